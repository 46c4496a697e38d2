"""Which workers of a store live: each holds a lock, and writes a heartbeat to its row.

A worker that holds its lock without a heartbeat for its lease is frozen or cut off:
others take its runs. The heartbeat has its own thread, so that a blocked event loop is
no death. A worker whose own heartbeat is late first gives up its runs.
"""

import asyncio
import logging
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from planner_ext.core.values import frozen
from planner_ext.durable.database import Execute, Value
from planner_ext.durable.store import JournalStore, RunOwner
from planner_ext.engine.concurrency import in_thread
from planner_ext.engine.log import one_line

logger = logging.getLogger(__name__)

_BEATS = 5
"""Heartbeats in a lease."""
_LONGEST_SECONDS = 60.0
"""The longest time between two heartbeats, for any lease."""

_FORGET = """
    DELETE FROM planner_workers WHERE worker_id = :worker_id OR name = :name OR seen_at < {now} - 86400
"""
"""Removes the row of the worker that had this name before, and those of workers that
died a day ago."""
_DISOWN = (
    "UPDATE planner_runs SET owner = :name || ' (earlier)' WHERE owner = :worker_id"
)
"""Names an owner that is gone: a worker of a file has the same id in each life, and a
death must be seen as one."""

_COLUMNS = (
    "worker_id",
    "name",
    "host",
    "pid",
    "status",
    "concurrency",
    "started_at",
    "seen_at",
)
_WORKERS = """
    SELECT {age} <= lease_seconds, worker_id, name, host, pid, status, concurrency, started_at, seen_at
    FROM planner_workers ORDER BY started_at, worker_id
"""
_DRIVEN = (
    "SELECT owner, run_id FROM planner_runs WHERE owner IS NOT NULL ORDER BY run_id"
)

_AGE = "SELECT {age} FROM planner_workers WHERE worker_id = :worker_id"

_SEEN = """
    INSERT INTO planner_workers (worker_id, name, host, pid, status, concurrency, lease_seconds, started_at, seen_at)
    VALUES (:worker_id, :name, :host, :pid, :status, :concurrency, :lease, {now}, {now})
    ON CONFLICT (worker_id) DO UPDATE
    SET status = excluded.status, concurrency = excluded.concurrency, seen_at = excluded.seen_at
"""


@frozen
class WorkerRecord:
    """One worker of a store; times are in seconds since the epoch.

    Attributes:
        worker_id: Its unique id, which owns runs.
        name: Unique among living workers.
        host: The machine.
        status: ``open``: drives what it starts itself; ``working``: takes due runs,
            too; ``leaving``: takes no more.
        seen_at: Its last heartbeat, by the clock of the store.
        alive: Whether it holds its lock, and was seen within its lease.
        concurrency: How many runs it drives at once at most; None if it takes none.
        runs: The names of the runs that it drives.
    """

    worker_id: str
    name: str
    host: str
    pid: int
    status: str
    started_at: float
    seen_at: float
    alive: bool
    concurrency: int | None = None
    runs: tuple[str, ...] = ()


async def list_workers(store: JournalStore) -> list[WorkerRecord]:
    """List the workers of a store, the oldest first."""
    workers = _WORKERS.format(age=store.database.age)
    rows, owned = await store.database.transact((workers, {}), (_DRIVEN, {}))
    runs: dict[Value, list[str]] = {}
    for owner, run_id in owned:
        runs.setdefault(owner, []).append(str(run_id))
    found: list[WorkerRecord] = []
    for was_seen, *values in rows:
        row: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
        worker_id = str(row["worker_id"])
        alive = bool(was_seen) and await store.database.holds_lock(worker_id)
        found.append(
            WorkerRecord(**row, alive=alive, runs=tuple(runs.get(worker_id, ())))
        )
    return found


class WorkerLocks(Protocol):
    """The locks of a store's workers."""

    @property
    def name(self) -> str:
        """This worker's name."""
        ...

    @property
    def worker_id(self) -> str:
        """This worker's unique id."""
        ...

    @property
    def hinted(self) -> asyncio.Event:
        """Set when the database hints that a run may be due."""
        ...

    def missing(self, is_locked: Mapping[str, bool]) -> set[str]:
        """Return those of some workers, this one included, that hold no lock any more.

        Args:
            is_locked: Whether the database sees each one's lock.
        """
        ...


class LeasedWorkers:
    """The workers of a store, and this worker's heartbeat.

    Args:
        store: The store.
        locks: Which workers hold their locks.
        lease_seconds: How long after its last heartbeat this worker counts as alive.

    Attributes:
        on_lapse: Called in the event loop when the lease has lapsed.
    """

    def __init__(
        self, store: JournalStore, locks: WorkerLocks, *, lease_seconds: float
    ) -> None:
        self.on_lapse: Callable[[], object] = lambda: None
        self._store = store
        self._locks = locks
        self._lease = lease_seconds
        self._interval = min(lease_seconds / _BEATS, _LONGEST_SECONDS)
        self._status: tuple[str, int | None] = ("open", None)
        self._lapses = 0
        self._is_steady = True
        self._marked = _clocks()
        self._wake = threading.Event()
        self._leaving = False
        self._started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._beat, name="planner_ext-heartbeat", daemon=True
        )
        self._loop: asyncio.AbstractEventLoop

    async def open(self) -> None:
        """Enter this worker's row, and keep it fresh; raise `StoreError` if it cannot be written."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        await asyncio.wrap_future(self._started)

    async def close(self) -> None:
        """Remove this worker's row."""
        self._leaving = True
        self._wake.set()
        if self._started.done():
            await in_thread(partial(self._thread.join, _BEATS * self._interval))

    @property
    def worker_id(self) -> str:
        """This worker's unique id."""
        return self._locks.worker_id

    @property
    def hinted(self) -> asyncio.Event:
        """Set when the database hints that a run may be due."""
        return self._locks.hinted

    def dead_among(self, owners: Sequence[RunOwner]) -> set[str]:
        """Return the owners of runs that hold no lock, or were not seen within their lease.

        A worker that was late does not judge others: where the machine slept, all were
        late.
        """
        dead = self._locks.missing(
            {owner.worker_id: owner.is_locked for owner in owners}
        )
        if self._is_steady and not self._is_late():
            dead |= {owner.worker_id for owner in owners if owner.is_lapsed}
        return dead - {self.worker_id}

    def hold(self) -> Callable[[], bool]:
        """Return a check whether this worker has kept its lease since now."""
        lapses = self._lapses
        return lambda: self._lapses == lapses and not self._is_late()

    def announce(self, status: str, concurrency: int | None = None) -> None:
        """Show in this worker's row what it does."""
        self._status = status, concurrency or self._status[1]
        self._wake.set()

    def _is_late(self) -> bool:
        """Whether the thread did not run for the lease: a frozen process, or machine."""
        (steady, wall) = _clocks()
        (steady_then, wall_then) = self._marked
        return steady - steady_then > self._lease or wall - wall_then > self._lease

    def _mark(self) -> None:
        if self._is_late():
            self._lapse()
        self._marked = _clocks()

    def _lapse(self) -> None:
        self._lapses += 1  # before anything else: what checks the lease stops here
        was_steady = self._is_steady
        self._is_steady = False
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.on_lapse)
        # Else it is the same freeze, seen once more by the age of the row.
        if was_steady:
            logger.warning(
                "Worker %s was not seen for %g seconds; it gives up its runs.",
                self.worker_id,
                self._lease,
            )

    def _beat(self) -> None:
        """Keep the row fresh until the worker leaves; a connection that fails is opened again."""
        failed = False
        while not self._leaving:
            try:
                with self._store.database.connection(
                    timeout=_BEATS * self._interval
                ) as execute:
                    self._beat_in(execute)
            except Exception as error:
                # A worker whose heartbeat has ended would lose its runs.
                if not self._started.done():
                    self._started.set_exception(error)
                    return
                if not failed:
                    logger.warning(
                        "The heartbeat of worker %s fails: %s",
                        self.worker_id,
                        one_line(error),
                    )
                failed = True
                self._mark()
                self._wake.wait(self._interval)

    def _beat_in(self, execute: Execute) -> None:
        now = self._store.database.now
        age = self._store.database.age
        values: dict[str, Value] = {
            "worker_id": self.worker_id,
            "name": self._locks.name,
            "lease": self._lease,
        }
        if not self._started.done():
            execute(_FORGET.format(now=now), values)
            execute(_DISOWN, values)
        while not self._leaving:
            lapses = self._lapses
            self._mark()
            seen = execute(_AGE.format(age=age), values)
            if lapses == self._lapses and any(
                float(seconds or 0) > self._lease for (seconds,) in seen
            ):
                self._lapse()
            status, concurrency = self._status
            row = {
                **values,
                "host": platform.node(),
                "pid": os.getpid(),
                "status": status,
                "concurrency": concurrency,
            }
            execute(_SEEN.format(now=now), row)
            self._mark()
            self._is_steady = lapses == self._lapses
            if not self._started.done():
                self._started.set_result(None)
            self._wake.wait(self._interval)
            self._wake.clear()
        self._mark()
        execute("DELETE FROM planner_workers WHERE worker_id = :worker_id", values)


def _clocks() -> tuple[float, float]:
    """Read the monotonic clock, which stands still while the machine sleeps, and the one that may be set."""
    return time.monotonic(), time.time()
