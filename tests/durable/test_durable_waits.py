"""A store that takes no transactions for a while: what a worker has in hand waits, and nothing known is in doubt."""

import asyncio
import shutil
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractContextManager,
    asynccontextmanager,
    closing,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any

import pytest

from planner_ext.durable import Runs, gauge, heartbeat, sqlite
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say
from support.durable import GOAL, effects_in, turn, world

LEASE_SECONDS = 1.0
SECONDS = 120
NAMES = ("a", "b", "c")


def books(request: ScriptedRequest) -> ScriptedReply:
    """Book two orders, which nobody may do twice, one after the other."""
    step = turn(request)
    order = call("shop-book", {"order": step}, id=f"book{step}")
    return order if step < 2 else say("Booked.")


@asynccontextmanager
async def in_calls(path: Path, effects: Path) -> AsyncIterator[Runs]:
    """Yield a worker whose runs are all in a call; check then that each call ran once, and nobody was asked."""
    options: dict[str, Any] = {"poll_seconds": 0.02, "lease_seconds": LEASE_SECONDS}
    async with Runs.sqlite(path, **options) as worker:
        submitted = [await worker.submit(GOAL, run_id=name) for name in NAMES]
        working = asyncio.create_task(worker.work(*world(effects, books, seconds=0.3)))
        while len(effects_in(effects)) < len(NAMES):  # noqa: ASYNC110  (no event says so)
            await asyncio.sleep(0.01)
        yield worker
        results = [await run.result(timeout=SECONDS) for run in submitted]
        assert [result.status for result in results] == ["answered"] * len(NAMES)
        assert {(run.retries, run.deaths) for run in await worker.list()} == {(0, 0)}
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert len(effects_in(effects)) == 2 * len(NAMES)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a small disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if (
        shutil.which("mount") is None
        or subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode
    ):
        pytest.skip("this machine lets nobody mount a disk")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@contextmanager
def full(path: Path) -> Iterator[None]:
    """Fill the disk of a store."""
    filler = path.with_name("filler")
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield
    filler.unlink()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a store, as a tool does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as tool:
        tool.execute("BEGIN IMMEDIATE")
        yield
        tool.execute("ROLLBACK")


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Let nobody write the files of a store, open ones included.

    Not the index of the log, which is mapped memory: a write there ends the process.
    """
    files = [str(path), f"{path}-wal"]
    if (
        shutil.which("chattr") is None
        or subprocess.run(
            ["chattr", "+i", *files], stderr=subprocess.DEVNULL, check=False
        ).returncode
    ):
        pytest.skip("this disk has no files that cannot be written")
    try:
        yield
    finally:
        subprocess.run(["chattr", "-i", *files], check=True)


def waiting() -> list[int | float]:
    """Read the gauge of the work that waits for its store."""
    return [point.value for point in gauge.observed("planner_ext.store.waiting")]


async def outlast(
    happens: Callable[[Path], AbstractContextManager[None]], path: Path, effects: Path
) -> None:
    """Let something happen to a store until the calls have ended, and the worker's lease has lapsed."""
    async with in_calls(path, effects) as worker:
        workers: Any = worker._pool.workers
        assert waiting() == [0]
        with happens(path):
            async with asyncio.timeout(SECONDS):
                while not (waiting()[0] > 1.5 and workers._is_late()):  # noqa: ASYNC110  (likewise)
                    await asyncio.sleep(0.01)


async def test_a_full_disk_is_waited_for(
    disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Results of calls are recorded when there is space again, however long that takes; a line of the log says so."""
    await outlast(full, disk / "runs.db", tmp_path / "effects")
    assert caplog.text.count("its work waits: The store") == 1
    assert "the disk is full" in caplog.text


async def test_a_locked_file_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where a tool holds the lock for longer than a lease."""
    monkeypatch.setattr(sqlite, "_BUSY_SECONDS", 0.1)
    await outlast(locked, tmp_path / "runs.db", tmp_path / "effects")


async def test_a_read_only_file_is_waited_for(tmp_path: Path) -> None:
    """The same where the file cannot be written any more."""
    await outlast(read_only, tmp_path / "runs.db", tmp_path / "effects")


@pytest.mark.parametrize("seconds", [3600, -3600])
async def test_a_clock_that_is_set_puts_no_call_in_doubt(
    seconds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set by an hour while another worker looks: nobody is late by it, and nobody loses runs."""
    path = tmp_path / "runs.db"
    effects = tmp_path / "effects"
    other = Runs.sqlite(path, poll_seconds=0.02, lease_seconds=LEASE_SECONDS)
    async with in_calls(path, effects), other as looking:
        now = f"({sqlite.SqliteDatabase.now} + {seconds})"
        monkeypatch.setattr(sqlite.SqliteDatabase, "now", now)
        monkeypatch.setattr(sqlite.SqliteDatabase, "age", f"{now} - seen_at")
        monkeypatch.setattr("time.time", lambda before=time.time: before() + seconds)
        for _ in range(10):
            assert await looking.recover(*world(effects, books)) == []


async def test_a_machine_that_slept_puts_no_call_in_doubt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All its workers slept: each asks the store what it still owns, and goes on with that."""
    path = tmp_path / "runs.db"
    effects = tmp_path / "effects"
    other = Runs.sqlite(path, poll_seconds=0.02, lease_seconds=LEASE_SECONDS)
    async with in_calls(path, effects), other as looking:
        before = heartbeat._steady
        monkeypatch.setattr(heartbeat, "_steady", lambda: before() + 3600)
        for _ in range(10):
            assert await looking.recover(*world(effects, books)) == []
    assert caplog.text.count("it still owns 3 runs") == 1


def test_the_clock_of_leases_goes_on_while_the_machine_sleeps() -> None:
    """And nobody can set it."""
    steady = heartbeat._steady()
    assert 0 <= heartbeat._steady() - steady < SECONDS
    assert steady >= time.monotonic() - SECONDS
