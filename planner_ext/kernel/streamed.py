"""A run's events as the chunks of one Semantic Kernel stream."""

from collections.abc import Sequence
from typing import Any

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionResultContent,
    StreamingChatMessageContent,
)

from planner_ext.ports import TextDelta

__all__ = ["StreamedRun"]


class StreamedRun:
    """Makes chunks that carry their round trip and one model id, so that those of a round trip can be added up."""

    def __init__(self, ai_model_id: str) -> None:
        self._model = ai_model_id
        self._trip = 0

    def chunk(self, delta: TextDelta) -> StreamingChatMessageContent:
        """Pass a connector's chunk on."""
        chunk: StreamingChatMessageContent = delta.chunk
        self._trip = delta.iteration
        chunk.function_invoke_attempt = delta.iteration
        chunk.ai_model_id = self._model
        return chunk

    def results(self, messages: Sequence[ChatMessageContent]) -> StreamingChatMessageContent | None:
        """Show the results of a batch in one tool message, or nothing where there are none."""
        items: list[Any] = [
            item for message in messages for item in message.items if isinstance(item, FunctionResultContent)
        ]
        if not items:
            return None
        return StreamingChatMessageContent(
            role=AuthorRole.TOOL,
            items=items,
            choice_index=0,
            ai_model_id=self._model,
            function_invoke_attempt=self._trip,
        )

    def last(self, message: ChatMessageContent, *, text_sent: bool) -> StreamingChatMessageContent:
        """Close the stream with the final message's metadata, and with what of it was not sent yet."""
        return StreamingChatMessageContent(
            role=AuthorRole.ASSISTANT,
            content="" if text_sent else str(message),
            choice_index=0,
            metadata=message.metadata,
            finish_reason=message.finish_reason,
            ai_model_id=self._model,
            function_invoke_attempt=self._trip,
        )
