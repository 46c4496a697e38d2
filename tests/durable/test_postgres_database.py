"""PostgreSQL as a database of runs: each transaction once, also if the connection breaks; errors with names."""

import asyncio
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

import psycopg
import pytest

from planner_ext.core.errors import NewerSchemaError
from planner_ext.durable.database import SCHEMAS
from planner_ext.durable.errors import DuplicateRowError, StoreError
from planner_ext.durable.postgres import PostgresDatabase
from planner_ext.durable.writer import ADD_FACT
from support import TESTS
from support.postgres import PostgresServer

CREATE_RUN = """
    INSERT INTO planner_runs (run_id, goal, status, owner, created_at, updated_at)
    VALUES (:run_id, :goal, 'running', :owner, :at, :at) ON CONFLICT DO NOTHING RETURNING run_id
"""
COUNT = "SELECT COUNT(*), MAX(seq) FROM planner_journal WHERE run_id = :run_id"
TRIP_COMMIT = """
    CREATE SEQUENCE trips;
    CREATE FUNCTION trip() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        IF nextval('trips') = 1 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF;
        RETURN NULL;
    END $$;
    CREATE CONSTRAINT TRIGGER trip AFTER INSERT ON planner_journal
        DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION trip();
"""
COMMITTED = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


def fact(
    seq: int, run_id: str = "r"
) -> tuple[str, dict[str, str | int | float | None]]:
    """Write the step that adds a row to a journal."""
    return (
        ADD_FACT,
        {
            "run_id": run_id,
            "seq": seq,
            "schema": 1,
            "fact": "{}",
            "link": "",
            "salt": "",
        },
    )


def created(run_id: str = "r") -> tuple[str, dict[str, str | int | float | None]]:
    """Write the step that enters a run."""
    return (CREATE_RUN, {"run_id": run_id, "goal": '"g"', "owner": None, "at": 1.0})


@pytest.fixture
def disk() -> Iterator[Path]:
    """Mount a small disk that the user of the server may use."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        disk = folder / "disk"
        disk.mkdir()
        options = ["-t", "tmpfs", "-o", "size=40m,mode=777", "tmpfs"]
        if (
            shutil.which("mount") is None
            or subprocess.run(
                ["mount", *options, str(disk)], stderr=subprocess.DEVNULL, check=False
            ).returncode
        ):
            pytest.skip("this machine lets nobody mount a disk")
        shutil.chown(disk, "nobody")
        yield disk
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.fixture
async def database(postgres_url: str) -> AsyncIterator[PostgresDatabase]:
    """Open an empty database with one run in it."""
    database = PostgresDatabase(postgres_url)
    await database.open()
    await database.transact(created())
    yield database
    await database.close()


async def counted(database: PostgresDatabase, run_id: str = "r") -> tuple[object, ...]:
    """Count the rows of a run's journal, and give the place of the last."""
    return (await database.transact((COUNT, {"run_id": run_id})))[0][0]


async def test_steps_are_one_transaction(database: PostgresDatabase) -> None:
    """Where one step of several is refused, none of them was done, and the connection continues."""
    await database.transact(fact(0))
    with pytest.raises(DuplicateRowError):
        await database.transact(fact(1), fact(0))
    assert await counted(database) == (1, 0)
    assert await database.transact(created("s"), created("s")) == [[("s",)], []]


async def test_workers_may_open_an_empty_database_at_once(postgres_url: str) -> None:
    """Tables are created once, however many workers begin together."""
    databases = [PostgresDatabase(postgres_url) for _ in range(4)]
    await asyncio.gather(*(database.open() for database in databases))
    await asyncio.gather(
        *(database.transact(created(str(n))) for n, database in enumerate(databases))
    )
    assert await databases[0].transact(("SELECT COUNT(*) FROM planner_runs", {})) == [
        [(4,)]
    ]
    await asyncio.gather(*(database.close() for database in databases))


async def test_a_transaction_outlives_its_caller(
    database: PostgresDatabase, postgres_url: str
) -> None:
    """A caller that is cancelled does not take back, nor cut in two, what it had begun."""
    asked = asyncio.create_task(database.transact(fact(0), fact(1)))
    await asyncio.sleep(0)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await database.close()
    with pytest.raises(StoreError, match="was closed"):
        await counted(database)
    again = PostgresDatabase(postgres_url)
    assert await counted(again) == (2, 1)
    await again.close()


async def test_a_commit_that_was_lost_is_done_again(
    database: PostgresDatabase, postgres_url: str
) -> None:
    """A connection that breaks in a commit which then did not happen: the transaction is done once."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute(TRIP_COMMIT)
    assert await database.transact(fact(0), created("s")) == [(), [("s",)]]
    assert await counted(database) == (1, 0)


@pytest.mark.parametrize("fails_over", [False, True])
async def test_a_commit_whose_answer_was_lost_is_not_done_again(
    fails_over: bool,
) -> None:
    """A connection that breaks in a commit which did happen: the transaction is done once, without a duplicate.

    Also where new sessions take no writes for a while: only others, later, tell.
    """
    with (
        PostgresServer() as server,
        psycopg.connect(server.url(), autocommit=True) as admin,
    ):
        database = PostgresDatabase(server.url())
        await database.open()
        await database.transact(created())
        admin.execute("SET synchronous_commit = off")
        admin.execute(
            "ALTER SYSTEM SET synchronous_standby_names = 'nobody'"
        )  # so commits wait, after they happened
        admin.execute("SELECT pg_reload_conf()")
        seq = 0
        asked = asyncio.create_task(database.transact(fact(seq)))
        while not (
            waiting := await asyncio.to_thread(
                lambda: admin.execute(COMMITTED).fetchall()
            )
        ):
            if asked.done():  # its connection had not heard of the setting yet
                seq += 1
                asked = asyncio.create_task(database.transact(fact(seq)))
        admin.execute("ALTER SYSTEM RESET synchronous_standby_names")
        admin.execute("SELECT pg_reload_conf()")
        if fails_over:
            admin.execute("ALTER ROLE postgres SET default_transaction_read_only = on")
        admin.execute("SELECT pg_terminate_backend(%s)", waiting[0])
        if fails_over:
            # It may have been told by a session from before.
            while not (database.waits.seconds or asked.done()):  # noqa: ASYNC110  (no event says so)
                await asyncio.sleep(0.01)
            admin.execute("ALTER ROLE postgres RESET default_transaction_read_only")
        assert await asked == [()]
        assert await counted(database) == (seq + 1, seq)
        await database.close()


async def test_a_full_disk_is_waited_for(disk: Path) -> None:
    """A transaction that finds no space waits, and is done once, when there is some."""
    with PostgresServer() as server:
        with psycopg.connect(server.url(), autocommit=True) as admin:
            admin.execute(f"CREATE TABLESPACE small LOCATION '{disk}'".encode())
            admin.execute("CREATE DATABASE small TABLESPACE small")
        database = PostgresDatabase(server.url("small"))
        await database.open()
        await database.transact(created())
        filler = disk / "filler"
        with suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        step, values = fact(0)
        text = random.Random(0).randbytes(500_000).hex()  # which is not compressed
        writing = asyncio.create_task(
            database.transact((step, {**values, "fact": text}))
        )
        while database.waits.seconds < 1:  # noqa: ASYNC110  (no event says so)
            await asyncio.sleep(0.01)
        await asyncio.to_thread(os.truncate, filler, 0)
        assert await writing == [()]
        assert await counted(database) == (1, 0)
        await database.close()


async def test_a_server_that_is_killed_and_started_again_is_waited_for() -> None:
    """Nothing is lost and nothing is written twice while the server dies under the writers, again and again."""
    with PostgresServer() as server:
        database = PostgresDatabase(server.url())
        await database.open()
        await database.transact(created("a"), created("b"))
        over = asyncio.Event()

        async def write(run_id: str) -> int:
            seq = 0
            while not over.is_set():
                await database.transact(fact(seq, run_id))
                seq += 1
            return seq

        writers = [asyncio.create_task(write(run_id)) for run_id in ("a", "b")]
        for _ in range(3):
            before = cast("int", (await counted(database, "a"))[0])
            while cast("int", (await counted(database, "a"))[0]) < before + 20:
                pass
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
        over.set()
        for run_id, writer in zip(("a", "b"), writers, strict=True):
            written = await writer
            assert await counted(database, run_id) == (written, written - 1)
        await database.close()


def test_the_server_of_the_tests_ends_with_who_opened_it() -> None:
    """A session that is killed leaves no PostgreSQL behind: its clients are cut off."""
    program = "from support.postgres import PostgresServer; print(PostgresServer().url(), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=TESTS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().decode().strip()
        with closing(psycopg.connect(url, autocommit=True)) as connection:
            process.kill()
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT pg_sleep(60)")


async def test_a_server_that_stays_away_is_named() -> None:
    """A server that is away for longer than the patience: an error that says where and what to do, not the password."""
    with PostgresServer() as server:
        url = server.url().replace("postgres@", "postgres:secret@")
        database = PostgresDatabase(url, patience=0.1)
        await database.open()
        server.stop()
        with pytest.raises(
            StoreError, match=r"PostgreSQL at /.*database postgres.*Start the server"
        ) as caught:
            await database.transact(created())
        assert "secret" not in str(caught.value)
        server.start()
        await database.transact(created())
        await database.close()


@pytest.mark.parametrize(
    ("url", "way_out"),
    [
        (
            "postgresql://postgres@127.0.0.1:1/runs",
            "Start the server, or check host and port",
        ),
        ("runs.db", "Give a URL such as"),
        ("{socket}/nowhere", "name of the database"),
        ("postgresql://nobody@/postgres{host}", "Check the user"),
    ],
)
async def test_a_database_that_cannot_be_had_is_named(
    postgres: PostgresServer, url: str, way_out: str
) -> None:
    """For each defect of the address, the error says what to do about it."""
    host = postgres.url().partition("?")[2]
    given = (
        postgres.url("nowhere")
        if url.startswith("{socket}")
        else url.replace("{host}", f"?{host}")
    )
    with pytest.raises(StoreError, match=way_out):
        await PostgresDatabase(given).open()


async def test_newer_tables_are_refused(
    database: PostgresDatabase, postgres_url: str
) -> None:
    """Tables that a newer version made are not touched."""
    await database.transact(
        (
            "INSERT INTO planner_schema (schema) VALUES (:n)",
            {"n": SCHEMAS[-1].number + 1},
        )
    )
    with pytest.raises(NewerSchemaError, match=f"schema {SCHEMAS[-1].number + 1}"):
        await PostgresDatabase(postgres_url).open()


async def test_a_user_without_rights_gets_a_named_error(
    database: PostgresDatabase, postgres_url: str
) -> None:
    """Tables that are there need no right to create any; reading what one may not is refused by name."""
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("CREATE ROLE reader LOGIN")
        admin.execute("GRANT SELECT ON planner_schema, planner_runs TO reader")
        other = PostgresDatabase(postgres_url.replace("postgres@", "reader@"))
        await other.open()
        try:
            assert (await other.transact(("SELECT run_id FROM planner_runs", {}))) == [
                [("r",)]
            ]
            with pytest.raises(StoreError, match="Grant the user the rights"):
                await other.transact(created("s"))
        finally:
            await other.close()
            admin.execute("DROP OWNED BY reader")
            admin.execute("DROP ROLE reader")
