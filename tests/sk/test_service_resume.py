"""Going on after an end: a run that a limit, a stop or a pause ended, resumed into the caller's own history."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, ChatMessageContent

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    Deny,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.errors import PlannerException
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.served import Answer, Served, Tools, question
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]
Resend = Callable[[ChatHistory], Awaitable[None]]

ADD = call("t-add", {"a": 1, "b": 2})
SETTINGS = PromptExecutionSettings(
    function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
)
BEFORE: dict[str, tuple[list[Any], Budget]] = {
    "answer": ([ADD, say("Enough.")], Budget(max_iterations=2)),
    "no-text": ([ADD, say("")], Budget(max_iterations=2)),
    "stop": ([ADD, ADD], Budget(max_iterations=2, on_limit="stop")),
    "return_calls": ([ADD, ADD], Budget(max_iterations=2, on_limit="return_calls")),
}
NEXT = {
    "an-unknown-call": [call("t-no"), say("Done.")],
    "a-batch": [
        calls(ADD, call("t-no"), call("t-fail"), text="Once more."),
        say("Done."),
    ],
}


async def resumed(
    service: FunctionInvokingChatCompletion,
    history: ChatHistory,
    checkpoint: str,
    decisions: Any,
    kernel: Kernel,
    *,
    streamed: bool,
    **options: Any,
) -> ChatMessageContent:
    if not streamed:
        return await service.resume(
            history, checkpoint, decisions, SETTINGS, kernel=kernel, **options
        )
    stream = service.resume_streaming(
        history, checkpoint, decisions, SETTINGS, kernel=kernel, **options
    )
    chunks = [chunk async for chunk in stream]
    return chunks[-1]


@each_of("added", [True, False], ids=["added", "not-added"])
@each_of("after", NEXT)
@each_of("before", BEFORE)
async def test_a_limited_run_continues_with_a_larger_budget(
    ask: Ask,
    serve: Serve,
    kernel: Kernel,
    streamed: bool,
    resend: Resend,
    before: str,
    after: str,
    added: bool,
) -> None:
    """Resumed, whether its last message was added or not: it is answered, the spent stays spent, all can be sent."""
    history = question()
    script, budget = BEFORE[before]
    served = serve([*script, *NEXT[after]])
    service = FunctionInvokingChatCompletion(served.connector, budget=budget)
    first = await ask(service, to=history, settings=SETTINGS)
    if added:
        history.add_message(first.message)
    budget = Budget(max_iterations=20)
    last = await resumed(
        service,
        history,
        first.metadata["checkpoint"],
        {},
        kernel,
        streamed=streamed,
        budget=budget,
    )
    assert last.metadata["status"] == "answered"
    assert served.server.refused == []
    assert last.metadata["iterations"] == len(served.server.requests)
    assert last.metadata["usage"].prompt_tokens == served.server.prompt_tokens
    await resend(history)


async def test_an_empty_history_is_filled(
    ask: Ask,
    serve: Serve,
    kernel: Kernel,
    streamed: bool,
    resend: Resend,
    history: ChatHistory,
) -> None:
    """In another process the history is empty: it gets every message of the run, and can be sent."""
    served = serve([calls(ADD, text="So."), ADD, call("t-no"), say("Done.")])
    service = FunctionInvokingChatCompletion(
        served.connector, budget=Budget(max_iterations=2, on_limit="stop")
    )
    checkpoint, other = (
        (await ask(service, settings=SETTINGS)).metadata["checkpoint"],
        ChatHistory(),
    )
    await resumed(
        service, other, checkpoint, {}, kernel, streamed=streamed, budget=Budget()
    )
    assert [message.to_dict() for message in other.messages[:5]] == [
        m.to_dict() for m in history.messages
    ]
    assert [message.role for message in other.messages] == [
        "user",
        *["assistant", "tool"] * 3,
    ]
    await resend(other)


@pytest.fixture
def deferring(
    serve: Serve,
) -> Callable[..., tuple[FunctionInvokingChatCompletion, Served]]:
    """A service whose every ``t-add`` waits for a person."""

    async def ask_a_person(tool: Any) -> Defer | None:
        return Defer() if tool.function_name == "add" else None

    def deferring(*script: Any) -> tuple[FunctionInvokingChatCompletion, Served]:
        served = serve(script)
        return FunctionInvokingChatCompletion(
            served.connector, interceptors=[ask_a_person]
        ), served

    return deferring


@each_of("added", [True, False, None], ids=["added", "not-added", "empty-history"])
@each_of(
    "decision", [Approve(by="ann"), Deny("No.", by="ann")], ids=["approve", "deny"]
)
async def test_a_paused_run_continues_when_it_is_decided(
    ask: Ask,
    deferring: Any,
    streamed: bool,
    resend: Resend,
    added: bool | None,
    decision: Any,
) -> None:
    """Paused, nothing has run and the history can be sent; decided, it continues, and the pause leaves no trace."""
    tools = Tools()
    kernel = tools.kernel()
    history = question()
    service, served = deferring(
        calls(ADD, call("t-echo", {"text": "x"}), text="May I?"), say("Done.")
    )
    paused = await ask(service, to=history, kernel=kernel, settings=SETTINGS)
    assert paused.metadata["status"] == "paused"
    assert tools.seen == []
    assert len(history.messages) == 1
    (pending,) = paused.metadata["pending"]
    assert pending["id"] == "call_1"
    assert pending["fully_qualified_name"] == "t-add"
    if added:
        history.add_message(paused.message)
    own = ChatHistory() if added is None else history
    last = await resumed(
        service,
        own,
        paused.metadata["checkpoint"],
        {"call_1": decision},
        kernel,
        streamed=streamed,
    )
    assert last.metadata["status"] == "answered"
    assert served.server.refused == []
    assert ((1, 2) in tools.seen) == isinstance(decision, Approve)
    assert "x" in tools.seen
    assert [message.role for message in own.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]
    await resend(own)


async def test_a_paused_stream_is_safe_to_add(
    ask: Ask, deferring: Any, history: ChatHistory, resend: Resend
) -> None:
    """What a paused run returns, streamed too, is an assistant message without calls that can be added and sent."""
    service, _ = deferring(calls(ADD, text="May I?"))
    paused = await ask(service, settings=SETTINGS)
    assert (paused.message.role, paused.calls) == ("assistant", [])
    history.add_message(paused.message)
    history.add_user_message("Well?")
    await resend(history)


async def test_an_invalid_checkpoint_is_refused(
    kernel: Kernel, history: ChatHistory, deferring: Any
) -> None:
    """Text that cannot be read as a checkpoint is a named error; nothing is sent, and the history is as it was."""
    service, served = deferring(say("Never sent."))
    for text in ("", "{}", '{"schema":1,"kind":"checkpoint","facts":[]}'):
        with pytest.raises(PlannerException):
            await service.resume(history, text, {}, SETTINGS, kernel=kernel)
    assert (served.server.requests, len(history.messages)) == ([], 1)


async def test_an_answered_run_has_nothing_to_resume(ask: Ask, serve: Serve) -> None:
    """An answered run's message has no checkpoint, and its behaviour may be a stock one."""
    answer = await ask(
        FunctionInvokingChatCompletion(serve([say("Hi.")]).connector),
        FunctionChoiceBehavior.Auto(),
    )
    assert "checkpoint" not in answer.metadata


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_a_resumed_run_keeps_the_budget_of_a_service_that_limits_itself(
    streamed: bool,
) -> None:
    """A handler's new budget replaces its own; that of the service which it was given still holds."""
    inner = ScriptedChatCompletion(
        lambda request: call("t-echo") if request.tools else say("Enough.")
    )
    kernel = Tools().kernel()
    kernel.add_service(
        FunctionInvokingChatCompletion(inner, budget=Budget(max_iterations=3))
    )
    handler, history = (
        ToolCallHandler(kernel, budget=Budget(max_iterations=2)),
        ChatHistory(),
    )
    history.add_user_message("Go.")
    first = [message async for message in handler.invoke(history)][-1]
    assert (first.metadata["iterations"], first.metadata["limit"]) == (
        2,
        "max_iterations",
    )
    resumed = handler.resume_stream if streamed else handler.resume
    last = [
        m
        async for m in resumed(
            history, first.metadata["checkpoint"], {}, budget=Budget(max_iterations=50)
        )
    ][-1]
    assert last.metadata["iterations"] == 3
    assert last.metadata["limit"] == "max_iterations"
    assert len(inner.requests) == 3
