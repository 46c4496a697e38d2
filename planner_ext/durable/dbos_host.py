"""DBOS in a thread and an event loop of its own: it queues, times and recovers segments, and knows nothing of runs.

Kept apart because DBOS blocks the loop that it is launched in, and takes that loop's pool of threads for itself and
leaves it shut down. Segments run in the loop of whoever opened the host; only JSON ever reaches DBOS's tables.
"""

import asyncio
import contextvars
import json
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar

from dbos import DBOS, DBOSConfig, DBOSPortableJSONSerializer, EnqueueOptions, SetWorkflowID, WorkflowStatus
from dbos import error as dbos_error
from dbos._serialization import DefaultSerializer

from planner_ext.durable.addresses import without_passwords
from planner_ext.durable.errors import StoreError
from planner_ext.durable.statements import TABLE_SCHEMA
from planner_ext.engine.journal import SCHEMA

__all__ = ["TABLES", "DbosHost", "SegmentRow", "Work"]

Work = Callable[[str], Coroutine[Any, Any, None]]
"""Works off a segment of the run of this name, and does not fail: what goes wrong is told elsewhere."""

_APPLICATION = "planner-ext"
_NUMBERS = (SCHEMA, TABLE_SCHEMA)
_VERSION = "planner_ext-{}.{}".format(*_NUMBERS)
"""Pinned: left alone it is a hash of the source, and a worker of the next release would not see what waits."""
TABLES = "planner_ext_dbos"
"""The PostgreSQL schema with DBOS's tables."""
_QUEUE = "planner_ext"
_POLLING_SECONDS = 0.25
_CONNECTIONS = 5

_Result = TypeVar("_Result")


SegmentState = Literal["queued", "delayed", "running", "ended"]
_STATES: Mapping[str, SegmentState] = {"ENQUEUED": "queued", "DELAYED": "delayed", "PENDING": "running"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """A segment, as DBOS has it.

    Attributes:
        key: ``{run_id}:{n}``.
        executor: The process that runs it, or ran it last; None where none did.
        state: ``queued``; ``delayed``; ``running``, also where its process died; or ``ended``.
        older: Whether it is of an earlier version, so that no worker of this one takes it from the queue.
    """

    key: str
    executor: str | None
    state: SegmentState
    older: bool


class DbosHost:
    """DBOS for this process, which can have it only once.

    Args:
        url: ``postgresql://...``.
        executor: The name of this process among all that ever were: with DBOS's default, "local", every process
            takes every other's live segments for its own, lost ones.
        work: Works off the segments that come from the queue, in the event loop of whoever opens the host.
    """

    def __init__(self, url: str, executor: str, work: Work) -> None:
        self._url = url
        self._executor = executor
        self._work = work
        self._opened: Future[None] = Future()
        self._closed: Future[None] = Future()
        self._given: dict[str, tuple[Work, contextvars.Context]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._interrupted = False
        self._filter = _PasswordFilter(url)
        self._home: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._dbos: DBOS

    async def open(self) -> None:
        """Launch DBOS; its tables are created where they are not there.

        Raises:
            StoreError: If this process has DBOS already, or it cannot be launched.
        """
        if _current:
            raise StoreError(
                "This process has DBOS runs open already, and DBOS can be had only once in a process. Close them "
                "first, or use the ones that are open."
            )
        _current.append(self)
        self._home = asyncio.get_running_loop()
        threading.Thread(target=self._live, name="planner_ext-dbos", daemon=True).start()
        await asyncio.wrap_future(self._opened)

    async def listen(self, *, at_most: int) -> None:
        """Take segments from the queue, from now on, as long as fewer than this many from there run here."""

        async def listen() -> None:
            await DBOS.register_queue_async(_QUEUE, worker_concurrency=at_most, polling_interval_sec=_POLLING_SECONDS)
            self._dbos._listening_queues = [_QUEUE]  # pyright: ignore[reportPrivateUsage]  (public before launch only)

        await self._there(listen)

    async def interrupt(self) -> None:
        """Cancel what runs here, and wait for it, and begin nothing more; to DBOS it runs still."""
        self._interrupted = True
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Let DBOS go."""
        self._loop.call_soon_threadsafe(self._stop.set)
        await asyncio.wrap_future(self._closed)

    async def begin(self, key: str, run_id: str, work: Work) -> bool:
        """Run a segment in this process at once, by ``work``; False where DBOS has one of this name already."""
        self._given[key] = (work, contextvars.copy_context())

        async def begin() -> bool:
            try:
                with SetWorkflowID(key, workflow_id_reuse_policy="reject"):
                    await DBOS.start_workflow_async(_segment, run_id)
            except dbos_error.DBOSWorkflowIDInUseError:
                return False
            return True

        begun = await self._there(begin)
        if not begun:
            self._given.pop(key, None)
        return begun

    async def enqueue(self, key: str, run_id: str, *, delay: float | None = None) -> None:
        """Let any process that listens run a segment, now or after some seconds; one of this name is left as it is."""
        options = EnqueueOptions(workflow_name=_NAME, queue_name=_QUEUE, workflow_id=key, app_version=_VERSION)
        if delay is not None:
            options["delay_seconds"] = delay
        await self._there(lambda: DBOS.enqueue_workflow_with_options_async(options, run_id))

    async def bring(self, keys: Sequence[str]) -> None:
        """Put segments on the queue, to be run now: delayed ones, and those whose process is gone."""
        if keys:
            await self._there(lambda: DBOS.resume_workflows_async(list(keys), queue_name=_QUEUE))

    async def forget(self, key: str) -> None:
        """Delete a segment's row."""
        await self._there(lambda: DBOS.delete_workflow_async(key))

    async def find(self, key: str) -> SegmentRow | None:
        """Read one segment's row; None where there is none."""
        rows = await self._list(workflow_ids=[key])
        return rows[0] if rows else None

    async def running(self) -> list[SegmentRow]:
        """List the segments that some process took and has not ended."""
        return await self._list(status="PENDING", name=_NAME)

    async def run_here(self, key: str, run_id: str) -> None:
        """Work off a segment in the loop of whoever opened the host, and wait for it from DBOS's."""
        if self._interrupted:  # the queue gives on until DBOS is gone
            raise asyncio.CancelledError
        work, context = self._given.pop(key, (self._work, contextvars.Context()))
        await asyncio.wrap_future(context.run(asyncio.run_coroutine_threadsafe, self._worked(work, run_id), self._home))

    async def _worked(self, work: Work, run_id: str) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await work(run_id)
        finally:
            self._tasks.discard(task)

    async def _list(self, **chosen: Any) -> list[SegmentRow]:
        # Without inputs and outputs: to load those, DBOS would read whatever serialization a row names.
        found: list[WorkflowStatus] = await self._there(
            lambda: DBOS.list_workflows_async(**chosen, load_input=False, load_output=False)
        )
        return [
            SegmentRow(
                key=row.workflow_id,
                executor=row.executor_id,
                state=_STATES.get(row.status, "ended"),
                older=_is_older(row.app_version),
            )
            for row in found
        ]

    async def _there(self, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result:
        """Run something in DBOS's loop; in an empty context, so that it is never taken for a part of a segment."""
        future = contextvars.Context().run(asyncio.run_coroutine_threadsafe, work(), self._loop)
        return await asyncio.wrap_future(future)

    def _live(self) -> None:
        """Be DBOS's thread, from launch to the end."""
        try:
            with _NoPickle():
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
            logger.addHandler(logging.NullHandler())  # else DBOS writes to the console by itself
        logger.addFilter(self._filter)
        self._dbos = DBOS(config=_config(self._url, self._executor))
        if DBOS.executor_id != self._executor:
            raise StoreError("another application of DBOS lives in this process. Give the planner one of its own")
        DBOS.listen_queues([])
        DBOS.launch()
        self._opened.set_result(None)
        await self._stop.wait()


_NAME = "planner_ext.segment"
_current: list[DbosHost] = []


@DBOS.workflow(name=_NAME, max_recovery_attempts=None)
async def _segment(run_id: str) -> None:
    key = DBOS.workflow_id
    assert key is not None
    await _current[0].run_here(key, str(run_id))


def _is_older(version: str | None) -> bool:
    numbers = re.fullmatch(r"planner_ext-(\d+)\.(\d+)", version or "")
    return numbers is not None and tuple(map(int, numbers.groups())) < _NUMBERS


def _config(url: str, executor: str) -> DBOSConfig:
    return DBOSConfig(
        name=_APPLICATION,
        system_database_url=url,
        dbos_system_schema=TABLES,
        executor_id=executor,
        application_version=_VERSION,
        serializer=DBOSPortableJSONSerializer(),
        sys_db_pool_size=_CONNECTIONS,
        log_level="WARNING",
    )


class _PasswordFilter(logging.Filter):
    """Takes the passwords of an address out of DBOS's own log lines."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url

    def filter(self, record: logging.LogRecord) -> bool:
        """Change the record where it has to be, and let it pass."""
        record.msg, record.args = without_passwords(record.getMessage(), self._url), ()
        if record.exc_info:
            text = logging.Formatter().formatException(record.exc_info)
            if (shown := without_passwords(text, self._url)) != text:
                record.exc_info, record.exc_text = None, shown
        return True


class _NoPickle:
    """Takes pickle away from DBOS: a row may name its serialization, and so run code, whatever the configuration says.

    With ``DBOSPortableJSONSerializer`` configured, DBOS 3.4 still unpickles a row that says ``py_pickle``.
    """

    def __init__(self) -> None:
        self._methods: Mapping[str, Any] = {name: vars(DefaultSerializer)[name] for name in _INSTEAD}

    def __enter__(self) -> None:
        for name, method in _INSTEAD.items():
            setattr(DefaultSerializer, name, method)

    def __exit__(self, *_: object) -> None:
        for name, method in self._methods.items():
            setattr(DefaultSerializer, name, method)


def _write_text(_: DefaultSerializer, data: object) -> str:
    return json.dumps(str(data))


def _refuse_pickle(_: DefaultSerializer, serialized_data: str) -> NoReturn:
    raise StoreError(
        f"A row of DBOS is written as pickle ({len(serialized_data)} characters). It was not read, since that may run "
        "code, and planner_ext writes JSON only: find out who wrote it."
    )


_INSTEAD: Mapping[str, Callable[..., Any]] = {"serialize": _write_text, "deserialize": _refuse_pickle}
