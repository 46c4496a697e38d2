"""A run, watched from an async generator: the run is a task of its own, and leaving the generator ends it."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from planner_ext.core.facts import CallFinished, CallStarted
from planner_ext.ports import Emit, Event, TextDelta

__all__ = ["watch"]

T = TypeVar("T")

_AHEAD = 64
"""Events that a run may be ahead of whoever watches it."""

_UNDER_WAY = (TextDelta, CallStarted, CallFinished)
"""Events of a request or a call that is being made; handing them over must not hold up the others of its batch."""


async def watch(run: Callable[[Emit], Awaitable[T]]) -> AsyncGenerator[Event, None]:
    """Start a run and yield its events as they happen; raise what it raises.

    The run has its own task, so no span, timeout or task group of it is ever open across a ``yield``. When the consumer
    leaves early the task is cancelled and awaited: nothing is left running. A consumer who is cancelled gets the
    attributes of the exception that this ended the run with, on its own. A consumer who waits is told what was decided
    of a batch before any of its calls begins.
    """
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    room = asyncio.Event()

    async def emit(event: Event) -> None:
        queue.put_nowait(event)
        if queue.qsize() > _AHEAD:
            room.clear()
            await room.wait()
        elif not isinstance(event, _UNDER_WAY):
            await asyncio.sleep(0)  # whoever waits for it may leave before the run goes on

    async def work() -> T:
        return await run(emit)

    task = asyncio.ensure_future(work())
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            if queue.qsize() <= _AHEAD:
                room.set()
            yield event
        await task
    except asyncio.CancelledError as error:
        vars(error).update(vars(await _end(task)))
        raise
    finally:
        await _end(task)


async def _end(task: asyncio.Future[T]) -> BaseException:
    """Cancel a task and wait for it; return what it raised, which the event loop then does not report."""
    task.cancel()
    await asyncio.wait({task})
    try:
        task.result()
    except BaseException as error:
        return error
    return asyncio.CancelledError()
