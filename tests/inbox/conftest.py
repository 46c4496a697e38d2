"""What the tests of the inbox share: a store in which a call waits."""

from pathlib import Path

import pytest

from support.durable import GOAL, open_runs, world


@pytest.fixture
async def store(tmp_path: Path) -> str:
    """A store whose run ``a`` waits for a decision on ``a/1/pay``: shop-pay with amount 5."""
    planner, kernel = world(tmp_path / "effects")
    async with open_runs(tmp_path / "runs.db", poll_seconds=0.01) as runs:
        result = await (await runs.start(planner, kernel, GOAL, run_id="a")).result()
        assert result.status == "paused"
    return str(tmp_path / "runs.db")
