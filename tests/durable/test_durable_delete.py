"""Runs are deleted: by name or by age, with all rows about them, and never while they are driven."""

import asyncio
import sqlite3
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from planner_ext import Approve, Budget
from planner_ext.durable import (
    ApprovalRefusedError,
    Approvals,
    RunConflictError,
    StoreError,
    UnknownRunError,
)
from planner_ext.durable.store import opened_store
from planner_ext.testing import Script, ScriptedChatCompletion, say
from support.durable import GOAL, PAY, decide_all, open_runs, store_neutral, world

TABLES = (
    "planner_runs",
    "planner_journal",
    "planner_approvals",
    "planner_refusals",
    "planner_notices",
)
ENDED = [say("Done.")]
PAID = [PAY, say("Paid.")]


def execute(store: str, *statements: str) -> list[Any]:
    """Execute statements on a store, past the package; return the rows of all."""
    rows: list[Any] = []
    database: Any = psycopg.connect(store) if "://" in store else sqlite3.connect(store)
    with closing(database):
        for statement in statements:
            cursor = database.execute(statement)
            rows += cursor.fetchall() if cursor.description else []
        database.commit()
    return rows


def rows_about(store: str, run_id: str) -> dict[str, int]:
    """Count the rows about a run in each table that has some."""
    counted = {table: f"{table} WHERE run_id = '{run_id}'" for table in TABLES}
    counts = {
        table: execute(store, f"SELECT COUNT(*) FROM {rows}")[0][0]
        for table, rows in counted.items()
    }
    return {table: count for table, count in counts.items() if count}


async def drive(store: str, tmp_path: Path, *names: str, script: Script) -> None:
    """Drive runs to their first pause or their end."""
    async with open_runs(store) as runs:
        for name in names:
            await (
                await runs.start(
                    *world(tmp_path / "effects", script), GOAL, run_id=name
                )
            ).result()


async def test_a_deleted_run_leaves_no_row(store: str, tmp_path: Path) -> None:
    """No table has a row about it any more; other runs keep theirs. Deleting it again is an error."""
    names = ("a", "a:1", "b")
    await drive(store, tmp_path, *names, script=[PAY])
    async with Approvals.connect(store) as approvals:
        for item in await approvals.pending():
            with pytest.raises(ApprovalRefusedError):
                await approvals.decide(item.id, Approve(fingerprint="another"))
    await decide_all(store)
    await drive(store, tmp_path, *names, script=lambda _: say("Paid."))
    execute(
        store,
        "INSERT INTO planner_notices (id, run_id, event, body, created_at) VALUES ('n', 'a', '', '', 0)",
    )
    others = rows_about(store, "a:1"), rows_about(store, "b")
    assert {*TABLES} <= {*rows_about(store, "a")}

    async with opened_store(store) as opened:
        await opened.delete("a")
        with pytest.raises(UnknownRunError, match="'a'"):
            await opened.delete("a")
    assert rows_about(store, "a") == {}
    assert (rows_about(store, "a:1"), rows_about(store, "b")) == others


async def test_nothing_is_done_twice_under_the_name_of_a_deleted_run(
    store: str, tmp_path: Path
) -> None:
    """Neither started nor submitted again, however it was deleted; the error says how the run was, and when it went."""
    await drive(store, tmp_path, "a", "b", "c", script=ENDED)
    async with open_runs(store) as runs:
        await runs.delete("a")
        assert await runs.prune(older_than=timedelta(0), status="answered") == 2
        for name in ("a", "b", "c"):
            said = f"Run '{name}' was deleted at .* UTC, and was answered: nothing was"
            with pytest.raises(RunConflictError, match=said):
                await runs.start(*world(tmp_path / "effects"), GOAL, run_id=name)
            with pytest.raises(RunConflictError, match=said):
                await runs.submit(GOAL, run_id=name)
        assert await runs.count() == 0
    names = execute(store, "SELECT digest FROM planner_deleted")
    assert {len(digest) for (digest,) in names} == {64}


async def test_a_name_may_be_reused(store: str, tmp_path: Path) -> None:
    """If that is asked for, a new run begins with an empty journal; once it is deleted, its status counts."""
    await drive(store, tmp_path, "a", script=ENDED)
    async with open_runs(store) as runs:
        await runs.delete("a")
        made = world(tmp_path / "effects", [say("Again.")])
        handle = await runs.start(*made, "Another goal.", run_id="a", reuse=True)
        assert (await handle.result()).final_answer == "Again."
        again = await runs.start(*made, "Another goal.", run_id="a")
        assert (await again.result()).final_answer == "Again."
        await runs.delete("a")
        await runs.submit(GOAL, run_id="a", reuse=True)
        await runs.cancel("a")
        await runs.delete("a")
        with pytest.raises(RunConflictError, match="and was stopped"):
            await runs.submit(GOAL, run_id="a")


async def test_a_run_that_was_not_deleted_leaves_no_mark(
    store: str, tmp_path: Path
) -> None:
    """A refused deletion keeps nothing."""
    await drive(store, tmp_path, "a", script=[PAY])
    async with open_runs(store) as runs:
        with pytest.raises(RunConflictError, match="it is paused"):
            await runs.delete("a")
    assert execute(store, "SELECT COUNT(*) FROM planner_deleted") == [(0,)]


async def test_an_unfinished_run_is_not_deleted(store: str, tmp_path: Path) -> None:
    """A paused run is refused unless it is forced, a running one is always refused; the message says the way out."""
    await drive(store, tmp_path, "a", script=[PAY])
    async with open_runs(store, grace_seconds=0) as runs:
        with pytest.raises(
            RunConflictError,
            match=r"'a' cannot be deleted: it is paused.*, or force it",
        ):
            await runs.delete("a")
        await runs.delete("a", force=True)
        assert await runs.count() == 0
        async with Approvals.connect(store) as approvals:
            assert await approvals.count() == 0

        reached = asyncio.Event()

        async def wait(_: object) -> None:
            reached.set()
            await asyncio.Event().wait()

        planner, kernel = world(tmp_path / "effects")
        kernel.add_service(
            ScriptedChatCompletion(ENDED, before_reply=wait), overwrite=True
        )
        handle = await runs.start(planner, kernel, GOAL, run_id="b")
        await reached.wait()
        for force in (False, True):
            with pytest.raises(
                RunConflictError, match="'b' cannot be deleted: it is running"
            ):
                await runs.delete("b", force=force)
    assert rows_about(store, "b")["planner_journal"] >= 1
    with pytest.raises(asyncio.CancelledError):
        await handle.result()


async def test_an_ended_run_that_is_driven_again_is_not_deleted(
    store: str, tmp_path: Path
) -> None:
    """A living worker that has claimed an ended run, as for a larger budget, is named; a dead one hinders nothing."""
    await drive(store, tmp_path, "a", script=ENDED)
    worker = "INSERT INTO planner_workers VALUES ('w', 'w', '', 0, 'working', 1, 0, {seen}, {lease})"
    execute(
        store,
        worker.format(lease=600, seen=time.time() - 60),
        "UPDATE planner_runs SET owner = 'w'",
    )
    async with open_runs(store) as runs:
        with pytest.raises(RunConflictError, match="the worker 'w' drives it"):
            await runs.delete("a")
        assert await runs.prune(older_than=timedelta(0), status="answered") == 0
        execute(
            store,
            "UPDATE planner_workers SET lease_seconds = 0.001 WHERE worker_id = 'w'",
        )
        await runs.delete("a")


async def test_a_run_is_deleted_or_continued_and_never_half_of_both(
    store: str, tmp_path: Path
) -> None:
    """Where a worker continues an ended run while another process deletes it, one of them finds the whole run."""
    outcomes: set[bool] = set()
    async with open_runs(store) as runs, opened_store(store) as other:
        for number in range(10):
            planner, kernel = world(
                tmp_path / "effects", lambda _: PAY, max_iterations=1
            )
            await (
                await runs.start(planner, kernel, GOAL, run_id=f"a{number}")
            ).result()
            assert (await other.record(f"a{number}")).status == "limit_reached"

            async def resume(run_id: str, moment: float) -> None:
                await asyncio.sleep(moment)
                planner, kernel = world(tmp_path / "effects", lambda _: say("Done."))
                await (
                    await runs.resume(
                        run_id, planner, kernel, budget=Budget(max_iterations=5)
                    )
                ).result()

            async def delete(run_id: str) -> None:
                await asyncio.sleep(0.005)
                await other.delete(run_id)

            moments = resume(f"a{number}", number / 1000), delete(f"a{number}")
            _, deleted = await asyncio.gather(*moments, return_exceptions=True)
            outcomes.add(deleted is None)
            if deleted is None:
                assert not {*rows_about(store, f"a{number}")} & {*TABLES}
            else:
                assert (await other.load(f"a{number}")).record.status == "answered"
    assert True in outcomes


async def test_old_runs_are_pruned(store: str, tmp_path: Path) -> None:
    """All that have the status and were not updated since; in batches, with their number, first counted on request."""
    names = [f"run-{number:03}" for number in range(120)]
    await drive(store, tmp_path, *names[:3], "waits", script=[PAY])
    await decide_all(store)
    async with open_runs(store) as runs:
        for name in names[:3]:
            await runs.cancel(name)
    await drive(store, tmp_path, "answered", script=ENDED)
    columns = "(run_id, goal, status, created_at, updated_at)"
    copy = (
        f"INSERT INTO planner_runs {columns} VALUES ('{{}}', '\"\"', 'stopped', 0, 0)"
    )
    fact = "INSERT INTO planner_journal (run_id, seq, schema, fact) VALUES ('{}', 0, 1, '{{}}')"
    execute(
        store,
        *(copy.format(name) for name in names[3:]),
        *(fact.format(name) for name in names[3:]),
    )
    async with open_runs(store) as runs:
        for given, count in ((timedelta(days=1), 117), (timedelta(0), 120)):
            assert (
                await runs.prune(older_than=given, status="stopped", dry_run=True)
                == count
            )
        assert await runs.prune(older_than=timedelta(days=1), status="stopped") == 117
        assert {record.run_id for record in await runs.list()} == {
            *names[:3],
            "waits",
            "answered",
        }
        assert await runs.prune(older_than=timedelta(0), status="stopped") == 3
        assert rows_about(store, names[0]) == {}
        assert {record.run_id for record in await runs.list()} == {"waits", "answered"}


@store_neutral("status", ["paused", "running", "queued", "asked", ""])
async def test_only_runs_that_are_at_rest_are_pruned(status: str, store: str) -> None:
    """Another status is refused, and the message lists the possible ones."""
    async with open_runs(store) as runs:
        with pytest.raises(
            StoreError,
            match="failed, quarantined, answered, incomplete, limit_reached, stopped",
        ):
            await runs.prune(older_than=timedelta(0), status=status)
