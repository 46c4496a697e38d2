"""What keeping runs in a store costs: figures, and an exit code of 1 where one is not as promised.

    python tests/benchmarks/durability.py                      every figure, on SQLite
    python tests/benchmarks/durability.py --store URL          likewise on PostgreSQL with DBOS, in an empty database
    python tests/benchmarks/durability.py --soak 60            kill workers at random for a minute: no call runs twice

A turn is one reply with one call, that call, and its result. What a turn costs more with a store is the difference of
two runs in this one process, best of several, with the same script and a function that does nothing.
"""

import argparse
import asyncio
import gc
import multiprocessing
import os
import random
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.durable import Approvals, Runs
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedChatCompletion, ScriptedRequest, call, say

TURNS = (20, 80)
PARKED = 5_000


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
        promise = "" if self.most is None else f"  (at most {self.most:g}{'' if self.kept else ': NOT KEPT'})"
        return f"{self.name:44}{self.value:10.2f} {self.unit:8}{promise}"


class Tools:
    """A function that does nothing, and one that leaves a trace."""

    def __init__(self, traces: Path | None = None) -> None:
        self._traces = traces

    @kernel_function(description="Does nothing.")
    async def work(self, step: int) -> str:
        if self._traces is not None:
            with self._traces.open("a") as file:
                file.write(f"{step}\n")
        return "ok"


def model(turns: int) -> Any:
    """Call the function so many times, then answer; where it stands it reads from its history."""

    def reply(request: ScriptedRequest) -> Any:
        done = sum(message["role"] == "tool" for message in request.messages)
        return say("Done.") if done >= turns else call("tool-work", {"step": done})

    return reply


def world(turns: int, traces: Path | None = None, **options: Any) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(model(turns)))
    kernel.add_plugin(Tools(traces), "tool")
    given = {"plan": False, "max_iterations": None, **options}
    return FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(**given)), kernel


def open_runs(store: str, **options: Any) -> AbstractAsyncContextManager[Runs]:
    """Open the runs in a SQLite file or in PostgreSQL."""
    return Runs.dbos(store, **options) if "://" in store else Runs.sqlite(store, **options)


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
    with closing(sqlite3.connect(folder / "bare.db", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("CREATE TABLE bare (fact TEXT)")
        began = time.perf_counter()
        for _ in range(200):
            connection.execute("INSERT INTO bare VALUES (?)", ("x" * 700,))
        return [Figure("a bare commit on this disk", (time.perf_counter() - began) * 1000 / 200, "ms")]


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
        *(Figure(f"a run of {turns} turns", size, "KiB") for turns, size in zip(TURNS, sizes, strict=True)),
        Figure(f"ratio of {TURNS[1]} to {TURNS[0]} turns", sizes[1] / sizes[0], "", 4.4),
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


def memory() -> float:
    """Read the resident memory of this process, in MB."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def throughput(store: str) -> list[Figure]:
    """Measure how many runs of three turns end in a second, with one worker and with two."""
    figures: list[Figure] = []
    for workers in (1, 2):
        context = multiprocessing.get_context("spawn")
        ready = context.Barrier(workers + 1)
        processes = [context.Process(target=busy, args=(store, ready, n, workers)) for n in range(workers)]
        for process in processes:
            process.start()
        ready.wait()
        began = time.perf_counter()
        for process in processes:
            process.join()
        assert all(process.exitcode == 0 for process in processes)
        figures.append(Figure(f"runs of 3 turns, {workers} worker(s)", 300 / (time.perf_counter() - began), "runs/s"))
    return figures


def busy(store: str, ready: Any, number: int, workers: int) -> None:
    """Drive one worker's share of 300 runs, 20 at once."""

    async def drive() -> None:
        async with open_runs(store, worker_id=f"busy-{workers}-{number}") as runs:
            ready.wait()
            for _ in range(300 // workers // 20 + 1):
                handles = [await runs.start(*world(3), "goal") for _ in range(20)]
                await asyncio.gather(*(handle.result() for handle in handles))

    asyncio.run(drive())


def soak(store: str, folder: Path, seconds: float) -> list[Figure]:
    """Kill workers at random moments while they drive runs of a function that may not run twice; count what did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["semantic_kernel.functions", "planner_ext.planner", "planner_ext.durable.runs"])
    end, kills, number = time.monotonic() + seconds, 0, 0
    processes: list[Any] = []
    while time.monotonic() < end:
        number += 1
        processes = [one for one in processes if one.is_alive()]
        while len(processes) < 2:
            process = context.Process(target=soaked, args=(store, str(folder), number), daemon=True)
            process.start()
            processes.append(process)
        time.sleep(random.uniform(0.3, 2.0))
        victim = random.choice(processes)
        victim.kill()
        victim.join()
        kills += 1
    for process in processes:
        process.kill()
        process.join()
    done, runs = asyncio.run(rinsed(store, folder))
    twice = sum(count > 1 for count in done.values())
    return [
        Figure("workers killed", kills, ""),
        Figure("runs", runs, ""),
        Figure("calls that took effect", sum(done.values()), ""),
        Figure("calls that took effect twice", twice, "", 0),
    ]


def soaked(store: str, folder: str, number: int) -> None:
    """Live as a worker: start runs, and take over those of the dead."""

    async def live() -> None:
        async with open_runs(store, in_doubt="model", poll_seconds=0.05) as runs:
            worker = asyncio.create_task(runs.work(*traced(folder)))
            for n in range(10_000):
                handles = [await runs.start(*traced(folder), "goal", run_id=f"{number}-{n}-{k}") for k in range(4)]
                await asyncio.gather(*(handle.result() for handle in handles), return_exceptions=True)
            worker.cancel()

    asyncio.run(live())


def traced(folder: str) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel whose function leaves a file for each time a call took effect."""

    class Traced:
        @kernel_function(description="Leaves a trace.")
        async def work(self, mark: str) -> str:
            traces = os.open(os.path.join(folder, "traces"), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(traces, f"{mark}\n".encode())
            os.close(traces)
            await asyncio.sleep(0.01)
            return "ok"

    def reply(request: ScriptedRequest) -> Any:
        done = sum(message["role"] == "tool" for message in request.messages)
        return say("Done.") if done >= 3 else call("tool-work", {"mark": f"{random.getrandbits(64)}"})

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(reply))
    kernel.add_plugin(Traced(), "tool")
    options = FunctionCallingStepwisePlannerOptions(plan=False)
    return FunctionCallingStepwisePlanner(options=options), kernel


async def rinsed(store: str, folder: Path) -> tuple[Counter[str], int]:
    """Let a last worker finish everything; count what took effect, by the mark of its call."""
    async with open_runs(store, in_doubt="model") as runs:
        planner, kernel = traced(str(folder))
        while handles := await runs.recover(planner, kernel):
            await asyncio.gather(*(handle.result() for handle in handles))
        records = await runs.list(limit=1_000_000)
    assert all(record.status == "answered" for record in records), Counter(record.status for record in records)
    traces = folder / "traces"
    return Counter(traces.read_text().split() if traces.exists() else []), len(records)


def main(store: str | None, seconds: float | None) -> int:
    """Measure, print, and tell whether all was as promised."""
    folder = Path(tempfile.mkdtemp(prefix="durability-"))
    try:
        where = store or str(folder / "runs.db")
        if seconds is not None:
            figures = soak(where, folder, seconds)
        else:
            figures = [
                *bare_commit(folder),
                *asyncio.run(added_per_turn(where, 2 if store is None else 12)),
                *asyncio.run(kib_per_run(folder)),
                *throughput(where),
                *asyncio.run(parked(where)),
            ]
    finally:
        shutil.rmtree(folder)
    for figure in figures:
        print(figure)
    return 0 if all(figure.kept for figure in figures) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--store", help="postgresql:// address of an empty database; left out: a new SQLite file")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="kill workers at random for so long")
    arguments = parser.parse_args()
    sys.exit(main(arguments.store, arguments.soak))
