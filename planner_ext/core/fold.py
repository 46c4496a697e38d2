"""``apply``: the state after a fact. The only way in which a state comes about.

Pure and total over legal transitions; everything that `planner_ext.core.transitions` does not list is refused.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from planner_ext.core.batches import call_clarified, call_decided, call_finished, call_started, calls_withheld
from planner_ext.core.change import replace
from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import (
    AnswerChecked,
    Clarified,
    Ended,
    Fact,
    IterationCompleted,
    MessageAdded,
    ModelReplied,
    Paused,
    Planned,
    Resumed,
    RunStarted,
    StopRequested,
)
from planner_ext.core.limits import Ledger
from planner_ext.core.sharing import row_of
from planner_ext.core.state import Batch, Call, Phase, State
from planner_ext.core.transitions import TRANSITIONS
from planner_ext.core.values import Entry, ReplyEntry, Said, Usage

__all__ = ["CUT_SHORT", "apply", "fold"]

CUT_SHORT = frozenset({"length", "content_filter"})
"""Finish reasons of a reply that is not whole: never a final answer, and none of its calls run."""


def fold(facts: Iterable[Fact]) -> State:
    """Compute the state that a whole journal describes.

    Raises:
        IllegalTransitionError: If a fact cannot follow the ones before it.
    """
    state = State()
    for fact in facts:
        state = apply(state, fact)
    return state


def apply(state: State, fact: Fact) -> State:
    """Compute the state after one more fact.

    Raises:
        IllegalTransitionError: If the fact cannot happen in this state.
    """
    allowed = TRANSITIONS.get((state.phase, fact.type))
    if allowed is None:
        raise IllegalTransitionError(f"{fact.type} cannot happen while a run is {state.phase}.")
    after = _APPLY[fact.type](state, fact)
    if after.phase not in allowed:
        raise IllegalTransitionError(f"{fact.type} cannot lead from {state.phase} to {after.phase}.")
    return after


def _run_started(state: State, fact: RunStarted) -> State:
    return replace(
        state,
        phase=Phase.PLANNING if fact.rules.plan else Phase.ASKING,
        run_id=fact.run_id,
        goal=fact.goal,
        rules=fact.rules,
        transcript=fact.messages,
        at=fact.at,
    )


def _planned(state: State, fact: Planned) -> State:
    iterations = fact.iterations if state.rules.charge_plan else 0
    return replace(
        state,
        phase=Phase.ASKING,
        planned=True,
        transcript=fact.messages,
        ledger=_charge(state.ledger, iterations, fact.usage, fact.seconds),
        at=fact.at,
    )


def _message_added(state: State, fact: MessageAdded) -> State:
    return replace(
        state,
        phase=Phase.ASKING,
        transcript=(*state.transcript, fact.message),
        reply=None,
        asked=False,
        final_answer=None,
        structuring=state.structuring + (fact.purpose == "structure"),
        step_rounds=0 if fact.purpose == "step" else state.step_rounds,
        at=fact.at,
    )


def _answer_checked(state: State, fact: AnswerChecked) -> State:
    return replace(state, checked=fact, at=fact.at)


def _model_replied(state: State, fact: ModelReplied) -> State:
    state = replace(
        state,
        ledger=_charge(state.ledger, fact.iterations, fact.usage, fact.seconds),
        iteration=fact.iteration + 1,
        reask=False,
        asked=False,
        checked=None,
        at=fact.at,
    )
    if fact.calls and fact.offered and fact.finish_reason not in CUT_SHORT:
        calls = row_of(Call(request=call) for call in fact.calls)
        batch = Batch(
            iteration=fact.iteration,
            message=fact.message,
            text=fact.text,
            calls=calls,
            undecided=len(calls),
            unanswered=len(calls),
        )
        return replace(state, phase=Phase.REVIEWING, batch=batch, reply=None)
    return replace(state, phase=Phase.ANSWERING, reply=fact, transcript=(*state.transcript, *_spoken(fact)))


def _spoken(fact: ModelReplied) -> tuple[Entry, ...]:
    """What the transcript keeps of a reply whose calls, if it has any, were not offered."""
    if fact.final_answer is not None:
        return (Said(role="assistant", text=fact.final_answer),)
    if not fact.text:
        return ()
    return (ReplyEntry(message=fact.message, kept=()) if fact.calls else fact.message,)


def _clarified(state: State, fact: Clarified) -> State:
    """Take an answer in: as the result of the call that asks, or as the user's next message."""
    state = replace(
        state,
        ledger=_charge(state.ledger, fact.iterations, fact.usage, fact.seconds),
        clarifications=state.clarifications + (fact.answer is not None),
        at=fact.at,
    )
    if fact.index is not None:
        return call_clarified(state, fact, fact.index)
    if fact.answer is None:
        return replace(state, asked=True)
    answer = Said(role="user", text=fact.answer)
    return replace(state, phase=Phase.ASKING, reply=None, asked=False, transcript=(*state.transcript, answer))


def _iteration_completed(state: State, fact: IterationCompleted) -> State:
    stopping = state.stopping
    if fact.terminate and stopping is None:
        stopping = fact.reason or "The iteration-completed callback asked to end the run."
    return replace(
        state,
        phase=Phase.ASKING,
        transcript=state.transcript if fact.messages is None else fact.messages,
        ledger=_charge(state.ledger, 0, Usage(), fact.seconds),
        rounds=state.rounds + 1,
        step_rounds=state.step_rounds + 1,
        stopping=stopping,
        at=fact.at,
    )


def _stop_requested(state: State, fact: StopRequested) -> State:
    return replace(state, phase=_awake(state), stopping=state.stopping or fact.reason, at=fact.at)


def _paused(state: State, fact: Paused) -> State:
    return replace(state, phase=Phase.PAUSED, ledger=_charge(state.ledger, 0, Usage(), fact.seconds), at=fact.at)


def _resumed(state: State, fact: Resumed) -> State:
    """Go on where the run stands; new limits replace the old ones, and what followed from those is forgotten."""
    state = replace(
        state,
        rules=dataclasses.replace(state.rules, limits=fact.limits or state.rules.limits),
        limit=state.limit if fact.limits is None else None,
        stopping=None,
        at=fact.at,
    )
    return replace(state, phase=_awake(state)) if state.ended is None else _reopened(state)


def _awake(state: State) -> Phase:
    """Where a run goes on that has not ended: a paused one with its open calls, or with the reply that asks."""
    if state.phase is not Phase.PAUSED:
        return state.phase
    return Phase.CALLING if state.batch is not None else Phase.ANSWERING


def _reopened(state: State) -> State:
    """Open an ended run again: what was spent stays spent, what counts in a row starts anew."""
    ledger = replace(state.ledger, errors_in_row=0, denials_in_row=0)
    form = min(state.structuring, 1)
    state = replace(state, ended=None, final_answer=None, ending=None, rounds=0, structuring=form, ledger=ledger)
    if state.batch is not None:
        return replace(state, phase=Phase.REVIEWING, batch=_undecided(state.batch))
    if state.rules.plan and not state.planned and state.iteration == 0:
        return replace(state, phase=Phase.PLANNING)
    forced = state.reply is not None and bool(_spoken(state.reply))
    return replace(
        state, phase=Phase.ASKING, reply=None, transcript=state.transcript[:-1] if forced else state.transcript
    )


def _undecided(batch: Batch) -> Batch:
    """Forget the decisions on a batch that was returned, but for the calls that had started: those stay as they are."""
    calls = row_of(call if call.started else Call(request=call.request) for call in batch.calls)
    undecided = sum(not call.started for call in calls)
    return replace(batch, calls=calls, undecided=undecided, unanswered=sum(call.answer is None for call in calls))


def _ended(state: State, fact: Ended) -> State:
    return replace(
        state,
        phase=Phase.ENDED,
        ended=fact,
        ledger=_charge(state.ledger, fact.iterations, Usage(), fact.seconds),
        at=fact.at,
    )


_APPLY: dict[str, Callable[[State, Any], State]] = {
    "RunStarted": _run_started,
    "Planned": _planned,
    "MessageAdded": _message_added,
    "ModelReplied": _model_replied,
    "CallDecided": call_decided,
    "CallsWithheld": calls_withheld,
    "CallStarted": call_started,
    "CallFinished": call_finished,
    "Clarified": _clarified,
    "IterationCompleted": _iteration_completed,
    "AnswerChecked": _answer_checked,
    "StopRequested": _stop_requested,
    "Paused": _paused,
    "Resumed": _resumed,
    "Ended": _ended,
}


def _charge(ledger: Ledger, iterations: int, usage: Usage, seconds: float) -> Ledger:
    return replace(
        ledger,
        iterations=ledger.iterations + iterations,
        usage=ledger.usage + usage + Usage(active_seconds=seconds),
    )
