"""A store keeps what has ended as long as its retention says, and its workers apply that."""

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Budget
from planner_ext.durable import (
    NotAuthorizedError,
    RunConflictError,
    Runs,
    StoreError,
    UnknownRunError,
)
from planner_ext.durable.retention import apply_retention
from planner_ext.durable.store import opened_store
from planner_ext.errors import InvalidJournalError
from planner_ext.testing import say
from support.durable import GOAL, PAY, decide_all, on_sqlite, open_runs, world

DAY = 86_400.0


async def drive(store: str, tmp_path: Path, *names: str) -> None:
    """Drive runs that pay, with a person's yes, to their end."""
    async with open_runs(store) as runs:
        for name in names:
            made = world(tmp_path / "effects", [PAY, say("Paid 5 to Ann Example.")])
            handle = await runs.start(*made, GOAL, run_id=name, tags=["t"])
            await handle.result()
            await decide_all(store)
            await handle.result()


async def until(runs: Runs, holds: Callable[[int], bool]) -> None:
    """Wait until something holds, which is asked with the number of runs."""
    async with asyncio.timeout(30):
        while not holds(await runs.count()):
            pass


async def applied(store: str, *, days: float) -> None:
    """Apply the retention as a worker would in so many days."""
    async with opened_store(store) as opened:
        await apply_retention(opened, now=time.time() + days * DAY)


async def test_ended_runs_are_deleted_when_they_are_old_enough(
    store: str, tmp_path: Path
) -> None:
    """Not earlier; a paused and a failed run stay; nothing is done twice under the name."""
    await drive(store, tmp_path, "a")
    async with open_runs(store, grace_seconds=0) as runs:
        paused = await runs.start(
            *world(tmp_path / "effects", [PAY]), GOAL, run_id="paused"
        )
        await paused.result()
        async with opened_store(store) as opened:
            await opened.create("failed", GOAL, owner=None, at=0.0)
            values: dict[str, Any] = {
                "retries": 1,
                "attempts": 5,
                "deaths": 0,
                "progress": 0,
            }
            await opened.park(
                "failed", seen=None, status="failed", problem="x", at=0.0, **values
            )
        await runs.retain(ended=timedelta(days=30), by="ann")
        await applied(store, days=29)
        assert await runs.count() == 3
        await applied(store, days=31)
        assert {one.run_id for one in await runs.list()} == {"paused", "failed"}
        with pytest.raises(RunConflictError, match="was answered"):
            await runs.submit(GOAL, run_id="a")


async def test_a_journal_goes_before_its_row(store: str, tmp_path: Path) -> None:
    """The row stays in lists, with tags and consumption; no table has a text of the run, and reading it says why."""
    await drive(store, tmp_path, "a")
    async with open_runs(store) as runs:
        await runs.retain(ended=timedelta(days=30), journals=timedelta(days=7))
        (before,) = await runs.list()
        await applied(store, days=6)
        assert len((await runs.load("a")).facts) > 1
        await applied(store, days=8)
        assert await runs.list(tag="t") == [before]
        for reading in (runs.load("a"), runs.result("a"), runs.fork("a", at=0)):
            with pytest.raises(InvalidJournalError, match="'a' was forgotten"):
                await reading
        assert await runs.notices("a") == ()
        assert await runs._store.refusals(run_id="a") == []
        await applied(store, days=31)
        with pytest.raises(UnknownRunError):
            await runs.load("a")


async def test_a_forgotten_run_does_nothing_again(store: str, tmp_path: Path) -> None:
    """Neither a start under its name nor a resume with a budget drives it."""
    await drive(store, tmp_path, "a")
    async with open_runs(store) as runs:
        await runs.retain(journals=timedelta(days=7))
        await applied(store, days=8)
        made = world(tmp_path / "effects", [PAY, say("Again.")])
        handle = await runs.start(*made, GOAL, run_id="a")
        with pytest.raises(InvalidJournalError, match="was forgotten"):
            await handle.result()
        handle = await runs.resume("a", *made, budget=Budget(max_iterations=9))
        with pytest.raises(InvalidJournalError, match="was forgotten"):
            await handle.result()
        assert (await runs.list())[0].status == "answered"
    assert (tmp_path / "effects").read_text().splitlines() == ["pay 5"]


async def test_the_retention_is_read_and_removed(store: str) -> None:
    """By any process; what is no time is refused by name."""
    async with Runs.connect(store) as runs:
        assert await runs.retention() is None
        await runs.retain(ended=timedelta(days=30), journals=timedelta(days=7), by="a")
        kept = await runs.retention()
        assert kept is not None
        assert (kept.ended, kept.journals, kept.by) == (30 * DAY, 7 * DAY, "a")
        with pytest.raises(StoreError, match="ended must be a time above 0"):
            await runs.retain(ended=timedelta(0))
        await runs.retain()
        assert await runs.retention() is None


@on_sqlite
async def test_the_application_may_refuse_a_retention(store: str) -> None:
    """The hook is asked; nothing is set."""

    async def refuse(request: object) -> str:
        return f"not {getattr(request, 'action', '')}"

    async with Runs.connect(store, authorize=refuse) as runs:
        with pytest.raises(NotAuthorizedError, match="not retain"):
            await runs.retain(ended=timedelta(days=1))
        with pytest.raises(NotAuthorizedError, match="not forget"):
            await runs.forget("user-7")
        assert await runs.retention() is None


@on_sqlite
async def test_a_worker_applies_it_by_itself(store: str, tmp_path: Path) -> None:
    """When it opens the store; no call is needed."""
    await drive(store, tmp_path, "a")
    async with Runs.connect(store) as runs:
        await runs.retain(ended=timedelta(microseconds=1))
    async with open_runs(store) as runs:
        await until(runs, lambda number: number == 0)


@on_sqlite
async def test_a_damaged_retention_deletes_nothing(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker says so, and drives its runs."""
    await drive(store, tmp_path, "a")
    async with opened_store(store) as opened:
        damage = "INSERT INTO planner_settings (name, value) VALUES ('retention', '{')"
        await opened.database.transact((damage, {}))
        with pytest.raises(StoreError, match="retention of the store is"):
            await apply_retention(opened, now=time.time())
    with caplog.at_level(logging.WARNING):
        async with open_runs(store) as runs:
            await until(runs, lambda _: "too old" in caplog.text)
            assert await runs.count() == 1


@on_sqlite
async def test_others_hardly_wait_for_it(store: str) -> None:
    """While 200 runs are deleted, a transaction of another caller is never far behind."""
    async with opened_store(store) as opened:
        add = """
            INSERT INTO planner_runs (run_id, goal, status, created_at, updated_at)
            VALUES (:run_id, '"g"', 'answered', 0, :at)
        """
        fact = "INSERT INTO planner_journal (run_id, seq, schema, fact) VALUES (:run_id, 0, 1, :fact)"
        steps = [
            (statement, {"run_id": str(number), "at": number, "fact": "f" * 5000})
            for number in range(200)
            for statement in (add, fact)
        ]
        await opened.database.transact(*steps)
    async with Runs.connect(store) as runs, opened_store(store) as opened:
        await runs.retain(ended=timedelta(days=1))
        work = asyncio.create_task(apply_retention(opened, now=time.time()))
        turns = 0
        while not work.done():
            turns += 1
            await runs.submit(GOAL, run_id=f"new-{turns}")
        await work
        assert await runs.count(status="answered") == 0
        assert turns > 40, "two transactions of others for each of 20 batches"
