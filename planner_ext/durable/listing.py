"""Filters for a list of runs, what a listed run waits for, and the numbers of a store."""

import json
import math
import re
from collections import Counter
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

DECIDED = "decided_at IS NOT NULL AND decision IS NOT NULL"
"""Chooses the approvals that were decided, or have expired."""

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


class CallFilters(TypedDict, total=False):
    """Which calls and questions to list or count; None does not filter.

    Attributes:
        text: A text that its goal, function or arguments contain; ASCII letters match
            in upper and lower case.
        function: The fully qualified name of its function.
        role: A role that may decide it, now or after its escalation.
        tag: A tag of its run.
        equal_to: What `equal_calls` returns for it: the same function, arguments and
            prompt.
        expires_before: It expires before this time, in seconds since the epoch.
        after: It began to wait after the call of this id.
        by: The name of who decided it, or of one of several.
        kind: How it was decided: ``approve``, ``deny``, ``supply`` or ``expire``.
        decided_after: When it was decided, at the earliest, in seconds since the
            epoch.
        decided_before: Before this time.
    """

    text: str | None
    function: str | None
    role: str | None
    tag: str | None
    equal_to: str | None
    expires_before: float | None
    after: str | None
    by: str | None
    kind: str | None
    decided_after: float | None
    decided_before: float | None


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


def read_hold(rows: Sequence[Row]) -> Hold | None:
    """Read the answer to `GET_HOLD`."""
    return Hold(**json.loads(rows[0][0])) if rows else None


GET_HOLD = "SELECT value FROM planner_settings WHERE name = 'hold'"


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
        hold: Why no run is driven, which changes both; None if runs are.
    """

    number: int
    waiting: str
    runs: str
    hold: Hold | None = None


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
"""The condition of each filter of runs."""

_CALL_CONDITIONS = {
    "text": "LOWER(call) LIKE :text ESCAPE '!'",
    "function": "function = :function",
    "role": "REPLACE(roles, :role, '') <> roles",
    "tag": "run_id IN (SELECT run_id FROM planner_runs WHERE REPLACE(tags, :tag, '') <> tags)",
    "equal_to": "question = :equal_to",
    "expires_before": "expires_at < :expires_before",
    "after": "(asked_at, id) > (SELECT asked_at, id FROM planner_approvals WHERE id = :after)",
    "by": "REPLACE(decision, :by, '') <> decision",
    "kind": "REPLACE(decision, :kind, '') <> decision",
    "decided_after": "decided_at >= :decided_after",
    "decided_before": "decided_at < :decided_before",
}
"""The condition of each filter of calls."""


def where_clause(status: Statuses, filters: RunFilters) -> tuple[str, dict[str, Value]]:
    """Write a WHERE clause, and the values of its placeholders.

    Raises:
        StoreError: If no run can have a status, or a value has another type.
        TypeError: If a filter is unknown.
    """
    conditions, values = _conditions("runs", filters, _CONDITIONS, _TEXTS)
    if status is not None:
        statuses = ", ".join(map(repr, _checked_statuses(status)))
        conditions.append(f"status IN ({statuses})")
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    return where, values


def calls_clause(
    chosen: str, run_id: str | None, filters: CallFilters
) -> tuple[str, dict[str, Value]]:
    """Write a WHERE clause for the calls that a condition chooses, of one run or of all; as `where_clause`."""
    conditions, values = _conditions("calls", filters, _CALL_CONDITIONS, _CALL_TEXTS)
    of_run = [] if run_id is None else ["run_id = :run_id"]
    where = f"WHERE {' AND '.join([*of_run, chosen, *conditions])}"
    return where, {**values, "run_id": run_id}


def _conditions(
    noun: str,
    filters: Mapping[str, object],
    known: Mapping[str, str],
    texts: Mapping[str, Callable[[str], str]],
) -> tuple[list[str], dict[str, Value]]:
    conditions: list[str] = []
    values: dict[str, Value] = {}
    for name, given in filters.items():
        if name not in known:
            raise TypeError(
                f"There is no filter {name!r} of {noun}. There are: {', '.join(known)}."
            )
        if given is not None:
            conditions.append(known[name])
            values[name] = _checked_value(name, given, texts)
    return conditions, values


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


def _checked_value(
    name: str, given: object, texts: Mapping[str, Callable[[str], str]]
) -> Value:
    if name in texts:
        if not isinstance(given, str):
            raise StoreError(f"{name} must be a text; got {shown(given)}.")
        return texts[name](given)
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
    "tag": lambda tag: joined([tag]) or "",
}
"""What each filter of runs by a text compares with."""

_CALL_TEXTS: Mapping[str, Callable[[str], str]] = {
    "text": _contained,
    "function": str,
    "role": lambda role: joined([role]) or "",
    "tag": lambda tag: joined([tag]) or "",
    "equal_to": str,
    "after": str,
    # As `write_decision` writes them.
    "by": lambda name: f'"by": {json.dumps(name)}',
    "kind": lambda kind: f', "kind": {json.dumps(kind)}, ',
}


def joined(names: Iterable[str]) -> str | None:
    """Join names, such as tags, which have no line breaks, to the value of their column."""
    return "".join(f"\n{name}\n" for name in names) or None


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
        calls.setdefault(run_id, []).append(_name_of(call, now))
        numbers[run_id] = number
    return [
        replace(one, waits_for=_calls_text(calls[one.run_id], numbers[one.run_id]))
        if one.run_id in calls and one.unfinished
        else replace(one, waits_for=_worker_text(one, lost, now))
        for one in records
    ]


def _name_of(call: str, now: float) -> str:
    try:
        data: Any = json.loads(call)
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
    texts = (
        f"{count} \N{MULTIPLICATION SIGN} {name}" if count > 1 else name
        for name, count in Counter(names).items()
    )
    return f"{', '.join(texts)}{more}"


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
    if record.wake_at is not None and record.wake_at > now:
        if record.status == "queued":
            return f"its start at {time_text(record.wake_at)}"
        return next_try(record) or "a worker"
    return "a worker"


def next_try(record: RunRecord) -> str:
    """Say which try of a run is next after a fault, and when; "" without one."""
    if record.status != "running" or record.wake_at is None:
        return ""
    number = "its next try"
    if record.retries:
        number = f"attempt {record.retries + 1} of {record.attempts}, next"
    return f"{number} at {time_text(record.wake_at)}"


def time_text(at: float) -> str:
    """Write a time in UTC."""
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC"
