"""Checks of what an application gives: each error names the option, what it must be, what it is, and the way out.

All raise `InvalidOptionError`.
"""

import inspect
from collections.abc import Sequence
from typing import TypeVar, cast

from planner_ext.core.errors import require, shown, way_out
from planner_ext.core.limits import is_count
from planner_ext.sk.errors import InvalidOptionError, InvalidSettingsError

_T = TypeVar("_T")


def instance_of(name: str, value: object, kind: type[_T]) -> _T:
    """Return a value that must be of a class."""
    if not isinstance(value, kind):
        error = (
            InvalidSettingsError
            if name in ("kernel", "settings")
            else InvalidOptionError
        )
        raise error(
            f"{name} must be of the class {kind.__name__}; got {shown(value)}.{way_out(name, value)}"
        )
    return value


def callable_with(name: str, value: _T, given: Sequence[str]) -> _T:
    """Return a function that takes these arguments, or None."""
    if value is None:
        return value
    if not callable(value):
        raise InvalidOptionError(
            f"{name} must be a function, or None; got {shown(value)}."
        )
    check_returns(name, value)
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return value  # a function written in C may have no signature
    try:
        signature.bind(*given)
    except TypeError as error:
        raise InvalidOptionError(
            f"{name} must take {' and '.join(given)}; got a function that takes {signature}: {error}."
        ) from None
    return value


def check_returns(name: str, function: object) -> None:
    """Refuse a class, whose call returns an object, and a function that yields."""
    if isinstance(function, type):
        made = f"{function.__name__}(...)"
        raise InvalidOptionError(
            f"{name} must be a function, or an object with __call__; got a class. Give {made}."
        )
    calls = (function, getattr(function, "__call__", None))  # noqa: B004  (an object whose call is a generator)
    if any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one)
        for one in calls
    ):
        raise InvalidOptionError(
            f"{name} must return its answer; got {shown(function)}, which yields. Use return."
        )


def one_of(name: str, value: _T, allowed: Sequence[str]) -> _T:
    """Return a value that must be one of these."""
    expected = " or ".join(f'"{one}"' for one in allowed)
    require(name, value in allowed, expected, value)
    return value


def non_negative(name: str, value: object) -> int:
    """Return a whole number, 0 or more; None is 0."""
    if value is None:
        return 0
    require(name, is_count(value, least=0), "a whole number, 0 or more", value)
    return cast("int", value)
