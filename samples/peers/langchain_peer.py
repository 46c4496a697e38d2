# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "langchain==1.5.2", "langchain-core==1.8.3", "langchain-openai==1.7.4", "langgraph==1.2.24",
#     "langgraph-checkpoint-sqlite==3.1.2", "httpx>=0.27",
# ]
# [tool.planner-ext]
# name = "langchain"
# short = "lang chain"
# package = "langchain"
# offers = ["tool calls", "veto", "approval", "recovery"]
# ///
"""LangChain's ``create_agent`` on LangGraph: its middleware for limits and people, and a checkpointer.

https://docs.langchain.com/oss/python/langchain/middleware, https://docs.langchain.com/oss/python/langgraph/durable-execution
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common import Report, Trial, main
from langchain.agents import create_agent
from langchain.agents.middleware import (
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    ToolCallLimitMiddleware,
    ToolErrorMiddleware,
    wrap_tool_call,
)
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.types import Command


class AnswersLast(ModelCallLimitMiddleware):
    """The limit of model calls; the last one is offered no tools, so that it brings an answer."""

    async def awrap_model_call(self, request, handler):
        """Choose the tools of a call, as the documentation does dynamically."""
        if request.state.get("run_model_call_count", 0) == self.run_limit - 1:
            request = request.override(tools=[])
        return await handler(request)


CONFIG = {"configurable": {"thread_id": "run"}, "recursion_limit": 2_000}


@asynccontextmanager
async def _saver(trial: Trial, kept: InMemorySaver) -> AsyncIterator[object]:
    if not trial.folder:
        yield kept if trial.is_judged else None  # the cost is that of a run that is not kept, as for the others
        return
    async with AsyncSqliteSaver.from_conn_string(str(Path(trial.folder, "checkpoints.db"))) as saver:
        yield saver


async def run(trial: Trial, report: Report) -> None:
    """Run the agent with a checkpointer, which also keeps what is left of a run that is interrupted."""
    kept = InMemorySaver()

    async def follow_up(text: str) -> None:
        async with _saver(trial, kept) as saver:
            await _agent(trial, saver).ainvoke({"messages": [{"role": "user", "content": text}]}, CONFIG)

    report.follow_up = follow_up
    async with _saver(trial, kept) as saver:
        await _run(trial, report, saver)


def _agent(trial: Trial, saver: object) -> object:
    @wrap_tool_call
    async def forbid(request, handler):
        if request.tool_call["name"] == trial.vetoed:
            return ToolMessage("This function may not run.", tool_call_id=request.tool_call["id"])
        return await handler(request)

    def on_error(error, request) -> str:
        return f"{request.tool_call['name']} failed: {error}"

    middleware = [
        forbid,
        ToolErrorMiddleware(on_error),
        AnswersLast(run_limit=trial.max_iterations, exit_behavior="end"),
    ]
    if calls := trial.limits.get("max_tool_calls"):
        middleware.append(ToolCallLimitMiddleware(run_limit=calls))
    if trial.gated:
        middleware.append(HumanInTheLoopMiddleware({trial.gated: True}))
    model = ChatOpenAI(model="scripted", base_url=trial.model_url, api_key="none", max_retries=0, stream_usage=True)
    tools = [
        StructuredTool.from_function(coroutine=function, name=name, description=function.__doc__)
        for name, function in trial.functions().items()
    ]
    if trial.delegates:
        helper = create_agent(model, tools, middleware=middleware)

        async def reach_goal(goal: str) -> str:
            """Hand a goal to a helper, who reaches it and reports."""
            done = await helper.ainvoke({"messages": [{"role": "user", "content": goal}]})
            return done["messages"][-1].text

        tools = [*tools, StructuredTool.from_function(coroutine=reach_goal, name="helper-reach_goal")]
    return create_agent(model, tools, middleware=middleware, checkpointer=saver)


async def _run(trial: Trial, report: Report, saver: object) -> None:
    agent = _agent(trial, saver)
    given: object = {"messages": [{"role": "user", "content": trial.goal}]}
    if trial.life > 1:
        given = Command(resume={"decisions": [{"type": "approve"}]}) if trial.gated else None
    if not saver:
        _conclude(report, (await agent.ainvoke(given, CONFIG))["messages"], waits=False)
        return
    try:
        if trial.streaming:
            async for _ in agent.astream(given, CONFIG, stream_mode="messages", durability="sync"):
                pass
        else:
            await agent.ainvoke(given, CONFIG, durability="sync")
    finally:
        state = await agent.aget_state(CONFIG)
        messages = state.values.get("messages", [])
        _write(report, messages)
        _conclude(report, messages, waits=bool(state.interrupts))


def _conclude(report: Report, messages: list, *, waits: bool) -> None:
    replies = [message for message in messages if isinstance(message, AIMessage)]
    # The message that the limit adds is not the model's: it has neither an id of a completion nor usage.
    made = [message for message in replies if message.response_metadata]
    report.charged = len(made)
    report.tokens = sum((message.usage_metadata or {}).get("total_tokens", 0) for message in made) or None
    if waits:
        report.status = "paused"
    elif replies and not replies[-1].tool_calls:
        last, told = replies[-1], replies[-1].response_metadata
        ended = "incomplete" if told.get("finish_reason") == "length" else "answered"
        report.status = ended if told else "limit_reached"
        report.answer = last.text or last.additional_kwargs.get("refusal") or ""


def _write(report: Report, messages: list) -> None:
    for message in messages:
        match message:
            case HumanMessage():
                report.user(message.text)
            case AIMessage():
                calls = [(call["id"], call["name"], json.dumps(call["args"])) for call in message.tool_calls]
                report.reply(message.text, calls)
            case ToolMessage():
                report.result(message.tool_call_id, message.name or "", message.text)
            case _:
                pass


main(run)
