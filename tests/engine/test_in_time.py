"""Work against a time limit: cancelled, left behind where it does not end, and never taken for a cancellation."""

import asyncio
import gc

import pytest

from planner_ext.engine import concurrency as module
from planner_ext.engine.concurrency import (
    OUT_OF_TIME,
    SystemClock,
    in_time,
    seconds_from_now,
    time_left,
)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.02)


async def for_ever() -> None:
    await asyncio.Future()


async def test_what_ends_in_time_is_returned_or_raised() -> None:
    """The outcome of the work is the outcome of the wait, late or not where it ended before it was looked at."""

    async def fail() -> None:
        raise ValueError("mine")

    assert await in_time(asyncio.sleep(0, "done"), seconds_from_now(60)) == "done"
    with pytest.raises(ValueError, match="mine"):
        await in_time(fail(), seconds_from_now(60))


async def test_a_limit_cancels_the_work() -> None:
    """Work that waits is cancelled when its time is over; of none at all it does not even begin."""
    assert await in_time(for_ever(), seconds_from_now(0.01)) is OUT_OF_TIME
    begun: list[bool] = []

    async def begin() -> None:
        begun.append(True)

    assert await in_time(begin(), lambda: 0.0) is OUT_OF_TIME
    assert begun == []


async def test_a_clock_that_is_not_the_machines_is_looked_at_again() -> None:
    """Time that another task moves is seen within a step."""
    left = [60.0]

    async def pass_the_time() -> None:
        left[0] = 0.0
        await asyncio.Future()

    assert await in_time(pass_the_time(), lambda: left[0], step=0.01) is OUT_OF_TIME


async def test_work_that_swallows_its_cancellation_is_left_behind() -> None:
    """It continues without being waited for; an exception that it raises later is neither seen nor reported."""
    release, later = asyncio.Event(), asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            await release.wait()
        later.set()
        raise RuntimeError("late")

    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: reported.append(context)
    )
    assert await in_time(stubborn(), seconds_from_now(0.01)) is OUT_OF_TIME
    assert not later.is_set()
    release.set()
    await later.wait()
    await asyncio.sleep(0)
    gc.collect()
    assert reported == []


async def test_a_cancellation_from_outside_is_not_the_limit() -> None:
    """It passes through as it is, and the work is cancelled with it; also while the limit is interrupting."""
    begun, ends = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Future()
        finally:
            ends.set()

    task = asyncio.create_task(in_time(wait(), seconds_from_now(60)))
    await begun.wait()
    task.cancel("from outside")
    with pytest.raises(asyncio.CancelledError, match="from outside"):
        await task
    assert ends.is_set()

    interrupted = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            interrupted.set()
            await asyncio.sleep(0.05)

    task = asyncio.create_task(in_time(stubborn(), seconds_from_now(0.01)))
    await interrupted.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_time_that_is_left_is_the_least_around() -> None:
    """Work inside work has no more time than what is around it."""

    async def inner() -> float | None:
        return time_left()

    async def outer() -> object:
        return await in_time(inner(), lambda: 50.0)

    assert time_left() is None
    assert await in_time(outer(), lambda: 10.0) == 10.0
    assert await in_time(outer(), lambda: 90.0) == 50.0


async def test_the_clock_of_the_machine_waits_and_lets_others_work() -> None:
    clock, worked = SystemClock(), asyncio.Event()
    asyncio.get_running_loop().call_soon(worked.set)
    before = clock.monotonic()
    await clock.sleep(0.02)
    assert worked.is_set()
    assert clock.monotonic() - before >= 0.019
