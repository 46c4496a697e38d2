"""The runs of a store: any process starts, reads and cancels them, and any worker continues them."""

import asyncio
import builtins
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, Unpack

from planner_ext.approval.decisions import (
    ApprovalSettings,
    AuthorizeHooks,
    Decision,
    Interceptor,
    RunAction,
    hooks_of,
)
from planner_ext.approval.guards import guard_name, hook_names
from planner_ext.approval.waiting import waiting_everywhere
from planner_ext.core.errors import (
    EndedRunError,
    InvalidLimitError,
    counted,
    not_answered,
    require,
    shown,
)
from planner_ext.core.facts import Guards
from planner_ext.core.limits import Budget, is_count
from planner_ext.core.state import State
from planner_ext.core.text import check_goal
from planner_ext.core.values import Usage, frozen
from planner_ext.durable.approvals import Approvals
from planner_ext.durable.archive import fork_run
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.errors import (
    RunConflictError,
    StoreError,
    is_address,
    redacted,
)
from planner_ext.durable.gauge import numbers_reported
from planner_ext.durable.heartbeat import (
    LeasedWorkers,
    WorkerLocks,
    WorkerRecord,
    list_workers,
)
from planner_ext.durable.inputs import RunInputs, new_budget_text
from planner_ext.durable.listing import (
    PARKED,
    UNFINISHED,
    Hold,
    RunFilters,
    RunStats,
    Statuses,
    StoreMarks,
    joined,
    time_text,
)
from planner_ext.durable.notices import (
    Listener,
    NoticeEvent,
    NoticeRecord,
    Notifier,
    notices_of,
)
from planner_ext.durable.options import (
    RetryPolicy,
    WorkerOptions,
    WorkerSettings,
    check_poll_seconds,
    checked_hook,
    checked_name,
    checked_tag,
    takes_worker_options,
)
from planner_ext.durable.outages import Outages
from planner_ext.durable.records import (
    RUN_ID,
    PendingApproval,
    RunRecord,
    StoredRun,
    fold_journal,
)
from planner_ext.durable.retention import (
    GET_RETENTION,
    Retention,
    forget_key,
    read_retention,
    retain,
    set_retention,
)
from planner_ext.durable.store import JournalStore, opened_store, opens
from planner_ext.durable.worker import (
    Claims,
    Due,
    Job,
    Next,
    RunHandle,
    Runner,
    WorkerPool,
)
from planner_ext.durable.writer import cancel_run, say_to
from planner_ext.engine.activation import ArgumentsFor, DurablePlanner
from planner_ext.engine.concurrency import SystemClock, end_tasks
from planner_ext.engine.document import dump_message
from planner_ext.engine.ports import Clock

logger = logging.getLogger(__name__)

R = TypeVar("R")

_PATIENCE_SECONDS = 60.0
"""How long a worker waits for a server that starts at the same time."""

_EXPIRED_PART = 10
"""How many slots let a worker drive one run besides in which a question has expired."""

_MOST_PRIORITY = 1_000_000


@frozen
class RunResult:
    """A run of a store: how it ended, what it waits for, or how far it is.

    Attributes:
        status: As in `RunRecord.status`.
        final_answer: The answer; "" without one.
        iterations: Round trips charged.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        limit: The name of the limit that ended the run, or None.
        reason: Why it ended; "" if it was answered.
        problem: Its last fault, or why it is in quarantine.
        pending: The calls and questions that wait for a person.
    """

    run_id: str
    goal: str
    status: str
    final_answer: str = ""
    iterations: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    limit: str | None = None
    reason: str = ""
    problem: str = ""
    pending: tuple[PendingApproval, ...] = ()

    def raise_for_status(self) -> Self:
        """Return this result if the run was answered.

        Raises:
            LimitReachedError: If a limit ended the run.
            RunNotAnsweredError: If it waits, failed, or ended without an answer
                otherwise.
        """
        if self.status == "answered":
            return self
        raise not_answered(
            status=self.status,
            reason=self.reason or self.problem,
            limit=self.limit,
            iterations=self.iterations,
            tool_calls=self.tool_calls,
            usage=self.usage,
        )


class RunsClient:
    """The runs of one store, for a process that drives none.

    Attributes:
        poll_seconds: How often to poll the store.
    """

    def __init__(
        self,
        store: JournalStore,
        *,
        clock: Clock | None = None,
        poll_seconds: float = 0.25,
        doorkeeper: Doorkeeper | None = None,
    ) -> None:
        """@private Called by `connect`."""
        self._doorkeeper = doorkeeper or Doorkeeper()
        self._store = store
        self._clock = clock or SystemClock()
        self.poll_seconds = poll_seconds

    @staticmethod
    @opens
    async def connect(
        where: str | Path,
        *,
        poll_seconds: float = 0.25,
        clock: Clock | None = None,
        authorize: AuthorizeHooks = None,
        verified: bool = False,
    ) -> AsyncGenerator["RunsClient"]:
        """Open a store without becoming a worker; used as ``async with Runs.connect(...) as runs``.

        Args:
            where: The SQLite file, created if it does not exist, or a ``postgresql://``
                address.
            poll_seconds: How often to poll the store for changes by others.
            clock: None uses the machine's clock.
            authorize: Asked before this process acts on a run or decides its calls; see
                `Approvals.connect`. A run that is submitted here is bound to it.
            verified: Whether the application vouches for the names given as ``by``.

        Raises:
            PlannerInvalidConfigurationError: If ``poll_seconds`` or ``authorize`` is
                invalid.
            StoreError: If the store cannot be used; says why, and the way out.
            NewerSchemaError: If a newer version of this package made the store.
        """
        check_poll_seconds(poll_seconds)
        doorkeeper = Doorkeeper(authorize=checked_hook(authorize), verified=verified)
        async with opened_store(where) as store:
            yield RunsClient(
                store, clock=clock, poll_seconds=poll_seconds, doorkeeper=doorkeeper
            )

    def acting(
        self,
        *,
        authorize: AuthorizeHooks = None,
        verified: bool = False,
    ) -> "RunsClient":
        """@private Return a client of the same store, under one more hook."""
        hooks = (*hooks_of(self._doorkeeper.authorize), *hooks_of(authorize))
        doorkeeper = Doorkeeper(authorize=hooks, verified=verified)
        return RunsClient(
            self._store,
            clock=self._clock,
            poll_seconds=self.poll_seconds,
            doorkeeper=doorkeeper,
        )

    async def _check(self, action: RunAction, run_id: str, by: str) -> None:
        """Raise `NotAuthorizedError` if the hook refuses."""
        await self._doorkeeper.check(self._store, action, run_id, by=by)

    async def cancel(self, run_id: str, *, by: str = "", reason: str = "") -> bool:
        """End a run for good, whichever worker drives it; False if it had ended, or its answer was recorded.

        No further function starts, and every open call is answered. The worker cancels
        a call in flight; a synchronous function continues in its thread, its result is
        discarded. ``by`` and ``reason`` are for the record and the model.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
        """
        await self._check("cancel", run_id, by)
        return await cancel_run(
            self._store, run_id, by=by, reason=reason, clock=self._clock
        )

    async def retry(
        self, run_id: str, *, budget: Budget | None = None, by: str = ""
    ) -> bool:
        """Let a worker continue a run that failed or is in quarantine; with a budget, also one that has ended.

        Its first request is sent even if the worker waits for the endpoint.

        Args:
            run_id: The run.
            budget: Replaces all limits; what the run spent so far still counts. It
                continues a run that reached a limit, was stopped, or is a fork.
            by: Who retries it, for the record and the hook, which is asked for
                ``retry``, or ``resume`` with a budget.

        Returns:
            False if the run has another status, or was answered; nothing changed.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
            PlannerInvalidConfigurationError: If the budget cannot be stored.
        """
        at = self._clock.now()
        text = None
        if budget is not None:
            text = new_budget_text(budget, by=by, at=at)
        await self._check("retry" if text is None else "resume", run_id, by)
        if await self._store.revive(run_id, at=at, budget=text):
            return True
        await self._store.record(run_id)  # says that there is no such run
        return False

    async def pause_all(self, *, by: str = "", reason: str = "") -> bool:
        """Drive no run of the store, in any process, until `resume_all`; False if they are paused already.

        Within ``poll_seconds`` no further request or call starts. Those in flight end
        and are recorded, then the workers release their runs. Runs can be submitted,
        decided, cancelled and read; whoever started one waits.

        Args:
            by: Who pauses them, for the record.
            reason: Why, for the record.

        Raises:
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here
                and an unfinished run began under one.
        """
        await self._check_all("pause_all", by)
        hold = Hold(by=by, reason=reason, at=self._clock.now())
        return await self._store.hold(hold)

    async def resume_all(self, *, by: str = "") -> bool:
        """Let workers drive runs again; False if they were not paused. Raises as `pause_all`."""
        await self._check_all("resume_all", by)
        return await self._store.hold(None)

    async def _check_all(self, action: RunAction, by: str) -> None:
        keeper = self._doorkeeper
        asked = bool(hooks_of(keeper.authorize))
        guards = ()
        if not asked:
            guards = await self._store.hooks_of_unfinished()
        await keeper.check_under(guards, action, "", by=by)

    async def delete(self, run_id: str, *, force: bool = False, by: str = "") -> None:
        """Delete a run that has ended, failed or is in quarantine, with all rows about it.

        Args:
            run_id: The run.
            force: Whether it may also be paused; its open calls are then never decided.
            by: Who deletes it, for the ``authorize`` hook.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
            RunConflictError: If the run is unfinished, or a worker drives it.
        """
        await self._check("delete", run_id, by)
        await self._store.delete(run_id, paused=force)

    async def prune(
        self, *, older_than: timedelta, status: str, dry_run: bool = False, by: str = ""
    ) -> int:
        """Delete old runs for good, in batches, and return their number; ``dry_run`` only counts them.

        Args:
            older_than: The time since `RunRecord.updated_at`.
            status: ``answered``, ``incomplete``, ``limit_reached``, ``stopped``,
                ``failed`` or ``quarantined``.
            dry_run: Deletes nothing.
            by: Who deletes them, for the ``authorize`` hook.

        Raises:
            StoreError: If runs with this status may not be deleted.
            NotAuthorizedError: If the hook refuses one of them, or is missing and one
                began under a hook; then none is deleted.
        """
        before = self._clock.now() - older_than.total_seconds()
        if not dry_run:
            is_asked = bool(hooks_of(self._doorkeeper.authorize))
            async for run_id, hooks in self._store.prunable(
                status=status, before=before, only_guarded=not is_asked
            ):
                await self._doorkeeper.check_under(hooks, "delete", run_id, by=by)
        return await self._store.prune(status=status, before=before, dry_run=dry_run)

    async def retain(
        self,
        *,
        ended: timedelta | None = None,
        journals: timedelta | None = None,
        by: str = "",
    ) -> None:
        """Set how long the store keeps what has ended; its workers apply that within the hour, a few runs at a time.

        Failed and quarantined runs wait for a person, and are kept.

        Args:
            ended: The age at which a run that has ended is deleted; None keeps it.
            journals: The age from which only the row of such a run is kept: its name,
                goal, tags, status and consumption. None keeps all of it.
            by: Who sets it, for the record.

        Raises:
            StoreError: If a time is not above 0.
            NotAuthorizedError: As `pause_all`.
        """
        await self._check_all("retain", by)
        given = {"ended": ended, "journals": journals}
        seconds = {
            name: None if age is None else age.total_seconds()
            for name, age in given.items()
        }
        retention = Retention(**seconds, by=by, at=self._clock.now())
        await set_retention(self._store, retention)

    async def retention(self) -> Retention | None:
        """Read how long the store keeps what has ended; None keeps all of it."""
        (rows,) = await self._store.database.transact(GET_RETENTION)
        return read_retention(rows)

    async def forget(self, key: str, *, rewrite: bool = True, by: str = "") -> int:
        """Take a person's texts out of the store: runs with the tag, grants, and the key of shared budgets.

        In periods that have not ended, a keyed digest replaces the key, and what was
        used stays used; the digest's own key is in the store. Backups, exports, logs, other stores, and the
        log (WAL) and replicas of PostgreSQL are not reached.

        Args:
            key: The tag of the person's runs, and the key in shared budgets.
            rewrite: Whether to rewrite the files, too, so that they do not contain what
                was deleted; its writers wait meanwhile.
            by: Who forgets, for the ``authorize`` hook, which is asked about each
                deletion, too.

        Returns:
            The number of runs, all of which were deleted.

        Raises:
            RunConflictError: If one of these runs has not ended; nothing was forgotten.
            NotAuthorizedError: If the hook refuses, or is missing; nothing was
                forgotten.
        """
        await self._check_all("forget", by)
        number = await self.count(status=UNFINISHED, tag=key)
        if number:
            raise RunConflictError(
                f"{counted(number, 'run')} with the tag {key!r} have not ended, and nothing was forgotten. Cancel them "
                f"first: planner-ext runs cancel --tag {key}."
            )
        names = [run_id async for run_id in self.find(tag=key)]
        for run_id in names:
            await self._check("delete", run_id, by)
        deleted = await self._store.delete_ended(names)
        if deleted < len(names):
            raise RunConflictError(
                f"{len(names) - deleted} of {counted(len(names), 'run')} with the tag {key!r} continued meanwhile, and "
                "were not deleted. Forget again when they have ended."
            )
        database = self._store.database
        await forget_key(database, key, runs=names, now=self._clock.now())
        if rewrite:
            await database.scrub()
        return deleted

    async def count(
        self, *, status: Statuses = None, **filters: Unpack[RunFilters]
    ) -> int:
        """Count all runs, or those that the filters of `list` let pass; raise `StoreError` if a filter is invalid."""
        return await self._store.count_runs(status=status, **filters)

    async def list(
        self,
        *,
        status: Statuses = None,
        limit: int = 50,
        offset: int = 0,
        **filters: Unpack[RunFilters],
    ) -> list[RunRecord]:
        """List the runs that all given filters let pass, the most recently updated first.

        Args:
            status: One status of `RunRecord`, or several; None lists all.
            limit: The maximum number of runs.
            offset: The number of runs to skip.
            **filters: By goal, worker, function, error, tag and time; see `RunFilters`.

        Raises:
            StoreError: If a filter, limit or offset is invalid.
        """
        now = self._clock.now()
        return await self._store.runs(
            now=now, status=status, limit=limit, offset=offset, **filters
        )

    def find(
        self, *, status: Statuses = None, **filters: Unpack[RunFilters]
    ) -> AsyncGenerator[str]:
        """Name the runs that the filters of `list` let pass, to act on each: `retry`, `cancel`, `delete`.

        Used as ``async for run_id in runs.find(status="failed", error="429")``. Each
        run is named once, in the order of names, even if it changes meanwhile.

        Raises:
            StoreError: If a filter is invalid.
        """
        return self._store.find(status=status, **filters)

    async def stats(self) -> RunStats:
        """Count the runs, and read the age of the oldest approval; this takes milliseconds with 100,000 runs."""
        return await self._store.stats(self._clock.now())

    async def marks(self) -> StoreMarks:
        """Read marks that change with the store, in a fraction of a millisecond: poll this to follow it."""
        return await self._store.marks(self._clock.now())

    async def set_inbox(self, address: str) -> None:
        """Store the address at which people reach the inbox, such as ``https://inbox.example.com``, for notices.

        Raises:
            StoreError: If it does not begin with ``https://`` or ``http://``.
        """
        if not address.startswith(("https://", "http://")):
            raise StoreError(
                f"The inbox's address must begin with https:// or http://; got {shown(address)}."
            )
        await self._store.set_inbox(address.rstrip("/"))

    def approvals(self, *, authorize: AuthorizeHooks = None) -> Approvals:
        """Return the approvals of the same store; ``authorize`` is asked besides this client's hook."""
        client = self.acting(authorize=authorize, verified=self._doorkeeper.verified)
        return Approvals(self._store, clock=self._clock, doorkeeper=client._doorkeeper)

    async def workers(self) -> builtins.list[WorkerRecord]:
        """List the workers of the store, the oldest first; one that died is listed for a day."""
        return await list_workers(self._store)

    async def load(self, run_id: str) -> StoredRun:
        """Read a run with its journal.

        Raises:
            UnknownRunError: If the store has no such run.
            InvalidJournalError: If its journal is damaged.
        """
        return await self._store.load(run_id)

    async def was_deleted(self, run_id: str) -> bool:
        """@private Whether the store had a run of this name, and has none now."""
        return await self._store.deleted(run_id) is not None

    async def fork(
        self,
        run_id: str,
        *,
        at: int,
        new_run_id: str | None = None,
        instruction: str = "",
        by: str = "",
    ) -> str:
        """Fork a run after an iteration: add a stopped run, which `Runs.resume` continues with a budget.

        It has the usage and the results of the kept iterations, and the run's policies;
        it has neither later decisions nor an approval for the rest of the run.
        Functions of later iterations are called again.

        Args:
            run_id: The run, in any state; it is not changed.
            at: The last iteration that is kept, 0-based; -1 keeps the plan alone.
            new_run_id: The fork's name, as of `submit`. None generates one.
            instruction: A user message to add.
            by: Who forks it, for the ``authorize`` hook.

        Returns:
            The fork's name.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
            InvalidForkError: If the run made no request after this iteration; names
                where it can be forked.
            RunConflictError: If the store has a run of the new name.
            StoreError: If the new name cannot be used.
        """
        name = _run_name(new_run_id)
        now = self._clock.now()
        await self._check("fork", run_id, by)
        return await fork_run(
            self._store,
            run_id,
            at=at,
            new_run_id=name,
            now=now,
            instruction=instruction,
        )

    async def notices(self, run_id: str) -> tuple[NoticeRecord, ...]:
        """List the notices of a run, the oldest first, with why one was not delivered."""
        return await notices_of(self._store, run_id)

    async def submit(
        self,
        goal: str,
        *,
        run_id: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        budget: Budget | None = None,
        interceptors: Sequence[Interceptor] = (),
        approval: ApprovalSettings | None = None,
        tags: Sequence[str] = (),
        priority: int = 0,
        not_before: datetime | None = None,
        reuse: bool = False,
    ) -> "SubmittedRun":
        """Queue a run for a worker, see `Runs.work`; submitting it again returns the existing run.

        Args:
            goal: The goal of the run.
            run_id: The run's name, 1 to 200 characters without ``/``. None generates
                one.
            arguments: The application's arguments that are data: JSON values by name,
                which the store keeps. Those of the worker's ``arguments_for`` take
                precedence.
            budget: Replaces the budget of the worker's planner.
            interceptors: Guards that the worker's planner must have, such as an
                `ApprovalPolicy`: compared as data, a function by its name.
            approval: The ``unmatched``, ``expires_in`` and ``authorize`` it must have,
                besides this client's hook.
            tags: Texts of one line by which to find the run; see `RunFilters.tag`. An
                existing run keeps its tags and its priority.
            priority: Of due runs a worker takes those with the highest first, then the
                oldest: -1,000,000 to 1,000,000.
            not_before: When a worker may begin a new run at the earliest, with a time
                zone. None: at once. `Runs.start` begins it at any time.
            reuse: Whether the name may be that of a deleted run. Without it nothing is
                done twice under a name.

        Raises:
            PlannerInvalidConfigurationError: If the goal is empty, or an argument, the
                budget, the priority or the earliest start cannot be stored.
            RunConflictError: If the name belongs to a run with another goal or other
                inputs, or belonged to one that was deleted.
            StoreError: If the name or the store cannot be used.
        """
        guards = self._guards(interceptors, approval or ApprovalSettings())
        inputs = RunInputs(arguments=arguments or {}, budget=budget, guards=guards)
        name, _ = await self._create(
            goal,
            run_id,
            owner=None,
            inputs=inputs,
            tags=tags,
            priority=priority,
            not_before=not_before,
            reuse=reuse,
        )
        return SubmittedRun(self, name)

    def _guards(
        self, interceptors: Sequence[Interceptor], approval: ApprovalSettings
    ) -> Guards | None:
        approval = approval.asking(self._doorkeeper.authorize)
        guards = Guards(
            interceptors=tuple(map(guard_name, interceptors)),
            unmatched=approval.unmatched,
            expires_in=approval.expires_in,
            authorize=hook_names(approval.authorize),
        )
        return None if guards == Guards() else guards

    async def set_budget(self, run_id: str, budget: Budget, *, by: str = "") -> None:
        """Give a run another budget; what it spent so far still counts.

        The worker takes it before its next action, as the fact `BudgetChanged`; a run
        that waits takes it when it continues. A limit that is already used up ends the
        run there. A newer budget replaces one that was not taken.

        Args:
            run_id: The run.
            budget: Replaces all limits. Without ``max_iterations`` that of the worker's
                planner holds.
            by: Who sets it, for the record.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
            PlannerInvalidConfigurationError: If the budget cannot be stored, or the run
                has ended.
        """
        await self._check("set_budget", run_id, by)
        text = new_budget_text(budget, by=by, at=self._clock.now())
        if not await self._store.set_budget(run_id, text):
            status = (await self._store.record(run_id)).status
            raise EndedRunError(
                f"Run {run_id!r} has ended ({status}) and spends nothing more. Resume it with this budget: "
                "Runs.resume(..., budget=...), or planner-ext runs resume.",
            )

    async def limits(self, run_id: str) -> Budget:
        """Read the limits of a run, or those that it gets before its next action.

        A queued run has those that it was submitted with; without any, those of the
        worker's planner hold.

        Raises:
            UnknownRunError: If the store has no such run.
            InvalidJournalError: If its journal is damaged.
        """
        stored, _, new, *_ = await self._store.load_driven(run_id)
        if new is not None:
            return new.limits
        if stored.facts:
            return fold_journal(run_id, stored.facts).rules.limits
        return stored.inputs.budget or Budget()

    async def say(
        self, run_id: str, text: str, *, by: str = "", once: str | None = None
    ) -> None:
        """Say something to a run: the model reads it as a message of the user in its next request.

        It costs no round trip of its own, and is a fact of the run once its worker has
        taken it. While calls wait for a decision it waits, too, and is shown to whoever
        decides. An answer that was given before the run has read it is not final.

        Args:
            run_id: The run.
            text: The message; not blank.
            by: Who says it, for the record.
            once: A tag that the message adds to the run. Nothing is said to a run that
                has the tag, so the same call may be repeated if its outcome was lost.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
            PlannerInvalidConfigurationError: If the text is blank, or the run has
                ended.
        """
        if once is not None:
            checked_tag(once)
        await say_to(
            self._store,
            self._doorkeeper,
            run_id,
            text,
            by=by,
            clock=self._clock,
            once=once,
        )

    async def result(self, run_id: str) -> RunResult:
        """Read how a run ended, what it waits for, or how far it is; does not wait.

        Raises:
            UnknownRunError: If the store has no such run.
            InvalidJournalError: If its journal is damaged.
        """
        stored = await self._store.load(run_id)
        state = fold_journal(run_id, stored.facts)
        approvals = self.approvals()
        waiting = waiting_everywhere(state)
        pending = ()
        if waiting:
            pending = await approvals.pending(run_id, limit=len(waiting))
        return _result_of(stored.record, state, pending)

    async def wait(self, run_id: str) -> None:
        """Wait until a run has ended, or waits for a decision or a date.

        Raises:
            UnknownRunError: If the store has no such run.
        """
        while await self._store.continues(run_id, self._clock.now()):
            await self._clock.sleep(self.poll_seconds)

    async def _create(
        self,
        goal: str,
        run_id: str | None,
        *,
        owner: str | None,
        inputs: RunInputs | None = None,
        tags: Sequence[str] = (),
        priority: int = 0,
        not_before: datetime | None = None,
        reuse: bool = False,
    ) -> tuple[str, RunRecord | None]:
        """Create a run, queued if it has inputs; return its name, and the existing run of this name."""
        check_goal(goal)
        name = _run_name(run_id)
        status, text = (
            ("running", None) if inputs is None else ("queued", inputs.to_json())
        )
        for tag in tags:
            checked_tag(tag)
        fits = is_count(priority, least=-_MOST_PRIORITY) and priority <= _MOST_PRIORITY
        require("priority", fits, "a whole number, -1,000,000 to 1,000,000", priority)
        fits = not_before is None or not_before.tzinfo is not None
        require("not_before", fits, "a time with its zone", not_before)
        created = await self._store.create(
            name,
            goal,
            owner=owner,
            at=self._clock.now(),
            status=status,
            inputs=text,
            tags=joined(tags),
            priority=priority,
            wake_at=None if not_before is None else not_before.timestamp(),
            reuse=reuse,
        )
        if created:
            return name, None
        gone = await self._store.deleted(name)
        if gone is not None:
            was, at = gone
            raise RunConflictError(
                f"Run {name!r} was deleted at {time_text(at)}, and was {was}: nothing was started, so that nothing "
                "is done twice under its name. Start this one under another name, or with reuse=True "
                "(runs submit --reuse)."
            )
        if (record := await self._store.record(name)).goal != goal:
            raise RunConflictError(
                f"Run {name!r} is there already, with another goal: {shown(record.goal)}. Start this one under another "
                "name, or resume that one."
            )
        if inputs is not None and (await self._store.load(name)).inputs != inputs:
            raise RunConflictError(
                f"Run {name!r} is there already, with other arguments or another budget, or under other guards. "
                "Submit this one under another name, or change that one's budget."
            )
        return name, record


def _run_name(run_id: str | None) -> str:
    """Return a valid name of a new run; None generates one."""
    expected = "run_id must be 1 to 200 characters, without / and control characters, and not . or .."
    return checked_name(
        uuid.uuid4().hex if run_id is None else run_id, RUN_ID, expected
    )


class SubmittedRun:
    """A run that workers drive, for a process that waits for it.

    Attributes:
        run_id: The run's name.
    """

    def __init__(self, runs: RunsClient, run_id: str) -> None:
        """@private Called by `RunsClient.submit`."""
        self.run_id = run_id
        self._runs = runs

    async def result(self, timeout: float | None = None) -> RunResult:  # noqa: ASYNC109  (as of a future)
        """Wait for the run's next pause or end; called again after a decision, for what follows.

        Raises:
            TimeoutError: If it is still queued or driven after ``timeout`` seconds; it
                continues.
        """
        async with asyncio.timeout(timeout):
            await self._runs.wait(self.run_id)
        return await self._runs.result(self.run_id)

    async def say(self, text: str, *, by: str = "") -> None:
        """Say something to the run; see `Runs.say`."""
        await self._runs.say(self.run_id, text, by=by)


class Runs(RunsClient):
    """The runs of one store, for one worker.

    A run continues from its journal, in any process; a recorded step is never repeated.
    A call that started and has no recorded end is handled as its function declares with
    `planner_ext.durable.effect`. Where a method takes them, ``planner`` drives the
    runs, ``kernel`` has their functions, and ``arguments_for`` returns the
    application's arguments for a run by its name.
    """

    def __init__(self, pool: WorkerPool, notifier: Notifier | None = None) -> None:
        """@private Called by `sqlite` and `postgres`."""
        is_pool = isinstance(pool, WorkerPool)  # pyright: ignore[reportUnnecessaryIsInstance]  (of untyped code)
        if not is_pool:
            raise InvalidLimitError(
                f"Open runs with async with Runs.sqlite(path) as runs, or Runs.postgres(url); got {shown(pool)}."
            )
        doorkeeper = Doorkeeper(authorize=pool.runner.authorize)
        super().__init__(
            pool.runner.store,
            clock=pool.runner.clock,
            poll_seconds=pool.poll_seconds,
            doorkeeper=doorkeeper,
        )
        self._pool = pool
        self._notifier = notifier
        self._job_of: Callable[[str], Job[Any]] | None = None
        self._closing = asyncio.Lock()

    @classmethod
    @takes_worker_options
    @opens
    async def sqlite(
        cls, path: str | Path, **options: Unpack[WorkerOptions]
    ) -> AsyncGenerator["Runs"]:
        """Keep runs in one SQLite file, on one host; used as ``async with Runs.sqlite(path) as runs``.

        Leaving the block hands this worker's runs over to others; see `close`.

        Args:
            path: Created if it does not exist. Its folder must exist, on a disk of this
                host: network file systems are refused by name, unless the environment
                variable ``PLANNER_EXT_TRUSTED_FILE_SYSTEMS`` has it, such as ``nfs4``.
            **options: See `WorkerOptions`.

        Raises:
            PlannerInvalidConfigurationError: If an option is invalid, naming it.
            StoreError: If the file cannot be used; says why, and the way out.
            WorkerInUseError: If a living process has the worker's name.
            NewerSchemaError: If a newer version of this package made the file.
        """
        from planner_ext.durable.sqlite import LockedWorkers  # noqa: PLC0415  (only for a file)

        settings = WorkerSettings(**options)
        notifier = settings.notifier()
        async with (
            opened_store(path) as store,
            LockedWorkers(Path(path), settings.name()) as locks,
            cls._opened(settings, notifier, store, locks, where=str(path)) as runs,
        ):
            yield runs

    @classmethod
    @takes_worker_options
    @opens
    async def postgres(
        cls, url: str, **options: Unpack[WorkerOptions]
    ) -> AsyncGenerator["Runs"]:
        """Keep runs in PostgreSQL, for workers on many machines; used as ``async with Runs.postgres(url) as runs``.

        Others that `work` continue the runs of a dead worker within seconds. Leaving
        the block hands its runs over; see `close`. A server that starts is awaited for
        up to a minute. Needs the extra ``postgres``.

        Args:
            url: ``postgresql://...``; to the server or a pooler that keeps sessions.
            **options: See `WorkerOptions`.

        Raises:
            PlannerInvalidConfigurationError: If an option is invalid, naming it.
            StoreError: If the database cannot be used; says why, and the way out.
            WorkerInUseError: If a living process has the worker's name.
            NewerSchemaError: If a newer version of this package made the tables.
        """
        settings = WorkerSettings(**options)
        notifier = settings.notifier()
        if not is_address(url):
            raise StoreError(
                f"Expected an address postgresql://user@host/database; got {redacted(url)!r}."
            )
        async with opened_store(url, patience=_PATIENCE_SECONDS) as store:
            from planner_ext.durable.postgres import PostgresWorkers  # noqa: PLC0415  (an optional dependency)

            async with (
                PostgresWorkers(url, settings.name()) as locks,
                cls._opened(settings, notifier, store, locks, where=url) as runs,
            ):
                yield runs

    @classmethod
    @asynccontextmanager
    async def _opened(
        cls,
        settings: WorkerSettings,
        notifier: Notifier,
        store: JournalStore,
        locks: WorkerLocks,
        *,
        where: str,
    ) -> AsyncGenerator["Runs"]:
        runner = Runner(
            store,
            settings.in_doubt,
            settings.clock or SystemClock(),
            settings.authorize,
        )
        workers = LeasedWorkers(store, locks, lease_seconds=settings.lease_seconds)
        retry = settings.retry or RetryPolicy()
        if retry.attempts > 1:
            store.database.waits.patience = retry.outage_seconds
        claims = Claims(
            store=store,
            workers=workers,
            clock=runner.clock,
            driven=runner.driven,
            retry=retry,
            outages=Outages(runner.clock, retry),
            max_deaths=settings.max_deaths,
        )
        pool = WorkerPool(
            runner=runner,
            claims=claims,
            workers=workers,
            poll_seconds=settings.poll_seconds,
            grace_seconds=settings.grace_seconds,
        )
        workers.on_lapse = pool.on_lapse
        runs = cls(pool, notifier)
        await workers.open()
        retaining = asyncio.create_task(retain(store, runner.clock))
        try:
            await notifier.open(
                store,
                where=redacted(where),
                clock=runner.clock,
                poll_seconds=settings.poll_seconds,
            )
            with numbers_reported(redacted(where), store.database, runner.clock.now):
                yield runs
        finally:
            retaining.cancel()  # awaited later: a second cancellation may end only the grace
            try:
                await runs.close()
            finally:
                try:
                    await end_tasks(retaining)
                finally:
                    await workers.close()

    @property
    def worker_id(self) -> str:
        """This worker's name."""
        return self._pool.workers.worker_id

    async def start(
        self,
        planner: DurablePlanner[R],
        kernel: Any,
        goal: str,
        *,
        run_id: str | None = None,
        arguments: Any = None,
        chat_history: Any = None,
        streaming: bool = False,
        tags: Sequence[str] = (),
        reuse: bool = False,
    ) -> RunHandle[R]:
        """Start a run, or continue the one that has this name.

        An unfinished, failed or quarantined run continues from its journal, with the
        decisions made meanwhile; an ended one returns its result. If another worker
        drives it, the handle waits for that worker.

        Args:
            planner: Drives the run.
            kernel: Its functions may be called.
            goal: The goal of the run.
            run_id: The run's name, 1 to 200 characters without ``/``. None generates
                one.
            arguments: The application's arguments; never stored, so each process that
                continues the run passes them. A submitted run keeps its other inputs.
            chat_history: An earlier conversation, as of the planner's ``invoke``; the
                store keeps it with a run that begins.
            streaming: Whether to stream requests, for the text in `RunHandle.events`;
                without effect on a run that is driven here already.
            tags: As for `submit`.
            reuse: As for `submit`.

        Raises:
            PlannerInvalidConfigurationError: If the goal is empty, or the planner is
                something else; nothing is stored.
            RunConflictError: If the name belongs to a run with another goal, or
                belonged to one that was deleted.
            NotAuthorizedError: If the run failed or is in quarantine, and the
                ``authorize`` hook refuses ``retry``, or is missing here.
            StoreError: If the name or the store cannot be used.
        """
        _check_planner(planner)
        inputs = None
        if chat_history is not None:
            messages = tuple(map(dump_message, chat_history.messages))
            inputs = RunInputs(before=messages)
        name, before = await self._create(
            goal, run_id, owner=self.worker_id, inputs=inputs, tags=tags, reuse=reuse
        )
        if before is not None:
            await self._revived(before, self._with_hook_of(planner))
        job = Job(
            run_id=name,
            planner=planner,
            kernel=kernel,
            arguments_for=lambda _: arguments,
            streaming=streaming,
        )
        return RunHandle(self._pool, job)

    async def resume(
        self,
        run_id: str,
        planner: DurablePlanner[R],
        kernel: Any,
        *,
        decisions: Mapping[str, Decision] | None = None,
        budget: Budget | None = None,
        arguments: Any = None,
        by: str = "",
        streaming: bool = False,
    ) -> RunHandle[R]:
        """Continue a run: with decisions, with a larger budget after a limit ended it, or after it failed.

        A run that a worker drives now is continued after its next pause or end.

        Args:
            run_id: The run.
            planner: Drives the run.
            kernel: Its functions may be called.
            decisions: Decisions on pending calls, by call id, besides those made
                through `Approvals`; all or none are taken. Where one is invalid, the
                handle's ``result`` raises ``DecisionRefusedError``.
            budget: Replaces the run's limits; usage so far still counts.
            arguments: As for `start`.
            by: Who resumes it, for the ``authorize`` hook, which is also asked about
                each decision. A resume with decisions alone asks about these only.
            streaming: As for `start`.

        Raises:
            UnknownRunError: If the store has no such run.
            NotAuthorizedError: If the ``authorize`` hook refuses, or is missing here.
        """
        record = await self._store.record(run_id)
        asking = self._with_hook_of(planner)
        if record.status not in PARKED and (budget is not None or not decisions):
            await asking._check("resume", run_id, by)
        await self._revived(record, asking, by=by)
        if budget is not None:
            # An earlier one that was not taken.
            await self._store.set_budget(run_id, None)
        job = Job(
            run_id=run_id,
            planner=planner,
            kernel=kernel,
            arguments_for=lambda _: arguments,
            decisions=decisions,
            budget=budget,
            streaming=streaming,
        )
        return RunHandle(self._pool, job)

    def _with_hook_of(self, planner: DurablePlanner[Any]) -> RunsClient:
        """Return a client that also asks the planner's ``authorize`` hook."""
        return self.acting(authorize=getattr(planner, "authorize", None))

    async def _revived(
        self, record: RunRecord, asking: RunsClient, *, by: str = ""
    ) -> None:
        if record.status in PARKED:
            await asking.retry(record.run_id, by=by)
        # Whoever starts a run again has it try an endpoint that was out.
        self._pool.claims.outages.forget()

    async def recover(
        self,
        planner: DurablePlanner[R],
        kernel: Any,
        *,
        arguments_for: ArgumentsFor | None = None,
        limit: int = 100,
    ) -> list[RunHandle[R]]:
        """Take at most ``limit`` due runs: submitted, decided, expired, at their retry, or of a worker that died.

        Those with the highest priority come first, then the oldest; those in which a
        question has expired come last.

        Returns:
            Their handles; the runs are already running.
        """
        return await self._pool.take_due(
            _jobs(planner, kernel, arguments_for), limit=limit
        )

    async def work(
        self,
        planner: DurablePlanner[Any],
        kernel: Any,
        *,
        arguments_for: ArgumentsFor | None = None,
        max_concurrency: int = 100,
    ) -> NoReturn:
        """Recover runs until cancelled, at most ``max_concurrency`` at once.

        Of due runs those with the highest priority come first, then the oldest. Runs
        that this worker started itself count, and never wait. Runs in which a question
        has expired do not count: they have slots of their own, a tenth as many and at
        least one, so that thousands of them delay no other run. A fault of a run is
        logged, and any worker retries the run.

        Raises:
            StoreError: If the store cannot be used, for longer than
                `RetryPolicy.outage_seconds` where that may pass.
        """
        _warn_unguarded(planner, kernel)
        self._pool.workers.announce("working", max_concurrency)
        job_of = _jobs(planner, kernel, arguments_for)
        beside = max(1, max_concurrency // _EXPIRED_PART)
        while True:
            free = max(0, max_concurrency - len(self._pool))
            await self._pool.take_due(job_of, limit=free, beside=beside)
            await self._pool.hint(self.poll_seconds)

    def drive_with(
        self,
        planner: DurablePlanner[Any],
        kernel: Any,
        arguments_for: ArgumentsFor | None = None,
    ) -> None:
        """Set what `activate` drives runs with.

        Raises:
            PlannerInvalidConfigurationError: If the planner is something else.
        """
        _check_planner(planner)
        _warn_unguarded(planner, kernel)
        self._pool.workers.announce("working")
        self._job_of = _jobs(planner, kernel, arguments_for)

    async def activate(self, run_id: str) -> Next:
        """Drive a run to its next pause or end, if it is due, and return when it is due again.

        For an engine that says when and where a run is driven, see
        `planner_ext.durable.hosts`. It may be called twice, late and on two machines:
        the journal lets one of them drive the run. A second call in this process waits
        for the first. Cancelling the wait does not cancel the run. A fault is not
        raised: the run is due at its retry.

        Returns:
            ``ended`` if nothing is due until a person resumes the run; else after how
                many ``seconds`` to activate it again: 0.0 if a decision was made
                meanwhile or this worker leaves, 5.0 if another worker drives it, 30.0
                if this worker's planner refuses it, None if only a decision continues
                it.

        Raises:
            PlannerInvalidConfigurationError: If `drive_with` was not called.
            UnknownRunError: If the store has no such run; do not activate it again.
            StoreError: If the store cannot be used; activate the run again.
        """
        given = self._job_of
        if given is None:
            raise InvalidLimitError(
                "There is no planner to activate runs with. Call drive_with(planner, kernel) first."
            )
        return await self._pool.activate(given(run_id))

    async def due(self, limit: int = 100, *, again_after: float = 30.0) -> Due:
        """Name at most ``limit`` due runs that no living worker drives, each to one caller, in any process.

        Due are runs that were submitted, decided, expired, or are at their retry, in
        the order of `recover`. One that no worker has claimed is named again after
        ``again_after`` seconds.

        Raises:
            StoreError: If the store cannot be used.
        """
        return await self._pool.due(limit=limit, again_after=again_after)

    async def hint(self, timeout: float) -> None:  # noqa: ASYNC109  (a hint is not an error when it is late)
        """Wait until runs may be due, ``timeout`` seconds at most; an SQLite file gives no hints."""
        await self._pool.hint(timeout)

    async def listen(self, event: NoticeEvent, name: str, listener: Listener) -> None:
        """@private Deliver the notices of an event to a host, too."""
        assert self._notifier is not None
        await self._notifier.listen(event, name, listener)

    async def close(self, grace_seconds: float | None = None) -> None:
        """Release the runs that this worker drives, for others to continue, and close the store.

        No run, call or request starts any more. Those in flight end first, so that no
        call is in doubt; after ``grace_seconds``, by default the worker's option, or
        when this wait is cancelled, the rest is cancelled. Leaving the ``async with``
        block calls this.
        """
        async with self._closing:  # a second call waits for the first one
            try:
                await self._pool.close(grace_seconds)
            finally:
                if self._notifier is not None:
                    await self._notifier.close()
                await self._store.close()


def _jobs(
    planner: DurablePlanner[R], kernel: Any, arguments_for: ArgumentsFor | None
) -> Callable[[str], Job[R]]:
    return lambda run_id: Job(
        run_id=run_id, planner=planner, kernel=kernel, arguments_for=arguments_for
    )


def _check_planner(planner: object) -> None:
    is_planner = callable(getattr(planner, "journaled", None))
    require("planner", is_planner, "a FunctionCallingStepwisePlanner", planner)


def _warn_unguarded(planner: DurablePlanner[Any], kernel: Any) -> None:
    if (say := getattr(planner, "unguarded", None)) is not None and (
        text := say(kernel)
    ) is not None:
        logger.warning(text)


def _result_of(
    record: RunRecord, state: State, pending: Sequence[PendingApproval]
) -> RunResult:
    """Build a run's result from its row, its journal, which may be newer, and its pending calls."""
    ended = state.ended
    return RunResult(
        run_id=record.run_id,
        goal=record.goal,
        status=record.status if ended is None else ended.status,
        final_answer="" if ended is None else ended.answer,
        iterations=state.usage.iterations,
        tool_calls=state.usage.tool_calls,
        usage=state.usage,
        limit=None if ended is None else ended.limit,
        reason="" if ended is None else ended.reason,
        problem=record.problem,
        pending=tuple(pending),
    )
