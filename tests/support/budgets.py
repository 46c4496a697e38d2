"""Runs that share budgets, and what their stores say."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner_ext.budgets import BudgetStore, SharedBudget
from support.planner import Clock

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp()


def opened(where: str | Path | None) -> BudgetStore:
    """Open a file, a database at an address, or one in memory."""
    if where is None:
        return BudgetStore.memory()
    return (
        BudgetStore.postgres(str(where))
        if "://" in str(where)
        else BudgetStore.sqlite(where)
    )


def shared(store: BudgetStore, name: str = "app", **more: Any) -> SharedBudget:
    """Make a budget per day."""
    given: dict[str, Any] = {"per": "day", **more}
    return SharedBudget(name, store=store, **given)


def noon() -> Clock:
    """Make a clock that stands at noon of the last day of January."""
    return Clock(NOON)


async def used(
    store: BudgetStore, part: str = "iterations", **chosen: Any
) -> list[Any]:
    """List one part of what was used, the newest period first."""
    return [getattr(row, part) for row in await store.usage(**chosen)]
