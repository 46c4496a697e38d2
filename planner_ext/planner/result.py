"""What a planner returns: a value for every expected end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from pydantic import Field, PrivateAttr
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.kernel_pydantic import KernelBaseModel

from planner_ext.approval.decisions import DecisionRecord, decisions_of
from planner_ext.core.facts import LINE_WIDTH, EventLine, Fact, Planned
from planner_ext.core.state import State
from planner_ext.core.values import Status, Usage
from planner_ext.engine.ports import TextDelta
from planner_ext.sk.approval import PendingCall, pending_calls
from planner_ext.sk.checkpoint import Checkpoint, SigningKey, journal_signature
from planner_ext.sk.errors import not_answered
from planner_ext.sk.outcome import chat_history, status_of
from planner_ext.sk.prompts import ResponseForm
from planner_ext.sk.questions import UserInteraction

__all__ = ["FunctionCallingStepwisePlannerResult", "PlannerEvent", "ResultReady", "UserInteraction", "result_of"]


class FunctionCallingStepwisePlannerResult(KernelBaseModel):
    """The outcome of a run.

    Attributes:
        status: ``answered``; ``incomplete``: the last reply was cut short or empty; ``paused``: a call waits for a
            decision; ``asked``: only questions wait, for an answer; ``limit_reached``: see ``limit``, and
            ``final_answer`` for the forced answer, "" if the model gave no answer although no functions were offered
            (``reason`` says so); ``stopped``.
        final_answer: The answer, "" if there is no answer; JSON text if it has the ``response_format``.
        value: The answer as an instance of the ``response_format``'s model, or as JSON values; None if there is no
            ``response_format``, or the answer does not have it.
        chat_history: Every message of the run, the final one included; servers accept it.
        iterations: Round trips charged.
        tool_calls: Functions started, failures included.
        usage: Tokens, cost and active time of all requests.
        limit: The name of the limit that ended the run, or None.
        pending: The calls and questions that wait for a person, if the run is ``paused`` or ``asked``.
        reason: Why the run ended as it did, in words; "" if it was answered.
        plan: The plan, "" if no plan was made.
        facts: The journal's facts.
    """

    final_answer: str = ""
    value: Any = None
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
    _signature: str | None = PrivateAttr(default=None)

    @property
    def checkpoint(self) -> Checkpoint:
        """The run's checkpoint, to resume it: after a pause, with a larger budget, or after a stop.

        Signed if the planner has a ``checkpoint_key``; then its ``to_json()`` is, too.
        """
        return Checkpoint.signed_as(self.facts, self._signature)

    @property
    def decisions(self) -> tuple[DecisionRecord, ...]:
        """The decisions on the run's calls with author, time and arguments, in the order in which they were taken."""
        return decisions_of(self.facts)

    def raise_for_status(self) -> Self:
        """Return this result if the run was answered; also works for a result that was stored and loaded.

        Raises:
            LimitReachedError: If a limit ended the run.
            RunNotAnsweredError: If the run is paused, or ended without an answer for another reason.
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
    state: State,
    facts: tuple[Fact, ...],
    form: ResponseForm | None = None,
    *,
    written: Sequence[ChatMessageContent] | None = None,
    key: SigningKey | None = None,
) -> FunctionCallingStepwisePlannerResult:
    """Build the result of a run, with its answer parsed if there is a response format.

    Args:
        state: The run's state.
        facts: Its journal.
        form: The response format, or None.
        written: The transcript as messages, if it was already written.
        key: Signs the result's checkpoint; None leaves it unsigned.
    """
    ended = state.ended
    answer = ended.answer if ended is not None else ""
    value = form.parse(answer) if form is not None and answer and not form.problem(answer) else None
    result = FunctionCallingStepwisePlannerResult(
        final_answer=answer,
        value=value,
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
    result._signature = journal_signature(facts, key)  # pyright: ignore[reportPrivateUsage]  (not a field: it is not an input)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultReady(EventLine):
    """The last event of a stream, with the result that ``invoke`` would have returned."""

    result: FunctionCallingStepwisePlannerResult

    def __str__(self) -> str:
        return f"ResultReady status={self.result.status!r} final_answer={self.result.final_answer!r}"[:LINE_WIDTH]


PlannerEvent: TypeAlias = TextDelta | Fact | ResultReady
"""Whatever ``invoke_stream`` yields."""
