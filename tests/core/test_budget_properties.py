"""What holds of every budget and every model: exact where it says so, first come first named, extendable.

``PLANNER_EXT_EXAMPLES=5000`` looks longer, as in ``test_properties``.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import pairwise
from typing import TypeGuard

from hypothesis import event, given
from hypothesis import strategies as st
from test_properties import finished, prefixes

from planner_ext.approval.decisions import Approve, Deny
from planner_ext.core.facts import (
    CallFinished,
    CallStarted,
    CallsWithheld,
    Ended,
    Fact,
    ModelReplied,
    Paused,
    Planned,
    Resumed,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import OF_A_START, Budget, Left, remaining_limits
from planner_ext.core.machine import AskModel, next_action
from planner_ext.core.state import State
from support.examples import tried
from support.property_world import Plan, World, honest, plans, through_json

UNLIMITED = Budget()


def steps(facts: Sequence[Fact]) -> list[tuple[State, Fact]]:
    """Each fact but the first, with the state in which it happened."""
    return [
        (state, facts[place])
        for place, (_, state) in enumerate(prefixes(facts)[:-1], start=1)
    ]


def spent(state: State) -> str | None:
    """Name the limit that is used up in a state, of those that are checked before each request and batch."""
    limits = state.rules.limits
    in_row = {
        "max_consecutive_errors": (limits.max_consecutive_errors, state.errors_in_row),
        "max_repeated_denials": (limits.max_repeated_denials, state.denials_in_row),
    }
    reached = (
        name
        for name, (limit, count) in in_row.items()
        if limit is not None and count >= limit
    )
    return Left.of(limits, state.usage, state.at).used_up(OF_A_START) or next(
        reached, None
    )


@tried(120)
@given(plans.map(honest))
def test_nothing_passes_a_limit_but_what_was_in_flight(plan: Plan) -> None:
    """Once a limit is used up no batch begins, and no request is made but the one forced answer; trips stay exact."""
    world = World(plan)
    facts = finished(world)
    limits = plan.rules.limits
    made = [
        state
        for state, fact in steps(facts)
        if isinstance(fact, ModelReplied | Planned)
    ]
    late = [state for state in made if spent(state) is not None]
    assert len(late) <= (limits.on_limit == "answer")
    begun = [
        state
        for (_, before), (state, fact) in pairwise(steps(facts))
        if isinstance(fact, CallStarted)
        and not isinstance(before, CallStarted | CallFinished)
    ]
    assert [spent(state) for state in begun] == [None] * len(begun)
    assert (
        limits.max_iterations is None
        or world.requests + world.plan_requests * plan.rules.charge_plan
        <= (limits.max_iterations)
    )
    assert limits.max_tool_calls is None or world.begun.total() <= limits.max_tool_calls


@tried(120)
@given(plans)
def test_the_first_limit_that_was_met_is_the_one_named(plan: Plan) -> None:
    """Even if another one is used up later, a run that a limit ends names the one that first withheld anything."""
    facts = finished(World(plan))
    end = facts[-1]
    assert isinstance(end, Ended)
    met = [
        fact.limit if isinstance(fact, CallsWithheld) else fact.withheld
        for fact in facts
        if _may_withhold(fact)
    ]
    named = [name for name in met if name is not None]
    if end.limit is not None and named:
        assert end.limit == named[0]


def _may_withhold(fact: Fact) -> TypeGuard[CallsWithheld | ModelReplied]:
    return isinstance(fact, CallsWithheld | ModelReplied)


@tried(60)
@given(plans)
def test_a_usage_outlives_its_process(plan: Plan) -> None:
    """At each pause and end, the usage read from the journal's text is the same, and resuming charges nothing."""
    for facts, state in prefixes(finished(World(plan))):
        if isinstance(facts[-1], Paused | Ended):
            read = through_json(facts)
            assert fold(read).usage == state.usage
            resumed = fold([*read, Resumed(limits=UNLIMITED, at=state.at + 1e6)]).usage
            assert resumed == state.usage


def willing(plan: Plan) -> Plan:
    """A model that gets to an answer as soon as nothing keeps it from one, and people who let it."""
    turns = tuple(
        replace(
            turn,
            text=turn.text or "text",
            calls=tuple(call for call in turn.calls if call[0] != "mine"),
            finish_reason=None,
            available=True,
            stubborn=False,
        )
        for turn in plan.turns
    )
    rules = replace(plan.rules, use_attempts=None, on_denial="refuse")
    kept = tuple(one for one in plan.decisions if not isinstance(one, Deny)) or (
        Approve(),
    )
    return replace(plan, turns=turns, rules=rules, decisions=kept, terminates=False)


@tried(120)
@given(plans.map(honest).map(willing), st.booleans())
def test_a_limited_run_continues_with_a_larger_budget(
    plan: Plan, unlimited: bool
) -> None:
    """Answered by force, stopped or handed back: resumed with a larger budget, each limited run is answered."""
    world = World(plan)
    facts = finished(world)
    end = facts[-1]
    assert isinstance(end, Ended)
    event(f"{end.status} {end.limit}, {plan.rules.limits.on_limit}")
    if end.status != "limit_reached":
        return
    larger = UNLIMITED if unlimited else _larger(plan.rules.limits, fold(facts))
    spent_before = fold(facts).usage
    again = asyncio.run(
        world.finish(through_json([*facts, Resumed(limits=larger, at=world.time)]))
    )
    assert isinstance(again[-1], Ended)
    assert again[-1].status == "answered"
    assert fold(again).usage.iterations > spent_before.iterations
    done = [
        (fact.iteration, fact.call_id)
        for fact in again
        if isinstance(fact, CallFinished)
    ]
    assert len(done) == len(set(done))
    assert world.problems == []


def _larger(limits: Budget, state: State) -> Budget:
    """Far more of every limit that there is."""
    grown = {
        name: getattr(limits, name) + 1000
        for name in (
            "max_iterations",
            "max_tool_calls",
            "max_total_tokens",
            "max_cost",
            "max_active_seconds",
        )
        if getattr(limits, name) is not None
    }
    deadline = (
        None if limits.deadline is None else datetime.fromtimestamp(state.at + 1e6, UTC)
    )
    return Budget(**grown, deadline=deadline, on_limit=limits.on_limit)


@tried(80)
@given(plans, st.sampled_from([False, True, 0.5]))
def test_the_model_reads_what_is_really_left(plan: Plan, tell: bool | float) -> None:
    """Every request says what is left at that moment, never below 0, and only under ``tell_budget``."""
    rules = replace(plan.rules, limits=replace(plan.rules.limits, tell_budget=tell))
    for _, state in prefixes(finished(World(replace(plan, rules=rules)))):
        action = next_action(state)
        if not isinstance(action, AskModel):
            continue
        left = action.left
        limits = state.rules.limits
        assert left == remaining_limits(
            limits, state.usage, Left.of(limits, state.usage, state.at)
        )
        assert all(0 <= item.left <= item.limit * (tell or 0) for item in left)
        told = {item.name: item.left for item in left}
        most = state.rules.limits.max_iterations
        if most is not None and tell is True:
            assert told["max_iterations"] == max(most - state.usage.iterations, 0)
        assert tell is not False or left == ()


@tried(50)
@given(plans)
def test_telling_changes_nothing_that_is_kept(plan: Plan) -> None:
    """With tell_budget a run makes the very same facts, but for the option itself in its rules."""
    told = replace(
        plan,
        rules=replace(plan.rules, limits=replace(plan.rules.limits, tell_budget=True)),
    )
    assert finished(World(told))[1:] == finished(World(plan))[1:]
