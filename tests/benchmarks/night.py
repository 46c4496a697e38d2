"""Play a night: three hours of faults in ten minutes, 500 runs, 8 workers, and the page of the morning.

    python tests/benchmarks/night.py sqlite postgres dbos temporal      the night in each place
    python tests/benchmarks/night.py sqlite --minutes 1 --runs 40 --workers 2      a short one

The plan (`Night.plan`): the endpoint answers 503, then refuses connections; 429 with ``Retry-After``;
the webhook is dead; the database fails over and is killed, or its file is locked and its disk full; each worker is
stopped and replaced; the clocks of half of the workers are set forward by an hour, and back; a worker is frozen for
longer than its lease; others are killed with SIGKILL, as when memory runs out; three runs kill whichever worker
drives them.

Judged by fsynced lines of the functions, and by what the endpoint counted. Exits with 1 unless:

    doubled     no call took effect twice, nor with two keys
    lost        each call of an answered run took effect
    over        no run made more requests than its budget, without those that the endpoint refused
    unnamed     each run was answered, or its row says why it was not
    innocent    only runs that kill their worker are in quarantine; none failed
    known       no question whether a call took effect, where a recorded result, a probe, its declaration or a
                living worker could tell
    refused     no request broke a rule of the endpoint
    untold      the webhook was told of each end
"""

import argparse
import asyncio
import json
import logging
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kills
import psycopg
from dbos import DBOS
from kills import CONTEXT, END_SESSIONS, ENGINES, PLACES, Shop, World
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
)
from planner_ext.durable import RetryPolicy, Runs, StoreError, effect
from planner_ext.testing import (
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.server import HttpRequest, HttpResponse, LoopbackServer
from support.hosts import hosted
from support.postgres import PostgresServer
from support.temporal import TemporalServer

CONTEXT.set_forkserver_preload(
    [
        Path(__file__).stem,
        "planner_ext.durable.sqlite",
        "planner_ext.durable.postgres",
        "planner_ext.durable.gauge",
    ]
)

BUDGET = 8
"""The requests that a run may make; without a fault it takes three."""
LEASE = 5.0
QUIET_SECONDS = 90.0
"""How long nothing may move in the morning before what is left counts as unnamed."""
START_SECONDS = 60.0
"""How long a worker may take to start."""
LATENCY = 0.2
"""Seconds until the endpoint answers."""
HOUR = 3600.0
DISK_MIB = 64
POISON = ("poison-1", "poison-2", "poison-3")
KILLS_PER_MINUTE = 2

Act = Callable[[], object]


# The workers: what the processes do.


class NightShop(Shop):
    """The shop of `kills`, with a function that ends its process."""

    @effect("idempotent")
    @kernel_function(description="Inspects an order.")
    async def inspect(self, order: int) -> str:
        self._world.write("poisoned", order=order)
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"


class SetClock:
    """The machine's clock, as somebody has set it."""

    monotonic = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)

    def now(self) -> float:
        """Return the time that the set clock shows."""
        return time.time()


def application(world: World) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel with the shop."""
    kernel = Kernel()
    client = AsyncOpenAI(base_url=world.model, api_key="any", max_retries=0)
    kernel.add_service(
        OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
    )
    shop = NightShop(world)
    kernel.add_plugin(shop, "shop")
    effect("once", probe=shop.shipped)(kernel.get_function("shop", "ship"))
    options = FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=BUDGET)
    return FunctionCallingStepwisePlanner(options=options), kernel


def live(world: World, up: Any, jump: Any, webhook: str) -> None:
    """Work until SIGTERM comes."""
    real = time.time
    time.time = lambda: real() + jump.value
    logging.basicConfig(
        filename=world.lines.with_name("log"),
        level=logging.INFO,
        format="%(process)d %(name)s %(message)s",
    )
    for name in ("httpx", "semantic_kernel", "openai", "temporalio", "dbos"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        asyncio.run(_live(world, up, webhook))
    except Exception as error:  # whoever starts while a server is away
        sys.exit(f"A worker ends: {error}")


async def _live(world: World, up: Any, webhook: str) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    open_runs = Runs.sqlite if world.place == "sqlite" else Runs.postgres
    retry = RetryPolicy(first_delay=0.5, max_delay=15.0, outage_seconds=2400.0)
    async with open_runs(
        world.store,
        lease_seconds=world.lease,
        retry=retry,
        grace_seconds=5.0,
        clock=SetClock(),
        notify=webhook,
    ) as runs:
        if world.place in ENGINES:
            runs.drive_with(*application(world))
            async with hosted(world.place, runs, world.engine):
                up.set()
                await stopped.wait()
        else:
            working = asyncio.create_task(runs.work(*application(world)))
            leaving = asyncio.create_task(stopped.wait())
            up.set()
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()


def submit(world: World, names: Sequence[str], seconds: float) -> None:
    """Submit runs, spread over some seconds."""
    asyncio.run(_submit(world, names, seconds))


async def _submit(world: World, names: Sequence[str], seconds: float) -> None:
    left = list(reversed(names))
    began = time.monotonic()
    while left:
        with suppress(StoreError):  # the database is away
            async with Runs.connect(world.store) as runs:
                while left:
                    due = len(names) * (time.monotonic() - began) / seconds
                    if len(names) - len(left) < due:
                        order = orders_of(names)[left[-1]]
                        await runs.submit(f"Settle order {order}.", run_id=left[-1])
                        left.pop()
                    await asyncio.sleep(0.02)


def orders_of(names: Sequence[str]) -> Mapping[str, int]:
    """Number the orders of runs."""
    return {name: number for number, name in enumerate(names)}


def decide(world: World, calm: Any) -> None:
    """Decide what waits, until killed."""
    asyncio.run(_decide(world, calm))


async def _decide(world: World, calm: Any) -> None:
    while True:
        with suppress(StoreError):  # the database is away
            async with Runs.connect(world.store) as runs:
                while True:
                    for item in await runs.approvals().pending(limit=100):
                        # A frozen worker may do later what nobody sees yet.
                        if random.random() < 0.3 and (
                            calm.is_set() or not item.in_doubt
                        ):
                            await kills.decide(world, runs, item)
                    await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)


# The world around: endpoint and webhook.


class Endpoint:
    """A model behind a port that can be closed.

    Attributes:
        mode: ``up``, ``out`` (503) or ``busy`` (429).
        rejected: The requests of each order that were answered with an error status.
        asked: The requests of each order that reached the model.
    """

    def __init__(self, poison: frozenset[int]) -> None:
        self.mode = "up"
        self.rejected = Counter[int]()
        self.asked = Counter[int]()
        self._poison = poison
        self.server = ScriptedOpenAIServer(self._reply)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._port = 0
        self._listening: asyncio.Server | None = None
        self._open = set[asyncio.StreamWriter]()

    def __enter__(self) -> "Endpoint":
        self.server.start()
        self._thread.start()
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.server.stop()

    @property
    def url(self) -> str:
        """The base URL for a client."""
        return f"http://127.0.0.1:{self._port}/v1"

    def listen(self) -> None:
        """Take connections."""
        self._run(self._listen())

    def refuse(self) -> None:
        """Break all connections, and refuse further ones."""
        self._run(self._refuse())

    def _run(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        self._listening = await asyncio.start_server(
            self._connected, "127.0.0.1", self._port
        )
        self._port = self._listening.sockets[0].getsockname()[1]

    async def _refuse(self) -> None:
        if self._listening is not None:
            self._listening.close()
        for writer in self._open:
            writer.transport.abort()

    async def _connected(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        port = int(self.server.url.split(":")[-1].split("/")[0])
        behind, to_behind = await asyncio.open_connection("127.0.0.1", port)
        both = {writer, to_behind}
        self._open |= both
        with suppress(OSError):
            await asyncio.gather(
                self._pass_on(reader, to_behind), self._pass_on(behind, writer, LATENCY)
            )
        self._open -= both
        for each in both:
            each.close()

    async def _pass_on(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        latency: float = 0.0,
    ) -> None:
        while data := await reader.read(65536):
            await asyncio.sleep(latency)
            writer.write(data)
            await writer.drain()
        writer.close()

    def _reply(self, request: ScriptedRequest) -> Any:
        order = kills.order_of(request)
        self.asked[order] += 1
        if self.mode == "out":
            self.rejected[order] += 1
            return ScriptedFault(status=503)
        if self.mode == "busy" and random.random() < 0.8:
            self.rejected[order] += 1
            return ScriptedFault(status=429, headers={"retry-after": "2"})
        if random.random() < 0.01:
            return ScriptedFault(drop=True)
        given = {"order": order}
        if order in self._poison:
            return call("shop-inspect", given, id="inspect")
        batch = calls(
            *(
                call(f"shop-{name}", given, id=name)
                for name in ("book", "label", "charge", "ship")
            )
        )
        turn = sum(bool(message.get("tool_calls")) for message in request.messages)
        return [batch, call("shop-pay", given, id="pay"), say("Settled.")][turn]


class Webhook:
    """A server that takes notices, or is dead.

    Attributes:
        is_dead: Whether it answers 503.
        told: The events of each run that it took.
        refused: How many it did not take.
    """

    def __init__(self) -> None:
        self.is_dead = False
        self.told: defaultdict[str, set[str]] = defaultdict(set)
        self.refused = 0
        self._server = LoopbackServer(self._respond)
        self.url = f"http://127.0.0.1:{self._server.port}/notices"

    def stop(self) -> None:
        """Stop the server."""
        self._server.stop()

    def _respond(self, request: HttpRequest) -> HttpResponse:
        if self.is_dead:
            self.refused += 1
            return HttpResponse(status=503, content_type="text/plain", parts=(b"dead",))
        notice = json.loads(request.body)
        self.told[notice["run_id"]].add(notice["event"])
        return HttpResponse(status=204, content_type="text/plain", parts=())


# The night.


@dataclass
class Worker:
    """A worker's process.

    Attributes:
        jump: By how many seconds its clock was set.
        leaves: Whether it was told to stop.
    """

    process: Any
    watch: threading.Thread
    up: Any
    jump: Any
    leaves: bool = False


@dataclass
class Night:
    """One place, its workers, and what is done to them.

    Attributes:
        number: How many workers there shall be.
        seconds: How long the night is.
        events: What happened, for the page of the morning.
    """

    world: World
    endpoint: Endpoint
    webhook: Webhook
    names: Sequence[str]
    number: int
    seconds: float
    postgres: PostgresServer | None = None
    temporal: TemporalServer | None = None
    events: Counter[str] = field(default_factory=Counter[str])
    _workers: list[Worker] = field(default_factory=list[Worker])

    def __post_init__(self) -> None:
        self._calm = CONTEXT.Event()
        self._calm.set()
        self._began = time.monotonic()
        self._processes = [
            CONTEXT.Process(target=decide, args=(self.world, self._calm), daemon=True),
            CONTEXT.Process(
                target=submit,
                args=(self.world, self.names, self.seconds * 0.7),
                daemon=True,
            ),
        ]

    def plan(self) -> list[tuple[float, str, Act]]:
        """List what happens when: the part of the night, its name, and what to do."""
        endpoint = self.endpoint
        webhook = self.webhook
        plan: list[tuple[float, str, Act]] = [
            (0.05, "the endpoint answers 503", lambda: self._mode("out")),
            (0.15, "the endpoint refuses connections", endpoint.refuse),
            (0.25, "the endpoint is back", self._endpoint_back),
            (0.10, "the webhook is dead", lambda: setattr(webhook, "is_dead", True)),
            (0.40, "the webhook lives", lambda: setattr(webhook, "is_dead", False)),
            (0.30, "the endpoint answers 429", lambda: self._mode("busy")),
            (0.38, "the endpoint is quiet", lambda: self._mode("up")),
            (0.60, "all workers are replaced", self._roll),
            (0.72, "half of the clocks jump forward", lambda: self._jump(HOUR)),
            (0.78, "they jump back", lambda: self._jump(0.0)),
            (0.85, "a worker is frozen", self._freeze),
        ]
        if self.postgres is None:
            plan.append((0.43, "the file is locked", self._lock))
            plan.append((0.50, "the disk is full", self._fill))
        else:
            plan.append((0.43, "the database fails over", self._fail_over))
            plan.append((0.50, "the database is killed", self._restart))
        if self.temporal is not None:
            plan.append((0.55, "the engine's server is killed", self._restart_engine))
        for _ in range(round(KILLS_PER_MINUTE * self.seconds / 60)):
            plan.append((random.uniform(0.02, 0.95), "a worker is killed", self._kill))
        return sorted(plan, key=lambda one: one[0])

    def play(self) -> None:
        """Play the plan, once the workers work."""
        self._staff()
        for worker in self._workers:
            worker.up.wait(START_SECONDS)
        self._began = time.monotonic()
        for process in self._processes:
            process.start()
        for part, name, act in self.plan():
            while time.monotonic() < self._began + part * self.seconds:
                self._staff()
                time.sleep(0.05)
            self._print(name)
            act()
        while time.monotonic() < self._began + self.seconds:
            self._staff()
            time.sleep(0.05)

    def finish(self) -> None:
        """Let the workers live until everything has ended and was told, or nothing moves."""
        self._print("the night is over")
        mark: object = None
        moved = time.monotonic()
        while time.monotonic() < moved + QUIET_SECONDS:
            self._staff()
            unfinished = asyncio.run(kills.count_unfinished(self.world))
            untold = len(self.untold())
            if not unfinished and not untold and not self._processes[1].is_alive():
                return
            now = (self.world.lines.stat().st_size, unfinished, untold)
            if now != mark:
                mark = now
                moved = time.monotonic()
            time.sleep(0.5)

    def untold(self) -> list[str]:
        """Name the runs of whose end the webhook was not told."""
        return [name for name in self.names if not self.webhook.told[name] - {"paused"}]

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for worker in self._workers:
            worker.process.kill()
            worker.watch.join()

    def _print(self, name: str) -> None:
        seconds = time.monotonic() - self._began
        print(f"  {seconds:6.1f} s  {name}", flush=True)
        self.events[name] += 1

    def _mode(self, mode: str) -> None:
        self.endpoint.mode = mode

    def _endpoint_back(self) -> None:
        self.endpoint.mode = "up"
        self.endpoint.listen()

    def _staff(self) -> None:
        """Replace the workers that have ended."""
        for worker in self._workers:
            if not worker.watch.is_alive():
                code = worker.process.exitcode
                name = {0: "left", -9: "died"}.get(code, f"ended with {code}")
                self.events[f"workers that {name}"] += 1
        self._workers = [each for each in self._workers if each.watch.is_alive()]
        while sum(not each.leaves for each in self._workers) < self.number:
            self._begin()

    def _begin(self) -> None:
        up = CONTEXT.Event()
        jump = CONTEXT.Value("d", 0.0)
        process = CONTEXT.Process(
            target=live, args=(self.world, up, jump, self.webhook.url), daemon=True
        )
        process.start()
        watch = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watch.start()
        self._workers.append(Worker(process, watch, up, jump))

    def _watch(self, process: Any) -> None:
        """Wait for the end of a worker, and write down whether it left what it knew."""
        process.join()
        known = process.exitcode != -signal.SIGKILL
        self.world.write("died", of=process.pid, known=known)

    def _any(self) -> Worker:
        self._staff()
        return random.choice(self._workers)

    def _kill(self) -> None:
        self._any().process.kill()

    def _roll(self) -> None:
        """Stop one worker after the other, each once the one that replaces it works."""
        for worker in list(self._workers):
            worker.leaves = True
            worker.process.terminate()
            self._staff()
            self._workers[-1].up.wait(START_SECONDS)

    def _jump(self, seconds: float) -> None:
        for worker in self._workers[: len(self._workers) // 2]:
            worker.jump.value = seconds

    def _freeze(self) -> None:
        pid = self._any().process.pid
        self._calm.clear()
        time.sleep(1.0)  # who is about to decide has decided
        self.world.write("died", of=pid, known=False)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(LEASE * 2)
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        self._calm.set()

    def _lock(self) -> None:
        """Hold the lock of the file, as a tool of somebody does."""
        connection = sqlite3.connect(self.world.store, isolation_level=None, timeout=60)
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(self.seconds * 0.02)
        connection.execute("ROLLBACK")
        connection.close()

    def _fill(self) -> None:
        """Fill the disk for a while."""
        filler = Path(self.world.store).with_name("filler")
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"0" * 4096)
        time.sleep(self.seconds * 0.03)
        filler.unlink()

    def _fail_over(self) -> None:
        """Make the database read-only for a while, and end all sessions."""
        with psycopg.connect(self.world.store, autocommit=True) as admin:
            admin.execute("SET default_transaction_read_only = off")
            admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            admin.execute("SELECT pg_reload_conf()")
            admin.execute(END_SESSIONS)
            time.sleep(self.seconds * 0.02)
            admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
            admin.execute("SELECT pg_reload_conf()")

    def _restart(self) -> None:
        assert self.postgres is not None
        self.postgres.kill()
        time.sleep(self.seconds * 0.01)
        self.postgres.start()

    def _restart_engine(self) -> None:
        assert self.temporal is not None
        self.temporal.kill()
        time.sleep(1.0)
        self.temporal.start()


# The morning: what came of it.

_LINES = {
    "retries after faults": "retry [0-9]+ of",
    "waits for the endpoint": "waits for .*next try",
    "takeovers": "taken over:",
    "in quarantine": "quarantined:",
    "failed": "run [^ ]+ failed:",
    "continued elsewhere": "continues elsewhere",
    "leases lapsed": "was not seen for",
    "interrupted by a drain": "interrupted:",
}
"""What is counted in the workers' log, and by which pattern."""


async def morning(night: Night) -> dict[str, int]:
    """Print the page of the morning, and count each broken promise."""
    world = night.world
    async with Runs.connect(world.store) as runs:
        stats = await runs.stats()
        records = {one.run_id: one for one in await runs.list(limit=100_000)}
        doubts = {line["id"]: line for line in world.read("doubted")}
        journals = {
            run_id: await runs.load(run_id)
            for run_id in {doubt["run_id"] for doubt in doubts.values()}
        }
    log = world.lines.with_name("log").read_text()
    orders = orders_of(night.names)
    effects: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in world.read("did"):
        effects[line["function"], line["order"]].append(line["key"])
    answered = [name for name, one in records.items() if one.status == "answered"]
    ended = {name: one for name, one in records.items() if one.status not in UNFINISHED}
    innocent = [
        name
        for name, one in records.items()
        if one.status in ("failed", "quarantined") and name not in POISON
    ]
    sent = night.endpoint.asked - night.endpoint.rejected
    known = kills.known_doubts(world, doubts, journals)

    print("\n  The morning's page")
    print(
        f"    runs             {dict(filter(lambda one: one[1], stats.by_status.items()))}"
    )
    print(f"    retrying now     {stats.retrying}")
    for name, pattern in _LINES.items():
        print(f"    {name:<24} {len(re.findall(pattern, log))}")
    print(f"    rejected requests        {night.endpoint.rejected.total()}")
    print(f"    refused notices          {night.webhook.refused}")
    print(f"    calls in doubt           {len(doubts)}")
    for name, number in sorted(night.events.items()):
        if name.startswith("workers"):
            print(f"    {name:<24} {number}")
    for name, one in sorted(records.items()):
        if one.status != "answered":
            print(f"    {name}: {one.status}, {one.problem}")
    for text in known:
        print(f"    A person was asked about {text}")
    return {
        "runs": len(records),
        "answered": len(answered),
        "effects": len(effects),
        "in doubt": len(doubts),
        "doubled": sum(
            kills.is_doubled(name, keys) for (name, _), keys in effects.items()
        ),
        "lost": sum(
            (function, orders[name]) not in effects
            for name in answered
            for function in kills.FUNCTIONS
        ),
        "over": sum(number > BUDGET for number in sent.values()),
        "unnamed": len(night.names) - len(ended),
        "innocent": len(innocent),
        "known": len(known),
        "refused": len(night.endpoint.server.refused),
        "untold": len(night.untold()),
    }


UNFINISHED = ("queued", "running", "paused")
PROMISED = (
    "doubled",
    "lost",
    "over",
    "unnamed",
    "innocent",
    "known",
    "refused",
    "untold",
)


@contextmanager
def disk(folder: Path) -> Generator[Path]:
    """Mount a small disk in memory; the folder itself where nobody may mount one."""
    place = folder / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(place)]
    mounted = shutil.which("mount") is not None and not subprocess.call(command)
    try:
        yield place
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=True)


def played(place: str, given: argparse.Namespace) -> dict[str, int]:
    """Play the night in one place."""
    folder = Path(tempfile.mkdtemp(prefix="night-"))
    names = [f"order-{number}" for number in range(given.runs - len(POISON))]
    for part, name in enumerate(POISON):
        names.insert(len(names) * (part + 1) // (len(POISON) + 2), name)
    poison = frozenset(orders_of(names)[name] for name in POISON)
    with ExitStack() as stack:
        if not given.keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        endpoint = stack.enter_context(Endpoint(poison))
        webhook = Webhook()
        stack.callback(webhook.stop)
        store = str(stack.enter_context(disk(folder)) / "runs.db")
        engine = ""
        postgres: PostgresServer | None = None
        temporal: TemporalServer | None = None
        if place != "sqlite":
            postgres = stack.enter_context(PostgresServer())
            store = engine = postgres.create("runs")
        if place == "dbos":
            DBOS.migrate(engine)
        if place == "temporal":
            temporal = stack.enter_context(TemporalServer())
            asyncio.run(temporal.connect())
            engine = temporal.address
        world = World(
            place,
            store,
            endpoint.url,
            folder / "lines",
            engine=engine,
            seconds=given.call_seconds,
            lease=LEASE,
        )
        night = Night(
            world,
            endpoint,
            webhook,
            names,
            given.workers,
            given.minutes * 60.0,
            postgres,
            temporal,
        )
        stack.callback(night.close)
        night.play()
        night.finish()
        return asyncio.run(morning(night))


def main() -> int:
    """Play the night in each place."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="+", choices=PLACES)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--call-seconds", type=float, default=1.0)
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    given = parser.parse_args()
    kept = True
    for place in given.places:
        print(
            f"{place}: {given.runs} runs, {given.workers} workers, {given.minutes} min"
        )
        figures = played(place, given)
        print(
            f"{place}: {', '.join(f'{value} {name}' for name, value in figures.items())}",
            flush=True,
        )
        kept = kept and not any(figures[name] for name in PROMISED)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
