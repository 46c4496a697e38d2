"""Drives the runs of a store: a worker claims a run, and drives it to its next pause or end.

From top to bottom:

    Job         a run, and what a worker drives it with
    Runner      drives the activations of one run
    Claims      which runs this worker may drive; counts faults and deaths
    WorkerPool  the runs that this worker drives, each in a task
    RunHandle   the result and the events of a run, for its readers

A fault is an exception of a run; a retry follows. A fault of an endpoint uses up no
retry: the run waits, see `planner_ext.durable.outages`.

A death is the end of the worker's process while it drove the run. These count as a
death, too: ``KeyboardInterrupt``, ``SystemExit`` or ``GeneratorExit`` out of the run,
and a cancellation of a running call that the pool did not ask for. After
``max_deaths`` the run is quarantined, also if its functions may run again. A new reply,
the start of a call, or a result resets the numbers of faults and deaths.

A death with one call in flight points at that call's run, which is driven alone from
then on, so that it does not take a call of another run with it. Where several runs were
in a call, or this one was in a request, the death points at none: they continue
together, with a higher limit, as does a run whose call was begun less often than
``max_deaths``: it was not in the call each time. After ``max_deaths`` of these in a
call, a run is driven alone, too: so only a death of its own sets it aside.
"""

import asyncio
import logging
import math
import os
import random
from collections import ChainMap, Counter
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar, cast

from planner_ext.approval.decisions import (
    Approve,
    AuthorizeHooks,
    Decision,
    Deny,
    InvalidDecisionError,
    MadeDecision,
    hooks_of,
)
from planner_ext.approval.waiting import InDoubt
from planner_ext.core.errors import (
    InvalidJournalError,
    NewerSchemaError,
    PlannerExtError,
    RunRefusedError,
    UnansweredRunError,
    described,
)
from planner_ext.core.facts import (
    CallFinished,
    CallStarted,
    Ended,
    ModelReplied,
    Planned,
    unwrapped,
)
from planner_ext.core.limits import Budget
from planner_ext.core.values import frozen
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.database import Row
from planner_ext.durable.driven import ArrivingText, DrivenRuns, DrivenStore
from planner_ext.durable.errors import ApprovalRefusedError, RunFencedError, StoreError
from planner_ext.durable.gauge import RETRIES, TAKEOVERS
from planner_ext.durable.heartbeat import LeasedWorkers
from planner_ext.durable.inputs import NewBudget
from planner_ext.durable.listing import PARKED
from planner_ext.durable.options import RetryPolicy
from planner_ext.durable.outages import Outages
from planner_ext.durable.records import (
    RunRecord,
    StoredRun,
    any_decision_text,
    fold_journal,
    read_approval,
    read_decision,
)
from planner_ext.durable.store import JournalStore
from planner_ext.durable.writer import Claim, JournalWriter, say_to
from planner_ext.engine.activation import Activation, ArgumentsFor, DurablePlanner
from planner_ext.engine.concurrency import contained_task, end_tasks, streams
from planner_ext.engine.log import escaped, log_run
from planner_ext.engine.ports import (
    Clock,
    Event,
    ResultReady,
    RunStore,
    current_circuit,
)

logger = logging.getLogger(__name__)

R = TypeVar("R")

_ALONE_SECONDS = 30.0
"""How long a run waits for the calls of others to end, and then until it tries again to
be driven alone."""
_ELSEWHERE_SECONDS = 5.0
"""When to activate a run again that another worker drives."""
_REFUSED_SECONDS = 30.0
"""When to activate a run again that this worker may not drive: another one may have
done so."""

_MOST_REFUSED = 100
"""How many refused runs are remembered before those that have ended are looked for."""

_INNOCENT_DEATHS = 2
"""The deaths in a request that do not delay a run."""

_REFUSALS = (RunRefusedError, NewerSchemaError)
"""The errors of a run that this worker's planner or version may not drive; it is left
to other workers, unchanged."""


@dataclass(slots=True, kw_only=True)
class Job(Generic[R]):
    """A run, and what a worker drives it with.

    Attributes:
        arguments_for: Called before each activation.
        decisions: By call id, for the first activation.
        budget: Replaces the limits in the first activation, also of an ended run.
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
        """Whether the job may continue a run that has ended."""
        return self.decisions is not None or self.budget is not None


@dataclass(frozen=True, slots=True)
class Next:
    """What is next for a run; see `Runs.activate`.

    Attributes:
        status: As in `RunRecord`.
        seconds: Seconds until it is due; 0.0 at once, None if only a decision continues
            it.
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
        seconds: Seconds until the next look; 0.0 if more may be due.
    """

    runs: tuple[str, ...]
    seconds: float


class _Decided(NamedTuple):
    """A decision to take.

    Attributes:
        key: The id of its approval.
        is_stored: Whether the approval's row holds it.
    """

    key: str
    made: MadeDecision
    is_stored: bool


@dataclass(frozen=True, slots=True)
class Runner:
    """Drives runs; of two processes with one run, one is fenced."""

    store: JournalStore
    in_doubt: InDoubt
    clock: Clock
    authorize: AuthorizeHooks = None
    driven: DrivenRuns = field(default_factory=DrivenRuns)

    async def drive(self, job: Job[R], *, claim: Claim | None = None) -> R:
        """Drive a run to its end, or to a pause at which no stored decision can be taken.

        Args:
            job: The run.
            claim: The worker's hold; None does not check the run's owner.

        Raises:
            RunFencedError: If the run continues, or was ended, elsewhere.
            InvalidDecisionError: If a decision of the job cannot be taken. An
                approver's makes its call wait again instead.
            Exception: On a fault.
        """
        run_id = job.run_id
        budget = job.budget
        own = job.decisions or {}
        arguments = None
        if job.arguments_for is not None:
            arguments = job.arguments_for(run_id)
        seen: set[Row] = set()
        while True:
            stored, chain, new, said, rows = await self.store.load_driven(run_id)
            budget = budget or _stored_budget(stored, new)
            untaken = await self._untaken_decisions(run_id, rows)
            keys = {one.key for one in untaken.values()}
            is_queued = stored.record.status == "queued"
            writer = JournalWriter(
                self.store,
                run_id,
                stored.facts,
                decided=keys,
                claim=claim,
                is_queued=is_queued,
                run_arguments=ChainMap(arguments or {}, {**stored.inputs.arguments}),
                chain=chain,
            )
            kept = DrivenStore(writer, self.driven)
            writer.budget.check_stays = kept.check_stays
            if new is not None:
                writer.budget.offer(new)
            writer.budget.say(said)
            given = self._given(writer, own)
            decided = {**untaken, **given}
            activation = Activation(
                run_id=run_id,
                goal=stored.record.goal,
                store=_with_crash_points(kept),
                facts=stored.facts,
                decisions={call_id: one.made for call_id, one in decided.items()},
                budget=budget,
                arguments=stored.inputs.arguments,
                before=stored.inputs.before,
                in_doubt=self.in_doubt,
                new_budget=writer.budget,
                authorize=self.authorize,
                described=writer.approval_of,
                guards=stored.inputs.guards,
                emit=kept.emit if job.streaming else None,
            )
            try:
                _refuse_second(untaken, given)
                # Around all of it: a cancellation also ends a hook that hangs.
                async with kept:
                    result = await job.planner.journaled(
                        job.kernel, activation, arguments=arguments
                    ).result()
            except InvalidDecisionError as error:
                refused = decided.get(error.call_id or "")
                if refused is None or not await self._reopened(run_id, refused, error):
                    raise
                continue
            budget = None
            own = {}
            if stored.record.status == "paused":
                # A run in any other state takes them after its next pause.
                seen.update(rows)
            left = (
                await self.store.decisions(run_id) if writer.state.ended is None else ()
            )
            if seen.issuperset(left):
                return result

    async def _untaken_decisions(
        self, run_id: str, rows: Sequence[Row]
    ) -> dict[str, _Decided]:
        """Read decisions by path; a damaged one is refused, and not copied."""
        decided: dict[str, _Decided] = {}
        for row in rows:
            key = row[0]
            try:
                approval = read_approval(row)
                made = read_decision(row[7])
            except ApprovalRefusedError as error:
                own_words = MadeDecision(decision=Deny(), at=self.clock.now())
                damaged = _Decided(key, own_words, is_stored=True)
                await self._reopened(run_id, damaged, error)
                continue
            decision = made.decision
            if isinstance(decision, Approve):
                decision = replace(decision, fingerprint=approval.fingerprint)
            at = 0.0
            if approval.decided_at is not None:
                at = approval.decided_at.timestamp()
            made = replace(made, decision=decision, at=at)
            decided[approval.path] = _Decided(key, made, is_stored=True)
        return decided

    def _given(
        self, writer: JournalWriter, own: Mapping[str, Decision]
    ) -> dict[str, _Decided]:
        """Prepare a job's decisions; their rows get them with their facts."""
        at = self.clock.now()
        given = {
            path: _Decided(
                writer.approval_id_of(path),
                MadeDecision(decision=decision, at=at),
                is_stored=False,
            )
            for path, decision in ((writer.path_of(name), own[name]) for name in own)
        }
        writer.given = {
            one.key: (any_decision_text(one.made.decision), at)
            for one in given.values()
        }
        return given

    async def _reopened(self, run_id: str, refused: _Decided, error: Exception) -> bool:
        """Refuse a decision; return whether its call waits again: its row held the decision."""
        key = refused.key
        made = refused.made
        at = made.at or 0.0
        text = any_decision_text(made.decision, grant=made.grant)
        problem = str(error)
        if not refused.is_stored:
            await self.store.refuse(run_id, key, text, problem=problem, at=at)
            return False
        log_run(
            logging.WARNING,
            run_id,
            f"call {escaped(key)} waits again: {escaped(error)}",
        )
        await self.store.reopen(key, problem, decision=text, grant=made.grant, at=at)
        return True


def _stored_budget(stored: StoredRun, new: NewBudget | None) -> Budget | None:
    """Return the budget with which a run begins, or continues after its end; None otherwise."""
    if not stored.facts:
        return stored.inputs.budget
    if new is not None and isinstance(stored.facts[-1], Ended):
        return new.limits
    return None


def _refuse_second(first: Collection[str], given: Collection[str]) -> None:
    call_id = next((call_id for call_id in given if call_id in first), None)
    if call_id:
        problem = (
            f"The call {call_id!r} was decided before: the first decision counts, this one changed nothing. "
            "Resume the run without it."
        )
        raise InvalidDecisionError(problem, call_id=call_id)


def _with_crash_points(store: RunStore) -> RunStore:
    """Add the crash points of tests; see `planner_ext.testing.crash`."""
    if "PLANNER_EXT_CRASH_AT" not in os.environ:
        return store
    from planner_ext.testing.crash import CrashingStore  # noqa: PLC0415  (not loaded by an application)

    return CrashingStore.of_environment(store)


@frozen
class Examined:
    """A run that a worker may take.

    Attributes:
        deaths: Since its last reply or result.
        progress: As in `_Standing`.
        most: The deaths at which it is quarantined.
        alone: Whether it is driven alone.
        beat: The last beat of its owner when that was found dead: a worker of the same
            name may live by now.
    """

    record: RunRecord
    deaths: int = 0
    progress: int = 0
    most: int = 0
    alone: bool = False
    beat: float | None = None

    @property
    def counted(self) -> str:
        """The deaths so far, and those that quarantine it, for the log."""
        return f"death {self.deaths}, quarantine at {self.most}"


@frozen
class Taken:
    """What a worker found at one look.

    Attributes:
        runs: The names of those that it owns now.
        expired: Those in which a question has expired; not in ``runs``.
        dead: The owners that died.
        must_examine: Whether other due runs have a dead owner, or a death.
    """

    runs: Sequence[str]
    expired: Sequence[str]
    dead: set[str]
    must_examine: bool


@frozen
class Claims:
    """The claims of one worker.

    Attributes:
        max_deaths: The number of deaths at which a run is quarantined.
    """

    store: JournalStore
    workers: LeasedWorkers
    clock: Clock
    driven: DrivenRuns
    retry: RetryPolicy
    outages: Outages
    max_deaths: int

    async def take_free(
        self, limit: int, *, expired: int | None, skip: Collection[str]
    ) -> Taken:
        """Become the owner of due runs that have neither an owner nor a death.

        Args:
            limit: The most runs.
            expired: The most of those in which a question has expired, besides; None
                counts them towards the limit, after the others.
            skip: Runs to leave out.
        """
        now = self.clock.now()
        me = self.workers.worker_id
        look = await self.store.look(now, me, skip=skip)
        dead = self.workers.dead_among(look.owners)
        claim = partial(self.store.claim_free, now, me, skip=skip)
        runs = await claim(limit=limit) if look.has_free and limit else []
        rest = limit - len(runs) if expired is None else expired
        late = (
            await claim(limit=rest, expired=True) if look.has_expired and rest else []
        )
        return Taken(
            runs=runs,
            expired=late,
            dead=dead,
            must_examine=bool(dead) or look.has_died,
        )

    async def dead(self) -> set[str]:
        """Return the owners of runs that died."""
        return self.workers.dead_among(await self.store.owners(self.workers.worker_id))

    async def is_elsewhere(self, record: RunRecord) -> bool:
        """Whether another worker, which lives, owns a run."""
        return (
            record.owner not in (None, self.workers.worker_id)
            and record.owner not in await self.dead()
        )

    async def examine_or_quarantine(self, record: RunRecord) -> Examined | None:
        """Examine a run, or quarantine it after too many deaths; None: it may not be taken."""
        me = self.workers.worker_id
        owner = record.owner
        if record.status in PARKED or await self.is_elsewhere(record):
            return None
        if owner == me or (owner is None and not record.deaths):
            return Examined(record=record)
        beat = self.workers.beat_of(owner)
        died = owner is not None and record.unfinished
        progress, calls, begun, _ = await self._standing(record.run_id)
        _, deaths = await self.store.counts(record.run_id, progress)
        deaths += died
        points_here = calls != ""
        if points_here and owner is not None:
            points_here = not await self.store.died_together(owner, record.run_id)
        alone = deaths > 0 and (
            points_here or (calls != "" and deaths >= self.max_deaths)
        )
        examined = Examined(
            record=record,
            deaths=deaths,
            progress=progress,
            most=self._most_deaths(deaths, begun if points_here else 0),
            alone=alone,
            beat=beat,
        )
        if died and await self._quarantined(examined, calls):
            return None
        if died and not alone and deaths > _INNOCENT_DEATHS:
            # It recorded nothing between deaths. So the one among several that ends each process meets the others
            # ever more rarely, and they continue in between.
            longest = self.retry.delay(deaths)
            delay = random.uniform(0, longest)  # noqa: S311  (nothing is kept secret by it)
            await self._put_back(examined, delay)
            return None
        return examined

    async def _put_back(self, examined: Examined, delay: float) -> None:
        """Release a run as it is; it is due again after the delay."""
        record = examined.record
        await self._park(
            examined,
            status="running",
            problem=record.problem,
            retries=record.retries,
            delay=delay,
            waits=record.outage_at is not None,
        )

    async def take(self, examined: Examined) -> bool:
        """Become the owner of a run.

        One that must be driven alone waits 30 s for other calls, else it is due again
        30 s later.
        """
        record = examined.record
        me = self.workers.worker_id
        if record.owner == me:
            return True
        if examined.alone and not await self.driven.alone(
            record.run_id, _ALONE_SECONDS
        ):
            await self._put_back(examined, _ALONE_SECONDS)
            return False
        counts = (
            (examined.deaths, examined.progress)
            if record.owner is not None or record.deaths
            else None
        )
        if await self.store.claim(
            record.run_id, me, seen=record.owner, beat=examined.beat, counts=counts
        ):
            if record.owner is not None:
                TAKEOVERS.add(1)
                died = f"taken over: worker {escaped(record.owner)} is gone"
                log_run(logging.WARNING, record.run_id, f"{died}; {examined.counted}")
            return True
        self.driven.together(record.run_id)
        return False

    async def park_death(self, run_id: str, error: BaseException) -> None:
        """Count a death against an interrupted run, and release it.

        A cancellation without a call in flight counts nothing: the run is not its
        reason.
        """
        record = await self.store.record(run_id)
        progress, calls, begun, _ = await self._standing(run_id)
        if record.owner != self.workers.worker_id or (
            not calls and isinstance(error, asyncio.CancelledError)
        ):
            return
        _, deaths = await self.store.counts(run_id, progress)
        examined = Examined(
            record=record,
            deaths=deaths + 1,
            progress=progress,
            most=self._most_deaths(deaths + 1, begun),
        )
        if await self._quarantined(examined, calls):
            return
        problem = f"Its worker was ended by {type(error).__name__} while it was driven."
        if await self._park(examined, status="running", problem=problem):
            log_run(
                logging.WARNING,
                run_id,
                f"{examined.counted}: {escaped(problem)}",
            )

    def _most_deaths(self, deaths: int, begun: int) -> int:
        """Return the deaths that quarantine a run, if its call, begun so often, is begun before each of them.

        Without such a call, and at most, the square of ``max_deaths``: most of these
        deaths are not its fault.
        """
        highest = self.max_deaths**2
        if not begun:
            return highest
        missing = max(self.max_deaths - begun, 0)
        return min(max(deaths + missing, self.max_deaths), highest)

    async def _quarantined(self, examined: Examined, calls: str) -> bool:
        """Quarantine a run after too many deaths; return whether there were."""
        if examined.deaths < examined.most:
            return False
        place = (
            f"in the call {calls}"
            if calls
            else "in a request, or beside another run's call"
        )
        problem = f"Its worker's process ended {examined.deaths} times while it was driven, {place}."
        if await self._park(examined, status="quarantined", problem=problem):
            log_run(
                logging.ERROR,
                examined.record.run_id,
                f"quarantined: {escaped(problem)}",
            )
        return True

    async def park_fault(self, run_id: str, error: Exception) -> None:
        """Store when a run is tried again, or that it failed; release it, if this worker still owns it."""
        record = await self.store.record(run_id)
        if record.owner != self.workers.worker_id:
            return
        progress, _, _, deadline = await self._standing(run_id)
        retries, deaths = await self.store.counts(run_id, progress)
        now = self.clock.now()
        outage = self._outage_of(error)
        if outage is None:
            retries += 1
            failed = retries >= self.retry.attempts or self.retry.is_final(error)
            delay = self.retry.delay(retries)
            next_try = f"retry {retries} of {self.retry.attempts - 1}"
        else:
            waited, revivals = await self.store.outage(run_id, now=now)
            left = self.retry.outage_seconds - waited
            failed = left <= 0
            endpoint, _ = outage
            self.outages.heed(revivals)
            delay = min(left, self.outages.delay(endpoint, waited))
            next_try = f"waits for {escaped(endpoint)}, next try"
        if now < deadline:
            delay = min(delay, deadline - now)
        parked = await self._park(
            Examined(record=record, deaths=deaths, progress=progress),
            status="failed" if failed else "running",
            delay=None if failed else delay,
            problem=described(error),
            retries=retries,
            waits=outage is not None and not failed,
        )
        if parked and failed:
            log_run(logging.ERROR, run_id, f"failed: {escaped(error)}")
        elif parked:
            if outage is None:
                RETRIES.add(1)
            log_run(logging.WARNING, run_id, f"{next_try} in {delay:.1f} s")

    def _outage_of(self, error: Exception) -> tuple[str, float] | None:
        """Return the outage that a run waits for after a fault."""
        never_waits = self.retry.attempts == 1 or self.retry.is_final(error)
        if never_waits or not isinstance(error, PlannerExtError):
            return None
        return error.outage

    async def _park(
        self,
        examined: Examined,
        *,
        status: str,
        problem: str,
        retries: int = 0,
        delay: float | None = None,
        waits: bool = False,
    ) -> bool:
        return await self.store.park(
            examined.record.run_id,
            seen=examined.record.owner,
            beat=examined.beat,
            problem=problem,
            status=status,
            delay=delay,
            retries=retries,
            attempts=self.retry.attempts,
            deaths=examined.deaths,
            progress=examined.progress,
            waits=waits,
            at=self.clock.now(),
        )

    async def _standing(self, run_id: str) -> "_Standing":
        """Read how far a run is."""
        try:
            facts = (await self.store.load(run_id)).facts
            state = fold_journal(run_id, facts)
        except InvalidJournalError:  # driving the run reports this, too
            return _Standing(0, "", 0, math.inf)
        batch = state.batch
        deadline = state.rules.limits.deadline
        recorded = sum(
            isinstance(unwrapped(fact), ModelReplied | Planned | CallFinished)
            for fact in facts
        )
        calls = () if batch is None else batch.calls
        in_flight = [call for call in calls if call.started and call.answer is None]
        names = [
            f"{call.decided_fact.function} ({call.request.id})" for call in in_flight
        ]
        starts = Counter(
            (fact.iteration, fact.index)
            for fact in facts
            if isinstance(fact, CallStarted)
        )
        return _Standing(
            2 * recorded + bool(names),
            ", ".join(names),
            max(
                (
                    starts[call.decided_fact.iteration, call.decided_fact.index]
                    for call in in_flight
                ),
                default=0,
            ),
            math.inf if deadline is None else deadline.timestamp(),
        )


class _Standing(NamedTuple):
    """How far a run is.

    Attributes:
        progress: Twice its replies and results, and one more while a call is in flight:
            the deaths before the call are not counted against it.
        calls: The names of its calls in flight.
        begun: How often the one of them was begun that was begun most often.
        deadline: In seconds since the epoch.
    """

    progress: int
    calls: str
    begun: int
    deadline: float


@dataclass(eq=False, kw_only=True)
class WorkerPool:
    """The runs that this worker drives, each in a task.

    Attributes:
        poll_seconds: How often to poll the store for changes.
        grace_seconds: How long a leaving worker waits for calls and requests in flight.
    """

    runner: Runner
    claims: Claims
    workers: LeasedWorkers
    poll_seconds: float
    grace_seconds: float

    def __post_init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._refused: dict[str, DurablePlanner[Any]] = {}
        self._most_refused = _MOST_REFUSED
        self._changing: dict[str, asyncio.Task[None]] = {}
        self._interrupted: set[str] = set()
        self._expired: set[str] = set()
        self._watching: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[Any] | None = None
        self._is_leaving = False

    def __len__(self) -> int:
        """Count the runs that take a slot: all but those in which a question had expired."""
        return len(self._tasks) - len(self._expired)

    def task_of(self, job: Job[R]) -> "asyncio.Task[R]":
        """Return the task that drives a run; decisions or a budget need a new one, after it."""
        task = self._tasks.get(job.run_id)
        if task is None or task.done() or job.is_forced:
            task = self._start_task(job.run_id, self._drive_after(task, replace(job)))
            job.decisions = job.budget = None
        return cast("asyncio.Task[R]", task)

    async def take_due(
        self, job_of: Callable[[str], Job[R]], *, limit: int, beside: int | None = None
    ) -> "list[RunHandle[R]]":
        """Take due runs without a living worker in their order, even if the caller is cancelled.

        Args:
            job_of: Returns what drives a run.
            limit: The most runs.
            beside: How many in which a question has expired may be driven at once
                besides; None counts them towards the limit.
        """
        taking = asyncio.create_task(self._take_due(job_of, limit, beside))
        taking.add_done_callback(_retrieve)
        self._taking = taking
        return await asyncio.shield(taking)

    async def hint(self, timeout: float) -> None:  # noqa: ASYNC109  (a hint is not an error when it is late)
        """Wait for a hint of the database, or until the timeout."""
        await _set_or_late(self.workers.hinted, timeout)
        self.workers.hinted.clear()

    async def activate(self, job: Job[Any]) -> Next:
        """See `Runs.activate`."""
        run_id = job.run_id
        before = await self._next(job)
        if before.seconds == 0.0 and run_id not in self._tasks and not self._is_leaving:
            self._start_task(run_id, self._drive_or_wait(job, wait=False))
        task = self._tasks.get(run_id)
        if task is None:
            return before
        # Were the task itself awaited, its cancellation would look like the caller's.
        await asyncio.wait({task})
        if self._is_leaving:
            return replace(before, seconds=0.0)
        return await self._next(job)

    async def _next(self, job: Job[Any]) -> Next:
        """Return when a run is due here."""
        now = self.runner.clock.now()
        record, continues, held, seconds = await self.runner.store.record_and_due(
            job.run_id, now=now
        )
        if not record.unfinished:
            return Next(record.status, None, ended=True)
        if self._is_refused(job):
            seconds = _REFUSED_SECONDS
        elif (
            held
            or job.run_id in self._changing
            or await self.claims.is_elsewhere(record)
        ):
            seconds = _ELSEWHERE_SECONDS
        elif record.status == "paused" and continues:
            seconds = 0.0
        elif record.status != "paused":
            seconds = seconds or 0.0
        return Next(record.status, seconds, ended=False)

    def _is_refused(self, job: Job[Any]) -> bool:
        return self._refused.get(job.run_id) is job.planner

    async def due(self, *, limit: int, again_after: float) -> Due:
        """See `Runs.due`."""
        store = self.runner.store
        dead = await self.claims.dead()
        found: list[RunRecord] = []
        async with aclosing(
            store.due(self.runner.clock.now(), dead, again_after=again_after)
        ) as records:
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
        """Let calls and requests in flight end, for some time, then interrupt and release all runs; once."""
        driven = self.runner.driven
        if self._is_leaving:
            return
        self._is_leaving = True
        driven.drain(self._interrupt)
        self.workers.announce("leaving")
        try:
            # These runs wait: nothing of them is in flight.
            for run_id in self._tasks.keys() - driven.stores.keys():
                self._interrupt(run_id)
            grace = self.grace_seconds if grace_seconds is None else grace_seconds
            # Others may take each run as soon as it is interrupted.
            if self._tasks and grace > 0:
                await asyncio.wait({*self._tasks.values()}, timeout=grace)
        finally:
            for run_id in driven.stores:
                log_run(
                    logging.WARNING,
                    run_id,
                    "interrupted: what it had in flight did not end within the grace",
                )
            self._interrupted.update(self._tasks)
            self.runner.store.database.waits.leave()
            await end_tasks(
                *self._tasks.values(),
                *self._changing.values(),
                *filter(None, [self._watching]),
            )
            if self._taking is not None:
                await asyncio.wait({self._taking})
            with suppress(StoreError):
                await self.runner.store.release_all(self.workers.worker_id)

    def on_lapse(self) -> Callable[[Collection[str]], None]:
        """Return what cancels the work on the runs driven now that others have taken; called from any thread."""
        return partial(self._give_up, dict(self.runner.driven.stores))

    def _give_up(
        self, before: Mapping[str, DrivenStore], owned: Collection[str]
    ) -> None:
        for run_id, store in before.items():
            if run_id not in owned and self.runner.driven.stores.get(run_id) is store:
                store.abandon()

    def _interrupt(self, run_id: str) -> None:
        task = self._tasks.get(run_id)
        if task is not None:
            self._interrupted.add(run_id)
            task.cancel()

    async def _watch_driven(self) -> None:
        """Pass on new budgets and what is said, cancel runs that were ended elsewhere, and hold all runs."""
        while self._tasks:
            await asyncio.sleep(self.poll_seconds)
            with suppress(StoreError):
                driven = self.runner.driven.stores
                # Of one that is being resumed, the store still tells the old end.
                before = {
                    run_id: store
                    for run_id, store in driven.items()
                    if store.writer.state.ended is None
                }
                changed, held = await self.runner.store.changed_elsewhere(
                    self.workers.worker_id
                )
                self._hold(held)
                for run_id, ended, new, said in changed:
                    store = driven.get(run_id)
                    # A run that was taken up meanwhile is not the one that was read.
                    if store is None or store is not before.get(run_id):
                        continue
                    if new is not None:
                        store.writer.budget.offer(new)
                    store.writer.budget.say(said)
                    if ended:
                        store.abandon()
        self.runner.driven.hold(False)

    def _hold(self, held: bool) -> None:
        """Let runs start no further request or call, and give them up; or let them start again."""
        if held is not self.runner.driven.is_held:
            text = "paused" if held else "resumed"
            logger.warning("All runs of the store are %s.", text)
            self.runner.driven.hold(held)

    def _start_task(
        self, run_id: str, work: Coroutine[Any, Any, R]
    ) -> "asyncio.Task[R]":
        task = self._tasks[run_id] = contained_task(work)
        task.add_done_callback(partial(self._task_ended, run_id))
        if self._watching is None or self._watching.done():
            self._watching = asyncio.create_task(self._watch_driven())
        return task

    def _task_ended(self, run_id: str, task: "asyncio.Task[Any]") -> None:
        if self._tasks.get(run_id) is task:
            del self._tasks[run_id]
            self._expired.discard(run_id)
        _retrieve(task)
        self.runner.driven.tell_readers(run_id)

    async def _drive_after(self, before: "asyncio.Task[Any] | None", job: Job[R]) -> R:
        """Drive a run after its present task; a cancellation cancels both."""
        if before is not None:
            with suppress(Exception):  # reported to those who await that task
                await before
        return await self._drive_or_wait(job)

    async def _drive_or_wait(self, job: Job[R], *, wait: bool = True) -> R:
        """Drive a run to its next pause or end, after another worker that drives it has done so.

        Raises:
            RunFencedError: If another worker drives it, and this does not ``wait``.
            RunNotAnsweredError: If it is failed or quarantined.
            Exception: On a fault; the run's row says when it is retried.
        """
        fences = 0
        while not self._is_leaving:
            if fences > 1:  # it may be refused for another reason, at each write
                await self.runner.clock.sleep(self.poll_seconds)
            claim = await self._claimed(job.run_id, wait=wait)
            try:
                return await self._drive_here(job, claim)
            except RunFencedError as error:
                fences += 1
                log_run(
                    logging.INFO, job.run_id, f"continues elsewhere: {escaped(error)}"
                )
                job = await self._unless_cancelled(job)
            except (*_REFUSALS, InvalidDecisionError):
                raise
            except Exception as error:
                fault = escaped(described(error))
                log_run(logging.WARNING, job.run_id, f"fault {fault}")
                park = partial(self.claims.park_fault, job.run_id, error)
                await self._now_or_later(job.run_id, park)
                raise
            finally:
                self._interrupted.discard(job.run_id)
                self.runner.driven.together(job.run_id)
                # A change that the store has not taken yet releases it, too.
                if job.run_id not in self._changing:
                    me = self.workers.worker_id
                    release = partial(self.runner.store.release, job.run_id, me)
                    await self._now_or_later(job.run_id, release)
        raise asyncio.CancelledError

    async def _unless_cancelled(self, job: Job[R]) -> Job[R]:
        """Drop what would reopen a run that was cancelled meanwhile."""
        ended = (await self.runner.store.record(job.run_id)).status == "stopped"
        if ended:
            return replace(job, decisions=None, budget=None)
        return job

    async def _claimed(self, run_id: str, *, wait: bool) -> Claim:
        """Claim a run, once no other worker drives it and no retry waits."""
        waited = False
        while True:
            claim = Claim(self.workers.worker_id, self.workers.settle)
            record, _, _, seconds = await self.runner.store.record_and_due(
                run_id, now=self.runner.clock.now()
            )
            _check_not_parked(record)
            is_retried_later = record.status == "running" and bool(seconds)
            if not (waited and is_retried_later):
                examined = await self.claims.examine_or_quarantine(record)
                if examined is not None and await self.claims.take(examined):
                    return claim
            if not wait:
                raise RunFencedError(
                    f"Run {run_id!r} is left to another worker, or to later."
                )
            waited = True
            await self.runner.clock.sleep(self.poll_seconds)

    async def _drive_here(self, job: Job[R], claim: Claim) -> R:
        """Drive a run; log once that its planner refuses it; count an interrupt as a death."""
        if self.claims.retry.attempts > 1:
            current_circuit.set(self.claims.outages.request)
        try:
            return await self.runner.drive(job, claim=claim)
        except _REFUSALS as error:
            if self._refused.get(job.run_id) is not job.planner:
                log_run(
                    logging.ERROR,
                    job.run_id,
                    f"left to another worker: {escaped(error)}",
                )
            self._refused[job.run_id] = job.planner
            raise
        except Exception:
            raise
        except BaseException as error:
            if job.run_id not in self._interrupted:
                with suppress(StoreError):
                    await self.claims.park_death(job.run_id, error)
            # It would close whoever awaits this task.
            if isinstance(error, GeneratorExit):
                raise RunFencedError(
                    "What it runs has raised GeneratorExit; that counts as a death."
                ) from error
            raise

    async def _now_or_later(
        self, run_id: str, change: Callable[[], Awaitable[None]]
    ) -> None:
        """Change a run's row; in the background while the store cannot be used."""
        try:
            await change()
        except StoreError:
            if run_id not in self._changing:
                task = self._changing[run_id] = asyncio.create_task(
                    self._later(run_id, change)
                )
                task.add_done_callback(lambda _: self._changing.pop(run_id))

    async def _later(self, run_id: str, change: Callable[[], Awaitable[None]]) -> None:
        """Change a run's row as soon as that works, unless it is driven again."""
        before = self._tasks.get(run_id)
        while True:
            await self.runner.clock.sleep(self.poll_seconds)
            if self._tasks.get(run_id) not in (None, before):
                return
            with suppress(StoreError):
                return await change()

    async def _take_due(
        self, job_of: Callable[[str], Job[R]], limit: int, beside: int | None
    ) -> "list[RunHandle[R]]":
        if self._is_leaving:
            return []
        if len(self._refused) > self._most_refused:
            await self._forget_refused()
        refused = [
            run_id for run_id in self._refused if self._is_refused(job_of(run_id))
        ]
        skip = {*refused, *self._changing, *self._tasks}
        expired = None
        if beside is not None:
            expired = beside - len(self._expired)
        taken = await self.claims.take_free(limit, expired=expired, skip=skip)
        if self._is_leaving:  # its runs are released at the end
            return []
        handles = [RunHandle(self, job_of(run_id)) for run_id in taken.runs]
        late = [RunHandle(self, job_of(run_id)) for run_id in taken.expired]
        if beside is None:
            handles += late
        else:
            self._expired.update(taken.expired)
        if taken.must_examine:
            room = limit - len(handles)
            handles += await self._take_died(job_of, room, dead=taken.dead, skip=skip)
        return handles

    async def _take_died(
        self,
        job_of: Callable[[str], Job[R]],
        limit: int,
        *,
        dead: Collection[str],
        skip: Collection[str],
    ) -> "list[RunHandle[R]]":
        """Take due runs whose owner, or an earlier worker, has died."""
        handles: list[RunHandle[R]] = []
        now = self.runner.clock.now()
        async with aclosing(self.runner.store.due(now, dead)) as due:
            async for record in due:
                if len(handles) >= limit or self._is_leaving:
                    break
                job = job_of(record.run_id)
                if record.run_id not in skip and await self._take_examined(record, job):
                    handles.append(RunHandle(self, job))
        return handles

    async def _forget_refused(self) -> None:
        """Forget refused runs that others have ended, each time that they are twice as many."""
        unfinished = await self.runner.store.unfinished(self._refused)
        for run_id in self._refused.keys() - unfinished:
            del self._refused[run_id]
        self._most_refused = max(_MOST_REFUSED, 2 * len(self._refused))

    async def _take_examined(self, record: RunRecord, job: Job[Any]) -> bool:
        """Claim a run whose worker died; one that is driven alone is not claimed beside another."""
        examined = await self.claims.examine_or_quarantine(record)
        if (
            examined is None
            or record.run_id in self._tasks
            or (examined.alone and self.runner.driven.is_taken)
        ):
            return False
        if examined.alone:
            self._start_task(record.run_id, self._drive_or_wait(job, wait=False))
            return True
        return await self.claims.take(examined)


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve a task's error, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()


def _check_not_parked(record: RunRecord) -> None:
    if record.status in PARKED:
        said = "failed" if record.status == "failed" else "is in quarantine"
        problem = (
            f"Run {record.run_id!r} {said}: {record.problem} Resume it to try again."
        )
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
        self._returned: asyncio.Task[R] | None = None

    @streams
    async def events(self, *, after: int = 0) -> AsyncGenerator[Event | ResultReady[R]]:
        """Yield what happens in the run until its next pause or end, as ``invoke_stream`` does.

        Each of any number of readers gets every fact once, in order, also those of
        earlier processes. A slow one delays nothing: if it is further behind than one
        reply, it reads that reply as a fact alone. Called again after a pause, this
        continues the run as `result` does. Leaving the iteration leaves the run
        running.

        Args:
            after: The number of first facts to leave out.

        Yields:
            `TextDelta` for text as it arrives, if the run is streamed and driven in
                this process; the run's facts, of another worker's run every
                ``poll_seconds``; last a `ResultReady`.

        Raises:
            Exception: As `result`.
        """
        task = self._continued()
        store = self._pool.runner.store
        driven = self._pool.runner.driven
        place = _Place(after)
        here: DrivenStore | None = None
        with driven.reading(self.run_id) as news:
            is_over = False
            while not is_over:
                news.clear()
                is_over = task.done()
                first = place.facts
                stored = (
                    ()
                    if self.run_id in driven.stores
                    else await store.load_facts(self.run_id, first)
                )
                here = driven.stores.get(self.run_id, here)
                if here is not None:
                    for event in place.pass_on(here):
                        yield event
                for fact in stored[place.facts - first :]:
                    place.facts += 1
                    yield fact
                if not is_over:
                    await _set_or_late(news, self._pool.poll_seconds)
        yield ResultReady(result=await self._outcome(task))

    async def result(self) -> R:
        """Wait for the run's next pause or end; a paused run's result lists its pending calls.

        Called again after a pause, it continues with the decisions made meanwhile;
        without one it returns the same pause. Cancelling the wait does not cancel the
        run.

        Raises:
            RunNotAnsweredError: If another worker drove the run, and it is failed or
                quarantined.
            Exception: On a fault. A worker retries the run, see `RetryPolicy`, and so
                does a start.
        """
        return await self._outcome(self._continued())

    async def finished(self) -> R:
        """Wait for the run's end; at each pause, wait until calls are decided or questions expire.

        Raises:
            Exception: As `result`.
        """
        result = await self.result()
        while await self.due():
            result = await self.result()
        return result

    async def due(self) -> bool:
        """Wait until a paused run can continue, as its calls were decided or a question expired; False if it ended."""
        return await self._pool.wait_until_due(self.run_id)

    async def say(self, text: str, *, by: str = "") -> None:
        """Say something to the run; see `Runs.say`."""
        runner = self._pool.runner
        planners: Any = getattr(self._job.planner, "authorize", None)
        hooks = (*hooks_of(runner.authorize), *hooks_of(planners))
        keeper = Doorkeeper(authorize=hooks)
        clock = runner.clock
        line = await say_to(runner.store, keeper, self.run_id, text, by=by, clock=clock)
        driven = runner.driven.stores.get(self.run_id)
        if driven is not None:
            driven.writer.budget.say(line)

    def _continued(self) -> "asyncio.Task[R]":
        """Return the present task; once its result was returned, start the next one."""
        if self._returned is self._task:
            self._task = self._pool.task_of(self._job)
        return self._task

    async def _outcome(self, task: "asyncio.Task[R]") -> R:
        result = await asyncio.shield(task)
        self._returned = task
        return result


async def _set_or_late(news: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


class _Place:
    """How many facts a reader has read, and how much of a reply's text."""

    def __init__(self, facts: int) -> None:
        self.facts = facts
        self._text = ArrivingText(place=-1)
        self._pieces = 0

    def pass_on(self, run: DrivenStore) -> Iterator[Event]:
        """Yield what is new of a run that is or was driven here; a begun text is read to its end."""
        journal = run.writer.facts
        while True:
            if run.text is not self._text and run.text.place == self.facts:
                self._text = run.text
                self._pieces = 0
            arrived = len(self._text.pieces)
            if self._text.place == self.facts and self._pieces < arrived:
                self._pieces += 1
                yield self._text.pieces[self._pieces - 1]
            elif self.facts < len(journal):
                self.facts += 1
                yield journal[self.facts - 1]
            else:
                return
