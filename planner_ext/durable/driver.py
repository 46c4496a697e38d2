"""Drives the segments of one run: folds its journal, takes what was decided of it, and lets its planner go on."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from planner_ext.approval.decisions import Approve, Decision
from planner_ext.approval.pending import InDoubt
from planner_ext.core.limits import Limits
from planner_ext.durable.decisions import read_decision, refused_text
from planner_ext.durable.errors import ApprovalRefusedError
from planner_ext.durable.records import read_approval
from planner_ext.durable.segment import DurablePlanner, Segment
from planner_ext.durable.store import JournalStore
from planner_ext.durable.writer import JournalWriter
from planner_ext.engine.concurrency import SystemClock
from planner_ext.engine.ports import Clock, RunStore
from planner_ext.sk.approval import DecisionRefusedError
from planner_ext.sk.budget import Price

__all__ = ["SegmentDriver"]

logger = logging.getLogger(__name__)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Decisions:
    """What was decided of a run and not yet taken: by call id, with the rows' ids and times."""

    by_call: Mapping[str, Decision]
    decided_at: Mapping[str, float]
    ids: Mapping[str, str]


class SegmentDriver:
    """Drives runs of one store, each in whatever process claimed it.

    Safe in two processes at once: the one that loses a place in the journal stops with `RunFencedError`.
    """

    def __init__(self, store: JournalStore, *, in_doubt: InDoubt = "person", clock: Clock | None = None) -> None:
        self._store = store
        self._clock = clock or SystemClock()
        self._in_doubt: InDoubt = in_doubt

    async def drive(
        self,
        run_id: str,
        planner: DurablePlanner[R],
        kernel: Any,
        *,
        arguments: Any = None,
        budget: Limits | None = None,
        price: Price | None = None,
        decisions: Mapping[str, Decision] | None = None,
    ) -> R:
        """Go on with a run to its end, or to a pause that nobody has decided on yet.

        Args:
            run_id: The run.
            planner: Drives it.
            kernel: Whose functions may be called.
            arguments: The application's arguments, which are not stored.
            budget: Replaces the run's limits; also of a run that a limit ended.
            price: Prices the requests in place of the planner's own, over all segments.
            decisions: By call id, beside those that were made through `Approvals`: all of them are taken, or none.

        Raises:
            RunFencedError: If somebody else goes on with the run.
            DecisionRefusedError: If one of the ``decisions`` cannot be taken; those of others are asked for again.
            Exception: On a fault.
        """
        seen: set[str] = set()
        while True:
            stored = await self._store.load(run_id)
            made = await self._made(run_id)
            await self._refuse_second(run_id, made, decisions or {})
            writer = JournalWriter(self._store, run_id, stored.facts, decided=made.ids.values())
            segment = Segment(
                run_id=run_id,
                goal=stored.record.goal,
                store=_watched(writer),
                facts=stored.facts,
                decisions={**made.by_call, **(decisions or {})},
                decided_at=made.decided_at,
                budget=budget,
                price=price,
                in_doubt=self._in_doubt,
            )
            try:
                result = await planner.journaled(kernel, segment, arguments=arguments).result()
            except DecisionRefusedError as error:
                if (key := made.ids.get(error.call_id or "")) is None or error.call_id in (decisions or {}):
                    await self._keep_refused(run_id, writer.asked_about(error.call_id or ""), decisions or {}, error)
                    raise
                await self._ask_again(key, error)
                continue
            budget = decisions = None
            if stored.record.status == "paused":
                seen |= set(made.ids.values())
            if not set((await self._made(run_id)).ids.values()) - seen:
                return result

    async def _made(self, run_id: str) -> _Decisions:
        """Read what was decided; a row that cannot be taken asks its question again, and says why."""
        by_call, decided_at, ids = dict[str, Decision](), dict[str, float](), dict[str, str]()
        for row in await self._store.decisions(run_id):
            key = str(row[0])
            try:
                approval, decision = read_approval(row), read_decision(str(row[7]))
            except ApprovalRefusedError as error:
                await self._ask_again(key, error)
                continue
            if isinstance(decision, Approve):
                decision = replace(decision, fingerprint=approval.fingerprint)
            by_call[approval.call_id], ids[approval.call_id] = decision, key
            decided_at[approval.call_id] = float(row[8] or 0)
        return _Decisions(by_call, decided_at, ids)

    async def _refuse_second(self, run_id: str, made: _Decisions, decisions: Mapping[str, Decision]) -> None:
        """Let the first decision on a call count, wherever the second is made."""
        for call_id in decisions:
            if call_id in made.ids:
                error = DecisionRefusedError(
                    f"The call {call_id!r} was decided before: the first decision counts, this one changed nothing. "
                    "Resume the run without it.",
                    call_id=call_id,
                )
                await self._keep_refused(run_id, made.ids[call_id], decisions, error)
                raise error

    async def _keep_refused(
        self, run_id: str, key: str, decisions: Mapping[str, Decision], error: DecisionRefusedError
    ) -> None:
        """Keep a decision that was given with the run and refused, where the error says which one it was."""
        if error.call_id is not None and error.call_id in decisions:
            text = refused_text(decisions[error.call_id])
            await self._store.refuse(run_id, key, text, problem=str(error), at=self._clock.now())

    async def _ask_again(self, key: str, error: Exception) -> None:
        logger.warning("The decision on %s cannot be taken, it is asked for again: %s", key, error)
        await self._store.reopen(key, str(error))


def _watched(writer: JournalWriter) -> RunStore:
    """The one seam for the crash points of the tests; see `planner_ext.testing.crash`."""
    if "PLANNER_EXT_CRASH_AT" not in os.environ:
        return writer
    from planner_ext.testing.crash import CrashingStore  # noqa: PLC0415  (nothing of it in an application)

    return CrashingStore.of_environment(writer)
