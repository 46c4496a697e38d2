"""A period of a shared budget ends while a run is under way, and others have used up the new one."""

import asyncio
from collections.abc import Sequence
from contextvars import Context
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    Budget,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.budgets import BudgetStore
from planner_ext.core.facts import Fact, SharedBudgetsChecked
from planner_ext.durable import Runs
from planner_ext.engine.shared import Reservations
from planner_ext.errors import IllegalTransitionError, LimitReachedError
from planner_ext.iteration import FunctionInvocationIterationContext
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from support.budgets import noon, shared, used
from support.examples import some_of
from support.inside import auto
from support.planner import ADD, both_ways, invoke, never_stops, planner_with, scripted

DAY = 86_400

LIMITS: dict[str, dict[str, Any]] = {
    "round trips": {"max_iterations": 3},
    "calls": {"max_tool_calls": 2},
    "tokens": {"max_total_tokens": 25},
    "cost": {"max_cost": 0.025},
}

PRICED: dict[str, Any] = {"price": lambda model, usage: 0.01}


class Midnight:
    """The day ends with a request, and another run uses up the new day before the next request."""

    def __init__(
        self,
        store: BudgetStore,
        limits: dict[str, Any],
        *,
        at: int,
        used_up: bool = True,
    ) -> None:
        self.clock = noon()
        self.budget = shared(store, **limits)
        self._at = at
        self._requests = 0
        self._used_up = used_up

    @property
    def options(self) -> dict[str, Any]:
        """Options of every door."""
        return {
            "clock": self.clock,
            "shared_budgets": [self.budget],
            "iteration_completed": self.others,
        }

    def script(self, request: ScriptedRequest) -> ScriptedReply:
        """Call two functions as long as there are any."""
        self._requests += 1
        if self._requests == self._at:
            self.clock.seconds += DAY
        return calls(ADD, ADD) if request.tools else say("Enough.")

    async def others(self, context: FunctionInvocationIterationContext) -> None:
        """Use up the new day, outside of this run."""
        if self._used_up and self._requests == self._at:
            await asyncio.create_task(self._use_up(), context=Context())

    async def _use_up(self) -> None:
        for _ in range(4):
            budget = Budget(on_limit="stop")
            options: dict[str, Any] = {
                "clock": self.clock,
                "shared_budgets": [self.budget],
                **PRICED,
            }
            kernel, _ = scripted(never_stops)
            await planner_with(plan=False, budget=budget, **options).invoke(
                kernel, "Add."
            )


def _refusals(facts: Sequence[Fact]) -> list[SharedBudgetsChecked]:
    return [fact for fact in facts if isinstance(fact, SharedBudgetsChecked)]


@pytest.mark.examples
@pytest.mark.parametrize("used_up", [False, True], ids=["free", "used up"])
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
async def test_a_run_over_the_end_of_a_period_ends_at_a_limit(
    memory: BudgetStore, limits: dict[str, Any], *, used_up: bool
) -> None:
    """Under every ``on_limit``, with a plan or without, and whenever the period ends: two refusals at most."""
    ends = (
        ("answer", "stop", "return_calls"),
        ("reject_batch", "fill_remaining"),
        (False, True),
        (1, 2, 3),
    )
    combinations: Any = some_of(product(*ends))
    for on_limit, over, plan, at in combinations:
        world = Midnight(BudgetStore.memory(), limits, at=at, used_up=used_up)
        kernel, _ = scripted(world.script)
        budget = Budget(max_iterations=9, on_limit=on_limit, batch_over_limit=over)
        result = await planner_with(
            plan=plan, budget=budget, **world.options, **PRICED
        ).invoke(kernel, "Add.")
        assert (result.status, len(_refusals(result.facts)) <= 2) == (
            "limit_reached",
            True,
        ), (on_limit, over, plan, at)


@both_ways
async def test_a_request_that_was_kept_in_a_period_that_is_over_is_not_made(
    memory: BudgetStore, *, streamed: bool
) -> None:
    """The answer was kept yesterday, and today is used up: the run ends without it, and gives it back."""
    world = Midnight(memory, {"max_iterations": 3}, at=1)
    kernel, service = scripted(world.script)
    result = await invoke(
        planner_with(plan=False, **world.options), kernel, streamed=streamed
    )
    assert (result.status, result.limit, result.final_answer) == (
        "limit_reached",
        "app: max_iterations",
        "",
    )
    assert [fact.answer for fact in _refusals(result.facts)] == [True, False]
    assert len(service.requests) == 1
    assert await used(memory) == [3, 1]


@pytest.mark.parametrize("door", ["service", "handler", "session"])
async def test_every_door_ends_where_the_new_period_is_used_up(
    memory: BudgetStore, door: str
) -> None:
    """Service, handler and session end by the limit's name after one request, as the planner does."""
    world = Midnight(memory, {"max_iterations": 3}, at=1)
    kernel, connector = scripted(world.script)
    history = ChatHistory()
    history.add_user_message("Add.")
    if door == "service":
        service = FunctionInvokingChatCompletion(connector, **world.options)
        message = await service.get_chat_message_content(history, auto(), kernel=kernel)
        assert message is not None
        assert message.metadata["limit"] == "app: max_iterations"
    elif door == "handler":
        messages = [
            message
            async for message in ToolCallHandler(kernel, **world.options).invoke(
                history
            )
        ]
        assert messages[-1].metadata["limit"] == "app: max_iterations"
    else:
        with pytest.raises(LimitReachedError, match="shared budget 'app'"):
            await ToolUseSession(kernel, **world.options).prompt("Add.")
    assert len(connector.requests) == 1


async def test_a_kept_run_writes_two_refusals_and_ends(
    memory: BudgetStore, tmp_path: Path
) -> None:
    """Its journal has what was refused, once for the request and once for the answer, and no fault is retried."""
    world = Midnight(memory, {"max_iterations": 3}, at=1)
    kernel, _ = scripted(world.script)
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        handle = await runs.start(
            planner_with(plan=False, **world.options), kernel, "Add."
        )
        assert (await handle.result()).status == "limit_reached"
        stored = await runs.load(handle.run_id)
    assert (stored.record.status, len(_refusals(stored.facts))) == ("limit_reached", 2)


async def test_a_nested_run_ends_with_the_period_as_well(memory: BudgetStore) -> None:
    """A planner inside a function meets the same refusal; the run around it ends by the same name."""
    world = Midnight(memory, {"max_iterations": 5}, at=2)

    def delegates(request: ScriptedRequest) -> ScriptedReply:
        reply = world.script(request)
        return (
            call("desk-plan", {"goal": "Add."})
            if "desk-plan" in str(request.tools)
            else reply
        )

    kernel, service = scripted(delegates)
    inner = planner_with(plan=False, excluded_plugins={"desk"}, **world.options)
    kernel.add_plugin(PlannerPlugin(inner, function_name="plan"), "desk")
    around = planner_with(plan=False, clock=world.clock, shared_budgets=[world.budget])
    result = await around.invoke(kernel, "Solve.")
    assert (result.status, result.limit, len(service.requests)) == (
        "limit_reached",
        "app: max_iterations",
        2,
    )


async def test_a_refusal_that_changes_nothing_ends_the_run_by_name(
    memory: BudgetStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a reservation ever refuse the same twice, the run ends with an error, and not with its stack."""
    refused = SharedBudgetsChecked(
        limit="app: max_iterations", reason="Used up.", answer=True, at=1.0
    )

    async def always_refuses(
        self: Reservations, action: Any, *, asks_model: bool
    ) -> SharedBudgetsChecked:
        return refused

    monkeypatch.setattr(Reservations, "before", always_refuses)
    kernel, service = scripted(never_stops)
    with pytest.raises(IllegalTransitionError, match="repeat AskModel for ever"):
        await planner_with(
            plan=False, shared_budgets=[shared(memory, max_iterations=3)]
        ).invoke(kernel, "Add.")
    assert service.requests == []
