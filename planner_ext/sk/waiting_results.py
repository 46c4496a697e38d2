"""Results in a stock kernel's history that say that their call waits for a person: written, found, and replaced.

A mark in the result's metadata says so; the text alone says nothing, since any function may return it. The mark's
fingerprint binds it to its conversation, the place of its call in it, the function and the arguments. Must not know
who decides, nor how a function runs.
"""

import hashlib
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.approval.decisions import ToolCall, digest_of
from planner_ext.sk.approval import PendingCall
from planner_ext.sk.arguments import InvalidArguments, parse_object
from planner_ext.sk.execution import result_text

__all__ = ["STARTED", "WAITING", "WaitingResult", "arguments_text", "mark_of", "replace_result", "waiting_results"]

WAITING = "This call waits for a person's approval and has not run: "
"""How the model reads that a call waits; its function, fingerprint and question follow."""

STARTED = "This call was approved and has started; its result is not known, and whether it took effect is in doubt."
"""What stands in the history from the start of an approved function to its end."""

_MARK = "planner_ext.waiting"
"""Where the metadata of a result says that its call waits; no function's text gets there."""


@dataclass(frozen=True, slots=True)
class WaitingResult:
    """A result that says that its call waits.

    Attributes:
        item: The result, as it stands in the history.
        content: The call.
        pending: The call as a person is shown it.
        signature: What the function took when it was asked about.
    """

    item: FunctionResultContent
    content: FunctionCallContent
    pending: PendingCall
    signature: str


def mark_of(
    history: ChatHistory | None, content: FunctionCallContent | None, call: ToolCall, signature: str
) -> tuple[str, dict[str, Any]]:
    """Write the text and the metadata of a result whose call waits.

    Args:
        history: The conversation, with the message that makes the call.
        content: The call, as it stands in the history.
        call: The same, as it will run.
        signature: What the function takes.
    """
    places = [] if history is None else list(_placed_calls(history))
    named = [place for one, place in places if one.id == call.id]
    exact = [place for one, place in places if one is content]
    mark = {
        "function": call.fully_qualified_name,
        "prompt": call.prompt,
        "arguments": arguments_text(call.arguments),
        "signature": signature,
        "nonce": uuid.uuid4().hex,
    }
    fingerprint = _fingerprint(mark, call.id, ["", *named, *exact][-1])  # a filter may have replaced the call itself
    text = f"{WAITING}{call.fully_qualified_name} {fingerprint}\n{call.prompt}".rstrip()
    return text, {_MARK: {**mark, "fingerprint": fingerprint}}


def waiting_results(history: ChatHistory) -> list[WaitingResult]:
    """Find the results that say that their call waits; one that does not fit a call before it is left out."""
    placed = list(_placed_calls(history))
    found: list[WaitingResult] = []
    for item in (item for message in history.messages for item in message.items):
        if isinstance(item, FunctionResultContent) and str(item.result).startswith(WAITING):
            mark = item.metadata.get(_MARK)
            waits = [_waiting(item, content, place, mark) for content, place in placed if content.id == item.id]
            found += [one for one in waits if one is not None][-1:]
    return found


def _waiting(item: FunctionResultContent, content: FunctionCallContent, place: str, mark: Any) -> WaitingResult | None:
    match mark:
        case {
            "function": str(function),
            "fingerprint": str(given),
            "prompt": str(prompt),
            "arguments": str(text),
            "signature": str(signature),
            "nonce": str(),
        }:
            own = cast("dict[str, Any]", {key: value for key, value in mark.items() if key != "fingerprint"})
            arguments = parse_object(text)
            fits = _names(content, function) and given == _fingerprint(own, content.id or "", place)
            if not fits or isinstance(arguments, InvalidArguments):
                return None
            shown: dict[str, Any] = {"arguments": arguments, "fingerprint": given, "prompt": prompt}
            pending = PendingCall(id=content.id or "", fully_qualified_name=function, **shown)
            return WaitingResult(item, content, pending, signature)
        case _:
            return None


def _names(content: FunctionCallContent, function: str) -> bool:
    """Whether a call is one of this function; a bare name is one of any plugin's function of that name."""
    plugin, _, name = function.rpartition("-")
    return name == content.function_name and content.plugin_name in (plugin, None)


def _placed_calls(history: ChatHistory) -> Iterator[tuple[FunctionCallContent, str]]:
    """List the calls of a history, each with its place: what user and assistant said before, and the call's number.

    System messages are not in it, since an agent adds its own to each request; nor are results, which are replaced.
    """
    said = hashlib.sha256()
    for message in history.messages:
        if message.role not in (AuthorRole.USER, AuthorRole.ASSISTANT):
            continue
        text = "".join(item.text for item in message.items if isinstance(item, TextContent))
        calls = [item for item in message.items if isinstance(item, FunctionCallContent)]
        shown = [[one.id, one.plugin_name, one.function_name, arguments_text(one.arguments)] for one in calls]
        said.update(json.dumps([str(message.role), text, shown]).encode())
        for number, one in enumerate(calls):
            yield one, f"{said.hexdigest()}/{number}"


def arguments_text(arguments: str | Mapping[str, Any] | None) -> str:
    """Write the arguments of a call as JSON text; a text is one already."""
    return arguments if isinstance(arguments, str) else result_text(dict(arguments or {}))


def _fingerprint(mark: Mapping[str, Any], call_id: str, place: str) -> str:
    return digest_of(mark["function"], {**mark, "id": call_id, "place": place})


def replace_result(
    history: ChatHistory, before: FunctionResultContent, after: FunctionResultContent | str
) -> FunctionResultContent:
    """Put another result in the place of one, which is found by identity; a text becomes a result of the same call.

    Returns:
        What stands there now.

    Raises:
        KeyError: If the result is no longer in the history.
    """
    if isinstance(after, str):
        after = FunctionResultContent(id=before.id, name=before.name, result=after)
    for place, message in enumerate(history.messages):
        if any(item is before for item in message.items):
            items: list[Any] = [after if item is before else item for item in message.items]
            history.messages[place] = ChatMessageContent(role=AuthorRole.TOOL, items=items, name=message.name)
            return after
    raise KeyError(before.id)
