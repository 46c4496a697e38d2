"""A store that cannot be used says why and what to do, and nothing that was recorded is lost."""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.core.errors import InvalidJournalError, NewerSchemaError
from planner_ext.durable import Approvals, RetryPolicy, Runs, StoreError
from planner_ext.durable import sqlite as sqlite_store
from planner_ext.durable.database import SCHEMAS
from planner_ext.durable.sqlite import SqliteDatabase
from planner_ext.durable.store import open_database
from planner_ext.testing import say
from support.durable import (
    GOAL,
    PAY,
    effects_in,
    open_runs,
    run_life,
    store_neutral,
    world,
)
from support.processes import Lives

WRITE = ("INSERT INTO planner_schema (schema) VALUES (:number)", {"number": 0})


@contextmanager
def raw(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the file as any tool would."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        yield connection


async def opened(path: Path) -> None:
    async with Runs.sqlite(path):
        pass


async def paused(store: str | Path, folder: Path) -> None:
    """Leave a run that waits."""
    planner, kernel = world(folder / "effects", [PAY])
    async with open_runs(store) as runs:
        assert (
            await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
        ).status == "paused"


async def continued(store: str | Path, folder: Path) -> Any:
    """Continue that run."""
    planner, kernel = world(folder / "effects", [say("Done.")])
    async with open_runs(store) as runs:
        return await (await runs.start(planner, kernel, GOAL, run_id="r")).result()


async def test_a_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    """Not SQLite's "unable to open database file"."""
    with pytest.raises(
        StoreError, match=r"folder does not exist. Create .*/nowhere first"
    ):
        await opened(tmp_path / "nowhere" / "runs.db")


async def test_approvals_make_no_store(tmp_path: Path) -> None:
    """A misspelt path is an error, and not an empty inbox."""
    with pytest.raises(StoreError, match=r"There is no store .*misspelt.db"):
        async with Approvals.connect(tmp_path / "misspelt.db"):
            pass
    with pytest.raises(
        StoreError, match="Expected a path or a postgresql:// address; got 'mysql://"
    ):
        async with Approvals.connect("mysql://runs"):
            pass


async def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    """A folder in the file's place."""
    (tmp_path / "runs.db").mkdir()
    with pytest.raises(
        StoreError, match=r"it cannot be opened. Check that it is a file"
    ):
        await opened(tmp_path / "runs.db")


async def test_a_file_other_than_a_database_is_left_as_it_is(tmp_path: Path) -> None:
    """It is named, and not a byte of it is changed."""
    letter = tmp_path / "runs.db"
    letter.write_text("Dear Ann, " * 100)
    with pytest.raises(
        StoreError,
        match=r"not an SQLite database. Give another path; the file was not changed",
    ):
        await opened(letter)
    assert letter.read_text() == "Dear Ann, " * 100


async def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    """Overwritten pages do not count as runs."""
    await paused(tmp_path / "runs.db", tmp_path)
    data = bytearray((tmp_path / "runs.db").read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    (tmp_path / "runs.db").write_bytes(data)
    with pytest.raises(StoreError, match=r"it is damaged. Restore it from a backup"):
        await continued(tmp_path / "runs.db", tmp_path)


async def test_tables_of_a_newer_version_are_refused(tmp_path: Path) -> None:
    """Nothing is written into what this version does not understand."""
    await paused(tmp_path / "runs.db", tmp_path)
    with raw(tmp_path / "runs.db") as connection:
        connection.execute("INSERT INTO planner_schema (schema) VALUES (99)")
    known = rf"runs.db has tables of schema 99, .* this version .* knows up to {SCHEMAS[-1].number}"
    with pytest.raises(NewerSchemaError, match=known):
        await opened(tmp_path / "runs.db")


async def test_a_locked_file_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that keeps the file locked is ended by the user, not by us."""
    await paused(tmp_path / "runs.db", tmp_path)
    monkeypatch.setattr(sqlite_store, "_BUSY_SECONDS", 0.05)
    with raw(tmp_path / "runs.db") as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(
            StoreError,
            match=r"another process holds its lock. End the tool that has it open",
        ):
            await continued(tmp_path / "runs.db", tmp_path)
        connection.execute("ROLLBACK")
    assert (await continued(tmp_path / "runs.db", tmp_path)).status == "paused"


@pytest.mark.parametrize(
    ("pragma", "problem"),
    [
        (
            "PRAGMA max_page_count = 1",
            "the disk is full. Free space and start the run again",
        ),
        (
            "PRAGMA query_only = ON",
            "it is read-only. Give this process the right to write",
        ),
    ],
)
async def test_a_store_that_takes_no_more_stops_the_run(
    pragma: str, problem: str, tmp_path: Path
) -> None:
    """A full disk or a read-only file stops it before the next side effect; after a repair, the run continues."""
    await paused(tmp_path / "runs.db", tmp_path)
    async with Approvals.connect(tmp_path / "runs.db") as approvals:
        assert await approvals.decide("r/0/pay", Approve(by="ann" * 10_000))
    planner, kernel = world(tmp_path / "effects", [say("Done.")])
    brief = RetryPolicy(outage_seconds=0.05)
    async with Runs.sqlite(tmp_path / "runs.db", retry=brief) as runs:
        database: Any = runs._store.database
        await runs._store.claim("r", runs.worker_id, seen=None)
        await asyncio.to_thread(database._connection.execute, pragma)
        handle = await runs.resume("r", planner, kernel)
        with pytest.raises(StoreError, match=problem):
            await handle.result()
    assert effects_in(tmp_path / "effects") == []
    assert (await continued(tmp_path / "runs.db", tmp_path)).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]


async def test_a_transaction_is_all_or_nothing(tmp_path: Path) -> None:
    """A step that fails takes back those before it, and a closed store says that it is closed."""
    database = await SqliteDatabase.open(tmp_path / "runs.db")
    with pytest.raises(StoreError, match=r"SQLite refused .*no such table: nowhere"):
        await database.transact(WRITE, ("DELETE FROM nowhere", {}))
    assert await database.transact(("SELECT schema FROM planner_schema", {})) == [
        [(SCHEMAS[-1].number,)]
    ]
    for odd in (10**30, "\ud800"):
        with pytest.raises(StoreError, match="SQLite refused"):
            await database.transact(
                (
                    "INSERT INTO planner_schema (schema) VALUES (:number)",
                    {"number": odd},
                )
            )
    await database.close()
    await database.close()
    with pytest.raises(
        StoreError, match=r"was closed. Use it inside its async with block"
    ):
        await database.transact(WRITE)


@store_neutral(
    ("forge", "problem"),
    [
        (
            "UPDATE planner_journal SET fact = 'cos\nsystem\n(S''touch {traces}''\ntR.' WHERE seq = 1",
            "Row 1 .* not JSON",
        ),
        (
            "UPDATE planner_journal SET fact = '[[[' WHERE seq = 1",
            "Row 1 of run 'r' is not JSON",
        ),
        (
            'UPDATE planner_journal SET fact = \'{{"type":"Exec"}}\' WHERE seq = 1',
            "damaged at 1: ",
        ),
        (
            "UPDATE planner_journal SET schema = 99 WHERE seq = 1",
            "Row 1 of run 'r': This journal has schema 99",
        ),
        (
            "UPDATE planner_journal SET seq = seq + 5 WHERE seq = 2",
            "expected row 2, found",
        ),
        ("DELETE FROM planner_journal WHERE seq = 1", "expected row 1, found 2"),
        ("DELETE FROM planner_journal WHERE seq > 2", None),
        (
            "UPDATE planner_journal SET fact = replace(fact, '\"amount', '\"Amount') WHERE seq = 1",
            "do not belong|open calls",
        ),
        (
            "UPDATE planner_journal SET fact = replace(fact, '\"defer\"', '\"run\"') WHERE seq = 2",
            "contradicts|none does",
        ),
        (
            "UPDATE planner_journal SET fact = replace(fact, '\"r\"', '\"s\"') WHERE seq = 0",
            "the facts of run 's'",
        ),
    ],
)
async def test_a_forged_journal_runs_nothing(
    forge: str, problem: str | None, store: str, tmp_path: Path
) -> None:
    """A row that is damaged, of a newer schema, lost or altered is refused by name; reading it runs no code."""
    await paused(store, tmp_path)
    traces = tmp_path / "traces"
    database = await open_database(store)
    await database.transact((forge.format(traces=traces), {}))
    await database.close()
    if problem is None:  # rows cut off at the end: the run goes on from what is there
        assert (await continued(store, tmp_path)).status == "paused"
    else:
        with pytest.raises(InvalidJournalError, match=problem):
            await continued(store, tmp_path)
    assert effects_in(tmp_path / "effects") == []
    assert not traces.exists()


async def test_every_row_is_json(tmp_path: Path) -> None:
    """Facts, calls, goals and decisions: text that anything can read, and no pickle."""
    await paused(tmp_path / "runs.db", tmp_path)
    async with Approvals.connect(tmp_path / "runs.db") as approvals:
        assert await approvals.decide("r/0/pay", Approve(by="ann"))
    with raw(tmp_path / "runs.db") as connection:
        rows = connection.execute(
            "SELECT fact FROM planner_journal UNION ALL SELECT goal FROM planner_runs "
            "UNION ALL SELECT call FROM planner_approvals UNION ALL SELECT decision FROM planner_approvals"
        ).fetchall()
    assert len(rows) == 7
    for (text,) in rows:
        assert isinstance(text, str)
        assert text.isascii()
        json.loads(text)


def test_two_processes_make_no_call_twice(tmp_path: Path) -> None:
    """Two that start the same runs at the same time share one store: each call takes effect once."""
    lives = Lives()
    try:
        processes = [
            lives.begin(
                run_life,
                tmp_path / "runs.db",
                tmp_path / "effects",
                "order-7",
                0.05,
                name,
            )
            for name in ("a", "b")
        ]
        for process in processes:
            process.join(120)
        assert [process.exitcode for process in processes] == [0, 0]
    finally:
        lives.close()
    assert sorted(effects_in(tmp_path / "effects")) == [
        "book 1",
        "charge 3 order-7/0/charge",
        "label 2",
        "pay 5",
    ]
