"""Shares of a budget: how one is divided, and what becomes of what was set aside."""

import json
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import pytest

from planner_ext.core.accounts import Account, Tab
from planner_ext.core.facts import CallFinished, CallStarted, CallsWithheld, Fact, ModelAsked, NestedCallStarted
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Budget, BudgetShare, Consumption, Ledger, divided, released
from planner_ext.core.machine import RunCalls, WithholdCalls, next_action
from planner_ext.core.values import Usage
from planner_ext.engine.document import dump_facts, load_facts
from planner_ext.engine.journal import stopping_facts
from support.core import budget_changed, calls, decided, finished, replied, run_started
from support.narrow import present

NOTHING = Consumption()
SHARE = BudgetShare(iterations=3, tool_calls=2, tokens=90, cost=0.3, seconds=20.0)
LIMITS = Budget(max_iterations=9, max_tool_calls=9, max_total_tokens=500, max_cost=2.0, max_active_seconds=100.0)


def started(share: BudgetShare | None = SHARE) -> list[Fact]:
    """A journal up to the start of a nested call."""
    start = CallStarted(iteration=0, index=0, call_id="c0", function="f", reserved=share, at=0.0)
    return [run_started(limits=LIMITS), replied(calls("f")), decided(0, nested=True), start]


def ended(spent: Consumption | None, **more: Any) -> CallFinished:
    """The end of that call."""
    fact = finished(0, **more)
    assert isinstance(fact, CallFinished)
    return CallFinished(**{name: getattr(fact, name) for name in _FIELDS}, spent=spent)


_FIELDS = ("iteration", "index", "call_id", "function", "outcome", "result", "at")


def test_the_trip_that_is_kept_for_the_answer_is_in_no_share() -> None:
    """Of 10 trips with one used, 8 are divided under ``answer`` and 9 otherwise; the rest of a division is left."""
    used = Ledger(iterations=1)
    assert divided(Budget(max_iterations=10), used, starting=3, by=3) == BudgetShare(iterations=2)
    assert divided(Budget(max_iterations=10, on_limit="stop"), used, starting=3, by=3) == BudgetShare(iterations=3)


def test_calls_that_are_about_to_start_are_in_no_share() -> None:
    """Of 10 calls with two used and four about to start, four are divided; none left is a share without functions."""
    used = Ledger(tool_calls=2)
    assert divided(Budget(max_tool_calls=10), used, starting=4, by=2) == BudgetShare(tool_calls=2)
    assert divided(Budget(max_tool_calls=6), used, starting=4, by=1) == BudgetShare(tool_calls=0)


def test_without_limits_a_share_has_none() -> None:
    """What is not limited around is not limited inside."""
    share = divided(Budget(), Ledger(iterations=50), starting=1, by=1)
    assert share == BudgetShare()
    assert present(share).limits(None) == Budget(max_calls_per_reply=None)


@pytest.mark.parametrize(
    ("limits", "ledger"),
    [
        (Budget(max_iterations=3), Ledger(iterations=1)),
        (Budget(max_total_tokens=1), Ledger()),
        (Budget(max_cost=0.5), Ledger(usage=Usage(cost=0.5))),
        (Budget(max_active_seconds=1.0), Ledger(usage=Usage(active_seconds=2.0))),
    ],
)
def test_a_share_that_buys_no_request_is_none(limits: Budget, ledger: Ledger) -> None:
    """Two nested runs need at least one trip, one token and some money and time each."""
    assert divided(limits, ledger, starting=2, by=2) is None


def test_a_share_counts_as_spent_while_its_call_runs() -> None:
    """Whatever looks at the ledger meanwhile sees the share in it, beside the call itself."""
    ledger = fold(started()).ledger
    assert (ledger.iterations, ledger.tool_calls) == (1 + 3, 1 + 2)
    assert (ledger.usage.total_tokens, ledger.usage.cost, ledger.usage.active_seconds) == (90, 0.3, 21.0)


def test_what_was_not_spent_comes_back_exactly() -> None:
    """After the call the ledger has what was spent, to the last decimal; the time is measured by the run around."""
    usage = Usage(prompt_tokens=40, completion_tokens=2, cost=0.1)
    ledger = fold([*started(), ended(Consumption(iterations=2, tool_calls=1, usage=usage))]).ledger
    assert (ledger.iterations, ledger.tool_calls) == (1 + 2, 1 + 1)
    assert ledger.usage == Usage(prompt_tokens=40, completion_tokens=2, cost=0.1, active_seconds=1.0)


def test_whoever_does_not_say_what_it_spent_has_spent_all() -> None:
    """A failed or cancelled nested call costs its share, but for the time, which the run around measures."""
    for fact in [ended(None), ended(None, outcome="failed"), ended(None, outcome="cancelled")]:
        ledger = fold([*started(), fact]).ledger
        assert (ledger.iterations, ledger.tool_calls, ledger.usage.total_tokens, ledger.usage.cost) == (4, 3, 90, 0.3)
        assert ledger.usage.active_seconds == 1.0


def test_a_nested_call_in_doubt_costs_its_share_and_another_one_when_it_runs_again() -> None:
    """A started, unfinished call that a person has run again gets a share anew; the lost one stays spent, its time not.

    The call itself is charged once, however often it starts.
    """
    first = started()
    again = [
        decided(0, nested=True),
        CallStarted(**{**_fields(first[-1]), "reserved": BudgetShare(iterations=2, seconds=3)}),
    ]
    ledger = fold([*first, *again, ended(Consumption(iterations=1))]).ledger
    assert (ledger.iterations, ledger.tool_calls, ledger.usage.active_seconds) == (1 + 3 + 1, 1 + 2, 1.0)


def test_a_nested_call_in_doubt_that_does_not_run_again_keeps_no_time() -> None:
    """Supplied by a person, or left in doubt with a run that ends: what it may have spent is charged, and no time."""
    first = started()
    supplied = decided(0, verdict="answer", nested=True)
    left = CallsWithheld(iteration=0, indexes=(0,), answer="In doubt.", limit=None, at=0.0)
    for fact in (supplied, left):
        ledger = fold([*first, fact]).ledger
        assert (ledger.iterations, ledger.tool_calls, ledger.usage.active_seconds) == (1 + 3, 1 + 2, 1.0)


def _fields(fact: Fact) -> dict[str, object]:
    return {name: getattr(fact, name) for name in ("iteration", "index", "call_id", "function", "at")}


def test_a_run_that_is_ended_with_a_nested_call_under_way_keeps_the_charge() -> None:
    """Stopping from outside takes nothing back."""
    state = fold(started())
    for fact in stopping_facts(state, reason="enough", at=0.0):
        state = apply(state, fact)
    assert (state.ledger.iterations, state.ledger.tool_calls) == (4, 3)


def test_the_machine_divides_when_the_batch_starts() -> None:
    """Each nested call of a batch gets an equal share; plain calls beside them take none."""
    facts = [
        run_started(limits=Budget(max_iterations=8, max_tool_calls=9)),
        replied(calls("f", "g", "f")),
        decided(0, nested=True),
        decided(1, "g"),
        decided(2, nested=True),
    ]
    share = BudgetShare(iterations=3, tool_calls=3)
    assert next_action(fold(facts)) == RunCalls(iteration=0, indexes=(0, 1, 2), share=share)


def test_the_machine_withholds_nested_calls_that_cannot_be_paid_and_runs_the_others() -> None:
    """No limit ends the run for it: the model is told, and goes on."""
    facts: list[Fact] = [
        run_started(limits=Budget(max_iterations=3)),
        replied(calls("f", "g", "f")),
        decided(0, nested=True),
        decided(1, "g"),
        decided(2, nested=True),
    ]
    action = next_action(fold(facts))
    assert isinstance(action, WithholdCalls)
    assert (action.indexes, action.limit) == ((0, 2), None)


def test_shares_survive_json_and_older_journals_have_none() -> None:
    """What was set aside and spent is written and read again; facts without it fold as they did."""
    facts = [started()[-1], ended(Consumption(iterations=2, usage=Usage(cost=0.1)))]
    data = json.loads(json.dumps(dump_facts(facts)))
    assert list(load_facts(data)) == facts
    del data[0]["reserved"], data[1]["spent"]
    assert list(load_facts(data)) == [started(None)[-1], ended(None)]


def test_what_functions_may_take_follows_a_budget_that_changes() -> None:
    """At once, and less what the run has spent and what it keeps for its answer."""
    facts = [*started(None), budget_changed(Budget(max_iterations=5, max_tool_calls=3))]
    account = Account(lambda: fold(facts), None, nullcontext())
    assert (account.left().iterations, account.left().tool_calls, account.left().tokens) == (3, 2, None)


async def never_again() -> bool:
    """Allow no further start."""
    return False


def test_what_running_calls_have_spent_is_known_before_it_is_recorded() -> None:
    facts = started(None)
    account = Account(lambda: fold(facts), None, nullcontext())
    with Tab(account, 0, None, never_again) as tab, Tab(account, 1, SHARE, never_again) as shared:
        assert account.unrecorded() == {1: Consumption()}
        tab.charge(Consumption(iterations=1))
        tab.expect("request", Usage(prompt_tokens=7))
        shared.lost = True
        whole = SHARE.at_least(NOTHING)
        assert account.unrecorded() == {0: Consumption(iterations=1, usage=Usage(prompt_tokens=7)), 1: whole}
        tab.charge(Consumption(usage=Usage(prompt_tokens=9)), instead_of="request")
        assert account.unrecorded() == {0: Consumption(iterations=1, usage=Usage(prompt_tokens=9)), 1: whole}
    assert tab.left() == BudgetShare(iterations=0, tool_calls=0), "a call that has ended takes nothing more"


def test_a_share_becomes_the_limits_of_the_run_inside() -> None:
    """Part by part, with the deadline of the run around it."""
    noon = datetime(2030, 1, 1, 12, tzinfo=UTC)
    assert SHARE.limits(noon) == Budget(
        max_iterations=3,
        max_tool_calls=2,
        max_total_tokens=90,
        max_cost=0.3,
        max_active_seconds=20.0,
        deadline=noon,
        max_calls_per_reply=None,
    )


def test_parts_without_a_limit_take_nothing() -> None:
    """A share without limits is no consumption, and an unknown cost takes nothing of one that is limited."""
    assert BudgetShare().whole() == Consumption()
    assert BudgetShare(cost=1.0).less(Consumption()) == BudgetShare(cost=1.0)


def test_reserving_and_releasing_leaves_no_fraction_behind() -> None:
    """Below a picodollar and a picosecond nothing is counted where a share was taken and came back."""
    amount = 0.1 + 0.2 + 4e-13
    money = released(
        Ledger(usage=Usage(cost=amount)), BudgetShare(cost=0.2), Consumption(usage=Usage(cost=0.0)), NOTHING
    )
    time = released(Ledger(usage=Usage(active_seconds=amount)), BudgetShare(seconds=0.2), Consumption(), NOTHING)
    assert (money.usage.cost, time.usage.active_seconds) == (0.1, 0.1)


def test_a_share_that_limits_neither_money_nor_time_rounds_neither() -> None:
    """What was charged before stays to the last digit."""
    usage = Usage(cost=0.1234567890123456, active_seconds=0.1234567890123456)
    assert released(Ledger(iterations=4, usage=usage), BudgetShare(iterations=3), Consumption(), NOTHING).usage == usage
    assert released(Ledger(tool_calls=2, usage=usage), None, None, NOTHING).usage == usage


def test_a_call_in_doubt_that_is_decided_twice_releases_its_share_once() -> None:
    """First it waits for a person, and then it is denied: time and requests are settled at the first of both."""
    deferred = [*started(), decided(0, verdict="defer", nested=True)]
    assert fold([*deferred, decided(0, verdict="deny")]).ledger.usage == fold(deferred).ledger.usage
    assert fold(deferred).ledger.usage.active_seconds == 1.0

    recorded = [*started(None), ModelAsked(iteration=0, index=0, at=0.0), decided(0, verdict="defer")]
    assert fold(recorded).ledger.iterations == 2
    assert fold([*recorded, decided(0, verdict="deny")]).ledger.iterations == 2


@pytest.mark.parametrize(("tool_calls", "charged"), [(None, 1), (5, 5)])
def test_the_calls_of_a_nested_run_are_counted_by_function_if_it_does_not_report(
    tool_calls: int | None, charged: int
) -> None:
    """A share has calls only where these are limited, and none of a function: those that were recorded count."""
    nested = NestedCallStarted(iteration=0, index=0, function="g", at=0.0)
    share = BudgetShare(iterations=3, tool_calls=tool_calls)
    ledger = fold([*started(share), nested, ended(None)]).ledger
    assert (ledger.iterations, ledger.tool_calls) == (4, 1 + charged)
    assert ledger.calls_by_function == {"f": 1, "g": 1}
