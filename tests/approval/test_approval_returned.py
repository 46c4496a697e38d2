"""Batches that go back to the caller, and runs that continue after that: nothing runs twice, nothing runs unasked."""

from typing import Any

from planner_ext import Approve, Budget, Deny
from planner_ext.hitl_manager import ApprovalSettings, Defer
from planner_ext.testing import call, calls
from support.approval import (
    ASKING_REFUND,
    DONE,
    LOOK,
    REFUND,
    REFUNDED,
    WIPE,
    Door,
    check_sendable,
    one_door,
    only,
    planner_doors,
    results,
    three_doors,
    world,
)
from support.values import each_of

RETURN = ApprovalSettings(on_denial="return_calls")
SAFE_RETURN = ApprovalSettings(on_denial="return_calls", on_deferred="run_safe_first")


@three_doors
async def test_a_returned_batch_is_reviewed_again(door: Door) -> None:
    """Returned at a limit and resumed with a larger budget, every call is shown to the interceptors of then."""
    here = world([calls(LOOK, REFUND)])
    ended = await door.ask(
        here, budget=Budget(max_tool_calls=1, on_limit="return_calls")
    )
    assert (ended.status, here.ran) == ("limit_reached", [])
    here = world([])
    budget = Budget(max_tool_calls=9)
    again = await door.resume(
        here, ended.checkpoint, {}, budget=budget, interceptors=[ASKING_REFUND]
    )
    assert again.status == "paused"
    assert again.waiting == ["call_2"]
    assert here.ran == []


@one_door
async def test_a_denied_batch_that_was_returned_is_denied_again(door: Door) -> None:
    """Resumed, a denied call does not slip through: it is decided again, and ends the run again."""
    options: dict[str, Any] = {
        "interceptors": [only("refund", Deny("No."))],
        "approval": RETURN,
    }
    ended = await door.ask(world([calls(LOOK, REFUND)]), **options)
    here = world([])
    again = await door.resume(here, ended.checkpoint, {}, **options)
    assert again.status == "stopped"
    assert here.ran == []
    assert here.requests == 0


@three_doors
async def test_a_persons_denial_returns_the_batch(door: Door) -> None:
    """Under ``return_calls`` a person's denial ends the run, too: nothing of the batch has run."""
    options: dict[str, Any] = {"interceptors": [ASKING_REFUND], "approval": RETURN}
    paused = await door.ask(world([calls(LOOK, REFUND)]), **options)
    here = world([])
    ended = await door.resume(
        here, paused.checkpoint, {"call_2": Deny("No.")}, **options
    )
    assert ended.status == "stopped"
    assert here.ran == []
    assert here.requests == 0


@one_door
async def test_what_ran_before_a_denial_does_not_run_again(door: Door) -> None:
    """A safe call that ran before the pause keeps its result when its sibling is denied and the run continues later."""
    options: dict[str, Any] = {"interceptors": [ASKING_REFUND], "approval": SAFE_RETURN}
    first = world([calls(LOOK, REFUND)])
    paused = await door.ask(first, **options)
    here = world([DONE])
    ended = await door.resume(
        here, paused.checkpoint, {"call_2": Deny("No.")}, **options
    )
    if ended.status == "stopped":
        await door.resume(
            here, ended.checkpoint, {}, interceptors=[], approval=SAFE_RETURN
        )
    assert (first.ran, ("look", "7") in here.ran) == ([("look", "7")], False)


@one_door
async def test_what_ran_before_a_limit_does_not_run_again(door: Door) -> None:
    """Nor does it when the approved sibling meets a limit that returns the calls, and a larger budget lets it go on."""
    options: dict[str, Any] = {"interceptors": [ASKING_REFUND], "approval": SAFE_RETURN}
    first = world([calls(LOOK, REFUND)])
    paused = await door.ask(
        first, budget=Budget(max_tool_calls=1, on_limit="return_calls"), **options
    )
    second = world([])
    ended = await door.resume(
        second, paused.checkpoint, {"call_2": Approve()}, **options
    )
    here = world([DONE])
    await door.resume(
        here, ended.checkpoint, {}, budget=Budget(max_tool_calls=9), **options
    )
    assert first.ran == [("look", "7")]
    assert second.ran == []
    assert ("look", "7") not in here.ran


@one_door
async def test_an_approval_does_not_outlive_the_return_of_its_batch(door: Door) -> None:
    """A call that was approved, returned at a limit and resumed is asked about again before it runs."""
    options: dict[str, Any] = {"interceptors": [ASKING_REFUND]}
    budget = Budget(max_tool_calls=1, on_limit="return_calls")
    paused = await door.ask(world([calls(LOOK, REFUND)]), budget=budget, **options)
    ended = await door.resume(
        world([]), paused.checkpoint, {"call_2": Approve()}, **options
    )
    here = world([])
    again = await door.resume(
        here, ended.checkpoint, {}, budget=Budget(max_tool_calls=9), **options
    )
    assert ended.status == "limit_reached"
    assert again.status == "paused"
    assert here.ran == []


@planner_doors
async def test_a_final_answer_beside_a_risky_call_ends_the_run(door: Door) -> None:
    """The answer is taken, and the risky call beside it is answered "not executed" without a question."""
    final = call("UserInteraction-SendFinalAnswer", {"answer": "Done."})
    here = world([calls(WIPE, final)])
    outcome = await door.ask(here, require_final_answer_function=True)
    assert outcome.status == "answered"
    assert outcome.text == "Done."
    assert here.ran == []
    assert results(outcome.history)[0].startswith("Not executed")
    check_sendable(outcome.history)


@each_of("control", ["use_attempts", "pre_invoke", "iterations_metadata"])
@planner_doors
async def test_every_control_of_the_planner_pauses_and_continues(
    door: Door, control: str
) -> None:
    """However many rounds a step may chain, a deferred call pauses the run, and its approval lets it continue."""
    options: dict[str, Any] = {
        "control": control,
        "interceptors": [only("refund", Defer())],
    }
    if control == "pre_invoke":
        options["pre_invoke"] = lambda *_: True
    paused = await door.ask(world([REFUND]), **options)
    here = world(lambda request: DONE)
    done = await door.resume(here, paused.checkpoint, {"call_1": Approve()}, **options)
    assert paused.status == "paused"
    assert done.status == "answered"
    assert here.ran == [REFUNDED]
