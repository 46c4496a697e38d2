"""Activations on many machines: DBOS queues and recovers them in PostgreSQL.

DBOS keeps one row for each activation, named ``{run_id}:{n}``, where ``n`` is the length of the journal at its start. A
second request for the same activation finds that row. The rows carry nothing else. An activation that runs twice folds
the journal and finds nothing left to do, or its write to the journal conflicts and it stops. DBOS decides when an
activation runs; only the journal says what happened.

DBOS runs in a separate thread with a separate event loop, because it blocks the loop that it is launched in, takes over
that loop's thread pool, and leaves the pool shut down. Activations run in the loop that opened the queue. Only JSON
reaches DBOS's tables.
"""

import asyncio
import contextvars
import logging
import re
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, EnqueueOptions, Queue, SetWorkflowID, WorkflowStatus
from dbos import error as dbos_error
from sqlalchemy.exc import DBAPIError

from planner_ext.core.errors import NewerSchemaError, PlannerExtError, RunRefusedError
from planner_ext.durable.errors import StoreError, WorkerInUseError, without_passwords
from planner_ext.durable.heartbeat import LeasedWorkers
from planner_ext.durable.no_pickle import no_pickle
from planner_ext.durable.postgres import (
    ACTIVATION,
    DBOS_TABLES,
    QUEUE,
    VERSION,
    VERSION_NUMBERS,
    PostgresWorkers,
    may_retry,
)
from planner_ext.durable.store import JournalStore
from planner_ext.engine.concurrency import end_tasks, in_thread

__all__ = ["ActivationQueue"]

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Work = Callable[[str], Coroutine[Any, Any, None]]
"""Runs an activation of the run of this name, and does not fail: errors are reported elsewhere."""

_APPLICATION = "planner-ext"
_OLDER = [f"planner_ext-{n}.{m}" for n in range(VERSION_NUMBERS[0] + 1) for m in range(VERSION_NUMBERS[1] + 1)]
_OLDER.remove(VERSION)
_POLLING_SECONDS = 0.25
_CONNECTIONS = 5
_QUEUED = ("ENQUEUED", "DELAYED")
"""The statuses of an activation on the queue; `PENDING` is one that runs, also where its process died."""

_LENGTH = "SELECT COALESCE(MAX(seq) + 1, 0) FROM planner_journal WHERE run_id = :run_id"
_DUE = f"""
    SELECT run_id, owner, status, wake_at FROM planner_runs
    WHERE status IN ('running', 'paused')
          AND run_id IN (SELECT run_id FROM planner_approvals WHERE status = 'decided')
    UNION SELECT run_id, owner, status, wake_at FROM planner_runs
          WHERE status IN ('running', 'paused') AND wake_at <= :now
    UNION SELECT run_id, owner, status, wake_at FROM planner_runs
          WHERE status IN ('queued', 'running')
                AND NOT EXISTS (SELECT 1 FROM planner_journal WHERE planner_journal.run_id = planner_runs.run_id)
                AND NOT EXISTS (
                    SELECT 1 FROM {DBOS_TABLES}.workflow_status
                    WHERE workflow_uuid = run_id || ':0' AND workflow_status.status IN ('PENDING', 'ENQUEUED')
                )
"""  # noqa: S608  (only this package's own text)
"""Runs with an untaken decision; with an expired question; those that a fault interrupted, at their retry; and those
without a journal yet, unless they are on the queue: there may be thousands."""
_RUNNING = "SELECT run_id, owner FROM planner_runs WHERE status = 'running' AND COALESCE(wake_at, 0) <= :now"
_WATCH_SECONDS = 1.0
_GRACE_SECONDS = 5.0
"""How long a worker's session must be missing: while the server restarts, all sessions are, for about a second."""
_PATIENCE_SECONDS = 60.0
"""How long the launch of DBOS is tried again."""
_HAND_OVER_SECONDS = 5.0
"""How long a worker that leaves tries to queue its interrupted activations, and waits for DBOS's thread to end."""
_CLOSE_SECONDS = 30.0
_RETRY_SECONDS = 0.05
_REFUSED_SECONDS = 1.0
_LONGEST_REFUSED_SECONDS = 60.0
"""The first and the longest delay of a queued run that this worker may not drive; another worker may take it."""


class ActivationQueue:
    """The activations of one worker.

    Args:
        url: ``postgresql://...``.
        name: The worker's name.
        store: The runs, on the same server.
        lease_seconds: How long after its last heartbeat a worker counts as alive.

    Attributes:
        workers: The workers of the database, this one included; the queue keeps its session alive.
    """

    def __init__(self, url: str, name: str, store: JournalStore, *, lease_seconds: float) -> None:
        self._locks = PostgresWorkers(url, name)
        self.workers = LeasedWorkers(store, self._locks, lease_seconds=lease_seconds)
        self._store = store
        self._host = _DbosHost(url, self.workers.worker_id, self._run_queued)
        self._serving: Callable[[str], Awaitable[object]] | None = None
        self._dead_since: dict[str, float] = {}
        self._orphaned_since: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._background: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Acquire the worker's name, and launch DBOS.

        Raises:
            WorkerInUseError: If a living process has the name.
            StoreError: If the database or DBOS cannot be used.
        """
        await self._locks.keep()
        try:
            await self.workers.open()
            await self._host.open()
        except BaseException:
            await self.workers.close()
            await self._locks.leave()
            raise
        self._in_background(self._watch())

    async def close(self) -> None:
        """Interrupt the activations that run here, queue them for other workers, and release the worker's name."""
        await end_tasks(*self._background)
        try:
            await self._host.interrupt()
            await self.hand_over()
        finally:
            await self._host.close()
            await self.workers.close()
            await self._locks.leave()

    async def stop_serving(self) -> None:
        """Take no further activation from the queue; those that run here continue."""
        await self._host.stop_listening()

    async def hand_over(self, *, driven: Collection[str] = ()) -> None:
        """Queue this worker's interrupted activations for other workers, but not those of runs that are still driven.

        If that is not possible, other workers find them when this worker's session has been missing for a while.
        """
        try:
            async with asyncio.timeout(_HAND_OVER_SECONDS):
                rows = await self._host.list(status="PENDING", name=ACTIVATION, executor_id=self.workers.worker_id)
                await self._host.requeue([k for r in rows if (k := r.workflow_id).rpartition(":")[0] not in driven])
        except Exception as error:  # of DBOS
            logger.warning("The interrupted runs could not be queued for other workers: %s", error)

    async def serve(self, work: Callable[[str], Awaitable[object]], *, at_most: int) -> None:
        """Start running due activations of all runs with ``work``, at most this many at once."""
        self._serving = work
        await self._host.listen(at_most=at_most)

    async def run(self, run_id: str, work: Callable[[], Awaitable[_Result]]) -> _Result:
        """Run a run's due activation in this process; if the process dies, another one runs it.

        Raises:
            Exception: Any exception of ``work``.
        """
        done: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        tasks: list[asyncio.Task[None] | None] = []

        async def activation(_: str) -> None:
            tasks.append(asyncio.current_task())
            try:
                result = await work()
            except asyncio.CancelledError:
                done.cancel()
                raise
            except BaseException as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(result)

        try:
            await self._start_here(run_id, activation)
            result = await done
            self._refused.pop(run_id, None)
            return result
        except (RunRefusedError, NewerSchemaError):
            await self._requeue_for_others(run_id)
            raise
        finally:  # the caller was cancelled, and so is the activation
            await end_tasks(*filter(None, tasks))

    async def _start_here(self, run_id: str, activation: _Work) -> None:
        """Start an activation in this process, in place of a queued or ended one; a running one is awaited first."""
        while not await self._host.start_here(key := await self._key(run_id), run_id, activation):
            row = await self._host.find(key)
            if row is None:
                continue
            if row.status == "PENDING" and row.executor_id and await self.workers.alive(row.executor_id):
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                await self._host.delete(key)

    async def _run_queued(self, run_id: str) -> None:
        """Run an activation from the queue."""
        assert self._serving is not None
        try:
            await self._serving(run_id)
        except Exception as error:  # the pool has logged it; for DBOS the activation is complete
            logger.debug("The activation of run %s failed: %s", run_id, error)
            if isinstance(error, RunRefusedError | NewerSchemaError):  # queued again once DBOS has recorded its end
                self._in_background(self._requeue_for_others(run_id))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _requeue_for_others(self, run_id: str) -> None:
        """Requeue the activation of a due run that this worker may not drive, with a longer delay each time.

        A run that waits for a decision or a date is started when that is due; see `_queue_due`.
        """
        try:
            key, delay = await self._key(run_id), self._refused.get(run_id, 0.0)
            self._refused[run_id] = min(2 * delay or _REFUSED_SECONDS, _LONGEST_REFUSED_SECONDS)
            if (await self._store.record(run_id)).status not in ("queued", "running"):
                return
            while (row := await self._host.find(key)) is not None and row.status in ("PENDING", *_QUEUED):
                if row.executor_id != self.workers.worker_id:
                    return
                await asyncio.sleep(_RETRY_SECONDS)
            await self._replace(key, run_id, delay=delay or None)
        except Exception as error:  # of DBOS
            logger.warning("A run that this worker may not drive could not be queued for another one: %s", error)

    async def _key(self, run_id: str) -> str:
        rows = await self._store.database.transact((_LENGTH, {"run_id": run_id}))
        return f"{run_id}:{rows[0][0][0]}"

    async def _watch(self) -> None:
        """Keep this worker's session alive; queue decided runs, and the activations of dead workers."""
        while True:
            try:
                await self._locks.keep()
                await self._queue_due()
                await self._queue_lost()
                await self._queue_orphans()
            except WorkerInUseError:
                logger.exception("The session of worker %r was lost, and its name is not free yet.", self._locks.name)
            except PlannerExtError as error:
                logger.warning("The database cannot be reached, due runs wait: %s", error)
            except Exception:  # of DBOS: a worker that stopped watching would leave the runs of dead workers
                logger.exception("The due activations cannot be read from DBOS; the worker tries again.")
            await asyncio.sleep(_WATCH_SECONDS)

    async def _queue_due(self) -> None:
        """Queue the next activation of each due run that no worker drives: once, however many workers see it."""
        now = time.time()
        for run_id, owner, status, wake_at in (await self._store.database.transact((_DUE, {"now": now})))[0]:
            later = status == "running" and float(wake_at or 0) > now
            if later or run_id in self._refused or (owner is not None and await self.workers.alive(str(owner))):
                continue
            key = await self._key(str(run_id))
            row = await self._host.find(key)
            if row is None or row.status not in ("PENDING", *_QUEUED) or (row.status in _QUEUED and _is_older(row)):
                await self._replace(key, str(run_id))
            elif row.status == "DELAYED":
                await self._host.requeue([key])

    async def _replace(self, key: str, run_id: str, *, delay: float | None = None) -> None:
        """Queue an activation again under this application version; an earlier version may have no worker left."""
        await self._host.delete(key)
        await self._host.enqueue(key, run_id, delay=delay)

    async def _queue_lost(self) -> None:
        """Queue the activations of workers whose sessions have been missing for `_GRACE_SECONDS`."""
        running = await self._host.list(status="PENDING", name=ACTIVATION)
        now = time.monotonic()
        executors = {row.executor_id for row in running if row.executor_id is not None}
        dead = [executor for executor in executors if not await self.workers.alive(executor)]
        self._dead_since = {executor: self._dead_since.get(executor, now) for executor in dead}
        lost = [row for row in running if now - self._dead_since.get(row.executor_id or "", now) >= _GRACE_SECONDS]
        lost += await self._host.list(status="ENQUEUED", name=ACTIVATION, app_version=_OLDER)
        if lost:
            logger.warning("Activations of dead or earlier workers are queued again: %s", [r.workflow_id for r in lost])
            await self._host.requeue([row.workflow_id for row in lost if not _is_older(row)])
        for row in filter(_is_older, lost):
            await self._replace(row.workflow_id, row.workflow_id.rpartition(":")[0])

    async def _queue_orphans(self) -> None:
        """Queue running runs that have had neither a living worker nor an activation for `_GRACE_SECONDS`.

        An activation that is queued twice ends at once where the first one runs; the worker of that may die afterwards.
        """
        now = time.monotonic()
        runs = (await self._store.database.transact((_RUNNING, {"now": time.time()})))[0]
        living = {owner: await self.workers.alive(str(owner)) for owner in {owner for _, owner in runs} - {None}}
        orphans = [str(run_id) for run_id, owner in runs if not living.get(owner)]
        self._orphaned_since = {run_id: self._orphaned_since.get(run_id, now) for run_id in orphans}
        for run_id, since in self._orphaned_since.items():
            if now - since >= _GRACE_SECONDS and run_id not in self._refused:
                filters = {"workflow_id_prefix": f"{run_id}:", "status": ["PENDING", *_QUEUED]}
                if not await self._host.list(**filters):
                    await self._replace(await self._key(run_id), run_id)


class _DbosHost:
    """The DBOS instance of this process; DBOS allows one.

    Args:
        url: ``postgresql://...``.
        executor: A globally unique name of this process. With DBOS's default, "local", every process would recover the
            live activations of all others as lost ones.
        work: Runs queued activations in the event loop that opened the host.
    """

    def __init__(self, url: str, executor: str, work: _Work) -> None:
        self._url = url
        self._executor = executor
        self._work = work
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._local_work: dict[str, tuple[_Work, contextvars.Context]] = {}
        self._started: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._filter = partial(_redact, url)
        self._home: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._dbos: DBOS

    async def open(self) -> None:
        """Launch DBOS, and create its tables if they do not exist.

        Raises:
            StoreError: If this process has already launched DBOS, or the launch fails.
        """
        if _current:
            raise StoreError(
                "This process has DBOS runs open already, and DBOS can be launched only once in a process. Close them "
                "first, or use the ones that are open."
            )
        _current.append(self)
        self._home = asyncio.get_running_loop()
        threading.Thread(target=self._run_dbos, name="planner_ext-dbos", daemon=True).start()
        await asyncio.wrap_future(self._opened)

    async def listen(self, *, at_most: int) -> None:
        """Start taking activations from the queue, while fewer than this many run here.

        DBOS would keep the number in its database, so that the one of the last worker held for all. Therefore it is
        set where DBOS reads the queue; activations that were started here, and not taken from the queue, count, too.
        """

        async def listen() -> None:
            await DBOS.register_queue_async(QUEUE, polling_interval_sec=_POLLING_SECONDS)
            database = self._dbos._sys_db  # pyright: ignore[reportPrivateUsage]  (DBOS has no limit of one worker)
            read_queue = database.get_queue

            def get_queue(name: str, **options: Any) -> Queue | None:
                if (queue := read_queue(name, **options)) is not None and name == QUEUE:
                    free = max(0, at_most - len(self._started))
                    queue._worker_concurrency = free  # pyright: ignore[reportPrivateUsage]  (see above)
                return queue

            database.get_queue = get_queue
            self._dbos._listening_queues = [QUEUE]  # pyright: ignore[reportPrivateUsage]  (public before launch only)

        await self._in_dbos(listen)

    async def stop_listening(self) -> None:
        """Take no more activations from the queue, and start no more here."""
        self._stopped = True
        for event in self._dbos.background_thread_stop_events:
            event.set()
        for thread in threading.enumerate():
            # one that has not started yet cannot be joined, and sees the event first
            if thread.name == f"queue-worker-{QUEUE}" and thread.is_alive():
                await in_thread(partial(thread.join, _HAND_OVER_SECONDS))

    async def interrupt(self) -> None:
        """Cancel and await the activations that run here; to DBOS they still run."""
        await end_tasks(*self._tasks)

    async def close(self) -> None:
        """Shut DBOS down; its thread is left behind where its server does not answer."""
        self._loop.call_soon_threadsafe(self._stop.set)
        closed = asyncio.wrap_future(self._closed)
        if not (await asyncio.wait({closed}, timeout=_CLOSE_SECONDS))[0]:
            logger.warning("DBOS has not ended after %g seconds; it is left behind.", _CLOSE_SECONDS)

    async def start_here(self, key: str, run_id: str, work: _Work) -> bool:
        """Run an activation in this process at once with ``work``; False if DBOS already has one of this name."""
        self._local_work[key] = (work, contextvars.copy_context())
        self._started.add(key)

        async def start() -> bool:
            try:
                with SetWorkflowID(key, workflow_id_reuse_policy="reject"):
                    await DBOS.start_workflow_async(_activation, run_id)
            except BaseException as error:
                self._local_work.pop(key, None)
                self._started.discard(key)
                if isinstance(error, dbos_error.DBOSWorkflowIDInUseError):
                    return False
                raise
            return True

        return await self._in_dbos(start)

    async def enqueue(self, key: str, run_id: str, *, delay: float | None = None) -> None:
        """Queue an activation for any listening process, now or after a delay; an existing one of this name stays."""
        options = EnqueueOptions(workflow_name=ACTIVATION, queue_name=QUEUE, workflow_id=key, app_version=VERSION)
        if delay is not None:
            options["delay_seconds"] = delay
        await self._in_dbos(lambda: DBOS.enqueue_workflow_with_options_async(options, run_id))

    async def requeue(self, keys: Sequence[str]) -> None:
        """Queue activations to run now: delayed ones, and those whose process has died."""
        if keys:
            await self._in_dbos(lambda: DBOS.resume_workflows_async([*keys], queue_name=QUEUE))

    async def delete(self, key: str) -> None:
        """Delete an activation's row."""
        await self._in_dbos(lambda: DBOS.delete_workflow_async(key))

    async def find(self, key: str) -> WorkflowStatus | None:
        """Read one activation's row; None if there is no such row."""
        rows = await self.list(workflow_ids=[key])
        return rows[0] if rows else None

    async def list(self, **filters: Any) -> list[WorkflowStatus]:
        """List activations without inputs and outputs: to load those, DBOS would read the serialization a row names."""
        return await self._in_dbos(lambda: DBOS.list_workflows_async(**filters, load_input=False, load_output=False))

    async def run_here(self, key: str, run_id: str) -> None:
        """Run an activation in the loop that opened the host, and await it in DBOS's loop."""
        if self._stopped:  # the queue had handed it out before
            raise asyncio.CancelledError
        work, context = self._local_work.pop(key, (self._work, contextvars.Context()))
        future = context.run(asyncio.run_coroutine_threadsafe, self._tracked(work, run_id), self._home)
        try:
            await asyncio.wrap_future(future)
        finally:
            self._started.discard(key)

    async def _tracked(self, work: _Work, run_id: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await work(run_id)
        finally:
            self._tasks.discard(task)

    async def _in_dbos(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run a coroutine in DBOS's loop, in an empty context: DBOS must not take it for part of an activation."""
        future = contextvars.Context().run(asyncio.run_coroutine_threadsafe, work(), self._loop)
        return await asyncio.wrap_future(future)

    def _run_dbos(self) -> None:
        """Run DBOS in its thread, from launch to shutdown."""
        try:
            with no_pickle():
                try:
                    asyncio.run(self._launched())
                finally:
                    DBOS.destroy()
        except BaseException as error:
            if not self._opened.done():
                said = without_passwords(str(error), self._url)
                self._opened.set_exception(StoreError(f"DBOS cannot be launched: {said}"))
        finally:
            logging.getLogger("dbos").removeFilter(self._filter)
            _current.remove(self)
            self._closed.set_result(None)

    async def _launched(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        logger = logging.getLogger("dbos")
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())  # else DBOS writes to the console
        logger.addFilter(self._filter)
        config = DBOSConfig(
            name=_APPLICATION,
            system_database_url=self._url,
            dbos_system_schema=DBOS_TABLES,
            executor_id=self._executor,
            application_version=VERSION,
            serializer=DBOSPortableJSONSerializer(),
            sys_db_pool_size=_CONNECTIONS,
            log_level="WARNING",
        )
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            self._dbos = DBOS(config=config)
            if DBOS.executor_id != self._executor:
                raise StoreError("another application of DBOS runs in this process. Run the planner in a separate one")
            DBOS.listen_queues([])
            try:
                DBOS.launch()
                break
            except DBAPIError as error:  # the server restarts, or other workers create the same tables
                if not may_retry(error.orig) or time.monotonic() > deadline:
                    raise
                logger.warning("DBOS cannot be launched yet, the worker tries again.")
                DBOS.destroy()
                await asyncio.sleep(_WATCH_SECONDS)
        self._opened.set_result(None)
        await self._stop.wait()


_current: list[_DbosHost] = []


@DBOS.workflow(name=ACTIVATION, max_recovery_attempts=None)
async def _activation(run_id: str) -> None:
    key = DBOS.workflow_id
    assert key is not None
    await _current[0].run_here(key, str(run_id))


def _is_older(row: WorkflowStatus) -> bool:
    """Return whether an activation has an earlier application version: workers of this version never dequeue it."""
    numbers = re.fullmatch(r"planner_ext-(\d+)\.(\d+)", row.app_version or "")
    return numbers is not None and tuple(map(int, numbers.groups())) < VERSION_NUMBERS


def _redact(url: str, record: logging.LogRecord) -> bool:
    """Remove the passwords of an address from a log record of DBOS; a filter that keeps every record."""
    record.msg, record.args = without_passwords(record.getMessage(), url), ()
    if record.exc_info:
        text = logging.Formatter().formatException(record.exc_info)
        if (shown := without_passwords(text, url)) != text:
            record.exc_info, record.exc_text = None, shown
    return True
