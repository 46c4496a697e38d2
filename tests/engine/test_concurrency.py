"""The application's exceptions end no more than their call; code that is not async has one loop of its own."""

import asyncio
import copy
from collections.abc import AsyncGenerator

import pytest

from planner_ext.engine.background import _Background, _Waited
from planner_ext.engine.concurrency import (
    OUT_OF_TIME,
    LeftByError,
    StopHandle,
    contained,
    in_time,
    streams,
)


async def raising(error: BaseException) -> None:
    raise error


async def for_ever() -> None:
    await asyncio.Future()


async def test_an_exit_in_a_group_ends_its_call_alone() -> None:
    """A group that holds a SystemExit leaves as an error; one of errors stays as it is."""
    with pytest.raises(LeftByError) as left:
        await contained(raising(BaseExceptionGroup("both", [SystemExit(1), OSError()])))
    assert isinstance(left.value.__cause__, BaseExceptionGroup)
    with pytest.raises(ExceptionGroup, match="errors"):
        await contained(raising(ExceptionGroup("errors", [OSError()])))


async def test_an_interrupt_in_a_group_is_not_taken_for_an_error() -> None:
    """A group that holds a KeyboardInterrupt passes as it is, at any depth."""
    group = BaseExceptionGroup("all", [BaseExceptionGroup("in", [KeyboardInterrupt()])])
    with pytest.raises(BaseExceptionGroup) as raised:
        await contained(raising(group))
    assert raised.value is group


def test_the_loop_ends_with_what_runs_on_it() -> None:
    """Closed, it has cancelled its tasks and is closed itself; one that never ran has nothing to end."""
    _Background().close()
    background = _Background()
    loop = background.loop()
    running = asyncio.run_coroutine_threadsafe(for_ever(), loop)
    assert background.loop() is loop
    background.close()
    assert running.cancelled()
    assert loop.is_closed()


def test_a_forked_process_starts_a_loop_of_its_own() -> None:
    """It forgets its parent's loop, which it leaves as it is."""
    background = _Background()
    of_parent = background.loop()
    thread = background._thread
    assert thread is not None
    background.forked()
    assert background.loop() is not of_parent
    assert not of_parent.is_closed()
    background.close()
    of_parent.call_soon_threadsafe(of_parent.stop)
    thread.join()


async def test_what_is_cancelled_before_it_began_never_begins() -> None:
    """An interrupt that comes first cancels the wait, and the start that follows does nothing."""
    begun: list[bool] = []

    async def work() -> None:
        begun.append(True)

    waited = _Waited(asyncio.get_running_loop(), work())
    waited.cancel()
    waited.start()
    await asyncio.sleep(0)
    assert isinstance(waited.outcome.exception(), asyncio.CancelledError)
    assert begun == []


async def test_a_stop_that_came_before_interrupts_at_once() -> None:
    """A handle that interrupts already lets no work begin."""
    stop = StopHandle()
    stop.stop(now=True)
    assert await in_time(for_ever(), None, stop=stop) is OUT_OF_TIME


def test_a_copy_of_a_handle_is_the_handle() -> None:
    """A stop reaches a run whose options were copied."""
    stop = StopHandle()
    assert copy.deepcopy({"stop": stop})["stop"] is stop


async def test_a_stream_is_an_async_generator() -> None:
    """It can be sent to and thrown into, as the generator that it reads."""
    seen: list[object] = []

    class Door:
        @streams
        async def events(self) -> AsyncGenerator[int, object]:
            seen.append((yield 1))
            try:
                yield 2
            except OSError as error:
                seen.append(error)
                yield 3

    events = Door().events()
    error = OSError()
    assert await anext(events) == 1
    assert await events.asend(None) == 2
    assert await events.athrow(error) == 3
    assert seen == [None, error]
    await events.aclose()
