"""Semantic Kernel's messages in and out: what the core needs to know of one, and how a transcript is written as them.

Nothing that a caller or a connector owns is changed; a message that must differ is made anew.
"""

import json
import re
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic_core import to_jsonable_python
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    TextContent,
)

from planner_ext.core.values import Message, RequestedCall
from planner_ext.journal import dump_message

__all__ = [
    "AssistantMessage",
    "as_history",
    "assistant_text",
    "calls_of",
    "dump_message",
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
    """Make an assistant message of a text, the empty one included."""
    return ChatMessageContent(role=AuthorRole.ASSISTANT, items=[TextContent(text=text)], **fields)


def requested_calls(message: ChatMessageContent) -> tuple[RequestedCall, ...]:
    """List a reply's calls as the core knows them."""
    return tuple(
        RequestedCall(id=call.id or "", name=name_of(call), arguments=_arguments(call)) for call in calls_of(message)
    )


def merge_reply(messages: Sequence[ChatMessageContent]) -> ChatMessageContent:
    """Make one message of a reply: the calls of several are one ordered batch, each with an id of its own.

    Ids that are missing, given twice within the reply, or refused by servers are reissued; everything else is kept as
    received.
    """
    first = messages[0]
    if len(messages) == 1 and not calls_of(first):
        return first
    items: list[Any] = [item for message in messages for item in message.items]
    metadata: dict[str, Any] = {}
    for message in messages:
        metadata |= message.metadata
    return with_items(first, with_own_ids(items), metadata)


_ID = re.compile("[!-~]+")
"""Ids that can be sent back: visible ASCII characters, as many as the server gave; some are signatures of thousands."""


def has_accepted_id(call: FunctionCallContent) -> bool:
    """Whether servers accept a call's id."""
    return bool(_ID.fullmatch(call.id or ""))


def with_own_ids(items: Iterable[Any]) -> list[Any]:
    """Give each call an id of its own; arguments that a connector parsed are written as JSON text again."""
    seen: set[str] = set()
    kept: list[Any] = []
    for item in items:
        own = item
        if isinstance(item, FunctionCallContent):
            fit = has_accepted_id(item) and item.id not in seen
            update: dict[str, Any] = {} if fit else {"id": f"call_{uuid.uuid4().hex[:24]}"}
            if isinstance(item.arguments, Mapping):
                update["arguments"] = _arguments(item)
            own = item.model_copy(update=update) if update else item
            seen.add(own.id or "")
        kept.append(own)
    return kept


def with_items(message: ChatMessageContent, items: list[Any], metadata: dict[str, Any]) -> AssistantMessage:
    """Copy a message with other items; validation is skipped, the items being valid already."""
    values: dict[str, Any] = {name: getattr(message, name) for name in ChatMessageContent.model_fields}
    given = (message.model_fields_set & values.keys()) | {"items", "metadata"}
    return AssistantMessage.model_construct(given, **(values | {"items": items, "metadata": metadata}))


def name_of(call: FunctionCallContent) -> str:
    """Name the function as the kernel would, whatever separator the connector uses."""
    if call.plugin_name and call.function_name:
        return f"{call.plugin_name}-{call.function_name}"
    return call.name or call.function_name


def _arguments(call: FunctionCallContent) -> str:
    if isinstance(call.arguments, Mapping):
        return json.dumps(
            to_jsonable_python(dict(call.arguments), bytes_mode="base64", fallback=str), ensure_ascii=False
        )
    return call.arguments or ""


def load_message(message: Message) -> ChatMessageContent:
    """Take a message as it is, or make it of its JSON.

    Raises:
        pydantic.ValidationError: If it is JSON of no message.
    """
    return message if isinstance(message, ChatMessageContent) else ChatMessageContent.model_validate(message)


def as_history(messages: Iterable[ChatMessageContent]) -> ChatHistory:
    """Make a history of messages, sharing them."""
    return ChatHistory(messages=list(messages))
