"""A quorum, and an escalation: several persons have to approve a call of a kept run, or others are asked later."""

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.connectors.ai import (
    FunctionChoiceBehavior,
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters import FilterTypes

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    Approve,
    Deny,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.core.facts import CallDecided
from planner_ext.durable import (
    ApprovalRefusedError,
    Approvals,
    DecisionRequest,
    Grant,
    NotAuthorizedError,
    PendingApproval,
    RunsClient,
)
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.records import write_decision
from planner_ext.durable.store import opened_store
from planner_ext.errors import DecisionRefusedError, PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Supply
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult
from support.durable import (
    GOAL,
    effects_in,
    on_sqlite,
    open_runs,
    pays,
    store_neutral,
    world,
)
from support.planner import Clock
from support.processes import Lives

ID = "r/0/pay"
STAFF = {"ann": "manager", "bo": "manager", "lee": "lead", "liz": "lead"}
HOURS = 3600


def policy(**rule: Any) -> ApprovalPolicy:
    """Ask two persons about each payment, or as the rule says."""
    asked = {"plugin": "shop", "function": "pay", "action": "ask", "quorum": 2}
    return ApprovalPolicy.from_dict({"default": "allow", "rules": [{**asked, **rule}]})


TWO = policy()
ESCALATED = policy(
    roles=["manager"], escalates_in=4 * HOURS, escalates_to=["lead"], expires_in=86_400
)


def of_staff(request: DecisionRequest) -> bool:
    """Let those decide whose name is vouched for, and who have one of the roles."""
    roles = () if request.call is None else request.call.roles
    return not roles or (request.verified and STAFF.get(request.by) in roles)


async def drive(
    store: str,
    tmp_path: Path,
    run_id: str = "r",
    *,
    asks: ApprovalPolicy = TWO,
    script: Any = pays,
    authorize: Any = None,
    **options: Any,
) -> FunctionCallingStepwisePlannerResult:
    """Drive a run to its next pause or end."""
    planner, kernel = world(
        tmp_path / "effects", script, interceptors=[asks], **options
    )
    async with open_runs(
        store, clock=options.get("clock"), authorize=authorize, poll_seconds=0.01
    ) as runs:
        return await (await runs.start(planner, kernel, GOAL, run_id=run_id)).result()


def voting(store: str, **options: Any) -> Any:
    """Open the approvals of persons who have signed in."""
    return Approvals.connect(store, **{"verified": True, **options})


async def waiting(store: str, clock: Clock | None = None) -> PendingApproval:
    """Show the one call that waits."""
    async with Approvals.connect(store, clock=clock) as approvals:
        (item,) = await approvals.pending()
        assert await approvals.show(item.id) == item
    return item


def decided_in(result: FunctionCallingStepwisePlannerResult) -> CallDecided:
    """Return the last decision on a call in a run's journal."""
    return [fact for fact in result.facts if isinstance(fact, CallDecided)][-1]


# Votes


async def test_a_call_runs_once_as_many_persons_have_approved_it(
    store: str, tmp_path: Path
) -> None:
    """Each vote counts, the list says how many there are, and the journal names all of them."""
    await drive(store, tmp_path)
    assert (await waiting(store)).tally == "0 of 2"

    async with voting(store) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
        item = await waiting(store)
        assert (item.tally, item.status, item.quorum) == ("1 of 2: ann", "open", 2)
        assert (await drive(store, tmp_path)).status == "paused"
        assert effects_in(tmp_path / "effects") == []
        assert (await waiting(store)).tally == "1 of 2: ann"
        assert await approvals.decide(ID, Approve(by="bo"))

    ended = await drive(store, tmp_path)
    assert ended.status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]
    fact = decided_in(ended)
    assert (fact.votes, fact.by) == (("ann", "bo"), "ann, bo")
    async with Approvals.connect(store) as approvals:
        closed = await approvals.show(ID)
    assert closed.tally == "2 of 2: ann, bo"
    assert closed.decision is not None
    assert (closed.decision.kind, closed.decision.by) == ("approve", "ann, bo")


@on_sqlite
async def test_a_person_counts_once(store: str, tmp_path: Path) -> None:
    """A second vote of one person is refused by name, and kept with the refused decisions."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        with pytest.raises(ApprovalRefusedError, match="'ann' has: one person counts"):
            await approvals.decide(ID, Approve(by="ann"))
    item = await waiting(store)
    assert item.tally == "1 of 2: ann"
    assert [one.by for one in item.refused] == ["ann"]


@store_neutral(
    "spelled",
    ["Ann", " ann", "ANN", "\uff41nn", "a\u200bnn", "ann\ufe0f", "a\xadnn\x00"],
)
async def test_a_person_counts_once_under_every_spelling(
    spelled: str, store: str, tmp_path: Path
) -> None:
    """Doors that sign people in may write one name in capitals or with blanks; the worker counts so, too."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        item = await approvals.show(ID)
        assert not await approvals.may_decide(item, by=spelled)
        assert await approvals.may_decide(item, by="bo")
        with pytest.raises(ApprovalRefusedError, match="one person counts once"):
            await approvals.decide(ID, Approve(by=spelled))
        # As a row that was altered.
        await approvals._store.decide(
            ID,
            write_decision(Approve(by="two"), verified=True, votes=["ann", spelled]),
            fingerprint=item.fingerprint,
            at=item.asked_at.timestamp(),
        )
    assert (await drive(store, tmp_path)).status == "paused"
    assert (await waiting(store)).tally == "0 of 2"
    assert effects_in(tmp_path / "effects") == []


@on_sqlite
async def test_a_vote_needs_a_verified_name(store: str, tmp_path: Path) -> None:
    """A name that is only typed, or none, could be one person's second; a denial by it counts."""
    await drive(store, tmp_path)
    async with voting(store, verified=False) as approvals:
        with pytest.raises(NotAuthorizedError, match="'ann' is only typed"):
            await approvals.decide(ID, Approve(by="ann"))
    async with voting(store) as approvals:
        for nobody in (None, " ", "\u200b"):
            with pytest.raises(NotAuthorizedError, match="nobody vouches for"):
                await approvals.decide(ID, Approve(by=nobody))
    assert (await waiting(store)).tally == "0 of 2"
    async with voting(store, verified=False) as approvals:
        assert await approvals.decide(ID, Deny("No.", by="ann"))


@on_sqlite
async def test_the_hook_is_asked_about_each_vote(store: str, tmp_path: Path) -> None:
    """A person without the role has no vote, and the worker asks about all who voted once more."""
    asks = policy(roles=["manager"])
    await drive(store, tmp_path, asks=asks, authorize=of_staff)
    heard: list[tuple[str, bool]] = []

    def hears(request: DecisionRequest) -> bool:
        heard.append((request.by, request.verified))
        return of_staff(request)

    async with voting(store, authorize=of_staff) as approvals:
        with pytest.raises(NotAuthorizedError):
            await approvals.decide(ID, Approve(by="lee"))
        await approvals.decide(ID, Approve(by="ann"))
        await approvals.decide(ID, Approve(by="bo"))
    planner, kernel = world(tmp_path / "effects", pays, interceptors=[asks])
    async with open_runs(store, authorize=(of_staff, hears)) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="r")
        assert (await handle.result()).status == "answered"
    assert heard == [("ann", True), ("bo", True)]


@on_sqlite
async def test_votes_that_the_worker_refuses_start_anew(
    store: str, tmp_path: Path
) -> None:
    """A person who has lost the role meanwhile does not count; the call waits again, without votes."""
    asks = policy(roles=["manager"])
    await drive(store, tmp_path, asks=asks, authorize=of_staff)
    staff = {**STAFF}

    def of_these(request: DecisionRequest) -> bool:
        roles = () if request.call is None else request.call.roles
        return not roles or staff.get(request.by) in roles

    async with voting(store, authorize=of_staff) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        await approvals.decide(ID, Approve(by="bo"))
    del staff["ann"]
    both = (of_staff, of_these)
    assert (await drive(store, tmp_path, asks=asks, authorize=both)).status == "paused"
    item = await waiting(store)
    assert item.tally == "0 of 2"
    assert "'ann' may not decide" in item.problem
    assert effects_in(tmp_path / "effects") == []


@on_sqlite
async def test_one_denial_denies(store: str, tmp_path: Path) -> None:
    """Whoever approved before: the call does not run, and the journal names who denied it."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        assert await approvals.decide(ID, Deny("Too much.", by="bo"))
        assert not await approvals.decide(ID, Approve(by="cy"))
    fact = decided_in(await drive(store, tmp_path))
    assert (fact.verdict, fact.by, fact.votes) == ("deny", "bo", ())
    assert effects_in(tmp_path / "effects") == []


@on_sqlite
async def test_a_supplied_result_takes_one_person(store: str, tmp_path: Path) -> None:
    """Nothing runs then."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        assert await approvals.decide(ID, Supply("paid by hand", by="bo"))
    assert (await drive(store, tmp_path)).status == "answered"
    assert effects_in(tmp_path / "effects") == []


async def test_an_edit_voids_the_votes(store: str, tmp_path: Path) -> None:
    """The call waits with the new arguments and no vote; who edited it has one, as everybody."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        before = await approvals.show(ID)
        await approvals.decide(ID, Approve(by="ann"))
        assert await approvals.decide(ID, Approve({"amount": 4}, by="bo"))
        assert (await drive(store, tmp_path)).status == "paused"
        item = await waiting(store)
        assert (item.tally, dict(item.arguments)) == ("0 of 2", {"amount": 4})
        with pytest.raises(ApprovalRefusedError, match="other arguments"):
            await approvals.decide(
                ID, Approve(by="ann", fingerprint=before.fingerprint)
            )
        await approvals.decide(ID, Approve(by="bo"))
        assert (await drive(store, tmp_path)).status == "paused"
        await approvals.decide(ID, Approve(by="ann"))
    assert decided_in(await drive(store, tmp_path)).votes == ("bo", "ann")
    assert effects_in(tmp_path / "effects") == ["pay 4"]


@on_sqlite
async def test_an_edit_that_changes_nothing_is_a_vote(
    store: str, tmp_path: Path
) -> None:
    """It approves the call as it is."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve({"amount": 5.0}, by="ann"))
        await approvals.decide(ID, Approve({"amount": 5}, by="bo"))
    assert decided_in(await drive(store, tmp_path)).votes == ("ann", "bo")
    assert effects_in(tmp_path / "effects") == ["pay 5"]


@on_sqlite
async def test_votes_expire_with_the_question(store: str, tmp_path: Path) -> None:
    """A vote that comes too late does not count, and the model reads that nobody decided."""
    clock = Clock()
    asks = policy(expires_in=60)
    await drive(store, tmp_path, asks=asks, clock=clock)
    async with voting(store, clock=clock) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        clock.seconds += 60
        with pytest.raises(ApprovalRefusedError, match="came too late"):
            await approvals.decide(ID, Approve(by="bo"))
    ended = await drive(store, tmp_path, asks=asks, clock=clock)
    assert decided_in(ended).reason == "expired"
    assert effects_in(tmp_path / "effects") == []


@on_sqlite
async def test_no_single_person_answers_later_calls(store: str, tmp_path: Path) -> None:
    """Neither a grant nor an approval for the rest of the run is a vote."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        with pytest.raises(ApprovalRefusedError, match="without always"):
            await approvals.decide(ID, Approve(by="ann", always="function"))
        with pytest.raises(ApprovalRefusedError, match="No grant can be given"):
            await approvals.decide(ID, Approve(by="ann"), grant=Grant(expires_in=HOURS))
        with pytest.raises(ApprovalRefusedError, match="No grant can be given"):
            await approvals.grant(ID, Deny(by="ann"), Grant(expires_in=HOURS))
    assert (await waiting(store)).tally == "0 of 2"


@on_sqlite
async def test_a_grant_for_another_question_does_not_answer_it(
    store: str, tmp_path: Path
) -> None:
    """What one person may answer alone is another question than what two have to."""
    alone = policy(quorum=1)
    await drive(store, tmp_path, "first", asks=alone)
    async with voting(store) as approvals:
        grant = Grant(expires_in=HOURS)
        await approvals.decide("first/0/pay", Approve(by="ann"), grant=grant)
    await drive(store, tmp_path, "first", asks=alone)
    await drive(store, tmp_path)
    assert (await waiting(store)).tally == "0 of 2"


@on_sqlite
async def test_decisions_that_are_given_to_the_run_are_no_votes(
    store: str, tmp_path: Path
) -> None:
    """Only a store counts votes: whoever resumes the run with a decision is one person."""
    await drive(store, tmp_path)
    planner, kernel = world(tmp_path / "effects", pays, interceptors=[TWO])
    async with open_runs(store) as runs:
        decisions = {"pay": Approve(by="ann")}
        handle = await runs.resume("r", planner, kernel, decisions=decisions)
        with pytest.raises(DecisionRefusedError, match="2 persons have to approve"):
            await handle.result()
    assert (await waiting(store)).tally == "0 of 2"


@on_sqlite
async def test_an_approver_is_one_person(store: str, tmp_path: Path) -> None:
    """A question for two is not put to it: the call waits."""
    asked: list[object] = []
    paused = await drive(store, tmp_path, approver=asked.append)
    assert (paused.status, asked) == ("paused", [])


@on_sqlite
async def test_others_are_asked_after_the_vote(store: str, tmp_path: Path) -> None:
    """A further question about the call is put once two have approved it, and its own terms hold."""
    planner, kernel = world(tmp_path / "effects", pays, interceptors=[TWO])
    boss = policy(quorum=1, roles=["lead"], reason="Boss?")
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, ApprovalFilter(boss))
    async with open_runs(store, authorize=of_staff, poll_seconds=0.01) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="r")
        await handle.result()
        async with voting(store, authorize=of_staff) as approvals:
            await approvals.decide(ID, Approve(by="ann"))
            await approvals.decide(ID, Approve(by="bo"))
            assert (await handle.result()).status == "paused"
            item = await waiting(store)
            assert (item.tally, item.prompt, item.roles) == ("", "Boss?", ("lead",))
            assert "ann, bo approved the call" in item.problem
            await approvals.decide(ID, Approve(by="lee"))
        ended = await handle.result()
    assert (decided_in(ended).by, decided_in(ended).votes) == ("lee", ())
    assert effects_in(tmp_path / "effects") == ["pay 5"]


async def test_votes_go_where_the_run_goes(store: str, tmp_path: Path) -> None:
    """An archive has those on what waits; in the other store one more decides."""
    first = str(tmp_path / "first.db")
    await drive(first, tmp_path)
    async with voting(first) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
    async with opened_store(first) as opened:
        text = await export_run(opened, "r")
    async with opened_store(store) as opened:
        await import_run(opened, text)
    assert (await waiting(store)).tally == "1 of 2: ann"
    async with voting(store) as approvals:
        assert await approvals.decide(ID, Approve(by="bo"))
    assert decided_in(await drive(store, tmp_path)).votes == ("ann", "bo")


# Several processes, and kills


async def test_a_vote_that_another_one_overtakes_is_counted_with_it(
    store: str, tmp_path: Path
) -> None:
    """While one person's vote is checked, the other's is stored: both count, and make the decision."""
    await drive(store, tmp_path)
    others = ["bo"]

    async def overtaken(request: DecisionRequest) -> bool:
        while others:
            async with voting(store) as approvals:
                assert await approvals.decide(ID, Approve(by=others.pop()))
        return True

    async with voting(store, authorize=overtaken) as approvals:
        assert await approvals.decide(ID, Approve(by="ann"))
    assert decided_in(await drive(store, tmp_path)).votes == ("bo", "ann")


@on_sqlite
async def test_a_vote_that_an_edit_overtakes_is_none(
    store: str, tmp_path: Path
) -> None:
    """It was given for other arguments than now wait."""
    await drive(store, tmp_path)
    edits = [Approve({"amount": 4}, by="bo")]
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve(by="cy"))

    async def overtaken(request: DecisionRequest) -> bool:
        while edits:
            async with voting(store) as approvals:
                assert await approvals.decide(ID, edits.pop())
            await drive(store, tmp_path)
        return True

    async with voting(store, authorize=overtaken) as approvals:
        assert not await approvals.decide(ID, Approve(by="ann"))
    item = await waiting(store)
    assert (item.tally, dict(item.arguments)) == ("0 of 2", {"amount": 4})


def vote_at_once(store: str, name: str, start: Any) -> None:
    """Vote as a person of a process of its own, at the same moment as the others."""

    async def vote() -> None:
        async with voting(store) as approvals:
            start.wait()
            assert await approvals.decide(ID, Approve(by=name))

    asyncio.run(vote())


async def test_the_last_two_votes_at_once_start_the_call_once(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """Of six persons in six processes at once each vote counts that comes before the quorum, and the call runs once."""
    await drive(store, tmp_path, asks=policy(quorum=6))
    start = multiprocessing.get_context("forkserver").Barrier(6)
    people = [f"p{number}" for number in range(6)]
    voters = [lives.begin(vote_at_once, store, name, start) for name in people]
    for process in voters:
        process.join(120)
        assert process.exitcode == 0

    ended = await drive(store, tmp_path, asks=policy(quorum=6))
    assert sorted(decided_in(ended).votes) == people
    assert effects_in(tmp_path / "effects") == ["pay 5"]


def pay_life(store: str, tmp_path: Path) -> None:
    """Drive the run in a process of its own."""
    asyncio.run(drive(store, tmp_path))


@pytest.mark.parametrize("point", ["after_pause", "after_decision"])
async def test_votes_survive_a_kill(
    point: str, store: str, tmp_path: Path, lives: Lives
) -> None:
    """The worker is killed before the votes, or after it took them: they count once."""
    if point == "after_decision":
        await drive(store, tmp_path)
    else:
        assert lives.live(pay_life, store, tmp_path, PLANNER_EXT_CRASH_AT=point) == -9
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        await approvals.decide(ID, Approve(by="bo"))
    if point == "after_decision":
        assert lives.live(pay_life, store, tmp_path, PLANNER_EXT_CRASH_AT=point) == -9
    ended = await drive(store, tmp_path)
    assert decided_in(ended).votes == ("ann", "bo")
    assert effects_in(tmp_path / "effects") == ["pay 5"]


@on_sqlite
async def test_a_call_in_doubt_is_voted_on_once_more(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """Whether it runs again takes as many persons; that it was done says one."""
    await drive(store, tmp_path)
    async with voting(store) as approvals:
        await approvals.decide(ID, Approve(by="ann"))
        await approvals.decide(ID, Approve(by="bo"))
        killed = lives.live(
            pay_life, store, tmp_path, PLANNER_EXT_CRASH_AT="after_intent"
        )
        assert killed == -9
        assert (await drive(store, tmp_path)).status == "paused"
        item = await waiting(store)
        assert (item.in_doubt, item.tally) == (True, "0 of 2")
        await approvals.decide(item.id, Approve(by="ann"))
        assert (await drive(store, tmp_path)).status == "paused"
        await approvals.decide(item.id, Approve(by="cy"))
    ended = await drive(store, tmp_path)
    assert decided_in(ended).votes == ("ann", "cy")
    assert effects_in(tmp_path / "effects") == ["pay 5"]


# Escalation


async def decide_as(store: str, clock: Clock, *names: str) -> None:
    """Let these persons of the staff approve the call, one after the other."""
    async with voting(store, clock=clock, authorize=of_staff) as approvals:
        for name in names:
            assert await approvals.decide(ID, Approve(by=name))


async def test_others_are_asked_once_it_has_waited(store: str, tmp_path: Path) -> None:
    """The roles change at that second, in every process, without a worker; those before may no longer decide."""
    clock = Clock()
    asks = policy(
        quorum=1, roles=["manager"], escalates_in=4 * HOURS, escalates_to=["lead"]
    )
    options: dict[str, Any] = {"asks": asks, "clock": clock, "authorize": of_staff}
    await drive(store, tmp_path, **options)
    async with RunsClient.connect(store, clock=clock) as client:
        clock.seconds += 4 * HOURS - 1
        assert (await waiting(store, clock)).roles == ("manager",)
        assert (await client.list())[0].waits_for == "shop-pay (manager)"
        clock.seconds += 1
        item = await waiting(store, clock)
        assert (item.roles, item.is_escalated) == (("lead",), True)
        assert (await client.list())[0].waits_for == "shop-pay (lead)"

    with pytest.raises(NotAuthorizedError, match="'ann' may not decide"):
        await decide_as(store, clock, "ann")
    await decide_as(store, clock, "lee")
    ended = await drive(store, tmp_path, **options)
    assert (ended.status, decided_in(ended).by) == ("answered", "lee")


@on_sqlite
async def test_a_decision_from_before_an_escalation_counts(
    store: str, tmp_path: Path
) -> None:
    """The worker takes it later, and asks whether its author was entitled when it was made."""
    clock = Clock()
    options: dict[str, Any] = {
        "asks": ESCALATED,
        "clock": clock,
        "authorize": of_staff,
    }
    await drive(store, tmp_path, **options)
    clock.seconds += 4 * HOURS - 1
    await decide_as(store, clock, "ann", "bo")
    clock.seconds += 1
    ended = await drive(store, tmp_path, **options)
    assert decided_in(ended).votes == ("ann", "bo")


@on_sqlite
async def test_a_vote_from_before_an_escalation_counts_if_the_new_roles_admit_its_giver(
    store: str, tmp_path: Path
) -> None:
    """A manager's vote ends there: two leads are needed, and the list says which vote is from before."""
    clock = Clock()
    options: dict[str, Any] = {
        "asks": ESCALATED,
        "clock": clock,
        "authorize": of_staff,
    }
    await drive(store, tmp_path, **options)
    await decide_as(store, clock, "ann")
    clock.seconds += 4 * HOURS
    assert (await waiting(store, clock)).tally == "0 of 2; before it was escalated: ann"
    await decide_as(store, clock, "lee")
    assert (await waiting(store, clock)).tally == "1 of 2: lee"
    await decide_as(store, clock, "liz")
    ended = await drive(store, tmp_path, **options)
    assert decided_in(ended).votes == ("lee", "liz")


@on_sqlite
async def test_a_vote_of_a_person_with_both_roles_holds(
    store: str, tmp_path: Path
) -> None:
    """One who may decide before and after counts with one vote."""
    clock = Clock()
    asks = policy(
        roles=["manager"], escalates_in=4 * HOURS, escalates_to=["manager", "lead"]
    )
    options: dict[str, Any] = {"asks": asks, "clock": clock, "authorize": of_staff}
    await drive(store, tmp_path, **options)
    await decide_as(store, clock, "ann")
    clock.seconds += 4 * HOURS
    await decide_as(store, clock, "lee")
    ended = await drive(store, tmp_path, **options)
    assert decided_in(ended).votes == ("ann", "lee")


@on_sqlite
async def test_an_escalated_question_has_no_grant(store: str, tmp_path: Path) -> None:
    """Those who are asked first would be passed over in later runs."""
    clock = Clock()
    asks = policy(
        quorum=1, roles=["manager"], escalates_in=4 * HOURS, escalates_to=["lead"]
    )
    await drive(store, tmp_path, asks=asks, clock=clock, authorize=of_staff)
    clock.seconds += 4 * HOURS
    async with voting(store, clock=clock, authorize=of_staff) as approvals:
        with pytest.raises(ApprovalRefusedError, match="was escalated"):
            await approvals.grant(ID, Approve(by="lee"), Grant(expires_in=HOURS))


@on_sqlite
async def test_an_escalated_question_has_no_answer_for_the_rest_of_the_run(
    store: str, tmp_path: Path
) -> None:
    """Those who are asked first would be passed over: the call waits again, and runs without ``always``."""
    clock = Clock()
    asks = policy(
        quorum=1, roles=["manager"], escalates_in=4 * HOURS, escalates_to=["lead"]
    )
    options: dict[str, Any] = {"asks": asks, "clock": clock, "authorize": of_staff}
    await drive(store, tmp_path, **options)
    clock.seconds += 4 * HOURS
    async with voting(store, clock=clock, authorize=of_staff) as approvals:
        assert await approvals.decide(ID, Approve(by="lee", always="function"))
    assert (await drive(store, tmp_path, **options)).status == "paused"
    assert "without always" in (await waiting(store, clock)).problem
    assert effects_in(tmp_path / "effects") == []

    await decide_as(store, clock, "lee")
    assert (await drive(store, tmp_path, **options)).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]


# Outside a store


@pytest.mark.parametrize(
    "asks", [TWO, policy(quorum=1, escalates_in=60, escalates_to=["lead"])]
)
async def test_it_needs_a_store(asks: ApprovalPolicy, tmp_path: Path) -> None:
    """A run that no store keeps is refused when it starts, at every door, and a filter when it is made."""
    planner, kernel = world(tmp_path / "effects", pays, interceptors=[asks])
    wanted = "quorum or an escalation"
    with pytest.raises(PlannerInvalidConfigurationError, match=wanted):
        await planner.invoke(kernel, GOAL)
    with pytest.raises(PlannerInvalidConfigurationError, match=wanted):
        ApprovalFilter(asks)
    session = ToolUseSession(kernel, interceptors=[asks])
    with pytest.raises(PlannerInvalidConfigurationError, match=wanted):
        await session.prompt("Pay.")
    handler = ToolCallHandler(kernel, interceptors=[asks])
    history = ChatHistory()
    history.add_user_message("Pay.")
    with pytest.raises(PlannerInvalidConfigurationError, match=wanted):
        await anext(handler.invoke(history))
    auto = FunctionChoiceBehavior.Auto()
    settings = PromptExecutionSettings(function_choice_behavior=auto)
    service = FunctionInvokingChatCompletion(kernel.get_service(), interceptors=[asks])
    with pytest.raises(PlannerInvalidConfigurationError, match=wanted):
        await service.get_chat_message_contents(history, settings, kernel=kernel)


async def test_a_quorum_behind_a_function_is_not_taken_for_one_yes(
    tmp_path: Path,
) -> None:
    """An interceptor that hides the policy cannot be refused at the start; no decision without votes is taken."""
    planner, kernel = world(
        tmp_path / "effects", pays, interceptors=[lambda call: TWO(call)]
    )
    paused = await planner.invoke(kernel, GOAL)
    assert paused.checkpoint is not None
    with pytest.raises(DecisionRefusedError, match="2 persons have to approve"):
        await planner.resume(kernel, paused.checkpoint, {"pay": Approve(by="ann")})
    assert effects_in(tmp_path / "effects") == []
