"""What a budget that runs share forbids: a limit like the run's own, until it is checked again."""

from typing import Any

import pytest

from planner_ext.core.facts import Fact, Resumed, SharedBudgetsChecked
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import AskModel, Finish, next_action
from support.core import (
    CALLED,
    RESUMED,
    Play,
    budget_changed,
    calls,
    completed,
    ended,
    replied,
    run_started,
    says,
    withheld,
)
from support.narrow import as_type
from support.values import each_of

NAME = "per user: max_cost"
REASON = "The limit max_cost=1.0 per user was reached."


def forbidden(*, answer: bool = False) -> SharedBudgetsChecked:
    """A shared budget forbids what is next."""
    return SharedBudgetsChecked(limit=NAME, reason=REASON, answer=answer, at=0.0)


ALLOWED = SharedBudgetsChecked(at=0.0)


def test_a_run_whose_shared_budget_is_used_up_ends_with_its_name_and_reason() -> None:
    """No request follows; the reason is the shared budget's, since the run does not know its value."""
    end = as_type(Finish, next_action(fold([run_started(), forbidden()])))
    assert end.status == "limit_reached"
    assert end.limit == NAME
    assert end.reason == REASON


@pytest.mark.parametrize("on_limit", ["stop", "answer"])
def test_the_request_that_is_reserved_for_the_answer_is_made(on_limit: Any) -> None:
    """It offers no functions, and is made where the run wants an answer at its limit."""
    action = next_action(
        fold([run_started(limits=Budget(on_limit=on_limit)), forbidden(answer=True)])
    )
    if on_limit == "answer":
        request = as_type(AskModel, action)
        assert (request.offer, request.withheld) == (False, NAME)
    else:
        assert isinstance(action, Finish)


def test_calls_that_a_shared_budget_forbids_are_answered_with_its_reason() -> None:
    """They do not run, and the run ends at that limit."""
    play = (
        Play(calls("f"), limits=Budget(on_limit="stop"))
        .go(steps=2)
        .add(forbidden())
        .go()
    )
    assert play.results == [f"Not executed: {REASON}"]
    assert (play.end.limit, play.end.reason) == (NAME, REASON)


@each_of(
    "again",
    [ALLOWED, budget_changed(), RESUMED, Resumed(limits=Budget(), at=0.0)],
    ids=lambda fact: fact.type,
)
def test_a_refusal_counts_until_it_is_checked_again(again: Fact) -> None:
    """Afterwards functions are offered, although calls were withheld because of it."""
    withheld_calls = [
        run_started(),
        *CALLED[1:],
        forbidden(),
        withheld(0, 1, limit=NAME),
        completed(),
    ]
    assert fold(withheld_calls).limit == NAME
    state = fold([*withheld_calls, again])
    assert (state.refused, state.limit) == (None, None)
    assert as_type(AskModel, next_action(state)).offer


def test_the_runs_own_limit_outlasts_a_refusal() -> None:
    """What was withheld because of it stays withheld when the shared budget allows more."""
    facts = [
        run_started(),
        *CALLED[1:],
        withheld(0, 1, limit="max_tool_calls"),
        completed(),
        forbidden(),
        ALLOWED,
    ]
    assert fold(facts).limit == "max_tool_calls"


def test_the_first_of_both_limits_is_the_runs_own() -> None:
    """A run that is beyond its own limit names that one."""
    state = fold(
        [
            run_started(limits=Budget(max_active_seconds=1.0)),
            replied(says("")),
            ended(),
            RESUMED,
            forbidden(),
        ]
    )
    end = as_type(Finish, next_action(state))
    assert end.limit == "max_active_seconds"
