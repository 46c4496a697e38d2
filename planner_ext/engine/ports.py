"""The ports of the engine, as protocols: adapters implement them, tests fake them."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, Generic, Protocol, TypeVar

from planner_ext.approval.decisions import Decision, Defer, ToolCall
from planner_ext.core.accounts import SharedBudgets, Tab
from planner_ext.core.facts import (
    LINE_WIDTH,
    AnswerPurpose,
    EventLine,
    Fact,
    Failure,
    FunctionOutcome,
    Purpose,
)
from planner_ext.core.limits import Budget
from planner_ext.core.machine import Action, AskModel, AskPerson
from planner_ext.core.state import State
from planner_ext.core.values import (
    Message,
    Reply,
    RequestedCall,
    ResolvedCall,
    TranscriptItem,
    Usage,
    frozen,
)


@frozen
class TextDelta(EventLine):
    """A piece of a streamed reply, as it arrives. Not a fact: the whole reply is one.

    Attributes:
        text: "" for pieces of function calls.
        iteration: 0-based; -1 for the plan request.
        chunk: The connector's own chunk.
    """

    text: str
    iteration: int
    chunk: Any = field(default=None, repr=False, compare=False)


R = TypeVar("R")


@frozen
class ResultReady(EventLine, Generic[R]):
    """The last event of a stream, with what ``invoke`` would have returned."""

    result: R

    def __str__(self) -> str:
        result: Any = self.result
        return f"ResultReady status={result.status!r} final_answer={result.final_answer!r}"[
            :LINE_WIDTH
        ]


Event = Fact | TextDelta
Emit = Callable[[Event], Awaitable[None]]


@frozen
class Finished:
    """How one function call ended; ``terminate`` if a filter asked to end the run after the batch."""

    outcome: FunctionOutcome
    text: str
    error: str = ""
    exception: BaseException | None = field(default=None, compare=False)
    terminate: bool = False


class Chat(Protocol):
    """One round trip to a model."""

    async def ask(
        self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None
    ) -> Reply:
        """Send the transcript; stream the pieces to ``emit`` if it is given."""
        ...

    def failure(self, error: BaseException) -> Failure:
        """Return how far a request came that ended in an error."""
        ...

    def estimated(
        self, transcript: Sequence[TranscriptItem], request: AskModel
    ) -> Usage:
        """Estimate a request without a reply; 0 in a run whose tokens are not limited."""
        ...


Circuit = Callable[[str], AbstractContextManager[str]]
"""Enters a request to an endpoint, by its name; yields why not to send it, or ""."""

current_circuit: ContextVar[Circuit | None] = ContextVar("circuit", default=None)
"""That of the store that drives the present run."""


class Functions(Protocol):
    """The functions that a run may call."""

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        """Resolve a call among the functions offered last, and validate its arguments."""
        ...

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        """Run one function of the open batch through the user's filters; only cancellation is raised."""
        ...

    def encode(self, result: Any) -> str:
        """Turn a result into the text that the model reads."""
        ...


@frozen
class Reviewed:
    """The outcome of the review of one call.

    Attributes:
        decision: None lets the call run without an approval. An edit is in
            ``arguments`` instead.
        question: What was asked last: the decision answers it, or leaves it open.
        further: The questions behind one that is left open, in order: they have to be
            answered, too.
    """

    decision: Decision | None = None
    question: Defer | None = None
    arguments: Mapping[str, Any] | None = None
    edited_by: str | None = None
    further: Sequence[Defer] = ()


class Gate(Protocol):
    """Decides whether calls run."""

    def watches(self, function: str) -> bool:
        """Return whether calls of a function have to be reviewed."""
        ...

    async def review(
        self, calls: Sequence[ToolCall], state: State
    ) -> Sequence[Reviewed]:
        """Decide each call of a batch, in order, before any of them runs.

        Raises:
            InvalidLimitError: If an interceptor's answer is not a decision; nothing of
                the batch runs.
        """
        ...


class Prompts(Protocol):
    """The planner's messages around a plan."""

    async def plan_request(self) -> tuple[Message, ...]:
        """Write the plan request."""
        ...

    async def opening(self, plan: str) -> tuple[Message, ...]:
        """Write the transcript's opening, with the plan in it."""
        ...


@frozen
class Clarification:
    """An answer to a question of the model, and what it cost.

    Attributes:
        text: What the model reads; None, or blank text, leaves the question open.
        iterations: Round trips, charged to the run; 0 for a person, whose time is not
            charged.
        usage: Their tokens and cost, charged too; its active seconds are ignored.
    """

    text: str | None
    by: str = ""
    iterations: int = 0
    usage: Usage = Usage()


class Respondent(Protocol):
    """Answers the model's questions for the user."""

    @property
    def is_model(self) -> bool:
        """Whether each answer takes a request: active time, and a round trip even if interrupted."""
        ...

    async def answer(self, request: AskPerson, state: State) -> Clarification:
        """Answer a question, or comment a plain reply; an exception ends the run as a fault."""
        ...


class AnswerCheck(Protocol):
    """Checks a final answer: its form, then what the application says of it."""

    async def problem(self, answer: str, state: State) -> tuple[AnswerPurpose, str]:
        """Say what is wrong with an answer, for the model, "" if nothing; and what asks for another."""
        ...


class IterationHook(Protocol):
    """The iteration-completed callback."""

    async def completed(self, state: State) -> Mapping[str, Any]:
        """Run the callback; return the fields of `IterationCompleted` that it asked for."""
        ...


class WorkLeftError(BaseException):
    """A store ends the work on a run here, also if it has recorded the facts; it is a cancellation, or an error."""


class RunStore(Protocol):
    """Keeps a journal."""

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        """Store facts durably, from position ``seq`` of the journal, before returning.

        Facts that can be computed again may be held back until the next one that
        cannot.

        Raises:
            WorkLeftError: If nothing more of the run is to happen here; they may be
                stored.
        """
        ...


class Clock(Protocol):
    """Time, injectable."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


Perform = Callable[[Action], Awaitable[None]]
"""Performs the next action of a run."""


class Tracing(Protocol):
    """The telemetry of a run while it is driven."""

    @property
    def trace(self) -> str:
        """The W3C ``traceparent`` of the span around the run, or ""."""
        ...

    def around(self, perform: Perform) -> Perform:
        """Surround each action with the span that it belongs to."""
        ...


@frozen
class RunInfo:
    """The run that a fact is of."""

    run_id: str
    goal: str


Observer = (
    Callable[[Fact], Awaitable[None] | None]
    | Callable[[Fact, RunInfo], Awaitable[None] | None]
)
"""Called with each fact after it was recorded, and its `RunInfo` if it takes two arguments.

A second parameter with a default does not count. An exception is logged and changes
nothing.
"""


@frozen
class Ports:
    """The ports and settings of one run.

    Attributes:
        message: Writes a message of a purpose, given the problem of a refused answer,
            or what was said.
        prompts: None if the run cannot make a plan.
        gate: None approves all calls.
        respondent: None leaves the model's questions to a person.
        follow: Called with every recorded fact, before the observers; must not raise.
        max_concurrency: Calls of a batch that run at once; None: all; 1: in call order.
        raise_errors: Whether a failed function ends the run with `CallFailedError`,
            after its batch.
        min_iteration_seconds: Least time between the starts of two requests.
        run: Which run of the call around it is; None if the run around does not record
            what happens in it.
        new_budget: Returns, once, limits that replace the run's, and who set them.
        next_message: Returns, once, what was said next to the run, and by whom.
        shared: As `planner_ext.core.accounts.Account`.
        count_tokens: Counts or estimates the tokens of a text; None cuts no result.
    """

    chat: Chat
    functions: Functions
    message: Callable[[Purpose, str], Message]
    clock: Clock
    prompts: Prompts | None = None
    gate: Gate | None = None
    hook: IterationHook | None = None
    answer_check: AnswerCheck | None = None
    respondent: Respondent | None = None
    store: RunStore | None = None
    observers: Sequence[Observer] = ()
    follow: Callable[[State, Fact], None] | None = None
    max_concurrency: int | None = None
    max_threads: int | None = None
    raise_errors: bool = False
    stop_on_unknown: bool = False
    min_iteration_seconds: float = 0.0
    within: Tab | None = None
    run: int | None = None
    new_budget: Callable[[], tuple[Budget, str] | None] | None = None
    next_message: Callable[[], tuple[str, str] | None] | None = None
    shared: SharedBudgets | None = None
    tracing: Tracing | None = None
    count_tokens: Callable[[str], int] | None = None
