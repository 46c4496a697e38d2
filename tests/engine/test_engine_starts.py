"""What a running function may start or send once more, and what of it is recorded first."""

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import replace
from threading import RLock
from typing import Any

import pytest

from planner_ext.core.accounts import Account, SharedBudgets, Tab, current_tab
from planner_ext.core.facts import CallStarted, ModelAsked
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.engine.concurrency import StopHandle, in_thread
from support.core import Silent, began, calls, decided, replied, run_started
from support.engine import FakeFunctions, FakeStore, engine_of, types_of


def tab_of_this_call() -> Tab:
    """Find the call in which this runs."""
    tab = current_tab()
    assert tab is not None
    return tab


async def test_a_second_start_is_recorded_before_it_happens() -> None:
    """A function that starts once more finds its start in the journal, as the second of its call."""
    seen: list[list[int]] = []

    async def again() -> None:
        assert await tab_of_this_call().restart()
        seen.append(
            [fact.attempt for fact in engine.facts if isinstance(fact, CallStarted)]
        )

    engine = engine_of(["f"], "done", functions=FakeFunctions(does={"f": again}))
    state = await engine.run()
    assert (seen, state.usage.tool_calls) == ([[1, 2]], 2)


async def test_a_second_start_that_does_not_happen_is_not_counted() -> None:
    """A shared budget whose store fails has not taken the start: the run's own budget has it again."""

    class Failing(SharedBudgets):
        counts_tokens, max_cost = False, None
        runs = False

        def begin(self, *_: Any, **__: Any) -> None: ...

        async def reserve(self, **_: Any) -> None:
            if self.runs:
                raise OSError("The store is gone.")

        def charge(self, *_: Any) -> None: ...

        async def settle(self, **_: Any) -> None: ...

    shared, left = Failing(), list[float | None]()

    async def again() -> None:
        shared.runs, tab = True, tab_of_this_call()
        with pytest.raises(OSError, match="gone"):
            await tab.restart()
        shared.runs = False
        left.append(tab.account.left().amounts.get("max_tool_calls"))

    functions, rules = (
        FakeFunctions(does={"f": again}),
        {"limits": Budget(max_tool_calls=3)},
    )
    await engine_of(
        ["f"], "done", functions=functions, shared=shared, rules=rules
    ).run()
    assert left == [2]


async def test_a_call_that_has_its_result_does_not_start_again() -> None:
    """It is refused within its batch, after it, and in a later batch with a call in the same place."""
    kept: list[Tab] = []
    started: list[bool] = []

    async def late() -> None:
        started.append(await kept[0].restart())

    does = {"f": lambda: kept.append(tab_of_this_call()), "g": late, "h": late}
    functions = FakeFunctions(does=does)
    engine = engine_of(
        ["f", "g"], ["h"], "done", functions=functions, max_concurrency=1
    )
    await engine.run()
    await late()
    assert started == [False] * 3
    assert sum(isinstance(fact, CallStarted) for fact in engine.facts) == 3


async def test_nothing_starts_again_once_the_run_is_to_stop() -> None:
    """A stop refuses the second start of a function that runs; the call keeps its first result."""
    stop = StopHandle()
    started: list[bool] = []

    async def stopped() -> None:
        stop.stop("enough")
        started.append(await tab_of_this_call().restart())

    engine = engine_of(
        ["f"], "done", functions=FakeFunctions(does={"f": stopped}), stop=stop
    )
    state = await engine.run()
    assert started == [False]
    assert state.ended is not None
    assert (state.ended.status, state.usage.tool_calls) == ("stopped", 1)


async def test_a_request_of_a_function_is_kept_before_it_is_sent() -> None:
    """In a store, a request that a function makes is on disk first: if the process ends, the run is charged for it."""
    store = FakeStore()
    stored: list[bool] = []

    async def asks() -> None:
        await tab_of_this_call().record_request()
        stored.append(
            any(
                isinstance(fact, ModelAsked) and fact.index == 0
                for fact in store.rows.values()
            )
        )

    engine = engine_of(
        ["f"], "done", functions=FakeFunctions(does={"f": asks}), store=store
    )
    await engine.run()
    assert stored == [True]
    assert types_of(engine.facts)[2:5] == ["CallStarted", "ModelAsked", "CallFinished"]


async def test_a_request_from_another_event_loop_is_not_waited_for() -> None:
    """A function may block the run's loop until a loop of its own has ended: recording there would wait for ever."""

    async def asks_elsewhere() -> None:
        with ThreadPoolExecutor() as threads:  # leaving it blocks the run's loop
            threads.submit(
                copy_context().run, asyncio.run, tab_of_this_call().record_request()
            )

    store = FakeStore()
    engine = engine_of(
        ["f"], "done", functions=FakeFunctions(does={"f": asks_elsewhere}), store=store
    )
    await engine.run()
    assert types_of(engine.facts)[2:4] == ["CallStarted", "CallFinished"]


async def test_what_happens_in_the_event_loop_of_a_thread_is_recorded() -> None:
    """A function in a thread does not block the run's loop, which records before the function continues."""

    class Threaded(FakeFunctions):
        def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
            return replace(super().check(call, edited), threaded=True)

    def calls_elsewhere() -> Awaitable[None]:
        return in_thread(lambda: asyncio.run(tab_of_this_call().record_call("g")))

    engine = engine_of(
        ["f"],
        "done",
        functions=Threaded(does={"f": calls_elsewhere}),
        store=FakeStore(),
    )
    await engine.run()
    assert types_of(engine.facts)[2:5] == [
        "CallStarted",
        "NestedCallStarted",
        "CallFinished",
    ]


async def test_what_happens_after_a_call_has_ended_is_not_recorded() -> None:
    """Its end has charged what it took; a fact about it would contradict the journal."""
    kept: list[Tab] = []
    engine = engine_of(
        ["f"],
        "done",
        functions=FakeFunctions(does={"f": lambda: kept.append(tab_of_this_call())}),
        store=FakeStore(),
    )
    await engine.run()
    facts = list(engine.facts)
    await kept[0].record_request()
    assert engine.facts == facts


async def test_a_second_start_is_taken_from_the_run_around() -> None:
    """A run in a call does not start a function again for which the run around has nothing left."""

    class Recorder(Silent):
        async def restart(self, _: Tab) -> bool:
            return True

    began_with = run_started(limits=Budget(max_tool_calls=2))
    around = fold([began_with, replied(calls("g")), decided(0, "g"), began(0, "g")])
    tab = Tab(Account(lambda: around, None, RLock()), 0, Recorder())
    restarted: list[bool] = []

    async def again() -> None:
        restarted.append(await tab_of_this_call().restart())

    functions = FakeFunctions(does={"f": again})
    with tab:
        engine = engine_of(["f"], "done", functions=functions, within=tab)
        assert engine.account.open() is None
        await engine.run()
    assert restarted == [False]
    assert tab.taken.tool_calls == 1
