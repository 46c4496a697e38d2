"""The check of a final answer before it is final: its form, then the application's ``check_answer``."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from semantic_kernel.contents import ChatHistory

from planner_ext.core.errors import shown
from planner_ext.core.facts import AnswerPurpose
from planner_ext.core.state import State
from planner_ext.core.values import Usage, frozen
from planner_ext.engine.concurrency import called
from planner_ext.sk.errors import AnswerCheckError
from planner_ext.sk.run.form import ResponseForm


@frozen
class AnswerContext:
    """The run whose answer is checked.

    Attributes:
        goal: The run's goal; "" for a service, which only has a history.
        value: The answer as the ``response_format`` reads it; None without one.
        chat_history: A copy of the messages so far; a plain reply that is the answer
            comes last.
        total_usage: Round trips, tokens, cost and active time of the run so far.
        refusals: How many answers of the run were refused before.
    """

    goal: str
    value: Any
    chat_history: ChatHistory
    total_usage: Usage
    refusals: int


CheckAnswer = Callable[[str, AnswerContext], Awaitable[str | None] | str | None]
"""Says why an answer is refused, for the model; None, or blank text, accepts it."""


@frozen
class AnswerChecks:
    """Checks answers (`planner_ext.engine.ports.AnswerCheck`); ``history`` renders messages."""

    form: ResponseForm | None
    checks: Sequence[CheckAnswer]
    history: Callable[[State], ChatHistory]

    async def problem(self, answer: str, state: State) -> tuple[AnswerPurpose, str]:
        """Return the first problem; the application sees only answers in the form."""
        value = None
        if self.form is not None:
            problem = self.form.problem(answer)
            if problem:
                return "structure", problem
            value = self.form.parse(answer)
        for check in self.checks:
            context = AnswerContext(
                goal=state.goal,
                value=value,
                chat_history=self.history(state),
                total_usage=state.usage,
                refusals=state.refusals,
            )
            reason = await _reason(check, answer, context)
            if reason:
                return "revise", reason
        return "structure", ""


async def _reason(check: CheckAnswer, answer: str, context: AnswerContext) -> str:
    try:
        reason: object = await called(check, answer, context)
    except Exception as error:
        raise _failed(f"raised {type(error).__name__}: {error}") from error
    if reason is None or isinstance(reason, str):
        return (reason or "").strip()
    raise _failed(f"returned {shown(reason)}")


def _failed(what: str) -> AnswerCheckError:
    return AnswerCheckError(
        f"check_answer must return None or the reason of a refusal; it {what}. Mend it, and resume the run."
    )
