"""Stores are listed without the right to write, and an SQLite file is copied while workers write."""

import asyncio
import os
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory
from uuid import uuid4

import psycopg
import pytest

from planner_ext import Approve
from planner_ext.durable import Approvals, Runs, RunsClient, StoreError
from planner_ext.durable.store import opened_store
from planner_ext.testing import ScriptedReply, call, say
from support.durable import GOAL, PAY, open_runs, turn, world
from support.processes import Lives

LOOK = """
import os, sys
if os.geteuid() == 0:
    os.setgroups([])
    os.setuid(65534)
from planner_ext.cli.__main__ import main
for words in (["runs", "list"], ["runs", "show", "a"], ["approvals", "list"], ["approvals", "show", "a/0/pay"]):
    sys.argv = ["planner-ext", *words, "--store", sys.argv[-1]]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
sys.argv = ["planner-ext", "approvals", "approve", "a/0/pay", "--store", sys.argv[-1]]
main()
"""
"""Lists and shows all that there is, and then decides, as a user who may not write what belongs to root."""


@pytest.fixture
async def paused(tmp_path: Path) -> AsyncIterator[Path]:
    """A folder that others may read, with a store that no process has open, in which a run waits."""
    with (
        TemporaryDirectory() as name
    ):  # pytest takes the right to read its folders from others
        folder = Path(name)
        async with open_runs(folder / "runs.db") as runs:
            await (
                await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id="a")
            ).result()
        yield folder


def look(folder: Path, lives: Lives) -> CompletedProcess[str]:
    """Look into a store in a process that may write neither its files nor its folder."""
    for path in folder.iterdir():
        path.chmod(0o444)
    folder.chmod(0o555)
    done = lives.run("-c", LOOK, str(folder / "runs.db"), cwd=folder)
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o600)
    return done


def check_looks(done: CompletedProcess[str]) -> None:
    """Check that all was listed and shown, and that the decision alone was refused."""
    assert done.returncode == 2, done.stderr
    assert done.stdout.count("shop-pay") >= 2
    assert "it is read-only. Give this process the right to write" in done.stderr


def test_a_store_without_a_worker_is_listed_without_the_right_to_write(
    paused: Path, lives: Lives
) -> None:
    """Runs and approvals are listed and shown, only a decision is refused, and no file is left beside the store."""
    before = {path.name: path.read_bytes() for path in paused.iterdir()}
    check_looks(look(paused, lives))
    assert {path.name: path.read_bytes() for path in paused.iterdir()} == before


async def test_a_store_with_a_worker_is_listed_without_the_right_to_write(
    paused: Path, lives: Lives, tmp_path: Path
) -> None:
    """The list has what the worker has just written."""
    async with open_runs(paused / "runs.db") as runs:
        await (
            await runs.start(
                *world(tmp_path / "effects", [say("Done.")]), GOAL, run_id="b"
            )
        ).result()
        done = await asyncio.to_thread(look, paused, lives)
    check_looks(done)
    assert re.search(r"^answered\b.*  b  ", done.stdout, re.MULTILINE)


async def test_a_reader_sees_what_a_worker_writes_later(
    paused: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was opened for reading while no worker had it open shows what a worker that came later wrote."""
    access = os.access
    async with open_runs(paused / "runs.db") as worker:
        pass
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode != os.W_OK and access(path, mode)
    )
    async with opened_store(paused / "runs.db", create=False) as reader:
        assert await reader.count_runs() == 1
        with pytest.raises(StoreError, match="read-only"):
            await reader.release("a", "nobody")
        monkeypatch.undo()
        for number in (2, 3):
            async with open_runs(paused / "runs.db") as worker:
                handle = await worker.start(
                    *world(tmp_path / "effects", [say("Done.")]),
                    GOAL,
                    run_id=str(number),
                )
                await handle.result()
                if number == 3:
                    assert await reader.count_runs() == 3
            assert await reader.count_runs() == number


async def test_a_role_with_the_right_to_select_lists_a_database(
    postgres_url: str, tmp_path: Path
) -> None:
    """Nothing is written where transactions are read-only; a decision names the missing right."""
    async with open_runs(postgres_url) as runs:
        await (
            await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id="a")
        ).result()
    role = f"reader_{uuid4().hex}"
    with psycopg.connect(postgres_url) as admin:
        for statement in (
            f"CREATE ROLE {role} LOGIN",
            f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}",
            f"ALTER ROLE {role} SET default_transaction_read_only = on",
        ):
            admin.execute(statement.encode())
    url = postgres_url.replace("//postgres@", f"//{role}@")
    async with Runs.connect(url) as runs:
        assert [record.run_id for record in await runs.list()] == ["a"]
        assert len((await runs.load("a")).facts) > 1
    async with Approvals.connect(url) as approvals:
        assert [item.id for item in await approvals.pending()] == ["a/0/pay"]
        assert (await approvals.show("a/0/pay")).status == "open"
    async with opened_store(url, create=False) as opened:
        opened.database.waits.patience = 0.1
        approvals = RunsClient(opened).approvals()
        with pytest.raises(
            StoreError, match=r"takes no writes|Grant the user the rights"
        ):
            await approvals.decide("a/0/pay", Approve())


def endless(request: object) -> ScriptedReply:
    """Book an order in every round trip, and answer after the fortieth."""
    number = turn(request)  # pyright: ignore[reportArgumentType]  (a request)
    return (
        say("Done.")
        if number == 40
        else call("shop-label", {"order": number}, id=f"label-{number}")
    )


async def test_a_store_is_copied_while_workers_write(tmp_path: Path) -> None:
    """Each copy is whole, a store, and one moment of the run that continues meanwhile; it is its owner's alone."""
    store, copies = (
        tmp_path / "runs.db",
        [tmp_path / f"copy-{number}.db" for number in range(5)],
    )
    async with open_runs(store) as runs, opened_store(store, create=False) as opened:
        planner, kernel = world(tmp_path / "effects", endless, max_iterations=50)
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        for copy in copies:
            await opened.database.backup(copy)
        assert (await handle.result()).status == "answered"
    lengths: list[int] = []
    for copy in copies:
        with closing(sqlite3.connect(copy)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        async with opened_store(copy, create=False) as opened:
            lengths.append(len((await opened.load("a")).facts))
        assert copy.stat().st_mode & 0o777 == 0o600
    assert lengths == sorted(lengths)
    assert {name for name in os.listdir(tmp_path) if "copy" in name} == {
        copy.name for copy in copies
    }


async def test_a_copy_replaces_no_file(paused: Path) -> None:
    """Neither another file nor the store itself; what cannot be written is named."""
    before = (paused / "runs.db").read_bytes()
    async with opened_store(paused / "runs.db", create=False) as opened:
        for path, said in (
            (paused / "runs.db", "File exists"),
            (paused / "nowhere" / "copy.db", "No such file"),
        ):
            with pytest.raises(StoreError, match=f"cannot be written: {said}"):
                await opened.database.backup(path)
    assert (paused / "runs.db").read_bytes() == before


async def test_a_database_is_copied_by_its_own_tool(
    postgres_url: str, tmp_path: Path
) -> None:
    """The command is named whole, without a password."""
    async with opened_store(
        postgres_url.replace("//postgres@", "//postgres:secret@")
    ) as opened:
        with pytest.raises(
            StoreError,
            match=r"pg_dump --format=custom --file=\S+/copy.db 'postgresql://",
        ) as refused:
            await opened.database.backup(tmp_path / "copy.db")
    assert "secret" not in str(refused.value)
