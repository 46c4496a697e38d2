"""Marks: what an application declares of a function, as an attribute, so that copies keep it."""

from functools import cache
from types import MethodType
from typing import Any, TypeVar, cast

from planner_ext.core.errors import NotAFunctionError, shown

_M = TypeVar("_M")


def markable(function: Any, usage: str) -> Any:
    """Return what keeps the mark of a function, a method or its wrapper, or a kernel's function.

    ``{}`` in ``usage``, for the error, becomes the function.

    Raises:
        NotAFunctionError: If it is something else, or keeps no mark, like a function in
            C.
    """
    keeper = getattr(function, "__func__", function)
    if (
        not callable(keeper)
        or isinstance(keeper, type)
        or not hasattr(keeper, "__dict__")
    ):
        raise NotAFunctionError(usage.format(shown(function)))
    return keeper


def put_mark(keeper: Any, mark: object) -> None:
    """Put a mark on what `markable` returned, in place of one of its type."""
    setattr(keeper, mark_name(type(mark)), mark)


def mark_on(function: object, kind: type[_M]) -> _M | None:
    """Return the mark on a function, or else on the method that it wraps."""
    name = mark_name(kind)
    own = _own(function)
    mark = own.get(name)
    if not isinstance(mark, kind):
        method = own.get("method") or method_of(function)
        mark = None if method is function else getattr(method, name, None)
    return mark if isinstance(mark, kind) else None


def method_of(function: object) -> Any:
    """Unwrap a kernel's function, a static method or a class method."""
    if isinstance(function, staticmethod | classmethod | MethodType):
        return cast("Any", function).__func__
    return _own(function).get("method", function)


def _own(function: object) -> dict[str, Any]:
    """Return an object's own attributes; a pydantic model is slow to look up others."""
    return getattr(function, "__dict__", {})


@cache
def mark_name(kind: type) -> str:
    """Name the attribute that holds the marks of a type."""
    return f"__planner_ext_{kind.__name__.lower()}__"
