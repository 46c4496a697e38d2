"""Runs a coroutine for code that is not async: on one event loop for the process, in a background thread."""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from planner_ext.core.errors import InvalidLimitError

_T = TypeVar("_T")

_PATIENCE: Final = 5.0
"""Seconds that the loop has to end, at the exit."""


class _Background:
    """The one event loop of this process for code that is not async, in a daemon thread.

    One for all: a client's connections belong to the loop that opened them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = False

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the loop; start it if it does not run."""
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._run,
                    args=(loop,),
                    name="planner_ext event loop",
                    daemon=True,
                )
                self._thread.start()
                self._loop = loop
            return self._loop

    @property
    def is_this_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        # The runner's end cancels what still runs, and closes the loop.
        with asyncio.Runner(loop_factory=lambda: loop):
            while not self._closing:
                # SystemExit and KeyboardInterrupt of a task end the loop that runs it;
                # they are its caller's.
                with suppress(BaseException):
                    loop.run_forever()

    def close(self) -> None:
        """End the loop and what runs on it, at the exit; what does not end in time is abandoned."""
        with self._lock:
            loop = self._loop
            thread = self._thread
            self._closing = True
        if loop is not None and thread is not None and thread.is_alive():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(_PATIENCE)

    def forked(self) -> None:
        """Forget the parent's loop: to close it would reach into the parent."""
        _of_parents.append(self._loop)
        self.__init__()


_background = _Background()


_of_parents: list[asyncio.AbstractEventLoop | None] = []


atexit.register(_background.close)
with suppress(AttributeError):  # on Windows, where nothing forks
    os.register_at_fork(after_in_child=_background.forked)


def run_sync(work: Coroutine[Any, Any, _T], *, door: str) -> _T:
    """Run a coroutine from code that is not async, with the caller's context variables.

    It runs on the process's background loop. What interrupts the wait, such as
    ``KeyboardInterrupt``, cancels the coroutine, waits for its end, and gets the
    attributes of what that raised; a second one does not wait.

    Raises:
        InvalidLimitError: If this is the background loop's own thread.
    """
    if _background.is_this_thread:
        work.close()
        raise InvalidLimitError(
            f"{door} was called on the event loop that it would wait for: by an async function of a run that began "
            f"with invoke_sync or resume_sync. Await {door.removesuffix('_sync')} there, or make the function a plain "
            "def: it then runs in a thread."
        )
    waited = _Waited(_background.loop(), work)
    try:
        # In a copy of the caller's context, as its task is.
        waited.loop.call_soon_threadsafe(waited.start)
        return waited.outcome.result()
    except BaseException as interrupt:
        if not waited.ended_with(interrupt):
            waited.loop.call_soon_threadsafe(waited.cancel)
            vars(interrupt).update(vars(waited.outcome.exception() or interrupt))
        raise


class _Waited(Generic[_T]):
    """A coroutine on an event loop, for which another thread waits."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, _T]
    ) -> None:
        self.loop = loop
        self.outcome: Future[_T] = Future()
        self._work = work
        self._task: asyncio.Task[_T] | None = None

    def start(self) -> None:
        if self.outcome.done():
            return
        self._task = self.loop.create_task(self._work)
        self._task.add_done_callback(self._settle)
        _waited_for.add(self._task)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        else:  # the interrupt came before the start
            self._work.close()
            self.outcome.set_exception(asyncio.CancelledError())

    def ended_with(self, error: BaseException) -> bool:
        return self.outcome.done() and self.outcome.exception() is error

    def _settle(self, task: asyncio.Task[_T]) -> None:
        _waited_for.discard(task)
        try:
            self.outcome.set_result(task.result())
        except BaseException as error:
            self.outcome.set_exception(error)


_waited_for: set[asyncio.Task[Any]] = set()
"""The tasks of `run_sync`: a loop holds its tasks only weakly."""
