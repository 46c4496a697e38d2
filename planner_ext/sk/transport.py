"""How a request is put to a connector. The way that every connector has is here; a faster one falls back on it.

A wire knows nothing of transcripts, budgets or replies: messages go in, what the connector makes of the answer comes
out.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.functions import KernelFunctionMetadata

from planner_ext.sk.connectors import connector_of, joined, one_text, received
from planner_ext.sk.toolset import RequestBehavior

if TYPE_CHECKING:
    from semantic_kernel.functions import KernelArguments
__all__ = ["ChatRequest", "ChatTransport", "GenericTransport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request, before it is put into a connector's words.

    Attributes:
        messages: What is sent. The same list for as long as messages are only added to it: where what was sent
            before is changed, it is another one.
        last: What is sent in place of the newest of them, this once; None sends that itself.
        settings: A copy for this request, without a behaviour.
        choice: The tool choice where functions are offered, else None.
        functions: The kernel functions offered. One tuple for as long as they are the same functions.
        schemas: The caller's own tool schemas that are offered beside them.
    """

    messages: list[ChatMessageContent]
    last: ChatMessageContent | None = None
    settings: PromptExecutionSettings
    choice: Literal["auto", "required", "none"] | None = None
    functions: tuple[KernelFunctionMetadata, ...] = ()
    schemas: tuple[Any, ...] = ()

    @property
    def sent(self) -> list[ChatMessageContent]:
        """The messages as they are sent, in a list of their own."""
        return list(self.messages) if self.last is None else [*self.messages[:-1], self.last]


class ChatTransport(Protocol):
    """A way to put requests to one connector. Raises whatever the connector raises."""

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        """Send a request; return a message for each choice of the response."""
        ...

    def stream(self, request: ChatRequest) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Send a request; yield the chunks of the response's first choice."""
        ...


class GenericTransport:
    """The connector's public methods: right for any connector, and they convert the whole history each time."""

    def __init__(
        self, service: ChatCompletionClientBase, *, kernel: Kernel | None, arguments: "KernelArguments | None"
    ) -> None:
        self._service = service
        self._kernel = kernel
        self._arguments = arguments
        self._connector = connector_of(service)

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        """Send a request; return a message for each choice of the response."""
        messages = await self._service.get_chat_message_contents(
            self._history(request), _settings(request), kernel=self._kernel, arguments=self._arguments
        )
        return [one_text(received(message)) for message in messages]

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Send a request; yield the chunks of the response's first choice."""
        groups = self._service.get_streaming_chat_message_contents(
            self._history(request), _settings(request), kernel=self._kernel, arguments=self._arguments
        )
        async with aclosing(groups):
            async for group in groups:
                for chunk in group:
                    if chunk is not None and chunk.choice_index == 0:  # pyright: ignore[reportUnnecessaryComparison]
                        yield received(chunk)

    def _history(self, request: ChatRequest) -> ChatHistory:
        sent = request.sent  # connectors may add to it
        joins = self._connector.joins
        return ChatHistory.model_construct(messages=sent if joins is None else joined(sent, joins))


def _settings(request: ChatRequest) -> PromptExecutionSettings:
    if request.choice is None:
        return request.settings
    behavior = RequestBehavior.of(list(request.functions), request.choice, schemas=request.schemas)
    return request.settings.model_copy(update={"function_choice_behavior": behavior})
