"""How many runs each worker of a PostgreSQL database drives at once."""

import asyncio
from pathlib import Path
from typing import Any

from semantic_kernel.functions import kernel_function

from planner_ext.durable.store import opened_store
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say
from support.durable import GOAL, effects_in, open_runs, turn, world
from support.processes import Lives

RUNS = 8
SECONDS = 120


class Station:
    """A tool that takes a while, and writes down when it begins and when it ends."""

    def __init__(self, effects: Path) -> None:
        self._effects = effects

    @kernel_function(description="Takes a while.")
    async def stop(self) -> str:
        self._write("+1")
        await asyncio.sleep(0.5)
        self._write("-1")
        return "done"

    def _write(self, line: str) -> None:
        with self._effects.open("a") as file:
            file.write(line + "\n")


def stops(request: ScriptedRequest) -> ScriptedReply:
    """Stop once, then answer."""
    return [call("station-stop", {}, id="stop"), say("Done.")][turn(request)]


def station(effects: Path) -> tuple[Any, Any]:
    planner, kernel = world(effects, stops)
    kernel.add_plugin(Station(effects), "station")
    return planner, kernel


def working_life(url: str, folder: Path, most: int, started: int) -> None:
    """Start some runs, and take others from the queue while fewer than the most are driven here."""

    async def work() -> None:
        async with open_runs(url, worker_id=f"most-{most}", poll_seconds=0.05) as runs:
            world = station(folder / f"most-{most}")
            for n in range(started):
                await runs.start(*world, GOAL, run_id=f"started-{n}")
            await runs.work(*world, max_concurrency=most)

    asyncio.run(work())


def at_once(effects: Path) -> int:
    """Count how many calls were under way at once."""
    counts = [0]
    for line in effects_in(effects):
        counts.append(counts[-1] + int(line))
    return max(counts)


async def answered(url: str, count: int) -> None:
    async with opened_store(url) as store, asyncio.timeout(SECONDS):
        while await store.count_runs(status="answered") < count:  # noqa: ASYNC110  (only another process tells)
            await asyncio.sleep(0.02)


async def entered(url: str) -> None:
    async with opened_store(url) as store:
        for n in range(RUNS):
            assert await store.create(f"run-{n}", GOAL, owner=None, at=1.0)


async def test_each_worker_has_a_limit_of_its_own(
    lives: Lives, postgres_url: str, tmp_path: Path
) -> None:
    """Two workers with different numbers each keep to their own, whichever of them came last."""
    await entered(postgres_url)
    processes = [
        lives.begin(working_life, postgres_url, tmp_path, most, 0) for most in (1, 4)
    ]
    await answered(postgres_url, RUNS)
    for process in processes:
        process.kill()
        process.join()
    assert at_once(tmp_path / "most-1") == 1
    assert 2 <= at_once(tmp_path / "most-4") <= 4


async def test_a_run_that_was_started_here_takes_a_place(
    lives: Lives, postgres_url: str, tmp_path: Path
) -> None:
    """Runs begun with `start` are never kept waiting, and while they are driven fewer are taken from the queue."""
    await entered(postgres_url)
    process = lives.begin(working_life, postgres_url, tmp_path, 2, 2)
    await answered(postgres_url, RUNS + 2)
    process.kill()
    process.join()
    assert at_once(tmp_path / "most-2") == 2
