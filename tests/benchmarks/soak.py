"""Keep two workers busy for an hour, and see whether memory, open files and the store stay as they are.

    python tests/benchmarks/soak.py                            an hour on SQLite
    python tests/benchmarks/soak.py --minutes 10 --store URL   ten minutes on PostgreSQL, in an empty database

Runs are submitted as fast as they end, each waits for a decision, and what has ended is deleted once a minute. A
third and a fourth process make runs that no store keeps, plain and streamed, over HTTP.

Exits with 1 if a figure's median in the last quarter is above that of the second by more than a tenth, or if a run
ended otherwise than answered.
"""

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
from durability import open_runs, world
from openai import AsyncOpenAI
from round_trips import Chained, Work, planner_of, serve

from planner_ext import Approve
from planner_ext.durable import Runs
from planner_ext.hitl_manager import Defer, ToolCall

SPAWN = multiprocessing.get_context("spawn")
TURNS = 5
OPEN_RUNS = 20
"""The runs that are submitted and have not ended."""
SAMPLE_SECONDS = 10.0
KEPT = timedelta(minutes=1)
GROWTH = 1.1

Samples = dict[str, list[float]]


def ask(call: ToolCall) -> Defer | None:
    """Ask a person about the first call of a run."""
    asks = call.arguments["step"] == 0
    return Defer("Do it?") if asks else None


def work(store: str) -> None:
    """Drive the runs of the store."""

    async def live() -> None:
        planner, kernel = world(TURNS, interceptors=[ask])
        script: Any = kernel.get_service()
        async with open_runs(store, poll_seconds=0.05) as runs:
            working = asyncio.create_task(runs.work(planner, kernel))
            while not working.done():
                await asyncio.sleep(1.0)
                script.requests.clear()

    asyncio.run(live())


def loop(trips: Work, port: int) -> None:
    """Make runs that no store keeps, of service and planner in turn."""

    async def live() -> None:
        url = f"http://127.0.0.1:{port}/v1"
        client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
        service = Chained(client, trips, wrapped=True).run
        planner = planner_of(client, trips)
        while True:
            await service()
            await planner()
            await asyncio.sleep(0.02)

    asyncio.run(live())


async def submit(
    runs: Any, ends: float, ended: Counter[str], decided: Counter[str]
) -> None:
    """Submit a run, approve what it waits for, and submit the next when it has ended."""
    while time.monotonic() < ends:
        run = await runs.submit("Work.")
        result = await run.result()
        while result.status == "paused":
            decided["questions"] += len(result.pending)
            for waits in result.pending:
                await runs.approvals().decide(waits.id, Approve(by="ann"))
            result = await run.result()
        ended[result.status] += 1


async def prune(runs: Any) -> None:
    """Delete what has ended."""
    while True:
        await asyncio.sleep(KEPT.total_seconds())
        await runs.prune(older_than=KEPT, status="answered")


def size_of(store: str) -> float:
    """Measure the store in MiB."""
    if "://" in store:
        with closing(psycopg.connect(store)) as database:
            query = "SELECT pg_database_size(current_database())"
            size: Any = database.execute(query).fetchone()
            return size[0] / 2**20
    files = Path(store).parent.glob(Path(store).name + "*")
    return sum(file.stat().st_size for file in files) / 2**20


async def sample(store: str, processes: dict[str, Any], samples: Samples) -> None:
    """Note what each process and the store take."""
    page = os.sysconf("SC_PAGE_SIZE")
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        samples["store, MiB"].append(size_of(store))
        for name, process in processes.items():
            assert process.is_alive(), f"{name} has ended"
            about = Path(f"/proc/{process.pid}")
            pages = int(about.joinpath("statm").read_text().split()[1])
            samples[f"{name}, MiB"].append(pages * page / 2**20)
            samples[f"{name}, open files"].append(
                len(list(about.joinpath("fd").iterdir()))
            )


async def soak(store: str, seconds: float, processes: dict[str, Any]) -> int:
    """Let it run; return 1 if something grew or failed."""
    samples: Samples = defaultdict(list)
    ended: Counter[str] = Counter()
    decided: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    async with Runs.connect(store) as runs:
        beside = [
            asyncio.create_task(each)
            for each in (prune(runs), sample(store, processes, samples))
        ]
        submitters = [submit(runs, ends, ended, decided) for _ in range(OPEN_RUNS)]
        work = asyncio.gather(*submitters)
        done, _ = await asyncio.wait({work, *beside}, return_when="FIRST_COMPLETED")
        for task in (*done, *beside):
            if task.done():
                task.result()
            task.cancel()
    grown = [name for name, values in samples.items() if not told(name, values)]
    print("runs", dict(ended), dict(decided))
    return int(bool(grown) or set(ended) != {"answered"})


def told(name: str, values: list[float]) -> bool:
    """Print the medians of the quarters; return whether the last is as the second."""
    quarter = len(values) // 4
    parts = [values[i * quarter : (i + 1) * quarter] for i in range(4)]
    medians = [statistics.median(part) for part in parts]
    kept = medians[3] <= medians[1] * GROWTH
    figures = "".join(f"{median:10.1f}" for median in medians)
    print(f"{name:28}{figures}{'' if kept else '   GROWS'}")
    return kept


def main() -> int:
    """Start the processes and watch them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--store", default="")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = given.store or str(Path(folder, "runs.db"))
        processes: dict[str, Any] = {
            "worker 1": SPAWN.Process(target=work, args=(store,), daemon=True),
            "worker 2": SPAWN.Process(target=work, args=(store,), daemon=True),
        }
        servers: list[Any] = []
        for name, streams in (("plain runs", False), ("streamed runs", True)):
            trips = Work(trips=TURNS, calls=2, chunks=50, stream=streams)
            ours, theirs = SPAWN.Pipe()
            servers.append(
                SPAWN.Process(target=serve, args=(trips, theirs), daemon=True)
            )
            servers[-1].start()
            given_to = (trips, ours.recv())
            processes[name] = SPAWN.Process(target=loop, args=given_to, daemon=True)
        for name, process in processes.items():
            process.start()
            if name == "worker 1":  # it makes the store
                time.sleep(10)
        try:
            return asyncio.run(soak(store, given.minutes * 60, processes))
        finally:
            for process in (*processes.values(), *servers):
                process.terminate()


if __name__ == "__main__":
    sys.exit(main())
