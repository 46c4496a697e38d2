"""Risk declared on a function itself: ``@requires_approval``."""

from collections.abc import Callable
from typing import Any, TypeVar, overload

from planner_ext.approval.decisions import Defer, is_duration
from planner_ext.core.errors import InvalidLimitError, NotAFunctionError
from planner_ext.core.shown import is_function, shown

__all__ = ["approval_required", "requires_approval"]

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__planner_ext_requires_approval__"


@overload
def requires_approval(function: F, /) -> F: ...


@overload
def requires_approval(*, prompt: str | None = None, expires_in: float | None = None) -> Callable[[F], F]: ...


def requires_approval(function: Any = None, /, *, prompt: str | None = None, expires_in: float | None = None) -> Any:
    """Declare that a function may not run before a person has approved the call.

    Stands above or below ``@kernel_function``, bare or with arguments. An allow *rule* of a policy may free the
    function, a policy's default never does. Without any approver the run pauses.

    Args:
        function: The function, where the decorator stands without arguments.
        prompt: What the person is asked.
        expires_in: Seconds after which the question is no longer open; None uses the run's setting.

    Raises:
        InvalidLimitError: If ``expires_in`` is no such number.
        NotAFunctionError: If something else than a function is marked.
    """
    if prompt is not None and not isinstance(prompt, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InvalidLimitError(f"prompt must be a text, or None; got {shown(prompt)}.")
    if expires_in is not None and not is_duration(expires_in):
        raise InvalidLimitError(f"expires_in must be a number of seconds above 0, or None; got {shown(expires_in)}.")

    def mark(function: F) -> F:
        if not is_function(function):
            raise NotAFunctionError(
                f"requires_approval marks a function; got {shown(function)}. Write @requires_approval above the "
                "function, or with words for the person: @requires_approval(prompt=...)."
            )
        method: Any = getattr(function, "__func__", function)  # of a static or class method, what it wraps
        setattr(method, _MARK, Defer(prompt=prompt, expires_in=expires_in))
        return function

    return mark if function is None else mark(function)


def approval_required(method: object) -> Defer | None:
    """Read the mark of a function or method; None where there is none."""
    mark = getattr(method, _MARK, None)
    return mark if isinstance(mark, Defer) else None
