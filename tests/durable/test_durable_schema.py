"""Stores and documents that a release does not read are refused by name, and stay as they are."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from planner_ext.core.errors import InvalidJournalError, NewerSchemaError
from planner_ext.durable import Approvals, Runs, StoreError
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.database import SCHEMAS
from planner_ext.durable.store import opened_store
from planner_ext.hitl_manager import Checkpoint
from planner_ext.testing import replay, say
from support.durable import GOAL, world
from support.processes import Lives

EARLIER = (
    "DROP TABLE planner_schema",
    "CREATE TABLE planner_schema (number INTEGER PRIMARY KEY)",
    "INSERT INTO planner_schema VALUES (1)",
    "INSERT INTO planner_schema VALUES (4)",
)
"""What the tables of a development version say of their schema."""

NEWER = (f"INSERT INTO planner_schema (schema) VALUES ({SCHEMAS[-1].number + 1})",)


def execute(store: str, *statements: str) -> list[Any]:
    connection: Any = (
        psycopg.connect(store) if "://" in store else sqlite3.connect(store)
    )
    with closing(connection) as database:
        rows: list[Any] = []
        for statement in statements:
            answer = database.execute(statement)
            rows = answer.fetchall() if answer.description else []
        database.commit()
    return rows


@pytest.fixture(params=["sqlite", "postgresql"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of its own, whose tables may be changed."""
    return (
        str(tmp_path / "runs.db")
        if request.param == "sqlite"
        else request.getfixturevalue("postgres_url")
    )


@pytest.mark.parametrize(
    ("statements", "error", "said"),
    [
        (EARLIER, StoreError, r"of another version|made by another version\?"),
        (
            NEWER,
            NewerSchemaError,
            f"has tables of schema {SCHEMAS[-1].number + 1}, for versions that know 2; this version",
        ),
    ],
    ids=["earlier", "newer"],
)
async def test_a_store_of_another_schema_is_refused(
    made: str, statements: tuple[str, ...], error: type[Exception], said: str
) -> None:
    """For workers and approvers alike, with the way out; nothing is written into it."""
    async with opened_store(made):
        pass
    execute(made, *statements)
    before = execute(made, "SELECT * FROM planner_schema ORDER BY 1")
    for opening in (Runs.connect(made), Approvals.connect(made)):
        with pytest.raises(error, match=said):
            async with opening:
                pass
    assert execute(made, "SELECT * FROM planner_schema ORDER BY 1") == before


def open_store(store: str) -> None:
    """Open a store, and read the runs in it."""
    import asyncio

    async def read() -> None:
        async with Runs.connect(store) as opened:
            assert await opened.list() == []

    asyncio.run(read())


def test_processes_that_create_a_store_at_once_do_not_disturb_each_other(
    made: str, lives: Lives
) -> None:
    """Four of them open a new store at the same time: each succeeds, and the tables are created once."""
    processes = [lives.begin(open_store, made) for _ in range(4)]
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 4
    assert execute(made, "SELECT schema FROM planner_schema") == [(SCHEMAS[-1].number,)]


@pytest.mark.parametrize("schema", [1, 2])
async def test_a_document_of_a_development_version_is_refused(
    schema: int, tmp_path: Path
) -> None:
    """These had no kind: a checkpoint, an exported run and a cassette are named, and the way out is said."""
    planner, kernel = world(tmp_path / "effects", [say("Done.")])
    said = "no kind: a development version from before 0.1.0 wrote it, which no release reads. End its run with"
    checkpoint = json.loads((await planner.invoke(kernel, GOAL)).checkpoint.to_json())
    del checkpoint["kind"]
    with pytest.raises(InvalidJournalError, match=said):
        Checkpoint.from_json(json.dumps(checkpoint | {"schema": schema}))
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        await (
            await runs.start(
                *world(tmp_path / "effects", [say("Done.")]), GOAL, run_id="a"
            )
        ).result()
    async with opened_store(tmp_path / "runs.db") as store:
        archive = json.loads(await export_run(store, "a"))
        del archive["kind"]
        with pytest.raises(InvalidJournalError, match=said):
            await import_run(
                store, json.dumps({"form": 1, **archive, "schema": schema})
            )
    cassette = tmp_path / "c.json"
    cassette.write_text(
        json.dumps(
            {"form": 1, "schema": schema, "services": {}, "requests": [], "runs": []}
        )
    )
    with pytest.raises(Exception, match=said), replay(cassette):
        pass
