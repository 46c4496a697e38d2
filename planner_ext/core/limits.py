"""What a run may spend, what is left, and which limit was reached first."""

import math
from collections.abc import Callable, Mapping, Set
from dataclasses import field, fields, replace
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, TypeGuard, cast

from planner_ext.core.errors import InvalidLimitError, shown, suggests_names
from planner_ext.core.values import Usage, frozen

Price = Callable[[str, Usage], float]
"""Gives the price of one request in US dollars, from the model's name and the tokens
used."""


@suggests_names
@frozen
class Budget:
    """The limits of a run. Amounts start at 0 with a new goal, not when a run is resumed. None means no limit.

    Round trips and calls are never exceeded. Tokens and cost are checked before each
    request and each batch, so what is then in flight, and the one forced answer, may
    exceed them. Retries inside an SDK are not seen, and not counted.

    Attributes:
        max_iterations: Round trips, every request included: plan, steps and answer.
            Charged from ``iterations`` in each reply's metadata, at least 1 per
            request. A request that fails, is cancelled or loses its process counts as
            1, unless it did not reach the server. Checked before each request. Under
            ``on_limit="answer"`` the last one is reserved: it offers no functions, so
            that N trips give an answer.
        max_tool_calls: Functions started, failures included; denied, unknown and
            malformed calls are free. Checked before a batch, on the calls about to
            start. A function that a filter starts again (see
            `planner_ext.durable.effect`) counts again, and is checked before each
            start.
        max_total_tokens: Prompt and completion tokens, as reported; otherwise
            estimated, see `Usage.estimated_tokens`.
        max_cost: US dollars, as the run's ``price`` (see
            `planner_ext.iteration.RunOptions`) computes them. A model without a known
            price is refused before the first request.
        max_active_seconds: Working time: requests, functions, callbacks and the wait
            between iterations; not pauses, nor decisions of interceptors or a
            clarifier, since they may be persons (a `ModelClarifier` counts). Checked
            continuously. At the limit, under every ``on_limit``, requests and functions
            in flight are cancelled: the request is charged, the function answered as
            ``timed_out``. A function that does not end within a second is abandoned:
            what it does later changes nothing in the run. No request follows.
        deadline: A moment, with its time zone. Pauses and persons' decisions count,
            too, and a call that is undecided by then does not run. Otherwise as
            ``max_active_seconds``.
        max_calls_per_function: Functions started, by fully qualified name; only the
            calls beyond it are not executed.
        max_consecutive_errors: Batches in a row with a failed, unknown or malformed
            call; a clean batch resets it.
        max_repeated_calls: Starts of one function with the same arguments.
        max_repeated_denials: Batches in a row in which every call was denied.
        max_calls_per_reply: Calls in one reply, of any kind. Checked when the reply has
            arrived. If it has more, none of them runs: each is answered "not executed"
            with this limit's name, and the run continues, so that the model can make
            fewer calls.
        max_result_tokens: Tokens of one function's result, error or supplied result in
            the conversation. Checked when it is recorded, counted as for
            ``max_prompt_tokens``. Of a longer one the model reads the beginning and how
            to read on: with ``Results-read``, which is free and has the same cap. The
            facts keep the whole result, and the run continues. In a nested run the
            smaller of its own cap and that of the run around applies.
        on_limit: ``answer``: calls beyond a limit are answered "not executed" and one
            more request, without functions, asks for the answer. ``stop``: they are
            answered "not executed" and the run ends. ``raise``: as ``stop``, then
            `LimitReachedError`. ``return_calls``: the run ends with the calls
            unanswered, for the caller to run. All but ``raise`` return a value that can
            be resumed with a larger budget.
        batch_over_limit: Whether a batch beyond ``max_tool_calls`` runs no call
            (``reject_batch``) or the first calls that fit (``fill_remaining``). With
            ``on_limit="return_calls"`` none runs, and the whole batch is returned.
        last_trip: Whether a request without functions omits their schema (``withdraw``)
            or sends it with tool choice "none", for providers that refuse tool messages
            without schema. Semantic Kernel's connectors to Anthropic and Bedrock send
            one function instead, whose description says that none is left. Its
            connector to Ollama cannot send "none" either, and needs no schema.
        tell_budget: Whether the model reads what is left of round trips, tool calls,
            tokens, cost and time, as far as they are limited. A share, such as 0.25,
            mentions a limit once that share or less of it is left. The note ends the
            newest message of each request except the plan's. It is not stored: history,
            journal and the beginning of a request, which providers cache, stay the
            same.

    Raises:
        InvalidLimitError: If a value is invalid; names the field. At a door it is a
            ``PlannerInvalidConfigurationError``, see `planner_ext.errors`.
    """

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
    max_calls_per_reply: int | None = 1024
    max_result_tokens: int | None = None
    on_limit: Literal["answer", "raise", "stop", "return_calls"] = "answer"
    batch_over_limit: Literal["reject_batch", "fill_remaining"] = "reject_batch"
    last_trip: Literal["withdraw", "none"] = "withdraw"
    tell_budget: bool | float = False

    def __post_init__(self) -> None:
        for item in fields(Budget):
            problem = _problem(item.name, getattr(self, item.name))
            if problem:
                raise InvalidLimitError(problem)
        # A copy: the caller may change the mapping after it was validated.
        object.__setattr__(
            self, "max_calls_per_function", dict(self.max_calls_per_function)
        )

    @property
    def iterations_kept(self) -> int:
        """@private Round trips that are kept for the answer."""
        return 1 if self.on_limit == "answer" else 0


def tightest(first: Budget, second: Budget | None) -> Budget:
    """Take the tighter of each limit, and the first budget's behaviour at a limit."""
    if second is None:
        return first
    values: dict[str, Any] = {}
    for item in fields(Budget):
        one = getattr(first, item.name)
        other = getattr(second, item.name)
        if item.name == "max_calls_per_function":
            values[item.name] = _smaller(one, other)
        elif item.name.startswith("max_") or item.name == "deadline":
            values[item.name] = least(one, other)
        elif item.name == "tell_budget":
            values[item.name] = one or other
    return replace(first, **values)


def least(one: Any, other: Any) -> Any:
    """Return the smaller value; None means no limit."""
    return min((value for value in (one, other) if value is not None), default=None)


def is_count(value: object, *, least: int) -> TypeGuard[int]:
    """Return whether a value is a whole number from ``least`` up to 64 bits."""
    return (
        isinstance(value, int)
        and not isinstance(value, bool)
        and least <= value < 2**63
    )


def is_positive_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a finite number above 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:
        return False


def _one_of(*allowed: str) -> tuple[Callable[[object], bool], str]:
    return lambda value: value in allowed, f"be one of {', '.join(allowed)}"


_OPTIONAL = "or None for no limit"
_COUNT = partial(is_count, least=1), f"be a whole number, 1 or more, {_OPTIONAL}"
_AMOUNT = is_positive_number, f"be a number above 0, {_OPTIONAL}"
_EXPECTED: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_tool_calls": (
        partial(is_count, least=0),
        f"be a whole number, 0 or more, {_OPTIONAL}",
    ),
    "max_cost": _AMOUNT,
    "max_active_seconds": _AMOUNT,
    "deadline": (
        lambda given: isinstance(given, datetime),
        f"be a datetime, {_OPTIONAL}",
    ),
    "max_calls_per_function": (
        lambda value: isinstance(value, Mapping),
        "map fully qualified function names to counts",
    ),
    "on_limit": _one_of("answer", "raise", "stop", "return_calls"),
    "batch_over_limit": _one_of("reject_batch", "fill_remaining"),
    "last_trip": _one_of("withdraw", "none"),
    "tell_budget": (
        lambda share: (
            isinstance(share, bool) or (isinstance(share, float) and 0 < share <= 1)
        ),
        "be True, False, or a share above 0.0 and up to 1.0 (a float)",
    ),
}
"""What each limit must be, if not a `_COUNT`."""


def _problem(name: str, value: object) -> str:
    valid, expected = _EXPECTED.get(name, _COUNT)
    if not valid(value) and not (value is None and expected.endswith(_OPTIONAL)):
        return f"{name} must {expected}; got {shown(value)}."
    if isinstance(value, datetime) and value.tzinfo is None:
        return f"deadline must say its time zone; got {value!r}, which has none. Add tzinfo, for instance datetime.UTC."
    if isinstance(value, Mapping):
        for function, count in cast("Mapping[object, object]", value).items():
            if not isinstance(function, str) or not is_count(count, least=0):
                expected = "map function names to whole numbers, 0 or more"
                return (
                    f"{name} must {expected}; got {shown(count)} for {shown(function)}."
                )
    return ""


TIMES: Final = frozenset({"max_active_seconds", "deadline"})
"""The limits of time, after which no request for an answer follows."""

AMOUNTS: Final = frozenset({"max_total_tokens", "max_cost"})

OF_A_START: Final = AMOUNTS | TIMES
"""The limits on a start of a function, besides those that count starts."""

_OF_A_REQUEST: Final = OF_A_START | {"max_iterations"}


@frozen
class Left:
    """What may still be spent, of a run's limits and those around it; below 0 if exceeded.

    Attributes:
        amounts: By the limit's name in `Budget`.
        starts: By the function's fully qualified name.
        around: The limits of which the run around has less left, or nothing.
    """

    amounts: Mapping[str, float] = field(default_factory=dict[str, float])
    starts: Mapping[str, float] = field(default_factory=dict[str, float])
    around: frozenset[str] = frozenset()

    @classmethod
    def of(cls, limits: Budget, usage: Usage, at: float) -> "Left":
        """@private Subtract a run's usage from its limits, at a time in seconds since the epoch."""
        amounts: dict[str, float] = {}
        if limits.max_iterations is not None:
            amounts["max_iterations"] = limits.max_iterations - usage.iterations
        if limits.max_tool_calls is not None:
            amounts["max_tool_calls"] = limits.max_tool_calls - usage.tool_calls
        if limits.max_total_tokens is not None:
            amounts["max_total_tokens"] = limits.max_total_tokens - usage.total_tokens
        if limits.max_cost is not None:
            amounts["max_cost"] = limits.max_cost - (usage.cost or 0.0)
        if limits.max_active_seconds is not None:
            amounts["max_active_seconds"] = (
                limits.max_active_seconds - usage.active_seconds
            )
        if limits.deadline is not None:
            amounts["deadline"] = limits.deadline.timestamp() - at
        started = usage.calls_by_function
        starts = {
            name: limit - started.get(name, 0)
            for name, limit in limits.max_calls_per_function.items()
        }
        return cls(amounts=amounts, starts=starts)

    def within(self, around: "Left") -> "Left":
        """@private Take the smaller value of each limit."""
        own = self.amounts
        # An own amount below 0 counts as 0, so a run around at 0 is named.
        tighter = (
            name
            for name, left in around.amounts.items()
            if left <= max(own.get(name, math.inf), 0)
        )
        return Left(
            amounts=_smaller(own, around.amounts),
            starts=_smaller(self.starts, around.starts),
            around=frozenset(tighter),
        )

    @property
    def iterations(self) -> float:
        """@private Round trips; infinity without a limit."""
        return self.amounts.get("max_iterations", math.inf)

    def used_up(self, limits: Set[str] = _OF_A_REQUEST) -> str | None:
        """@private Name the first of these limits, by default those on a request, that leaves nothing."""
        return next(
            (
                name
                for name, left in self.amounts.items()
                if left <= 0 and name in limits
            ),
            None,
        )

    def forbids_start(self, function: str) -> str | None:
        """@private Name the limit that forbids one more start of a function."""
        if self.amounts.get("max_tool_calls", 1) <= 0:
            return "max_tool_calls"
        if self.starts.get(function, 1) <= 0:
            return "max_calls_per_function"
        return self.used_up(OF_A_START)


def _smaller(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    both = one.keys() & other.keys()
    return {**one, **other, **{name: min(one[name], other[name]) for name in both}}


@frozen
class RemainingLimit:
    """What is left of one limit.

    Attributes:
        left: Round trips, calls, tokens, US dollars or seconds; never below 0.
        limit: For a deadline, or a limit of a run around, what was used plus what is
            left.
    """

    name: str
    left: float
    limit: float


def remaining_limits(
    limits: Budget, usage: Usage, left: Left
) -> tuple[RemainingLimit, ...]:
    """List what ``tell_budget`` tells the model of what is left."""
    if limits.tell_budget is False:
        return ()
    parts = usage.by_part
    used = {name: parts[part] for part, name in LIMIT_OF_PART.items()}
    used["deadline"] = usage.active_seconds
    items = list[RemainingLimit]()
    for name, amount in left.amounts.items():
        rest = max(amount, 0)
        limit = None if name == "deadline" else getattr(limits, name)
        items.append(
            RemainingLimit(
                name=name,
                left=rest,
                limit=used[name] + rest if limit is None else limit,
            )
        )
    return tuple(item for item in items if item.left <= item.limit * limits.tell_budget)


LIMIT_OF_PART = {
    "iterations": "max_iterations",
    "tool_calls": "max_tool_calls",
    "tokens": "max_total_tokens",
    "cost": "max_cost",
    "seconds": "max_active_seconds",
}
"""The limit on each part of a usage."""
