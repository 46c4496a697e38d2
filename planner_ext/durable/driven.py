"""Decides when the calls of a worker's runs may start, and interrupts runs when the worker leaves or they are ended."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self

from planner_ext.core.facts import (
    CallFinished,
    CallLeft,
    CallStarted,
    Ended,
    Fact,
    ModelReplied,
    Place,
    Planned,
    place_of_fact,
    unwrapped,
)
from planner_ext.core.machine import (
    AddMessage,
    Finish,
    Pause,
    WithholdCalls,
    next_action,
)
from planner_ext.core.state import OpenRun, State, run_at
from planner_ext.core.values import Usage
from planner_ext.durable.errors import RunFencedError, StoreError
from planner_ext.durable.writer import JournalWriter
from planner_ext.engine.journal import lost_request
from planner_ext.engine.ports import Event, TextDelta, WorkLeftError

_LONGEST_SECONDS = 60.0
"""The longest time for which a run that is driven alone delays the calls of others: its
own call may hang."""

_BOOKKEEPING = (AddMessage, Finish, Pause, WithholdCalls)
"""Actions without a request, a call or the application's own code: a draining worker
still performs them."""


class DrivenRuns:
    """The runs that a worker drives, and their calls in flight.

    While a run is driven alone, no call of another run starts until it has recorded a
    reply or a result. While the worker drains, no call starts, and a run is interrupted
    once nothing of it is in flight. It drains when it leaves, and while all runs of the
    store are held.

    Attributes:
        stores: The store of each run that is driven now.
        interrupt: Cancels the task of a run; None unless the worker leaves.
        is_held: Whether all runs of the store are held.
    """

    def __init__(self) -> None:
        self.stores: dict[str, DrivenStore] = {}
        self.interrupt: Callable[[str], object] | None = None
        self.is_held = False
        self._alone: str | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._readers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    @property
    def is_taken(self) -> bool:
        """Whether a run is driven alone, or waits for that."""
        return self._alone is not None

    @property
    def is_draining(self) -> bool:
        """Whether no call may start."""
        return self.is_held or self.interrupt is not None

    def drain(self, interrupt: Callable[[str], object]) -> None:
        """Start no further calls."""
        self.interrupt = interrupt
        self.notify()

    def hold(self, held: bool) -> None:
        """Start no further calls, or let them start again."""
        self.is_held = held
        self.notify()

    async def alone(self, run_id: str, seconds: float) -> bool:
        """Reserve the worker for one run; False if other calls were still in flight after this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._until(lambda: self._alone in (None, run_id))
                self._alone = run_id
                await self._until(
                    lambda: (
                        not any(
                            s.calls for name, s in self.stores.items() if name != run_id
                        )
                    )
                )
        except BaseException as error:
            self.together(run_id)
            if isinstance(error, TimeoutError):
                return False
            raise
        self._limit = asyncio.get_running_loop().call_later(
            _LONGEST_SECONDS, self.together, run_id
        )
        return True

    def together(self, run_id: str) -> None:
        """Let other runs' calls start again."""
        if self._alone == run_id:
            self._alone = None
            if self._limit is not None:
                self._limit.cancel()
        self.notify()

    def is_open(self, run_id: str) -> bool:
        """Whether calls of a run may start."""
        return not self.is_draining and self._alone in (None, run_id)

    async def until_decided(self, run_id: str) -> None:
        """Wait until calls of a run may start, or the worker drains."""
        await self._until(lambda: self.is_draining or self.is_open(run_id))

    def notify(self) -> None:
        """Wake the waiting runs."""
        self._changed.set()
        self._changed = asyncio.Event()

    @contextmanager
    def reading(self, run_id: str) -> Generator[asyncio.Event]:
        """Yield an event that is set whenever there is something new of a run."""
        news = asyncio.Event()
        self._readers[run_id].add(news)
        try:
            yield news
        finally:
            self._readers[run_id].remove(news)
            if not self._readers[run_id]:
                del self._readers[run_id]

    def tell_readers(self, run_id: str) -> None:
        """Wake those who read a run."""
        for news in self._readers.get(run_id, ()):
            news.set()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class ArrivingText:
    """The text of one streamed reply, as it arrives.

    Attributes:
        place: How many facts the journal had when it began to arrive; -1 for none.
    """

    place: int
    pieces: list[TextDelta] = field(default_factory=list[TextDelta])


class DrivenStore:
    """Records a driven run's facts while its calls may start; implements `planner_ext.engine.ports.RunStore`.

    Attributes:
        calls: Those in flight, each as the place of its run, its iteration and index;
            without those in which a run has begun that is recorded here.
        text: That of the last streamed reply.
    """

    def __init__(self, writer: JournalWriter, driven: DrivenRuns) -> None:
        self.writer = writer
        self.calls: set[tuple[Place, int, int]] = set()
        self.text = ArrivingText(place=-1)
        self._driven = driven
        self._ends = False
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._driven.stores[self.writer.run_id] = self
        self._driven.tell_readers(self.writer.run_id)
        return self

    async def __aexit__(self, *error: Any) -> None:
        run_id = self.writer.run_id
        del self._driven.stores[run_id]
        self._driven.together(run_id)
        try:
            await self._limit.__aexit__(*error)
        except TimeoutError:
            raise self._fenced() from None

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        """Record facts; cancelled if a call may not start now."""
        happened = [(place_of_fact(fact), unwrapped(fact)) for fact in facts]
        new = {
            (place, fact.iteration, fact.index)
            for place, fact in happened
            if isinstance(fact, CallStarted)
        } - self.calls
        place, _ = happened[-1]
        # Its run can be left at any time, so the call around it is not in flight.
        if place:
            iteration, index, _ = place[-1]
            self.calls.discard((place[:-1], iteration, index))
        # A call that starts again is in flight already.
        if new and not (place and self.calls):
            await self._until_allowed()
        self.calls |= new
        self._ends = isinstance(facts[-1], Ended)
        try:
            await self.writer.append(run_id, seq, facts)
            # The cancellation reaches the task of a call too late to stop its start.
            if self._limit.when() is not None:
                raise self._fenced()
            self._driven.tell_readers(run_id)
        except BaseException:
            self.calls -= new
            raise
        finally:
            self.calls -= {
                (place, fact.iteration, fact.index)
                for place, fact in happened
                if isinstance(fact, CallFinished | CallLeft)
            }
            if any(
                isinstance(fact, ModelReplied | Planned | CallFinished)
                for _, fact in happened
            ):
                self._driven.together(self.writer.run_id)
        if self.leaves(place):
            await self._leave(place, seq=seq + len(facts), at=facts[-1].at)

    async def _leave(self, place: Place, *, seq: int, at: float) -> None:
        """End the work on the run, in which a run at a place would start new work; an unsent request is free."""
        run = OpenRun(state=run_at(self.writer.state, place) or State(), place=place)
        # Else the next activation would charge it.
        unsent = lost_request(run.state, at=at)
        if unsent:
            reason = "Not sent: the worker leaves."
            free = [
                run.wrapped(replace(fact, reason=reason, usage=Usage()))
                for fact in unsent
            ]
            await self.writer.append(self.writer.run_id, seq, free)
        await self._interrupt()

    async def emit(self, event: Event) -> None:
        """Show readers a piece of text; the facts before it are stored first."""
        if not isinstance(event, TextDelta) or not event.text:
            return
        with suppress(StoreError):  # the next fact is not recorded then, either
            await self.writer.flush()
        place = len(self.writer.facts)
        if self.text.place != place:
            self.text = ArrivingText(place)
        self.text.pieces.append(event)
        self._driven.tell_readers(self.writer.run_id)

    def leaves(self, place: Place = ()) -> bool:
        """Whether the worker drains, and a run, or the one inside it at a place, is about to start new work.

        None of its calls is in flight then. A request that another run inside it has
        sent is charged, and sent again.
        """
        if not self._driven.is_draining or self.calls:
            return False
        run = run_at(self.writer.state, place)
        action = None if run is None else next_action(run)
        return action is not None and not isinstance(action, _BOOKKEEPING)

    def check_stays(self) -> None:
        """End the work on the run, by an error, if it is not to start new work here."""
        if self.leaves():
            if self._driven.interrupt is None:
                raise self._held()
            raise asyncio.CancelledError

    def abandon(self) -> None:
        """Cancel the run's work, unless its end is being recorded."""
        if not self._ends and not self._limit.expired():
            self._limit.reschedule(asyncio.get_running_loop().time())

    async def _until_allowed(self) -> None:
        """Return once a call may start.

        The engine records nothing else of the run meanwhile. So where other calls of
        the batch are in flight, only this call's task is cancelled; the engine starts
        it again once they have ended.
        """
        if self.calls and not self._driven.is_open(self.writer.run_id):
            raise asyncio.CancelledError
        await self._driven.until_decided(self.writer.run_id)
        if self._driven.is_draining:
            await self._interrupt()

    async def _interrupt(self) -> None:
        """End the work on the run, also if the runs of the store were held and are no longer."""
        if self._driven.interrupt is None:
            raise self._held()
        self._driven.interrupt(self.writer.run_id)
        # This task, too: that of a result outlasts the cancellation of the run's.
        task = asyncio.current_task()
        assert task is not None, "a coroutine runs in a task"
        task.cancel()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise _InterruptedError from None

    def _fenced(self) -> RunFencedError:
        return RunFencedError(
            f"Run {self.writer.run_id!r} was ended or taken over; its work here was cancelled."
        )

    def _held(self) -> "_HeldError":
        return _HeldError(
            f"Run {self.writer.run_id!r} is paused, as are all runs of its store."
        )


class _HeldError(WorkLeftError, RunFencedError):
    """All runs of the store are held."""


class _InterruptedError(WorkLeftError, asyncio.CancelledError):
    """The worker leaves."""
