"""A PostgreSQL that fails over: it takes no writes for a while, and every session is ended; and one that restarts."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from planner_ext.durable import Runs
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say
from support.durable import effects_in, open_runs, turn, world
from support.postgres import PostgresServer
from support.processes import Lives

RECOVERY_SECONDS = 120
AWAY_SECONDS = 3.0
CALL_SECONDS = 2.0
"""The calls in flight end while the server is away."""
LEASE_SECONDS = 1.0
"""Less than the time for which the server takes no writes."""

END_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
"""


def books(request: ScriptedRequest) -> ScriptedReply:
    """Book the order that the goal names, which may not happen twice, two times one after the other, then answer."""
    order = next(
        int(str(message["content"]))
        for message in request.messages
        if message["role"] == "user"
    )
    step = turn(request)
    return (
        call("shop-book", {"order": 10 * order + step}, id=f"book{step}")
        if step < 2
        else say("Booked.")
    )


def working_life(url: str, effects: Path, name: str) -> None:
    """Drive what is due, until killed."""

    async def work() -> None:
        async with open_runs(
            url, worker_id=name, poll_seconds=0.05, lease_seconds=LEASE_SECONDS
        ) as runs:
            await runs.work(
                *world(effects, books, seconds=CALL_SECONDS), max_concurrency=5
            )

    asyncio.run(work())


async def fail_over(server: PostgresServer) -> None:
    """Let the server take no writes, end all its sessions, and let it take writes again later."""
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("SET default_transaction_read_only = off")
        admin.execute("ALTER SYSTEM SET default_transaction_read_only = on")
        admin.execute("SELECT pg_reload_conf()")
        admin.execute(END_SESSIONS)
        await asyncio.sleep(AWAY_SECONDS)
        admin.execute("ALTER SYSTEM RESET default_transaction_read_only")
        admin.execute("SELECT pg_reload_conf()")
        admin.execute(END_SESSIONS)


async def restart(server: PostgresServer) -> None:
    """Kill the server, and start it again."""
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(AWAY_SECONDS)
    await asyncio.to_thread(server.start)


async def see_runs_through(
    lives: Lives,
    folder: Path,
    happens: Callable[[PostgresServer], object],
    *,
    workers: int = 2,
    runs: int = 8,
) -> None:
    """Let something happen to the server while calls are in flight; check that no person is asked, and nothing lost."""
    effects = folder / "effects"
    with PostgresServer() as server:
        url = server.create("runs")
        async with (
            Runs.connect(url, poll_seconds=0.05) as client,
            asyncio.timeout(RECOVERY_SECONDS),
        ):
            submitted = [
                await client.submit(str(n), run_id=f"order-{n}") for n in range(runs)
            ]
            processes = [
                lives.begin(working_life, url, effects, f"worker-{n}")
                for n in range(workers)
            ]
            while len(effects_in(effects)) < runs:  # noqa: ASYNC110  (only another process tells)
                await asyncio.sleep(0.01)
            happening = happens(server)
            assert asyncio.iscoroutine(happening)
            await happening
            results = [await one.result() for one in submitted]
            with psycopg.connect(url) as connection:
                deaths = connection.execute(
                    "SELECT SUM(deaths), SUM(retries) FROM planner_runs"
                ).fetchone()
        assert [result.status for result in results] == ["answered"] * runs
        assert sorted(effects_in(effects)) == sorted(
            f"book {10 * n + step}" for n in range(runs) for step in (0, 1)
        )
        assert deaths == (0, 0)
        assert [process.is_alive() for process in processes] == [True] * workers
        for process in processes:
            process.kill()
            process.join()


async def test_a_server_that_fails_over_is_waited_for(
    lives: Lives, tmp_path: Path
) -> None:
    """Calls in flight are recorded when writes are taken again: each ran once, no worker counts as dead.

    However long that takes: nobody could write a heartbeat, so none was missed.
    """
    await see_runs_through(lives, tmp_path, fail_over)


@pytest.mark.kills
async def test_a_server_that_restarts_is_waited_for(
    lives: Lives, tmp_path: Path
) -> None:
    """The same where the server was killed."""
    await see_runs_through(lives, tmp_path, restart)
