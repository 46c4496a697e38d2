"""``ModelClarifier``: another model answers the questions of the one that works."""

from copy import deepcopy
from dataclasses import replace

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments

from planner_ext.core.errors import shown
from planner_ext.sk.budget import Budget, Price
from planner_ext.sk.chat import named_errors, no_reply
from planner_ext.sk.connectors import select_service
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.messages import text_of
from planner_ext.sk.options import instance_of
from planner_ext.sk.prices import PromptSize, checked_price
from planner_ext.sk.questions import Clarification, Question
from planner_ext.sk.run_context import connector_settings
from planner_ext.sk.usage import read_iterations, usage_in

__all__ = ["ModelClarifier", "default_clarifier_instructions"]

_NOTHING = "PASS"

default_clarifier_instructions = (
    "You stand in for the user of an assistant. You are given the user's goal, the conversation so far, and what the "
    "assistant says now. If it asks for something that the goal or the conversation tells, or that a sensible default "
    "settles, answer in one short sentence, as the user would. If it asks for nothing, or only the user can know, "
    f"reply with the single word {_NOTHING}."
)
"""What the answering model is told. Replace it to say what the user wants and knows; it may reply PASS."""


class ModelClarifier:
    """Answers questions with a model. A `planner_ext.hitl_manager.Clarifier`.

    Each question is one request without functions, charged to the run as a round trip of its own, with its tokens,
    estimated where the service reports none, and its time; the run's ``max_iterations`` holds for them, too. Where no
    trip is left beside the one that uses the answer, nothing is sent, and nothing said. A reply of the single word
    PASS says nothing either; its request counts.
    """

    is_model = True

    def __init__(
        self,
        kernel: Kernel,
        *,
        service_id: str | None = None,
        instructions: str = default_clarifier_instructions,
        settings: PromptExecutionSettings | None = None,
        price: Price | None = None,
    ) -> None:
        """Choose the model.

        Args:
            kernel: Where its service is; its functions are not offered.
            service_id: The chat completion service; None leaves it to the kernel's own selection.
            instructions: The system message of each request.
            settings: Of each request; None is the service's defaults.
            price: Of a request in US dollars, from the model's name and the `Usage`; None leaves its cost unknown, so
                that ``max_cost`` does not see it.

        Raises:
            PlannerInvalidConfigurationError: If there is no such service, or an option cannot be used.
        """
        if not isinstance(instructions, str) or not instructions.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlannerInvalidConfigurationError(f"instructions must be a text; got {shown(instructions)}.")
        Budget(price=price)  # which checks that it is a function
        instance_of("kernel", kernel, Kernel)
        self._service, selected = select_service(kernel, service_id, KernelArguments(), settings)
        self._settings = connector_settings(self._service, selected).model_copy(
            update={"function_choice_behavior": None}
        )
        self._instructions = instructions
        self._price = None if price is None else checked_price(price, self._service.ai_model_id)

    async def __call__(self, question: Question) -> Clarification | None:
        """Ask the model.

        Raises:
            ServiceCallError: If the request fails.
            InvalidReplyError: If the response is no reply.
        """
        if question.trips_left is not None and question.trips_left < 1:
            return None
        history = ChatHistory.model_construct(messages=self._messages(question))
        with named_errors(self._service):
            replies = await self._service.get_chat_message_contents(history, deepcopy(self._settings))
            if not replies:
                raise no_reply("a response without choices")
        reply = replies[0]
        usage = PromptSize(self._service, self._settings, 0).completed(usage_in(reply), history.messages, None, reply)
        if self._price is not None:
            usage = replace(usage, cost=self._price(reply.ai_model_id or self._service.ai_model_id, usage))
        text = text_of(reply).strip()
        return Clarification(
            text=None if text.strip("\"'.` ").upper() == _NOTHING else text,
            by=self._service.ai_model_id,
            iterations=read_iterations(reply.metadata),
            usage=usage,
        )

    def _messages(self, question: Question) -> list[ChatMessageContent]:
        """Write the conversation as one text: its roles are not the roles of this request."""
        parts = [f"Goal: {question.goal}"] if question.goal else []
        said = [f"{message.role.value}: {text_of(message)}" for message in question.chat_history if text_of(message)]
        parts += ["Conversation so far:", *said, f"The assistant says now:\n{question.text}"]
        return [
            ChatMessageContent(role=AuthorRole.SYSTEM, content=self._instructions),
            ChatMessageContent(role=AuthorRole.USER, content="\n\n".join(parts)),
        ]
