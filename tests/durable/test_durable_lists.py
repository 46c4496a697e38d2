"""Lists of a store: in parts, with how many there are, by what is known of runs, and with what these wait for."""

import asyncio
import json
import sqlite3
import time
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import Deny
from planner_ext.durable import Approvals, RunRecord, Runs, StoreError
from planner_ext.durable.listing import PAGE, where_clause
from planner_ext.durable.store import opened_store
from planner_ext.testing import call, calls, say
from support.durable import GOAL, PAY, open_runs, store_neutral, world


async def leave_open(question: Any) -> None:
    """Leave a question to a person."""


async def test_lists_come_in_parts(store: str, tmp_path: Path) -> None:
    """Limit and offset walk through all of a list once, in its order; a count says how many there are."""
    names = {f"run-{number}" for number in range(7)}
    async with open_runs(store) as runs:
        for name in sorted(names):
            await (
                await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id=name)
            ).result()
        await (
            await runs.start(
                *world(tmp_path / "effects", [say("Done.")]), GOAL, run_id="done"
            )
        ).result()
        assert (
            await runs.count(),
            await runs.count(status="paused"),
            await runs.count(status="stopped"),
        ) == (8, 7, 0)
        parts = [
            await runs.list(status="paused", limit=3, offset=offset)
            for offset in (0, 3, 6, 9)
        ]
        assert [len(part) for part in parts] == [3, 3, 1, 0]
        assert {record.run_id for part in parts for record in part} == names
        assert [record.run_id for part in parts for record in part] == [
            record.run_id for record in await runs.list(status="paused")
        ]
    async with Approvals.connect(store) as approvals:
        assert (
            await approvals.count(),
            await approvals.count("run-3"),
            await approvals.count("nobody"),
        ) == (7, 1, 0)
        parts = [await approvals.pending(limit=5, offset=offset) for offset in (0, 5)]
        assert [item.run_id for part in parts for item in part] == sorted(names)
        assert await approvals.pending("run-3", offset=1) == []


@store_neutral(
    "page",
    [{"limit": -1}, {"offset": -1}, {"offset": 1.5}, {"limit": True}, {"limit": 2**63}],
)
async def test_a_part_that_there_cannot_be_is_refused(
    page: dict[str, Any], store: str
) -> None:
    """The error names which of the two, on every store alike."""
    (name,) = page
    async with open_runs(store) as runs:
        with pytest.raises(StoreError, match=f"{name} must be a whole number"):
            await runs.list(**page)
    async with Approvals.connect(store) as approvals:
        with pytest.raises(StoreError, match=f"{name} must be a whole number"):
            await approvals.pending(**page)


@pytest.mark.parametrize("status", ["asked", "finished", "", "PAUSED"])
async def test_a_status_that_no_run_has_is_refused(status: str, tmp_path: Path) -> None:
    """The error names those that there are."""
    async with open_runs(tmp_path / "runs.db") as runs:
        for ask in (runs.list, runs.count):
            with pytest.raises(
                StoreError,
                match="queued, running, paused, failed, quarantined, answered",
            ):
                await ask(status=status)


async def change(store: str, statement: str, **values: Any) -> None:
    """Change the tables as another process, or time, would."""
    async with opened_store(store) as opened:
        await opened.database.transact((statement, values))


async def leave_run(
    store: str, run_id: str, *, goal: str = GOAL, **columns: Any
) -> None:
    """Leave a run's row that no worker drives."""
    async with opened_store(store) as opened:
        await opened.create(run_id, goal, owner=None, at=1000.0)
        for name, value in columns.items():
            statement = (
                f"UPDATE planner_runs SET {name} = :value WHERE run_id = :run_id"
            )
            await opened.database.transact(
                (statement, {"value": value, "run_id": run_id})
            )


async def test_runs_are_chosen_by_what_is_known_of_them(store: str) -> None:
    """By one status or several, a part of the goal, the worker and the age; the count agrees with the list."""
    await leave_run(
        store,
        "old",
        goal="Refund 100% of order_7 to José.",
        status="failed",
        updated_at=1000.0,
    )
    await leave_run(
        store, "new", goal="Refund 100 of order 7.", status="paused", updated_at=3000.0
    )
    await leave_run(
        store,
        "driven",
        goal='Say "no!"',
        owner="w1",
        created_at=2000.0,
        updated_at=2000.0,
    )
    chosen: list[tuple[dict[str, Any], list[str]]] = [
        ({}, ["new", "driven", "old"]),
        ({"status": ["failed", "paused"]}, ["new", "old"]),
        ({"status": ("running",)}, ["driven"]),
        ({"goal": "refund 100"}, ["new", "old"]),
        ({"goal": "100%"}, ["old"]),
        ({"goal": "order_7"}, ["old"]),
        ({"goal": "José"}, ["old"]),
        ({"goal": '"No!"'}, ["driven"]),
        ({"goal": "nothing"}, []),
        ({"worker": "w1"}, ["driven"]),
        ({"updated_before": 2000.0}, ["old"]),
        ({"updated_after": 2000.0}, ["new", "driven"]),
        ({"created_after": 1500}, ["driven"]),
        ({"created_before": 1500, "updated_after": 1500}, ["new"]),
        (
            {"status": None, "goal": None, "worker": None, "updated_before": None},
            ["new", "driven", "old"],
        ),
    ]
    async with Runs.connect(store) as runs:
        for filters, names in chosen:
            assert [record.run_id for record in await runs.list(**filters)] == names, (
                filters
            )
            assert await runs.count(**filters) == len(names)
            assert [
                one.run_id for one in await runs.list(**filters, limit=1, offset=1)
            ] == names[1:2]


@store_neutral(
    ("name", "value"),
    [
        ("status", []),
        ("status", 7),
        ("status", ["paused", "finished"]),
        ("goal", 7),
        ("worker", b"w1"),
        ("updated_before", "1000"),
        ("created_after", True),
        ("created_before", float("nan")),
    ],
)
async def test_a_filter_that_cannot_be_is_refused(
    name: str, value: Any, store: str
) -> None:
    """The error names it, or the statuses that there are, before anything is read."""
    async with Runs.connect(store) as runs:
        for ask in (runs.list, runs.count):
            with pytest.raises(
                StoreError, match=f"{name} must be|No run has the {name}"
            ):
                await ask(**{name: value})


async def test_a_list_says_what_a_paused_run_waits_for(
    store: str, tmp_path: Path
) -> None:
    """The functions of its first open calls, and how many more there are; a worker, once all are decided."""
    pays = calls(
        *(
            call("shop-pay", {"amount": number}, id=f"pay{number}")
            for number in range(5)
        )
    )
    asks = call("UserInteraction-AskUser", {"question": "Which?"})
    async with open_runs(store) as runs:
        await (
            await runs.start(*world(tmp_path / "effects", [pays]), GOAL, run_id="pays")
        ).result()
        asking = world(
            tmp_path / "effects", [asks], max_clarifications=1, clarifier=leave_open
        )
        await (await runs.start(*asking, GOAL, run_id="asks")).result()
        waits = {record.run_id: record.waits_for for record in await runs.list()}
        assert waits == {
            "pays": "3 \N{MULTIPLICATION SIGN} shop-pay and 2 more",
            "asks": "an answer",
        }
        assert (await runs.load("pays")).record.waits_for == ""
        async with Approvals.connect(store) as approvals:
            first, *others = await approvals.pending("pays")
            for item in others:
                await approvals.decide(item.id, Deny())
            assert (await runs.list(goal=GOAL))[1].waits_for == "shop-pay"
            await approvals.decide(first.id, Deny())
        assert (await runs.list(goal=GOAL))[1].waits_for == "a worker"


async def test_a_list_says_which_runs_no_worker_drives(store: str) -> None:
    """A run that was submitted, was left, waits for its next try, or whose worker died."""
    await leave_run(store, "submitted", status="queued")
    await leave_run(store, "left")
    await leave_run(store, "retried", retries=2, attempts=5, wake_at=4e9)
    await leave_run(store, "forgotten", owner="nobody")
    await leave_run(store, "lost", owner="dead")
    await leave_run(store, "ended", status="failed", problem=json.dumps("no answer"))
    add = """
        INSERT INTO planner_workers (worker_id, name, host, pid, status, lease_seconds, started_at, seen_at)
        VALUES ('dead', 'dead', 'host', 1, 'working', 30, :seen_at, :seen_at)
    """
    await change(store, add, seen_at=time.time() - 3600)
    async with (
        open_runs(store, worker_id="living") as worker,
        Runs.connect(store) as runs,
    ):
        await leave_run(store, "driven", owner=worker.worker_id)
        waits = {record.run_id: record.waits_for for record in await runs.list()}
        assert [record.run_id for record in await runs.list(worker="living")] == [
            "driven"
        ]
        assert [
            record.run_id for record in await runs.list(worker=worker.worker_id)
        ] == ["driven"]
    assert waits.pop("lost").startswith("a worker: dead was last seen at 20")
    assert waits == {
        "submitted": "a worker",
        "left": "a worker",
        "retried": "attempt 3 of 5, next at 2096-10-02 07:06:40 UTC",
        "forgotten": "a worker: nobody is gone",
        "driven": "",
        "ended": "",
    }


async def test_a_running_run_shows_its_progress(store: str, tmp_path: Path) -> None:
    """Each reply updates what the run has spent, and when it last changed."""
    seen: list[RunRecord] = []
    async with open_runs(store) as runs:

        @kernel_function
        async def look() -> None:
            seen.extend(await runs.list())

        looks = call("shop-look", {})
        planner, kernel = world(tmp_path / "effects", [looks, looks, say("Done.")])
        kernel.add_function("shop", look)
        await (await runs.start(planner, kernel, GOAL, run_id="a")).result()
        seen.extend(await runs.list())
    assert [
        (record.status, record.iterations, record.tool_calls) for record in seen
    ] == [
        ("running", 1, 0),
        ("running", 2, 1),
        ("answered", 3, 2),
    ]
    assert 0 < seen[0].tokens < seen[1].tokens < seen[2].tokens
    assert (
        seen[0].created_at
        < seen[0].updated_at
        < seen[1].updated_at
        < seen[2].updated_at
    )


async def test_a_store_counts_its_runs(store: str, tmp_path: Path) -> None:
    """By status, those that wait for a retry, and for how long the oldest open call waits."""
    async with Runs.connect(store) as runs:
        empty = await runs.stats()
    assert (empty.total, set(empty.by_status.values()), empty.retrying) == (0, {0}, 0)
    assert empty.oldest_approval_seconds is None
    for name, columns in {
        "a": {"retries": 1, "wake_at": 4e9},
        "b": {},
        "c": {"status": "failed"},
        "d": {"status": "quarantined"},
        "e": {"status": "failed"},
    }.items():
        await leave_run(store, name, **columns)
    async with open_runs(store) as runs:
        await (
            await runs.start(*world(tmp_path / "effects", [PAY]), GOAL, run_id="paused")
        ).result()
        await change(store, "UPDATE planner_approvals SET asked_at = asked_at - 3600")
        stats = await runs.stats()
    counts = {status: number for status, number in stats.by_status.items() if number}
    assert counts == {"running": 2, "failed": 2, "quarantined": 1, "paused": 1}
    assert (stats.total, stats.retrying) == (6, 1)
    assert stats.oldest_approval_seconds == pytest.approx(3600, abs=60)


async def test_a_first_page_needs_no_sort(tmp_path: Path) -> None:
    """The first runs are read from an index, with or without a status, and their questions by the run's name."""
    async with open_runs(tmp_path / "runs.db"):
        pass
    with closing(sqlite3.connect(tmp_path / "runs.db")) as database:
        for status, index in ((None, "update"), ("paused", "status_and_update")):
            where, values = where_clause(status, {})
            rows = database.execute(
                f"EXPLAIN QUERY PLAN {PAGE.format(where=where)}",
                {**values, "limit": 50, "offset": 0, "now": 0.0},
            )
            plan = "\n".join(row[3] for row in rows)
            assert f"planner_runs USING INDEX planner_runs_by_{index}" in plan
            assert "waiting USING INDEX planner_approvals_by_run" in plan


async def test_a_worker_claims_the_oldest_runs_of_a_long_queue(store: str) -> None:
    """Those that it has room for and does not leave out; the next worker has the others."""
    async with opened_store(store) as opened:
        assert all(
            [
                await opened.create(f"r{n}", GOAL, owner=None, at=n, status="queued")
                for n in range(5)
            ]
        )
        assert {*await opened.claim_free(9.0, "a", skip={"r1"}, limit=2)} == {
            "r0",
            "r2",
        }
        assert {*await opened.claim_free(9.0, "b", skip=(), limit=9)} == {
            "r1",
            "r3",
            "r4",
        }
        assert await opened.claim_free(9.0, "c", skip=(), limit=9) == []
        assert {owner.worker_id for owner in await opened.owners("c")} == {
            "a",
            "b",
            "c",
        }


async def test_workers_that_claim_at_once_share_the_queue(store: str) -> None:
    """Each run of it has one owner, and none is left."""
    async with opened_store(store) as opened:
        assert all(
            [
                await opened.create(f"r{n}", GOAL, owner=None, at=n, status="queued")
                for n in range(20)
            ]
        )
        claims = (opened.claim_free(99.0, f"w{n}", skip=(), limit=10) for n in range(4))
        claimed = await asyncio.gather(*claims)
        left = await opened.claim_free(99.0, "last", skip=(), limit=20)
    taken = [run_id for runs in [*claimed, left] for run_id in runs]
    assert sorted(taken) == sorted(f"r{n}" for n in range(20))


async def test_runs_of_the_dead_are_read_as_far_as_a_worker_takes_them(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest comes first, and a worker that has room for one run reads one page of them."""
    async with opened_store(store) as opened:
        assert all(
            [
                await opened.create(f"r{n}", GOAL, owner="gone", at=n, status="queued")
                for n in range(5)
            ]
        )
        assert await opened.create("free", GOAL, owner=None, at=0.0, status="queued")
        monkeypatch.setattr("planner_ext.durable.store._PAGE", 2)
        assert [record.run_id async for record in opened.due(9.0, ())] == []
        assert [record.run_id async for record in opened.due(9.0, {"gone"})] == [
            f"r{n}" for n in range(5)
        ]
        asked: list[Any] = []
        transact = opened.database.transact

        async def counting(*steps: Any) -> Any:
            asked.extend(steps)
            return await transact(*steps)

        monkeypatch.setattr(opened.database, "transact", counting)
        async with aclosing(opened.due(9.0, {"gone"})) as due:
            assert (await anext(due)).run_id == "r0"
        assert len(asked) == 1
