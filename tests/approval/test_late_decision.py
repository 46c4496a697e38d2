"""A decision that comes after the conversation continued: refused by name, unless the caller lets it run."""

import json
from typing import Any

import pytest
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent

from planner_ext import (
    Approve,
    Budget,
    Deny,
    FunctionInvokingChatCompletion,
    Supply,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.errors import (
    DecisionRefusedError,
    InvalidHistoryError,
    InvalidOptionError,
    RunNotAnsweredError,
)
from planner_ext.testing import call, say
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    Outcome,
    asked,
    both_ways,
    check_sendable,
    service_and_handler,
    service_or_handler,
    settings_with,
    world,
)
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
APPROVE = {"call_2": Approve(by="ann")}


def texts(history: ChatHistory) -> list[str]:
    return [json.dumps(message.to_dict()) for message in history.messages]


async def paused_and_continued(door: Door, *, added: bool) -> Outcome:
    """A refund waits; the user changes their mind, and the model answers in the same history."""
    paused = await door.ask(world([LOOK, REFUND]), **ASK)
    if added:
        paused.history.add_assistant_message(paused.closing)
    paused.history.add_user_message("Forget it, I keep the lamp.")
    answer = await door.ask(
        world([say("Good, no refund.")]), history=paused.history, **ASK
    )
    if door.kind == "service":
        paused.history.add_assistant_message(answer.text)
    return paused


@each_of("added", [False, True], ids=["alone", "after-the-pause"])
@each_of(
    "decision",
    [Approve(by="ann"), Deny("No."), Supply("paid")],
    ids=lambda d: type(d).__name__,
)
@service_and_handler
async def test_a_late_decision_is_refused(
    door: Door, decision: Any, added: bool
) -> None:
    """For every decision: nothing runs, nothing is sent, the history is as it was, and the error names the turn."""
    paused = await paused_and_continued(door, added=added)
    here, before = world([DONE]), texts(paused.history)
    with pytest.raises(DecisionRefusedError, match=r"Forget it.*late='allow'"):
        await door.resume(
            here, paused.checkpoint, {"call_2": decision}, history=paused.history, **ASK
        )
    assert here.ran == []
    assert here.requests == 0
    assert texts(paused.history) == before


@each_of("added", [False, True], ids=["alone", "after-the-pause"])
@service_or_handler
async def test_a_late_decision_runs_where_the_caller_lets_it(
    door: Door, added: bool
) -> None:
    """``late="allow"``: the call runs once, the later turn stays, and the history can be sent."""
    paused = await paused_and_continued(door, added=added)
    here = world([DONE])
    done = await door.resume(
        here, paused.checkpoint, APPROVE, history=paused.history, late="allow", **ASK
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED])
    assert "Forget it" in "".join(texts(paused.history))
    check_sendable(paused.history)


@service_or_handler
async def test_a_message_without_an_answer_is_a_later_turn(door: Door) -> None:
    """The user's last message counts even before it is answered; a database may have kept it."""
    paused = await door.ask(world([LOOK, REFUND]), **ASK)
    paused.history.add_user_message("Stop!")
    history = ChatHistory.model_validate_json(paused.history.model_dump_json())
    with pytest.raises(DecisionRefusedError, match="Stop!"):
        await door.resume(
            world([DONE]), paused.checkpoint, APPROVE, history=history, **ASK
        )


@service_or_handler
async def test_calls_of_another_run_are_a_later_turn(door: Door) -> None:
    """The question was asked again without a new message, and that run looked the order up: the first is over."""
    paused = await door.ask(world([REFUND]), **ASK)
    await door.ask(
        world([call("shop-look", {"order": "8"}, id="other"), DONE]),
        history=paused.history,
        **ASK,
    )
    here = world([DONE])
    with pytest.raises(DecisionRefusedError, match="calling shop-look"):
        await door.resume(
            here,
            paused.checkpoint,
            {"call_1": Approve()},
            history=paused.history,
            **ASK,
        )
    assert here.ran == []


@service_or_handler
async def test_a_note_of_the_application_does_not_begin_a_later_turn(
    door: Door,
) -> None:
    """What the assistant or the system says meanwhile decides nothing."""
    paused = await door.ask(world([LOOK, REFUND]), **ASK)
    for role in ("assistant", "system"):
        paused.history.add_message(
            ChatMessageContent(role=AuthorRole(role), content="Ann was asked.")
        )
    here = world([DONE])
    await door.resume(here, paused.checkpoint, APPROVE, history=paused.history, **ASK)
    assert here.ran == [REFUNDED]


@service_or_handler
async def test_a_limit_is_raised_after_a_later_message(door: Door) -> None:
    """A run that only needs a larger budget has nothing to decide: "Go on" does not refuse it."""
    limited = await door.ask(
        world([LOOK, say("So far.")]), budget=Budget(max_iterations=2)
    )
    limited.history.add_user_message("Go on.")
    done = await door.resume(
        world([DONE]), limited.checkpoint, {}, history=limited.history, budget=Budget()
    )
    assert done.status == "answered"


@service_or_handler
async def test_a_refused_late_decision_can_still_be_taken(door: Door) -> None:
    """The same object that refused it takes it with ``late="allow"``: nothing was taken before."""
    paused = await paused_and_continued(door, added=False)
    here = world([DONE])
    if door.kind == "handler":
        handler = ToolCallHandler(here.kernel, settings=settings_with(), **ASK)

        async def resume(**late: Any) -> None:
            async for _ in handler.resume(
                paused.history, paused.checkpoint, APPROVE, **late
            ):
                pass
    else:
        service = FunctionInvokingChatCompletion(here.service, **ASK)

        async def resume(**late: Any) -> None:
            given: Any = (paused.history, paused.checkpoint, APPROVE, settings_with())
            await service.resume(*given, kernel=here.kernel, **late)

    with pytest.raises(DecisionRefusedError, match="late"):
        await resume()
    await resume(late="allow")
    assert here.ran == [REFUNDED]


@service_or_handler
async def test_an_unknown_value_of_late_is_refused(door: Door) -> None:
    """The two words that there are stand in the error."""
    paused = await door.ask(world([REFUND]), **ASK)
    with pytest.raises(
        InvalidOptionError, match='late must be "refuse" or "allow"; got True'
    ):
        await door.resume(
            world([DONE]),
            paused.checkpoint,
            {"call_1": Approve()},
            history=asked(),
            late=True,
            **ASK,
        )


SESSIONS = {
    "no-batch-before": ([REFUND], "call_1"),
    "a-batch-before": ([LOOK, REFUND], "call_2"),
}


@each_of("given", ["the-sessions", "the-errors", "an-empty-one"])
@each_of("before", SESSIONS)
@both_ways
async def test_a_session_with_a_later_turn_refuses_the_old_call(
    before: str, given: str, streamed: bool
) -> None:
    """With whichever history the checkpoint of an earlier prompt is resumed: refused after a later one."""
    script, call_id = SESSIONS[before]
    here = world([*script, say("Good, no refund."), DONE])
    session, decisions = (
        ToolUseSession(here.kernel, **ASK),
        {call_id: Approve(by="ann")},
    )
    with pytest.raises(RunNotAnsweredError) as waiting:
        await session.prompt("Refund order 7.")
    assert await session.prompt("Forget it.") == "Good, no refund."
    checkpoint, left = waiting.value.checkpoint, waiting.value.chat_history
    assert checkpoint is not None and left is not None
    handler = ToolCallHandler(here.kernel, settings=settings_with(), **ASK)
    history = {
        "the-sessions": session.history(),
        "the-errors": left,
        "an-empty-one": ChatHistory(),
    }[given]
    resume = handler.resume_stream if streamed else handler.resume
    with pytest.raises((DecisionRefusedError, InvalidHistoryError)):
        [message async for message in resume(history, checkpoint, decisions)]
    assert REFUNDED not in here.ran
    if given == "the-sessions" and before == "no-batch-before":
        return  # the waiting prompt left nothing in it: it is the history of another run
    last = [
        message
        async for message in resume(
            history, checkpoint.to_json(), decisions, late="allow"
        )
    ][-1]
    assert (last.metadata["status"], here.ran[-1]) == ("answered", REFUNDED)


async def test_a_session_that_only_waits_is_resumed() -> None:
    """Without a later prompt the decision is not late."""
    here = world([LOOK, REFUND, DONE])
    session = ToolUseSession(here.kernel, **ASK)
    with pytest.raises(RunNotAnsweredError) as waiting:
        await session.prompt("Refund order 7.")
    handler, checkpoint = (
        ToolCallHandler(here.kernel, settings=settings_with(), **ASK),
        waiting.value.checkpoint,
    )
    assert checkpoint is not None
    last = [
        message
        async for message in handler.resume(session.history(), checkpoint, APPROVE)
    ][-1]
    assert (str(last), here.ran) == ("Done.", [("look", "7"), REFUNDED])


async def test_each_prompt_that_waits_leaves_the_one_before() -> None:
    """Two prompts wait, one after the other: the first is over, the second can be decided."""
    here = world([REFUND, REFUND, DONE])
    session = ToolUseSession(here.kernel, **ASK)
    checkpoints: list[Any] = []
    for _ in range(2):
        with pytest.raises(RunNotAnsweredError) as waiting:
            await session.prompt("Refund order 7.")
        checkpoints.append(waiting.value.checkpoint)
    handler = ToolCallHandler(here.kernel, settings=settings_with(), **ASK)
    with pytest.raises(DecisionRefusedError, match="another prompt of its session"):
        [
            message
            async for message in handler.resume(
                ChatHistory(), checkpoints[0], {"call_1": Approve()}
            )
        ]
    [
        message
        async for message in handler.resume(
            ChatHistory(), checkpoints[1], {"call_2": Approve()}
        )
    ]
    assert here.ran == [REFUNDED]
