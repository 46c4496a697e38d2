"""The order in which workers take due runs: by priority, from an earliest start on, and past questions that expired."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from semantic_kernel import Kernel

from planner_ext.durable import Runs
from planner_ext.engine.concurrency import SystemClock
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Defer
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.durable import Shop, open_runs, planner_of
from support.stock import scripted_by

SECONDS = 120
HOUR = 3600.0


class LaterClock(SystemClock):
    """The machine's clock, some seconds ahead."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Model(ScriptedChatCompletion):
    """Notes the goal of each request; one that continues after a question waits for a gate."""

    _asked: list[str]
    _gate: asyncio.Event

    async def _inner_get_chat_message_contents(self, *args: Any, **options: Any) -> Any:
        history = args[0]
        goal = next(str(one.content) for one in history if one.role == "user")
        self._asked.append(goal)
        if history[-1].role == "tool":
            await self._gate.wait()
        return await super()._inner_get_chat_message_contents(*args, **options)


def replies(request: ScriptedRequest) -> ScriptedReply:
    """Ask a person if the goal says so, then answer."""
    goal = next(
        message["content"] for message in request.messages if message["role"] == "user"
    )
    begins = request.messages[-1]["role"] == "user"
    asks = begins and str(goal).startswith("asks")
    return call("shop-book", {"order": 1}, id="book") if asks else say("Done.")


def world(
    tmp: Any, asked: list[str], gate: asyncio.Event, clock: LaterClock
) -> tuple[Any, Kernel]:
    """Make a planner whose calls wait a minute for a decision, and a kernel."""
    kernel = Kernel()
    service = scripted_by(Model, replies)
    service._asked = asked
    service._gate = gate
    kernel.add_service(service)
    kernel.add_plugin(Shop(tmp / "effects"), "shop")
    defers = [lambda _: Defer(expires_in=60)]
    return planner_of(interceptors=defers, clock=clock), kernel


@asynccontextmanager
async def working(runs: Runs, *app: Any, slots: int) -> AsyncIterator[None]:
    """Let a worker take due runs."""
    work = asyncio.create_task(runs.work(*app, max_concurrency=slots))
    try:
        yield
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_the_highest_priority_comes_first(store: str, tmp_path: Any) -> None:
    """Then the oldest; the list of a run's row has the priority."""
    asked: list[str] = []
    app = world(tmp_path, asked, asyncio.Event(), LaterClock())
    priorities = {"low": -1, "first": 0, "second": 0, "high": 7}
    async with open_runs(store, poll_seconds=0.01) as runs:
        submitted = [
            await runs.submit(goal, priority=number)
            for goal, number in priorities.items()
        ]
        assert {run.goal: run.priority for run in await runs.list()} == priorities
        assert (await runs.due(limit=1)).runs == (submitted[-1].run_id,)
        async with working(runs, *app, slots=1):
            for one in submitted:
                await one.result(timeout=SECONDS)
    assert asked == ["high", "first", "second", "low"]


async def test_a_run_waits_for_its_earliest_start(store: str, tmp_path: Any) -> None:
    """No worker takes it before, whatever its priority; the list says until when it waits."""
    asked: list[str] = []
    clock = LaterClock()
    app = world(tmp_path, asked, asyncio.Event(), clock)
    async with open_runs(store, poll_seconds=0.01, clock=clock) as runs:
        start = datetime.now(UTC) + timedelta(hours=1)
        later = await runs.submit("later", not_before=start, priority=9)
        at_once = await runs.submit("at once")
        (waits,) = [run.waits_for for run in await runs.list() if run.goal == "later"]
        assert waits == f"its start at {start:%Y-%m-%d %H:%M:%S} UTC"
        async with working(runs, *app, slots=5):
            await at_once.result(timeout=SECONDS)
            assert asked == ["at once"]
            clock.ahead = HOUR
            assert (await later.result(timeout=SECONDS)).status == "answered"


@pytest.mark.parametrize(
    "invalid",
    [
        {"priority": True},
        {"priority": 1.5},
        {"priority": 10**7},
        {"not_before": datetime(2026, 12, 1)},
    ],
)
async def test_an_invalid_place_in_the_order_is_named(
    invalid: dict[str, Any], tmp_path: Any
) -> None:
    """Nothing is stored."""
    async with Runs.connect(tmp_path / "runs.db") as runs:
        (name,) = invalid
        with pytest.raises(PlannerInvalidConfigurationError, match=name):
            await runs.submit("goal", **invalid)
        assert await runs.count() == 0


async def test_questions_that_expire_hold_up_no_run(store: str, tmp_path: Any) -> None:
    """They take no slot: a worker with one slot answers a new run while many expire; one of these at a time goes on."""
    asked: list[str] = []
    gate = asyncio.Event()
    clock = LaterClock()
    app = world(tmp_path, asked, gate, clock)
    async with open_runs(store, poll_seconds=0.01, clock=clock) as runs:
        for number in range(12):
            handle = await runs.start(*app, f"asks {number}", run_id=f"asks-{number}")
            assert (await handle.result()).status == "paused"
        clock.ahead = HOUR
        asked.clear()
        async with working(runs, *app, slots=1):
            for number in range(3):
                new = await runs.submit(f"new {number}", run_id=f"new-{number}")
                assert (await new.result(timeout=SECONDS)).status == "answered"
            assert [goal for goal in asked if goal.startswith("new")] == [
                "new 0",
                "new 1",
                "new 2",
            ]
            assert sum(goal.startswith("asks") for goal in asked) <= 1
            gate.set()
            async with asyncio.timeout(SECONDS):
                while await runs.count(status="answered") < 15:  # noqa: ASYNC110  (polled, as `work` does)
                    await asyncio.sleep(0.01)


async def test_an_engine_is_told_of_new_runs_before_questions_that_expired(
    store: str, tmp_path: Any
) -> None:
    """Whatever their ages."""
    clock = LaterClock()
    app = world(tmp_path, [], asyncio.Event(), clock)
    async with open_runs(store, poll_seconds=0.01, clock=clock) as runs:
        handle = await runs.start(*app, "asks", run_id="asks")
        await handle.result()
        clock.ahead = HOUR
        await runs.submit("new", run_id="new", priority=-1)
        assert (await runs.due()).runs == ("new", "asks")
