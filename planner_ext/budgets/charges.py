"""What a run takes of shared budgets: reserved before it is used, in one transaction over all budgets of a store.

``planner_budgets`` has what was used, by budget, key and period;
``planner_budget_runs`` the totals of each run that is driven. A reservation writes the
new totals, and adds the difference to the budget, unless a limit forbids that: it may
be repeated, and a crash neither loses nor repeats a charge.

A run's row belongs to one activation, named by the length of its first journal; a later
one claims it, and an earlier one then changes nothing. It is deleted when the run
pauses or ends.
"""

# ruff: noqa: S608  (only this module's own text is put into a statement)

import asyncio
import inspect
import json
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import uuid4

from planner_ext.budgets.budget import LIMITS, SharedBudget
from planner_ext.budgets.store import SELECT_USAGE, BudgetStore, BudgetUsage, read_usage
from planner_ext.core.accounts import SharedBudgets
from planner_ext.core.facts import Fact, RunStarted, SharedBudgetsChecked, cost_of
from planner_ext.core.values import Usage
from planner_ext.durable.database import Row, Step, Value
from planner_ext.durable.errors import DuplicateRowError, RunFencedError, StoreError
from planner_ext.durable.retention import GET_DIGEST_KEY, forgotten_key
from planner_ext.engine.concurrency import Raised, caught

logger = logging.getLogger(__name__)

_TRIES = 5

_PATIENCE = 10.0
"""Seconds that ``on_limit_reached`` may take."""

_Parts: TypeAlias = Mapping[str, float]
"""What is used, by part."""

_OF_ACCOUNT = "WHERE budget = :budget AND key = :key AND period = :period"
_OF_RUN = "WHERE run = :run AND budget = :budget AND key = :key"
_OF_ACTIVATION = f"{_OF_RUN} AND activation = :activation"
_CLAIM = f"UPDATE planner_budget_runs SET activation = :activation {_OF_RUN} AND activation < :activation"
_SELECT_RUN = f"""
    SELECT activation, period, kept, iterations, tool_calls, tokens, cost FROM planner_budget_runs {_OF_RUN}
"""
_ADD_ACCOUNT = """
    INSERT INTO planner_budgets (budget, key, period, until, limits, updated_at)
    VALUES (:budget, :key, :period, :until, :limits, :at)
    ON CONFLICT (budget, key, period) DO UPDATE SET limits = excluded.limits
"""
_ADD_RUN = """
    INSERT INTO planner_budget_runs (run, budget, key, activation, period, iterations, tool_calls, tokens, cost)
    VALUES (:run, :budget, :key, :activation, :period, :iterations, :tool_calls, :tokens, :cost)
    ON CONFLICT (run, budget, key) DO NOTHING
"""
_ITERATIONS = "b.iterations + :iterations + :kept - r.iterations - r.kept"
_CHARGE = f"""
    UPDATE planner_budgets AS b
    SET iterations = {_ITERATIONS}, tool_calls = b.tool_calls + :tool_calls - r.tool_calls,
        tokens = b.tokens + :tokens - r.tokens, cost = b.cost + :cost - r.cost, stamp = :stamp, updated_at = :at
    FROM planner_budget_runs AS r
    WHERE b.budget = :budget AND b.key = :key AND b.period = :period
          AND r.run = :run AND r.activation = :activation
          AND r.budget = b.budget AND r.key = b.key AND r.period = b.period
"""
"""Adds to a budget what a run takes more than its row says."""
_CONDITIONS = {
    "max_iterations": f" AND {_ITERATIONS} <= :max_iterations",
    "max_tool_calls": " AND b.tool_calls + :tool_calls - r.tool_calls <= :max_tool_calls",
    "max_total_tokens": " AND b.tokens + :tokens - r.tokens < :max_total_tokens",
    "max_cost": " AND b.cost + :cost - r.cost < :max_cost",
}
_KEEP = f"""
    UPDATE planner_budget_runs SET period = :period, iterations = :iterations, tool_calls = :tool_calls,
        tokens = :tokens, cost = :cost, kept = :kept {_OF_ACTIVATION} RETURNING run
"""
_KEEP_IF_CHARGED = f"""
    INSERT INTO planner_budget_runs (run, budget, key, activation, period, iterations, tool_calls, tokens, cost, kept)
    VALUES (:run, :budget, :key, :activation, :period, :iterations, :tool_calls, :tokens, :cost, (
        SELECT CASE WHEN COUNT(*) = 1 THEN :kept END FROM planner_budgets {_OF_ACCOUNT} AND stamp = :stamp
    ))
    ON CONFLICT (run, budget, key) DO UPDATE SET period = excluded.period, iterations = excluded.iterations,
        tool_calls = excluded.tool_calls, tokens = excluded.tokens, cost = excluded.cost, kept = excluded.kept
"""
"""Writes null, which rolls the transaction back, unless the budget was charged
before."""
_DELETE_RUN = f"DELETE FROM planner_budget_runs {_OF_ACTIVATION} RETURNING run"
_REACHED = f"""
    UPDATE planner_budgets SET reached = :limit {_OF_ACCOUNT} AND reached IS NULL
    RETURNING budget, key, period, iterations, tool_calls, tokens, cost, limits, reached
"""


def charges_of(
    budgets: Sequence[SharedBudget],
    arguments: Mapping[str, Any],
    now: Callable[[], float],
    outer: SharedBudgets | None = None,
) -> SharedBudgets | None:
    """Make what a run takes of shared budgets, but for those that the run around takes from."""
    around = outer
    while isinstance(around, _Charges):
        taken = {(budget.store, budget.name) for budget in around.budgets}
        budgets = [
            budget for budget in budgets if (budget.store, budget.name) not in taken
        ]
        around = around.outer
    for store in dict.fromkeys(budget.store for budget in budgets):
        outer = _Charges(
            store,
            tuple(one for one in budgets if one.store == store),
            arguments,
            now,
            outer,
        )
    return outer


@dataclass(eq=False)
class _Line:
    budget: SharedBudget
    key: str
    before: _Parts = field(default_factory=dict[str, float])
    stored: _Parts = field(default_factory=dict[str, float])
    kept: int = 0
    period: str | None = None

    @property
    def values(self) -> dict[str, Value]:
        return {"budget": self.budget.name, "key": self.key}

    def account(self, at: float) -> Step:
        """Return the step that adds the row of a moment's period, unless it is there."""
        values: dict[str, Value] = {
            "period": self.budget.period(at),
            "until": self.budget.period_end(at),
            "limits": json.dumps(self.budget.given_limits()),
            "at": at,
        }
        return _ADD_ACCOUNT, {**self.values, **values}


@dataclass(frozen=True, slots=True)
class _Refusal:
    """The limit that refuses a reservation; ``usage`` is set if no process has noted it yet."""

    budget: SharedBudget
    limit: str
    usage: BudgetUsage | None


@dataclass(slots=True)
class _Attempt:
    """A reservation; ``granted`` once the store has it, ``cancelled`` if its caller has left."""

    wanted: Usage
    kept: int
    granted: bool = False
    cancelled: bool = False


class _Charges:
    """What a run takes of the budgets in one store.

    ``_total`` is what this activation has taken, in all periods. The store has the
    totals of the run since the budget was added.
    """

    def __init__(
        self,
        store: BudgetStore,
        budgets: Sequence[SharedBudget],
        arguments: Mapping[str, Any],
        now: Callable[[], float],
        outer: SharedBudgets | None,
    ) -> None:
        self.budgets = budgets
        self.outer = outer
        given = [budget.max_cost for budget in budgets]
        given += [] if outer is None else [outer.max_cost]
        costs = [cost for cost in given if cost is not None]
        tokens = any(budget.max_total_tokens or budget.max_cost for budget in budgets)
        self.max_cost = min(costs, default=None)
        self.counts_tokens = tokens or (outer is not None and outer.counts_tokens)
        self._limited = {
            part
            for part, name in LIMITS.items()
            for budget in budgets
            if name in budget.given_limits()
        }
        self._store = store
        self._arguments = arguments
        self._now = now
        self._turn = asyncio.Lock()
        self._pending = deque[tuple[Usage, int] | _Attempt]()
        self._lines: list[_Line] = []
        self._run = uuid4().hex
        self._activation = 0
        self._known: _Parts = dict.fromkeys(LIMITS, 0.0)
        self._total: _Parts = dict.fromkeys(LIMITS, 0.0)
        self._kept = 0
        self._opened = self._used = False

    def begin(self, facts: Sequence[Fact], *, is_kept: bool) -> None:
        """Take in the journal with which an activation begins."""
        match facts:
            case [RunStarted(run_id=run_id, at=at), *more] if is_kept:
                self._run = f"{run_id} {float(at)!r}"  # a deleted run frees its name
                self._activation = len(facts)
                # An earlier process may have left something reserved.
                self._used = bool(more)
            case _:
                pass
        self._lines = self._new_lines()
        spent = sum(map(cost_of, facts), Usage())
        self._known = _parts(spent)

    async def reserve(
        self, *, requests: int = 0, calls: int = 0, kept: int = 0, forced: bool = False
    ) -> SharedBudgetsChecked | None:
        """Reserve all of it in all of the budgets, or nothing."""
        wanted = Usage(iterations=requests, tool_calls=calls)
        due = {
            "tokens": True,
            "cost": True,
            "iterations": requests > 0 or kept > 0,
            "tool_calls": calls > 0,
        }
        checked = (
            set[str]() if forced else {part for part, is_due in due.items() if is_due}
        )
        refused = None
        if requests or kept or not checked.isdisjoint(self._limited):
            refused = await self._attempted(_Attempt(wanted, kept), checked)
        else:
            # No budget limits it: it is stored with the next request.
            self._pending.append((wanted, 0))
        if refused is not None:
            if refused.usage is not None:
                await _tell(refused.budget, refused.usage)
            return _fact(refused)
        if self.outer is None:
            return None
        granted = False
        try:
            above = await self.outer.reserve(
                requests=requests, calls=calls, kept=kept, forced=forced
            )
            granted = above is None
        finally:
            if not granted:
                self._pending.append((Usage() - wanted, -kept))
        return above

    def charge(self, spent: Usage) -> None:
        """Add what was spent beside the reservations."""
        self._pending.append((spent, 0))
        if self.outer is not None:
            self.outer.charge(spent)

    async def settle(self, *, kept: int) -> None:
        """Store what was charged; release requests kept for an answer."""
        self._pending.append((Usage(), kept))
        try:
            if self._used:
                await self._store.perform(self._settle())
        except StoreError as error:
            logger.warning(
                "What a run took of shared budgets is not settled, and stays reserved: %s",
                error,
            )
        finally:
            if self.outer is not None:
                await self.outer.settle(kept=kept)

    async def _attempted(
        self, attempt: "_Attempt", checked: set[str]
    ) -> _Refusal | None:
        """Reserve; if the caller is cancelled meanwhile, the next write gives it back."""
        self._used = True
        try:
            return await self._store.perform(self._reserve(attempt, checked))
        except asyncio.CancelledError:
            attempt.cancelled = True  # before it is appended: `_reserve` looks after it has taken in what is pending
            self._pending.append(attempt)
            raise

    async def _reserve(self, attempt: "_Attempt", checked: set[str]) -> _Refusal | None:
        async with self._turn:
            await self._open()
            self._drain()
            if attempt.cancelled:
                return None
            at = self._now()
            total = _plus(self._total, _parts(attempt.wanted))
            kept = self._kept + attempt.kept
            if any(line.period != line.budget.period(at) for line in self._lines):
                checked = checked | {
                    "iterations",
                    "tokens",
                    "cost",
                }  # what was kept, was kept in another period
            for _ in range(_TRIES):
                steps = self._steps(total, kept, checked, at)
                try:
                    await self._store.transact(*steps)
                except DuplicateRowError:
                    if (
                        refused := await self._refused(total, kept, checked, at)
                    ) is not None:
                        return refused
                    await self._read()  # it fits by now, or a row was deleted
                else:
                    self._take(total, kept, at)
                    attempt.granted = True
                    return None
            raise StoreError(
                f"{self._store!r} does not keep what a run takes: its rows vanish or change. See who else writes them."
            )

    async def _open(self) -> None:
        if self._opened:
            return
        self._lines = self._lines or self._new_lines()
        await self._read()
        for line in self._lines:
            line.before = {
                part: max(line.stored[part], self._known[part]) for part in LIMITS
            }
        self._opened = True

    def _new_lines(self) -> list[_Line]:
        """Determine the keys, in the one order in which all processes lock rows."""
        lines = [
            _Line(budget, budget.key_of(self._arguments)) for budget in self.budgets
        ]
        return sorted(lines, key=lambda line: line.budget.name)

    async def _read(self) -> None:
        """Claim and read the run's rows; without one, what is known to be spent was charged before.

        Raises:
            RunFencedError: If a later activation has claimed one.
        """
        steps: list[Step] = []
        for line in self._lines:
            own = self._values(line)
            steps += [(_CLAIM, own), (_SELECT_RUN, own)]
        secret, *found = await self._store.transact(GET_DIGEST_KEY, *steps)
        if secret and await self._use_digests(secret):
            return await self._read()
        for line, rows in zip(self._lines, found[1::2], strict=True):
            line.period = None
            line.kept = 0
            line.stored = line.stored or dict(self._known)
            for activation, period, kept, *totals in rows:
                if activation != self._activation:
                    raise RunFencedError(
                        "Another worker has continued this run, and takes of its shared budgets."
                    )
                line.period = period
                line.kept = kept
                line.stored = dict(zip(LIMITS, totals, strict=True))

    async def _use_digests(self, secret: Sequence[Row]) -> bool:
        """Replace keys that were forgotten in the present period; return whether there are some."""
        at = self._now()
        changed = False
        for line in self._lines:
            digest = forgotten_key(secret, line.key)
            account = {
                "budget": line.budget.name,
                "key": digest,
                "period": line.budget.period(at),
            }
            (rows,) = await self._store.transact(
                (f"{SELECT_USAGE} {_OF_ACCOUNT}", account)
            )
            if rows:
                line.key = digest
                changed = True
        return changed

    def _values(self, line: _Line) -> dict[str, Value]:
        return {**line.values, "run": self._run, "activation": self._activation}

    def _drain(self) -> None:
        while self._pending:
            match self._pending.popleft():
                case _Attempt() as attempt:
                    spent = Usage() - attempt.wanted
                    kept = -attempt.kept
                    if not attempt.granted:
                        continue
                case spent, kept:
                    pass
            self._total = _plus(self._total, _parts(spent))
            self._kept = self._kept + kept

    def _steps(
        self, total: _Parts, kept: int, checked: set[str], at: float
    ) -> list[Step]:
        """List the statements of a reservation; without ``checked``, it always succeeds."""
        steps: list[Step] = []
        for line in self._lines:
            period = line.budget.period(at)
            limits = line.budget.given_limits()
            values = {**self._values(line), "at": at, "stamp": uuid4().hex}
            account = line.account(at)
            if line.period is None:
                new = {**values, **_columns(line.stored), "period": period}
                steps += [account, (_ADD_RUN, new)]
            elif line.period != period:
                taken = _plus(line.before, self._total)
                old = {**values, **_columns(taken), "kept": 0}
                steps += [
                    (_CHARGE, {**old, "period": line.period}),
                    account,
                    (_KEEP, {**old, "period": period}),
                ]
            values |= {
                **_columns(_plus(line.before, total)),
                "kept": kept,
                "period": period,
            }
            limits = {
                name: limits[name]
                for part, name in LIMITS.items()
                if part in checked and name in limits
            }
            conditions = "".join(_CONDITIONS[name] for name in limits)
            steps += [
                (f"{_CHARGE}{conditions}", {**values, **limits}),
                (_KEEP_IF_CHARGED, values),
            ]
        return steps

    def _take(self, total: _Parts, kept: int, at: float) -> None:
        self._total = total
        self._kept = kept
        for line in self._lines:
            line.stored = _plus(line.before, total)
            line.kept = kept
            line.period = line.budget.period(at)

    async def _refused(
        self, total: _Parts, kept: int, checked: set[str], at: float
    ) -> _Refusal | None:
        """Find the limit that refuses a reservation; None if none does any more."""
        for line in self._lines:
            period = line.budget.period(at)
            limits = line.budget.given_limits()
            (rows,) = await self._store.transact(
                (f"{SELECT_USAGE} {_OF_ACCOUNT}", {**line.values, "period": period})
            )
            stored = (
                line.stored
                if line.period in (period, None)
                else _plus(line.before, self._total)
            )
            more = _plus(
                _plus(line.before, total),
                {part: -value for part, value in stored.items()},
            )
            kept_before = line.kept if line.period == period else 0
            more["iterations"] += kept - kept_before
            for part, name in LIMITS.items():
                used = 0
                if rows:
                    used = getattr(read_usage(rows[0]), part)
                over = used + more[part] - limits.get(name, math.inf)
                if part in checked and (
                    over > 0 or (over == 0 and part in ("tokens", "cost"))
                ):
                    noted = await self._reached(line, name, period, at)
                    return _Refusal(line.budget, name, noted)
        return None

    async def _reached(
        self, line: _Line, limit: str, period: str, at: float
    ) -> BudgetUsage | None:
        _, rows = await self._store.transact(
            line.account(at),
            (_REACHED, {**line.values, "period": period, "limit": limit}),
        )
        return read_usage(rows[0]) if rows else None

    async def _settle(self) -> None:
        async with self._turn:
            await self._open()
            self._drain()
            with suppress(RunFencedError):
                while not await self._settled():
                    await self._read()  # a key was forgotten meanwhile
            for line in self._lines:
                line.stored = _plus(line.before, self._total)
                line.kept = self._kept
                line.period = line.period if self._kept else None

    async def _settled(self) -> bool:
        """Write what was taken; False if a row is not there any more, or is a later activation's."""
        steps: list[Step] = []
        for line in self._lines:
            if line.period is None:
                continue
            values = {
                **self._values(line),
                **_columns(_plus(line.before, self._total)),
                "period": line.period,
            }
            values["kept"] = self._kept
            charged = {**values, "at": self._now(), "stamp": ""}
            row = _KEEP if self._kept else _DELETE_RUN
            steps += [(_CHARGE, charged), (row, values)]
        if not steps:
            return True
        found = await self._store.transact(*steps)
        return all(found[1::2])


def _parts(spent: Usage) -> dict[str, float]:
    parts = spent.by_part
    return {part: parts[part] for part in LIMITS}


def _plus(one: _Parts, other: _Parts) -> dict[str, float]:
    return {part: one[part] + other[part] for part in LIMITS}


def _columns(parts: _Parts) -> dict[str, Value]:
    """Write totals as values of columns: all but the cost are whole numbers."""
    return {
        part: float(value) if part == "cost" else int(value)
        for part, value in parts.items()
    }


def _fact(refused: _Refusal) -> SharedBudgetsChecked:
    """Say which limit was reached, without the key: a model and other persons may read it."""
    budget = refused.budget
    limit = refused.limit
    per = "" if budget.per is None else f" per {budget.per}"
    reason = f"The limit {limit}={getattr(budget, limit)}{per} of the shared budget {budget.name!r} was reached."
    return SharedBudgetsChecked(limit=f"{budget.name}: {limit}", reason=reason, at=0.0)


async def _tell(budget: SharedBudget, usage: BudgetUsage) -> None:
    if budget.on_limit_reached is None:
        told = budget.name, usage.reached, usage.period
        logger.warning(
            "The shared budget %r has reached its %s in the period %s.", *told
        )
        return
    on_limit_reached = budget.on_limit_reached

    async def told_within(seconds: float) -> None:
        waiting = on_limit_reached(usage)
        if inspect.isawaitable(waiting):
            async with asyncio.timeout(seconds):
                await waiting

    if isinstance(outcome := await caught(told_within(_PATIENCE)), Raised):
        problem = "on_limit_reached of the shared budget %r failed; the run continues."
        logger.error(problem, budget.name, exc_info=outcome.error)
