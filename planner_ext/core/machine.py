"""``next_action``: what is to be done next in a state. Pure: the same state, the same action."""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Literal

from planner_ext.core.actions import (
    Action,
    AddMessage,
    AskModel,
    AskPerson,
    AskPlan,
    CheckAnswer,
    CompleteIteration,
    Finish,
    Pause,
    ReviewCalls,
    RunCalls,
    WithholdCalls,
)
from planner_ext.core.facts import ModelReplied
from planner_ext.core.fold import CUT_SHORT
from planner_ext.core.limits import divided, remaining_limits, spent_limit, time_left
from planner_ext.core.state import (
    NO_MORE_QUESTIONS,
    Batch,
    Call,
    Phase,
    State,
    asks,
    open_questions,
    over_the_cap,
    questions_left,
)

__all__ = ["IN_DOUBT", "in_form", "iterations_left", "limit_of_restart", "next_action"]

# A final answer that has to be in a form: it is checked before the run ends with it, and asked for again.

_MOST_REQUESTS = 10
"""How often the answer is asked for again where no limit on round trips bounds it."""


def in_form(state: State, end: Finish, spent: str | None) -> Action:
    """Say what comes before an end with an answer, where the run's answer has to be in a form.

    An answer in its form ends the run. Another one is asked for again, without functions, as long as a request may be
    made; then the run ends at its limit with the text as it is, and its reason says what is wrong with it. Without
    a limit on round trips it is asked for ten times, and the run ends ``incomplete``.

    Args:
        state: The run.
        end: How it would end.
        spent: The limit that forbids a further request, or None.
    """
    checked = state.checked
    if not end.answer or (checked is not None and not checked.problem):
        return end
    if state.stopping is not None:
        return Finish(status="stopped", answer=end.answer, reason=state.stopping)
    if checked is None:
        return CheckAnswer(answer=end.answer)
    if spent is not None:
        reason = f"The answer is not in its form, and no further request may be made. {checked.problem}"
        return Finish(status="limit_reached", answer=end.answer, limit=end.limit or spent, reason=reason)
    if state.rules.limits.max_iterations is None and state.structuring >= _MOST_REQUESTS:
        reason = f"The answer is not in its form; it was asked for again {state.structuring} times. {checked.problem}"
        return Finish(status="incomplete", answer=end.answer, reason=reason)
    return AddMessage(purpose="structure", problem=checked.problem)


IN_DOUBT = "Cancelled while it ran; whether it took effect is not known."
"""What the model reads of a function that had started and was not seen to finish."""

TOO_LITTLE_LEFT = (
    "Not executed: what is left of the budget, less the request that is kept for the answer, is too little for it. "
    "Ask for fewer planners at once, or go on without."
)
"""What the model reads of nested runs among which the rest of the budget cannot be divided."""

_TRIPS_OF_A_PLANNED_RUN = 2
"""The plan, and at least one request for the goal."""


def next_action(state: State) -> Action | None:
    """Say what is to be done next; None while the run is paused, has ended or has not begun."""
    action = _in_phase(state)
    if state.rules.structured and isinstance(action, Finish):
        return in_form(state, action, _no_request(state))
    return action


def _in_phase(state: State) -> Action | None:
    match state.phase:
        case Phase.NEW | Phase.PAUSED | Phase.ENDED:
            return None
        case Phase.PLANNING:
            return _plan(state)
        case Phase.ASKING:
            return _ask(state)
        case Phase.ANSWERING:
            assert state.reply is not None
            return _judge(state, state.reply)
        case Phase.REVIEWING:
            assert state.batch is not None
            return _review(state, state.batch)
        case Phase.CALLING:
            assert state.batch is not None
            return _call(state, state.batch)
        case Phase.COMPLETING:
            return CompleteIteration(iteration=state.iteration - 1, called=state.called)


def iterations_left(state: State) -> int | None:
    """Count the round trips that may still be made; None where they are not limited."""
    allowed = state.rules.limits.max_iterations
    return None if allowed is None else allowed - state.ledger.iterations


def _no_request(state: State) -> str | None:
    """Name the limit that forbids any further request, or None."""
    left = iterations_left(state)
    no_trip = "max_iterations" if left is not None and left <= 0 else None
    return no_trip or spent_limit(state.rules.limits, state.ledger, state.at)


def _no_time(state: State) -> bool:
    """Whether a time limit has passed: unlike the other limits, it leaves no request for an answer."""
    left = time_left(state.rules.limits, state.ledger, state.at)
    return left is not None and left[0] <= 0


def _plan(state: State) -> Action:
    """Ask for the plan, unless it would leave no trip for the goal itself, or a limit forbids any such request."""
    left = iterations_left(state)
    spent = spent_limit(state.rules.limits, state.ledger, state.at)
    if state.stopping is not None or spent is not None or (left is not None and left < _TRIPS_OF_A_PLANNED_RUN):
        return _ask(state)
    return AskPlan()


def _ask(state: State) -> Action:
    if state.final_answer is not None:
        return Finish(status="answered", answer=state.final_answer)
    if state.structuring:
        return _ask_in_form(state)
    if state.stopping is not None:
        return Finish(status="stopped", reason=state.stopping)
    left = iterations_left(state)
    limits = state.rules.limits
    limit = state.limit or spent_limit(limits, state.ledger, state.at)
    if limit is None and left is not None and left <= 0:
        limit = "max_iterations"
    if limit is not None and (limits.on_limit != "answer" or _no_time(state) or (left is not None and left <= 0)):
        return Finish(status="limit_reached", limit=limit, reason=_limit_text(state, limit))
    if limit is None and left == 1 and limits.on_limit == "answer":
        limit = "max_iterations"
    return _request(state, limit)


def _ask_in_form(state: State) -> Action:
    """Ask for the answer again; where no request may follow any more, the run ends with the answer as it is."""
    answer = "" if state.checked is None else state.checked.answer
    if state.stopping is not None:
        return Finish(status="stopped", answer=answer, reason=state.stopping)
    if (limit := _no_request(state)) is not None:
        return Finish(status="limit_reached", answer=answer, limit=limit, reason=_limit_text(state, limit))
    return _request(state, state.limit)


def _request(state: State, limit: str | None) -> AskModel:
    """Decide whether functions are offered, and for whose sake they are not."""
    rules = state.rules
    withheld, offer = limit, limit is None
    if offer and rules.use_attempts is not None and state.rounds >= rules.use_attempts:
        withheld, offer = rules.attempts_limit or None, False
    closing = _closes_step(state)
    if state.reask or closing or state.structuring:
        offer = False
    keep_schema = "none" if rules.limits.last_trip == "none" else None
    return AskModel(
        iteration=state.iteration,
        offer=offer,
        tool_choice=rules.tool_choice if offer else keep_schema,
        withheld=withheld,
        structured=rules.structured and (withheld is not None or not closing),
        left=remaining_limits(rules.limits, state.ledger, state.at),
    )


def _judge(state: State, reply: ModelReplied) -> Action:
    """Decide what a reply without calls is: the answer, the close of a step, or nothing to go by."""
    left = iterations_left(state)
    if reply.finish_reason in CUT_SHORT:
        return Finish(status="incomplete", reason=f"The reply was cut short: finish_reason is {reply.finish_reason}.")
    limit = reply.withheld or ("max_iterations" if left is not None and left < 0 else None)
    answer = reply.text if reply.final_answer is None else reply.final_answer
    if limit is not None:
        reason = _limit_text(state, limit) if answer else f"{_limit_text(state, limit)} {_empty_text(reply)}"
        return Finish(status="limit_reached", answer=answer, limit=limit, reason=reason)
    if reply.final_answer is None:
        purpose = _next_message(state, reply)
        if purpose is not None and state.stopping is not None:
            return Finish(status="stopped", reason=state.stopping)
        if (action := _continued(state, reply, purpose)) is not None:
            return action
    if not answer:
        return Finish(status="incomplete", reason=_empty_text(reply))
    return Finish(status="answered", answer=answer)


def _continued(state: State, reply: ModelReplied, purpose: Literal["step", "insist"] | None) -> Action | None:
    """Say what follows on a plain reply that is not the end; None where it is."""
    if purpose != "step" and reply.text and state.stopping is None and _may_clarify(state):
        if state.rules.clarifier and not state.asked:
            return AskPerson(question=reply.text, iteration=reply.iteration, index=None, trips=_trips(state))
        if purpose == "insist" and asks(reply.text):
            return Pause()
    return None if purpose is None else AddMessage(purpose=purpose)


def _may_clarify(state: State) -> bool:
    """Whether an answer to a question could still be used: none is asked where no request may follow."""
    return not state.structuring and _no_request(state) is None and questions_left(state) != 0


def _trips(state: State) -> int | None:
    """Count the round trips that an answer may take: one is kept to use it."""
    left = iterations_left(state)
    return None if left is None else max(left - 1, 0)


def _closes_step(state: State) -> bool:
    """Whether the next plain reply closes a step, and is no answer."""
    rounds = state.rules.rounds_per_step
    return rounds is not None and state.step_rounds >= rounds and not state.structuring


def _next_message(state: State, reply: ModelReplied) -> Literal["step", "insist"] | None:
    """Say what the planner has to add where a plain reply is not the end, or None."""
    rules = state.rules
    if _closes_step(state) and not reply.offered:
        return "step"
    return "insist" if reply.text and rules.require_final_answer and reply.offered else None


def _review(state: State, batch: Batch) -> Action:
    if state.stopping is not None:
        return _withhold_open(batch, _stopped_text(state), None)
    most = state.rules.limits.max_calls_per_reply
    if most is not None and len(batch.calls) > most:
        return _withhold_open(batch, _too_many_text(len(batch.calls), most), None)
    undecided = tuple(i for i, call in enumerate(batch.calls) if call.decided is None and call.answer is None)
    return ReviewCalls(iteration=batch.iteration, indexes=undecided)


def _call(state: State, batch: Batch) -> Action:
    if (reason := _returned(state, batch)) is not None and state.stopping is None:
        return Finish(status="stopped", reason=reason, returned=True)
    if state.final_answer is not None:
        return _withhold_open(batch, "Not executed: the final answer was given in the same message.", None)
    if state.stopping is not None:
        return _withhold_open(batch, _stopped_text(state), None)
    if state.ending is not None:
        return _withhold_open(batch, f"Not executed: the run was stopped. {state.ending}", None)
    left = iterations_left(state)
    if left is not None and left <= 0:
        return _refuse(state, batch, _open(batch), "max_iterations")
    ready = tuple(i for i in _open(batch) if _may_start(batch.calls[i]))
    waiting = len(ready) < batch.unanswered
    if ready and (not waiting or state.rules.on_deferred == "run_safe_first"):
        return _start(state, batch, ready)
    return _put_questions(state, batch) or Pause()


def _put_questions(state: State, batch: Batch) -> Action | None:
    """Refuse the questions over the cap, then put the others to the clarifier; None: what is left is a person's."""
    questions = open_questions(batch)
    if over := over_the_cap(state, questions):
        return WithholdCalls(iteration=batch.iteration, indexes=over, answer=NO_MORE_QUESTIONS, limit=None)
    unasked = next((i for i in questions if not batch.calls[i].asked), None)
    if unasked is None and not (questions and _no_time(state)):
        return None
    if (limit := spent_limit(state.rules.limits, state.ledger, state.at)) is not None:
        return _refuse(state, batch, questions, limit)
    decided = None if unasked is None else batch.calls[unasked].decided
    if not state.rules.clarifier or decided is None:
        return None
    return AskPerson(question=decided.prompt, iteration=batch.iteration, index=unasked, trips=_trips(state))


def _returned(state: State, batch: Batch) -> str | None:
    """Say why the batch goes back to the caller, or None."""
    verdicts = {call.decided.verdict for call in batch.calls if call.decided is not None}
    if "deny" in verdicts and state.rules.on_denial == "return_calls":
        return "A call was denied; the calls are returned to the caller."
    if "external" in verdicts and state.final_answer is None:
        return "A function that is known by its schema only was called; the caller has to run it."
    return None


def _start(state: State, batch: Batch, ready: tuple[int, ...]) -> Action:
    """Run the calls that are ready, or first refuse those among them that a limit forbids."""
    limit = spent_limit(state.rules.limits, state.ledger, state.at)
    over, limit = (ready, limit) if limit is not None else _over_limit(state, batch, ready)
    if over:
        return _refuse(state, batch, over, limit)
    nested = tuple(i for i in ready if _nested(batch.calls[i]))
    if not nested:
        return RunCalls(iteration=batch.iteration, indexes=ready)
    asking = sum(_asks_model(batch.calls[i]) for i in ready if i not in nested)  # what they need is not known before
    share = divided(state.rules.limits, state.ledger, starting=len(ready), by=len(nested) + asking)
    if share is None:
        return WithholdCalls(iteration=batch.iteration, indexes=nested, answer=TOO_LITTLE_LEFT, limit=None)
    return RunCalls(iteration=batch.iteration, indexes=ready, share=share)


def limit_of_restart(state: State, index: int, at: float) -> str | None:
    """Name the limit that forbids a running call to be started once more, or None.

    The other calls of its batch that are to run and have not started come first: what is left is counted without them,
    and as nothing while a nested run among them has not been given its share.

    Args:
        state: The run, while the call runs.
        index: The call's place in the open batch.
        at: Now, in seconds since the epoch.
    """
    batch = state.batch
    assert batch is not None
    if (limit := spent_limit(state.rules.limits, state.ledger, at)) is not None:
        return limit
    ready = tuple(i for i in _open(batch) if _may_start(batch.calls[i]))
    if state.rules.limits.max_tool_calls is not None and any(_nested(batch.calls[i]) for i in ready):
        return "max_tool_calls"
    over, limit = _over_limit(state, batch, (*ready, index))
    return limit if index in over else None


def _over_limit(state: State, batch: Batch, ready: tuple[int, ...]) -> tuple[tuple[int, ...], str]:
    """Find the calls that may not start, if any, and the limit that forbids them."""
    limits, ledger = state.rules.limits, state.ledger
    if limits.max_tool_calls is not None and ledger.tool_calls + len(ready) > limits.max_tool_calls:
        fitting = limits.max_tool_calls - ledger.tool_calls if limits.batch_over_limit == "fill_remaining" else 0
        return ready[max(fitting, 0) :], "max_tool_calls"
    by_function = [(i, _function(batch.calls[i])) for i in ready]
    over = _beyond(by_function, ledger.calls_by_function, limits.max_calls_per_function)
    if over or limits.max_repeated_calls is None:
        return over, "max_calls_per_function"
    by_digest = [(i, _digest(batch.calls[i])) for i in ready]
    allowed = dict.fromkeys((digest for _, digest in by_digest), limits.max_repeated_calls)
    return _beyond(by_digest, ledger.calls_by_digest, allowed), "max_repeated_calls"


def _beyond(calls: Iterable[tuple[int, str]], used: Mapping[str, int], allowed: Mapping[str, int]) -> tuple[int, ...]:
    """List the calls that would make a key's count pass what is allowed for it."""
    counts = dict(used)
    over: list[int] = []
    for index, key in calls:
        if key in allowed and counts.get(key, 0) >= allowed[key]:
            over.append(index)
        else:
            counts[key] = counts.get(key, 0) + 1
    return tuple(over)


def _refuse(state: State, batch: Batch, indexes: tuple[int, ...], limit: str) -> Action:
    """Answer calls that a limit forbids, or hand the whole batch back where the caller wants that."""
    text = _limit_text(state, limit)
    if state.rules.limits.on_limit == "return_calls":
        return Finish(status="limit_reached", limit=limit, reason=text, returned=True)
    answer = f"Not executed: {text}"
    if len(indexes) == batch.unanswered:
        return _withhold_open(batch, answer, limit)
    return WithholdCalls(iteration=batch.iteration, indexes=indexes, answer=answer, limit=limit)


def _withhold_open(batch: Batch, answer: str, limit: str | None) -> Action:
    """Answer every open call; those that a life before had started are not said to have not run."""
    started = tuple(i for i in _open(batch) if batch.calls[i].started)
    return WithholdCalls(
        iteration=batch.iteration,
        indexes=started or _open(batch),
        answer=IN_DOUBT if started else answer,
        limit=limit,
    )


def _open(batch: Batch) -> tuple[int, ...]:
    return tuple(i for i, call in enumerate(batch.calls) if call.answer is None)


def _may_start(call: Call) -> bool:
    return call.decided is not None and call.decided.verdict == "run" and not call.started


def _nested(call: Call) -> bool:
    return call.decided is not None and call.decided.nested


def _asks_model(call: Call) -> bool:
    return call.decided is not None and call.decided.asks_model


def _function(call: Call) -> str:
    return call.decided.function if call.decided is not None else call.request.name


def _digest(call: Call) -> str:
    return call.decided.digest if call.decided is not None else ""


def _stopped_text(state: State) -> str:
    return f"Not executed: the run was stopped. {state.stopping}".rstrip()


def _too_many_text(calls: int, most: int) -> str:
    return (
        f"Not executed: one reply may have max_calls_per_reply={most} calls, and this one has {calls}; none of them "
        "ran. Make fewer calls at once."
    )


def _empty_text(reply: ModelReplied) -> str:
    if not reply.calls:
        return "The reply has neither text nor calls."
    called = reply.calls[0].name[:64]
    return f"The model called {called}, and no functions were offered; there is no text beside the call."


def _limit_text(state: State, limit: str) -> str:
    """Say which limit was reached, and what it is, in words that a model and a person can read."""
    if limit == state.rules.attempts_limit:
        return f"The limit {limit}={state.rules.use_attempts} was reached."
    value = getattr(state.rules.limits, limit)
    if isinstance(value, Mapping):  # it names functions that this run may never have spoken of
        return f"The limit {limit} was reached."
    if isinstance(value, datetime):
        value = value.astimezone(UTC).isoformat()
    return f"The limit {limit}={value} was reached."
