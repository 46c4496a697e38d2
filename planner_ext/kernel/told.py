"""What is left of the budget, told to the model with one request and kept nowhere."""

from collections.abc import Sequence
from typing import Any

from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionResultContent, TextContent

from planner_ext.core.limits import Left

__all__ = ["told"]

_UNITS = {
    "max_iterations": "round trips",
    "max_tool_calls": "tool calls",
    "max_total_tokens": "tokens",
    "max_cost": "US dollars",
    "max_active_seconds": "seconds of work",
}


def told(messages: Sequence[ChatMessageContent], left: Sequence[Left]) -> ChatMessageContent | None:
    """Copy the newest message with what is left added to it; None where nothing is to be said.

    It is added to the end of that message's text, and not sent as a message of its own: right after a tool message some
    providers take an assistant's turn only, and everywhere results have to follow their calls. All that stands before
    it is the same from request to request, so a prompt cache keeps what it has. Where the newest message is the
    assistant's own, a turn that it is to go on with, nothing is said.

    Args:
        messages: What is to be sent; not changed.
        left: What to say; nothing for nothing.
    """
    if not left or not messages or messages[-1].role == AuthorRole.ASSISTANT:
        return None
    newest = messages[-1]
    words = f"[Budget left, this request included: {'; '.join(_words(item) for item in left)}.]"
    return newest.model_copy(update={"items": _ending(newest.items, words)})


def _words(item: Left) -> str:
    if item.name == "deadline":
        return f"{item.left:.0f} seconds to the deadline"
    return f"{_number(item.left)} of {_number(item.limit)} {_UNITS[item.name]}"


def _number(value: float) -> str:
    """Write a number without more digits than say something."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _ending(items: Sequence[Any], words: str) -> list[Any]:
    """Let the last text or result end with the words; what has neither gets a text."""
    last = items[-1] if items else None
    match last:
        case TextContent():
            return [*items[:-1], last.model_copy(update={"text": f"{last.text}\n\n{words}".lstrip()})]
        case FunctionResultContent():
            return [*items[:-1], last.model_copy(update={"result": f"{last.result}\n\n{words}".lstrip()})]
        case _:
            return [*items, TextContent(text=words)]
