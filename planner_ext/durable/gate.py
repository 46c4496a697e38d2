"""Decides when the calls of a worker's runs may start: a run that may end the process is driven alone."""

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from planner_ext.core.facts import CallFinished, CallStarted, Fact, ModelReplied, Planned
from planner_ext.durable.writer import JournalWriter

__all__ = ["CallGate", "GatedStore"]

_LONGEST_SECONDS = 60.0
"""How long a run keeps the calls of others from starting: one of its own calls may hang."""


class CallGate:
    """The runs that a worker drives, and their calls in flight.

    While a run is driven alone, no call of another run starts. It is alone from when no call of others is in flight
    until it has recorded a reply or a result.

    Attributes:
        driven: The store of each run that is driven at this moment.
    """

    def __init__(self) -> None:
        self.driven: dict[str, GatedStore] = {}
        self._alone: str | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()

    @property
    def is_taken(self) -> bool:
        """Whether a run is driven alone, or waits for that."""
        return self._alone is not None

    @contextmanager
    def driving(self, writer: JournalWriter) -> "Generator[GatedStore]":
        """Wrap a run's journal for the time in which the block drives the run."""
        store = self.driven[writer.run_id] = GatedStore(writer, self)
        try:
            yield store
        finally:
            del self.driven[writer.run_id]
            self.together(writer.run_id)

    async def alone(self, run_id: str, seconds: float) -> bool:
        """Reserve the worker for one run; False if calls of other runs were still in flight after this time."""
        try:
            async with asyncio.timeout(seconds):
                await self._until(lambda: self._alone in (None, run_id))
                self._alone = run_id
                await self._until(lambda: not any(s.calls for name, s in self.driven.items() if name != run_id))
        except BaseException as error:
            self.together(run_id)
            if isinstance(error, TimeoutError):
                return False
            raise
        self._limit = asyncio.get_running_loop().call_later(_LONGEST_SECONDS, self.together, run_id)
        return True

    def together(self, run_id: str) -> None:
        """Let calls of other runs start again, if this run is driven alone."""
        if self._alone == run_id:
            self._alone = None
            if self._limit is not None:
                self._limit.cancel()
        self.notify()

    async def until_open(self, run_id: str) -> None:
        """Wait until no other run is driven alone."""
        await self._until(lambda: self._alone in (None, run_id))

    def notify(self) -> None:
        """Look again at what is waited for: a call has ended, or a run is no longer driven."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            await self._changed.wait()


class GatedStore:
    """Records a driven run's facts while the gate permits; implements `planner_ext.engine.ports.RunStore`.

    Attributes:
        writer: Records the facts.
        calls: The calls in flight, each as its iteration and index.
    """

    def __init__(self, writer: JournalWriter, gate: CallGate) -> None:
        self.writer = writer
        self.calls: set[tuple[int, int]] = set()
        self._gate = gate

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        """Record facts; see `planner_ext.engine.ports.RunStore`.

        The engine records nothing else of the run meanwhile. So a call does not wait where others of its batch are in
        flight: their ends could not be recorded.
        """
        new = {(fact.iteration, fact.index) for fact in facts if isinstance(fact, CallStarted)} - self.calls
        if new and not self.calls:
            await self._gate.until_open(self.writer.run_id)
        self.calls |= new
        try:
            await self.writer.append(run_id, seq, facts)
        except BaseException:
            self.calls -= new
            raise
        finally:
            self.calls -= {(fact.iteration, fact.index) for fact in facts if isinstance(fact, CallFinished)}
            if any(isinstance(fact, ModelReplied | Planned | CallFinished) for fact in facts):
                self._gate.together(self.writer.run_id)
