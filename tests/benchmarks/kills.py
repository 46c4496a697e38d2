"""Kill workers at random and at every crash point, and judge by what functions and model have written down.

    python tests/benchmarks/kills.py sqlite postgres dbos temporal   45 kills in each place
    python tests/benchmarks/kills.py postgres --fail-over            no kill: 12 s read-only, with all sessions ended
    python tests/benchmarks/kills.py sqlite --kills 20 --mutant      functions that claim to be repeatable: not kept

Two workers live 2 to 6 s each, with 30 open runs. A life ends by SIGKILL, at random or at a crash point, by SIGTERM, or
it is frozen for longer than its lease. The servers are killed with SIGKILL once each, and started again. Another
process submits runs and decides; of a call in doubt it looks whether it took effect, as a person does.

Judged by fsynced lines of the functions, and by the requests that the model's server counted. Exits with 1 unless:

    doubled     no call took effect twice, nor with two keys
    lost        each call of an answered run took effect
    over        no run made more requests than its budget
    stranded    each run ended, answered or at its budget
    known       no question whether a call took effect, where a recorded result, a probe, its declaration or a
                living worker could tell
    refused     no request broke a rule of the endpoint
"""

import argparse
import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import psycopg
from dbos import DBOS
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

sys.path.insert(0, str(Path(__file__).parents[1]))

from planner_ext import (
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.core.facts import CallFinished
from planner_ext.durable import (
    ApprovalRefusedError,
    NoEffect,
    PendingApproval,
    RetryPolicy,
    Runs,
    RunsClient,
    StoredRun,
    StoreError,
    TookEffect,
    effect,
)
from planner_ext.hitl_manager import Supply
from planner_ext.testing import (
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.crash import CRASH_POINTS
from support.hosts import hosted
from support.postgres import PostgresServer
from support.temporal import TemporalServer

for _name in (
    "planner_ext",
    "psycopg",
    "temporalio",
):  # in each process: only what came of it
    logging.getLogger(_name).addHandler(logging.NullHandler())

os.environ["PYTHONPATH"] = os.pathsep.join(
    sys.path[:2]
)  # where the process that is forked finds its modules
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    [
        Path(__file__).stem,
        "planner_ext.durable.sqlite",
        "planner_ext.durable.postgres",
        "planner_ext.durable.gauge",
    ]
)
"""Workers are forked from a process that has imported all this, and opened nothing."""

PLACES = ("sqlite", "postgres", "dbos", "temporal")
ENGINES = ("dbos", "temporal")

BUDGET = 4
"""The requests that a run may make; without a fault it takes three."""
LEASE = 5.0
OPEN_RUNS = 30
QUIET_SECONDS = 60.0
"""How long nothing may move before the runs that are left count as stranded."""

START_SECONDS = 30.0
"""How long a worker may take to start."""

NOTICE_SECONDS = 0.5
"""How long after a death it may be noticed here."""

READ_ONLY_SECONDS = 12.0
RUNS_IN_CALLS = 15
END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname <> ''"

ENDS = ("stopped", "frozen", *CRASH_POINTS, *["killed"] * 7)
"""How lives end, each as often as the others before one comes again."""

ONCE = ("book", "ship", "pay")
FUNCTIONS = (*ONCE, "label", "charge")


@dataclass(frozen=True)
class World:
    """What every process of a trial is given.

    Attributes:
        place: One of `PLACES`.
        store: The SQLite file, or the address of a PostgreSQL database.
        model: The URL of the model's server.
        lines: The file of what happened.
        engine: The address of the engine's server.
        seconds: How long a function takes.
        lease: How long a worker may be frozen, or the database away, until others take its runs.
        mutant: Whether the functions claim that they may run again.
    """

    place: str
    store: str
    model: str
    lines: Path
    engine: str = ""
    seconds: float = 0.15
    lease: float = LEASE
    mutant: bool = False

    def write(self, what: str, **values: object) -> None:
        """Write down what happened, for good."""
        line = json.dumps(
            {"what": what, "pid": os.getpid(), "at": time.time(), **values}
        )
        file = os.open(self.lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{line}\n".encode())
        os.fsync(file)
        os.close(file)

    def read(self, *what: str, **values: object) -> list[dict[str, Any]]:
        """List what happened."""
        lines = (
            map(json.loads, self.lines.read_text().splitlines())
            if self.lines.exists()
            else ()
        )
        return [
            line
            for line in lines
            if line["what"] in what and values.items() <= line.items()
        ]


class Shop:
    """Functions that write down when they begin, and when they take effect."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def _do(self, function: str, order: int, key: str = "") -> str:
        before = random.uniform(0, self._world.seconds)
        self._world.write("began", function=function, order=order)
        await asyncio.sleep(before)
        self._world.write("did", function=function, order=order, key=key)
        await asyncio.sleep(self._world.seconds - before)
        return "done"

    @kernel_function(description="Books an order.")
    async def book(self, order: int) -> str:
        return await self._do("book", order)

    @effect("idempotent")
    @kernel_function(description="Prints a label.")
    async def label(self, order: int) -> str:
        return await self._do("label", order)

    @effect("keyed")
    @kernel_function(description="Charges a card.")
    async def charge(self, order: int, idempotency_key: str) -> str:
        return await self._do("charge", order, idempotency_key)

    @kernel_function(description="Ships an order.")
    async def ship(self, order: int) -> str:
        return await self._do("ship", order)

    @requires_approval(prompt="Really?")
    @kernel_function(description="Pays.")
    async def pay(self, order: int) -> str:
        return await self._do("pay", order)

    def shipped(
        self, _: str, arguments: Mapping[str, Any]
    ) -> TookEffect | NoEffect | None:
        """Tell whether a call of `ship` took effect; None if it began and may be about to."""
        call = {"function": "ship", "order": arguments["order"]}
        if self._world.read("did", **call):
            return TookEffect("done")
        return None if self._world.read("began", **call) else NoEffect()


def application(world: World) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel with the shop."""
    kernel = Kernel()
    client = AsyncOpenAI(base_url=world.model, api_key="any", max_retries=0)
    kernel.add_service(
        OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
    )
    shop = Shop(world)
    kernel.add_plugin(shop, "shop")
    effect("once", probe=shop.shipped)(kernel.get_function("shop", "ship"))
    if world.mutant:
        for name in ONCE:
            effect("idempotent")(kernel.get_function("shop", name))
    options = FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=BUDGET)
    return FunctionCallingStepwisePlanner(options=options), kernel


def order_of(request: ScriptedRequest) -> int:
    """Read which order, and so which run, a request is about."""
    return int(
        next(
            number
            for message in request.messages
            for number in re.findall(r"order (\d+)\.", str(message))
        )
    )


def model(request: ScriptedRequest) -> Any:
    """Call four functions at once, then the one that needs a person, then answer; now and then fail."""
    if random.random() < 0.02:
        return ScriptedFault(status=500)
    order = {"order": order_of(request)}
    batch = calls(
        *(
            call(f"shop-{name}", order, id=name)
            for name in ("book", "label", "charge", "ship")
        )
    )
    turn = sum(bool(message.get("tool_calls")) for message in request.messages)
    return [batch, call("shop-pay", order, id="pay"), say("Settled.")][turn]


# Lives: what the processes do.


def live(world: World, up: Any, point: str, armed_after: float) -> None:
    """Work until a signal comes; die at a crash point if one is named, from a moment on."""
    try:
        asyncio.run(_live(world, up, point, armed_after))
    except (StoreError, RuntimeError) as error:  # whoever starts while a server is away
        sys.exit(f"A worker ends: {error}")


async def _live(world: World, up: Any, point: str, armed_after: float) -> None:
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    if point:
        loop.call_later(
            armed_after, os.environ.__setitem__, "PLANNER_EXT_CRASH_AT", point
        )
    open_runs = Runs.sqlite if world.place == "sqlite" else Runs.postgres
    async with open_runs(world.store, **options(world)) as runs:
        if world.place in ENGINES:
            runs.drive_with(*application(world))
            async with hosted(world.place, runs, world.engine, again_after=5.0):
                up.set()
                await stopped.wait()
        else:
            working = asyncio.create_task(runs.work(*application(world)))
            leaving = asyncio.create_task(stopped.wait())
            up.set()
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()


def options(world: World) -> dict[str, Any]:
    """Return the options of a worker."""
    retry = RetryPolicy(attempts=1000, first_delay=0.2, max_delay=2.0)
    return {
        "poll_seconds": 0.1,
        "lease_seconds": world.lease,
        "max_deaths": 1000,
        "retry": retry,
        "grace_seconds": 5.0,
    }


def serve_people(world: World, submitting: Any, calm: Any) -> None:
    """Submit runs, and decide what waits, until killed."""
    asyncio.run(_serve_people(world, submitting, calm))


async def _serve_people(world: World, submitting: Any, calm: Any) -> None:
    numbers = itertools.count()
    while True:
        with suppress(StoreError):  # the server is away
            async with Runs.connect(world.store) as runs:
                while True:
                    unfinished = await runs.count(
                        status=("queued", "running", "paused")
                    )
                    missing = (
                        max(0, OPEN_RUNS - unfinished) if submitting.is_set() else 0
                    )
                    for number in itertools.islice(numbers, missing):
                        await runs.submit(f"Settle order {number}.", run_id=str(number))
                    for item in await runs.approvals().pending(limit=100):
                        # a frozen worker may do later what nobody sees yet
                        if random.random() < 0.3 and (
                            calm.is_set() or not item.in_doubt
                        ):
                            await decide(world, runs, item)
                    await asyncio.sleep(0.1)


async def decide(world: World, runs: RunsClient, item: PendingApproval) -> None:
    """Approve a call; of one in doubt look whether it took effect, and say so."""
    decision: Approve | Supply = Approve(by="ann", fingerprint=item.fingerprint)
    if item.in_doubt:
        name = item.fully_qualified_name.removeprefix("shop-")
        call = {"function": name, "order": item.arguments["order"]}
        asked = {
            "id": item.id,
            "run_id": item.run_id,
            "call_id": item.call_id,
            "asked": item.asked_at.timestamp(),
        }
        world.write("doubted", **call, **asked)
        if world.read("did", **call):
            decision = Supply("It is done.", by="ann")
    with suppress(ApprovalRefusedError):  # it does not wait any more
        await runs.approvals().decide(item.id, decision)


# The trial: what is done to them.


class Server(Protocol):
    """A server that may be killed."""

    def kill(self) -> None:
        """End it as when its machine dies."""
        ...

    def start(self) -> None:
        """Start it on the same files."""
        ...


@dataclass
class Life:
    """A worker's process.

    Attributes:
        process: The process.
        watch: Writes down when it has ended.
        end: What ends it: ``killed``, ``stopped``, ``frozen`` or a crash point.
        up: Set once it works.
        seconds: How long it then lives; with a crash point, until it is killed at random instead.
        due: When something is done to it, by the monotonic clock.
    """

    process: Any
    watch: threading.Thread
    end: str
    up: Any
    seconds: float
    due: float


@dataclass
class Trial:
    """One place, its workers, and how they ended."""

    world: World
    servers: Sequence[Server]
    ends: Counter[str] = field(default_factory=Counter[str])
    _lives: list[Life] = field(default_factory=list[Life])

    def __post_init__(self) -> None:
        self._submitting, self._calm = CONTEXT.Event(), CONTEXT.Event()
        self._submitting.set()
        self._calm.set()
        self._people = CONTEXT.Process(
            target=serve_people,
            args=(self.world, self._submitting, self._calm),
            daemon=True,
        )
        self._people.start()

    @property
    def kills(self) -> int:
        """The number of SIGKILLs of workers."""
        return sum(self.ends[end] for end in ("killed", *CRASH_POINTS))

    def kill(self, wanted: int) -> None:
        """Let two workers live and die until enough were killed; kill each server once on the way."""
        servers = list(self.servers)
        ends: list[str] = []
        while not self.world.read("did"):
            self._staff(2)
            time.sleep(0.1)
        while self.kills < wanted and self.ends["failed"] < wanted:
            self._bury()
            while len(self._lives) < 2:
                ends = ends or random.sample(ENDS, len(ENDS))
                self._begin(ends.pop())
            for life in self._lives:
                if life.up.is_set():
                    life.up.clear()
                    life.due = time.monotonic() + life.seconds
                if time.monotonic() > life.due:
                    self._end(life)
            if servers and self.kills >= wanted * (
                len(self.servers) - len(servers) + 1
            ) / (len(self.servers) + 1):
                server = servers.pop()
                server.kill()
                time.sleep(random.uniform(0.5, 1.5))
                server.start()
            time.sleep(0.05)

    def finish(self) -> None:
        """Submit nothing more, and let three workers live until everything has ended, or nothing moves."""
        self._submitting.clear()
        size = -1
        moved = time.monotonic()
        while (
            asyncio.run(count_unfinished(self.world))
            and time.monotonic() - moved < QUIET_SECONDS
        ):
            self._staff(3)
            size_now = self.world.lines.stat().st_size
            if size_now != size:
                size = size_now
                moved = time.monotonic()
            time.sleep(0.2)

    def fail_over(self, url: str) -> None:
        """Make the database read-only for 12 s, and end all sessions, while 15 runs have calls in flight."""
        while self._in_flight() < RUNS_IN_CALLS:
            self._staff(3)
            time.sleep(0.05)
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("SET default_transaction_read_only = off")
            admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
            admin.execute("SELECT pg_reload_conf()")
            admin.execute(END_SESSIONS)
            print(f"{self._in_flight()} runs in calls")
            time.sleep(READ_ONLY_SECONDS)
            admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
            admin.execute("SELECT pg_reload_conf()")

    def _in_flight(self) -> int:
        """Count the runs with a call that has begun and not ended."""
        since = time.time() - self.world.seconds
        return len(
            {line["order"] for line in self.world.read("began") if line["at"] > since}
        )

    def _staff(self, workers: int) -> None:
        """Begin lives that nothing ends."""
        self._bury()
        while len(self._lives) < workers:
            self._begin("left")

    def close(self) -> None:
        """End all processes."""
        self._people.kill()
        self._people.join()
        for life in self._lives:
            life.process.kill()
            life.watch.join()

    def _begin(self, end: str) -> None:
        seconds = random.uniform(2.0, 6.0)
        point = end if end in CRASH_POINTS else ""
        up = CONTEXT.Event()
        process = CONTEXT.Process(
            target=live, args=(self.world, up, point, seconds), daemon=True
        )
        process.start()
        watch = threading.Thread(target=self._watch, args=(process,), daemon=True)
        watch.start()
        more = 3.0 if point else 0.0
        self._lives.append(
            Life(
                process,
                watch,
                end,
                up,
                seconds + more,
                time.monotonic() + START_SECONDS,
            )
        )

    def _watch(self, process: Any) -> None:
        """Wait for the end of a worker, and write down whether it left what it knew."""
        process.join()
        self.world.write(
            "died", of=process.pid, known=process.exitcode != -signal.SIGKILL
        )

    def _end(self, life: Life) -> None:
        """End a worker, or freeze it and let it live on."""
        match life.end:
            case "stopped":
                life.end = "leaving"
                life.process.terminate()
            case "frozen":
                self._freeze(life.process.pid)
                self.ends["frozen"] += 1
                life.end = "killed"
                life.due = time.monotonic() + random.uniform(1.0, 3.0)
                return
            case _:
                life.end = "killed"
                life.process.kill()
        life.due = time.monotonic() + 10.0  # a worker that does not leave is killed

    def _freeze(self, pid: int) -> None:
        self._calm.clear()
        time.sleep(0.2)  # who is about to decide has decided
        self.world.write("died", of=pid, known=False)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(LEASE * random.uniform(0.5, 1.5))
            os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)
        self._calm.set()

    def _bury(self) -> None:
        """Count the workers that have ended."""
        for life in self._lives:
            if not life.watch.is_alive():
                match life.process.exitcode, life.end:
                    case 0, "leaving":
                        self.ends["stopped"] += 1
                    case -9, "killed" | "left":
                        self.ends["killed"] += 1
                    case -9, point if point in CRASH_POINTS:
                        self.ends[point] += 1
                    case _:
                        self.ends["failed"] += 1
        self._lives = [life for life in self._lives if life.watch.is_alive()]


async def count_unfinished(world: World) -> int:
    """Count the runs that have not ended."""
    async with Runs.connect(world.store) as runs:
        return await runs.count(status=("queued", "running", "paused"))


# The verdict: what came of it.


async def judge(world: World, requests: Sequence[ScriptedRequest]) -> dict[str, int]:
    """Count what happened, and each broken promise."""
    async with Runs.connect(world.store) as runs:
        status = {
            record.run_id: record.status for record in await runs.list(limit=100_000)
        }
        doubts = {line["id"]: line for line in world.read("doubted")}
        journals = {
            run_id: await runs.load(run_id)
            for run_id in {doubt["run_id"] for doubt in doubts.values()}
        }
    effects: dict[tuple[str, int], list[str]] = defaultdict(list)
    for line in world.read("did"):
        effects[line["function"], line["order"]].append(line["key"])
    asked = Counter(order_of(request) for request in requests)
    answered = [int(run_id) for run_id, ended in status.items() if ended == "answered"]
    known = known_doubts(world, doubts, journals)
    for text in known:
        print(f"A person was asked about {text}")
    return {
        "runs": len(status),
        "answered": len(answered),
        "effects": len(effects),
        "in doubt": len(doubts),
        "doubled": sum(is_doubled(name, keys) for (name, _), keys in effects.items()),
        "lost": sum(
            (name, order) not in effects for order in answered for name in FUNCTIONS
        ),
        "over": sum(count > BUDGET for count in asked.values()),
        "stranded": sum(
            ended not in ("answered", "limit_reached") for ended in status.values()
        ),
        "known": len(known),
    }


PROMISED = ("doubled", "lost", "over", "stranded", "known", "refused")


def known_doubts(
    world: World,
    doubts: Mapping[str, Mapping[str, Any]],
    journals: Mapping[str, StoredRun],
) -> list[str]:
    """Tell of each call in doubt that needed no person who could tell whether it took effect."""
    finished = {
        (run_id, fact.call_id): fact.at
        for run_id, stored in journals.items()
        for fact in stored.facts
        if isinstance(fact, CallFinished)
    }
    return [
        f"{doubt['id']} of order {doubt['order']}: {who}."
        for doubt in doubts.values()
        if (who := who_knew(world, doubt, finished))
    ]


def is_doubled(function: str, keys: Sequence[str]) -> bool:
    """Whether a call took effect twice, by the keys of its effects."""
    return (
        len(keys) > 1
        if function in ONCE
        else function == "charge" and len(set(keys)) > 1
    )


def who_knew(
    world: World, doubt: Mapping[str, Any], finished: Mapping[tuple[str, str], float]
) -> str:
    """Name what could tell whether a call took effect, about which a person was asked; "" if nothing could."""
    call = {"function": doubt["function"], "order": doubt["order"]}
    if finished.get((doubt["run_id"], doubt["call_id"]), float("inf")) < doubt["asked"]:
        return "its result was recorded"
    if doubt["function"] not in ONCE:
        return "it may run again"
    before = [
        line
        for line in world.read("began", "did", **call)
        if line["at"] < doubt["asked"]
    ]
    if doubt["function"] == "ship" and (not before or before[-1]["what"] == "did"):
        return "its probe can tell"
    if not before:
        return ""
    deaths = [
        death["at"] for death in world.read("died", of=before[-1]["pid"], known=False)
    ]
    is_dead = any(at < doubt["asked"] + NOTICE_SECONDS for at in deaths)
    return (
        "" if is_dead else f"its worker {before[-1]['pid']} lives; deaths at {deaths}"
    )


def tried(place: str, given: argparse.Namespace) -> dict[str, int]:
    """Try one place."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        model_server = stack.enter_context(ScriptedOpenAIServer(model))
        world = World(
            place,
            str(folder / "runs.db"),
            model_server.url,
            folder / "lines",
            mutant=given.mutant,
        )
        if given.fail_over:
            world = replace(world, seconds=6.0, lease=30.0)
        servers: list[Server] = []
        if place != "sqlite":
            postgres = stack.enter_context(PostgresServer())
            servers.append(postgres)
            url = postgres.create("runs")
            world = replace(world, store=url, engine=url)
        if place == "dbos":
            DBOS.migrate(url)
        if place == "temporal":
            temporal = stack.enter_context(TemporalServer())
            asyncio.run(temporal.connect())
            servers.append(temporal)
            world = replace(world, engine=temporal.address)
        trial = Trial(world, servers)
        stack.callback(trial.close)
        if given.fail_over:
            trial.fail_over(world.store)
        else:
            trial.kill(given.kills)
        trial.finish()
        print(
            f"{place}: {', '.join(f'{count} {end}' for end, count in sorted(trial.ends.items()))}"
        )
        figures = asyncio.run(judge(world, model_server.requests))
        return {"kills": trial.kills, **figures, "refused": len(model_server.refused)}


def main() -> int:
    """Try the places, and print the outcome."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("places", nargs="+", choices=PLACES)
    parser.add_argument("--kills", type=int, default=45)
    parser.add_argument(
        "--mutant",
        action="store_true",
        help="let the functions claim that they may run again",
    )
    parser.add_argument(
        "--fail-over",
        action="store_true",
        help="no kill: the database is read-only for 12 s",
    )
    given = parser.parse_args()
    kept = True
    for place in given.places:
        figures = tried(place, given)
        print(
            f"{place}: {', '.join(f'{value} {name}' for name, value in figures.items())}",
            flush=True,
        )
        promised = (*PROMISED, "in doubt") if given.fail_over else PROMISED
        kept = kept and not any(figures[name] for name in promised)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
