"""The effect of running a function twice, declared on the function: ``@effect``.

A process can die after a function took effect and before its result was recorded. The
function declares what happens then: the call runs again, a probe finds out whether it
took effect, or a person decides.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.marks import mark_on, markable, method_of, put_mark

F = TypeVar("F", bound=Callable[..., Any])

KEY_PARAMETER = "idempotency_key"
"""The parameter that receives the call's key; hidden from the model, which may not give
it as an argument."""

TIME_PARAMETER = "time_left"
"""The parameter that receives the seconds that the call has left; also hidden from the
model."""

EffectKind: TypeAlias = Literal["once", "idempotent", "keyed"]
"""``once``: not run again without a decision; ``idempotent``: any number of times;
``keyed``: the same with one key."""


@dataclass(frozen=True, slots=True)
class TookEffect:
    """A probe's answer: the call took effect; ``result`` is what the model reads, as if the function returned it."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A probe's answer: the call took no effect, and will not; it is run again."""


Probe: TypeAlias = Callable[
    [str, Mapping[str, Any]],
    TookEffect | NoEffect | Awaitable[TookEffect | NoEffect | None] | None,
]
"""Called with a call's idempotency key and arguments; returns whether it took effect,
or None if it cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The declaration of a function; without one it is ``once``, without a probe."""

    kind: EffectKind = "once"
    probe: Probe | None = None


def effect(
    kind: EffectKind = "once", *, probe: Probe | None = None
) -> Callable[[F], F]:
    """Declare the effect of running a function twice; stands above or below ``@kernel_function``.

    Like `planner_ext.requires_approval`, it also marks a function of a kernel.

    It matters in two places. One is a run whose journal is kept in a store, where a
    call is found started and not finished: its process died.

    - ``once``, the default: the call is in doubt. The ``probe`` is called; without one,
      or if it cannot tell, a person decides (or the model reads so, see `Runs`).
    - ``idempotent``: the call runs again.
    - ``keyed``: it runs again with the same key. The function has a parameter
      ``idempotency_key``, which the model does not see, and which receives
      ``{run_id}/{iteration}/{call_id}``: in every run, with a store or without.

    The other is a filter of the kernel that calls ``next`` more than once, to retry for
    instance. A function of effect ``once`` starts once for each call: a further
    ``next`` gives the outcome of that start again, its result or its exception, and
    runs nothing, also where the first start failed. An ``idempotent`` or ``keyed``
    function starts again; each start is recorded before it happens and counts against
    ``max_tool_calls``, ``max_calls_per_function`` and ``max_repeated_calls``, and where
    one of these is reached the last outcome is given again.

    A marked function of another kind may have that parameter, too: so that a probe can
    find by it what was done.

    Any marked function may also have a parameter ``time_left``, which the model does
    not see either, and which receives the seconds that the call has when it starts, a
    float: the least of its own timeout, the run's ``deadline`` and
    ``max_active_seconds``; None if none of them is set, so annotate it ``float |
    None``. At that moment the call is cancelled. Without the mark both names are
    parameters like any other.

    Args:
        kind: One of the above.
        probe: Asked with the key and the arguments, sync or async; answers `TookEffect`
            with the result, `NoEffect` to have the call run again, or None if it cannot
            tell. One that raises cannot tell.

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
    """Return the declaration of a function, or None; see `planner_ext.core.marks`."""
    return mark_on(function, Effect)


def injected(function: object) -> frozenset[str]:
    """Name the parameters of a marked function that its run fills."""
    return (
        frozenset()
        if effect_of(function) is None
        else _parameters(function) & {KEY_PARAMETER, TIME_PARAMETER}
    )


def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(method_of(function)).parameters)


def idempotency_key(run_id: str, iteration: int, call_id: str) -> str:
    """Return the key of a call, unique among all runs and the same whenever the call runs again."""
    return f"{run_id}/{iteration}/{call_id}"
