"""Messages as a connector and its provider take them, where these need more than to be passed on."""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import is_
from typing import Any, Final

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    ImageContent,
    TextContent,
)

from planner_ext.sk.chat.connectors import Connector
from planner_ext.sk.messages import calls_of, text_of, with_one_text

EMPTY: Final = "(empty)"
"""Sent for blank text, to a provider that refuses it."""


def rewritten(
    messages: Sequence[ChatMessageContent], connector: Connector
) -> list[ChatMessageContent]:
    """Write messages as a connector and its provider take them; see `Connector`.

    What needs no change is not copied. A message is written alike in every request, so
    that prompt caches keep it.
    """
    written = messages
    if connector.instructions != "differ":
        written = [
            _as_system(message) if message.role == AuthorRole.DEVELOPER else message
            for message in written
        ]
    if connector.instructions == "one":
        written = _one_system_first(written)
    return [
        _one_text(message, connector)
        for message in _ordered(_written(written, connector), connector)
    ]


def _as_system(message: ChatMessageContent) -> ChatMessageContent:
    return message.model_copy(update={"role": AuthorRole.SYSTEM})


def _one_system_first(
    messages: Sequence[ChatMessageContent],
) -> list[ChatMessageContent]:
    system = [message for message in messages if message.role == AuthorRole.SYSTEM]
    if len(system) > 1:
        texts: list[Any] = [TextContent(text="\n\n".join(map(text_of, system)))]
        system = [system[0].model_copy(update={"items": texts})]
    return [
        *system,
        *(message for message in messages if message.role != AuthorRole.SYSTEM),
    ]


def _written(
    messages: Iterable[ChatMessageContent], connector: Connector
) -> Iterator[ChatMessageContent]:
    used: set[str] = set()
    ids: dict[str | None, str] = {}  # of the newest batch, by those in the history
    for message in messages:
        if connector.ids is not None and (calls := calls_of(message)):
            ids = _sent_ids(calls, used, connector.ids)
        items = [_item(item, ids, connector) for item in message.items]
        kept = [item for item in items if item is not None]
        if (items or connector.takes_blank) and all(map(is_, items, message.items)):
            yield message
        elif kept or message.role == AuthorRole.USER:
            yield message.model_copy(
                update={"items": kept or [TextContent(text=EMPTY)]}
            )


def _sent_ids(
    calls: Iterable[FunctionCallContent], used: set[str], accepted: re.Pattern[str]
) -> dict[str | None, str]:
    ids: dict[str | None, str] = {}
    for call in calls:
        own = call.id or ""
        if own in used or not accepted.fullmatch(own):
            own = hashlib.sha256(f"{len(used)} {own}".encode()).hexdigest()[:9]
        used.add(own)
        ids[call.id] = own
    return ids


def _item(item: Any, ids: Mapping[str | None, str], connector: Connector) -> Any:
    update: dict[str, Any] = {}
    match item:
        case TextContent():
            if connector.takes_blank or item.text.strip():
                return item
            return None
        case FunctionCallContent() if connector.separator is not None:
            name = item.custom_fully_qualified_name(connector.separator)
            update = {"name": name, "plugin_name": None, "function_name": name}
        case FunctionResultContent() if (
            not connector.takes_blank and not str(item.result).strip()
        ):
            update = {"result": EMPTY}
        case _:
            pass
    if (
        isinstance(item, FunctionCallContent | FunctionResultContent)
        and ids.get(item.id, item.id) != item.id
    ):
        update["id"] = ids[item.id]
    return item.model_copy(update=update) if update else item


def _ordered(
    messages: Iterable[ChatMessageContent], connector: Connector
) -> list[ChatMessageContent]:
    ordered: list[ChatMessageContent] = []
    last: AuthorRole | None = None
    for message in messages:
        turn = (last, message.role)
        if turn in connector.joins:
            ordered[-1] = ordered[-1].model_copy(
                update={"items": [*ordered[-1].items, *message.items]}
            )
        else:
            ordered += [*connector.between.get(turn, ()), message]
        last = None
        if ordered[-1].role != AuthorRole.SYSTEM:
            last = ordered[-1].role
    return [*ordered, *connector.between.get((last, None), ())]


def _one_text(message: ChatMessageContent, connector: Connector) -> ChatMessageContent:
    if not connector.first_text:
        return message
    if connector.first_text == "without_images" and any(
        isinstance(item, ImageContent) for item in message.items
    ):
        return message
    items = with_one_text(
        message.items, "" if message.role == AuthorRole.ASSISTANT else "\n"
    )
    return (
        message
        if items is message.items
        else message.model_copy(update={"items": items})
    )
