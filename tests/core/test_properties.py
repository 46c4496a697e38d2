"""What holds of every run, for every model, limit, decider and person.

``PLANNER_EXT_EXAMPLES=5000`` looks longer, at other runs each time, and makes what it finds small.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import groupby, pairwise
from typing import TypeVar, cast

from hypothesis import event, given
from hypothesis import strategies as st

from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    Clarified,
    Ended,
    Fact,
    ModelReplied,
    Planned,
    Resumed,
)
from planner_ext.core.fold import apply, apply_decisions, fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import next_action
from planner_ext.core.state import Phase, State
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.journal import stopping_facts
from support.core import violations
from support.examples import tried
from support.property_world import (
    Plan,
    World,
    charged,
    honest,
    limits,
    of_a_person,
    plans,
    starts,
    through_json,
    timeless,
)

T = TypeVar("T")


def finished(world: World) -> list[Fact]:
    """Drive a world's run to its end."""
    facts = asyncio.run(world.finish(world.start()))
    end = facts[-1]
    assert isinstance(end, Ended)
    event(f"ended {end.status}, limit {end.limit}")
    return facts


def prefixes(facts: Sequence[Fact]) -> list[tuple[Sequence[Fact], State]]:
    """Every head of a journal, with its state."""
    state, heads = State(), []
    for place, fact in enumerate(facts, start=1):
        state = apply(state, fact)
        heads.append((facts[:place], state))
    return heads


@tried(80)
@given(plans.map(honest))
def test_requests_never_exceed_the_limit_on_iterations(plan: Plan) -> None:
    """With one round trip a request, no more are made than are allowed: for the plan, the steps and a clarifier."""
    world = World(plan)
    finished(world)
    rules = world.plan.rules
    made = (
        world.requests
        + world.clarifier_requests
        + (world.plan_requests if rules.charge_plan else 0)
    )
    assert rules.limits.max_iterations is None or made <= rules.limits.max_iterations
    assert world.plan_requests <= 1


@tried(80)
@given(plans)
def test_functions_started_never_exceed_their_limits(plan: Plan) -> None:
    """Not one function more than allowed is started, in all, by name, or again with the same arguments."""
    world = World(plan)
    facts = finished(world)
    allowed = world.plan.rules.limits
    assert (
        allowed.max_tool_calls is None or world.begun.total() <= allowed.max_tool_calls
    )
    assert all(
        world.begun[name] <= count
        for name, count in allowed.max_calls_per_function.items()
    )
    if allowed.max_repeated_calls is not None:
        assert all(
            count <= allowed.max_repeated_calls
            for count in fold(facts).calls_by_digest.values()
        )
    assert starts(facts) == world.begun


@tried(80)
@given(plans)
def test_the_transcript_is_valid_after_every_fact(plan: Plan) -> None:
    """In every run, each message with calls is followed by one result per call, in order; nothing else has one."""
    world = World(plan)
    facts = finished(world)
    assert world.problems == []
    assert [
        found for _, state in prefixes(facts) for found in violations(state.transcript)
    ] == []


@tried(50)
@given(plans)
def test_the_flags_of_a_state_exclude_each_other_as_described(plan: Plan) -> None:
    """What `planner_ext.core` says of the fields of a state holds after every fact."""
    for _, state in prefixes(finished(World(plan))):
        assert state.batch is None or state.reply is None
        assert (state.phase in (Phase.REVIEWING, Phase.CALLING)) <= (
            state.batch is not None
        )
        assert (state.phase is Phase.ANSWERING) <= (state.reply is not None)
        assert (state.phase is Phase.PAUSED) <= (
            (state.batch is None) is not (state.reply is None)
        )
        assert (state.ending is not None) <= (
            state.phase in (Phase.CALLING, Phase.PAUSED, Phase.ENDED)
        )
        assert state.structuring <= state.rules.structured
        assert (state.checked is not None) <= (
            state.rules.structured or state.rules.checked
        )
        assert (state.ended is not None) is (state.phase is Phase.ENDED)


@tried(80)
@given(plans)
def test_the_usage_is_what_the_facts_say(plan: Plan) -> None:
    """After every fact: trips are the sum of those reported, tool calls the starts, tokens and cost those used."""
    world = World(plan)
    for facts, state in prefixes(finished(world)):
        assert state.usage.iterations == charged(facts, world.plan.rules)
        assert state.usage.tool_calls == starts(facts).total()
        assert Counter(state.usage.calls_by_function) == starts(facts)
        replies = [fact for fact in facts if isinstance(fact, ModelReplied | Clarified)]
        assert state.usage.total_tokens == sum(
            reply.usage.total_tokens for reply in replies
        )
        assert (state.usage.cost or 0.0) == sum(
            reply.usage.cost or 0.0 for reply in replies
        )


@tried(40)
@given(plans)
def test_a_journal_survives_json_at_every_fact(plan: Plan) -> None:
    """Every head of a journal, written and read, is the same facts and folds to the same state."""
    for facts, state in prefixes(finished(World(plan))):
        read = through_json(facts)
        assert read == list(facts)
        assert fold(read) == state


@tried(80)
@given(plans)
def test_decisions_in_one_step_change_what_they_change_one_by_one(plan: Plan) -> None:
    """Wherever decisions stand in a row in a journal, both ways lead to the same state."""
    state = State()
    for decided, row in groupby(
        finished(World(plan)), lambda fact: isinstance(fact, CallDecided)
    ):
        facts = list(row)
        after = state
        for fact in facts:
            after = apply(after, fact)
        if decided:
            assert apply_decisions(state, cast("list[CallDecided]", facts)) == after
            event(f"{'all' if after.phase is Phase.CALLING else 'some'} run")
        state = after


@tried(80)
@given(plans)
def test_every_run_ends(plan: Plan) -> None:
    """A run whose model comes to an end ends, in a known way, with nothing left to do, paused never for nothing."""
    facts = finished(World(plan))
    state = fold(facts)
    assert state.phase is Phase.ENDED
    assert next_action(state) is None
    assert state.ended is not None
    assert state.ended.status in ("answered", "incomplete", "limit_reached", "stopped")
    assert (state.ended.status == "limit_reached") is (state.ended.limit is not None)
    assert state.ended.returned is (state.batch is not None)


@tried(60)
@given(plans.map(timeless))
def test_an_interrupted_run_ends_as_the_uninterrupted_one(plan: Plan) -> None:
    """Interrupted after any fact and resumed from JSON in a new engine, a run makes the same journal."""
    whole = finished(World(plan))
    for facts, following in pairwise(facts for facts, _ in prefixes(whole)):
        amid_a_resumption = of_a_person(facts[-1]) and of_a_person(following[-1])
        batch = fold(facts).batch
        amid_a_call = batch is not None and any(
            call.started and call.answer is None for call in batch.calls
        )
        if not amid_a_call and not amid_a_resumption:
            world = World(plan)
            assert asyncio.run(world.finish(through_json(facts))) == whole
            assert world.problems == []


@tried(80)
@given(plans)
def test_the_limit_that_ends_a_run_was_reached(plan: Plan) -> None:
    """The named limit is one that the run has, and its own numbers say that nothing more was allowed by it."""
    facts = finished(World(plan))
    state = fold(facts)
    assert state.ended is not None
    if state.ended.limit is not None:
        assert REACHED[state.ended.limit](state, facts)


def _withheld_by(name: str) -> Callable[[State, Sequence[Fact]], bool]:
    """The calls that were refused for a limit, with those that ran, would have passed it."""

    def reached(state: State, facts: Sequence[Fact]) -> bool:
        assert state.ended is not None
        refused = any(
            isinstance(fact, CallsWithheld) and fact.limit == name for fact in facts
        )
        return getattr(state.rules.limits, name) not in (None, {}) and (
            refused or state.ended.returned
        )

    return reached


def _iterations(state: State, facts: Sequence[Fact]) -> bool:
    """Every trip is spent; a service that reports less than one for a request has still made it."""
    allowed = state.rules.limits.max_iterations
    silent = sum(
        fact.usage.iterations < 1 for fact in facts if isinstance(fact, ModelReplied)
    )
    return allowed is not None and state.usage.iterations + silent >= allowed


REACHED: dict[str, Callable[[State, Sequence[Fact]], bool]] = {
    "max_iterations": _iterations,
    "max_tool_calls": _withheld_by("max_tool_calls"),
    "max_calls_per_function": _withheld_by("max_calls_per_function"),
    "max_repeated_calls": _withheld_by("max_repeated_calls"),
    "max_total_tokens": lambda s, _: (
        s.usage.total_tokens >= (s.rules.limits.max_total_tokens or 1e9)
    ),
    "max_cost": lambda s, _: (s.usage.cost or 0) >= (s.rules.limits.max_cost or 1e9),
    "max_active_seconds": lambda s, _: (
        s.usage.active_seconds >= (s.rules.limits.max_active_seconds or 1e9)
    ),
    "deadline": lambda s, _: (
        s.rules.limits.deadline is not None
        and s.at >= s.rules.limits.deadline.timestamp()
    ),
    "max_consecutive_errors": lambda s, _: (
        s.errors_in_row >= (s.rules.limits.max_consecutive_errors or 99)
    ),
    "max_repeated_denials": lambda s, _: (
        s.denials_in_row >= (s.rules.limits.max_repeated_denials or 99)
    ),
    "maximum_use_attempts": lambda s, _: s.rounds >= (s.rules.use_attempts or 99),
}


@tried(50)
@given(plans)
def test_a_run_can_be_ended_after_every_fact(plan: Plan) -> None:
    """Whenever a run is ended from outside, every call is answered, no started one is said to have not run."""
    facts = finished(World(plan))
    for head, state in prefixes(facts[:-1]):
        after = fold([*head, *stopping_facts(state, reason="enough", at=state.at)])
        assert after.phase is Phase.ENDED
        assert after.batch is None
        assert violations(after.transcript) == []
        begun = sum(isinstance(fact, CallStarted) for fact in head)
        assert after.usage.tool_calls == begun


@tried(50)
@given(plans, limits)
def test_a_run_that_ended_can_be_resumed_and_ends_again(
    plan: Plan, larger: Budget
) -> None:
    """With any other limits an ended run continues, runs nothing twice that it has seen finish, and ends once more."""
    world = World(plan)
    facts = finished(world)
    again = asyncio.run(world.finish([*facts, Resumed(limits=larger, at=world.time)]))
    assert isinstance(again[-1], Ended)
    assert world.problems == []
    done = Counter(
        (fact.iteration, fact.call_id)
        for fact in again
        if isinstance(fact, CallFinished)
    )
    assert [place for place, times in done.items() if times > 1] == []


@tried(80)
@given(plans, st.integers(1, 30))
def test_a_fault_at_any_fact_leaves_a_run_that_can_be_resumed(
    plan: Plan, place: int
) -> None:
    """An observer may fail at any fact: every call is answered or waits for a person, and the run can continue."""
    world = World(plan)

    async def failing(_: object) -> None:
        if len(engine.facts) >= place:
            raise ConnectionResetError

    engine = world.engine(world.start(), emit=failing)
    with suppress(ConnectionResetError):
        asyncio.run(engine.run())
    assert fold(engine.facts) == engine.state
    assert engine.state.batch is None or engine.state.phase in (
        Phase.PAUSED,
        Phase.ENDED,
    )
    going_on = [] if engine.state.phase is Phase.PAUSED else [Resumed(at=world.time)]
    facts = asyncio.run(world.finish([*through_json(engine.facts), *going_on]))
    assert isinstance(facts[-1], Ended)
    assert world.problems == []
    done = Counter(
        (fact.iteration, fact.call_id)
        for fact in facts
        if isinstance(fact, CallFinished)
    )
    assert [place for place, times in done.items() if times > 1] == []


@tried(80)
@given(plans, st.integers(1, 30))
def test_a_run_stopped_from_outside_does_nothing_more(plan: Plan, place: int) -> None:
    """From the fact on after which a run was asked to stop, no request is made, and it ends or already paused."""
    world, stop = World(plan), StopHandle()
    asked: list[int] = []

    async def stopping(_: object) -> None:
        if len(engine.facts) >= place and not asked:
            stop.stop("enough")
            asked.append(len(engine.facts))

    engine = world.engine(world.start(), emit=stopping, stop=stop)
    state = asyncio.run(engine.run())
    assert state.phase in (Phase.PAUSED, Phase.ENDED)
    later = engine.facts[asked[0] :] if asked else []
    assert not any(isinstance(fact, ModelReplied | Planned) for fact in later)
    assert world.problems == []


@tried(50)
@given(plans)
def test_after_a_stop_nothing_more_is_started(plan: Plan) -> None:
    """Asked to stop after any fact, a run makes no request and starts no function from there on."""
    facts = finished(World(plan))
    for head, state in prefixes(facts[:-1]):
        ending = stopping_facts(state, reason="enough", at=state.at)
        assert not any(isinstance(fact, CallStarted | ModelReplied) for fact in ending)
        assert isinstance(ending[-1], Ended), head[-1].type
