"""Semantic Kernel's connectors: what each refuses or loses of a conversation, and what is sent because of it.

One table, by the module of a connector's class, so that no SDK need be installed. The messages of a run stay as they
are: only the copy that is sent differs. Whatever the table does not name is sent as it is.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, Final, Literal

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    ImageContent,
    TextContent,
)
from semantic_kernel.functions import KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.sk.messages import calls_of, text_of, with_one_text

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


_UNKNOWN: Final = Connector()
_OPENAI: Final = Connector(provider="openai")

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
    "open_ai": _OPENAI,
}


def connector_of(service: AIServiceClientBase) -> Connector:
    """Return the properties of a connector, of its base class, or of the connector in a wrapper."""
    while (inner := getattr(service, "inner", None)) is not None:
        service = inner
    modules = (kind.__module__ for kind in type(service).__mro__)
    known = next((module for module in modules if module.startswith(_PACKAGE)), "")
    return _KNOWN.get(known.removeprefix(_PACKAGE).partition(".")[0], _UNKNOWN)


def has_calls(messages: Iterable[ChatMessageContent]) -> bool:
    """Whether any message has calls or results."""
    return any(message.role == _TOOL or calls_of(message) for message in messages)


# What is sent.


def sent(messages: list[ChatMessageContent], connector: Connector) -> list[ChatMessageContent]:
    """Write messages as a connector and its provider take them; see `Connector`.

    What needs no change is not copied. A message is written alike in every request, so that prompt caches keep it.
    """
    if connector is _OPENAI or connector is _UNKNOWN:
        return messages
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
    if not connector.first_text:
        return message
    if connector.first_text == "without_images" and any(isinstance(item, ImageContent) for item in message.items):
        return message
    items = with_one_text(message.items, "" if message.role == _ASSISTANT else "\n")
    return message if items is message.items else message.model_copy(update={"items": items})
