"""An event loop with virtual time, in which processes live and die; the same seed plays the same.

A process is a `Life`: every task of it, and every callback, carries it in its context.
The loop runs nothing of a dead one, also no ``finally``: what it had not sent has not
happened. It keeps back what a frozen one would run. Time passes only while nothing can
run. Sets of tasks and futures have one order, since these are numbered; the order of
sets of texts needs ``PYTHONHASHSEED``.
"""

import asyncio
import contextvars
import heapq
import itertools
import os
import random
import selectors
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, NoReturn

__all__ = ["LIFE", "Life", "VirtualLoop", "VirtualThreading", "without_chance"]


class Life:
    """A process of the simulation.

    Attributes:
        name: What it is called.
        steps: How many callbacks it has run.
        dies_at: The step at which it dies; 0 for none.
        is_dead: Whether it has died.
        frozen_until: Until when it is frozen.
        was_frozen_at: When it was frozen last.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.steps = 0
        self.dies_at = 0
        self.is_dead = False
        self.frozen_until = 0.0
        self.was_frozen_at = float("-inf")
        self.kept_back: deque[Any] = deque()
        self.on_death: Callable[[], object] = lambda: None

    def die(self) -> None:
        """Die now."""
        if not self.is_dead:
            self.is_dead = True
            self.on_death()


LIFE: ContextVar[Life | None] = ContextVar("life", default=None)
"""The process that runs."""


class _Handle(asyncio.Handle):
    def _run(self) -> None:
        if _may_run(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    def _run(self) -> None:
        if _may_run(self):
            super()._run()


def _may_run(handle: Any) -> bool:
    """Whether the life of a callback runs now; counts its steps."""
    life: Life | None = handle._context.get(LIFE)
    if life is None:
        return True
    if life.is_dead:
        return False
    if handle._loop.time() < life.frozen_until:
        life.kept_back.append(handle)
        return False
    life.steps += 1
    if life.steps == life.dies_at:
        life.die()
    return not life.is_dead


class _Numbered:
    """Gives each object a number as its hash, so that a set of them has one order."""

    numbers = itertools.count()
    _number: int

    def __hash__(self) -> int:
        return self._number


class _Task(_Numbered, asyncio.Task[Any]):
    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(self.numbers)  # the task enters sets at once
        super().__init__(*args, **options)


class _Future(_Numbered, asyncio.Future[Any]):
    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(self.numbers)
        super().__init__(*args, **options)


class _Skipping(selectors.BaseSelector):
    """Waits for nothing: the time of the wait passes at once."""

    def __init__(self) -> None:
        self.now = 0.0

    def register(
        self, fileobj: Any, events: int, data: Any = None
    ) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return selectors.SelectorKey(fileobj, 0, 0, None)

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing of the simulation will ever happen")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, Any]:
        return {}


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop.

    Attributes:
        kept: All tasks: one that is dropped would run to its end.
        threads: All virtual threads.
    """

    _ready: deque[Any]
    _scheduled: list[Any]

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)
        self.kept: list[asyncio.Task[Any]] = []
        self.threads: list[VirtualThread] = []
        factory: Any = self._new_task
        self.set_task_factory(factory)

    def time(self) -> float:
        """Return the virtual seconds since the start."""
        return self._skipping.now

    def create_future(self) -> asyncio.Future[Any]:
        """Create a future that has a number."""
        return _Future(loop=self)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Schedule a callback, which its life may not reach."""
        timer: Any = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)
        timer._scheduled = True
        return timer

    def _call_soon(
        self, callback: Callable[..., object], args: Any, context: Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _new_task(
        self, loop: Any, work: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = _Task(work, loop=loop, **options)
        self.kept.append(task)
        return task

    def live(self, life: Life, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Start the first task of a life; nothing else is in its context."""
        context = Context()
        context.run(LIFE.set, life)
        return context.run(
            lambda: self.create_task(work(), context=contextvars.copy_context())
        )

    def outside(self, seconds: float, callback: Callable[..., object]) -> None:
        """Call something that belongs to no process."""
        self.call_later(seconds, callback, context=Context())

    def freeze(self, life: Life, seconds: float) -> None:
        """Let a life stand still for some seconds."""
        life.was_frozen_at = self.time()
        life.frozen_until = self.time() + seconds
        self.outside(seconds + 1e-6, lambda: self._thaw(life))

    def _thaw(self, life: Life) -> None:
        if self.time() >= life.frozen_until:
            self._ready.extend(life.kept_back)
            life.kept_back.clear()


class _Dropped(BaseException):
    """Ends the thread of a dead life, where it waits."""


_here = threading.local()


class VirtualThread:
    """A thread that runs only while the loop waits for it: in a callback of its life.

    What blocks it is a `VirtualEvent`; it must not wait for anything else.
    """

    def __init__(
        self,
        *,
        target: Callable[..., object],
        args: Sequence[Any] = (),
        name: str = "",
        daemon: bool = True,
    ) -> None:
        self._work = partial(target, *args)
        self._context = contextvars.copy_context()
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._waits_for: object = None
        self._is_dropped = False
        self._ended = VirtualEvent()
        self.loop: VirtualLoop

    @staticmethod
    def current() -> "VirtualThread":
        """Return the thread that runs."""
        return _here.thread

    def start(self) -> None:
        """Let it run once the loop comes to it."""
        loop: Any = asyncio.get_running_loop()
        self.loop = loop
        loop.threads.append(self)
        _start(self._thread)
        self._waits_for = self
        self.wake(self)

    def join(self, timeout: float | None = None) -> None:
        """Wait in another virtual thread for its end."""
        self._ended.wait(timeout)

    def wake(self, token: object, seconds: float = 0.0) -> None:
        """Let it run on after some seconds, if it still waits for this then."""
        resume = partial(self._resume, token)
        self.loop.call_later(seconds, resume, context=self._context.copy())

    def wait(self, token: object) -> None:
        """Let the loop run until something wakes it."""
        self._waits_for = token
        self._back.release()
        self._turn.acquire()
        if self._is_dropped:
            raise _Dropped

    def drop(self) -> None:
        """End it."""
        if self._thread.is_alive():
            self._is_dropped = True
            self._turn.release()
            self._thread.join()

    def _resume(self, token: object) -> None:
        if self._waits_for is token:
            self._waits_for = None
            self._turn.release()
            self._back.acquire()

    def _run(self) -> None:
        _here.thread = self
        self._turn.acquire()
        with suppress(_Dropped):
            if not self._is_dropped:
                self._context.run(self._work)
        if not self._is_dropped:
            self._ended.set()
        self._back.release()


class VirtualEvent:
    """As ``threading.Event``, for virtual threads."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[tuple[VirtualThread, object]] = []

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Wake those that wait."""
        self._is_set = True
        waiting = self._waiting
        self._waiting = []
        for thread, token in waiting:
            thread.wake(token)

    def clear(self) -> None:
        """Let further ones wait."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait in a virtual thread."""
        if not self._is_set:
            thread = VirtualThread.current()
            token = object()
            self._waiting.append((thread, token))
            if timeout is not None:
                thread.wake(token, timeout)
            thread.wait(token)
        return self._is_set


_start = threading.Thread.start


class VirtualThreading:
    """Stands for the module ``threading``."""

    Thread = VirtualThread
    Event = VirtualEvent

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def without_chance(seed: int) -> None:
    """Let all that is random follow from a seed, and let nothing start a real thread."""
    drawn = random.Random(seed)
    random.seed(drawn.random())
    os.urandom = drawn.randbytes

    def refuse(self: threading.Thread) -> NoReturn:
        raise AssertionError(f"a thread starts: {self.name}")

    threading.Thread.start = refuse
