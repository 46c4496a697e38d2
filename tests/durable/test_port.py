"""The port for engines: what is due is named to one caller, and driven by one of those that activate it."""

import asyncio
from pathlib import Path

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.durable import Next, RetryPolicy, StoreError, UnknownRunError
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.hitl_manager import ApprovalSettings, Deny, ToolCall
from planner_ext.testing import ScriptedChatCompletion, ScriptedFault, call, say
from support.durable import (
    GOAL,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    pays,
    planner_of,
    world,
)

ANSWERED = Next("answered", None, ended=True)
WAITS = Next("paused", None, ended=False)
SOON = 0.2
"""A time after which a run is named again, in seconds, that a test waits for."""


class Held:
    """A function that does not return before it is let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    @kernel_function(description="Waits.")
    async def wait(self) -> str:
        self.begun.set()
        await self.go_on.wait()
        return "done"

    def kernel(self) -> Kernel:
        """Make a kernel with the function, and a model that calls it once."""
        kernel = Kernel()
        kernel.add_service(
            ScriptedChatCompletion([call("held-wait", {}, id="wait"), say("Done.")])
        )
        kernel.add_plugin(self, "held")
        return kernel


async def test_an_activation_leads_to_the_next_pause_and_then_to_the_end(
    store: str, tmp_path: Path
) -> None:
    """A run waits for a decision at first, is named once it is decided, and ends at its next activation."""
    async with open_runs(store) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays))
        await runs.submit(GOAL, run_id="a")
        assert (await runs.due()).runs == ("a",)
        assert await runs.activate("a") == WAITS
        assert (await runs.due()).runs == ()
        await decide_all(store)
        assert (await runs.due()).runs == ("a",)
        assert await runs.activate("a") == ANSWERED
        assert (await runs.due()).runs == ()
    assert effects_in(tmp_path / "effects") == ["pay 5"]


async def test_an_activation_too_many_does_nothing(store: str, tmp_path: Path) -> None:
    """A run that waits or has ended is not driven: its row does not change."""
    async with open_runs(store) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays))
        await runs.submit(GOAL, run_id="a")
        await runs.activate("a")
        before = await runs.load("a")
        assert await runs.activate("a") == WAITS
        assert await runs.load("a") == before
        await runs.cancel("a")
        before = await runs.load("a")
        assert await runs.activate("a") == Next("stopped", None, ended=True)
        assert await runs.load("a") == before


async def test_the_second_activation_in_a_process_waits_for_the_first(
    store: str,
) -> None:
    """Both return what is next after the one that drove the run, whose function was called once."""
    held = Held()
    async with open_runs(store) as runs:
        runs.drive_with(planner_of(), held.kernel())
        await runs.submit(GOAL, run_id="a")
        first = asyncio.create_task(runs.activate("a"))
        await held.begun.wait()
        second = asyncio.create_task(runs.activate("a"))
        held.go_on.set()
        assert await asyncio.gather(first, second) == [ANSWERED, ANSWERED]


async def test_a_run_of_another_worker_is_left_to_it(store: str) -> None:
    """While one worker drives a run, another one returns at once, and the run is named to no caller."""
    held = Held()
    async with open_runs(store) as one, open_runs(store) as other:
        one.drive_with(planner_of(), held.kernel())
        other.drive_with(planner_of(), Kernel())
        await one.submit(GOAL, run_id="a")
        driven = asyncio.create_task(one.activate("a"))
        await held.begun.wait()
        assert await other.activate("a") == Next("running", 5.0, ended=False)
        assert (await other.due()).runs == ()
        held.go_on.set()
        assert await driven == ANSWERED
        assert await other.activate("a") == ANSWERED


async def test_a_cancelled_wait_leaves_the_run_running(store: str) -> None:
    """The engine gives up its wait, and the run ends as if it had not."""
    held = Held()
    async with open_runs(store) as runs:
        runs.drive_with(planner_of(), held.kernel())
        await runs.submit(GOAL, run_id="a")
        waiting = asyncio.create_task(runs.activate("a"))
        await held.begun.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        held.go_on.set()
        assert await runs.activate("a") == ANSWERED


@on_sqlite
async def test_a_fault_is_not_raised_but_due_at_its_retry(
    store: str, tmp_path: Path
) -> None:
    """A fault gives the seconds to its retry, before which nothing runs; the last one ends what is due by itself."""
    planner, kernel = world(tmp_path / "effects", [ScriptedFault(status=500)] * 2)
    async with open_runs(store, retry=RetryPolicy(attempts=2, first_delay=0.1)) as runs:
        runs.drive_with(planner, kernel)
        await runs.submit(GOAL, run_id="a")
        then = await runs.activate("a")
        assert then.status == "running"
        assert not then.ended
        assert then.seconds is not None
        assert 0.0 < then.seconds < 0.25
        assert (await runs.activate("a")).status == "running"
        await asyncio.sleep(then.seconds)
        assert (await runs.due()).runs == ("a",)
        assert await runs.activate("a") == Next("failed", None, ended=True)


async def test_a_question_that_expires_is_due_by_the_clock(
    store: str, tmp_path: Path
) -> None:
    """A pause with an expiry gives the seconds until then; the expired run is named."""
    planner, kernel = world(
        tmp_path / "effects", pays, approval=ApprovalSettings(expires_in=0.3)
    )
    async with open_runs(store) as runs:
        runs.drive_with(planner, kernel)
        await runs.submit(GOAL, run_id="a")
        then = await runs.activate("a")
        assert then.status == "paused"
        assert then.seconds is not None
        assert 0.0 < then.seconds <= 0.3
        await asyncio.sleep(then.seconds)
        assert (await runs.due()).runs == ("a",)
        assert await runs.activate("a") == ANSWERED
    assert effects_in(tmp_path / "effects") == []


async def test_a_refused_run_is_left_for_a_while(store: str, tmp_path: Path) -> None:
    """A worker with less of a policy activates a run again after half a minute, also one that waits and was decided."""

    def deny_label(call: ToolCall) -> Deny | None:
        return Deny("Not today.") if call.function_name == "label" else None

    planner, kernel = world(tmp_path / "effects", pays, interceptors=(deny_label,))
    async with open_runs(store) as runs:
        runs.drive_with(planner, kernel)
        await runs.submit(GOAL, run_id="a")
        await runs.activate("a")
        await decide_all(store)
        runs.drive_with(planner_of(), kernel)
        for _ in range(2):
            assert await runs.activate("a") == Next("paused", 30.0, ended=False)
        runs.drive_with(planner, kernel)
        assert await runs.activate("a") == ANSWERED


async def test_a_worker_that_leaves_gives_its_run_back_at_once(store: str) -> None:
    """The activation of a run that a drain interrupts returns, and is due now."""
    held = Held()
    async with open_runs(store, grace_seconds=0) as runs:
        runs.drive_with(planner_of(), held.kernel())
        await runs.submit(GOAL, run_id="a")
        driven = asyncio.create_task(runs.activate("a"))
        await held.begun.wait()
    assert await driven == Next("queued", 0.0, ended=False)


async def test_each_run_is_named_to_one_caller_at_a_time(
    store: str, tmp_path: Path
) -> None:
    """Many callers at once are named each run once; again later, unless it was claimed meanwhile."""
    names = {f"run-{n}" for n in range(20)}
    async with open_runs(store) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays))
        for name in sorted(names):
            await runs.submit(GOAL, run_id=name)
        named = await asyncio.gather(
            *(runs.due(limit=7, again_after=SOON) for _ in range(4))
        )
        while missing := names - {name for one in named for name in one.runs}:
            more = await runs.due(limit=7, again_after=60.0)
            assert set(more.runs) <= missing
            named.append(more)
        assert sorted(name for one in named for name in one.runs) == sorted(names)
        await runs.activate("run-0")
        await asyncio.sleep(SOON)
        again = await runs.due(again_after=SOON)
        assert set(again.runs) == names - {"run-0"}


async def test_a_list_that_was_cut_is_read_on_at_once(store: str) -> None:
    """More runs than the limit are due now; with nothing left, the worker's pace says when to look."""
    async with open_runs(store, poll_seconds=0.5) as runs:
        await runs.submit(GOAL, run_id="a")
        await runs.submit(GOAL, run_id="b")
        one = await runs.due(limit=1)
        assert (one.runs, one.seconds) == (("a",), 0.0)
        rest = await runs.due()
        assert (rest.runs, rest.seconds) == (("b",), 0.5)


async def test_an_unknown_run_is_an_error(store: str, tmp_path: Path) -> None:
    """An engine gives up a run that the store does not have."""
    async with open_runs(store) as runs:
        runs.drive_with(*world(tmp_path / "effects"))
        with pytest.raises(UnknownRunError):
            await runs.activate("a")


async def test_a_store_that_cannot_be_used_is_an_error(tmp_path: Path) -> None:
    """An engine repeats an activation while the store is gone."""
    path = tmp_path / "runs.db"
    async with open_runs(path) as runs:
        runs.drive_with(*world(tmp_path / "effects"))
        await runs.submit(GOAL, run_id="a")
        path.rename(tmp_path / "moved.db")
        with pytest.raises(StoreError):
            await runs.activate("a")
        (tmp_path / "moved.db").rename(path)


@on_sqlite
async def test_an_activation_needs_a_planner(store: str) -> None:
    """Without a planner, or with something else, it is refused with the way out."""
    async with open_runs(store) as runs:
        with pytest.raises(PlannerInvalidConfigurationError, match="Call drive_with"):
            await runs.activate("a")
        with pytest.raises(PlannerInvalidConfigurationError, match="planner must be"):
            runs.drive_with("planner", Kernel())  # pyright: ignore[reportArgumentType]


@on_sqlite
async def test_the_applications_arguments_come_with_each_activation(
    store: str, tmp_path: Path
) -> None:
    """What is not stored is asked for by the run's name."""
    asked: list[str] = []
    async with open_runs(store) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays), arguments_for=asked.append)
        await runs.submit(GOAL, run_id="a")
        await runs.activate("a")
    assert asked == ["a"]
