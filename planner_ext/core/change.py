"""Copies of values with some of their fields changed: what the fold makes several of for each fact."""

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

__all__ = ["replace"]

_T = TypeVar("_T")


def replace(value: _T, **changes: Any) -> _T:
    """Copy a frozen, slotted dataclass as `dataclasses.replace` does, without its constructor: in half the time.

    Not for a class with a ``__post_init__``, which would be passed over.

    Raises:
        AttributeError: If a change is for something that is no field.
    """
    made = object.__new__(type(value))
    for read, write in _slots(type(value)):
        write(made, read(value))
    for name, change in changes.items():
        object.__setattr__(made, name, change)
    return made


@cache
def _slots(kind: type[Any]) -> tuple[tuple[Callable[[Any], Any], Callable[[Any, Any], None]], ...]:
    slots = [getattr(kind, field.name) for field in fields(kind)]
    return tuple((slot.__get__, slot.__set__) for slot in slots)
