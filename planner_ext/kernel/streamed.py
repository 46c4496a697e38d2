"""A run's events as the chunks of one Semantic Kernel stream."""

from collections.abc import Iterator, Sequence
from typing import Any

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
    StreamingTextContent,
)

from planner_ext.kernel.messages import calls_of, text_of
from planner_ext.ports import TextDelta

__all__ = ["StreamedRun"]


class StreamedRun:
    """Makes chunks that carry their round trip and one model id, so that those of a round trip can be added up.

    Text is passed on as it comes. Calls are shown once their batch has its results, or where they go back to the
    caller: whole, under the ids and with the arguments of the history, and never left without a result in the stream.
    """

    def __init__(self, ai_model_id: str) -> None:
        self._model = ai_model_id
        self._trip = 0
        self._text: list[str] = []

    def chunk(self, delta: TextDelta) -> StreamingChatMessageContent | None:
        """Pass a connector's chunk on, but for the calls in it; None where nothing is left, or results are in it."""
        chunk: StreamingChatMessageContent = delta.chunk
        if delta.iteration != self._trip:  # a question that was answered is no part of the answer
            self._trip, self._text = delta.iteration, []
        items = [item for item in chunk.items if not isinstance(item, FunctionCallContent)]
        if chunk.role == AuthorRole.TOOL or (chunk.items and not items and chunk.finish_reason is None):
            return None
        self._text.append(delta.text)
        own = {"items": items, "function_invoke_attempt": delta.iteration, "ai_model_id": self._model}
        return chunk.model_copy(update=own)

    def settled(self, messages: Sequence[ChatMessageContent], iteration: int) -> Iterator[StreamingChatMessageContent]:
        """Show a batch that has its results: its calls, then the results in one tool message."""
        self._trip, self._text = iteration, []
        calls = [call for message in messages for call in _numbered(calls_of(message))]
        results = [item for message in messages for item in message.items if isinstance(item, FunctionResultContent)]
        if calls:
            yield self._message(AuthorRole.ASSISTANT, calls)
        if results:
            yield self._message(AuthorRole.TOOL, results)

    def last(self, message: ChatMessageContent) -> StreamingChatMessageContent:
        """Close the stream with the final message's metadata, and with what of it was not sent yet."""
        text = text_of(message)
        items: list[Any] = _numbered(calls_of(message))
        if not items or text != "".join(self._text):
            unsent = "" if text == "".join(self._text) else text
            items.append(StreamingTextContent(choice_index=0, text=unsent))
        return self._message(
            AuthorRole.ASSISTANT, items, metadata=message.metadata, finish_reason=message.finish_reason
        )

    def _message(self, role: AuthorRole, items: Sequence[Any], **fields: Any) -> StreamingChatMessageContent:
        return StreamingChatMessageContent(
            role=role,
            items=[*items],
            choice_index=0,
            ai_model_id=self._model,
            function_invoke_attempt=self._trip,
            **fields,
        )


def _numbered(calls: Sequence[FunctionCallContent]) -> list[Any]:
    """Number calls as streamed ones are, so that adding chunks up does not take two of them for one."""
    return [call.model_copy(update={"index": place}) for place, call in enumerate(calls)]
