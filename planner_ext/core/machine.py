"""``next_action``: what to do next in a state. Pure: the same state gives the same action.

    phase        decided by         limits that are checked
    -----------  -----------------  ---------------------------------------------------------------------
    planning     `_plan`            those of a request, and two round trips for a plan
    asking       `_ask`             those of a request: all but those on calls
    reviewing    `_review`          ``max_calls_per_reply``
    calling      `_continue_batch`  all, before the calls of the batch start
    answering    `_judge`           those of a request, where a question or another answer would take one
    completing   `next_action`      none

A limit on calls is that of a batch as a whole: `_over_limit` says which calls exceed it.
"""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal, TypeAlias

from planner_ext.core.facts import (
    CallDecided,
    IterationCompleted,
    ModelReplied,
    Purpose,
)
from planner_ext.core.fold import CUT_SHORT, apply, cut_short_text
from planner_ext.core.limits import (
    AMOUNTS,
    OF_A_START,
    TIMES,
    Left,
    RemainingLimit,
    remaining_limits,
)
from planner_ext.core.state import Batch, Call, Phase, State, asks
from planner_ext.core.values import Status, frozen

IN_DOUBT = "Cancelled while it ran; whether it took effect is not known."
"""What the model reads of a function that started and was not seen to finish."""

ENDED_WAITING = "Ended while it waited for a person's decision."
"""What the model reads of a function in which a run waited when its own run ended."""

NO_MORE_QUESTIONS = (
    "Not asked: no further questions are answered. Go on with what you know."
)

_REFUSED = {
    "structure": "The answer is not in its form",
    "revise": "The answer was refused",
}

_MOST_REQUESTS = 10
"""How often the answer is asked for again where no limit on round trips bounds it."""

_ITERATIONS_OF_A_PLANNED_RUN = 2
"""The plan, and at least one request for the goal."""


@frozen
class AskPlan:
    """Make the plan request."""


@frozen
class AskModel:
    """Make one request with the transcript.

    Attributes:
        tool_choice: Without functions, None omits their schema from the request, and
            ``none`` sends it with a tool choice that forbids calls.
        structured: Whether an answer must have its form.
        reads: Whether the function that reads on in a result is offered.
    """

    iteration: int
    offer: bool
    tool_choice: Literal["auto", "required", "none"] | None
    withheld: str | None
    structured: bool = False
    left: tuple[RemainingLimit, ...] = ()
    reads: bool = False


@frozen
class ReviewCalls:
    """Resolve, check and decide these calls of the open batch."""

    iteration: int
    indexes: tuple[int, ...]


@frozen
class RunCalls:
    """Run these calls of the open batch, each to its end or until it waits, also where one fails.

    Calls that have started are called again.
    """

    iteration: int
    indexes: tuple[int, ...]


@frozen
class WithholdCalls:
    """Answer these calls of the open batch without running them."""

    iteration: int
    indexes: tuple[int, ...]
    answer: str
    limit: str | None


@frozen
class CompleteIteration:
    """Call the iteration-completed callback if a function was called."""

    iteration: int
    called: bool


@frozen
class AddMessage:
    """Add a message that asks for the next step, the final-answer function, or another answer."""

    purpose: Purpose
    problem: str = ""


@frozen
class CheckAnswer:
    """Check an answer: its form, and what the application says of it."""

    answer: str


@frozen
class AskPerson:
    """Put a question of the model, or its plain reply, to the clarifier.

    Attributes:
        iterations: Round trips that the answer may take, so that one is left to use it.
    """

    question: str
    iteration: int
    index: int | None
    iterations: int | None


@frozen
class Pause:
    """Leave the run as a value until a person has decided."""


@frozen
class Finish:
    """End the run."""

    status: Status
    answer: str = ""
    limit: str | None = None
    reason: str = ""
    returned: bool = False


Action: TypeAlias = (
    AskPlan
    | AskModel
    | AskPerson
    | ReviewCalls
    | RunCalls
    | WithholdCalls
    | CompleteIteration
    | AddMessage
    | CheckAnswer
    | Pause
    | Finish
)


def next_action(state: State, around: Left | None = None) -> Action | None:
    """Decide what to do next; None while the run is paused, has ended or has not begun.

    ``around`` is what is left to a run inside a function; no amount is below 0.
    """
    if state.phase is Phase.COMPLETING:
        return CompleteIteration(iteration=state.iteration - 1, called=state.called)
    if state.phase is Phase.REVIEWING:
        return _review(state)
    decide = _DECIDE.get(state.phase)
    if decide is None:
        return None
    left = Left.of(state.rules.limits, state.usage, state.at)
    if around is not None:
        left = left.within(around)
    action = decide(state, left)
    return (
        _checked_answer(state, left, action)
        if isinstance(action, Finish)
        and (state.rules.structured or state.rules.checked)
        else action
    )


def may_have_asked(state: State) -> bool:
    """Return whether this process, or one that has ended, may have sent the next request.

    Usually nothing is recorded before a request. `ModelAsked` announces the exceptions:
    a retry, and a clarifier's request.
    """
    if state.intent != "implied":
        return state.intent == "recorded"
    if state.phase is Phase.COMPLETING:
        done = IterationCompleted(
            iteration=state.iteration - 1, called=state.called, at=state.at, seconds=0.0
        )
        state = apply(state, done)
    return isinstance(next_action(state), AskModel | AskPlan)


def _spent(state: State, left: Left) -> str | None:
    limit = left.used_up(OF_A_START) or _spent_in_row(state)
    return state.refused.limit if limit is None and state.refused is not None else limit


def _spent_in_row(state: State) -> str | None:
    limits = state.rules.limits
    if (
        limits.max_consecutive_errors is not None
        and state.errors_in_row >= limits.max_consecutive_errors
    ):
        return "max_consecutive_errors"
    if (
        limits.max_repeated_denials is not None
        and state.denials_in_row >= limits.max_repeated_denials
    ):
        return "max_repeated_denials"
    return None


def _no_request(state: State, left: Left) -> str | None:
    return "max_iterations" if left.iterations <= 0 else _spent(state, left)


def _plan(state: State, left: Left) -> Action:
    forbidden = state.stopping is not None or _spent(state, left) is not None
    return (
        _ask(state, left)
        if forbidden or left.iterations < _ITERATIONS_OF_A_PLANNED_RUN
        else AskPlan()
    )


def _ask(state: State, left: Left) -> Action:
    if state.final_answer is not None:
        return Finish(status="answered", answer=state.final_answer)
    if state.structuring:
        return _ask_in_form(state, left)
    answer = "" if state.checked is None else state.checked.answer
    if state.stopping is not None:
        return Finish(status="stopped", answer=answer, reason=state.stopping)
    answers = state.rules.limits.on_limit == "answer"
    limit = (
        state.limit
        or _spent(state, left)
        or ("max_iterations" if left.iterations <= 0 else None)
    )
    answers = answers and (state.refused is None or state.refused.answer)
    if left.around and left.used_up(AMOUNTS & left.around):
        answers = False  # the forced answer is the outermost run's
    if limit is not None and (
        not answers or left.iterations <= 0 or left.used_up(TIMES) is not None
    ):
        return Finish(
            status="limit_reached",
            answer=answer,
            limit=limit,
            reason=_limit_text(state, left, limit),
        )
    return _request(
        state,
        left,
        "max_iterations"
        if limit is None and left.iterations == 1 and answers
        else limit,
    )


def _ask_in_form(state: State, left: Left) -> Action:
    """Ask for the answer again; where no request may follow, end with it as it is."""
    answer = "" if state.checked is None else state.checked.answer
    if state.stopping is not None:
        return Finish(status="stopped", answer=answer, reason=state.stopping)
    limit = _no_request(state, left)
    if limit is not None:
        return Finish(
            status="limit_reached",
            answer=answer,
            limit=limit,
            reason=_limit_text(state, left, limit),
        )
    return _request(state, left, state.limit)


def _request(state: State, left: Left, limit: str | None) -> AskModel:
    rules = state.rules
    withheld = limit
    offer = limit is None
    # `attempts_limit` is "" where reaching `use_attempts` is no limit.
    if offer and rules.use_attempts is not None and state.rounds >= rules.use_attempts:
        withheld = rules.attempts_limit or None
        offer = False
    closing = _closes_step(state)
    offer = offer and not (state.reask or closing or state.structuring)
    keep_schema = "none" if rules.limits.last_trip == "none" else None
    return AskModel(
        iteration=state.iteration,
        offer=offer,
        tool_choice=rules.tool_choice if offer else keep_schema,
        withheld=withheld,
        structured=rules.structured and (withheld is not None or not closing),
        left=remaining_limits(rules.limits, state.usage, left),
        reads=bool(state.cut),
    )


def _closes_step(state: State) -> bool:
    rounds = state.rules.rounds_per_step
    return rounds is not None and state.step_rounds >= rounds and not state.structuring


def _judge(state: State, left: Left) -> Action:
    """Decide what a reply without calls is: the answer, the close of a step, or incomplete."""
    reply = state.reply
    assert reply is not None
    if reply.finish_reason in CUT_SHORT:
        return Finish(
            status="incomplete", reason=cut_short_text(reply.finish_reason, reply.text)
        )
    # The reply is charged by now: 0 left is the last one allowed, below 0 more than that.
    limit = reply.withheld or ("max_iterations" if left.iterations < 0 else None)
    answer = reply.text if reply.final_answer is None else reply.final_answer
    if limit is not None:
        reason = _limit_text(state, left, limit)
        if not answer:
            reason = f"{reason} {_empty_text(reply)}"
        return Finish(status="limit_reached", answer=answer, limit=limit, reason=reason)
    if (
        reply.final_answer is None
        and (action := _continued(state, left, reply)) is not None
    ):
        return action
    if not answer:
        return Finish(status="incomplete", reason=_empty_text(reply))
    return Finish(status="answered", answer=answer)


def _continued(state: State, left: Left, reply: ModelReplied) -> Action | None:
    """Decide what follows a plain reply; None if it is the end."""
    purpose: Literal["step", "insist"] | None = None
    if _closes_step(state) and not reply.offered:
        purpose = "step"
    elif reply.text and reply.offered and state.rules.require_final_answer:
        purpose = "insist"
    if state.stopping is not None:
        return (
            None if purpose is None else Finish(status="stopped", reason=state.stopping)
        )
    if purpose != "step" and reply.text and _may_clarify(state, left):
        if state.rules.clarifier and not state.asked:
            return _question(left, reply.text, reply.iteration, None)
        if purpose == "insist" and asks(reply.text):
            return Pause()
    return None if purpose is None else AddMessage(purpose=purpose)


def _may_clarify(state: State, left: Left) -> bool:
    allowed = state.rules.max_clarifications
    if allowed is not None and state.clarifications >= allowed:
        return False
    return not state.structuring and _no_request(state, left) is None


def _question(
    left: Left, question: str, iteration: int, index: int | None
) -> AskPerson:
    iterations = (
        None if left.iterations == math.inf else max(int(left.iterations) - 1, 0)
    )
    return AskPerson(
        question=question, iteration=iteration, index=index, iterations=iterations
    )


def _checked_answer(state: State, left: Left, end: Finish) -> Action:
    """Decide what comes before an end with an answer that is checked.

    A refused answer is asked for again, until no request may be made or, without a
    limit on round trips, ten times; then it stays, and the run is not ``answered``.
    """
    checked = state.checked
    if not end.answer or (checked is not None and not checked.problem):
        return end
    if state.stopping is not None:
        return Finish(status="stopped", answer=end.answer, reason=state.stopping)
    if checked is None:
        return CheckAnswer(answer=end.answer)
    refused = _REFUSED[checked.purpose]
    asked_again = state.phase is Phase.ASKING and state.final_answer is None
    spent = _no_request(state, left) or (end.limit if asked_again else None)
    if spent is not None:
        reason = f"{refused}, and no further request may be made. {checked.problem}"
        return Finish(
            status="limit_reached",
            answer=end.answer,
            limit=end.limit or spent,
            reason=reason,
        )
    if left.iterations == math.inf and state.refusals >= _MOST_REQUESTS:
        reason = f"{refused}; it was asked for again {state.refusals} times. {checked.problem}"
        return Finish(status="incomplete", answer=end.answer, reason=reason)
    return AddMessage(purpose=checked.purpose, problem=checked.problem)


def _review(state: State) -> Action:
    batch = state.batch
    assert batch is not None
    answer = _stopped_text(state)
    if answer is not None:
        return _withhold_open(batch, answer)
    most = state.rules.limits.max_calls_per_reply
    count = len(batch.calls)
    if most is not None and count > most:
        answer = (
            f"Not executed: one reply may have max_calls_per_reply={most} calls, and this one has {count}; none of "
            "them ran. Make fewer calls at once."
        )
        return _withhold_open(batch, answer)
    undecided = tuple(i for i, call in enumerate(batch.calls) if call.decided is None)
    return ReviewCalls(iteration=batch.iteration, indexes=undecided)


def _continue_batch(state: State, left: Left) -> Action:
    """Decide how a decided batch continues: it is returned, withheld, run, or waits."""
    batch = state.batch
    assert batch is not None
    entered = [
        index
        for index, call in enumerate(batch.calls)
        if call.left and call.answer is None
    ]
    if entered:
        return _continue_inside(state, left, batch, entered)
    reason = _returned(state, batch)
    if reason is not None and state.stopping is None:
        return Finish(status="stopped", reason=reason, returned=True)
    if state.final_answer is not None:
        return _withhold_open(
            batch, "Not executed: the final answer was given in the same message."
        )
    answer = _stopped_text(state)
    if answer is not None:
        return _withhold_open(batch, answer)
    if left.iterations <= 0:
        return _refuse(state, left, batch, tuple(_open(batch)), "max_iterations")
    ready = _ready(batch)
    if ready and (
        len(ready) == batch.unanswered or state.rules.on_deferred == "run_safe_first"
    ):
        return _start(state, left, batch, ready)
    return _put_questions(state, left, batch) or Pause()


def _continue_inside(
    state: State, left: Left, batch: Batch, entered: list[int]
) -> Action:
    """Decide how a batch continues with calls that were left because a run in them waits: see `CallLeft`.

    First every call in which no run waits any more is called again, whatever the limits:
    a run inside ends by itself where nothing is left to it. Then a run that is to stop
    answers the others; another one starts its other calls, or pauses.
    """
    runs = tuple(
        i for i in entered if not batch.calls[i].waits_inside or batch.calls[i].going_on
    )
    if runs:
        return RunCalls(iteration=batch.iteration, indexes=runs)
    why = state.ending if state.stopping is None else state.stopping
    if why is not None:
        return WithholdCalls(
            iteration=batch.iteration,
            indexes=tuple(entered),
            answer=f"{ENDED_WAITING} {why}".rstrip(),
            limit=None,
        )
    ready = _ready(batch)
    if ready and state.rules.on_deferred == "run_safe_first":
        return _start(state, left, batch, ready)
    return _put_questions(state, left, batch) or Pause()


_DECIDE: dict[Phase, Callable[[State, Left], Action]] = {
    Phase.PLANNING: _plan,
    Phase.ASKING: _ask,
    Phase.ANSWERING: _judge,
    Phase.CALLING: _continue_batch,
}
"""The decision of each phase that limits concern."""


def _put_questions(state: State, left: Left, batch: Batch) -> Action | None:
    """Refuse the questions over the cap, put the others to the clarifier; None: the rest is a person's."""
    questions = {
        i: call
        for i, call in _open(batch).items()
        if call.decided and call.decided.kind == "question"
    }
    allowed = state.rules.max_clarifications
    over = (
        ()
        if allowed is None
        else tuple(questions)[max(allowed - state.clarifications, 0) :]
    )
    if over:
        return WithholdCalls(
            iteration=batch.iteration,
            indexes=over,
            answer=NO_MORE_QUESTIONS,
            limit=None,
        )
    unasked = next((i for i, call in questions.items() if not call.asked), None)
    if unasked is None and not (questions and left.used_up(TIMES)):
        return None
    limit = _spent(state, left)
    if limit is not None:
        return _refuse(state, left, batch, tuple(questions), limit)
    decided = None if unasked is None else questions[unasked].decided
    if not state.rules.clarifier or decided is None:
        return None
    return _question(left, decided.prompt, batch.iteration, unasked)


def _returned(state: State, batch: Batch) -> str | None:
    verdicts = {
        call.decided.verdict for call in batch.calls if call.decided is not None
    }
    if "deny" in verdicts and state.rules.on_denial == "return_calls":
        return "A call was denied; the calls are returned to the caller."
    if "external" in verdicts and state.final_answer is None:
        return "A function that is known by its schema only was called; the caller has to run it."
    return None


def _start(
    state: State, left: Left, batch: Batch, ready: Mapping[int, CallDecided]
) -> Action:
    limit = _spent(state, left)
    over, limit = (
        (tuple(ready), limit) if limit is not None else _over_limit(state, left, ready)
    )
    if over:
        return _refuse(state, left, batch, over, limit)
    return RunCalls(iteration=batch.iteration, indexes=tuple(ready))


def limit_of_restart(state: State, index: int, at: float) -> str | None:
    """Name the limit that forbids starting a running call again.

    The calls of its batch that are about to start for the first time count before it.
    """
    assert state.batch is not None
    running = state.batch.calls[index].decided
    assert running is not None
    left = Left.of(state.rules.limits, state.usage, at)
    limit = left.used_up(OF_A_START) or _spent_in_row(state)
    if limit is not None:
        return limit
    over, limit = _over_limit(state, left, {**_ready(state.batch), index: running})
    return limit if index in over else None


def _over_limit(
    state: State, left: Left, ready: Mapping[int, CallDecided]
) -> tuple[tuple[int, ...], str]:
    limits = state.rules.limits
    room = left.amounts.get("max_tool_calls", math.inf)
    if len(ready) > room:
        fitting = (
            max(int(room), 0) if limits.batch_over_limit == "fill_remaining" else 0
        )
        return tuple(ready)[fitting:], "max_tool_calls"
    if left.starts:
        functions = {i: decided.function for i, decided in ready.items()}
        over = _beyond(functions, left.starts)
        if over:
            return over, "max_calls_per_function"
    if limits.max_repeated_calls is None:
        return (), ""
    digests = {i: decided.counted_as for i, decided in ready.items()}
    used = state.calls_by_digest
    repeats = {
        digest: limits.max_repeated_calls - used.get(digest, 0)
        for digest in digests.values()
    }
    return _beyond(digests, repeats), "max_repeated_calls"


def _beyond(calls: Mapping[int, str], left: Mapping[str, float]) -> tuple[int, ...]:
    rest = dict(left)
    over: list[int] = []
    for index, key in calls.items():
        if rest.get(key, 1) <= 0:
            over.append(index)
        elif key in rest:
            rest[key] -= 1
    return tuple(over)


def _refuse(
    state: State, left: Left, batch: Batch, indexes: tuple[int, ...], limit: str
) -> Action:
    """Answer calls that a limit forbids, or return the whole batch to the caller."""
    text = _limit_text(state, left, limit)
    if state.rules.limits.on_limit == "return_calls":
        return Finish(status="limit_reached", limit=limit, reason=text, returned=True)
    if len(indexes) == batch.unanswered:
        return _withhold_open(batch, f"Not executed: {text}", limit)
    return WithholdCalls(
        iteration=batch.iteration,
        indexes=indexes,
        answer=f"Not executed: {text}",
        limit=limit,
    )


def _withhold_open(batch: Batch, answer: str, limit: str | None = None) -> Action:
    """Answer every open call without running it; first, with another text, those in doubt."""
    started = tuple(i for i, call in _open(batch).items() if call.started)
    return WithholdCalls(
        iteration=batch.iteration,
        indexes=started or tuple(_open(batch)),
        answer=IN_DOUBT if started else answer,
        limit=limit,
    )


def _open(batch: Batch) -> dict[int, Call]:
    return {i: call for i, call in enumerate(batch.calls) if call.answer is None}


def _ready(batch: Batch) -> dict[int, CallDecided]:
    return {
        i: call.decided
        for i, call in enumerate(batch.calls)
        if call.answer is None
        and not call.starts
        and call.decided is not None
        and call.decided.verdict == "run"
    }


def _stopped_text(state: State) -> str | None:
    why = state.ending if state.stopping is None else state.stopping
    return None if why is None else f"Not executed: the run was stopped. {why}".rstrip()


def _empty_text(reply: ModelReplied) -> str:
    if not reply.calls:
        return "The reply has neither text nor calls."
    called = reply.calls[0].name[:64]
    return f"The model called {called}, and no functions were offered; there is no text beside the call."


def _limit_text(state: State, left: Left, limit: str) -> str:
    if limit == state.rules.attempts_limit:
        return f"The limit {limit}={state.rules.use_attempts} was reached."
    if state.refused is not None and limit == state.refused.limit:
        return state.refused.reason
    if limit in left.around:
        return f"The limit {limit} of the run around was reached."
    value = getattr(state.rules.limits, limit, None)  # otherwise a shared budget's
    # The keys may name functions that the model has not seen.
    if value is None or isinstance(value, Mapping):
        return f"The limit {limit} was reached."
    if isinstance(value, datetime):
        value = value.astimezone(UTC).isoformat()
    return f"The limit {limit}={value} was reached."
