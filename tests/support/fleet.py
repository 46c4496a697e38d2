"""A fleet in one event loop with virtual time: workers, store, endpoint, people and clocks follow from one seed.

    PYTHONHASHSEED=0 python -m support.fleet --seed 7              one world, told
    PYTHONHASHSEED=0 python -m support.fleet --seconds 3600        as many as fit into an hour, from seed 0
    PYTHONHASHSEED=0 python -m support.fleet --workers 100         no faults: statements a second

Real are the worker, its planner, OpenAI's client, and the SQL on SQLite. Simulated are
what the ports stand for: the connection to the database, the locks, the thread of the
heartbeat, the wire to the endpoint, and the clocks. Faults are drawn at each of these,
and a worker dies at any step of its event loop.

What holds at each step, else the world ends with a `Broken`:

    once         no call that may run once takes effect twice; one with a key has one key
    recorded     a call has its start in the journal before it runs
    asked        no call that waits for a person runs without his decision
    charged      a request has its charge in the journal before the endpoint has it
    over         the endpoint serves no run more requests than its budget
    known        no person is asked whether a call took effect whose worker lives, or that
                 may run again
    stranded     no run stays with a dead worker, or due once the faults are over, for
                 longer than `PATIENCE`
    ended        once the faults are over, each run is answered or says why it is not
"""

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import os
import random
import re
import sqlite3
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import httpx
from openai import AsyncOpenAI
from openai._base_client import get_platform
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.core.state import State
from planner_ext.durable import (
    ApprovalRefusedError,
    NoEffect,
    PendingApproval,
    RetryPolicy,
    Runs,
    RunsClient,
    StoreError,
    TookEffect,
    UnknownRunError,
    effect,
    heartbeat,
    store,
)
from planner_ext.durable.database import SCHEMAS, Execute, Row, Step, Waits
from planner_ext.durable.errors import DuplicateRowError
from planner_ext.durable.options import WorkerSettings
from planner_ext.durable.records import fold_journal, read_facts
from planner_ext.durable.store import JournalStore
from planner_ext.engine import concurrency
from planner_ext.engine.journal import lost_request
from planner_ext.hitl_manager import Supply
from planner_ext.testing import (
    ScriptedOpenAIServer,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.server import HttpRequest
from support.virtual import (
    LIFE,
    Life,
    VirtualLoop,
    VirtualThreading,
    without_chance,
)

__all__ = ["Broken", "Plan", "played"]

EPOCH = 1_800_000_000.0
LEASE = 5.0
POLL = 0.5
QUIET_SECONDS = 60.0
"""How long after a freeze, or an error of the store, a call may be in doubt whose
worker lives."""
PATIENCE = 120.0
"""Seconds for which a run may stay due while a worker lives that was undisturbed as
long: it may have to be driven alone, beside the calls of others."""
CALM_SECONDS = 7200.0
"""How long runs may take to end once the faults are over: a retry that was planned while
the store's clock was set forward is due when that shows the time."""
MEASURED_SECONDS = 10.0
UNCLAIMED = "SELECT COUNT(*) FROM planner_runs WHERE status = 'queued'"
SERVER_PATIENCE = 60.0
"""How long a transaction waits for a server that is away."""
BUDGET = 8
HOUR = 3600.0
ONCE = ("book", "ship", "pay")
FUNCTIONS = ("book", "label", "charge", "ship", "pay")
UNFINISHED = """
    SELECT run_id, owner, wake_at FROM planner_runs WHERE status IN ('queued', 'running', 'paused') ORDER BY run_id
"""


JOURNAL = (
    "SELECT seq, schema, fact FROM planner_journal WHERE run_id = :run ORDER BY seq"
)


class Broken(AssertionError):
    """A promise that was not kept."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The size of a world, and how much goes wrong in it.

    Attributes:
        faults: Whether anything goes wrong.
        seconds: Virtual seconds in which it does.
        mutant: Whether the functions claim that they may run again.
        step: The seconds by which a clock may be set.
    """

    seed: int
    workers: int = 3
    runs: int = 10
    faults: bool = True
    seconds: float = 120.0
    mutant: bool = False
    step: float = HOUR


@dataclass
class World:
    """What all processes of a simulation share.

    Attributes:
        chance: What the faults are drawn from.
        counts: What happened, by name.
        faults: Whether anything goes wrong now.
        submitted: Whether all runs were.
        cancelled: The orders that people may have cancelled.
        lives: The present life of each worker.
        disturbed: When a transaction of a life failed last.
        failed: The promise that was not kept.
    """

    plan: Plan
    loop: VirtualLoop
    tell: Callable[[str], object]
    chance: random.Random = field(init=False)
    counts: Counter[str] = field(default_factory=Counter[str])
    faults: bool = False
    submitted: bool = False
    disturbed: dict[Life, float] = field(default_factory=dict[Life, float])
    cancelled: set[int] = field(default_factory=set[int])
    lives: dict[int, Life] = field(default_factory=dict[int, Life])
    failed: "Broken | None" = None

    def __post_init__(self) -> None:
        self.chance = random.Random(self.plan.seed)
        self.faults = self.plan.faults
        self.digest = hashlib.sha256()
        self.database = Database(self)
        self.shop = Ledger(self)
        self.endpoint = Endpoint(self)

    @property
    def now(self) -> float:
        """The true time."""
        return EPOCH + self.loop.time()

    def note(self, what: str, *more: object) -> None:
        """Write down what happened, for a replay to compare."""
        life = LIFE.get()
        who = "-" if life is None else life.name
        line = f"{self.loop.time():9.4f} {who:<12} {what} {' '.join(map(str, more))}"
        self.digest.update(line.encode())
        self.counts[what] += 1
        self.tell(line)

    def happens(self, chance: float) -> bool:
        """Draw whether a fault happens."""
        return self.faults and self.chance.random() < chance

    def state_of(self, order: int) -> State:
        """Fold the journal of an order's run, as it is in the store."""
        run_id = f"order-{order}"
        rows = self.database.read(JOURNAL, run=run_id)
        return fold_journal(run_id, read_facts(run_id, rows))

    def is_quiet(self, life: Life) -> bool:
        """Whether a life was neither frozen nor refused by the store for a while."""
        then = max(life.was_frozen_at, self.disturbed.get(life, float("-inf")))
        return self.loop.time() - then > QUIET_SECONDS

    def broken(self, promise: str, text: str) -> Broken:
        """Make the error that says which promise was not kept; it ends the world."""
        error = Broken(f"seed {self.plan.seed}: {promise}: {text}")
        self.failed = error
        self.loop.stop()
        return error


class SetClock:
    """A clock that somebody may set; monotonic time is not affected."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.offset = 0.0

    def now(self) -> float:
        """Return what it shows."""
        return self._world.now + self.offset

    def monotonic(self) -> float:
        """Return the seconds since the start."""
        return self._world.loop.time()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


# The store.


class Database:
    """The server: real SQL on SQLite in memory, a transaction after the other.

    Attributes:
        locks: The workers that live.
        away_until: Until when nothing reaches it.
        offset: By how much its clock was set.
        seconds: The time that SQLite took.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.locks: set[str] = set()
        self.away_until = 0.0
        self.offset = 0.0
        self.seconds = 0.0
        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        self._connection.create_function(
            "store_now", 0, lambda: world.now + self.offset
        )
        self._connection.execute("PRAGMA foreign_keys = ON")
        for schema in SCHEMAS:
            for statement, values in schema.steps():
                self._connection.execute(statement, dict(values))

    def close(self) -> None:
        """Throw the tables away."""
        self._connection.close()

    def read(self, statement: str, **values: Any) -> list[Any]:
        """Read, as the judge of the world."""
        return self._connection.execute(statement, values).fetchall()

    @property
    def is_away(self) -> bool:
        """Whether nothing reaches it."""
        return self._world.loop.time() < self.away_until

    def perform(self, steps: Sequence[Step]) -> list[list[Row]] | StoreError:
        """Perform a transaction."""
        began = time.perf_counter()
        try:
            outcome = self._transacted(steps)
        finally:
            self.seconds += time.perf_counter() - began
        self._world.counts["statements"] += len(steps)
        if not isinstance(outcome, StoreError):
            self._world.counts["rows"] += sum(map(len, outcome))
        return outcome

    def _transacted(self, steps: Sequence[Step]) -> list[list[Row]] | StoreError:
        connection = self._connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            rows = [
                connection.execute(text, dict(given)).fetchall()
                for text, given in steps
            ]
        except sqlite3.IntegrityError as error:
            connection.execute("ROLLBACK")
            return DuplicateRowError(str(error))
        connection.execute("COMMIT")
        return rows


class Connected:
    """A process's connection; implements `planner_ext.durable.database.Database`."""

    now: ClassVar[str] = "store_now()"
    age: ClassVar[str] = "store_now() - seen_at"
    is_locked: ClassVar[str] = "1"
    skip_locked: ClassVar[str] = ""
    hints: ClassVar[Sequence[Step]] = ()

    def __init__(self, world: World) -> None:
        self._world = world
        self.waits = Waits(SERVER_PATIENCE)

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Send a transaction, which waits while the server is away; it may arrive after its sender's death.

        A lost one is sent again, and a lost outcome found out, as by
        `planner_ext.durable.postgres`. An error is rare, and does not say whether it
        was performed.
        """
        world = self._world
        done: asyncio.Future[list[list[Row]]] = world.loop.create_future()
        fate = "perform"
        if world.happens(0.01):
            fate = world.chance.choice(("late", "late", "lost", "unknown"))
        arrives = world.loop.time() + world.chance.expovariate(500.0)
        if fate == "late":
            arrives += world.chance.expovariate(1.0)
        back = world.chance.expovariate(500.0)
        life = LIFE.get()

        def arrive() -> None:
            if world.database.is_away and world.loop.time() < arrives + SERVER_PATIENCE:
                world.loop.outside(0.2, arrive)
                return
            outcome: list[list[Row]] | StoreError = StoreError("it was lost")
            if not (fate == "lost" or world.database.is_away):
                outcome = world.database.perform(steps)
                who = life and life.name
                if is_written(steps):
                    world.note("commit", who, *map(told, steps))
                else:
                    world.note("read", who)
            if fate == "unknown":
                outcome = StoreError("the connection was lost in a commit")
            if isinstance(outcome, StoreError) and life is not None:
                world.note("fails", life.name, outcome)
                world.disturbed[life] = world.loop.time()
            world.loop.outside(back, lambda: deliver(done, outcome))

        world.loop.outside(arrives - world.loop.time(), arrive)
        return await done

    async def backup(self, path: Any) -> None:
        """Refuse: nobody in a fleet makes a backup."""
        raise AssertionError("A fleet makes no backup.")

    @contextmanager
    def connection(self, *, timeout: float) -> Generator[Execute]:
        """Open a connection for the heartbeat, which waits for nothing here."""

        def execute(statement: str, values: Mapping[str, Any]) -> Sequence[Row]:
            if self._world.database.is_away:
                raise StoreError("the server is away")
            outcome = self._world.database.perform([(statement, values)])
            if isinstance(outcome, StoreError):
                raise outcome
            return outcome[0]

        yield execute

    async def scrub(self) -> None:
        """Refuse: nobody in a fleet forgets a person."""
        raise AssertionError("A fleet forgets nobody.")

    async def holds_lock(self, worker_id: str) -> bool:
        """Whether a worker lives."""
        return worker_id in self._world.database.locks

    async def close(self) -> None:
        """Nothing is open."""


def is_written(steps: Sequence[Step]) -> bool:
    """Whether a transaction may change something."""
    return not all(text.lstrip().startswith("SELECT") for text, _ in steps)


def told(step: Step) -> str:
    """Tell a statement in short: its beginning, the run, and who is to own it."""
    text, values = step
    beginning = " ".join(text.split()[:6])
    names = ("run_id", "owner", "seen", "me")
    named = [str(values[name]) for name in names if values.get(name)]
    return f"[{beginning} {' '.join(named)}]"


def deliver(
    done: "asyncio.Future[list[list[Row]]]", outcome: list[list[Row]] | StoreError
) -> None:
    """Give a caller that waits its outcome."""
    if done.done():
        return
    if isinstance(outcome, StoreError):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


class Locks:
    """The locks of workers; implements `planner_ext.durable.heartbeat.WorkerLocks`."""

    def __init__(self, world: World, life: Life, name: str) -> None:
        self.name = name
        self.worker_id = name
        self.hinted = asyncio.Event()
        self._held = world.database.locks
        self._held.add(name)
        life.on_death = lambda: self._held.discard(name)

    def missing(self, is_locked: Mapping[str, bool]) -> set[str]:
        """Return those that do not live."""
        return set(is_locked) - self._held


class VirtualTime:
    """Stands for the module ``time`` of the heartbeat: the clocks of the process that asks."""

    CLOCK_BOOTTIME = 7

    @staticmethod
    def time() -> float:
        """Return what the clock shows that somebody may set."""
        return _clock_of[LIFE.get()].now()

    @staticmethod
    def monotonic() -> float:
        """Return the seconds since the start."""
        return _clock_of[LIFE.get()].monotonic()

    @classmethod
    def clock_gettime(cls, clock: int) -> float:
        """Return the seconds since the start."""
        assert clock == cls.CLOCK_BOOTTIME
        return cls.monotonic()


_clock_of: dict[Life | None, SetClock] = {}


# The shop: functions with effects, and the ledger that judges them.


class Ledger:
    """What took effect, and who began it.

    Attributes:
        effects: The keys of the effects of each function and order.
        began: The lives that began each call, the last one last.
        running: The lives in which each call runs; a dead one stays.
        approved: The orders whose payment a person has approved.
        doubted: The questions of calls in doubt that people have seen.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.effects: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
        self.began: defaultdict[tuple[str, int], list[Life]] = defaultdict(list)
        self.running: defaultdict[tuple[str, int], list[Life]] = defaultdict(list)
        self.approved: set[int] = set()
        self.doubted: set[str] = set()

    async def do(self, function: str, order: int, key: str = "") -> str:
        """Perform a function, and check that it may."""
        world = self._world
        life = LIFE.get()
        assert life is not None
        world.note("began", function, order)
        self.began[function, order].append(life)
        batch = world.state_of(order).batch
        started = {
            one.request.id for one in (batch.calls if batch else ()) if one.started
        }
        if function not in started:
            raise world.broken("recorded", f"{function} {order} runs unrecorded")
        if function == "pay" and order not in self.approved:
            raise world.broken("asked", f"{function} {order} runs unasked")
        self.running[function, order].append(life)
        try:
            await self._take_effect(function, order, key)
            await asyncio.sleep(world.chance.uniform(0.0, 1.0))
        finally:
            self.running[function, order].remove(life)
        return "done"

    def may_yet(self, function: str, order: int) -> bool:
        """Whether a call that began in some life may still take effect, as that is frozen."""
        return any(not life.is_dead for life in self.running[function, order])

    async def _take_effect(self, function: str, order: int, key: str) -> None:
        world = self._world
        await asyncio.sleep(world.chance.uniform(0.0, 3.0))
        world.note("did", function, order)
        self.effects[function, order].append(key)
        keys = self.effects[function, order]
        is_keyed = function == "charge" and len(set(keys)) > 1
        if is_keyed or (function in ONCE and len(keys) > 1):
            raise world.broken("once", f"{function} {order} took effect {keys}")


class Shop:
    """The functions that a worker offers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @kernel_function(description="Books an order.")
    async def book(self, order: int) -> str:
        return await self._ledger.do("book", order)

    @effect("idempotent")
    @kernel_function(description="Prints a label.")
    async def label(self, order: int) -> str:
        return await self._ledger.do("label", order)

    @effect("keyed")
    @kernel_function(description="Charges a card.")
    async def charge(self, order: int, idempotency_key: str) -> str:
        return await self._ledger.do("charge", order, idempotency_key)

    @kernel_function(description="Ships an order.")
    async def ship(self, order: int) -> str:
        return await self._ledger.do("ship", order)

    @requires_approval(prompt="Really?")
    @kernel_function(description="Pays.")
    async def pay(self, order: int) -> str:
        return await self._ledger.do("pay", order)

    async def shipped(
        self, _: str, arguments: Mapping[str, Any]
    ) -> TookEffect | NoEffect | None:
        """Tell whether a call of `ship` took effect; None while it may still do so."""
        key = ("ship", int(arguments["order"]))
        if self._ledger.effects[key]:
            return TookEffect("done")
        return None if self._ledger.may_yet(*key) else NoEffect()


def application(world: World) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner and a kernel with the shop."""
    kernel = Kernel()
    http: Any = httpx.AsyncClient(transport=world.endpoint)
    client: Any = AsyncOpenAI(
        base_url="http://endpoint/v1", api_key="any", max_retries=0, http_client=http
    )
    client._platform = get_platform()  # else it is found out in a thread
    kernel.add_service(
        OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
    )
    shop = Shop(world.shop)
    kernel.add_plugin(shop, "shop")
    effect("once", probe=shop.shipped)(kernel.get_function("shop", "ship"))
    if world.plan.mutant:
        for name in ONCE:
            effect("idempotent")(kernel.get_function("shop", name))
    options = FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=BUDGET)
    return FunctionCallingStepwisePlanner(options=options), kernel


# The endpoint.


class Endpoint(httpx.AsyncBaseTransport):
    """The wire to the model, and the model.

    Attributes:
        out_until: Until when it refuses connections.
        served: The requests of each order that it served.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._server: Any = ScriptedOpenAIServer(replies)
        self.out_until = 0.0
        self.served = Counter[int]()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Answer a request, late, with an error, or not at all."""
        world = self._world
        body = request.read()
        await asyncio.sleep(world.chance.expovariate(100.0))
        if world.loop.time() < self.out_until:
            world.note("refused")
            raise httpx.ConnectError("refused", request=request)
        (number,) = re.findall(rb"order (\d+)\.", body)[:1]
        order = int(number)
        world.note("request", order)
        if world.happens(0.05):
            status = world.chance.choice((429, 503))
            world.note("rejected", order, status)
            headers = {"retry-after": "2"} if world.happens(0.5) else {}
            return httpx.Response(status, headers=headers, json={}, request=request)
        self.served[order] += 1
        self._check_charged(order)
        if self.served[order] > BUDGET:
            raise world.broken("over", f"order {order}")
        await asyncio.sleep(world.chance.expovariate(1.0))
        if world.happens(0.03):
            world.note("broken off", order)
            raise httpx.ReadError("the connection broke", request=request)
        answer = self._server._respond(
            HttpRequest(method="POST", path="/v1/chat/completions", body=body)
        )
        if answer.status != 200:
            raise world.broken("valid", f"the endpoint: {answer.parts!r}")
        return httpx.Response(
            answer.status,
            headers={"content-type": answer.content_type},
            content=b"".join(answer.parts),
            request=request,
        )

    def _check_charged(self, order: int) -> None:
        """Check that the run would pay for a request that arrives if its worker died now."""
        world = self._world
        state = world.state_of(order)
        due = sum(fact.usage.iterations for fact in lost_request(state, at=world.now))
        charged = state.usage.iterations + due
        if charged < self.served[order]:
            raise world.broken(
                "charged", f"request {self.served[order]} of order {order}: {charged}"
            )


def replies(request: ScriptedRequest) -> Any:
    """Call four functions at once, then the one that needs a person, then answer."""
    (number,) = re.findall(r"order (\d+)\.", str(request.messages))[:1]
    given = {"order": int(number)}
    batch = calls(
        *(
            call(f"shop-{name}", given, id=name)
            for name in ("book", "label", "charge", "ship")
        )
    )
    turn = sum(bool(message.get("tool_calls")) for message in request.messages)
    return [batch, call("shop-pay", given, id="pay"), say("Settled.")][turn]


# The processes.


async def work(world: World, life: Life, number: int) -> None:
    """Be a worker until the life ends, or leave."""
    clock = _clock_of[life]
    settings = WorkerSettings(
        worker_id=f"worker-{number}",
        lease_seconds=LEASE,
        poll_seconds=POLL,
        clock=clock,
        grace_seconds=world.chance.choice((0.0, 2.0, 25.0)),
        max_deaths=1000,
        retry=RetryPolicy(first_delay=0.5, max_delay=20.0),
    )
    locks = Locks(world, life, settings.name())
    opened: Any = Runs
    try:
        async with opened._opened(
            settings,
            settings.notifier(),
            JournalStore(Connected(world)),
            locks,
            where="fleet",
        ) as runs:
            working = asyncio.create_task(runs.work(*application(world)))
            stays = world.chance.expovariate(1 / 40.0) if world.faults else CALM_SECONDS
            await asyncio.wait({working}, timeout=stays)
            world.note("leaves")
            working.cancel()
    except StoreError as error:
        world.note("gives up", error)
    world.note("left")
    life.die()


def employ(world: World, number: int, life: int) -> None:
    """Start a life of a worker; another one follows it."""
    new = Life(f"worker-{number}.{life}")
    _clock_of[new] = SetClock(world)
    if world.happens(0.7):
        new.dies_at = int(world.chance.lognormvariate(7.0, 1.5)) + 1
    task = world.loop.live(new, lambda: work(world, new, number))

    def over() -> None:
        world.note("died" if new.is_dead else "over", new.name, new.steps)
        delay = world.chance.expovariate(1.0)
        world.loop.outside(delay, lambda: employ(world, number, life + 1))

    def end(task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            world.failed = world.failed or Broken(f"{new.name} ended: {error!r}")
            world.loop.stop()

    task.add_done_callback(end)
    world.lives[number] = new
    Watch(world, new, over)


class Watch:
    """Waits for the death of a life, and disturbs it."""

    def __init__(self, world: World, life: Life, over: Callable[[], object]) -> None:
        self._world, self._life, self._over = world, life, over
        self._look()

    def _look(self) -> None:
        world, life = self._world, self._life
        if life.is_dead:
            self._over()
            return
        if world.happens(0.01):
            seconds = world.chance.uniform(0.1, 3 * LEASE)
            world.note("freezes", life.name, seconds)
            world.loop.freeze(life, seconds)
        if world.happens(0.005):
            clock = _clock_of[life]
            clock.offset = world.chance.choice((-1, 0, 1)) * world.plan.step
            world.note("clock", life.name, clock.offset)
        world.loop.outside(1.0, self._look)


async def decide(world: World) -> None:
    """Be the people: decide what waits, at any time; cancel a run now and then."""
    client = RunsClient(
        JournalStore(Connected(world)), clock=_clock_of[LIFE.get()], poll_seconds=POLL
    )
    while True:
        await asyncio.sleep(world.chance.expovariate(1.0))
        with suppress(StoreError):
            for item in await client.approvals().pending(limit=100):
                if world.chance.random() < 0.5:
                    await answer(world, client, item)
            for record in await client.list(status=("failed", "quarantined")):
                world.note("revived", record.run_id, record.problem)
                await client.retry(record.run_id)
            if world.happens(0.01):
                order = world.chance.randrange(world.plan.runs)
                world.cancelled.add(order)
                with suppress(UnknownRunError):
                    await client.cancel(f"order-{order}", by="ann")
                    world.note("cancelled", order)
            if world.happens(0.02):
                world.note("held", await client.pause_all(by="ann"))
            elif not world.faults or world.chance.random() < 0.2:
                await client.resume_all(by="ann")


async def answer(world: World, client: RunsClient, item: PendingApproval) -> None:
    """Approve a call; of one in doubt look whether it took effect, and say so."""
    order = int(item.arguments["order"])
    name = item.fully_qualified_name.removeprefix("shop-")
    decision: Approve | Supply = Approve(by="ann", fingerprint=item.fingerprint)
    if item.in_doubt:
        world.note("doubted", name, order)
        if item.id not in world.shop.doubted:
            world.shop.doubted.add(item.id)
            check_doubt(world, name, order)
        if world.shop.may_yet(name, order):
            return
        if world.shop.effects[name, order]:
            decision = Supply("done", by="ann")
    if name == "pay":
        world.shop.approved.add(order)
    with suppress(ApprovalRefusedError):
        await client.approvals().decide(item.id, decision)


def check_doubt(world: World, name: str, order: int) -> None:
    """Check that nobody and nothing could tell whether a call took effect."""
    if name not in ONCE:
        raise world.broken("known", f"{name} {order} may run again")
    for life in world.shop.began[name, order][-1:]:
        if not life.is_dead and world.is_quiet(life):
            raise world.broken("known", f"{name} {order}: {life.name} lives")


async def submit(world: World) -> None:
    """Submit all runs."""
    client = RunsClient(JournalStore(Connected(world)), clock=_clock_of[LIFE.get()])
    for order in range(world.plan.runs):
        while True:
            try:
                await client.submit(f"Settle order {order}.", run_id=f"order-{order}")
                break
            except StoreError:
                await asyncio.sleep(0.1)
        await asyncio.sleep(
            world.chance.expovariate(world.plan.runs / world.plan.seconds * 2)
        )
    world.submitted = True


async def disturb(world: World) -> None:
    """Let the endpoint and the database be away for a while, now and then."""
    while True:
        await asyncio.sleep(world.chance.expovariate(1 / 30.0))
        if not world.faults:
            return
        seconds = world.chance.expovariate(1 / 8.0)
        until = world.loop.time() + seconds
        match world.chance.choice(("endpoint", "database", "its clock")):
            case "endpoint":
                world.note("outage", seconds)
                world.endpoint.out_until = until
            case "database":
                world.note("away", seconds)
                world.database.away_until = until
            case _:
                offset = world.chance.choice((-1, 0, 1)) * world.plan.step
                world.note("server's clock", offset)
                world.database.offset = offset


# The judge.


async def watch(world: World) -> None:
    """Check what holds of the store at each second, until all runs have ended."""
    since: dict[str, float] = {}
    calm_at: float | None = None if world.faults else 0.0
    while True:
        await asyncio.sleep(1.0)
        over = world.loop.time() > world.plan.seconds
        if over and world.faults:
            world.note("calm")
            world.faults = False
            calm_at = world.loop.time()
            world.database.offset = 0.0
            for clock in _clock_of.values():
                clock.offset = 0.0
        unfinished = world.database.read(UNFINISHED)
        if over and world.submitted and not unfinished:
            return
        if world.loop.time() > world.plan.seconds + CALM_SECONDS:
            raise world.broken("ended", f"{unfinished}")
        strays = {
            run_id
            for run_id, owner, wake_at in unfinished
            if (owner is not None and owner not in world.database.locks)
            or (calm_at is not None and (wake_at or 0.0) < world.now)
        }
        since = {
            run_id: since.get(run_id, world.loop.time()) for run_id in sorted(strays)
        }
        for run_id, at in since.items():
            if world.loop.time() - at > PATIENCE:
                raise world.broken("stranded", f"{run_id} does not continue")


def check_end(world: World) -> None:
    """Check that what ended is whole."""
    for run_id, status, problem in world.database.read(
        "SELECT run_id, status, problem FROM planner_runs"
    ):
        order = int(run_id.removeprefix("order-"))
        world.counts[f"runs {status}"] += 1
        missing = [name for name in FUNCTIONS if not world.shop.effects[name, order]]
        if status == "answered" and missing:
            raise world.broken("lost", f"{run_id}: {missing}")
        ends = ("stopped",) if order in world.cancelled else ()
        if status not in ("answered", "limit_reached", *ends):
            raise world.broken("ended", f"{run_id} is {status}: {problem}")


def played(plan: Plan, tell: Callable[[str], object] = lambda _: None) -> World:
    """Play a world to its end.

    Raises:
        Broken: If a promise was not kept.
    """
    without_chance(plan.seed)
    _clock_of.clear()
    loop = VirtualLoop()
    loop.set_exception_handler(lambda _loop, context: tell(f"  {context}"))
    asyncio.set_event_loop(loop)
    world = World(plan, loop, tell)
    _kept.append(world)
    people = Life("people")
    judge = Life("judge")
    for life in (people, judge):
        _clock_of[life] = SetClock(world)
    for number in range(plan.workers):
        employ(world, number, 0)
    loop.live(people, lambda: submit(world))
    loop.live(people, lambda: decide(world))
    if plan.faults:
        loop.live(judge, lambda: disturb(world))
    end = loop.live(judge, lambda: watch(world))
    end.add_done_callback(partial(stopped, loop))
    loop.run_forever()
    for thread in loop.threads:
        thread.drop()
    if world.failed is not None:
        raise world.failed
    end.result()
    check_end(world)
    return world


def measured(workers: int) -> Mapping[str, float]:
    """Let a fleet without faults wait for runs, and then drive two runs a worker that come at once.

    Returns:
        Statements and rows a virtual second while nothing is due, and while runs are;
        how long the last run waited until it was claimed.
    """
    plan = Plan(seed=0, workers=workers, runs=2 * workers, faults=False)
    without_chance(plan.seed)
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    world = World(plan, loop, lambda _: None)
    for number in range(workers):
        employ(world, number, 0)
    people = Life("people")
    _clock_of[people] = SetClock(world)
    figures: dict[str, float] = {"workers": workers}
    end = loop.live(people, lambda: measure(world, figures))
    end.add_done_callback(partial(stopped, loop))
    loop.run_forever()
    if world.failed is not None:
        raise world.failed
    end.result()
    return figures


async def measure(world: World, figures: dict[str, float]) -> None:
    """Fill in the figures."""
    client = RunsClient(JournalStore(Connected(world)), clock=_clock_of[LIFE.get()])
    await asyncio.sleep(5.0)
    with counted(world, "idle", figures):
        await asyncio.sleep(MEASURED_SECONDS)
    first = world.loop.time()
    for order in range(world.plan.runs):
        await client.submit(f"Settle order {order}.", run_id=f"order-{order}")
    figures["submitted after"] = round(world.loop.time() - first, 1)
    with counted(world, "busy", figures):
        while world.database.read(UNCLAIMED)[0][0]:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.1)
        figures["claimed after"] = round(world.loop.time() - first, 1)
        await asyncio.sleep(MEASURED_SECONDS)


@contextmanager
def counted(world: World, what: str, figures: dict[str, float]) -> Generator[None]:
    """Count statements and rows, and the time that SQLite takes."""
    before = Counter(world.counts)
    seconds = world.database.seconds
    first = world.loop.time()
    yield
    passed = world.loop.time() - first
    for name in ("statements", "rows"):
        figures[f"{what}: {name} a second"] = round(
            (world.counts[name] - before[name]) / passed
        )
    used = world.database.seconds - seconds
    figures[f"{what}: SQLite's share of a core"] = round(used / passed, 3)


def stopped(loop: VirtualLoop, _: object) -> None:
    """Stop the loop, as the world has ended."""
    loop.stop()


_kept: list[World] = []
"""Worlds that were played: what the dead left is never run, nor thrown away."""


def main() -> int:
    """Play worlds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, help="one world, told line by line")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--seconds", type=float, default=25.0)
    parser.add_argument("--mutant", action="store_true")
    parser.add_argument(
        "--step", type=float, default=HOUR, help="of a clock, in seconds"
    )
    parser.add_argument("--workers", type=int, help="a fleet without faults")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    modules: Any = (heartbeat, concurrency, store)
    for module in modules[:2]:
        module.threading = VirtualThreading()
    for module in modules[::2]:
        module.time = VirtualTime
    options: dict[str, Any] = {"mutant": given.mutant, "step": given.step}
    if given.workers is not None:
        print(json.dumps(measured(given.workers), indent=4))
        return 0
    if given.seed is not None:
        plan = Plan(seed=given.seed, **options)
        try:
            world = played(plan, print)
        except Broken as error:
            print(error)
            return 1
        print(world.digest.hexdigest(), dict(sorted(world.counts.items())))
        return 0
    totals = Counter[str]()
    began = time.perf_counter()
    for seed in itertools.count(given.first):
        if time.perf_counter() > began + given.seconds:
            break
        try:
            world = played(Plan(seed=seed, **options))
        except Broken as error:
            print(error)
            return 1
        totals += world.counts
        totals["worlds"] += 1
    print(json.dumps(dict(sorted(totals.items()))))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)
