"""What the tests of the stores share: a PostgreSQL for the session, and an empty database for each test."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from support.postgres import PostgresServer

END_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
"""
FILLED = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'planner_schema'"


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """Make an empty database."""
    return postgres.create(f"runs_{uuid4().hex}")


@pytest.fixture(scope="session")
def shared_url(postgres: PostgresServer) -> str:
    """Make a database for the tests that leave nothing behind but rows: emptying it is cheaper than a new one."""
    return postgres.create("shared")


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
        tables = [f'"{table}"' for (table,) in admin.execute(FILLED).fetchall()]
        if tables:
            admin.execute(f"TRUNCATE {', '.join(tables)} CASCADE".encode())
