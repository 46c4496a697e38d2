# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0", "httpx>=0.27"]
# [tool.planner-ext]
# name = "pydantic-ai"
# short = "pyd. ai"
# package = "pydantic-ai-slim"
# offers = ["tool calls", "tokens", "time", "veto", "approval"]
# ///
"""pydantic-ai: `UsageLimits`, ``timeout``, `PrepareTools`, hooks, deferred tools and the message history.

https://ai.pydantic.dev/agents/#usage-limits, https://ai.pydantic.dev/hooks, https://ai.pydantic.dev/deferred-tools.
Durable execution takes a further package (Temporal, DBOS or Prefect): see ``durable``.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import wraps

from common import Report, Trial, main
from openai import AsyncOpenAI
from pydantic_ai import (
    Agent,
    AgentRunResult,
    AgentRunResultEvent,
    DeferredToolRequests,
    DeferredToolResults,
    ModelMessagesTypeAdapter,
    ModelRetry,
    RunContext,
    Tool,
    ToolDefinition,
    UsageLimitExceeded,
    capture_run_messages,
)
from pydantic_ai.capabilities import Hooks, PrepareTools
from pydantic_ai.exceptions import ContentFilterError, RunTimedOut, SkipToolExecution
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.usage import RunUsage, UsageLimits


async def run(trial: Trial, report: Report) -> None:
    """Run the agent within its limits; a limit raises, and the messages until then are captured."""
    limits = UsageLimits(
        request_limit=trial.max_iterations,
        tool_calls_limit=trial.limits.get("max_tool_calls"),
        total_tokens_limit=trial.limits.get("max_total_tokens"),
    )
    agent = _agent(trial, limits)
    usage = RunUsage()
    bounds = {"usage_limits": limits, "usage": usage, "timeout": trial.limits.get("max_active_seconds")}
    given = {"user_prompt": trial.goal}
    if trial.life > 1:
        saved = trial.saved()
        history = ModelMessagesTypeAdapter.validate_python(saved["messages"])
        approved = dict.fromkeys(saved["asked"], True)
        given = {"message_history": history, "deferred_tool_results": DeferredToolResults(approvals=approved)}
    with capture_run_messages() as captured:
        messages = captured
        try:
            result = await _result(agent, given | bounds, streaming=trial.streaming)
            output, messages = result.output, result.all_messages()
            cut = messages[-1].kind == "response" and messages[-1].finish_reason == "length"
            paused = isinstance(output, DeferredToolRequests)
            forced = usage.requests == limits.request_limit
            ended = "incomplete" if cut else "limit_reached" if forced else "answered"
            report.status = "paused" if paused else ended
            report.answer = output if isinstance(output, str) else ""
            if report.status == "paused":
                asked = [call.tool_call_id for call in output.approvals]
                trial.save({"messages": ModelMessagesTypeAdapter.dump_python(messages, mode="json"), "asked": asked})
        except (UsageLimitExceeded, RunTimedOut):
            report.status = "limit_reached"
        except ContentFilterError as error:
            report.status, report.answer = "refused", str(error)
        finally:
            report.charged, report.tokens = usage.requests, usage.total_tokens or None
            _write(report, messages)
            left = list(messages)
            report.follow_up = lambda text: agent.run(text, message_history=left)


async def _result(agent: Agent, given: dict[str, object], *, streaming: bool) -> AgentRunResult:
    if not streaming:
        return await agent.run(**given)
    async with agent.run_stream_events(**given) as events:
        (result,) = [event.result async for event in events if isinstance(event, AgentRunResultEvent)]
    return result


def _agent(trial: Trial, limits: UsageLimits) -> Agent:
    client = AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0)
    tools = [
        Tool(_retried(function), name=name, max_retries=limits.request_limit, requires_approval=name == trial.gated)
        for name, function in trial.functions().items()
    ]
    hooks = Hooks()

    @hooks.on.before_tool_execute(tools=[trial.vetoed])
    async def forbid(_: RunContext, **__: object) -> dict[str, object]:
        raise SkipToolExecution("This function may not run.")

    agent = Agent(
        OpenAIChatModel("scripted", provider=OpenAIProvider(openai_client=client)),
        output_type=[str, DeferredToolRequests],
        tools=tools,
        capabilities=[PrepareTools(_answer_last), hooks],
    )
    if trial.delegates:

        @agent.tool(name="helper-reach_goal")
        async def reach_goal(context: RunContext, goal: str) -> str:
            """Hand a goal to a helper, who reaches it and reports."""
            # Agent delegation, with the usage of both counted together; one request is left for who delegates.
            left = replace(limits, request_limit=limits.request_limit - 1)
            try:
                return (await agent.run(goal, usage=context.usage, usage_limits=left)).output
            except UsageLimitExceeded:
                return "No request is left for the helper."

    return agent


def _answer_last(context: RunContext, tools: list[ToolDefinition]) -> list[ToolDefinition]:
    """Offer no functions in the last request that is allowed, so that it brings an answer."""
    is_last = context.usage.requests == context.usage_limits.request_limit - 1
    return [] if is_last else tools


def _retried(function: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
    """Let the model read the error of a function, which is what `ModelRetry` is for."""

    @wraps(function)
    async def retried(**arguments: str) -> str:
        try:
            return await function(**arguments)
        except LookupError as error:
            raise ModelRetry(str(error)) from error

    return retried


def _write(report: Report, messages: list) -> None:
    for message in messages:
        parts = message.parts
        if message.kind == "response":
            asked = [part for part in parts if part.part_kind == "tool-call"]
            calls = [(part.tool_call_id, part.tool_name, part.args_as_json_str()) for part in asked]
            report.reply("".join(part.content for part in parts if part.part_kind == "text"), calls)
            continue
        for part in parts:
            if part.part_kind == "user-prompt":
                report.user(str(part.content))
            elif part.part_kind in ("tool-return", "retry-prompt") and part.tool_name:
                report.result(part.tool_call_id, part.tool_name, str(part.content))


main(run)
