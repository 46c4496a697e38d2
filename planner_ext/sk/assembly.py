"""A streamed reply, put together again: in linear time, without keeping chunks, and without losing any delta.

Semantic Kernel's own addition of chunks drops an argument delta equal to ``{}``, mixes the fragments of calls that
share an index, and loses a function name that comes in pieces.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    StreamingChatMessageContent,
    TextContent,
)

from planner_ext.sk.messages import AssistantMessage
from planner_ext.sk.usage import merge_reported

__all__ = ["ReplyAssembly"]


@dataclass(slots=True)
class _Call:
    id: str | None
    index: int | None
    call_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    names: list[str] = field(default_factory=list[str])
    arguments: list[Any] = field(default_factory=list[Any])

    def finished(self) -> FunctionCallContent:
        texts = [piece for piece in self.arguments if isinstance(piece, str)]
        whole = [piece for piece in self.arguments if not isinstance(piece, str)]
        arguments = whole[-1] if whole and not texts else "".join(texts)
        return FunctionCallContent(
            id=self.id,
            call_id=self.call_id,
            index=self.index,
            name="".join(self.names),
            arguments=arguments,
            metadata=self.metadata,
        )


class ReplyAssembly:
    """Takes the chunks of one streamed reply and gives the whole message."""

    def __init__(self) -> None:
        self._first: StreamingChatMessageContent | None = None
        self._text: list[str] = []
        self._calls: list[_Call] = []
        self._others: list[Any] = []
        self._metadata: dict[str, Any] = {}
        self._finish_reason: Any = None

    def add(self, chunk: StreamingChatMessageContent) -> str:
        """Take one chunk; return the text in it."""
        if chunk.role == AuthorRole.TOOL:
            self._forget()
            return ""
        if self._first is None:
            self._first = chunk
        if chunk.finish_reason is not None:
            self._finish_reason = chunk.finish_reason
        self._add_metadata(chunk.metadata)
        start = len(self._text)
        for item in chunk.items:
            if isinstance(item, FunctionCallContent):
                self._add_call(item)
            elif isinstance(item, TextContent):
                self._text.append(item.text)
            else:
                self._others.append(item)
        return "".join(self._text[start:])

    @property
    def any(self) -> bool:
        """Whether there is a reply at all: some content, or at least the word that it has ended."""
        return bool(self._text or self._calls or self._others or self._finish_reason is not None)

    def message(self) -> ChatMessageContent:
        """Give the whole message: its calls in the order of their indexes, then what else it holds, then its text."""
        first = self._first
        assert first is not None
        calls = sorted(self._calls, key=lambda call: call.index or 0)
        items: list[Any] = [*(call.finished() for call in calls), *self._others]
        if text := "".join(self._text):
            items.append(TextContent(text=text))
        return AssistantMessage(
            role=first.role,
            items=items,
            name=first.name,
            ai_model_id=first.ai_model_id,
            metadata=self._metadata,
            finish_reason=self._finish_reason,
        )

    def _forget(self) -> None:
        """Drop what came so far: results in a stream mean that the service ran those calls itself, and goes on."""
        self._text, self._calls, self._others = [], [], []

    def _add_metadata(self, metadata: dict[str, Any]) -> None:
        """Keep what any chunk says; usage that is reported more than once is cumulative."""
        usage = merge_reported(self._metadata.get("usage"), metadata.get("usage"))
        for key, value in metadata.items():
            if value is not None or key not in self._metadata:
                self._metadata[key] = value
        if usage is not None:
            self._metadata["usage"] = usage

    def _add_call(self, piece: FunctionCallContent) -> None:
        name = piece.name or piece.custom_fully_qualified_name("-")
        call = self._continued(piece, name)
        if call is None:
            call = _Call(id=piece.id or None, index=piece.index)
            self._calls.append(call)
        call.id = call.id or piece.id or None
        call.call_id = call.call_id or piece.call_id
        call.metadata |= piece.metadata
        if name and not call.arguments and not _is_repeated(name, piece, call):
            call.names.append(name)
        if piece.arguments is not None and piece.arguments != "":
            call.arguments.append(piece.arguments)

    def _continued(self, piece: FunctionCallContent, name: str) -> _Call | None:
        """Find the call that a piece goes on with; None where it opens a new one.

        A new call is opened by arguments that are whole, by another id, and, where no ids are sent, by a name after
        arguments have begun.
        """
        if isinstance(piece.arguments, Mapping):
            return None
        same: Sequence[_Call] = [call for call in self._calls[-_OPEN_CALLS:] if call.index == piece.index]
        if not same:
            return None
        call = same[-1]
        if piece.id and call.id:
            return next((known for known in reversed(same) if known.id == piece.id), None)
        if piece.id and call.names:
            return None
        return None if name and call.arguments and not call.id else call


def _is_repeated(name: str, piece: FunctionCallContent, call: _Call) -> bool:
    """Whether a name is the call's header once more, as some servers send it with each piece, and not its next part."""
    return bool(piece.id or piece.arguments) and "".join(call.names) == name


_OPEN_CALLS = 256
"""How far back a piece looks for its call: keeps a reply of very many calls linear. Providers send calls in order."""
