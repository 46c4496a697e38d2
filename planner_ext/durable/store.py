"""Runs in a database: everything that workers and approvers do there, each in one transaction."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from planner_ext.durable import statements as sql
from planner_ext.durable.database import Database, Row, Step, Value
from planner_ext.durable.errors import DuplicateRowError, RunFencedError, StoreError, UnknownRunError
from planner_ext.durable.records import RunRecord, StoredRun, read_run
from planner_ext.durable.rows import FactRow, read_facts

__all__ = ["JournalStore", "Question", "RunMove"]

logger = logging.getLogger(__name__)

_STATUSES = ("running", "paused", "answered", "incomplete", "limit_reached", "stopped")
"""What a run's row says of it; one that waits for an answer, ``asked`` as a result, is ``paused``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A call that a pause asks a person about, as its row; ``call`` is JSON text of what `PendingApproval` shows."""

    id: str
    fingerprint: str
    call: str
    expires_at: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMove:
    """What facts mean for the derived tables.

    Attributes:
        status: The run's new status; None leaves it.
        wake_at: When the first question expires, where the run pauses.
        asked: Questions that the pause opens; those that are there already stay as they are.
        closed: Ids of questions that are answered.
        decided: The decisions that answered them, by id, as JSON text and with their times, where a person made them.
        undecided: Ids of further ones, on which nobody may have decided meanwhile: else nothing is recorded.
        at: When.
    """

    status: str | None = None
    wake_at: float | None = None
    asked: tuple[Question, ...] = ()
    closed: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    decided: Mapping[str, tuple[str, float]] = field(default_factory=dict[str, tuple[str, float]])
    at: float = 0.0


class JournalStore:
    """The runs in one database.

    Safety is the journal's unique ``(run_id, seq)``; owners only keep workers out of each other's way.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, run_id: str, goal: str, *, owner: str | None, at: float) -> bool:
        """Enter a run, owned at once; False where the name is taken."""
        values: Mapping[str, Value] = {"run_id": run_id, "goal": json.dumps(goal), "owner": owner, "at": at}
        return bool(await self._one(sql.CREATE_RUN, values))

    async def append(self, run_id: str, rows: Sequence[FactRow], move: RunMove | None = None) -> None:
        """Add rows to a run's journal, and what follows from them to the derived tables, durably.

        Raises:
            RunFencedError: If one of the places is taken: somebody else has gone on with the run, or decided of it.
        """
        steps: list[Step] = [
            (sql.ADD_FACT, {"run_id": run_id, "seq": row.seq, "schema": row.schema, "fact": row.fact}) for row in rows
        ]
        if move is not None:
            steps += _moving(run_id, move)
        try:
            await self._database.transact(*steps)
        except DuplicateRowError as error:
            raise RunFencedError(
                f"Run {run_id!r} was gone on with elsewhere: row {rows[0].seq} of its journal is taken, or a question "
                "was decided meanwhile. Nothing was recorded here; read the run again."
            ) from error

    async def record(self, run_id: str) -> RunRecord:
        """Read what is listed of a run.

        Raises:
            UnknownRunError: If there is none.
        """
        return _record(run_id, await self._one(sql.GET_RUN, {"run_id": run_id}))

    async def load(self, run_id: str) -> StoredRun:
        """Read a run and its journal.

        Raises:
            UnknownRunError: If there is none.
            InvalidJournalError: If the journal cannot be read.
        """
        key = {"run_id": run_id}
        runs, facts = await self._database.transact((sql.GET_RUN, key), (sql.GET_FACTS, key))
        return StoredRun(record=_record(run_id, runs), facts=read_facts(run_id, facts))

    async def runs(self, *, status: str | None = None, limit: int = 50, offset: int = 0) -> list[RunRecord]:
        """List runs, those that moved last first; one whose row is damaged is left out and logged.

        Raises:
            StoreError: If no run can have the status, or the page cannot be one.
        """
        page = _page(limit, offset)
        if status is None:
            return _readable(await self._one(sql.LIST_RUNS, page))
        return _readable(await self._one(sql.LIST_RUNS_BY_STATUS, {**page, "status": _checked_status(status)}))

    async def count_runs(self, *, status: str | None = None) -> int:
        """Count runs, only those of a status where one is given.

        Raises:
            StoreError: If no run can have the status.
        """
        if status is None:
            return _number(await self._one(sql.COUNT_RUNS, {}))
        return _number(await self._one(sql.COUNT_RUNS_BY_STATUS, {"status": _checked_status(status)}))

    async def due(self, now: float) -> list[RunRecord]:
        """List the runs that there is something to do for, if nobody does it: unfinished, decided, or expired."""
        return _readable(await self._one(sql.DUE_RUNS, {"now": now}))

    async def claim(self, run_id: str, owner: str, *, seen: str | None) -> bool:
        """Take a run over, if its owner is still the one that was seen."""
        return bool(await self._one(sql.CLAIM_RUN, {"run_id": run_id, "owner": owner, "seen": seen or ""}))

    async def release(self, run_id: str, owner: str) -> None:
        """Give a run up, if it is still one's own."""
        await self._one(sql.RELEASE_RUN, {"run_id": run_id, "owner": owner})

    async def open_approvals(
        self, now: float, *, run_id: str | None = None, limit: int = 50, offset: int = 0
    ) -> Sequence[Row]:
        """List the rows of questions that are open, of all runs or of one, the oldest first; see `read_approval`.

        Raises:
            StoreError: If the page cannot be one.
        """
        page: Mapping[str, Value] = {"now": now, **_page(limit, offset)}
        if run_id is None:
            return await self._one(sql.LIST_OPEN_APPROVALS, page)
        return await self._one(sql.LIST_OPEN_APPROVALS_OF_RUN, {**page, "run_id": run_id})

    async def count_open_approvals(self, now: float, *, run_id: str | None = None) -> int:
        """Count the questions that are open, of all runs or of one."""
        if run_id is None:
            return _number(await self._one(sql.COUNT_OPEN_APPROVALS, {"now": now}))
        return _number(await self._one(sql.COUNT_OPEN_APPROVALS_OF_RUN, {"now": now, "run_id": run_id}))

    async def approval(self, key: str) -> tuple[Row | None, Sequence[Row]]:
        """Read the row of one question, open or not, and those of the decisions on it that were refused."""
        rows, refused = await self._database.transact((sql.GET_APPROVAL, {"id": key}), (sql.LIST_REFUSALS, {"id": key}))
        return (rows[0] if rows else None), refused

    async def refusals(self, *, run_id: str | None = None) -> Sequence[Row]:
        """List the rows of decisions that were refused: of a run, or of every question that is open."""
        if run_id is None:
            return await self._one(sql.LIST_REFUSALS_OF_OPEN, {})
        return await self._one(sql.LIST_REFUSALS_OF_RUN, {"run_id": run_id})

    async def refuse(self, run_id: str, key: str, decision: str, *, problem: str, at: float) -> None:
        """Keep a decision, as JSON text, that was not taken, and why."""
        values = {"run_id": run_id, "id": key, "decision": decision, "problem": json.dumps(problem), "at": at}
        await self._one(sql.ADD_REFUSAL, values)

    async def decide(self, key: str, decision: str, *, fingerprint: str, at: float) -> bool:
        """Put a decision, as JSON text, on an open question; False where it is not open any more."""
        values: Mapping[str, Value] = {"id": key, "decision": decision, "fingerprint": fingerprint, "at": at}
        return bool(await self._one(sql.DECIDE_APPROVAL, values))

    async def decisions(self, run_id: str) -> Sequence[Row]:
        """List the rows of a run's questions whose decisions no worker has taken yet."""
        return await self._one(sql.LIST_DECISIONS, {"run_id": run_id})

    async def reopen(self, key: str, problem: str) -> None:
        """Ask a question again whose decision cannot be taken; keep that decision, and say why."""
        values = {"id": key, "problem": json.dumps(problem)}
        await self._database.transact((sql.KEEP_REOPENED, values), (sql.REOPEN_APPROVAL, values))

    async def close(self) -> None:
        """Let go of the database."""
        await self._database.close()

    async def _one(self, statement: str, values: Mapping[str, Value]) -> Sequence[Row]:
        return (await self._database.transact((statement, values)))[0]


def _page(limit: object, offset: object) -> dict[str, Value]:
    """Read which part of a list is wanted.

    Raises:
        StoreError: If one of the two is no such number.
    """
    for name, value in (("limit", limit), ("offset", offset)):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
            raise StoreError(f"{name} must be a whole number, 0 or more; got {value!r}.")
    return {"limit": cast("int", limit), "offset": cast("int", offset)}


def _number(rows: Sequence[Row]) -> int:
    return int(rows[0][0] or 0)


def _checked_status(status: object) -> str:
    if status not in _STATUSES:
        raise StoreError(f"No run has the status {status!r}. There are: {', '.join(_STATUSES)}.")
    return cast("str", status)


def _readable(rows: Sequence[Row]) -> list[RunRecord]:
    """Read the rows of runs; one that cannot be read is no reason to leave the others alone."""
    found: list[RunRecord] = []
    for row in rows:
        try:
            found.append(read_run(row))
        except StoreError as error:
            logger.error("A run is left alone: %s", error)
    return found


def _record(run_id: str, rows: Sequence[Row]) -> RunRecord:
    if not rows:
        raise UnknownRunError(f"There is no run {run_id!r} in this store. List them to see their names.")
    return read_run(rows[0])


def _moving(run_id: str, move: RunMove) -> list[Step]:
    def closing(key: str) -> Mapping[str, Value]:
        decision, at = move.decided.get(key, (None, None))
        return {"id": key, "decision": decision, "decided_at": at}

    steps: list[Step] = [(sql.CLOSE_APPROVAL, closing(key)) for key in move.closed]
    for key in move.undecided:
        steps += [(sql.CLOSE_UNDECIDED, closing(key)), (sql.REFUSE_DECIDED, {"id": key})]
    for one in move.asked:
        asked: Mapping[str, Value] = {
            "id": one.id,
            "run_id": run_id,
            "fingerprint": one.fingerprint,
            "call": one.call,
            "asked_at": move.at,
            "expires_at": one.expires_at,
        }
        steps.append((sql.OPEN_APPROVAL, asked))
    if move.status is not None:
        moved: Mapping[str, Value] = {
            "run_id": run_id,
            "status": move.status,
            "wake_at": move.wake_at,
            "at": move.at,
        }
        steps.append((sql.MOVE_RUN, moved))
    return steps
