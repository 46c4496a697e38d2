"""The store of shared budgets, and what a person reads and resets in it."""

import asyncio
import json
import os
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from planner_ext.core.errors import InvalidLimitError, shown
from planner_ext.core.values import frozen
from planner_ext.durable.database import BUDGET_TABLES, Row, Step, read_values
from planner_ext.durable.errors import (
    DuplicateRowError,
    StoreError,
    is_address,
    redacted,
)

_T = TypeVar("_T")

SELECT_USAGE = "SELECT budget, key, period, iterations, tool_calls, tokens, cost, limits, reached FROM planner_budgets"
_RESET = """
    UPDATE planner_budgets
    SET tool_calls = 0, tokens = 0, cost = 0, reached = NULL, iterations = (
        SELECT COALESCE(SUM(kept), 0) FROM planner_budget_runs AS r
        WHERE r.budget = :budget AND r.key = :key AND r.period = planner_budgets.period
    )
    WHERE budget = :budget AND key = :key AND period = {period} RETURNING period
"""
_DELETE_OLD = """
    DELETE FROM planner_budgets WHERE until < :before AND updated_at < :before RETURNING period
"""
_DELETE_ORPHANS = """
    DELETE FROM planner_budget_runs WHERE NOT EXISTS (
        SELECT 1 FROM planner_budgets AS b
        WHERE b.budget = planner_budget_runs.budget AND b.key = planner_budget_runs.key
              AND b.period = planner_budget_runs.period
    )
"""


@frozen
class BudgetUsage:
    """What one key has used of a shared budget in one period.

    Attributes:
        key: "" for a budget without ``key``.
        period: The hour (``2026-11-22T19+0000``), day or month; ``all`` without
            ``per``.
        iterations: Round trips, with those reserved for requests under way and for
            answers.
        tool_calls: Functions started, or about to start.
        cost: US dollars.
        limits: By name, as the last process declared them.
        reached: The limit that was reached first.
    """

    budget: str
    key: str
    period: str
    iterations: int
    tool_calls: int
    tokens: int
    cost: float
    limits: Mapping[str, int | float]
    reached: str | None = None


class BudgetStore:
    """Where shared budgets are kept: made by `sqlite`, `postgres` or `memory`.

    It opens when it is first used, works in any event loop and thread, and is closed by
    ``async with`` or `aclose`; runs that use it then end with `StoreError`. Two of one
    file or address are equal.
    """

    def __init__(self, where: str | Path | None, *, create: bool = True) -> None:
        """@private Called by `sqlite`, `postgres` and `memory`."""
        self._where = where
        self._create = create
        self._inherited: _Database | None = None
        self._is_closed = False
        self._begin()
        self._place = (
            None
            if where is None
            else str(where)
            if is_address(where)
            else os.path.realpath(where)
        )

    def _begin(self) -> None:
        """Begin without a thread and a database: a forked process inherits neither."""
        self._process = os.getpid()
        self._database: _Database | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = threading.Lock()
        self._opening = asyncio.Lock()

    def _lock(self) -> threading.Lock:
        """Return the lock of the thread in this process."""
        if self._process != os.getpid():
            # Kept: to close it would disturb the process that opened it.
            self._inherited = self._database
            self._begin()
        return self._starting

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, BudgetStore) and other._place == self._place is not None
        )

    def __hash__(self) -> int:
        return hash(self._place or id(self))

    def __repr__(self) -> str:
        return f"BudgetStore({'in memory' if self._where is None else redacted(str(self._where))})"

    @classmethod
    def sqlite(cls, path: str | Path) -> Self:
        """Keep budgets in one SQLite file, which may be that of the runs; for the processes of one host."""
        if is_address(path):
            raise InvalidLimitError(
                f"BudgetStore.sqlite takes the path of a file; got {redacted(str(path))}."
            )
        return cls(path)

    @classmethod
    def postgres(cls, url: str) -> Self:
        """Keep budgets in a PostgreSQL database, which may be that of the runs.

        Args:
            url: ``postgresql://...``; needs ``planner-ext[postgres]``.
        """
        if not is_address(url):
            raise InvalidLimitError(
                f"BudgetStore.postgres takes a postgresql:// address; got {shown(url)}."
            )
        return cls(url)

    @classmethod
    def memory(cls) -> Self:
        """Keep budgets in this process alone, until it ends."""
        return cls(None)

    async def __aenter__(self) -> Self:
        self._is_closed = False
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the store, after what is under way in it; budgets in memory are lost."""
        with self._lock():
            loop = self._loop
            self._loop = None
            self._is_closed = True
        if loop is not None:
            await asyncio.wrap_future(
                asyncio.run_coroutine_threadsafe(self._end(), loop)
            )
            loop.call_soon_threadsafe(loop.stop)

    async def _end(self) -> None:
        # What was submitted before the store was closed is a task by now.
        await asyncio.sleep(0)
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        database = self._database
        self._database = None
        if database is not None:
            await database.close()

    async def usage(
        self,
        budget: str | None = None,
        *,
        key: str | None = None,
        period: str | None = None,
        limit: int = 1000,
    ) -> list[BudgetUsage]:
        """List what was used, the newest periods first.

        Raises:
            StoreError: If the store cannot be used.
        """
        given = {"budget": budget, "key": key, "period": period}
        chosen = {name: value for name, value in given.items() if value is not None}
        where = " AND ".join(f"{name} = :{name}" for name in chosen) or "TRUE"
        statement = f"{SELECT_USAGE} WHERE {where} ORDER BY period DESC, budget, key LIMIT :limit"
        (rows,) = await self.perform(
            self.transact((statement, {**chosen, "limit": limit}))
        )
        return [read_usage(row) for row in rows]

    async def reset(
        self, budget: str, *, key: str = "", period: str | None = None
    ) -> bool:
        """Forget what one key used, by default in the newest period; requests that runs keep stay reserved.

        Returns:
            Whether there was such a row.

        Raises:
            StoreError: If the store cannot be used.
        """
        newest = "(SELECT MAX(period) FROM planner_budgets WHERE budget = :budget AND key = :key)"
        values = {"budget": budget, "key": key} | (
            {} if period is None else {"period": period}
        )
        statement = _RESET.format(period=newest if period is None else ":period")
        (rows,) = await self.perform(self.transact((statement, values)))
        return bool(rows)

    async def prune(self, *, before: datetime) -> int:
        """Delete periods that ended and were last used before a moment, and what unfinished runs took of them.

        Budgets without ``per`` have no end, and are kept.

        Returns:
            How many rows of usage were deleted.

        Raises:
            StoreError: If the store cannot be used.
        """
        deletion: Step = (_DELETE_OLD, {"before": before.timestamp()})
        orphans: Step = (_DELETE_ORPHANS, {})
        rows, _ = await self.perform(self.transact(deletion, orphans))
        return len(rows)

    async def perform(self, work: Coroutine[Any, Any, _T]) -> _T:
        """@private Await work in the store's event loop and thread; cancelling the wait does not cancel it."""
        with self._lock():
            if self._is_closed:
                work.close()
                raise StoreError(
                    f"{self!r} was closed. Close it after the last run that uses it."
                )
            future = asyncio.run_coroutine_threadsafe(work, self._started())
        return await asyncio.shield(asyncio.wrap_future(future))

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """@private Perform steps in one transaction, in the store's own event loop."""
        async with self._opening:
            if self._database is None:
                self._database = await self._open()
        return await self._database.transact(*steps)

    async def _open(self) -> "_Database":
        if self._where is None:
            return _Memory()
        from planner_ext.durable.store import open_database  # noqa: PLC0415  (only where budgets are shared)

        return await open_database(self._where, create=self._create)

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._opening = asyncio.Lock()
            threading.Thread(
                target=_serve,
                args=(self._loop,),
                name="planner_ext budgets",
                daemon=True,
            ).start()
        return self._loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class _Database(Protocol):
    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]: ...

    async def close(self) -> None: ...


class _Memory:
    def __init__(self) -> None:
        import sqlite3  # noqa: PLC0415  (only where budgets are in memory)

        self._conflict = sqlite3.IntegrityError
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        # Nobody need close what is in memory.
        weakref.finalize(self, self._connection.close)
        for statement in BUDGET_TABLES:
            self._connection.execute(statement)

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        try:
            with self._connection as connection:
                connection.execute("BEGIN")
                return [
                    connection.execute(statement, dict(values)).fetchall()
                    for statement, values in steps
                ]
        except self._conflict as error:
            raise DuplicateRowError(str(error)) from error

    async def close(self) -> None:
        self._connection.close()


def read_usage(row: Row) -> BudgetUsage:
    """Read a row of `SELECT_USAGE`."""
    *used, limits, reached = row
    names = [one.name for one in fields(BudgetUsage)]
    values = (*used, json.loads(limits), reached)
    return read_values(BudgetUsage, dict(zip(names, values, strict=True)))
