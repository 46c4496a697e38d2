# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0", "httpx>=0.27"]
# [tool.planner-ext]
# name = "openai-agents"
# short = "oai agents"
# package = "openai-agents"
# offers = ["veto", "approval"]
# ///
"""openai-agents: ``max_turns`` with an error handler that has the model answer, tools that need approval, `RunState`.

https://openai.github.io/openai-agents-python/running_agents, https://openai.github.io/openai-agents-python/human_in_the_loop
"""

from agents import (
    Agent,
    ModelRefusalError,
    OpenAIChatCompletionsModel,
    RunConfig,
    RunErrorHandlerInput,
    RunErrorHandlerResult,
    Runner,
    RunState,
    ToolGuardrailFunctionOutput,
    function_tool,
    set_tracing_disabled,
    tool_input_guardrail,
)
from common import Report, Trial, main
from openai import AsyncOpenAI

set_tracing_disabled(True)


@tool_input_guardrail
def forbid(_: object) -> ToolGuardrailFunctionOutput:
    """Reject a call, and let the run go on."""
    return ToolGuardrailFunctionOutput.reject_content("This function may not run.")


async def run(trial: Trial, report: Report) -> None:
    """Run the agent; at the limit of turns it raises."""
    client = AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0)
    tools = [
        function_tool(
            function,
            name_override=name,
            needs_approval=name == trial.gated,
            tool_input_guardrails=[forbid] if name == trial.vetoed else None,
        )
        for name, function in trial.functions().items()
    ]
    agent = Agent(name="clerk", model=OpenAIChatCompletionsModel("scripted", client), tools=tools)
    if trial.delegates:
        helper = agent.clone(tools=tools.copy())

        async def reach_goal(goal: str) -> str:
            """Hand a goal to a helper, who reaches it and reports."""
            # An agent as a tool with a parameter of its own, as the documentation customizes one.
            return str((await Runner.run(helper, goal, max_turns=trial.max_iterations)).final_output)

        agent.tools.append(function_tool(reach_goal, name_override="helper-reach_goal"))
    config = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")
    forced = []

    async def answer(failed: RunErrorHandlerInput) -> RunErrorHandlerResult:
        """Spend the last request on an answer without tools."""
        last = await Runner.run(agent.clone(tools=[]), failed.run_data.history, max_turns=1, run_config=config)
        failed.context.usage.add(last.context_wrapper.usage)
        forced.extend(last.raw_responses)
        return RunErrorHandlerResult(final_output=str(last.final_output))

    turns = max(trial.max_iterations - 1, 1)
    options = {"max_turns": turns, "run_config": config, "error_handlers": {"max_turns": answer}}
    given = trial.goal if trial.life == 1 else await _approved(agent, trial)
    try:
        if trial.streaming or trial.stops_at:
            # Only a streamed run can be cancelled so that its turn is whole.
            result = Runner.run_streamed(agent, given, **options)
            trial.stop = lambda: result.cancel(mode="after_turn")
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, given, **options)
    except ModelRefusalError as error:
        report.status, report.answer = "refused", error.refusal
        report.charged = len(error.run_data.raw_responses)
        return
    report.answer = str(result.final_output or "")
    report.status = "limit_reached" if forced else "answered" if report.answer else "cancelled"
    if result.interruptions:
        report.status = "paused"
        trial.save(result.to_state().to_json())
    report.charged = len(result.raw_responses) + len(forced)
    report.tokens = result.context_wrapper.usage.total_tokens or None
    _write(report, result.to_input_list())
    history = result.to_input_list()
    report.follow_up = lambda text: Runner.run(agent, [*history, {"role": "user", "content": text}], **options)


async def _approved(agent: Agent, trial: Trial) -> RunState:
    state = await RunState.from_json(agent, trial.saved())
    for item in state.get_interruptions():
        state.approve(item)
    return state


def _write(report: Report, items: list) -> None:
    """Write items of the Responses API, in which a reply with calls is several items."""
    names: dict[str, str] = {}
    calls: list[tuple[str, str, str]] = []
    for item in [*items, {"type": "end"}]:
        if calls and item.get("type") != "function_call":
            report.reply("", calls)
            calls = []
        match item:
            case {"type": "function_call", "call_id": call, "name": name, "arguments": arguments}:
                calls.append((call, name, arguments))
                names[call] = name
            case {"type": "function_call_output", "call_id": call, "output": output}:
                report.result(call, names.get(call, ""), str(output))
            case {"role": "user", "content": content}:
                report.user(str(content))
            case {"role": "assistant", "content": content}:
                report.reply("".join(part.get("text") or part.get("refusal") or "" for part in content), [])
            case _:
                pass


main(run)
