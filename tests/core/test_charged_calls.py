"""What a call is charged: what it reports at its end, or else what it recorded before that."""

import json
from dataclasses import replace
from datetime import UTC, datetime

from planner_ext.core.facts import (
    CallFinished,
    CallsWithheld,
    Fact,
    FunctionOutcome,
    ModelAsked,
    NestedCallStarted,
)
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Budget, Left
from planner_ext.core.values import Usage
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.engine.journal import stopping_facts
from support.core import began, calls, decided, finished, replied, run_started
from support.values import each_of

USED = Usage(prompt_tokens=40, completion_tokens=2, cost=0.1)
RECORDED: list[Fact] = [
    ModelAsked(iteration=0, index=0, at=0.0),
    NestedCallStarted(iteration=0, index=0, function="g", usage=USED, at=0.0),
]
WITHHELD = CallsWithheld(
    iteration=0, indexes=(0,), answer="In doubt.", limit=None, at=0.0
)


def calling(*more: Fact) -> list[Fact]:
    """A journal up to the start of a call, and more."""
    return [run_started(), replied(calls("f")), decided(0), began(0), *more]


def ended(spent: Usage | None, outcome: FunctionOutcome = "ok") -> CallFinished:
    """The end of that call."""
    fact = finished(0, outcome=outcome, spent=spent)
    assert isinstance(fact, CallFinished)
    return fact


def test_a_call_is_charged_what_it_reports() -> None:
    """The report at its end counts, not earlier records. The time is measured by the run around."""
    spent = replace(USED, iterations=2, tool_calls=1)
    usage = fold(calling(*RECORDED, ended(spent))).usage
    assert usage == USED + Usage(
        iterations=1 + 2,
        tool_calls=1 + 1,
        active_seconds=1.0,
        calls_by_function={"f": 1},
    )


@each_of(
    "end",
    [
        ended(None),
        ended(None, "failed"),
        ended(None, "cancelled"),
        decided(0, verdict="answer"),
        WITHHELD,
    ],
    ids=["ended", "failed", "cancelled", "supplied", "left in doubt"],
)
def test_a_call_that_does_not_report_is_charged_what_it_recorded(end: Fact) -> None:
    """Its requests, its functions by name, and the tokens that it had used by the newest record."""
    usage = fold(calling(*RECORDED, end)).usage
    counted = Usage(
        iterations=1 + 1, tool_calls=1 + 1, calls_by_function={"f": 1, "g": 1}
    )
    assert usage == USED + counted + Usage(active_seconds=1.0)


def test_the_newest_record_says_what_was_used_so_far() -> None:
    """Not what came to it since the record before."""
    later = ModelAsked(iteration=0, index=0, usage=USED + USED, at=0.0)
    counted = Usage(
        iterations=1 + 2, tool_calls=1 + 1, calls_by_function={"f": 1, "g": 1}
    )
    assert fold(
        calling(*RECORDED, later, ended(None))
    ).usage == USED + USED + counted + Usage(active_seconds=1.0)


def test_a_call_in_doubt_that_runs_again_is_charged_both_lives_and_one_start() -> None:
    """What the first life recorded stays spent, beside what the second one reports."""
    facts = calling(*RECORDED, decided(0), began(0), ended(Usage(iterations=1)))
    usage = fold(facts).usage
    assert usage.iterations == 1 + 1 + 1
    assert usage.tool_calls == 1 + 1
    assert usage.total_tokens == 42


def test_a_call_in_doubt_that_is_decided_twice_is_charged_once() -> None:
    """First it waits for a person, and then it is denied."""
    deferred = calling(*RECORDED, decided(0, verdict="defer"))
    assert fold(deferred).usage.iterations == 2
    denied = fold([*deferred, decided(0, verdict="deny")]).usage
    assert denied == fold(deferred).usage


def test_a_run_that_is_ended_with_a_call_under_way_keeps_the_charge() -> None:
    """Stopping from outside takes nothing back."""
    state = fold(calling(*RECORDED))
    for fact in stopping_facts(state, reason="enough", at=0.0):
        state = apply(state, fact)
    assert (state.usage.iterations, state.usage.tool_calls) == (2, 2)


def test_what_was_spent_and_recorded_survives_json() -> None:
    """It is written and read again."""
    facts = [*RECORDED, ended(replace(USED, iterations=2))]
    assert list(load_facts(json.loads(json.dumps(dump_facts(facts))))) == facts


NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
LIMITS = Budget(
    max_iterations=9,
    max_total_tokens=50,
    deadline=NOON,
    max_calls_per_function={"f": 2, "g": 1},
)


def test_what_is_left_names_only_limits_that_are_set() -> None:
    """Less what was spent, also below 0; of a deadline the seconds."""
    spent = Usage(iterations=2, prompt_tokens=60)
    left = Left.of(
        LIMITS, spent + Usage(calls_by_function={"f": 1}), NOON.timestamp() - 5
    )
    assert left.amounts == {
        "max_iterations": 7,
        "max_total_tokens": -10,
        "deadline": 5.0,
    }
    assert left.starts == {"f": 1, "g": 1}
    assert Left.of(Budget(), spent, 0.0) == Left()


def test_the_smaller_of_two_rests_is_taken_limit_by_limit() -> None:
    """A limit that only one of them has is kept."""
    one = Left(amounts={"max_iterations": 3, "max_cost": 0.5}, starts={"f": 1})
    other = Left(
        amounts={"max_iterations": 2, "max_tool_calls": 1}, starts={"f": 2, "g": 0}
    )
    for both in (one.within(other), other.within(one)):
        assert both.amounts == {
            "max_iterations": 2,
            "max_cost": 0.5,
            "max_tool_calls": 1,
        }
        assert both.starts == {"f": 1, "g": 0}


def test_what_is_left_says_which_limits_are_those_of_the_run_around() -> None:
    """Those that only the run around has, those of which it has less, and those of which it has nothing."""
    own = Left(
        amounts={
            "max_iterations": 3,
            "max_total_tokens": -5,
            "max_active_seconds": 1.0,
            "max_cost": 0.1,
        }
    )
    around = {
        "max_iterations": 2,
        "max_total_tokens": 0,
        "max_active_seconds": 2.0,
        "max_tool_calls": 9,
    }
    left = own.within(Left(amounts=around))
    assert left.around == {"max_iterations", "max_total_tokens", "max_tool_calls"}


@each_of(
    ("left", "request_", "start"),
    [
        (Left(), None, None),
        (Left(amounts={"max_iterations": 0}), "max_iterations", None),
        (Left(amounts={"max_tool_calls": 0}), None, "max_tool_calls"),
        (
            Left(amounts={"max_total_tokens": -1}),
            "max_total_tokens",
            "max_total_tokens",
        ),
        (Left(amounts={"deadline": 0.0}), "deadline", "deadline"),
        (Left(starts={"f": 0}), None, "max_calls_per_function"),
        (
            Left(
                amounts={"max_iterations": 1, "max_tool_calls": 1, "max_cost": 0.1},
                starts={"g": 0},
            ),
            None,
            None,
        ),
    ],
)
def test_a_request_needs_no_functions_and_a_start_no_round_trip(
    left: Left, request_: str | None, start: str | None
) -> None:
    """Each is forbidden by the limits that it counts against, and by tokens, cost and time."""
    assert (left.used_up(), left.forbids_start("f")) == (request_, start)
