"""A worker that leaves finishes what is in flight, starts nothing more, and hands its runs over at once."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import pytest

from planner_ext.cli.__main__ import main
from planner_ext.core.facts import CallFinished, ModelReplied, RequestFailed
from planner_ext.core.values import Usage
from planner_ext.durable import Approvals, RunRecord, Runs
from planner_ext.durable.store import JournalStore, opened_store
from planner_ext.engine import concurrency
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.durable import GOAL, open_runs, turn
from support.durable import world as shop
from support.gated import GATED_IN, World, application, until
from support.processes import Lives

T = TypeVar("T")
EVERYTHING = ("ask0", "book", "label", "ask1", "post", "ask2")


def worker_life(folder: Path, name: str, words: list[str]) -> None:
    """Be a worker of the command line, whose output is in a file."""
    os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), sys.stderr.fileno())
    sys.argv = [
        "planner-ext",
        "worker",
        "--app",
        "support.gated:application",
        "--worker-id",
        name,
        *words,
    ]
    main()


class Scene:
    """A store with runs, and the workers that a test starts on it."""

    def __init__(self, lives: Lives, store: str, folder: Path) -> None:
        self.store, self.world = store, World(folder)
        self._lives, self._folder = lives, folder
        self._workers: list[ForkServerProcess] = []

    def submit(self, *names: str) -> None:
        """Put runs into the store that no worker drives yet."""

        async def created(store: JournalStore) -> None:
            for name in names:
                assert await store.create(name, name, owner=None, at=1.0)

        self.ask(created)

    def worker(self, name: str, *words: str) -> ForkServerProcess:
        """Start a worker."""
        given = ["--store", self.store, *words]
        worker = self._lives.begin(
            worker_life, self._folder, name, given, **{GATED_IN: str(self._folder)}
        )
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        """End the workers that a failed test leaves."""
        for worker in self._workers:
            worker.kill()
            worker.join()

    def said(self, name: str) -> str:
        """Return what a worker has printed."""
        file = self._folder / name
        return file.read_text() if file.exists() else ""

    def terminated(self, worker: ForkServerProcess, name: str) -> None:
        """Send a worker SIGTERM, and wait until it has noticed."""
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGTERM)
        until(lambda: "Calls in flight have" in self.said(name))

    def ask(self, question: Callable[[JournalStore], Awaitable[T]]) -> T:
        """Ask the store."""

        async def asked() -> T:
            async with opened_store(self.store) as store:
                return await question(store)

        return asyncio.run(asked())

    def record(self, name: str) -> RunRecord:
        """Read the row of a run."""
        return self.ask(lambda store: store.record(name))

    def facts(self, name: str, kind: type) -> list[object]:
        """List the facts of a kind in a run's journal."""
        return [
            fact
            for fact in self.ask(lambda store: store.load(name)).facts
            if isinstance(fact, kind)
        ]

    def answered(self, *names: str) -> None:
        """Wait until runs are answered."""
        until(lambda: all(self.record(name).status == "answered" for name in names))


@pytest.fixture
def scene(lives: Lives, store: str, tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(lives, store, tmp_path)
    yield scene
    scene.close()


def ended(process: ForkServerProcess) -> int | None:
    """Wait for a process, and return its exit code."""
    process.join(120)
    return process.exitcode


def all_of(*names: str) -> list[str]:
    """List everything that runs do, sorted."""
    return sorted(f"{name}/{step}" for name in names for step in EVERYTHING)


def test_a_deployment_loses_nothing_and_asks_no_person(scene: Scene) -> None:
    """On SIGTERM what is in flight ends and is recorded, nothing starts, and another worker has each run at once."""
    world = scene.world
    scene.submit("calls", "asks")
    world.close("calls/book", "calls/label", "asks/ask0")
    old = scene.worker("old")
    until(
        lambda: (
            sorted(world.begun())
            == ["asks/ask0", "calls/ask0", "calls/book", "calls/label"]
        )
    )
    new = scene.worker("new")
    until(lambda: "Worker new" in scene.said("new"))
    scene.terminated(old, "old")

    world.open(
        "asks/ask0"
    )  # the reply is paid for, and recorded; the calls that it asks for start elsewhere
    scene.answered("asks")
    assert old.is_alive()  # the other run still has calls in flight there
    world.open("calls/book")
    until(lambda: len(scene.facts("calls", CallFinished)) == 1)
    assert scene.record("calls").owner is not None
    world.open("calls/label")
    assert ended(old) == 0
    scene.answered("calls")

    assert old.pid is not None
    assert sorted(world.begun(old.pid)) == [
        "asks/ask0",
        "calls/ask0",
        "calls/book",
        "calls/label",
    ]
    assert sorted(world.begun()) == sorted(world.ended()) == all_of("asks", "calls")
    assert len(scene.facts("asks", ModelReplied)) == 3
    new.terminate()
    assert ended(new) == 0
    assert "interrupted" not in scene.said("old")


def test_a_call_that_outlasts_the_grace_is_in_doubt(scene: Scene) -> None:
    """It is cancelled when the grace is over; then its function's declaration decides what happens to it."""
    scene.submit("order")
    scene.world.close("order/book", "order/label")
    worker = scene.worker("old", "--grace", "0.2")
    until(lambda: len(scene.world.begun()) == 3)
    scene.terminated(worker, "old")
    assert ended(worker) == 0
    assert scene.world.ended() == ["order/ask0"]
    assert scene.record("order").owner is None
    scene.world.open("order/book", "order/label")
    assert ended(scene.worker("new", "--once")) == 0
    assert scene.record("order").status == "paused"
    assert doubts(scene.store) == ["order/0/book"]


def test_a_second_signal_ends_a_worker_at_once(scene: Scene) -> None:
    """Who cannot wait for the grace need not kill it; its runs are still free for other workers."""
    scene.submit("order")
    scene.world.close("order/book")
    worker = scene.worker("old", "--grace", "600")
    until(lambda: "order/label" in scene.world.ended())
    scene.terminated(worker, "old")
    assert worker.is_alive()
    worker.terminate()
    assert ended(worker) == 0
    assert scene.world.ended() == ["order/ask0", "order/label"]
    assert scene.record("order").owner is None


@pytest.mark.parametrize("hangs", ["hung/label", "hung/post"])
def test_a_hung_call_is_cancelled_from_elsewhere(hangs: str, scene: Scene) -> None:
    """Cancelling its run frees its worker's only place, also where a synchronous function hangs in a thread."""
    scene.submit("hung")
    scene.world.close(hangs)
    worker = scene.worker("old", "--max-concurrency", "1")
    until(lambda: hangs in scene.world.begun())
    scene.submit("next")
    assert asyncio.run(cancelled(scene.store, "hung"))
    scene.answered("next")
    assert scene.record("hung").status == "stopped"
    assert hangs not in scene.world.ended()
    scene.terminated(worker, "old")
    assert ended(worker) == 0


async def cancelled(store: str, run_id: str) -> bool:
    async with Runs.connect(store) as runs:
        return await runs.cancel(run_id, by="ann", reason="it hangs")


def doubts(store: str) -> list[str]:
    """List the calls in doubt that wait for a person."""

    async def listed() -> list[str]:
        async with Approvals.connect(store) as approvals:
            return [one.id for one in await approvals.pending() if one.in_doubt]

    return asyncio.run(listed())


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world of runs in this process."""
    monkeypatch.setenv(GATED_IN, str(tmp_path))
    return World(tmp_path)


async def begun(world: World, *names: str) -> None:
    """Wait until steps have begun in this process."""
    async with asyncio.timeout(120):
        while not set(names) <= set(world.begun()):  # noqa: ASYNC110  (the trace is a file)
            await asyncio.sleep(0.01)


async def leave(runs: Runs, world: World, *opened: str) -> None:
    """Close runs while calls are in flight, and let these calls end only then."""
    closing = asyncio.create_task(runs.close())
    await asyncio.sleep(0)
    for name in opened:
        world.open(name)
    await closing


async def see_through(store: str, world: World, *steps: str) -> None:
    """Finish the run, and check that everything was done once."""
    async with open_runs(store) as runs:
        result = await (
            await runs.start(*application(), "order", run_id="order")
        ).result()
    assert (result.status, result.iterations) == (
        "answered",
        3,
    )  # no request is charged that was not sent
    assert (
        sorted(world.begun())
        == sorted(world.ended())
        == sorted([*all_of("order"), *steps])
    )


async def test_leaving_the_block_drains(store: str, world: World) -> None:
    """The end of the block waits for calls in flight, and starts nothing more; the next worker does the rest."""
    world.close("order/book")
    async with open_runs(store) as runs:
        await runs.start(*application(), "order", run_id="order")
        await begun(world, "order/book", "order/label")
        await leave(runs, world, "order/book")
    assert sorted(world.begun()) == ["order/ask0", "order/book", "order/label"]
    async with opened_store(store) as journals:
        last = (await journals.load("order")).facts[-1]
    assert isinstance(last, RequestFailed)
    assert last.usage == Usage()  # the request was not sent
    await see_through(store, world)


class SlowWrites:
    """A store whose journals take no fact, once told so, until a test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.may_end = asyncio.Event(), asyncio.Event()
        self.may_end.set()
        write = JournalStore.append

        async def append(store: JournalStore, run_id: str, *steps: Any) -> None:
            self.began.set()
            await self.may_end.wait()
            await write(store, run_id, *steps)

        monkeypatch.setattr(JournalStore, "append", append)

    async def begin(self, wait_for: Callable[[], bool]) -> None:
        """Wait until the condition holds and a write waits."""
        async with asyncio.timeout(120):
            await self.began.wait()
            while not wait_for():  # noqa: ASYNC110  (the trace is a file)
                await asyncio.sleep(0.01)

    def stop(self) -> None:
        """Let no further write end."""
        self.began.clear()
        self.may_end.clear()


async def leave_while_results_wait(
    runs: Runs, world: World, writes: SlowWrites, *, record: bool
) -> None:
    """Close runs without grace after both calls have returned and before the store has taken either result."""
    await runs.start(*application(), "order", run_id="order")
    await begun(world, "order/book", "order/label")
    writes.stop()
    world.open("order/book", "order/label")
    await writes.begin(lambda: len(world.ended()) == 3)
    closing = asyncio.create_task(runs.close(0))
    for _ in range(20):  # the cancellation arrives
        await asyncio.sleep(0)
    if record:
        writes.may_end.set()
    await closing
    writes.may_end.set()


async def test_results_in_hand_are_recorded_after_the_grace(
    store: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls that have returned when the grace ends are not in doubt, though the store took no result yet."""
    writes = SlowWrites(monkeypatch)
    world.close("order/book", "order/label")
    async with open_runs(store) as runs:
        await leave_while_results_wait(runs, world, writes, record=True)
    await see_through(store, world)


async def test_a_store_that_stays_slow_does_not_keep_the_worker(
    store: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results in hand are given up after a bound; then their calls are in doubt."""
    monkeypatch.setattr(concurrency, "IN_HAND", 0.05)
    writes = SlowWrites(monkeypatch)
    world.close("order/book", "order/label")
    async with open_runs(store) as runs:
        await leave_while_results_wait(runs, world, writes, record=False)
    async with open_runs(store) as runs:
        started = await runs.start(*application(), "order", run_id="order")
        assert (await started.result()).status == "paused"


async def test_a_request_whose_reply_is_recorded_as_the_worker_leaves_has_not_failed(
    store: str, world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Its reply is the last fact, and no log line says that a failed request could not be recorded."""
    caplog.set_level("INFO")
    world.close("order/ask0")
    async with open_runs(store) as runs:
        await runs.start(*application(), "order", run_id="order")
        await begun(world, "order/ask0")
        await leave(runs, world, "order/ask0")
    async with opened_store(store) as journals:
        last = (await journals.load("order")).facts[-1]
    assert isinstance(last, ModelReplied)
    assert "a failed request is not recorded" not in caplog.text
    await see_through(store, world)


@pytest.mark.parametrize("steps", [1, 2, 4])
async def test_a_second_cancellation_ends_the_grace_and_releases_the_runs(
    steps: int, store: str, world: World
) -> None:
    """However soon it comes after the first, the runs are free for other workers."""
    world.close("order/book")

    async def work() -> None:
        async with open_runs(store, grace_seconds=600.0) as runs:
            await runs.start(*application(), "order", run_id="order")
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await begun(world, "order/book", "order/label")
    working.cancel()
    for _ in range(steps):
        await asyncio.sleep(0)
    working.cancel()
    with pytest.raises(asyncio.CancelledError):
        await working
    async with opened_store(store) as journals:
        assert (await journals.record("order")).owner is None


async def test_leaving_twice_is_leaving_once(store: str, world: World) -> None:
    """The end of the block waits for a close that has begun, and does not close the store under what is in flight."""
    world.close("order/book")
    async with open_runs(store) as runs:
        await runs.start(*application(), "order", run_id="order")
        await begun(world, "order/book", "order/label")
        first = asyncio.create_task(runs.close())
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_later(0.1, world.open, "order/book")
    await first
    await see_through(store, world)


async def test_a_call_whose_turn_comes_while_the_worker_leaves_does_not_start(
    store: str, world: World
) -> None:
    """The calls of its batch that are in flight end and are recorded; it starts in the next worker."""
    planner, kernel = application()
    planner.options = planner.options.model_copy(
        update={"execution": ToolExecution(max_concurrency=2)}
    )
    batch = [
        call(f"shop-{name}", {"name": f"order/{name}"}, id=name)
        for name in ("book", "label", "post")
    ]
    kernel.add_service(ScriptedChatCompletion([calls(*batch)]), overwrite=True)
    world.close("order/book", "order/label")
    async with open_runs(store) as runs:
        await runs.start(planner, kernel, "order", run_id="order")
        await begun(world, "order/book", "order/label")
        await leave(runs, world, "order/label", "order/book")
    assert sorted(world.ended()) == ["order/book", "order/label"]


class Interval:
    """The time of a planner that waits between its requests until a test lets it continue."""

    def __init__(self) -> None:
        self.waits, self.over = asyncio.Event(), asyncio.Event()

    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.waits.set()
        await self.over.wait()


async def test_a_request_that_waits_for_its_interval_is_not_sent(
    store: str, tmp_path: Path
) -> None:
    """The worker begins to leave meanwhile: the server sees no further request, and the run is charged none."""
    interval, effects = Interval(), tmp_path / "effects"
    label = [call("shop-label", {"order": 1}), say("Done.")]
    planner, kernel = shop(
        effects, lambda r: label[turn(r)], clock=interval, min_iteration_time_ms=1000
    )
    model = kernel.get_service(type=ScriptedChatCompletion)
    async with open_runs(store, poll_seconds=0.02) as runs:
        await runs.start(planner, kernel, GOAL, run_id="order")
        await asyncio.wait_for(interval.waits.wait(), 120)
        leaving = asyncio.create_task(runs.close())
        async with Runs.connect(store) as client:
            while [worker.status for worker in await client.workers()] != ["leaving"]:  # noqa: ASYNC110  (its row says)
                await asyncio.sleep(0.01)
        interval.over.set()
        await asyncio.wait_for(leaving, 120)
    assert len(model.requests) == 1
    async with open_runs(store) as runs:
        planner, kernel = shop(effects, lambda _: say("Done."))
        result = await (
            await runs.start(planner, kernel, GOAL, run_id="order")
        ).result()
    assert (result.status, result.iterations) == ("answered", 2)
