"""What a kept run may spend holds in every life of it, and is replaced with what a caller has at hand."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from semantic_kernel import Kernel

from planner_ext import (
    Approve,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.core.values import Usage
from planner_ext.durable import Runs, StoreError, UnknownRunError
from planner_ext.engine.activation import Activation
from planner_ext.engine.batch import BudgetHandle
from planner_ext.errors import PlannerInvalidConfigurationError, RunEndedError
from planner_ext.events import BudgetChanged
from planner_ext.testing import ScriptedReply, call, say
from support.durable import (
    GOAL,
    PAY,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    store_neutral,
    world,
)
from support.engine import FakeStore
from support.processes import Lives

LABEL = call("shop-label", {"order": 1})


def a_cent(model: str, usage: Usage) -> float:
    return 0.01


class Paid(BaseModel):
    """The form of an answer."""

    amount: int


async def drive(
    store: str, effects: Path, *script: ScriptedReply, **options: Any
) -> FunctionCallingStepwisePlannerResult:
    """Let a worker live for one activation of the run."""
    planner, kernel = world(effects, script, **options)
    async with open_runs(store) as runs:
        return await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()


@store_neutral("goal", ["", " \n", None])
async def test_an_empty_goal_is_refused_before_anything_is_stored(
    goal: Any, store: str, tmp_path: Path
) -> None:
    """By the name that the planner has for it; the run's name is still free."""
    planner, kernel = world(tmp_path / "effects", [say("Hello.")])
    async with open_runs(store) as runs:
        with pytest.raises(
            PlannerInvalidConfigurationError,
            match="The goal must be a text that is not empty",
        ):
            await runs.start(planner, kernel, goal, run_id="order-7")
        assert await runs.list() == []
        assert (
            await (
                await runs.start(planner, kernel, "greet", run_id="order-7")
            ).result()
        ).status == "answered"


@on_sqlite
async def test_a_cost_limit_holds_over_a_pause(store: str, tmp_path: Path) -> None:
    """What was spent before counts after, at the limit that the run began with, not at the later planner's."""
    options = {"budget": Budget(max_cost=0.015), "price": a_cent}
    await drive(store, tmp_path / "effects", PAY, **options)
    await decide_all(store)
    later = {"budget": Budget(max_cost=9.0), "price": a_cent}
    await drive(store, tmp_path / "effects", PAY, **later)
    await decide_all(store)
    result = await drive(store, tmp_path / "effects", say("So far."), **later)
    assert (result.status, result.limit, result.final_answer) == (
        "limit_reached",
        "max_cost",
        "So far.",
    )
    assert effects_in(tmp_path / "effects") == ["pay 5"]


@on_sqlite
async def test_a_kept_cost_limit_needs_a_price_in_every_life(
    store: str, tmp_path: Path
) -> None:
    """A later planner without one is refused by name before a request, instead of spending without a count."""
    await drive(
        store, tmp_path / "effects", PAY, budget=Budget(max_cost=1.0), price=a_cent
    )
    await decide_all(store)
    with pytest.raises(
        PlannerInvalidConfigurationError, match="max_cost=1 needs a price"
    ):
        await drive(store, tmp_path / "effects")
    assert effects_in(tmp_path / "effects") == []
    done = await drive(store, tmp_path / "effects", say("Paid."), price=a_cent)
    assert (done.status, done.usage.cost, effects_in(tmp_path / "effects")) == (
        "answered",
        0.02,
        ["pay 5"],
    )
    assert (await drive(store, tmp_path / "effects")).final_answer == "Paid."


@on_sqlite
async def test_the_price_of_the_planner_that_resumes_lasts_as_long_as_the_handle(
    store: str, tmp_path: Path
) -> None:
    """Over a further pause, too, though it is in no journal."""
    await drive(store, tmp_path / "effects", PAY)
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")], price=a_cent)
    async with open_runs(store) as runs:
        await decide_all(store)
        handle = await runs.resume(
            "order-7", planner, kernel, budget=Budget(max_cost=1.0)
        )
        assert (await handle.result()).status == "paused"
        await decide_all(store)
        result = await handle.result()
    assert (result.status, result.usage.cost, result.tool_calls) == (
        "answered",
        0.02,
        2,
    )


@on_sqlite
async def test_limits_out_of_a_journal_replace_those_of_a_run(
    store: str, tmp_path: Path
) -> None:
    """As good as a budget, which they are; what is neither is refused by name."""
    options = {"budget": Budget(max_tool_calls=1, on_limit="stop"), "interceptors": ()}
    await drive(store, tmp_path / "effects", PAY, **options)
    await decide_all(store)
    assert (await drive(store, tmp_path / "effects", PAY, **options)).status == "paused"
    await decide_all(store)
    assert (
        await drive(store, tmp_path / "effects", **options)
    ).limit == "max_tool_calls"

    planner, kernel = world(tmp_path / "effects", [say("Paid.")], **options)
    async with open_runs(store) as runs:
        wrong: Any = {"max_tool_calls": 9}
        with pytest.raises(
            PlannerInvalidConfigurationError, match="budget must be of the class Budget"
        ):
            await (await runs.resume("order-7", planner, kernel, budget=wrong)).result()
        done = await (
            await runs.resume(
                "order-7", planner, kernel, budget=Budget(max_tool_calls=9)
            )
        ).result()
    assert (done.status, done.tool_calls) == ("answered", 1)


@on_sqlite
async def test_a_run_that_answers_in_a_form_continues_with_it_alone(
    store: str, tmp_path: Path
) -> None:
    """No store holds the form; a planner without it is refused by name, and may still read the ended run."""
    await drive(store, tmp_path / "effects", PAY, response_format=Paid)
    await decide_all(store)
    with pytest.raises(
        PlannerInvalidConfigurationError, match="has to answer in a form"
    ):
        await drive(store, tmp_path / "effects", say("Paid."))
    done = await drive(
        store, tmp_path / "effects", say('{"amount": 5}'), response_format=Paid
    )
    assert (done.status, done.final_answer) == ("answered", '{"amount": 5}')
    assert (await drive(store, tmp_path / "effects")).final_answer == '{"amount": 5}'


async def drive_changed(
    budget: BudgetHandle, effects: Path, *script: ScriptedReply, **options: Any
) -> Any:
    """Drive a run that takes another budget before its first action."""
    planner, kernel = world(effects, script, **options)
    given = Activation(
        run_id="order-7", goal=GOAL, store=FakeStore(), new_budget=budget
    )
    return await planner.journaled(kernel, given).result()


async def test_a_driven_run_takes_a_new_budget_and_counts_what_it_limits(
    tmp_path: Path,
) -> None:
    """Cost is counted from then on; ``max_iterations``, if the new budget has none, stays as it was."""
    budget = BudgetHandle()
    budget.change(Budget(max_cost=0.015), by="ann")
    result = await drive_changed(
        budget, tmp_path / "effects", LABEL, LABEL, say("So far."), price=a_cent
    )
    assert (result.status, result.limit, result.usage.cost) == (
        "limit_reached",
        "max_cost",
        0.03,
    )
    (changed,) = [fact for fact in result.facts if isinstance(fact, BudgetChanged)]
    assert (changed.limits, changed.by) == (
        Budget(max_cost=0.015, max_iterations=15),
        "ann",
    )


async def test_a_new_budget_that_needs_an_unknown_price_is_refused_by_name(
    tmp_path: Path,
) -> None:
    """Before a request, instead of spending without a count."""
    budget = BudgetHandle()
    budget.change(Budget(max_cost=1.0))
    with pytest.raises(
        PlannerInvalidConfigurationError, match="max_cost=1 needs a price"
    ):
        await drive_changed(budget, tmp_path / "effects")


async def test_a_new_budget_of_a_run_that_waits_holds_when_it_continues(
    store: str, tmp_path: Path
) -> None:
    """It is in the journal with who set it, and the store holds it no longer; a newer one replaces it before that."""
    options = {"budget": Budget(max_tool_calls=1, on_limit="stop")}
    await drive(store, tmp_path / "effects", PAY, **options)
    async with Runs.connect(store) as client:
        await client.set_budget(
            "order-7", Budget(max_tool_calls=0, on_limit="stop"), by="bob"
        )
        await client.set_budget(
            "order-7", Budget(max_tool_calls=2, on_limit="stop"), by="ann"
        )
        assert (await client.result("order-7")).status == "paused"
    result = None
    for _ in range(3):
        await decide_all(store)
        result = await drive(store, tmp_path / "effects", PAY, **options)
    assert result is not None
    (changed,) = (fact for fact in result.facts if isinstance(fact, BudgetChanged))
    assert (result.status, result.limit) == ("limit_reached", "max_tool_calls")
    assert effects_in(tmp_path / "effects") == ["pay 5", "pay 5"]
    assert (
        changed.limits.max_tool_calls,
        changed.limits.max_iterations,
        changed.by,
    ) == (2, 15, "ann")


async def test_a_new_budget_of_a_queued_run_holds_from_its_beginning(
    store: str, tmp_path: Path
) -> None:
    """In place of the one that it was submitted with."""
    async with Runs.connect(store) as client:
        await client.submit(GOAL, run_id="order-7", budget=Budget(max_tool_calls=3))
        await client.set_budget("order-7", Budget(max_tool_calls=0, on_limit="stop"))
    result = await drive(
        store, tmp_path / "effects", PAY, interceptors=[lambda _: Approve()]
    )
    assert (result.status, result.limit, effects_in(tmp_path / "effects")) == (
        "limit_reached",
        "max_tool_calls",
        [],
    )


async def test_an_ended_run_takes_no_budget_but_by_a_resume(
    store: str, tmp_path: Path
) -> None:
    """The refusal names the way out; one that came too late for the run is forgotten, and does not replace a later."""
    options = {
        "budget": Budget(max_tool_calls=0, on_limit="stop"),
        "interceptors": [lambda _: Approve()],
    }
    assert (
        await drive(store, tmp_path / "effects", PAY, **options)
    ).limit == "max_tool_calls"
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")], **options)
    async with open_runs(store) as runs:
        with pytest.raises(
            RunEndedError,
            match=r"'order-7' has ended \(limit_reached\).*Runs.resume\(..., budget=...\)",
        ):
            await runs.set_budget("order-7", Budget(max_tool_calls=9))
        with pytest.raises(UnknownRunError, match="no run 'order-8'"):
            await runs.set_budget("order-8", Budget())
        result = await (
            await runs.resume(
                "order-7", planner, kernel, budget=Budget(max_tool_calls=9)
            )
        ).result()
    assert (result.status, effects_in(tmp_path / "effects")) == ("answered", ["pay 5"])


async def test_a_resume_with_a_budget_outdoes_an_earlier_new_one(
    store: str, tmp_path: Path
) -> None:
    """The later word counts."""
    await drive(store, tmp_path / "effects", PAY)
    await decide_all(store)
    planner, kernel = world(tmp_path / "effects", [say("Paid.")])
    async with open_runs(store) as runs:
        await runs.set_budget("order-7", Budget(max_tool_calls=0, on_limit="stop"))
        result = await (
            await runs.resume(
                "order-7", planner, kernel, budget=Budget(max_tool_calls=9)
            )
        ).result()
    assert (result.status, effects_in(tmp_path / "effects")) == ("answered", ["pay 5"])


async def test_a_damaged_new_budget_is_refused_by_name(tmp_path: Path) -> None:
    """The run does not continue without it; setting it again repairs it."""
    store = str(tmp_path / "runs.db")
    await drive(store, tmp_path / "effects", PAY)
    await decide_all(store)
    for text in ("{", "[]", "7", "{}", '{"limits": {"max_tool_calls": -1}, "by": ""}'):
        with closing(sqlite3.connect(store)) as database, database:
            database.execute("UPDATE planner_runs SET new_budget = ?", (text,))
        database.close()
        with pytest.raises(
            StoreError, match="The new budget of run 'order-7' is damaged"
        ):
            await drive(store, tmp_path / "effects", say("Paid."))
    async with Runs.connect(store) as client:
        await client.set_budget("order-7", Budget(max_tool_calls=3))
    assert (await drive(store, tmp_path / "effects", say("Paid."))).status == "answered"


def labels(effects: Path) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """An application whose model never stops calling a function by itself."""
    return world(
        effects,
        lambda _: LABEL,
        budget=Budget(max_iterations=1_000_000, on_limit="stop"),
    )


def labelling_life(store: str, effects: Path) -> None:
    """Drive such a run in a process."""

    async def drive() -> None:
        async with open_runs(store, poll_seconds=0.05) as runs:
            await (await runs.start(*labels(effects), GOAL, run_id="order-7")).result()

    asyncio.run(drive())


async def test_a_run_that_another_process_drives_takes_a_new_budget(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """Before its next step: less than what it has spent ends it there, and the journal says who set that."""
    effects = tmp_path / "effects"
    async with Runs.connect(store, poll_seconds=0.05) as client:
        worker = lives.begin(labelling_life, store, effects)
        async with asyncio.timeout(120):
            while len(effects_in(effects)) < 3:  # noqa: ASYNC110  (only another process tells)
                await asyncio.sleep(0.02)
            await client.set_budget(
                "order-7", Budget(max_tool_calls=2, on_limit="stop"), by="ann"
            )
            await client.wait("order-7")
        result = await client.result("order-7")
        facts = (await client.load("order-7")).facts
    await asyncio.to_thread(worker.join, 30)
    assert (result.status, result.limit, worker.exitcode) == (
        "limit_reached",
        "max_tool_calls",
        0,
    )
    assert result.tool_calls == len(effects_in(effects))
    assert [
        (fact.limits.max_tool_calls, fact.by)
        for fact in facts
        if isinstance(fact, BudgetChanged)
    ] == [(2, "ann")]


async def test_a_driven_run_takes_each_new_budget_once(
    store: str, tmp_path: Path
) -> None:
    """The store forgets a budget with its fact, and a later one comes through as well."""
    planner, kernel = labels(tmp_path / "effects")
    async with open_runs(store, poll_seconds=0.01) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
        for limits in (Budget(max_tool_calls=900_000), Budget(max_tool_calls=800_000)):
            await runs.set_budget("order-7", limits)
            async with asyncio.timeout(120):
                while (taken := await changes(runs))[-1:] != [limits.max_tool_calls]:  # noqa: ASYNC110  (no event)
                    await asyncio.sleep(0)
        await runs.cancel("order-7")
        assert (await handle.result()).status == "stopped"
        assert taken == [900_000, 800_000]


async def changes(runs: Runs) -> list[int | None]:
    """List the limits that the run took while it was driven."""
    facts = (await runs.load("order-7")).facts
    return [
        fact.limits.max_tool_calls for fact in facts if isinstance(fact, BudgetChanged)
    ]
