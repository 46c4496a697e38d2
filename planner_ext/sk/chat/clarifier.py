"""Another model that answers the questions of the one that works, for the user."""

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext.core.errors import require
from planner_ext.core.limits import Price
from planner_ext.core.machine import AskModel
from planner_ext.engine.ports import (
    Clarification,
)
from planner_ext.sk.chat.prices import RequestMeter
from planner_ext.sk.chat.round_trip import KernelChat
from planner_ext.sk.chat.transport import connector_settings, select_service
from planner_ext.sk.functions.questions import Question
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.sk.messages import text_of

_NOTHING = "PASS"


default_clarifier_instructions = (
    "You stand in for the user of an assistant. You are given the user's goal, the conversation so far, and what the "
    "assistant says now. If it asks for something that the goal or the conversation tells, or that a sensible default "
    "settles, answer in one short sentence, as the user would. If it asks for nothing, or only the user can know, "
    f"reply with the single word {_NOTHING}."
)
"""The system message of the answering model. Replace it to say what the user wants and knows; it may reply PASS."""


class ModelClarifier:
    """Answers questions with a model. A `planner_ext.hitl_manager.Clarifier`.

    Each question is one request without functions, charged to the run as a round trip
    with its time and tokens, estimated where the service reports none. It counts
    towards ``max_iterations``: where only the trip that uses the answer is left,
    nothing is sent. Then, and after the reply PASS, the question stays open.
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
            kernel: Has the service; its functions are not offered.
            service_id: None uses the kernel's selector.
            instructions: The system message of each request.
            settings: Of each request; None is the service's defaults.
            price: Of a request in US dollars, from the model's name and the `Usage`;
                None leaves its cost unknown, so that ``max_cost`` does not limit it.

        Raises:
            PlannerInvalidConfigurationError: If the service does not exist, or an
                option is invalid.
        """
        fits = isinstance(instructions, str) and bool(instructions.strip())  # pyright: ignore[reportUnnecessaryIsInstance]
        require("instructions", fits, "a text", instructions)
        self._instructions = instructions
        self._service, selected = select_service(
            kernel, service_id, KernelArguments(), settings
        )
        own = connector_settings(self._service, selected)
        self._chat = KernelChat(
            self._service,
            own,
            kernel=None,
            arguments=None,
            tools=ToolSet(kernel, None, own),
            meter=RequestMeter(self._service, own, price=price, estimates=True),
            streaming=False,
        )

    async def __call__(self, question: Question) -> Clarification | None:
        """Ask the model.

        Raises:
            ServiceCallError: If the request fails.
            InvalidReplyError: If the response is not a reply.
        """
        if question.trips_left is not None and question.trips_left < 1:
            return None
        request = AskModel(
            iteration=question.iteration, offer=False, tool_choice=None, withheld=None
        )
        reply = await self._chat.ask(self._messages(question), request, None)
        text = reply.text.strip()
        return Clarification(
            text=None if text.strip("\"'.` ").upper() == _NOTHING else text,
            by=self._service.ai_model_id,
            iterations=reply.usage.iterations,
            usage=reply.usage,
        )

    def _messages(self, question: Question) -> list[ChatMessageContent]:
        """Write the conversation as one text: its roles are not those of this request."""
        parts = [f"Goal: {question.goal}"] if question.goal else []
        said = [
            f"{message.role.value}: {text_of(message)}"
            for message in question.chat_history
            if text_of(message)
        ]
        parts += [
            "Conversation so far:",
            *said,
            f"The assistant says now:\n{question.text}",
        ]
        return [
            ChatMessageContent(role=AuthorRole.SYSTEM, content=self._instructions),
            ChatMessageContent(role=AuthorRole.USER, content="\n\n".join(parts)),
        ]
