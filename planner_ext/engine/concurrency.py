"""Work in threads, work against a time limit, and the machine's clock."""

import asyncio
import contextvars
import inspect
import math
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Any, Final, NoReturn, ParamSpec, Self, TypeVar, cast

from planner_ext.core.accounts import CallWaits
from planner_ext.core.errors import (
    PlannerExtError,
    described,
    require,
)

_T = TypeVar("_T")
_P = ParamSpec("_P")


class LeftByError(PlannerExtError, RuntimeError):
    """The application's code raised what would end more than its own call, such as ``SystemExit``.

    The cause is that exception; its attributes, such as the run that it ended, are
    here, too.
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(described(raised))
        vars(self).update(vars(raised))


def _stays(error: BaseException) -> bool:
    """Return whether an exception ends no more than its call."""
    if isinstance(error, BaseExceptionGroup):
        return all(
            map(_stays, cast("BaseExceptionGroup[BaseException]", error).exceptions)
        )
    return isinstance(error, Exception | SystemExit | asyncio.CancelledError)


async def contained(work: Awaitable[_T]) -> _T:
    """Await the application's code; ``SystemExit``, which would end the event loop, becomes an error.

    Raises:
        LeftByError: If the work raised ``SystemExit``, alone or in a group.
    """
    try:
        return await work
    except (SystemExit, BaseExceptionGroup) as error:
        if isinstance(error, Exception) or not _stays(error):
            raise
        raise LeftByError(error) from error


def contained_task(
    work: Coroutine[Any, Any, _T], *, context: contextvars.Context | None = None
) -> "asyncio.Task[_T]":
    """Start a task with `contained` work."""
    task = asyncio.create_task(contained(work), context=context)
    # The work has ended, unless the task was cancelled before it began.
    task.add_done_callback(lambda _: work.close())
    return task


async def of_application(work: Awaitable[_T]) -> _T:
    """Await a callback of the application; its own ``CancelledError`` is an error, too.

    Raises:
        LeftByError: If it raised ``SystemExit``, or ``CancelledError`` while this task
            was not cancelled.
    """

    async def awaited() -> _T:
        return await work

    outcome = await caught(awaited())
    if not isinstance(outcome, Raised):
        return outcome
    if isinstance(outcome.error, Exception):
        raise outcome.error
    raise LeftByError(outcome.error) from outcome.error


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run a function in a new daemon thread, with the caller's context variables.

    Threads of ``asyncio.to_thread`` are shared: abandoned ones would starve the others
    and delay the exit. If the wait is cancelled, the function continues, and its
    outcome is dropped.

    Raises:
        LeftByError: If it raised what is no exception.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[tuple[_T | None, BaseException | None]] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(result: _T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_result((result, error))

    def run() -> None:
        result = None
        error = None
        try:
            result = context.run(work)
        except BaseException as caught:
            error = caught
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="planner_ext tool", daemon=True).start()
    result, error = await done
    if error is not None and not isinstance(error, Exception | CallWaits):
        raise LeftByError(error) from error
    if error is not None:
        # A future takes no StopIteration; here that becomes the RuntimeError of PEP
        # 479.
        raise error
    return cast("_T", result)


async def called(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of the application, in a thread unless it is async, and await what it returns."""
    return await of_application(_called(function, *arguments))


async def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    call: object = getattr(function, "__call__", None)  # noqa: B004  (an object whose call is async)
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        call
    )
    result = (
        function(*arguments)
        if is_async
        else await in_thread(lambda: function(*arguments))
    )
    return await result if inspect.isawaitable(result) else result


@dataclass(frozen=True, slots=True)
class Raised:
    """What a piece of work raised, as a value."""

    error: BaseException


async def caught(work: Coroutine[Any, Any, _T]) -> _T | Raised:
    """Return what work raises, except an interrupt, a close, and the cancellation of this task.

    Where the application suppresses this task's cancellation, it is raised anyway.
    """
    task = asyncio.current_task()
    cancelling = task.cancelling() if task else 0
    ended: _T | Raised
    try:
        ended = await contained(work)
    except (Exception, asyncio.CancelledError) as error:
        ended = Raised(error)
    if task is not None and task.cancelling() > cancelling:
        error = ended.error if isinstance(ended, Raised) else None
        if isinstance(error, asyncio.CancelledError):
            raise error
        raise asyncio.CancelledError from error
    return ended


GRACE: Final = 1.0
"""Seconds that cancelled work has to end before it is abandoned."""

IN_HAND: Final = 4.0
"""Seconds that a reply or a result in hand has to be recorded after a cancellation. With
a worker's grace of 25 s, Kubernetes' 30 s hold."""

AGAIN: Final = 5.0
"""Seconds after which a task that has not ended is cancelled again."""

STEP: Final = 60.0
"""Seconds after which a clock is read again: it may be set, and the machine may
sleep."""


class OutOfTime(Enum):
    """The outcome of work that a time limit interrupted."""

    OUT_OF_TIME = "out of time"


OUT_OF_TIME: Final = OutOfTime.OUT_OF_TIME

_left: ContextVar[Callable[[], float] | None] = ContextVar(
    "planner_ext_time_left", default=None
)
_abandoned: set[asyncio.Task[Any]] = set()


def time_left() -> float | None:
    """Return the seconds that the calling code has left; None without a limit."""
    left = _left.get()
    if left is None:
        return None
    return max(left(), 0.0)


def seconds_from_now(seconds: float) -> Callable[[], float]:
    """Count down, on the event loop's clock."""
    clock = asyncio.get_running_loop().time
    end = clock() + seconds
    return lambda: end - clock()


class _Stream(AsyncGenerator[_T]):
    """An async generator that says how it is read if it is awaited."""

    def __init__(self, events: AsyncGenerator[_T], name: str) -> None:
        self._events = events
        self._name = name

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, _T]:
        return self._events.__anext__()

    def asend(self, value: None) -> Coroutine[Any, Any, _T]:
        return self._events.asend(value)

    def athrow(self, *error: Any) -> Coroutine[Any, Any, _T]:
        return self._events.athrow(*error)

    def aclose(self) -> Coroutine[Any, Any, None]:
        return self._events.aclose()

    def __await__(self) -> NoReturn:
        raise TypeError(
            f"{self._name} returns a stream, which is not awaited: async for event in {self._name}(...): ..."
        )


def streams(
    function: Callable[_P, AsyncGenerator[_T]],
) -> Callable[_P, AsyncGenerator[_T]]:
    """Decorate a method that returns an async generator: awaiting it says how to read it."""

    @wraps(function)
    def streamed(*values: _P.args, **options: _P.kwargs) -> AsyncGenerator[_T]:
        return _Stream(function(*values, **options), function.__name__)

    return streamed


class StopHandle:
    """Asks a run to stop, from any task or thread; given to one run as ``stop=``.

    The run looks at it before each request and each call: running functions finish,
    nothing further starts, and the results so far are kept. It stops nested runs, too,
    see `planner_ext.plugin.PlannerPlugin`.

    Attributes:
        reason: Why the run is to stop.
        now: Whether what is under way is interrupted.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.now = False
        self._lock = threading.Lock()
        self._waiting: set[asyncio.Future[None]] = set()

    def stop(
        self, reason: str = "The caller asked the run to stop.", *, now: bool = False
    ) -> None:
        """Ask the run to stop; the first reason stays.

        Args:
            reason: Why, for the record.
            now: Interrupts what is under way. The request is charged. A function is
                cancelled, a synchronous one is left to its thread; the record says that
                its effect is not known. May follow a stop without it.

        Raises:
            PlannerInvalidConfigurationError: If the reason is not a text, or ``now``
                not a bool.
        """
        require("reason", isinstance(reason, str), "a text that says why", reason)  # pyright: ignore[reportUnnecessaryIsInstance]
        require("now", isinstance(now, bool), "True or False", now)  # pyright: ignore[reportUnnecessaryIsInstance]
        if self.reason is None:
            self.reason = reason
        if not now:
            return
        with self._lock:
            self.now = True
            waiting = self._waiting
            self._waiting = set()
        for interrupt in waiting:
            with suppress(RuntimeError):  # its loop is closed: nothing waits any more
                interrupt.get_loop().call_soon_threadsafe(interrupt.set_result, None)

    def __deepcopy__(self, memo: object) -> "StopHandle":
        return self

    @contextmanager
    def interrupts(self) -> Generator[asyncio.Future[None]]:
        """@private Yield a future that is done once what is under way has to be interrupted."""
        interrupt: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self.now:
                interrupt.set_result(None)
            else:
                self._waiting.add(interrupt)
        try:
            yield interrupt
        finally:
            with self._lock:
                self._waiting.discard(interrupt)


async def in_time(
    work: Coroutine[Any, Any, _T],
    left: Callable[[], float] | None,
    *,
    step: float = STEP,
    patience: float = 0.0,
    stop: StopHandle | None = None,
) -> _T | OutOfTime:
    """Await work until a time limit, or until a stop that interrupts.

    At the limit the work has ``patience`` seconds, then it is cancelled, and its
    outcome dropped. If it has not ended after ``GRACE`` more, it is abandoned. ``left``
    is called at least every ``step`` seconds.

    Raises:
        asyncio.CancelledError: This wait was cancelled, and the work with it.
        BaseException: What the work raised in time.
    """
    context = copy_context()
    if left is not None:
        context.run(_left.set, _least(left, _left.get()))
    task = contained_task(work, context=context)
    if stop is None:
        return await _in_time(
            task, left or _unlimited, None, step=step, patience=patience
        )
    with stop.interrupts() as interrupt:
        return await _in_time(
            task, left or _unlimited, interrupt, step=step, patience=patience
        )


def _unlimited() -> float:
    return math.inf


def _least(
    left: Callable[[], float], outer: Callable[[], float] | None
) -> Callable[[], float]:
    if outer is None:
        return left
    return lambda: min(left(), outer())


async def _in_time(
    task: asyncio.Task[_T],
    left: Callable[[], float],
    interrupt: asyncio.Future[None] | None,
    *,
    step: float,
    patience: float,
) -> _T | OutOfTime:
    ends: set[asyncio.Future[Any]] = {task} if interrupt is None else {task, interrupt}
    try:
        while not task.done():
            interrupted = interrupt is not None and interrupt.done()
            if not interrupted and (seconds := left()) > 0:
                await asyncio.wait(
                    ends,
                    timeout=min(seconds, step),
                    return_when=asyncio.FIRST_COMPLETED,
                )
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
    """Cancel a task and wait at most so long for it; its outcome counts as retrieved."""
    _abandoned.add(task)
    task.add_done_callback(_forget)
    task.cancel()
    await asyncio.wait({task}, timeout=seconds)


class Outlasting(asyncio.Future[_T]):
    """What work returns or raises; whoever awaits it and is cancelled waits until it has ended.

    `IN_HAND` seconds after that cancellation the work is cancelled, too.
    """

    _cancels: asyncio.TimerHandle | None = None

    def __init__(self, work: Coroutine[Any, Any, _T]) -> None:
        super().__init__()
        self._task = asyncio.create_task(self._end_with(work))

    async def _end_with(self, work: Coroutine[Any, Any, _T]) -> None:
        try:
            self.set_result(await work)
        except BaseException as error:
            self.set_exception(error)

    def cancel(self, msg: object = None) -> bool:
        """Return False: the wait goes on."""
        if self._cancels is None:
            self._cancels = self.get_loop().call_later(IN_HAND, self._task.cancel, msg)
        return False


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks until they have ended: psycopg before 3.3.6, for one, may drop a cancellation.

    Raises:
        asyncio.CancelledError: This wait was cancelled; the tasks have ended.
    """
    waiting = {task for task in tasks if not task.done()}
    cancelled = None
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
    """The machine's time, as a `planner_ext.engine.ports.Clock`."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        await asyncio.sleep(seconds)
