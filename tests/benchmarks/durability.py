"""What keeping runs in a store costs: figures, and an exit code of 1 where one is not as promised.

    python tests/benchmarks/durability.py                      every figure, on SQLite
    python tests/benchmarks/durability.py --store URL          likewise on PostgreSQL with DBOS, in an empty database
    python tests/benchmarks/durability.py --soak 60            kill, stop and freeze workers at random for a minute

The soak submits runs all the time, with an endpoint that fails at times, and counts at the end, by what the model and
the function have written down themselves: no call ran twice, no run was stranded, no run asked more than its budget.

A turn is one reply with one call, that call, and its result. What a turn costs more with a store is the difference of
two runs in this one process, best of several, with the same script and a function that does nothing.
"""

import argparse
import asyncio
import gc
import itertools
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractAsyncContextManager, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.durable import Approvals, Runs
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedChatCompletion, ScriptedRequest, call, say

for _name in ("planner_ext", "psycopg"):  # in each process: figures only
    logging.getLogger(_name).addHandler(logging.NullHandler())

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


BUDGET = 5
"""The round trips that a run of the soak may make; without a fault it takes four."""

LEASE = 3.0
"""Seconds after which a frozen worker of the soak loses its runs."""


def soak(store: str, folder: Path, seconds: float) -> list[Figure]:
    """Kill, stop and freeze two workers at random moments while runs are submitted; count what they did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["semantic_kernel.functions", "planner_ext.planner", "planner_ext.durable.runs"])
    end, ends = time.monotonic() + seconds, Counter[str]()
    submitter = context.Process(target=submitting, args=(store, seconds), daemon=True)
    submitter.start()
    workers: list[Any] = []
    while time.monotonic() < end:
        workers = [one for one in workers if one.is_alive()]
        while len(workers) < 2:
            workers.append(context.Process(target=soaked, args=(store, str(folder)), daemon=True))
            workers[-1].start()
        time.sleep(random.uniform(0.5, 3.0))
        ends[interfere(random.choice(workers))] += 1
    submitter.join()
    for worker in workers:
        worker.kill()
        worker.join()
    asked, done, statuses = asyncio.run(rinsed(store, folder))
    unfinished = sum(statuses[status] for status in ("queued", "running", "paused"))
    return [
        *(Figure(f"workers {how}", count, "") for how, count in sorted(ends.items())),
        *(Figure(f"runs {status}", count, "") for status, count in sorted(statuses.items())),
        Figure("calls that took effect", sum(done.values()), ""),
        Figure("calls that took effect twice", sum(count > 1 for count in done.values()), "", 0),
        Figure("runs stranded", unfinished, "", 0),
        Figure(f"most requests of a run, by the model's own count (budget {BUDGET})", max(asked.values()), "", BUDGET),
    ]


def interfere(worker: Any) -> str:
    """End or freeze a worker in one of three ways, and name it."""
    how = random.choice(("killed", "stopped", "frozen"))
    with suppress(ProcessLookupError):  # it was stopped before, and has ended meanwhile
        if how == "frozen":
            os.kill(worker.pid, signal.SIGSTOP)
            time.sleep(LEASE * random.uniform(0.5, 2.0))
            os.kill(worker.pid, signal.SIGCONT)
        else:
            os.kill(worker.pid, signal.SIGKILL if how == "killed" else signal.SIGTERM)
    if how == "killed":
        worker.join()
    return how


def submitting(store: str, seconds: float) -> None:
    """Submit runs as long as the soak lasts; drive none."""

    async def submit() -> None:
        end = time.monotonic() + seconds
        async with open_runs(store) as runs:
            for number in itertools.count():
                if time.monotonic() > end:
                    return
                await runs.submit(f"goal {number}", run_id=str(number))
                await asyncio.sleep(0.2)

    asyncio.run(submit())


def soaked(store: str, folder: str) -> None:
    """Live as a worker until a signal comes."""

    async def live() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        options: dict[str, Any] = {"in_doubt": "model", "poll_seconds": 0.05, "lease_seconds": LEASE}
        async with open_runs(store, **options) as runs:
            worker = asyncio.create_task(runs.work(*traced(folder)))
            await stopped.wait()
            worker.cancel()

    asyncio.run(live())


def traced(folder: str) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel whose model and function write down each request and each effect."""

    def leave(file: str, mark: str) -> None:
        traces = os.open(os.path.join(folder, file), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(traces, f"{mark}\n".encode())
        os.close(traces)

    class Traced:
        @kernel_function(description="Leaves a trace.")
        async def work(self, mark: str) -> str:
            leave("effects", mark)
            await asyncio.sleep(0.01)
            return "ok"

    def reply(request: ScriptedRequest) -> Any:
        goal = next(word for message in request.messages for word in re.findall(r"goal (\d+)", str(message)))
        leave("requests", goal)
        if random.random() < 0.02:
            raise ConnectionResetError("the endpoint failed")
        done = sum(message["role"] == "tool" for message in request.messages)
        return say("Done.") if done >= 3 else call("tool-work", {"mark": f"{random.getrandbits(64)}"})

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(reply))
    kernel.add_plugin(Traced(), "tool")
    options = FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=BUDGET)
    return FunctionCallingStepwisePlanner(options=options), kernel


async def rinsed(store: str, folder: Path) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Let a last worker work until nothing moves any more; count requests by run, effects by call, runs by status."""
    async with open_runs(store, in_doubt="model", lease_seconds=LEASE) as runs:
        worker = asyncio.create_task(runs.work(*traced(str(folder))))
        left, quiet = -1, time.monotonic()
        while time.monotonic() - quiet < 30:
            counts = [await runs.count(status=status) for status in ("queued", "running")]
            if sum(counts) != left:
                left, quiet = sum(counts), time.monotonic()
            if left == 0:
                break
            await asyncio.sleep(0.2)
        worker.cancel()
        records = await runs.list(limit=1_000_000)
    asked, effects = ((folder / name).read_text().split() for name in ("requests", "effects"))
    return Counter(asked), Counter(effects), Counter(record.status for record in records)


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
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="kill, stop and freeze workers for so long")
    arguments = parser.parse_args()
    sys.exit(main(arguments.store, arguments.soak))
