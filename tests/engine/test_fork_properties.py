"""Forks: every cut of every run is a run that any engine takes on, within its budget and under its own name."""

import asyncio

import pytest
from hypothesis import event, given

from planner_ext.approval.decisions import Approve, Decision
from planner_ext.core.facts import CallDecided, ModelReplied, Resumed, Rules
from planner_ext.core.fold import fold
from planner_ext.core.state import Phase
from planner_ext.engine.fork import InvalidForkError, forked_facts
from support.core import violations
from support.examples import tried
from support.property_world import Plan, Turn, World, plans, starts, through_json


def two_calls(decision: Decision) -> World:
    """A model that calls f, then g, then answers."""
    turns = (Turn(calls=(("f", "{}"),)), Turn(calls=(("g", "{}"),)), Turn(text="done"))
    return World(
        Plan(
            rules=Rules(),
            turns=turns,
            decisions=(decision,),
            answers=("run",),
            partly=False,
            terminates=False,
            concurrency=1,
        )
    )


@tried(80)
@given(plans)
def test_every_fork_of_every_run_is_resumed_to_its_end(plan: Plan) -> None:
    """Cut after any iteration, a run folds, has a valid history, makes no charge for the cut, and ends when resumed."""
    world = World(plan)
    whole = asyncio.run(world.finish(world.start()))
    made = 0
    for at in range(-1, fold(whole).iteration + 1):
        try:
            forked = through_json(
                forked_facts(whole, at=at, run_id="fork", now=world.time)
            )
        except InvalidForkError:
            continue
        made += 1
        state = fold(forked)
        assert state.phase == Phase.ENDED
        assert state.run_id == "fork"
        assert state.sticky == frozenset()
        assert state.ended is not None
        assert (state.ended.status, violations(state.transcript)) == ("stopped", [])
        assert (
            max(
                (fact.iteration for fact in forked if isinstance(fact, ModelReplied)),
                default=-1,
            )
            <= at
        )
        again = World(plan, time=world.time)
        ended = asyncio.run(again.finish([*forked, Resumed(at=world.time)]))
        assert again.problems == []
        assert fold(ended).phase is Phase.ENDED
        assert (
            starts(ended).total() - starts(forked).total() == again.begun.total()
        )  # nothing before the cut ran again
    event(f"{made} forks")


@tried(40)
@given(plans)
def test_a_fork_keeps_what_was_spent(plan: Plan) -> None:
    """The usage of a fork is that of the run when its iteration had ended: no request is charged for the fork."""
    world = World(plan)
    whole = asyncio.run(world.finish(world.start()))
    for at in range(fold(whole).iteration):
        heads = (fold(whole[:count]) for count in range(1, len(whole) + 1))
        head = next(
            (
                one
                for one in heads
                if one.phase is Phase.ASKING and one.iteration == at + 1
            ),
            None,
        )
        if head is not None and head.final_answer is None:
            forked = fold(forked_facts(whole, at=at, run_id="fork", now=world.time))
            assert forked.usage == head.usage


def test_decisions_after_the_cut_are_not_in_a_fork() -> None:
    """A fork holds no decision on a call of a later iteration, and none for the rest of the run."""
    world = two_calls(Approve(by="gate", always="function"))
    whole = asyncio.run(world.finish(world.start()))
    forked = forked_facts(whole, at=0, run_id="fork", now=world.time)
    decided = [fact for fact in forked if isinstance(fact, CallDecided)]
    assert [(fact.function, fact.sticky) for fact in decided] == [("f", None)]
    assert fold(whole[:-1]).sticky


def test_a_fork_that_cannot_be_is_refused_with_those_that_can() -> None:
    """After the iteration that answered there is nothing to continue from; the error names the other ones."""
    world = two_calls(Approve())
    whole = asyncio.run(world.finish(world.start()))
    for at in (2, -2, 7):
        with pytest.raises(InvalidForkError, match="possible iterations: -1, 0, 1"):
            forked_facts(whole, at=at, run_id="fork", now=world.time)


def test_an_instruction_is_the_last_message_of_the_fork() -> None:
    """The forked run reads it before its next request; the original has no such message."""
    facts = asyncio.run(two_calls(Approve()).finish(two_calls(Approve()).start()))
    forked = forked_facts(facts, at=0, run_id="fork", now=1.0, instruction="Use h.")
    assert "Use h." in str(fold(forked).transcript[-1])
    assert "Use h." not in str(
        fold(forked_facts(facts, at=0, run_id="fork", now=1.0)).transcript
    )
