"""One budget for a run and the runs inside it: what a nested run may spend, and what of it was spent in the end.

A share is set aside when a nested run's call starts, as if it were spent already; when the call ends, what was not
spent comes back. So nested runs beside each other cannot pass the budget together, and one that is never heard of again
has cost its whole share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import reduce

from planner_ext.core.limits import Ledger, Limits
from planner_ext.core.values import Usage

__all__ = ["Share", "Spent", "divided", "merged_counts", "reserved", "settled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one nested run may spend of the budget around it; None where that has no such limit.

    Attributes:
        iterations: Round trips.
        tool_calls: Functions started.
        tokens: Prompt and completion tokens.
        cost: US dollars.
        seconds: Active time.
    """

    iterations: int | None = None
    tool_calls: int | None = None
    tokens: int | None = None
    cost: float | None = None
    seconds: float | None = None

    @classmethod
    def of(cls, limits: Limits) -> "Share":
        """Give all that the limits of a run allow."""
        return cls(**{name: getattr(limits, limit) for name, limit in _LIMITS.items()})

    def limits(self, deadline: datetime | None) -> Limits:
        """Write the share as the limits of a run, which has to end when the run around it has."""
        return Limits(**{limit: getattr(self, name) for name, limit in _LIMITS.items()}, deadline=deadline)

    def used_up(self) -> str | None:
        """Name the limit of which nothing is left for a request; of functions there may be nothing left."""
        needed = {limit: getattr(self, name) for name, limit in _LIMITS.items() if name != "tool_calls"}
        return next((limit for limit, value in needed.items() if value is not None and value <= 0), None)

    def whole(self) -> "Spent":
        """Write the share as spent to its end."""
        usage = Usage(completion_tokens=self.tokens or 0, cost=self.cost, active_seconds=self.seconds or 0.0)
        return Spent(iterations=self.iterations or 0, tool_calls=self.tool_calls or 0, usage=usage)

    def at_least(self, taken: "Spent") -> "Spent":
        """Count the whole share as spent, and what was taken where it has no limit."""
        usage = taken.usage if self.tokens is None else Usage(completion_tokens=self.tokens)
        return replace(
            taken,
            iterations=taken.iterations if self.iterations is None else self.iterations,
            tool_calls=taken.tool_calls if self.tool_calls is None else self.tool_calls,
            usage=replace(usage, cost=taken.usage.cost if self.cost is None else self.cost),
        )


_LIMITS = {
    "iterations": "max_iterations",
    "tool_calls": "max_tool_calls",
    "tokens": "max_total_tokens",
    "cost": "max_cost",
    "seconds": "max_active_seconds",
}
"""The limit of a run that each part of a share comes from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a call has spent on requests and functions of its own, those of the runs inside it included.

    Its active time is not in it, for the run around it was active all the while.

    Attributes:
        iterations: Round trips.
        tool_calls: Functions started.
        usage: Tokens and cost.
        calls_by_function: Functions started, by fully qualified name.
    """

    iterations: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    calls_by_function: Mapping[str, int] = field(default_factory=dict[str, int])

    def __add__(self, other: "Spent") -> "Spent":
        return Spent(
            iterations=self.iterations + other.iterations,
            tool_calls=self.tool_calls + other.tool_calls,
            usage=self.usage + other.usage,
            calls_by_function=merged_counts(self.calls_by_function, other.calls_by_function),
        )


def merged_counts(one: Mapping[str, int], other: Mapping[str, int], sign: int = 1) -> dict[str, int]:
    """Add two counts by name, or take the second from the first; a name that comes to nothing is left out."""
    sums = {name: one.get(name, 0) + sign * other.get(name, 0) for name in (*one, *other)}
    return {name: count for name, count in sums.items() if count}


def divided(limits: Limits, ledger: Ledger, *, starting: int, by: int) -> Share | None:
    """Divide what is left of a budget, less the round trip that is kept for the answer.

    Args:
        limits: Of the run around.
        ledger: What that has spent.
        starting: How many functions are about to start, nested runs included.
        by: How many of them are nested runs.

    Returns:
        The share of each; None where it comes to no round trip, or to no token.
    """
    trips, tokens = limits.max_iterations, limits.max_total_tokens
    calls, cost, seconds = limits.max_tool_calls, limits.max_cost, limits.max_active_seconds
    used = ledger.usage
    share = Share(
        iterations=None if trips is None else (trips - ledger.iterations - limits.trips_kept) // by,
        tool_calls=None if calls is None else max(calls - ledger.tool_calls - starting, 0) // by,
        tokens=None if tokens is None else (tokens - used.total_tokens) // by,
        cost=None if cost is None else (cost - (used.cost or 0.0)) / by,
        seconds=None if seconds is None else (seconds - used.active_seconds) / by,
    )
    return share if share.used_up() is None else None


def reserved(ledger: Ledger, share: Share | None) -> Ledger:
    """Set a share aside: it counts as spent."""
    return ledger if share is None else _charged(ledger, share.whole())


def settled(ledger: Ledger, share: Share | None, spent: Spent | None) -> Ledger:
    """Charge what a call has spent, and take back the rest of its share.

    Without ``spent`` the whole share was spent, but for its time: that is measured.
    """
    if share is None:
        return ledger if spent is None else _charged(ledger, spent)
    whole = share.whole()
    rest = Usage(active_seconds=-(share.seconds or 0.0))
    if spent is None:
        return _exact(replace(ledger, usage=ledger.usage + rest), share)
    rest += Usage(completion_tokens=-(share.tokens or 0), cost=None if share.cost is None else -share.cost)
    back = Spent(iterations=-whole.iterations, tool_calls=-whole.tool_calls, usage=rest)
    return _exact(_charged(_charged(ledger, back), spent), share)


def _charged(ledger: Ledger, spent: Spent) -> Ledger:
    return replace(
        ledger,
        iterations=ledger.iterations + spent.iterations,
        tool_calls=ledger.tool_calls + spent.tool_calls,
        usage=ledger.usage + spent.usage,
        calls_by_function=reduce(
            lambda tally, count: tally.plus(*count), spent.calls_by_function.items(), ledger.calls_by_function
        ),
    )


def _exact(ledger: Ledger, share: Share) -> Ledger:
    """Round away what adding and taking a fraction leaves behind: a picodollar or a picosecond is nobody's."""
    usage = ledger.usage
    if share.cost is not None and usage.cost is not None:
        usage = replace(usage, cost=round(usage.cost, 12))
    if share.seconds is not None:
        usage = replace(usage, active_seconds=round(usage.active_seconds, 12))
    return replace(ledger, usage=usage)
