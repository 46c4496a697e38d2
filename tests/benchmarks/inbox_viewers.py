"""How much five hundred viewers of the inbox slow the workers of its store down.

    python tests/benchmarks/inbox_viewers.py [--viewers 500] [--seconds 4] [--rounds 8]

Two workers drive runs of twenty turns in one SQLite file, as fast as they can; one call a second comes to wait and is
decided. Rounds with and without viewers alternate. A viewer does what the page's script does: it holds an event
stream, and reloads the list when it has changed, at a random moment of the spread. Exits with 1 above five percent.

The workers are compared by their processor time for a turn, and by what they get done: on a machine whose cores are
all at work, the second also has what the server and the viewers themselves take of the processors.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.durable import Approvals, Runs
from planner_ext.hitl_manager import Deny
from planner_ext.testing import ScriptedChatCompletion, ScriptedRequest, call, say

TURNS = 20


class Tools:
    @kernel_function
    async def step(self, n: int) -> int:
        return n

    @requires_approval
    @kernel_function
    async def pay(self, amount: int) -> str:
        return f"paid {amount}"


def script(request: ScriptedRequest) -> Any:
    turn = sum(bool(message.get("tool_calls")) for message in request.messages)
    return (
        call("tools-step", {"n": turn}, id=f"call_{turn}")
        if turn < TURNS
        else say("Done.")
    )


def world(model: Any) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(model))
    kernel.add_plugin(Tools(), "tools")
    options = FunctionCallingStepwisePlannerOptions(
        plan=False, max_iterations=TURNS + 2
    )
    return FunctionCallingStepwisePlanner(options=options), kernel


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def cpu_seconds_of(pid: int) -> float:
    """Read the processor time of a process; Linux only."""
    times = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def work(store: str, name: str, runs_done: Any, cpu: Any) -> None:
    """Drive one run after the other for ever; count them, and the processor time they take."""

    async def drive() -> None:
        planner, kernel = world(script)
        async with Runs.sqlite(store, worker_id=name) as runs:
            while True:
                await (await runs.start(planner, kernel, "Work.")).result()
                runs_done.value += 1
                cpu.value = cpu_seconds()

    asyncio.run(drive())


async def ask(store: str) -> None:
    """Let a call wait each second, and decide it a second later."""
    pays = [call("tools-pay", {"amount": 5}, id="pay"), say("Paid.")]
    async with (
        Runs.sqlite(store, worker_id="asker") as runs,
        Approvals.connect(store) as approvals,
    ):
        while True:
            handle = await runs.start(*world(pays), "Pay.")
            await handle.result()
            await asyncio.sleep(1)
            for item in await approvals.pending(handle.run_id):
                await approvals.decide(item.id, Deny(by="bench"))


async def view(base: str, cookies: httpx.Cookies, loads: list[float]) -> None:
    """Be a viewer, as the page's script is."""
    shown, limits = "", httpx.Limits(max_connections=2)
    async with (
        httpx.AsyncClient(
            base_url=base, cookies=cookies, timeout=None, limits=limits
        ) as client,
        client.stream("GET", "/events") as stream,
    ):
        async for line in stream.aiter_lines():
            if not line.startswith("data: "):
                continue
            event = json.loads(line.removeprefix("data: "))
            if event["mark"] != shown:
                shown = event["mark"]
                await asyncio.sleep(random.random() * event["spread"])
                start = time.perf_counter()
                (await client.get("/")).raise_for_status()
                loads.append(time.perf_counter() - start)


def watch(address: str, viewers: int, orders: Any) -> None:
    """Hold all viewers, in a process of its own: "in" and "out" come as orders, and are answered."""

    async def hold() -> None:
        base = address.partition("/sign-in")[0]
        async with httpx.AsyncClient(base_url=base) as client:
            await client.post(
                "/sign-in",
                data={"token": address.partition("token=")[2], "name": "ann"},
            )
            cookies = client.cookies
        loads: list[float] = []
        async with AsyncExitStack() as stack:
            tasks: list[asyncio.Task[None]] = []
            stack.push_async_callback(lambda: _cancelled(tasks))
            while (order := await asyncio.to_thread(orders.recv)) != "end":
                if order == "in":
                    loads.clear()
                    tasks += [
                        asyncio.create_task(view(base, cookies, loads))
                        for _ in range(viewers)
                    ]
                    while len(loads) < viewers * 0.9:  # noqa: ASYNC110  (a count in another task)
                        await asyncio.sleep(0.05)
                    orders.send(len(tasks))
                else:
                    orders.send(list(loads[viewers:]))
                    await _cancelled(tasks)
                    tasks.clear()

    asyncio.run(hold())


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(arguments: argparse.Namespace) -> bool:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "runs.db"))
        async with Runs.sqlite(store):
            pass
        counters = [(context.Value("l", 0), context.Value("d", 0.0)) for _ in range(2)]
        workers = [
            context.Process(
                target=work,
                args=(store, f"worker-{place}", *counters[place]),
                daemon=True,
            )
            for place in range(2)
        ]
        for worker in workers:
            worker.start()
        words = [
            sys.executable,
            "-m",
            "planner_ext",
            "serve",
            "--store",
            store,
            "--port",
            "0",
        ]
        server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220  (begun once)
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        ours, theirs = context.Pipe()
        watcher = context.Process(
            target=watch, args=(address, arguments.viewers, theirs), daemon=True
        )
        watcher.start()
        asker = asyncio.create_task(ask(store))
        while min(done.value for done, _ in counters) < 3:  # noqa: ASYNC110  (a count in another process)
            await asyncio.sleep(0.1)

        async def round_() -> tuple[float, float]:
            before = [(done.value, cpu.value) for done, cpu in counters]
            start = time.perf_counter()
            await asyncio.sleep(arguments.seconds)
            runs = sum(
                done.value - b[0] for (done, _), b in zip(counters, before, strict=True)
            )
            cpu = sum(
                cpu.value - b[1] for (_, cpu), b in zip(counters, before, strict=True)
            )
            return runs * TURNS / (time.perf_counter() - start), 1000 * cpu / max(
                runs * TURNS, 1
            )

        alone: list[tuple[float, float]] = []
        watched: list[tuple[float, float]] = []
        loads: list[float] = []
        shares: list[float] = []
        for number in range(arguments.rounds):
            alone.append(await round_())
            ours.send("in")
            await asyncio.to_thread(ours.recv)
            start, used = time.perf_counter(), cpu_seconds_of(server.pid)
            watched.append(await round_())
            shares.append(
                (cpu_seconds_of(server.pid) - used) / (time.perf_counter() - start)
            )
            ours.send("out")
            loads += await asyncio.to_thread(ours.recv)
            await asyncio.sleep(0.5)
            print(
                f"round {number + 1}: {alone[-1][0]:6.0f} and {watched[-1][0]:6.0f} turns a second, "
                f"{alone[-1][1]:.3f} and {watched[-1][1]:.3f} ms of processor time a turn", flush=True,
            )  # fmt: skip
        ours.send("end")
        asker.cancel()
        for process in (*workers, watcher):
            process.terminate()
        server.terminate()
        server.wait()
    speed = statistics.median(
        after[0] / before[0] for before, after in zip(alone, watched, strict=True)
    )
    cost = min(after[1] for after in watched) / min(before[1] for before in alone)
    loads.sort()
    print(f"{arguments.viewers} viewers, two workers")
    print(f"  turns a second:           {100 * (speed - 1):+.1f} % (median)")
    print(f"  processor time of a turn: {100 * (cost - 1):+.1f} % (best of the rounds)")
    print(f"  the server takes {100 * statistics.median(shares):.0f} % of a core")
    if loads:
        print(
            f"  a list is loaded in {1000 * loads[len(loads) // 2]:.0f} ms (median of {len(loads)})"
        )
    return cost <= 1.05


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--viewers", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=8)
    sys.exit(not asyncio.run(measure(parser.parse_args())))
