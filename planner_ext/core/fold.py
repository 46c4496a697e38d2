"""``apply``: the state after a fact, and ``fold``: the state after a whole journal.

Pure; a fact that `planner_ext.core.state.TRANSITIONS` does not allow is refused. Each
kind of fact has a function that returns the changed fields of the state.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from planner_ext.core import facts
from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.state import (
    TRANSITIONS,
    Batch,
    Call,
    Phase,
    State,
    name_inside,
)
from planner_ext.core.values import (
    NOTHING,
    CallResult,
    Cut,
    EditedReply,
    TextMessage,
    TranscriptItem,
    Usage,
    row_of,
    start_of,
    updated,
    with_item,
)

CUT_SHORT = frozenset({"length", "content_filter", "refusal"})
"""Finish reasons of an incomplete reply: it is no final answer, and none of its calls
run."""


def cut_short_text(finish_reason: str | None, text: str) -> str:
    """Say why a reply is incomplete; of a refusal, the text says why the model refuses."""
    if finish_reason == "refusal":
        return f"The model refused to answer (refusal): {text}"
    return f"The reply was cut short: finish_reason is {finish_reason}."


_KEEPS_INTENT = frozenset({"CallDecided", "IterationCompleted"})
"""Facts that a store may write with the next ones: they do not announce a request, and
leave `State.intent` as it is."""

_MOST_AT_ONCE = 1000
"""How many runs of one call may begin before an earlier one of it has."""

_Changes: TypeAlias = dict[str, Any]


def fold(journal: Iterable[facts.Fact]) -> State:
    """Compute the state that a whole journal describes.

    Raises:
        IllegalTransitionError: If a fact cannot follow the ones before it.
    """
    state = State()
    for fact in journal:
        state = apply(state, fact)
    return state


def apply(state: State, fact: facts.Fact) -> State:
    """Compute the state after one more fact.

    Raises:
        IllegalTransitionError: If the fact cannot happen in this state.
    """
    allowed = TRANSITIONS.get((state.phase, fact.type))
    if allowed is None:
        raise IllegalTransitionError(
            f"{fact.type} cannot happen while a run is {state.phase}."
        )
    changes = _APPLY[fact.type](state, fact)
    changes["at"] = fact.at
    if state.intent != "implied" and fact.type not in _KEEPS_INTENT:
        changes.setdefault("intent", "implied")
    after = updated(state, changes)
    if after.phase not in allowed:
        raise IllegalTransitionError(
            f"{fact.type} cannot lead from {state.phase} to {after.phase}."
        )
    return after


def apply_decisions(state: State, decided: Sequence[facts.CallDecided]) -> State:
    """Compute the state after the decisions on a reply's calls, as `apply` one by one does.

    Where all of its calls run, in one step.
    """
    batch = state.batch
    if batch is None or not _all_run(state, batch, decided):
        for fact in decided:
            state = apply(state, fact)
        return state
    calls = row_of(
        updated(call, decided=fact, erred=False)
        for call, fact in zip(batch.calls, decided, strict=True)
    )
    return updated(
        state,
        phase=Phase.CALLING,
        batch=updated(batch, calls=calls, undecided=0),
        at=decided[-1].at,
    )


def _all_run(state: State, batch: Batch, decided: Sequence[facts.CallDecided]) -> bool:
    """Whether these are the first decisions on all calls, none of which changes more than its call."""
    return (
        state.phase is Phase.REVIEWING
        and batch.undecided == len(batch.calls) == len(decided)
        and all(
            fact.verdict == "run"
            and fact.kind == "function"
            and fact.sticky is None
            and fact.final_answer is None
            and fact.index == index
            and fact.iteration == batch.iteration
            and fact.call_id == batch.calls[index].request.id
            for index, fact in enumerate(decided)
        )
    )


def _run_started(_: State, fact: facts.RunStarted) -> _Changes:
    return {
        "phase": Phase.PLANNING if fact.rules.plan else Phase.ASKING,
        "run_id": fact.run_id,
        "goal": fact.goal,
        "rules": fact.rules,
        "transcript": fact.messages,
        "given": fact.messages,
    }


def _planned(state: State, fact: facts.Planned) -> _Changes:
    return {
        "phase": Phase.ASKING,
        "planned": True,
        "transcript": fact.messages,
        "usage": _charged(state, fact),
    }


def _message_added(state: State, fact: facts.MessageAdded) -> _Changes:
    return {
        "phase": Phase.ASKING,
        "transcript": (*state.transcript, fact.message),
        "reply": None,
        "final_answer": None,
        "structuring": fact.purpose == "structure",
        "refusals": state.refusals + (fact.purpose in ("structure", "revise")),
        "step_rounds": state.step_rounds
        if fact.purpose in ("insist", "structure")
        else 0,
    }


def _model_asked(state: State, fact: facts.ModelAsked) -> _Changes:
    if fact.index is None:
        return {"intent": "recorded"}
    return _recorded(state, fact, fact.index, Usage(iterations=1))


def _nested_call_started(state: State, fact: facts.NestedCallStarted) -> _Changes:
    return _recorded(state, fact, fact.index, start_of(fact.function))


def _recorded(
    state: State,
    fact: facts.ModelAsked | facts.NestedCallStarted,
    index: int,
    more: Usage,
) -> _Changes:
    """Note what a running call is about to use; its end, or another decision on it, charges that."""
    batch, call = _named_call(state.batch, fact, index)
    _require(call.started and call.answer is None, fact, "it is not running")
    inside = call.inside.union(more.calls_by_function)
    counted = call.recorded + more
    recorded = updated(
        fact.usage,
        iterations=counted.iterations,
        tool_calls=counted.tool_calls,
        calls_by_function=counted.calls_by_function,
    )
    return {
        "batch": _with_call(
            batch, index, updated(call, recorded=recorded, inside=inside)
        )
    }


def _request_failed(state: State, fact: facts.RequestFailed) -> _Changes:
    return {"intent": "failed", "usage": _charged(state, fact)}


def _model_replied(state: State, fact: facts.ModelReplied) -> _Changes:
    usage = _charged(state, fact)
    common = {
        "usage": usage,
        "iteration": fact.iteration + 1,
        "reask": False,
        "asked": False,
        "checked": None,
    }
    if fact.calls and fact.offered and fact.finish_reason not in CUT_SHORT:
        calls = row_of(Call(request=call) for call in fact.calls)
        n = len(calls)
        batch = Batch(
            iteration=fact.iteration,
            message=fact.message,
            text=fact.text,
            calls=calls,
            undecided=n,
            unanswered=n,
        )
        return {**common, "phase": Phase.REVIEWING, "batch": batch}
    transcript = (*state.transcript, *_kept_text(fact))
    return {**common, "phase": Phase.ANSWERING, "reply": fact, "transcript": transcript}


def _kept_text(fact: facts.ModelReplied) -> tuple[TranscriptItem, ...]:
    if fact.final_answer is not None:
        return (TextMessage(role="assistant", text=fact.final_answer),)
    if not fact.text:
        return ()
    return (EditedReply(message=fact.message, kept=()) if fact.calls else fact.message,)


def _call_decided(state: State, fact: facts.CallDecided) -> _Changes:
    """Decide a call; a deferred call, and one in doubt, is decided a second time."""
    batch, call = _named_call(state.batch, fact, fact.index)
    deferred = call.decided is not None and call.decided.verdict == "defer"
    _require(
        call.answer is None and (call.decided is None or deferred or call.started),
        fact,
        "it is decided already",
    )
    usage = state.usage + (_charge(state, fact) if call.started else call.recorded)
    changes = _Changes()
    if _runs_again(call, fact):
        changes["calls_by_digest"] = state.calls_by_digest.plus(
            call.decided_fact.counted_as, -1
        )
    returned = fact.verdict == "deny" and state.rules.on_denial == "return_calls"
    answered = fact.verdict in ("answer", "deny", "final_answer") and not returned
    answer = fact.answer if answered else None
    erred = fact.kind in ("unknown", "invalid")
    if fact.cut is not None:
        answer, changes["cut"] = _cut(
            state, fact.iteration, fact.index, fact.answer, fact.cut
        )
    call = updated(
        call,
        decided=fact,
        starts=0,
        recorded=NOTHING,
        answer=answer,
        erred=erred,
        left=False,
    )
    changes.update(_settled(state, _with_call(batch, fact.index, call), usage))
    if state.final_answer is None:
        changes["final_answer"] = fact.final_answer
    if fact.sticky is not None:
        keys = sticky_keys(
            fact.function,
            fact.digest,
            fact.signature,
            source=fact.source,
            roles=fact.roles,
        )
        changes["sticky"] = state.sticky | {keys[fact.sticky]}
    return changes


def sticky_keys(
    function: str, digest: str, signature: str, *, source: str, roles: Iterable[str]
) -> dict[str, str]:
    """Name what a sticky approval answers: one question, asked of the same roles.

    Returns:
        The names for the ``function`` as it is now, and for it with these
            ``arguments``.
    """
    asked = f"{signature}:{source}:{sorted(set(roles))}"
    return {
        "function": f"function:{function}:{asked}",
        "arguments": f"arguments:{digest}:{asked}",
    }


def _calls_withheld(state: State, fact: facts.CallsWithheld) -> _Changes:
    batch = state.batch
    for index in fact.indexes:
        batch, call = _named_call(batch, fact, index)
        _require(call.answer is None, fact, "it has its result")
        batch = _with_call(batch, index, updated(call, answer=fact.answer))
    assert batch is not None, "a journal that withholds calls has a batch open"
    usage = state.usage + _charge(state, fact)
    return {"limit": state.limit or fact.limit, **_settled(state, batch, usage)}


def _call_started(state: State, fact: facts.CallStarted) -> _Changes:
    """Charge a call before it runs; a call that a filter runs again is charged again."""
    batch, call = _named_call(state.batch, fact, fact.index)
    _require(
        call.answer is None and fact.attempt == call.starts + 1,
        fact,
        "it has started already",
    )
    _require(
        call.decided is not None and call.decided.verdict == "run",
        fact,
        "it was not decided to run",
    )
    assert call.decided is not None, "a call that was decided"
    return {
        "usage": _charged(state, fact),
        "calls_by_digest": state.calls_by_digest.plus(call.decided.counted_as, 1),
        "batch": _with_call(
            batch,
            fact.index,
            updated(call, starts=fact.attempt, entered=len(call.runs), left=False),
        ),
    }


def _call_finished(state: State, fact: facts.CallFinished) -> _Changes:
    batch, call = _named_call(state.batch, fact, fact.index)
    _require(call.started and call.answer is None, fact, "it is not running")
    usage = state.usage + (call.recorded if fact.spent is None else fact.spent)
    answer = fact.result
    changes = _Changes()
    if fact.cut is not None:
        answer, changes["cut"] = _cut(
            state, fact.iteration, fact.index, fact.result, fact.cut
        )
    started = () if fact.spent is None else fact.spent.calls_by_function
    inside = call.inside.union(started, fact.brought)
    call = updated(call, answer=answer, erred=fact.outcome != "ok", inside=inside)
    ending = state.ending
    if fact.terminate and ending is None:
        ending = f"A filter asked to end the run after {fact.function}."
    changes.update(_settled(state, _with_call(batch, fact.index, call), usage, ending))
    return changes


def _call_left(state: State, fact: facts.CallLeft) -> _Changes:
    """Charge what a function used that is called again, but for the runs in it."""
    batch, call = _named_call(state.batch, fact, fact.index)
    _require(call.is_open, fact, "it cannot be left")
    started = () if fact.spent is None else fact.spent.calls_by_function
    left = updated(call, recorded=NOTHING, inside=call.inside.union(started), left=True)
    return {
        "usage": state.usage + _charge(state, fact),
        "batch": _with_call(batch, fact.index, left),
    }


def _happened_inside(state: State, fact: facts.HappenedInside) -> _Changes:
    """Take in what happened in a run that a call's function makes: it charges this run, too."""
    batch, call = _named_call(state.batch, fact, fact.index)
    _require(call.started and call.answer is None, fact, "it is not running")
    runs = call.runs
    _require(0 <= fact.run < len(runs) + _MOST_AT_ONCE, fact, "no such run")
    runs += (State(),) * (fact.run + 1 - len(runs))
    run = apply(runs[fact.run], fact.fact)
    named = run.run_id == name_inside(state, fact.index, fact.run)
    _require(named, fact, "the run has another name")
    charge = _charge(state, fact)
    call = updated(
        call,
        runs=(*runs[: fact.run], run, *runs[fact.run + 1 :]),
        inside=call.inside.union(charge.calls_by_function),
    )
    return {
        "usage": state.usage + charge,
        "batch": _with_call(batch, fact.index, call),
    }


def _cut(
    state: State, iteration: int, index: int, result: str, cut: Cut
) -> tuple[str, Mapping[str, str]]:
    from planner_ext.core.results import cut_text, name_of_result  # noqa: PLC0415  (only where a result was cut)

    kept = {**state.cut, name_of_result(result, iteration, index): result}
    return cut_text(result, cut, iteration, index), kept


def _clarified(state: State, fact: facts.Clarified) -> _Changes:
    """Take in an answer: as the result of the call that asks, or as the user's next message."""
    usage = _charged(state, fact)
    answered = {"clarifications": state.clarifications + (fact.answer is not None)}
    if fact.index is not None:
        batch, call = _named_call(state.batch, fact, fact.index)
        question = call.decided is not None and call.decided.kind == "question"
        _require(question and call.answer is None, fact, "it asks nothing")
        batch = _with_call(
            batch, fact.index, updated(call, asked=True, answer=fact.answer)
        )
        return {**answered, **_settled(state, batch, usage)}
    if fact.answer is None:
        return {"usage": usage, "asked": True}
    transcript = (*state.transcript, TextMessage(role="user", text=fact.answer))
    asking = {"phase": Phase.ASKING, "reply": None, "transcript": transcript}
    return {**answered, **asking, "usage": usage}


_NamesCalls: TypeAlias = (
    facts.CallFact
    | facts.CallsWithheld
    | facts.Clarified
    | facts.ModelAsked
    | facts.NestedCallStarted
    | facts.HappenedInside
)


def _named_call(
    batch: Batch | None, fact: _NamesCalls, index: int
) -> tuple[Batch, Call]:
    if batch is None:
        raise IllegalTransitionError(
            f"{type(fact).__name__} names a call while no batch is open."
        )
    _require(
        fact.iteration == batch.iteration and 0 <= index < len(batch.calls),
        fact,
        "no such call",
    )
    call = batch.calls[index]
    _require(
        not isinstance(fact, facts.CallFact) or fact.call_id == call.request.id,
        fact,
        "no such call",
    )
    return batch, call


def _require(condition: bool, fact: _NamesCalls, problem: str) -> None:
    if not condition:
        raise IllegalTransitionError(
            f"{type(fact).__name__} in iteration {fact.iteration} cannot happen: {problem}."
        )


def _with_call(batch: Batch, index: int, call: Call) -> Batch:
    """Replace a call that has no result yet, and update the counts."""
    return updated(
        batch,
        calls=with_item(batch.calls, index, call),
        undecided=batch.undecided - (batch.calls[index].decided is None),
        unanswered=batch.unanswered - (call.answer is not None),
    )


def _settled(
    state: State, batch: Batch, usage: Usage, ending: str | None = None
) -> _Changes:
    """Move a batch into the transcript, in call order, once every call has its result."""
    ending = ending or state.ending
    if batch.unanswered:
        decided = state.phase is Phase.REVIEWING and batch.undecided == 0
        phase = Phase.CALLING if decided else state.phase
        return {"phase": phase, "batch": batch, "usage": usage, "ending": ending}
    denied = [
        call
        for call in batch.calls
        if call.decided is not None and call.decided.verdict == "deny"
    ]
    removed = (
        {call.request.id for call in denied}
        if state.rules.on_denial == "reask"
        else set[str]()
    )
    erred = any(call.erred for call in batch.calls)
    return {
        "phase": Phase.COMPLETING,
        "batch": None,
        "called": any(call.started for call in batch.calls),
        "earlier": usage.calls_by_function,
        "inside": state.inside.union(
            *(call.inside for call in batch.calls if call.inside)
        ),
        "transcript": (*state.transcript, *_items(batch, removed)),
        "stopping": state.stopping or ending,
        "ending": None,
        "reask": bool(removed or (denied and state.rules.close_on_denial)),
        "usage": usage,
        "errors_in_row": state.errors_in_row + 1 if erred else 0,
        "denials_in_row": state.denials_in_row + 1
        if len(denied) == len(batch.calls)
        else 0,
    }


def _items(batch: Batch, removed: set[str]) -> list[TranscriptItem]:
    kept = [call for call in batch.calls if call.request.id not in removed]
    changed = ((call.request.id, call.decided and call.decided.edited) for call in kept)
    edited = tuple((call_id, text) for call_id, text in changed if text is not None)
    message: TranscriptItem = batch.message
    if removed or edited:
        message = EditedReply(
            message=message, kept=tuple(call.request.id for call in kept), edited=edited
        )
    results = [
        CallResult(
            call_id=call.request.id,
            name=call.request.sent_name or call.request.name,
            text=call.answer or "",
            inside=tuple(sorted(call.inside)) if call.inside else (),
        )
        for call in kept
    ]
    return [message, *results] if kept or batch.text else []


def _iteration_completed(state: State, fact: facts.IterationCompleted) -> _Changes:
    stopping = state.stopping
    if fact.terminate and stopping is None:
        stopping = (
            fact.reason or "The iteration-completed callback asked to end the run."
        )
    return {
        "phase": Phase.ASKING,
        "transcript": state.transcript if fact.messages is None else fact.messages,
        "usage": _charged(state, fact),
        "rounds": state.rounds + 1,
        "step_rounds": state.step_rounds + 1,
        "stopping": stopping,
    }


def _answer_checked(_: State, fact: facts.AnswerChecked) -> _Changes:
    return {"checked": fact}


def _stop_requested(state: State, fact: facts.StopRequested) -> _Changes:
    return {"phase": _resumed_phase(state), "stopping": state.stopping or fact.reason}


def _budget_changed(state: State, fact: facts.BudgetChanged) -> _Changes:
    rules = replace(state.rules, limits=fact.limits)
    return {
        "rules": rules,
        "limit": None,
        "refused": None,
        "usage": _charged(state, fact),
    }


def _shared_budgets_checked(state: State, fact: facts.SharedBudgetsChecked) -> _Changes:
    return {"limit": _own_limit(state), "refused": None if fact.limit is None else fact}


def _own_limit(state: State) -> str | None:
    """Return the limit that withheld calls, unless it is a shared budget's."""
    return (
        None
        if state.refused is not None and state.limit == state.refused.limit
        else state.limit
    )


def _paused(state: State, fact: facts.Paused) -> _Changes:
    return {"phase": Phase.PAUSED, "usage": _charged(state, fact)}


def _resumed(state: State, fact: facts.Resumed) -> _Changes:
    """Continue where the run stands, with new limits if given.

    What a shared budget refused is forgotten in any case: it is checked again.
    """
    common = {
        "rules": replace(state.rules, limits=fact.limits or state.rules.limits),
        "limit": _own_limit(state) if fact.limits is None else None,
        "refused": None,
        "stopping": None,
    }
    return (
        {**common, "phase": _resumed_phase(state)}
        if state.ended is None
        else {**common, **_reopened(state)}
    )


def _resumed_phase(state: State) -> Phase:
    if state.phase is not Phase.PAUSED:
        return state.phase
    return Phase.CALLING if state.batch is not None else Phase.ANSWERING


def _reopened(state: State) -> _Changes:
    """Open an ended run again: what was spent stays spent, what counts in a row starts from 0."""
    common = {
        "ended": None,
        "final_answer": None,
        "ending": None,
        "rounds": 0,
        "refusals": 0,
        "errors_in_row": 0,
        "denials_in_row": 0,
    }
    if state.batch is not None:
        return {**common, "phase": Phase.REVIEWING, "batch": _undecided(state.batch)}
    if state.rules.plan and not state.planned and state.iteration == 0:
        return {**common, "phase": Phase.PLANNING}
    forced = state.reply is not None and bool(_kept_text(state.reply))
    transcript = state.transcript[:-1] if forced else state.transcript
    return {**common, "phase": Phase.ASKING, "reply": None, "transcript": transcript}


def _undecided(batch: Batch) -> Batch:
    calls = row_of(
        call if call.started else Call(request=call.request) for call in batch.calls
    )
    undecided = sum(not call.started for call in calls)
    return updated(
        batch,
        calls=calls,
        undecided=undecided,
        unanswered=sum(call.answer is None for call in calls),
    )


def _ended(state: State, fact: facts.Ended) -> _Changes:
    return {"phase": Phase.ENDED, "ended": fact, "usage": _charged(state, fact)}


_APPLY: dict[str, Callable[[State, Any], _Changes]] = {
    "RunStarted": _run_started,
    "Planned": _planned,
    "MessageAdded": _message_added,
    "ModelAsked": _model_asked,
    "RequestFailed": _request_failed,
    "ModelReplied": _model_replied,
    "CallDecided": _call_decided,
    "CallsWithheld": _calls_withheld,
    "CallStarted": _call_started,
    "NestedCallStarted": _nested_call_started,
    "CallFinished": _call_finished,
    "CallLeft": _call_left,
    "HappenedInside": _happened_inside,
    "Clarified": _clarified,
    "IterationCompleted": _iteration_completed,
    "AnswerChecked": _answer_checked,
    "StopRequested": _stop_requested,
    "BudgetChanged": _budget_changed,
    "SharedBudgetsChecked": _shared_budgets_checked,
    "Paused": _paused,
    "Resumed": _resumed,
    "Ended": _ended,
}


def _charged(state: State, fact: facts.Fact) -> Usage:
    return state.usage + facts.cost_of(fact, state.rules)


def _charge(state: State, fact: facts.Fact) -> Usage:
    """Return what a fact charges in a state: its cost, and what its calls have recorded before it happened."""
    calls = () if state.batch is None else state.batch.calls
    match fact:
        case facts.HappenedInside():
            runs = calls[fact.index].runs
            run = runs[fact.run] if fact.run < len(runs) else State()
            return updated(_charge(run, fact.fact), active_seconds=0.0)
        case facts.CallDecided():
            call = calls[fact.index]
            if not _runs_again(call, fact):
                return call.recorded
            return call.recorded - start_of(call.decided_fact.function)
        case facts.CallsWithheld():
            return sum((calls[index].recorded for index in fact.indexes), NOTHING)
        case facts.CallFinished(spent=None) | facts.CallLeft(spent=None):
            return calls[fact.index].recorded
        case _:
            return facts.cost_of(fact, state.rules)


def _runs_again(call: Call, decided: facts.CallDecided) -> bool:
    """Return whether a call that had started is to run again: it is charged once, however often its process died."""
    return call.started and call.decided is not None and decided.verdict == "run"
