"""Runs that survive their process: started, gone on with, recovered, resumed and cancelled by whoever lives."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from planner_ext.approval.decisions import Decision, is_duration
from planner_ext.approval.pending import InDoubt
from planner_ext.core.errors import shown
from planner_ext.core.limits import Limits
from planner_ext.durable.cancelling import cancel_run
from planner_ext.durable.driven import ArgumentsFor, DrivenRuns
from planner_ext.durable.driver import SegmentDriver
from planner_ext.durable.errors import RunConflictError
from planner_ext.durable.handle import RunHandle
from planner_ext.durable.liveness import Workers
from planner_ext.durable.locks import LockedWorkers
from planner_ext.durable.names import checked_run_id, new_worker_id
from planner_ext.durable.opening import open_database, open_segments
from planner_ext.durable.records import RunRecord, StoredRun
from planner_ext.durable.segment import DurablePlanner
from planner_ext.durable.segments import Segments
from planner_ext.durable.store import JournalStore
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.ports import Clock
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.options import checked_goal

__all__ = ["Runs"]

R = TypeVar("R")


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
        self._poll_seconds = poll_seconds
        self._clock = clock or SystemClock()
        self._driven = DrivenRuns(
            store,
            workers,
            SegmentDriver(store, in_doubt=in_doubt, clock=self._clock),
            segments=segments,
            poll_seconds=poll_seconds,
            clock=self._clock,
        )

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
            PlannerInvalidConfigurationError: If an option means nothing, naming it.
            StoreError: If the file cannot be used; says why, and the way out.
            WorkerInUseError: If a living process has the worker's name.
            NewerSchemaError: If a newer version of this package made the file.
        """
        _check_options(in_doubt, poll_seconds)
        file = Path(path)
        database = await open_database(file)
        try:
            workers = LockedWorkers(file, _name(worker_id))
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
            worker_id: As for `sqlite`.
            in_doubt: Who hears of a call in doubt.
            poll_seconds: How often to look whether another worker, or an approver, has done something.
            clock: Tells the time; the expiry of questions goes by the machine's all the same.

        Raises:
            PlannerInvalidConfigurationError: If an option means nothing, naming it.
            StoreError: If the database or DBOS cannot be used; says why, and the way out.
            WorkerInUseError: If a living process has the worker's name.
            NewerSchemaError: If a newer version of this package made the tables.
        """
        _check_options(in_doubt, poll_seconds)
        database, workers, segments = await open_segments(url, _name(worker_id))
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
            PlannerInvalidConfigurationError: If the goal is empty; nothing is stored of it.
            RunConflictError: If the name belongs to a run with another goal.
            StoreError: If the name or the store cannot be used.
        """
        checked_goal(goal)
        name = checked_run_id(run_id)
        created = await self._store.create(name, goal, owner=self.worker_id, at=self._clock.now())
        if not created and (record := await self._store.record(name)).goal != goal:
            raise RunConflictError(
                f"Run {name!r} is there already, with another goal: {shown(record.goal)}. Start this one under a name "
                "of its own, or resume that one."
            )
        return self._driven.handle(name, planner, kernel, lambda: arguments)

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
            budget: Replaces the run's limits, what was spent stays spent: a `planner_ext.Budget`, or limits alone as
                a journal keeps them. No store keeps its ``price``: that prices the requests of this handle, and
                whoever else goes on with the run has the planner's.
            arguments: The application's arguments.

        Raises:
            UnknownRunError: If there is no such run.
        """
        await self._store.record(run_id)
        return self._driven.handle(run_id, planner, kernel, lambda: arguments, decisions=decisions, budget=budget)

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
        return await cancel_run(self._store, run_id, by=by, reason=reason, clock=self._clock)

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
            if (handle := await self._driven.taken(record, planner, kernel, arguments_for)) is not None:
                taken.append(handle)
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

        async def work_off(run_id: str) -> None:
            await self._driven.work_off(run_id, planner, kernel, arguments_for)

        if self._segments is not None:
            await self._segments.serve(work_off, at_most=max_concurrency)
        while True:
            if (free := max_concurrency - len(self._driven)) > 0:
                await self.recover(planner, kernel, arguments_for=arguments_for, limit=free)
            if self._segments is not None:
                await asyncio.Event().wait()  # what comes from now on, comes from there
            await self._clock.sleep(self._poll_seconds)

    async def count(self, *, status: str | None = None) -> int:
        """Count runs, only those of a status where one is given.

        Raises:
            StoreError: If no run can have the status; names those that there are.
        """
        return await self._store.count_runs(status=status)

    async def list(self, *, status: str | None = None, limit: int = 50, offset: int = 0) -> list[RunRecord]:
        """List runs, those that moved last first.

        Args:
            status: Only those that are ``running``, ``paused``, ``answered``, ``incomplete``, ``limit_reached`` or
                ``stopped``; None lists all.
            limit: How many at most.
            offset: How many of the first to leave out; see `count`.

        Raises:
            StoreError: If no run can have the status, or limit or offset is no whole number from 0 on.
        """
        return await self._store.runs(status=status, limit=limit, offset=offset)

    async def load(self, run_id: str) -> StoredRun:
        """Read a run with its journal.

        Raises:
            UnknownRunError: If there is none.
            InvalidJournalError: If its journal is damaged.
        """
        return await self._store.load(run_id)

    async def close(self) -> None:
        """Interrupt what runs, and let go of the store."""
        await self._driven.close()
        if self._segments is not None:
            await self._segments.close()
        await self._store.close()


def _name(worker_id: str | None) -> str:
    return new_worker_id() if worker_id is None else worker_id


def _check_options(in_doubt: object, poll_seconds: object) -> None:
    if in_doubt not in ("person", "model"):
        raise PlannerInvalidConfigurationError(f"in_doubt must be 'person' or 'model'; got {shown(in_doubt)}.")
    if not is_duration(poll_seconds):
        problem = f"poll_seconds must be a number of seconds above 0; got {shown(poll_seconds)}."
        raise PlannerInvalidConfigurationError(problem)
