"""What keeping runs in a store costs: figures, and an exit code of 1 where one is not as promised.

    python tests/benchmarks/durability.py                      every figure, on SQLite
    python tests/benchmarks/durability.py --store URL          the same on PostgreSQL, in an empty database
    python tests/benchmarks/durability.py --workers            only what one, two and four workers cost and do

A turn is one reply with one call, that call, and its result. What a turn costs more with a store is the difference of
two runs in this one process, best of several, with the same script and a function that does nothing.
"""

import argparse
import asyncio
import gc
import logging
import multiprocessing
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.durable import Approvals, Runs
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedChatCompletion, ScriptedRequest, call, say

for _name in ("planner_ext", "psycopg"):  # in each process: figures only
    logging.getLogger(_name).addHandler(logging.NullHandler())

TURNS = (20, 80)
PARKED = 5_000
WORKERS = (1, 2, 4)
IDLE_SECONDS = 6.0
LONG_RUNS = 100
LONG_SECONDS = 30.0
SHORT_RUNS = 1_500
DECIDED_RUNS = 200


@dataclass(frozen=True)
class Figure:
    """One measured figure, and what was promised of it."""

    name: str
    value: float
    unit: str
    most: float | None = None

    @property
    def kept(self) -> bool:
        """Whether it is as promised."""
        return self.most is None or self.value <= self.most

    def __str__(self) -> str:
        """Write one line of the table."""
        promise = (
            ""
            if self.most is None
            else f"  (at most {self.most:g}{'' if self.kept else ': NOT KEPT'})"
        )
        return f"{self.name:44}{self.value:10.2f} {self.unit:8}{promise}"


class Tools:
    """A function that does nothing, and one that takes long."""

    @kernel_function(description="Does nothing.")
    async def work(self, step: int) -> str:
        return "ok"

    @kernel_function(description="Takes long.")
    async def wait(self, step: int) -> str:
        await asyncio.sleep(LONG_SECONDS)
        return "ok"


def model(turns: int) -> Any:
    """Call a function so many times, one that takes long once, then answer; the history says which is next."""

    def reply(request: ScriptedRequest) -> Any:
        done = sum(message["role"] == "tool" for message in request.messages)
        is_long = any(message.get("content") == "long" for message in request.messages)
        if done >= (1 if is_long else turns):
            return say("Done.")
        return call("tool-wait" if is_long else "tool-work", {"step": done})

    return reply


def world(turns: int, **options: Any) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(model(turns)))
    kernel.add_plugin(Tools(), "tool")
    given = {"plan": False, "max_iterations": None, **options}
    return FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(**given)
    ), kernel


def open_runs(store: str, **options: Any) -> AbstractAsyncContextManager[Runs]:
    """Open the runs in a SQLite file or in PostgreSQL."""
    return (
        Runs.postgres(store, **options)
        if "://" in store
        else Runs.sqlite(store, **options)
    )


async def added_per_turn(store: str, most: float) -> list[Figure]:
    """Measure what a turn takes more with a store: best of several runs each, one after the other in turns."""
    turns, without, with_store = TURNS[1], [], []
    async with open_runs(store) as runs:
        for _ in range(5):
            planner, kernel = world(turns)
            began = time.perf_counter()
            await planner.invoke(kernel, "goal")
            without.append(time.perf_counter() - began)
            began = time.perf_counter()
            await (await runs.start(planner, kernel, "goal")).result()
            with_store.append(time.perf_counter() - began)
    off, on = (min(seconds) * 1000 / turns for seconds in (without, with_store))
    return [
        Figure("a turn without a store", off, "ms"),
        Figure("added per turn", on - off, "ms", most),
    ]


def bare_commit(folder: Path) -> list[Figure]:
    """Measure the disk itself: a row of a turn's size in SQLite, with nothing of ours around it. A turn has three."""
    with closing(
        sqlite3.connect(folder / "bare.db", isolation_level=None)
    ) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE bare (fact TEXT)")
        began = time.perf_counter()
        for _ in range(200):
            connection.execute("INSERT INTO bare VALUES (?)", ("x" * 700,))
        return [
            Figure(
                "a bare commit on this disk",
                (time.perf_counter() - began) * 1000 / 200,
                "ms",
            )
        ]


async def kib_per_run(folder: Path) -> list[Figure]:
    """Measure how a run's file grows with its turns; PostgreSQL's rows are the same text."""
    sizes: list[float] = []
    for turns in TURNS:
        file = folder / f"size-{turns}.db"
        async with Runs.sqlite(file) as runs:
            empty = used(file)
            await (await runs.start(*world(turns), "goal")).result()
            sizes.append((used(file) - empty) / 1024)
    return [
        *(
            Figure(f"a run of {turns} turns", size, "KiB")
            for turns, size in zip(TURNS, sizes, strict=True)
        ),
        Figure(
            f"ratio of {TURNS[1]} to {TURNS[0]} turns", sizes[1] / sizes[0], "", 4.4
        ),
    ]


def used(file: Path) -> int:
    """Count the bytes in use, once the log is written back."""
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    return pages * size


async def parked(store: str) -> list[Figure]:
    """Measure what thousands of runs that wait cost a worker that lives, and one that starts."""
    planner, kernel = world(1, interceptors=[lambda _: Defer()])
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, "goal")).result()
        before = memory()
        began = time.perf_counter()
        for _ in range(PARKED // 50):
            handles = [await runs.start(planner, kernel, "goal") for _ in range(50)]
            await asyncio.gather(*(handle.result() for handle in handles))
        parked_in = time.perf_counter() - began
        del handles
        grown = memory() - before
    async with Approvals.connect(store) as approvals:
        listed = min([await timed(approvals.pending(limit=50)) for _ in range(5)])
    began = time.perf_counter()
    async with open_runs(store) as runs:
        ready = await runs.recover(planner, kernel)
        restarted = time.perf_counter() - began
    assert ready == []
    return [
        Figure(f"parked runs ({PARKED} in all)", PARKED / parked_in, "runs/s"),
        Figure(f"memory grown by {PARKED} parked runs", grown, "MB", 20),
        Figure("the first 50 listed", listed * 1000, "ms", 100),
        Figure("a worker that starts is ready", restarted, "s", 5),
    ]


async def timed(work: Any) -> float:
    """Measure the seconds that something takes."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def decided(store: str) -> list[Figure]:
    """Measure the CPU time of a run of one call that waits for a person: up to the pause, the decision, the rest."""
    planner, kernel = world(1, interceptors=[lambda _: Defer()])
    async with open_runs(store) as runs, Approvals.connect(store) as approvals:
        runs.drive_with(planner, kernel)
        await (await runs.start(planner, kernel, "goal")).result()
        begun = time.process_time()
        for _ in range(DECIDED_RUNS):
            await (await runs.start(planner, kernel, "goal")).result()
        paused = time.process_time()
        for waiting in await approvals.pending(limit=DECIDED_RUNS):
            assert await approvals.decide(waiting.id, Approve(by="a person"))
        approved = time.process_time()
        while due := (await runs.due()).runs:
            for run_id in due:
                await runs.activate(run_id)
        ended = time.process_time()
    spans = {
        "to the pause": paused - begun,
        "to be decided": approved - paused,
        "from the decision to the end": ended - approved,
    }
    return [
        Figure(f"a run {name}", seconds * 1000 / DECIDED_RUNS, "ms CPU")
        for name, seconds in spans.items()
    ]


def memory() -> float:
    """Read the resident memory of this process, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def by_workers(store: str) -> list[Figure]:
    """Measure what one, two and four workers cost the database when idle and busy, and how many runs they end."""
    figures: list[Figure] = []
    for workers in WORKERS:
        context = multiprocessing.get_context("spawn")
        ready = context.Barrier(workers + 1)
        processes = [
            context.Process(target=work, args=(store, ready), daemon=True)
            for _ in range(workers)
        ]
        for process in processes:
            process.start()
        ready.wait()
        figures += asyncio.run(loaded(store, workers))
        for process in processes:
            process.kill()
            process.join()
    return figures


def work(store: str, ready: Any) -> None:
    """Live as a worker until killed."""

    async def live() -> None:
        async with open_runs(store) as runs:
            ready.wait()
            await runs.work(*world(3))

    asyncio.run(live())


async def loaded(store: str, workers: int) -> list[Figure]:
    """Submit long runs, then short ones, to workers that live."""
    name = f"{workers} worker(s)"
    async with Runs.connect(store, poll_seconds=0.1) as runs:

        async def submit(count: int, goal: str) -> None:
            for _ in range(count // 50):
                await asyncio.gather(*(runs.submit(goal) for _ in range(50)))

        async def until(queued: int, running: int = 0) -> None:
            while True:  # only other processes tell
                waiting = await runs.count(status="queued")
                driven = await runs.count(status="running")
                if (waiting, driven) == (queued, running):
                    return
                await asyncio.sleep(0.05)

        await asyncio.sleep(
            2.0
        )  # the session of a worker reports what it did once a second
        idle = await transactions(store, asyncio.sleep(IDLE_SECONDS))
        await submit(LONG_RUNS, "long")
        await until(0, LONG_RUNS)
        await asyncio.sleep(2.0)
        long = await transactions(store, asyncio.sleep(IDLE_SECONDS))
        await until(0)
        began = time.perf_counter()

        async def drive() -> None:
            await submit(SHORT_RUNS, "short")
            await until(0)

        busy = await transactions(store, drive())
        seconds = time.perf_counter() - began
    return [
        Figure(f"runs of 3 turns, {name}", SHORT_RUNS / seconds, "runs/s"),
        *(
            Figure(f"{what}, {name}", value, "trans./s")
            for what, value in (
                ("idle", idle),
                (f"{LONG_RUNS} runs in a call", long),
                ("runs of 3 turns", busy),
            )
            if value is not None
        ),
    ]


async def transactions(store: str, work: Awaitable[None]) -> float | None:
    """Measure the transactions a second of all databases of a server while something is done; None for a file."""
    began = time.perf_counter()
    before = counted(store)
    await work
    return (
        (counted(store) - before) / (time.perf_counter() - began)
        if "://" in store
        else None
    )


def counted(store: str) -> int:
    """Count the transactions that a server has ended; 0 for a file."""
    if "://" not in store:
        return 0
    with psycopg.connect(store) as connection:
        row = connection.execute(
            "SELECT sum(xact_commit + xact_rollback)::bigint FROM pg_stat_database"
        ).fetchone()
    assert row is not None
    return row[0]


def main(store: str | None, only_workers: bool) -> int:
    """Measure, print, and tell whether all was as promised."""
    folder = Path(tempfile.mkdtemp(prefix="durability-"))
    try:
        where = store or str(folder / "runs.db")
        figures = (
            by_workers(where)
            if only_workers
            else [
                *bare_commit(folder),
                *asyncio.run(added_per_turn(where, 2 if store is None else 12)),
                *asyncio.run(kib_per_run(folder)),
                *asyncio.run(decided(where)),
                *by_workers(where),
                *asyncio.run(parked(where)),
            ]
        )
    finally:
        shutil.rmtree(folder)
    for figure in figures:
        print(figure)
    return 0 if all(figure.kept for figure in figures) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--store",
        help="postgresql:// address of an empty database; left out: a new SQLite file",
    )
    parser.add_argument(
        "--workers",
        action="store_true",
        help="only what one, two and four workers cost and do",
    )
    arguments = parser.parse_args()
    sys.exit(main(arguments.store, arguments.workers))
