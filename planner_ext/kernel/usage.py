"""What a reply's metadata says of round trips and tokens, read with mistrust, and sums of it."""

from collections.abc import Callable, Mapping
from operator import add
from typing import Any, cast

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
    prompt_tokens = _count(reported, "prompt_tokens")
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=_count(reported, "completion_tokens"),
        cached_tokens=min(_count(_part(reported, "prompt_tokens_details"), "cached_tokens"), prompt_tokens),
    )


def add_reported(first: Any, second: Any) -> Any:
    """Sum two of a connector's own usage objects, those of two requests; None counts as nothing."""
    if first is None or second is None:
        return second if first is None else first
    try:
        total = first + second
    except TypeError:
        return _combine(first, second, add)
    return total if type(total) is type(first) else _combine(first, second, add)  # the sum of a base class loses fields


def merge_reported(first: Any, second: Any) -> Any:
    """Merge two usage reports of one streamed reply: the larger of each number, since later reports are cumulative."""
    if first is None or second is None:
        return second if first is None else first
    return _combine(first, second, max)


def _count(reported: object, name: str) -> int:
    value = _part(reported, name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _part(reported: object, name: str) -> object:
    if isinstance(reported, Mapping):
        return cast("Mapping[object, object]", reported).get(name)
    return getattr(reported, name, None)


def _combine(first: Any, second: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the numbers of two usage objects, or of their parts; what only one has is kept."""
    one, other = _fields(first), _fields(second)
    if not one or not other:
        return first if one else second
    both = {key: _number(value, other[key], combine) for key, value in one.items() if other.get(key) is not None}
    values = {**one, **{key: value for key, value in other.items() if value is not None}, **both}
    model = next((given for given in (first, second) if isinstance(given, BaseModel)), None)
    return values if model is None else model.model_copy(update=values)


def _number(one: Any, other: Any, combine: Callable[[Any, Any], Any]) -> Any:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return combine(one, other)
    return _combine(one, other, combine)


def _fields(reported: object) -> dict[str, Any]:
    if isinstance(reported, BaseModel):
        return dict(reported)
    return dict(cast("Mapping[str, Any]", reported)) if isinstance(reported, Mapping) else {}
