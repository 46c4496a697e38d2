"""The port of the databases that hold runs, and their tables.

``planner_journal`` is the source of truth: a row is one fact, and its unique ``(run_id,
seq)`` fences workers. ``planner_runs`` and ``planner_approvals`` are derived from it,
in the same transaction. Only decisions and votes enter ``planner_approvals`` first,
until a worker takes them into the journal.

Statements use the SQL that SQLite (from 3.35) and PostgreSQL have in common, with
``:name`` placeholders.
"""

import logging
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from pydantic import TypeAdapter

from planner_ext.core.errors import NewerSchemaError
from planner_ext.core.values import frozen
from planner_ext.durable.errors import StoreError, without_passwords
from planner_ext.engine.log import escaped

logger = logging.getLogger(__name__)

_LOGGED_SECONDS = 1.0
"""Waits that are shorter are not logged."""
_LEAVE_SECONDS = 5.0

Value: TypeAlias = str | int | float | None
"""The value of a column."""

Row: TypeAlias = tuple[Any, ...]
"""One row of an answer: a plain tuple of values, in the order of the statement's columns."""

_T = TypeVar("_T")


def read_values(kind: type[_T], values: object) -> _T:
    """Make a record of values as rows and JSON have them, or raise; a moment is in seconds since the epoch."""
    return adapter(kind).validate_python(values)


@cache
def adapter(kind: type[Any]) -> TypeAdapter[Any]:
    """Return what reads and writes values of a class."""
    return TypeAdapter(kind)


Step: TypeAlias = tuple[str, Mapping[str, Value]]
"""One statement, and the values of its placeholders."""


Execute: TypeAlias = Callable[[str, Mapping[str, Value]], Sequence[Row]]
"""Performs one statement in a separate transaction, and returns its rows; blocks its
thread."""


class Waits:
    """The transactions that wait while their database takes none: it restarts, is read-only, full or locked.

    Attributes:
        patience: Seconds for which each waits until its error is raised. A worker's is
            `planner_ext.durable.RetryPolicy.outage_seconds`.

    Args:
        patience: See above.
        url: The database's address, whose password is not logged.
    """

    def __init__(self, patience: float, url: str = "") -> None:
        self.patience = patience
        self._url = url
        self._ends = math.inf
        self._since: dict[object, float] = {}
        self._is_logged = False

    @property
    def seconds(self) -> float:
        """For how long the first of them has waited; 0.0 if none does."""
        since = tuple(self._since.values())
        if since:
            return time.monotonic() - min(since)
        return 0.0

    def leave(self) -> None:
        """Let them wait for seconds at most from now on: the process ends."""
        self._ends = min(self._ends, time.monotonic() + _LEAVE_SECONDS)

    @contextmanager
    def transaction(self) -> Generator[Callable[[Exception], bool]]:
        """Yield what says, after a fault that may pass, whether to try the transaction again."""
        key = object()

        def waits(error: Exception) -> bool:
            now = time.monotonic()
            waited = now - self._since.setdefault(key, now)
            if waited >= _LOGGED_SECONDS and not self._is_logged:
                self._is_logged = True
                problem = without_passwords(escaped(error), self._url)
                logger.warning("The store cannot be used, its work waits: %s", problem)
            return waited < self.patience and now < self._ends

        try:
            yield waits
        finally:
            self._since.pop(key, None)
            if self._is_logged and not self._since:
                self._is_logged = False
                logger.warning("The store can be used again, or its work gave up.")


class Database(Protocol):
    """A database that holds runs.

    Attributes:
        waits: Its transactions that wait.
        now: SQL of the database's time, in seconds since the epoch.
        age: SQL of the seconds since a worker's row was seen; time without a server
            does not count.
        is_locked: SQL of whether the worker ``owner`` holds its lock; true where only
            `planner_ext.durable.heartbeat.WorkerLocks` knows.
        skip_locked: SQL that ends a SELECT of rows that are to be changed.
        hints: The steps that tell waiting workers that a run may be due.
    """

    waits: Waits
    now: ClassVar[str]
    age: ClassVar[str]
    is_locked: ClassVar[str]
    skip_locked: ClassVar[str]
    hints: ClassVar[Sequence[Step]]

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in one transaction: all of them, durably, or none; return the rows of each.

        Raises:
            DuplicateRowError: If a key exists.
            StoreError: If the database cannot be used, for longer than it `waits`; says
                the way out.
        """
        ...

    async def backup(self, path: Path) -> None:
        """Write a copy into a new file while workers write; raise `StoreError` if this is impossible."""
        ...

    async def scrub(self) -> None:
        """Rewrite the files without what was deleted; its writers wait meanwhile."""
        ...

    def connection(self, *, timeout: float) -> AbstractContextManager[Execute]:
        """Open a connection for another thread; its commits do not wait for the disk.

        Args:
            timeout: Seconds after which a server that does not answer counts as lost.
        """
        ...

    async def holds_lock(self, worker_id: str) -> bool:
        """Whether a process holds a worker's lock."""
        ...

    async def close(self) -> None:
        """Close the database; transactions that were awaited have completed."""
        ...


BUDGET_TABLES = (
    """
    CREATE TABLE planner_budgets (
        budget TEXT NOT NULL,
        key TEXT NOT NULL,
        period TEXT NOT NULL,
        until DOUBLE PRECISION,
        limits TEXT NOT NULL,
        iterations BIGINT NOT NULL DEFAULT 0,
        tool_calls BIGINT NOT NULL DEFAULT 0,
        tokens BIGINT NOT NULL DEFAULT 0,
        cost DOUBLE PRECISION NOT NULL DEFAULT 0,
        reached TEXT,
        stamp TEXT,
        updated_at DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (budget, key, period)
    )
    """,
    """
    CREATE TABLE planner_budget_runs (
        run TEXT NOT NULL,
        budget TEXT NOT NULL,
        key TEXT NOT NULL,
        activation BIGINT NOT NULL,
        period TEXT NOT NULL,
        iterations BIGINT NOT NULL,
        tool_calls BIGINT NOT NULL,
        tokens BIGINT NOT NULL,
        cost DOUBLE PRECISION NOT NULL,
        kept INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (run, budget, key)
    )
    """,
    """
    CREATE TABLE planner_settings (
        name TEXT PRIMARY KEY,
        value TEXT NOT NULL
    )
    """,
)
"""The tables of `planner_ext.budgets`, which says what they hold, and the settings."""

CREATE_TABLES: tuple[str, ...] = (
    """
    CREATE TABLE planner_schema (
        schema INTEGER PRIMARY KEY,
        reader INTEGER
    )
    """,
    """
    CREATE TABLE planner_runs (
        run_id TEXT PRIMARY KEY,
        goal TEXT NOT NULL,
        status TEXT NOT NULL,
        priority INTEGER NOT NULL DEFAULT 0,
        owner TEXT,
        wake_at DOUBLE PRECISION,
        outage_at DOUBLE PRECISION,
        told_at DOUBLE PRECISION,
        created_at DOUBLE PRECISION NOT NULL,
        updated_at DOUBLE PRECISION NOT NULL,
        problem TEXT,
        retries INTEGER NOT NULL DEFAULT 0,
        attempts INTEGER NOT NULL DEFAULT 0,
        deaths INTEGER NOT NULL DEFAULT 0,
        died_together TEXT,
        progress INTEGER NOT NULL DEFAULT 0,
        iterations INTEGER NOT NULL DEFAULT 0,
        tool_calls INTEGER NOT NULL DEFAULT 0,
        tokens INTEGER NOT NULL DEFAULT 0,
        cost DOUBLE PRECISION,
        inputs TEXT,
        new_budget TEXT,
        said TEXT,
        tags TEXT
    )
    """,
    """
    CREATE TABLE planner_journal (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        seq INTEGER NOT NULL,
        schema INTEGER NOT NULL,
        fact TEXT NOT NULL,
        link TEXT,
        salt TEXT,
        PRIMARY KEY (run_id, seq)
    )
    """,
    """
    CREATE TABLE planner_approvals (
        id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        status TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        call TEXT NOT NULL,
        asked_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION,
        decision TEXT,
        decided_at DOUBLE PRECISION,
        problem TEXT,
        votes TEXT,
        function TEXT,
        roles TEXT,
        question TEXT
    )
    """,
    """
    CREATE TABLE planner_refusals (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        id TEXT NOT NULL,
        decision TEXT NOT NULL,
        problem TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL
    )
    """,
    """
    CREATE TABLE planner_workers (
        worker_id TEXT PRIMARY KEY,
        name TEXT NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        status TEXT NOT NULL,
        concurrency INTEGER,
        started_at DOUBLE PRECISION NOT NULL,
        seen_at DOUBLE PRECISION NOT NULL,
        lease_seconds DOUBLE PRECISION NOT NULL
    )
    """,
    """
    CREATE TABLE planner_notices (
        id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL,
        event TEXT NOT NULL,
        body TEXT NOT NULL,
        created_at DOUBLE PRECISION NOT NULL,
        attempts INTEGER NOT NULL DEFAULT 0,
        next_at DOUBLE PRECISION,
        delivered_at DOUBLE PRECISION,
        problem TEXT
    )
    """,
    """
    CREATE TABLE planner_subscriptions (
        event TEXT PRIMARY KEY,
        until DOUBLE PRECISION NOT NULL
    )
    """,
    """
    CREATE TABLE planner_grants (
        id TEXT PRIMARY KEY,
        question TEXT NOT NULL,
        kind TEXT NOT NULL,
        terms TEXT NOT NULL,
        decision TEXT NOT NULL,
        given_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION NOT NULL,
        uses BIGINT,
        used BIGINT NOT NULL DEFAULT 0,
        used_for TEXT,
        used_at DOUBLE PRECISION,
        revoked_at DOUBLE PRECISION,
        revoked_by TEXT
    )
    """,
    """
    CREATE TABLE planner_deleted (
        digest TEXT PRIMARY KEY,
        status TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL,
        head TEXT
    )
    """,
    *BUDGET_TABLES,
    "CREATE INDEX planner_runs_by_status ON planner_runs (status, wake_at)",
    "CREATE INDEX planner_runs_by_update ON planner_runs (updated_at, run_id)",
    "CREATE INDEX planner_runs_by_status_and_update ON planner_runs (status, updated_at, run_id)",
    "CREATE INDEX planner_runs_by_owner ON planner_runs (owner) WHERE owner IS NOT NULL",
    "CREATE INDEX planner_approvals_by_status ON planner_approvals (status, asked_at, id)",
    "CREATE INDEX planner_approvals_by_run ON planner_approvals (run_id)",
    "CREATE INDEX planner_approvals_by_decision ON planner_approvals (decided_at, id) WHERE decided_at IS NOT NULL",
    "CREATE INDEX planner_refusals_by_run ON planner_refusals (run_id)",
    "CREATE INDEX planner_refusals_by_id ON planner_refusals (id)",
    "CREATE INDEX planner_grants_by_expiry ON planner_grants (expires_at)",
    "CREATE INDEX planner_notices_by_next ON planner_notices (next_at)",
    "CREATE INDEX planner_notices_by_run ON planner_notices (run_id)",
)
"""The statements that create the tables of the first schema.

``planner_schema``: a row for each schema that the tables went through; ``reader`` as in
`Schema`, null for its own number.
``planner_runs.status``: ``queued``, ``running``, ``paused``, ``failed``,
``quarantined``, or how the run ended. ``owner``: the worker that drives it, or null.
``priority``: of due runs a worker takes those with the highest first. ``wake_at``: when
it is next due: the earliest start of a queued run, the first expiry of a paused one, the
next retry of a running one. ``outage_at``: since when it waits for an endpoint, or null. ``problem``:
its last fault, or why it is in quarantine. ``retries``, ``deaths``: faults, and ends of
its worker's process, since its last reply, start of a call, or result; ``progress``:
how far it was when the last one was counted. ``attempts``: how many tries its worker
allows, noted at a fault. ``died_together``: its last owner that died while several of
its runs were in calls, or null.
``inputs``: what `Runs.submit` gave. ``new_budget``: limits that its worker shall take.
``said``: messages that it shall take, a line each, the oldest first; null without one.
``tags``: each between line breaks; null without one.
``told_at``: when `Runs.due` last named the run, by the database's time; null once a
worker has claimed it.

``planner_approvals.status``: ``open``, ``decided`` (a decision waits for a worker) or
``closed``. ``votes``: who approved it so far, and when, where several have to; null
whenever it waits anew. ``function``, ``roles``, ``question``: of ``call``, to choose by;
``roles`` as ``tags``, with those of its escalation; ``question``: digest of what is
asked, equal for equal calls. ``planner_refusals``: decisions that were not taken, of the
approval that ``id`` names, or of a call of the run that did not wait.
``planner_workers.seen_at``: the worker's last heartbeat; after ``lease_seconds``
without one others take its runs.
``planner_notices.next_at``: when a notice is next sent, by the database's time; at
once if nobody has tried it yet; null once it was delivered or given up.
``planner_subscriptions``: the events of which notices are written, ``until`` then.
``planner_grants.question``: digest of the question that ``decision`` answers,
``used`` times so far, the last time for the approval ``used_for``.
``planner_deleted``: the `run_digest` of each deleted run's name, its last status, and
the number and last link of its journal. ``planner_settings``: what holds for the whole store, as JSON: ``hold``, while
no run is driven; ``retried``, how often runs were revived; ``inbox``, the
address of its pages; ``retention``, how long what ended is kept; ``forgotten``, the key
of the digests that stand for forgotten keys of shared budgets.
``planner_journal.fact``: "" once it was forgotten. ``link``, ``salt``: see
`planner_ext.durable.chain`. Times are seconds since the epoch.
"""


@frozen
class Schema:
    """A schema of the tables, as changes to the one before.

    What is only added (a table, an index, a column that may be null) keeps older
    versions working: they name the columns that they read and write.

    Attributes:
        number: Counts from 1.
        reader: Versions that know this schema may use the tables; equal to ``number``
            unless all changes since were only added.
        statements: Make the schema of the one before, in both SQL dialects.
    """

    number: int
    reader: int
    statements: Sequence[str]

    def steps(self) -> Sequence[Step]:
        """Return the steps that make this schema of the one before."""
        note = "INSERT INTO planner_schema (schema, reader) VALUES (:number, :reader)"
        numbers = {"number": self.number, "reader": self.reader}
        return [*((one, {}) for one in self.statements), (note, numbers)]


SCHEMAS: list[Schema] = [Schema(number=1, reader=1, statements=CREATE_TABLES)]
"""All schemas, in their order: a new store goes through all of them at once."""

GET_SCHEMA = "SELECT schema, COALESCE(reader, schema) FROM planner_schema"


def check_schema(database: str, rows: Sequence[Row], *, older: bool = False) -> None:
    """Check the schema of a database's tables.

    Args:
        database: Its name, for an error.
        rows: The answer to `GET_SCHEMA`.
        older: Whether it may be older than the one that this version needs.

    Raises:
        NewerSchemaError: If they need a newer version of this package.
        StoreError: If they are older, or the number is damaged.
    """
    number, reader = read_schema(database, rows)
    known = SCHEMAS[-1].number
    if reader > known:
        raise NewerSchemaError(
            f"{database} has tables of schema {number}, for versions that know {reader}; this version of planner_ext "
            f"knows up to {known}. Use the version that made them, or a newer one."
        )
    if number < known and not older:
        raise StoreError(
            f"{database} has tables of schema {number}; this version of planner_ext needs {known}. Nothing was "
            "changed. See what planner-ext store migrate --dry-run would do; then run it without --dry-run."
        )


def read_schema(database: str, rows: Sequence[Row]) -> tuple[int, int]:
    """Read the answer to `GET_SCHEMA`: the schema, and the lowest that a version must know."""
    numbers = [
        (number, reader)
        for number, reader in rows
        if isinstance(number, int) and isinstance(reader, int)
    ]
    if not numbers or len(numbers) < len(rows):
        raise StoreError(
            f"{database} is damaged: it does not say its schema. Restore it from a backup."
        )
    return max(numbers)
