"""Kept runs on Temporal: a workflow a run, with the run's name as its id, woken by a signal or a timer.

Its one activity at a time looks at the run. Temporal learns names and statuses of runs,
nothing else.
"""

import asyncio
import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, Self

from temporalio import activity, workflow
from temporalio.client import Client
from temporalio.common import (
    RetryPolicy,
    WorkflowIDConflictPolicy,
    WorkflowIDReusePolicy,
)
from temporalio.exceptions import (
    ActivityError,
    ApplicationError,
    is_cancelled_exception,
)
from temporalio.service import RPCError, RPCStatusCode
from temporalio.worker import Worker

from planner_ext.core.errors import PlannerExtError
from planner_ext.durable.errors import StoreError
from planner_ext.durable.hosts.dispatch import dispatch
from planner_ext.durable.notices import RunNotice
from planner_ext.durable.runs import Runs
from planner_ext.durable.worker import Next
from planner_ext.engine.concurrency import end_tasks
from planner_ext.engine.log import escaped

logger = logging.getLogger(__name__)

_WORKFLOW = "planner_ext.run"
_ACTIVATE = "planner_ext.activate"
_CANCEL = "planner_ext.cancel"

_LONGEST_SECONDS = 86400.0
"""How long a workflow waits at most: the signal that its run was cancelled may be
lost."""
_BEAT_SECONDS = 1.0
_HEARTBEAT = timedelta(seconds=5)
_YEAR = timedelta(days=365)
_GRACE = timedelta(hours=1)
"""Longer than the grace of the runs, which interrupts activities."""
_RETRY = RetryPolicy(maximum_interval=timedelta(seconds=10))


# The sandbox would import the package anew for each run.
@workflow.defn(name=_WORKFLOW, sandboxed=False)
class RunWorkflow:
    """Looks at a run when it is due, until it has ended; returns its status."""

    def __init__(self) -> None:
        self._woken = False

    @workflow.signal
    def wake(self) -> None:
        """Look at the run now, or once more after the present look."""
        self._woken = True

    @workflow.run
    async def run(self) -> str:
        """Look until the run has ended; cancelling the workflow cancels the run."""
        try:
            return await self._until_ended()
        except (asyncio.CancelledError, ActivityError) as error:
            if is_cancelled_exception(error):
                await self._in_activity(_CANCEL)
            raise

    async def _until_ended(self) -> str:
        while True:
            self._woken = False
            then = await self._in_activity(_ACTIVATE)
            if then.ended:
                return then.status
            seconds = (
                _LONGEST_SECONDS
                if then.seconds is None
                else min(then.seconds, _LONGEST_SECONDS)
            )
            with suppress(TimeoutError):
                await workflow.wait_condition(lambda: self._woken, timeout=seconds)
            if workflow.info().is_continue_as_new_suggested():
                workflow.continue_as_new()

    async def _in_activity(self, name: str) -> Next:
        return await workflow.execute_activity(
            name,
            workflow.info().workflow_id,
            result_type=Next,
            start_to_close_timeout=_YEAR,
            heartbeat_timeout=_HEARTBEAT,
            cancellation_type=workflow.ActivityCancellationType.ABANDON,
            retry_policy=_RETRY,
        )


class TemporalHost:
    """Drives runs where and when Temporal says so; used as ``async with TemporalHost(runs, client, task_queue=...)``.

    Call `Runs.drive_with` before. Leaving the block lets what is in flight end, and
    closes ``runs``. Cancelling a run ends its workflow; cancelling a workflow ends its
    run.

    Args:
        runs: The runs.
        client: Of the namespace in which each run has a workflow with its name as the
            id.
        task_queue: Where the workers of these runs poll.
        options: Returns, for a run's name, more options of `Client.start_workflow`,
            such as its ``priority``.
        again_after: Seconds after which a run that no worker has claimed is signalled
            again.
        **worker: More options of `temporalio.worker.Worker`, such as
            ``max_concurrent_activities``, or a ``deployment_config`` that pins runs to
            a version.
    """

    def __init__(
        self,
        runs: Runs,
        client: Client,
        *,
        task_queue: str,
        options: Callable[[str], Mapping[str, Any]] | None = None,
        again_after: float = 30.0,
        **worker: Any,
    ) -> None:
        self._runs = runs
        self._client = client
        self._task_queue = task_queue
        self._options = options
        self._again_after = again_after
        self._settings = worker
        self._worker: Worker
        self._dispatching: asyncio.Task[NoReturn]

    async def __aenter__(self) -> Self:
        """Begin to poll Temporal, and to signal what is due; a later fatal error of the worker cancels the block."""
        settings: dict[str, Any] = {
            "graceful_shutdown_timeout": _GRACE,
            "disable_eager_activity_execution": True,  # an eager activity bypasses the priorities
            **self._settings,
        }
        activities = [self._activate, self._cancel]
        self._worker = Worker(
            self._client,
            task_queue=self._task_queue,
            workflows=[RunWorkflow],
            activities=activities,
            **settings,
        )
        await self._runs.listen("ended", "temporal", self._ended)
        await self._worker.__aenter__()
        self._dispatching = asyncio.create_task(
            dispatch(self._runs, self.wake, again_after=self._again_after)
        )
        return self

    async def __aexit__(self, *error: Any) -> None:
        await end_tasks(self._dispatching)
        leaving = asyncio.create_task(self._worker.__aexit__(*error))
        await asyncio.sleep(0)  # the worker polls no more before activities return
        try:
            await self._runs.close()
        finally:
            await leaving

    async def wake(self, run_id: str) -> None:
        """Make a run's workflow look at it; start the workflow if it does not run."""
        await self._client.start_workflow(
            _WORKFLOW,
            id=run_id,
            task_queue=self._task_queue,
            start_signal="wake",
            id_conflict_policy=WorkflowIDConflictPolicy.USE_EXISTING,
            id_reuse_policy=WorkflowIDReusePolicy.ALLOW_DUPLICATE,
            **({} if self._options is None else self._options(run_id)),
        )

    async def _ended(self, notice: RunNotice) -> None:
        """End the workflow of a run that was cancelled while it waited."""
        if notice.status == "stopped":
            try:
                await self._client.get_workflow_handle(notice.run_id).signal("wake")
            except RPCError as error:
                if error.status is not RPCStatusCode.NOT_FOUND:
                    raise

    @activity.defn(name=_ACTIVATE)
    async def _activate(self, run_id: str) -> Next:
        """Look at a run; an end of this wait leaves the run running."""
        looking = asyncio.create_task(self._runs.activate(run_id))
        try:
            while not looking.done():
                activity.heartbeat()
                await asyncio.wait({looking}, timeout=_BEAT_SECONDS)
            with _without_text():
                return await looking
        finally:
            looking.cancel()

    @activity.defn(name=_CANCEL)
    async def _cancel(self, run_id: str) -> None:
        with _without_text():
            await self._runs.cancel(
                run_id, by="temporal", reason="Its workflow was cancelled."
            )


@contextmanager
def _without_text() -> Generator[None]:
    """Tell Temporal the class of an error, and the log its text; only an unusable store is tried again."""
    try:
        yield
    except PlannerExtError as error:
        name = type(error).__name__
        is_final = not isinstance(error, StoreError)
        logger.warning("A look at a run failed: %s", escaped(error))
        raise ApplicationError(name, type=name, non_retryable=is_final) from None
