"""What can happen in a run. A run is the list of these; everything else is computed from them.

Facts are past tense, frozen, and complete. Fields that several have:

    at             seconds since the epoch
    seconds        active time since the last fact that has this field
    iteration      0-based; -1 is the plan request
    index          of a call in its batch, from 0
    message        a value of Semantic Kernel
    usage          charged to the run: round trips, tokens and cost
    limit          the name of a limit
    trace          the W3C ``traceparent`` of the span, or ""
"""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal, TypeAlias

from planner_ext.core.limits import Budget
from planner_ext.core.values import (
    NOTHING,
    CallKind,
    Cut,
    Message,
    RequestedCall,
    Status,
    Usage,
    frozen,
    start_of,
    updated,
)

Verdict: TypeAlias = Literal[
    "run", "answer", "deny", "defer", "final_answer", "external"
]
"""``answer`` answers the call without running it, ``external`` returns it to the
caller."""

AnswerPurpose: TypeAlias = Literal["structure", "revise"]
"""What asks for the answer again: its form, or the application's ``check_answer``."""

Purpose: TypeAlias = Literal["step", "insist", "said"] | AnswerPurpose

FunctionOutcome: TypeAlias = Literal["ok", "failed", "timed_out", "cancelled"]
"""How a started function ended; ``timed_out`` at its own or the run's time limit."""

Failure: TypeAlias = Literal["unsent", "refused", "processed"]
"""How far a request came that has no reply: ``unsent``, or not connected; ``refused`` by
an HTTP error; or ``processed``, as it may have been."""


def is_free(failure: Failure, *, kept: bool, again: bool) -> bool:
    """Whether a request without a reply is charged to no limit.

    A refused one is charged where no store waits for the endpoint, and any that a
    function makes ``again``, after one of its call had failed: else nothing would bound
    who resumes the run, or asks in its function, again and again.
    """
    return not again and (failure == "unsent" or (failure == "refused" and kept))


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


class EventLine:
    """The base of what a stream yields: ``str(event)`` is one line, ``repr(event)`` has every field."""

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


@frozen
class Rules:
    """The settings of a run that its machine depends on, fixed when it starts.

    Attributes:
        charge_plan: Whether the plan request counts as a round trip.
        use_attempts: Tool rounds after which no functions are offered; None is
            unlimited.
        attempts_limit: The limit that a result then names; "": none, the run ends
            ``answered``.
        tool_choice: Whether the model may call a function in each tool round, or must.
        rounds_per_step: Tool rounds after which a plain reply closes a step; None
            chains rounds without end.
        require_final_answer: Whether only the final-answer function ends the run.
        on_denial, on_deferred: As in `ApprovalSettings`.
        close_on_denial: Whether the request after a denied call offers no functions.
        structured: Whether the answer must match a form, which the journal does not
            record.
        checked: Whether ``check_answer`` is asked about the answer.
        clarifier: Whether questions and plain replies are put to a clarifier.
        max_clarifications: Questions that are answered; None is unlimited.
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
    checked: bool = False
    clarifier: bool = False
    max_clarifications: int | None = None


@frozen
class Guards:
    """What can decide a run's calls, and its answer: policies as JSON text in normal form, all else by name.

    Attributes:
        interceptors, pre_invoke, checks, filters, answers: In the order in which they
            are asked; ``answers`` are the hooks that check the final answer.
        unmatched, expires_in: As in `ApprovalSettings`.
        marked: The offered functions that require approval by themselves, sorted.
        shared_budgets, authorize: Sorted.
    """

    interceptors: tuple[str, ...] = ()
    pre_invoke: tuple[str, ...] = ()
    checks: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    unmatched: Literal["approve", "defer", "deny"] = "approve"
    expires_in: float | None = None
    marked: tuple[str, ...] = ()
    shared_budgets: tuple[str, ...] = ()
    authorize: tuple[str, ...] = ()


@frozen
class RunStarted(EventLine):
    """A run began.

    Attributes:
        run_id: The run's name; in a store, the one that it was started under.
        messages: The first messages of the transcript.
        goal: "" if the run continues a history without one.
        guards: None outside a store.
    """

    run_id: str
    rules: Rules
    messages: tuple[Message, ...]
    goal: str = ""
    guards: Guards | None = None
    trace: str = ""
    at: float
    type: Literal["RunStarted"] = "RunStarted"


@frozen
class Planned(EventLine):
    """The plan request was answered; ``messages`` is the transcript, which now opens with the plan."""

    plan: str
    messages: tuple[Message, ...]
    usage: Usage
    at: float
    seconds: float
    type: Literal["Planned"] = "Planned"


@frozen
class MessageAdded(EventLine):
    """A message was added, to which the model replies next.

    Attributes:
        purpose: It asks for the next ``step``, the final-answer function (``insist``),
            the answer in the ``response_format`` (``structure``), or a better answer
            than the one that was refused (``revise``); or a person ``said`` it.
        by: Who said it; "" without a name.
    """

    message: Message
    purpose: Purpose
    by: str = ""
    at: float
    type: Literal["MessageAdded"] = "MessageAdded"


@frozen
class ModelAsked(EventLine):
    """A request is about to be sent; recorded where the fact before it does not imply the request.

    Attributes:
        index: The call whose function makes the request; None for the run's own.
        usage: Tokens and cost of this call so far, requests under way estimated.
    """

    iteration: int
    index: int | None = None
    usage: Usage = Usage()
    at: float
    type: Literal["ModelAsked"] = "ModelAsked"


@frozen
class RequestFailed(EventLine):
    """A request has no reply: it failed, was interrupted, or its process ended.

    ``usage`` is 1 round trip and estimated tokens; 0 if the request was not sent, or if
    an endpoint refused that of a kept run.
    """

    iteration: int
    reason: str
    failure: Failure = "processed"
    usage: Usage = Usage()
    at: float
    seconds: float
    type: Literal["RequestFailed"] = "RequestFailed"


@frozen
class ModelReplied(EventLine):
    """One request was answered.

    Attributes:
        usage: The round trips that the reply's metadata reports, 1 without them; tokens
            and cost, reported or estimated.
        offered: Whether functions were offered.
        withheld: The limit because of which they were not.
        final_answer: What the final-answer function was called with although not
            offered.
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


@frozen
class CallFact(EventLine):
    """The base of the facts about one call; ``call_id`` is unique in its batch."""

    iteration: int
    index: int
    call_id: str
    function: str


@frozen
class Panel:
    """How many must approve a call, and who is asked in place of its roles once it has waited.

    Attributes:
        quorum: The number of persons.
        escalates_in: Seconds from the question on; None: never.
        escalates_to: The roles from then on.
    """

    quorum: int = 1
    escalates_in: float | None = None
    escalates_to: tuple[str, ...] = ()


@frozen
class FurtherQuestion:
    """A question about a deferred call that is put when those before it are answered.

    Attributes:
        prompt, roles, source, asked_by, panel: As in `CallDecided`.
        expires_in: Seconds from then on after which it expires; None: never.
    """

    prompt: str = ""
    roles: tuple[str, ...] = ()
    source: str = ""
    expires_in: float | None = None
    asked_by: str = ""
    panel: Panel = Panel()


@frozen
class CallDecided(CallFact):
    """One call of the open batch was decided; a deferred one is decided again when its answer comes.

    Fields of the call are as in `ToolCall`.

    Attributes:
        kind: A ``function``, ``unknown`` (not offered), ``invalid`` (unusable
            arguments), the ``final_answer``, a ``question``, to ``read`` on in a
            result, or ``external``: the caller runs it.
        answer: What the model reads where the call does not run.
        reason: Why it does not run, or waits.
        digest: Of function and converted arguments; "" if nothing could run.
        arguments: JSON text of what the function gets; None if equivalent to the
            model's.
        edited: JSON text of the converted arguments that replace the model's.
        by: An interceptor, a policy's rule or a person; "" for the loop itself.
        sticky: Whether the same question about this function, or with these arguments
            alone, is answered so for the rest of the run.
        expires_at: When a deferred call stops waiting, in seconds since the epoch.
        person: Whether a person decided, on what they were shown.
        nested: Whether the function may be called again where a run in it waits or was
            lost: a planner, a prompt, an agent, or one that is declared idempotent or
            keyed.
        approved: Whether an interceptor, a policy or a person let the call run; False
            if none objected. With the verdict ``defer``, others are still asked.
        source: Digest of what asked, to which a sticky approval binds.
        cut: Where a supplied result, the ``answer``, was cut for the model.
        repetition: Digest without arguments that are defaults; "" if there are none.
        further: Questions to others, one after the other, once this one is answered.
        grant: The grant by which the person decided; "" if on this call alone.
        panel: Who decides a deferred call, besides the roles.
        votes: The persons whose votes approved it, in order; empty if one decided.
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
    summary: str = ""
    asked_by: str = ""
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
    grant: str = ""
    panel: Panel = Panel()
    votes: tuple[str, ...] = ()
    at: float
    type: Literal["CallDecided"] = "CallDecided"

    @property
    def counted_as(self) -> str:
        """@private The key under which ``max_repeated_calls`` counts the call."""
        return (
            self.repetition if self.repetition and self.edited is None else self.digest
        )

    @property
    def escalates_at(self) -> float | None:
        """@private When its question asks others."""
        seconds = self.panel.escalates_in
        return None if seconds is None else self.at + seconds

    @property
    def binds(self) -> bool:
        """@private Whether the call runs only as decided."""
        return self.approved or self.edited is not None

    def arguments_of(self, request: RequestedCall) -> str:
        """@private Return the JSON text of the arguments: edited, converted, or as the model wrote them."""
        given = request.arguments if self.arguments is None else self.arguments
        return given if self.edited is None else self.edited


@frozen
class CallsWithheld(EventLine):
    """Calls were answered without running: because of a limit, a stop, or a final answer beside them.

    Attributes:
        indexes: Of the calls, in their batch.
        answer: What the model reads as the result of each.
        limit: The limit that they would have exceeded, or None.
    """

    iteration: int
    indexes: tuple[int, ...]
    answer: str
    limit: str | None
    at: float
    type: Literal["CallsWithheld"] = "CallsWithheld"


@frozen
class CallStarted(CallFact):
    """A function is about to run, or a filter starts it again: ``attempt`` counts from 1."""

    attempt: int = 1
    at: float
    type: Literal["CallStarted"] = "CallStarted"


@frozen
class NestedCallStarted(EventLine):
    """A running call's function is about to start another one: itself, or in a run inside it.

    Recorded in a store, so that it is charged if the process ends amid the call.

    Attributes:
        iteration, index: Of the running call.
        usage: As in `ModelAsked`.
    """

    iteration: int
    index: int
    function: str
    usage: Usage = Usage()
    at: float
    type: Literal["NestedCallStarted"] = "NestedCallStarted"


@frozen
class CallFinished(CallFact):
    """A started call ended; recorded in the order in which the calls end.

    Attributes:
        result: What the model reads, whole; ``cut`` says where it was cut.
        error: Type and message of the exception; never sent to the model.
        terminate: Whether a filter asked to end the run after this batch.
        spent: The function's own requests and nested calls; None: what it recorded
            before it happened is charged.
        brought: The functions whose calls or results were in histories inside it.
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


@frozen
class CallLeft(CallFact):
    """A running function was left without a result, to be called again: a run in it waits, or lost process or endpoint.

    Attributes:
        iteration, index, call_id, function: As in `CallStarted`.
        spent: What the function used since it was called, besides the runs in it, which
            charge it as they happen. None means that it is not known: what the call
            recorded before it happened is charged.
    """

    spent: Usage | None = None
    at: float
    type: Literal["CallLeft"] = "CallLeft"


@frozen
class HappenedInside(EventLine):
    """Something happened in a run that the function of a call makes; recorded as it happens, the outermost run first.

    Attributes:
        iteration: The iteration of the running call.
        index: Its index in the batch.
        run: Which run of the call it is, from 0.
        fact: What happened; itself a `HappenedInside` for a run in that run.
    """

    iteration: int
    index: int
    run: int = 0
    fact: "Fact"
    type: Literal["HappenedInside"] = "HappenedInside"

    @property
    def at(self) -> float:
        """When it happened."""
        return self.fact.at

    def __str__(self) -> str:
        line = (
            f"HappenedInside iteration={self.iteration} index={self.index}: {self.fact}"
        )
        return line if len(line) <= LINE_WIDTH else f"{line[: LINE_WIDTH - 1]}…"


@frozen
class Clarified(EventLine):
    """A question of the model was put to the clarifier or a person.

    Attributes:
        answer: What the model reads. Without one, a call waits for a person, and a
            plain reply is taken as it is.
        index: None for a plain reply.
        by: Who answered; "" if unknown.
        denied: Why a person did not answer; None if the question was answered.
        usage: Of a model that answered; 0 of a person.
        seconds: Without the time that a person took.
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


@frozen
class IterationCompleted(EventLine):
    """Every call of a batch has its result in the transcript.

    Attributes:
        called: Whether a function was started, so that the iteration-completed callback
            was due.
        terminate, reason, messages: What that callback asked for: to end the run, or
            another transcript.
    """

    iteration: int
    called: bool
    terminate: bool = False
    reason: str = ""
    messages: tuple[Message, ...] | None = None
    at: float
    seconds: float
    type: Literal["IterationCompleted"] = "IterationCompleted"


@frozen
class AnswerChecked(EventLine):
    """An answer was checked.

    Attributes:
        problem: Why it is refused, for the model; "" if it is right.
        purpose: Of the message that asks for another one.
    """

    answer: str
    problem: str
    purpose: AnswerPurpose = "structure"
    at: float
    type: Literal["AnswerChecked"] = "AnswerChecked"


@frozen
class StopRequested(EventLine):
    """The run was asked to stop: no further request is made, no further function started."""

    reason: str
    at: float
    type: Literal["StopRequested"] = "StopRequested"


@frozen
class BudgetChanged(EventLine):
    """New limits replaced those of a run while it was driven; what was spent stays spent."""

    limits: Budget
    by: str = ""
    at: float
    seconds: float
    type: Literal["BudgetChanged"] = "BudgetChanged"


@frozen
class SharedBudgetsChecked(EventLine):
    """A shared budget forbade what was due next, or no longer does.

    In a store, each activation that continues a run with shared budgets begins with
    this fact. Of two that begin at once only one can write it: the other one stops.

    Attributes:
        limit: Budget and limit, such as ``per user: max_cost``; None if an earlier
            refusal no longer counts.
        answer: Whether one request, without functions, is still reserved for the
            answer.
    """

    limit: str | None = None
    reason: str = ""
    answer: bool = False
    at: float
    type: Literal["SharedBudgetsChecked"] = "SharedBudgetsChecked"


@frozen
class Paused(EventLine):
    """The run waits for a person; it executes nothing until it is resumed."""

    trace: str = ""
    at: float
    seconds: float
    type: Literal["Paused"] = "Paused"


@frozen
class Resumed(EventLine):
    """A paused or ended run was resumed, with new ``limits`` or the old ones; what was spent stays spent."""

    limits: Budget | None = None
    trace: str = ""
    at: float
    type: Literal["Resumed"] = "Resumed"


@frozen
class Ended(EventLine):
    """The run ended.

    Attributes:
        status: How it ended.
        answer: "" without one.
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


PlainFact: TypeAlias = (
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
    | CallLeft
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
"""Everything that can happen in a run itself."""

Fact: TypeAlias = PlainFact | HappenedInside
"""Everything that can happen in a run, and in the runs inside it."""


Place: TypeAlias = tuple[tuple[int, int, int], ...]
"""Where a run inside is made: the iteration, index and run of each call around it, the
outermost first; empty for the outermost run itself."""


def wrapped(fact: Fact, place: Place) -> Fact:
    """Write a fact of a run inside, at this place, as one of the outermost run."""
    for iteration, index, run in reversed(place):
        fact = HappenedInside(iteration=iteration, index=index, run=run, fact=fact)
    return fact


def facts_inside(
    facts: Iterable[Fact], iteration: int, index: int, run: int
) -> list[Fact]:
    """List what happened in one run of a call."""
    return [
        fact.fact
        for fact in facts
        if isinstance(fact, HappenedInside)
        and (fact.iteration, fact.index, fact.run) == (iteration, index, run)
    ]


def unwrapped(fact: Fact) -> PlainFact:
    """Return the fact of the run in which it happened."""
    while isinstance(fact, HappenedInside):
        fact = fact.fact
    return fact


def place_of_fact(fact: Fact) -> Place:
    """Return in which run inside something happened."""
    place: list[tuple[int, int, int]] = []
    while isinstance(fact, HappenedInside):
        place.append((fact.iteration, fact.index, fact.run))
        fact = fact.fact
    return tuple(place)


def cost_of(fact: Fact, rules: Rules | None = None) -> Usage:
    """Return what a fact charges to its run, without what a running call recorded before it happened.

    Without rules a plan request is always charged, as shared budgets do. The time of a
    nested run is not in it: the run around measures it.
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
            return start_of(function)
        case CallFinished(spent=Usage() as spent) | CallLeft(spent=Usage() as spent):
            return spent
        case IterationCompleted() | BudgetChanged() | Paused() | Ended():
            return Usage(active_seconds=fact.seconds)
        case HappenedInside():
            return updated(cost_of(unwrapped(fact)), active_seconds=0.0)
        case _:
            return NOTHING


def _is_plan_request(fact: Planned | ModelReplied | RequestFailed | Clarified) -> bool:
    return isinstance(fact, Planned) or (
        isinstance(fact, RequestFailed) and fact.iteration < 0
    )
