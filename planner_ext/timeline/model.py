"""The timeline of a run as values, in reading order.

Every value is frozen and complete: a page, a terminal or a program draws it without the journal. Times are in seconds
since the epoch. Texts are not escaped; escape them before you show them, see `planner_ext.core.text`.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from planner_ext.approval.decisions import DecisionRecord
from planner_ext.core.limits import Consumption
from planner_ext.core.values import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineMessage:
    """A message that was sent to the model, or its reply.

    Attributes:
        role: As in the message, such as ``user``; "" without one.
        text: Its whole text.
        others: A line for each part that is not text: calls, results, reasoning, images, files.
    """

    role: str
    text: str
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The consumption of one limit of a run.

    Attributes:
        name: The limit's name in `Budget`.
        function: The limited function, for ``max_calls_per_function``; else "".
        used: Round trips, calls, tokens, US dollars, or seconds; of a deadline, the seconds since the run started.
        limit: How much is allowed, in the same unit.
        nested: The part that functions used: nested runs and prompts.
    """

    name: str
    function: str = ""
    used: float
    limit: float
    nested: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRequest:
    """A request without a reply.

    Attributes:
        started: When it was sent.
        ended: When it failed; for a lost request, when the loss was noticed.
        reason: Why it failed.
        charged: The round trips charged for it.
        lost: Whether its process ended before the reply was recorded.
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
        started: When the latest attempt was sent.
        ended: When the reply arrived; None without a reply.
        charged: Round trips, without those of failed attempts.
        usage: Tokens and cost, without those of failed attempts.
        model: The model's name in the reply; "" without one.
        finish_reason: Why the model stopped, or None.
        withheld: The limit for which no functions were offered, or None.
        failed: The failed attempts before the latest one.
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
    "answered",  # by a person, the clarifier, or the run itself, without running
    "unknown",  # no such function
    "invalid",  # unusable arguments
    "withheld",  # because of a limit, a stop, or a final answer
    "final_answer",
    "returned",  # to the caller of the run
]
"""How a call ended, or its present state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallAttempt:
    """One execution of a call's function; ``ended`` has no value while it runs, or if its process ended."""

    started: float
    ended: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineCall:
    """One call of an iteration.

    Attributes:
        index: Its position among the calls of the reply.
        id: Unique among the calls of the reply.
        function: Fully qualified name of the function; before resolution, the name that the model used.
        requested: JSON text of the arguments as the model sent them.
        arguments: JSON text of the arguments that the function received, or would receive.
        outcome: How it ended, or its present state.
        asked: When a person was first asked to decide it, or None.
        prompt: The text shown to that person.
        roles: Who may decide it; empty for anyone.
        expires: When it stops waiting, or None.
        decisions: The decisions on it, with author and time.
        attempts: Each execution of the function.
        ended: When its result was recorded, or None.
        result: The result that the model reads.
        shown: How many characters of the result the model read at once, where it was cut; None for all of it.
        error: Type and message of the function's exception, or the reason why it did not run; "" without one.
        nested: Whether the function is a nested run.
        spent: The consumption of its function: requests and nested calls; or None.
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
    shown: int | None = None
    error: str = ""
    nested: bool = False
    spent: Consumption | None = None

    @property
    def started(self) -> float | None:
        """When its function first started; None before."""
        return self.attempts[0].started if self.attempts else None


EventKind: TypeAlias = Literal[
    "paused", "resumed", "crashed", "stopped", "budget", "question", "check", "callback", "violation", "ended"
]
"""``check``: the form of an answer was checked; ``callback``: the iteration-completed callback ended the run;
``violation``: servers would refuse the history, in a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineEvent:
    """An event of the run other than a request or a call.

    Attributes:
        text: The question, reason, problem or change; "" if the kind is the whole message.
        answer: The answer to a question, or None.
        by: Who answered or made the change; "" if unknown.
    """

    at: float
    kind: EventKind
    text: str = ""
    answer: str | None = None
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A period in which the run was idle.

    Attributes:
        ended: None while the run still waits.
        kind: ``paused``; ``left``: the run had ended, or no process drove it; ``crashed``: its process had ended;
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
        messages: The messages added to the transcript since the previous request, except replies and results.
        replaced: Whether ``messages`` replaced the whole transcript: after a plan, and if a callback compacted it.
        request: The request.
        reply: The reply as a message; None before it arrives.
        calls: The calls of the reply, in order.
        events: Its events, in order.
        gaps: Its idle periods.
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
    """The timeline of a run.

    Attributes:
        status: As in a result; ``running``; or ``queued`` without any fact. For a run of a store, replace it with the
            status of its `RunRecord`, which has more values.
        limit: The limit that ended the run, or None.
        reason: Why it ended as it did; "" if it was answered.
        started: When it began; None without any fact, or without known times.
        ended: When it ended, or None.
        until: The time up to which the timeline is known: that of the newest fact, or ``now``.
        spent: The total charged.
        spending: The consumption of each limit that is set.
        lives: The number of processes or activations that drove it, as far as its facts show.
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
