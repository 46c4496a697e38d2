"""What the tests of the stores share: a PostgreSQL for the session, and an empty database for each test."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from dbos import DBOS

from planner_ext.durable.dbos import TABLES
from support.postgres import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Run one server for the session."""
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="session")
def launched(postgres: PostgresServer) -> str:
    """Name a database in which DBOS has made its tables already: a copy is there much sooner."""
    DBOS.migrate(postgres.create("launched"), schema=TABLES)
    return "launched"


@pytest.fixture
def postgres_url(postgres: PostgresServer, launched: str) -> str:
    """Make a database without runs."""
    return postgres.create(f"runs_{uuid4().hex}", template=launched)


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name a store that is not there yet: the path of a SQLite file, and then the URL of a PostgreSQL database."""
    if request.param == "sqlite":
        return str(tmp_path / "runs.db")
    return request.getfixturevalue("postgres_url")
