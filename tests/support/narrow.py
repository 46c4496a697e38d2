"""Assertions that tell a type checker what a test knows of a value."""

from typing import Any, TypeVar

__all__ = ["as_type", "present", "run_of"]

T = TypeVar("T")


def as_type(kind: type[T], value: object) -> T:
    """Return a value that is of this type."""
    assert isinstance(value, kind), value
    return value


def present(value: T | None) -> T:
    """Return a value that is not None."""
    assert value is not None
    return value


def run_of(error: BaseException | None) -> Any:
    """Return the exception that ended a run, with the attributes `chat_history` and `checkpoint` that it then has."""
    assert hasattr(error, "chat_history"), error
    assert hasattr(error, "checkpoint"), error
    return error
