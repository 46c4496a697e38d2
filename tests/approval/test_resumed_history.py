"""The history that a run is resumed with: it is the run's, or it is refused; no message is lost."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext import Approve, Budget, Deny
from planner_ext.errors import InvalidHistoryError
from planner_ext.hitl_manager import ApprovalSettings
from planner_ext.testing import calls, say
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    asked,
    check_sendable,
    service_and_handler,
    service_or_handler,
    world,
)
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
SCRIPT = [LOOK, calls(LOOK, REFUND)]
"""A look, and then a look beside a refund that waits as ``call_3``."""


def texts(history: ChatHistory) -> list[str]:
    return [json.dumps(message.to_dict()) for message in history.messages]


def tool_message(*results: tuple[str, str]) -> ChatMessageContent:
    items = [
        FunctionResultContent(id=call_id, name="shop-look", result=text)
        for call_id, text in results
    ]
    return ChatMessageContent(role=AuthorRole.TOOL, items=[*items])


async def refused(
    door: Door, history: ChatHistory, match: str, decisions: Any = None
) -> None:
    """Resume a paused run with a history that is not its own: refused by name, nothing runs, nothing changes."""
    paused = await door.ask(world(SCRIPT), **ASK)
    here, before = world([DONE]), texts(history)
    with pytest.raises(InvalidHistoryError, match=match):
        await door.resume(
            here,
            paused.checkpoint,
            decisions or {"call_3": Approve()},
            history=history,
            **ASK,
        )
    assert here.ran == []
    assert here.requests == 0
    assert texts(history) == before


@service_and_handler
async def test_a_history_that_holds_the_results_is_refused(door: Door) -> None:
    """Resumed a second time with the history that the first one completed: refused, also by another object."""
    paused = await door.ask(world(SCRIPT), **ASK)
    await door.resume(
        world([DONE]),
        paused.checkpoint,
        {"call_3": Approve()},
        history=paused.history,
        **ASK,
    )
    await refused(door, paused.history, "holds .*the result of the call 'call_3'")


@service_or_handler
async def test_a_history_that_went_through_json_and_holds_the_results_is_refused(
    door: Door,
) -> None:
    """As it comes out of a database, the completed history is refused as well, with any decisions."""
    paused = await door.ask(world(SCRIPT), **ASK)
    await door.resume(
        world([DONE]),
        paused.checkpoint,
        {"call_3": Deny()},
        history=paused.history,
        **ASK,
    )
    history = ChatHistory.model_validate_json(paused.history.model_dump_json())
    history.add_user_message("And now?")
    await refused(door, history, "holds", {"call_3": Deny()})


OTHERS: dict[str, Callable[[ChatHistory], object]] = {
    "another-question": lambda h: h.messages.__setitem__(
        0, _text("user", "Refund order 8.")
    ),
    "another-role": lambda h: h.messages.__setitem__(
        0, _text("system", "Refund order 7.")
    ),
    "another-call-id": lambda h: h.messages.__setitem__(
        1, _call("call_x", "shop-look", '{"order":"7"}')
    ),
    "another-function": lambda h: h.messages.__setitem__(
        1, _call("call_1", "shop-wipe", '{"order":"7"}')
    ),
    "other-arguments": lambda h: h.messages.__setitem__(
        1, _call("call_1", "shop-look", '{"order":"8"}')
    ),
    "another-result": lambda h: h.messages.__setitem__(
        2, tool_message(("call_1", "lost"))
    ),
    "another-result-id": lambda h: h.messages.__setitem__(
        2, tool_message(("call_2", "sent"))
    ),
    "one-more-at-the-front": lambda h: h.messages.insert(
        0, _text("system", "Be kind.")
    ),
    "one-more-within": lambda h: h.messages.insert(1, _text("assistant", "I will.")),
    "one-less": lambda h: h.messages.pop(0),
    "an-answer-in-place": lambda h: h.messages.__setitem__(
        slice(1, None), [_text("assistant", "It was refunded.")]
    ),
    "reversed": lambda h: h.messages.reverse(),
}


def _text(role: str, text: str) -> ChatMessageContent:
    return ChatMessageContent(role=AuthorRole(role), content=text)


def _call(call_id: str, name: str, arguments: str) -> ChatMessageContent:
    call = FunctionCallContent(id=call_id, name=name, arguments=arguments)
    return ChatMessageContent(role=AuthorRole.ASSISTANT, items=[call])


@each_of("what", OTHERS)
@service_or_handler
async def test_the_history_of_another_run_is_refused(door: Door, what: str) -> None:
    """One message differs in role, text, call, name, arguments or result, is missing or too many: refused by name."""
    history = (await door.ask(world(SCRIPT), **ASK)).history
    OTHERS[what](history)
    await refused(
        door, history, "Expected the history of this checkpoint's run; its message"
    )


ADDED: dict[str, list[tuple[str, str]]] = {
    "an-assistant": [("assistant", "I have asked Ann.")],
    "a-system": [("system", "Ann decides.")],
    "an-assistant-twice": [
        ("assistant", "This run waits."),
        ("assistant", "This run waits."),
    ],
}


@each_of("with_own", [False, True], ids=["alone", "after-the-pause"])
@each_of("what", ADDED)
@service_and_handler
async def test_what_the_caller_added_is_kept(
    door: Door, what: str, with_own: bool
) -> None:
    """Messages that the caller added while the run waited stay, an assistant's, too; the pause's own is taken out."""
    paused = await door.ask(world(SCRIPT), **ASK)
    history, known = paused.history, texts(paused.history)
    if with_own:
        history.add_assistant_message(paused.closing)
    added = [_text(role, text) for role, text in ADDED[what]]
    history.messages.extend(added)
    here = world([DONE])
    await door.resume(
        here, paused.checkpoint, {"call_3": Approve()}, history=history, **ASK
    )
    assert texts(history)[: len(known)] == known
    assert history.messages[len(known) : len(known) + len(added)] == added
    assert paused.closing not in "".join(texts(history))
    assert here.ran == [("look", "7"), REFUNDED]
    check_sendable(history)


@service_or_handler
async def test_only_the_first_of_two_equal_messages_is_the_runs(door: Door) -> None:
    """The run's message was added, and the caller wrote the same words again: theirs stays."""
    paused = await door.ask(world([REFUND]), **ASK)
    for _ in range(2):
        paused.history.add_assistant_message(paused.closing)
    await door.resume(
        world([DONE]),
        paused.checkpoint,
        {"call_1": Approve()},
        history=paused.history,
        **ASK,
    )
    assert [str(message) for message in paused.history.messages].count(
        paused.closing
    ) == 1


@service_or_handler
async def test_returned_calls_that_the_caller_answered_are_refused(door: Door) -> None:
    """A limit returned the calls, the caller ran them: a resume does not run them again."""
    budget = Budget(max_iterations=1, on_limit="return_calls")
    history = asked()
    limited = await door.ask(world([LOOK]), history=history, budget=budget)
    history = limited.history
    if door.kind == "service":
        history.messages.append(_call("call_1", "shop-look", '{"order": "7"}'))
    history.messages.append(tool_message(("call_1", "sent")))
    here, before = world([DONE]), texts(history)
    with pytest.raises(InvalidHistoryError, match="the result of the call 'call_1'"):
        await door.resume(
            here, limited.checkpoint, {}, history=history, budget=Budget()
        )
    assert (here.ran, texts(history)) == ([], before)


@service_or_handler
async def test_calls_that_a_denial_returned_are_resumed(door: Door) -> None:
    """``on_denial="return_calls"``: the message with the calls is the run's own and is taken out, not kept twice."""
    options = {**ASK, "approval": ApprovalSettings(on_denial="return_calls")}
    paused = await door.ask(world([REFUND]), **options)
    denied = await door.resume(
        world([]),
        paused.checkpoint,
        {"call_1": Deny()},
        history=paused.history,
        **options,
    )
    if door.kind == "service":
        paused.history.messages.append(
            _call("call_1", "shop-refund", '{"order": "7", "amount": 50}')
        )
    here = world([DONE])
    again = await door.resume(
        here, denied.checkpoint, {}, history=paused.history, **options
    )
    assert (again.status, again.waiting) == ("paused", ["call_1"])
    done = await door.resume(
        here, again.checkpoint, {"call_1": Approve()}, history=paused.history, **options
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED])
    check_sendable(paused.history)


@service_or_handler
async def test_a_compacted_history_is_the_runs(door: Door) -> None:
    """A history that the iteration-completed callback shortened is that of the run, which is resumed with it."""

    async def compact(context: Any) -> None:
        context.messages[:] = [context.messages[0], _text("assistant", "I looked.")]

    options = {**ASK, "iteration_completed": compact}
    paused = await door.ask(world([LOOK, REFUND]), **options)
    assert [str(message) for message in paused.history.messages] == [
        "Refund order 7.",
        "I looked.",
    ]
    here = world([DONE])
    done = await door.resume(
        here, paused.checkpoint, {"call_2": Approve()}, history=paused.history, **ASK
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED])
    check_sendable(paused.history)


def several_results() -> ChatHistory:
    """A history as a stock loop leaves it: two results in one tool message, one of them not a text."""
    history = asked()
    two = [
        FunctionCallContent(id=name, name="shop-look", arguments='{"order": "1"}')
        for name in ("a", "b")
    ]
    history.add_message(
        ChatMessageContent(
            role=AuthorRole.ASSISTANT, items=[TextContent(text="Both."), *two]
        )
    )
    history.add_message(tool_message(("a", "sent"), ("b", "lost")))
    history.add_user_message("Then refund it.")
    return history


@each_of("reloaded", [False, True], ids=["as-it-is", "from-json"])
@service_or_handler
async def test_a_tool_message_with_several_results_is_the_runs(
    door: Door, reloaded: bool
) -> None:
    """Split by the run or still whole, as it was asked: it is the same history."""
    paused = await door.ask(world([REFUND]), history=several_results(), **ASK)
    for history in (several_results(), paused.history):
        here = world([DONE])
        given = (
            ChatHistory.model_validate_json(history.model_dump_json())
            if reloaded
            else history
        )
        done = await door.resume(
            here, paused.checkpoint, {"call_1": Approve()}, history=given, **ASK
        )
        assert (done.status, here.ran) == ("answered", [REFUNDED])
        check_sendable(given)


@service_or_handler
async def test_a_repaired_history_is_the_runs(door: Door) -> None:
    """``on_invalid_history="repair"`` repairs the history in place: the run is resumed with the repaired messages."""
    history = asked()
    history.add_message(_call("a", "shop-look", "{}"))
    history.add_user_message("Refund it.")
    options = {**ASK, "on_invalid_history": "repair"}
    paused = await door.ask(world([REFUND]), history=history, **options)
    here = world([DONE])
    done = await door.resume(
        here, paused.checkpoint, {"call_1": Approve()}, history=history, **options
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED])
    check_sendable(history)


@service_or_handler
async def test_a_chat_that_keeps_texts_alone_is_filled_up(door: Door) -> None:
    """An application that stores questions and answers only: its history is that of the run, as far as it goes."""
    paused = await door.ask(world(SCRIPT), **ASK)
    history = asked()
    history.add_assistant_message(paused.closing)
    done = await door.resume(
        world([DONE]), paused.checkpoint, {"call_3": Approve()}, history=history, **ASK
    )
    roles = [message.role.value for message in history.messages]
    stored = ["assistant"] if door.kind == "handler" else []
    assert (done.status, roles) == (
        "answered",
        ["user", "assistant", "tool", "assistant", "tool", "tool", *stored],
    )


@service_and_handler
async def test_the_forced_answer_is_taken_out_and_no_other(door: Door) -> None:
    """Resumed after a limit, the answer that was forced is replaced; an answer of the caller's own is kept."""
    budget = Budget(max_iterations=2)
    for last, kept in (("So far.", False), ("Let me rephrase: so far.", True)):
        history = asked()
        limited = await door.ask(
            world([LOOK, say("So far.")]), history=history, budget=budget
        )
        history.messages[3:] = [_text("assistant", last)]
        await door.resume(
            world([DONE]), limited.checkpoint, {}, history=history, budget=Budget()
        )
        assert (last in [str(message) for message in history.messages]) is kept
