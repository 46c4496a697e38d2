"""`next_action`, rule by rule: the course of a run, and its round trips."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from planner_ext.core.facts import Resumed
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget, Left
from planner_ext.core.machine import (
    AskModel,
    AskPlan,
    CompleteIteration,
    Finish,
    ReviewCalls,
    RunCalls,
    next_action,
)
from planner_ext.core.state import Phase
from support.core import (
    LOOP,
    SAMPLES,
    Play,
    calls,
    run_started,
    says,
    violations,
)
from support.values import each_of


@each_of(
    ("phase", "action"),
    [
        (Phase.NEW, type(None)),
        (Phase.PLANNING, AskPlan),
        (Phase.ASKING, AskModel),
        (Phase.REVIEWING, ReviewCalls),
        (Phase.CALLING, RunCalls),
        (Phase.COMPLETING, CompleteIteration),
        (Phase.ANSWERING, Finish),
        (Phase.PAUSED, type(None)),
        (Phase.ENDED, type(None)),
    ],
)
def test_every_phase_has_its_action(phase: Phase, action: type) -> None:
    """What is next follows from the phase; a run that waits, has ended or has not begun asks for nothing."""
    assert type(next_action(fold(SAMPLES[phase]))) is action


def test_a_run_is_request_review_calls_completion_request() -> None:
    """One tool round and an answer: the actions in their order, with functions offered and nothing withheld."""
    play = Play(calls("f", "g"), says("done")).go()
    assert play.actions == [
        AskModel(iteration=0, offer=True, tool_choice="auto", withheld=None),
        ReviewCalls(iteration=0, indexes=(0, 1)),
        RunCalls(iteration=0, indexes=(0, 1)),
        CompleteIteration(iteration=0, called=True),
        AskModel(iteration=1, offer=True, tool_choice="auto", withheld=None),
        Finish(status="answered", answer="done"),
    ]
    assert violations(play.state.transcript) == []


def test_the_plan_is_asked_for_once_before_the_first_trip() -> None:
    """The plan request comes first, is charged, and is not one of the loop's trips."""
    play = Play(says("done"), plan=True).go()
    assert [type(action) for action in play.actions] == [AskPlan, AskModel, Finish]
    assert play.requests[0].iteration == 0
    assert play.state.usage.iterations == 2


def test_no_plan_request_unless_two_charged_trips_remain() -> None:
    """With a single trip left, that trip is the answer's: a plan request would leave none."""
    play = (
        Play(says("done"), plan=True)
        .add(Resumed(limits=Budget(max_iterations=1), at=0.0))
        .go()
    )
    assert AskPlan() not in play.actions
    assert play.end.answer == "done"


def test_two_charged_trips_are_enough_for_a_plan() -> None:
    """With two trips left there is a plan, and an answer to it."""
    play = Play(says("done"), plan=True, limits=Budget(max_iterations=2)).go()
    assert [type(action) for action in play.actions] == [AskPlan, AskModel, Finish]
    assert play.end.answer == "done"


def test_a_deadline_that_has_passed_leaves_no_plan_request() -> None:
    """Limits on time are checked before each request, and the plan request is one."""
    start = replace(
        run_started(
            plan=True, limits=Budget(deadline=datetime(2000, 1, 1, tzinfo=UTC))
        ),
        at=2e9,
    )
    play = Play(start=False).add(start).go()
    assert AskPlan() not in play.actions


@each_of("limit", [1, 2, 5])
def test_the_last_trip_is_reserved_for_an_answer(limit: int) -> None:
    """Under ``answer``, N trips are N requests: N - 1 with functions, and a last one without that gives the answer."""
    play = Play(*LOOP, limits=Budget(max_iterations=limit)).go()
    assert [request.offer for request in play.requests] == [True] * (limit - 1) + [
        False
    ]
    assert play.requests[-1].withheld == "max_iterations"
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_iterations"
    assert play.end.answer == "forced"
    assert play.state.usage.iterations == limit


def test_an_answer_before_the_last_trip_reaches_no_limit() -> None:
    """A run that answers while trips remain is answered, and names no limit."""
    play = Play(calls("f"), says("done"), limits=Budget(max_iterations=3)).go()
    assert play.end.status == "answered"
    assert play.end.limit is None
    assert play.end.answer == "done"


@pytest.mark.parametrize(
    ("last_trip", "choice"), [("withdraw", None), ("none", "none")]
)
def test_the_last_trip_keeps_the_schema_where_asked(
    last_trip: Any, choice: str | None
) -> None:
    """The reserved request drops the functions, or keeps their schema with the choice "none"."""
    play = Play(*LOOP, limits=Budget(max_iterations=2, last_trip=last_trip)).go()
    assert [request.tool_choice for request in play.requests] == ["auto", choice]


@pytest.mark.parametrize("on_limit", ["raise", "stop"])
def test_without_a_forced_answer_the_last_calls_are_answered_not_executed(
    on_limit: Any,
) -> None:
    """Under ``stop`` and ``raise`` every trip offers functions, and the calls of the last one are answered, not run."""
    play = Play(*LOOP, limits=Budget(max_iterations=2, on_limit=on_limit)).go()
    assert [request.offer for request in play.requests] == [True, True]
    assert play.results == [
        "result of f",
        "Not executed: The limit max_iterations=2 was reached.",
    ]
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_iterations"
    assert play.end.answer == ""
    assert play.state.usage.tool_calls == 1
    assert violations(play.state.transcript) == []


def test_under_return_calls_the_last_calls_go_back_unanswered() -> None:
    """Under ``return_calls`` the calls of the last trip end the run, unanswered, and stay out of the transcript."""
    play = Play(*LOOP, limits=Budget(max_iterations=2, on_limit="return_calls")).go()
    assert play.end.returned
    assert (play.end.status, play.end.limit) == ("limit_reached", "max_iterations")
    assert play.state.batch is not None
    assert play.state.batch.calls[0].answer is None
    assert violations(play.state.transcript) == []


@each_of("on_limit", ["raise", "stop", "return_calls"])
def test_an_answer_on_the_last_trip_is_an_answer(on_limit: Any) -> None:
    """Where the last trip was not withheld, a plain reply in it, or a final answer, is the run's own."""
    limits = Budget(max_iterations=1, on_limit=on_limit)
    assert Play(says("done"), limits=limits).go().end.status == "answered"
    final = Play(calls("final"), limits=limits).go()
    assert (final.end.status, final.end.answer) == ("answered", "42")


def test_trips_left_are_counted_where_they_are_limited() -> None:
    """What may still be asked is the limit less what was charged; without a limit it is not counted."""
    assert Left().iterations == math.inf
    state = Play(calls("f", iterations=3), limits=Budget(max_iterations=5)).go().state
    assert Left.of(state.rules.limits, state.usage, state.at).iterations == 2


@each_of("on_limit", ["answer", "stop", "raise"])
def test_a_service_that_overcharges_with_calls_ends_the_run(on_limit: Any) -> None:
    """A foreign service that spends more than is left gets no function run and no further request."""
    play = Play(
        calls("f", iterations=9), limits=Budget(max_iterations=3, on_limit=on_limit)
    ).go()
    assert (play.end.status, play.end.limit) == ("limit_reached", "max_iterations")
    assert play.state.usage.iterations == 9
    assert play.state.usage.tool_calls == 0
    assert violations(play.state.transcript) == []


def test_a_service_that_overcharges_with_text_ends_at_the_limit() -> None:
    """What a foreign service answered over its budget is kept, and the limit is named."""
    play = Play(says("late", iterations=4), limits=Budget(max_iterations=3)).go()
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_iterations"
    assert play.end.answer == "late"
    assert (
        Play(says("in time", iterations=3), limits=Budget(max_iterations=3))
        .go()
        .end.status
        == "answered"
    )


def test_a_service_that_overcharges_beside_another_limit_names_the_first() -> None:
    """The first limit that was reached names the end, also where the forced answer was overcharged."""
    limits = Budget(max_iterations=3, max_tool_calls=0)
    play = Play(calls("f"), says("late", iterations=5), limits=limits).go()
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.answer == "late"
