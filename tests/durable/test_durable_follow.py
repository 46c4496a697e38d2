"""A run that another process drives is followed in its store, fact by fact."""

import asyncio
from pathlib import Path

from planner_ext.durable.store import opened_store
from planner_ext.events import CallStarted
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.durable import GOAL, on_sqlite, open_runs, turn, world
from support.processes import Lives

BATCH = calls(
    call("shop-book", {"order": 1}, id="book"),
    call("shop-label", {"order": 2}, id="label"),
)


async def test_a_run_is_followed_while_another_process_drives_it(
    store: str, lives: Lives, tmp_path: Path
) -> None:
    """Each fact is shown when it is stored: a call is seen while the model has not replied to it."""
    seen, asked = asyncio.Event(), asyncio.Event()

    async def wait(request: ScriptedRequest) -> None:
        if turn(request) == 1:
            asked.set()
            await seen.wait()

    planner, kernel = world(tmp_path / "effects")
    kernel.add_service(
        ScriptedChatCompletion([BATCH, say("Settled.")], before_reply=wait),
        overwrite=True,
    )
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        await asked.wait()
        words = (
            "-m",
            "planner_ext.cli",
            "runs",
            "show",
            "a",
            "--store",
            store,
            "--follow",
        )
        with lives.program(*words, cwd=tmp_path) as follower:
            async with asyncio.timeout(120):
                line = ""
                while "shop-label" not in line or "done" not in line:
                    line = await asyncio.to_thread(follower.stderr.readline)
                    assert line, "it ended"
                seen.set()
                await handle.result()
                shown = await asyncio.to_thread(follower.stderr.read)
            assert (follower.wait(), follower.stdout.read()) == (0, "Settled.\n")
    assert shown.startswith(
        "Round trip 2 of 15\n    Settled.\nanswered: 2 round trips, 2 function calls,"
    )


@on_sqlite
async def test_only_new_facts_are_read(store: str, tmp_path: Path) -> None:
    """What was read is not read again, and the run's row says whether it continues."""
    async with open_runs(store) as runs:
        await (
            await runs.start(*world(tmp_path / "effects"), GOAL, run_id="a")
        ).result()
    async with opened_store(store) as opened:
        whole = (await opened.load("a")).facts
        for number in (0, 3, len(whole)):
            record, continues, facts = await opened.load_since("a", number, now=0.0)
            assert (record.status, continues, facts) == (
                "paused",
                False,
                whole[number:],
            )
    assert any(isinstance(fact, CallStarted) for fact in whole)
