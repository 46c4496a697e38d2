"""Which workers of a store live: each holds a lock, and writes a heartbeat to its row.

A worker that holds its lock without a heartbeat for its lease is frozen or cut off:
others take its runs. The heartbeat has its own thread, so that a blocked event loop is
no death.

No clock of another process, nor one that somebody may set, decides about a lease. A
worker counts the beats that another one missed while its own were written: so nobody
dies of a database that takes no writes, of a machine that slept, or of a clock that was
set. A worker whose own beats were late starts nothing until the store has told which of
its runs it still owns; it gives up the others.
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
from typing import Any, NamedTuple, Protocol

from planner_ext.core.values import frozen
from planner_ext.durable.database import Execute
from planner_ext.durable.store import JournalStore, RunOwner
from planner_ext.engine.concurrency import in_thread
from planner_ext.engine.log import escaped

logger = logging.getLogger(__name__)

_BEATS = 5
"""Heartbeats in a lease: a worker that misses as many is gone."""
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

_OWNED = "SELECT run_id FROM planner_runs WHERE owner = :worker_id"

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
    runs: dict[str, list[str]] = {}
    for owner, run_id in owned:
        runs.setdefault(owner, []).append(run_id)
    found: list[WorkerRecord] = []
    for was_seen, *values in rows:
        row: dict[str, Any] = dict(zip(_COLUMNS, values, strict=True))
        worker_id = row["worker_id"]
        alive = bool(was_seen) and await store.database.holds_lock(worker_id)
        found.append(
            WorkerRecord(**row, alive=alive, runs=tuple(runs.get(worker_id, ())))
        )
    return found


class WorkerLocks(Protocol):
    """The locks of a store's workers.

    Attributes:
        name: This worker's name.
        worker_id: Its unique id.
        hinted: Set when the database hints that a run may be due.
    """

    name: str
    worker_id: str
    hinted: asyncio.Event

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
        worker_id: This worker's unique id.
        hinted: Set when the database hints that a run may be due.
        on_lapse: Called when the lease had lapsed, before the store is asked, in the
            heartbeat's thread. What it returns is called in the event loop, with the
            names of the runs that this worker still owns.
    """

    def __init__(
        self, store: JournalStore, locks: WorkerLocks, *, lease_seconds: float
    ) -> None:
        self.on_lapse: Callable[[], Callable[[set[str]], object]] = lambda: len
        self.worker_id = locks.worker_id
        self.hinted = locks.hinted
        self._store = store
        self._locks = locks
        self._lease = lease_seconds
        self._interval = min(lease_seconds / _BEATS, _LONGEST_SECONDS)
        self._status: tuple[str, int | None] = ("open", None)
        self._written = _steady()
        self._settled = asyncio.Event()
        self._watched: dict[str, _Watched] = {}
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

    def dead_among(self, owners: Sequence[RunOwner]) -> set[str]:
        """Return the owners of runs that hold no lock, or have missed the beats of their lease."""
        dead = self._locks.missing(
            {owner.worker_id: owner.is_locked for owner in owners}
        )
        beats = {owner.worker_id: owner.seen_at for owner in owners}
        own = beats.get(self.worker_id)
        self._watched = {owner.worker_id: self._watch(owner, own) for owner in owners}
        dead |= {
            worker_id
            for worker_id, watched in self._watched.items()
            if watched.missed >= _BEATS
        }
        # One that has left removed its row; it may own a run whose claim came late.
        dead |= {
            owner.worker_id
            for owner in owners
            if owner.seen_at is None and not owner.is_locked
        }
        return dead - {self.worker_id}

    def beat_of(self, owner: str | None) -> float | None:
        """Return the last beat of a worker that `dead_among` saw."""
        watched = self._watched.get(owner or "")
        return None if watched is None else watched.beat

    async def settle(self) -> None:
        """Wait, if this worker's beats were late, until the store has told which runs it still owns."""
        while self._is_late():
            self._wake.set()
            await self._settled.wait()

    def announce(self, status: str, concurrency: int | None = None) -> None:
        """Show in this worker's row what it does."""
        self._status = status, concurrency or self._status[1]
        self._wake.set()

    def _watch(self, owner: RunOwner, own: float | None) -> "_Watched":
        """Count the beats that an owner has missed; each is missed only once this worker has written one."""
        now = _steady()
        before = self._watched.get(owner.worker_id)
        if before is None or owner.seen_at is None or before.beat != owner.seen_at:
            return _Watched(beat=owner.seen_at, own=own, at=now)
        if now - before.at < owner.lease / _BEATS:
            return before
        if own == before.own:
            self._wake.set()
            return before
        missed = before.missed + 1
        return _Watched(beat=owner.seen_at, own=own, at=now, missed=missed)

    def _is_late(self) -> bool:
        """Whether no beat was written for the lease: the process or machine slept, or was cut off."""
        return _steady() - self._written > self._lease

    def _settle(self, written: float, lapse: "_Lapse | None") -> None:
        """Take note of a beat, and of the runs that are still owned if it was late."""
        if lapse is not None and self._is_late():
            logger.warning(
                "Worker %s was not seen for %g seconds; it still owns %d runs.",
                self.worker_id,
                self._lease,
                len(lapse.owned),
            )
            lapse.give_up(lapse.owned)
        self._written = written
        self._settled.set()
        self._settled = asyncio.Event()

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
                        escaped(error),
                    )
                failed = True
                self._wake.wait(self._interval)
                self._wake.clear()

    def _beat_in(self, execute: Execute) -> None:
        now = self._store.database.now
        values = {
            "worker_id": self.worker_id,
            "name": self._locks.name,
            "lease": self._lease,
        }
        if not self._started.done():
            execute(_FORGET.format(now=now), values)
            execute(_DISOWN, values)
        while not self._leaving:
            status, concurrency = self._status
            row = {
                **values,
                "host": platform.node(),
                "pid": os.getpid(),
                "status": status,
                "concurrency": concurrency,
            }
            written = _steady()
            is_late = self._is_late()
            execute(_SEEN.format(now=now), row)
            lapse = None
            if is_late:
                give_up = self.on_lapse()
                owned = {name for (name,) in execute(_OWNED, values)}
                lapse = _Lapse(give_up, owned)
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._settle, written, lapse)
            if not self._started.done():
                self._started.set_result(None)
            self._wake.wait(self._interval)
            self._wake.clear()
        execute("DELETE FROM planner_workers WHERE worker_id = :worker_id", values)


class _Lapse(NamedTuple):
    """What to do about a lapsed lease, and the runs that were still owned then."""

    give_up: Callable[[set[str]], object]
    owned: set[str]


@frozen
class _Watched:
    """An owner of runs, as this worker sees it.

    Attributes:
        beat: Its last beat.
        own: This worker's last beat at the last count.
        at: When that was, by the steady clock.
        missed: How many beats it has missed.
    """

    beat: float | None
    own: float | None
    at: float
    missed: int = 0


_CLOCK = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def _steady() -> float:
    """Read the clock that nobody sets, and that goes on while the machine sleeps."""
    if _CLOCK is None:
        return time.monotonic()
    return time.clock_gettime(_CLOCK)
