"""The metrics of a store: read from the store, from any thread, as long as a worker has it open."""

import json
import time
from pathlib import Path

import pytest

from planner_ext.durable import gauge
from support.durable import GOAL, PAY, decide_all, open_runs, world


def reported() -> list[int | float]:
    """Collect the gauge, as the thread of a metric reader does."""
    for one in gauge._stores.values():
        one._read_at = None
    return [point.value for point in gauge.observed("planner_ext.approvals.waiting")]


async def test_a_worker_reports_what_waits_in_its_store(
    store: str, tmp_path: Path
) -> None:
    """One for each approval that waits, wherever it is decided; nothing after the worker has left."""
    async with open_runs(store) as runs:
        assert reported() == [0]
        for name in ("one", "two"):
            await (
                await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id=name)
            ).result()
        assert reported() == [2]
        assert await decide_all(store) == 2
        assert reported() == [0]
    assert reported() == []


def read(name: str) -> dict[tuple[str, ...], float]:
    """Read a gauge afresh, by the values of its attributes besides the store."""
    for one in gauge._stores.values():
        one._read_at = None
    return {
        tuple(
            str(value)
            for key, value in (point.attributes or {}).items()
            if key != "planner_ext.store"
        ): point.value
        for point in gauge.observed(f"planner_ext.{name}")
    }


async def test_the_numbers_of_a_store_are_reported(store: str, tmp_path: Path) -> None:
    """Depth and age of the queue, approvals, runs by status, notices, budgets and a hold, as the store has them."""
    async with open_runs(store) as runs:
        assert read("queue.age") == {(): 0.0}
        made = world(tmp_path / "effects", [PAY])
        await (await runs.start(*made, GOAL, run_id="waits")).result()
        await runs.submit(GOAL, run_id="queued")
        await runs.submit(GOAL, run_id="out")
        limits = json.dumps({"max_iterations": 20, "max_cost": None})
        await runs._store.database.transact(
            ("UPDATE planner_runs SET updated_at = updated_at - 900", {}),
            (
                "UPDATE planner_runs SET status = 'running', outage_at = updated_at, wake_at = :at "
                "WHERE run_id = 'out'",
                {"at": time.time() + 1000},
            ),
            ("UPDATE planner_approvals SET asked_at = asked_at - 60", {}),
            (
                "INSERT INTO planner_notices (id, run_id, event, body, created_at) "
                "VALUES ('n', 'waits', 'paused', '', 0)",
                {},
            ),
            *(
                (
                    "INSERT INTO planner_budgets (budget, key, period, until, limits, iterations, updated_at) "
                    "VALUES (:budget, :key, :period, :until, :limits, :used, 0)",
                    {
                        "budget": budget,
                        "key": key,
                        "period": f"2026-11-{day}",
                        "until": time.time() + hours * 3600,
                        "limits": limits,
                        "used": used,
                    },
                )
                for budget, key, day, hours, used in (
                    ("user", "ann", "01", -12, 20),
                    ("user", "ann", "02", 12, 5),
                    ("user", "bo", "02", 12, 10),
                    ("left alone", "", "01", -12, 20),
                )
            ),
        )
        await runs.pause_all()
        assert read("approvals.waiting") == {(): 1}
        assert 60 <= read("approvals.age")[()] < 600
        assert read("queue.depth") == {(): 1}
        assert 900 <= read("queue.age")[()] < 1500
        by_status = {key: value for key, value in read("runs").items() if value}
        assert by_status == {("queued",): 1, ("running",): 1, ("paused",): 1}
        assert read("runs.retrying") == {(): 1}
        assert read("outage.runs") == {(): 1}
        assert 900 <= read("outage.age")[()] < 1500
        assert read("runs.held") == {(): 1}
        assert read("notices.undelivered") == {("pending",): 0, ("given_up",): 1}
        assert read("budgets.used") == {
            ("user", "max_iterations"): 0.5,
            ("left alone", "max_iterations"): 0.0,
        }

        await decide_all(store)
        assert read("queue.depth") == {(): 2}
        await runs.cancel("queued")
        assert read("queue.age")[()] < 600


async def test_a_store_that_fails_reports_nothing(
    store: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning for all gauges that are read from it; the collection of other metrics goes on."""
    async with open_runs(store) as runs:
        await runs._store.database.transact(
            ("ALTER TABLE planner_notices RENAME TO planner_elsewhere", {})
        )
        read_there = gauge._GAUGES.keys() - {"planner_ext.store.waiting"}
        assert [gauge.observed(name) for name in read_there] == [[]] * 11
        await runs._store.database.transact(
            ("ALTER TABLE planner_elsewhere RENAME TO planner_notices", {})
        )
    assert caplog.text.count("The numbers of a store are not reported") == 1
