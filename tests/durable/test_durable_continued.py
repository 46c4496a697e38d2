"""A run that has ended is continued by any worker, with the budget that a person gave it."""

import asyncio
from pathlib import Path

from planner_ext import Budget
from planner_ext.durable import Runs
from planner_ext.testing import call, say
from support.durable import effects_in, open_runs, world

BOOKS = [call("shop-book", {"order": n}, id=f"book{n}") for n in range(3)]


async def test_a_budget_continues_a_run_that_reached_its_limit(
    store: str, tmp_path: Path
) -> None:
    """Another worker takes it, with the larger budget: what it spent counts, nothing is done twice."""
    planner, kernel = world(
        tmp_path / "effects", [*BOOKS, say("Booked.")], max_iterations=2
    )
    async with open_runs(store) as runs:
        result = await (await runs.start(planner, kernel, "Book.", run_id="a")).result()
        assert result.status == "limit_reached"
    async with Runs.connect(store) as client:
        assert not await client.retry("a")
        assert await client.retry("a", budget=Budget(max_iterations=9), by="ann")
        record = (await client.load("a")).record
        assert (record.status, record.iterations) == ("running", 2)
    planner, kernel = world(
        tmp_path / "effects", [*BOOKS[2:], say("Booked.")], max_iterations=2
    )
    async with open_runs(store, poll_seconds=0.01) as runs:
        working = asyncio.create_task(runs.work(planner, kernel))
        await runs.wait("a")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        result = await runs.result("a")
        assert (result.status, result.final_answer) == ("answered", "Booked.")
        assert not await runs.retry("a", budget=Budget(max_iterations=9))
    lines = effects_in(tmp_path / "effects")
    assert len(lines) == len(set(lines))


async def test_a_fork_is_continued_with_its_instruction(
    store: str, tmp_path: Path
) -> None:
    """A fork is a stopped run: a budget makes it due for the workers."""
    planner, kernel = world(tmp_path / "effects", [*BOOKS[:2], say("Booked.")])
    async with open_runs(store, poll_seconds=0.01) as runs:
        await (await runs.start(planner, kernel, "Book.", run_id="b")).result()
        name = await runs.fork("b", at=0, instruction="Stop here.", by="ann")
        assert await runs.retry(name, budget=Budget(max_iterations=9), by="ann")
        planner, kernel = world(tmp_path / "effects", [say("Stopped.")])
        working = asyncio.create_task(runs.work(planner, kernel))
        await runs.wait(name)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert (await runs.result(name)).final_answer == "Stopped."
