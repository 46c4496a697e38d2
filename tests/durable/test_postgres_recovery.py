"""Recovery in PostgreSQL: expired questions, runs that were never begun, workers that leave, stall or are cut off."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg

from planner_ext import Approve
from planner_ext.durable import Approvals, Runs
from planner_ext.durable.store import JournalStore, open_database
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say
from support.durable import GOAL, effects_in, open_runs, pays, turn, world
from support.processes import Lives

RECOVERY_SECONDS = 120
CUT_OFF = """
    SELECT pg_terminate_backend(pid) FROM pg_locks
    WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
"""Ends the sessions by which workers live; one that is not stopped takes its own again at once."""
SOON: dict[str, Any] = {"interceptors": [lambda _: Defer(expires_in=1)]}


def labels(request: ScriptedRequest) -> ScriptedReply:
    """Print a label, which may be done twice, then answer."""
    return [call("shop-label", {"order": 1}, id="label"), say("Printed.")][
        turn(request)
    ]


@asynccontextmanager
async def working(
    url: str,
    effects: Path,
    script: Callable[[ScriptedRequest], ScriptedReply] = pays,
    **options: Any,
) -> AsyncIterator[Runs]:
    """Let a worker live that takes due runs."""
    async with open_runs(url, worker_id="working", poll_seconds=0.05) as runs:
        work = asyncio.create_task(runs.work(*world(effects, script, **options)))
        try:
            yield runs
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def answered(runs: Runs, *names: str) -> None:
    """Wait, for as long as recovery may take, until runs are answered."""
    async with asyncio.timeout(RECOVERY_SECONDS):
        while True:  # only another process tells
            answered = {one.run_id for one in await runs.list(status="answered")}
            if set(names) <= answered:
                return
            await asyncio.sleep(0.02)


async def test_a_run_that_is_started_again_while_it_waits_still_expires(
    postgres_url: str, tmp_path: Path
) -> None:
    """Starting a run that waits takes nothing from it: its question expires by itself."""
    async with working(postgres_url, tmp_path / "effects", **SOON) as runs:
        for _ in range(2):
            handle = await runs.start(
                *world(tmp_path / "effects", pays, **SOON), GOAL, run_id="order-7"
            )
            assert (await handle.result()).status == "paused"
        await answered(runs, "order-7")
    assert effects_in(tmp_path / "effects") == []


async def test_a_question_that_is_asked_again_still_expires(
    postgres_url: str, tmp_path: Path
) -> None:
    """A decision that cannot be taken leaves the call waiting, and only until its time."""
    async with working(postgres_url, tmp_path / "effects", **SOON) as runs:
        handle = await runs.start(
            *world(tmp_path / "effects", pays, **SOON), GOAL, run_id="order-7"
        )
        await handle.result()
        async with Approvals.connect(postgres_url) as approvals:
            assert await approvals.decide(
                "order-7/0/pay", Approve(arguments={"amount": None})
            )
        await answered(runs, "order-7")
    assert effects_in(tmp_path / "effects") == []


async def test_a_run_that_was_entered_and_never_begun_is_begun(
    postgres_url: str, tmp_path: Path
) -> None:
    """Its worker died, or left, between the row of the run and the activation: a worker that lives finds it."""
    async with working(postgres_url, tmp_path / "effects", labels) as runs:
        handle = await runs.start(
            *world(tmp_path / "effects", labels), GOAL, run_id="first"
        )
        await (
            handle.result()
        )  # by now the worker has looked at what there was when it came
        store = JournalStore(await open_database(postgres_url))
        assert await store.create("killed", GOAL, owner="gone/0", at=1.0)
        assert await store.create("left", GOAL, owner=None, at=1.0)
        await store.close()
        await answered(runs, "killed", "left")
    assert effects_in(tmp_path / "effects") == ["label 1"] * 3


def leaving_life(url: str, effects: Path) -> None:
    """Start runs and leave at once: one in the midst of a call, one before anything of it began."""

    async def leave() -> None:
        async with open_runs(url, worker_id="leaving", grace_seconds=0) as runs:
            await runs.start(
                *world(effects, labels, seconds=60), GOAL, run_id="in-a-call"
            )
            while not effects_in(effects):  # noqa: ASYNC110  (only another process tells)
                await asyncio.sleep(0.01)
            await runs.start(*world(effects, labels), GOAL, run_id="not-begun")

    asyncio.run(leave())


async def test_a_worker_that_leaves_leaves_its_runs_to_others(
    lives: Lives, postgres_url: str, tmp_path: Path
) -> None:
    """Leaving the block interrupts what runs; a worker that lives continues it, and takes what had not begun."""
    async with working(postgres_url, tmp_path / "effects", labels) as runs:
        assert (
            await asyncio.to_thread(
                lives.live, leaving_life, postgres_url, tmp_path / "effects"
            )
            == 0
        )
        await answered(runs, "in-a-call", "not-begun")
    assert effects_in(tmp_path / "effects") == ["label 1"] * 3


def stalled_life(url: str, effects: Path) -> None:
    """Drive a run whose first call takes a while."""

    async def drive() -> None:
        async with open_runs(url, worker_id="stalled", poll_seconds=0.05) as runs:
            handle = await runs.start(
                *world(effects, labels_then_books, seconds=2), GOAL, run_id="order-7"
            )
            assert (await handle.result()).status == "answered"

    asyncio.run(drive())


def labels_then_books(request: ScriptedRequest) -> ScriptedReply:
    """Print a label, book an order, then answer."""
    label, book = (
        call("shop-label", {"order": 1}, id="label"),
        call("shop-book", {"order": 1}, id="book"),
    )
    return [label, book, say("Done.")][turn(request)]


async def test_a_worker_that_stalls_is_fenced_when_it_comes_back(
    lives: Lives, postgres_url: str, tmp_path: Path
) -> None:
    """Stopped in a call, taken for dead, replaced, and let go again: it does nothing more, and hears the result."""
    effects = tmp_path / "effects"
    async with working(postgres_url, effects, labels_then_books) as runs:
        process = lives.begin(stalled_life, postgres_url, effects)
        while not effects_in(effects):  # noqa: ASYNC110  (only another process tells)
            await asyncio.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        with psycopg.connect(postgres_url, autocommit=True) as admin:
            admin.execute(CUT_OFF)
        await answered(runs, "order-7")
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.to_thread(process.join, RECOVERY_SECONDS)
        assert process.exitcode == 0
    assert effects_in(effects) == ["label 1", "label 1", "book 1"]
