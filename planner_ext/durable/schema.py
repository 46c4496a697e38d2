"""The tables of a store, and the database port: steps in one transaction. The two databases differ in the port alone.

``planner_journal`` is the source of truth: a row holds one fact as JSON, and its unique ``(run_id, seq)`` fences
workers. ``planner_runs`` and ``planner_approvals`` are derived from it, in the same transaction, so that unfinished
runs and open approvals are found without reading every journal. Only a decision enters ``planner_approvals`` first,
until a worker takes it into the journal. Text of a model or a person is stored as JSON: ASCII, without control
characters.

Statements use the SQL that SQLite (from 3.35) and PostgreSQL have in common, with ``:name`` placeholders.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

__all__ = ["GET_SCHEMA", "PUT_SCHEMA", "TABLES", "TABLE_SCHEMA", "Database", "Row", "Step", "Value"]

Value: TypeAlias = str | int | float | None
"""The value of a column."""

Row: TypeAlias = tuple[Value, ...]
"""One row of an answer: a plain tuple in the order of the statement's columns."""

Step: TypeAlias = tuple[str, Mapping[str, Value]]
"""One statement, and the values of its placeholders."""


class Database(Protocol):
    """A database that holds runs."""

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in order in one transaction: all of them, durably, or none.

        Returns:
            The rows of each step; empty for a step that returns no rows.

        Raises:
            DuplicateRowError: If a key exists.
            StoreError: If the database cannot be used; the message has the way out.
        """
        ...

    async def close(self) -> None:
        """Close the database; transactions that were awaited have completed."""
        ...


TABLE_SCHEMA = 1
"""The number of these tables; one line per number. 1: the first."""

TABLES: tuple[str, ...] = (
    """
    CREATE TABLE IF NOT EXISTS planner_schema (
        number INTEGER PRIMARY KEY
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS planner_runs (
        run_id TEXT PRIMARY KEY,
        goal TEXT NOT NULL,
        status TEXT NOT NULL,
        owner TEXT,
        wake_at DOUBLE PRECISION,
        created_at DOUBLE PRECISION NOT NULL,
        updated_at DOUBLE PRECISION NOT NULL
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS planner_journal (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        seq INTEGER NOT NULL,
        schema INTEGER NOT NULL,
        fact TEXT NOT NULL,
        PRIMARY KEY (run_id, seq)
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS planner_approvals (
        id TEXT PRIMARY KEY,
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        status TEXT NOT NULL,
        fingerprint TEXT NOT NULL,
        call TEXT NOT NULL,
        asked_at DOUBLE PRECISION NOT NULL,
        expires_at DOUBLE PRECISION,
        decision TEXT,
        decided_at DOUBLE PRECISION,
        problem TEXT
    )
    """,
    """
    CREATE TABLE IF NOT EXISTS planner_refusals (
        run_id TEXT NOT NULL REFERENCES planner_runs (run_id),
        id TEXT NOT NULL,
        decision TEXT NOT NULL,
        problem TEXT NOT NULL,
        at DOUBLE PRECISION NOT NULL
    )
    """,
    "CREATE INDEX IF NOT EXISTS planner_refusals_by_run ON planner_refusals (run_id)",
    "CREATE INDEX IF NOT EXISTS planner_refusals_by_id ON planner_refusals (id)",
    "CREATE INDEX IF NOT EXISTS planner_runs_by_status ON planner_runs (status, wake_at)",
    "CREATE INDEX IF NOT EXISTS planner_approvals_by_status ON planner_approvals (status, asked_at, id)",
    "CREATE INDEX IF NOT EXISTS planner_approvals_by_run ON planner_approvals (run_id)",
)
"""Created where they do not exist.

``planner_runs.status``: ``running``, ``paused``, or how the run ended. ``owner``: the worker that drives it, or null.
``wake_at``: when the first question of a paused run expires. ``planner_approvals.status``: ``open``, ``decided``
(a decision waits for a worker) or ``closed``. ``planner_refusals``: decisions that were not taken, of the approval that
``id`` names, or of a call of the run that did not wait; a store of an earlier version gets the table when it is opened.
Times are seconds since the epoch.
"""

GET_SCHEMA = "SELECT MAX(number) FROM planner_schema"
PUT_SCHEMA = "INSERT INTO planner_schema (number) VALUES (:number) ON CONFLICT DO NOTHING"
