"""Interceptors of every kind, and those that misbehave: an unclear decision never runs a call."""

import asyncio
import contextlib
import functools
import re
import threading
from typing import Any

import pytest

from planner_ext import ApprovalPolicy, Approve, Deny
from planner_ext.hitl_manager import ApprovalSettings, Defer, Supply, ToolCall
from planner_ext.testing import call, calls
from support.approval import (
    DONE,
    DOORS,
    LOOK,
    REFUND,
    REFUNDED,
    Door,
    arguments_in,
    check_sendable,
    decided,
    one_door,
    requested,
    results,
    three_doors,
    world,
)
from support.values import each_of


async def asynchronous(call: ToolCall) -> Any:
    return Deny("No.") if call.function_name == "refund" else None


class Answering:
    """An object that decides, in any of the ways in which Python calls one."""

    def __call__(self, call: ToolCall) -> Any:
        return Deny("No.") if call.function_name == "refund" else None

    async def method(self, call: ToolCall) -> Any:
        return self(call)


class AnsweringLater:
    async def __call__(self, call: ToolCall) -> Any:
        return Answering()(call)


KINDS: dict[str, Any] = {
    "function": Answering().__call__,
    "async-function": asynchronous,
    "object": Answering(),
    "async-object": AnsweringLater(),
    "async-method": Answering().method,
    "lambda-to-coroutine": lambda call: asynchronous(call),
    "partial": functools.partial(Answering.__call__, Answering()),
    "async-partial": functools.partial(Answering.method, Answering()),
}


@each_of("kind", KINDS)
@one_door
async def test_anything_that_can_be_called_may_decide(door: Door, kind: str) -> None:
    """Sync or async, function or object: everything that can be called with the call is an interceptor."""
    here = world()
    outcome = await door.ask(here, interceptors=[KINDS[kind]])
    assert (here.ran, outcome.status) == ([("look", "7")], "answered")
    assert results(outcome.history)[1] == "The call was refused and did not run: No."


async def raising(call: ToolCall) -> Any:
    raise RuntimeError("password=hunter2")


def raising_at_once(call: ToolCall) -> Any:
    raise ValueError("password=hunter2")


async def cancelled_inside(call: ToolCall) -> Any:
    waiting: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    waiting.cancel()
    return await waiting


def stopping(call: ToolCall) -> Any:
    raise StopIteration


MISBEHAVING: dict[str, Any] = {
    "raises": raising,
    "raises-at-once": raising_at_once,
    "raises-stop-iteration": stopping,
    "cancelled-inside": cancelled_inside,
    "wrong-arity": lambda: Approve(),
}


@each_of("kind", MISBEHAVING)
@one_door
async def test_an_interceptor_that_raises_denies(door: Door, kind: str) -> None:
    """The run continues, with a clean text; `test_no_decision.py` has the answers that are not decisions."""
    here = world()
    outcome = await door.ask(
        here, interceptors=[MISBEHAVING[kind], lambda call: Approve()]
    )
    assert here.ran == []
    assert outcome.status == "answered"
    assert outcome.text == "Done."
    assert all(
        "refused" in text and "hunter2" not in text for text in results(outcome.history)
    )
    check_sendable(outcome.history)


CIRCULAR: dict[str, Any] = {"amount": 1}
CIRCULAR["order"] = CIRCULAR

JUNK: dict[str, Any] = {
    "arguments-text": Approve(arguments="all"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "arguments-key": Approve(arguments={("order", "amount"): 1}),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "arguments-circular": Approve(arguments=CIRCULAR),
    "always": Approve(always="everything"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "expires-text": Defer(expires_in="soon"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "expires-nan": Defer(expires_in=float("nan")),
    "expires-never": Defer(expires_in=float("inf")),
    "expires-far": Defer(expires_in=1e30),
    "prompt": Defer(prompt=5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "reason": Deny(5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "by": Deny("No.", by=5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "approve-by": Approve(by=5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "supply-by": Supply("paid", by=5),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    "reason-surrogate": Deny("No \ud800."),
}


@each_of("kind", JUNK)
@one_door
async def test_a_decision_with_junk_in_it_runs_nothing(door: Door, kind: str) -> None:
    """A decision whose fields mean nothing denies or waits; the run has a value for it, and can be saved and read."""
    here = world([REFUND, DONE])
    outcome = await door.ask(here, interceptors=[lambda call: JUNK[kind]])
    assert (here.ran, outcome.status in ("answered", "paused")) == ([], True)
    outcome.history.model_dump_json()
    if outcome.checkpoint:
        again = world([DONE])
        if outcome.status == "paused":
            assert (await door.resume(again, outcome.checkpoint, {})).status in (
                "paused",
                "answered",
            )
        assert again.ran == []


@each_of(
    ("answer", "problem"),
    [
        (JUNK["always"], "an Approve, but always must be .* got 'everything'"),
        (JUNK["arguments-text"], "arguments must map parameter names .* got str"),
        (JUNK["approve-by"], "an Approve, but by must be text, .* got 5"),
        (JUNK["supply-by"], "a Supply, but by must be text, .* got 5"),
        (Approve(fingerprint="0" * 64), "its fingerprint is that of another call"),
    ],
)
async def test_the_log_says_why_an_answer_is_not_taken(
    answer: Any, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With the name of the interceptor, and without the repr of what it answered, which may be secret."""
    await DOORS[0].ask(world([REFUND, DONE]), interceptors=[lambda call: answer])
    assert re.search(rf"<lambda> answered .*{problem}; the call is denied", caplog.text)


@one_door
async def test_an_approval_of_another_call_does_not_count(door: Door) -> None:
    """Where an approval names a fingerprint, it must be the call's: one kept from another call runs nothing."""
    here = world([REFUND, DONE])
    await door.ask(here, interceptors=[lambda call: Approve(fingerprint="0" * 64)])
    assert here.ran == []
    here = world([REFUND, DONE])
    await door.ask(
        here, interceptors=[lambda call: Approve(fingerprint=call.fingerprint)]
    )
    assert here.ran == [REFUNDED]


@one_door
async def test_an_interceptor_that_hangs_denies(door: Door) -> None:
    """Past ``interceptor_timeout`` a call is denied, whether the interceptor hangs in the event loop or in a thread."""
    released = threading.Event()

    async def hangs(call: ToolCall) -> Any:
        return await asyncio.Future()

    def blocks(call: ToolCall) -> Any:
        released.wait(10)
        return Approve()

    try:
        for interceptor in (hangs, blocks):
            here = world([REFUND, DONE])
            approval = ApprovalSettings(interceptor_timeout=0.02)
            outcome = await door.ask(
                here, interceptors=[interceptor], approval=approval
            )
            assert (here.ran, outcome.status) == ([], "answered")
            assert "not decided in time" in results(outcome.history)[0]
    finally:
        released.set()


@one_door
async def test_an_answer_after_the_timeout_does_not_approve(door: Door) -> None:
    """An interceptor that answers its own cancellation with an approval has not decided in time."""

    async def stubborn(call: ToolCall) -> Any:
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            return Approve()

    here = world([REFUND, DONE])
    await door.ask(
        here,
        interceptors=[stubborn],
        approval=ApprovalSettings(interceptor_timeout=0.02),
    )
    assert here.ran == []


@one_door
async def test_what_ran_is_what_was_recorded(door: Door) -> None:
    """An interceptor that changes the arguments it was shown changes nothing: only ``Approve(arguments=)`` edits."""
    facts: list[Any] = []

    def meddling(call: ToolCall) -> Any:
        with contextlib.suppress(TypeError):
            call.arguments["amount"] = 9999  # pyright: ignore[reportIndexIssue]  # what is read-only is written

    here = world([REFUND, DONE])
    outcome = await door.ask(here, interceptors=[meddling], observers=[facts.append])
    assert here.ran == [REFUNDED]
    assert (
        arguments_in(outcome.history)
        == requested(facts)
        == [{"order": "7", "amount": 50}]
    )


@one_door
async def test_every_interceptor_is_shown_the_same(door: Door) -> None:
    """What one interceptor does to the arguments it was shown, the next one, a policy for instance, does not see."""

    def meddling(call: ToolCall) -> Any:
        with contextlib.suppress(TypeError):
            call.arguments["amount"] = 1  # pyright: ignore[reportIndexIssue]  # what is read-only is written

    large = {
        "function": "refund",
        "arguments": {"amount": {"gt": 10}},
        "action": "deny",
    }
    here = world([REFUND, DONE])
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [large]})
    await door.ask(here, interceptors=[meddling, policy], pre_invoke=lambda *_: True)
    assert here.ran == []


@one_door
async def test_all_calls_of_a_batch_are_seen_before_any_runs(door: Door) -> None:
    """While interceptors are asked, nothing of the batch has run, not even what they approved a moment before."""
    here = world([calls(LOOK, REFUND, LOOK), DONE])
    seen: list[tuple[str, int]] = []

    async def watch(call: ToolCall) -> Any:
        seen.append((call.function_name, len(here.ran)))
        await asyncio.sleep(0)
        return Approve()

    await door.ask(here, interceptors=[watch])
    assert (seen, len(here.ran)) == ([("look", 0), ("refund", 0), ("look", 0)], 3)


@three_doors
async def test_mixed_decisions_keep_the_order_of_the_calls(door: Door) -> None:
    """Run, denied, supplied, unknown and invalid calls of one batch: one result each, in call order."""
    batch = calls(
        LOOK,
        REFUND,
        call("shop-none"),
        call("shop-look", {"wrong": 1}),
        call("shop-charge", {"amount": 2}),
    )
    decisions = {"refund": Deny("No."), "charge": Supply("paid")}
    facts: list[Any] = []
    here = world([batch, DONE])
    outcome = await door.ask(
        here,
        interceptors=[lambda call: decisions.get(call.function_name)],
        observers=[facts.append],
    )
    texts = results(outcome.history)
    assert texts[0] == "sent"
    assert texts[1] == "The call was refused and did not run: No."
    assert texts[4] == "paid"
    assert "no function" in texts[2]
    assert "cannot be used" in texts[3]
    assert len(texts) == 5
    assert [d.verdict for d in decided(facts)] == [
        "run",
        "deny",
        "answer",
        "answer",
        "answer",
    ]
    assert (here.ran, outcome.tool_calls) == ([("look", "7")], 1)
    check_sendable(outcome.history)


@one_door
async def test_interceptors_see_only_calls_that_could_run(door: Door) -> None:
    """Unknown functions, malformed arguments and hidden parameters are answered without asking anybody."""
    seen: list[str] = []
    batch = calls(
        call("refund", {"order": "7", "amount": 1}),
        call("shop-refund", "{"),
        call("shop-look"),
    )
    here = world([batch, DONE])
    await door.ask(here, interceptors=[lambda call: seen.append(call.id)])
    assert (seen, here.ran) == ([], [])
