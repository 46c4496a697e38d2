"""Processes that share a budget: together they never exceed it, even if they are killed."""

import asyncio
import os
import signal
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

from planner_ext import Budget
from planner_ext.core.facts import SharedBudgetsChecked
from planner_ext.testing import (
    ScriptedAnswer,
    ScriptedChatCompletion,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.budgets import opened, shared, used
from support.durable import GOAL, effects_in, open_runs, planner_of, world
from support.planner import kernel_of, never_stops, planner_with
from support.processes import Lives

KILLED = -9
RUNS = 12


async def many_runs(where: str, url: str) -> None:
    """Drive runs at once, each of which would make four requests and three calls."""
    async with (
        opened(where) as store,
        AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client,
    ):
        connector = OpenAIChatCompletion(
            "scripted", service_id="chat", async_client=client
        )
        budgets = [
            shared(store, max_iterations=50, max_tool_calls=31),
            shared(store, "wide", max_iterations=10**6),
        ]
        planner = planner_with(plan=False, max_iterations=4, shared_budgets=budgets)
        await asyncio.gather(
            *[planner.invoke(kernel_of(connector), GOAL) for _ in range(RUNS)]
        )


def life_of_many_runs(where: str, url: str) -> None:
    asyncio.run(many_runs(where, url))


async def test_four_processes_make_no_request_and_no_call_too_many(
    lives: Lives, where: str
) -> None:
    """48 runs want 192 requests: the server counts the 50 that there are, the store as many, of both budgets."""
    with ScriptedOpenAIServer(never_stops) as server:
        processes = [
            lives.begin(life_of_many_runs, where, server.url) for _ in range(4)
        ]
        for process in processes:
            await asyncio.to_thread(process.join, 60)
        assert [process.exitcode for process in processes] == [0] * 4
        called = sum(
            message.get("role") == "tool"
            and "Not executed" not in str(message)
            and message is request.messages[-1]
            for request in server.requests
            for message in request.messages
        )
        assert len(server.requests) == 50
    async with opened(where) as store:
        (app,), (wide,) = await store.usage("app"), await store.usage("wide")
    assert (app.iterations, wide.iterations) == (50, 50)
    assert called <= app.tool_calls == wide.tool_calls <= 31


async def kept_run(where: str, folder: Path, *, deadly: Collection[int]) -> Any:
    """Drive a kept run whose process dies in some requests, which are numbered from 1."""

    def reply(request: ScriptedRequest) -> ScriptedAnswer:
        with (folder / "requests").open("a") as file:
            file.write("one\n")
        if len(effects_in(folder / "requests")) in deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return call("shop-label", {"order": 1}) if request.tools else say("Settled.")

    async with opened(where) as store:
        budgets = [
            shared(store, max_iterations=5),
            shared(store, "ever", per=None, max_iterations=90),
        ]
        planner, kernel = world(
            folder / "effects",
            reply,
            budget=Budget(max_iterations=30),
            shared_budgets=budgets,
        )
        async with open_runs(where, poll_seconds=0.01, max_deaths=100) as runs:
            handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
            return await handle.result()


def kept_life(where: str, folder: Path, deadly: Collection[int]) -> None:
    asyncio.run(kept_run(where, folder, deadly=deadly))


async def test_a_death_between_reservation_and_reply_is_charged_once(
    lives: Lives, where: str, tmp_path: Path
) -> None:
    """Each request that the model saw is charged, by three dead processes and a living one; none is lost or twice."""
    codes = [lives.live(kept_life, where, tmp_path, (1, 2, 3)) for _ in range(3)]
    assert codes == [KILLED] * 3
    async with opened(where) as store:
        assert await used(store, budget="ever") == [
            4
        ]  # three requests, and one that is kept for the answer
    result = await kept_run(where, tmp_path, deadly=())
    requests = effects_in(tmp_path / "requests")
    assert (result.status, result.limit, result.final_answer) == (
        "limit_reached",
        "app: max_iterations",
        "Settled.",
    )
    assert len(requests) == 5 == result.iterations
    async with opened(where) as store:
        assert await used(store) == [5, 5]
        (ever,) = await store.usage("ever")
        assert (ever.tool_calls, ever.tokens) == (
            result.tool_calls,
            result.usage.total_tokens,
        )


@pytest.mark.parametrize("reset", [False, True])
async def test_a_refusal_is_checked_again_after_a_death(
    lives: Lives, where: str, tmp_path: Path, *, reset: bool
) -> None:
    """A process dies in the request for the answer: the next one ends the run, or continues it after a reset."""
    assert lives.live(kept_life, where, tmp_path, (5,)) == KILLED
    async with opened(where) as store:
        assert await used(store, budget="app") == [5]
        if reset:
            assert await store.reset("app")
    result = await kept_run(where, tmp_path, deadly=())
    requests = len(effects_in(tmp_path / "requests"))
    answer, calls = ("Settled.", 8) if reset else ("", 4)
    assert (result.status, result.limit, result.final_answer) == (
        "limit_reached",
        "app: max_iterations",
        answer,
    )
    assert (
        result.iterations,
        result.tool_calls,
        len(effects_in(tmp_path / "effects")),
    ) == (requests, calls, calls)
    assert requests == (10 if reset else 5)
    async with opened(where) as store:
        assert (await used(store, budget="app"), await used(store, budget="ever")) == (
            [5],
            [requests],
        )


async def batch_that_kills(where: str, folder: Path) -> Any:
    """Drive a kept run whose function kills its process once."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        done = sum(message.get("role") == "tool" for message in request.messages)
        return say("Settled.") if done else call("shop-label", {"order": 1})

    async with opened(where) as store:
        planner = planner_of(shared_budgets=[shared(store, max_tool_calls=5)])
        _, kernel = world(folder / "effects", reply, seconds=0.3)
        async with open_runs(where, poll_seconds=0.01, max_deaths=100) as runs:
            handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
            return await handle.result()


def life_in_a_batch(where: str, folder: Path) -> None:
    asyncio.run(batch_that_kills(where, folder))


async def test_a_call_that_is_run_again_after_a_death_counts_again(
    lives: Lives, where: str, tmp_path: Path
) -> None:
    """It started twice, so it is charged twice; the round trips are charged once."""
    assert (
        lives.live(life_in_a_batch, where, tmp_path, PLANNER_EXT_CRASH_AT="mid_tool")
        == KILLED
    )
    result = await batch_that_kills(where, tmp_path)
    assert result.status == "answered"
    assert sum(isinstance(fact, SharedBudgetsChecked) for fact in result.facts) == 1, (
        "each life has a longer journal"
    )
    async with opened(where) as store:
        (row,) = await store.usage()
    assert (row.iterations, row.tool_calls) == (2, 2)
    assert len(effects_in(tmp_path / "effects")) == 2
    assert row.period == datetime.now(UTC).strftime("%Y-%m-%d")


def forking_life(where: str) -> None:
    """Use a store, fork, and use it in the child, and then again here."""

    async def ask() -> None:
        planner = planner_with(
            plan=False, shared_budgets=[shared(store, max_iterations=9)]
        )
        await planner.invoke(kernel_of(ScriptedChatCompletion([say("Done.")])), GOAL)

    store = opened(where)
    asyncio.run(ask())
    if (child := os.fork()) == 0:
        asyncio.run(ask())
        asyncio.run(store.aclose())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    asyncio.run(ask())
    asyncio.run(store.aclose())


async def test_a_forked_process_opens_the_store_for_itself(
    lives: Lives, where: str
) -> None:
    """A store that was used before a fork works in both processes, as where a server forks its workers."""
    assert lives.live(forking_life, where) == 0
    async with opened(where) as store:
        assert await used(store) == [3]
