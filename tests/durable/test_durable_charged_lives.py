"""Real processes that die again and again: the service counts every request, and never more than the run may make."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerResult,
    PlannerPlugin,
)
from planner_ext.core.facts import HappenedInside, ModelAsked, RequestFailed
from planner_ext.durable import effect
from planner_ext.testing import (
    ScriptedAnswer,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.crash import CRASH_POINTS
from support.durable import (
    BATCH,
    GOAL,
    PAY,
    Shop,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    planner_of,
    store_neutral,
    turn,
    world,
)
from support.processes import Lives

KILLED = -9


def counted(
    requests: Path, request: ScriptedRequest, reply: ScriptedReply
) -> ScriptedReply:
    """Write down that a request came, also if the process that made it dies."""
    with requests.open("a") as file:
        file.write(f"{len(request.tools)} functions\n")
    return reply


async def driven(
    store: str, planner: FunctionCallingStepwisePlanner, kernel: Kernel
) -> FunctionCallingStepwisePlannerResult:
    """Drive the run to its end, and decide each question."""
    async with open_runs(store, poll_seconds=0.01, max_deaths=100) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
        result = await handle.result()
        while result.status == "paused":
            await decide_all(store)
            result = await handle.result()
    return result


async def spend(
    store: str, folder: Path, point: str
) -> FunctionCallingStepwisePlannerResult:
    """Drive a run that may make two requests: one for all calls, of which one waits, and one for the answer."""
    batch = BATCH if point == "mid_parallel" else calls(BATCH, PAY)
    seconds = 0.2 if point == "mid_tool" else 0.0

    def settles(request: ScriptedRequest) -> ScriptedReply:
        return counted(
            folder / "requests", request, batch if request.tools else say("Settled.")
        )

    budget = Budget(max_iterations=2)
    return await driven(
        store, *world(folder / "effects", settles, seconds=seconds, budget=budget)
    )


def spending_life(store: str, folder: Path, point: str) -> None:
    asyncio.run(spend(store, folder, point))


@store_neutral("point", CRASH_POINTS)
async def test_deaths_at_a_point_make_no_request_too_many(
    point: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """With ``max_iterations=2`` three lives make two at most, and the run is charged for each of them."""
    codes = [
        lives.live(spending_life, store, tmp_path, point, PLANNER_EXT_CRASH_AT=point)
        for _ in range(2)
    ]
    result = await spend(store, tmp_path, point)
    assert codes[0] == KILLED
    assert result.status in ("answered", "limit_reached")
    requests = effects_in(tmp_path / "requests")
    assert 1 <= len(requests) <= result.iterations <= 2
    done = [line.split()[0] for line in effects_in(tmp_path / "effects")]
    assert all(done.count(name) <= 1 for name in ("book", "pay"))


async def nest(store: str, folder: Path) -> FunctionCallingStepwisePlannerResult:
    """Drive a run that leaves all work to a planner, which makes requests as long as it may."""

    def restless(request: ScriptedRequest) -> ScriptedAnswer:
        if not request.tools:
            return counted(folder / "requests", request, say("Enough."))
        outer = any("desk-reach_goal" in str(tool) for tool in request.tools)
        work = (
            call("desk-reach_goal", {"goal": "work"})
            if outer
            else call("shop-label", {"order": 1})
        )
        return counted(folder / "requests", request, work)

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(restless))
    kernel.add_plugin(Shop(folder / "effects", 0.02), "shop")
    inner = planner_of(excluded_plugins={"desk"})
    kernel.add_plugin(PlannerPlugin(inner), "desk")
    return await driven(
        store,
        planner_of(excluded_plugins={"shop"}, budget=Budget(max_iterations=12)),
        kernel,
    )


def nesting_life(store: str, folder: Path) -> None:
    asyncio.run(nest(store, folder))


@store_neutral(
    "points",
    [["mid_tool"] * 2, ["after_intent"] * 2, ["after_model", "mid_tool", "after_tool"]],
)
async def test_nested_runs_that_die_spend_no_more_than_the_run_around_them_may(
    points: Sequence[str], lives: Lives, store: str, tmp_path: Path
) -> None:
    """What a nested run had recorded is spent once its process died; all requests together stay within the budget."""
    codes = [
        lives.live(nesting_life, store, tmp_path, PLANNER_EXT_CRASH_AT=point)
        for point in points
    ]
    result = await nest(store, tmp_path)
    assert codes[0] == KILLED
    assert result.status in ("answered", "limit_reached")
    assert any(isinstance(fact, HappenedInside) for fact in result.facts)
    requests = effects_in(tmp_path / "requests")
    assert 2 <= len(requests) <= result.iterations <= 12


async def test_a_turn_waits_for_the_disk_as_often_as_before(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For its reply, and for the start and end of each call; a request is charged without a write of its own."""
    planner, kernel = world(
        tmp_path / "effects",
        [*(call("shop-label", {"order": n}) for n in range(5)), say("Done.")],
    )
    async with open_runs(store) as runs:
        written: list[int] = []
        transact = type(runs._store.database).transact

        async def counting(self: Any, *steps: Any) -> Any:
            written.extend(1 for text, _ in steps[:1] if "INTO planner_journal" in text)
            return await transact(self, *steps)

        monkeypatch.setattr(type(runs._store.database), "transact", counting)
        result = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
    assert result.iterations == 6
    assert not any(
        isinstance(fact, ModelAsked | RequestFailed) for fact in result.facts
    )
    assert (
        len(written) == 1 + 5 * 3 + 2
    )  # the start, five turns, the answer and the end


class Thinker:
    """A function that makes requests itself: through the kernel that it is given."""

    @effect("idempotent")
    @kernel_function(description="Thinks.")
    async def think(self, kernel: Kernel) -> str:
        for _ in range(4):
            await kernel.invoke_prompt("Think.")
            await asyncio.sleep(0.02)
        return "thought"


async def think(store: str, folder: Path) -> FunctionCallingStepwisePlannerResult:
    """Drive a run whose function makes four requests."""

    def script(request: ScriptedRequest) -> ScriptedAnswer:
        thinks = "Think." in str(request.messages[-1])
        reply = (
            say("Hm.")
            if thinks or not request.tools or turn(request)
            else call("mind-think")
        )
        return counted(folder / "requests", request, reply)

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Thinker(), "mind")
    return await driven(store, planner_of(budget=Budget(max_iterations=6)), kernel)


def thinking_life(store: str, folder: Path) -> None:
    asyncio.run(think(store, folder))


@on_sqlite
async def test_the_requests_of_functions_that_die_are_charged(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """Each is recorded before it is sent: processes that die amid a function make no request too many."""
    codes = [
        lives.live(thinking_life, store, tmp_path, PLANNER_EXT_CRASH_AT="mid_tool")
        for _ in range(3)
    ]
    result = await think(store, tmp_path)
    assert codes[0] == KILLED
    assert result.status in ("answered", "limit_reached")
    requests = effects_in(tmp_path / "requests")
    assert (
        1 <= len(requests) <= result.iterations <= 6
    )  # a process may die between a record and its request


@on_sqlite
async def test_a_recorded_request_of_a_function_is_charged_once(
    store: str, tmp_path: Path
) -> None:
    """With the end of its call, as without a store."""
    result = await think(store, tmp_path)
    recorded = [fact.index for fact in result.facts if isinstance(fact, ModelAsked)]
    assert (result.final_answer, recorded) == ("Hm.", [0] * 4)
    assert result.iterations == len(effects_in(tmp_path / "requests")) == 6


class Packer(Shop):
    """Functions that start another one themselves: through the kernel that they are given, and in a nested run."""

    @effect("idempotent")
    @kernel_function(description="Packs.")
    async def pack(self, kernel: Kernel) -> str:
        for order in range(4):
            await kernel.invoke(plugin_name="shop", function_name="label", order=order)
        return "packed"

    @effect("idempotent")
    @kernel_function(description="Delegates.")
    async def delegate(self, kernel: Kernel) -> str:
        planner = planner_of(excluded_functions={"shop-delegate", "shop-pack"})
        result = await planner.invoke(kernel, "Print labels.")
        return result.final_answer


PACKED = {
    "invoked": ("shop-pack", Budget(max_tool_calls=7)),
    "in a nested run": (
        "shop-delegate",
        Budget(max_iterations=90, max_calls_per_function={"shop-label": 6}),
    ),
}
"""A function that starts another, in each way, and what the run may spend."""


async def pack(
    store: str, folder: Path, way: str
) -> FunctionCallingStepwisePlannerResult:
    """Drive a run whose function starts four functions, each of which takes its time."""
    called, budget = PACKED[way]

    def script(request: ScriptedRequest) -> ScriptedAnswer:
        outer = GOAL in str(request.messages[0])
        if not request.tools or turn(request) >= (5 if outer else 4):
            return say("Packed.")
        return call(called) if outer else call("shop-label", {"order": 1})

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Packer(folder / "effects", 0.02), "shop")
    return await driven(store, planner_of(budget=budget), kernel)


def packing_life(store: str, folder: Path, way: str) -> None:
    asyncio.run(pack(store, folder, way))


@on_sqlite
@pytest.mark.parametrize("way", PACKED)
async def test_functions_that_a_function_starts_are_counted_over_all_lives(
    way: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """Each start is recorded before it happens: processes that die amid a function start none too many.

    A call of a nested run that a death repeats is charged once, as every call is.
    """
    codes = [
        lives.live(packing_life, store, tmp_path, way, PLANNER_EXT_CRASH_AT="mid_tool")
        for _ in range(3)
    ]
    result = await pack(store, tmp_path, way)
    assert codes[0] == KILLED
    labels = len(effects_in(tmp_path / "effects"))
    repeated = codes.count(KILLED) if way == "in a nested run" else 0
    assert 1 <= labels <= 6 + repeated
    assert labels <= result.tool_calls + repeated
