"""A transcript written as messages of Semantic Kernel, as they are sent."""

import json
import re
import uuid
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic_core import to_jsonable_python
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.core.values import CallResult, EditedReply, Message, RequestedCall, TextMessage, TranscriptItem
from planner_ext.engine.journal import dump_message
from planner_ext.sk.arguments import InvalidArguments, parse_object
from planner_ext.sk.execution import sendable

__all__ = [
    "INVALID_JSON",
    "AssistantMessage",
    "accepted_call",
    "accepted_message",
    "accepted_name",
    "accepted_reply",
    "as_history",
    "assistant_text",
    "calls_of",
    "dump_message",
    "given_arguments",
    "has_accepted_id",
    "is_written_as",
    "load_message",
    "merge_reply",
    "name_of",
    "render",
    "requested_calls",
    "text_of",
    "with_items",
    "with_own_ids",
]

# Semantic Kernel's messages in and out: what the core needs to know of one, and how a transcript is written as them.
#
# Nothing that a caller or a connector owns is changed; a message that must differ is made anew.


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


# A reply as servers accept it when it is sent back: the names, ids and arguments of its calls, its role and text.
#
# A model may call a function by a name that no server takes (``functions.t-a``, ``t-a<|channel|>commentary``, none at
# all). Kept as it is, such a call has every later request of the conversation refused. So a reply is written once,
# here, before it enters a history; what servers accept stays as it is, byte by byte.

INVALID_JSON: Final = "invalid_json"
"""The key under which a history holds arguments that are not one JSON object."""

_NAME = re.compile("[a-zA-Z0-9_-]+")
_NOT_IN_A_NAME = re.compile("[^a-zA-Z0-9_-]+")
_LONGEST_NAME: Final = 64
_SPEAKER = re.compile(r"[^\s<|\\/>]+")


def accepted_name(name: str, offered: Container[str] | None = ()) -> str:
    """Return a function name as servers accept it: ``[a-zA-Z0-9_-]``, 1 to 64 characters.

    Args:
        name: As the model gave it.
        offered: Names that the server has accepted in the request, however long they are; None does not judge lengths.

    Returns:
        The name itself, or one that resembles it and begins with ``unknown_``, so that it is not a function's.
    """
    if _NAME.fullmatch(name) and (len(name) <= _LONGEST_NAME or offered is None or name in offered):
        return name
    resembling = _NOT_IN_A_NAME.sub("_", name[:_LONGEST_NAME])
    return f"unknown_{resembling or 'function'}"[:_LONGEST_NAME]


def accepted_call(call: FunctionCallContent, offered: Container[str] | None = ()) -> FunctionCallContent:
    """Write a call as servers accept it; one that needs no change is returned itself.

    Arguments that are not one JSON object become one with the model's text under `INVALID_JSON`: some servers, and some
    connectors, parse the arguments in a history.
    """
    name, arguments = name_of(call), _accepted_arguments(call.arguments)
    own = accepted_name(name, offered)
    if own == name and call.name and arguments == call.arguments:
        return call
    update: dict[str, Any] = {"arguments": arguments}
    if own != name or not call.name:
        plugin, function = own.split("-", 1) if "-" in own else (None, own)
        update |= {"name": own, "plugin_name": plugin, "function_name": function}
    return call.model_copy(update=update)


def _accepted_arguments(given: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    text = given or ""
    if not text or text.isspace():
        return "{}"
    if isinstance(parse_object(text), InvalidArguments):
        return json.dumps({INVALID_JSON: sendable(text)}, ensure_ascii=False)
    return text


def given_arguments(written: str) -> str:
    """Read arguments as the model gave them off a call that `accepted_call` wrote."""
    if not written.startswith(f'{{"{INVALID_JSON}": '):
        return written
    parsed = parse_object(written)
    given = parsed.get(INVALID_JSON) if isinstance(parsed, dict) and len(parsed) == 1 else None
    return given if isinstance(given, str) and isinstance(parse_object(given), InvalidArguments) else written


def accepted_message(message: ChatMessageContent, offered: Container[str] | None = ()) -> ChatMessageContent:
    """Write the calls of an assistant message as servers accept them; one that needs no change is returned itself."""
    calls = calls_of(message)
    if message.role != AuthorRole.ASSISTANT or not calls:
        return message
    items = [accepted_call(item, offered) if isinstance(item, FunctionCallContent) else item for item in message.items]
    if all(new is old for new, old in zip(items, message.items, strict=True)):
        return message
    return with_items(message, items, message.metadata)


def accepted_reply(
    message: ChatMessageContent, offered: Container[str] = ()
) -> tuple[ChatMessageContent, tuple[RequestedCall, ...]]:
    """Write a reply for the history, and list its calls as the model made them.

    Args:
        message: The reply, its calls with ids of their own.
        offered: The names of the functions that the request offered.
    """
    calls = requested_calls(message)
    if _is_accepted(message, calls, offered):
        return message, calls
    message = _as_assistant(message)
    written = accepted_message(message, offered)
    if written is message:
        return message, calls
    return written, tuple(
        RequestedCall(id=call.id, name=call.name, arguments=call.arguments, sent_name=own)
        if (own := name_of(item)) != call.name
        else call
        for call, item in zip(calls, calls_of(written), strict=True)
    )


def _is_accepted(message: ChatMessageContent, calls: Sequence[RequestedCall], offered: Container[str]) -> bool:
    """Whether a reply is as nearly all are: it calls what was offered, and needs no closer look."""
    return (
        message.role is AuthorRole.ASSISTANT
        and message.name is None
        and all(
            call.name in offered and call.arguments[:1] == "{" and isinstance(parse_object(call.arguments), dict)
            for call in calls
        )
        and all(
            bool(item.name)
            if isinstance(item, FunctionCallContent)
            else isinstance(item, TextContent) and item.text.isascii()
            for item in message.items
        )
    )


def is_written_as(message: ChatMessageContent, calls: Sequence[RequestedCall]) -> bool:
    """Whether the calls in a message are these, as `accepted_reply` writes them, or as the model made them."""
    written = requested_calls(message)
    return len(written) == len(calls) and all(map(_is_written_as, written, calls))


def _is_written_as(written: RequestedCall, call: RequestedCall) -> bool:
    return (
        written.id == call.id
        and written.name == (call.sent_name or call.name)
        and call.sent_name in ("", accepted_name(call.name))
        and written.arguments in (call.arguments, _accepted_arguments(call.arguments))
    )


def _as_assistant(message: ChatMessageContent) -> ChatMessageContent:
    """Take a reply for the assistant's, whatever role and speaker it names, and its text as UTF-8 can encode it."""
    update: dict[str, Any] = {}
    if message.role != AuthorRole.ASSISTANT:
        update["role"] = AuthorRole.ASSISTANT
    if message.name is not None and not _SPEAKER.fullmatch(message.name):
        update["name"] = None
    items = [_encodable(item) for item in message.items]
    if any(new is not old for new, old in zip(items, message.items, strict=True)):
        update["items"] = items
    return message.model_copy(update=update) if update else message


def _encodable(item: Any) -> Any:
    if not isinstance(item, TextContent):
        return item
    text = sendable(item.text)
    return item if text == item.text else item.model_copy(update={"text": text})


def render(entries: Iterable[TranscriptItem], offered: Container[str] | None = None) -> list[ChatMessageContent]:
    """Write transcript entries as messages of Semantic Kernel.

    Args:
        entries: The transcript, or a part of it.
        offered: Names of the functions that are offered; see `planner_ext.sk.messages.accepted_name`.
    """
    return [_render(entry, offered) for entry in entries]


def _render(entry: TranscriptItem, offered: Container[str] | None) -> ChatMessageContent:
    match entry:
        case CallResult():
            content = FunctionResultContent(id=entry.call_id, name=entry.name, result=entry.text)
            return ChatMessageContent(role=AuthorRole.TOOL, items=[content])
        case EditedReply():
            return _changed(_load(entry.message, offered), set(entry.kept), dict(entry.edited))
        case TextMessage():
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

    A message out of a journal may be older than what `planner_ext.sk.messages` promises of replies.
    """
    loaded = load_message(message)
    if loaded is not message:
        loaded = accepted_message(loaded, offered)
    if not loaded.items:
        return loaded.model_copy(update={"items": [TextContent(text="")]})
    if loaded.role != AuthorRole.ASSISTANT or isinstance(loaded, AssistantMessage) or not calls_of(loaded):
        return loaded
    return with_items(loaded, list(loaded.items), loaded.metadata)
