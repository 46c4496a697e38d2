"""What a run may spend, what it has spent, and which limit was reached first.

Round trips and calls are exact: the machine never goes one over. Tokens and cost are checked before each request and
before each batch, so only what is then in flight, and the one forced answer, may pass them. Active time and deadline
interrupt what is in flight, and no request follows them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Literal, cast

from planner_ext.core.errors import InvalidLimitError
from planner_ext.core.sharing import Tally
from planner_ext.core.shown import shown
from planner_ext.core.values import Usage

__all__ = ["Ledger", "Left", "Limits", "left_to_tell", "spent_limit", "time_left"]


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
    def trips_kept(self) -> int:
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
class Left:
    """How much of one limit is left.

    Attributes:
        name: The limit, as `Limits` has it.
        left: Trips, calls, tokens, US dollars or seconds; never below 0.
        limit: The whole of it; of a deadline, the time worked so far and the time that is left.
    """

    name: str
    left: float
    limit: float


def left_to_tell(limits: Limits, ledger: Ledger, at: float) -> tuple[Left, ...]:
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
    known = (Left(name=name, left=max(limit - used, 0), limit=limit) for name, limit, used in limited)
    return tuple(item for item in known if item.left <= item.limit * limits.tell_budget)
