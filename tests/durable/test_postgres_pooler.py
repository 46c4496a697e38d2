"""PostgreSQL behind a pooler: workers need a session of their own, everybody else does not."""

import asyncio
from pathlib import Path

import pytest

from planner_ext.durable import Approvals, Runs, StoreError, WorkerInUseError
from planner_ext.durable.postgres import PostgresDatabase
from planner_ext.testing import ScriptedReply, ScriptedRequest, say
from support.durable import GOAL, PAY, decide_all, effects_in, open_runs, turn, world
from support.pooler import PROGRAM, pooler

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no pgbouncer on this machine")

USES = 12
"""More than after how many uses psycopg prepares a statement."""


def pays(request: ScriptedRequest) -> ScriptedReply:
    """Call the tool that needs a person, then answer."""
    return [PAY, say("Paid.")][turn(request)]


async def test_a_worker_is_refused_behind_a_pooler_of_transactions(
    postgres_url: str,
) -> None:
    """At its start, by name, with the way out; its name is not kept from others."""
    with pooler(postgres_url, "transaction") as pooled:
        for _ in range(2):
            with pytest.raises(
                StoreError,
                match=r"'a' needs a session of its own.*Give the address of the server",
            ):
                async with open_runs(pooled, worker_id="a"):
                    pass
        async with open_runs(postgres_url, worker_id="a"):
            pass


async def test_a_worker_works_behind_a_pooler_of_sessions(
    postgres_url: str, tmp_path: Path
) -> None:
    """There its lock is its own, and a second worker of its name is refused."""
    with pooler(postgres_url, "session") as pooled:
        async with open_runs(pooled, worker_id="a", poll_seconds=0.05) as runs:
            with pytest.raises(WorkerInUseError, match="'a' is in use"):
                async with open_runs(pooled, worker_id="a"):
                    pass
            result = await (
                await runs.start(*world(tmp_path / "effects", [say("Hello.")]), GOAL)
            ).result()
    assert result.status == "answered"


async def test_approvals_and_submitting_may_be_pooled(
    postgres_url: str, tmp_path: Path
) -> None:
    """Runs are submitted, listed, decided and cancelled through a pooler of transactions, also before any worker."""
    effects = tmp_path / "effects"
    with pooler(postgres_url, "transaction") as pooled:
        async with (
            Runs.connect(pooled, poll_seconds=0.05) as client,
            Approvals.connect(pooled) as approvals,
        ):
            submitted = [
                await client.submit(GOAL, run_id=f"order-{n}") for n in range(USES)
            ]
            async with open_runs(postgres_url, poll_seconds=0.05) as runs:
                work = asyncio.create_task(runs.work(*world(effects, pays)))
                paused = [await one.result(120) for one in submitted]
                assert {item.run_id for item in await approvals.pending()} == {
                    one.run_id for one in submitted
                }
                assert await client.cancel("order-0", by="ann")
                assert await decide_all(pooled) == USES - 1
                ended = [await one.result(120) for one in submitted]
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            assert await client.count(status="answered") == USES - 1
    assert {result.status for result in paused} == {"paused"}
    assert [result.status for result in ended] == ["stopped"] + ["answered"] * (
        USES - 1
    )
    assert effects_in(effects) == ["pay 5"] * (USES - 1)


async def test_tables_may_be_made_through_a_pooler(postgres_url: str) -> None:
    """By several processes at once; no lock is left in the pooler's sessions."""
    with pooler(postgres_url, "transaction") as pooled:
        databases = [PostgresDatabase(pooled) for _ in range(4)]
        await asyncio.gather(*(database.open() for database in databases))
        await asyncio.gather(*(database.close() for database in databases))
        direct = PostgresDatabase(postgres_url)
        locks = await direct.transact(
            ("SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory'", {})
        )
        assert locks == [[(0,)]]
        await direct.close()
