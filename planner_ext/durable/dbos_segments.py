"""When and where segments of runs are worked off: on many machines, by DBOS.

A segment goes from a run's start, or a decision, to its next pause or end. DBOS has a row for each, ``{run_id}:{n}``,
with ``n`` the length of the journal where it begins: so whoever asks for the same segment again finds it there. The
rows carry nothing else. A segment that is worked off twice folds the journal and finds nothing left to do, or loses a
place in the journal and stops: DBOS decides when something runs, and never what happened.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from planner_ext.core.errors import PlannerExtError
from planner_ext.durable.dbos_host import DbosHost, Work
from planner_ext.durable.errors import RunRefusedError, WorkerInUseError
from planner_ext.durable.postgres import PostgresDatabase
from planner_ext.durable.postgres_workers import PostgresWorkers
from planner_ext.durable.records import read_run
from planner_ext.durable.statements import GET_RUN

__all__ = ["DbosSegments"]

logger = logging.getLogger(__name__)

_LENGTH = "SELECT COALESCE(MAX(seq) + 1, 0) FROM planner_journal WHERE run_id = :run_id"
_DUE = """
    SELECT run_id, owner, status FROM planner_runs
    WHERE status IN ('running', 'paused')
          AND run_id IN (SELECT run_id FROM planner_approvals WHERE status = 'decided')
    UNION SELECT run_id, owner, status FROM planner_runs WHERE status = 'paused' AND wake_at <= :now
    UNION SELECT run_id, owner, status FROM planner_runs
          WHERE status = 'running'
                AND NOT EXISTS (SELECT 1 FROM planner_journal WHERE planner_journal.run_id = planner_runs.run_id)
"""
"""Runs that were decided; whose question expired, though its timer may be lost; that were entered and never begun."""
_WATCH_SECONDS = 1.0
_GRACE_SECONDS = 5.0
"""How long a worker's session must be seen to be gone: where the server restarts, all are, for about a second."""
_AGAIN_SECONDS = 0.05
_REFUSED_SECONDS = 1.0
_LONGEST_REFUSED_SECONDS = 60.0
"""How long a run that this worker may not drive waits on the queue for one that may, from the first time on."""

_Result = TypeVar("_Result")


class DbosSegments:
    """The segments of one worker; implements `planner_ext.durable.segments.Segments`.

    Args:
        url: ``postgresql://...``.
        database: The store's, on the same server.
        workers: This worker; its session is kept from here.
    """

    def __init__(self, url: str, database: PostgresDatabase, workers: PostgresWorkers) -> None:
        self._database = database
        self._workers = workers
        self._host = DbosHost(url, workers.worker_id, self._served)
        self._serving: Callable[[str], Awaitable[object]] | None = None
        self._gone: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._passing: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Take the worker's name, and launch DBOS.

        Raises:
            WorkerInUseError: If a process that lives has the name.
            StoreError: If the database or DBOS cannot be used.
        """
        await self._workers.keep()
        try:
            await self._host.open()
        except BaseException:
            await self._workers.leave()
            raise
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Interrupt what is worked off here, and let go of the worker's name: others recover what is left."""
        tasks = [*self._passing, *([] if self._watching is None else [self._watching])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        try:
            await self._host.interrupt()
        finally:
            await self._host.close()
            await self._workers.leave()

    async def serve(self, work: Callable[[str], Awaitable[object]], *, at_most: int) -> None:
        """From now on, work off whatever segment is due of whatever run, by ``work``; this many at once."""
        self._serving = work
        await self._host.listen(at_most=at_most)

    async def run(self, run_id: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Work off the segment that is due of a run, here and now; should this process die, another one does.

        Raises:
            Exception: What ``work`` raises.
        """
        done: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None] | None] = []

        async def segment(run_id: str) -> None:
            tasks.append(asyncio.current_task())
            try:
                result = await work()
                await self._set_timer(run_id)
            except Exception as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        try:
            await self._begin(run_id, segment)
            result = await done
            self._refused.pop(run_id, None)
            return result
        except RunRefusedError:
            await self._pass_on(run_id)
            raise
        finally:
            await _cancelled(tasks)  # the caller was cancelled, and so is this

    async def _begin(self, run_id: str, segment: Work) -> None:
        """Begin a segment here, in place of one that waits or has ended; one that is being worked off is waited for."""
        while not await self._host.begin(key := await self._key(run_id), run_id, segment):
            row = await self._host.find(key)
            if row is None:
                continue
            if row.state == "running" and row.executor is not None and await self._workers.alive(row.executor):
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                await self._host.forget(key)

    async def _served(self, run_id: str) -> None:
        """Work off a segment from the queue."""
        assert self._serving is not None
        try:
            await self._serving(run_id)
            await self._set_timer(run_id)
        except Exception as error:  # whoever serves has told of it; to DBOS the segment is done
            logger.debug("The segment of run %s was left: %s", run_id, error)
            if isinstance(error, RunRefusedError):  # once DBOS has noted that, the segment is queued again
                task = asyncio.create_task(self._pass_on(run_id))
                self._passing.add(task)
                task.add_done_callback(self._passed)

    def _passed(self, task: asyncio.Task[None]) -> None:
        self._passing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("A run that this worker may not drive could not be queued for another one: %s", error)

    async def _pass_on(self, run_id: str) -> None:
        """Queue the segment of a run in progress that this worker may not drive, for one that may: later each time.

        One that waits for a decision or a date is begun when that is due, see `_take_due`.
        """
        runs = await self._database.transact((GET_RUN, {"run_id": run_id}))
        key, delay = await self._key(run_id), self._refused.get(run_id, 0.0)
        self._refused[run_id] = min(2 * delay or _REFUSED_SECONDS, _LONGEST_REFUSED_SECONDS)
        if read_run(runs[0][0]).status != "running":
            return
        while (row := await self._host.find(key)) is not None and row.state != "ended":
            if row.executor != self._workers.worker_id:
                return
            await asyncio.sleep(_AGAIN_SECONDS)
        await self._host.forget(key)
        await self._host.enqueue(key, run_id, delay=delay or None)

    async def _set_timer(self, run_id: str) -> None:
        """Where a run waits for an answer that has a date, have its next segment begin then.

        Nothing is set where this segment recorded nothing, since the next one has its name; see `_DUE`.
        """
        runs = await self._database.transact((GET_RUN, {"run_id": run_id}))
        wake_at = read_run(runs[0][0]).wake_at
        if wake_at is not None:
            await self._host.enqueue(await self._key(run_id), run_id, delay=max(0.0, wake_at - time.time()))

    async def _key(self, run_id: str) -> str:
        rows = await self._database.transact((_LENGTH, {"run_id": run_id}))
        return f"{run_id}:{rows[0][0][0]}"

    async def _watch(self) -> None:
        """Keep this worker's session, and see to what others left: decisions, and segments of workers that died."""
        while True:
            try:
                await self._workers.keep()
                await self._take_due()
                await self._recover()
            except WorkerInUseError:
                logger.exception("The session of worker %r was lost, and is not free yet.", self._workers.name)
            except PlannerExtError as error:
                logger.warning("The database is away, what is due waits: %s", error)
            except Exception:  # of DBOS: a worker that stopped looking would leave what others began for good
                logger.exception("DBOS cannot be asked what is due; it is asked again.")
            await asyncio.sleep(_WATCH_SECONDS)

    async def _take_due(self) -> None:
        """Begin the next segment of each run that is due and nobody drives: once, however many workers see it."""
        for run_id, owner, status in (await self._database.transact((_DUE, {"now": time.time()})))[0]:
            if run_id in self._refused or (owner is not None and await self._workers.alive(str(owner))):
                continue
            key = await self._key(str(run_id))
            row = await self._host.find(key)
            if row is None or (row.older and row.state in ("queued", "delayed")):
                await self._renew(key, str(run_id))
            elif row.state == "delayed":
                await self._host.bring([key])
            elif row.state == "ended" and status == "paused":  # a run that is not is left by a fault, as told
                await self._renew(key, str(run_id))

    async def _renew(self, key: str, run_id: str) -> None:
        """Put a segment on the queue anew, under this version: an earlier one may have no worker any more."""
        await self._host.forget(key)
        await self._host.enqueue(key, run_id)

    async def _recover(self) -> None:
        """Put the segments of workers that have been gone for a while on the queue."""
        running = await self._host.running()
        now = time.monotonic()
        executors = {row.executor for row in running if row.executor is not None}
        gone = [executor for executor in executors if not await self._workers.alive(executor)]
        self._gone = {executor: self._gone.get(executor, now) for executor in gone}
        lost = [row for row in running if now - self._gone.get(row.executor or "", now) >= _GRACE_SECONDS]
        if lost:
            logger.warning("The segments %s of workers that are gone are queued.", ", ".join(row.key for row in lost))
            await self._host.bring([row.key for row in lost if not row.older])
        for row in lost:
            if row.older:
                await self._renew(row.key, row.key.rpartition(":")[0])


async def _cancelled(tasks: Sequence[asyncio.Task[None] | None]) -> None:
    for task in tasks:
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task])
