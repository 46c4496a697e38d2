"""Where several ask about one call, and ask different roles, it runs when each question is answered."""

from pathlib import Path
from typing import Any

import pytest

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
)
from planner_ext.durable import Approvals, Runs
from planner_ext.errors import DecisionRefusedError
from planner_ext.events import CallDecided
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Checkpoint,
    DecisionRequest,
    Supply,
)
from support.approval import (
    DONE,
    REFUND,
    REFUNDED,
    Door,
    World,
    asked,
    both_ways,
    check_sendable,
    one_door,
    planner_with,
    results,
    three_doors,
    world,
)
from support.approval_filter import AUTO, chat, guarded
from support.stock import add_filter
from support.values import each_of

ROLES = {"cleo": "clerk", "bea": "boss", "otto": "owner"}
CLERK = Approve(by="cleo")
BOSS = Approve(by="bea")
PAID_LESS = ("refund", "7", 20.0, "")


def of_staff(request: DecisionRequest) -> bool:
    """Let those decide who have one of the call's roles."""
    return (
        request.call is None
        or not request.call.roles
        or ROLES.get(request.by) in request.call.roles
    )


STAFF = ApprovalSettings(authorize=of_staff)


def ask_of(*roles: str, **rule: Any) -> ApprovalPolicy:
    """Make a policy that asks these roles about refunds."""
    asks = {
        "function": "refund",
        "action": "ask",
        "roles": [*roles],
        "reason": f"{' or '.join(roles)}?",
        **rule,
    }
    return ApprovalPolicy.from_dict({"default": "allow", "rules": [asks]})


def of_clerk(to: World, *filters: Any) -> Any:
    """Have the run ask the clerk, and filters of its kernel ask others: the boss, unless given."""
    for one in filters or (ApprovalFilter(ask_of("boss")),):
        add_filter(to.kernel, "auto_function_invocation", one)
    return {"interceptors": [ask_of("clerk")], "approval": STAFF}


def who(outcome: Any) -> list[list[str]]:
    return [one["roles"] for one in outcome.pending]


@three_doors
async def test_an_approval_by_the_clerk_does_not_run_what_waits_for_the_boss(
    door: Door,
) -> None:
    """The call waits again for the boss, under another fingerprint, and then runs; also over checkpoints as JSON."""
    first = world([REFUND])
    paused = await door.ask(first, **of_clerk(first))
    second = world([DONE])
    again = await door.resume(
        second, paused.checkpoint, {"call_1": CLERK}, **of_clerk(second)
    )
    assert who(paused) == [["clerk"]]
    assert again.status == "paused"
    assert who(again) == [["boss"]]
    assert second.ran == []
    assert second.requests == 0
    assert again.pending[0]["prompt"] == "boss?"
    assert again.pending[0]["fingerprint"] != paused.pending[0]["fingerprint"]
    here = world([DONE])
    given = of_clerk(here)
    with pytest.raises(DecisionRefusedError):
        await door.resume(here, again.checkpoint, {"call_1": CLERK}, **given)
    named = Approve(by="bea", fingerprint=again.pending[0]["fingerprint"])
    done = await door.resume(here, again.checkpoint, {"call_1": named}, **given)
    assert (done.status, here.ran) == ("answered", [REFUNDED])
    check_sendable(done.history)


@each_of(
    ("answer", "read"),
    [(Deny("No.", by="bea"), "No."), (Supply("by hand", by="bea"), "by hand")],
)
@each_of("first", [True, False], ids=["at once", "after the clerk"])
@one_door
async def test_a_no_or_a_result_answers_at_once(
    door: Door, answer: Any, read: str, first: bool
) -> None:
    """No other person is asked about a call that does not run."""
    here = world([REFUND, DONE])
    given = of_clerk(here) | {
        "approval": ApprovalSettings(authorize=lambda request: True)
    }
    paused = await door.ask(here, **given)
    if not first:
        paused = await door.resume(here, paused.checkpoint, {"call_1": CLERK}, **given)
    done = await door.resume(here, paused.checkpoint, {"call_1": answer}, **given)
    assert (done.status, here.ran) == ("answered", [])
    assert read in results(done.history)[-1]


@one_door
async def test_each_of_three_is_asked_in_turn(door: Door) -> None:
    """The rest of the questions is in the journal: resumed without the filters, they are still put."""
    first = world([REFUND])
    given = of_clerk(
        first, ApprovalFilter(ask_of("boss")), ApprovalFilter(ask_of("owner", "boss"))
    )
    outcome = await door.ask(first, **given)
    seen, here = [who(outcome)], world([DONE])
    for by in ("cleo", "bea", "otto"):
        outcome = await door.resume(
            here, outcome.checkpoint, {"call_1": Approve(by=by)}, approval=STAFF
        )
        seen.append(who(outcome))
    others = [[["boss"]], [["owner", "boss"]]]
    assert sorted(seen[1:3]) == others
    assert seen[0] == [["clerk"]]
    assert seen[3] == []
    assert here.ran == [REFUNDED]


@one_door
async def test_the_same_roles_are_asked_once(door: Door) -> None:
    """A filter that asks the roles that the run asks puts no second question."""
    here = world([REFUND, DONE])
    given = of_clerk(here, ApprovalFilter(ask_of("clerk", reason="Really?")))
    paused = await door.ask(here, **given)
    done = await door.resume(here, paused.checkpoint, {"call_1": CLERK}, **given)
    assert (done.status, here.ran) == ("answered", [REFUNDED])


@one_door
async def test_an_edit_of_the_second_has_the_first_asked_again(door: Door) -> None:
    """The clerk, who approved other arguments, is asked about the boss's, and then the call runs with these."""
    here = world([REFUND, DONE])
    given = of_clerk(here)
    paused = await door.ask(here, **given)
    again = await door.resume(here, paused.checkpoint, {"call_1": CLERK}, **given)
    less = Approve(arguments={"order": "7", "amount": 20}, by="bea")
    anew = await door.resume(here, again.checkpoint, {"call_1": less}, **given)
    assert here.ran == []
    assert who(anew) == [["clerk"]]
    assert anew.pending[0]["arguments"]["amount"] == 20
    done = await door.resume(here, anew.checkpoint, {"call_1": CLERK}, **given)
    assert (done.status, here.ran) == ("answered", [PAID_LESS])


@one_door
async def test_an_edit_of_the_first_is_shown_to_the_second(door: Door) -> None:
    """The boss is asked about the clerk's arguments; given back as they were they are a plain approval."""
    here = world([REFUND, DONE])
    given = of_clerk(here)
    paused = await door.ask(here, **given)
    less = Approve(arguments={"order": "7", "amount": 20}, by="cleo")
    anew = await door.resume(here, paused.checkpoint, {"call_1": less}, **given)
    assert here.ran == []
    assert who(anew) == [["boss"]]
    assert anew.pending[0]["arguments"]["amount"] == 20
    same = Approve(arguments={"order": "7", "amount": 20.0}, by="bea")
    done = await door.resume(here, anew.checkpoint, {"call_1": same}, **given)
    assert (done.status, here.ran) == ("answered", [PAID_LESS])


@one_door
async def test_arguments_given_back_as_they_are_do_not_pass_the_second(
    door: Door,
) -> None:
    """An approval with the arguments that wait is an approval as it is: the boss is still asked."""
    here = world([REFUND, DONE])
    given = of_clerk(here)
    paused = await door.ask(here, **given)
    same = Approve(arguments={"order": "7", "amount": 50}, by="cleo")
    again = await door.resume(here, paused.checkpoint, {"call_1": same}, **given)
    assert again.status == "paused"
    assert who(again) == [["boss"]]
    assert here.ran == []


@one_door
async def test_within_one_batch_an_approver_is_asked_each_question(door: Door) -> None:
    """An approver beside the run is shown the roles of both."""
    seen: list[tuple[str, ...]] = []

    def approver(call: Any) -> Any:
        seen.append(call.roles)
        return Approve()

    here = world([REFUND, DONE])
    add_filter(here.kernel, "auto_function_invocation", ApprovalFilter(ask_of("boss")))
    done = await door.ask(here, interceptors=[ask_of("clerk")], approver=approver)
    assert done.status == "answered"
    assert seen == [("clerk",), ("boss",)]
    assert here.ran == [REFUNDED]


@one_door
async def test_what_the_runs_approver_leaves_open_waits(door: Door) -> None:
    """The clerk's answer is taken at once, the boss's question waits."""
    here = world([REFUND, DONE])
    add_filter(here.kernel, "auto_function_invocation", ApprovalFilter(ask_of("boss")))
    given: dict[str, Any] = {"interceptors": [ask_of("clerk")], "approval": STAFF}
    paused = await door.ask(
        here, approver=lambda call: CLERK if "clerk" in call.roles else None, **given
    )
    assert paused.status == "paused"
    assert who(paused) == [["boss"]]
    assert here.ran == []
    done = await door.resume(here, paused.checkpoint, {"call_1": BOSS}, **given)
    assert (done.status, here.ran) == ("answered", [REFUNDED])


@each_of("answer", [Approve(), Deny("No.")], ids=["yes", "no"])
@one_door
async def test_a_filter_s_own_approver_is_asked_before_the_run_pauses(
    door: Door, answer: Any
) -> None:
    """What can be answered beside the run is; only then does the run wait for the clerk."""
    seen: list[tuple[str, ...]] = []

    def approver(call: Any) -> Any:
        seen.append(call.roles)
        return answer

    here = world([REFUND, DONE])
    paused = await door.ask(
        here, **of_clerk(here, ApprovalFilter(ask_of("boss"), approver))
    )
    expected = (
        ("paused", [["clerk"]]) if isinstance(answer, Approve) else ("answered", [])
    )
    assert (paused.status, who(paused)) == expected
    assert seen == [("boss",)]
    assert here.ran == []


async def decided_in_turn(
    *decisions: Any,
) -> tuple[FunctionCallingStepwisePlanner, World, list[Any]]:
    """Run until it waits, and take each decision on the result before."""
    here = world([REFUND, DONE])
    planner = planner_with(**of_clerk(here))
    found = [await planner.invoke(here.kernel, "Refund.")]
    for one in decisions:
        found.append(
            await planner.resume(here.kernel, found[-1].checkpoint, {"call_1": one})
        )
    return planner, here, found


async def test_each_approval_is_in_the_record_once() -> None:
    """Who approved first is named beside the question of the second, and both are in the record of decisions."""
    _, here, (_, again, done) = await decided_in_turn(CLERK, BOSS)
    (waits,) = again.pending
    assert waits.decision is not None
    assert (waits.decision.kind, waits.decision.by) == ("approve", "cleo")
    assert [(one.kind, one.by) for one in done.decisions] == [
        ("approve", "cleo"),
        ("approve", "bea"),
    ]
    assert here.ran == [REFUNDED]


async def test_the_first_approval_is_taken_once() -> None:
    """The checkpoint that waits for the clerk takes no second decision; the one that waits for the boss takes one."""
    planner, here, (paused, again) = await decided_in_turn(CLERK)
    with pytest.raises(DecisionRefusedError, match="decided before"):
        await planner.resume(here.kernel, paused.checkpoint, {"call_1": CLERK})
    checkpoint = Checkpoint.from_json(again.checkpoint.to_json())
    await planner.resume(here.kernel, checkpoint, {"call_1": BOSS})
    with pytest.raises(DecisionRefusedError, match="decided before"):
        await planner.resume(here.kernel, checkpoint, {"call_1": BOSS})
    assert here.ran == [REFUNDED]


async def test_an_approval_for_the_clerk_s_call_does_not_approve_the_boss_s() -> None:
    """It names the fingerprint of the clerk's question."""
    planner, here, (paused, again) = await decided_in_turn(CLERK)
    stale = Approve(by="bea", fingerprint=paused.pending[0].fingerprint)
    with pytest.raises(DecisionRefusedError, match="another call"):
        await planner.resume(here.kernel, again.checkpoint, {"call_1": stale})
    assert here.ran == []


async def test_always_of_the_first_answers_nothing_of_the_second() -> None:
    """An approval for the rest of the run is for the clerk's question, and is not kept while others are asked."""
    here = world([REFUND, REFUND, DONE])
    planner = planner_with(**of_clerk(here))
    result = await planner.invoke(here.kernel, "Refund.")
    for by in (Approve(by="cleo", always="function"), BOSS):
        result = await planner.resume(here.kernel, result.checkpoint, {"call_1": by})
    assert ([one.roles for one in result.pending], here.ran) == (
        [("clerk",)],
        [REFUNDED],
    )


async def test_a_question_behind_another_expires_from_its_own_opening() -> None:
    """The record says that the clerk approved, and that the boss's question expired."""
    here = world([REFUND, DONE])
    planner = planner_with(
        interceptors=[ask_of("clerk", expires_in=1000)],
        approval=ApprovalSettings(authorize=of_staff, expires_in=1e-6),
    )
    add_filter(here.kernel, "auto_function_invocation", ApprovalFilter(ask_of("boss")))
    paused = await planner.invoke(here.kernel, "Refund.")
    again = await planner.resume(here.kernel, paused.checkpoint, {"call_1": CLERK})
    done = await planner.resume(here.kernel, again.checkpoint, {})
    assert (done.status, here.ran) == ("answered", [])
    assert [(one.kind, one.by) for one in done.decisions] == [
        ("approve", "cleo"),
        ("expire", ""),
    ]


async def test_a_call_that_one_asks_about_is_written_as_before() -> None:
    """The further questions are in the journal only where there are any."""
    _, _, (paused, again) = await decided_in_turn(CLERK)
    assert [
        bool(fact.further) for fact in paused.facts if isinstance(fact, CallDecided)
    ] == [True]
    assert (
        '"further"' in paused.checkpoint.to_json(),
        '"boss?"' in again.checkpoint.to_json(),
    ) == (True, True)
    alone = await planner_with(interceptors=[ask_of("clerk")]).invoke(
        world([REFUND]).kernel, "Refund."
    )
    assert '"further"' not in alone.checkpoint.to_json()


async def test_a_kept_run_waits_for_each_of_them(tmp_path: Path) -> None:
    """Decided through the store by persons of both roles: the question is reopened for the boss, with the reason."""
    store = tmp_path / "runs.db"
    here = world([REFUND, DONE])
    planner = planner_with(**of_clerk(here))
    staff: Any = {"authorize": of_staff}
    async with (
        Runs.sqlite(store, poll_seconds=0.01, **staff) as runs,
        Approvals.connect(store, **staff) as approvals,
    ):
        handle = await runs.start(planner, here.kernel, "Refund.", run_id="a")
        await handle.result()
        (first,) = await approvals.pending()
        assert (first.roles, await approvals.decide(first.id, CLERK)) == (
            ("clerk",),
            True,
        )
        assert (await handle.result()).status == "paused"
        (waits,) = await approvals.pending()
        assert waits.roles == ("boss",)
        assert waits.prompt == "boss?"
        assert here.ran == []
        assert (
            waits.problem
            == "cleo approved the call, which needs another decision of boss, too."
        )
        assert await approvals.decide(waits.id, BOSS)
        result = await handle.result()
        assert (result.status, here.ran) == ("answered", [REFUNDED])
        assert [(one.kind, one.by) for one in result.decisions] == [
            ("approve", "cleo"),
            ("approve", "bea"),
        ]


@both_ways
async def test_a_history_s_approval_asks_the_other_filter_of_the_kernel(
    streamed: bool,
) -> None:
    """On a stock kernel the clerk's yes has the call wait for the boss, whose yes runs it."""
    by, history = ApprovalFilter(ask_of("clerk"), authorize=of_staff), asked()
    here = guarded([REFUND, DONE], by=by, under=AUTO)
    add_filter(
        here.kernel,
        "auto_function_invocation",
        ApprovalFilter(ask_of("boss"), authorize=of_staff),
    )
    await chat(here, history, streamed=streamed)
    people = {"clerk": CLERK, "boss": BOSS}
    ((first,),) = (one.roles for one in by.pending(history))
    ((second,),) = (
        one.roles
        for one in await by.resume(here.kernel, history, {"call_1": people[first]})
    )
    assert ({first, second}, here.ran) == ({"clerk", "boss"}, [])
    assert await by.resume(here.kernel, history, {"call_1": people[second]}) == ()
    assert here.ran == [REFUNDED]
    check_sendable(history)
