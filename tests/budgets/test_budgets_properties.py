"""What runs take of shared budgets, against a model of it: any number of runs, in any order, with any deaths."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planner_ext.budgets import BudgetStore, SharedBudget
from planner_ext.budgets.charges import charges_of
from planner_ext.core.accounts import SharedBudgets
from planner_ext.core.facts import (
    CallStarted,
    Fact,
    ModelReplied,
    Rules,
    RunStarted,
    SharedBudgetsChecked,
)
from planner_ext.core.values import Usage
from support.budgets import noon, shared
from support.examples import tried

LIMITS = {"small": 4, "large": 9}
CALLS = 6
STEPS = st.sampled_from(
    [
        "ask",
        "ask",
        "ask",
        "batch",
        "reply",
        "reply",
        "refuse",
        "pause",
        "die",
        "midnight",
    ]
)


@dataclass
class Model:
    """One run as the model of the test sees it: what it was granted, and what its journal says."""

    name: str
    facts: list[Fact] = field(default_factory=list[Fact])
    charges: SharedBudgets | None = None
    kept: int = 0
    under_way: int = 0


def replied(tokens: int) -> ModelReplied:
    """Write the fact of a reply."""
    return ModelReplied(
        iteration=0, message={}, text="", calls=(), finish_reason="stop",
        usage=Usage(iterations=1, completion_tokens=tokens), offered=False, withheld=None, at=0.0, seconds=0.0,
    )  # fmt: skip


@given(st.lists(st.tuples(st.integers(0, 2), STEPS), max_size=40))
@tried(150)
async def test_the_store_counts_what_was_granted_and_never_more_than_its_limits(
    steps: list[tuple[int, str]],
) -> None:
    """In each period the used round trips are those sent and those kept; all budgets grant a request, or none does."""
    async with BudgetStore.memory() as store:
        await play(store, steps)


async def play(store: BudgetStore, steps: Sequence[tuple[int, str]]) -> None:
    """Play the steps of three runs, and compare the store with what they were granted."""
    clock, sent, calls, held = (
        noon(),
        dict[str, int](),
        dict[str, int](),
        dict[str, str](),
    )
    budgets = [
        shared(store, name, max_iterations=most, max_tool_calls=CALLS)
        for name, most in LIMITS.items()
    ]
    runs = [Model(f"run {number}") for number in range(3)]
    for run in runs:
        run.facts.append(
            RunStarted(run_id=run.name, rules=Rules(), messages=(), at=0.0)
        )
    for number, step in steps:
        await take_step(runs[number], step, budgets, clock, sent, calls, held)
        today = budgets[0].period(clock.now())
        for row in await store.usage():
            kept = sum(period == row.period for period in held.values())
            assert row.iterations == sent.get(row.period, 0) + kept
            assert row.iterations <= LIMITS[row.budget]
            assert row.tool_calls == calls.get(row.period, 0) <= CALLS
            assert row.period <= today
    for run in runs:
        if run.charges is not None:
            await run.charges.settle(kept=-run.kept)


async def take_step(
    run: Model,
    step: str,
    budgets: list[SharedBudget],
    clock: Any,
    sent: dict[str, int],
    calls: dict[str, int],
    held: dict[str, str],
) -> None:
    """Let one run do one thing, if it can."""
    if step == "midnight":
        clock.seconds += timedelta(days=1).total_seconds()
        return
    period = budgets[0].period(clock.now())
    if run.charges is None:
        run.charges = charges_of(budgets, {}, clock.now)
        assert run.charges is not None
        run.facts += [
            replied(0) for _ in range(run.under_way)
        ]  # as the journal charges a request that was lost
        run.under_way = run.kept = 0
        run.facts += [
            SharedBudgetsChecked(at=0.0)
        ]  # as each activation of a kept run begins
        run.charges.begin(run.facts, is_kept=True)
    match step:
        case "ask" if not run.under_way:
            if await run.charges.reserve(requests=1, kept=1 - run.kept) is None:
                run.under_way, run.kept, held[run.name] = 1, 1, period
                sent[period] = sent.get(period, 0) + 1
        case "batch" if not run.under_way:
            if await run.charges.reserve(calls=2) is None:
                calls[period] = calls.get(period, 0) + 2
                run.facts += [started(), started()]
                held.pop(run.name, None)
                held |= {run.name: period} if run.kept else {}
        case "reply" if run.under_way:
            run.charges.charge(Usage(completion_tokens=5))
            run.facts.append(replied(5))
            run.under_way = 0
        case "pause" if not run.under_way:
            await run.charges.settle(kept=-run.kept)
            held.pop(run.name, None)
            run.charges, run.kept = None, 0
        case "die":
            run.charges = None
        case _:
            pass


def started() -> Fact:
    """Write the fact of a call's start."""
    return CallStarted(iteration=0, index=0, call_id="1", function="f", at=0.0)
