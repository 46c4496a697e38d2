"""Lists of a store: in parts, with how many there are, and by a status that there is."""

from pathlib import Path
from typing import Any

import pytest

from planner_ext.durable import Approvals, StoreError
from planner_ext.testing import say
from support.durable import GOAL, PAY, open_runs, store_neutral, world


async def test_lists_come_in_parts(store: str, tmp_path: Path) -> None:
    """Limit and offset walk through all of a list once, in its order; a count says how many there are."""
    names = {f"run-{number}" for number in range(7)}
    async with open_runs(store) as runs:
        for name in sorted(names):
            await (await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id=name)).result()
        await (await runs.start(*world(tmp_path / "effects", [say("Done.")]), GOAL, run_id="done")).result()
        assert (await runs.count(), await runs.count(status="paused"), await runs.count(status="stopped")) == (8, 7, 0)
        parts = [await runs.list(status="paused", limit=3, offset=offset) for offset in (0, 3, 6, 9)]
        assert [len(part) for part in parts] == [3, 3, 1, 0]
        assert {record.run_id for part in parts for record in part} == names
        assert [record.run_id for part in parts for record in part] == [
            record.run_id for record in await runs.list(status="paused")
        ]
    async with Approvals.connect(store) as approvals:
        assert (await approvals.count(), await approvals.count("run-3"), await approvals.count("nobody")) == (7, 1, 0)
        parts = [await approvals.pending(limit=5, offset=offset) for offset in (0, 5)]
        assert [item.run_id for part in parts for item in part] == sorted(names)
        assert await approvals.pending("run-3", offset=1) == []


@store_neutral("page", [{"limit": -1}, {"offset": -1}, {"offset": 1.5}, {"limit": True}, {"limit": 2**63}])
async def test_a_part_that_there_cannot_be_is_refused(page: dict[str, Any], store: str) -> None:
    """The error names which of the two, on every store alike."""
    (name,) = page
    async with open_runs(store) as runs:
        with pytest.raises(StoreError, match=f"{name} must be a whole number"):
            await runs.list(**page)
    async with Approvals.connect(store) as approvals:
        with pytest.raises(StoreError, match=f"{name} must be a whole number"):
            await approvals.pending(**page)


@pytest.mark.parametrize("status", ["asked", "finished", "", "PAUSED"])
async def test_a_status_that_no_run_has_is_refused(status: str, tmp_path: Path) -> None:
    """The error names those that there are."""
    async with open_runs(tmp_path / "runs.db") as runs:
        for ask in (runs.list, runs.count):
            with pytest.raises(StoreError, match="queued, running, paused, failed, quarantined, answered"):
                await ask(status=status)
