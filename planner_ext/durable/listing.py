"""Filters for a list of runs, what a listed run waits for, and the numbers of a store."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, TypeAlias, TypedDict, cast

from planner_ext.core.errors import shown
from planner_ext.core.values import frozen
from planner_ext.durable.database import Row, Value
from planner_ext.durable.errors import StoreError
from planner_ext.durable.records import RUN_COLUMNS, RunRecord

PARKED = ("failed", "quarantined")
"""The statuses of runs that are driven again only after a start or a resume."""

ENDS = ("answered", "incomplete", "limit_reached", "stopped")
AT_REST = (*PARKED, *ENDS)
"""The statuses of runs that only a `resume` continues; they may be deleted."""

UNFINISHED = ("queued", "running", "paused")

STATUSES = (*UNFINISHED, *AT_REST)
"""The statuses of a run's row; a run whose result is ``asked`` is ``paused``."""

OPEN = "status = 'open' AND (expires_at IS NULL OR expires_at > :now)"
"""Chooses the approvals that a person may still decide."""

_COLUMNS = ", ".join(RUN_COLUMNS)
_ORDER = "ORDER BY updated_at DESC, run_id"
_NAMED = 3
"""The calls of a run that a list names; the others are counted."""
_LONGEST_NAME = 100

PAGE = f"""
    SELECT {_COLUMNS}, call, number FROM (
        SELECT page.*, call,
            COUNT(id) OVER (PARTITION BY page.run_id) AS number,
            ROW_NUMBER() OVER (PARTITION BY page.run_id ORDER BY asked_at, id) AS place
        FROM (SELECT {_COLUMNS} FROM planner_runs {{where}} {_ORDER} LIMIT :limit OFFSET :offset) AS page
        LEFT JOIN planner_approvals AS waiting ON waiting.run_id = page.run_id AND waiting.{OPEN}
    ) AS listed
    WHERE place <= {_NAMED} {_ORDER}, place
"""  # noqa: S608  (only this module's own text)
"""Reads a page of runs, each with its first open approvals and their number: a row for
each of these, at least one."""


Statuses: TypeAlias = str | Collection[str] | None
"""A status of `RunRecord.status`, several of which a run has one, or None for all."""


class RunFilters(TypedDict, total=False):
    """Which runs to list or count, besides their status; None does not filter.

    Attributes:
        goal: A text that the goal contains; ASCII letters match in upper and lower
            case.
        worker: The name or unique id of the worker that drives the run.
        function: The fully qualified name of a function that its model asked for.
        error: A text that its last fault contains, as ``goal``; a run that is driven
            again has none.
        tag: One of its tags.
        created_after: When it was created, at the earliest, in seconds since the epoch.
        created_before: Before this time.
        updated_after: When it was last updated, at the earliest.
        updated_before: Before this time.
    """

    goal: str | None
    worker: str | None
    function: str | None
    error: str | None
    tag: str | None
    created_after: float | None
    created_before: float | None
    updated_after: float | None
    updated_before: float | None


@frozen
class Hold:
    """Why no run of a store is driven; see `Runs.pause_all`.

    Attributes:
        by: Who paused them; "" without a name.
        at: When, in seconds since the epoch.
    """

    by: str
    reason: str
    at: float


@frozen
class RunStats:
    """The numbers of a store, for a dashboard or an alarm.

    Attributes:
        by_status: The number of runs of every status of `RunRecord.status`, 0 included.
        retrying: The running ones that wait for their next try after a fault.
        oldest_approval_seconds: The age of the oldest open call or question; None
            without one.
        hold: Why no run is driven; None if runs are.
    """

    total: int
    by_status: Mapping[str, int]
    retrying: int
    oldest_approval_seconds: float | None
    hold: Hold | None = None


@frozen
class StoreMarks:
    """Two marks of a store are equal as long as its lists are.

    Attributes:
        number: The open calls and questions.
        waiting: Changes when one of these is added, decided or expires.
        runs: Changes when a run changes.
    """

    number: int
    waiting: str
    runs: str


_CONDITIONS = {
    "goal": "LOWER(goal) LIKE :goal ESCAPE '!'",
    "worker": "owner || '/' LIKE :worker ESCAPE '!'",
    "function": "EXISTS (SELECT 1 FROM planner_journal AS asked WHERE asked.run_id = planner_runs.run_id "
    "AND REPLACE(fact, :function, '') <> fact)",
    "error": "LOWER(problem) LIKE :error ESCAPE '!'",
    "tag": "REPLACE(tags, :tag, '') <> tags",
    "created_after": "created_at >= :created_after",
    "created_before": "created_at < :created_before",
    "updated_after": "updated_at >= :updated_after",
    "updated_before": "updated_at < :updated_before",
}
"""The condition of each filter."""


def where_clause(status: Statuses, filters: RunFilters) -> tuple[str, dict[str, Value]]:
    """Write a WHERE clause, and the values of its placeholders.

    Raises:
        StoreError: If no run can have a status, or a value has another type.
        TypeError: If a filter is unknown.
    """
    named = (
        {}
        if status is None
        else {f"is_{one}": one for one in _checked_statuses(status)}
    )
    values: dict[str, Value] = {**named}
    conditions = (
        [f"status IN ({', '.join(f':{one}' for one in named)})"] if named else []
    )
    for name, given in filters.items():
        if name not in _CONDITIONS:
            raise TypeError(
                f"There is no filter {name!r} of runs. There are: status, {', '.join(_CONDITIONS)}."
            )
        if given is not None:
            conditions.append(_CONDITIONS[name])
            values[name] = _checked_value(name, given)
    return (f"WHERE {' AND '.join(conditions)}" if conditions else ""), values


def _checked_statuses(given: object) -> Sequence[str]:
    statuses = [given] if isinstance(given, str) else given
    if not isinstance(statuses, Collection):
        raise StoreError(f"status must be a text, or several; got {shown(given)}.")
    named = sorted({str(status) for status in cast("Collection[object]", statuses)})
    for status in named or [""]:
        if status not in STATUSES:
            raise StoreError(
                f"No run has the status {status!r}. There are: {', '.join(STATUSES)}."
            )
    return named


def _checked_value(name: str, given: object) -> Value:
    if name in _TEXTS:
        if not isinstance(given, str):
            raise StoreError(f"{name} must be a text; got {shown(given)}.")
        return _TEXTS[name](given)
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float)
        or not math.isfinite(given)
    ):
        raise StoreError(
            f"{name} must be a number of seconds since the epoch; got {shown(given)}."
        )
    return float(given)


def _escaped(text: str) -> str:
    """Escape what has a meaning in a LIKE pattern."""
    return re.sub("([!%_])", r"!\1", text)


def _contained(text: str) -> str:
    return f"%{_escaped(json.dumps(text)[1:-1].lower())}%"


_TEXTS: Mapping[str, Callable[[str], str]] = {
    "goal": _contained,
    "worker": lambda name: f"{_escaped(name)}/%",
    # As `CallDecided` is written: no text of a model reads so in it.
    "function": lambda name: f'"function":{json.dumps(name)},"kind":',
    "error": _contained,
    "tag": lambda tag: joined_tags([tag]) or "",
}
"""What each filter by a text compares with."""


def joined_tags(tags: Iterable[str]) -> str | None:
    """Join tags, which have no line breaks, to the value of their column."""
    return "".join(f"\n{tag}\n" for tag in tags) or None


def with_waits(
    records: Sequence[RunRecord],
    waiting: Sequence[Row],
    lost: Mapping[str, float],
    now: float,
) -> list[RunRecord]:
    """Add to runs what they wait for.

    Args:
        records: The runs of a page.
        waiting: The rows of `PAGE`: name, call and number.
        lost: When lost workers were last seen; 0 if that is not known.
        now: The time.
    """
    calls: dict[str, list[str]] = {}
    numbers: dict[str, int] = {}
    for run_id, call, number in waiting:
        calls.setdefault(str(run_id), []).append(_name_of(call, now))
        numbers[str(run_id)] = int(number or 0)
    return [
        replace(one, waits_for=_calls_text(calls[one.run_id], numbers[one.run_id]))
        if one.run_id in calls and one.unfinished
        else replace(one, waits_for=_worker_text(one, lost, now))
        for one in records
    ]


def _name_of(call: Value, now: float) -> str:
    try:
        data: Any = json.loads(str(call))
        is_escalated = "escalates_at" in data and now >= data["escalates_at"]
        asked = data.get("escalates_to" if is_escalated else "roles", ())
        roles = ", ".join(map(str, asked))[:_LONGEST_NAME]
        name = (
            "an answer"
            if data.get("kind") == "question"
            else str(data["fully_qualified_name"])[:_LONGEST_NAME]
        )
        return f"{name} ({roles})" if roles else name
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "a call whose row is damaged"


def _calls_text(names: Sequence[str], number: int) -> str:
    more = f" and {number - len(names)} more" if number > len(names) else ""
    return f"{', '.join(names)}{more}"


def _worker_text(record: RunRecord, lost: Mapping[str, float], now: float) -> str:
    """Say which worker or time a run waits for."""
    if not record.unfinished:
        return ""
    if record.owner is not None:
        seen = lost.get(record.owner)
        last = f"was last seen at {time_text(seen)}" if seen else "is gone"
        return "" if seen is None else f"a worker: {record.owner} {last}"
    if record.outage_at is not None:
        return f"the endpoint since {time_text(record.outage_at)}"
    if (
        record.status == "running"
        and record.wake_at is not None
        and record.wake_at > now
    ):
        return f"its next try at {time_text(record.wake_at)}"
    return "a worker"


def time_text(at: float) -> str:
    """Write a time in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
