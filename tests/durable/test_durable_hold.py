"""All runs of a store are paused for an incident: nothing new starts anywhere, and nothing is lost or done twice."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from test_durable_drain import all_of, begun

from planner_ext import Approve
from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.state import State
from planner_ext.durable import NotAuthorizedError, RunFencedError, Runs
from planner_ext.durable.driven import DrivenRuns, DrivenStore
from planner_ext.durable.records import fold_journal
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.durable import GOAL, PAY, open_runs
from support.durable import world as shop
from support.gated import GATED_IN, World, application


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """The world of runs in this process."""
    monkeypatch.setenv(GATED_IN, str(tmp_path))
    return World(tmp_path)


async def released(runs: Runs, run_id: str) -> None:
    """Wait until no worker has a run."""
    async with asyncio.timeout(60):
        while (await runs.load(run_id)).record.owner is not None:  # noqa: ASYNC110  (another process may write it)
            await asyncio.sleep(0.01)


async def test_calls_in_flight_end_and_nothing_else_starts(
    store: str, world: World
) -> None:
    """The run waits without a worker; resumed, it continues where it stood, each step once."""
    world.close("order/book")
    async with (
        open_runs(store, poll_seconds=0.01) as runs,
        Runs.connect(store) as operator,
    ):
        handle = await runs.start(*application(), "order", run_id="order")
        await begun(world, "order/book", "order/label")
        assert await operator.pause_all(by="ann", reason="wrong account")
        await asyncio.sleep(0.1)
        world.open("order/book")
        await released(runs, "order")
        assert sorted(world.begun()) == ["order/ask0", "order/book", "order/label"]
        assert await operator.resume_all(by="ann")
        result = await handle.result()
    assert (result.status, result.iterations) == ("answered", 3)
    assert sorted(world.begun()) == sorted(world.ended()) == sorted(all_of("order"))


async def test_no_worker_begins_a_run_while_all_are_paused(
    store: str, tmp_path: Path
) -> None:
    """Neither one that is started nor one that is submitted; one that had ended is read; a host asks again later."""
    asked: list[Any] = []

    async def heard(request: Any) -> None:
        asked.append(request)

    def made() -> tuple[Any, Any]:
        planner, kernel = shop(tmp_path / "effects")
        service = ScriptedChatCompletion(lambda _: say("Done."), before_reply=heard)
        kernel.add_service(service, overwrite=True)
        return planner, kernel

    async with open_runs(store, poll_seconds=0.01) as runs:
        await (await runs.start(*made(), GOAL, run_id="earlier")).result()
        asked.clear()
        assert await runs.pause_all(reason="incident")
        assert not await runs.pause_all()
        await runs.submit(GOAL, run_id="queued")
        handle = await runs.start(*made(), GOAL, run_id="started")
        again = await runs.start(*made(), GOAL, run_id="earlier")
        assert (await again.result()).status == "answered"
        assert await runs.recover(*made()) == []
        runs.drive_with(*made())
        after = await runs.activate("queued")
        assert (after.status, after.seconds, after.ended) == ("queued", 5.0, False)
        assert asked == []
        hold = (await runs.stats()).hold
        assert hold is not None
        assert (hold.by, hold.reason) == ("", "incident")

        assert await runs.resume_all()
        assert not await runs.resume_all()
        assert (await handle.result()).status == "answered"
        (queued,) = await runs.recover(*made())
        assert (await queued.result()).status == "answered"
        assert (await runs.stats()).hold is None
    assert len(asked) == 2


async def test_the_hook_is_asked_who_may_pause_all(store: str) -> None:
    """A process without one may not, while an unfinished run began under one; nothing changes."""
    heard: list[tuple[str, str]] = []

    def of_ann(request: Any) -> bool:
        heard.append((request.action, request.run_id))
        return request.by == "ann"

    async with Runs.connect(store, authorize=of_ann) as runs:
        await runs.submit(GOAL, run_id="a")
        with pytest.raises(NotAuthorizedError, match="'bo' may not pause all runs"):
            await runs.pause_all(by="bo")
        async with Runs.connect(store) as client:
            with pytest.raises(NotAuthorizedError, match="which this process lacks"):
                await client.pause_all(by="ann")
        assert (await runs.stats()).hold is None
        assert await runs.pause_all(by="ann")
        with pytest.raises(NotAuthorizedError, match="'bo' may not resume all runs"):
            await runs.resume_all(by="bo")
        assert await runs.resume_all(by="ann")
    assert heard[0] == ("pause_all", "")


async def test_a_worker_leaves_while_all_runs_are_paused(
    store: str, world: World
) -> None:
    """Its runs are free, and another worker does the rest once all are resumed."""
    world.close("order/book")
    async with open_runs(store, poll_seconds=0.01) as runs:
        await runs.start(*application(), "order", run_id="order")
        await begun(world, "order/book", "order/label")
        await runs.pause_all()
        world.open("order/book")
        await released(runs, "order")
    async with open_runs(store, poll_seconds=0.01) as runs:
        await runs.resume_all()
        handle = await runs.start(*application(), "order", run_id="order")
        assert (await handle.result()).status == "answered"
    assert sorted(world.begun()) == sorted(all_of("order"))


async def test_a_decision_that_was_taken_is_not_taken_again(
    store: str, tmp_path: Path
) -> None:
    """A run is resumed with it, and paused after the approved call ran: it continues behind that call."""
    effects = tmp_path / "effects"
    asked, answered = asyncio.Event(), asyncio.Event()
    planner, kernel = shop(effects)

    async def wait(request: Any) -> None:
        if any(message["role"] == "tool" for message in request.messages):
            asked.set()
            await answered.wait()

    again = call("shop-pay", {"amount": 6}, id="again")
    service = ScriptedChatCompletion([PAY, again, say("Paid.")], before_reply=wait)
    kernel.add_service(service, overwrite=True)
    async with open_runs(store, poll_seconds=0.01) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="a")).result()
        handle = await runs.resume("a", planner, kernel, decisions={"pay": Approve()})
        await asked.wait()
        await runs.pause_all()
        await asyncio.sleep(0.1)
        answered.set()
        await released(runs, "a")
        await runs.resume_all()
        result = await handle.result()
        assert (result.status, [one.id for one in result.pending]) == (
            "paused",
            ["again"],
        )
    assert len(effects.read_text().splitlines()) == 1


async def test_a_run_that_was_left_stays_left_if_the_hold_ends_meanwhile() -> None:
    """Once its request is recorded as not sent, it is not sent here: no journal would charge it."""
    driven = DrivenRuns()
    stored: list[Fact] = []

    class Writer:
        """A writer during whose second transaction the hold ends."""

        run_id = "a"

        @property
        def state(self) -> State:
            return fold_journal("a", stored)

        async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
            driven.hold(not stored)
            stored.extend(facts)

    begins = RunStarted(run_id="a", rules=Rules(), messages=(), at=0.0)
    driven.hold(True)
    async with DrivenStore(cast("Any", Writer()), driven) as kept:
        with pytest.raises(RunFencedError, match="is paused"):
            await kept.append("a", 0, [begins])
    assert [fact.type for fact in stored] == ["RunStarted", "RequestFailed"]
    assert not driven.is_held
