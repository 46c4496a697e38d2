"""Typed access to what Semantic Kernel, pydantic and Hypothesis declare in part only."""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar, cast

from hypothesis import HealthCheck
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.contents import (
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)

from planner_ext.testing import Script, ScriptedChatCompletion
from support.narrow import as_type

__all__ = [
    "EVERY_HEALTH_CHECK",
    "add_filter",
    "every_call",
    "every_result",
    "first_call",
    "first_result",
    "scripted_by",
    "sent_calls",
    "stock",
]

Scripted = TypeVar("Scripted", bound=ScriptedChatCompletion)

stock: Any = FunctionChoiceBehavior
"""Semantic Kernel's own behaviours; their makers take keywords of no type."""

EVERY_HEALTH_CHECK: Any = list(HealthCheck)
"""Every health check, to suppress; Hypothesis declares the class of its members as a class without them."""


def add_filter(
    kernel: Any,
    kind: Literal["auto_function_invocation", "function_invocation"],
    by: Any,
) -> None:
    """Register a filter; Semantic Kernel declares the type of the kind as a value."""
    kernel.add_filter(kind, by)


def every_call(message: ChatMessageContent) -> list[FunctionCallContent]:
    """List the items of a message, all of them calls."""
    return [as_type(FunctionCallContent, item) for item in message.items]


def every_result(message: ChatMessageContent) -> list[FunctionResultContent]:
    """List the items of a message, all of them results."""
    return [as_type(FunctionResultContent, item) for item in message.items]


def first_call(message: ChatMessageContent) -> FunctionCallContent:
    """Return the first item of a message, a call."""
    return as_type(FunctionCallContent, message.items[0])


def first_result(message: ChatMessageContent) -> FunctionResultContent:
    """Return the first item of a message, a result."""
    return as_type(FunctionResultContent, message.items[0])


def sent_calls(message: Mapping[str, object]) -> list[Any]:
    """List the calls of a message as a service received it."""
    calls = message["tool_calls"]
    assert isinstance(calls, list), message
    return cast(list[Any], calls)


def scripted_by(kind: type[Scripted], script: Script, **options: Any) -> Scripted:
    """Make a scripted service of a subclass, to which pydantic ascribes a constructor of its fields alone."""
    return kind(script, **options)
