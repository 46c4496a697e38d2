"""Stores whose tables have the first schema: they are migrated when they are opened, while older workers continue.

``older/schema1.sql`` and ``older/schema1_postgresql.sql`` were dumped from stores that the last version with the first
schema had made: a run that was answered, one that waits, one that waits after a refused decision, one whose approval no
worker had taken, and one whose worker was killed between the start and the end of its first call.
"""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from planner_ext import Approve
from planner_ext.core.errors import NewerSchemaError
from planner_ext.durable import Approvals, Runs
from planner_ext.durable.database import TABLE_SCHEMA
from planner_ext.durable.store import opened_store
from planner_ext.engine.document import SCHEMA
from planner_ext.testing import ScriptedReply, say
from support.durable import decide_all, effects_in, open_runs, world
from support.processes import Lives

OLDER = Path(__file__).parent / "older"
STATUSES = {
    "answered": "answered",
    "paused": "paused",
    "refused": "paused",
    "decided": "paused",
    "killed": "running",
}


def settled(_: object) -> ScriptedReply:
    """Answer, whatever happened before."""
    return say("Settled.")


def connect(store: str) -> Any:
    return psycopg.connect(store) if "://" in store else sqlite3.connect(store)


def execute(store: str, statement: str) -> Sequence[Any]:
    with closing(connect(store)) as database:
        cursor = database.execute(statement)
        rows = cursor.fetchall() if cursor.description else []
        database.commit()
    return rows


@pytest.fixture(params=["sqlite", "postgresql"])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store with the first schema."""
    if request.param == "sqlite":
        path = tmp_path / "runs.db"
        with closing(sqlite3.connect(path)) as database:
            database.executescript((OLDER / "schema1.sql").read_text("utf-8"))
        return str(path)
    url: str = request.getfixturevalue("postgres_url")
    with psycopg.connect(url) as connection:
        connection.execute((OLDER / "schema1_postgresql.sql").read_bytes())
    return url


async def test_an_older_store_is_migrated_and_listed(older: str) -> None:
    """Its runs, journals, approvals, decisions and refused decisions are read; totals of ended runs stay at 0."""
    assert execute(older, "SELECT MAX(number) FROM planner_schema") == [(1,)]
    async with Runs.connect(older) as runs:
        assert {record.run_id: record.status for record in await runs.list()} == STATUSES
        assert {(record.deaths, record.retries, record.problem) for record in await runs.list()} == {(0, 0, "")}
        lengths = {name: len((await runs.load(name)).facts) for name in STATUSES}
        assert lengths == {"answered": 3, "paused": 4, "refused": 4, "decided": 4, "killed": 6}
    async with Approvals.connect(older) as approvals:
        assert {item.id for item in await approvals.pending()} == {"paused/0/pay", "refused/0/pay"}
        (refused,) = await approvals.refused("refused")
        assert (refused.by, refused.kind) == ("bob", "approve")
        assert (await approvals.show("decided/0/pay")).status == "decided"
    assert execute(older, "SELECT MAX(number) FROM planner_schema") == [(TABLE_SCHEMA,)]


async def test_the_runs_of_an_older_store_are_continued(older: str, tmp_path: Path) -> None:
    """A worker takes the decided run and the one of the killed worker; the others wait until they are decided."""
    planner, kernel = world(tmp_path / "effects", settled)
    async with open_runs(older) as runs:
        taken = await runs.recover(planner, kernel)
        assert {handle.run_id for handle in taken} == {"decided", "killed"}
        results = {handle.run_id: await handle.result() for handle in taken}
        assert {name: result.status for name, result in results.items()} == {"decided": "answered", "killed": "paused"}
        (doubtful,) = results["killed"].pending
        assert (doubtful.id, doubtful.in_doubt) == ("book", True)
        assert await decide_all(older) == 3
        for name in ("paused", "refused", "killed"):
            assert (await (await runs.resume(name, planner, kernel)).result()).status == "answered"
        assert {record.status for record in await runs.list()} == {"answered"}
    done = sorted(line.split()[0] for line in effects_in(tmp_path / "effects"))
    assert done == ["charge", "label", "pay", "pay", "pay"]


def list_runs(store: str) -> None:
    """Open a store, and read the runs in it."""
    import asyncio

    async def read() -> None:
        async with Runs.connect(store) as opened:
            assert len(await opened.list()) == len(STATUSES)

    asyncio.run(read())


def test_processes_that_migrate_at_once_do_not_disturb_each_other(older: str, lives: Lives) -> None:
    """Four of them open an older store at the same time: each succeeds, and the tables are migrated once."""
    processes = [lives.begin(list_runs, older) for _ in range(4)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert execute(older, "SELECT number FROM planner_schema ORDER BY number") == [(1,), (TABLE_SCHEMA,)]


async def test_a_store_of_a_newer_version_is_refused(older: str) -> None:
    """By its number, for workers and approvers, and it is not changed."""
    execute(older, f"INSERT INTO planner_schema VALUES ({TABLE_SCHEMA + 1})")
    for opening in (open_runs(older), Approvals.connect(older)):
        with pytest.raises(NewerSchemaError, match=f"has tables of schema {TABLE_SCHEMA + 1}"):
            async with opening:
                pass
    with pytest.raises(Exception, match="planner_workers"):
        execute(older, "SELECT * FROM planner_workers")


FIRST = (
    "INSERT INTO planner_runs (run_id, goal, status, owner, created_at, updated_at)"
    " VALUES ('new', '\"Go.\"', 'running', 'w', 1, 1) ON CONFLICT DO NOTHING",
    "INSERT INTO planner_journal (run_id, seq, schema, fact) SELECT 'new', seq, schema, replace(fact, 'paused', 'new')"
    " FROM planner_journal WHERE run_id = 'paused'",
    "UPDATE planner_runs SET status = 'paused', wake_at = NULL, updated_at = 2 WHERE run_id = 'new'",
    "INSERT INTO planner_approvals (id, run_id, status, fingerprint, call, asked_at, expires_at)"
    " VALUES ('new/0/pay', 'new', 'open', '', '{}', 2, NULL) ON CONFLICT (id) DO UPDATE SET status = 'open'",
    "UPDATE planner_runs SET owner = 'v' WHERE run_id = 'new' AND COALESCE(owner, '') = 'w'",
    "UPDATE planner_approvals SET status = 'closed', decision = COALESCE(decision, '{}') WHERE id = 'new/0/pay'",
    "INSERT INTO planner_refusals (run_id, id, decision, problem, at) VALUES ('new', 'new/0/pay', '{}', '\"\"', 3)",
    "UPDATE planner_runs SET owner = NULL WHERE run_id = 'new' AND owner = 'v'",
)
"""What workers of the first schema write."""


async def test_an_older_worker_is_not_disturbed(older: str) -> None:
    """A connection from before the migration writes on as it did, and what it wrote is read like other runs."""
    with closing(connect(older)) as database:
        database.execute("SELECT COUNT(*) FROM planner_runs").fetchall()
        database.commit()
        async with opened_store(older, create=False) as store:
            for statement in FIRST:
                database.execute(statement)
                database.commit()
            stored = await store.load("new")
            assert (stored.record.status, stored.record.owner, stored.record.iterations) == ("paused", None, 0)
            assert len(stored.facts) == 4


async def test_facts_of_an_older_worker_are_read_by_their_own_number(older: str, tmp_path: Path) -> None:
    """A journal may go on in a newer schema than it began in; a row keeps the number of the version that wrote it."""
    async with open_runs(older) as runs:
        assert await decide_all(older) == 2
        result = await (await runs.resume("paused", *world(tmp_path / "effects", settled))).result()
        assert result.status == "answered"
        rows = execute(older, "SELECT seq, schema FROM planner_journal WHERE run_id = 'paused' ORDER BY seq")
        assert [schema for seq, schema in rows] == [1 if seq < 4 else SCHEMA for seq, _ in rows]
        assert len((await runs.load("paused")).facts) == len(rows)


async def test_a_store_of_the_second_schema_is_migrated(tmp_path: Path) -> None:
    """Its workers get the lease that they had by default; what waited and what was queued in it goes on."""
    path = tmp_path / "runs.db"
    with closing(sqlite3.connect(path)) as database:
        database.executescript((OLDER / "schema2.sql").read_text("utf-8"))
        database.execute("INSERT INTO planner_workers VALUES ('older', 'older', 'host', 1, 'working', NULL, 0, 0)")
        database.commit()
    async with Runs.connect(path) as runs:
        assert {run.run_id: run.status for run in await runs.list()} == {"paused": "paused", "queued": "queued"}
    async with Approvals.connect(path) as approvals:
        (call,) = await approvals.pending()
        assert await approvals.decide(call.id, Approve(by="ann"))
    assert execute(str(path), "SELECT MAX(number) FROM planner_schema") == [(TABLE_SCHEMA,)]
    assert execute(str(path), "SELECT DISTINCT lease_seconds FROM planner_workers") == [(30.0,)]
