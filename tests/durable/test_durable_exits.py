"""A worker that a function ends, or would end: exits stay in their call, an interrupt counts as the worker's death."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.durable import effect
from planner_ext.durable.store import opened_store
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.durable import GOAL, effects_in, on_sqlite, open_runs, planner_of, turn
from support.processes import Lives

LIMIT_SECONDS = 120

RAISED: dict[str, Callable[[], BaseException]] = {
    "exit": lambda: SystemExit(2),
    "interrupt": KeyboardInterrupt,
    "close": GeneratorExit,
    "cancelled": asyncio.CancelledError,
}


class Desk:
    """Functions that may run again, and leave; each notes that it began."""

    def __init__(self, effects: Path) -> None:
        self._effects = effects

    def _leave(self, how: str) -> None:
        with self._effects.open("a") as file:
            file.write(f"{how}\n")
        raise RAISED[how]()

    @effect("idempotent")
    @kernel_function(description="Leaves in its thread.")
    def leave(self, how: str) -> None:
        self._leave(how)

    @effect("idempotent")
    @kernel_function(description="Leaves on the event loop.")
    async def leave_async(self, how: str) -> None:
        self._leave(how)


def world(folder: Path, function: str, how: str) -> tuple[Any, Kernel]:
    """Make a planner and a kernel whose model calls one function, and then answers."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        return (
            say("Done.")
            if turn(request)
            else call(f"desk-{function}", {"how": how}, id="leave")
        )

    kernel = Kernel(services=[ScriptedChatCompletion(script)])
    kernel.add_plugin(Desk(folder / "effects"), "desk")
    return planner_of(), kernel


def working_life(store: str, folder: Path, function: str, how: str) -> None:
    """Drive due runs until the run has ended, or the function ends the process."""

    async def work() -> None:
        async with (
            open_runs(store, poll_seconds=0.02) as runs,
            asyncio.TaskGroup() as group,
        ):
            working = group.create_task(runs.work(*world(folder, function, how)))
            await runs.wait("r")
            working.cancel()

    asyncio.run(work())


async def lived(
    lives: Lives, store: str, folder: Path, function: str, how: str
) -> list[int | None]:
    """Live again and again until the run is through; return how each life ended."""
    ends: list[int | None] = []
    async with opened_store(store) as opened, asyncio.timeout(LIMIT_SECONDS):
        assert await opened.create("r", GOAL, owner=None, at=1.0)
        while (await opened.record("r")).status in ("queued", "running"):
            process = lives.begin(working_life, store, folder, function, how)
            await asyncio.to_thread(process.join)
            ends.append(process.exitcode)
    return ends


@pytest.mark.parametrize("how", RAISED)
async def test_what_a_function_raises_in_its_thread_ends_no_worker(
    how: str, lives: Lives, tmp_path: Path
) -> None:
    """One worker drives the run to its answer; the call has failed, once."""
    store = str(tmp_path / "runs.db")
    assert await lived(lives, store, tmp_path, "leave", how) == [0]
    async with opened_store(store) as opened:
        record = await opened.record("r")
    assert (record.status, record.deaths, effects_in(tmp_path / "effects")) == (
        "answered",
        0,
        [how],
    )


async def test_an_exit_on_the_event_loop_ends_no_worker(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """``sys.exit`` in an async function of a kept run is the error of its call."""
    assert await lived(lives, store, tmp_path, "leave_async", "exit") == [0]
    async with opened_store(store) as opened:
        assert (await opened.record("r")).status == "answered"
    assert effects_in(tmp_path / "effects") == ["exit"]


@on_sqlite
@pytest.mark.parametrize("how", ["interrupt", "close"])
async def test_what_ends_worker_after_worker_is_set_aside(
    how: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """An interrupt or a close on the event loop, in a call that may run again, counts as a death, and three are all."""
    await lived(lives, store, tmp_path, "leave_async", how)
    async with opened_store(store) as opened:
        record = await opened.record("r")
    assert (record.status, record.deaths, record.owner) == ("quarantined", 3, None)
    assert record.problem.endswith("in the call desk-leave_async (leave).")
    assert effects_in(tmp_path / "effects") == [how] * 3
