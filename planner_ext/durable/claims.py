"""Claims the runs that a worker may drive, counts faults and worker deaths against them, and parks them.

When a worker's process ends, each run that it drove has a death counted. So it has where an interrupt or a close
leaves the run, such as ``KeyboardInterrupt``, and where anybody but its pool cancels it in a call. At the allowed
number of deaths the run is quarantined, also if its functions are declared repeatable. A new reply or result in the
run's journal resets faults and deaths.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from planner_ext.core.errors import InvalidJournalError, described
from planner_ext.core.facts import CallFinished, ModelReplied, Planned
from planner_ext.durable.gate import CallGate
from planner_ext.durable.records import RunRecord, fold_journal
from planner_ext.durable.retry import RetryPolicy
from planner_ext.durable.store import JournalStore, RunOwner
from planner_ext.engine.log import log_run, one_line
from planner_ext.engine.ports import Clock

PARKED = ("failed", "quarantined")
"""The statuses of runs that are driven again only after a start or a resume."""

_ALONE_SECONDS = 30.0
"""How long a run waits for the calls of others to end, and then until it tries again to be driven alone."""


class WorkerRegistry(Protocol):
    """The workers of one store. It only hints which runs may be taken over; the journal makes that safe."""

    @property
    def worker_id(self) -> str:
        """This worker's own name."""
        ...

    @property
    def hinted(self) -> asyncio.Event:
        """Set when the database hints that a run may be due."""
        ...

    def dead_among(self, owners: Sequence[RunOwner]) -> set[str]:
        """Return the owners of runs that died; one that this worker cannot judge counts as alive."""
        ...

    def announce(self, status: str, concurrency: int | None = None) -> None:
        """Show to others what this worker does: ``open``, ``working`` or ``leaving``."""
        ...

    def hold(self) -> Callable[[], bool]:
        """Return a check whether this worker has kept its lease since now."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimable:
    """A run that a worker may take.

    Attributes:
        record: The run.
        deaths: The deaths of its workers since its last reply or result.
        progress: The replies and results in its journal.
        alone: Whether it may be what ended its worker's process, so that it is driven alone.
    """

    record: RunRecord
    deaths: int = 0
    progress: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """The claims of one worker.

    Attributes:
        store: The runs.
        workers: Knows which workers live.
        clock: The time source.
        gate: Lets a run be driven alone.
        retry: When a run that a fault interrupted is driven again, by any worker.
        max_deaths: After how many deaths a run is quarantined.
    """

    store: JournalStore
    workers: WorkerRegistry
    clock: Clock
    gate: CallGate
    retry: RetryPolicy
    max_deaths: int

    async def take_free(self, limit: int, *, skip: Collection[str]) -> tuple[list[str], set[str] | None]:
        """Become the owner of due runs without an owner and a death, the oldest first.

        Args:
            limit: Their maximum number.
            skip: Runs to leave out.

        Returns:
            Their names, and the dead owners of runs, which have to be examined by `of`. None if no run has to be.
        """
        now = self.clock.now()
        me = self.workers.worker_id
        look = await self.store.look(now, me, skip=skip)
        dead = self.workers.dead_among(look.owners)
        taken: list[str] = []
        if look.has_free:
            taken = await self.store.claim_free(now, me, skip=skip, limit=limit)
        return taken, dead if dead or look.has_died else None

    async def dead(self) -> set[str]:
        """Return the owners of runs that died."""
        return self.workers.dead_among(await self.store.owners(self.workers.worker_id))

    async def is_elsewhere(self, record: RunRecord) -> bool:
        """Whether another worker, which lives, owns a run."""
        return record.owner not in (None, self.workers.worker_id) and record.owner not in await self.dead()

    async def of(self, record: RunRecord) -> Claimable | None:
        """Examine a run; None if a living worker has it, or it is parked, which may happen here."""
        me = self.workers.worker_id
        owner = record.owner
        if record.status in PARKED or await self.is_elsewhere(record):
            return None
        if owner == me or (owner is None and not record.deaths):
            return Claimable(record=record)
        died = owner is not None and record.unfinished
        progress, calls = await self._standing(record.run_id)
        _, deaths = await self.store.counts(record.run_id, progress)
        deaths += died
        if died and await self._quarantined(Claimable(record=record, deaths=deaths, progress=progress), calls):
            return None
        # in a request, one death says little: all runs of a worker that is killed would be driven one by one
        return Claimable(
            record=record, deaths=deaths, progress=progress, alone=deaths > 1 or (deaths == 1 and calls != "")
        )

    async def take(self, claim: Claimable) -> bool:
        """Become the owner of a run; one that has to be driven alone waits for that, and is put back after a while."""
        record = claim.record
        me = self.workers.worker_id
        if record.owner == me:
            return True
        if claim.alone and not await self.gate.alone(record.run_id, _ALONE_SECONDS):
            later = self.clock.now() + _ALONE_SECONDS
            await self._park(claim, status="running", problem=record.problem, retries=record.retries, wake_at=later)
            return False
        counts = (claim.deaths, claim.progress) if record.owner is not None or record.deaths else None
        if await self.store.claim(record.run_id, me, seen=record.owner, counts=counts):
            if record.owner is not None:
                died = f"worker {one_line(record.owner)} is gone, death {claim.deaths} of {self.max_deaths}"
                log_run(logging.WARNING, record.run_id, f"taken over: {died}")
            return True
        self.gate.together(record.run_id)
        return False

    async def park_death(self, run_id: str, error: BaseException) -> None:
        """Count a death of this worker against a run that an interrupt or a close breaks off; release it.

        A run that is cancelled without a call under way counts none: its worker's loop ends, and it is not the reason.
        """
        record = await self.store.record(run_id)
        progress, calls = await self._standing(run_id)
        if record.owner != self.workers.worker_id or (not calls and isinstance(error, asyncio.CancelledError)):
            return
        _, deaths = await self.store.counts(run_id, progress)
        claim = Claimable(record=record, deaths=deaths + 1, progress=progress)
        if await self._quarantined(claim, calls):
            return
        problem = f"Its worker was ended by {type(error).__name__} while it was driven."
        if await self._park(claim, status="running", problem=problem):
            log_run(logging.WARNING, run_id, f"death {claim.deaths} of {self.max_deaths}: {one_line(problem)}")

    async def _quarantined(self, claim: Claimable, calls: str) -> bool:
        """Quarantine a run at the allowed number of deaths; return whether that is reached."""
        if claim.deaths < self.max_deaths:
            return False
        place = f"in the call {calls}" if calls else "in a request, or beside another run's call"
        problem = f"Its worker's process ended {claim.deaths} times while it was driven, {place}."
        if await self._park(claim, status="quarantined", problem=problem):
            log_run(logging.ERROR, claim.record.run_id, f"quarantined: {one_line(problem)}")
        return True

    async def park_fault(self, run_id: str, error: Exception) -> None:
        """Store when a run that a fault interrupted is retried, or that it failed; release it."""
        progress, _ = await self._standing(run_id)
        retries, deaths = await self.store.counts(run_id, progress)
        record = await self.store.record(run_id)
        failed = retries + 1 >= self.retry.attempts or self.retry.is_final(error)
        delay = self.retry.delay(retries + 1)
        parked = record.owner == self.workers.worker_id and await self._park(
            Claimable(record=record, deaths=deaths, progress=progress),
            status="failed" if failed else "running",
            wake_at=None if failed else self.clock.now() + delay,
            problem=described(error),
            retries=retries + 1,
        )
        if parked and failed:
            log_run(logging.ERROR, run_id, f"failed: {one_line(error)}")
        elif parked:
            log_run(logging.WARNING, run_id, f"retry {retries + 1} of {self.retry.attempts - 1} in {delay:.1f} s")

    async def _park(
        self, claim: Claimable, *, status: str, problem: str, retries: int = 0, wake_at: float | None = None
    ) -> bool:
        return await self.store.park(
            claim.record.run_id,
            seen=claim.record.owner,
            problem=problem,
            status=status,
            wake_at=wake_at,
            retries=retries,
            deaths=claim.deaths,
            progress=claim.progress,
            at=self.clock.now(),
        )

    async def _standing(self, run_id: str) -> tuple[int, str]:
        """Count the replies and results in a journal, and name the calls that have started without an end."""
        try:
            facts = (await self.store.load(run_id)).facts
            batch = fold_journal(run_id, facts).batch
        except InvalidJournalError:  # driving the run reports this, too
            return 0, ""
        progress = sum(isinstance(fact, ModelReplied | Planned | CallFinished) for fact in facts)
        calls = () if batch is None else (call for call in batch.calls if call.started and call.answer is None)
        names = (f"{call.decided.function} ({call.request.id})" for call in calls if call.decided is not None)
        return progress, ", ".join(names)
