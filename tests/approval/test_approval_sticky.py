"""Approvals that hold for the rest of a run, questions that expire, and runs that are cancelled."""

from typing import Any

import pytest

from planner_ext import ApprovalPolicy, Approve, Deny
from planner_ext.errors import DecisionRefusedError, PlannerInvalidConfigurationError
from planner_ext.events import CallDecided
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Checkpoint,
    Defer,
    Supply,
    ToolCall,
)
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.testing import call, calls
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Clock,
    Door,
    check_sendable,
    decided,
    one_door,
    only,
    planner_with,
    results,
    three_doors,
    world,
)
from support.narrow import present
from support.stock import add_filter
from support.values import each_of

ASK: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
OTHER = call("shop-refund", {"order": "8", "amount": 1})
SAME = call("shop-refund", '{"amount": 50, "order": "7"}')
"""`REFUND` again, its keys in another order."""


@three_doors
async def test_always_this_function(door: Door) -> None:
    """``always="function"``: later calls of the function run unasked, with any arguments, and say why."""
    facts: list[Any] = []
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([OTHER, calls(SAME, LOOK), DONE])
    approve = Approve(always="function", by="ann")
    done = await door.resume(
        here, paused.checkpoint, {"call_1": approve}, observers=[facts.append], **ASK
    )
    assert done.status == "answered"
    assert len(here.ran) == 4
    assert done.tool_calls == 4
    assert [d.by for d in decided(facts)][:3] == [
        "ann",
        "approved earlier in this run",
        "approved earlier in this run",
    ]


@one_door
async def test_always_these_arguments(door: Door) -> None:
    """``always="arguments"``: the same call runs unasked, with its keys in any order; another one still waits."""
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([SAME, OTHER])
    again = await door.resume(
        here, paused.checkpoint, {"call_1": Approve(always="arguments")}, **ASK
    )
    assert again.status == "paused"
    assert again.waiting == ["call_2"]
    assert here.ran == [REFUNDED, REFUNDED]


@one_door
async def test_always_the_edited_arguments(door: Door) -> None:
    """Edited and approved for always: it holds for the edited arguments, not for those that the model sent."""
    edit = Approve(arguments={"order": "8", "amount": 1}, always="arguments")
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([OTHER, REFUND])
    again = await door.resume(here, paused.checkpoint, {"call_1": edit}, **ASK)
    assert again.status == "paused"
    assert again.waiting == ["call_2"]
    assert here.ran == [("refund", "8", 1.0, "")] * 2


@one_door
async def test_sticky_replaces_a_question_never_a_denial(door: Door) -> None:
    """A call that was approved for always is still denied by an interceptor that denies it."""

    def policy(call: ToolCall) -> Any:
        return Deny("Not this one.") if call.arguments["order"] == "8" else Defer()

    options: dict[str, Any] = {"interceptors": [policy]}
    paused = await door.ask(world([REFUND]), **options)
    here = world([OTHER, REFUND, DONE])
    done = await door.resume(
        here, paused.checkpoint, {"call_1": Approve(always="function")}, **options
    )
    assert (done.status, here.ran) == ("answered", [REFUNDED, REFUNDED])
    assert (
        results(done.history)[1]
        == "The call was refused and did not run: Not this one."
    )


@three_doors
async def test_sticky_outlives_further_pauses(door: Door) -> None:
    """It is in the journal: the run's next life, from JSON, still knows it."""
    options: dict[str, Any] = {
        "interceptors": [ApprovalPolicy.from_dict({"default": "ask"})]
    }
    first = await door.ask(world([REFUND]), **options)
    second = await door.resume(
        world([calls(REFUND, LOOK)]),
        first.checkpoint,
        {"call_1": Approve(always="function")},
        **options,
    )
    assert (second.status, second.waiting) == ("paused", ["call_2"])
    here = world([OTHER, DONE])
    done = await door.resume(here, second.checkpoint, {"call_2": Approve()}, **options)
    assert (done.status, here.ran) == (
        "answered",
        [REFUNDED, ("look", "7"), ("refund", "8", 1.0, "")],
    )


@one_door
async def test_sticky_is_of_this_run_only(door: Door) -> None:
    """Another run, of the same planner and the same goal, asks again."""
    paused = await door.ask(world([REFUND]), **ASK)
    await door.resume(
        world([DONE]), paused.checkpoint, {"call_1": Approve(always="function")}, **ASK
    )
    here = world([REFUND])
    assert ((await door.ask(here, **ASK)).status, here.ran) == ("paused", [])


@one_door
async def test_sticky_frees_no_other_function(door: Door) -> None:
    """Approval for one function does not approve another one, marked functions included."""
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([WIPE])
    again = await door.resume(
        here, paused.checkpoint, {"call_1": Approve(always="function")}, **ASK
    )
    assert (again.status, here.ran) == ("paused", [REFUNDED])


@one_door
async def test_sticky_arguments_hold_against_filters(door: Door) -> None:
    """A later call that runs because exactly these arguments were approved is refused when a filter changes them."""
    paused = await door.ask(world([REFUND]), **ASK)
    here = world([REFUND, DONE])

    async def tamper(context: Any, next: Any) -> None:
        if here.ran:
            context.arguments["amount"] = 9999
        await next(context)

    add_filter(here.kernel, "function_invocation", tamper)
    await door.resume(
        here, paused.checkpoint, {"call_1": Approve(always="arguments")}, **ASK
    )
    assert here.ran == [REFUNDED]


# Expiry


def expiring(seconds: float) -> dict[str, Any]:
    return {"approval": ApprovalSettings(expires_in=seconds), **ASK}


@three_doors
async def test_expiry_is_an_outcome_of_its_own(door: Door) -> None:
    """An expired question is recorded as expired, not as denied; the model reads it, ``on_denial`` has no part."""
    clock, facts = Clock(), list[Any]()
    approval = ApprovalSettings(expires_in=60, on_denial="return_calls")
    paused = await door.ask(
        world([calls(LOOK, REFUND)]), approval=approval, clock=clock, **ASK
    )
    clock.seconds += 60
    here = world([DONE])
    options = {"approval": approval, "clock": clock, "observers": [facts.append], **ASK}
    done = await door.resume(here, paused.checkpoint, {}, **options)
    assert (done.status, here.ran) == ("answered", [("look", "7")])
    assert [(d.verdict, d.reason) for d in decided(facts)] == [("answer", "expired")]
    assert "nobody decided in time" in results(done.history)[1]
    assert "refused" not in results(done.history)[1]


@each_of(
    "decision", [Approve(), Deny("No."), Supply("x")], ids=["approve", "deny", "supply"]
)
@one_door
async def test_late_decisions_are_refused_by_name(door: Door, decision: Any) -> None:
    """From the second of expiry on no decision is taken any more, and nothing runs; a second before it still is."""
    clock = Clock()
    paused = await door.ask(world([calls(LOOK, REFUND)]), clock=clock, **expiring(60))
    clock.seconds += 60
    here = world([])
    with pytest.raises(DecisionRefusedError, match=r"call_2.*too late"):
        await door.resume(
            here, paused.checkpoint, {"call_2": decision}, clock=clock, **expiring(60)
        )
    assert (here.ran, here.requests) == ([], 0)
    clock.seconds -= 1
    here = world([DONE])
    done = await door.resume(
        here, paused.checkpoint, {"call_2": decision}, clock=clock, **expiring(60)
    )
    assert done.status == "answered"


@one_door
async def test_only_the_expired_question_is_closed(door: Door) -> None:
    """Of two questions one expires: the other stays pending, and can still be decided."""
    clock = Clock()
    options: dict[str, Any] = {
        "interceptors": [
            only("refund", Defer(expires_in=60)),
            only("look", Defer(expires_in=600)),
        ],
        "clock": clock,
    }
    paused = await door.ask(world([calls(LOOK, REFUND)]), **options)
    clock.seconds += 100
    second = await door.resume(world([]), paused.checkpoint, {}, **options)
    assert (second.status, second.waiting) == ("paused", ["call_1"])
    here = world([DONE])
    done = await door.resume(here, second.checkpoint, {"call_1": Approve()}, **options)
    assert (done.status, here.ran) == ("answered", [("look", "7")])


@one_door
async def test_deciding_one_closes_the_expired_other(door: Door) -> None:
    """A decision on an open question may be given while another one has expired; the run continues with both."""
    clock = Clock()
    options: dict[str, Any] = {
        "interceptors": [ASKING_REFUND, only("look", Defer(expires_in=60))],
        "clock": clock,
    }
    paused = await door.ask(world([calls(LOOK, REFUND)]), **options)
    clock.seconds += 60
    here = world([DONE])
    done = await door.resume(here, paused.checkpoint, {"call_2": Approve()}, **options)
    assert (done.status, here.ran) == ("answered", [REFUNDED])
    assert "nobody decided in time" in results(done.history)[0]


# Cancelling


async def paused_planner(**options: Any) -> Any:
    return await planner_with(**ASK, **options).invoke(
        world([calls(LOOK, REFUND)]).kernel, "Refund order 7."
    )


async def test_cancel_answers_every_call() -> None:
    """A cancelled run is stopped: every call of its batch is answered, nothing ran, and the history can be sent."""
    paused = await paused_planner()
    ended = planner_with().cancel(
        paused.checkpoint, by="ann", reason="changed her mind"
    )
    assert ended.status == "stopped"
    assert ended.pending == ()
    assert ended.iterations == 1
    assert ended.tool_calls == 0
    assert ended.reason == "Cancelled by ann: changed her mind"
    texts = results(present(ended.chat_history))
    assert (len(texts), ["changed her mind" in text for text in texts]) == (
        2,
        [True, True],
    )
    check_sendable(present(ended.chat_history))


async def test_cancel_keeps_what_had_run() -> None:
    """With ``run_safe_first`` the results that are there stay; only what waits is answered "not executed"."""
    paused = await paused_planner(
        approval=ApprovalSettings(on_deferred="run_safe_first")
    )
    texts = results(present(planner_with().cancel(paused.checkpoint).chat_history))
    assert (texts[0], texts[1].startswith("Not executed")) == ("sent", True)


@three_doors
async def test_a_cancelled_run_takes_no_decision_any_more(door: Door) -> None:
    """Its checkpoint is not a paused one: a decision on a call that was cancelled is refused, and nothing runs."""
    ended = planner_with().cancel((await paused_planner()).checkpoint, by="ann")
    here = world([])
    with pytest.raises(DecisionRefusedError, match="call_2"):
        await door.resume(
            here, ended.checkpoint.to_json(), {"call_2": Approve()}, **ASK
        )
    assert (here.ran, here.requests) == ([], 0)


async def test_cancelling_twice_is_refused() -> None:
    """A run that has ended cannot be cancelled; the error says how it ended."""
    ended = planner_with().cancel((await paused_planner()).checkpoint)
    with pytest.raises(PlannerInvalidConfigurationError, match="stopped"):
        planner_with().cancel(ended.checkpoint)


async def test_cancel_survives_json() -> None:
    """A checkpoint from JSON can be cancelled, in a process without kernel and functions."""
    checkpoint = Checkpoint.from_json((await paused_planner()).checkpoint.to_json())
    ended = planner_with().cancel(checkpoint)
    assert (ended.status, len(results(present(ended.chat_history)))) == ("stopped", 2)


@one_door
async def test_each_decision_is_recorded_with_who_and_when(door: Door) -> None:
    """The journal tells of every decision of a person: whose, at what time, and that a person made it."""
    clock, facts = Clock(seconds=500.0), list[CallDecided]()
    paused = await door.ask(world([calls(REFUND, REFUND, REFUND)]), clock=clock, **ASK)
    clock.seconds = 900.0
    decisions = {
        "call_1": Approve(by="ann"),
        "call_2": Deny("No.", by="bob"),
        "call_3": Supply("x", by="cy"),
    }

    def note(fact: Any) -> None:
        if isinstance(fact, CallDecided):
            facts.append(fact)

    await door.resume(
        world([DONE]),
        paused.checkpoint,
        decisions,
        clock=clock,
        observers=[note],
        **ASK,
    )
    assert [(d.call_id, d.verdict, d.by, d.at, d.person) for d in facts] == [
        ("call_1", "run", "ann", 900.0, True),
        ("call_2", "deny", "bob", 900.0, True),
        ("call_3", "answer", "cy", 900.0, True),
    ]


@one_door
async def test_the_iteration_callback_runs_when_the_batch_has_settled(
    door: Door,
) -> None:
    """Not at the pause, but after the resumed batch has its results."""
    seen: list[int] = []

    def callback(context: FunctionInvocationIterationContext) -> None:
        seen.append(context.iteration)

    paused = await door.ask(world([REFUND]), iteration_completed=callback, **ASK)
    assert seen == []
    await door.resume(
        world([DONE]),
        paused.checkpoint,
        {"call_1": Approve()},
        iteration_completed=callback,
        **ASK,
    )
    assert seen == [0]
