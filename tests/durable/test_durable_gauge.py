"""The gauge of what waits: read from the store, from any thread, as long as a worker has it open."""

from pathlib import Path

from opentelemetry.metrics import CallbackOptions

from planner_ext.durable import gauge
from support.durable import GOAL, PAY, decide_all, open_runs, world


def reported() -> list[int | float]:
    """Collect the gauge, as the thread of a metric reader does."""
    return [point.value for point in gauge._observe(CallbackOptions())]


async def test_a_worker_reports_what_waits_in_its_store(
    store: str, tmp_path: Path
) -> None:
    """One for each approval that waits, wherever it is decided; nothing after the worker has left."""
    async with open_runs(store) as runs:
        assert reported() == [0]
        for name in ("one", "two"):
            await (
                await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id=name)
            ).result()
        assert reported() == [2]
        assert await decide_all(store) == 2
        assert reported() == [0]
    assert reported() == []
