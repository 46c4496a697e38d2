"""The runs that one worker drives: claimed, driven in tasks of their own, and given up again."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar, cast

from planner_ext.approval.decisions import Decision
from planner_ext.core.limits import Limits
from planner_ext.durable.driver import SegmentDriver
from planner_ext.durable.errors import RunFencedError, RunRefusedError, StoreError
from planner_ext.durable.handle import RunHandle
from planner_ext.durable.liveness import Workers
from planner_ext.durable.records import RunRecord
from planner_ext.durable.segment import DurablePlanner
from planner_ext.durable.segments import Segments
from planner_ext.durable.store import JournalStore
from planner_ext.engine.ports import Clock
from planner_ext.sk.budget import price_in

__all__ = ["ArgumentsFor", "DrivenRuns"]

logger = logging.getLogger(__name__)

R = TypeVar("R")

ArgumentsFor = Callable[[str], Any]
"""Gives the application's arguments for a run, by its name: they are not stored."""


class DrivenRuns:
    """The runs that this worker drives; one that it does not, it waits for.

    Args:
        store: Holds the runs.
        workers: Knows who lives.
        driver: Drives segments.
        segments: Queues segments, or None where a worker finds by itself what there is to do.
        poll_seconds: How often to look at what another worker, or an approver, does.
        clock: Tells the time and waits.
    """

    def __init__(
        self,
        store: JournalStore,
        workers: Workers,
        driver: SegmentDriver,
        *,
        segments: Segments | None,
        poll_seconds: float,
        clock: Clock,
    ) -> None:
        self._store = store
        self._workers = workers
        self._driver = driver
        self._segments = segments
        self._poll_seconds = poll_seconds
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._faulted: set[str] = set()
        self._refused: dict[str, DurablePlanner[Any]] = {}

    def __len__(self) -> int:
        """Count the runs that are driven at this moment."""
        return len(self._tasks)

    def handle(
        self,
        run_id: str,
        planner: DurablePlanner[R],
        kernel: Any,
        arguments: Callable[[], Any],
        *,
        decisions: Mapping[str, Decision] | None = None,
        budget: Limits | None = None,
    ) -> RunHandle[R]:
        """Drive a run, or wait for whoever does; decisions and budget are for the segment that begins now.

        The application's arguments are asked for when a segment begins: what that raises is a fault of this run alone.
        """
        first: dict[str, Any] = {"decisions": decisions, "budget": budget}
        price = price_in(budget)

        def task() -> asyncio.Task[R]:
            driven = self._tasks.get(run_id)
            if driven is None or driven.done():
                options = {**first, "price": price}
                driven = self._begun(run_id, self._see_through(run_id, planner, kernel, arguments, options))
                first.clear()
            return cast("asyncio.Task[R]", driven)

        return RunHandle(run_id, task, lambda: self._decided(run_id))

    async def taken(
        self, record: RunRecord, planner: DurablePlanner[R], kernel: Any, arguments_for: ArgumentsFor | None
    ) -> RunHandle[R] | None:
        """Take over a run that is driven nowhere.

        Returns:
            None where it is driven, where a fault interrupted it here, or where it was refused to this planner.
        """
        run_id = record.run_id
        left = run_id in self._faulted or self._refused.get(run_id) is planner
        if run_id in self._tasks or left or not await self._claimed(record):
            return None
        return self.handle(run_id, planner, kernel, _arguments(arguments_for, run_id))

    async def work_off(
        self, run_id: str, planner: DurablePlanner[Any], kernel: Any, arguments_for: ArgumentsFor | None
    ) -> None:
        """Drive a segment that came from the queue, unless somebody drives its run, and sees to this too."""
        if run_id in self._tasks or not await self._claimed(await self._store.record(run_id)):
            return
        if run_id not in self._tasks:
            arguments = _arguments(arguments_for, run_id)
            await self._begun(run_id, self._see_through(run_id, planner, kernel, arguments, {}, queued=True))

    async def close(self) -> None:
        """Interrupt what runs."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begun(self, run_id: str, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        driven = self._tasks[run_id] = asyncio.create_task(work)
        driven.add_done_callback(lambda done: self._let_go(run_id, done))
        return driven

    def _let_go(self, run_id: str, task: asyncio.Task[Any]) -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, RunRefusedError):
                return
            self._faulted.add(run_id)
            logger.error("Run %s was interrupted: %s: %s", run_id, type(error).__name__, error)

    async def _see_through(
        self,
        run_id: str,
        planner: DurablePlanner[R],
        kernel: Any,
        arguments: Callable[[], Any],
        options: Mapping[str, Any],
        *,
        queued: bool = False,
    ) -> R:
        """Drive a run to its next pause or end, or wait until whoever does has.

        It is claimed before a segment begins: one that waited for its run would be in the way of whoever has that.
        """

        async def drive() -> R:
            return await self._drive(run_id, planner, kernel, arguments=arguments(), **options)

        given = options.get("decisions") is not None or options.get("budget") is not None
        while True:
            record = await self._store.record(run_id)
            if not await self._claimed(record):
                await self._clock.sleep(self._poll_seconds)
                continue
            try:
                if self._segments is None or queued or not (given or record.unfinished):
                    return await drive()
                return await self._segments.run(run_id, drive)
            except RunFencedError as error:
                logger.info("Run %s is gone on with elsewhere: %s", run_id, error)
                if queued:
                    raise
            finally:
                with suppress(StoreError):
                    await self._store.release(run_id, self._workers.worker_id)

    async def _drive(self, run_id: str, planner: DurablePlanner[R], kernel: Any, **options: Any) -> R:
        """Drive a run; where it is refused to this planner, say so once."""
        try:
            return await self._driver.drive(run_id, planner, kernel, **options)
        except RunRefusedError as error:
            if self._refused.get(run_id) is not planner:
                logger.error("Run %s is left to another worker: %s", run_id, error)
            self._refused[run_id] = planner
            raise

    async def _claimed(self, record: RunRecord) -> bool:
        """Take a run that nobody drives, or whose worker died."""
        if record.owner == self._workers.worker_id:
            return True
        if record.owner is not None and await self._workers.alive(record.owner):
            return False
        return await self._store.claim(record.run_id, self._workers.worker_id, seen=record.owner)

    async def _decided(self, run_id: str) -> bool:
        while (record := await self._store.record(run_id)).unfinished:
            expired = record.wake_at is not None and record.wake_at <= self._clock.now()
            if record.status == "running" or expired or await self._store.decisions(run_id):
                return True
            await self._clock.sleep(self._poll_seconds)
        return False


def _arguments(arguments_for: ArgumentsFor | None, run_id: str) -> Callable[[], Any]:
    return lambda: None if arguments_for is None else arguments_for(run_id)
