"""What can happen in a run. A run is the list of these; everything else is computed from them.

Facts are past tense, frozen, and complete: a journal needs nothing else to be read.
Every ``at`` is in seconds since the epoch, every ``seconds`` is the active time since
the last fact that has one, and every ``iteration`` is the 0-based iteration of the
loop. A plan request is made before iteration 0.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from planner_ext.core.limits import Budget
from planner_ext.core.results import Cut
from planner_ext.core.values import (
    CallKind,
    Message,
    RequestedCall,
    Status,
    Usage,
    updated,
)

Verdict: TypeAlias = Literal[
    "run", "answer", "deny", "defer", "final_answer", "external"
]
"""What was decided about a call: run it; answer it without running it (unknown,
invalid, supplied); deny it; ask a person; take it as the final answer; return it to the
caller."""

FunctionOutcome: TypeAlias = Literal["ok", "failed", "timed_out", "cancelled"]
"""How a function that was started ended; ``timed_out`` at its own timeout, or at a time
limit of the run."""


_IN_NO_LINE = frozenset(
    {
        "type",
        "at",
        "seconds",
        "digest",
        "repetition",
        "signature",
        "parameters",
        "fingerprint",
        "run_id",
        "source",
        "trace",
    }
)
LINE_WIDTH = 120
"""The most characters of an event's line."""


class EventLine:
    """The base of everything that a stream yields: ``str(event)`` is one line, ``repr(event)`` has every field."""

    __slots__ = ()

    def __str__(self) -> str:
        event: Any = self
        given = [
            (field.name, getattr(event, field.name), field.default)
            for field in fields(event)
        ]
        shown = [
            f"{name}={value!r}"
            for name, value, default in given
            if name not in _IN_NO_LINE
            and isinstance(value, str | int | float)
            and value != default
        ]
        line = " ".join([type(self).__name__, *shown])
        return line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 1]}…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The settings of one run that its machine depends on; fixed when it starts, and recorded in its journal.

    Attributes:
        limits: What the run may spend.
        plan: Whether a plan is requested before the first step.
        charge_plan: Whether the plan request counts as a round trip.
        use_attempts: Maximum number of tool rounds, after which no functions are
            offered; None is unlimited.
        attempts_limit: The name under which a result reports that ``use_attempts`` was
            reached, for instance ``maximum_use_attempts``; "" if it is not reported as
            a limit, so that the run ends ``answered``.
        tool_choice: ``auto`` lets the model choose, ``required`` makes it call a
            function in each tool round.
        rounds_per_step: Tool rounds of one step, after which a plain reply closes it;
            None chains without end.
        require_final_answer: Whether a plain reply is not enough, only the final-answer
            function is.
        on_denial: What follows a denied call: it is answered with a refusal, it is
            removed and the model asked again without functions, or its batch is
            returned to the caller.
        close_on_denial: Whether a denied call ends the chain of tool rounds: the next
            request offers no functions.
        on_deferred: Whether the other calls of a batch wait for a deferred one, or run
            before the pause.
        structured: Whether the answer must match a form. The journal does not record
            the form itself.
        clarifier: Whether the model's questions, and its plain replies, are put to a
            clarifier.
        max_clarifications: How many questions are answered; None is unlimited.
    """

    limits: Budget = Budget(max_calls_per_reply=None)
    plan: bool = False
    charge_plan: bool = True
    use_attempts: int | None = None
    attempts_limit: str = ""
    tool_choice: Literal["auto", "required"] = "auto"
    rounds_per_step: int | None = None
    require_final_answer: bool = False
    on_denial: Literal["refuse", "reask", "return_calls"] = "refuse"
    close_on_denial: bool = False
    on_deferred: Literal["hold_all", "run_safe_first"] = "hold_all"
    structured: bool = False
    clarifier: bool = False
    max_clarifications: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Guards:
    """What can decide the calls of a run before they are executed, as far as that is data.

    A policy is written as JSON text in normal form, anything else by name.

    Attributes:
        interceptors: In the order in which they are asked.
        pre_invoke: The pre-invoke callbacks, in that order.
        checks: The ``check_for_intervention`` callbacks, in that order.
        filters: The policies of the kernel's `ApprovalFilter`s, in that order.
        unmatched: What happens to an undecided call.
        expires_in: Seconds for which a question is open by default; None is without
            end.
        marked: Fully qualified names of the offered functions that require approval by
            themselves, sorted.
        shared_budgets: The names of the budgets that the run shares with others,
            sorted.
        authorize: The names of the hooks that say who may decide, sorted.
    """

    interceptors: tuple[str, ...] = ()
    pre_invoke: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    unmatched: Literal["approve", "defer", "deny"] = "approve"
    expires_in: float | None = None
    marked: tuple[str, ...] = ()
    shared_budgets: tuple[str, ...] = ()
    authorize: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(EventLine):
    """A run began: with these rules, and this transcript.

    Attributes:
        run_id: The run's name; in a store, the one that it was started under.
        messages: The first messages of the transcript, as values of Semantic Kernel.
        goal: The goal of the run; "" if it continues a history without one.
        guards: What could decide its calls; None if the run is not kept in a store.
        trace: The W3C ``traceparent`` of the span that started it; "" if nothing traced
            it.
    """

    run_id: str
    rules: Rules
    messages: tuple[Message, ...]
    goal: str = ""
    guards: Guards | None = None
    trace: str = ""
    at: float
    type: Literal["RunStarted"] = "RunStarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(EventLine):
    """The plan request was answered; the transcript now opens with the plan.

    Attributes:
        plan: The text of the plan.
        messages: The transcript as it now is.
        usage: As in `ModelReplied`.
    """

    plan: str
    messages: tuple[Message, ...]
    usage: Usage
    at: float
    seconds: float
    type: Literal["Planned"] = "Planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageAdded(EventLine):
    """The planner added a message to the transcript, to which the model replies next.

    Attributes:
        message: The message, a value of Semantic Kernel.
        purpose: What it asks for: the next ``step``, the final-answer function
            (``insist``), or the answer in the ``response_format`` (``structure``).
    """

    message: Message
    purpose: Literal["step", "insist", "structure"]
    at: float
    type: Literal["MessageAdded"] = "MessageAdded"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAsked(EventLine):
    """A request is about to be sent; recorded where the fact before it does not imply the request.

    Attributes:
        iteration: The iteration that the request opens; -1 for the plan request.
        index: The index of the call whose function makes the request; None for a
            request of the run itself.
        usage: Tokens and cost that this call has used so far, with estimates for
            requests under way.
    """

    iteration: int
    index: int | None = None
    usage: Usage = Usage()
    at: float
    type: Literal["ModelAsked"] = "ModelAsked"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailed(EventLine):
    """A request has no reply: it failed, was interrupted, or its process ended.

    Attributes:
        iteration: As in `ModelAsked`.
        reason: Why, for the record.
        usage: Charged to the run: 1 round trip, or 0 if the request did not reach the
            server; estimated tokens and their cost.
    """

    iteration: int
    reason: str
    usage: Usage = Usage()
    at: float
    seconds: float
    type: Literal["RequestFailed"] = "RequestFailed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReplied(EventLine):
    """One request was answered.

    Attributes:
        message: The reply, a value of Semantic Kernel.
        text: Its text, "" without one.
        calls: The function calls in it, in order.
        finish_reason: The reason that the service gave, or None.
        usage: Charged to the run: the round trips that the reply's metadata reports, 1
            without them; tokens and their cost, reported or estimated.
        offered: Whether functions were offered in the request.
        withheld: The limit because of which functions that exist were not offered, or
            None.
        final_answer: The answer that the final-answer function was called with although
            it was not offered, or None.
    """

    iteration: int
    message: Message
    text: str
    calls: tuple[RequestedCall, ...]
    finish_reason: str | None
    usage: Usage
    offered: bool
    withheld: str | None
    final_answer: str | None = None
    at: float
    seconds: float
    type: Literal["ModelReplied"] = "ModelReplied"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFact(EventLine):
    """The base of the facts about one call: its iteration, its index in the batch, its id, and its function."""

    iteration: int
    index: int
    call_id: str
    function: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherQuestion:
    """A question about a deferred call that is put when those before it are answered.

    Attributes:
        prompt, roles, source: As in `CallDecided`.
        expires_in: Seconds after which it expires, from then on; None: never.
    """

    prompt: str = ""
    roles: tuple[str, ...] = ()
    source: str = ""
    expires_in: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDecided(CallFact):
    """One call of the open batch was decided; a deferred one is decided a second time when its answer comes.

    Attributes:
        iteration, index, call_id: As in `CallStarted`.
        function: Fully qualified name of the function that would run.
        kind: What the requested call turned out to be.
        verdict: What was decided.
        answer: What the model reads where the call does not run.
        reason: Why it does not run, or waits: the words of the interceptor, rule or
            person; "" without any.
        digest: Digest of function and converted arguments; "" if nothing could run.
        signature: The function's parameters, ``name=digest`` of each; "" if they are
            not known.
        fingerprint: Digest of run, iteration, call id, function and arguments, to which
            a decision binds.
        arguments: JSON text of what the function gets where that was converted from the
            model's text, or None.
        edited: JSON text of the arguments that replace the model's, converted in the
            same way, or None.
        by: Who or what decided: an interceptor, a policy's rule, a person; "" for the
            loop itself.
        sticky: Whether the same question is answered so for the rest of the run, for
            the function or for these arguments.
        expires_at: When a deferred call stops waiting, or None.
        prompt: The text that a person reads with a deferred call; "" without one.
        final_answer: The answer that the final-answer function was called with, or
            None.
        person: Whether a person decided, on what they were shown.
        approved: Whether a decision let the call run: an interceptor's, a policy's, a
            person's, also an earlier one for the rest of the run. False if the call
            runs because no interceptor objected. Of a deferred call: a person approved
            it, and others are still asked.
        nested: Whether the function is a planner itself.
        roles: The roles that may decide a deferred call; empty for anyone. Data of the
            application.
        source: Digest of what asked about the call: a policy's rule or default, the
            function's mark, or an interceptor with its prompt. "" if nothing asked. A
            sticky approval holds for this source and these roles.
        parameters: JSON text of the schema of a deferred call's parameters.
        cut: Where a supplied result, which is the ``answer``, was cut for the model;
            None if it was not.
        repetition: Digest of function and arguments without those that are the
            parameters' defaults; "" if there are none of these. `counted_as` uses it,
            and no decision binds to it.
        further: What others are asked about a deferred call, one after the other, once
            this question is answered.
    """

    kind: CallKind
    verdict: Verdict
    answer: str = ""
    reason: str = ""
    digest: str = ""
    signature: str = ""
    fingerprint: str = ""
    arguments: str | None = None
    edited: str | None = None
    by: str = ""
    sticky: Literal["function", "arguments"] | None = None
    expires_at: float | None = None
    prompt: str = ""
    final_answer: str | None = None
    person: bool = False
    nested: bool = False
    approved: bool = False
    roles: tuple[str, ...] = ()
    source: str = ""
    parameters: str = ""
    cut: Cut | None = None
    repetition: str = ""
    further: tuple[FurtherQuestion, ...] = ()
    at: float
    type: Literal["CallDecided"] = "CallDecided"

    @property
    def counted_as(self) -> str:
        """@private The name under which ``max_repeated_calls`` counts the call; an edited one by its own arguments."""
        return (
            self.repetition if self.repetition and self.edited is None else self.digest
        )

    @property
    def binds(self) -> bool:
        """@private Whether the call runs only as decided."""
        return self.approved or self.edited is not None

    def arguments_of(self, request: RequestedCall) -> str:
        """@private Return the JSON text of the function's arguments: edited, converted, or as the model wrote them."""
        given = request.arguments if self.arguments is None else self.arguments
        return given if self.edited is None else self.edited


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsWithheld(EventLine):
    """Calls were answered without running: because of a limit, a stop, or a final answer beside them.

    Attributes:
        indexes: The indexes of the calls in their batch.
        answer: What the model reads as the result of each.
        limit: The limit that they would have exceeded, or None.
    """

    iteration: int
    indexes: tuple[int, ...]
    answer: str
    limit: str | None
    at: float
    type: Literal["CallsWithheld"] = "CallsWithheld"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStarted(CallFact):
    """A function is about to run; recorded before each start, also when a filter starts it again.

    Attributes:
        iteration: The iteration in which the model made the call.
        index: The call's index in its batch, from 0.
        call_id: The call's id, unique in its batch.
        function: Fully qualified name of the function.
        attempt: Which start of the call this is, from 1.
    """

    attempt: int = 1
    at: float
    type: Literal["CallStarted"] = "CallStarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedCallStarted(EventLine):
    """A running call's function is about to start another one: itself, or in a run inside it. See `CallFinished.spent`.

    Recorded in a run that is kept in a store, before the start: it is charged if the
    process ends amid the call.

    Attributes:
        iteration: The iteration of the running call.
        index: Its index in the batch.
        function: Fully qualified name of the function that it starts.
        usage: As in `ModelAsked`.
    """

    iteration: int
    index: int
    function: str
    usage: Usage = Usage()
    at: float
    type: Literal["NestedCallStarted"] = "NestedCallStarted"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFinished(CallFact):
    """A started call ended; recorded in the order in which the calls end.

    Attributes:
        iteration, index, call_id, function: As in `CallStarted`.
        outcome: How the function ended: ``ok``, ``failed``, ``timed_out`` or
            ``cancelled``.
        result: What the model reads, or the beginning of which it reads.
        cut: Where the result was cut for the model; None if it was not.
        error: Type and message of the exception, "" without one; for the record, never
            sent to the model.
        terminate: Whether a filter asked to end the run after this batch.
        spent: The usage of the function: its requests and nested calls. None means that
            it is not known: what the call recorded before it happened is charged.
        brought: The functions whose calls or results were in the histories of the runs
            and requests inside it.
    """

    outcome: FunctionOutcome
    result: str
    error: str = ""
    terminate: bool = False
    spent: Usage | None = None
    brought: tuple[str, ...] = ()
    cut: Cut | None = None
    at: float
    type: Literal["CallFinished"] = "CallFinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Clarified(EventLine):
    """A question of the model was put to the clarifier or a person.

    Attributes:
        question: Its text; the whole of a plain reply.
        answer: What the model reads; None without an answer: a call then waits for a
            person, and a plain reply is taken as it is.
        iteration: The iteration in which it was asked.
        index: The index of the call that asks; None for a plain reply.
        by: Who answered, "" if that is not known.
        denied: Why a person did not answer, "" without a reason; None if the question
            was answered.
        usage: Charged to the run: the round trips that the answer took, their tokens
            and cost; 0 of a person's.
        seconds: Active time; waiting for a person is not in it.
    """

    question: str
    answer: str | None
    iteration: int
    index: int | None
    by: str = ""
    denied: str | None = None
    usage: Usage = Usage()
    at: float
    seconds: float
    type: Literal["Clarified"] = "Clarified"


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCompleted(EventLine):
    """Every call of a batch has its result in the transcript.

    Attributes:
        terminate: Whether the iteration-completed callback asked to end the run.
        reason: The reason that the callback gave, "" without one.
        messages: The transcript that the callback replaced the run's with, or None.
        called: Whether any function was started, so that the callback was due.
    """

    iteration: int
    called: bool
    terminate: bool = False
    reason: str = ""
    messages: tuple[Message, ...] | None = None
    at: float
    seconds: float
    type: Literal["IterationCompleted"] = "IterationCompleted"


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChecked(EventLine):
    """The form of an answer was checked.

    Attributes:
        answer: The answer, as the model gave it.
        problem: What is wrong with it, "" if the form is right.
    """

    answer: str
    problem: str
    at: float
    type: Literal["AnswerChecked"] = "AnswerChecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(EventLine):
    """The run was asked to stop: no further request is made, no further function started.

    Attributes:
        reason: Why, in words.
    """

    reason: str
    at: float
    type: Literal["StopRequested"] = "StopRequested"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChanged(EventLine):
    """New limits replaced those of a run while it was driven; what was spent stays spent.

    Attributes:
        limits: The new limits.
        by: Who changed them, "" if that is not known.
    """

    limits: Budget
    by: str = ""
    at: float
    seconds: float
    type: Literal["BudgetChanged"] = "BudgetChanged"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBudgetsChecked(EventLine):
    """A budget that the run shares with others forbade what was due next; or it was forbidden before, and no longer is.

    What is allowed is not recorded. But in a store, each activation that continues a
    run with shared budgets begins with this fact: so no two have begun with a journal
    of the same length.

    Attributes:
        limit: The budget and its limit, such as ``per user: max_cost``; None if an
            earlier refusal no longer counts.
        reason: Which limit was reached, in words; "" without one.
        answer: Whether one request, without functions, is still reserved for the run's
            answer.
    """

    limit: str | None = None
    reason: str = ""
    answer: bool = False
    at: float
    type: Literal["SharedBudgetsChecked"] = "SharedBudgetsChecked"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused(EventLine):
    """The run waits for a person; it executes nothing until it is resumed.

    Attributes:
        trace: The W3C ``traceparent`` of the span in which it paused; "" if nothing
            traced it.
    """

    trace: str = ""
    at: float
    seconds: float
    type: Literal["Paused"] = "Paused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(EventLine):
    """A paused or ended run was resumed.

    Attributes:
        limits: New limits, which replace the old ones; what was spent stays spent. None
            keeps the old ones.
        trace: The W3C ``traceparent`` of the span that resumed it; "" if nothing traced
            it.
    """

    limits: Budget | None = None
    trace: str = ""
    at: float
    type: Literal["Resumed"] = "Resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(EventLine):
    """The run ended.

    Attributes:
        status: How it ended.
        answer: The final answer, "" without one.
        limit: The limit that ended it, or None.
        reason: Why, in words.
        returned: Whether the open batch is returned to the caller, unanswered.
    """

    status: Status
    answer: str = ""
    limit: str | None = None
    reason: str = ""
    returned: bool = False
    at: float
    seconds: float
    type: Literal["Ended"] = "Ended"


Fact: TypeAlias = (
    RunStarted
    | Planned
    | MessageAdded
    | ModelAsked
    | RequestFailed
    | ModelReplied
    | CallDecided
    | CallsWithheld
    | CallStarted
    | NestedCallStarted
    | CallFinished
    | Clarified
    | IterationCompleted
    | AnswerChecked
    | StopRequested
    | BudgetChanged
    | SharedBudgetsChecked
    | Paused
    | Resumed
    | Ended
)
"""Everything that can happen in a run."""


def cost_of(fact: Fact, rules: Rules | None = None) -> Usage:
    """Return what a fact charges to its run.

    What a call recorded before it happened is not in it: the state knows that, see
    `planner_ext.core.state.Call.recorded`.

    Args:
        fact: Any fact.
        rules: Of the run, since ``charge_plan`` frees the round trip of the plan
            request. None counts it, as shared budgets do.
    """
    match fact:
        case Planned() | ModelReplied() | RequestFailed() | Clarified():
            free = (
                rules is not None and not rules.charge_plan and _is_plan_request(fact)
            )
            iterations = 0 if free else fact.usage.iterations
            return updated(
                fact.usage, iterations=iterations, active_seconds=fact.seconds
            )
        case CallStarted(function=function):
            return Usage(tool_calls=1, calls_by_function={function: 1})
        case CallFinished(spent=Usage() as spent):
            return spent
        case IterationCompleted() | BudgetChanged() | Paused() | Ended():
            return Usage(active_seconds=fact.seconds)
        case _:
            return Usage()


def _is_plan_request(fact: Planned | ModelReplied | RequestFailed | Clarified) -> bool:
    return isinstance(fact, Planned) or (
        isinstance(fact, RequestFailed) and fact.iteration < 0
    )
