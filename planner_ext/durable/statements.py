"""The tables and statements of a store, in the SQL that SQLite (from 3.35) and PostgreSQL have in common.

``planner_journal`` is the truth: a row holds one fact as JSON, and ``(run_id, seq)`` is unique, which fences.
``planner_runs`` and ``planner_approvals`` are derived from it, in the same transaction, so that nobody has to read
every journal to find what is unfinished and what waits; only a decision is in ``planner_approvals`` first, until a
worker takes it into the journal. Whatever a model or a person wrote is stored as JSON text: ASCII, without control
characters.

Placeholders are ``:name``; a database that writes them otherwise translates with `translated`.
"""

# ruff: noqa: S608  (what is put into a statement is this module's own list of columns)

import re

__all__ = [
    "ADD_FACT",
    "ADD_REFUSAL",
    "CLAIM_RUN",
    "CLOSE_APPROVAL",
    "CLOSE_UNDECIDED",
    "COUNT_OPEN_APPROVALS",
    "COUNT_OPEN_APPROVALS_OF_RUN",
    "COUNT_RUNS",
    "COUNT_RUNS_BY_STATUS",
    "CREATE_RUN",
    "DECIDE_APPROVAL",
    "DUE_RUNS",
    "GET_APPROVAL",
    "GET_FACTS",
    "GET_RUN",
    "GET_SCHEMA",
    "KEEP_REOPENED",
    "LIST_DECISIONS",
    "LIST_OPEN_APPROVALS",
    "LIST_OPEN_APPROVALS_OF_RUN",
    "LIST_REFUSALS",
    "LIST_REFUSALS_OF_OPEN",
    "LIST_REFUSALS_OF_RUN",
    "LIST_RUNS",
    "LIST_RUNS_BY_STATUS",
    "MOVE_RUN",
    "OPEN_APPROVAL",
    "PUT_SCHEMA",
    "REFUSE_DECIDED",
    "RELEASE_RUN",
    "REOPEN_APPROVAL",
    "TABLES",
    "TABLE_SCHEMA",
    "translated",
]

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
"""What is created where it is not there.

``planner_runs.status``: ``running``, ``paused``, or how the run ended. ``owner``: the worker that drives it, or null.
``wake_at``: when the first question of a paused run expires. ``planner_approvals.status``: ``open``, ``decided``
(a decision waits for a worker) or ``closed``. ``planner_refusals``: decisions that were not taken, of the approval that
``id`` names, or of a call of the run that did not wait; a store of an earlier version gets the table when it is opened.
Times are seconds since the epoch.
"""

GET_SCHEMA = "SELECT MAX(number) FROM planner_schema"
PUT_SCHEMA = "INSERT INTO planner_schema (number) VALUES (:number) ON CONFLICT DO NOTHING"

CREATE_RUN = """
    INSERT INTO planner_runs (run_id, goal, status, owner, created_at, updated_at)
    VALUES (:run_id, :goal, 'running', :owner, :at, :at)
    ON CONFLICT DO NOTHING RETURNING run_id
"""
_RUN = "run_id, goal, status, owner, wake_at, created_at, updated_at"
GET_RUN = f"SELECT {_RUN} FROM planner_runs WHERE run_id = :run_id"
LIST_RUNS = f"SELECT {_RUN} FROM planner_runs ORDER BY updated_at DESC, run_id LIMIT :limit OFFSET :offset"
LIST_RUNS_BY_STATUS = f"""
    SELECT {_RUN} FROM planner_runs WHERE status = :status
    ORDER BY updated_at DESC, run_id LIMIT :limit OFFSET :offset
"""
COUNT_RUNS = "SELECT COUNT(*) FROM planner_runs"
COUNT_RUNS_BY_STATUS = "SELECT COUNT(*) FROM planner_runs WHERE status = :status"
DUE_RUNS = f"""
    SELECT {_RUN} FROM planner_runs WHERE status = 'running'
    UNION SELECT {_RUN} FROM planner_runs WHERE status = 'paused' AND wake_at <= :now
    UNION SELECT {_RUN} FROM planner_runs
          WHERE run_id IN (SELECT run_id FROM planner_approvals WHERE status = 'decided')
    ORDER BY created_at, run_id
"""
CLAIM_RUN = """
    UPDATE planner_runs SET owner = :owner
    WHERE run_id = :run_id AND COALESCE(owner, '') = :seen RETURNING run_id
"""
RELEASE_RUN = "UPDATE planner_runs SET owner = NULL WHERE run_id = :run_id AND owner = :owner"
MOVE_RUN = "UPDATE planner_runs SET status = :status, wake_at = :wake_at, updated_at = :at WHERE run_id = :run_id"

ADD_FACT = """
    INSERT INTO planner_journal (run_id, seq, schema, fact) VALUES (:run_id, :seq, :schema, :fact)
"""
GET_FACTS = "SELECT seq, schema, fact FROM planner_journal WHERE run_id = :run_id ORDER BY seq"

OPEN_APPROVAL = """
    INSERT INTO planner_approvals (id, run_id, status, fingerprint, call, asked_at, expires_at)
    VALUES (:id, :run_id, 'open', :fingerprint, :call, :asked_at, :expires_at)
    ON CONFLICT (id) DO UPDATE
    SET status = 'open', fingerprint = excluded.fingerprint, call = excluded.call, asked_at = excluded.asked_at,
        expires_at = excluded.expires_at, decision = NULL, decided_at = NULL,
        problem = CASE WHEN planner_approvals.status = 'closed' THEN NULL ELSE planner_approvals.problem END
    WHERE planner_approvals.status = 'closed' OR planner_approvals.fingerprint <> excluded.fingerprint
"""
"""Asks a question, or asks it anew: about a call that would now get another value, whatever was decided of the old."""
CLOSE_APPROVAL = """
    UPDATE planner_approvals SET status = 'closed', decision = COALESCE(decision, :decision),
        decided_at = COALESCE(decided_at, :decided_at)
    WHERE id = :id
"""
CLOSE_UNDECIDED = f"{CLOSE_APPROVAL} AND status <> 'decided'"
REFUSE_DECIDED = """
    INSERT INTO planner_approvals (id, run_id, status, fingerprint, call, asked_at)
    SELECT id, run_id, status, fingerprint, call, asked_at FROM planner_approvals WHERE id = :id AND status = 'decided'
"""
"""Fails, as one of a key that is there, where a question was decided; after `CLOSE_UNDECIDED`, which waits for that."""
_APPROVAL = "id, run_id, status, fingerprint, call, asked_at, expires_at, decision, decided_at, problem"
GET_APPROVAL = f"SELECT {_APPROVAL} FROM planner_approvals WHERE id = :id"
_OPEN = "status = 'open' AND (expires_at IS NULL OR expires_at > :now)"
LIST_OPEN_APPROVALS = f"""
    SELECT {_APPROVAL} FROM planner_approvals WHERE {_OPEN} ORDER BY asked_at, id LIMIT :limit OFFSET :offset
"""
LIST_OPEN_APPROVALS_OF_RUN = f"""
    SELECT {_APPROVAL} FROM planner_approvals WHERE run_id = :run_id AND {_OPEN}
    ORDER BY asked_at, id LIMIT :limit OFFSET :offset
"""
COUNT_OPEN_APPROVALS = f"SELECT COUNT(*) FROM planner_approvals WHERE {_OPEN}"
COUNT_OPEN_APPROVALS_OF_RUN = f"SELECT COUNT(*) FROM planner_approvals WHERE run_id = :run_id AND {_OPEN}"
LIST_DECISIONS = f"""
    SELECT {_APPROVAL} FROM planner_approvals WHERE run_id = :run_id AND status = 'decided' ORDER BY decided_at, id
"""
DECIDE_APPROVAL = """
    UPDATE planner_approvals SET status = 'decided', decision = :decision, decided_at = :at, problem = NULL
    WHERE id = :id AND status = 'open' AND fingerprint = :fingerprint AND (expires_at IS NULL OR expires_at > :at)
    RETURNING id
"""
REOPEN_APPROVAL = """
    UPDATE planner_approvals SET status = 'open', decision = NULL, decided_at = NULL, problem = :problem
    WHERE id = :id AND status = 'decided'
"""


ADD_REFUSAL = """
    INSERT INTO planner_refusals (run_id, id, decision, problem, at) VALUES (:run_id, :id, :decision, :problem, :at)
"""
KEEP_REOPENED = """
    INSERT INTO planner_refusals (run_id, id, decision, problem, at)
    SELECT run_id, id, decision, :problem, decided_at FROM planner_approvals WHERE id = :id AND status = 'decided'
"""
_REFUSAL = "id, decision, problem, at"
LIST_REFUSALS = f"SELECT {_REFUSAL} FROM planner_refusals WHERE id = :id ORDER BY at"
LIST_REFUSALS_OF_RUN = f"SELECT {_REFUSAL} FROM planner_refusals WHERE run_id = :run_id ORDER BY at"
LIST_REFUSALS_OF_OPEN = f"""
    SELECT {_REFUSAL} FROM planner_refusals
    WHERE id IN (SELECT id FROM planner_approvals WHERE status = 'open') ORDER BY at
"""


def translated(statement: str) -> str:
    """Write a statement with the placeholders of Python's ``pyformat``: ``%(name)s``."""
    return re.sub(r":([a-z_]+)", r"%(\1)s", statement)
