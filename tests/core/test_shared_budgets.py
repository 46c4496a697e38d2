"""What a refusal of a shared budget changes in the core: it is a limit that is used up, until it is forgotten."""

import pytest

from planner_ext.core.limits import Budget
from planner_ext.core.machine import (
    AskModel,
    Finish,
    RunCalls,
    WithholdCalls,
    may_have_asked,
    next_action,
)
from support.core import (
    RESUMED,
    Play,
    budget_changed,
    calls,
    says,
    shared_budgets_checked,
)

REFUSED = "app: max_cost"
REASON = "The limit app: max_cost=1 was reached."


@pytest.mark.parametrize("answer", [True, False])
def test_a_refused_request_ends_the_run_or_asks_for_the_answer(*, answer: bool) -> None:
    """Only a request that is kept for it is made; else the run ends at the limit, and no request is under way."""
    play = Play().add(shared_budgets_checked(answer=answer))
    action = next_action(play.state)
    if answer:
        assert isinstance(action, AskModel)
        assert (action.offer, action.withheld) == (False, REFUSED)
    else:
        assert action == Finish(status="limit_reached", limit=REFUSED, reason=REASON)
    assert may_have_asked(play.state) is answer


def test_without_an_answer_at_limits_a_kept_request_is_not_used() -> None:
    """Under ``stop`` the run ends, even if a request was kept for the answer."""
    play = Play(limits=Budget(on_limit="stop")).add(shared_budgets_checked(answer=True))
    assert isinstance(next_action(play.state), Finish)


def test_the_answer_of_a_refused_run_names_the_budget() -> None:
    """The last reply ends the run with its text, the limit, and its value in words."""
    play = Play(says("sorry")).add(shared_budgets_checked(answer=True)).go()
    assert (play.end.status, play.end.limit) == ("limit_reached", REFUSED)
    assert (play.end.answer, play.end.reason) == ("sorry", REASON)


def test_a_refused_batch_is_withheld_until_the_refusal_is_forgotten() -> None:
    """Its calls are not executed; after another check, new limits, or a resumption they run."""
    play = Play(calls("f", "g")).go(steps=2)
    refused = shared_budgets_checked()
    withheld = next_action(play.add(refused).state)
    assert isinstance(withheld, WithholdCalls)
    assert (withheld.limit, withheld.answer) == (REFUSED, f"Not executed: {REASON}")
    for fact in (shared_budgets_checked(None), budget_changed()):
        assert isinstance(next_action(play.add(fact).state), RunCalls)
        play.add(refused)


def test_a_resumed_run_forgets_what_was_refused() -> None:
    """Also the limit because of which its calls were withheld; a limit of the run itself stays."""
    play = Play(calls("f")).go(steps=2).add(shared_budgets_checked()).go()
    assert play.end.limit == REFUSED
    again = play.add(RESUMED).state
    assert (again.refused, again.limit) == (None, None)
