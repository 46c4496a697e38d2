"""``apply``: the state after a fact. The only way in which a state comes about.

Pure and total over legal transitions; everything that `planner_ext.core.state` does not list is refused.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import (
    AnswerChecked,
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
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
from planner_ext.core.limits import Ledger, reserved, settled
from planner_ext.core.state import TRANSITIONS, Batch, Call, Phase, State
from planner_ext.core.values import CallResult, EditedReply, TextMessage, TranscriptItem, Usage, replace, row_of

__all__ = [
    "CUT_SHORT",
    "apply",
    "call_clarified",
    "call_decided",
    "call_finished",
    "call_started",
    "calls_withheld",
    "fold",
    "sticky_keys",
]

# What facts about the calls of the open batch do to a state.


def call_decided(state: State, fact: CallDecided) -> State:
    """Put a decision in its place; a deferred call, and one in doubt, is decided a second time."""
    batch, call = _named_call(state, fact)
    deferred = call.decided is not None and call.decided.verdict == "defer"
    _require(call.answer is None and (call.decided is None or deferred or call.started), fact, "it is decided already")
    changed = replace(
        call, decided=fact, starts=0, reserved=None, answer=_answer(state, fact), erred=fact.kind in _ERRED
    )
    ledger = settled(state.ledger, call.reserved, None)
    state = replace(
        state,
        batch=_with_call(batch, fact.index, changed),
        final_answer=fact.final_answer if state.final_answer is None else state.final_answer,
        ledger=_taken_back(ledger, call) if call.started and fact.verdict == "run" else ledger,
        sticky=state.sticky | _sticky_key(fact) if fact.sticky else state.sticky,
        at=fact.at,
    )
    return _settle_if_answered(state)


def _taken_back(ledger: Ledger, call: Call) -> Ledger:
    """Uncharge a call in doubt that is to run again: it is charged once, however often its process died."""
    assert call.decided is not None
    return replace(
        ledger,
        tool_calls=ledger.tool_calls - 1,
        calls_by_function=ledger.calls_by_function.plus(call.decided.function, -1),
        calls_by_digest=ledger.calls_by_digest.plus(call.decided.digest, -1),
    )


_ERRED = frozenset({"unknown", "invalid"})


def _answer(state: State, fact: CallDecided) -> str | None:
    """What the model reads of a call that is decided and does not run; None where that is open."""
    if fact.verdict == "deny" and state.rules.on_denial == "return_calls":
        return None
    return fact.answer if fact.verdict in ("answer", "deny", "final_answer") else None


def _sticky_key(fact: CallDecided) -> frozenset[str]:
    keys = sticky_keys(fact.function, fact.digest, fact.signature)
    return frozenset() if fact.sticky is None else frozenset({keys[fact.sticky]})


def sticky_keys(function: str, digest: str, signature: str) -> dict[str, str]:
    """Write what is approved for the rest of a run: a function as it is now, or this function with these arguments."""
    now = f":{signature}" if signature else ""
    return {"function": f"function:{function}{now}", "arguments": f"arguments:{digest}{now}"}


def calls_withheld(state: State, fact: CallsWithheld) -> State:
    """Answer calls that do not run."""
    batch, ledger = _open_batch(state), state.ledger
    for index in fact.indexes:
        _require(fact.iteration == batch.iteration and 0 <= index < len(batch.calls), fact, "no such call")
        call = batch.calls[index]
        _require(call.answer is None, fact, "it has its result")
        ledger = settled(ledger, call.reserved, None)
        batch = _with_call(batch, index, replace(call, reserved=None, answer=fact.answer))
    state = replace(state, batch=batch, ledger=ledger, limit=state.limit or fact.limit, at=fact.at)
    return _settle_if_answered(state)


def call_started(state: State, fact: CallStarted) -> State:
    """Charge a call before it runs; a call that a filter runs again is charged again."""
    batch, call = _named_call(state, fact)
    decided = call.decided
    _require(call.answer is None and fact.attempt == call.starts + 1, fact, "it has started already")
    if decided is None or decided.verdict != "run":
        raise IllegalTransitionError(f"CallStarted cannot happen to {fact.call_id!r}: it was not decided to run.")
    ledger = reserved(state.ledger, fact.reserved)
    ledger = replace(
        ledger,
        tool_calls=ledger.tool_calls + 1,
        calls_by_function=state.ledger.calls_by_function.plus(fact.function, 1),
        calls_by_digest=state.ledger.calls_by_digest.plus(decided.digest, 1),
    )
    call = replace(call, starts=fact.attempt, reserved=fact.reserved if fact.attempt == 1 else call.reserved)
    return replace(state, ledger=ledger, batch=_with_call(batch, fact.index, call), at=fact.at)


def call_finished(state: State, fact: CallFinished) -> State:
    """Answer a call that ran."""
    batch, call = _named_call(state, fact)
    _require(call.started and call.answer is None, fact, "it is not running")
    ledger = settled(state.ledger, call.reserved, fact.spent)
    call = replace(call, answer=fact.result, erred=fact.outcome != "ok")
    state = replace(state, ledger=ledger, batch=_with_call(batch, fact.index, call), at=fact.at)
    if fact.terminate and state.ending is None:
        state = replace(state, ending=f"A filter asked to end the run after {fact.function}.")
    return _settle_if_answered(state)


def call_clarified(state: State, fact: Clarified, index: int) -> State:
    """Answer a call that asks the user; one that nobody answered waits for a person."""
    batch = _open_batch(state)
    _require(fact.iteration == batch.iteration and 0 <= index < len(batch.calls), fact, "no such call")
    call = batch.calls[index]
    question = call.decided is not None and call.decided.kind == "question"
    _require(question and call.answer is None, fact, "it asks nothing")
    call = replace(call, asked=True, answer=fact.answer)
    return _settle_if_answered(replace(state, batch=_with_call(batch, index, call)))


def _open_batch(state: State) -> Batch:
    if state.batch is None:
        raise IllegalTransitionError(f"A call was named while no batch is open (the run is {state.phase}).")
    return state.batch


def _named_call(state: State, fact: CallDecided | CallStarted | CallFinished) -> tuple[Batch, Call]:
    """Find the call that a fact names; a damaged journal is refused by name."""
    batch = _open_batch(state)
    _require(fact.iteration == batch.iteration and 0 <= fact.index < len(batch.calls), fact, "no such call")
    call = batch.calls[fact.index]
    _require(call.request.id == fact.call_id, fact, "no such call")
    return batch, call


_OfCalls = CallDecided | CallStarted | CallFinished | CallsWithheld | Clarified


def _require(condition: bool, fact: _OfCalls, problem: str) -> None:
    if not condition:
        raise IllegalTransitionError(f"{fact.type} in iteration {fact.iteration} cannot happen: {problem}.")


def _with_call(batch: Batch, index: int, call: Call) -> Batch:
    """Put a changed call in its place, and count anew what is undecided and unanswered."""
    before = batch.calls[index]
    return replace(
        batch,
        calls=batch.calls.changed(index, call),
        undecided=batch.undecided - _is_undecided(before) + _is_undecided(call),
        unanswered=batch.unanswered - (before.answer is None) + (call.answer is None),
    )


def _is_undecided(call: Call) -> bool:
    return call.decided is None and call.answer is None


def _settle_if_answered(state: State) -> State:
    """Move a batch whose every call has its result into the transcript, results in call order."""
    batch = _open_batch(state)
    if batch.unanswered:
        decided = state.phase is Phase.REVIEWING and batch.undecided == 0
        return replace(state, phase=Phase.CALLING) if decided else state
    denied = [call for call in batch.calls if call.decided is not None and call.decided.verdict == "deny"]
    removed = {call.request.id for call in denied} if state.rules.on_denial == "reask" else set[str]()
    ledger = state.ledger
    return replace(
        state,
        phase=Phase.COMPLETING,
        batch=None,
        called=any(call.started for call in batch.calls),
        transcript=(*state.transcript, *_entries(batch, removed)),
        stopping=state.stopping or state.ending,
        ending=None,
        reask=bool(removed or (denied and state.rules.close_on_denial)),
        ledger=replace(
            ledger,
            errors_in_row=ledger.errors_in_row + 1 if any(call.erred for call in batch.calls) else 0,
            denials_in_row=ledger.denials_in_row + 1 if len(denied) == len(batch.calls) else 0,
        ),
    )


def _entries(batch: Batch, removed: set[str]) -> list[TranscriptItem]:
    kept = [call for call in batch.calls if call.request.id not in removed]
    edited = tuple(
        (call.request.id, call.decided.edited)
        for call in kept
        if call.decided is not None and call.decided.edited is not None
    )
    message: TranscriptItem = batch.message
    if removed or edited:
        message = EditedReply(message=message, kept=tuple(call.request.id for call in kept), edited=edited)
    if not kept and not batch.text:
        return []
    return [message, *map(_result, kept)]


def _result(call: Call) -> CallResult:
    request = call.request
    return CallResult(call_id=request.id, name=request.sent_name or request.name, text=call.answer or "")


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


def _spoken(fact: ModelReplied) -> tuple[TranscriptItem, ...]:
    """What the transcript keeps of a reply whose calls, if it has any, were not offered."""
    if fact.final_answer is not None:
        return (TextMessage(role="assistant", text=fact.final_answer),)
    if not fact.text:
        return ()
    return (EditedReply(message=fact.message, kept=()) if fact.calls else fact.message,)


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
    answer = TextMessage(role="user", text=fact.answer)
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
