# /// script
# requires-python = ">=3.11"
# dependencies = ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0", "httpx>=0.27"]
# [tool.planner-ext]
# name = "agent-framework"
# short = "agent fw"
# package = "agent-framework-core"
# offers = ["tool calls", "time", "veto", "approval"]
# ///
"""agent-framework: the function invocation configuration, tools that require approval and the agent's session.

https://learn.microsoft.com/agent-framework: the limits are those that ``FunctionInvocationConfiguration`` documents.
Rounds of calls are counted, and one more request without functions brings the answer.
"""

import json

from agent_framework import Agent, AgentSession, FunctionInvocationContext, Message, function_middleware, tool
from agent_framework.openai import OpenAIChatCompletionClient
from common import Report, Trial, main
from openai import AsyncOpenAI


async def run(trial: Trial, report: Report) -> None:
    """Run the agent within the limits of its client; a session keeps the messages."""

    @function_middleware
    async def forbid(context: FunctionInvocationContext, call_next) -> None:
        if context.function.name == trial.vetoed:
            context.result = "This function may not run."
        else:
            await call_next()

    openai = AsyncOpenAI(base_url=trial.model_url, api_key="none", max_retries=0)
    client = OpenAIChatCompletionClient(model="scripted", async_client=openai)
    limits = client.function_invocation_configuration
    limits["max_iterations"] = max(trial.max_iterations - 1, 1)
    limits["max_function_calls"] = trial.limits.get("max_tool_calls")
    limits["max_duration_seconds"] = trial.limits.get("max_active_seconds")
    tools = [
        tool(function, name=name, approval_mode="always_require" if name == trial.gated else "never_require")
        for name, function in trial.functions().items()
    ]
    if trial.delegates:
        helper = Agent(client, tools=tools, name="helper")
        tools = [
            *tools,
            helper.as_tool(name="helper-reach_goal", description="Hand a goal to a helper.", arg_name="goal"),
        ]
    agent = Agent(client, tools=tools, middleware=[forbid])
    given, session = trial.goal, agent.create_session()
    if trial.life > 1:
        saved = trial.saved()
        session = AgentSession.from_dict(saved["session"])
        parts = [part for message in map(Message.from_dict, saved["messages"]) for part in message.contents]
        asked = [part for part in parts if part.type == "function_approval_request"]
        approvals = [part.to_function_approval_response(True) for part in asked]
        given = [Message(role="user", contents=approvals)]
    try:
        if trial.streaming:
            stream = agent.run(given, session=session, stream=True)
            response = await stream.get_final_response()
        else:
            response = await agent.run(given, session=session)
        waits = list(response.user_input_requests)
        cut = response.finish_reason == "length"
        report.status = "paused" if waits else "incomplete" if cut else "answered"
        report.answer = "" if waits else response.text
        if waits:
            messages = [message.to_dict() for message in response.messages]
            trial.save({"session": session.to_dict(), "messages": messages})
        report.tokens = (response.usage_details or {}).get("total_token_count")
    finally:
        _write(report, session)
        if report.messages:
            report.follow_up = lambda text: agent.run(text, session=session)
    report.charged = sum(message["role"] == "assistant" for message in report.messages)


def _write(report: Report, session: AgentSession) -> None:
    names: dict[str, str] = {}
    for state in session.state.values():
        for message in state.get("messages", ()) if isinstance(state, dict) else ():
            results = [part for part in message.contents if part.type == "function_result"]
            calls = [part for part in message.contents if part.type == "function_call"]
            names |= {part.call_id: part.name for part in calls}
            for part in results:
                report.result(part.call_id, names.get(part.call_id, ""), str(part.result))
            if str(message.role) == "user":
                report.user(message.text)
            elif str(message.role) == "assistant":
                report.reply(message.text, [(part.call_id, part.name, _text(part.arguments)) for part in calls])


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


main(run)
