"""A reply: from what a connector returned, whole or in chunks, to the message that servers accept, and its calls.

A model may call a function by a name that servers refuse (``functions.t-a``,
``t-a<|channel|>commentary``, ""), and would then have every later request refused. So a
reply is normalised before it enters a history; an acceptable item stays as it is, byte
by byte.
"""

import json
import re
from collections.abc import AsyncGenerator, Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from operator import is_
from typing import Any, Final, TypeVar, cast

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FinishReason,
    FunctionCallContent,
    StreamingChatMessageContent,
    StreamingTextContent,
    TextContent,
)

from planner_ext.core.values import RequestedCall
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object
from planner_ext.sk.functions.execution import sendable
from planner_ext.sk.messages import (
    AssistantMessage,
    merge_reported,
    part_of,
    requested_call,
    requested_calls,
    text_of,
    usage_in,
    with_items,
    with_one_text,
    with_usage,
)

M = TypeVar("M", bound=ChatMessageContent)

INVALID_JSON: Final = "invalid_json"
"""The key under which a history holds arguments that are not one JSON object."""

_NAME = re.compile("[a-zA-Z0-9_-]+")
_NOT_IN_A_NAME = re.compile("[^a-zA-Z0-9_-]+")
_LONGEST_NAME: Final = 64
_SPEAKER = re.compile(r"[^\s<|\\/>]+")


def accepted_reply(
    messages: Sequence[ChatMessageContent], offered: Container[str] = ()
) -> tuple[ChatMessageContent, tuple[RequestedCall, ...]]:
    """Make one message of a reply, normalised, and list its calls as the model made them.

    ``messages`` are one for each choice: their calls become one batch, their texts one.
    ``offered`` are the names that the request offered.
    """
    first = messages[0]
    received = [item for message in messages for item in message.items]
    items, calls = accepted_items(received, offered)
    items = with_one_text(items)
    name = None
    if first.name is None or _SPEAKER.fullmatch(first.name):
        name = first.name
    if first.role is not AuthorRole.ASSISTANT or name != first.name:
        first = first.model_copy(update={"role": AuthorRole.ASSISTANT, "name": name})
    if (
        len(messages) == 1
        and not calls
        and len(items) == len(received)
        and all(map(is_, items, received))
    ):
        return first, ()
    metadata = {
        key: value for message in messages for key, value in message.metadata.items()
    }
    return with_items(first, items, metadata), tuple(calls)


# Names and arguments that servers accept.


def accepted_name(name: str, offered: Container[str] | None = ()) -> str:
    """Return a function name that servers accept: ``[a-zA-Z0-9_-]``, 1 to 64 characters.

    One that was ``offered`` may be longer; with None each may. A name that servers
    refuse becomes a similar one with the prefix ``unknown_``, which no function has.
    """
    if _NAME.fullmatch(name) and (
        len(name) <= _LONGEST_NAME or offered is None or name in offered
    ):
        return name
    resembling = _NOT_IN_A_NAME.sub("_", name[:_LONGEST_NAME])
    return f"unknown_{resembling or 'function'}"[:_LONGEST_NAME]


def _accepted_arguments(given: str) -> str:
    if not given or given.isspace():
        return "{}"
    if isinstance(parse_object(given), InvalidArguments):
        return json.dumps({INVALID_JSON: sendable(given)}, ensure_ascii=False)
    return given


def given_arguments(written: str) -> str:
    """Recover the model's own arguments from those in a history."""
    if not written.startswith(f'{{"{INVALID_JSON}": '):
        return written
    parsed = parse_object(written)
    given = (
        parsed.get(INVALID_JSON)
        if isinstance(parsed, dict) and len(parsed) == 1
        else None
    )
    return (
        given
        if isinstance(given, str) and isinstance(parse_object(given), InvalidArguments)
        else written
    )


def accepted_items(
    received: Iterable[Any], offered: Container[str] | None
) -> tuple[list[Any], list[RequestedCall]]:
    """Normalise an assistant message's items, and list its calls as the model made them.

    An item that needs no change is returned itself; for ``offered`` see
    `accepted_name`.
    """
    items: list[Any] = []
    calls: list[RequestedCall] = []
    used: set[str] = set()
    for item in received:
        own = item
        if isinstance(item, FunctionCallContent):
            own, call = _accepted_call(item, requested_call(item, used), offered)
            calls.append(call)
        elif (
            isinstance(item, TextContent) and (text := sendable(item.text)) != item.text
        ):
            own = item.model_copy(update={"text": text})
        items.append(own)
    return items, calls


def _accepted_call(
    item: FunctionCallContent, call: RequestedCall, offered: Container[str] | None
) -> tuple[FunctionCallContent, RequestedCall]:
    update: dict[str, Any] = {}
    if call.id != item.id:
        update["id"] = call.id
    arguments = _accepted_arguments(call.arguments)
    if arguments != item.arguments:
        update["arguments"] = arguments
    name = accepted_name(call.name, offered)
    if name != call.name or not item.name:
        plugin, dash, function = name.partition("-")
        update["name"] = name
        update["plugin_name"] = plugin if dash else None
        update["function_name"] = function if dash else name
    if name != call.name:
        call = replace(call, sent_name=name)
    return (item.model_copy(update=update) if update else item), call


def is_written_as(message: ChatMessageContent, calls: Sequence[RequestedCall]) -> bool:
    """Whether the calls in a message are the given ones, normalised."""
    written = requested_calls(message)
    return len(written) == len(calls) and all(
        own.id == call.id
        and own.name == (call.sent_name or call.name)
        and call.sent_name in ("", accepted_name(call.name))
        and own.arguments == _accepted_arguments(call.arguments)
        for own, call in zip(written, calls, strict=True)
    )


# What a connector omits, read from its SDK's response.

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "guardrail_intervened": FinishReason.CONTENT_FILTER,
    "recitation": FinishReason.CONTENT_FILTER,
    "blocklist": FinishReason.CONTENT_FILTER,
    "prohibited_content": FinishReason.CONTENT_FILTER,
    "spii": FinishReason.CONTENT_FILTER,
}
"""Finish reasons of Ollama, Bedrock and Google that Semantic Kernel does not read; all but "stop" mean a cut reply."""

_REFUSED = "refusal"
"""The key in the metadata of the model's refusal, and the finish reason of such a reply."""


def has_form(settings: object) -> bool:
    """Whether the settings ask for an answer in a form."""
    return getattr(settings, "response_format", None) is not None


def reply_ended_by(message: ChatMessageContent, *, in_form: bool) -> str | None:
    """Return a reply's finish reason as `planner_ext.core.fold.CUT_SHORT` has it.

    A refusal of an answer ``in_form`` ends by ``refusal``; another one is the answer.
    """
    if in_form and message.metadata.get(_REFUSED):
        return _REFUSED
    return None if message.finish_reason is None else message.finish_reason.value


def corrected(message: M) -> M:
    """Correct a reply, or a chunk of one, by its SDK's response: usage, finish reason, refusal, and Google's thoughts.

    Connectors omit the first two, and write thoughts as text. A correct message is
    returned itself.
    """
    response = message.inner_content
    if response is None:
        return message
    message = with_refusal(message)
    # Google's replies have candidates.
    candidate = next(iter(_sequence(part_of(response, "candidates"))), None)
    if (
        message.finish_reason is None
        and (reason := _finish_reason(response, candidate)) is not None
    ):
        message = message.model_copy(update={"finish_reason": reason})
    parts = _sequence(part_of(part_of(candidate, "content"), "parts"))
    if any(part_of(part, "thought") for part in parts):
        thoughts = iter(
            [bool(part_of(part, "thought")) for part in parts if part_of(part, "text")]
        )
        items = [
            item
            for item in message.items
            if not (isinstance(item, TextContent) and next(thoughts, False))
        ]
        message = message.model_copy(update={"items": items})
    return with_usage(message, usage_in(message))


def with_refusal(message: M) -> M:
    """Mark a refusal, as OpenAI's response has it, in the metadata of a reply or chunk.

    Semantic Kernel's connector writes that of a plain reply as its text, and drops that
    of a streamed one, which is added here.
    """
    place = getattr(message, "choice_index", None)
    for choice in _sequence(part_of(message.inner_content, "choices")):
        refusal = part_of(part_of(choice, "message"), _REFUSED) or part_of(
            part_of(choice, "delta"), _REFUSED
        )
        if not isinstance(refusal, str) or not refusal:
            continue
        marked = {**message.metadata, _REFUSED: True}
        if place is None and text_of(message) == refusal:
            return message.model_copy(update={"metadata": marked})
        if place is not None and part_of(choice, "index") == place:
            items = [
                *message.items,
                StreamingTextContent(choice_index=place, text=refusal),
            ]
            return message.model_copy(update={"metadata": marked, "items": items})
    return message


def whole(message: ChatMessageContent) -> ChatMessageContent:
    """Correct a reply, its text in one item: Semantic Kernel's callers read only the first."""
    message = corrected(message)
    items = with_one_text(message.items)
    return (
        message
        if items is message.items
        else message.model_copy(update={"items": items})
    )


def _sequence(value: object) -> Sequence[object]:
    if isinstance(value, list | tuple):
        return cast("Sequence[object]", value)
    return ()


def _finish_reason(response: object, candidate: object) -> FinishReason | None:
    stop = part_of(response, "messageStop") or response
    reasons = (
        part_of(stop, "done_reason"),
        part_of(stop, "stopReason"),
        part_of(candidate, "finish_reason"),
    )
    # Some reasons are of an SDK's enumeration.
    texts = (str(getattr(reason, "value", reason)).lower() for reason in reasons)
    return next((_REASONS[text] for text in texts if text in _REASONS), None)


# A streamed reply.

_OPEN_CALLS = 256
"""How far back a piece looks for its call, so that many calls stay linear. Providers send calls in order."""


async def corrected_chunks(
    stream: AsyncGenerator[list[StreamingChatMessageContent], Any],
) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
    """Correct a stream's chunks; see `corrected`.

    Google's connector raises TypeError on a last chunk that has the usage alone; the
    reply before it is whole.
    """
    ended = False
    try:
        async with aclosing(stream) as groups:
            async for chunks in groups:  # some connectors yield None among them
                ended = ended or any(chunk and chunk.finish_reason for chunk in chunks)
                yield [chunk and corrected(chunk) for chunk in chunks]
    except TypeError:
        if not ended:
            raise


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
            # Some servers repeat the name.
            repeated = bool(piece.id or piece.arguments) and "".join(self.names) == name
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
            arguments="".join(texts)
            if texts or not self.arguments
            else self.arguments[0],
            metadata=self.metadata,
        )


class ReplyAssembly:
    """Puts the chunks of one streamed reply together: in linear time, losing no delta.

    Semantic Kernel's own addition drops an argument delta equal to ``{}``, mixes the
    fragments of calls that share an index, and loses a function name that comes in
    pieces.
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
        # The service ran the calls so far itself, and begins another reply.
        if chunk.role == AuthorRole.TOOL:
            self._text = []
            self._calls = []
            self._others = []
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
        """Whether the chunks hold content, or a finish reason."""
        return bool(
            self._text or self._calls or self._others or self._finish_reason is not None
        )

    def message(self) -> ChatMessageContent:
        """Return the whole message: calls by index, other items, text."""
        first = self._first
        assert first is not None
        calls = sorted(self._calls, key=lambda call: call.index or 0)
        items: list[Any] = [*(call.content() for call in calls), *self._others]
        text = "".join(self._text)
        if text:
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
        """Merge metadata; usage that is reported more than once is cumulative."""
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

        A new call is opened by arguments that are whole, by another id, and, where no
        ids are sent, by a name after arguments have begun.
        """
        same = [
            call for call in self._calls[-_OPEN_CALLS:] if call.index == piece.index
        ]
        if not same or isinstance(piece.arguments, Mapping):
            return None
        call = same[-1]
        if piece.id and call.id:
            return next(
                (known for known in reversed(same) if known.id == piece.id), None
            )
        opens = call.names if piece.id else name and call.arguments and not call.id
        return None if opens else call
