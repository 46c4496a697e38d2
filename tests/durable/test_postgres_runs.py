"""Runs in PostgreSQL: several workers, workers that die, a server that dies, and decisions."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from planner_ext import Approve
from planner_ext.core.facts import CallDecided
from planner_ext.durable import Approvals, Runs, WorkerInUseError
from planner_ext.hitl_manager import Defer
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from support.durable import (
    GOAL,
    check_history,
    decide_all,
    effects_in,
    open_runs,
    pays,
    world,
)
from support.postgres import PostgresServer
from support.processes import Lives

RECOVERY_SECONDS = 120
TABLES = "SELECT tablename FROM pg_tables WHERE schemaname = 'public'"
BATCH = calls(*(call("shop-book", {"order": n}, id=f"book{n}") for n in range(4)))


def books(request: ScriptedRequest) -> ScriptedReply:
    """Book four orders at once, four times, then answer."""
    turn = sum(bool(message.get("tool_calls")) for message in request.messages)
    return BATCH if turn < 4 else say("Booked.")


@asynccontextmanager
async def working(
    url: str, effects: Path, script: Any, **options: Any
) -> AsyncIterator[Runs]:
    """Let a worker live that takes due runs."""
    planner, kernel = world(effects, script, **options)
    async with open_runs(url, worker_id="working", poll_seconds=0.05) as runs:
        work = asyncio.create_task(runs.work(planner, kernel))
        try:
            yield runs
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def until(told: Callable[[], Awaitable[bool]]) -> None:
    """Wait, for as long as recovery may take, until something is so that only a database or another process tells."""
    async with asyncio.timeout(RECOVERY_SECONDS):
        while not await told():  # noqa: ASYNC110  (nobody here could set an event)
            await asyncio.sleep(0.02)


async def written(effects: Path, least: int) -> None:
    """Wait until so many effects took place."""

    async def enough() -> bool:
        return len(effects_in(effects)) >= least

    await until(enough)


async def ended(runs: Runs, *names: str) -> set[str]:
    """Wait until runs have ended; return how."""
    statuses: list[str] = []

    async def all_ended() -> bool:
        statuses[:] = [
            record.status for record in await runs.list() if record.run_id in names
        ]
        return not {"running", "paused"} & set(statuses)

    await until(all_ended)
    return set(statuses)


def booking_life(
    url: str, effects: Path, worker_id: str, names: list[str], seconds: float
) -> None:
    """Drive several runs at once."""

    async def drive() -> None:
        planner, kernel = world(effects, books, seconds=seconds)
        async with open_runs(url, worker_id=worker_id, poll_seconds=0.05) as runs:
            handles = [
                await runs.start(planner, kernel, GOAL, run_id=name) for name in names
            ]
            await asyncio.gather(*(handle.result() for handle in handles))

    asyncio.run(drive())


async def test_two_workers_that_want_the_same_runs_do_nothing_twice(
    lives: Lives, postgres: PostgresServer, tmp_path: Path
) -> None:
    """Two processes make the tables and are given the same runs, all at once: each call runs once."""
    effects, names = tmp_path / "effects", [f"order-{n}" for n in range(8)]
    empty = postgres.create("two_workers")

    processes = [
        lives.begin(booking_life, empty, effects, name, names, 0.01)
        for name in ("a", "b")
    ]
    for process in processes:
        await asyncio.to_thread(process.join, 60)

    assert [process.exitcode for process in processes] == [0, 0]
    assert len(effects_in(effects)) == len(names) * 16
    async with open_runs(empty) as runs:
        assert await ended(runs, *names) == {"answered"}


async def test_a_worker_that_is_killed_is_replaced(
    lives: Lives, postgres_url: str, tmp_path: Path
) -> None:
    """A worker that lives takes over what one that was killed had begun, within half a minute and by itself."""
    effects, names = tmp_path / "effects", [f"order-{n}" for n in range(4)]
    async with working(postgres_url, effects, books) as runs:
        process = lives.begin(booking_life, postgres_url, effects, "a", names, 0.2)
        await written(effects, 16)
        process.kill()
        process.join()

        async def taken_over() -> bool:
            return not await runs.list(status="running")

        await until(taken_over)
        await decide_all(postgres_url)  # of what is in doubt: that it is done
        assert await ended(runs, *names) == {"answered"}

    assert len(effects_in(effects)) <= 16 * len(names)


async def test_a_worker_alone_takes_its_own_runs_up_again(
    lives: Lives, postgres_url: str, tmp_path: Path
) -> None:
    """A worker that was killed and is started again under its name, at once, is another life of it."""
    effects = tmp_path / "effects"
    process = lives.begin(booking_life, postgres_url, effects, "a", ["order-7"], 30.0)
    await written(effects, 1)
    process.kill()
    process.join()

    planner, kernel = world(effects, books)
    async with open_runs(postgres_url, worker_id="a") as runs:
        paused = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
        assert {item.in_doubt for item in await pending(postgres_url)} == {True}
        await decide_all(postgres_url)
        result = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()

    assert (paused.status, result.status) == ("paused", "answered")
    check_history(result, [f"book{n}" for n in range(4)] * 4)


async def test_a_name_that_is_in_use_is_refused(postgres_url: str) -> None:
    """Two workers of one name would take each other's runs for lost: the second is refused."""
    async with open_runs(postgres_url, worker_id="a"):
        async with open_runs(postgres_url, worker_id="b"):
            pass
        with pytest.raises(
            WorkerInUseError, match="worker 'a' is in use by a process that lives"
        ):
            async with open_runs(postgres_url, worker_id="a"):
                pass
    async with open_runs(postgres_url, worker_id="a"):
        pass


async def pending(url: str) -> list[Any]:
    """List what waits."""
    async with Approvals.connect(url) as approvals:
        return await approvals.pending()


async def test_a_server_that_dies_in_the_midst_is_waited_for(tmp_path: Path) -> None:
    """PostgreSQL is killed under running calls and started again: every run ends, and every call ran once."""
    effects, names = tmp_path / "effects", [f"order-{n}" for n in range(4)]
    with PostgresServer() as server:
        planner, kernel = world(effects, books, seconds=0.05)
        async with open_runs(server.url(), worker_id="a", poll_seconds=0.05) as runs:
            handles = [
                await runs.start(planner, kernel, GOAL, run_id=name) for name in names
            ]
            for seen in (8, 24):
                await written(effects, seen)
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
            results = await asyncio.gather(*(handle.result() for handle in handles))
            assert {result.status for result in results} == {"answered"}
            planner, kernel = world(effects, pays)
            paused = await (
                await runs.start(planner, kernel, GOAL, run_id="after")
            ).result()
            assert paused.status == "paused"
    assert len(effects_in(effects)) == 16 * len(names)


async def test_a_decision_wakes_a_run_without_a_holder(
    postgres_url: str, tmp_path: Path
) -> None:
    """Parked by one process, decided while none lives, finished by one that works and never heard of it."""
    effects = tmp_path / "effects"
    planner, kernel = world(effects, pays)
    async with open_runs(postgres_url) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
    assert await decide_all(postgres_url) == 1

    async with working(postgres_url, effects, pays) as runs:
        assert await ended(runs, "order-7") == {"answered"}
    assert effects_in(effects) == ["pay 5"]


async def test_a_decision_wakes_a_run_of_a_worker_that_lives(
    postgres_url: str, tmp_path: Path
) -> None:
    """A worker that began with runs of its own takes later decisions on any run."""
    effects = tmp_path / "effects"
    async with working(postgres_url, effects, pays) as runs:
        planner, kernel = world(effects, pays)
        handles = [
            await runs.start(planner, kernel, GOAL, run_id=f"order-{n}")
            for n in range(3)
        ]
        await asyncio.gather(*(handle.result() for handle in handles))
        async with Approvals.connect(postgres_url) as approvals:
            items = await approvals.pending()
            won = [
                await approvals.decide(item.id, Approve(by=name))
                for item in items
                for name in ("ann", "bob")
            ]
        assert await ended(runs, *(handle.run_id for handle in handles)) == {"answered"}
    assert won == [True, False] * 3
    assert effects_in(effects) == ["pay 5"] * 3


async def test_a_question_expires_by_itself(postgres_url: str, tmp_path: Path) -> None:
    """A call that is not decided in time: a worker that works records that, and the run continues."""
    effects = tmp_path / "effects"
    options: dict[str, Any] = {"interceptors": [lambda _: Defer(expires_in=1)]}
    async with working(postgres_url, effects, pays, **options) as runs:
        planner, kernel = world(effects, pays, **options)
        assert (
            await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        ).status == "paused"
        assert await ended(runs, "order-7") == {"answered"}
        facts = (await runs.load("order-7")).facts
    assert [fact.reason for fact in facts if isinstance(fact, CallDecided)] == [
        "",
        "expired",
    ]
    assert effects_in(effects) == []


async def test_every_row_is_json_and_none_is_pickle(
    postgres_url: str, tmp_path: Path
) -> None:
    """What a run leaves behind is text, numbers and JSON."""
    options: dict[str, Any] = {"interceptors": [lambda _: Defer(expires_in=3600)]}
    async with working(postgres_url, tmp_path / "effects", pays, **options) as runs:
        planner, kernel = world(tmp_path / "effects", pays, **options)
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        assert await decide_all(postgres_url) == 1
        assert await ended(runs, "order-7") == {"answered"}
    with psycopg.connect(postgres_url) as connection:
        tables = connection.execute(TABLES).fetchall()
        rows = {
            name: connection.execute(f'SELECT * FROM "{name}"'.encode()).fetchall()
            for (name,) in tables
        }
    values = [value for table in rows.values() for row in table for value in row]
    assert not [value for value in values if isinstance(value, bytes | memoryview)]
    assert not [
        value for value in values if isinstance(value, str) and value.startswith("gAS")
    ]
    for name, column in (("planner_journal", 3), ("planner_approvals", 4)):
        assert rows[name]
        assert all(isinstance(json.loads(row[column]), dict) for row in rows[name])
