"""A run inside a run: what a function learns of the run that calls it, how it pays, and under whose gate it stands.

The call of a function is found through a context variable, which holds for whatever the call awaits or starts. Must
not know the planner, nor how a budget is counted: that is `planner_ext.core.accounts`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from semantic_kernel.functions import KernelFunction

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, ToolCall
from planner_ext.core.accounts import Account, Tab, current_tab
from planner_ext.core.state import State
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.engine.engine import StopHandle
from planner_ext.engine.gate import InterceptorChain
from planner_ext.engine.ports import Finished, Functions, Gate
from planner_ext.sk.budget import Price, tightest
from planner_ext.sk.errors import LimitReachedError, NestedRunRefusedError
from planner_ext.sk.options import LoopOptions

__all__ = [
    "Around",
    "NestedGate",
    "NestingFunctions",
    "NobodyWaits",
    "around_of",
    "mark_planner",
    "nothing_left",
    "planner_of",
    "refusal_in",
]

_MARK = "__planner_ext_planner__"


def mark_planner(function: Callable[..., Any], planner: object) -> None:
    """Declare that a function is this planner: its call is given a share of the budget of the run around it."""
    setattr(function, _MARK, planner)


def planner_of(function: KernelFunction | None) -> object | None:
    """Read the mark of a kernel's function; None where it is no planner."""
    return getattr(getattr(function, "method", None), _MARK, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The run in which a function is called, and the call.

    Attributes:
        planners: Those whose runs are around the function, the outermost first.
        gates: What has a say in each of the runs around, the outermost first, and that run's account.
        price: How the run around counts cost, if its application says so.
        stop: Stops the run around, and with it the runs inside it.
        tab: Of the call.
    """

    planners: tuple[object, ...]
    gates: tuple[tuple[InterceptorChain, Account], ...]
    price: Price | None = None
    stop: StopHandle | None = None
    tab: Tab

    def check(self) -> None:
        """See that the call may still make requests and start functions.

        Raises:
            NestedRunRefusedError: If it has ended, or its run is to stop.
        """
        if self.tab.closed:
            raise NestedRunRefusedError(
                "The function that was given this kernel has returned, and its call is charged: nothing more can be "
                "done in its name. Await what the function starts, or start it with a context and a kernel of its own."
            )
        if self.stop is not None and self.stop.reason is not None:
            raise NestedRunRefusedError(f"The run was asked to stop: {self.stop.reason}")

    def within(self, options: LoopOptions) -> LoopOptions:
        """Keep a nested run to what is left: of each limit the tighter holds.

        Raises:
            NestedRunRefusedError: If the call has ended, or its run is to stop.
            LimitReachedError: If nothing is left for a request.
        """
        self.check()
        left = self.tab.left()
        if (limit := left.used_up()) is not None:
            raise nothing_left(limit)
        calls = None if left.tool_calls is None else max(left.tool_calls, 0)
        limits = replace(left, tool_calls=calls).limits(self.tab.account.state.rules.limits.deadline)
        return replace(options, budget=tightest(options.budget, limits), price=options.price or self.price)


def nothing_left(limit: str) -> LimitReachedError:
    """Make the error for a request inside a function for which the budget of the run around has nothing left."""
    error = LimitReachedError(
        f"The limit {limit} of the run leaves nothing for a request or a call inside a function, but for the request "
        "that is kept for the run's answer. It was not made."
    )
    error.status, error.limit = "limit_reached", limit
    return error


def refusal_in(error: BaseException) -> str | None:
    """Find what a function was refused inside of a run, behind whatever its error became on the way; None otherwise."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NestedRunRefusedError | LimitReachedError):
            return str(cause)
        cause = cause.__cause__
    return None


def around_of(tab: Tab | None = None) -> Around | None:
    """Find the run in which this code is called as a function, or as a part of one; None outside of every run.

    Args:
        tab: Of the call that the code belongs to where it runs in a context of its own, as threads do.
    """
    tab = current_tab() or tab
    return None if tab is None or tab.around is None else tab.around(tab)


class NestingFunctions:
    """A run's functions, which may be planners themselves, or make runs (`planner_ext.engine.ports.Functions`).

    Args:
        functions: The kernel's.
        offered: Those of the last request, by fully qualified name.
        around: Gives what they learn of this run, from the tab of a call and ``stop``.
    """

    def __init__(
        self,
        functions: Functions,
        *,
        offered: Callable[[], Mapping[str, KernelFunction]],
        around: Callable[..., Around],
    ) -> None:
        self._functions = functions
        self._offered = offered
        self._around = around

    def stopped_by(self, stop: StopHandle) -> None:
        """Let what stops this run stop the runs inside it, too."""
        self._around = partial(self._around, stop=stop)

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        """Resolve a call, see `KernelFunctions.check`, and say whether it is a planner's."""
        checked = self._functions.check(call, edited)
        nested = checked.kind == "function" and planner_of(self._offered().get(checked.function)) is not None
        return replace(checked, nested=True) if nested else checked

    async def run(self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State) -> Finished:
        """Run a function, see `KernelFunctions.run`, and let what it does find this run."""
        if (tab := current_tab()) is not None:
            tab.around = self._around
        return await self._functions.run(call, checked, index=index, state=state)

    def encode(self, result: Any) -> str:
        """Turn a value into the text that the model reads as a function's result."""
        return self._functions.encode(result)


class NestedGate:
    """Decides on the calls of a nested run: what a gate around it or its own forbids, does not run.

    The functions' own ``@requires_approval`` counts once, for the outermost run.

    Args:
        around: The gates of the runs around, the outermost first; each is asked about what those before it approved.
        own: The run's own gate, asked last; None where a function calls another one by itself.
        marked: Gives a function's own mark by its fully qualified name, or None.
    """

    def __init__(
        self,
        around: Sequence[tuple[InterceptorChain, Account]],
        own: InterceptorChain | None,
        *,
        marked: Callable[[str], Defer | None],
    ) -> None:
        (outermost, account), *others = around
        self._gates = [(replace(outermost, marked=marked), account), *others]
        self._own = own

    def watches(self, function: str) -> bool:
        """Whether any of the gates has a say."""
        return any(gate.watches(function) for gate, _ in self._asked(State()))

    def _asked(self, state: State) -> list[tuple[InterceptorChain, State]]:
        """List the gates, each with the run whose sticky approvals it heeds."""
        around = [(gate, account.state) for gate, account in self._gates]
        return around if self._own is None else [*around, (self._own, state)]

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision | None]:
        """Decide each call, in order."""
        return [await self._decide(call, state) for call in calls]

    async def _decide(self, call: ToolCall, state: State) -> Decision | None:
        decided: Approve | None = None
        for gate, run in self._asked(state):
            if not gate.watches(call.fully_qualified_name):
                continue
            (decision,) = await gate.review([call], run)
            if not isinstance(decision, Approve | None):
                return decision
            if decision is not None:
                decided = _both(decided, decision)
                call = call if decided.arguments is None else replace(call, arguments=decided.arguments)
        return decided


def _both(first: Approve | None, then: Approve) -> Approve:
    """Merge two approvals of a call: the last edit of its arguments, and the last one's approver."""
    if first is None:
        return then
    edited = first.arguments if then.arguments is None else then.arguments
    return replace(then, arguments=edited, by=then.by or first.by)


class NobodyWaits:
    """Decides as another gate does, but for the calls that would wait for a person: a run in a function cannot wait."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def watches(self, function: str) -> bool:
        """Whether the other gate has a say."""
        return self._gate.watches(function)

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision | None]:
        """Decide; a deferred call is denied, by name."""
        decisions = await self._gate.review(calls, state)
        return [
            _denied(call) if isinstance(decision, Defer) else decision
            for call, decision in zip(calls, decisions, strict=True)
        ]


def _denied(call: ToolCall) -> Deny:
    return Deny(
        f"{call.fully_qualified_name} needs a person's decision, and a run inside a function cannot wait for one. "
        "Go on without it."
    )
