"""What the tests of the bounded behaviour share."""

import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, ClassVar

from hypothesis import strategies as st
from pydantic import Field
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_calling_utils import (
    update_settings_from_function_call_configuration,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
    StreamingTextContent,
)
from semantic_kernel.functions import kernel_function

from planner_ext.sk.run.behavior import (
    UNLIMITED_ATTEMPTS,
    BoundedFunctionChoiceBehavior,
)

Make = Callable[..., BoundedFunctionChoiceBehavior]


MAKERS: list[Make] = [
    BoundedFunctionChoiceBehavior.Auto,
    BoundedFunctionChoiceBehavior.Required,
    BoundedFunctionChoiceBehavior.NoneInvoke,
]


MEANINGLESS_ATTEMPTS = [0, -1, True, False, 2.0, 1.5, float("inf"), "3", [3]]


ATTEMPTS = st.integers(min_value=1, max_value=1000)


def allow(iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
    return True


async def allow_async(iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
    return True


class Gate:
    """An owner of a callback that cannot be deep-copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def allow(self, iteration: int, name: str, arguments: Mapping[str, Any]) -> bool:
        return True


def in_step(behavior: BoundedFunctionChoiceBehavior) -> bool:
    """The one invariant: Semantic Kernel's field is 0 or the bound."""
    bound = behavior.maximum_use_attempts
    if not behavior.auto_invoke_kernel_functions:
        return behavior.maximum_auto_invoke_attempts == 0 and behavior.use_attempts == 0
    return (
        behavior.maximum_auto_invoke_attempts == (bound or UNLIMITED_ATTEMPTS)
        and behavior.use_attempts == bound
    )


class ToolSettings(PromptExecutionSettings):
    """A connector's settings, as far as functions go."""

    tools: list[dict[str, Any]] | None = None
    tool_choice: FunctionChoiceType | None = None


class EagerModel(ChatCompletionClientBase):
    """A model that calls a function whenever it is offered one, and answers otherwise; records what it was sent."""

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True
    calls: int = UNLIMITED_ATTEMPTS
    choices: list[FunctionChoiceType | None] = Field(
        default_factory=list[FunctionChoiceType | None]
    )

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        return ToolSettings

    def _update_function_choice_settings_callback(self) -> Callable[..., None]:
        return update_settings_from_function_call_configuration

    def _reset_function_choice_settings(
        self, settings: PromptExecutionSettings
    ) -> None:
        assert isinstance(settings, ToolSettings)
        settings.tool_choice = settings.tools = None

    def _call(self, settings: PromptExecutionSettings) -> FunctionCallContent | None:
        assert isinstance(settings, ToolSettings)
        self.choices.append(settings.tool_choice if settings.tools else None)
        if not settings.tools or len(self.choices) > self.calls:
            return None
        return FunctionCallContent(
            id=f"call_{len(self.choices)}",
            index=0,
            name="math-add",
            arguments='{"a": 1, "b": 2}',
        )

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        call = self._call(settings)
        if call is None:
            return [ChatMessageContent(role=AuthorRole.ASSISTANT, content="done")]
        return [ChatMessageContent(role=AuthorRole.ASSISTANT, items=[call])]

    async def _inner_get_streaming_chat_message_contents(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        function_invoke_attempt: int = 0,
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        call = self._call(settings)
        item = call or StreamingTextContent(choice_index=0, text="done")
        yield [
            StreamingChatMessageContent(
                role=AuthorRole.ASSISTANT, choice_index=0, items=[item]
            )
        ]


class Calculator:
    @kernel_function
    def add(self, a: int, b: int) -> int:
        return a + b


def model(calls: int = UNLIMITED_ATTEMPTS) -> EagerModel:
    return EagerModel(ai_model_id="scripted", calls=calls)


def results_in(history: ChatHistory) -> int:
    return sum(
        isinstance(item, FunctionResultContent)
        for message in history
        for item in message.items
    )


def settings_with(behavior: FunctionChoiceBehavior) -> PromptExecutionSettings:
    return PromptExecutionSettings(function_choice_behavior=behavior)
