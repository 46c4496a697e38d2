"""Forks: a run's journal up to the end of an iteration, as the journal of a new run."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import CallDecided, Fact, MessageAdded, RunStarted
from planner_ext.core.fold import apply
from planner_ext.core.state import Phase, State
from planner_ext.engine.journal import stopping_facts


class InvalidForkError(PlannerExtError):
    """A run cannot be forked there: it made no request after that iteration; names the iterations where it can."""


def forked_facts(facts: Sequence[Fact], *, at: int, run_id: str, now: float, instruction: str = "") -> tuple[Fact, ...]:
    """Return the journal of a fork: stopped after an iteration, so that any door resumes it.

    The fork starts with the consumption of the kept iterations. An approval "for the rest of the run" does not hold in
    the fork, which asks again.

    Args:
        facts: The journal of the run.
        at: The last iteration that is kept, 0-based; -1 keeps the beginning, and the plan.
        run_id: The fork's name, to which its approvals will bind.
        now: Seconds since the epoch.
        instruction: A user message to add.

    Raises:
        InvalidForkError: If the run made no request after this iteration.
    """
    state = State()
    ends = dict[int, tuple[int, State]]()
    for count, fact in enumerate(facts, 1):
        state = apply(state, fact)
        if state.phase is Phase.ASKING:
            ends.setdefault(state.iteration - 1, (count, state))
    if at not in ends or (ends[at][1].final_answer is not None and not instruction):
        there = ", ".join(str(end) for end, (_, state) in ends.items() if state.final_answer is None)
        raise InvalidForkError(
            f"The run cannot be forked after iteration {at}; possible iterations: {there or 'none'}."
        )
    count, state = ends[at]
    kept = [_of_fork(fact, run_id) for fact in facts[:count]]
    if instruction:
        message = {"role": "user", "items": [{"content_type": "text", "text": instruction}]}
        kept.append(MessageAdded(message=message, purpose="step", at=now))
    state = reduce(apply, kept, State())
    stopped = stopping_facts(state, reason=f"Forked after iteration {at} of run {_name(facts)}.", at=now)
    return (*kept, *stopped)


def _name(facts: Sequence[Fact]) -> str:
    return next((fact.run_id for fact in facts if isinstance(fact, RunStarted)), "")


def _of_fork(fact: Fact, run_id: str) -> Fact:
    match fact:
        case RunStarted():
            return replace(fact, run_id=run_id)
        case CallDecided(sticky=str()):
            return replace(fact, sticky=None)
        case _:
            return fact
