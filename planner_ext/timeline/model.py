"""What happened in a run, as values in the order in which a person reads them.

Every value is frozen and complete, so that a page, a terminal or a program draws it without the journal. Times are in
seconds since the epoch. Texts are as they came: whoever shows them escapes them, see `planner_ext.core.text`.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from planner_ext.approval.decisions import DecisionRecord
from planner_ext.core.limits import BudgetShare, Consumption
from planner_ext.core.values import Usage

__all__ = [
    "CallAttempt",
    "CallOutcome",
    "EventKind",
    "FailedRequest",
    "Gap",
    "ModelRequest",
    "Spending",
    "Timeline",
    "TimelineCall",
    "TimelineEvent",
    "TimelineIteration",
    "TimelineMessage",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMessage:
    """A message that the model was sent, or replied with.

    Attributes:
        role: As in the message, such as ``user``; "" if it has none.
        text: All of its text.
        others: A line for each part that is not text: calls, results, reasoning, images, files.
    """

    role: str
    text: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """What was used of one limit of a run.

    Attributes:
        name: The limit's name in `Budget`.
        function: The function that it limits, of ``max_calls_per_function``; else "".
        used: Round trips, calls, tokens, US dollars, or seconds; of a deadline, the seconds since the run started.
        limit: How much is allowed, in the same unit.
        nested: The part of it that functions spent by themselves: nested runs, prompts.
    """

    name: str
    function: str = ""
    used: float
    limit: float
    nested: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request that has no reply.

    Attributes:
        started: When it was sent.
        ended: When it failed; when this was noticed, if the process ended.
        reason: Why.
        charged: The round trips that it cost.
        lost: Whether the process that made it ended.
    """

    started: float
    ended: float
    reason: str
    charged: int
    lost: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest:
    """The request of one iteration.

    Attributes:
        started: When the attempt that was answered, or that is under way, was sent.
        ended: When the reply arrived; None without a reply.
        charged: Round trips, without those of failed attempts.
        usage: Tokens and cost, without those of failed attempts.
        model: The model's name, as the reply has it; "" if it has none.
        finish_reason: Why the model stopped, or None.
        withheld: The limit because of which no functions were offered, or None.
        failed: The attempts before it.
    """

    started: float
    ended: float | None = None
    charged: int = 0
    usage: Usage = Usage()
    model: str = ""
    finish_reason: str | None = None
    withheld: str | None = None
    failed: tuple[FailedRequest, ...] = ()


CallOutcome: TypeAlias = Literal[
    "requested",  # not decided yet
    "ready",  # decided, and not started yet
    "waiting",  # for a person's decision or answer
    "in_doubt",  # started when its process ended: a person decides
    "running",
    "ok",
    "failed",
    "timed_out",
    "cancelled",
    "denied",
    "expired",
    "answered",  # by a person or the clarifier, without running
    "unknown",  # no such function
    "invalid",  # unusable arguments
    "withheld",  # because of a limit, a stop, or a final answer
    "final_answer",
    "returned",  # to the caller of the run
]
"""How a call ended, or how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAttempt:
    """One start of a call's function; ``ended`` is None while it runs, and if its process ended."""

    started: float
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineCall:
    """One call of an iteration.

    Attributes:
        index: Its place among the calls of the reply.
        id: Unique among these.
        function: Fully qualified name of the function; before it is known, the name that the model used.
        requested: JSON text of the arguments as the model sent them.
        arguments: JSON text of the arguments that the function got, or would get.
        outcome: How it ended, or how far it is.
        asked: When a person was first asked about it, or None.
        prompt: What the person was asked.
        roles: Who may decide it; empty for anyone.
        expires: When it stops waiting, or None.
        decisions: Who decided what on it, and when.
        attempts: Each start of the function.
        ended: When it had its result, or None.
        result: What the model read.
        error: Type and text of the function's exception, or why it was not executed; "" without one.
        nested: Whether it is a run itself.
        reserved: The share of the budget that was reserved for it, or None.
        spent: What it spent by itself on requests and functions, or None.
    """

    index: int
    id: str
    function: str
    requested: str
    arguments: str
    outcome: CallOutcome = "requested"
    asked: float | None = None
    prompt: str = ""
    roles: tuple[str, ...] = ()
    expires: float | None = None
    decisions: tuple[DecisionRecord, ...] = ()
    attempts: tuple[CallAttempt, ...] = ()
    ended: float | None = None
    result: str = ""
    error: str = ""
    nested: bool = False
    reserved: BudgetShare | None = None
    spent: Consumption | None = None

    @property
    def started(self) -> float | None:
        """When its function first started, or None."""
        return self.attempts[0].started if self.attempts else None


EventKind: TypeAlias = Literal[
    "paused", "resumed", "crashed", "stopped", "budget", "question", "check", "callback", "violation", "ended"
]
"""``check``: the form of an answer was checked; ``callback``: the iteration-completed callback ended the run;
``violation``: servers would refuse the history, in a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """Something that happened to the run, beside requests and calls.

    Attributes:
        text: The question, reason, problem or change, in words; "" if the kind says all.
        answer: The answer to a question, or None.
        by: Who answered or changed it; "" if that is not known.
    """

    at: float
    kind: EventKind
    text: str = ""
    answer: str | None = None
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A time in which the run did not work.

    Attributes:
        ended: None if the run still waits.
        kind: ``paused``; ``left``: it had ended, or its process had left it; ``crashed``: its process had ended;
            ``retry``: between two attempts of a request.
    """

    started: float
    ended: float | None
    kind: Literal["paused", "left", "crashed", "retry"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineIteration:
    """One request with its reply, and what followed until the next request.

    Attributes:
        number: From 0; -1 is the plan request.
        messages: The messages that the transcript got since the request before, other than replies and results.
        replaced: Whether ``messages`` replaced the whole transcript: after a plan, and if a callback compacted it.
        request: The request.
        reply: The reply as a message; None without one.
        calls: The calls of the reply, in order.
        events: What happened in it beside them, in order.
        gaps: When the run did not work in it.
        ended: The time of its last fact.
    """

    number: int
    messages: tuple[TimelineMessage, ...] = ()
    replaced: bool = False
    request: ModelRequest
    reply: TimelineMessage | None = None
    calls: tuple[TimelineCall, ...] = ()
    events: tuple[TimelineEvent, ...] = ()
    gaps: tuple[Gap, ...] = ()
    ended: float

    @property
    def started(self) -> float:
        """When its first attempt was sent."""
        return self.request.failed[0].started if self.request.failed else self.request.started


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happened in a run.

    Attributes:
        status: As in a result; ``running``; or ``queued`` without any fact. A store knows more: replace it by what its
            `RunRecord` says.
        limit: The limit that ended the run, or None.
        reason: Why it ended as it did; "" if it was answered.
        started: When it began; None without any fact, and where no times are known.
        ended: When it ended, or None.
        until: The time up to which this is known: of the newest fact, or ``now``.
        spent: All that was charged.
        spending: What was used of each limit that is set.
        lives: In how many processes or activations it was driven, as far as the facts tell.
        plan: The plan, "" without one.
        answer: The answer, "" without one.
        iterations: In order.
    """

    run_id: str = ""
    goal: str = ""
    status: str = "queued"
    limit: str | None = None
    reason: str = ""
    started: float | None = None
    ended: float | None = None
    until: float = 0.0
    spent: Consumption = field(default_factory=Consumption)
    spending: tuple[Spending, ...] = ()
    lives: int = 0
    plan: str = ""
    answer: str = ""
    iterations: tuple[TimelineIteration, ...] = ()

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """The events of all iterations."""
        return tuple(event for iteration in self.iterations for event in iteration.events)

    @property
    def calls(self) -> tuple[TimelineCall, ...]:
        """The calls of all iterations."""
        return tuple(call for iteration in self.iterations for call in iteration.calls)
