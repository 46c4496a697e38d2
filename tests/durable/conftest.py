"""What the tests of the stores share: a PostgreSQL for the session, and an empty database for each test."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from postgres_server import PostgresServer


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """Run one server for the session."""
    with PostgresServer() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """Make an empty database."""
    return postgres.create(f"runs_{uuid4().hex}")


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name a store that is not there yet: the path of a SQLite file, and then the URL of a PostgreSQL database."""
    if request.param == "sqlite":
        return str(tmp_path / "runs.db")
    return request.getfixturevalue("postgres_url")
