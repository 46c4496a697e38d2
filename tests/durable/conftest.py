"""What the tests of the stores share: a PostgreSQL for the session, and an empty database for each test."""

from collections.abc import Iterator
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
