"""What a reply's metadata says of round trips and tokens, read with mistrust, and sums of it."""

from collections.abc import Callable, Mapping
from operator import add
from typing import Any

from pydantic import BaseModel

from planner_ext.core.values import Usage

__all__ = ["add_reported", "merge_reported", "read_iterations", "read_usage"]

_KEYS = ("iterations", "Iterations")
"""Ours, and the spelling of the ADR "Automatic tool calling controls"."""


def read_iterations(metadata: Mapping[str, Any]) -> int:
    """Read how many round trips a reply took; 1 where that is missing, no whole number, a boolean or below 1."""
    for key in _KEYS:
        value = metadata.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return value
    return 1


def read_usage(reported: object) -> Usage:
    """Read the tokens out of a connector's own usage object or mapping; 0 where it says nothing usable."""
    return Usage(
        prompt_tokens=_count(reported, "prompt_tokens"), completion_tokens=_count(reported, "completion_tokens")
    )


def add_reported(first: Any, second: Any) -> Any:
    """Sum two of a connector's own usage objects, those of two requests; None counts as nothing."""
    if first is None or second is None:
        return second if first is None else first
    try:
        return first + second
    except TypeError:
        return _combine(first, second, add)


def merge_reported(first: Any, second: Any) -> Any:
    """Merge two usage reports of one streamed reply: the larger of each number, since later reports are cumulative."""
    if first is None or second is None:
        return second if first is None else first
    return _combine(first, second, max)


def _count(reported: object, name: str) -> int:
    value = reported.get(name) if isinstance(reported, Mapping) else getattr(reported, name, None)  # pyright: ignore
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _combine(first: Any, second: Any, combine: Callable[[Any, Any], Any]) -> Any:
    if isinstance(first, BaseModel):
        one, other = dict(first), dict(second) if isinstance(second, BaseModel) else {}
        numbers = {
            key: combine(value, other[key])
            for key, value in one.items()
            if isinstance(value, int | float) and isinstance(other.get(key), int | float)
        }
        return first.model_copy(update={**{k: v for k, v in other.items() if v is not None}, **numbers})
    return second
