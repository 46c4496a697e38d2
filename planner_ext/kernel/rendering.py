"""A transcript written as messages of Semantic Kernel, as they are sent."""

from collections.abc import Container, Iterable, Mapping
from typing import Any

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.core.values import CallResult, Entry, Message, ReplyEntry, Said
from planner_ext.kernel.accepted import accepted_message
from planner_ext.kernel.messages import AssistantMessage, calls_of, load_message, with_items

__all__ = ["render"]


def render(entries: Iterable[Entry], offered: Container[str] | None = None) -> list[ChatMessageContent]:
    """Write transcript entries as messages of Semantic Kernel.

    Args:
        entries: The transcript, or a part of it.
        offered: Names of the functions that are offered; see `planner_ext.kernel.accepted.accepted_name`.
    """
    return [_render(entry, offered) for entry in entries]


def _render(entry: Entry, offered: Container[str] | None) -> ChatMessageContent:
    match entry:
        case CallResult():
            content = FunctionResultContent(id=entry.call_id, name=entry.name, result=entry.text)
            return ChatMessageContent(role=AuthorRole.TOOL, items=[content])
        case ReplyEntry():
            return _changed(_load(entry.message, offered), set(entry.kept), dict(entry.edited))
        case Said():
            return ChatMessageContent(role=AuthorRole(entry.role), content=entry.text)
        case _:
            return _load(entry, offered)


def _changed(message: ChatMessageContent, kept: set[str], edited: Mapping[str, str]) -> ChatMessageContent:
    """Leave calls out of a message, and put a person's arguments in place of the model's."""
    items: list[Any] = [
        item.model_copy(update={"arguments": edited[item.id or ""]})
        if isinstance(item, FunctionCallContent) and item.id in edited
        else item
        for item in message.items
        if not isinstance(item, FunctionCallContent) or item.id in kept
    ]
    return with_items(message, items, message.metadata)


def _load(message: Message, offered: Container[str] | None) -> ChatMessageContent:
    """Make a message fit to be sent: one with calls is sent with its text, too, an empty one as an empty text.

    A message out of a journal may be older than what `planner_ext.kernel.accepted` promises of replies.
    """
    loaded = load_message(message)
    if loaded is not message:
        loaded = accepted_message(loaded, offered)
    if not loaded.items:
        return loaded.model_copy(update={"items": [TextContent(text="")]})
    if loaded.role != AuthorRole.ASSISTANT or isinstance(loaded, AssistantMessage) or not calls_of(loaded):
        return loaded
    return with_items(loaded, list(loaded.items), loaded.metadata)
