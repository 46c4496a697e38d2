"""Grants: a decision that answers the same question about later calls, in any run of the store."""

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.functions import KernelArguments

from planner_ext import ApprovalPolicy, Approve, Deny
from planner_ext.core.facts import CallDecided
from planner_ext.durable import (
    ApprovalRefusedError,
    Approvals,
    DecisionRequest,
    Grant,
    GrantRecord,
    NotAuthorizedError,
    RunNotice,
)
from planner_ext.hitl_manager import ArgumentPredicate, Defer, Supply
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from support.durable import (
    GOAL,
    check_history,
    effects_in,
    on_sqlite,
    open_runs,
    pays,
    turn,
    world,
)
from support.planner import Clock
from support.processes import Lives
from support.stock import every_result

HOUR = Grant(expires_in=3600)
YES = Approve(by="ann")


def paying(*amounts: object) -> Any:
    """A script that pays these amounts in one batch, then answers."""
    batch = calls(
        *(
            call("shop-pay", {"amount": amount}, id=f"pay{place}")
            for place, amount in enumerate(amounts)
        )
    )

    def script(request: ScriptedRequest) -> ScriptedReply:
        return [batch, say("Paid.")][turn(request)]

    return script


async def drive(
    store: str,
    tmp_path: Path,
    run_id: str,
    script: Any = pays,
    *,
    arguments: Any = None,
    authorize: Any = None,
    **options: Any,
) -> FunctionCallingStepwisePlannerResult:
    """Drive a run to its next pause or end."""
    planner, kernel = world(tmp_path / "effects", script, **options)
    async with open_runs(
        store, clock=options.get("clock"), authorize=authorize
    ) as runs:
        handle = await runs.start(
            planner, kernel, GOAL, run_id=run_id, arguments=arguments
        )
        return await handle.result()


async def give(
    store: str,
    grant: Grant = HOUR,
    decision: Any = YES,
    *,
    call: str = "first/0/pay",
    **options: Any,
) -> str:
    """Give a grant by hand."""
    async with Approvals.connect(store, **options) as approvals:
        return await approvals.grant(call, decision, grant)


async def grants(store: str, clock: Clock | None = None) -> list[GrantRecord]:
    async with Approvals.connect(store, clock=clock) as approvals:
        return await approvals.grants()


def by_grant(result: FunctionCallingStepwisePlannerResult) -> list[tuple[str, str]]:
    """List the verdict and author of each decision by a grant."""
    return [
        (fact.verdict, fact.by)
        for fact in result.facts
        if isinstance(fact, CallDecided) and fact.grant
    ]


async def test_a_grant_in_a_decision_answers_the_question_of_a_later_run(
    store: str, tmp_path: Path
) -> None:
    """The first run and a later one go on; the later decision names the author and the grant, and nobody is asked."""
    await drive(store, tmp_path, "first")
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide("first/0/pay", Approve(by="ann"), grant=HOUR)
        assert (await drive(store, tmp_path, "first")).status == "answered"

        later = await drive(store, tmp_path, "later")

        (grant,) = await approvals.grants()
        shown = await approvals.show("later/0/pay")
    assert later.status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5", "pay 5"]
    (decision,) = later.decisions
    assert (decision.kind, decision.by, decision.grant) == ("approve", "ann", grant.id)
    assert shown.decision is not None
    assert (shown.status, shown.decision.grant) == ("closed", grant.id)
    assert (grant.used, grant.used_for) == (1, "later/0/pay")
    assert (grant.decision.by, grant.decision.call) == ("ann", "first/0/pay")
    json.dumps(grant.as_dict())


@on_sqlite
async def test_a_grant_by_hand_does_not_decide_the_call(
    store: str, tmp_path: Path
) -> None:
    """It answers what is asked from then on; the call that it names still waits."""
    await drive(store, tmp_path, "first")
    await give(store)

    assert (await drive(store, tmp_path, "first")).status == "paused"
    assert (await drive(store, tmp_path, "later")).status == "answered"


@on_sqlite
async def test_a_decision_that_does_not_count_gives_no_grant(
    store: str, tmp_path: Path
) -> None:
    """Who is second with a decision and a grant changes nothing."""
    await drive(store, tmp_path, "first")
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide("first/0/pay", Deny("no", by="bo"))
        assert not await approvals.decide("first/0/pay", Approve(by="ann"), grant=HOUR)
        assert await approvals.grants() == []


async def test_a_standing_no_comes_before_a_yes(store: str, tmp_path: Path) -> None:
    """The model reads its reason; the call does not run, and the older yes is not used."""
    await drive(store, tmp_path, "first")
    await give(store)
    await give(store, HOUR, Deny("stocktaking", by="bo"))

    later = await drive(store, tmp_path, "later")

    assert by_grant(later) == [("deny", "bo")]
    assert effects_in(tmp_path / "effects") == []
    assert later.chat_history is not None
    heard = [
        str(item.result)
        for message in later.chat_history.messages
        if message.role == "tool"
        for item in every_result(message)
    ]
    assert heard == ["The call was refused and did not run: stocktaking"]
    assert [(one.decision.kind, one.used) for one in await grants(store)] == [
        ("deny", 1),
        ("approve", 0),
    ]


async def test_its_uses_end(store: str, tmp_path: Path) -> None:
    """Of three calls in one batch a grant for two decides two; the third waits, and a person decides it."""
    await drive(store, tmp_path, "first")
    await give(store, Grant(expires_in=3600, uses=2))

    later = await drive(store, tmp_path, "later", paying(1, 2, 3))

    assert later.status == "paused"
    assert await grants(store) == []
    assert len(later.pending) == 1
    async with Approvals.connect(store) as approvals:
        (item,) = await approvals.pending("later")
        assert await approvals.decide(item.id, Approve(by="cy"))
    ended = await drive(store, tmp_path, "later", paying(1, 2, 3))
    assert sorted(effects_in(tmp_path / "effects")) == ["pay 1", "pay 2", "pay 3"]
    check_history(ended, ["pay0", "pay1", "pay2"])


@on_sqlite
async def test_its_lifetime_ends(store: str, tmp_path: Path) -> None:
    """What is asked after it waits for a person."""
    clock = Clock()
    await drive(store, tmp_path, "first", clock=clock)
    await give(store, clock=clock)

    clock.seconds += 3599
    assert (await drive(store, tmp_path, "in-time", clock=clock)).status == "answered"
    clock.seconds += 1
    assert (await drive(store, tmp_path, "late", clock=clock)).status == "paused"
    assert await grants(store, clock) == []


async def test_a_revoked_grant_answers_nothing(store: str, tmp_path: Path) -> None:
    """It is no longer listed; one that does not hold cannot be revoked, and is named."""
    await drive(store, tmp_path, "first")
    grant = await give(store)
    async with Approvals.connect(store) as approvals:
        await approvals.revoke(grant, by="bo")
        assert await approvals.grants() == []
        with pytest.raises(ApprovalRefusedError, match=f"No grant '{grant}' holds"):
            await approvals.revoke(grant, by="cy")

    assert (await drive(store, tmp_path, "later")).status == "paused"


@on_sqlite
async def test_its_conditions_are_on_the_validated_arguments(
    store: str, tmp_path: Path
) -> None:
    """The function's values are compared: "4" for an integer is 4; what is above the limit waits."""
    await drive(store, tmp_path, "first")
    await give(
        store, Grant(expires_in=60, arguments={"amount": ArgumentPredicate(le=4)})
    )

    assert (await drive(store, tmp_path, "a", paying("4"))).status == "answered"
    assert (await drive(store, tmp_path, "b", paying("40"))).status == "paused"
    assert effects_in(tmp_path / "effects") == ["pay 4"]


@on_sqlite
async def test_a_condition_that_cannot_be_evaluated_fails_safe(
    store: str, tmp_path: Path
) -> None:
    """On an argument that is missing it does not hold for a yes, and holds for a no."""
    await drive(store, tmp_path, "first")
    terms = Grant(expires_in=60, arguments={"colour": ArgumentPredicate(equals="red")})

    await give(store, terms)
    assert (await drive(store, tmp_path, "a")).status == "paused"
    await give(store, terms, Deny(by="bo"))
    assert by_grant(await drive(store, tmp_path, "b")) == [("deny", "bo")]


@on_sqlite
async def test_it_may_be_for_the_runs_of_one_tenant(store: str, tmp_path: Path) -> None:
    """Conditions on the application's arguments of a run; a run without them waits."""
    await drive(store, tmp_path, "first")
    await give(
        store,
        Grant(expires_in=60, run_arguments={"tenant": ArgumentPredicate(equals="a")}),
    )

    for run_id, arguments, status in [
        ("a", KernelArguments(tenant="a"), "answered"),
        ("b", KernelArguments(tenant="b"), "paused"),
        ("c", None, "paused"),
    ]:
        result = await drive(store, tmp_path, run_id, arguments=arguments)
        assert result.status == status, run_id


@on_sqlite
async def test_another_question_is_asked(store: str, tmp_path: Path) -> None:
    """A grant for a mark's question answers neither a policy's, nor an interceptor's, about the same function."""
    await drive(store, tmp_path, "first")
    await give(store)
    rule = {"function": "pay", "action": "ask"}
    policy = ApprovalPolicy.from_dict({"default": "allow", "rules": [rule]})

    for run_id, interceptor in [("a", policy), ("b", lambda _: Defer("Really?"))]:
        result = await drive(store, tmp_path, run_id, interceptors=[interceptor])
        assert result.status == "paused"
    assert [one.used for one in await grants(store)] == [0]


def of_roles(request: DecisionRequest) -> bool:
    """Ann is a clerk, Lea a lead; other actions are theirs, too."""
    staff = {"ann": "clerk", "lea": "lead"}
    roles = () if request.call is None else request.call.roles
    return not roles or staff.get(request.by) in roles


def asking(*roles: str) -> ApprovalPolicy:
    rule = {"function": "pay", "action": "ask", "roles": [*roles]}
    return ApprovalPolicy.from_dict({"default": "deny", "rules": [rule]})


@on_sqlite
async def test_who_may_give_and_revoke_is_asked_of_authorize(
    store: str, tmp_path: Path
) -> None:
    """Under the actions grant and revoke, with the roles of the question; without a hook nobody may."""
    options = {"interceptors": [asking("clerk")], "authorize": of_roles}
    await drive(store, tmp_path, "first", **options)

    for by, hook in [("lea", of_roles), ("ann", None)]:
        with pytest.raises(NotAuthorizedError, match=f"'{by}' may not grant"):
            await give(store, HOUR, Approve(by=by), authorize=hook)
    grant = await give(store, authorize=of_roles)
    for by, hook in [("lea", of_roles), ("ann", None)]:
        async with Approvals.connect(store, authorize=hook) as approvals:
            with pytest.raises(NotAuthorizedError, match=f"'{by}' may not revoke"):
                await approvals.revoke(grant, by=by)

    assert (await drive(store, tmp_path, "later", **options)).status == "answered"
    async with Approvals.connect(store, authorize=of_roles) as approvals:
        await approvals.revoke(grant, by="ann")


@on_sqlite
async def test_it_is_for_the_roles_of_its_question(store: str, tmp_path: Path) -> None:
    """A clerk's grant does not answer what leads are asked."""
    options: dict[str, Any] = {"authorize": of_roles}
    await drive(store, tmp_path, "first", interceptors=[asking("clerk")], **options)
    await give(store, authorize=of_roles)

    later = await drive(
        store, tmp_path, "later", interceptors=[asking("lead")], **options
    )

    assert later.status == "paused"
    assert [one.used for one in await grants(store)] == [0]


@on_sqlite
async def test_a_use_that_the_workers_hook_refuses_is_none(
    store: str, tmp_path: Path
) -> None:
    """Who gave it has left: the call waits for a person, once, and the use is not counted."""
    allowed = {"ann"}

    def hook(request: DecisionRequest) -> bool:
        return request.by in allowed

    options = {"authorize": hook}
    await drive(store, tmp_path, "first", **options)
    await give(store, Grant(expires_in=60, uses=1), authorize=hook)
    allowed.clear()

    later = await drive(store, tmp_path, "later", **options)

    assert (later.status, by_grant(later)) == ("paused", [])
    async with Approvals.connect(store) as approvals:
        (item,) = await approvals.pending("later")
        assert "'ann' may not decide" in item.problem
    (grant,) = await grants(store)
    assert grant.used == 0
    assert item.refused[0].grant == grant.id


@on_sqlite
async def test_a_grant_that_is_used_up_can_be_revoked(
    store: str, tmp_path: Path
) -> None:
    """Its last use may be given back by a worker that refuses it: a revoked grant does not come back with it."""
    allowed = {"ann"}

    def hook(request: DecisionRequest) -> bool:
        return request.action == "revoke" or request.by in allowed

    given: list[str] = []

    async def revokes(request: DecisionRequest) -> bool:
        if request.action == "decide" and given:
            allowed.clear()
            assert await grants(store) == []
            async with Approvals.connect(store, authorize=hook) as approvals:
                await approvals.revoke(given.pop(), by="ann")
        return True

    both = (revokes, hook)
    await drive(store, tmp_path, "first", authorize=both)
    given.append(await give(store, Grant(expires_in=60, uses=1), authorize=hook))
    assert (await drive(store, tmp_path, "later", authorize=both)).status == "paused"
    assert await grants(store) == []
    assert (await drive(store, tmp_path, "third", authorize=both)).status == "paused"


@on_sqlite
async def test_an_edited_call_is_a_new_question(store: str, tmp_path: Path) -> None:
    """A person's edit raises the lead's question: a lead's grant answers it by the edited arguments."""

    def of_amount(item: Any) -> Defer | None:
        return Defer("Lead?", roles=("lead",)) if item.arguments["amount"] > 9 else None

    options: dict[str, Any] = {
        "interceptors": [of_amount],
        "authorize": of_roles,
    }
    await drive(store, tmp_path, "first", paying(50), **options)
    terms = Grant(expires_in=60, arguments={"amount": ArgumentPredicate(le=20)})
    await give(store, terms, Approve(by="lea"), call="first/0/pay0", authorize=of_roles)
    for run_id, amount, status in [("a", 20, "answered"), ("b", 21, "paused")]:
        await drive(store, tmp_path, run_id, **options)
        edit = Approve(arguments={"amount": amount}, by="ann")
        async with Approvals.connect(store, authorize=of_roles) as approvals:
            assert await approvals.decide(f"{run_id}/0/pay", edit)
        assert (await drive(store, tmp_path, run_id, **options)).status == status
    assert effects_in(tmp_path / "effects") == ["pay 20"]


@on_sqlite
async def test_what_no_grant_can_answer_is_refused_by_name(
    store: str, tmp_path: Path
) -> None:
    """An edit, a supplied result, and what is no grant; the call still waits."""
    await drive(store, tmp_path, "first")
    async with Approvals.connect(store) as approvals:
        for decision in (Approve(arguments={"amount": 1}, by="ann"), Supply("x")):
            with pytest.raises(ApprovalRefusedError, match="is of one call"):
                await approvals.decide("first/0/pay", decision, grant=HOUR)
        with pytest.raises(ApprovalRefusedError, match="Expected a Grant"):
            await approvals.grant("first/0/pay", Approve(), None)
        assert (await approvals.show("first/0/pay")).status == "open"
        assert await approvals.grants() == []


@on_sqlite
async def test_a_question_of_the_model_and_a_call_in_doubt_have_no_grant(
    store: str, tmp_path: Path
) -> None:
    """They are decided one by one."""
    await drive(store, tmp_path, "first")
    with closing(sqlite3.connect(store)) as rows, rows:
        text = rows.execute("SELECT call FROM planner_approvals").fetchone()[0]
        doubt = json.dumps({**json.loads(text), "in_doubt": True})
        rows.execute("UPDATE planner_approvals SET call = ?", (doubt,))
    with pytest.raises(ApprovalRefusedError, match="decided one by one"):
        await give(store)


@on_sqlite
@pytest.mark.parametrize("column", ["terms", "decision", "given_at", "expires_at"])
async def test_a_damaged_grant_answers_nothing_and_stops_no_run(
    column: str, store: str, tmp_path: Path
) -> None:
    """It is left out and logged; the call waits for a person."""
    await drive(store, tmp_path, "first")
    await give(store)
    with closing(sqlite3.connect(store)) as rows, rows:
        rows.execute(f"UPDATE planner_grants SET {column} = 'odd'")

    assert (await drive(store, tmp_path, "later")).status == "paused"
    assert await grants(store) == []


async def test_a_pause_in_which_nobody_is_asked_is_not_told(
    store: str, tmp_path: Path
) -> None:
    """Notices are of the run that waits for a person, and not of the one that a grant answered."""
    await drive(store, tmp_path, "first")
    await give(store, Grant(expires_in=60, uses=1))
    heard: asyncio.Queue[RunNotice] = asyncio.Queue()
    planner, kernel = world(tmp_path / "effects", pays)
    async with open_runs(store, poll_seconds=0.01, on_paused=heard.put) as runs:
        for run_id in ("answered", "waits"):
            handle = await runs.start(planner, kernel, GOAL, run_id=run_id)
            await handle.result()
        told = await asyncio.wait_for(heard.get(), 120)
    assert (told.run_id, heard.empty()) == ("waits", True)


async def pay_in(store: str, effects: Path, run_ids: Sequence[str]) -> None:
    """Drive runs that each pay once, as far as they go."""
    planner, kernel = world(effects, pays)
    async with open_runs(store, poll_seconds=0.01) as runs:
        handles = [
            await runs.start(planner, kernel, GOAL, run_id=name) for name in run_ids
        ]
        await asyncio.gather(*(handle.result() for handle in handles))


def paying_life(store: str, effects: Path, run_ids: Sequence[str]) -> None:
    """Drive runs in a process of their own."""
    asyncio.run(pay_in(store, effects, run_ids))


async def test_its_uses_are_exact_with_two_workers(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """Of twenty runs of two processes at once, seven are answered by a grant for seven; the others wait."""
    await drive(store, tmp_path, "first")
    await give(store, Grant(expires_in=3600, uses=7))
    names = [f"r{number}" for number in range(20)]

    working = [
        lives.begin(paying_life, store, tmp_path / "effects", part)
        for part in (names[::2], names[1::2])
    ]
    for process in working:
        process.join(120)
        assert process.exitcode == 0

    assert await grants(store) == []
    assert effects_in(tmp_path / "effects") == ["pay 5"] * 7
    async with Approvals.connect(store) as approvals:
        assert await approvals.count() == 14


@pytest.mark.parametrize("point", ["after_pause", "after_decision"])
async def test_a_use_is_counted_once_over_a_kill(
    point: str, store: str, tmp_path: Path, lives: Lives
) -> None:
    """The worker is killed after the pause that the grant ended, or after it took the decision: one use, one effect."""
    await drive(store, tmp_path, "first")
    await give(store, Grant(expires_in=3600, uses=2))
    effects = tmp_path / "effects"

    killed = lives.live(paying_life, store, effects, ["r"], PLANNER_EXT_CRASH_AT=point)
    assert killed == -9
    assert (await drive(store, tmp_path, "r")).status == "answered"

    (grant,) = await grants(store)
    assert (grant.used, effects_in(effects)) == (1, ["pay 5"])
    assert grant.used_for == "r/0/pay"
