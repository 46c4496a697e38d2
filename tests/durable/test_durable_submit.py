"""Runs that are submitted by a process that drives none: queued with their inputs, driven by workers, awaited."""

from pathlib import Path

from planner_ext.core.facts import Ended
from planner_ext.durable import Runs
from planner_ext.testing import say
from support.durable import GOAL, PAY, open_runs, world


async def test_a_process_that_is_no_worker_lists_and_cancels_runs(store: str, tmp_path: Path) -> None:
    """A client, of which a process may have several, needs neither planner nor kernel, and takes no worker's name."""
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")])
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        async with Runs.connect(store) as client, Runs.connect(store) as other:
            assert [record.run_id for record in await client.list(status="paused")] == ["order-7"]
            assert await other.cancel("order-7", by="ann")
            assert await client.count(status="stopped") == 1
            assert isinstance((await client.load("order-7")).facts[-1], Ended)
