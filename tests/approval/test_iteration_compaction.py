"""Compaction: the callback edits or replaces the history, and every call keeps its one result."""

from typing import Any

import pytest
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)

from planner_ext import Approve
from planner_ext.errors import InvalidHistoryError, PlannerException
from planner_ext.hitl_manager import Checkpoint
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.testing import calls
from support.approval import (
    DONE,
    LOOK,
    REFUND,
    WIPE,
    Door,
    asked,
    check_sendable,
    one_door,
    planner_doors,
    planner_with,
    results,
    service_and_handler,
    three_doors,
    two_doors,
    world,
)
from support.stock import first_result
from support.values import each_of

Context = FunctionInvocationIterationContext
SUMMARY = "Order 7 was looked up: it is sent."


def summarize(context: Context) -> None:
    """Put one message in place of everything after the question."""
    context.messages[1:] = [
        ChatMessageContent(role=AuthorRole.ASSISTANT, content=SUMMARY)
    ]


def summarize_again(context: Context) -> None:
    """Do the same with another list."""
    context.messages = [
        context.messages[0],
        ChatMessageContent(role=AuthorRole.ASSISTANT, content=SUMMARY),
    ]


def once(compact: Any) -> Any:
    """Compact after the first iteration only."""

    def callback(context: Context) -> None:
        if context.iteration == 0:
            compact(context)

    return callback


@each_of("compact", [summarize, summarize_again])
@three_doors
async def test_the_next_request_has_the_compacted_history(
    door: Door, compact: Any
) -> None:
    """Edited in place or replaced: the model, the result and the caller's history have the callback's messages."""
    here = world([LOOK, REFUND, DONE])
    outcome = await door.ask(here, iteration_completed=once(compact))
    sent = [(m["role"], m.get("content")) for m in here.service.requests[1].messages]
    assert sent == [("user", "Refund order 7."), ("assistant", SUMMARY)]
    texts = [str(message) for message in outcome.history.messages]
    assert texts[:2] == ["Refund order 7.", SUMMARY]
    assert outcome.status == "answered"
    assert results(outcome.history) == ["refunded 50"]
    assert len(here.ran) == 2
    check_sendable(outcome.history)


@three_doors
async def test_a_whole_pair_may_go(door: Door) -> None:
    """A message with calls and its results may be taken out together, a result's text be put in another's place."""

    def shorten(context: Context) -> None:
        old = first_result(context.messages[2])
        short = FunctionResultContent(id=old.id, name=old.name, result="(cut)")
        context.messages[2] = ChatMessageContent(role=AuthorRole.TOOL, items=[short])

    here = world([LOOK, REFUND, DONE])
    outcome = await door.ask(here, iteration_completed=once(shorten))
    assert results(outcome.history) == ["(cut)", "refunded 50"]
    assert here.service.requests[1].messages[2]["content"] == "(cut)"
    here = world([LOOK, REFUND, DONE])
    outcome = await door.ask(
        here,
        iteration_completed=once(
            lambda context: context.messages.__delitem__(slice(1, 3))
        ),
    )
    assert results(outcome.history) == ["refunded 50"]
    check_sendable(outcome.history)


def drop_result(context: Context) -> None:
    context.messages.pop()


def drop_calls(context: Context) -> None:
    del context.messages[1]


def double_result(context: Context) -> None:
    context.messages.append(context.messages[-1])


def move_result(context: Context) -> None:
    context.messages.append(ChatMessageContent(role=AuthorRole.USER, content="And?"))
    context.messages.append(context.messages.pop(2))


def add_call(context: Context) -> None:
    item = FunctionCallContent(id="call_9", name="shop-wipe", arguments="{}")
    context.messages.append(ChatMessageContent(role=AuthorRole.ASSISTANT, items=[item]))


BREAKING = {
    one.__name__: one
    for one in (drop_result, drop_calls, double_result, move_result, add_call)
}


@each_of("how", BREAKING)
@two_doors
async def test_a_broken_pair_is_refused(door: Door, how: str) -> None:
    """A history with an unanswered call, an orphan or a second result is refused with its ids; nothing is sent."""
    here = world([LOOK, DONE])
    with pytest.raises(InvalidHistoryError, match=r"call_1|call_9"):
        await door.ask(here, iteration_completed=BREAKING[how])
    assert here.requests == 1


@planner_doors
async def test_the_error_carries_a_history_and_a_run_to_resume(door: Door) -> None:
    """The refused callback costs nothing: history and checkpoint of the error are whole, and the run continues."""
    with pytest.raises(PlannerException) as raised:
        await door.ask(world([LOOK, DONE]), iteration_completed=drop_result)
    assert raised.value.chat_history is not None
    assert raised.value.checkpoint is not None
    check_sendable(raised.value.chat_history)
    here = world([DONE])
    done = await door.resume(here, raised.value.checkpoint.to_json(), {})
    assert done.status == "answered"
    assert done.tool_calls == 1
    assert results(done.history) == ["sent"]


@service_and_handler
async def test_the_callers_history_is_whole_after_a_refusal(door: Door) -> None:
    """What the callback broke, it broke in its own list: the caller's history has the pair."""
    history = asked()
    with pytest.raises(InvalidHistoryError):
        await door.ask(
            world([LOOK, DONE]), history=history, iteration_completed=drop_result
        )
    assert results(history) == ["sent"]
    check_sendable(history)


@one_door
async def test_an_untouched_list_is_not_recorded_as_compaction(door: Door) -> None:
    """A callback that puts an equal list of the same messages in place records no other transcript."""
    facts: list[Any] = []

    def same(context: Context) -> None:
        context.messages = list(context.messages)

    await door.ask(
        world([LOOK, DONE]), iteration_completed=same, observers=[facts.append]
    )
    assert [fact.messages for fact in facts if fact.type == "IterationCompleted"] == [
        None
    ]


@three_doors
async def test_compaction_outlives_pause_and_process(door: Door) -> None:
    """Compacted, then paused: the checkpoint has the compacted history, and the resumed run continues with it."""
    paused = await door.ask(
        world([LOOK, calls(LOOK, WIPE)]), iteration_completed=once(summarize)
    )
    assert paused.status == "paused"
    here = world([DONE])
    done = await door.resume(here, paused.checkpoint, {paused.waiting[0]: Approve()})
    texts = [str(message) for message in done.history.messages]
    assert texts[:2] == ["Refund order 7.", SUMMARY]
    assert (here.ran, results(done.history)) == (
        [("look", "7"), ("wipe",)],
        ["sent", "gone"],
    )


@three_doors
async def test_what_is_sent_is_what_is_recorded(door: Door) -> None:
    """Messages changed in place, object by object, are either recorded or not sent: record and request agree."""

    def scribble(context: Context) -> None:
        first_result(context.messages[2]).result = "(cut)"

    here = world([LOOK, DONE])
    outcome = await door.ask(here, iteration_completed=scribble)
    assert (
        here.service.requests[1].messages[2]["content"] == results(outcome.history)[0]
    )


@planner_doors
async def test_compaction_survives_json(door: Door) -> None:
    """The run's record with a replaced transcript can be written and read."""
    planner = planner_with(iteration_completed=once(summarize))
    result = await planner.invoke(world([LOOK, WIPE]).kernel, "Refund order 7.")
    read = Checkpoint.from_json(result.checkpoint.to_json())
    assert [fact.type for fact in read.facts] == [fact.type for fact in result.facts]


@three_doors
async def test_compact_and_terminate(door: Door) -> None:
    """Both at once: the history is compacted, the run ends, and continues later with what was left."""

    def both(context: Context) -> None:
        summarize(context)
        context.terminate = True

    stopped = await door.ask(world([LOOK]), iteration_completed=both)
    assert (stopped.status, [str(m) for m in stopped.history.messages][1]) == (
        "stopped",
        SUMMARY,
    )
    here = world([DONE])
    await door.resume(here, stopped.checkpoint, {})
    assert here.service.requests[0].messages[1]["content"] == SUMMARY
