"""What a planner returns: a value for every expected end."""

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.functions import kernel_function
from semantic_kernel.kernel_pydantic import KernelBaseModel

from planner_ext.core.facts import Fact, Planned
from planner_ext.core.state import State
from planner_ext.core.values import Status, Usage
from planner_ext.kernel.approval import PendingCall, pending_calls
from planner_ext.kernel.checkpoint import Checkpoint
from planner_ext.kernel.errors import not_answered
from planner_ext.kernel.outcome import chat_history, status_of

__all__ = ["FunctionCallingStepwisePlannerResult", "UserInteraction", "result_of"]


class UserInteraction:
    """The planner's own functions, as the model sees them."""

    @kernel_function(name="SendFinalAnswer", description="Hand the final answer over to the user; this ends the work.")
    def send_final_answer(self, answer: Annotated[str, "The whole answer, as the user shall read it"]) -> str:
        """Take the final answer."""
        return answer


class FunctionCallingStepwisePlannerResult(KernelBaseModel):
    """How a run came out.

    Attributes:
        status: ``answered``; ``incomplete``: the last reply was cut short or empty; ``paused``; ``asked``;
            ``limit_reached``: see ``limit``, and ``final_answer`` for the answer that was forced; ``stopped``.
        final_answer: The answer, "" where there is none.
        chat_history: Every message of the run, the final one included, fit to be sent.
        iterations: Round trips charged.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        limit: The name of the limit that ended the run, or None.
        pending: The calls that wait for a person, where the run is paused.
        reason: Why the run ended as it did, in words; "" where it was answered.
        plan: The plan that was made, "" where none was.
        facts: The journal's facts.
    """

    final_answer: str = ""
    chat_history: ChatHistory | None = None
    iterations: int = 0
    status: Status = "answered"
    tool_calls: int = 0
    usage: Usage = Usage()
    limit: str | None = None
    pending: tuple[PendingCall, ...] = ()
    reason: str = ""
    plan: str = ""
    facts: tuple[Any, ...] = Field(default=(), exclude=True, repr=False)

    @property
    def checkpoint(self) -> Checkpoint:
        """The run, to be resumed: after a pause, with a larger budget, or after a stop."""
        return Checkpoint(self.facts)

    def raise_for_status(self) -> Self:
        """Return this result if the run was answered; a result that was stored and read again knows that, too.

        Raises:
            LimitReachedError: If a limit ended the run.
            RunNotAnsweredError: If it ended otherwise without an answer, or waits.
        """
        if self.status == "answered":
            return self
        raise not_answered(
            status=self.status,
            reason=self.reason,
            limit=self.limit,
            iterations=self.iterations,
            tool_calls=self.tool_calls,
            usage=self.usage,
            chat_history=self.chat_history,
            checkpoint=self.checkpoint if self.facts else None,
        )


def result_of(
    state: State, facts: tuple[Fact, ...], *, written: Sequence[ChatMessageContent] | None = None
) -> FunctionCallingStepwisePlannerResult:
    """Read a result out of a run; ``written`` is its transcript as messages, where there are such already."""
    ended = state.ended
    return FunctionCallingStepwisePlannerResult(
        final_answer=ended.answer if ended is not None else "",
        chat_history=chat_history(state, written),
        iterations=state.ledger.iterations,
        status=status_of(state),
        tool_calls=state.ledger.tool_calls,
        usage=state.ledger.usage,
        limit=ended.limit if ended is not None else None,
        pending=pending_calls(state),
        reason=ended.reason if ended is not None else "",
        plan=next((fact.plan for fact in facts if isinstance(fact, Planned)), ""),
        facts=facts,
    )
