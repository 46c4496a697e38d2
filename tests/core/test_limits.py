"""What `Budget` accepts, and which limit `Left` names."""

import dataclasses
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from planner_ext.core.errors import InvalidLimitError, PlannerExtError
from planner_ext.core.limits import (
    OF_A_START,
    Budget,
    Left,
    RemainingLimit,
    is_positive_number,
    remaining_limits,
    tightest,
)
from planner_ext.core.values import Usage
from support.values import each_of

COUNTS = [
    "max_iterations",
    "max_tool_calls",
    "max_total_tokens",
    "max_consecutive_errors",
    "max_repeated_calls",
    "max_repeated_denials",
    "max_calls_per_reply",
]
AMOUNTS = ["max_cost", "max_active_seconds"]
CHOICES = {
    "on_limit": ("answer", "raise", "stop", "return_calls"),
    "batch_over_limit": ("reject_batch", "fill_remaining"),
    "last_trip": ("withdraw", "none"),
}
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def refused(**limits: Any) -> str:
    """Return the message with which a limit is refused."""
    with pytest.raises(InvalidLimitError) as caught:
        Budget(**limits)
    return str(caught.value)


@each_of("value", [-1, True, False, 1.0, "3", math.nan, [], b"1"])
@each_of("name", COUNTS)
def test_a_count_takes_whole_numbers_only(name: str, value: object) -> None:
    """Anything but a whole number is refused; the message names the field, what it takes, what it got, the way out."""
    message = refused(**{name: value})
    assert message.startswith(f"{name} must be a whole number")
    assert repr(value) in message
    assert "None for no limit" in message


@each_of("name", COUNTS)
def test_zero_is_a_limit_for_tool_calls_alone(name: str) -> None:
    """A run without any tool call makes sense; a run without a request, or without an error to allow, does not."""
    if name == "max_tool_calls":
        assert Budget(max_tool_calls=0).max_tool_calls == 0
    else:
        assert "1 or more" in refused(**{name: 0})


@each_of("value", [0, 0.0, -0.5, True, "1", math.nan, math.inf, -math.inf, 1j, 10**400])
@each_of("name", AMOUNTS)
def test_an_amount_takes_finite_numbers_above_zero(name: str, value: object) -> None:
    """Cost and seconds are refused where they could never be spent or never be reached, naming the field."""
    assert refused(**{name: value}).startswith(f"{name} must be a number above 0")
    assert is_positive_number(value) is False


@each_of("value", ["2030-01-01", 1893456000.0, NOON.date(), timedelta(hours=1), True])
def test_a_deadline_is_a_datetime(value: object) -> None:
    """A deadline of another type is refused, naming the field."""
    assert refused(deadline=value).startswith("deadline must be a datetime")


def test_a_deadline_says_its_time_zone() -> None:
    """A naive deadline would mean another moment on another machine: it is refused, and the message says the cure."""
    message = refused(deadline=NOON.replace(tzinfo=None))
    assert message.startswith("deadline must say its time zone")
    assert "tzinfo" in message


@each_of("value", [None, [("f", 1)], "f", 3])
def test_the_limits_per_function_are_a_mapping(value: object) -> None:
    """Anything but a mapping is refused, naming the field."""
    assert refused(max_calls_per_function=value).startswith(
        "max_calls_per_function must map"
    )


@each_of(
    "value",
    [{"f": -1}, {"f": True}, {"f": 1.5}, {"f": "1"}, {"f": None}, {1: 1}, {None: 1}],
)
def test_a_limit_per_function_maps_a_name_to_a_count(value: dict[Any, Any]) -> None:
    """A name that is not a string, or a count that is not a whole number, is refused, naming the field and entry."""
    message = refused(max_calls_per_function=value)
    assert message.startswith(
        "max_calls_per_function must map function names to whole numbers"
    )
    assert all(repr(part) in message for pair in value.items() for part in pair)


@each_of("value", ["", "ANSWER", None, True, 0, ["answer"]])
@each_of("name", CHOICES)
def test_a_choice_takes_its_own_words_only(name: str, value: object) -> None:
    """Another word is refused, and the message lists those that are taken."""
    message = refused(**{name: value})
    assert message.startswith(f"{name} must be one of")
    assert all(choice in message for choice in CHOICES[name])


@each_of(
    ("name", "value"), [(name, value) for name in CHOICES for value in CHOICES[name]]
)
def test_every_word_of_a_choice_is_taken(name: str, value: Any) -> None:
    """Each documented word is accepted."""
    assert getattr(Budget(**{name: value}), name) == value


def test_meaningful_limits_are_kept_as_given() -> None:
    """Valid values pass unchanged, and without any the run is unlimited and answers at a limit."""
    given: dict[str, Any] = {name: 1 for name in COUNTS} | {
        "max_cost": 1,
        "max_active_seconds": 0.5,
        "deadline": NOON,
    }
    limits = Budget(**given, max_calls_per_function={"f": 0})
    assert {name: getattr(limits, name) for name in given} == given
    assert limits.max_calls_per_function == {"f": 0}
    unlimited = [name for name in given if name != "max_calls_per_reply"]
    assert all(getattr(Budget(), name) is None for name in unlimited)
    assert Budget().on_limit == "answer"


def test_limits_refuse_by_an_error_of_this_package() -> None:
    """One root catches everything that is raised on purpose."""
    assert issubclass(InvalidLimitError, PlannerExtError)
    assert not issubclass(InvalidLimitError, ValueError)


def spent(limits: Budget, usage: Usage, at: float) -> str | None:
    """Name the first limit on tokens, cost or time that is used up."""
    return Left.of(limits, usage, at).used_up(OF_A_START)


def remaining(limits: Budget, usage: Usage, at: float) -> tuple[RemainingLimit, ...]:
    """List what the model reads of a run's own limits."""
    return remaining_limits(limits, usage, Left.of(limits, usage, at))


SPENT: dict[str, tuple[Budget, Usage, Usage]] = {
    "max_total_tokens": (
        Budget(max_total_tokens=10),
        Usage(prompt_tokens=5, completion_tokens=4),
        Usage(prompt_tokens=5, completion_tokens=5),
    ),
    "max_cost": (Budget(max_cost=0.5), Usage(cost=0.49), Usage(cost=0.5)),
    "max_active_seconds": (
        Budget(max_active_seconds=2),
        Usage(active_seconds=1.9),
        Usage(active_seconds=2.0),
    ),
}


@each_of("name", SPENT)
def test_a_limit_is_spent_when_it_is_reached(name: str) -> None:
    """Below its limit nothing is named; at it, the field is."""
    limits, below, reached = SPENT[name]
    assert spent(limits, below, 0.0) is None
    assert spent(limits, reached, 0.0) == name


def test_a_deadline_is_spent_from_its_moment_on() -> None:
    """A deadline is compared with the time of the newest fact."""
    limits = Budget(deadline=NOON)
    assert spent(limits, Usage(), NOON.timestamp() - 1) is None
    assert spent(limits, Usage(), NOON.timestamp()) == "deadline"


def test_a_deadline_means_its_moment_in_any_time_zone() -> None:
    """The same moment, written in another time zone, is the same deadline."""
    far = datetime.fromisoformat("2030-01-01T22:00:00+10:00")
    assert spent(Budget(deadline=far), Usage(), NOON.timestamp()) == "deadline"


def test_an_unknown_price_costs_nothing_yet() -> None:
    """Where no cost was reported, the cost limit is not reached."""
    assert spent(Budget(max_cost=0.01), Usage(prompt_tokens=10**9), 0.0) is None


def test_the_first_of_several_spent_limits_is_named() -> None:
    """With everything spent at once, one name is given, always the same."""
    everything = {
        field.name: getattr(limits, field.name)
        for limits, _, _ in SPENT.values()
        for field in dataclasses.fields(limits)
        if field.name in SPENT and getattr(limits, field.name) is not None
    }
    usage = Usage(prompt_tokens=99, cost=99.0, active_seconds=99.0)
    assert spent(Budget(**everything), usage, 0.0) == "max_total_tokens"


def test_usage_adds_up_and_keeps_an_unknown_cost_unknown() -> None:
    """Tokens and seconds are summed; the cost is unknown only as long as no part of it is known."""
    first = Usage(
        prompt_tokens=1,
        completion_tokens=2,
        cached_tokens=3,
        active_seconds=0.5,
        estimated_tokens=4,
    )
    priced = Usage(
        prompt_tokens=10,
        completion_tokens=20,
        cached_tokens=30,
        cost=0.25,
        active_seconds=1.0,
        estimated_tokens=40,
    )
    total = first + priced
    assert total == Usage(
        prompt_tokens=11,
        completion_tokens=22,
        cached_tokens=33,
        cost=0.25,
        active_seconds=1.5,
        estimated_tokens=44,
    )
    assert total.total_tokens == 33
    assert (first + first).cost is None


def test_limits_do_not_change_when_the_callers_mapping_does() -> None:
    """Limits are a value: a change of the caller's own dict does not change what was validated."""
    given = {"f": 1}
    limits = Budget(max_calls_per_function=given)
    given["f"] = -5
    assert limits.max_calls_per_function == {"f": 1}


@each_of("share", [True, False, 0.001, 1.0])
def test_tell_budget_takes_true_false_or_a_share(share: bool | float) -> None:
    """True, False and shares up to the whole are kept as given."""
    assert Budget(tell_budget=share).tell_budget is share


@each_of("share", [0.0, 1.5, -0.5, math.nan, 1, 0, None, "0.5"])
def test_an_invalid_share_is_refused(share: Any) -> None:
    """A share is a float above 0.0 and up to 1.0: the number 1 could mean True or the whole."""
    assert refused(tell_budget=share).startswith(
        "tell_budget must be True, False, or a share above 0.0"
    )


ALL = Budget(
    max_iterations=10,
    max_tool_calls=20,
    max_total_tokens=1000,
    max_cost=2.0,
    max_active_seconds=100.0,
    deadline=NOON,
    tell_budget=True,
)
USED = Usage(
    iterations=4, tool_calls=5, prompt_tokens=900, cost=1.5, active_seconds=30.0
)


def test_what_is_left_is_computed_for_each_limit() -> None:
    """A deadline reads as the time until it, of that and the active time so far together."""
    told = remaining(ALL, USED, NOON.timestamp() - 20)
    assert [(item.name, item.left, item.limit) for item in told] == [
        ("max_iterations", 6, 10),
        ("max_tool_calls", 15, 20),
        ("max_total_tokens", 100, 1000),
        ("max_cost", 0.5, 2.0),
        ("max_active_seconds", 70.0, 100.0),
        ("deadline", 20.0, 50.0),
    ]
    assert remaining(dataclasses.replace(ALL, tell_budget=False), USED, 0.0) == ()
    assert remaining(Budget(tell_budget=True), USED, 0.0) == ()


def test_what_is_left_is_never_below_zero() -> None:
    """What in-flight requests took beyond a limit, and a deadline that has passed, is 0 left."""
    over = Usage(iterations=11, prompt_tokens=2000, active_seconds=1.0)
    told = remaining(ALL, over, NOON.timestamp() + 60)
    left = {item.name: (item.left, item.limit) for item in told}
    assert left["max_iterations"] == (0, 10)
    assert left["max_total_tokens"] == (0, 1000)
    assert left["deadline"] == (0.0, 1.0)


def test_a_limit_is_mentioned_once_its_share_is_reached() -> None:
    """A share of one half mentions what is half used up exactly, and nothing before."""
    half = Budget(max_iterations=10, max_tool_calls=10, tell_budget=0.5)
    told = remaining(half, Usage(iterations=5, tool_calls=4), 0.0)
    assert [item.name for item in told] == ["max_iterations"]


def test_of_two_budgets_the_tighter_limit_holds() -> None:
    """Each limit is the smaller of both, or the one that is given; the behaviour is the first one's."""
    one = Budget(
        max_iterations=3,
        max_tool_calls=9,
        max_calls_per_function={"f": 1, "g": 5, "i": 1},
        on_limit="stop",
    )
    other = Budget(
        max_iterations=5,
        max_tool_calls=2,
        max_total_tokens=7,
        deadline=NOON,
        max_calls_per_function={"g": 2, "h": 3, "i": 4},
        on_limit="raise",
        tell_budget=0.5,
        max_calls_per_reply=None,
    )
    assert tightest(one, other) == Budget(
        max_iterations=3,
        max_tool_calls=2,
        max_total_tokens=7,
        deadline=NOON,
        max_calls_per_function={"f": 1, "g": 2, "h": 3, "i": 1},
        on_limit="stop",
        tell_budget=0.5,
    )
    assert tightest(one, None) is one


def test_what_was_taken_back_is_gone() -> None:
    """A consumption less itself is empty: no function keeps a count of 0."""
    spent = Usage(
        iterations=2, tool_calls=3, prompt_tokens=4, calls_by_function={"f": 2, "g": 1}
    )
    assert spent - spent == Usage()
    assert (spent - Usage(calls_by_function={"f": 1})).calls_by_function == {
        "f": 1,
        "g": 1,
    }
