"""How soon a new run begins beside thousands of questions that expire at once.

    python tests/benchmarks/expiring.py [--store URL] [--runs 10000] [--new 20] [--seconds 0.2]

So many runs are started, and pause. A day later by its clock a worker of 100 slots starts. A new run is submitted each
half second; printed is when its first request was made, and how many of the others had been answered by then.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from semantic_kernel import Kernel

sys.path.insert(0, str(Path(__file__).parent.parent))

from planner_ext.engine.concurrency import SystemClock
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.durable import Shop, open_runs, planner_of
from support.stock import scripted_by

BATCH = 200


class LaterClock(SystemClock):
    """The machine's clock, some seconds ahead."""

    ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Model(ScriptedChatCompletion):
    """Notes when the first request of a goal comes, and takes a while to answer."""

    _began: dict[str, float]
    _seconds: float

    async def _inner_get_chat_message_contents(self, *args: Any, **options: Any) -> Any:
        goal = next(str(one.content) for one in args[0] if one.role == "user")
        self._began.setdefault(goal, time.monotonic())
        await asyncio.sleep(self._seconds)
        return await super()._inner_get_chat_message_contents(*args, **options)


def replies(request: Any) -> Any:
    """Ask a person where the goal says so, then answer."""
    last = request.messages[-1]
    asks = last["role"] == "user" and last["content"] == "book"
    return call("shop-book", {"order": 1}, id="book") if asks else say("Done.")


async def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store")
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--new", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    store = given.store or str(folder / "runs.db")
    clock = LaterClock()
    kernel = Kernel()
    service = scripted_by(Model, replies)
    service._began = {}
    service._seconds = 0.0
    kernel.add_service(service)
    kernel.add_plugin(Shop(folder / "effects"), "shop")
    planner = planner_of(interceptors=[lambda _: Defer(expires_in=3600)], clock=clock)
    async with open_runs(store, clock=clock) as runs:
        for _ in range(0, given.runs, BATCH):
            handles = [await runs.start(planner, kernel, "book") for _ in range(BATCH)]
            await asyncio.gather(*(handle.result() for handle in handles))
    clock.ahead = 86_400.0
    service._seconds = given.seconds
    waits: list[float] = []
    async with open_runs(store, clock=clock) as runs:
        work = asyncio.create_task(runs.work(planner, kernel))
        for number in range(given.new):
            goal = f"new {number}"
            at = time.monotonic()
            await (await runs.submit(goal)).result()
            waits.append(service._began[goal] - at)
            gone = await runs.count(status="answered")
            print(f"{goal}: first request after {waits[-1]:.2f} s; {gone} answered")
            await asyncio.sleep(0.5)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    print(f"median {statistics.median(waits):.2f} s, longest {max(waits):.2f} s")


if __name__ == "__main__":
    asyncio.run(main())
