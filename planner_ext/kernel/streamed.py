"""A run's events as the chunks of one Semantic Kernel stream."""

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionResultContent,
    StreamingChatMessageContent,
)

from planner_ext.core.facts import CallDecided, CallFinished, CallsWithheld, IterationCompleted, ModelReplied
from planner_ext.ports import Event, TextDelta

__all__ = ["StreamedRun"]


class StreamedRun:
    """Turns the events of one run into chunks that carry their round trip and one model id, so that they add up."""

    def __init__(self, ai_model_id: str) -> None:
        self._model = ai_model_id
        self._trip = 0
        self._results: dict[int, tuple[str, str]] = {}
        self._names: dict[int, tuple[str, str]] = {}

    def chunk_of(self, event: Event) -> StreamingChatMessageContent | None:
        """Give the chunk for an event, or None for those that a stream does not show."""
        match event:
            case TextDelta():
                chunk: StreamingChatMessageContent = event.chunk
                self._trip = event.iteration
                chunk.function_invoke_attempt = event.iteration
                chunk.ai_model_id = self._model
                return chunk
            case ModelReplied(calls=calls):
                self._names = {index: (call.id, call.name) for index, call in enumerate(calls)}
                self._results = {}
            case CallDecided(verdict="answer" | "deny" | "final_answer", index=index, answer=answer):
                self._add(index, answer)
            case CallsWithheld(indexes=indexes, answer=answer):
                for index in indexes:
                    self._add(index, answer)
            case CallFinished(index=index, result=result):
                self._add(index, result)
            case IterationCompleted():
                return self._tool_message()
            case _:
                pass
        return None

    def _add(self, index: int, text: str) -> None:
        self._results[index] = (self._names[index][1], text)

    def _tool_message(self) -> StreamingChatMessageContent:
        return StreamingChatMessageContent(
            role=AuthorRole.TOOL,
            items=[
                FunctionResultContent(id=self._names[index][0], name=name, result=text)
                for index, (name, text) in sorted(self._results.items())
            ],
            choice_index=0,
            ai_model_id=self._model,
            function_invoke_attempt=self._trip,
        )

    def last_chunk(self, message: ChatMessageContent, *, text_sent: bool) -> StreamingChatMessageContent:
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
