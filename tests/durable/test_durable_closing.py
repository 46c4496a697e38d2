"""Closing a store ends, also if the runs that it interrupts ignore the cancellation."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.engine import concurrency
from planner_ext.testing import ScriptedChatCompletion, call
from support.durable import GOAL, open_runs, planner_of


class Deaf:
    """A tool that drops its first cancellation, as psycopg before 3.3.6 may in the midst of anything."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.dropped = 0

    @kernel_function(description="Waits.")
    async def wait(self) -> str:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.dropped += 1
        await asyncio.Event().wait()
        return "never"


async def test_a_dropped_cancellation_does_not_keep_a_store_open(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that drops the first one is cancelled again; leaving the block ends, and the run is kept."""
    monkeypatch.setattr(concurrency, "AGAIN", 0.05)
    tool, kernel = Deaf(), Kernel()
    kernel.add_service(ScriptedChatCompletion([call("deaf-wait", {}, id="wait")]))
    kernel.add_plugin(tool, "deaf")
    options: dict[str, Any] = {"poll_seconds": 0.05, "grace_seconds": 0}
    async with asyncio.timeout(120):
        async with open_runs(store, **options) as runs:
            await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
            await tool.begun.wait()
        async with open_runs(store, **options) as runs:
            assert (await runs.load("order-7")).record.status == "running"
    assert tool.dropped == 1
