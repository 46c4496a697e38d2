"""Semantic Kernel's messages in and out: what the core reads of a reply, and a streamed reply put together.

Nothing that a caller or a connector owns is changed; a message that must differ is copied.
"""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_jsonable_python
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    StreamingChatMessageContent,
    TextContent,
)

from planner_ext.core.values import Message, RequestedCall
from planner_ext.sk.usage import merge_reported

__all__ = [
    "AssistantMessage",
    "ReplyAssembly",
    "assistant_text",
    "calls_of",
    "has_accepted_id",
    "load_message",
    "merge_reply",
    "name_of",
    "requested_calls",
    "text_of",
    "with_items",
    "with_own_ids",
]


class AssistantMessage(ChatMessageContent):
    """An assistant message that is sent with both its text and its calls.

    Semantic Kernel's own leaves the text out of every later request (chat_message_content.py, ``to_dict``).
    """

    def to_dict(self, role_key: str = "role", content_key: str = "content") -> dict[str, Any]:
        """Write the message as a connector sends it."""
        sent = super().to_dict(role_key=role_key, content_key=content_key)
        if "tool_calls" in sent and (text := text_of(self)):
            sent[content_key] = text
        return sent


def text_of(message: ChatMessageContent) -> str:
    """Join all text of a message; Semantic Kernel's ``content`` is its first piece only."""
    return "".join(item.text for item in message.items if isinstance(item, TextContent))


def calls_of(message: ChatMessageContent) -> list[FunctionCallContent]:
    """List the function calls of a message."""
    return [item for item in message.items if isinstance(item, FunctionCallContent)]


def assistant_text(text: str, **fields: Any) -> ChatMessageContent:
    """Make an assistant message of a text, which may be empty."""
    return ChatMessageContent(role=AuthorRole.ASSISTANT, items=[TextContent(text=text)], **fields)


def load_message(message: Message) -> ChatMessageContent:
    """Return a message as it is, or read it from its JSON.

    Raises:
        pydantic.ValidationError: If the JSON is not that of a message.
    """
    return message if isinstance(message, ChatMessageContent) else ChatMessageContent.model_validate(message)


def with_items(message: ChatMessageContent, items: list[Any], metadata: dict[str, Any]) -> AssistantMessage:
    """Copy a message with other items, without validating them again."""
    values: dict[str, Any] = {name: getattr(message, name) for name in ChatMessageContent.model_fields}
    given = (message.model_fields_set & values.keys()) | {"items", "metadata"}
    return AssistantMessage.model_construct(given, **(values | {"items": items, "metadata": metadata}))


# The calls of a reply.

_ID = re.compile("[!-~]+")
"""Ids that can be sent back: visible ASCII characters of any number; some are signatures of thousands."""


def name_of(call: FunctionCallContent) -> str:
    """Name the function as the kernel would, whatever separator the connector uses."""
    if call.plugin_name and call.function_name:
        return f"{call.plugin_name}-{call.function_name}"
    return call.name or call.function_name


def _as_json(arguments: Mapping[str, Any]) -> str:
    """Write arguments that a connector parsed as JSON text again."""
    return json.dumps(to_jsonable_python(dict(arguments), bytes_mode="base64", fallback=str), ensure_ascii=False)


def requested_calls(message: ChatMessageContent) -> tuple[RequestedCall, ...]:
    """List a reply's calls as the core knows them."""
    return tuple(
        RequestedCall(
            id=call.id or "",
            name=name_of(call),
            arguments=_as_json(call.arguments) if isinstance(call.arguments, Mapping) else call.arguments or "",
        )
        for call in message.items
        if isinstance(call, FunctionCallContent)
    )


def has_accepted_id(call: FunctionCallContent) -> bool:
    """Whether servers accept a call's id."""
    return bool(_ID.fullmatch(call.id or ""))


def with_own_ids(items: Iterable[Any]) -> list[Any]:
    """Give each call a unique id, and write arguments that a connector parsed as JSON text again."""
    seen: set[str] = set()
    kept: list[Any] = []
    for item in items:
        own = item
        if isinstance(item, FunctionCallContent):
            fit = has_accepted_id(item) and item.id not in seen
            update: dict[str, Any] = {} if fit else {"id": f"call_{uuid.uuid4().hex[:24]}"}
            if isinstance(item.arguments, Mapping):
                update["arguments"] = _as_json(item.arguments)
            own = item.model_copy(update=update) if update else item
            seen.add(own.id or "")
        kept.append(own)
    return kept


def merge_reply(messages: Sequence[ChatMessageContent]) -> ChatMessageContent:
    """Merge the messages of a reply into one, whose calls are one ordered batch.

    Ids that are missing, given twice within the reply, or refused by servers are reissued; everything else is kept as
    received.
    """
    first = messages[0]
    if len(messages) == 1 and not calls_of(first):
        return first
    metadata = {key: value for message in messages for key, value in message.metadata.items()}
    return with_items(first, with_own_ids(item for message in messages for item in message.items), metadata)


# A streamed reply.

_OPEN_CALLS = 256
"""How far back a piece looks for its call: keeps a reply of very many calls linear. Providers send calls in order."""


@dataclass(slots=True)
class _StreamedCall:
    id: str | None
    index: int | None
    call_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict[str, Any])
    names: list[str] = field(default_factory=list[str])
    arguments: list[Any] = field(default_factory=list[Any])

    def add(self, piece: FunctionCallContent, name: str) -> None:
        self.id = self.id or piece.id or None
        self.call_id = self.call_id or piece.call_id
        self.metadata |= piece.metadata
        if name and not self.arguments:
            repeated = bool(piece.id or piece.arguments) and "".join(self.names) == name  # as some servers do
            self.names += [] if repeated else [name]
        if piece.arguments is not None and piece.arguments != "":
            self.arguments.append(piece.arguments)

    def content(self) -> FunctionCallContent:
        texts = [piece for piece in self.arguments if isinstance(piece, str)]
        return FunctionCallContent(
            id=self.id,
            call_id=self.call_id,
            index=self.index,
            name="".join(self.names),
            arguments="".join(texts) if texts or not self.arguments else self.arguments[0],
            metadata=self.metadata,
        )


class ReplyAssembly:
    """Puts the chunks of one streamed reply together: in linear time, keeping no chunk and losing no delta.

    Semantic Kernel's own addition of chunks drops an argument delta equal to ``{}``, mixes the fragments of calls that
    share an index, and loses a function name that comes in pieces.
    """

    def __init__(self) -> None:
        self._first: StreamingChatMessageContent | None = None
        self._text: list[str] = []
        self._calls: list[_StreamedCall] = []
        self._others: list[Any] = []
        self._metadata: dict[str, Any] = {}
        self._finish_reason: Any = None

    def add(self, chunk: StreamingChatMessageContent) -> str:
        """Take one chunk; return the text in it."""
        if chunk.role == AuthorRole.TOOL:  # the service ran the calls so far itself, and replies anew
            self._text, self._calls, self._others = [], [], []
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
    def is_reply(self) -> bool:
        """Whether the chunks make a reply: they hold content, or a finish reason."""
        return bool(self._text or self._calls or self._others or self._finish_reason is not None)

    def message(self) -> ChatMessageContent:
        """Return the whole message: its calls in the order of their indexes, then other items, then its text."""
        first = self._first
        assert first is not None
        calls = sorted(self._calls, key=lambda call: call.index or 0)
        items: list[Any] = [*(call.content() for call in calls), *self._others]
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

    def _add_metadata(self, metadata: dict[str, Any]) -> None:
        """Merge the metadata of all chunks; usage that is reported more than once is cumulative."""
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
            call = _StreamedCall(id=piece.id or None, index=piece.index)
            self._calls.append(call)
        call.add(piece, name)

    def _continued(self, piece: FunctionCallContent, name: str) -> _StreamedCall | None:
        """Find the call that a piece continues; None if it opens a new one.

        A new call is opened by arguments that are whole, by another id, and, where no ids are sent, by a name after
        arguments have begun.
        """
        same = [call for call in self._calls[-_OPEN_CALLS:] if call.index == piece.index]
        if not same or isinstance(piece.arguments, Mapping):
            return None
        call = same[-1]
        if piece.id and call.id:
            return next((known for known in reversed(same) if known.id == piece.id), None)
        opens = call.names if piece.id else name and call.arguments and not call.id
        return None if opens else call
