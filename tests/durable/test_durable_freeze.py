"""Frozen workers: stopped for longer than their lease, they lose their runs, and do nothing more when they are back."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.core.facts import CallStarted
from planner_ext.durable import Runs, effect
from planner_ext.durable.store import opened_store
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.durable import GOAL, effects_in, open_runs, planner_of, turn, world
from support.processes import Lives
from support.stock import scripted_by

LEASE_SECONDS = 2.0
SECONDS = 120
LONG, SHORT = 30.0, 0.5
"""Seconds of a call or request that is under way when its process is back, and of one that has ended by then."""
LABEL = call("post-label", {"order": 1}, id="label")


class Post:
    """Tools that write down, with their process, that they began and that they ended."""

    def __init__(self, trace: Path, seconds: float) -> None:
        self._trace = trace
        self._seconds = seconds

    @effect("idempotent")
    @kernel_function(description="Prints a label.")
    async def label(self, order: int) -> str:
        return await self._do("label")

    @kernel_function(description="Sends an order; nobody may do it twice.")
    async def send(self, order: int) -> str:
        return await self._do("send")

    async def _do(self, what: str) -> str:
        write(self._trace, f"{what} begins")
        await asyncio.sleep(self._seconds)
        write(self._trace, f"{what} ends")
        return "done"


class SlowModel(ScriptedChatCompletion):
    """Writes down each request, and takes a while to answer."""

    _trace: Path
    _seconds: float

    async def _inner_get_chat_message_contents(self, *args: Any, **options: Any) -> Any:
        write(self._trace, "request")
        await asyncio.sleep(self._seconds)
        return await super()._inner_get_chat_message_contents(*args, **options)


def write(trace: Path, what: str) -> None:
    with trace.open("a") as file:
        file.write(f"{os.getpid()} {what}\n")


def labels(request: ScriptedRequest) -> ScriptedReply:
    """Print a label, which may be done twice, then answer."""
    return [LABEL, say("Done.")][turn(request)]


def sends(request: ScriptedRequest) -> ScriptedReply:
    """Send an order, which may not be done twice, then answer."""
    return [call("post-send", {"order": 1}, id="send"), say("Done.")][turn(request)]


def post(
    trace: Path, script: Any = labels, *, tool: float = 0.0, model: float = 0.0
) -> tuple[Any, Kernel]:
    """Make a planner and a kernel whose tools or whose model take a while."""
    kernel = Kernel()
    service = scripted_by(SlowModel, script)
    service._trace, service._seconds = trace, model
    kernel.add_service(service)
    kernel.add_plugin(Post(trace, tool), "post")
    return planner_of(), kernel


def frozen_life(
    store: str, trace: Path, script: Any, tool: float, model: float
) -> None:
    """Start a run, and wait for its result from any worker; then drive another one."""

    async def drive() -> None:
        async with open_runs(
            store, worker_id="frozen", poll_seconds=0.05, lease_seconds=LEASE_SECONDS
        ) as runs:
            await (
                await runs.start(
                    *post(trace, script, tool=tool, model=model), GOAL, run_id="order-7"
                )
            ).result()
            write(trace, "back")
            await (await runs.start(*post(trace), GOAL, run_id="order-8")).result()

    asyncio.run(drive())


@asynccontextmanager
async def working(
    store: str, trace: Path, script: Any = labels, **options: Any
) -> AsyncIterator[Runs]:
    """Let a worker live that takes due runs."""
    options = {"poll_seconds": 0.05, "lease_seconds": LEASE_SECONDS, **options}
    async with open_runs(store, worker_id="working", **options) as runs:
        work = asyncio.create_task(runs.work(*post(trace, script)))
        try:
            yield runs
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def reached(trace: Path, what: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not any(line.endswith(what) for line in effects_in(trace)):  # noqa: ASYNC110  (only another process tells)
            await asyncio.sleep(0.01)


async def ended(runs: Runs, status: str) -> None:
    async with asyncio.timeout(SECONDS):
        while not [record.run_id for record in await runs.list(status=status)]:  # noqa: ASYNC110  (likewise)
            await asyncio.sleep(0.02)


def of(pid: int | None, trace: Path) -> list[str]:
    """List what a process did."""
    return [
        line.split(" ", 1)[1]
        for line in effects_in(trace)
        if line.startswith(f"{pid} ")
    ]


@pytest.mark.parametrize(
    ("until", "tool", "model"),
    [
        ("label begins", LONG, 0.0),
        pytest.param("request", 0.0, LONG, marks=pytest.mark.kills),
        pytest.param("request", 0.0, SHORT, marks=pytest.mark.kills),
    ],
    ids=["in-a-call", "in-a-request", "its-reply-has-come"],
)
async def test_a_frozen_worker_loses_its_run_and_does_nothing_more(
    until: str, tool: float, model: float, lives: Lives, store: str, tmp_path: Path
) -> None:
    """Another worker finishes the run after the lease; back again, it writes, asks and calls nothing of it."""
    trace = tmp_path / "trace"
    async with working(store, trace) as runs:
        process = lives.begin(frozen_life, store, trace, labels, tool, model)
        await reached(trace, until)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        await ended(runs, "answered")
        before, rows = of(process.pid, trace), len((await runs.load("order-7")).facts)
        workers = {worker.name: worker.alive for worker in await runs.workers()}
        assert workers == {"frozen": False, "working": True}
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.to_thread(process.join, SECONDS)
        assert process.exitcode == 0
        done = of(process.pid, trace)
        assert done[: done.index("back")] == before
        assert done[done.index("back") :] == [
            "back",
            "request",
            "label begins",
            "label ends",
            "request",
        ]
        assert len((await runs.load("order-7")).facts) == rows


async def test_each_worker_has_its_own_lease(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """A worker with a longer one judges a frozen one by the lease that this one has, and takes its run over."""
    trace = tmp_path / "trace"
    async with working(store, trace, lease_seconds=600.0) as runs:
        process = lives.begin(frozen_life, store, trace, labels, LONG, 0.0)
        await reached(trace, "label begins")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        await ended(runs, "answered")
        assert {worker.name: worker.alive for worker in await runs.workers()} == {
            "frozen": False,
            "working": True,
        }
        process.kill()


async def test_a_freeze_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is seen; what is about to start waits until the store has told which runs are still owned."""
    async with Runs.sqlite(tmp_path / "runs.db", worker_id="w") as runs:
        workers: Any = runs._pool.workers
        workers._written -= 3600
        workers.announce("open")
        await workers.settle()
        await workers.settle()
        assert not workers._is_late()
    assert caplog.text.count("Worker w was not seen for 30 seconds") == 1


async def test_a_run_that_is_claimed_while_the_owned_ones_are_read_is_not_given_up(
    tmp_path: Path,
) -> None:
    """A late worker reads which runs it owns, and claims another one before it learns them: it keeps that one."""
    tries: list[str] = []
    read = asyncio.Event()
    told: list[tuple[Any, ...]] = []
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        workers: Any = runs._pool.workers
        driven = runs._pool.runner.driven
        loop = workers._loop

        class Late:
            def call_soon_threadsafe(self, *settle: Any) -> None:
                told.append(settle)
                loop.call_soon_threadsafe(read.set)

        await runs.submit(GOAL, run_id="r")
        workers._loop = Late()
        workers._written -= 3600
        workers.announce("open")
        await read.wait()
        script = [say("Done.")]
        (handle,) = await runs.recover(
            *world(tmp_path / "effects", script), arguments_for=tries.append
        )
        async with asyncio.timeout(SECONDS):
            while "r" not in driven.stores:  # noqa: ASYNC110  (nothing tells that it was taken up)
                await asyncio.sleep(0)
        workers._loop = loop
        for settle in told:
            loop.call_soon(*settle)
        assert (await handle.result()).status == "answered"
    assert tries == ["r"]


async def test_a_call_does_not_begin_whose_run_was_taken_while_its_start_was_recorded(
    tmp_path: Path,
) -> None:
    """A worker that froze there learns that before the function runs: another one may have run it meanwhile."""
    effects = tmp_path / "effects"
    book = call("shop-book", {"order": 1}, id="book")
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        pool = runs._pool
        workers: Any = pool.workers

        async def settle() -> None:
            facts = pool.runner.driven.stores["r"].writer.facts
            if any(isinstance(fact, CallStarted) for fact in facts):
                workers.settle = settles
                pool.on_lapse()(())

        settles = workers.settle
        workers.settle = settle
        handle = await runs.start(*world(effects, [book]), GOAL, run_id="r")
        result = await handle.result()
    assert [item.in_doubt for item in result.pending] == [True]
    assert effects_in(effects) == []


async def test_a_call_of_a_frozen_worker_is_in_doubt(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """A function that may not run twice waits for a person, and what the frozen worker finds out is discarded."""
    trace = tmp_path / "trace"
    async with working(store, trace, sends) as runs:
        process = lives.begin(frozen_life, store, trace, sends, LONG, 0.0)
        await reached(trace, "send begins")
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        await ended(runs, "paused")
        os.kill(process.pid, signal.SIGCONT)
        await reached(trace, "back")
        await asyncio.to_thread(process.join, SECONDS)
        assert (await runs.load("order-7")).record.status == "paused"
    assert [line for line in effects_in(trace) if "send" in line] == [
        f"{process.pid} send begins"
    ]


async def test_a_worker_that_is_back_first_continues_its_run(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """Where no other worker took the run, the frozen one goes on with it: its call is not in doubt, nor repeated."""
    trace = tmp_path / "trace"
    process = lives.begin(frozen_life, store, trace, labels, LEASE_SECONDS, 0.0)
    await reached(trace, "label begins")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    async with opened_store(store) as opened, asyncio.timeout(SECONDS):
        (row,) = (
            await opened.database.transact(
                ("SELECT worker_id FROM planner_workers", {})
            )
        )[0]
        while (await opened.last_heartbeat(str(row[0])) or (0, 0))[0] < LEASE_SECONDS:  # noqa: ASYNC110  (likewise)
            await asyncio.sleep(0.02)
    os.kill(process.pid, signal.SIGCONT)
    await asyncio.to_thread(process.join, SECONDS)
    assert process.exitcode == 0
    assert (
        of(process.pid, trace).count("label begins") == 2
    )  # once of this run, once of the other
    async with opened_store(store) as opened:
        assert await opened.count_runs(status="answered") == 2
