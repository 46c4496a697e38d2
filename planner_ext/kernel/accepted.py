"""A reply as servers accept it when it is sent back: the names, ids and arguments of its calls, its role and text.

A model may call a function by a name that no server takes (``functions.t-a``, ``t-a<|channel|>commentary``, none at
all). Kept as it is, such a call has every later request of the conversation refused. So a reply is written once, here,
before it enters a history; what servers accept stays as it is, byte by byte.
"""

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, Final

from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionCallContent, TextContent

from planner_ext.core.values import RequestedCall
from planner_ext.kernel.arguments import InvalidArguments, parse_object
from planner_ext.kernel.messages import calls_of, name_of, requested_calls, with_items
from planner_ext.kernel.results import sendable

__all__ = [
    "INVALID_JSON",
    "accepted_call",
    "accepted_message",
    "accepted_name",
    "accepted_reply",
    "given_arguments",
    "is_written_as",
]

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
