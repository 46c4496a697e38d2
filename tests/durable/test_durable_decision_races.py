"""Decisions at the worst moment: while a worker takes another one, lets the question expire, or ends the run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve, Budget, Deny
from planner_ext.core.facts import (
    BudgetChanged,
    CallDecided,
    Resumed,
    Rules,
    RunStarted,
)
from planner_ext.durable import Approvals, Runs, StoredRun
from planner_ext.durable.store import JournalStore, opened_store
from planner_ext.durable.writer import JournalWriter
from planner_ext.engine.activation import Activation, ActivationRun
from planner_ext.hitl_manager import Defer
from planner_ext.sk.errors import DecisionRefusedError
from planner_ext.testing import call, calls, say
from support.durable import (
    GOAL,
    check_history,
    effects_in,
    open_runs,
    pays,
    turn,
    world,
)
from support.planner import Clock


@dataclass
class Late:
    """A planner to which something happens between the reading of what was decided and the taking of it."""

    planner: Any
    meanwhile: Callable[[], Any] | None
    run: Any = None

    def journaled(
        self, kernel: Any, activation: Activation, *, arguments: Any = None
    ) -> ActivationRun[Any]:
        self.run = self.planner.journaled(kernel, activation, arguments=arguments)
        return self

    async def result(self) -> Any:
        if (meanwhile := self.meanwhile) is not None:
            self.meanwhile = None
            await meanwhile()
        return await self.run.result()


async def decided(
    store: str, decision: Any, clock: Clock, call_id: str = "pay"
) -> None:
    """Decide from another connection, and win."""
    async with Approvals.connect(store, clock=clock) as approvals:
        assert await approvals.decide(f"r/0/{call_id}", decision)


async def test_a_decision_that_won_is_not_lost_to_an_expiry(
    store: str, tmp_path: Path
) -> None:
    """Made in time and committed while a worker is about to record the expiry: it counts, as its maker was told."""
    clock, effects = Clock(), tmp_path / "effects"
    planner, kernel = world(
        effects, pays, clock=clock, interceptors=[lambda _: Defer(expires_in=60)]
    )
    async with open_runs(store, clock=clock) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()

        async def in_time() -> None:
            clock.seconds -= 1
            await decided(store, Approve(by="ann"), clock)
            clock.seconds += 1

        clock.seconds += 60
        result = await (
            await runs.start(Late(planner, in_time), kernel, GOAL, run_id="r")
        ).result()
    assert (result.status, effects_in(effects)) == ("answered", ["pay 5"])
    assert [
        fact.by
        for fact in result.facts
        if isinstance(fact, CallDecided) and fact.person
    ] == ["ann"]


async def test_a_decision_that_won_is_not_lost_to_one_of_a_resume(
    store: str, tmp_path: Path
) -> None:
    """The first one counts: the second is refused by name, and changes nothing."""
    clock, effects = Clock(), tmp_path / "effects"
    planner, kernel = world(effects, pays)
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()

        async def first() -> None:
            await decided(store, Approve(by="ann"), clock)

        second = {"pay": Deny("no", by="bob")}
        handle = await runs.resume("r", Late(planner, first), kernel, decisions=second)
        with pytest.raises(DecisionRefusedError, match="'pay' was decided before"):
            await handle.result()
        result = await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
    assert (result.status, effects_in(effects)) == ("answered", ["pay 5"])
    assert [
        fact.by
        for fact in result.facts
        if isinstance(fact, CallDecided) and fact.person
    ] == ["ann"]


async def test_a_decision_meanwhile_on_another_call_is_kept(
    store: str, tmp_path: Path
) -> None:
    """Of two calls that wait one is decided while the other is being taken: both decisions count."""
    clock, effects = Clock(), tmp_path / "effects"
    both = calls(*(call("shop-pay", {"amount": n}, id=f"pay{n}") for n in (1, 2)))
    planner, kernel = world(
        effects, lambda request: [both, say("Paid.")][turn(request)]
    )
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()

        async def other() -> None:
            await decided(store, Approve(by="ann"), clock, "pay2")

        one = {"pay1": Approve(by="bob")}
        result = await (
            await runs.resume("r", Late(planner, other), kernel, decisions=one)
        ).result()
    assert (result.status, sorted(effects_in(effects))) == (
        "answered",
        ["pay 1", "pay 2"],
    )
    check_history(result, ["pay1", "pay2"])


async def test_a_cancellation_that_came_later_ends_what_was_decided(
    store: str, tmp_path: Path
) -> None:
    """A decision that no worker has taken yet does not hold up a cancellation, nor leave the run due for good."""
    clock, effects = Clock(), tmp_path / "effects"
    planner, kernel = world(effects, pays)
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
        await decided(store, Approve(by="ann"), clock)
        assert await runs.cancel("r", by="bob")
        result = await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
        assert await runs.recover(planner, kernel) == []
    assert (result.status, effects_in(effects)) == ("stopped", [])


async def test_a_run_continues_where_the_clock_went_back(
    store: str, tmp_path: Path
) -> None:
    """Each life's clock may be behind the one before: nothing is charged for that, and nothing is refused."""
    clock, effects = Clock(), tmp_path / "effects"
    planner, kernel = world(effects, pays, clock=clock)
    async with open_runs(store, clock=clock) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
    clock.seconds -= 3600
    await decided(store, Approve(by="ann"), clock)
    async with open_runs(store, clock=clock) as runs:
        result = await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
    assert (result.status, effects_in(effects), result.usage.active_seconds) == (
        "answered",
        ["pay 5"],
        0,
    )


async def test_a_cancellation_catches_a_run_that_is_faster(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancellation of a run that records facts all the time reads the new ones only, and is not late for ever."""
    load = JournalStore.load

    async def overtaken(self: JournalStore, run_id: str) -> StoredRun:
        stored = await load(self, run_id)
        at = len(stored.facts)
        started = RunStarted(
            run_id=run_id, rules=Rules(), messages=(), goal=GOAL, at=0.0
        )
        fact = (
            BudgetChanged(limits=Budget(), at=float(at), seconds=0.0) if at else started
        )
        await JournalWriter(self, run_id, stored.facts).append(run_id, at, (fact,))
        return stored

    monkeypatch.setattr(JournalStore, "load", overtaken)
    async with opened_store(store) as opened, Runs.connect(store) as runs:
        assert await opened.create("r", GOAL, owner=None, at=1.0)
        async with asyncio.timeout(120):
            assert await runs.cancel("r", by="ann")
        assert (await opened.record("r")).status == "stopped"


async def test_a_resume_of_a_run_that_is_driven_here_takes_effect_after_it(
    store: str, tmp_path: Path
) -> None:
    """Its decision and its budget count at the pause to which the run is driven; the first handle reads the pause."""
    asked, waits = asyncio.Event(), asyncio.Event()

    async def hold(run_call: Any) -> None:
        asked.set()
        await waits.wait()

    planner, kernel = world(tmp_path / "effects", pays, interceptors=[hold])
    async with open_runs(store) as runs:
        driven = await runs.start(planner, kernel, GOAL, run_id="order-7")
        await asked.wait()
        budget = Budget(max_iterations=7)
        resumed = await runs.resume(
            "order-7",
            planner,
            kernel,
            decisions={"pay": Approve(by="ann")},
            budget=budget,
        )
        waits.set()
        paused, result = await asyncio.gather(driven.result(), resumed.result())
    assert (paused.status, result.status, result.final_answer) == (
        "paused",
        "answered",
        "Paid.",
    )
    assert [
        fact.limits.max_iterations
        for fact in result.facts
        if isinstance(fact, Resumed) and fact.limits
    ] == [7]


async def test_closing_ends_what_drives_a_run_and_what_waits_for_it(
    store: str, tmp_path: Path
) -> None:
    """A worker leaves while a run waits for its call here, and a resume for the run: both handles are cancelled."""
    asked = asyncio.Event()

    async def hold(run_call: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    planner, kernel = world(tmp_path / "effects", pays, interceptors=[hold])
    async with open_runs(store, grace_seconds=0.01) as runs:
        driven = await runs.start(planner, kernel, GOAL, run_id="order-7")
        await asked.wait()
        resumed = await runs.resume(
            "order-7", planner, kernel, decisions={"pay": Approve(by="ann")}
        )
    ends = await asyncio.gather(
        driven.result(), resumed.result(), return_exceptions=True
    )
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
    async with Runs.connect(store) as client:
        assert (await client.load("order-7")).record.owner is None
