"""A paused run is a row: listed, shown and decided from a process that knows neither kernel nor functions."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve, Deny
from planner_ext.core.facts import CallDecided
from planner_ext.durable import ApprovalRefusedError, Approvals, PendingApproval
from planner_ext.durable.store import open_database
from planner_ext.hitl_manager import ApprovalSettings, Defer, Supply
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult
from planner_ext.testing import call, calls, say
from support.durable import (
    GOAL,
    deciding_life,
    effects_in,
    on_sqlite,
    open_runs,
    pays,
    store_neutral,
    world,
)
from support.planner import Clock
from support.processes import Lives
from support.stock import every_result


async def drive(
    store: str, tmp_path: Path, **options: Any
) -> FunctionCallingStepwisePlannerResult:
    """Let a worker live for one activation of the run."""
    planner, kernel = world(tmp_path / "effects", pays, **options)
    async with open_runs(store, clock=options.get("clock")) as runs:
        return await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()


async def pending(store: str, clock: Clock | None = None) -> list[PendingApproval]:
    async with Approvals.connect(store, clock=clock) as approvals:
        return await approvals.pending()


async def test_a_run_that_waits_is_decided_while_no_worker_lives(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """Paused, decided by another process, finished by a later worker; the second decision changes nothing."""
    paused = await drive(store, tmp_path)
    assert (paused.status, effects_in(tmp_path / "effects")) == ("paused", [])

    report = tmp_path / "report"
    assert lives.live(deciding_life, store, report) == 0
    told = json.loads(report.read_text())
    result = await drive(store, tmp_path)

    assert told == {
        "id": "order-7/0/pay",
        "arguments": {"amount": 5},
        "won": [True, False],
    }
    assert (result.status, effects_in(tmp_path / "effects")) == ("answered", ["pay 5"])
    decided = [
        fact for fact in result.facts if isinstance(fact, CallDecided) and fact.person
    ]
    assert [(fact.by, fact.verdict) for fact in decided] == [("ann", "run")]


@on_sqlite
async def test_what_waits_is_shown_exactly_as_it_will_run(
    store: str, tmp_path: Path
) -> None:
    """Function, arguments, prompt, goal, run and fingerprint: those of the paused result."""
    paused = await drive(store, tmp_path)

    (item,) = await pending(store)

    assert item.id == "order-7/0/pay"
    assert (item.run_id, item.goal, item.prompt) == ("order-7", GOAL, "Really?")
    assert (item.fully_qualified_name, dict(item.arguments)) == (
        "shop-pay",
        {"amount": 5},
    )
    assert item.fingerprint == paused.pending[0].fingerprint
    assert not item.in_doubt


@store_neutral(
    ("decision", "done", "heard"),
    [
        (Approve(arguments={"amount": 3}, by="ann"), ["pay 3"], "done pay 3"),
        (
            Deny("too much", by="ann"),
            [],
            "The call was refused and did not run: too much",
        ),
        (Supply("It was paid yesterday.", by="ann"), [], "It was paid yesterday."),
    ],
)
async def test_each_decision_reaches_the_run(
    decision, done: list[str], heard: str, store: str, tmp_path: Path
) -> None:
    """An edit runs as edited, a denial and a supplied result are what the model reads."""
    await drive(store, tmp_path)
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide("order-7/0/pay", decision)

    result = await drive(store, tmp_path)

    assert effects_in(tmp_path / "effects") == done
    assert result.chat_history is not None
    assert heard in [
        str(item.result)
        for m in result.chat_history.messages
        if m.role == "tool"
        for item in every_result(m)
    ]
    assert await pending(store) == []


@on_sqlite
async def test_an_edit_that_does_not_fit_is_refused_when_it_is_made(
    store: str, tmp_path: Path
) -> None:
    """The row has the schema of the function's parameters: the refusal names the argument, the call still waits."""
    await drive(store, tmp_path)
    (item,) = await pending(store)
    schema = {
        "type": "object",
        "properties": {"amount": {"type": "integer"}},
        "required": ["amount"],
        "description": "Pays.",
    }
    assert item.parameters == schema

    async with Approvals.connect(store) as approvals:
        for arguments, problem in [
            ({"amount": "all"}, "\"amount\": 'all' is not of type 'integer'"),
            ({}, '"amount" is missing'),
            ({"amount": 3, "to": "bo"}, '"to" is not a parameter; there are: amount'),
        ]:
            with pytest.raises(
                ApprovalRefusedError, match=re.escape(f"do not fit shop-pay: {problem}")
            ):
                await approvals.decide(item.id, Approve(arguments=arguments, by="ann"))
        shown = await approvals.show(item.id)
        assert (shown.status, [(one.by, one.kind) for one in shown.refused]) == (
            "open",
            [("ann", "approve")] * 3,
        )
        assert await approvals.decide(
            item.id, Approve(arguments={"amount": "3"}, by="ann")
        )

    assert (await drive(store, tmp_path)).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 3"]


@on_sqlite
async def test_an_edit_that_the_function_does_not_take_is_asked_for_again(
    store: str, tmp_path: Path
) -> None:
    """What the schema does not say is refused by the worker: the call still waits, and says why."""
    await drive(store, tmp_path)
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide(
            "order-7/0/pay", Approve(arguments={"amount": None}, by="ann")
        )

    assert (await drive(store, tmp_path)).status == "paused"

    (item,) = await pending(store)
    assert '"amount" must be integer' in item.problem
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide(item.id, Approve(by="ann"))
    assert (await drive(store, tmp_path)).status == "answered"


async def test_a_question_that_expired_cannot_be_decided(
    store: str, tmp_path: Path
) -> None:
    """It is not listed, a decision is refused by name, and the worker tells the model so."""
    clock = Clock()
    options = {
        "clock": clock,
        "approval": ApprovalSettings(expires_in=60),
        "interceptors": [lambda _: Defer()],
    }
    await drive(store, tmp_path, **options)
    (item,) = await pending(store, clock)

    clock.seconds += 60

    assert await pending(store, clock) == []
    async with Approvals.connect(store, clock=clock) as approvals:
        with pytest.raises(
            ApprovalRefusedError, match="came too late: the question expired"
        ):
            await approvals.decide(item.id, Approve(by="ann"))
        result = await drive(store, tmp_path, **options)
        with pytest.raises(
            ApprovalRefusedError, match="came too late: the question expired"
        ):
            await approvals.decide(item.id, Approve(by="ann"))
    assert (result.status, effects_in(tmp_path / "effects")) == ("answered", [])
    assert [fact.reason for fact in result.facts if isinstance(fact, CallDecided)] == [
        "",
        "expired",
    ]


async def test_a_worker_notices_what_expired(store: str, tmp_path: Path) -> None:
    """A worker that looks for work finds the run without a request, and not before its time."""
    clock = Clock()
    options = {"clock": clock, "interceptors": [lambda _: Defer(expires_in=60)]}
    await drive(store, tmp_path, **options)
    planner, kernel = world(tmp_path / "effects", pays, **options)
    async with open_runs(store, clock=clock) as runs:
        assert await runs.recover(planner, kernel) == []
        clock.seconds += 60
        (handle,) = await runs.recover(planner, kernel)
        assert (await handle.result()).status == "answered"


async def test_a_decision_made_in_time_counts_though_it_is_taken_late(
    store: str, tmp_path: Path
) -> None:
    """A worker that lives again after the question expired takes what was decided before."""
    clock = Clock()
    options = {"clock": clock, "interceptors": [lambda _: Defer(expires_in=60)]}
    await drive(store, tmp_path, **options)
    async with Approvals.connect(store, clock=clock) as approvals:
        assert await approvals.decide("order-7/0/pay", Approve(by="ann"))

    clock.seconds += 3600
    result = await drive(store, tmp_path, **options)

    assert (result.status, effects_in(tmp_path / "effects")) == ("answered", ["pay 5"])


@store_neutral(
    ("decision", "problem"),
    [
        (Approve(fingerprint="0" * 64), "given for another call or other arguments"),
        (Approve(arguments={"amount": float("nan")}), "can be written as JSON"),
        (Supply(object()), "can be written as JSON"),
        (Defer(), "Expected Approve, Deny or Supply"),
        (Approve(always="forever"), "always must be"),  # pyright: ignore[reportArgumentType]  # junk, on purpose
    ],
)
async def test_a_decision_that_cannot_be_taken_is_refused_by_name(
    decision, problem: str, store: str, tmp_path: Path
) -> None:
    """Another fingerprint, values other than JSON's and anything but a decision leave the call waiting."""
    await drive(store, tmp_path)
    async with Approvals.connect(store) as approvals:
        with pytest.raises(ApprovalRefusedError, match=problem):
            await approvals.decide("order-7/0/pay", decision)
        assert len(await approvals.pending()) == 1


async def test_an_unknown_call_is_refused_by_name(store: str, tmp_path: Path) -> None:
    """An id that never waited is an error, not a lost race."""
    await drive(store, tmp_path)
    async with Approvals.connect(store) as approvals:
        with pytest.raises(
            ApprovalRefusedError,
            match="No call with the id 'order-7/9/pay' ever waited",
        ):
            await approvals.decide("order-7/9/pay", Approve())


async def test_an_altered_row_is_not_shown(store: str, tmp_path: Path) -> None:
    """An approver neither sees nor decides other arguments than those that will run: the row's fingerprint tells."""
    await drive(store, tmp_path)
    database = await open_database(store)
    await database.transact(
        ("UPDATE planner_approvals SET call = replace(call, '5', '1')", {})
    )
    await database.close()

    assert await pending(store) == []
    async with Approvals.connect(store) as approvals:
        with pytest.raises(ApprovalRefusedError, match="'order-7/0/pay' was altered"):
            await approvals.decide("order-7/0/pay", Approve(by="ann"))


@store_neutral(
    "forged",
    ['{"schema":1,"kind":"eval"}', "os.system('x')", '{"schema":2,"kind":"deny"}'],
)
async def test_a_forged_decision_is_asked_for_again(
    forged: str, store: str, tmp_path: Path
) -> None:
    """A decision's row that was forged runs nothing; the call waits again, and says why."""
    await drive(store, tmp_path)
    database = await open_database(store)
    forge = "UPDATE planner_approvals SET status = 'decided', decided_at = 1, decision = :decision"
    await database.transact((forge, {"decision": forged}))
    await database.close()

    assert (await drive(store, tmp_path)).status == "paused"

    (item,) = await pending(store)
    assert item.problem
    assert effects_in(tmp_path / "effects") == []


async def test_decisions_come_one_by_one(store: str, tmp_path: Path) -> None:
    """Of two calls that wait, the one that is decided stays so; nothing runs before the other is."""
    both = calls(*(call("shop-pay", {"amount": 5}, id=name) for name in ("one", "two")))
    planner, kernel = world(
        tmp_path / "effects",
        lambda request: say("Paid.") if len(request.messages) > 1 else both,
    )
    async with (
        open_runs(store) as runs,
        Approvals.connect(store) as approvals,
    ):
        handle = await runs.start(planner, kernel, GOAL)
        await handle.result()
        one, two = await approvals.pending()
        assert await approvals.decide(one.id, Approve(by="ann"))
        paused = await handle.result()
        assert [waiting.id for waiting in paused.pending] == ["two"]
        assert [item.id for item in await approvals.pending()] == [two.id]
        assert not await approvals.decide(one.id, Deny("changed my mind", by="ann"))
        assert effects_in(tmp_path / "effects") == []
        assert await approvals.decide(two.id, Approve(by="bob"))
        assert (await handle.result()).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5", "pay 5"]


def test_an_approvers_process_does_not_import_semantic_kernel() -> None:
    """A process that only decides starts fast, and needs no kernel."""
    program = (
        "import sys; from planner_ext import Approve, Deny; from planner_ext.durable import Approvals; "
        "sys.exit('semantic_kernel' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_stores_are_imported_where_semantic_kernel_cannot_be() -> None:
    """Every module of the folder: what it needs of Semantic Kernel, the planner brings."""
    program = (
        "import importlib, pkgutil, sys; sys.modules['semantic_kernel'] = None; import planner_ext.durable as durable; "
        "names = [module.name for module in pkgutil.iter_modules(durable.__path__)]; assert 'postgres' in names; "
        "[importlib.import_module(f'planner_ext.durable.{name}') for name in names]; "
        "[getattr(durable, name) for name in durable.__all__]"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
