"""Forks of runs in a store: added beside the run, stopped until they are resumed, under names of their own."""

from pathlib import Path
from typing import Any

import pytest

from planner_ext import ApprovalSettings, Budget
from planner_ext.approval.record import decisions_of
from planner_ext.durable import (
    ApprovalRefusedError,
    RunConflictError,
    RunRefusedError,
    StoreError,
    UnknownRunError,
)
from planner_ext.engine.document import dump_facts
from planner_ext.errors import InvalidForkError
from planner_ext.testing import call, say
from support.durable import (
    GOAL,
    PAY,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    world,
)

BOOK, LABEL = call("shop-book", {"order": 1}), call("shop-label", {"order": 2})


async def test_a_kept_run_is_forked_and_resumed(store: str, tmp_path: Path) -> None:
    """A fork is stopped, no worker takes it; resumed with a budget, it continues from what was spent."""
    effects = tmp_path / "effects"
    planner, kernel = world(effects, [BOOK, LABEL, say("Both.")])
    async with open_runs(store) as runs:
        first = await (
            await runs.start(planner, kernel, "Settle.", run_id="order-7")
        ).result()
        name = await runs.fork(
            "order-7", at=0, new_run_id="order-7b", instruction="No label."
        )
        assert name == "order-7b"
        record = (await runs.load(name)).record
        assert (record.status, record.goal) == ("stopped", "Settle.")
        assert await runs.recover(planner, kernel) == []
        other, kernel = world(effects, [say("Booked, no label.")])
        handle = await runs.resume(name, other, kernel, budget=Budget(max_iterations=5))
        forked = await handle.result()
        assert (forked.final_answer, forked.iterations, forked.tool_calls) == (
            "Booked, no label.",
            2,
            1,
        )
        assert dump_facts((await runs.load("order-7")).facts) == dump_facts(first.facts)
    assert effects_in(effects) == ["book 1", "label 2"]


async def test_a_decision_stays_with_the_run_it_was_made_on(
    store: str, tmp_path: Path
) -> None:
    """A fork keeps the decided call in its journal; the store shows the call of the first run alone."""
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")])
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        assert (await handle.result()).status == "paused"
        assert await decide_all(store) == 1
        assert (await handle.result()).status == "answered"
        name = await runs.fork("a", at=0, new_run_id="fork")
        approvals = runs.approvals()
        assert (await approvals.show("a/0/pay")).decision is not None
        with pytest.raises(ApprovalRefusedError, match="ever waited in this store"):
            await approvals.show(f"{name}/0/pay")
        assert decisions_of((await runs.load(name)).facts)


@on_sqlite
async def test_forks_that_cannot_be_are_refused(store: str, tmp_path: Path) -> None:
    """An unknown run, an iteration without a next request, a name that is taken or none: refused, nothing is added."""
    planner, kernel = world(tmp_path / "effects", [BOOK, say("Booked.")])
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, "Settle.", run_id="order-7")).result()
        with pytest.raises(UnknownRunError):
            await runs.fork("order-8", at=0)
        with pytest.raises(InvalidForkError, match="possible iterations: -1, 0"):
            await runs.fork("order-7", at=1)
        with pytest.raises(RunConflictError, match="another name"):
            await runs.fork("order-7", at=0, new_run_id="order-7")
        with pytest.raises(StoreError, match="run_id must be"):
            await runs.fork("order-7", at=0, new_run_id="a/b")
        assert await runs.count() == 1


@on_sqlite
async def test_a_fork_needs_the_guards_of_its_run(store: str, tmp_path: Path) -> None:
    """A planner without the guards that a run began under does not resume its fork; with them, calls wait again."""
    guarded: dict[str, Any] = {"approval": ApprovalSettings(unmatched="defer")}
    planner, kernel = world(tmp_path / "effects", [BOOK, say("Booked.")], **guarded)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, "Settle.", run_id="order-7")
        assert (await handle.result()).status == "paused"
        assert await decide_all(store) == 1
        assert (await handle.result()).status == "answered"
        name, budget = await runs.fork("order-7", at=-1), Budget(max_iterations=5)
        unguarded, again = world(tmp_path / "effects", [BOOK, say("Booked.")])
        with pytest.raises(RunRefusedError, match="cannot be continued here"):
            await (await runs.resume(name, unguarded, again, budget=budget)).result()
        forked = await (await runs.resume(name, planner, again, budget=budget)).result()
        assert forked.status == "paused"
    assert effects_in(tmp_path / "effects") == ["book 1"]
