"""Many values in one case: for what differs in nothing but a value."""

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

__all__ = ["each_of"]

_Test = Callable[..., Any]
_FAILURES = (Exception, pytest.fail.Exception)
"""What fails a value: an error, or pytest's word that an expected one did not come."""


def each_of(
    names: str | Sequence[str], values: Iterable[Any], *, ids: object = None
) -> Callable[[_Test], _Test]:
    """Run a test with each of several values, as one case that lists all that fail.

    It reads as ``pytest.mark.parametrize`` does, and costs one setup instead of one a value. The values share the
    fixtures of the test, which must leave them as they were.

    Args:
        names: The parameters.
        values: The values of one parameter, or a sequence of values for each row of several.
        ids: As ``pytest.mark.parametrize`` takes them; a failure shows the values themselves.
    """
    given = (
        [name.strip() for name in names.split(",")]
        if isinstance(names, str)
        else [*names]
    )
    rows = [_row(given, value) for value in values]

    def decorate(test: _Test) -> _Test:
        @functools.wraps(test)
        async def run_later(*owner: Any, **fixtures: Any) -> None:
            errors: list[BaseException] = []
            for row in rows:
                try:
                    await test(*owner, **fixtures, **row)
                except _FAILURES as error:
                    errors.append(_noted(error, row))
            _raise_all(errors)

        @functools.wraps(test)
        def run(*owner: Any, **fixtures: Any) -> None:
            errors: list[BaseException] = []
            for row in rows:
                try:
                    test(*owner, **fixtures, **row)
                except _FAILURES as error:
                    errors.append(_noted(error, row))
            _raise_all(errors)

        made: Any = run_later if inspect.iscoroutinefunction(test) else run
        signature = inspect.signature(test)
        others = [
            one for name, one in signature.parameters.items() if name not in given
        ]
        made.__signature__ = signature.replace(parameters=others)
        return made

    return decorate


def _row(names: Sequence[str], value: Any) -> Mapping[str, Any]:
    if type(value).__name__ == "ParameterSet":  # of pytest.param
        return dict(zip(names, value.values, strict=True))
    return dict(zip(names, value if len(names) > 1 else (value,), strict=True))


def _noted(error: BaseException, row: Mapping[str, Any]) -> BaseException:
    error.add_note(f"with {row!r:.300}")
    return error


def _raise_all(errors: Sequence[BaseException]) -> None:
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} values fail", errors)


def stem(file: Path) -> str:
    """Name a case by its file."""
    return file.stem
