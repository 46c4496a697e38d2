"""`next_action` at limits: which calls and requests they forbid, and what the run then comes to."""

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from planner_ext.core.facts import CallsWithheld, Resumed
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    IN_DOUBT,
    AskModel,
    ReviewCalls,
    WithholdCalls,
    next_action,
)
from planner_ext.core.values import Usage
from support.core import (
    Play,
    began,
    budget_changed,
    calls,
    clarified,
    decided,
    replied,
    run_started,
    says,
    violations,
    withheld,
)
from support.narrow import as_type


@pytest.mark.parametrize(
    ("policy", "results"),
    [
        ("reject_batch", ["not", "not", "not"]),
        ("fill_remaining", ["ran", "ran", "not"]),
    ],
)
def test_a_batch_over_the_call_limit(policy: Any, results: list[str]) -> None:
    """A batch over ``max_tool_calls`` runs not at all, or as far as it fits; the rest is answered; then an answer."""
    limits = Budget(max_tool_calls=2, batch_over_limit=policy)
    play = Play(calls("f", "g", "h"), calls("f"), limits=limits).go()
    assert [
        "ran" if text.startswith("result") else "not" for text in play.results
    ] == results
    assert play.state.usage.tool_calls == results.count("ran")
    assert play.requests[-1] == AskModel(
        iteration=1, offer=False, tool_choice=None, withheld="max_tool_calls"
    )
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.answer == "forced"
    assert violations(play.state.transcript) == []


def test_the_call_limit_counts_batches_as_they_are() -> None:
    """Two batches of two fill a limit of four; the fifth call is one too many."""
    play = Play(
        calls("f", "g"), calls("f", "g"), calls("f"), limits=Budget(max_tool_calls=4)
    ).go(says("x"))
    assert play.state.usage.tool_calls == 4
    assert [request.offer for request in play.requests] == [True, True, True, False]


def test_calls_that_do_not_run_are_free() -> None:
    """Denied, unknown, invalid and final-answer calls do not count as tool calls."""
    play = Play(
        calls("f", "unknown", "bad"),
        says("done"),
        verdicts={"f": "deny"},
        limits=Budget(max_tool_calls=0),
    )
    assert play.go().end.status == "answered"
    assert play.state.usage.tool_calls == 0


@pytest.mark.parametrize("on_limit", ["stop", "raise"])
def test_another_limit_ends_the_run_where_no_answer_is_wanted(on_limit: Any) -> None:
    """Under ``stop`` and ``raise`` the refused calls are answered, and no further request is made."""
    play = Play(
        calls("f", "g"), limits=Budget(max_tool_calls=1, on_limit=on_limit)
    ).go()
    assert len(play.requests) == 1
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.answer == ""
    assert "max_tool_calls=1" in play.end.reason
    assert violations(play.state.transcript) == []


@pytest.mark.parametrize("policy", ["reject_batch", "fill_remaining"])
def test_another_limit_returns_the_whole_batch(policy: Any) -> None:
    """Under ``return_calls`` a batch over the limit goes back whole; none of it has run."""
    limits = Budget(max_tool_calls=1, on_limit="return_calls", batch_over_limit=policy)
    play = Play(calls("f", "g"), limits=limits).go()
    assert play.end.returned
    assert play.state.usage.tool_calls == 0


def test_a_function_has_its_own_limit() -> None:
    """Only calls of the limited function are refused; the others of the batch run, then an answer is asked for."""
    limits = Budget(max_calls_per_function={"f": 1})
    play = Play(calls("f", "f", "g"), limits=limits).go(says("sorry"))
    assert [text.split(":")[0] for text in play.results] == [
        "result of f",
        "Not executed",
        "result of g",
    ]
    assert play.state.usage.calls_by_function == {"f": 1, "g": 1}
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_calls_per_function"
    assert play.end.answer == "sorry"


def test_a_function_is_limited_by_the_name_it_was_resolved_to() -> None:
    """What counts is the function that would run, not the name that the model used for it."""
    play = Play(calls("f"), limits=Budget(max_calls_per_function={"plugin-f": 0})).go(
        steps=1
    )
    play.add(replace(decided(0), function="plugin-f")).go(says("sorry"))
    assert play.state.usage.tool_calls == 0
    assert play.end.limit == "max_calls_per_function"


def test_the_same_call_may_be_repeated_so_often() -> None:
    """``max_repeated_calls=2`` lets the same call run twice, wherever; another call is not the same."""
    play = Play(
        calls("f", "g"), calls("f"), calls("f"), limits=Budget(max_repeated_calls=2)
    ).go(says("sorry"))
    assert play.state.usage.calls_by_function == {"f": 2, "g": 1}
    assert play.end.limit == "max_repeated_calls"
    twice = Play(calls("f", "f", "f"), limits=Budget(max_repeated_calls=2)).go(
        says("sorry")
    )
    assert [text.split(":")[0] for text in twice.results] == [
        "result of f",
        "result of f",
        "Not executed",
    ]


def test_batches_with_errors_in_a_row_end_the_run() -> None:
    """After n failed, unknown or invalid batches in a row the next request goes without functions."""
    play = Play(calls("f"), calls("unknown"), limits=Budget(max_consecutive_errors=2))
    play.outcomes["f"] = "failed"
    play.go(says("sorry"))
    assert [request.offer for request in play.requests] == [True, True, False]
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_consecutive_errors"
    assert play.end.answer == "sorry"


def test_a_clean_batch_forgives_errors() -> None:
    """Errors that are not in a row never reach the limit."""
    play = Play(
        calls("bad"),
        calls("f"),
        calls("bad"),
        says("done"),
        limits=Budget(max_consecutive_errors=2),
    ).go()
    assert play.end.status == "answered"


def test_denials_in_a_row_end_the_run() -> None:
    """After n batches denied whole the next request goes without functions."""
    play = Play(
        calls("f"),
        calls("f"),
        verdicts={"f": "deny"},
        limits=Budget(max_repeated_denials=2),
    ).go(says("sorry"))
    assert [request.offer for request in play.requests] == [True, True, False]
    assert play.end.limit == "max_repeated_denials"


def test_a_spent_limit_is_checked_before_a_batch() -> None:
    """Tokens spent by the request that asked for calls refuse those calls; then one answer is forced."""
    many = Usage(prompt_tokens=100)
    play = Play(calls("f", usage=many), limits=Budget(max_total_tokens=50)).go(
        says("sorry", usage=many)
    )
    assert play.results == ["Not executed: The limit max_total_tokens=50 was reached."]
    assert (play.end.limit, play.end.answer) == ("max_total_tokens", "sorry")
    assert len(play.requests) == 2


def test_a_spent_limit_is_checked_before_a_request() -> None:
    """What a batch spent is seen before the next request, which a limit on time leaves none of."""
    play = Play(calls("f"), limits=Budget(max_active_seconds=2)).go(says("sorry"))
    assert play.state.usage.tool_calls == 1
    assert [request.withheld for request in play.requests] == [None]
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_active_seconds"
    assert play.end.answer == ""


def test_a_deadline_is_named_with_its_moment() -> None:
    """The reason says which deadline passed, in universal time."""
    deadline = datetime(2000, 1, 1, 12, tzinfo=timezone(timedelta(hours=2)))
    start = replace(
        run_started(limits=Budget(deadline=deadline, on_limit="stop")), at=2e9
    )
    play = Play(start=False).add(start).go(says("x"))
    assert (
        play.end.reason == "The limit deadline=2000-01-01T10:00:00+00:00 was reached."
    )
    assert play.requests == []


def test_a_call_limit_that_is_passed_already_leaves_no_call() -> None:
    """Resumed with a lower limit than what was called, no call of a batch runs."""
    play = Play(calls("f", "g", "h"), calls("f", "g", "ask")).go()
    lower = Budget(max_tool_calls=2, batch_over_limit="fill_remaining")
    play.add(Resumed(limits=lower, at=0.0), clarified(index=2, iteration=1)).go(
        says("sorry")
    )
    assert [fact.indexes for fact in play.facts if isinstance(fact, CallsWithheld)] == [
        (0, 1)
    ]
    assert (
        play.results[3:5]
        == ["Not executed: The limit max_tool_calls=2 was reached."] * 2
    )
    assert play.state.usage.tool_calls == 3


def test_a_budget_that_grows_while_a_run_is_driven_lets_it_continue() -> None:
    """The limit that was reached is forgotten; what was spent counts, the time until the change included."""
    play = Play(calls("f"), limits=Budget(max_tool_calls=0)).go()
    assert play.state.limit == "max_tool_calls"
    play.add(budget_changed(Budget(max_tool_calls=1, max_iterations=3), by="ann")).go(
        calls("f"), says("done")
    )
    assert [request.offer for request in play.requests] == [True, True, False]
    assert play.end.status == "limit_reached"
    assert play.state.usage.tool_calls == 1
    assert play.state.usage.iterations == 3


def test_a_budget_that_shrinks_while_a_run_is_driven_ends_it() -> None:
    """No request follows one that is over the new limit."""
    play = Play(calls("f"), limits=Budget(max_iterations=9)).go()
    play.add(budget_changed(Budget(max_iterations=1))).go(says("never asked for"))
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_iterations"
    assert len(play.requests) == 1


def test_a_reply_with_more_calls_than_one_may_have_runs_none() -> None:
    """All are answered before any is decided, without ending the run; as many as it may have are reviewed."""
    limits = Budget(max_calls_per_reply=2)
    action = as_type(
        WithholdCalls,
        next_action(fold([run_started(limits=limits), replied(calls("f", "g", "h"))])),
    )
    assert (action.indexes, action.limit) == ((0, 1, 2), None)
    assert "max_calls_per_reply=2 calls, and this one has 3" in action.answer
    assert isinstance(
        next_action(fold([run_started(limits=limits), replied(calls("f", "g"))])),
        ReviewCalls,
    )


@pytest.mark.parametrize(
    ("on_limit", "returned"), [("stop", False), ("return_calls", True)]
)
def test_the_end_at_a_limit_says_which_and_its_value(
    on_limit: Any, returned: bool
) -> None:
    """Also where the calls go back unanswered."""
    play = Play(calls("f"), limits=Budget(max_tool_calls=0, on_limit=on_limit)).go()
    assert play.end.status == "limit_reached"
    assert play.end.limit == "max_tool_calls"
    assert play.end.returned == returned
    assert play.end.reason == "The limit max_tool_calls=0 was reached."


def test_the_limit_of_a_function_is_named_without_the_other_functions() -> None:
    """A model reads no names of functions that it was not shown."""
    play = Play(
        calls("f"),
        says("sorry"),
        limits=Budget(max_calls_per_function={"f": 0, "secret": 1}),
    ).go()
    assert play.results == [
        "Not executed: The limit max_calls_per_function was reached."
    ]


def test_only_open_calls_are_refused_at_a_limit() -> None:
    """A call that has its answer keeps it."""
    play = Play(
        calls("unknown", "f"), limits=Budget(max_iterations=1, on_limit="stop")
    ).go()
    assert play.results == [
        "answer to unknown",
        "Not executed: The limit max_iterations=1 was reached.",
    ]


def test_a_call_in_doubt_is_not_said_to_have_not_run_at_a_limit() -> None:
    """It is answered first, with what is known of it; the others are refused after it."""
    limits = Budget(max_iterations=1, on_limit="stop")
    facts = [
        run_started(limits=limits),
        replied(calls("f", "g")),
        decided(0),
        decided(1, "g"),
        began(0),
    ]
    first = as_type(WithholdCalls, next_action(fold(facts)))
    assert first.indexes == (0,)
    assert first.answer == IN_DOUBT
    assert first.limit == "max_iterations"
    second = as_type(WithholdCalls, next_action(fold([*facts, withheld(0)])))
    assert (second.indexes, second.answer) == (
        (1,),
        "Not executed: The limit max_iterations=1 was reached.",
    )


def test_calls_with_different_keys_are_limited_apart() -> None:
    """Each function has its own count, and a function without one is not limited by those of the others."""
    limits = Budget(max_calls_per_function={"f": 1, "g": 2})
    play = Play(
        calls("f", "g", "h", "f", "g", "h", "g"), says("done"), limits=limits
    ).go()
    refused = [
        place
        for place, result in enumerate(play.results)
        if result.startswith("Not executed")
    ]
    assert refused == [3, 6]


def test_the_model_reads_what_is_left_where_this_is_wanted() -> None:
    """The request carries what is left before it; without ``tell_budget`` nothing."""
    limits = Budget(max_iterations=5, tell_budget=True)
    (told,) = as_type(AskModel, next_action(fold([run_started(limits=limits)]))).left
    assert (told.name, told.left) == ("max_iterations", 5)
    assert (
        as_type(
            AskModel, next_action(fold([run_started(limits=Budget(max_iterations=5))]))
        ).left
        == ()
    )
