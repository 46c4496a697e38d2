"""The journal of one run while it is being written: a fact is stored, folded and told, in one order for all."""

import asyncio
import logging
from collections.abc import Iterable

from planner_ext.core.facts import Fact
from planner_ext.core.fold import apply, fold
from planner_ext.core.settle import stopping_facts
from planner_ext.ports import Emit, Observer, Ports

__all__ = ["Recorder"]

logger = logging.getLogger(__name__)


class Recorder:
    """Takes the facts of one run.

    Attributes:
        facts: The journal so far.
        state: Its fold.
    """

    def __init__(self, facts: Iterable[Fact], ports: Ports, emit: Emit | None) -> None:
        self.facts = list(facts)
        self.state = fold(self.facts)
        self._ports = ports
        self._emit = emit
        self._recording = asyncio.Lock()
        self._told = ports.store is not None or bool(ports.observers) or emit is not None
        self._mark = ports.clock.monotonic()

    def now(self) -> float:
        """Seconds since the epoch."""
        return self._ports.clock.now()

    def lap(self) -> float:
        """Seconds of activity since this was last asked."""
        now = self._ports.clock.monotonic()
        seconds, self._mark = now - self._mark, now
        return seconds

    async def record(self, fact: Fact) -> None:
        """Add a fact to the journal, then tell everybody who watches; one after the other, in the journal's order."""
        if not self._told:
            return self._note(fact)  # nothing is waited for, so nothing can come in between
        async with self._recording:
            if self._ports.store is not None:
                await self._ports.store.append(self.state.run_id, len(self.facts), (fact,))
            self._note(fact)
            for observer in self._ports.observers:
                await _observe(observer, fact)
            if self._emit is not None:
                await self._emit(fact)
        return None

    async def settle(self, reason: str) -> None:
        """Answer every call of the open batch and end the run; then tell the observers, since nobody else listens."""
        facts = stopping_facts(self.state, reason=reason, at=self.now(), seconds=self.lap())
        for fact in facts:
            self._note(fact)
        for fact in facts:
            for observer in self._ports.observers:
                await _observe(observer, fact)

    def _note(self, fact: Fact) -> None:
        self.state = apply(self.state, fact)
        self.facts.append(fact)
        if self._ports.follow is not None:
            self._ports.follow(self.state, fact)


async def _observe(observer: Observer, fact: Fact) -> None:
    try:
        if (waiting := observer(fact)) is not None:
            await waiting
    except Exception:
        logger.exception("The observer %r failed on %s; the run goes on.", observer, fact.type)
