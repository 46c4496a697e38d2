"""The events of a kept run, for its readers.

A reader has a place in the run's journal. In the process that drives the run it reads from there at once, also the text
that arrives; anywhere else it polls the store. So it gets each fact once, whoever drives the run and however often, and
nobody waits for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from typing import Any

from planner_ext.durable.gate import ArrivingText, CallGate, GatedStore
from planner_ext.durable.store import JournalStore
from planner_ext.engine.ports import Event


async def events_of(
    run_id: str, task: "asyncio.Task[Any]", *, after: int, store: JournalStore, gate: CallGate, poll_seconds: float
) -> AsyncGenerator[Event, None]:
    """Yield a run's facts and the text that arrives here, until a task has ended.

    Args:
        run_id: The run.
        task: Drives the run, or waits until the worker that drives it has done so.
        after: How many of the first facts are left out.
        store: The store of the run.
        gate: Knows the runs that are driven here.
        poll_seconds: How often to read the store for a run that is not driven here.
    """
    place = _Place(after)
    here: GatedStore | None = None
    with gate.reading(run_id) as news:
        while True:
            news.clear()
            is_over = task.done()
            first = place.facts
            stored = () if run_id in gate.driven else await store.load_facts(run_id, first)
            here = gate.driven.get(run_id, here)
            if here is not None:
                for event in place.pass_on(here):
                    yield event
            for fact in stored[place.facts - first :]:
                place.facts += 1
                yield fact
            if is_over:
                return
            await _set_or_late(news, poll_seconds)


async def _set_or_late(news: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await news.wait()


class _Place:
    """How far a reader is.

    Attributes:
        facts: How many facts it has read.
    """

    def __init__(self, facts: int) -> None:
        self.facts = facts
        self._text = ArrivingText(place=-1)
        self._pieces = 0

    def pass_on(self, run: GatedStore) -> Iterator[Event]:
        """Yield what is new of a run that is, or was, driven here; a text that was begun is read to its end."""
        journal = run.writer.facts
        while True:
            if run.text is not self._text and run.text.place == self.facts:
                self._text = run.text
                self._pieces = 0
            if self._text.place == self.facts and self._pieces < len(self._text.pieces):
                self._pieces += 1
                yield self._text.pieces[self._pieces - 1]
            elif self.facts < len(journal):
                self.facts += 1
                yield journal[self.facts - 1]
            else:
                return
