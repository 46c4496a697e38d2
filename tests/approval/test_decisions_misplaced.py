"""Decisions that were made for something else: another run, another call, other arguments, another time."""

import asyncio
import contextlib
import inspect
from typing import Any

import pytest

from planner_ext import Approve, Deny
from planner_ext.errors import DecisionRefusedError, PlannerExtError
from planner_ext.hitl_manager import Defer, Supply
from planner_ext.testing import call, calls
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    Outcome,
    one_door,
    service_and_handler,
    three_doors,
    two_doors,
    world,
)
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
OTHER = call("shop-refund", {"order": "7", "amount": 51})


async def paused(door: Door, *script: Any) -> Outcome:
    return await door.ask(world(script or [calls(LOOK, REFUND)]), **ASK)


async def refused(door: Door, text: str, decisions: Any, match: str) -> None:
    """Fail unless decisions are refused by an error that matches, with nothing run, and the call still waits."""
    here = world([])
    with pytest.raises(DecisionRefusedError, match=match):
        await door.resume(here, text, decisions, **ASK)
    assert (here.ran, here.requests) == ([], 0)
    assert (await door.resume(world([]), text, {}, **ASK)).status == "paused"


@one_door
async def test_an_approval_for_another_run(door: Door) -> None:
    """The same call of another run has another fingerprint: its approval is refused by name."""
    one, other = await paused(door), await paused(door)
    approve = Approve(fingerprint=other.pending[0]["fingerprint"])
    await refused(
        door,
        one.checkpoint,
        {"call_2": approve},
        "call_2.*another call or other arguments",
    )


@one_door
async def test_an_approval_for_another_call_of_the_batch(door: Door) -> None:
    """Two equal calls have two fingerprints: an approval of the one does not approve the other."""
    text = await paused(door, calls(REFUND, REFUND))
    approve = Approve(fingerprint=text.pending[1]["fingerprint"])
    await refused(
        door, text.checkpoint, {"call_1": approve, "call_2": Deny()}, "call_1"
    )


@one_door
async def test_an_approval_for_another_trip(door: Door) -> None:
    """Models use ids again: an approval of ``c`` in one trip does not approve ``c`` in the next."""
    again = call("shop-refund", {"order": "7", "amount": 50}, id="c")
    first = await paused(door, again)
    second = await door.resume(
        world([again]), first.checkpoint, {"c": Approve()}, **ASK
    )
    assert second.waiting == ["c"]
    approve = Approve(fingerprint=first.pending[0]["fingerprint"])
    await refused(door, second.checkpoint, {"c": approve}, "'c'")


@one_door
async def test_an_approval_for_other_arguments(door: Door) -> None:
    """One cent more is another call."""
    one, other = await paused(door, REFUND), await paused(door, OTHER)
    approve = Approve(fingerprint=one.pending[0]["fingerprint"])
    await refused(door, other.checkpoint, {"call_1": approve}, "call_1")


@one_door
async def test_an_unknown_call(door: Door) -> None:
    """A decision on a call that does not wait is refused, and the error names those that do."""
    text = (await paused(door)).checkpoint
    for name in (
        "call_9",
        "",
        "CALL_2",
        "call_2 ",
        "\N{CYRILLIC SMALL LETTER ES}all_2",
        "call_1",
    ):
        await refused(door, text, {name: Approve()}, "does not wait.*call_2")


@three_doors
async def test_all_or_nothing(door: Door) -> None:
    """Of a good and a bad decision none is taken, in whichever order they stand."""
    text = (await paused(door, calls(REFUND, REFUND))).checkpoint
    good, bad = ("call_1", Approve()), ("call_9", Approve())
    for pairs in ([good, bad], [bad, good]):
        await refused(door, text, dict(pairs), "call_9")
    await refused(
        door, text, {"call_1": Approve(), "call_2": Approve(fingerprint="no")}, "call_2"
    )


@one_door
async def test_a_doubled_decision(door: Door) -> None:
    """Decided once, a call takes no second decision; the one that was taken stands."""
    first = await paused(door, calls(REFUND, REFUND))
    second = await door.resume(
        world([]), first.checkpoint, {"call_1": Deny("No.")}, **ASK
    )
    await refused(door, second.checkpoint, {"call_1": Approve()}, "decided before")
    here = world([DONE])
    await door.resume(here, second.checkpoint, {"call_2": Approve()}, **ASK)
    assert here.ran == [REFUNDED]


@one_door
async def test_a_decision_after_the_end(door: Door) -> None:
    """A run that continued does not take the decision of its pause again."""
    first = await paused(door, REFUND)
    later = await door.resume(
        world([OTHER]), first.checkpoint, {"call_1": Deny("No.")}, **ASK
    )
    approve = Approve(fingerprint=first.pending[0]["fingerprint"])
    await refused(door, later.checkpoint, {"call_1": approve}, "call_1")


CIRCULAR: dict[str, Any] = {"amount": 1}
CIRCULAR["order"] = CIRCULAR

JUNK: dict[str, Any] = {
    "none": None,
    "true": True,
    "text": "approve",
    "class": Approve,
    "defer": Defer(),
    "mapping": {"arguments": None},
    "arguments-text": Approve(arguments="all"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "arguments-list": Approve(arguments=[1]),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "arguments-key": Approve(arguments={("order",): 1}),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "arguments-circular": Approve(arguments=CIRCULAR),
    "arguments-deep": Approve(
        arguments={"order": eval("[" * 60 + "]" * 60), "amount": 1}
    ),
    "arguments-nan": Approve(arguments={"order": "7", "amount": float("nan")}),
    "arguments-missing": Approve(arguments={"order": "7"}),
    "arguments-hidden": Approve(arguments={"order": "7", "amount": 1, "kernel": "x"}),
    "always": Approve(always="everything"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "fingerprint": Approve(fingerprint=5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "by": Approve(by=5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "by-surrogate": Approve(by="\ud800"),
    "reason": Deny(5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
}


@each_of("kind", JUNK)
@two_doors
async def test_an_invalid_decision_is_refused(door: Door, kind: str) -> None:
    """An object of another type, or with junk in it, is refused by the call's name; the call still waits."""
    await refused(
        door, (await paused(door)).checkpoint, {"call_2": JUNK[kind]}, "call_2"
    )


@one_door
async def test_endlessly_nested_edits_are_refused(door: Door) -> None:
    """Edited arguments of ten thousand levels are refused like any others that cannot be used."""
    deep: Any = "end"
    for _ in range(10_000):
        deep = [deep]
    await refused(
        door,
        (await paused(door)).checkpoint,
        {"call_2": Approve(arguments={"order": deep})},
        "call_2",
    )


@one_door
async def test_what_is_supplied_need_not_be_json(door: Door) -> None:
    """A supplied result of any kind becomes a text that can be sent, without an error or a side effect."""
    here = world([DONE])
    done = await door.resume(
        here, (await paused(door)).checkpoint, {"call_2": Supply(object())}, **ASK
    )
    assert (done.status, here.ran) == ("answered", [("look", "7")])


@one_door
async def test_a_coroutine_is_refused_as_a_decision(door: Door) -> None:
    """A forgotten ``await`` is refused by name, and leaves no warning."""

    async def approve() -> Any:
        return Approve()

    forgotten = approve()
    try:
        await refused(
            door, (await paused(door)).checkpoint, {"call_2": forgotten}, "call_2"
        )
    finally:
        forgotten.close()
    assert inspect.getcoroutinestate(forgotten) == inspect.CORO_CLOSED


@two_doors
@each_of("decisions", [[], "call_2", Approve(), 5, [("call_2", Approve())]], ids=repr)
async def test_decisions_other_than_a_mapping_get_a_named_error(
    door: Door, decisions: Any
) -> None:
    """Decisions go by call id; anything else is refused by an error of ours, or as nothing where it is empty."""
    here = world([])
    with contextlib.suppress(PlannerExtError):
        outcome = await door.resume(
            here, (await paused(door)).checkpoint, decisions, **ASK
        )
        assert (outcome.status, decisions) == ("paused", [])
    assert (here.ran, here.requests) == ([], 0)


@one_door
async def test_two_resumes_of_one_pause_are_two_runs_on_paper(door: Door) -> None:
    """A checkpoint is a value and cannot know that it was used: each use runs the call, as documented."""
    text = (await paused(door, REFUND)).checkpoint
    first, second = world([DONE]), world([DONE])
    await asyncio.gather(
        door.resume(first, text, {"call_1": Approve()}, **ASK),
        door.resume(second, text, {"call_1": Approve()}, **ASK),
    )
    assert (first.ran, second.ran) == ([REFUNDED], [REFUNDED])


@service_and_handler
async def test_refused_again_and_again_the_history_does_not_change(door: Door) -> None:
    """No refusal leaves a trace in the caller's history."""
    pause = await paused(door)
    before = [message.to_dict() for message in pause.history.messages]
    for decision in (
        {"call_9": Approve()},
        {"call_2": Approve(fingerprint="x")},
        {"call_2": None},
    ):
        with pytest.raises(DecisionRefusedError):
            await door.resume(
                world([]), pause.checkpoint, decision, history=pause.history, **ASK
            )
    assert [message.to_dict() for message in pause.history.messages] == before


SURROGATES: dict[str, Any] = {
    "deny-reason": Deny("\ud800"),
    "deny-by": Deny("No.", by="\ud800"),
    "approve-by": Approve(by="\ud800"),
    "supply": Supply("\ud800"),
}


@each_of("what", SURROGATES)
@one_door
async def test_text_that_no_request_can_carry(door: Door, what: str) -> None:
    """A decision's text with a lone surrogate is refused, or made fit to be sent; the run is not lost."""
    pause = await paused(door, calls(REFUND, REFUND))
    with contextlib.suppress(DecisionRefusedError):
        half = await door.resume(
            world([]), pause.checkpoint, {"call_1": SURROGATES[what]}, **ASK
        )
        done = await door.resume(
            world([DONE]), half.checkpoint, {"call_2": Deny()}, **ASK
        )
        "".join(str(message.to_dict()) for message in done.history.messages).encode()


@one_door
async def test_a_question_with_a_lone_surrogate_can_be_read_again(door: Door) -> None:
    """An interceptor's prompt of that kind denies, or is repaired: a paused run's checkpoint can always be read."""
    ask = [lambda call: Defer("\ud800")]
    outcome = await door.ask(world([REFUND, DONE]), interceptors=ask)
    if outcome.status == "paused":
        assert (
            await door.resume(world([]), outcome.checkpoint, {}, interceptors=ask)
        ).status == "paused"
