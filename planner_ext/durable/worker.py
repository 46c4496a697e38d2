"""Drives runs: a worker claims a run, and runs its activations until the run pauses or ends.

An activation leads from a run's start, or from a decision, to the next pause or end. A worker knows planners only by
the protocols of this module; nothing here needs Semantic Kernel.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from planner_ext.approval.decisions import (
    Approve,
    Authorize,
    Decision,
    InDoubt,
    InvalidDecisionError,
)
from planner_ext.core.errors import NewerSchemaError, RunRefusedError, UnansweredRunError, described
from planner_ext.core.limits import Budget
from planner_ext.durable.claims import PARKED, Claims, WorkerRegistry
from planner_ext.durable.database import Row
from planner_ext.durable.errors import ApprovalRefusedError, RunFencedError, StoreError
from planner_ext.durable.events import events_of
from planner_ext.durable.gate import CallGate, GatedStore
from planner_ext.durable.records import RunRecord, read_approval, read_decision, refused_text
from planner_ext.durable.retry import RetryPolicy
from planner_ext.durable.store import JournalStore
from planner_ext.durable.writer import Claim, JournalWriter
from planner_ext.engine.activation import Activation, ArgumentsFor, DurablePlanner
from planner_ext.engine.concurrency import contained_task, end_tasks, streams
from planner_ext.engine.log import log_run, one_line
from planner_ext.engine.ports import Clock, Event, ResultReady, RunStore

R = TypeVar("R")


@dataclass(slots=True, kw_only=True)
class Job(Generic[R]):
    """A run, and the planner, kernel and options with which a worker drives it.

    Attributes:
        run_id: The run's name.
        planner: Drives it.
        kernel: Its functions may be called.
        arguments_for: Called when a worker begins; an exception is a fault of this run alone.
        decisions: Decisions by call id for the first activation, in addition to those made through `Approvals`.
        budget: Replaces the run's limits in the first activation, even if a limit had ended the run.
        streaming: Whether requests are streamed.
    """

    run_id: str
    planner: DurablePlanner[R]
    kernel: Any
    arguments_for: ArgumentsFor | None = None
    decisions: Mapping[str, Decision] | None = None
    budget: Budget | None = None
    streaming: bool = False

    @property
    def is_forced(self) -> bool:
        """Whether the job may have something to do in a run that has ended."""
        return self.decisions is not None or self.budget is not None


@dataclass(frozen=True, slots=True)
class Next:
    """What is next for a run; see `Runs.activate`.

    Attributes:
        status: Its status, as in `RunRecord`.
        seconds: Seconds until it is due by the clock; 0.0 at once, None if only a decision continues it.
        ended: Whether nothing is due until a person resumes it.
    """

    status: str
    seconds: float | None
    ended: bool


@dataclass(frozen=True, slots=True)
class Due:
    """Runs to activate; see `Runs.due`.

    Attributes:
        runs: Their names, the oldest first.
        seconds: Seconds until the next look for due runs; 0.0 if more may be due.
    """

    runs: tuple[str, ...]
    seconds: float


class _Decided(NamedTuple):
    """A decision that no worker has taken yet, with its row's id and time, and whether its author is vouched for."""

    key: str
    decision: Decision
    at: float
    verified: bool


@dataclass(frozen=True, slots=True)
class Runner:
    """Drives the activations of runs in one store.

    Safe in two processes at once: the one whose write to the journal conflicts stops with `RunFencedError`.
    """

    store: JournalStore
    in_doubt: InDoubt
    clock: Clock
    authorize: Authorize | tuple[Authorize, ...] | None = None
    gate: CallGate = field(default_factory=CallGate)

    async def drive(self, job: Job[R], *, claim: Claim | None = None) -> R:
        """Continue a run to its end, or to a pause; a pause with a stored decision that can be taken is continued.

        Args:
            job: The run.
            claim: The hold of the worker that drives it; None drives it without checking its owner.

        Raises:
            RunFencedError: If another worker continues the run, or it was ended elsewhere.
            InvalidDecisionError: If one of the job's decisions cannot be taken. After an invalid decision of an
                approver the call waits again.
            Exception: On a fault.
        """
        run_id = job.run_id
        budget = job.budget
        own = job.decisions or {}
        arguments = None if job.arguments_for is None else job.arguments_for(run_id)
        seen: set[str] = set()
        while True:
            stored, new, rows = await self.store.load_driven(run_id)
            if not stored.facts:
                budget = budget or stored.inputs.budget
            decided = await self._untaken_decisions(run_id, rows)
            keys = {one.key for one in decided.values()}
            is_queued = stored.record.status == "queued"
            writer = JournalWriter(self.store, run_id, stored.facts, decided=keys, claim=claim, is_queued=is_queued)
            gated = GatedStore(writer, self.gate)
            writer.budget.leaves = gated.leaves
            if new is not None:
                writer.budget.offer(new)
            decisions = {**{call_id: one.decision for call_id, one in decided.items()}, **own}
            activation = Activation(
                run_id=run_id,
                goal=stored.record.goal,
                store=_with_crash_points(gated),
                facts=stored.facts,
                decisions=decisions,
                decided_at={call_id: one.at for call_id, one in decided.items()},
                budget=budget,
                arguments=stored.inputs.arguments,
                in_doubt=self.in_doubt,
                new_budget=writer.budget,
                authorize=self.authorize,
                described=writer.approval_of,
                guards=stored.inputs.guards,
                verified={call_id for call_id, one in decided.items() if one.verified and call_id not in own},
                emit=gated.emit if job.streaming else None,
            )
            try:
                _refuse_second(decided, own)
                async with gated:  # so that a cancellation ends a hook that hangs, too
                    result = await job.planner.journaled(job.kernel, activation, arguments=arguments).result()
            except InvalidDecisionError as error:
                if not await self._reopened(error, decided, own, writer):
                    raise
                continue
            budget = None
            own = {}
            if stored.record.status == "paused":
                seen |= keys  # a run in any other state takes them after its next pause
            rows = await self.store.decisions(run_id) if writer.state.ended is None else ()
            if {one.key for one in (await self._untaken_decisions(run_id, rows)).values()} <= seen:
                return result

    async def _untaken_decisions(self, run_id: str, rows: Sequence[Row]) -> dict[str, _Decided]:
        """Read the rows of untaken decisions by call id; a damaged one reopens its question, with the problem."""
        decided: dict[str, _Decided] = {}
        for row in rows:
            key = str(row[0])
            try:
                approval = read_approval(row)
                decision, verified = read_decision(str(row[7]))
            except ApprovalRefusedError as error:
                await self._reopen(run_id, key, error)
                continue
            if isinstance(decision, Approve):
                decision = replace(decision, fingerprint=approval.fingerprint)
            at = 0.0 if approval.decided_at is None else approval.decided_at.timestamp()
            decided[approval.call_id] = _Decided(key, decision, at, verified)
        return decided

    async def _reopened(
        self,
        error: InvalidDecisionError,
        decided: Mapping[str, _Decided],
        own: Mapping[str, Decision],
        writer: JournalWriter,
    ) -> bool:
        """Reopen the question of an approver's refused decision; store a refused one of the job."""
        call_id = error.call_id or ""
        if call_id in decided and call_id not in own:
            await self._reopen(writer.run_id, decided[call_id].key, error)
            return True
        if call_id in own:
            key = decided[call_id].key if call_id in decided else writer.question_id_of(call_id)
            text = refused_text(own[call_id])
            await self.store.refuse(writer.run_id, key, text, problem=str(error), at=self.clock.now())
        return False

    async def _reopen(self, run_id: str, key: str, error: Exception) -> None:
        log_run(logging.WARNING, run_id, f"call {one_line(key)} waits again: {one_line(error)}")
        await self.store.reopen(key, str(error))


def _refuse_second(decided: Mapping[str, _Decided], own: Mapping[str, Decision]) -> None:
    """Refuse a job's decision on a call that an approver has already decided."""
    if call_id := next((call_id for call_id in own if call_id in decided), None):
        problem = (
            f"The call {call_id!r} was decided before: the first decision counts, this one changed nothing. "
            "Resume the run without it."
        )
        raise InvalidDecisionError(problem, call_id=call_id)


def _with_crash_points(store: RunStore) -> RunStore:
    """Wrap a store with the crash points of the tests; see `planner_ext.testing.crash`."""
    if "PLANNER_EXT_CRASH_AT" not in os.environ:
        return store
    from planner_ext.testing.crash import CrashingStore  # noqa: PLC0415  (not loaded by an application)

    return CrashingStore.of_environment(store)


@dataclass(eq=False, slots=True, kw_only=True)
class WorkerPool:
    """The runs that this worker drives, each in a task; a run of another worker is awaited.

    Attributes:
        runner: Drives activations.
        workers: Knows which workers live.
        poll_seconds: How often to poll the store for changes by other workers and approvers.
        retry: When a run that a fault interrupted is driven again, by any worker.
        max_deaths: After how many ends of its worker's process a run is quarantined.
        grace_seconds: How long calls and requests in flight may take to end when the worker leaves.
    """

    runner: Runner
    workers: WorkerRegistry
    poll_seconds: float
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    max_deaths: int = 3
    grace_seconds: float = 30.0
    _claims: Claims = field(init=False)
    _tasks: dict[str, asyncio.Task[Any]] = field(default_factory=dict[str, asyncio.Task[Any]])
    _refused: dict[str, DurablePlanner[Any]] = field(default_factory=dict[str, DurablePlanner[Any]])
    _parking: dict[str, asyncio.Task[None]] = field(default_factory=dict[str, asyncio.Task[None]])
    _interrupted: set[str] = field(default_factory=set[str])
    _watching: asyncio.Task[None] | None = None
    _taking: asyncio.Task[Any] | None = None

    def __post_init__(self) -> None:
        runner = self.runner
        self._claims = Claims(
            store=runner.store,
            workers=self.workers,
            clock=runner.clock,
            gate=runner.gate,
            retry=self.retry,
            max_deaths=self.max_deaths,
        )

    def __len__(self) -> int:
        """Return the number of runs that are driven at this moment."""
        return len(self._tasks)

    def task_of(self, job: Job[R]) -> "asyncio.Task[R]":
        """Return the task that drives a run; a new one takes the job's decisions and budget, after the one before."""
        task = self._tasks.get(job.run_id)
        if task is None or task.done() or job.is_forced:
            task = self._start_task(job.run_id, self._drive_after(task, replace(job)))
            job.decisions = job.budget = None
        return cast("asyncio.Task[R]", task)

    async def take_due(self, job_of: Callable[[str], Job[R]], *, limit: int) -> "list[RunHandle[R]]":
        """Take over due runs that no living worker drives, the oldest first.

        Those that were refused to their planner are left out, and so is one that has to be driven alone while another
        is. If the caller is cancelled, what was claimed is driven nevertheless: others could not have it.

        Args:
            job_of: Returns the job of a run.
            limit: The maximum number of runs.
        """
        taking = asyncio.create_task(self._take_due(job_of, limit))
        taking.add_done_callback(_retrieve)
        self._taking = taking
        return await asyncio.shield(taking)

    async def hint(self, timeout: float) -> None:  # noqa: ASYNC109  (a hint is not an error when it is late)
        """Wait until the database hints at a due run, or until the timeout."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self.workers.hinted.wait()
        self.workers.hinted.clear()

    async def activate(self, job: Job[Any]) -> Next:
        """Drive a run that is due and that no other worker drives, and say what is next; see `Runs.activate`."""
        run_id = job.run_id
        before = await self._next(job)
        if before.seconds == 0.0 and run_id not in self._tasks and not self._is_leaving:
            self._start_task(run_id, self._drive_or_wait(job, wait=False))
        task = self._tasks.get(run_id)
        if task is None:
            return before
        await asyncio.wait({task})  # were the task itself awaited, its cancellation would look like the caller's
        if self._is_leaving:
            return replace(before, seconds=0.0)
        return await self._next(job)

    async def _next(self, job: Job[Any]) -> Next:
        """Say when a run is due here, whether or not it is driven at this moment."""
        now = self.runner.clock.now()
        record, continues, _ = await self.runner.store.load_since(job.run_id, _NO_FACTS, now=now)
        if not record.unfinished:
            return Next(record.status, None, ended=True)
        seconds = None if record.wake_at is None else max(0.0, record.wake_at - now)
        if self._is_refused(job):
            seconds = _REFUSED_SECONDS
        elif job.run_id in self._parking or await self._claims.is_elsewhere(record):
            seconds = _ELSEWHERE_SECONDS
        elif record.status == "paused" and continues:
            seconds = 0.0
        elif record.status != "paused":
            seconds = seconds or 0.0
        return Next(record.status, seconds, ended=False)

    def _is_refused(self, job: Job[Any]) -> bool:
        return self._refused.get(job.run_id) is job.planner

    async def due(self, *, limit: int, again_after: float) -> Due:
        """Name due runs without a living worker, each to one caller; see `Runs.due`."""
        store = self.runner.store
        dead = await self._claims.dead()
        found: list[RunRecord] = []
        async with aclosing(store.due(self.runner.clock.now(), dead, again_after=again_after)) as records:
            async for record in records:
                found.append(record)
                if len(found) == limit:
                    break
        told = await store.tell(found, again_after=again_after)
        return Due(told, 0.0 if len(found) == limit else self.poll_seconds)

    async def wait_until_due(self, run_id: str) -> bool:
        """Wait until a paused run can continue; False if it has ended."""
        while not await self.runner.store.continues(run_id, self.runner.clock.now()):
            if not (await self.runner.store.record(run_id)).unfinished:
                return False
            await self.runner.clock.sleep(self.poll_seconds)
        return True

    async def close(self, grace_seconds: float | None = None) -> None:
        """Let calls and requests in flight end, interrupt and release all runs; once.

        Args:
            grace_seconds: How long they may take; what is left is cancelled then, or when this wait is cancelled. None
                is the pool's own.
        """
        gate = self.runner.gate
        if self._is_leaving:
            return
        gate.drain(self._interrupt)
        self.workers.announce("leaving")
        try:
            for run_id in self._tasks.keys() - gate.driven.keys():  # it waits: nothing of it is in flight
                self._interrupt(run_id)
            await self._drain(self.grace_seconds if grace_seconds is None else grace_seconds)
        finally:
            for run_id in gate.driven:
                log_run(logging.WARNING, run_id, "interrupted: what it had in flight did not end within the grace")
            self._interrupted.update(self._tasks)
            await end_tasks(*self._tasks.values(), *self._parking.values(), *filter(None, [self._watching]))
            if self._taking is not None:
                await asyncio.wait({self._taking})
            with suppress(StoreError):
                await self.runner.store.release_all(self.workers.worker_id)

    def give_up(self) -> None:
        """Cancel the work on this worker's runs: its lease has lapsed, and others may have taken them."""
        for store in [*self.runner.gate.driven.values()]:
            store.abandon()

    @property
    def _is_leaving(self) -> bool:
        return self.runner.gate.interrupt is not None

    def _interrupt(self, run_id: str) -> None:
        if (task := self._tasks.get(run_id)) is not None:
            self._interrupted.add(run_id)
            task.cancel()

    async def _drain(self, grace_seconds: float) -> None:
        """Wait for the driven runs until they are interrupted; other workers may have each of them at once."""
        if self._tasks and grace_seconds > 0:
            await asyncio.wait({*self._tasks.values()}, timeout=grace_seconds)

    async def _watch_driven(self) -> None:
        """Pass new budgets from the store to driven runs, and cancel runs ended elsewhere: a call may hang."""
        while self._tasks:
            await asyncio.sleep(self.poll_seconds)
            with suppress(StoreError):
                for run_id, ended, new in await self.runner.store.changed_elsewhere(self.workers.worker_id):
                    if (store := self.runner.gate.driven.get(run_id)) is None:
                        continue
                    if new is not None:
                        store.writer.budget.offer(new)
                    if ended:
                        store.abandon()

    def _start_task(self, run_id: str, work: Coroutine[Any, Any, R]) -> "asyncio.Task[R]":
        task = self._tasks[run_id] = contained_task(work)
        task.add_done_callback(partial(self._task_ended, run_id))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch_driven())
        return task

    def _task_ended(self, run_id: str, task: "asyncio.Task[Any]") -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]
        _retrieve(task)
        self.runner.gate.tell_readers(run_id)

    async def _drive_after(self, before: "asyncio.Task[Any] | None", job: Job[R]) -> R:
        """Drive a run once the task that drives it has ended, which is cancelled with this one."""
        if before is not None:
            with suppress(Exception):  # reported to those who await that task
                await before
        return await self._drive_or_wait(job)

    async def _drive_or_wait(self, job: Job[R], *, wait: bool = True) -> R:
        """Drive a run to its next pause or end, or wait until the worker that drives it has done so.

        Args:
            job: The run.
            wait: Whether to wait for another worker.

        Raises:
            RunFencedError: If another worker drives the run, and this does not wait.
            RunNotAnsweredError: If it is failed or quarantined.
            Exception: On a fault; when the run is retried is in its row.
        """
        while not self._is_leaving:
            claim = await self._claimed(job.run_id, wait=wait)
            try:
                return await self._drive_here(job, claim)
            except RunFencedError as error:
                log_run(logging.INFO, job.run_id, f"continues elsewhere: {one_line(error)}")
                job = await self._unless_cancelled(job)
            except (*_REFUSALS, InvalidDecisionError):
                raise
            except Exception as error:
                await self._park_in_time(job.run_id, error)
                raise
            finally:
                self._interrupted.discard(job.run_id)
                self.runner.gate.together(job.run_id)
                with suppress(StoreError):
                    await self.runner.store.release(job.run_id, self.workers.worker_id)
        raise asyncio.CancelledError

    async def _unless_cancelled(self, job: Job[R]) -> Job[R]:
        """Drop the decisions and the budget of a job whose run was cancelled meanwhile: they would reopen it."""
        ended = (await self.runner.store.record(job.run_id)).status == "stopped"
        return replace(job, decisions=None, budget=None) if ended else job

    async def _claimed(self, run_id: str, *, wait: bool) -> Claim:
        """Claim a run; if it failed at another worker while this one waited, wait until its retry is due, too."""
        waited = False
        while True:
            claim = Claim(self.workers.worker_id, self.workers.hold())  # before the row is read
            record = await self.runner.store.record(run_id)
            _check_not_parked(record)
            later = waited and self._is_retried_later(record)
            if not later and await self._try_claim(record):
                return claim
            if not wait:
                raise RunFencedError(f"Run {run_id!r} is left to another worker, or to later.")
            waited = True
            await self.runner.clock.sleep(self.poll_seconds)

    def _is_retried_later(self, record: RunRecord) -> bool:
        return record.status == "running" and (record.wake_at or 0) > self.runner.clock.now()

    async def _drive_here(self, job: Job[R], claim: Claim) -> R:
        """Drive a run; log once if it is refused to this planner, and count what is no error of it as a death."""
        try:
            return await self.runner.drive(job, claim=claim)
        except _REFUSALS as error:
            if self._refused.get(job.run_id) is not job.planner:
                log_run(logging.ERROR, job.run_id, f"left to another worker: {one_line(error)}")
            self._refused[job.run_id] = job.planner
            raise
        except Exception:
            raise
        except BaseException as error:
            if job.run_id not in self._interrupted:
                await self._count_death(job.run_id, error)
            if isinstance(error, GeneratorExit):  # it would close whoever awaits this task
                raise RunFencedError("What it runs has raised GeneratorExit; that counts as a death.") from error
            raise

    async def _park_in_time(self, run_id: str, error: Exception) -> None:
        """Store when a run is retried; in the background where the store itself cannot be used."""
        log_run(logging.WARNING, run_id, f"fault {one_line(described(error))}")
        try:
            await self._claims.park_fault(run_id, error)
        except StoreError:
            if run_id not in self._parking:
                task = self._parking[run_id] = asyncio.create_task(self._park_again(run_id, error))
                task.add_done_callback(lambda _: self._parking.pop(run_id))

    async def _count_death(self, run_id: str, error: BaseException) -> None:
        """Count what interrupts a run with a call under way, and not this pool, as the end of its worker's process."""
        with suppress(StoreError):
            await self._claims.park_death(run_id, error)

    async def _park_again(self, run_id: str, error: Exception) -> None:
        while True:
            await self.runner.clock.sleep(self.poll_seconds)
            with suppress(StoreError):
                return await self._claims.park_fault(run_id, error)

    async def _take_due(self, job_of: Callable[[str], Job[R]], limit: int) -> "list[RunHandle[R]]":
        if self._is_leaving:
            return []
        refused = [run_id for run_id in self._refused if self._is_refused(job_of(run_id))]
        skip = {*refused, *self._parking, *self._tasks}
        taken, dead = await self._claims.take_free(limit, skip=skip)
        if self._is_leaving:  # its runs are released at the end
            return []
        handles = [RunHandle(self, job_of(run_id)) for run_id in taken]
        if dead is None:
            return handles
        async with aclosing(self.runner.store.due(self.runner.clock.now(), dead)) as due:
            async for record in due:
                if len(handles) >= limit or self._is_leaving:
                    break
                job = job_of(record.run_id)
                if record.run_id not in skip and await self._take_examined(record, job):
                    handles.append(RunHandle(self, job))
        return handles

    async def _take_examined(self, record: RunRecord, job: Job[Any]) -> bool:
        """Claim a run whose worker died, unless it has to be driven alone, and another one is."""
        claim = await self._claims.of(record)
        if claim is None or record.run_id in self._tasks or (claim.alone and self.runner.gate.is_taken):
            return False
        if claim.alone:
            self._start_task(record.run_id, self._drive_or_wait(job, wait=False))
            return True
        return await self._claims.take(claim)

    async def _try_claim(self, record: RunRecord) -> bool:
        """Claim a run if it has no owner, or its owner died."""
        claim = await self._claims.of(record)
        return claim is not None and await self._claims.take(claim)


_NO_FACTS = 2**31 - 1
"""Reads a run without its journal, which never has as many facts."""
_ELSEWHERE_SECONDS = 5.0
"""When to activate a run again that another worker drives."""
_REFUSED_SECONDS = 30.0
"""When to activate a run again that this worker may not drive: another one may have done so."""

_REFUSALS = (RunRefusedError, NewerSchemaError)
"""The errors of a run that this worker's planner or version may not drive; it is left to other workers, unchanged."""


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's error, so that asyncio does not log it if no caller awaits the task."""
    if not task.cancelled():
        task.exception()


def _check_not_parked(record: RunRecord) -> None:
    if record.status in PARKED:
        said = "failed" if record.status == "failed" else "is in quarantine"
        problem = f"Run {record.run_id!r} {said}: {record.problem} Resume it to try again."
        raise UnansweredRunError(problem)


class RunHandle(Generic[R]):
    """A run of a store; it continues whether or not its result is awaited.

    Attributes:
        run_id: The run's name.
    """

    def __init__(self, pool: WorkerPool, job: Job[R]) -> None:
        """@private Called by `Runs`."""
        self.run_id = job.run_id
        self._pool = pool
        self._job = job
        self._task = pool.task_of(job)
        self._returned = False

    @streams
    async def events(self, *, after: int = 0) -> AsyncGenerator[Event | ResultReady[R], None]:
        """Yield what happens in the run until its next pause or end, as a planner's ``invoke_stream`` does.

        Each reader gets every fact of the run once, in order: first those that there are, also those of earlier
        processes, then each one when it is stored. It may begin late, and there may be several; called again after a
        pause, this continues the run as `result` does. Leaving the iteration leaves the run running.

        A reader is never waited for, and facts do not pile up for it: they are in the journal. The text of a reply is
        kept until the next one begins, whole, so a reader that is further behind gets that reply as a fact alone.

        Args:
            after: How many of the first facts to leave out, for a reader that has them.

        Yields:
            `TextDelta` for text as it arrives, if the run is streamed and driven in this process; the run's facts; and
            last a `ResultReady` with the result. The facts of a run that another worker drives come every
            ``poll_seconds``.

        Raises:
            Exception: As `result`.
        """
        task = self._continued()
        runner = self._pool.runner
        told = events_of(
            self.run_id, task, after=after, store=runner.store, gate=runner.gate, poll_seconds=self._pool.poll_seconds
        )
        async with aclosing(told) as events:
            async for event in events:
                yield event
        yield ResultReady(result=await self._outcome(task))

    async def result(self) -> R:
        """Wait for the run's next pause or end; a paused run's result lists its pending calls.

        Called again after a pause, it continues with the decisions made meanwhile; without decisions it returns the
        same pause. If another worker drives the run, this waits for it. Cancelling the wait does not cancel the run.

        Raises:
            RunNotAnsweredError: If another worker drove the run, and it is failed or quarantined.
            Exception: On a fault, as of a planner's ``invoke``; a worker that works retries the run, see `RetryPolicy`,
                and so does a start.
        """
        return await self._outcome(self._continued())

    async def finished(self) -> R:
        """Wait for the run's end; at each pause, wait until calls are decided or questions expire.

        Raises:
            Exception: As `result`.
        """
        result = await self.result()
        while await self._pool.wait_until_due(self.run_id):
            result = await self.result()
        return result

    def _continued(self) -> "asyncio.Task[R]":
        """Return the task of the current activation; once its result was returned, start the next one."""
        if self._returned and self._task.done() and not self._task.cancelled() and self._task.exception() is None:
            self._task = self._pool.task_of(self._job)
            self._returned = False
        return self._task

    async def _outcome(self, task: "asyncio.Task[R]") -> R:
        result = await asyncio.shield(task)
        self._returned = True
        return result
