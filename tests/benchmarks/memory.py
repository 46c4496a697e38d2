"""What a run holds in memory, each figure with what it may be at most; exits with 1 above it.

    python tests/benchmarks/memory.py

    result  a result that the application keeps: 10 replies of 8 calls, 500 characters of text in each result
    live    a run that waits for its function, in its tenth reply of one call
    parked  a kept run whose call waits for a person, in the process of the worker that parked it

Counted by ``tracemalloc`` over many runs in this process, without the kernels: the figures are the same on a busy
machine. Most of each is Semantic Kernel's messages, some 3 KB a call; a result's text is in it once.
"""

import asyncio
import gc
import logging
import sys
import tempfile
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.durable import Runs
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    call,
    calls,
    say,
)

MOST_KB = {"result": 470.0, "live": 115.0, "parked": 4.0}
TEXT = "x" * 496
RUNS = 20
PLANNER = FunctionCallingStepwisePlanner(
    options=FunctionCallingStepwisePlannerOptions(plan=False)
)


class Desk:
    """Functions that answer, wait, and ask."""

    def __init__(self) -> None:
        self.models: list[ScriptedChatCompletion] = []
        self.waiting = 0
        self.full = asyncio.Event()
        self.opened = asyncio.Event()

    @kernel_function
    def read(self, number: int) -> str:
        """Read a text."""
        return f"{TEXT}{number:4}"

    @kernel_function
    async def wait(self) -> str:
        """Wait until the desk opens."""
        self.waiting += 1
        if self.waiting == RUNS:
            self.full.set()
        await self.opened.wait()
        return "Open."

    @requires_approval
    @kernel_function
    def pay(self, amount: int) -> str:
        """Pay."""
        return f"{amount} paid."

    def kernel(self, *replies: ScriptedReply) -> Kernel:
        """Make a kernel whose model gives these replies."""
        model = ScriptedChatCompletion([*replies, say("Done.")])
        self.models.append(model)
        kernel = Kernel(services=[model])
        kernel.add_plugin(self, "desk")
        return kernel

    def forget(self) -> None:
        """Forget the requests, which the models keep for a test."""
        for model in self.models:
            model.requests.clear()


def traced() -> float:
    """Return the kilobytes that are in use."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0] / 1000


async def result() -> float:
    """Measure results that are kept."""
    replies = [
        calls(*(call("desk-read", {"number": trip * 8 + place}) for place in range(8)))
        for trip in range(10)
    ]
    desk = Desk()
    kernels = [desk.kernel(*replies) for _ in range(RUNS)]
    before = traced()
    kept = [await PLANNER.invoke(kernel, "Read.") for kernel in kernels]
    desk.forget()
    after = traced()
    assert all(one.final_answer == "Done." for one in kept)
    return (after - before) / RUNS


async def live() -> float:
    """Measure runs that wait for their functions."""
    desk = Desk()
    replies = [*(call("desk-read", {"number": n}) for n in range(9)), call("desk-wait")]
    kernels = [desk.kernel(*replies) for _ in range(RUNS)]
    before = traced()
    tasks = [asyncio.create_task(PLANNER.invoke(one, "Wait.")) for one in kernels]
    await desk.full.wait()
    desk.forget()
    after = traced()
    desk.opened.set()
    await asyncio.gather(*tasks)
    return (after - before) / RUNS


async def parked() -> float:
    """Measure kept runs that wait for a person."""
    desk = Desk()
    with tempfile.TemporaryDirectory() as folder:
        async with Runs.sqlite(Path(folder) / "runs.db") as runs:

            async def park() -> None:
                kernel = desk.kernel(call("desk-pay", {"amount": 5}))
                handle = await runs.start(PLANNER, kernel, "Pay 5.")
                assert (await handle.result()).status == "paused"

            await park()
            before = traced()
            for _ in range(RUNS):
                await park()
            desk.models.clear()
            return (traced() - before) / RUNS


async def measured(measure: Callable[[], Awaitable[float]]) -> float:
    """Measure once to load what is loaded late, and again."""
    await measure()
    tracemalloc.start()
    try:
        return await measure()
    finally:
        tracemalloc.stop()


def main() -> int:
    """Print the figures."""
    logging.disable(logging.CRITICAL)
    above = False
    for measure in (result, live, parked):
        name = measure.__name__
        kilobytes = asyncio.run(measured(measure))
        most = MOST_KB[name]
        print(f"{name:8} {kilobytes:7.1f} KB, at most {most:.0f}")
        above = above or kilobytes > most
    return int(above)


if __name__ == "__main__":
    sys.exit(main())
