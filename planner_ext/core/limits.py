"""What a run may spend, what it has spent, which limit was reached first, and what a nested run gets of it.

Round trips and calls are exact: the machine never exceeds them. Tokens and cost are checked before each request and
before each batch, so only what is then in flight, and the one forced answer, may exceed them. Active time and deadline
interrupt what is in flight, and no request follows them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import partial, reduce
from typing import Any, ClassVar, Literal, Self, TypeGuard, cast

from planner_ext.core.errors import InvalidLimitError, PlannerExtError, shown
from planner_ext.core.values import Tally, Usage, updated

__all__ = [
    "LIMIT_OF_PART",
    "BudgetShare",
    "Consumption",
    "Ledger",
    "Limits",
    "RemainingLimit",
    "divided",
    "is_count",
    "is_positive_number",
    "out_of_time",
    "released",
    "remaining_limits",
    "spent_limit",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of one run; None means no limit. Each is validated on construction, see `InvalidLimitError`."""

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

    error: ClassVar[type[PlannerExtError]] = InvalidLimitError
    """What an invalid value raises."""

    def __post_init__(self) -> None:
        for item in fields(Limits):
            if problem := _problem(item.name, getattr(self, item.name)):
                raise self.error(problem)
        # A copy: the caller may change the mapping after it was validated.
        object.__setattr__(self, "max_calls_per_function", dict(self.max_calls_per_function))

    @property
    def iterations_kept(self) -> int:
        """How many round trips are kept for the answer."""
        return 1 if self.on_limit == "answer" else 0


def is_count(value: object, *, least: int) -> TypeGuard[int]:
    """Return whether a value is a whole number, this one or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:
        return False


def _is_share(value: object) -> bool:
    return isinstance(value, bool) or (isinstance(value, float) and is_positive_number(value) and value <= 1)


def _one_of(*allowed: str) -> tuple[Callable[[object], bool], str]:
    return lambda value: value in allowed, f"be one of {', '.join(allowed)}"


_OPTIONAL = "or None for no limit"
_COUNT = partial(is_count, least=1), f"be a whole number, 1 or more, {_OPTIONAL}"
_AMOUNT = is_positive_number, f"be a number above 0, {_OPTIONAL}"
_EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_tool_calls": (partial(is_count, least=0), f"be a whole number, 0 or more, {_OPTIONAL}"),
    "max_cost": _AMOUNT,
    "max_active_seconds": _AMOUNT,
    "deadline": (lambda given: isinstance(given, datetime), f"be a datetime, {_OPTIONAL}"),
    "max_calls_per_function": (
        lambda value: isinstance(value, Mapping),
        "map fully qualified function names to counts",
    ),
    "on_limit": _one_of("answer", "raise", "stop", "return_calls"),
    "batch_over_limit": _one_of("reject_batch", "fill_remaining"),
    "last_trip": _one_of("withdraw", "none"),
    "tell_budget": (_is_share, "be True, False, or a share above 0.0 and up to 1.0 (a float)"),
}
"""What each limit must be; all others must be a `_COUNT`."""


def _problem(name: str, value: object) -> str:
    """Say what is wrong with a value, naming the field, what it takes and what it got; "" for a valid one."""
    valid, expected = _EXPECTED.get(name, _COUNT)
    if not valid(value) and not (value is None and expected.endswith(_OPTIONAL)):
        return f"{name} must {expected}; got {shown(value)}."
    if isinstance(value, datetime) and value.tzinfo is None:
        return f"deadline must say its time zone; got {value!r}, which has none. Add tzinfo, for instance datetime.UTC."
    if isinstance(value, Mapping):
        for function, count in cast("Mapping[object, object]", value).items():
            if not isinstance(function, str) or not is_count(count, least=0):
                expected = "map function names to whole numbers, 0 or more"
                return f"{name} must {expected}; got {shown(count)} for {shown(function)}."
    return ""


@dataclass(frozen=True, kw_only=True)
class Consumption:
    """What was spent on requests and functions: by one call and the runs inside it, or by a run so far.

    A call's consumption leaves out its active time, which the run around it measures.

    Attributes:
        iterations: Round trips charged: what each reply's metadata reports, at least 1 a request.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        calls_by_function: Functions started, by fully qualified name.
    """

    iterations: int = 0
    tool_calls: int = 0
    usage: Usage = Usage()
    calls_by_function: Mapping[str, int] = field(default_factory=dict[str, int])

    def __add__(self, other: "Consumption") -> Self:
        return updated(
            self,
            iterations=self.iterations + other.iterations,
            tool_calls=self.tool_calls + other.tool_calls,
            usage=self.usage + other.usage,
            calls_by_function=_summed(self.calls_by_function, other.calls_by_function),
        )

    def __sub__(self, other: "Consumption") -> Self:
        calls = {name: -count for name, count in other.calls_by_function.items()}
        return self + Consumption(
            iterations=-other.iterations, tool_calls=-other.tool_calls, usage=-other.usage, calls_by_function=calls
        )

    @property
    def by_part(self) -> dict[str, float]:
        """What counts against each part of a `BudgetShare`."""
        usage = self.usage
        return {
            "iterations": self.iterations,
            "tool_calls": self.tool_calls,
            "tokens": usage.total_tokens,
            "cost": usage.cost or 0.0,
            "seconds": usage.active_seconds,
        }


def _summed(one: Mapping[str, int], other: Mapping[str, int]) -> Mapping[str, int]:
    if isinstance(one, Tally):
        return reduce(lambda tally, item: tally.plus(*item), other.items(), one)
    sums = {name: one.get(name, 0) + other.get(name, 0) for name in (*one, *other)}
    return {name: count for name, count in sums.items() if count}


@dataclass(frozen=True, kw_only=True)
class Ledger(Consumption):
    """What a run has spent so far; survives pause, process and resume.

    Attributes:
        calls_by_digest: Functions started, by digest of function and arguments.
        errors_in_row: Batches in a row with a failed, unknown or invalid call.
        denials_in_row: Batches in a row in which every call was denied.
    """

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


def out_of_time(limits: Limits, ledger: Ledger, at: float) -> bool:
    """Return whether a time limit has passed: unlike the other limits, it leaves no request for an answer."""
    most = limits.max_active_seconds
    worked = most is not None and ledger.usage.active_seconds >= most
    return worked or (limits.deadline is not None and at >= limits.deadline.timestamp())


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingLimit:
    """What is left of one limit.

    Attributes:
        name: The limit's name in `Limits`.
        left: Round trips, calls, tokens, US dollars or seconds; never below 0.
        limit: The whole of it; for a deadline, the active time so far plus the time that is left.
    """

    name: str
    left: float
    limit: float


def remaining_limits(limits: Limits, ledger: Ledger, at: float) -> tuple[RemainingLimit, ...]:
    """List what is left of round trips, calls, tokens, cost and time, as far as ``tell_budget`` shows it to the model.

    Args:
        limits: What may be spent.
        ledger: What was spent.
        at: The time of the newest fact, in seconds since the epoch.
    """
    if limits.tell_budget is False:
        return ()
    spent = ledger.by_part
    known = [(limit, getattr(limits, limit), spent[part]) for part, limit in LIMIT_OF_PART.items()]
    if limits.deadline is not None:
        until = max(limits.deadline.timestamp() - at, 0.0)
        known.append(("deadline", until + spent["seconds"], spent["seconds"]))
    left = (
        RemainingLimit(name=name, left=max(limit - used, 0), limit=limit)
        for name, limit, used in known
        if limit is not None
    )
    return tuple(item for item in left if item.left <= item.limit * limits.tell_budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetShare:
    """What one nested run may spend of the budget around it; a part is None if that has no such limit.

    A share is reserved when the call of a nested run starts, as if it were spent; when the call ends, what was not
    spent is released. So nested runs beside each other cannot exceed the budget together, and a nested run that never
    reports back has cost its whole share.

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
        """Make a share of all that the limits of a run allow."""
        return cls(**{name: getattr(limits, limit) for name, limit in LIMIT_OF_PART.items()})

    def limits(self, deadline: datetime | None) -> Limits:
        """Convert the share to the limits of a run that has the deadline of the run around it."""
        return Limits(**{limit: getattr(self, name) for name, limit in LIMIT_OF_PART.items()}, deadline=deadline)

    def used_up(self) -> str | None:
        """Name the limit that leaves nothing for a request; a request needs no functions."""
        needed = {limit: getattr(self, name) for name, limit in LIMIT_OF_PART.items() if name != "tool_calls"}
        return next((limit for limit, value in needed.items() if value is not None and value <= 0), None)

    def less(self, spent: Consumption) -> "BudgetShare":
        """Subtract what was spent; a part may become negative."""
        used = spent.by_part
        return self._each(lambda name, own: own - used[name])

    def least(self, other: "BudgetShare") -> "BudgetShare":
        """Take the smaller of two shares, part by part."""
        given = {name: (getattr(self, name), getattr(other, name)) for name in LIMIT_OF_PART}
        return BudgetShare(
            **{name: min((one for one in both if one is not None), default=None) for name, both in given.items()}
        )

    def divided(self, by: int) -> "BudgetShare":
        """Divide each part; what can only be spent whole is rounded down."""
        return self._each(lambda name, own: own / by if name in ("cost", "seconds") else own // by)

    def whole(self) -> Consumption:
        """Convert the share to a consumption of all of it."""
        usage = Usage(completion_tokens=self.tokens or 0, cost=self.cost, active_seconds=self.seconds or 0.0)
        return Consumption(iterations=self.iterations or 0, tool_calls=self.tool_calls or 0, usage=usage)

    def at_least(self, taken: Consumption) -> Consumption:
        """Count the whole share as spent, and what was taken where it has no limit."""
        usage = taken.usage if self.tokens is None else Usage(completion_tokens=self.tokens)
        return updated(
            taken,
            iterations=taken.iterations if self.iterations is None else self.iterations,
            tool_calls=taken.tool_calls if self.tool_calls is None else self.tool_calls,
            usage=replace(usage, cost=taken.usage.cost if self.cost is None else self.cost),
        )

    def _each(self, change: Callable[[str, Any], Any]) -> "BudgetShare":
        parts = {name: getattr(self, name) for name in LIMIT_OF_PART}
        return BudgetShare(**{name: None if own is None else change(name, own) for name, own in parts.items()})


LIMIT_OF_PART = {
    "iterations": "max_iterations",
    "tool_calls": "max_tool_calls",
    "tokens": "max_total_tokens",
    "cost": "max_cost",
    "seconds": "max_active_seconds",
}
"""The limit of a run that each part of a share comes from."""


def divided(limits: Limits, ledger: Ledger, *, starting: int, by: int) -> BudgetShare | None:
    """Divide what is left of a budget, less the round trip that is kept for the answer.

    Args:
        limits: Of the run around.
        ledger: What that has spent.
        starting: How many functions are about to start, nested runs included.
        by: How many of them are nested runs.

    Returns:
        The share of each; None if it buys no round trip or no token.
    """
    left = BudgetShare.of(limits).less(ledger + Consumption(iterations=limits.iterations_kept, tool_calls=starting))
    share = left.divided(by)
    if share.tool_calls is not None:
        share = replace(share, tool_calls=max(share.tool_calls, 0))
    return share if share.used_up() is None else None


def released(ledger: Ledger, share: BudgetShare | None, spent: Consumption | None) -> Ledger:
    """Charge what a call has spent, and release the rest of its share.

    Without ``spent`` the whole share was spent, except for its time, which is measured.
    """
    if share is None:
        return ledger if spent is None else ledger + spent
    whole = share.whole()
    if spent is None:
        spent = updated(whole, usage=replace(whole.usage, active_seconds=0.0))
    ledger = ledger - whole + spent
    usage = ledger.usage  # adding and subtracting fractions leaves a picodollar or a picosecond behind
    if share.cost is not None and usage.cost is not None:
        usage = replace(usage, cost=round(usage.cost, 12))
    if share.seconds is not None:
        usage = replace(usage, active_seconds=round(usage.active_seconds, 12))
    return updated(ledger, usage=usage)
