"""A run inside a run: what a function that is a planner learns of the run that calls it, and how it pays.

The run around a function is found through a context variable, which holds for whatever the call awaits or starts. Must
not know the planner, nor how a budget is divided: that is `planner_ext.core.shares`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from semantic_kernel.functions import KernelFunction

from planner_ext.approval.decisions import Decision, Defer, Deny, ToolCall
from planner_ext.core.limits import Ledger, Limits
from planner_ext.core.shares import Spent, divided
from planner_ext.core.state import State
from planner_ext.core.values import Checked, RequestedCall, Usage
from planner_ext.engine import StopHandle
from planner_ext.kernel.budget import Price, tightest
from planner_ext.kernel.options import LoopOptions
from planner_ext.ports import Finished, Functions, Gate

__all__ = ["Around", "NestingFunctions", "NobodyWaits", "Purse", "mark_planner", "planner_of", "run_around"]

_MARK = "__planner_ext_planner__"


def mark_planner(function: Callable[..., Any], planner: object) -> None:
    """Declare that a function is this planner: its call is given a share of the budget of the run around it."""
    setattr(function, _MARK, planner)


def planner_of(function: KernelFunction | None) -> object | None:
    """Read the mark of a kernel's function; None where it is no planner."""
    return getattr(getattr(function, "method", None), _MARK, None)


class Purse:
    """The share of one call, and what the runs begun in it have spent: more than one where a filter tries again."""

    def __init__(self, share: Limits) -> None:
        self._share = replace(share, on_limit="stop")  # the share has no trip of its own that is kept for an answer
        self._ledger = Ledger()
        self._lost = False

    @property
    def limits(self) -> Limits | None:
        """What may still be spent, by the run that pays as well; None where that is nothing."""
        left = divided(self._share, self._ledger, starting=0, by=1)
        return None if left is None else left.limits(self._share.deadline)

    @property
    def spent(self) -> Spent | None:
        """What was spent; None while a run pays, and for good where it came to no end that says so."""
        ledger = self._ledger
        usage = replace(ledger.usage, active_seconds=0.0)
        return None if self._lost else Spent(iterations=ledger.iterations, tool_calls=ledger.tool_calls, usage=usage)

    @contextmanager
    def paying(self) -> Generator[Callable[[int, int, Usage], None]]:
        """Let a run spend; it has lost everything unless it says what it spent: iterations, tool calls, usage."""
        self._lost = True

        def pay(iterations: int, tool_calls: int, usage: Usage) -> None:
            ledger = self._ledger
            self._ledger = Ledger(
                iterations=ledger.iterations + iterations,
                tool_calls=ledger.tool_calls + tool_calls,
                usage=ledger.usage + usage,
            )
            self._lost = False

        yield pay


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """The run in which a function is called.

    Attributes:
        planners: Those whose runs are around the function, the outermost first.
        purse: What the function may spend where it is a planner, else None.
        price: How the run around counts cost, if its application says so.
        stop: Whoever stops the run around, stops the runs inside it.
    """

    planners: tuple[object, ...]
    purse: Purse | None = None
    price: Price | None = None
    stop: StopHandle | None = None

    def within(self, options: LoopOptions) -> LoopOptions:
        """Keep a nested run to its share: of each limit the tighter holds."""
        share = None if self.purse is None else self.purse.limits
        if share is None:
            return options
        return replace(options, budget=tightest(options.budget, share), price=options.price or self.price)


_AROUND: ContextVar[Around | None] = ContextVar("planner_ext_run_around", default=None)


def run_around() -> Around | None:
    """Find the run in which this code is called as a function, or as a part of one; None outside of every run."""
    return _AROUND.get()


class NestingFunctions:
    """A run's functions, where one may be a planner itself. Implements `planner_ext.ports.Functions`.

    Args:
        functions: The kernel's.
        offered: Those of the last request, by fully qualified name.
        planners: Whose runs are around them.
        price: How this run counts cost, if the application says so.
    """

    def __init__(
        self,
        functions: Functions,
        *,
        offered: Callable[[], Mapping[str, KernelFunction]],
        planners: tuple[object, ...],
        price: Price | None,
    ) -> None:
        self._functions = functions
        self._offered = offered
        self._around = Around(planners=planners, price=price)

    def stopped_by(self, stop: StopHandle) -> None:
        """Let whoever stops this run stop the runs inside it, too."""
        self._around = replace(self._around, stop=stop)

    def check(self, call: RequestedCall, edited: str | None = None) -> Checked:
        """Resolve a call, see `KernelFunctions.check`, and say whether it is a planner's."""
        checked = self._functions.check(call, edited)
        nested = checked.kind == "function" and planner_of(self._offered().get(checked.function)) is not None
        return replace(checked, nested=True) if nested else checked

    async def run(self, call: RequestedCall, checked: Checked, *, index: int, state: State) -> Finished:
        """Run a function, see `KernelFunctions.run`, with its share at hand where it is a planner."""
        assert state.batch is not None, "a call is run while its batch is open"
        share = state.batch.calls[index].reserved
        purse = None if share is None else Purse(share.limits(state.rules.limits.deadline))
        before = _AROUND.set(self._around if purse is None else replace(self._around, purse=purse))
        try:
            finished = await self._functions.run(call, checked, index=index, state=state)
        finally:
            _AROUND.reset(before)
        return finished if purse is None else replace(finished, spent=purse.spent)

    def encode(self, result: Any) -> str:
        """Turn a value into the text that the model reads as a function's result."""
        return self._functions.encode(result)


class NobodyWaits:
    """Decides as another gate does, but for the calls that would wait for a person: a nested run cannot."""

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
        f"{call.fully_qualified_name} needs a person's decision, and a planner that runs as a function cannot wait "
        "for one. Go on without it."
    )
