"""What a run may still spend at this moment, including what its running functions take.

A call's `Tab` holds what its function uses until its end charges the state. Left is a
budget's limits, less the state's usage, the open tabs and the round trip kept for the
answer; and no more than is left to the call around.
"""

import math
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol, Self

from planner_ext.core.facts import Fact, SharedBudgetsChecked
from planner_ext.core.limits import Left
from planner_ext.core.machine import (
    Action,
    AskModel,
    AskPerson,
    AskPlan,
    RunCalls,
    next_action,
)
from planner_ext.core.state import Call, State, name_inside
from planner_ext.core.values import Message, Usage, start_of, updated

_CURRENT: ContextVar["Tab | None"] = ContextVar("planner_ext_call", default=None)


class SharedBudgets(Protocol):
    """What a run, and the runs inside its functions, take of budgets that other runs share.

    Attributes:
        counts_tokens: Whether one limits tokens or cost: unreported tokens are then
            estimated.
        max_cost: The smallest limit on cost; None without one.
    """

    counts_tokens: bool
    max_cost: float | None

    def begin(self, facts: Sequence[Fact], *, is_kept: bool) -> None:
        """Take in the journal with which an activation begins: what an earlier process was charged for.

        Where a store ``is_kept``, each activation begins with a longer journal.

        Raises:
            InvalidOptionError: If a budget has no key for this run.
        """
        ...

    async def reserve(
        self, *, requests: int = 0, calls: int = 0, kept: int = 0, forced: bool = False
    ) -> SharedBudgetsChecked | None:
        """Reserve all of it in all of the budgets, or nothing.

        Args:
            requests: Requests that are about to be sent.
            calls: Functions that are about to start.
            kept: 1 keeps one request for an answer, -1 uses or releases it.
            forced: Tokens and cost are not checked: the request is the kept one.

        Returns:
            What was refused, without ``answer`` and ``at``.

        Raises:
            StoreError: If the store of a budget cannot be used.
        """
        ...

    def charge(self, spent: Usage) -> None:
        """Add what was spent beside the reservations; the next one stores it."""
        ...

    async def settle(self, *, kept: int) -> None:
        """Store what was charged, and release requests kept for an answer; failures are logged."""
        ...


def current_tab() -> "Tab | None":
    """Find the call of a run in which this code runs; None outside of every run."""
    return _CURRENT.get()


class CallWaits(BaseException):
    """A run in a call's function waits for a person: this leaves the function, which is called again later.

    Not an ``Exception``, so that code between does not take it for a failure. Code that
    suppresses it changes nothing: the call has no result while a run in it waits.
    """


class CallRecorder(Protocol):
    """Records what running calls are about to do, and what happens in the runs inside them."""

    @property
    def is_kept(self) -> bool:
        """Whether a store keeps what is recorded."""
        ...

    def records(self, tab: "Tab", /) -> bool:
        """Return whether what happens in this context, inside a call, can be recorded as it happens."""
        ...

    def facts_inside(self, tab: "Tab", run: int, /) -> list[Fact]:
        """List what has happened in a run of a call so far."""
        ...

    async def happened(
        self,
        tab: "Tab",
        run: int,
        fact: Fact,
        applied: Callable[[], None],
        *,
        streamed: bool,
    ) -> None:
        """Record what happened in a run of a call; ``applied`` takes it in there, with nothing in between."""
        ...

    async def restart(self, tab: "Tab", /) -> bool:
        """Record one more start of a call; return False if it may not start."""
        ...

    async def record(self, tab: "Tab", function: str | None) -> None:
        """Record the start of a function in a call, or a request (None)."""
        ...


class Tab:
    """What one call takes of its run's budget: a context manager around its function.

    Attributes:
        closed: Whether the call has ended: nothing more may be taken.
        has_failed: Whether a request in the call had no reply, since its function
            began.
        around, names_in: Set by the adapters: what they know of the run, and the
            functions whose calls or results messages have.
        when_quiet: Called when a run of the call has come to its pause or end.
        unrendered: Whether its next run is continued without rendering its prompt
            again.
    """

    def __init__(
        self,
        account: "Account",
        index: int,
        recorder: CallRecorder,
        *,
        threaded: bool = False,
    ) -> None:
        self.account = account
        self.index = index
        self.threaded = threaded
        self._recorder = recorder
        self.closed = False
        self.has_failed = False
        self.around: Callable[..., Any] | None = None
        self.names_in: Callable[[Sequence[Message]], Set[str]] = _no_names
        self._read: Set[str] = frozenset[str]()
        self._taken: Usage | None = None
        self._expected: dict[object, Usage] = {}
        self.runs: list[Account] = []
        self.when_quiet: list[Callable[[], None]] = []
        self._made: set[int] = set()
        self.unrendered = False

    def __enter__(self) -> Self:
        self._before = _CURRENT.set(self)
        with self.account.lock:
            self.account.tabs[self.index] = self
        return self

    def __exit__(self, *raised: object) -> None:
        _CURRENT.reset(self._before)
        with self.account.lock:
            self.closed = True

    @property
    def call(self) -> Call:
        """The call, as its run has it now."""
        batch = self.account.state.batch
        assert batch is not None, "a call that runs is in the open batch"
        return batch.calls[self.index]

    @property
    def can_wait(self) -> bool:
        """Whether a run in the call may wait for a person: this function, and all around it, may be called again."""
        within = self.account.within
        return (
            not self.closed
            and self.call.decided_fact.nested
            and self._recorder.records(self)
            and (within is None or within.can_wait)
        )

    @property
    def is_kept(self) -> bool:
        """Whether a store keeps what happens in the runs of the call."""
        return self._recorder.is_kept

    @property
    def is_busy(self) -> bool:
        """Whether a run of the call is driven."""
        return any(run.is_driven for run in self.runs)

    @property
    def expects_more(self) -> bool:
        """Whether a run of the call goes on that the function, called again, has not made, or not begun, yet."""
        going_on = {*self.call.going_on}
        is_prepared = len(self._made) > len(self.runs)
        return bool(going_on - self._made) or (bool(going_on) and is_prepared)

    def enter(self, is_same: Callable[[Fact], bool]) -> int | None:
        """Number a run that the call's function makes; None if what happens in it cannot be recorded as it happens.

        Where the function is called again, its runs get their numbers again: each the
        first that ``is_same`` as it began, or else the first.
        """
        if self.closed or not self._recorder.records(self):
            return None
        with self.account.lock:
            known = self._not_made()
            same = (run for run in known if any(map(is_same, self.facts_of(run)[:1])))
            new = max([len(self.call.runs), *(run + 1 for run in self._made)])
            number = next(same, next(iter(known), new))
            self._made.add(number)
            return number

    def begun(self) -> Fact | None:
        """Return the first fact of the run that the function, called again, makes next; None for a new run."""
        if self.closed or not self._recorder.records(self):
            return None
        first = self._not_made()[:1]
        return next((fact for run in first for fact in self.facts_of(run)[:1]), None)

    def _not_made(self) -> list[int]:
        """List the runs that the function made when it was called before, and has not made again."""
        call = self.call
        made = range(call.entered, len(call.runs))
        return [run for run in made if run not in self._made]

    def name_of(self, run: int) -> str:
        """Name a run of the call."""
        return name_inside(self.account.state, self.index, run)

    def facts_of(self, run: int) -> list[Fact]:
        """List what has happened in a run of the call so far."""
        return self._recorder.facts_inside(self, run)

    async def happened(
        self,
        run: int,
        fact: Fact,
        applied: Callable[[], None],
        *,
        streamed: bool = True,
    ) -> None:
        """Record what happened in a run of the call in the runs around; see `CallRecorder.happened`."""
        await self._recorder.happened(self, run, fact, applied, streamed=streamed)

    @property
    def spent(self) -> Usage | None:
        """What the call has spent besides what its runs have recorded, as `CallFinished` has it; None for nothing."""
        if self._taken is None and not self.runs:
            return None
        taken = self.taken
        unknown = self._taken is None and all(run.is_recorded for run in self.runs)
        return None if unknown and taken == Usage() else taken

    @property
    def taken(self) -> Usage:
        """What was taken so far and is not recorded, including requests that are under way."""
        with self.account.lock:
            taken = self._taken or Usage()
            for usage in self._expected.values():
                taken += usage
            for run in self.runs:
                taken += run.total()
            return taken

    @property
    def held(self) -> int:
        """Round trips that runs in the call keep for their answers."""
        return sum(run.held + run.held_inside for run in self.runs)

    def left(self) -> Left:
        """Compute what is left; calls that run together draw on the same."""
        with self.account.lock:
            return _NOTHING if self.closed else self.account.left()

    def seconds_left(self) -> float:
        """Compute the seconds until the first time limit around."""
        amounts = self.left().amounts
        return min(
            amounts.get("max_active_seconds", math.inf),
            amounts.get("deadline", math.inf),
        )

    def earlier(self, run: "Account | None" = None) -> set[str]:
        """Name the functions started before this moment, without the calls of a run that asks."""
        with self.account.lock:
            names = set((self._taken or Usage()).calls_by_function)
            others = [one for one in self.runs if one is not run]
            return names.union(
                self.account.earlier(),
                self._brought(others),
                *(one.started() for one in others),
            )

    def bring(self, messages: Sequence[Message]) -> None:
        """Note the messages that the call sends to a model without a run."""
        with self.account.lock:
            self._read = self._read | self.names_in(messages)

    @property
    def brought(self) -> set[str]:
        """The functions whose calls or results are in histories inside the call."""
        with self.account.lock:
            return self._brought(self.runs)

    def _brought(self, runs: Sequence["Account"]) -> set[str]:
        names = set(self._read)
        for run in runs:
            names |= self.names_in(run.state.given) | run.state.inside
            names.update(*(tab.brought for tab in run.tabs.values()))
        return names

    def runs_around(self) -> list[State]:
        """List the states of the runs around, the innermost first."""
        within = self.account.within
        return [self.account.state, *([] if within is None else within.runs_around())]

    def take_request(self) -> str | None:
        """Take one round trip, or name the limit that forbids it."""
        with self.account.lock:
            limit = self.left().used_up()
            if limit is None:
                self.charge(Usage(iterations=1))
            return limit

    async def restart(self) -> bool:
        """Record one more start of the call; return False if it may not start."""
        return await self._recorder.restart(self)

    async def record_request(self) -> None:
        """Record a request in the journals around, before it is sent."""
        await self._record(None)

    async def record_call(self, function: str) -> None:
        """Record the start of a function in the journals around."""
        await self._record(function)

    async def _record(self, function: str | None) -> None:
        await self._recorder.record(self, function)
        within = self.account.within
        if within is not None and not self.account.is_recorded:
            await within._record(function)

    def take_call(self, function: str) -> str | None:
        """Take the start of a function, or name the limit that forbids it."""
        with self.account.lock:
            limit = self.left().forbids_start(function)
            if limit is None:
                self.charge(start_of(function))
            return limit

    def expect(self, request: object, usage: Usage) -> None:
        """Count what a request will use at least, until its usage is known."""
        with self.account.lock:
            self._expected[request] = usage

    def charge(self, spent: Usage, *, instead_of: object = None) -> None:
        """Add the usage of a request, instead of what was expected of it."""
        with self.account.lock:
            self._expected.pop(instead_of, None)
            self._taken = spent if self._taken is None else self._taken + spent


def _no_names(_: Sequence[Message]) -> Set[str]:
    return frozenset()


_NOTHING = Left(amounts={"max_iterations": 0, "max_tool_calls": 0})


class Account:
    """What one run may still spend.

    A run and those inside have one lock. None for ``shared`` takes the budgets of the
    run around. Where it ``is_recorded``, the run around records what happens in it, and
    charges it.

    Attributes:
        is_driven: Whether the run is between its opening and its pause or end.
        held: Round trips that the run keeps for its answer.
        tabs: Of the calls whose end is not recorded, by index.
    """

    def __init__(
        self,
        state: Callable[[], State],
        within: Tab | None,
        lock: AbstractContextManager[object],
        shared: SharedBudgets | None = None,
        *,
        is_recorded: bool = False,
    ) -> None:
        self.is_recorded = is_recorded
        self.is_driven = False
        self.shared = (
            within.account.shared if shared is None and within is not None else shared
        )
        self.lock = lock if within is None else within.account.lock
        self.held = 0
        self._state = state
        self.within = within
        self._before = Usage()
        self.tabs: dict[int, Tab] = {}
        self._starting: tuple[int, ...] = ()
        self._under_way = 0
        self._charged = 0
        self._restarting = Usage()

    @property
    def state(self) -> State:
        """The run's current state."""
        return self._state()

    def open(self, *, continues: bool = False) -> str | None:
        """Begin to take from the call around, or name the limit that forbids the first request.

        A run that continues ends by itself where nothing is left.
        """
        if self.within is None:
            return None
        with self.lock:
            limit = None if continues else self.within.left().used_up()
            if limit is None:
                self._before = self.state.usage
                self.held = self.state.rules.limits.iterations_kept
                self.is_driven = True
                self.within.runs.append(self)
            return limit

    def close(self) -> None:
        """Release what is held."""
        with self.lock:
            self.held = self._under_way = 0
            self.is_driven = False
        if self.within is not None:
            for call in self.within.when_quiet:
                call()

    def decide(self, state: State) -> Action | None:
        """Decide what to do next, and take what it needs from the call around."""
        within = self.within
        if within is None:
            return next_action(state)
        with self.lock:
            self._under_way = 0
            self._charged = self.state.usage.iterations
            if within.closed and state.stopping is None:
                state = updated(
                    state, stopping="The call in which this run was begun has ended."
                )
            around = within.left()
            # The run may use the trip it keeps. What the run around overspent is not
            # this run's last reply's: show 0.
            held = {"max_iterations": self.held}
            amounts = {
                name: max(amount + held.get(name, 0), 0)
                for name, amount in around.amounts.items()
            }
            action = next_action(state, replace(around, amounts=amounts))
            match action:
                case AskPlan() | AskModel():
                    self._under_way = 1
                case AskPerson(iterations=iterations):
                    self._under_way = iterations or 0
                case RunCalls(indexes=indexes):
                    self.starting(indexes)
                case _:
                    pass
            if within.left().amounts.get("max_iterations", 0) < 0:
                self.held = 0  # for this request it was held
            return action

    def starting(self, indexes: Sequence[int]) -> None:
        """Count these calls as taken, until their start is recorded."""
        with self.lock:
            self._starting = tuple(indexes)

    def restart(self, function: str) -> str | None:
        """Take one more start of a running call, or name the limit that forbids it."""
        with self.lock:
            limit = self.left().forbids_start(function)
            if limit is None:
                self._restarting = start_of(function)
            return limit

    def restarted(self) -> None:
        """Forget that start: it is in the state now, or does not happen."""
        with self.lock:
            self._restarting = Usage()

    def unrecorded(self) -> dict[int, Usage]:
        """Return what the running calls have spent, by index."""
        spent = {index: tab.spent for index, tab in self.tabs.items()}
        return {index: one for index, one in spent.items() if one is not None}

    @property
    def held_inside(self) -> int:
        """Round trips that runs in its running calls keep for their answers."""
        return self._open(self.state)[1]

    def left(self) -> Left:
        """Compute what is left to the run's functions, within the limits around."""
        with self.lock:
            state = self.state
            limits = state.rules.limits
            taken, held = self._open(state)
            kept = Usage(iterations=held + limits.iterations_kept)
            left = Left.of(limits, state.usage + taken + kept, state.at)
            return left if self.within is None else left.within(self.within.left())

    def earlier(self) -> Set[str]:
        """Name the functions started in earlier batches, and before the run in those around."""
        names = self.state.inside.union(self.state.earlier)
        return names if self.within is None else names | self.within.earlier(self)

    def started(self) -> set[str]:
        """Name the functions started so far, nested ones included."""
        with self.lock:
            taken = (tab.taken.calls_by_function for tab in self.tabs.values())
            return set(self.state.usage.calls_by_function).union(*taken)

    def total(self) -> Usage:
        """Compute what the run has spent since it was opened, with what is under way.

        Where the run around records it, only what is not recorded yet.
        """
        state = self.state
        spent = self._open(state)[0]
        if not self.is_recorded:
            spent = Usage() + state.usage - self._before + spent
        spent = updated(spent, active_seconds=0.0)  # the run around measures it
        # A reply that came is in the state.
        waits = self._under_way and state.usage.iterations == self._charged
        return spent + Usage(iterations=self._under_way) if waits else spent

    def _open(self, state: State) -> tuple[Usage, int]:
        """Sum what is taken and not yet in the state, and the round trips held."""
        batch = state.batch
        if batch is None:
            return Usage(), 0
        calls = batch.calls
        taken = self._restarting
        held = 0
        for index, tab in self.tabs.items():
            if index < len(calls) and calls[index].answer is None:
                taken += tab.taken
                held += tab.held
        waiting = ((i, calls[i]) for i in self._starting if i < len(calls))
        self._starting = tuple(
            i for i, call in waiting if not call.started and call.answer is None
        )
        for index in self._starting:
            decided = calls[index].decided
            assert decided is not None, "a call that is about to start was decided"
            taken += start_of(decided.function)
        return taken, held
