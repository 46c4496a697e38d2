"""Who counts: the endpoint where a model is scripted, the connector where it is real, and the kernel for functions."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any, ClassVar

from pydantic import PrivateAttr
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_call_choice_configuration import FunctionCallChoiceConfiguration
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.filters import FunctionInvocationContext

from planner_ext.sk.usage import read_usage

__all__ = ["MeteredChatCompletion", "ToolMeter", "TripMeter"]


class TripMeter:
    """Counts the round trips of one run, and the tokens of each."""

    def __init__(self) -> None:
        self._tokens: list[int] = []

    def count(self, tokens: int) -> None:
        """Note one round trip, with its tokens."""
        self._tokens.append(tokens)

    @property
    def trips(self) -> int:
        """Round trips so far."""
        return len(self._tokens)

    def tokens(self, *, after: int = 0) -> int:
        """Tokens of the round trips that came after this many."""
        return sum(self._tokens[after:])


class ToolMeter:
    """Counts the functions that a model has a kernel start; those that a function calls in turn are not counted.

    Args:
        trips: Counts the round trips.
        budget: Round trips that are allowed.
    """

    def __init__(self, trips: TripMeter, budget: int) -> None:
        self._trips = trips
        self._budget = budget
        self._inside = ContextVar("inside", default=False)
        self.run = 0
        self.past_budget = 0

    async def __call__(
        self, context: FunctionInvocationContext, next: Callable[[FunctionInvocationContext], Awaitable[None]]
    ) -> None:
        """Count a function about to start; a function invocation filter of Semantic Kernel."""
        if self._inside.get():
            await next(context)
            return
        self.run += 1
        self.past_budget += self._trips.trips >= self._budget
        token = self._inside.set(True)
        try:
            await next(context)
        finally:
            self._inside.reset(token)


class MeteredChatCompletion(ChatCompletionClientBase):
    """A connector that counts its round trips, those of Semantic Kernel's own loop included, and is the inner one else.

    It overrides what every connector overrides: the one request at the bottom of Semantic Kernel's loop.

    Args:
        inner: The connector that makes the requests.
        trips: Counts them; None where somebody else does.
        reports: Whether replies keep their metadata.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    _inner: ChatCompletionClientBase = PrivateAttr()
    _trips: TripMeter | None = PrivateAttr()
    _reports: bool = PrivateAttr()

    def __init__(self, inner: ChatCompletionClientBase, *, trips: TripMeter | None, reports: bool = True) -> None:
        super().__init__(ai_model_id=inner.ai_model_id, service_id=inner.service_id)
        self.instruction_role = inner.instruction_role
        self._inner = inner
        self._trips = trips
        self._reports = reports

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Name the inner connector's settings class."""
        return self._inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """Give the inner connector's URL."""
        return self._inner.service_url()

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        messages = await self._inner._inner_get_chat_message_contents(chat_history, settings)
        self._count(messages[0].metadata if messages else {})
        for message in messages:
            self._silence(message)
        return messages

    async def _inner_get_streaming_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, function_invoke_attempt: int = 0
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        reported: dict[str, Any] = {}
        stream = self._inner._inner_get_streaming_chat_message_contents(chat_history, settings, function_invoke_attempt)
        async for chunks in stream:
            for chunk in chunks:
                reported |= {key: value for key, value in chunk.metadata.items() if value is not None}
                self._silence(chunk)
            yield chunks
        self._count(reported)

    def _verify_function_choice_settings(self, settings: PromptExecutionSettings) -> None:
        self._inner._verify_function_choice_settings(settings)

    def _update_function_choice_settings_callback(
        self,
    ) -> Callable[[FunctionCallChoiceConfiguration, PromptExecutionSettings, FunctionChoiceType], None]:
        return self._inner._update_function_choice_settings_callback()

    def _reset_function_choice_settings(self, settings: PromptExecutionSettings) -> None:
        self._inner._reset_function_choice_settings(settings)

    def _count(self, metadata: dict[str, Any]) -> None:
        if self._trips is not None:
            self._trips.count(read_usage(metadata.get("usage")).total_tokens)

    def _silence(self, message: ChatMessageContent) -> None:
        if not self._reports:
            message.metadata = {}
