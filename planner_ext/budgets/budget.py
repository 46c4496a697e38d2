"""`SharedBudget`: limits that runs share."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, Literal

from planner_ext.budgets.store import BudgetStore, BudgetUsage
from planner_ext.core.errors import InvalidLimitError, described, shown, suggests_names
from planner_ext.core.limits import Budget
from planner_ext.core.text import is_unicode

LIMITS = {
    "iterations": "max_iterations",
    "tool_calls": "max_tool_calls",
    "tokens": "max_total_tokens",
    "cost": "max_cost",
}

_PERIODS = {"hour": "%Y-%m-%dT%H%z", "day": "%Y-%m-%d", "month": "%Y-%m", None: "all"}
"""The name of a period; an hour has its offset, since a clock that is set back repeats
it."""

_MOST_CHARACTERS = 200


@suggests_names
@dataclass(frozen=True, slots=True)
class SharedBudget:
    """Limits shared by all runs, in any process, that name this budget in the same store, with the same key.

    A request is reserved before it is sent, and a batch before it starts, in all of the
    run's shared budgets or in none: limits on round trips and calls are never exceeded.
    Tokens and cost are checked at the same moments and charged after; what is then in
    flight, of all processes, and the forced answers may exceed them. What was reserved
    and not sent or started is released.

    At a limit the run does what its own ``Budget.on_limit`` says. The one request that
    ``answer`` then makes is reserved with the run's first one, and released where it is
    not made: at a pause, and at another end. It is not made if a new period has begun
    that is used up, too. A run that begins or is resumed when nothing is left ends
    ``limit_reached`` without a request. ``limit`` of the result is
    ``"{name}: {limit}"``. A batch beyond ``max_tool_calls`` does not run, under either
    value of ``batch_over_limit``.

    Only a process that has a kept run's shared budgets, by name, continues it; any
    other gets `RunRefusedError`. A run whose process died stays charged for what may
    have been sent or started. If the store cannot be used, the run fails with
    `StoreError`, and is never unlimited; at its end this is logged instead.

    Attributes:
        name: Its name in the store, of 1 to 200 characters.
        per: The period, by the run's clock, whose end frees the budget; None has no
            end. A request and its tokens count in the period in which it is reserved.
        store: Where it is kept.
        key: Returns whose budget it is (a user, a tenant), of 1 to 200 characters,
            given the application's arguments of the run; None is one budget for all.
            Nested runs are charged to the outermost run's key.
        max_iterations: Requests, as in `Budget`, and the plan request also without
            ``charge_plan``.
        max_tool_calls: As in `Budget`; a call that runs again after a crash counts
            again.
        max_total_tokens: As in `Budget`.
        max_cost: US dollars, by the run's ``price``, or the list of ``genai-prices``.
        time_zone: In which periods begin.
        on_limit_reached: Called with the `BudgetUsage` when a limit first refuses
            something, once for each key and period, in one of the processes. Async or
            not. An exception is logged; so is a call that takes longer than ten
            seconds, which is cancelled. None logs a warning. Observers and streams get
            the fact `SharedBudgetsChecked` in any case.

    Raises:
        InvalidLimitError: If a value is invalid, or no limit is set; names the field.
    """

    name: str
    _: KW_ONLY
    store: BudgetStore
    per: Literal["hour", "day", "month"] | None = None
    key: Callable[[Mapping[str, Any]], str] | None = None
    max_iterations: int | None = None
    max_tool_calls: int | None = None
    max_total_tokens: int | None = None
    max_cost: float | None = None
    time_zone: tzinfo = UTC
    on_limit_reached: Callable[[BudgetUsage], Awaitable[None] | None] | None = None

    def __post_init__(self) -> None:
        Budget(**self.given_limits())  # pyright: ignore[reportArgumentType]  (which checks them)
        optional = "a function, or None"
        given: dict[str, Any] = {
            item.name: getattr(self, item.name) for item in fields(self)
        }
        for name, valid, expected in (
            (
                "name",
                _is_name(given["name"]),
                f"text of 1 to {_MOST_CHARACTERS} characters",
            ),
            ("store", isinstance(given["store"], BudgetStore), "a BudgetStore"),
            (
                "per",
                given["per"] in (*_PERIODS,),
                "hour, day, month, or None for no period",
            ),
            ("key", given["key"] is None or callable(given["key"]), optional),
            (
                "time_zone",
                isinstance(given["time_zone"], tzinfo),
                "a tzinfo, such as datetime.UTC",
            ),
            (
                "on_limit_reached",
                self.on_limit_reached is None or callable(self.on_limit_reached),
                optional,
            ),
        ):
            if not valid:
                raise InvalidLimitError(
                    f"{name} must be {expected}; got {shown(given[name])}."
                )
        if not self.given_limits():
            raise InvalidLimitError(
                f"A shared budget must have one of {', '.join(LIMITS.values())}; got none."
            )

    def given_limits(self) -> dict[str, float]:
        """@private The limits that are set, by name."""
        given = {name: getattr(self, name) for name in LIMITS.values()}
        return {name: value for name, value in given.items() if value is not None}

    def period(self, at: float) -> str:
        """@private Name the period of a moment, in seconds since the epoch."""
        moment = datetime.fromtimestamp(at, self.time_zone)
        return moment.strftime(_PERIODS[self.per])

    def period_end(self, at: float) -> float | None:
        """@private Return when the period of a moment ends, in seconds since the epoch; None without ``per``."""
        hour = datetime.fromtimestamp(at, self.time_zone).replace(
            minute=0, second=0, microsecond=0
        )
        day = hour.replace(hour=0, fold=0)
        match self.per:
            case None:
                return None
            case "hour":
                return hour.timestamp() + 3600
            case "day":
                end = day + timedelta(days=1)
            case "month":
                in_next_month = day.replace(day=28) + timedelta(days=4)
                end = in_next_month.replace(day=1)
        return end.timestamp()

    def key_of(self, arguments: Mapping[str, Any]) -> str:
        """@private Return the key of a run.

        Raises:
            InvalidLimitError: If ``key`` raises, or returns no text of 1 to 200
                characters.
        """
        if self.key is None:
            return ""
        try:
            key = self.key(arguments)
        except (Exception, SystemExit) as error:
            raise InvalidLimitError(
                f"The key of the shared budget {self.name!r} raised {described(error)}. Nothing was sent. "
                "Pass the arguments that it reads to the run."
            ) from error
        if not _is_name(key):
            raise InvalidLimitError(
                f"The key of the shared budget {self.name!r} must be text of 1 to {_MOST_CHARACTERS} characters; got "
                f"{shown(key)}. Nothing was sent."
            )
        return key


def _is_name(value: object) -> bool:
    if not is_unicode(value) or "\0" in value:
        return False
    return 0 < len(value) <= _MOST_CHARACTERS
