"""The statements of a store: each method is one transaction."""

# ruff: noqa: S608  (only this module's own text is put into a statement)

import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import Any, Literal, NoReturn, ParamSpec, TypeVar, Unpack

from planner_ext.core.facts import Fact
from planner_ext.core.limits import is_count
from planner_ext.core.values import frozen
from planner_ext.durable.chain import Chain, run_digest
from planner_ext.durable.database import Database, Row, Step, Value
from planner_ext.durable.errors import (
    DuplicateRowError,
    RunConflictError,
    RunFencedError,
    StoreError,
    UnknownRunError,
    is_address,
)
from planner_ext.durable.inputs import (
    NewBudget,
    hooks_in,
    read_inputs,
    read_new_budget,
    read_said,
)
from planner_ext.durable.listing import (
    AT_REST,
    ENDS,
    GET_HOLD,
    OPEN,
    PAGE,
    STATUSES,
    UNFINISHED,
    CallFilters,
    Hold,
    RunFilters,
    RunStats,
    Statuses,
    StoreMarks,
    calls_clause,
    joined,
    read_hold,
    where_clause,
    with_waits,
)
from planner_ext.durable.records import RUN_COLUMNS, RunRecord, StoredRun, read_facts

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

_RUN = f"SELECT {', '.join(RUN_COLUMNS)} FROM planner_runs"
_TABLES_OF_RUNS = (
    "planner_journal",
    "planner_approvals",
    "planner_refusals",
    "planner_notices",
)
_GET_RUN = f"{_RUN} WHERE run_id = :run_id"
_GET_STORED = f"SELECT {', '.join(RUN_COLUMNS)}, inputs, new_budget, said FROM planner_runs WHERE run_id = :run_id"
_JOURNAL = "SELECT seq, schema, fact FROM planner_journal WHERE run_id = :run_id AND seq >= :seen ORDER BY seq"
_LAST_LINK = """
    SELECT seq, link, (SELECT salt FROM planner_journal WHERE run_id = :run_id AND seq = 0) FROM planner_journal
    WHERE run_id = :run_id ORDER BY seq DESC LIMIT 1
"""
_CHAIN = """
    SELECT link, (SELECT salt FROM planner_journal WHERE run_id = :run_id AND seq = 0) FROM planner_journal
    WHERE run_id = :run_id AND seq = :last
"""
_FIRST_FACT = (
    "SELECT fact FROM planner_journal WHERE run_id = planner_runs.run_id AND seq = 0"
)
_GUARDS = f"SELECT inputs, ({_FIRST_FACT}) FROM planner_runs WHERE run_id = :run_id"
_HOOK = '%"authorize"%'
_IS_GUARDED = f"inputs LIKE :hook OR ({_FIRST_FACT}) LIKE :hook"
_CONTINUES = """
    CASE WHEN status = 'paused' THEN wake_at <= :now OR EXISTS (
        SELECT 1 FROM planner_approvals WHERE run_id = :run_id AND status = 'decided'
    ) ELSE status IN ('queued', 'running') END
"""
"""Whether a run is driven, or is due: unless it has ended, or waits for a decision or a
date."""
STORE_NOW = "{now} + CAST(:ahead AS DOUBLE PRECISION)"
"""The time by which retries, earliest starts and notices are due, and waits for an
endpoint are measured: the store's, as the clocks of workers differ. ``:ahead`` is how
far a clock that an application gave is ahead of its machine's."""
LATER = f"{STORE_NOW} + CAST(:delay AS DOUBLE PRECISION)"
"""So many seconds after that time; null without a delay."""
_RUN_AND_DUE = f"""
    SELECT {", ".join(RUN_COLUMNS)}, {_CONTINUES},
        wake_at - CASE WHEN status = 'paused' THEN CAST(:now AS DOUBLE PRECISION) ELSE {STORE_NOW} END
    FROM planner_runs WHERE run_id = :run_id
"""


def _begun(which: str) -> str:
    """Select the due runs that somebody waits for, of those that a condition chooses."""
    return f"""
        SELECT run_id, created_at FROM planner_runs
        WHERE status IN ('queued', 'running') AND (wake_at IS NULL OR wake_at <= (SELECT {STORE_NOW})) AND {which}
        UNION ALL SELECT run_id, created_at FROM planner_runs
        WHERE status = 'paused' AND {which}
              AND run_id IN (SELECT run_id FROM planner_approvals WHERE status = 'decided')
    """


def _expired(which: str) -> str:
    """Select the runs in which a question has expired, of those that a condition chooses."""
    return f"SELECT run_id, created_at FROM planner_runs WHERE status = 'paused' AND wake_at <= :now AND {which}"


def due_runs(which: str) -> str:
    """Select all due runs of those that a condition chooses; ``{now}`` is left for the database's time."""
    return f"{_begun(which)} UNION ALL {_expired(which)}"


_ORDER = """
    ORDER BY CASE WHEN status = 'paused' AND wake_at <= :now THEN 1 ELSE 0 END, priority DESC, created_at, run_id
"""
"""The order in which due runs are taken."""
_HELD = "EXISTS (SELECT 1 FROM planner_settings WHERE name = 'hold')"
_MAY_DRIVE = f"(status IN ({', '.join(map(repr, AT_REST))}) OR NOT {_HELD})"
"""Whether a run may be claimed: the result of one that has ended is read even while all
are paused."""
_LISTED = "REPLACE(CAST(:{names} AS TEXT), '\n' || {column} || '\n', '') <> CAST(:{names} AS TEXT)"
"""Whether a column is one of the names that `_listed` joined."""
_FREE = f"owner IS NULL AND deaths = 0 AND NOT {_LISTED.format(names='skip', column='run_id')}"
_DEAD = _LISTED.format(names="dead", column="owner")
_LOOK = f"""
    SELECT EXISTS ({_begun(_FREE)}), EXISTS ({_expired(_FREE)}), EXISTS ({due_runs("owner IS NULL AND deaths > 0")})
"""
_UNTOLD = "COALESCE(told_at, 0) <= {now} - :again_after"
_TELL = f"""
    UPDATE planner_runs SET told_at = {{now}} WHERE run_id IN (
        SELECT run_id FROM planner_runs
        WHERE run_id = :run_id AND COALESCE(owner, '') = :seen AND {_UNTOLD} {{skip_locked}}
    ) RETURNING run_id
"""


def _claim_of(due: str, order: str) -> str:
    """Own the first due runs of an order.

    The conditions are repeated: PostgreSQL checks only the outer ones again on a row
    that changed meanwhile.
    """
    return f"""
        WITH free AS MATERIALIZED (
            SELECT run_id FROM planner_runs
            WHERE NOT {_HELD} AND {_FREE}
                  AND (status = 'paused' OR status IN ('queued', 'running') AND COALESCE(wake_at, 0) <= {STORE_NOW})
                  AND run_id IN (SELECT run_id FROM ({due}) AS due)
            ORDER BY {order} LIMIT :limit {{skip_locked}}
        )
        UPDATE planner_runs
        SET owner = :me, told_at = NULL, wake_at = CASE WHEN status = 'running' THEN NULL ELSE wake_at END
        WHERE run_id IN (SELECT run_id FROM free) RETURNING {", ".join(RUN_COLUMNS)}
    """


_CLAIM_BEGUN = _claim_of(_begun(_FREE), "priority DESC, created_at, run_id")
_CLAIM_EXPIRED = _claim_of(_expired(_FREE), "wake_at, run_id")
_OWNERS = """
    SELECT owner, {is_locked}, seen_at, lease_seconds
    FROM (SELECT owner FROM planner_runs WHERE owner IS NOT NULL UNION SELECT CAST(:me AS TEXT)) AS owners
    LEFT JOIN planner_workers ON worker_id = owner
"""
"""Who owns runs, and the worker that asks: one whose own lock is lost does not judge
others."""
_PAGE = 200
"""The rows of due runs that are read at once."""
_APPROVAL = """
    SELECT id, run_id, status, fingerprint, call, asked_at, expires_at, decision, decided_at, problem, votes,
        (SELECT said FROM planner_runs WHERE planner_runs.run_id = planner_approvals.run_id)
    FROM planner_approvals
"""
_REST = """
    UPDATE planner_runs
    SET status = 'paused', problem = NULL, wake_at = (
        SELECT MIN(expires_at) FROM planner_approvals WHERE run_id = :run_id AND status = 'open'
    )
    WHERE run_id = :run_id AND owner = :owner AND status = 'running'
          AND (SELECT fact FROM planner_journal WHERE run_id = :run_id ORDER BY seq DESC LIMIT 1) LIKE :paused
"""
"""Makes a run wait again whose driving ended where it had begun: paused, after a fault
or a revival set it running."""
_STILL_SEEN = """
    COALESCE(owner, '') = :seen AND NOT EXISTS (
        SELECT 1 FROM planner_workers WHERE worker_id = :seen AND seen_at <> CAST(:beat AS DOUBLE PRECISION)
    )
"""
"""Whether a run's owner is still the one that was seen, without a beat since."""
_COUNT = """
    UPDATE planner_runs
    SET deaths = :deaths, progress = :progress, retries = CASE WHEN progress = :progress THEN retries ELSE 0 END
    WHERE run_id = :run_id AND owner = :owner
"""
_PAUSED = '%"type":"Paused"%'
_STARTED = '%"type":"CallStarted"%'
_WAITING_MARK = (
    "COUNT(*), COUNT(problem), CAST(SUM(CAST(asked_at * 1000 AS BIGINT)) AS BIGINT), "
    "COALESCE(SUM(LENGTH(votes)), 0)"
)
"""What changes with the open approvals: how many there are, how many were opened again,
when each was asked, and the votes."""
ADD_NOTICE = """
    INSERT INTO planner_notices (id, run_id, event, body, created_at, next_at)
    SELECT :id, run_id, :event, :body, :at, :at FROM planner_runs
    WHERE run_id = :run_id AND status = :status AND updated_at = :at
          AND EXISTS (SELECT 1 FROM planner_subscriptions WHERE event = :event AND until > :at)
          AND (status <> 'paused' OR EXISTS (
              SELECT 1 FROM planner_approvals WHERE run_id = :run_id AND status = 'open'
          ))
"""
"""A pause is told only while something in it waits for a person."""
_EVENT_OF: Mapping[str, str] = {
    "paused": "paused",
    "failed": "failed",
    "quarantined": "failed",
}
"""The event of a status; that of any other one at which nothing more runs is
``ended``."""
_GRANT_MAY_HOLD = "revoked_at IS NULL AND expires_at > :at"
GRANT_HOLDS = f"{_GRANT_MAY_HOLD} AND (uses IS NULL OR used < uses)"
_GRANTS = """
    SELECT id, question, terms, decision, given_at, expires_at, used, used_for FROM planner_grants
    WHERE {which} ORDER BY kind DESC, given_at, id
"""
_DECIDED = (
    f"{_APPROVAL} WHERE run_id = :run_id AND status = 'decided' ORDER BY decided_at, id"
)
_REFUSAL = "SELECT id, decision, problem, at FROM planner_refusals"

_IDLE = "NOT EXISTS (SELECT 1 FROM planner_workers WHERE worker_id = planner_runs.owner AND {age} <= lease_seconds)"
_OLD = f"status = :status AND updated_at < :before AND {_IDLE}"

_KEEP_DIGEST = """
    INSERT INTO planner_deleted (digest, status, at, head)
    SELECT :digest, status, {now}, (
        SELECT CAST(seq + 1 AS TEXT) || '.' || link FROM planner_journal
        WHERE run_id = :run_id ORDER BY seq DESC LIMIT 1
    ) FROM planner_runs WHERE run_id = :run_id AND owner = :owner
    ON CONFLICT (digest) DO UPDATE SET status = EXCLUDED.status, at = EXCLUDED.at, head = EXCLUDED.head
"""

_OWNED = "run_id IN (SELECT run_id FROM planner_runs WHERE owner = :owner)"
_TAKE_RUNS = (
    f"UPDATE planner_grants SET used_for = NULL WHERE used_for IN (SELECT id FROM planner_approvals WHERE {_OWNED})",
    *(f"DELETE FROM {table} WHERE {_OWNED}" for table in _TABLES_OF_RUNS),
    "DELETE FROM planner_runs WHERE owner = :owner RETURNING run_id",
)
_HAS_TEXTS = f"({_FIRST_FACT}) <> ''"
_TAKE_TEXTS = (
    f"UPDATE planner_journal SET fact = '', salt = NULL WHERE {_OWNED}",
    *(f"DELETE FROM {table} WHERE {_OWNED}" for table in _TABLES_OF_RUNS[1:]),
    "UPDATE planner_runs SET owner = NULL, inputs = NULL, said = NULL WHERE owner = :owner RETURNING run_id",
)

_BATCH = 10
"""The most runs that one transaction takes out: other writers of an SQLite file wait 20
ms for ten of 200 KiB."""


class Opening(AbstractAsyncContextManager[T]):
    """A store that is not open yet; its use without ``async with`` is an error that says so."""

    def __init__(self, context: AbstractAsyncContextManager[T], name: str) -> None:
        self._context = context
        self._name = name

    async def __aenter__(self) -> T:
        return await self._context.__aenter__()

    async def __aexit__(self, *error: Any) -> bool | None:
        return await self._context.__aexit__(*error)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise StoreError(
            f"The store was not opened before .{name}. Write: async with {self._name}(...) as opened."
        )


def times(now: float) -> dict[str, Value]:
    """Return the values of ``:now``, a process's time, and of ``:ahead`` beside the store's."""
    return {"now": now, "ahead": now - time.time()}


def opens(function: Callable[P, AsyncGenerator[T]]) -> Callable[P, Opening[T]]:
    """Make a generator that yields an open store return its `Opening`."""
    context = asynccontextmanager(function)

    @wraps(function)
    def opening(*args: P.args, **kwargs: P.kwargs) -> Opening[T]:
        return Opening(context(*args, **kwargs), function.__qualname__)

    return opening


async def open_database(
    where: str | Path,
    *,
    create: bool = True,
    patience: float = 0.0,
    older: bool = False,
) -> Database:
    """Open the SQLite file at a path, or the PostgreSQL database at an address.

    Args:
        where: The path or ``postgresql://`` address.
        create: Whether to create a missing file, or missing tables.
        patience: Seconds to wait for a server that cannot be reached.
        older: Whether to open tables of an older schema, which `migrate` changes.
    """
    if not is_address(where):
        from planner_ext.durable.sqlite import SqliteDatabase  # noqa: PLC0415  (only for a file)

        return await SqliteDatabase.open(Path(where), create=create, older=older)
    try:
        from planner_ext.durable.postgres import PostgresDatabase  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        raise StoreError(
            f"Runs in PostgreSQL need more ({error}). Install planner-ext[postgres]."
        ) from error
    database = PostgresDatabase(str(where))
    await database.open(patience=patience, create=create, older=older)
    return database


@asynccontextmanager
async def opened_store(
    where: str | Path, *, create: bool = True, patience: float = 0.0
) -> "AsyncGenerator[JournalStore, None]":
    """Open a store for a block; see `open_database`."""
    store = JournalStore(await open_database(where, create=create, patience=patience))
    try:
        yield store
    finally:
        await store.close()


@frozen
class RunOwner:
    """A worker that owns runs: whether its lock is held, its last heartbeat, None without one, and its lease."""

    worker_id: str
    is_locked: bool
    seen_at: float | None
    lease: float


@frozen
class Look:
    """What a worker reads in each poll.

    Attributes:
        has_free: Whether a due run has neither an owner nor a death.
        has_expired: Whether a question in such a run has expired; ``has_free`` is about
            all others.
        has_died: Whether a due run has no owner, and a death.
    """

    has_free: bool
    has_expired: bool
    has_died: bool
    owners: Sequence[RunOwner]


class JournalStore:
    """The runs in one database.

    The journal's unique ``(run_id, seq)`` makes concurrent workers safe; owners only
    avoid wasted work.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    async def create(
        self,
        run_id: str,
        goal: str,
        *,
        owner: str | None,
        at: float,
        status: Literal["queued", "running"] = "running",
        inputs: str | None = None,
        tags: str | None = None,
        priority: int = 0,
        wake_at: float | None = None,
        reuse: bool = False,
    ) -> bool:
        """Insert a run; False if the name is taken, or was that of a deleted run, unless it may be reused."""
        statement = f"""
            INSERT INTO planner_runs (
                run_id, goal, status, owner, created_at, updated_at, inputs, tags, priority, wake_at
            )
            SELECT :run_id, :goal, :status, CASE WHEN {_HELD} THEN NULL ELSE :owner END, :at, :at, :inputs, :tags,
                CAST(:priority AS INTEGER), CAST(:wake_at AS DOUBLE PRECISION)
            WHERE NOT EXISTS (SELECT 1 FROM planner_deleted WHERE digest = :digest)
            ON CONFLICT DO NOTHING RETURNING run_id
        """
        values = {
            "run_id": run_id,
            "digest": run_digest(run_id),
            "goal": json.dumps(goal),
            "owner": owner,
            "at": at,
            "status": status,
            "inputs": inputs,
            "tags": tags,
            "priority": priority,
            "wake_at": wake_at,
        }
        hints = self.database.hints if owner is None else ()
        forget = "DELETE FROM planner_deleted WHERE digest = :digest"
        statements = [forget, statement] if reuse else [statement]
        steps = [(one, values) for one in statements]
        rows = await self.database.transact(*steps, *hints)
        return bool(rows[len(steps) - 1])

    async def deleted(self, run_id: str) -> tuple[str, float] | None:
        """Read the status of a deleted run, and when it was deleted; None if there is no such, or a run of its name."""
        statement = """
            SELECT status, at FROM planner_deleted
            WHERE digest = :digest AND NOT EXISTS (SELECT 1 FROM planner_runs WHERE run_id = :run_id)
        """
        digest = run_digest(run_id)
        rows = await self._rows(statement, run_id=run_id, digest=digest)
        return rows[0] if rows else None

    async def append(self, run_id: str, *steps: Step) -> None:
        """Append rows to a run's journal and update the derived tables, durably.

        Raises:
            RunFencedError: If a ``seq`` exists or is null.
        """
        try:
            await self.database.transact(*steps)
        except DuplicateRowError as error:
            raise RunFencedError(
                f"Run {run_id!r} was continued elsewhere: row {steps[0][1]['seq']} of its journal is taken, another "
                "worker took the run over, or a call was decided or something said meanwhile. Nothing was recorded "
                "here; read the run again."
            ) from error

    async def chain(self, run_id: str, number: int) -> Chain:
        """Read the chain of the first facts of a journal, so many of them."""
        if number == 0:
            return Chain.begin(run_id)
        rows = await self._rows(_CHAIN, run_id=run_id, last=number - 1)
        link, salt = rows[0] if rows else ("", "")
        return Chain(run=run_digest(run_id), number=number, link=link, salt=salt)

    async def load_chained(
        self, run_id: str, seen: int
    ) -> tuple[tuple[Fact, ...], Chain | None]:
        """Read a run's facts after the first ``seen``, and its chain; None if facts came in between."""
        values = {"run_id": run_id, "seen": seen}
        rows, last = await self.database.transact(
            (_JOURNAL, values), (_LAST_LINK, values)
        )
        facts = read_facts(run_id, rows, first=seen)
        return facts, _chain_of(run_id, seen + len(facts), last)

    async def record(self, run_id: str) -> RunRecord:
        """Read a run's row; raise `UnknownRunError` if the store has no such run."""
        return _read_run(run_id, await self._rows(_GET_RUN, run_id=run_id))

    async def hooks(self, run_id: str) -> tuple[str, ...]:
        """Read the names of a run's ``authorize`` hooks."""
        rows = await self._rows(_GUARDS, run_id=run_id)
        if not rows:
            raise _unknown(run_id)
        return hooks_in(run_id, *rows[0])

    async def load(self, run_id: str) -> StoredRun:
        """Read a run and its journal; raise `UnknownRunError` or `InvalidJournalError`."""
        values = {"run_id": run_id, "seen": 0}
        return _read_stored(
            run_id,
            *await self.database.transact((_GET_STORED, values), (_JOURNAL, values)),
        )

    async def load_driven(
        self, run_id: str
    ) -> tuple[StoredRun, Chain | None, NewBudget | None, str, Sequence[Row]]:
        """Read a run and its `chain`, its new budget, what was said to it, and the rows of its `decisions`."""
        values = {"run_id": run_id, "seen": 0}
        runs, facts, last, decided = await self.database.transact(
            (_GET_STORED, values),
            (_JOURNAL, values),
            (_LAST_LINK, values),
            (_DECIDED, values),
        )
        return (
            _read_stored(run_id, runs, facts),
            _chain_of(run_id, len(facts), last),
            read_new_budget(run_id, runs[0][-2]),
            runs[0][-1] or "",
            decided,
        )

    async def load_since(
        self, run_id: str, seen: int, *, now: float
    ) -> tuple[RunRecord, bool, tuple[Fact, ...]]:
        """Read a run, whether it `continues`, and its facts after the first ``seen``."""
        values = {**times(now), "run_id": run_id, "seen": seen}
        statement = _RUN_AND_DUE.format(now=self.database.now)
        rows, facts = await self.database.transact(
            (statement, values), (_JOURNAL, values)
        )
        record = _read_run(run_id, [row[:-2] for row in rows])
        return record, bool(rows[0][-2]), read_facts(run_id, facts, first=seen)

    async def record_and_due(
        self, run_id: str, *, now: float
    ) -> tuple[RunRecord, bool, bool, float | None]:
        """Read a run's row, whether it `continues`, whether all runs are held, and the seconds until ``wake_at``."""
        statement = _RUN_AND_DUE.format(now=self.database.now)
        rows, held = await self.database.transact(
            (statement, {**times(now), "run_id": run_id}), (f"SELECT {_HELD}", {})
        )
        record = _read_run(run_id, [row[:-2] for row in rows])
        continues, seconds = rows[0][-2:]
        late = None if seconds is None else max(0.0, seconds)
        return record, bool(continues), bool(held[0][0]), late

    async def load_facts(self, run_id: str, seen: int) -> tuple[Fact, ...]:
        """Read a run's facts after the first ``seen``."""
        return read_facts(
            run_id, await self._rows(_JOURNAL, run_id=run_id, seen=seen), first=seen
        )

    async def runs(
        self,
        *,
        now: float,
        status: Statuses = None,
        limit: int = 50,
        offset: int = 0,
        **filters: Unpack[RunFilters],
    ) -> list[RunRecord]:
        """List runs with what they wait for, the last updated first; a damaged row is skipped and logged."""
        where, values = where_clause(status, filters)
        rows = await self._rows(
            PAGE.format(where=where), **values, **_page(limit, offset), now=now
        )
        by_name = {row[0]: row[:-2] for row in rows}
        records = _read_runs([*by_name.values()])
        waiting = [(row[0], *row[-2:]) for row in rows if row[-2] is not None]
        owners = {
            record.owner
            for record in records
            if record.unfinished and record.owner is not None
        }
        seen = {owner: await self._last_seen(owner, now) for owner in owners}
        return with_waits(
            records, waiting, {owner: at for owner, at in seen.items() if at < now}, now
        )

    async def count_runs(
        self, *, status: Statuses = None, **filters: Unpack[RunFilters]
    ) -> int:
        """Count the runs that filters let pass."""
        where, values = where_clause(status, filters)
        return await self._number(
            f"SELECT COUNT(*) FROM planner_runs {where}", **values
        )

    async def find(
        self, *, status: Statuses = None, **filters: Unpack[RunFilters]
    ) -> AsyncGenerator[str]:
        """Name the runs that filters let pass, each once, whatever changes meanwhile."""
        where, values = where_clause(status, filters)
        statement = f"""
            SELECT run_id FROM planner_runs {where} {"AND" if where else "WHERE"} run_id > :last
            ORDER BY run_id LIMIT :limit
        """
        last = ""
        while rows := await self._rows(statement, **values, last=last, limit=_PAGE):
            for (run_id,) in rows:
                yield run_id
            last = rows[-1][0]

    async def stats(self, now: float) -> RunStats:
        """Read the numbers of the store, from indexes."""
        statuses, retrying, oldest, held = await self.database.transact(
            ("SELECT status, COUNT(*) FROM planner_runs GROUP BY status", {}),
            (
                "SELECT COUNT(*) FROM planner_runs WHERE status = 'running' AND wake_at IS NOT NULL",
                {},
            ),
            (
                f"SELECT asked_at FROM planner_approvals WHERE {OPEN} ORDER BY asked_at LIMIT 1",
                {"now": now},
            ),
            (GET_HOLD, {}),
        )
        counts = dict[str, int](statuses)
        return RunStats(
            total=sum(counts.values()),
            by_status={status: counts.get(status, 0) for status in STATUSES},
            retrying=retrying[0][0],
            oldest_approval_seconds=now - oldest[0][0] if oldest else None,
            hold=read_hold(held),
        )

    async def marks(self, now: float) -> StoreMarks:
        """Read what changes with the store, from indexes."""
        waiting, runs, held = await self.database.transact(
            (
                f"SELECT {_WAITING_MARK} FROM planner_approvals WHERE {OPEN}",
                {"now": now},
            ),
            ("SELECT MAX(updated_at) FROM planner_runs", {}),
            (GET_HOLD, {}),
        )
        of_hold = tuple(one for row in held for one in row)
        return StoreMarks(
            number=waiting[0][0],
            waiting=_mark((*waiting[0], *of_hold)),
            runs=_mark((*runs[0], *of_hold)),
            hold=read_hold(held),
        )

    async def look(self, now: float, me: str, *, skip: Collection[str]) -> Look:
        """Look for due runs without an owner, and for the owners."""
        values = {**times(now), "skip": _listed(skip)}
        look = _LOOK.format(now=self.database.now)
        found, owners = await self.database.transact(
            (look, values), (self._owners(), {"me": me})
        )
        has_free, has_expired, has_died = map(bool, found[0])
        return Look(
            has_free=has_free,
            has_expired=has_expired,
            has_died=has_died,
            owners=_read_owners(owners),
        )

    async def owners(self, me: str) -> list[RunOwner]:
        """List the owners of runs, and the worker that asks."""
        return _read_owners(await self._rows(self._owners(), me=me))

    async def claim_free(
        self,
        now: float,
        me: str,
        *,
        skip: Collection[str],
        limit: int,
        expired: bool = False,
    ) -> list[str]:
        """Own due runs without an owner or a death, the first of their order; return their names.

        Either those in which a question has ``expired``, or the others. A damaged row
        is left out, and gets the owner, so that it is not claimed again.
        """
        claim = _CLAIM_EXPIRED if expired else _CLAIM_BEGUN
        database = self.database
        statement = claim.format(now=database.now, skip_locked=database.skip_locked)
        rows = await self._rows(
            statement, **times(now), me=me, skip=_listed(skip), limit=limit
        )
        return [record.run_id for record in _read_runs(rows)]

    async def unfinished(self, names: Collection[str]) -> set[str]:
        """Return which of these runs have not ended."""
        listed = _LISTED.format(names="names", column="run_id")
        statuses = ", ".join(map(repr, UNFINISHED))
        statement = (
            f"SELECT run_id FROM planner_runs WHERE status IN ({statuses}) AND {listed}"
        )
        rows = await self._rows(statement, names=_listed(names))
        return {run_id for (run_id,) in rows}

    async def due(
        self, now: float, dead: Collection[str], *, again_after: float | None = None
    ) -> AsyncGenerator[RunRecord]:
        """Read due runs in the order in which they are taken, as far as they are needed.

        Args:
            now: Seconds since the epoch.
            dead: The dead owners of runs.
            again_after: None reads their runs, and those without an owner that have a
                death. A number reads all without an owner, too, except those that
                `tell` named within so many seconds.
        """
        which = f"(owner IS NULL AND deaths > 0 OR {_DEAD})"
        if again_after is not None:
            which = f"(owner IS NULL OR {_DEAD}) AND {_UNTOLD}"
        due = due_runs(which).format(now=self.database.now)
        statement = f"{_RUN} WHERE run_id IN (SELECT run_id FROM ({due}) AS due) {_ORDER} LIMIT :limit OFFSET :offset"
        values = {
            **times(now),
            "dead": _listed(dead),
            "again_after": again_after,
        }
        read = 0
        while rows := await self._rows(statement, **values, limit=_PAGE, offset=read):
            for record in _read_runs(rows):
                yield record
            read += len(rows)

    async def tell(
        self, records: Sequence[RunRecord], *, again_after: float
    ) -> tuple[str, ...]:
        """Note that runs are named to a caller; return those that no other one was named."""
        statement = _TELL.format(
            now=self.database.now, skip_locked=self.database.skip_locked
        )
        among = [
            {"run_id": one.run_id, "seen": one.owner or "", "again_after": again_after}
            for one in records
        ]
        told = await self.database.transact(*((statement, values) for values in among))
        return tuple(run_id for rows in told for (run_id,) in rows)

    async def continues(self, run_id: str, now: float) -> bool:
        """Whether a run is driven or due."""
        statement = f"SELECT {_CONTINUES} FROM planner_runs WHERE run_id = :run_id"
        rows = await self._rows(statement, run_id=run_id, now=now)
        if not rows:
            raise _unknown(run_id)
        return bool(rows[0][0])

    async def set_budget(self, run_id: str, text: str | None) -> bool:
        """Store a new budget, or remove it; False if the run has ended."""
        statement = f"""
            UPDATE planner_runs SET new_budget = :text
            WHERE run_id = :run_id AND status NOT IN ({", ".join(map(repr, ENDS))}) RETURNING run_id
        """
        return bool(await self._rows(statement, run_id=run_id, text=text))

    async def say(self, run_id: str, line: str, *, tag: str | None = None) -> bool:
        """Store what was said to a run, after what was said before; False if the run has ended, or has the tag."""
        statement = f"""
            UPDATE planner_runs
            SET said = COALESCE(said, '') || CAST(:line AS TEXT),
                tags = NULLIF(COALESCE(tags, '') || CAST(:tag AS TEXT), '')
            WHERE run_id = :run_id AND status NOT IN ({", ".join(map(repr, ENDS))})
                  AND REPLACE(COALESCE(tags, ''), CAST(:tag AS TEXT), '') = COALESCE(tags, '')
            RETURNING run_id
        """
        tags = "" if tag is None else joined([tag])
        rows = await self._rows(statement, run_id=run_id, line=line, tag=tags)
        return bool(rows)

    async def claim(
        self,
        run_id: str,
        owner: str,
        *,
        seen: str | None,
        beat: float | None = None,
        counts: tuple[int, int] | None = None,
    ) -> bool:
        """Own a run whose owner is still ``seen``, without a beat since ``beat``; store its deaths and progress."""
        statement = f"""
            UPDATE planner_runs
            SET owner = :owner, told_at = NULL, wake_at = CASE WHEN status = 'running' THEN NULL ELSE wake_at END
            WHERE run_id = :run_id AND {_STILL_SEEN} AND {_MAY_DRIVE} RETURNING run_id
        """
        values = {"run_id": run_id, "owner": owner}
        steps = [(statement, {**values, "seen": seen or "", "beat": beat})]
        if counts is not None:
            steps.append(
                (_COUNT, {**values, "deaths": counts[0], "progress": counts[1]})
            )
        return bool((await self.database.transact(*steps))[0])

    async def died_together(self, owner: str, run_id: str) -> bool:
        """Whether a dead owner had other runs whose journals end with the start of a call.

        This is noted in all its runs, as others may take them one after the other.
        """
        note = """
            UPDATE planner_runs SET died_together = :owner
            WHERE owner = :owner AND COALESCE(died_together, '') <> :owner AND EXISTS (
                SELECT 1 FROM planner_runs AS other WHERE owner = :owner AND run_id <> :run_id AND (
                    SELECT fact FROM planner_journal WHERE run_id = other.run_id ORDER BY seq DESC LIMIT 1
                ) LIKE :started
            )
        """
        noted = "SELECT died_together FROM planner_runs WHERE run_id = :run_id"
        values = {"owner": owner, "run_id": run_id}
        _, rows = await self.database.transact(
            (note, {**values, "started": _STARTED}), (noted, values)
        )
        return [*rows] == [(owner,)]

    async def release(self, run_id: str, owner: str) -> None:
        """Clear a run's owner, if it is still this one."""
        values = {"run_id": run_id, "owner": owner}
        statement = "UPDATE planner_runs SET owner = NULL WHERE run_id = :run_id AND owner = :owner"
        await self.database.transact(
            (_REST, {**values, "paused": _PAUSED}), (statement, values)
        )

    async def counts(self, run_id: str, progress: int) -> tuple[int, int]:
        """Read the faults and deaths that were counted at this progress."""
        statement = "SELECT retries, deaths FROM planner_runs WHERE run_id = :run_id AND progress = :progress"
        rows = await self._rows(statement, run_id=run_id, progress=progress)
        return rows[0] if rows else (0, 0)

    async def park(
        self,
        run_id: str,
        *,
        seen: str | None,
        status: str,
        problem: str,
        at: float,
        delay: float | None = None,
        beat: float | None = None,
        waits: bool = False,
        **values: Value,
    ) -> bool:
        """Release an unfinished run until its retry or resumption; False if its owner changed, as `claim` does.

        Args:
            run_id: Its name.
            seen: As in `claim`.
            status: Its new status.
            problem: Why.
            at: Seconds since the epoch, by this process's clock.
            delay: Seconds until it is due, by the store's clock.
            beat: As in `claim`.
            waits: Whether it waits for its endpoint; since when is by the store's clock.
            values: Of further columns.
        """
        now = STORE_NOW.format(now=self.database.now)
        due = LATER.format(now=self.database.now)
        statement = f"""
            UPDATE planner_runs
            SET owner = NULL, status = :status, wake_at = {due}, problem = :problem, retries = :retries,
                attempts = :attempts, deaths = :deaths, progress = :progress, updated_at = :at,
                outage_at = CASE WHEN CAST(:waits AS INTEGER) = 1 THEN COALESCE(outage_at, {now}) END
            WHERE run_id = :run_id AND {_STILL_SEEN} AND status IN ('queued', 'running', 'paused')
            RETURNING run_id
        """
        values = {
            **values,
            **times(at),
            "run_id": run_id,
            "seen": seen or "",
            "beat": beat,
            "status": status,
            "at": at,
            "delay": delay,
            "waits": int(waits),
        }
        values["problem"] = json.dumps(problem)
        told = (
            []
            if status == "running"
            else [notice_step(run_id, status, at=at, problem=problem)]
        )
        rows = await self.database.transact((statement, values), *told)
        return bool(rows[0])

    async def revive(
        self, run_id: str, *, at: float, budget: str | None = None
    ) -> bool:
        """Set a failed or quarantined run to running, and count that; with a new budget also one that has ended.

        False if it has another status, or was answered.
        """
        chosen = """
            WHERE run_id = :run_id AND (status IN ('failed', 'quarantined') OR CAST(:budget AS TEXT) IS NOT NULL
                                        AND status IN ('incomplete', 'limit_reached', 'stopped'))
        """
        note = f"""
            INSERT INTO planner_settings (name, value) SELECT 'retried', '1' FROM planner_runs {chosen}
            ON CONFLICT (name) DO UPDATE SET value = CAST(CAST(planner_settings.value AS INTEGER) + 1 AS TEXT)
        """
        revive = f"""
            UPDATE planner_runs
            SET status = 'running', wake_at = NULL, outage_at = NULL, problem = NULL, retries = 0, deaths = 0,
                new_budget = COALESCE(:budget, new_budget), updated_at = :at
            {chosen} RETURNING run_id
        """
        values = {"run_id": run_id, "at": at, "budget": budget}
        _, rows = await self.database.transact((note, values), (revive, values))
        return bool(rows)

    async def outage(self, run_id: str, *, now: float) -> tuple[float, int]:
        """Return for how many seconds a run has waited for its endpoint, and how often runs were revived."""
        statement = f"""
            SELECT {STORE_NOW.format(now=self.database.now)} - outage_at,
                (SELECT value FROM planner_settings WHERE name = 'retried')
            FROM planner_runs WHERE run_id = :run_id
        """
        ((waited, revivals),) = await self._rows(
            statement, run_id=run_id, ahead=times(now)["ahead"]
        )
        return waited or 0.0, int(revivals or 0)

    async def last_heartbeat(self, worker_id: str) -> tuple[float, float] | None:
        """Return the seconds since a worker's heartbeat, and its lease; None without a row."""
        statement = f"SELECT {self.database.age}, lease_seconds FROM planner_workers WHERE worker_id = :worker_id"
        rows = await self._rows(statement, worker_id=worker_id)
        return rows[0] if rows else None

    async def release_all(self, owner: str) -> None:
        """Clear a worker as the owner of all runs."""
        await self._rows(
            "UPDATE planner_runs SET owner = NULL WHERE owner = :owner", owner=owner
        )

    async def changed_elsewhere(
        self, owner: str
    ) -> tuple[list[tuple[str, bool, NewBudget | None, str]], bool]:
        """List a worker's runs that were ended, got a new budget, or were said something; whether all are held."""
        statement = f"""
            SELECT run_id, status, new_budget, said FROM planner_runs
            WHERE owner = :owner
                  AND (status IN ({", ".join(map(repr, ENDS))}) OR new_budget IS NOT NULL OR said IS NOT NULL)
        """
        found: list[tuple[str, bool, NewBudget | None, str]] = []
        rows, held = await self.database.transact(
            (statement, {"owner": owner}), (f"SELECT {_HELD}", {})
        )
        for run_id, status, text, said in rows:
            try:
                new = read_new_budget(run_id, text)
                found.append((run_id, status in ENDS, new, said or ""))
            except StoreError as error:
                logger.error("A run does not get another budget: %s", error)
        return found, bool(held[0][0])

    async def hold(self, hold: Hold | None) -> bool:
        """Hold all runs, or release them; False if they are, or are not, held already."""
        if hold is None:
            statement = (
                "DELETE FROM planner_settings WHERE name = 'hold' RETURNING name"
            )
            rows, *_ = await self.database.transact(
                (statement, {}), *self.database.hints
            )
        else:
            statement = """
                INSERT INTO planner_settings (name, value) VALUES ('hold', :value)
                ON CONFLICT DO NOTHING RETURNING name
            """
            rows = await self._rows(statement, value=json.dumps(asdict(hold)))
        return bool(rows)

    async def set_inbox(self, address: str) -> None:
        """Store the address of the inbox."""
        statement = """
            INSERT INTO planner_settings (name, value) VALUES ('inbox', :value)
            ON CONFLICT (name) DO UPDATE SET value = excluded.value
        """
        await self._rows(statement, value=json.dumps(address))

    async def inbox(self) -> str:
        """Read the address of the inbox; "" if there is none."""
        statement = "SELECT value FROM planner_settings WHERE name = 'inbox'"
        rows = await self._rows(statement)
        return json.loads(rows[0][0]) if rows else ""

    async def hooks_of_unfinished(self) -> tuple[str, ...]:
        """Read the names of the ``authorize`` hooks of an unfinished run that has some."""
        statement = f"""
            SELECT run_id, inputs, ({_FIRST_FACT}) FROM planner_runs
            WHERE status IN ('queued', 'running', 'paused') AND ({_IS_GUARDED}) LIMIT 1
        """
        rows = await self._rows(statement, hook=_HOOK)
        return hooks_in(*rows[0]) if rows else ()

    async def approvals(
        self,
        chosen: str,
        now: float,
        *,
        run_id: str | None = None,
        limit: int = 50,
        offset: int = 0,
        **filters: Unpack[CallFilters],
    ) -> Sequence[Row]:
        """List the rows of `OPEN` approvals, the oldest first, or `DECIDED` ones, the latest decision first."""
        where, values = calls_clause(chosen, run_id, filters)
        order = "asked_at, id" if chosen == OPEN else "decided_at DESC, id DESC"
        statement = f"{_APPROVAL} {where} ORDER BY {order} LIMIT :limit OFFSET :offset"
        return await self._rows(statement, **values, now=now, **_page(limit, offset))

    async def count_approvals(
        self,
        chosen: str,
        now: float,
        *,
        run_id: str | None = None,
        **filters: Unpack[CallFilters],
    ) -> int:
        """Count the approvals that `approvals` lists."""
        where, values = calls_clause(chosen, run_id, filters)
        statement = f"SELECT COUNT(*) FROM planner_approvals {where}"
        return await self._number(statement, **values, now=now)

    async def equal_approvals(self, now: float, *, limit: int) -> Mapping[str, int]:
        """Count open approvals by what is asked, the most first, where that are several."""
        statement = f"""
            SELECT question, COUNT(*) FROM planner_approvals WHERE {OPEN}
            GROUP BY question HAVING COUNT(*) > 1 ORDER BY COUNT(*) DESC, question LIMIT :limit
        """
        rows = await self._rows(statement, now=now, limit=limit)
        return dict(rows)

    async def approval(self, key: str) -> tuple[Row | None, Sequence[Row]]:
        """Read the rows of an approval and of its refused decisions."""
        rows, refused = await self.database.transact(
            (f"{_APPROVAL} WHERE id = :id", {"id": key}),
            (f"{_REFUSAL} WHERE id = :id ORDER BY at", {"id": key}),
        )
        return (rows[0] if rows else None), refused

    async def refusals(self, *, run_id: str | None = None) -> Sequence[Row]:
        """List the rows of refused decisions, of one run or of all open approvals."""
        opened = "id IN (SELECT id FROM planner_approvals WHERE status = 'open')"
        chosen = opened if run_id is None else "run_id = :run_id"
        return await self._rows(f"{_REFUSAL} WHERE {chosen} ORDER BY at", run_id=run_id)

    async def refuse(
        self, run_id: str, key: str, decision: str, *, problem: str, at: float
    ) -> None:
        """Store a refused decision, and why."""
        statement = """
            INSERT INTO planner_refusals (run_id, id, decision, problem, at)
            VALUES (:run_id, :id, :decision, :problem, :at)
        """
        await self._rows(
            statement,
            run_id=run_id,
            id=key,
            decision=decision,
            problem=json.dumps(problem),
            at=at,
        )

    async def decide(
        self,
        key: str,
        decision: str | None,
        *then: Step,
        votes: str = "",
        seen: str = "",
        fingerprint: str,
        at: float,
    ) -> bool:
        """Store a decision on an open approval, or votes and the decision that they make, and what follows.

        Args:
            key: The approval's id.
            decision: None where the votes make none.
            *then: Further steps.
            votes: Those that count from now on; "" where one person decides.
            seen: The votes that were counted.
            fingerprint: Of the call that was decided.
            at: When.

        Returns:
            Whether it was stored. False if the approval was decided, has expired, or
                has other votes than were seen.
        """
        is_made = "CAST(:decision AS TEXT) IS NOT NULL"
        statement = f"""
            UPDATE planner_approvals
            SET decision = :decision, votes = COALESCE(NULLIF(CAST(:votes AS TEXT), ''), votes),
                status = CASE WHEN {is_made} THEN 'decided' ELSE status END,
                decided_at = CASE WHEN {is_made} THEN CAST(:at AS DOUBLE PRECISION) END,
                problem = CASE WHEN {is_made} THEN NULL ELSE problem END
            WHERE id = :id AND status = 'open' AND fingerprint = :fingerprint
                  AND (expires_at IS NULL OR expires_at > :at)
                  AND (CAST(:votes AS TEXT) = '' OR COALESCE(votes, '') = :seen)
            RETURNING id
        """
        values = {
            "id": key,
            "decision": decision,
            "votes": votes,
            "seen": seen,
            "fingerprint": fingerprint,
            "at": at,
        }
        rows = await self.database.transact(
            (statement, values), *then, *self.database.hints
        )
        return bool(rows[0])

    async def decisions(self, run_id: str) -> Sequence[Row]:
        """List the rows of a run's untaken decisions."""
        return await self._rows(_DECIDED, run_id=run_id)

    async def reopen(
        self, key: str, problem: str, *, decision: str, grant: str, at: float
    ) -> None:
        """Reopen an approval without votes, and keep the decision as refused: it is no use of its grant."""
        decided = "WHERE id = :id AND status = 'decided'"
        values = {
            "id": key,
            "decision": decision,
            "problem": json.dumps(problem),
            "grant": grant,
            "at": at,
        }
        unused = f"""
            UPDATE planner_grants SET used = used - 1
            WHERE id = :grant AND EXISTS (SELECT 1 FROM planner_approvals {decided})
        """
        keep = f"""
            INSERT INTO planner_refusals (run_id, id, decision, problem, at)
            SELECT run_id, id, :decision, :problem, :at FROM planner_approvals {decided}
        """
        reopen = f"""
            UPDATE planner_approvals
            SET status = 'open', decision = NULL, decided_at = NULL, votes = NULL, problem = :problem
            {decided}
        """
        await self.database.transact((unused, values), (keep, values), (reopen, values))

    async def grants(self, now: float) -> Sequence[Row]:
        """List the rows of the grants that hold: denials first, then the oldest."""
        return await self._rows(_GRANTS.format(which=GRANT_HOLDS), at=now)

    async def grant(self, grant: str, now: float) -> Sequence[Row]:
        """Read the row of a grant that was not revoked, also if it is used up: a refused use is given back."""
        which = f"id = :grant AND {_GRANT_MAY_HOLD}"
        statement = _GRANTS.format(which=which)
        return await self._rows(statement, grant=grant, at=now)

    async def revoke(self, grant: str, by: str, *, at: float) -> None:
        """Revoke a grant."""
        statement = """
            UPDATE planner_grants SET revoked_at = :at, revoked_by = :by
            WHERE id = :grant AND revoked_at IS NULL
        """
        await self._rows(statement, grant=grant, by=json.dumps(by), at=at)

    async def delete(self, run_id: str, *, paused: bool = False) -> None:
        """Delete a run that has ended, failed or is in quarantine, or also a paused one.

        Raises:
            RunConflictError: If the run is unfinished, or a living worker drives it.
        """
        statuses = (*AT_REST, "paused") if paused else AT_REST
        listed = ", ".join(f"'{status}'" for status in statuses)
        chosen = f"run_id = :run_id AND status IN ({listed}) AND {_IDLE}"
        if await self._take_out([run_id], chosen, _TAKE_RUNS, run_id=run_id):
            return
        record = await self.record(run_id)
        if record.status in statuses:
            problem = f"the worker {record.owner!r} drives it. Wait until it has ended"
        elif record.status == "paused":
            problem = "it is paused, and what waits in it would be lost. Cancel it first, or force it"
        else:
            problem = f"it is {record.status}. Cancel it first"
        raise RunConflictError(f"Run {run_id!r} cannot be deleted: {problem}.")

    async def delete_ended(self, names: Sequence[str]) -> int:
        """Delete those of the named runs that only a `resume` continues; return their number."""
        chosen = f"status IN ({', '.join(map(repr, AT_REST))}) AND {_IDLE}"
        deleted = 0
        for first in range(0, len(names), _BATCH):
            some = names[first : first + _BATCH]
            deleted += await self._take_out(some, chosen, _TAKE_RUNS)
        return deleted

    async def prune(self, *, status: str, before: float, dry_run: bool = False) -> int:
        """Delete, or only count, the runs with a status that were last updated before a time; return their number."""
        if status not in AT_REST:
            raise StoreError(
                f"Runs that are {status!r} are not deleted. Give one of: {', '.join(AT_REST)}."
            )
        values = {"status": status, "before": before}
        if dry_run:
            old = _OLD.format(age=self.database.age)
            return await self._number(
                f"SELECT COUNT(*) FROM planner_runs WHERE {old}", **values
            )
        deleted = 0
        while batch := await self.prune_batch(status=status, before=before):
            deleted += batch[0]
        return deleted

    async def prune_batch(
        self,
        *,
        status: str,
        before: float,
        after: float = 0.0,
        only_texts: bool = False,
    ) -> tuple[int, float] | None:
        """Delete the oldest runs of one transaction, or take their texts.

        A run without its texts keeps its row, and of its journal the links; reading it
        is an error.

        Args:
            status: Theirs.
            before: When they were last updated, at the latest.
            after: When they were last updated, at the earliest.
            only_texts: Whether their rows stay.

        Returns:
            Their number, and when the last one was updated; None if there is none.
        """
        has_texts = f"AND {_HAS_TEXTS}" if only_texts else ""
        statement = f"""
            SELECT run_id, updated_at FROM planner_runs
            WHERE {_OLD} AND updated_at >= :after {has_texts} ORDER BY updated_at LIMIT :batch
        """.format(age=self.database.age)
        values = {"status": status, "before": before}
        rows = await self._rows(statement, **values, after=after, batch=_BATCH)
        if not rows:
            return None
        names = [run_id for run_id, _ in rows]
        take = _TAKE_TEXTS if only_texts else _TAKE_RUNS
        number = await self._take_out(names, _OLD, take, **values)
        return number, rows[-1][1]

    async def prunable(
        self, *, status: str, before: float, only_guarded: bool
    ) -> AsyncGenerator[tuple[str, tuple[str, ...]]]:
        """List what `prune` would delete, with its `hooks`; optionally only what has some."""
        old = _OLD.format(age=self.database.age)
        guarded = f"AND ({_IS_GUARDED})" if only_guarded else ""
        statement = f"""
            SELECT run_id, inputs, ({_FIRST_FACT}) FROM planner_runs
            WHERE {old} AND run_id > :last {guarded} ORDER BY run_id LIMIT :limit
        """
        values = {
            "status": status,
            "before": before,
            "hook": _HOOK,
            "limit": _PAGE,
        }
        last = ""
        while rows := await self._rows(statement, **values, last=last):
            for row in rows:
                names = hooks_in(*row)
                if names or not only_guarded:
                    yield row[0], names
            last = rows[-1][0]

    async def close(self) -> None:
        """Close the database."""
        await self.database.close()

    async def _take_out(
        self, names: Sequence[str], chosen: str, take: Sequence[str], **values: Value
    ) -> int:
        """Take those of the named runs out that a condition chooses; a unique owner locks their rows first."""
        owner = {"owner": f"deleted/{uuid.uuid4().hex}"}
        chosen = chosen.format(age=self.database.age)
        named = {
            f"name_{chr(ord('a') + place)}": name for place, name in enumerate(names)
        }
        placeholders = ", ".join(f":{one}" for one in named)
        lock = (
            f"UPDATE planner_runs SET owner = :owner WHERE run_id IN ({placeholders}) AND {chosen}",
            {**values, **owner, **named},
        )
        kept = [
            (
                _KEEP_DIGEST.format(now=self.database.now),
                {**owner, "run_id": name, "digest": run_digest(name)},
            )
            for name in names
            if take is _TAKE_RUNS
        ]
        *_, runs = await self.database.transact(
            lock, *kept, *((statement, owner) for statement in take)
        )
        return len(runs)

    async def _last_seen(self, worker_id: str, now: float) -> float:
        """Return when a worker was last seen: ``now`` if it lives, 0.0 if that is not known."""
        heartbeat = await self.last_heartbeat(worker_id)
        if heartbeat is None:
            return 0.0
        age, lease = heartbeat
        lives = age <= lease and await self.database.holds_lock(worker_id)
        return now if lives else now - max(age, 1.0)

    def _owners(self) -> str:
        return _OWNERS.format(is_locked=self.database.is_locked)

    async def _rows(self, statement: str, **values: Value) -> Sequence[Row]:
        return (await self.database.transact((statement, values)))[0]

    async def _number(self, statement: str, **values: Value) -> int:
        ((number,),) = await self._rows(statement, **values)
        return number


def notice_step(
    run_id: str, status: str, *, at: float, problem: str = "", head: str = ""
) -> Step:
    """Return the step that adds a notice of a run's new status, if a worker subscribed."""
    told = {"status": status, "problem": problem, "head": head}
    body = json.dumps(told, separators=(",", ":"))
    values = {
        "id": uuid.uuid4().hex,
        "run_id": run_id,
        "status": status,
        "event": _EVENT_OF.get(status, "ended"),
        "body": body,
        "at": at,
    }
    return ADD_NOTICE, values


def _listed(names: Collection[str]) -> str:
    """Join names, which have no line breaks, to one value of a statement."""
    return "".join(f"\n{name}\n" for name in names)


def _read_owners(rows: Sequence[Row]) -> list[RunOwner]:
    return [
        RunOwner(
            worker_id=owner,
            is_locked=bool(is_locked),
            seen_at=seen_at,
            lease=lease or 0.0,
        )
        for owner, is_locked, seen_at, lease in rows
    ]


def _mark(row: Row) -> str:
    return "/".join(map(repr, row))


def _page(limit: int, offset: int) -> dict[str, int]:
    page = {"limit": limit, "offset": offset}
    for name, value in page.items():
        if not is_count(value, least=0) or value >= 2**63:
            raise StoreError(
                f"{name} must be a whole number, 0 or more; got {value!r}."
            )
    return page


def _read_runs(rows: Sequence[Row]) -> list[RunRecord]:
    """Read the rows of runs; a damaged row does not hide the others."""
    found: list[RunRecord] = []
    for row in rows:
        try:
            found.append(RunRecord.from_row(row))
        except StoreError as error:
            logger.error("A run is skipped: %s", error)
    return found


def _read_run(run_id: str, rows: Sequence[Row]) -> RunRecord:
    if not rows:
        raise _unknown(run_id)
    return RunRecord.from_row(rows[0])


def _read_stored(run_id: str, runs: Sequence[Row], facts: Sequence[Row]) -> StoredRun:
    record = _read_run(run_id, [row[:-3] for row in runs])
    return StoredRun(
        record=record,
        facts=read_facts(run_id, facts),
        inputs=read_inputs(run_id, runs[0][-3]),
        said=read_said(run_id, runs[0][-1]),
    )


def _unknown(run_id: str) -> UnknownRunError:
    return UnknownRunError(
        f"There is no run {run_id!r} in this store. List them to see their names."
    )


def _chain_of(run_id: str, number: int, last: Sequence[Row]) -> Chain | None:
    """Read the answer to `_LAST_LINK` as the chain of so many facts; None if there are others by now."""
    if not last:
        return Chain.begin(run_id)
    ((seq, link, salt),) = last
    run = run_digest(run_id)
    chain = Chain(run=run, number=number, link=link, salt=salt)
    return chain if seq == number - 1 else None
