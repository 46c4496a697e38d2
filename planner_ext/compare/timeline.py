"""A history of Semantic Kernel's as plain values: what was said, called and answered, and in which round trip."""

from collections.abc import Sequence

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.compare.comparison import ShownCall, ShownMessage, ShownResult

__all__ = ["shown"]


def shown(messages: Sequence[ChatMessageContent]) -> tuple[ShownMessage, ...]:
    """Write down a history; its replies are numbered as round trips, in order."""
    trip, found = 0, list[ShownMessage]()
    for message in messages:
        is_reply = message.role == AuthorRole.ASSISTANT
        trip += is_reply
        found.append(_shown(message, trip if is_reply else None))
    return tuple(found)


def _shown(message: ChatMessageContent, trip: int | None) -> ShownMessage:
    items = message.items
    return ShownMessage(
        role=message.role.value,
        text="".join(item.text for item in items if isinstance(item, TextContent)),
        calls=tuple(
            ShownCall(id=item.id or "", name=item.name or "", arguments=_text(item.arguments))
            for item in items
            if isinstance(item, FunctionCallContent)
        ),
        results=tuple(
            ShownResult(call_id=item.id or "", name=item.name or "", text=_text(item.result))
            for item in items
            if isinstance(item, FunctionResultContent)
        ),
        trip=trip,
    )


def _text(value: object) -> str:
    return "" if value is None else str(value)
