"""Workers and their PostgreSQL that start at the same time."""

import asyncio
import time
from pathlib import Path

from planner_ext.durable.store import opened_store
from planner_ext.testing import ScriptedReply, ScriptedRequest, say
from support.durable import GOAL, open_runs, world
from support.postgres import PostgresServer
from support.processes import Lives

WORKERS = 3
START_SECONDS = 120


def answers(_: ScriptedRequest) -> ScriptedReply:
    """Answer at once."""
    return say("Done.")


def working_life(url: str, opened: Path, effects: Path, name: str) -> None:
    """Write down that the store is open, or why it is not, and work."""

    async def work() -> None:
        try:
            async with open_runs(url, worker_id=name) as runs:
                (opened / name).write_text("open")
                await runs.work(*world(effects, answers))
        except Exception as error:
            (opened / name).write_text(f"{type(error).__name__}: {error}")

    asyncio.run(work())


async def test_workers_may_start_before_their_server(
    lives: Lives, tmp_path: Path
) -> None:
    """Three workers that find no server wait for it, make the tables together, and drive what is there."""
    with PostgresServer() as server:
        url = server.create("runs")
        server.stop()
        opened = tmp_path / "opened"
        opened.mkdir()

        def said() -> dict[str, str]:
            return {
                file.name: text
                for file in opened.iterdir()
                if (text := file.read_text())
            }

        names = [f"worker-{n}" for n in range(WORKERS)]
        processes = [
            lives.begin(working_life, url, opened, tmp_path / "effects", name)
            for name in names
        ]
        await asyncio.to_thread(server.start)
        until = time.monotonic() + START_SECONDS
        while len(said()) < WORKERS and time.monotonic() < until:  # noqa: ASYNC110  (likewise)
            await asyncio.sleep(0.02)
        assert said() == dict.fromkeys(names, "open")
        async with opened_store(url) as store:
            assert await store.create("order-7", GOAL, owner=None, at=1.0)
            async with asyncio.timeout(START_SECONDS):
                while (await store.record("order-7")).status != "answered":  # noqa: ASYNC110  (only another process tells)
                    await asyncio.sleep(0.02)
        for process in processes:
            process.kill()
            process.join()
