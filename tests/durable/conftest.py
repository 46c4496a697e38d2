"""What the tests of the stores share: a PostgreSQL for the session, and an empty database for each test."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from dbos import DBOS

from planner_ext.durable import dbos
from planner_ext.durable.postgres import DBOS_TABLES
from support.postgres import PostgresServer

END_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
FILLED = f"""
    SELECT schemaname, tablename FROM pg_tables
    WHERE schemaname IN ('public', '{DBOS_TABLES}') AND tablename <> 'planner_schema'
          AND tablename NOT LIKE '%migrations'
"""


@pytest.fixture(autouse=True)
def quick_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for what is due more often, and take a worker that is gone for dead sooner, than where servers restart."""
    monkeypatch.setattr(dbos, "_WATCH_SECONDS", 0.2)
    monkeypatch.setattr(dbos, "_GRACE_SECONDS", 1.0)


@pytest.fixture(scope="session")
def launched(postgres: PostgresServer) -> str:
    """Name a database in which DBOS has made its tables already: a copy is there much sooner."""
    DBOS.migrate(postgres.create("launched"), schema=DBOS_TABLES)
    return "launched"


@pytest.fixture
def postgres_url(postgres: PostgresServer, launched: str) -> str:
    """Make a database without runs."""
    return postgres.create(f"runs_{uuid4().hex}", template=launched)


@pytest.fixture(scope="session")
def shared_url(postgres: PostgresServer, launched: str) -> str:
    """Make a database for the tests that leave nothing behind but rows: emptying it is cheaper than a new one."""
    return postgres.create("shared", template=launched)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Name a store without runs: the path of a SQLite file, and then the URL of a PostgreSQL database."""
    if request.param == "sqlite":
        yield str(tmp_path / "runs.db")
        return
    url = request.getfixturevalue("shared_url")
    yield url
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute(END_SESSIONS)
        tables = [f'"{schema}"."{table}"' for schema, table in admin.execute(FILLED).fetchall()]
        admin.execute(f"TRUNCATE {', '.join(tables)} CASCADE".encode())
