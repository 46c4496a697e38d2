"""Semantic Kernel's connectors: what each refuses or loses of a conversation, and what is sent and read because of it.

One table, by the module of a connector's class, so that no SDK need be installed. The messages of a run stay as they
are: only the copy that is sent differs. Whatever the table does not name is sent as it is.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final, Literal, TypeVar, cast

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FinishReason,
    FunctionCallContent,
    FunctionResultContent,
    ImageContent,
    StreamingTextContent,
    TextContent,
)
from semantic_kernel.functions import KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.sk.messages import calls_of, part_of, text_of, usage_in, with_usage

M = TypeVar("M", bound=ChatMessageContent)

NO_FUNCTION = KernelFunctionMetadata(
    name="no_function_is_left",
    description="Not a function: none can be called any more. Answer in text.",
    is_prompt=False,
)
"""Offered in place of the functions that are withdrawn, to a provider that insists on one."""

EMPTY: Final = "(empty)"
"""Sent for a blank result, or a user's blank message, to a provider that refuses blank text."""

_SYSTEM = AuthorRole.SYSTEM
_USER = AuthorRole.USER
_ASSISTANT = AuthorRole.ASSISTANT
_TOOL = AuthorRole.TOOL

_Turn = tuple[AuthorRole | None, AuthorRole | None]
"""The roles of two neighbouring messages; None is the start or the end of the conversation."""

_CONTINUE = (ChatMessageContent(role=_USER, content="Please continue."),)
_NOTED = (ChatMessageContent(role=_ASSISTANT, content="OK."),)
_RESULTS = frozenset({(_TOOL, _TOOL)})
_ROLES = _RESULTS | {(_USER, _USER), (_ASSISTANT, _ASSISTANT)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """The properties of a connector; the defaults fit OpenAI's and unknown ones, which need nothing.

    Attributes:
        provider: Its provider in ``genai-prices``; "" if the list does not have it.
        takes_none: Whether its requests can send the tool choice "none".
        needs_tools: Whether its provider refuses calls and results in a request that offers no function.
        needs_description: Whether its SDK refuses a function without a description.
        instructions: How it sends messages of the roles system and developer: as they ``differ``, all as the
            ``system``'s, or as ``one`` message of the system, before all others.
        takes_blank: Whether its provider accepts blank text.
        ids: The ids of calls that its provider accepts, if each occurs once; None accepts all.
        separator: Between plugin and function in the names of calls, which it would write otherwise than those of the
            functions and results; None leaves names to the connector.
        first_text: When it sends only the first text of a message; None never.
        joins: Which neighbouring messages it must join into one.
        between: What it must put between two messages.
        says_calls: Whether its finish reasons tell replies with calls from others.
    """

    provider: str = ""
    takes_none: bool = True
    needs_tools: bool = False
    needs_description: bool = False
    instructions: Literal["differ", "system", "one"] = "differ"
    takes_blank: bool = True
    ids: re.Pattern[str] | None = None
    separator: str | None = None
    first_text: Literal["always", "without_images"] | None = None
    joins: frozenset[_Turn] = frozenset()
    between: Mapping[_Turn, Sequence[ChatMessageContent]] = field(
        default_factory=dict[_Turn, Sequence[ChatMessageContent]]
    )
    says_calls: bool = True


_PACKAGE = "semantic_kernel.connectors.ai."

_KNOWN = {
    # The API accepts the choice "none", but Semantic Kernel's settings refuse it.
    "anthropic": Connector(
        provider="anthropic",
        takes_none=False,
        needs_tools=True,
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9_-]+"),
        first_text="always",
        joins=_RESULTS,
    ),
    "azure_ai_inference": Connector(provider="azure", first_text="without_images"),
    # There is no choice "none": Semantic Kernel sends no function at all for it.
    "bedrock": Connector(
        provider="aws",
        takes_none=False,
        needs_tools=True,
        needs_description=True,
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9_-]{1,64}"),
        joins=_ROLES | {(_TOOL, _USER)},
        between={(None, _ASSISTANT): _CONTINUE},
    ),
    # Semantic Kernel joins results here, too, but it changes the caller's messages.
    "google": Connector(
        provider="google",
        instructions="one",
        takes_blank=False,
        separator="__",
        joins=_ROLES,
        between={(None, _ASSISTANT): _CONTINUE, (_ASSISTANT, None): _CONTINUE},
        says_calls=False,
    ),
    "mistral_ai": Connector(
        provider="mistral",
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9]{9}"),
        between={(_TOOL, _USER): _NOTED, (_ASSISTANT, None): _CONTINUE},
    ),
    "ollama": Connector(takes_none=False, instructions="system", separator="-", first_text="always", says_calls=False),
    "open_ai": Connector(provider="openai"),
}


def connector_of(service: AIServiceClientBase) -> Connector:
    """Return the properties of a connector, of its base class, or of the connector in a wrapper."""
    while (inner := getattr(service, "inner", None)) is not None:
        service = inner
    modules = (kind.__module__ for kind in type(service).__mro__)
    known = next((module for module in modules if module.startswith(_PACKAGE)), "")
    return _KNOWN.get(known.removeprefix(_PACKAGE).partition(".")[0], Connector())


def has_calls(messages: Iterable[ChatMessageContent]) -> bool:
    """Whether any message has calls or results."""
    return any(message.role == _TOOL or calls_of(message) for message in messages)


# What is sent.


def sent(messages: Sequence[ChatMessageContent], connector: Connector) -> list[ChatMessageContent]:
    """Write messages as a connector and its provider take them, in a new list; see `Connector`.

    What needs no change is not copied. A message is written alike in every request, so that prompt caches keep it.
    """
    written = messages
    if connector.instructions != "differ":
        written = [_as_system(message) if message.role == AuthorRole.DEVELOPER else message for message in written]
    if connector.instructions == "one":
        written = _one_system_first(written)
    return [_one_text(message, connector) for message in _ordered(_written(written, connector), connector)]


def _as_system(message: ChatMessageContent) -> ChatMessageContent:
    return message.model_copy(update={"role": _SYSTEM})


def _one_system_first(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Move the system messages to the start, as one text."""
    system = [message for message in messages if message.role == _SYSTEM]
    if len(system) > 1:
        texts: list[Any] = [TextContent(text="\n\n".join(map(text_of, system)))]
        system = [system[0].model_copy(update={"items": texts})]
    return [*system, *(message for message in messages if message.role != _SYSTEM)]


def _written(messages: Iterable[ChatMessageContent], connector: Connector) -> Iterator[ChatMessageContent]:
    """Write the items of messages; a message of the system or the model of which nothing is left is left out."""
    used: set[str] = set()
    ids: dict[str | None, str] = {}  # of the newest batch, by those in the history
    for message in messages:
        if connector.ids is not None and (calls := calls_of(message)):
            ids = _sent_ids(calls, used, connector.ids)
        items = [_item(item, ids, connector) for item in message.items]
        kept = [item for item in items if item is not None]
        if (items or connector.takes_blank) and all(map(is_, items, message.items)):
            yield message
        elif kept or message.role == _USER:
            yield message.model_copy(update={"items": kept or [TextContent(text=EMPTY)]})


def _sent_ids(calls: Iterable[FunctionCallContent], used: set[str], accepted: re.Pattern[str]) -> dict[str | None, str]:
    """Choose the ids of a batch: those that the provider refuses, and those of earlier batches, are replaced."""
    ids: dict[str | None, str] = {}
    for call in calls:
        own = call.id or ""
        if own in used or not accepted.fullmatch(own):
            own = hashlib.sha256(f"{len(used)} {own}".encode()).hexdigest()[:9]
        used.add(own)
        ids[call.id] = own
    return ids


def _item(item: Any, ids: Mapping[str | None, str], connector: Connector) -> Any:
    """Write one item of a message; None leaves it out."""
    update: dict[str, Any] = {}
    match item:
        case TextContent():
            return item if connector.takes_blank or item.text.strip() else None
        case FunctionCallContent() if connector.separator is not None:
            name = item.custom_fully_qualified_name(connector.separator)
            update = {"name": name, "plugin_name": None, "function_name": name}
        case FunctionResultContent() if not connector.takes_blank and not str(item.result).strip():
            update = {"result": EMPTY}
        case _:
            pass
    if isinstance(item, FunctionCallContent | FunctionResultContent) and ids.get(item.id, item.id) != item.id:
        update["id"] = ids[item.id]
    return item.model_copy(update=update) if update else item


def _ordered(messages: Iterable[ChatMessageContent], connector: Connector) -> list[ChatMessageContent]:
    """Join messages, and put others between them; see `Connector`."""
    ordered: list[ChatMessageContent] = []
    last: AuthorRole | None = None
    for message in messages:
        turn = (last, message.role)
        if turn in connector.joins:
            ordered[-1] = ordered[-1].model_copy(update={"items": [*ordered[-1].items, *message.items]})
        else:
            ordered += [*connector.between.get(turn, ()), message]
        last = None if ordered[-1].role == _SYSTEM else ordered[-1].role
    return [*ordered, *connector.between.get((last, None), ())]


def _one_text(message: ChatMessageContent, connector: Connector) -> ChatMessageContent:
    """Join the texts of a message, of which the connector would send the first only."""
    texts = [item for item in message.items if isinstance(item, TextContent)]
    if len(texts) < 2 or not connector.first_text:
        return message
    if connector.first_text == "without_images" and any(isinstance(item, ImageContent) for item in message.items):
        return message
    return _with_one_text(message, texts, "" if message.role == _ASSISTANT else "\n")


def _with_one_text(message: M, texts: Sequence[TextContent], separator: str) -> M:
    whole = texts[0].model_copy(update={"text": separator.join(item.text for item in texts)})
    return message.model_copy(
        update={"items": [whole, *(item for item in message.items if not isinstance(item, TextContent))]}
    )


# What is read.

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
"""The key in the metadata of a refusal of the model, and what such a reply counts as having ended by."""


def has_form(settings: object) -> bool:
    """Return whether the settings of a request ask for an answer in a form."""
    return getattr(settings, "response_format", None) is not None


def reply_ended_by(message: ChatMessageContent, *, in_form: bool) -> str | None:
    """Return the finish reason of a whole reply as `planner_ext.core.fold.CUT_SHORT` has it.

    Args:
        message: The reply.
        in_form: Whether the answer must have a form. Then a refusal of the model is no answer, and ends by ``refusal``;
            elsewhere its text is the answer.
    """
    if in_form and message.metadata.get(_REFUSED):
        return _REFUSED
    return None if message.finish_reason is None else message.finish_reason.value


def with_refusal(message: M) -> M:
    """Mark a refusal of the model, as OpenAI's response has it, in the metadata of a reply or of a part of it.

    Semantic Kernel's connector writes the refusal of a plain reply as its text, and drops that of a streamed one, which
    is added here.
    """
    place = getattr(message, "choice_index", None)
    for choice in _sequence(part_of(message.inner_content, "choices")):
        refusal = part_of(part_of(choice, "message"), _REFUSED) or part_of(part_of(choice, "delta"), _REFUSED)
        if not isinstance(refusal, str) or not refusal:
            continue
        marked = {**message.metadata, _REFUSED: True}
        if place is None and text_of(message) == refusal:
            return message.model_copy(update={"metadata": marked})
        if place is not None and part_of(choice, "index") == place:
            items = [*message.items, StreamingTextContent(choice_index=place, text=refusal)]
            return message.model_copy(update={"metadata": marked, "items": items})
    return message


def received(message: M) -> M:
    """Correct a reply, or a part of it, by its SDK's response: usage, finish reason, refusal, and Google's thoughts.

    Connectors omit the first two, and write thoughts as text. A correct message is returned itself.
    """
    message = with_refusal(message)
    candidate = _candidate(message.inner_content)
    if message.finish_reason is None and (reason := _finish_reason(message.inner_content, candidate)) is not None:
        message = message.model_copy(update={"finish_reason": reason})
    parts = part_of(part_of(candidate, "content"), "parts")
    if any(part_of(part, "thought") for part in _sequence(parts)):
        texts = iter([bool(part_of(part, "thought")) for part in _sequence(parts) if part_of(part, "text")])
        items = [item for item in message.items if not (isinstance(item, TextContent) and next(texts, False))]
        message = message.model_copy(update={"items": items})
    return with_usage(message, usage_in(message))


def whole_text(message: M) -> M:
    """Copy a reply with all its text in one item: Semantic Kernel's callers read the first one only."""
    texts = [item for item in message.items if isinstance(item, TextContent)]
    return message if len(texts) < 2 else _with_one_text(message, texts, "")


def _candidate(response: object) -> object:
    """Return the first candidate of a response of Google's, else None."""
    return next(iter(_sequence(part_of(response, "candidates"))), None)


def _sequence(value: object) -> Sequence[object]:
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def _finish_reason(response: object, candidate: object) -> FinishReason | None:
    """Read the finish reason from a response of Ollama, Bedrock (plain or an event of a stream) or Google."""
    stop = part_of(response, "messageStop") or response
    reasons = (part_of(stop, "done_reason"), part_of(stop, "stopReason"), part_of(candidate, "finish_reason"))
    texts = (str(getattr(reason, "value", reason)).lower() for reason in reasons)  # some are of an SDK's enumeration
    return next((_REASONS[text] for text in texts if text in _REASONS), None)
