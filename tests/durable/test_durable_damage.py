"""Damaged rows, names and files: each is one named error, and no other run suffers for it."""

import asyncio
import os
import re
import shutil
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.core.errors import PlannerExtError
from planner_ext.durable import Approvals, RetryPolicy, Runs, RunsClient, StoreError
from planner_ext.durable.archive import export_run
from planner_ext.durable.database import Step
from planner_ext.durable.records import (
    approval_id,
)
from planner_ext.durable.store import open_database, opened_store
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say
from support.durable import GOAL, PAY, effects_in, open_runs, turn, world
from support.inbox import inbox, visitor_at

LONG = "".join(chr(33 + n * n % 89) for n in range(6000))
ODD = "\N{SNOWMAN} \x00/../\ud800'\"%s:id"


async def changed(store: str, *steps: Step) -> None:
    """Damage a store's rows."""
    database = await open_database(store)
    await database.transact(*steps)
    await database.close()


@pytest.mark.parametrize(
    ("name", "kept"), [(LONG, LONG), (ODD, "call_")], ids=["long", "odd"]
)
async def test_a_models_id_may_be_anything(
    name: str, kept: str, store: str, tmp_path: Path
) -> None:
    """Some are signatures of thousands of characters, too long for a key: the call waits, is decided, and runs.

    An id that no request can carry is reissued.
    """

    def pays(request: ScriptedRequest) -> ScriptedReply:
        return [call("shop-pay", {"amount": 5}, id=name), say("Paid.")][turn(request)]

    run_id = "\N{PARTY POPPER} %s:id"
    async with open_runs(store) as runs, Approvals.connect(store) as approvals:
        handle = await runs.start(
            *world(tmp_path / "effects", pays), GOAL, run_id=run_id
        )
        await handle.result()
        (item,) = await approvals.pending()
        assert item.call_id.startswith(kept)
        assert (await approvals.show(item.id)).fingerprint == item.fingerprint
        assert await approvals.decide(item.id, Approve(by=ODD.replace("\ud800", "")))
        assert (await handle.result()).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5"]


def test_long_ids_that_begin_alike_are_distinguished() -> None:
    """The end of what is too long is a digest."""
    assert approval_id("r", 0, f"{LONG}1") != approval_id("r", 0, f"{LONG}2")
    assert len(approval_id("r", 0, LONG)) < 600


async def test_an_impossible_name_is_a_named_error(store: str) -> None:
    """Asking for it raises an error of ours, which does not speak of a server that would be away."""
    async with open_runs(store) as runs, Approvals.connect(store) as approvals:
        with pytest.raises(StoreError, match="surrogates not allowed"):
            await runs.load("\ud800")
        for ask in (runs.load, approvals.show):
            with pytest.raises(
                Exception,
                match=r"There is no run|No call with the id|Give a name that there may be",
            ):
                await ask("\x00")


ROWS = ("goal = '{'", "created_at = 1e300")
"""What makes a run's row one that cannot be read: a text that is not JSON, and a time that is no date."""


@pytest.mark.parametrize(
    "damage", [f"UPDATE planner_runs SET {to} WHERE run_id = 'a'" for to in ROWS]
)
async def test_a_damaged_row_of_a_run_keeps_no_other_from_going_on(
    damage: str, store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out of the lists and logged; asked for, it is named."""
    effects = tmp_path / "effects"
    async with open_runs(store) as runs:
        for name in ("a", "b"):
            await (await runs.start(*world(effects, [PAY]), GOAL, run_id=name)).result()
    async with Approvals.connect(store) as approvals:
        for name in ("a", "b"):
            assert await approvals.decide(f"{name}/0/pay", Approve())
    await changed(store, (damage, {}))
    async with open_runs(store) as runs:
        (handle,) = await runs.recover(*world(effects, [say("Paid.")]))
        assert ((await handle.result()).status, handle.run_id) == ("answered", "b")
        assert [record.run_id for record in await runs.list()] == ["b"]
        with pytest.raises(StoreError, match="row of run 'a' is damaged"):
            await runs.load("a")
    assert "A run is skipped: The row of run 'a' is damaged" in caplog.text
    assert effects_in(effects) == ["pay 5"]


async def test_a_text_that_is_too_long_fails_alone(tmp_path: Path) -> None:
    """A result that the database does not take ends its own run's activation, and no other one's."""
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        database: Any = runs._store.database
        database._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 10_000)
        goals = {"long": "x" * 20_000, "short": "x"}
        handles = await asyncio.gather(
            *(
                runs.start(
                    *world(tmp_path / "effects", [say("Done.")]),
                    goals[name],
                    run_id=name,
                )
                for name in goals
            ),
            return_exceptions=True,
        )
        refused, taken = handles
        assert isinstance(refused, StoreError)
        assert "a text is longer than SQLite takes" in str(refused)
        assert not isinstance(taken, BaseException)
        assert (await taken.result()).status == "answered"


@pytest.mark.parametrize("do", ["removed", "replaced"])
async def test_a_file_that_is_gone_stops_the_run(
    do: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite would keep writing into a deleted file: the run stops before its next side effect."""
    effects, kept = tmp_path / "effects", tmp_path / "kept"
    planner, kernel = world(effects, [PAY, say("Paid.")])
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
    monkeypatch.chdir(tmp_path)
    kept.mkdir()
    async with (
        Runs.sqlite("runs.db") as runs,
        Approvals.connect("runs.db") as approvals,
    ):
        monkeypatch.chdir(kept)
        assert await approvals.decide("r/0/pay", Approve())
        shutil.copy(tmp_path / "runs.db", kept)
        if do == "replaced":
            os.replace(kept / "runs.db", tmp_path / "runs.db")
        else:
            (tmp_path / "runs.db").unlink()
        with pytest.raises(
            StoreError, match="was moved, replaced or removed while it was open"
        ):
            await runs.start(planner, kernel, GOAL, run_id="r")
    assert effects_in(effects) == []


def mount(folder: Path, options: str) -> int:
    """Mount a disk in memory; 0 where that worked."""
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 400 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or mount(disk, "size=400k") != 0:
        pytest.skip("this machine lets nobody mount a disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


async def test_a_disk_that_is_full_loses_nothing(
    small_disk: Path, tmp_path: Path
) -> None:
    """A real disk fills up under a run: told, and nothing ran unrecorded; with space again, nothing runs twice."""
    effects = tmp_path / "effects"

    def books(request: ScriptedRequest) -> ScriptedReply:
        number = turn(request)
        return (
            call("shop-book", {"order": number}, id=f"book{number}")
            if number < 30
            else say("Booked.")
        )

    async def go_on() -> Any:
        planner, kernel = world(effects, books, max_iterations=40)
        brief = RetryPolicy(outage_seconds=0.05)
        async with Runs.sqlite(small_disk / "runs.db", retry=brief) as runs:
            return await (await runs.start(planner, kernel, GOAL, run_id="r")).result()

    with pytest.raises(
        StoreError, match=r"the disk is full. Free space and start the run again"
    ):
        await go_on()
    assert 0 < len(effects_in(effects)) < 30
    assert await asyncio.to_thread(mount, small_disk, "remount,size=20m") == 0
    result = await go_on()
    assert result.status == "answered" or [
        item.in_doubt for item in result.pending
    ] == [True]
    lines = effects_in(effects)
    assert len(lines) == len(set(lines))


DAMAGED: dict[str, str] = {
    "goal": "UPDATE planner_runs SET goal = :odd",
    "count": "UPDATE planner_runs SET tool_calls = :odd",
    "time": "UPDATE planner_runs SET updated_at = 1e300",
    "problem": "UPDATE planner_runs SET problem = :odd",
    "inputs": "UPDATE planner_runs SET inputs = :odd",
    "budget": "UPDATE planner_runs SET new_budget = :odd",
    "fact": "UPDATE planner_journal SET fact = :odd WHERE seq = 1",
    "schema": "UPDATE planner_journal SET schema = :odd WHERE seq = 1",
    "seq": "UPDATE planner_journal SET seq = 99 WHERE seq = 1",
    "message": "UPDATE planner_journal SET fact = REPLACE(fact, '\"items\":[', '\"items\":[[],') WHERE seq = 0",
    "call": 'UPDATE planner_approvals SET call = REPLACE(call, \'"prompt":\', \'"prompt":[1], "p":\')',
    "asked": "UPDATE planner_approvals SET asked_at = :odd",
    "expires": "UPDATE planner_approvals SET expires_at = 1e300",
    "decision": "UPDATE planner_approvals SET decided_at = 1, decision = :odd",
    "decided": "UPDATE planner_approvals SET decided_at = :odd, decision = '{}'",
    "refusal": "INSERT INTO planner_refusals VALUES ('a', 'a/1/pay', :odd, :odd, 0)",
    "moment": "INSERT INTO planner_refusals VALUES ('a', 'a/1/pay', '{}', '{}', 1e300)",
    "notice": "INSERT INTO planner_notices (id, run_id, event, body, created_at) VALUES ('n', 'a', 'e', '{}', :odd)",
}
"""A value in each table and of each kind that only an administrator can have written there."""

READ = ("message",)
"""Messages are read by who drives the run."""


@pytest.mark.parametrize("what", DAMAGED)
async def test_a_damaged_value_is_one_named_error(what: str, tmp_path: Path) -> None:
    """A reader gets an error of the package that names the row, the inbox a page, and nothing is executed."""
    store = tmp_path / "runs.db"
    effects = tmp_path / "effects"
    async with open_runs(store, poll_seconds=0.01) as runs:
        await (await runs.start(*world(effects), GOAL, run_id="a")).result()
    done = effects_in(effects)
    await changed(
        str(store), (DAMAGED[what], {"odd": "[odd"} if ":odd" in DAMAGED[what] else {})
    )
    said: list[str] = []
    async with opened_store(store, create=False) as opened:
        client = RunsClient(opened)
        approvals = client.approvals()
        reads: tuple[Any, ...] = (
            *(
                partial(one, "a")
                for one in (
                    client.load,
                    client.notices,
                    approvals.refused,
                    opened.load_driven,
                )
            ),
            partial(export_run, opened, "a"),
            partial(approvals.show, "a/1/pay"),
        )
        for read in reads:
            try:
                found: Any = await read()
                if hasattr(found, "timeline"):
                    found.timeline()
            except PlannerExtError as error:
                said.append(str(error))
        await client.list()
        await approvals.pending()
    assert said or what in READ
    assert all(re.search("damaged|is not JSON|schema number", text) for text in said), (
        said
    )
    async with inbox(store) as base, visitor_at(base) as ann:
        for path in ("", "runs", "runs/a", "approvals/a%2F1%2Fpay"):
            assert (
                (await ann.get(path)).headers["content-type"].startswith("text/html")
            ), path
    with suppress(PlannerExtError):
        async with open_runs(store, poll_seconds=0.01) as runs:
            for handle in await runs.recover(*world(effects)):
                await handle.result()
    assert effects_in(effects) == done
