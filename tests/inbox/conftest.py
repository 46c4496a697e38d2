"""What the tests of the inbox share: a store in which a call waits."""

import shutil
from pathlib import Path

import pytest
import pytest_asyncio

from support.durable import GOAL, open_runs, world


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def waiting_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store whose run ``a`` waits, which no test opens."""
    folder = tmp_path_factory.mktemp("waiting")
    planner, kernel = world(folder / "effects")
    async with open_runs(folder / "runs.db", poll_seconds=0.01) as runs:
        result = await (await runs.start(planner, kernel, GOAL, run_id="a")).result()
        assert result.status == "paused"
    return folder / "runs.db"


@pytest.fixture
def store(waiting_store: Path, tmp_path: Path) -> str:
    """A store whose run ``a`` waits for a decision on ``a/1/pay``: shop-pay with amount 5."""
    return str(shutil.copy(waiting_store, tmp_path))
