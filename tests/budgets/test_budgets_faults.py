"""Shared budgets where something is not as it should be: two objects for one store, requests that fail half way."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.connectors.ai.text_completion_client_base import (
    TextCompletionClientBase,
)
from semantic_kernel.contents import StreamingTextContent
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionInvokingChatCompletion, PlannerPlugin
from planner_ext.budgets import BudgetStore, BudgetUsage, SharedBudget
from planner_ext.budgets.charges import charges_of
from planner_ext.core.accounts import SharedBudgets
from planner_ext.core.facts import Rules, RunStarted, SharedBudgetsChecked
from planner_ext.core.values import Usage
from planner_ext.errors import RunFencedError, StoreError
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.budgets import noon, opened, shared, used
from support.planner import never_stops, planner_with, scripted


async def test_two_objects_of_one_place_are_one_store(where: str) -> None:
    """A run inside a function, and a wrapped service, are charged once, whichever module opened the store."""
    async with opened(where) as one, opened(where) as other:
        assert one == other and len({one, other}) == 1
        kernel, service = scripted(
            [call("desk-reach_goal", {"goal": "Part."}), say("Done.")]
        )
        kernel.add_service(ScriptedChatCompletion([say("Part.")], service_id="inner"))
        inner = planner_with(
            "inner", plan=False, shared_budgets=[shared(other, max_iterations=9)]
        )
        kernel.add_plugin(PlannerPlugin(inner), "desk")
        wrapped = FunctionInvokingChatCompletion(
            service, shared_budgets=[shared(other, max_iterations=9)]
        )
        kernel.add_service(wrapped, overwrite=True)
        result = await planner_with(
            plan=False, shared_budgets=[shared(one, max_iterations=9)]
        ).invoke(kernel, "Go.")
        assert (result.status, result.iterations, await used(one)) == (
            "answered",
            3,
            [3],
        )


def test_stores_in_memory_are_different() -> None:
    """Each is one that no other object reaches."""
    assert BudgetStore.memory() != BudgetStore.memory()


class BreakingText(TextCompletionClientBase):
    """Streams a text, reports its tokens, and fails."""

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        usage = {"prompt_tokens": 30, "completion_tokens": 12}
        yield [
            StreamingTextContent(
                choice_index=0, text="Once upon", metadata={"usage": usage}
            )
        ]
        raise ConnectionResetError("gone")


class Writer:
    """Reads a stream of text as far as it comes."""

    @kernel_function
    async def write(self, kernel: Kernel) -> str:
        """Write."""
        service = kernel.get_service("text", TextCompletionClientBase)
        text = ""
        with pytest.raises(ConnectionResetError):
            async for chunks in service.get_streaming_text_contents(
                "Write.", PromptExecutionSettings()
            ):
                text += chunks[0].text
        return text


async def test_a_stream_of_text_that_breaks_is_charged_what_came(
    memory: BudgetStore,
) -> None:
    """The budgets of the run and of all runs count the same tokens."""
    kernel, _ = scripted([call("writer-write", {}), say("Done.")])
    kernel.add_service(BreakingText(ai_model_id="text", service_id="text"))
    kernel.add_plugin(Writer(), "writer")
    planner = planner_with(
        plan=False, shared_budgets=[shared(memory, max_total_tokens=10_000)]
    )
    result = await planner.invoke(kernel, "Go.")
    assert (result.status, result.iterations) == ("answered", 3)
    assert result.usage.total_tokens > 42
    assert (await used(memory), await used(memory, "tokens")) == (
        [3],
        [result.usage.total_tokens],
    )


class Closer:
    """Closes a store while a run uses it."""

    def __init__(self, store: BudgetStore) -> None:
        self.store = store

    @kernel_function
    async def close(self) -> str:
        """Close."""
        await self.store.aclose()
        return "closed"


@pytest.mark.parametrize("first", [True, False])
async def test_a_store_that_fails_leaves_nothing_reserved_in_another(
    memory: BudgetStore, *, first: bool
) -> None:
    """Of two stores one is closed: the run fails, and the other has the one request that was sent."""
    closing = BudgetStore.memory()
    kernel, service = scripted([call("closer-close", {}), say("Done.")])
    kernel.add_plugin(Closer(closing), "closer")
    budgets = [
        shared(closing, "closing", max_iterations=9),
        shared(memory, max_iterations=9, max_tool_calls=9),
    ]
    planner = planner_with(
        plan=False, shared_budgets=budgets if first else budgets[::-1]
    )
    with pytest.raises(StoreError, match="was closed"):
        await planner.invoke(kernel, "Go.")
    assert len(service.requests) == 1
    assert (await used(memory), await used(memory, "tool_calls")) == ([1], [1])


async def test_a_callback_that_hangs_does_not_hold_the_run(
    memory: BudgetStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is cancelled after its time, and logged; the run ends with its answer."""
    monkeypatch.setattr("planner_ext.budgets.charges._PATIENCE", 0.01)

    async def hangs(usage: BudgetUsage) -> None:
        await asyncio.Event().wait()

    budget = shared(memory, max_iterations=1, on_limit_reached=hangs)
    result = await planner_with(plan=False, shared_budgets=[budget]).invoke(
        scripted([say("Enough.")])[0], "Go."
    )
    assert (result.status, result.final_answer) == ("limit_reached", "Enough.")
    assert "on_limit_reached of the shared budget 'app' failed" in caplog.text


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), SystemExit(2), ValueError("no")], ids=repr
)
async def test_a_callback_that_raises_changes_nothing(
    memory: BudgetStore,
    error: BaseException,
    is_async: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every exception, a cancellation of its own included, is logged; the run ends with its answer."""

    def raises(usage: BudgetUsage) -> None:
        raise error

    async def raises_later(usage: BudgetUsage) -> None:
        raise error

    budget = shared(
        memory, max_iterations=1, on_limit_reached=raises_later if is_async else raises
    )
    result = await planner_with(plan=False, shared_budgets=[budget]).invoke(
        scripted([say("Enough.")])[0], "Go."
    )
    assert (result.status, result.final_answer) == ("limit_reached", "Enough.")
    assert "on_limit_reached of the shared budget 'app' failed" in caplog.text


def month(store: BudgetStore, **limits: Any) -> tuple[Any, SharedBudget]:
    """Make a budget per month, and a clock that stands in the middle of one."""
    clock = noon()
    clock.seconds -= timedelta(days=15).total_seconds()
    return clock, shared(store, per="month", **limits)


def begun(budget: SharedBudget, clock: Any, run_id: str, length: int) -> SharedBudgets:
    """Begin an activation of a kept run with a journal of some length."""
    charges = charges_of([budget], {}, clock.now)
    assert charges is not None
    at: float = (
        0 if length == 1 else 0.0
    )  # a clock may give whole seconds, which are read back as a float
    started = RunStarted(run_id=run_id, rules=Rules(), messages=(), at=at)
    charges.begin(
        [started, *(SharedBudgetsChecked(at=0.0) for _ in range(length - 1))],
        is_kept=True,
    )
    return charges


async def test_a_period_that_has_not_ended_is_not_pruned(store: BudgetStore) -> None:
    """A month that was used up two weeks ago forbids its requests until it ends."""
    clock, budget = month(store, max_iterations=1)
    planner, (kernel, _) = (
        planner_with(plan=False, clock=clock, shared_budgets=[budget]),
        scripted(never_stops),
    )
    await planner.invoke(kernel, "Add.")
    clock.seconds += timedelta(days=14).total_seconds()
    assert await store.prune(before=datetime.fromtimestamp(clock.now(), UTC)) == 0
    assert (await planner.invoke(kernel, "Add.")).iterations == 0
    clock.seconds += timedelta(days=7).total_seconds()
    assert await store.prune(before=datetime.fromtimestamp(clock.now(), UTC)) == 1


async def test_a_run_whose_rows_were_pruned_is_charged(store: BudgetStore) -> None:
    """It began in a period that has ended and was pruned; in the next one it is charged and refused as any run."""
    clock = noon()
    run = begun(shared(store, max_iterations=2), clock, "order-7", 1)
    assert await run.reserve(requests=2) is None
    clock.seconds += timedelta(days=4).total_seconds()
    assert await store.prune(before=datetime.fromtimestamp(clock.now(), UTC)) == 1
    assert await run.reserve(requests=2) is None
    assert await used(store) == [2]
    assert await run.reserve(requests=1) is not None
    await run.settle(kept=0)
    assert await used(store) == [2]


@pytest.mark.parametrize("asked_before", [True, False])
async def test_an_activation_that_was_frozen_changes_nothing(
    store: BudgetStore, *, asked_before: bool
) -> None:
    """Back after a later one has claimed the run, it reserves and releases nothing, also if it never asked before."""
    clock, budget = noon(), shared(store, max_iterations=9, max_total_tokens=99)
    frozen = begun(budget, clock, "order-7", 1)
    if asked_before:
        assert await frozen.reserve(requests=1, kept=1) is None
    later = begun(budget, clock, "order-7", 2)
    assert await later.reserve(requests=3, kept=1) is None
    before = await store.usage()
    with pytest.raises(RunFencedError):
        await frozen.reserve(requests=1)
    frozen.charge(Usage(completion_tokens=50))
    await frozen.settle(kept=-1)
    assert await store.usage() == before
    await later.settle(kept=-1)
    assert await used(store) == [before[0].iterations - 1]


async def test_a_deleted_run_frees_its_name(store: BudgetStore) -> None:
    """What it had reserved when its process died stays charged; a new run of its name has a journal of its own."""
    clock, budget = noon(), shared(store, max_iterations=9)
    assert await begun(budget, clock, "order-7", 5).reserve(requests=2) is None
    new = charges_of([budget], {}, clock.now)
    assert new is not None
    new.begin(
        [RunStarted(run_id="order-7", rules=Rules(), messages=(), at=clock.now())],
        is_kept=True,
    )
    assert await new.reserve(requests=1) is None
    await new.settle(kept=0)
    assert await used(store) == [3]


async def test_runs_resumed_twice_from_one_checkpoint_are_charged_both(
    store: BudgetStore,
) -> None:
    """A checkpoint is a value: each run that resumes it is charged for itself."""
    clock, budget = noon(), shared(store, max_iterations=9)
    runs = [charges_of([budget], {}, clock.now) for _ in range(2)]
    for number, run in enumerate([*runs, *runs]):
        assert run is not None
        if number < 2:
            run.begin(
                [RunStarted(run_id="order-7", rules=Rules(), messages=(), at=0.0)],
                is_kept=False,
            )
        assert await run.reserve(requests=1) is None
    assert await used(store) == [4]


async def test_a_store_that_fails_at_the_end_leaves_the_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the run kept stays reserved, as is logged; the answer is returned."""
    store = opened(tmp_path / "budgets.db")

    def answers(request: ScriptedRequest) -> ScriptedReply:
        (tmp_path / "budgets.db").rename(tmp_path / "elsewhere.db")
        return say("Done.")

    async with store:
        planner = planner_with(
            plan=False, shared_budgets=[shared(store, max_iterations=9)]
        )
        result = await planner.invoke(scripted(answers)[0], "Go.")
    assert (result.status, result.final_answer) == ("answered", "Done.")
    assert "is not settled, and stays reserved: The store" in caplog.text
