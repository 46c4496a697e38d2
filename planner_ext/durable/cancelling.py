"""Ends a run from outside, whoever drives it: the journal's next rows decide who was first."""

from contextlib import suppress

from planner_ext.core.facts import Rules, RunStarted
from planner_ext.core.state import Phase
from planner_ext.core.termination import cancellation_reason, stopping_facts
from planner_ext.durable.errors import RunFencedError
from planner_ext.durable.store import JournalStore
from planner_ext.durable.writer import JournalWriter
from planner_ext.engine.ports import Clock

__all__ = ["cancel_run"]


async def cancel_run(store: JournalStore, run_id: str, *, by: str, reason: str, clock: Clock) -> bool:
    """Answer every open call of a run, and end it; False where it had ended before.

    Raises:
        UnknownRunError: If there is no such run.
    """
    while True:
        stored = await store.load(run_id)
        writer = JournalWriter(store, run_id, stored.facts)
        if writer.state.phase is Phase.ENDED:
            return False
        at = clock.now()
        if writer.state.phase is Phase.NEW:
            begun = RunStarted(run_id=run_id, rules=Rules(), messages=(), goal=stored.record.goal, at=at)
            with suppress(RunFencedError):
                await writer.append(run_id, 0, (begun,))
            continue
        with suppress(RunFencedError):  # somebody went on with it meanwhile: read it again
            await writer.append(
                run_id, len(stored.facts), stopping_facts(writer.state, reason=cancellation_reason(by, reason), at=at)
            )
            return True
