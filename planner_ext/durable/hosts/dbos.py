"""Kept runs on DBOS's queues: a row of a queue is one look at a run, which may happen twice, or not at all.

A row carries the run's name and, at the end, its status. Only public names of DBOS are
used.
"""

import asyncio
import contextvars
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn, Self, cast

from dbos import DBOS, EnqueueOptions

from planner_ext.durable.errors import StoreError
from planner_ext.durable.hosts.dispatch import dispatch
from planner_ext.durable.runs import Runs
from planner_ext.engine.concurrency import end_tasks

_WORKFLOW = "planner_ext.activate"
_QUEUED = ("ENQUEUED", "DELAYED")


class DbosHost:
    """Drives runs where and when a queue of DBOS says so; used as ``async with DbosHost(runs, queue="agents")``.

    Call `Runs.drive_with` before. Import this class before ``DBOS.launch()``, which
    looks for the workflow of the rows that a process left; open it afterwards. Leaving
    the block lets what is in flight end, and closes ``runs``.

    Args:
        runs: The runs; one host in a process at a time.
        queue: One that the application registered: `DBOS.register_queue`. A decision
            waits for its ``polling_interval_sec`` at most.
        options: Returns, for a run's name, more options of
            `DBOS.enqueue_workflow_with_options_async`, such as its ``priority``. With a
            ``queue_partition_key`` a run may be queued several times: let
            ``again_after`` exceed the time that a row waits in the queue.
        again_after: Seconds after which a run that no worker has claimed is queued
            again.
    """

    def __init__(
        self,
        runs: Runs,
        *,
        queue: str,
        options: Callable[[str], Mapping[str, Any]] | None = None,
        again_after: float = 30.0,
    ) -> None:
        self.runs = runs
        self._queue = queue
        self._options = options
        self._again_after = again_after
        self._tasks: list[asyncio.Task[NoReturn]] = []
        self._loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Self:
        """Begin to queue due runs.

        Raises:
            StoreError: If DBOS has no such queue, or another host is open in this
                process.
        """
        if await DBOS.retrieve_queue_async(self._queue) is None:
            way_out = f"Register it first: DBOS.register_queue({self._queue!r})."
            raise StoreError(f"DBOS has no queue {self._queue!r}. {way_out}")
        if _opened[0].done():
            raise StoreError(
                "This process has a DbosHost open already. Leave its block first."
            )
        self._loop = asyncio.get_running_loop()
        dispatching = dispatch(self.runs, self.wake, again_after=self._again_after)
        self._tasks = [
            asyncio.create_task(dispatching),
            asyncio.create_task(self._clear_away()),
        ]
        _opened[0].set_result(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        _opened[:] = [Future()]
        await end_tasks(*self._tasks)
        await self.runs.close()

    async def wake(self, run_id: str) -> None:
        """Queue a look at a run, unless one is queued.

        A row that is said to run does not count: while DBOS's database takes no writes,
        looks end without a trace.
        """
        key = f"{run_id}/{uuid.uuid4().hex}"
        more: Mapping[str, Any] = {} if self._options is None else self._options(run_id)
        look = {
            "workflow_name": _WORKFLOW,
            "queue_name": self._queue,
            "workflow_id": key,
            **more,
        }
        if "queue_partition_key" not in more:  # DBOS refuses both at once
            once = {
                **look,
                "deduplication_id": run_id,
                "duplication_policy": "return-existing",
            }
            queued = await _enqueue(once, run_id)
            if (
                queued.workflow_id == key
                or (await queued.get_status()).status in _QUEUED
            ):
                return
        await _enqueue(look, run_id)

    async def activate(self, run_id: str) -> str:
        """@private Look at a run, outside of any workflow; return its status."""
        looking = contextvars.Context().run(
            asyncio.run_coroutine_threadsafe, self.runs.activate(run_id), self._loop
        )
        then = await asyncio.wrap_future(looking)
        return then.status

    async def _clear_away(self) -> NoReturn:
        """Cancel rows that are said to run, and do not: a queue's limits count them."""
        while True:
            await asyncio.sleep(self._again_after)
            with suppress(Exception):  # of DBOS, or of the store: tried again
                before = datetime.now(UTC) - timedelta(seconds=self._again_after)
                rows = await DBOS.list_workflows_async(
                    name=_WORKFLOW,
                    queue_name=self._queue,
                    status="PENDING",
                    dequeued_before=before.isoformat(),
                    load_input=False,
                    load_output=False,
                )
                driven = {
                    run_id
                    for worker in await self.runs.workers()
                    if worker.alive
                    for run_id in worker.runs
                }
                lost = [
                    row.workflow_id
                    for row in rows
                    if row.workflow_id.rpartition("/")[0] not in driven
                ]
                if lost:
                    await DBOS.cancel_workflows_async(lost)


async def _enqueue(options: Mapping[str, Any], run_id: str) -> Any:
    return await DBOS.enqueue_workflow_with_options_async(
        cast("EnqueueOptions", options), run_id
    )


_opened: list[Future[DbosHost]] = [Future()]
"""The host of this process, once it is open: DBOS takes rows from its launch on."""


@DBOS.workflow(name=_WORKFLOW, max_recovery_attempts=None)
async def _activate(run_id: str) -> str:
    """Look at a run once, as soon as this process has an open host; return its status."""
    host = await asyncio.shield(asyncio.wrap_future(_opened[0]))
    return await host.activate(run_id)
