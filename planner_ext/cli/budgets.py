"""``planner-ext budgets``: what was used of shared budgets, for a person who looks after them."""

from dataclasses import asdict

import typer

from planner_ext.budgets import BudgetStore, BudgetUsage
from planner_ext.cli.options import BudgetArgs, ExitCode
from planner_ext.cli.store import store_name
from planner_ext.cli.text import Terminal, json_document
from planner_ext.core.text import exact

_PARTS = (
    ("iterations", "max_iterations", "round trips {:,}"),
    ("tool_calls", "max_tool_calls", "calls {:,}"),
    ("tokens", "max_total_tokens", "tokens {:,}"),
    ("cost", "max_cost", "cost ${:,.4f}"),
)
"""Each part of what is used, its limit, and how it is written."""


async def show_budgets(args: BudgetArgs) -> int:
    """Print usage as lines or JSON; with ``reset`` forget it first."""
    async with BudgetStore(args.store, create=False) as store:
        if args.reset:
            if args.budget is None:
                raise typer.BadParameter("it resets one budget; give --budget, too.", param_hint="--reset")
            if not await store.reset(args.budget, key=args.key or "", period=args.period):
                problem = f"nothing was used of {exact(args.budget)} by {exact(args.key or '') or 'no key'}."
                raise typer.BadParameter(f"{problem} List the budgets to see their keys.", param_hint="--reset")
        rows = await store.usage(args.budget, key=args.key, period=args.period, limit=args.limit)
    if args.as_json:
        print(json_document([asdict(row) for row in rows]))
    elif not rows:
        Terminal(stderr=True).say(f"Nothing was used of a shared budget in {store_name(args.store)}.")
    for row in () if args.as_json else rows:
        _print(Terminal(), row)
    return ExitCode.ANSWERED


def _print(console: Terminal, row: BudgetUsage) -> None:
    """Print one row; names and keys come from users, so that all that is invisible in them is escaped."""
    key = f"  {exact(row.key)}" if row.key else ""
    reached = ("", "") if row.reached is None else (f"  {exact(row.reached)} reached", "yellow")
    console.print_line((exact(row.period), "dim"), "  ", (exact(row.budget), "bold"), key, reached)
    used = [_used(row, part, name, text) for part, name, text in _PARTS]
    console.print_line(f"    {', '.join(used)}")


def _used(row: BudgetUsage, part: str, name: str, text: str) -> str:
    limit = row.limits.get(name)
    return text.format(getattr(row, part)) + ("" if limit is None else f" of {limit:,}")
