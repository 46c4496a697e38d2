"""The errors that Semantic Kernel's callers see: each is a ``PlannerExtError`` and a ``KernelException``.

``door_of`` is the one place where errors of lower floors are converted. Applications
import from ``planner_ext.errors``, which draws the tree.
"""

from typing import TYPE_CHECKING

from semantic_kernel.exceptions import (
    KernelException,
    KernelServiceNotFoundError,
    ServiceInitializationError,
    ServiceInvalidExecutionSettingsError,
    ServiceInvalidResponseError,
    ServiceResponseException,
)

from planner_ext.approval.decisions import InvalidDecisionError
from planner_ext.core.errors import (
    EndedRunError,
    InvalidLimitError,
    LimitExceededError,
    PlannerExtError,
    UnansweredRunError,
    UnusableCheckpointError,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from semantic_kernel.contents import ChatHistory

    from planner_ext.core.values import Usage
    from planner_ext.sk.checkpoint import Checkpoint


class PlannerException(PlannerExtError, KernelException):
    """The base of the removed planners' errors, kept by name.

    Attributes:
        chat_history: The messages so far, fit to be sent; None if no run had begun.
        checkpoint: Resumes the run once the cause is fixed; None if no run had begun.
    """

    chat_history: "ChatHistory | None" = None
    checkpoint: "Checkpoint | None" = None


class PlannerInvalidConfigurationError(PlannerException):
    """A configuration error, by the removed planner's name; raised before any request."""


class InvalidOptionError(
    PlannerInvalidConfigurationError, InvalidLimitError, door_of=InvalidLimitError
):
    """An option, argument, limit or setting is invalid; names it, the value and the way out."""


class InvalidSettingsError(InvalidOptionError, ServiceInvalidExecutionSettingsError):
    """A request lacks its kernel, or its settings cannot be used, in Semantic Kernel's loop either."""


class InvalidBehaviorError(InvalidOptionError, ServiceInitializationError):
    """A function choice behaviour has an unknown type, key or value."""


class ServiceNotFoundError(
    PlannerInvalidConfigurationError, KernelServiceNotFoundError
):
    """No chat completion service of the kernel fits; names those there are."""

    may_pass = True


class RunEndedError(
    PlannerInvalidConfigurationError, EndedRunError, door_of=EndedRunError
):
    """The run has ended: it cannot be resumed or cancelled."""


class DecisionRefusedError(
    InvalidDecisionError, PlannerException, door_of=InvalidDecisionError
):
    """A decision cannot be taken. None of the decisions given with it was taken, nothing ran.

    But where code of the application had to make the run of the call again first: then
    ``checkpoint`` holds what was taken with it, and in it the call still waits.

    Attributes:
        call_id: The call that it was given for; None if it names no call.
        changed: Whether the call would by now get another value than was asked about. A
            resume without a decision on it has it wait as that, with its own
            fingerprint.
    """


class InvalidCheckpointError(
    PlannerException, UnusableCheckpointError, door_of=UnusableCheckpointError
):
    """A checkpoint is truncated, altered, unsigned, wrongly signed, too new, or of a kept run; nothing was run."""


class InvalidPriceError(PlannerException):
    """A price is not an amount of US dollars. The reply is lost; no further request was made."""


class InvalidHistoryError(PlannerException):
    """The history has an unanswered call, an orphan result or a duplicate one; names the ids. Nothing was sent.

    Raised also for a further turn of an agent while its last one waits for a decision.
    """


class ServiceCallError(PlannerException, ServiceResponseException):
    """A request failed; the connector's own exception is the cause."""

    may_pass = True


class InvalidReplyError(PlannerException, ServiceInvalidResponseError):
    """The connector's response is not a reply: no choices, null choices, no JSON, an unknown role."""

    may_pass = True


class AnswerCheckError(PlannerException):
    """``check_answer`` raised, or returned neither None nor a text; the answer is not accepted."""


class NestedRunRefusedError(PlannerException):
    """A function asked for what its run does not allow.

    That is a planner inside its own run; a function, called by the function itself,
    that the run's gate denied or that needs a person; and every request once the call
    has ended, or its run is to stop.
    """


class ToolExecutionError(PlannerException):
    """A function failed under ``ToolExecution(on_error="raise")``; its own exception is the cause."""


class SessionBusyError(PlannerException):
    """A session still answers another prompt; nothing was sent or added."""


class PromptTooLargeError(PlannerException):
    """A request had more tokens than ``max_prompt_tokens``; nothing was sent, and the run can be resumed.

    Attributes:
        prompt_tokens: Of the request; the message says whether counted or estimated.
        max_prompt_tokens: The limit.
    """

    def __init__(
        self, message: str, *, prompt_tokens: int, max_prompt_tokens: int
    ) -> None:
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.max_prompt_tokens = max_prompt_tokens


class RunNotAnsweredError(
    PlannerException, UnansweredRunError, door_of=UnansweredRunError
):
    """A run ended without an answer, or waits; raised by ``raise_for_status()`` and sessions.

    Attributes:
        status: How the run ended.
        iterations: Round trips charged.
        tool_calls: Functions started.
        usage: Tokens, cost and active time.
        limit: The limit that ended the run, or None.
    """

    status: str = ""
    iterations: int = 0
    tool_calls: int = 0
    usage: "Usage | None" = None
    limit: str | None = None


class TurnPausedError(RunNotAnsweredError):
    """The turn of an agent of an orchestration waits for a person; the orchestration has ended.

    Its ``result.get()`` raises this; ``checkpoint`` and ``chat_history`` are those of
    the turn, for `planner_ext.agent.resume_agent`.

    Attributes:
        agent: The agent's name.
        pending: The calls that wait, as in a message's metadata.
        turns: The orchestration's turns that have paused, this one included; of agents that
            work concurrently there can be several, and one that pauses later is added.
    """

    agent: str = ""
    pending: "Sequence[Mapping[str, Any]]" = ()
    turns: "Sequence[TurnPausedError]" = ()


class LimitReachedError(
    RunNotAnsweredError, LimitExceededError, door_of=LimitExceededError
):
    """A limit of the budget was reached, under ``Budget.on_limit="raise"``.

    Raised also to a function of a run that asks a model, or calls a function, when
    nothing is left.
    """
