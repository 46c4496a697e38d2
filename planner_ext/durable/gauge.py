"""The numbers of a store as metrics: gauges that are read from it, and counters of what this worker did.

The gauges are read when metrics are collected: a run pauses in one process and is
decided in another. Every worker of a store reports the same numbers, so dashboards take
the greatest, not the sum. The counters are each worker's own.
"""

# ruff: noqa: S608  (only this module's own text is put into a statement)

import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeAlias

from opentelemetry.metrics import CallbackOptions, Observation, get_meter

from planner_ext.durable.database import Database, Row
from planner_ext.durable.errors import StoreError
from planner_ext.durable.listing import OPEN, STATUSES
from planner_ext.durable.store import due_runs, times

logger = logging.getLogger(__name__)

_READ_SECONDS = 5.0
"""How long a server that does not answer may hold up the collection of metrics."""
_FRESH_SECONDS = 1.0
"""How long numbers are used that were read: one reading serves all gauges."""

_METER = get_meter("planner_ext")
RETRIES: Final = _METER.create_counter(
    "planner_ext.runs.retries", "{retry}", "Retries planned after a fault of a run."
)
TAKEOVERS: Final = _METER.create_counter(
    "planner_ext.runs.takeovers", "{run}", "Runs taken over from a worker that is gone."
)

_DUE_SINCE = """
    CASE WHEN wake_at <= :now THEN wake_at WHEN status <> 'paused' THEN updated_at
    ELSE (SELECT MIN(decided_at) FROM planner_approvals AS decided
          WHERE decided.run_id = planner_runs.run_id AND decided.status = 'decided') END
"""
_STATEMENTS = (
    f"SELECT COUNT(*), MIN(asked_at) FROM planner_approvals WHERE {OPEN}",
    f"""
    SELECT COUNT(*), MIN({_DUE_SINCE}) FROM planner_runs
    WHERE run_id IN (SELECT run_id FROM ({due_runs("owner IS NULL")}) AS due)
    """,
    "SELECT status, COUNT(*) FROM planner_runs GROUP BY status",
    "SELECT COUNT(wake_at), COUNT(outage_at), MIN(outage_at) FROM planner_runs WHERE status = 'running'",
    "SELECT COUNT(*), COUNT(next_at) FROM planner_notices WHERE delivered_at IS NULL",
    "SELECT COUNT(*) FROM planner_settings WHERE name = 'hold'",
    """
    SELECT budget, limits, MAX(until), MAX(iterations), MAX(tool_calls), MAX(tokens), MAX(cost)
    FROM planner_budgets AS used
    WHERE period = (SELECT MAX(period) FROM planner_budgets WHERE budget = used.budget) GROUP BY budget, limits
    ORDER BY MAX(updated_at)
    """,
)
_LIMITS = ("max_iterations", "max_tool_calls", "max_total_tokens", "max_cost")
"""The limits of a shared budget, in the order of the columns that they bound."""

_GAUGES: Mapping[str, tuple[str, str]] = {
    "planner_ext.approvals.waiting": (
        "{approval}",
        "Approvals that wait for a decision in a store.",
    ),
    "planner_ext.approvals.age": ("s", "How long the oldest of these has waited."),
    "planner_ext.queue.depth": ("{run}", "Runs that are due, and that no worker has."),
    "planner_ext.queue.age": ("s", "How long the oldest of these has been due."),
    "planner_ext.runs": ("{run}", "Runs in a store, by status."),
    "planner_ext.runs.retrying": ("{run}", "Runs that wait for their next try."),
    "planner_ext.outage.runs": (
        "{run}",
        "Runs that wait for the endpoint of their model.",
    ),
    "planner_ext.outage.age": ("s", "How long the first of these has waited."),
    "planner_ext.runs.held": (
        "{store}",
        "1 while all runs of a store are paused, else 0.",
    ),
    "planner_ext.store.waiting": (
        "s",
        "How long the work of this worker has waited for its store; 0 while that can be used.",
    ),
    "planner_ext.notices.undelivered": (
        "{notice}",
        "Notices that were not delivered yet, or were given up.",
    ),
    "planner_ext.budgets.used": (
        "{part}",  # exporters do not agree on the suffix of "1"
        "The used part of a shared budget's limit in this period, of the key that used most of it.",
    ),
}

_Readings: TypeAlias = Sequence[tuple[str, float, Mapping[str, str]]]
"""Values of gauges, with the attributes of each besides the store."""


class _Store:
    """The numbers of one store, read at most once in a second."""

    def __init__(self, name: str, database: Database, now: Callable[[], float]) -> None:
        self.name = name
        self._database = database
        self._now = now
        self._readings: _Readings = ()
        self._read_at: float | None = None

    def readings(self) -> _Readings:
        """Read the numbers, in the thread that collects metrics, which this blocks; of one that fails, only that."""
        at = time.monotonic()
        if self._read_at is None or at > self._read_at + _FRESH_SECONDS:
            try:
                self._readings = self._read()
            except StoreError as error:
                logger.warning("The numbers of a store are not reported: %s", error)
                self._readings = ()
            self._read_at = time.monotonic()
        waited = self._database.waits.seconds
        return [*self._readings, ("planner_ext.store.waiting", waited, {})]

    def _read(self) -> _Readings:
        now = self._now()
        store_now = self._database.now
        steps = [(one.format(now=store_now), times(now)) for one in _STATEMENTS]
        with self._database.connection(timeout=_READ_SECONDS) as execute:
            waiting, due, runs, trying, notices, held, budgets = (
                execute(*step) for step in steps
            )
        by_status = dict[str, int](runs)
        retrying, out, out_since = trying[0]
        unsent, tried = notices[0]
        return [
            ("planner_ext.approvals.waiting", waiting[0][0], {}),
            ("planner_ext.approvals.age", _age(waiting[0][1], now), {}),
            ("planner_ext.queue.depth", due[0][0], {}),
            ("planner_ext.queue.age", _age(due[0][1], now), {}),
            *(
                (
                    "planner_ext.runs",
                    by_status.get(status, 0),
                    {"planner_ext.run.status": status},
                )
                for status in STATUSES
            ),
            ("planner_ext.runs.retrying", retrying, {}),
            ("planner_ext.outage.runs", out, {}),
            ("planner_ext.outage.age", _age(out_since, now), {}),
            ("planner_ext.runs.held", held[0][0], {}),
            _notices("pending", tried),
            _notices("given_up", unsent - tried),
            *(one for row in budgets for one in _used(row, now)),
        ]


def _age(since: float | None, now: float) -> float:
    if since is None:
        return 0.0
    return max(0.0, now - since)


def _notices(state: str, number: int) -> tuple[str, float, Mapping[str, str]]:
    return "planner_ext.notices.undelivered", number, {"planner_ext.state": state}


def _used(row: Row, now: float) -> _Readings:
    budget, limits, until, *used = row
    is_over = until is not None and until <= now
    given: Mapping[str, float | None] = json.loads(limits)
    return [
        (
            "planner_ext.budgets.used",
            0.0 if is_over else amount / limit,
            {"planner_ext.budget": budget, "planner_ext.limit": name},
        )
        for name, amount in zip(_LIMITS, used, strict=True)
        if (limit := given.get(name))
    ]


_stores: Final[dict[object, _Store]] = {}


@contextmanager
def numbers_reported(
    store: str, database: Database, now: Callable[[], float]
) -> Generator[None]:
    """Report the numbers of a store.

    Args:
        store: The store's address, without a password.
        database: Is read in the thread that collects metrics.
        now: Returns the time.
    """
    key = object()
    _stores[key] = _Store(store, database, now)
    for counter in (RETRIES, TAKEOVERS):
        counter.add(0)  # else its first increase is not seen
    try:
        yield
    finally:
        del _stores[key]


def observed(name: str, _: CallbackOptions | None = None) -> list[Observation]:
    """Observe a gauge of all stores."""
    return [
        Observation(value, {"planner_ext.store": store.name, **attributes})
        for store in tuple(_stores.values())
        for gauge, value, attributes in store.readings()
        if gauge == name
    ]


for _name, (_unit, _description) in _GAUGES.items():
    _METER.create_observable_gauge(
        _name, [partial(observed, _name)], _unit, _description
    )
