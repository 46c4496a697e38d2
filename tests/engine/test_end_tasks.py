"""Tasks that are ended: cancelled until they have ended, also where a cancellation is dropped."""

import asyncio

import pytest

from planner_ext.engine import concurrency
from planner_ext.engine.concurrency import end_tasks

pytestmark = pytest.mark.fast


async def drops_one() -> None:
    """Drop a cancellation, as psycopg before 3.3.6 may, and wait for ever."""
    for _ in range(2):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
    await asyncio.Event().wait()


async def test_a_task_that_drops_a_cancellation_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is cancelled again until it has ended; one that failed is not reported by the event loop."""
    monkeypatch.setattr(concurrency, "AGAIN", 0.01)

    async def fails() -> None:
        raise ValueError

    tasks = [asyncio.create_task(drops_one()), asyncio.create_task(fails())]
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        await end_tasks(*tasks)
    assert [task.done() for task in tasks] == [True, True]


async def test_nothing_to_end_returns_at_once() -> None:
    """Without tasks, or with ended ones, it returns at once."""
    await end_tasks()
    done = asyncio.create_task(asyncio.sleep(0))
    await done
    await end_tasks(done)
    assert not done.cancelled()


async def test_a_cancelled_wait_still_ends_its_tasks() -> None:
    """What cleans up is cancelled once more; the cancellation is raised when nothing is left running."""
    cleans, ended = asyncio.Event(), asyncio.Event()

    async def clean_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cleans.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    task = asyncio.create_task(clean_up())
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(task))
    await cleans.wait()
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ended.is_set()
