"""Work in threads, work against a time limit, and the machine's clock."""

import asyncio
import contextvars
import inspect
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeVar, cast

__all__ = [
    "GRACE",
    "OUT_OF_TIME",
    "STEP",
    "OutOfTime",
    "Raised",
    "SystemClock",
    "called",
    "caught",
    "end_tasks",
    "in_thread",
    "in_time",
    "run_sync",
    "seconds_from_now",
    "time_left",
]

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run a function in a new daemon thread, with the caller's context variables.

    ``asyncio.to_thread`` does not fit: its few threads are shared, so abandoned ones would starve the others, and the
    loop and the interpreter wait for them when they end.

    Args:
        work: What to run. If the wait for it is cancelled, it continues, and its outcome is dropped.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[_T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: _T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="planner_ext tool", daemon=True).start()
    result, error = await done
    if error is not None:
        # Not through the future, which takes no StopIteration; here that becomes the RuntimeError of PEP 479.
        raise error
    return cast("_T", result)


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the application, in a thread unless it is async, and await what it returns."""
    call: object = getattr(function, "__call__", None)  # noqa: B004  (an object whose call is async)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    result = function(*arguments) if is_async else await in_thread(lambda: function(*arguments))
    return await result if inspect.isawaitable(result) else result


def run_sync(work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
    """Run a coroutine to its end from code that is not async, with the caller's context variables.

    It runs on a new event loop: in this thread, or in another one if this thread already runs a loop, as a notebook
    does. An exception that interrupts the wait cancels the coroutine.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work())
    tasks: list[asyncio.Task[_T]] = []
    outcome: Future[_T] = Future()
    context = copy_context()

    async def run() -> _T:
        tasks.append(cast("asyncio.Task[_T]", asyncio.current_task()))
        return await work()

    def run_all() -> None:
        try:
            outcome.set_result(context.run(asyncio.run, run()))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run_all, name="planner_ext run")
    try:
        thread.start()
        return outcome.result()
    except BaseException:
        for task in tasks:
            with suppress(RuntimeError):  # its loop is closed: it has ended
                task.get_loop().call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()


@dataclass(frozen=True, slots=True)
class Raised:
    """The exception that a piece of work raised, as a value."""

    error: BaseException


async def caught(work: Coroutine[Any, Any, _T]) -> _T | Raised:
    """Return what work raises, except the cancellation of this task and what ends the program.

    The application's code may also raise ``CancelledError`` itself, after waiting for something that was cancelled:
    that is an ordinary error. If it suppresses the cancellation of this task, the cancellation is raised anyway.
    """
    task = asyncio.current_task()
    cancelling = task.cancelling() if task else 0
    ended: _T | Raised
    try:
        ended = await work
    except (Exception, asyncio.CancelledError) as error:
        ended = Raised(error)
    if task is not None and task.cancelling() > cancelling:
        error = ended.error if isinstance(ended, Raised) else None
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise asyncio.CancelledError from error
    return ended


GRACE: Final = 1.0
"""Seconds, of the machine's own clock, that cancelled work has to end before it is abandoned."""

AGAIN: Final = 5.0
"""Seconds after which a task that has not ended is cancelled again."""

STEP: Final = 60.0
"""Seconds after which the clock is read again: it may have been set, or the machine may have slept."""


class OutOfTime(Enum):
    """The outcome of work that a time limit interrupted."""

    OUT_OF_TIME = "out of time"


OUT_OF_TIME: Final = OutOfTime.OUT_OF_TIME

_left: ContextVar[Callable[[], float] | None] = ContextVar("planner_ext_time_left", default=None)
_abandoned: set[asyncio.Task[Any]] = set()


def time_left() -> float | None:
    """Return the seconds that the calling code has left, 0 or more; None if its time is not limited."""
    left = _left.get()
    return None if left is None else max(left(), 0.0)


def seconds_from_now(seconds: float) -> Callable[[], float]:
    """Count down from a number of seconds, on the event loop's clock."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    return lambda: end - clock()


async def in_time(
    work: Coroutine[Any, Any, _T], left: Callable[[], float], *, step: float = STEP, patience: float = 0.0
) -> _T | OutOfTime:
    """Await work until a time limit.

    At the limit the work is cancelled; what it returns or raises from then on is dropped. Work that does not end
    within ``GRACE`` seconds after that is abandoned: it continues, and is not awaited. So this returns at most
    ``GRACE`` seconds after the limit, even if the work ignores its cancellation.

    Args:
        work: The work, which runs in a new task.
        left: Returns the seconds that are left.
        step: Seconds after which ``left`` is called again at the latest: short if it does not follow the machine's own
            clock.
        patience: Seconds that the work has at the limit to end before it is cancelled.

    Returns:
        The work's result, or `OUT_OF_TIME`.

    Raises:
        asyncio.CancelledError: This wait was cancelled, and the work with it.
        BaseException: Whatever the work raised in time.
    """
    outer, context = _left.get(), copy_context()
    context.run(_left.set, left if outer is None else lambda: min(left(), outer()))
    task = asyncio.create_task(work, context=context)
    try:
        while not task.done():
            if (seconds := left()) > 0:
                await asyncio.wait({task}, timeout=min(seconds, step))
            elif patience:
                await asyncio.wait({task}, timeout=patience)
                patience = 0.0
            else:
                await _end(task, GRACE)
                return OUT_OF_TIME
    except asyncio.CancelledError:
        await _end(task, max(left(), 0.0) + GRACE)
        raise
    return task.result()


async def _end(task: asyncio.Task[Any], seconds: float) -> None:
    """Cancel a task and wait so many seconds for it; its outcome counts as retrieved."""
    _abandoned.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait({task}, timeout=seconds)


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they have ended: a library may drop a cancellation, as psycopg before 3.3.6 does.

    Raises:
        asyncio.CancelledError: This wait was cancelled; the tasks have been cancelled once more, and have ended.
    """
    waiting, cancelled = {task for task in tasks if not task.done()}, None
    while waiting:
        for task in waiting:
            task.cancel()
        try:
            await asyncio.wait(waiting, timeout=AGAIN)
        except asyncio.CancelledError as error:
            cancelled = error
        waiting = {task for task in waiting if not task.done()}
    for task in tasks:
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
    if cancelled is not None:
        raise cancelled


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()


class SystemClock:
    """The machine's time. Implements `planner_ext.engine.ports.Clock`."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        await asyncio.sleep(seconds)
