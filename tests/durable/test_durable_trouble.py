"""A store in trouble for a while: its workers wait, and continue by themselves."""

import asyncio
import logging
import sqlite3
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner_ext.durable import RetryPolicy, Runs, StoreError, sqlite
from planner_ext.durable.store import JournalStore
from planner_ext.engine.activation import Activation, ActivationRun
from planner_ext.testing import ScriptedReply, ScriptedRequest, say
from support.durable import GOAL, PAY, decide_all, world

BRIEF = RetryPolicy(first_delay=0.01, outage_seconds=0.2)
"""How long a store is waited for."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a lock for less than half a minute."""
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.1)


async def logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    async with asyncio.timeout(120):
        while text not in caplog.text:  # noqa: ASYNC110  (no event says so)
            await asyncio.sleep(0.01)


async def test_a_worker_outlasts_a_locked_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says once that due runs wait, and drives them when the lock is gone."""
    path = tmp_path / "runs.db"
    async with Runs.sqlite(path, poll_seconds=0.02) as worker:
        run = await worker.submit(GOAL, run_id="a")
        with closing(sqlite3.connect(path, isolation_level=None)) as tool:
            tool.execute("BEGIN IMMEDIATE")
            working = asyncio.create_task(
                worker.work(*world(tmp_path / "effects", [say("Done.")]))
            )
            await logged(caplog, "The store cannot be used, its work waits")
            tool.execute("ROLLBACK")
        assert (await run.result(timeout=120)).status == "answered"
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert caplog.text.count("its work waits") == 1


async def test_a_worker_does_not_wait_for_ever(tmp_path: Path) -> None:
    """After `outage_seconds` it ends with the reason and the way out, so that its supervisor sees it."""
    path = tmp_path / "runs.db"
    async with Runs.sqlite(path, poll_seconds=0.02, retry=BRIEF) as worker:
        await worker.submit(GOAL, run_id="a")
        with closing(sqlite3.connect(path, isolation_level=None)) as tool:
            tool.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="another process holds its lock"):
                await asyncio.wait_for(
                    worker.work(*world(tmp_path / "effects", [])), 120
                )


async def test_a_fault_of_the_store_is_put_off_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose fact cannot be written is not driven again and again until the store can be used."""
    path = tmp_path / "runs.db"
    tool = sqlite3.connect(path, isolation_level=None, check_same_thread=False)

    def locks(_: ScriptedRequest) -> ScriptedReply:
        if not caplog.records:
            tool.execute("BEGIN IMMEDIATE")
        return say("Done.")

    application = world(tmp_path / "effects", locks)
    async with Runs.sqlite(path, poll_seconds=0.02, retry=BRIEF) as worker:
        with pytest.raises(StoreError):
            await (await worker.start(*application, GOAL, run_id="a")).result()
        assert "run a fault StoreError" in caplog.text
        for _ in range(10):
            with suppress(
                StoreError
            ):  # a read that shares a transaction with the write that waits
                assert await worker.recover(*application) == []
        tool.execute("ROLLBACK")
        async with asyncio.timeout(120):
            while not (taken := await worker.recover(*application)):  # noqa: ASYNC110  (polled, as `work` does)
                await asyncio.sleep(worker.poll_seconds)
        assert (await taken[0].result()).status == "answered"
    tool.close()
    assert caplog.text.count("run a fault") == 1


async def test_a_run_whose_fault_is_not_stored_stays_with_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker would take it at once, and the fault would then be stored over that one's claim."""
    path = tmp_path / "runs.db"
    failing = world(tmp_path / "effects", [])
    async with Runs.sqlite(path, poll_seconds=0.02, worker_id="a") as worker:
        store = worker._pool.claims.store
        parks = store.park
        owners: list[str | None] = []

        async def park(run_id: str, **values: Any) -> bool:
            owners.append((await store.record(run_id)).owner)
            if len(owners) < 3:
                raise StoreError("the disk is full")
            return await parks(run_id, **values)

        monkeypatch.setattr(JournalStore, "park", staticmethod(park))
        handle = await worker.start(*failing, GOAL, run_id="r")
        with pytest.raises(Exception, match="script"):
            await handle.result()
        async with asyncio.timeout(120):
            while (await store.record("r")).owner is not None:  # noqa: ASYNC110  (no event says so)
                await asyncio.sleep(0.01)
        assert (await store.record("r")).problem
    assert owners == ["a", "a", "a"]


async def test_a_fault_is_not_stored_over_the_claim_of_another_worker(
    tmp_path: Path,
) -> None:
    """Whoever parks a run late, as the store did not answer, leaves it to the worker that has it now."""
    path = tmp_path / "runs.db"
    async with Runs.sqlite(path) as worker:
        store = worker._pool.claims.store
        await worker.submit(GOAL, run_id="r")
        assert await store.claim("r", "other", seen=None)
        await worker._pool.claims.park_fault("r", ValueError("late"))
        record = await store.record("r")
    assert (record.owner, record.problem) == ("other", "")


@dataclass
class Locking:
    """A planner that locks the store when its run has paused."""

    planner: Any
    tool: sqlite3.Connection
    run: Any = None

    def journaled(
        self, kernel: Any, activation: Activation, *, arguments: Any = None
    ) -> ActivationRun[Any]:
        self.run = self.planner.journaled(kernel, activation, arguments=arguments)
        return self

    async def result(self) -> Any:
        result = await self.run.result()
        self.tool.execute("BEGIN IMMEDIATE")
        return result


async def test_a_run_is_released_when_the_store_can_be_used_again(
    tmp_path: Path,
) -> None:
    """A pause, then a locked store: once it is open, another worker takes the decision that was made on the run."""
    path = tmp_path / "runs.db"
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")])
    tool = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    async with Runs.sqlite(path, poll_seconds=0.02, retry=BRIEF) as worker:
        locking = Locking(planner, tool)
        handle = await worker.start(locking, kernel, GOAL, run_id="a")
        assert (await handle.result()).status == "paused"
        owners = tool.execute("SELECT owner FROM planner_runs").fetchall()
        assert owners == [(worker.worker_id,)]
        tool.execute("ROLLBACK")
        assert await decide_all(str(path)) == 1
        async with Runs.sqlite(path, poll_seconds=0.02) as other:
            async with asyncio.timeout(120):
                while not (taken := await other.recover(planner, kernel)):  # noqa: ASYNC110  (polled, as `work` does)
                    await asyncio.sleep(other.poll_seconds)
            assert (await taken[0].result()).status == "answered"
    tool.close()


async def test_a_heartbeat_that_fails_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line has the store's reason and the way out, once for as long as it lasts."""
    path = tmp_path / "runs.db"
    async with Runs.sqlite(path, worker_id="w", lease_seconds=0.5):
        with closing(sqlite3.connect(path, isolation_level=None)) as tool:
            tool.execute("BEGIN IMMEDIATE")
            await logged(caplog, "The heartbeat of worker w fails: The store")
            tool.execute("ROLLBACK")
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING
    ]
    assert "End the tool that has it open" in "".join(lines)
