"""Runs that survive their process: started, gone on with, recovered, resumed and cancelled by whoever lives."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

from planner_ext.approval.decisions import Decision
from planner_ext.clock import SystemClock
from planner_ext.core.limits import Limits
from planner_ext.durable.cancelling import cancel_run
from planner_ext.durable.driver import SegmentDriver
from planner_ext.durable.errors import RunConflictError, RunFencedError, StoreError, UnknownRunError
from planner_ext.durable.handle import RunHandle
from planner_ext.durable.liveness import Workers
from planner_ext.durable.locks import LockedWorkers
from planner_ext.durable.names import checked_run_id, new_worker_id
from planner_ext.durable.opening import open_database, open_segments
from planner_ext.durable.records import RunRecord, StoredRun
from planner_ext.durable.segment import DurablePlanner, InDoubt
from planner_ext.durable.segments import Segments
from planner_ext.durable.store import JournalStore
from planner_ext.ports import Clock

__all__ = ["Runs"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

ArgumentsFor = Callable[[str], Any]
"""Gives the application's arguments for a run, by its name: they are not stored."""


class Runs:
    """The runs of one store, seen by one worker.

    What was recorded is never done again: a run goes on from its journal, in whatever process. A call that had started
    and was not seen to finish goes by what its function declares with `planner_ext.durable.effect`.
    """

    def __init__(
        self,
        store: JournalStore,
        workers: Workers,
        *,
        in_doubt: InDoubt = "person",
        segments: Segments | None = None,
        poll_seconds: float = 0.25,
        clock: Clock | None = None,
    ) -> None:
        self._store = store
        self._workers = workers
        self._segments = segments
        self._driver = SegmentDriver(store, in_doubt=in_doubt)
        self._poll_seconds = poll_seconds
        self._clock = clock or SystemClock()
        self._driven: dict[str, asyncio.Task[Any]] = {}
        self._faulted: set[str] = set()

    @classmethod
    @asynccontextmanager
    async def sqlite(
        cls,
        path: str | Path,
        *,
        worker_id: str | None = None,
        in_doubt: InDoubt = "person",
        poll_seconds: float = 0.25,
        clock: Clock | None = None,
    ) -> AsyncGenerator["Runs", None]:
        """Keep runs in one SQLite file, on one host; used as ``async with Runs.sqlite(path) as runs``.

        Leaving the block interrupts what runs, which goes on in a later life.

        Args:
            path: The file; made where it is not there. Its folder must be there, on a disk of this host.
            worker_id: This worker's name. Two that live may not have the same. None makes one.
            in_doubt: Who hears of a call that had started when its process died, that may not simply run again, and
                whose probe cannot tell: a ``person``, as a pending approval, or the ``model``, as the call's result.
            poll_seconds: How often to look whether another worker, or an approver, has done something.
            clock: Tells the time and waits; None is the machine's.

        Raises:
            StoreError: If the file cannot be used; says why, and the way out.
            WorkerInUseError: If a living process has the worker's name.
            NewerSchemaError: If a newer version of this package made the file.
        """
        file = Path(path)
        database = await open_database(file)
        try:
            workers = LockedWorkers(file, worker_id or new_worker_id())
        except BaseException:
            await database.close()
            raise
        runs = cls(JournalStore(database), workers, in_doubt=in_doubt, poll_seconds=poll_seconds, clock=clock)
        try:
            await workers.sweep()
            yield runs
        finally:
            await runs.close()
            workers.release()

    @classmethod
    @asynccontextmanager
    async def dbos(
        cls,
        url: str,
        *,
        worker_id: str | None = None,
        in_doubt: InDoubt = "person",
        poll_seconds: float = 0.25,
        clock: Clock | None = None,
    ) -> AsyncGenerator["Runs", None]:
        """Keep runs in PostgreSQL, for workers on many machines; used as ``async with Runs.dbos(url) as runs``.

        DBOS queues, times and recovers: what a worker that died had begun goes on at another one that `work`s, within
        half a minute. Needs the extra ``planner-ext[dbos]``. A process can have this open once at a time. Leaving the
        block interrupts what runs, and leaves it to the workers that live.

        Args:
            url: ``postgresql://...``; straight to the server or through a pooler that keeps sessions.
            worker_id: As for `sqlite`, as are the others.
            in_doubt: Who hears of a call in doubt.
            poll_seconds: How often to look whether another worker, or an approver, has done something.
            clock: Tells the time; the expiry of questions goes by the machine's all the same.

        Raises:
            StoreError: If the database or DBOS cannot be used; says why, and the way out.
            WorkerInUseError: If a living process has the worker's name.
            NewerSchemaError: If a newer version of this package made the tables.
        """
        database, workers, segments = await open_segments(url, worker_id or new_worker_id())
        runs = cls(
            JournalStore(database),
            workers,
            in_doubt=in_doubt,
            segments=segments,
            poll_seconds=poll_seconds,
            clock=clock,
        )
        try:
            yield runs
        finally:
            await runs.close()

    @property
    def worker_id(self) -> str:
        """This worker's name."""
        return self._workers.worker_id

    async def start(
        self,
        planner: DurablePlanner[R],
        kernel: Any,
        goal: str,
        *,
        run_id: str | None = None,
        arguments: Any = None,
    ) -> RunHandle[R]:
        """Start a run, or go on with the one that has this name.

        A run that is unfinished goes on from its journal, with what was decided meanwhile; one that has ended gives its
        result. Where another worker drives it, the handle waits for that one.

        Args:
            planner: Drives the run.
            kernel: Its functions may be called.
            goal: What to reach.
            run_id: The run's name, 1 to 200 characters without ``/``. None makes one.
            arguments: The application's arguments; never stored, so given again by whoever goes on.

        Raises:
            RunConflictError: If the name belongs to a run with another goal.
            StoreError: If the name or the store cannot be used.
        """
        name = checked_run_id(run_id)
        created = await self._store.create(name, goal, owner=self.worker_id, at=self._clock.now())
        if not created and (record := await self._record(name)).goal != goal:
            raise RunConflictError(
                f"Run {name!r} is there already, with another goal: {record.goal!r}. Start this one under a name of "
                "its own, or resume that one."
            )
        return self._handle(name, planner, kernel, arguments)

    async def resume(
        self,
        run_id: str,
        planner: DurablePlanner[R],
        kernel: Any,
        *,
        decisions: Mapping[str, Decision] | None = None,
        budget: Limits | None = None,
        arguments: Any = None,
    ) -> RunHandle[R]:
        """Go on with a run: with decisions, or with a larger budget after a limit ended it.

        Args:
            run_id: The run.
            planner: Drives the run.
            kernel: Its functions may be called.
            decisions: On calls that wait, by call id, beside those made through `Approvals`; all or none are taken.
            budget: Replaces the run's limits; what was spent stays spent.
            arguments: The application's arguments.

        Raises:
            UnknownRunError: If there is no such run.
        """
        await self._record(run_id)
        return self._handle(run_id, planner, kernel, arguments, decisions=decisions, budget=budget)

    async def cancel(self, run_id: str, *, by: str = "", reason: str = "") -> bool:
        """End a run for good, whoever drives it: no further function starts, every open call is answered.

        A function that runs at this moment is not interrupted; what comes of it is dropped.

        Args:
            run_id: The run.
            by: Who cancels, for the record and the model.
            reason: Why, likewise.

        Returns:
            Whether the run was ended by this; False where it had ended before.

        Raises:
            UnknownRunError: If there is no such run.
        """
        who = f"Cancelled by {by}" if by else "Cancelled"
        return await cancel_run(self._store, run_id, f"{who}: {reason}" if reason else f"{who}.", self._clock)

    async def recover(
        self, planner: DurablePlanner[R], kernel: Any, *, arguments_for: ArgumentsFor | None = None, limit: int = 100
    ) -> list[RunHandle[R]]:
        """Take over what is left to do: runs whose worker died, that were decided, or whose question has expired.

        A run that a fault interrupted here is not tried again by this worker; `start` or `resume` it.

        Args:
            planner: Drives the runs.
            kernel: Its functions may be called.
            arguments_for: Gives the application's arguments for a run.
            limit: How many to take at most.

        Returns:
            Their handles; the runs are going on already.
        """
        taken: list[RunHandle[R]] = []
        for record in await self._store.due(self._clock.now()):
            if len(taken) >= limit:
                break
            if record.run_id in self._driven or record.run_id in self._faulted or not await self._claimed(record):
                continue
            arguments = None if arguments_for is None else arguments_for(record.run_id)
            taken.append(self._handle(record.run_id, planner, kernel, arguments))
        return taken

    async def work(
        self,
        planner: DurablePlanner[Any],
        kernel: Any,
        *,
        arguments_for: ArgumentsFor | None = None,
        max_concurrency: int = 100,
    ) -> NoReturn:
        """Recover for as long as this is not cancelled; a run that fails is logged, and left to another worker.

        Args:
            planner: Drives the runs.
            kernel: Its functions may be called.
            arguments_for: Gives the application's arguments for a run.
            max_concurrency: How many runs go on at once.
        """

        async def see_through(run_id: str) -> None:
            if run_id in self._driven or not await self._claimed(await self._record(run_id)):
                return  # somebody drives it, and sees to this too
            arguments = None if arguments_for is None else arguments_for(run_id)
            if run_id not in self._driven:
                await self._begun(run_id, self._see_through(run_id, planner, kernel, arguments, {}, queued=True))

        if self._segments is not None:
            await self._segments.serve(see_through, at_most=max_concurrency)
        while True:
            if (free := max_concurrency - len(self._driven)) > 0:
                await self.recover(planner, kernel, arguments_for=arguments_for, limit=free)
            if self._segments is not None:
                await asyncio.Event().wait()  # what comes from now on, comes from there
            await self._clock.sleep(self._poll_seconds)

    async def list(self, *, status: str | None = None, limit: int = 50) -> list[RunRecord]:
        """List runs, those that moved last first; only those of a status where one is given."""
        return await self._store.runs(status=status, limit=limit)

    async def load(self, run_id: str) -> StoredRun:
        """Read a run with its journal.

        Raises:
            UnknownRunError: If there is none.
            InvalidJournalError: If its journal is damaged.
        """
        return await self._store.load(run_id)

    async def close(self) -> None:
        """Interrupt what runs, and let go of the store."""
        tasks = list(self._driven.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._segments is not None:
            await self._segments.close()
        await self._store.close()

    def _handle(
        self, run_id: str, planner: DurablePlanner[R], kernel: Any, arguments: Any, **first: Any
    ) -> RunHandle[R]:
        def task() -> asyncio.Task[R]:
            driven = self._driven.get(run_id)
            if driven is None or driven.done():
                driven = self._begun(run_id, self._see_through(run_id, planner, kernel, arguments, dict(first)))
                first.clear()
            return cast("asyncio.Task[R]", driven)

        return RunHandle(run_id, task, lambda: self._decided(run_id))

    def _begun(self, run_id: str, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        driven = self._driven[run_id] = asyncio.create_task(work)
        driven.add_done_callback(lambda done: self._let_go(run_id, done))
        return driven

    def _let_go(self, run_id: str, task: asyncio.Task[Any]) -> None:
        if self._driven.get(run_id) is task:
            del self._driven[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faulted.add(run_id)
            logger.error("Run %s was interrupted: %s: %s", run_id, type(error).__name__, error)

    async def _see_through(
        self,
        run_id: str,
        planner: DurablePlanner[R],
        kernel: Any,
        arguments: Any,
        first: dict[str, Any],
        *,
        queued: bool = False,
    ) -> R:
        """Drive a run to its next pause or end, or wait until whoever does has.

        It is claimed before a segment begins: one that waited for its run would be in the way of whoever has that.
        """

        async def drive() -> R:
            return await self._driver.drive(run_id, planner, kernel, arguments=arguments, **first)

        while True:
            record = await self._record(run_id)
            if not await self._claimed(record):
                await self._clock.sleep(self._poll_seconds)
                continue
            try:
                if self._segments is None or queued or not (first or record.unfinished):
                    return await drive()
                return await self._segments.run(run_id, drive)
            except RunFencedError as error:
                logger.info("Run %s is gone on with elsewhere: %s", run_id, error)
                if queued:
                    raise
            finally:
                with suppress(StoreError):
                    await self._store.release(run_id, self.worker_id)

    async def _claimed(self, record: RunRecord) -> bool:
        """Take a run that nobody drives, or whose worker died."""
        if record.owner == self.worker_id:
            return True
        if record.owner is not None and await self._workers.alive(record.owner):
            return False
        return await self._store.claim(record.run_id, self.worker_id, seen=record.owner)

    async def _decided(self, run_id: str) -> bool:
        while (record := await self._record(run_id)).unfinished:
            expired = record.wake_at is not None and record.wake_at <= self._clock.now()
            if record.status == "running" or expired or await self._store.decisions(run_id):
                return True
            await self._clock.sleep(self._poll_seconds)
        return False

    async def _record(self, run_id: str) -> RunRecord:
        record = await self._store.record(run_id)
        if record is None:
            raise UnknownRunError(f"There is no run {run_id!r} in this store. List them to see their names.")
        return record
