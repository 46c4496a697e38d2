"""One budget for a run and the runs inside it: what a nested run may spend, and what of it was spent in the end.

A share is set aside when a nested run's call starts, as if it were spent already; when the call ends, what was not
spent comes back. So nested runs beside each other cannot pass the budget together, and one that is never heard of again
has cost its whole share.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import reduce
from typing import Literal, cast

from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.values import Tally, Usage

__all__ = [
    "BudgetShare",
    "Consumption",
    "Ledger",
    "Limits",
    "RemainingLimit",
    "divided",
    "merged_counts",
    "remaining_limits",
    "reserved",
    "settled",
    "spent_limit",
    "time_left",
]

# What a run may spend, what it has spent, and which limit was reached first.
#
# Round trips and calls are exact: the machine never goes one over. Tokens and cost are checked before each request and
# before each batch, so only what is then in flight, and the one forced answer, may pass them. Active time and deadline
# interrupt what is in flight, and no request follows them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one run; None is no limit. Each is checked when it is made, see `InvalidLimitError`."""

    max_iterations: int | None = None
    max_tool_calls: int | None = None
    max_total_tokens: int | None = None
    max_cost: float | None = None
    max_active_seconds: float | None = None
    deadline: datetime | None = None
    max_calls_per_function: Mapping[str, int] = field(default_factory=dict[str, int])
    max_consecutive_errors: int | None = None
    max_repeated_calls: int | None = None
    max_repeated_denials: int | None = None
    max_calls_per_reply: int | None = None
    on_limit: Literal["answer", "raise", "stop", "return_calls"] = "answer"
    batch_over_limit: Literal["reject_batch", "fill_remaining"] = "reject_batch"
    last_trip: Literal["withdraw", "none"] = "withdraw"
    tell_budget: bool | float = False

    def __post_init__(self) -> None:
        for name, value in ((item.name, getattr(self, item.name)) for item in fields(Limits)):
            _check(name, value)
        # A copy of its own: what was checked stays as it was, whatever becomes of the caller's mapping.
        object.__setattr__(self, "max_calls_per_function", dict(self.max_calls_per_function))

    @property
    def iterations_kept(self) -> int:
        """How many round trips are kept for the answer."""
        return 1 if self.on_limit == "answer" else 0


_ALLOWED: dict[str, tuple[str, ...]] = {
    "on_limit": ("answer", "raise", "stop", "return_calls"),
    "batch_over_limit": ("reject_batch", "fill_remaining"),
    "last_trip": ("withdraw", "none"),
}


def _check(name: str, value: object) -> None:
    """Refuse a value that means nothing, naming the field, what it takes, what it got and the way out."""
    if name in _ALLOWED:
        if value not in _ALLOWED[name]:
            raise InvalidLimitError(f"{name} must be one of {', '.join(_ALLOWED[name])}; got {shown(value)}.")
    elif name in _CHECKS:
        _CHECKS[name](value)
    elif name in ("max_cost", "max_active_seconds"):
        if value is not None and not _is_positive_number(value):
            raise InvalidLimitError(f"{name} must be a number above 0, or None for no limit; got {shown(value)}.")
    elif value is not None and not _is_count(value, least=0 if name == "max_tool_calls" else 1):
        least = "0 or more" if name == "max_tool_calls" else "1 or more"
        raise InvalidLimitError(f"{name} must be a whole number, {least}, or None for no limit; got {shown(value)}.")


def _is_count(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_positive_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:
        return False


def _check_deadline(value: object) -> None:
    if value is None:
        return
    if not isinstance(value, datetime):
        raise InvalidLimitError(f"deadline must be a datetime, or None for no limit; got {shown(value)}.")
    if value.tzinfo is None:
        raise InvalidLimitError(
            f"deadline must say its time zone; got {value!r}, which has none. Add tzinfo, for instance datetime.UTC."
        )


def _check_per_function(value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidLimitError(
            f"max_calls_per_function must map fully qualified function names to counts; got {shown(value)}."
        )
    for name, count in cast("Mapping[object, object]", value).items():
        if not isinstance(name, str) or not _is_count(count, least=0):
            raise InvalidLimitError(
                f"max_calls_per_function must map function names to whole numbers, 0 or more; "
                f"got {shown(count)} for {shown(name)}."
            )


def _check_tell(value: object) -> None:
    if not isinstance(value, bool) and not (_is_positive_number(value) and isinstance(value, float) and value <= 1):
        raise InvalidLimitError(
            f"tell_budget must be True, False, or a share above 0.0 and up to 1.0 (a float); got {shown(value)}."
        )


_CHECKS: dict[str, Callable[[object], None]] = {
    "deadline": _check_deadline,
    "max_calls_per_function": _check_per_function,
    "tell_budget": _check_tell,
}


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What a run has spent so far; survives pause, process and resume.

    Attributes:
        iterations: Round trips charged: what each reply's metadata reports, at least 1 a request.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        calls_by_function: Functions started, by fully qualified name.
        calls_by_digest: Functions started, by digest of function and arguments; kept where repeats are limited.
        errors_in_row: Batches in a row with a failed, unknown or invalid call.
        denials_in_row: Batches in a row in which every call was denied.
    """

    iterations: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    calls_by_function: Tally = field(default_factory=Tally)
    calls_by_digest: Tally = field(default_factory=Tally)
    errors_in_row: int = 0
    denials_in_row: int = 0


def spent_limit(limits: Limits, ledger: Ledger, at: float) -> str | None:
    """Name the first limit on tokens, cost, time, errors or denials that is used up, or None.

    Args:
        limits: What may be spent.
        ledger: What was spent.
        at: The time of the newest fact, in seconds since the epoch.
    """
    spent: tuple[tuple[str, float | None, float], ...] = (
        ("max_total_tokens", limits.max_total_tokens, ledger.usage.total_tokens),
        ("max_cost", limits.max_cost, ledger.usage.cost or 0.0),
        ("max_active_seconds", limits.max_active_seconds, ledger.usage.active_seconds),
        ("deadline", limits.deadline.timestamp() if limits.deadline else None, at),
        ("max_consecutive_errors", limits.max_consecutive_errors, ledger.errors_in_row),
        ("max_repeated_denials", limits.max_repeated_denials, ledger.denials_in_row),
    )
    return next((name for name, limit, used in spent if limit is not None and used >= limit), None)


def time_left(limits: Limits, ledger: Ledger, at: float) -> tuple[float, str] | None:
    """Compute the seconds until the first of the time limits, and name it; None where time is not limited.

    Args:
        limits: What may be spent.
        ledger: What was spent.
        at: Now, in seconds since the epoch.
    """
    left: list[tuple[float, str]] = []
    if limits.max_active_seconds is not None:
        left.append((limits.max_active_seconds - ledger.usage.active_seconds, "max_active_seconds"))
    if limits.deadline is not None:
        left.append((limits.deadline.timestamp() - at, "deadline"))
    return min(left, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingLimit:
    """How much of one limit is left.

    Attributes:
        name: The limit, as `Limits` has it.
        left: Trips, calls, tokens, US dollars or seconds; never below 0.
        limit: The whole of it; of a deadline, the time worked so far and the time that is left.
    """

    name: str
    left: float
    limit: float


def remaining_limits(limits: Limits, ledger: Ledger, at: float) -> tuple[RemainingLimit, ...]:
    """List what is left of trips, calls, tokens, cost and time, as far as ``tell_budget`` has the model told.

    Args:
        limits: What may be spent.
        ledger: What was spent.
        at: The time of the newest fact, in seconds since the epoch.
    """
    if limits.tell_budget is False:
        return ()
    usage = ledger.usage
    until = None if limits.deadline is None else max(limits.deadline.timestamp() - at, 0.0)
    spent: tuple[tuple[str, float | None, float], ...] = (
        ("max_iterations", limits.max_iterations, ledger.iterations),
        ("max_tool_calls", limits.max_tool_calls, ledger.tool_calls),
        ("max_total_tokens", limits.max_total_tokens, usage.total_tokens),
        ("max_cost", limits.max_cost, usage.cost or 0.0),
        ("max_active_seconds", limits.max_active_seconds, usage.active_seconds),
        ("deadline", None if until is None else until + usage.active_seconds, usage.active_seconds),
    )
    limited = ((name, limit, used) for name, limit, used in spent if limit is not None)
    known = (RemainingLimit(name=name, left=max(limit - used, 0), limit=limit) for name, limit, used in limited)
    return tuple(item for item in known if item.left <= item.limit * limits.tell_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetShare:
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
    def of(cls, limits: Limits) -> "BudgetShare":
        """Give all that the limits of a run allow."""
        return cls(**{name: getattr(limits, limit) for name, limit in _LIMITS.items()})

    def limits(self, deadline: datetime | None) -> Limits:
        """Write the share as the limits of a run, which has to end when the run around it has."""
        return Limits(**{limit: getattr(self, name) for name, limit in _LIMITS.items()}, deadline=deadline)

    def used_up(self) -> str | None:
        """Name the limit of which nothing is left for a request; of functions there may be nothing left."""
        needed = {limit: getattr(self, name) for name, limit in _LIMITS.items() if name != "tool_calls"}
        return next((limit for limit, value in needed.items() if value is not None and value <= 0), None)

    def whole(self) -> "Consumption":
        """Write the share as spent to its end."""
        usage = Usage(completion_tokens=self.tokens or 0, cost=self.cost, active_seconds=self.seconds or 0.0)
        return Consumption(iterations=self.iterations or 0, tool_calls=self.tool_calls or 0, usage=usage)

    def at_least(self, taken: "Consumption") -> "Consumption":
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
class Consumption:
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

    def __add__(self, other: "Consumption") -> "Consumption":
        return Consumption(
            iterations=self.iterations + other.iterations,
            tool_calls=self.tool_calls + other.tool_calls,
            usage=self.usage + other.usage,
            calls_by_function=merged_counts(self.calls_by_function, other.calls_by_function),
        )


def merged_counts(one: Mapping[str, int], other: Mapping[str, int], sign: int = 1) -> dict[str, int]:
    """Add two counts by name, or take the second from the first; a name that comes to nothing is left out."""
    sums = {name: one.get(name, 0) + sign * other.get(name, 0) for name in (*one, *other)}
    return {name: count for name, count in sums.items() if count}


def divided(limits: Limits, ledger: Ledger, *, starting: int, by: int) -> BudgetShare | None:
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
    share = BudgetShare(
        iterations=None if trips is None else (trips - ledger.iterations - limits.iterations_kept) // by,
        tool_calls=None if calls is None else max(calls - ledger.tool_calls - starting, 0) // by,
        tokens=None if tokens is None else (tokens - used.total_tokens) // by,
        cost=None if cost is None else (cost - (used.cost or 0.0)) / by,
        seconds=None if seconds is None else (seconds - used.active_seconds) / by,
    )
    return share if share.used_up() is None else None


def reserved(ledger: Ledger, share: BudgetShare | None) -> Ledger:
    """Set a share aside: it counts as spent."""
    return ledger if share is None else _charged(ledger, share.whole())


def settled(ledger: Ledger, share: BudgetShare | None, spent: Consumption | None) -> Ledger:
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
    back = Consumption(iterations=-whole.iterations, tool_calls=-whole.tool_calls, usage=rest)
    return _exact(_charged(_charged(ledger, back), spent), share)


def _charged(ledger: Ledger, spent: Consumption) -> Ledger:
    return replace(
        ledger,
        iterations=ledger.iterations + spent.iterations,
        tool_calls=ledger.tool_calls + spent.tool_calls,
        usage=ledger.usage + spent.usage,
        calls_by_function=reduce(
            lambda tally, count: tally.plus(*count), spent.calls_by_function.items(), ledger.calls_by_function
        ),
    )


def _exact(ledger: Ledger, share: BudgetShare) -> Ledger:
    """Round away what adding and taking a fraction leaves behind: a picodollar or a picosecond is nobody's."""
    usage = ledger.usage
    if share.cost is not None and usage.cost is not None:
        usage = replace(usage, cost=round(usage.cost, 12))
    if share.seconds is not None:
        usage = replace(usage, active_seconds=round(usage.active_seconds, 12))
    return replace(ledger, usage=usage)
