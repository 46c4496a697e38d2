"""Kept runs under an engine that a team runs already: `DbosHost` (extra ``dbos``), `TemporalHost` (extra ``temporal``).

The engine says when and where a run is driven; the journal alone says what happened. A
host asks `Runs.due` which runs are due, hands their names to the engine, and calls
`Runs.activate` where the engine says so. What the engine does twice, late or not at all
repeats no call, and a run outlives the engine's database. Every worker has a host.

    dispatch    hands the names of due runs to an engine
    dbos        `DbosHost`
    temporal    `TemporalHost`
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner_ext.durable.hosts.dbos import DbosHost
    from planner_ext.durable.hosts.temporal import TemporalHost

__all__ = ["DbosHost", "TemporalHost"]

_EXTRAS = {"DbosHost": "dbos", "TemporalHost": "temporal"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    extra = _EXTRAS[name]
    try:
        module = import_module(f"planner_ext.durable.hosts.{extra}")
    except ImportError as error:
        raise ImportError(
            f"{name} needs more ({error}). Install planner-ext[{extra}]."
        ) from error
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
