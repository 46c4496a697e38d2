"""Where the budgets of a test are kept: in memory, in a file, in PostgreSQL."""

from collections.abc import AsyncGenerator
from pathlib import Path
from uuid import uuid4

import pytest

from planner_ext.budgets import BudgetStore
from support.budgets import opened
from support.postgres import PostgresServer


@pytest.fixture
async def memory() -> AsyncGenerator[BudgetStore]:
    """Keep budgets in this process."""
    async with BudgetStore.memory() as store:
        yield store


@pytest.fixture(params=["sqlite", "postgresql"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Name a store that processes can share."""
    if request.param == "sqlite":
        return str(tmp_path / "runs.db")
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create(f"budgets_{uuid4().hex}")


@pytest.fixture(params=["memory", "sqlite", "postgresql"])
async def store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncGenerator[BudgetStore]:
    """Open each kind of store."""
    if request.param == "memory":
        where = None
    elif request.param == "sqlite":
        where = str(tmp_path / "runs.db")
    else:
        server: PostgresServer = request.getfixturevalue("postgres")
        where = server.create(f"budgets_{uuid4().hex}")
    async with opened(where) as found:
        yield found
