"""Questions of the model: the function that asks them, and the application's clarifier that answers them."""

from collections.abc import Awaitable, Callable
from functools import cache
from typing import Annotated, Any, Final, Protocol

from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelFunction, KernelPlugin, kernel_function

from planner_ext.core.errors import shown
from planner_ext.core.limits import is_count
from planner_ext.core.machine import AskPerson
from planner_ext.core.state import State
from planner_ext.core.values import Usage, frozen
from planner_ext.engine.concurrency import called
from planner_ext.engine.ports import Clarification
from planner_ext.sk.errors import PlannerException


@frozen
class Question:
    """A question of the model, or a plain reply that may be a question.

    Attributes:
        text: The question; for a plain reply, its whole text.
        goal: The run's goal; "" for a service, which only has a history.
        chat_history: A copy of the messages so far. It ends with the plain reply; a
            call that asks is omitted.
        by_function: True if the model called ``UserInteraction-AskUser``.
        iteration: The 0-based iteration of the question.
        clarifications: How many questions of the run were answered before.
        trips_left: Requests that the clarifier may spend, beside one to use the answer.
            None if unlimited.
    """

    text: str
    goal: str
    chat_history: ChatHistory
    by_function: bool
    iteration: int
    clarifications: int
    trips_left: int | None

    def __str__(self) -> str:
        return self.text


class Clarifier(Protocol):
    """Answers the model's questions for the user. A plain function, sync or async, satisfies the protocol.

    A text, or a `Clarification` with its cost, answers. After None or a blank text a
    call of ``UserInteraction-AskUser`` waits for a person, and a plain reply counts as
    it would without a clarifier.

    A sync function runs in a thread. Only the run's ``deadline`` limits its time. A
    stop takes effect after the answer, a cancellation at once. An exception ends the
    run as a fault.
    """

    def __call__(
        self, question: Question, /
    ) -> str | Clarification | Awaitable[str | Clarification | None] | None:
        """Answer, or return None to leave the question open."""
        ...


@frozen
class AskedClarifier:
    """Asks an application's clarifier (`planner_ext.engine.ports.Respondent`); ``history`` renders messages."""

    clarifier: Clarifier
    history: Callable[[State], ChatHistory]

    @property
    def is_model(self) -> bool:
        """Whether the clarifier is a model, as its own ``is_model`` says."""
        return getattr(self.clarifier, "is_model", False) is True

    async def answer(self, request: AskPerson, state: State) -> Clarification:
        """Ask the clarifier; refuse an answer of another type."""
        question = Question(
            text=request.question,
            goal=state.goal,
            chat_history=self.history(state),
            by_function=request.index is not None,
            iteration=request.iteration,
            clarifications=state.clarifications,
            trips_left=request.iterations,
        )
        given: object = await called(self.clarifier, question)
        if given is None or isinstance(given, str):
            return Clarification(text=given)
        if not isinstance(given, Clarification) or not _is_sound(given):
            raise PlannerException(
                f"The clarifier must answer with text, a Clarification or None; got {shown(given)}. A Clarification "
                "has text or None, and iterations, 0 or more."
            )
        return given


def _is_sound(given: Clarification) -> bool:
    values: list[tuple[object, Any]] = [
        (given.text, str | None),
        (given.by, str),
        (given.usage, Usage),
    ]
    return all(isinstance(value, kind) for value, kind in values) and is_count(
        given.iterations, least=0
    )


OWN_PLUGIN: Final = "UserInteraction"
OWN_FUNCTIONS: Final = ("SendFinalAnswer", "AskUser")


class UserInteraction:
    """The planner's own functions, as the model sees them."""

    @kernel_function(
        name="SendFinalAnswer",
        description="Hand the final answer over to the user; this ends the work.",
    )
    def send_final_answer(
        self,
        answer: Annotated[str, "The whole answer, as the user shall read it"],  # noqa: ARG002  (the model reads its name)
    ) -> str:
        """Take the final answer; returns what the removed planner's function did."""
        return "Thanks"

    @kernel_function(
        name="AskUser",
        description="Ask the user one question, where something that is needed is missing or ambiguous and no other "
        "function tells it. The result is the user's answer.",
    )
    def ask_user(
        self, question: Annotated[str, "The question, as the user shall read it"]
    ) -> str:
        """Take a question."""
        return question


@cache
def own_function(name: str) -> KernelFunction:
    """Return a function of `UserInteraction`, by its own name; made once."""
    return KernelPlugin.from_object(OWN_PLUGIN, UserInteraction()).functions[name]
