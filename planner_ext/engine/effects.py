"""``@effect``: what running a function twice does.

A process can die after a function took effect and before its result was recorded. The
function declares whether the call runs again, a probe finds out, or a person decides.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.marks import mark_on, markable, method_of, put_mark
from planner_ext.core.state import path_of
from planner_ext.core.values import frozen

F = TypeVar("F", bound=Callable[..., Any])

KEY_PARAMETER = "idempotency_key"
"""The parameter that receives the call's key; hidden from the model."""

TIME_PARAMETER = "time_left"
"""The parameter that receives the seconds that the call has left; hidden from the
model."""

EffectKind: TypeAlias = Literal["once", "idempotent", "keyed"]
"""``once``: not run again without a decision; ``idempotent``: any number of times;
``keyed``: any number of times with one key."""


@dataclass(frozen=True, slots=True)
class TookEffect:
    """A probe's answer: the call took effect; the model reads ``result``."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A probe's answer: the call took no effect, and will not; it is run again."""


Probe: TypeAlias = Callable[
    [str, Mapping[str, Any]],
    TookEffect | NoEffect | Awaitable[TookEffect | NoEffect | None] | None,
]
"""Called with a call's idempotency key and arguments; says whether it took effect, None
if it cannot tell."""


@frozen
class Effect:
    """The declaration of a function."""

    kind: EffectKind = "once"
    probe: Probe | None = None


def effect(
    kind: EffectKind = "once", *, probe: Probe | None = None
) -> Callable[[F], F]:
    """Declare the effect of running a function twice; above or below ``@kernel_function``.

    Like `planner_ext.requires_approval`, it also marks a function of a kernel.

    In a store, a call may be found started and not finished, because its process died:

    - ``once``, the default: the ``probe`` is called; without one, or if it cannot tell,
      a person decides (or the model reads so, see `Runs`).
    - ``idempotent``: the call runs again.
    - ``keyed``: it runs again with the same key, ``{run_id}/{iteration}/{call_id}``,
      which its parameter ``idempotency_key`` receives in every run.

    A filter of the kernel may call ``next`` more than once. A ``once`` function starts
    once for each call: a further ``next`` gives that start's result or exception again.
    Another one starts again; each start is recorded before it happens and checked
    against the limits on calls, and at a limit the last outcome is given again.

    Any marked function may have both parameters, which the model does not see:
    ``idempotency_key``, and ``time_left: float | None``, the seconds after which the
    call is cancelled: the least of its own timeout, the run's ``deadline`` and
    ``max_active_seconds``.

    Args:
        kind: One of the above.
        probe: Asked with the key and the arguments, sync or async; answers `TookEffect`
            with the result, `NoEffect` to have the call run again, or None. One that
            raises cannot tell.

    Raises:
        InvalidLimitError: For another kind, a probe that cannot be called or is not
            needed, and ``keyed`` without the parameter.
        NotAFunctionError: If something other than a function is marked.
    """
    if kind not in ("once", "idempotent", "keyed"):
        raise InvalidLimitError(
            f'effect takes "once", "idempotent" or "keyed"; got {shown(kind)}.'
        )
    if probe is not None and (kind != "once" or not callable(probe)):
        raise InvalidLimitError(
            f'probe must be a function (key, arguments), and only stands with effect("once"), the one that is not run '
            f"again unasked; got {shown(probe)} with {shown(kind)}."
        )

    def mark(function: F) -> F:
        keeper = markable(function, f"effect({kind!r}) marks a function; got {{}}.")
        if kind == "keyed" and KEY_PARAMETER not in _parameters(function):
            name = getattr(
                function,
                "fully_qualified_name",
                getattr(function, "__qualname__", repr(function)),
            )
            raise InvalidLimitError(
                f'{name} is declared effect("keyed") and has no parameter {KEY_PARAMETER}: add it.'
            )
        put_mark(keeper, Effect(kind=kind, probe=probe))
        return function

    return mark


def effect_of(function: object) -> Effect | None:
    """Return the declaration of a function; see `planner_ext.core.marks`."""
    return mark_on(function, Effect)


def injected(function: object) -> frozenset[str]:
    """Name the hidden parameters of a marked function."""
    return (
        frozenset()
        if effect_of(function) is None
        else _parameters(function) & {KEY_PARAMETER, TIME_PARAMETER}
    )


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(method_of(function)).parameters)


def idempotency_key(run_id: str, iteration: int, call_id: str) -> str:
    """Return a call's key, unique among all runs, and the same when it runs again."""
    return f"{run_id}/{iteration}/{path_of(call_id)}"
