"""What a run has spent at this moment, with what its running functions take: read before each request inside of one.

The ledger is charged with what a function spends when its call ends, see `planner_ext.core.facts.CallFinished`. Until
then the call's `Tab` holds it. What is left of a budget is its limits, less the ledger, less all open tabs, less the
round trip that is kept for the answer; and no more than what is left to the call in which the run itself is made.
Nothing here is kept: a journal alone gives the same ledger.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from planner_ext.core.limits import LIMIT_OF_PART, BudgetShare, Consumption, Ledger
from planner_ext.core.machine import Action, AskModel, AskPerson, AskPlan, RunCalls, next_action
from planner_ext.core.state import Call, State
from planner_ext.core.values import Usage, replace

__all__ = ["Account", "Tab", "current_tab"]

_CURRENT: ContextVar["Tab | None"] = ContextVar("planner_ext_call", default=None)


def current_tab() -> "Tab | None":
    """Find the call of a run in which this code runs; None outside of every run."""
    return _CURRENT.get()


class Tab:
    """What one call takes of the budget of its run while its function runs.

    As a context manager it stands around the function: what that does, and what it starts, finds the tab by
    `current_tab`. Afterwards the tab takes no more.

    Attributes:
        account: Of the run.
        index: The call's place in the open batch.
        share: What was set aside for the call; None where it takes what it needs from the run's budget.
        closed: Whether the call has ended: nothing more may be taken.
        lost: Whether the whole share counts as spent: the run in the call came to no end that says what was.
        around: Gives what the adapters know of the run, from the tab.
    """

    __slots__ = ("_before", "_expected", "_runs", "_taken", "account", "around", "closed", "index", "lost", "share")

    def __init__(self, account: "Account", index: int, share: BudgetShare | None) -> None:
        self.account = account
        self.index = index
        self.share = share
        self.closed = False
        self.lost = False
        self.around: Callable[[Tab], Any] | None = None
        self._taken: Consumption | None = None
        self._expected: dict[object, Usage] = {}
        self._runs: list[Account] | None = None

    def __enter__(self) -> None:
        self._before = _CURRENT.set(self)

    def __exit__(self, *raised: object) -> None:
        _CURRENT.reset(self._before)
        with self.account.lock:
            self.closed = True

    @property
    def spent(self) -> Consumption | None:
        """What the call has spent, as `CallFinished` records it: None is its whole share, round trips included."""
        if self.share is None:
            return self.taken if self.used else None
        if not self.lost:
            return self.taken
        return None if self.share.iterations is not None else self.share.at_least(self.taken)

    @property
    def used(self) -> bool:
        """Whether anything was taken."""
        return self._taken is not None or self._runs is not None

    @property
    def taken(self) -> Consumption:
        """What was taken so far, requests that are under way included."""
        with self.account.lock:
            taken = self._taken or Consumption()
            for usage in self._expected.values():
                taken += Consumption(usage=usage)
            for run in self._runs or ():
                taken += run.total()
            return taken

    @property
    def held(self) -> int:
        """Round trips that the runs in the call keep for their answers."""
        return sum(run.held for run in self._runs or ())

    def left(self) -> BudgetShare:
        """What may still be taken."""
        with self.account.lock:
            if self.closed:
                return BudgetShare(iterations=0, tool_calls=0)
            if self.share is None:
                return self.account.left()
            return self.share.less(self.taken + Consumption(iterations=self.held))

    def calls_left(self) -> dict[str, int]:
        """How often each function may still be started whose calls are limited."""
        return self.account.calls_left()

    def take_request(self) -> str | None:
        """Take one round trip for a request that is about to be sent; or name the limit that forbids it."""
        with self.account.lock:
            if (limit := self.left().used_up()) is None:
                self.charge(Consumption(iterations=1))
            return limit

    def take_call(self, function: str) -> str | None:
        """Take the start of a function; or name the limit that forbids it."""
        with self.account.lock:
            limit = _forbids_start(function, self.left(), self.calls_left())
            if limit is None:
                self.charge(Consumption(tool_calls=1, calls_by_function={function: 1}))
            return limit

    def expect(self, request: object, usage: Usage) -> None:
        """Count what a request will use at least, until it is known what it came to."""
        with self.account.lock:
            self._expected[request] = usage

    def charge(self, spent: Consumption, *, instead_of: object = None) -> None:
        """Add what a request came to, once that is known, in the place of what was expected."""
        with self.account.lock:
            self._expected.pop(instead_of, None)
            self._taken = spent if self._taken is None else self._taken + spent

    def begin(self, run: "Account") -> None:
        """Count a run that is made in this call."""
        self._runs = [*(self._runs or ()), run]


class Account:
    """What one run may still spend.

    Args:
        state: Gives the run's state at the moment.
        within: The call of another run in which this run is made, or None.
        lock: Held while something is looked at and taken; the same for a run and all runs in it, for these may be in
            other threads.
    """

    def __init__(self, state: Callable[[], State], within: Tab | None, lock: AbstractContextManager[object]) -> None:
        self.lock = lock if within is None else within.account.lock
        self.held = 0
        self._state = state
        self._within = within
        self._before = Ledger()
        self._tabs: dict[int, Tab] = {}
        self._starting: tuple[int, ...] = ()
        self._share: BudgetShare | None = None
        self._under_way = 0
        self._charged = 0
        self._restarting = Consumption()

    @property
    def state(self) -> State:
        """The run at this moment."""
        return self._state()

    def open(self) -> str | None:
        """Begin to take from the call around, where there is one; or name the limit that forbids the first request."""
        within = self._within
        if within is None:
            return None
        with self.lock:
            limit = within.left().used_up()
            if limit is None:
                self._before = self.state.ledger
                self.held = self.state.rules.limits.iterations_kept
                within.begin(self)
        return limit

    def close(self, *, sent: bool = True) -> None:
        """Give back what is held; and the round trip of the last request, where that was not ``sent``."""
        with self.lock:
            self.held = 0
            self._under_way = self._under_way if sent else 0

    def decide(self, state: State) -> Action | None:
        """Say what is to be done next, and take what that needs from the call around."""
        within = self._within
        if within is None:
            return next_action(state)
        with self.lock:
            self._under_way, self._charged = 0, self.state.ledger.iterations
            action = next_action(self._seen_within(state, within))
            match action:
                case AskPlan() | AskModel():
                    self._under_way = 1
                case AskPerson(iterations=iterations):
                    self._under_way = iterations or 0
                case RunCalls(indexes=indexes, share=share):
                    self.starting(indexes, share)
                case _:
                    pass
            left = within.left().iterations
            if left is not None and left < 0:
                self.held = 0  # this is the request that it was held for
            return action

    def starting(self, indexes: Sequence[int], share: BudgetShare | None) -> None:
        """Note which calls are about to start, and the share of each that is a planner: both are as good as taken."""
        with self.lock:
            self._starting, self._share = tuple(indexes), share

    def restart(self, function: str) -> str | None:
        """Take one more start of a running call; or name the limit that forbids it."""
        with self.lock:
            if (limit := _forbids_start(function, self.left(), self.calls_left())) is None:
                self._restarting = Consumption(tool_calls=1, calls_by_function={function: 1})
            return limit

    def restarted(self) -> None:
        """Forget a start that is in the ledger by now."""
        with self.lock:
            self._restarting = Consumption()

    def tab(self, index: int, share: BudgetShare | None) -> Tab:
        """Make the tab of a call that starts."""
        with self.lock:
            tab = self._tabs[index] = Tab(self, index, share)
            return tab

    def settle(self, index: int) -> None:
        """Forget the tab of a call that is recorded."""
        with self.lock:
            self._tabs.pop(index, None)

    def unrecorded(self) -> dict[int, Consumption]:
        """Give what the calls have spent that are not recorded yet, by index, but for whole shares."""
        spent = {index: tab.spent for index, tab in self._tabs.items()}
        return {index: one for index, one in spent.items() if one is not None}

    def left(self) -> BudgetShare:
        """What the functions of the run may still take."""
        with self.lock:
            state = self.state
            limits, ledger = state.rules.limits, state.ledger
            taken, held = self._open(state)
            taken += Consumption(iterations=held + limits.iterations_kept)
            left = BudgetShare.of(limits).less(ledger + taken)
            return left if self._within is None else left.least(self._within.left())

    def calls_left(self) -> dict[str, int]:
        """How often each function may still be started whose calls are limited, here or around."""
        with self.lock:
            around = {} if self._within is None else self._within.calls_left()
            state = self.state
            limits, used = state.rules.limits.max_calls_per_function, state.ledger.calls_by_function
            if limits:
                used = Counter(used) + Counter(self._open(state)[0].calls_by_function)
                for name, limit in limits.items():
                    around[name] = min(limit - used.get(name, 0), around.get(name, limit))
            return around

    def total(self) -> Consumption:
        """What the run has spent since it was opened, with what is under way in it."""
        state = self.state
        spent = Consumption() + state.ledger - self._before + self._open(state)[0]
        spent = replace(spent, usage=dataclasses.replace(spent.usage, active_seconds=0.0))  # the run around measures it
        waits = self._under_way and state.ledger.iterations == self._charged  # a reply that came is in the ledger
        return spent + Consumption(iterations=self._under_way) if waits else spent

    def _open(self, state: State) -> tuple[Consumption, int]:
        """Sum what is taken and not in the ledger: by the open tabs, and by the calls that are about to start."""
        batch = state.batch
        if batch is None:
            return Consumption(), 0
        taken, held = self._restarting, 0
        for index, tab in self._tabs.items():
            if tab.used and index < len(batch.calls) and batch.calls[index].answer is None:
                own = tab.taken
                taken += own if tab.share is None else Consumption(calls_by_function=own.calls_by_function)
                held += tab.held if tab.share is None else 0
        self._starting = tuple(i for i in self._starting if i < len(batch.calls) and _is_to_start(batch.calls[i]))
        for index in self._starting:
            taken += _start_of(batch.calls[index], self._share)
        return taken, held

    def _seen_within(self, state: State, within: Tab) -> State:
        """Show the run to itself with the budget that is left around it: what others took of that counts as spent."""
        if within.closed:
            return replace(state, stopping=state.stopping or "The call in which this run was begun has ended.")
        left, limits, ledger = within.left().less(Consumption(iterations=-self.held)), state.rules.limits, state.ledger
        changed, hidden = dict[str, Any](), dict[str, Any]()
        for part, limit in LIMIT_OF_PART.items():
            if part != "seconds" and (rest := getattr(left, part)) is not None:
                used = ledger.by_part[part]
                changed[limit], shown = _shown(getattr(limits, limit), used, rest)
                hidden[part] = shown - used
        if per_function := within.calls_left():
            used = ledger.calls_by_function
            own = limits.max_calls_per_function
            allowed = {name: max(used.get(name, 0) + count, 0) for name, count in per_function.items()}
            changed["max_calls_per_function"] = {
                name: min(counts[name] for counts in (own, allowed) if name in counts) for name in (*own, *allowed)
            }
        shown = {name: value for name, value in changed.items() if value != getattr(limits, name)}
        rules = dataclasses.replace(state.rules, limits=dataclasses.replace(limits, **shown)) if shown else state.rules
        return replace(state, rules=rules, ledger=ledger + BudgetShare(**hidden).whole())


def _is_to_start(call: Call) -> bool:
    return not call.started and call.answer is None


def _start_of(call: Call, share: BudgetShare | None) -> Consumption:
    """What the start of a call will be charged."""
    assert call.decided is not None, "a call that is about to start was decided"
    start = Consumption(tool_calls=1, calls_by_function={call.decided.function: 1})
    if share is None or not call.decided.nested:
        return start
    return start + share.whole()


def _shown(limit: Any, used: Any, left: Any) -> tuple[Any, Any]:
    """Give a limit, and what has to count as spent for no more than this to be left of it."""
    left = max(left, 0)
    limit = max(used + left, 1) if limit is None else limit
    return limit, max(used, limit - left)


def _forbids_start(function: str, left: BudgetShare, calls_left: Mapping[str, int]) -> str | None:
    """Name the limit of which nothing is left for one more start of a function."""
    if left.tool_calls is not None and left.tool_calls <= 0:
        return "max_tool_calls"
    if calls_left.get(function, 1) <= 0:
        return "max_calls_per_function"
    return dataclasses.replace(left, iterations=None).used_up()
