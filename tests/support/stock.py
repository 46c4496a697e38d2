"""What Semantic Kernel types in part only, for tests that are typed."""

from typing import Any, Literal

from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior

__all__ = ["add_filter", "stock"]

stock: Any = FunctionChoiceBehavior
"""Semantic Kernel's own behaviours; their makers take keywords of no type."""


def add_filter(kernel: Any, kind: Literal["auto_function_invocation", "function_invocation"], by: Any) -> None:
    """Register a filter; Semantic Kernel declares the type of the kind as a value."""
    kernel.add_filter(kind, by)
