"""Forks: the journal of a new run that begins as another one did, up to an iteration."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from planner_ext.core import facts
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.fold import apply
from planner_ext.core.state import Phase, State
from planner_ext.engine.journal import stopping_facts


class InvalidForkError(PlannerExtError):
    """The run made no request after that iteration; names the iterations where it can be forked."""


def forked_facts(
    journal: Sequence[facts.Fact],
    *,
    at: int,
    run_id: str,
    now: float,
    instruction: str = "",
) -> tuple[facts.Fact, ...]:
    """Return the journal of a fork: stopped after an iteration, so that any door resumes it.

    The fork keeps the usage of those iterations, and no approval "for the rest of the
    run". At -1 it keeps the beginning, and the plan.

    Raises:
        InvalidForkError: If the run made no request after this iteration.
    """
    state = State()
    ends = dict[int, tuple[int, State]]()
    for count, fact in enumerate(journal, 1):
        state = apply(state, fact)
        if state.phase is Phase.ASKING:
            ends.setdefault(state.iteration - 1, (count, state))
    has_ended = at in ends and ends[at][1].final_answer is not None
    if at not in ends or (has_ended and not instruction):
        there = ", ".join(
            str(end) for end, (_, state) in ends.items() if state.final_answer is None
        )
        raise InvalidForkError(
            f"The run cannot be forked after iteration {at}; possible iterations: {there or 'none'}."
        )
    count, state = ends[at]
    before = _run_of(journal)
    kept = [_of_fork(fact, before, run_id) for fact in journal[:count]]
    if instruction:
        message = {
            "role": "user",
            "items": [{"content_type": "text", "text": instruction}],
        }
        kept.append(facts.MessageAdded(message=message, purpose="step", at=now))
    state = reduce(apply, kept, State())
    stopped = stopping_facts(
        state, reason=f"Forked after iteration {at} of run {before}.", at=now
    )
    return (*kept, *stopped)


def _run_of(journal: Sequence[facts.Fact]) -> str:
    return next(
        (fact.run_id for fact in journal if isinstance(fact, facts.RunStarted)), ""
    )


def _of_fork(fact: facts.Fact, before: str, run_id: str) -> facts.Fact:
    match fact:
        case facts.RunStarted():
            return replace(fact, run_id=run_id + fact.run_id[len(before) :])
        case facts.HappenedInside():
            return replace(fact, fact=_of_fork(fact.fact, before, run_id))
        case facts.CallDecided(sticky=str()):
            return replace(fact, sticky=None)
        case _:
            return fact
