"""A run leaves its store as one JSON document, and continues in another store from it."""

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.core.errors import (
    InvalidJournalError,
    NewerSchemaError,
    PlannerExtError,
)
from planner_ext.durable import Approvals, RunConflictError, Runs, UnknownRunError
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.store import opened_store
from planner_ext.testing import ScriptedReply, say
from support.durable import (
    GOAL,
    PAY,
    decide_all,
    effects_in,
    open_runs,
    run_life,
    store_neutral,
    world,
)
from support.examples import some_of
from support.odd import ODD, every_place, with_odd
from support.processes import Lives

ROWS = {
    "runs": "run_id, goal, status, wake_at, created_at, updated_at, problem, inputs, iterations, tool_calls, tokens",
    "journal": "seq, fact",
    "approvals": "id, status, fingerprint, call, asked_at, expires_at, decision, decided_at",
    "refusals": "at, id, decision, problem",
}
"""The columns of each table that describe a run, its owner excepted."""


def settled(_: object) -> ScriptedReply:
    """Answer in any case."""
    return say("Settled.")


async def rows_of(store: str, run_id: str) -> dict[str, Any]:
    """Read what a store's tables say of a run."""
    async with opened_store(store) as opened:
        answers = await opened.database.transact(
            *(
                (
                    f"SELECT {columns} FROM planner_{table} WHERE run_id = :run_id ORDER BY 1",
                    {"run_id": run_id},
                )
                for table, columns in ROWS.items()
            )
        )
    return dict(zip(ROWS, (list(map(tuple, rows)) for rows in answers), strict=True))


async def exported(store: str, run_id: str, key: bytes | None = None) -> str:
    async with opened_store(store) as opened:
        return await export_run(opened, run_id, key=key)


async def imported(store: str, text: str, key: bytes | None = None) -> str:
    async with opened_store(store) as opened:
        return await import_run(opened, text, key=key)


@pytest.fixture
async def first(tmp_path: Path) -> str:
    """A store with a run that asked twice: the first call was approved after a refused decision, the second waits."""
    store = str(tmp_path / "first.db")
    async with open_runs(store) as runs, Approvals.connect(store) as approvals:
        handle = await runs.start(
            *world(tmp_path / "effects", [PAY, PAY]), GOAL, run_id="a"
        )
        await handle.result()
        with pytest.raises(Exception, match="another call"):
            await approvals.decide("a/0/pay", Approve(by="bob", fingerprint="another"))
        await decide_all(store)
        assert (await handle.result()).status == "paused"
    return store


async def test_an_imported_run_is_the_same(first: str, store: str) -> None:
    """Every row of it: the journal, and what is derived from it, with the decisions that were made and refused."""
    text = await exported(first, "a")
    assert json.loads(text)["run"]["goal"] == GOAL
    assert await imported(store, text) == "a"
    rows = await rows_of(first, "a")
    assert await rows_of(store, "a") == rows
    assert [row[1] for row in rows["approvals"]] == ["closed", "open"]
    assert await exported(store, "a") == text


async def test_an_imported_run_waits_and_continues(
    first: str, store: str, tmp_path: Path
) -> None:
    """What waited can be decided in the new store, and a worker of it takes the decision and ends the run."""
    await imported(store, await exported(first, "a"))
    assert await decide_all(store) == 1
    async with open_runs(store) as runs:
        (handle,) = await runs.recover(*world(tmp_path / "effects", settled))
        assert (await handle.result()).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 5", "pay 5"]


async def leave(store: str, run_id: str, lives: Lives, effects: Path) -> None:
    """Leave a run in the state that it is named after."""
    if run_id == "killed":
        lives.live(
            run_life, store, effects, run_id, 0.2, PLANNER_EXT_CRASH_AT="mid_tool"
        )
        return
    async with open_runs(store) as runs:
        script = [say("Done.")] if run_id == "answered" else [PAY]
        await (await runs.start(*world(effects, script), GOAL, run_id=run_id)).result()
    async with Approvals.connect(store) as approvals:
        if run_id == "refused":
            with pytest.raises(Exception, match="another call"):
                await approvals.decide(
                    "refused/0/pay", Approve(by="bob", fingerprint="another")
                )
        if run_id == "decided":
            assert await approvals.decide("decided/0/pay", Approve(by="ann"))


@pytest.mark.parametrize(
    "run_id", ["answered", "paused", "refused", "decided", "killed"]
)
async def test_a_run_is_imported_in_every_state(
    run_id: str, store: str, lives: Lives, tmp_path: Path
) -> None:
    """Also with a decision that no worker has taken, and with a call that had started; a worker then takes these."""
    first = str(tmp_path / "first.db")
    await leave(first, run_id, lives, tmp_path / "effects")
    await imported(store, await exported(first, run_id))
    before, after = await rows_of(first, run_id), await rows_of(store, run_id)
    assert {name: after[name] for name in ("approvals", "refusals")} == {
        name: before[name] for name in ("approvals", "refusals")
    }
    assert after["runs"][0][:3] == before["runs"][0][:3]
    async with open_runs(store) as runs:
        taken = await runs.recover(*world(tmp_path / "effects", settled))
        assert [handle.run_id for handle in taken] == [run_id] * (
            run_id in ("decided", "killed")
        )
        for handle in taken:
            result = await handle.result()
            assert (result.status, [call.in_doubt for call in result.pending]) == (
                ("answered", []) if run_id == "decided" else ("paused", [True])
            )


async def test_a_queued_run_is_begun_in_the_new_store(
    store: str, tmp_path: Path
) -> None:
    """With what it was submitted with; only a worker of the store that it was imported into begins it."""
    first = tmp_path / "first.db"
    async with Runs.connect(first) as runs:
        await runs.submit(GOAL, run_id="a", arguments={"tenant": "x"})
    await imported(store, await exported(str(first), "a"))
    async with open_runs(store) as runs:
        loaded = await runs.load("a")
        assert (loaded.record.status, loaded.inputs.arguments) == (
            "queued",
            {"tenant": "x"},
        )
        (handle,) = await runs.recover(*world(tmp_path / "effects", settled))
        assert (await handle.result()).status == "answered"


@store_neutral("status", ["failed", "quarantined"])
async def test_a_status_that_the_journal_does_not_say_is_kept(
    status: str, first: str, store: str
) -> None:
    """A run that is set aside stays so in the new store, with its problem; an invented status is not believed."""
    with closing(sqlite3.connect(first)) as database:
        database.execute(
            "UPDATE planner_runs SET status = ?, problem = ?", (status, '"It broke."')
        )
        database.commit()
    text = await exported(first, "a")
    await imported(store, text)
    async with opened_store(store) as opened:
        record = await opened.record("a")
    assert (record.status, record.problem) == (status, "It broke.")
    other = first.replace("first", "other")
    await imported(other, text.replace(f'"status":"{status}"', '"status":"answered"'))
    assert (await rows_of(other, "a"))["runs"][0][2] == "paused"


async def test_a_run_that_is_there_is_not_overwritten(first: str, store: str) -> None:
    """The second import is refused by name, and changes nothing; what is not there is not exported."""
    text = await exported(first, "a")
    await imported(store, text)
    before = await rows_of(store, "a")
    with pytest.raises(RunConflictError, match="Run 'a' is there already"):
        await imported(store, text)
    assert await rows_of(store, "a") == before
    with pytest.raises(UnknownRunError):
        await exported(store, "b")


@pytest.mark.parametrize(
    "form", ["unsigned", "altered", "another key", "a signature of nothing"]
)
async def test_with_a_key_only_a_signed_run_is_imported(
    form: str, first: str, tmp_path: Path
) -> None:
    """An unsigned, altered or wrongly signed one is refused with the way out, and nothing of it is stored."""
    key, second = b"key", str(tmp_path / "second.db")
    text = await exported(
        first,
        "a",
        None if form == "unsigned" else b"other" if form == "another key" else key,
    )
    if form == "altered":
        text = text.replace(GOAL, "Another goal.")
    if form == "a signature of nothing":
        text = json.dumps({**json.loads(text), "signature": None})
    with pytest.raises(
        InvalidJournalError, match=r"signed with this key.*Read it with the key"
    ):
        await imported(second, text, key)
    async with opened_store(second) as opened:
        assert await opened.count_runs() == 0
    assert await imported(second, await exported(first, "a", key), key) == "a"


VOTED = {"id": "a/0/pay", "fingerprint": "f"}


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda document: document.pop(name)


def with_value(value: object, *path: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        place: Any = document
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (without("facts"), InvalidJournalError),
        (without("decisions"), InvalidJournalError),
        (with_value(1, "more"), InvalidJournalError),
        (without("kind"), InvalidJournalError),
        (with_value("checkpoint", "kind"), InvalidJournalError),
        (with_value(0, "schema"), InvalidJournalError),
        (with_value(2, "schema"), NewerSchemaError),
        (with_value(99, "schema"), NewerSchemaError),
        (with_value([], "facts", 1), InvalidJournalError),
        (with_value("b", "run_id"), InvalidJournalError),
        (with_value("b", "facts", 0, "run_id"), InvalidJournalError),
        (with_value("x", "run", "created_at"), InvalidJournalError),
        (with_value(float("nan"), "run", "created_at"), InvalidJournalError),
        (with_value(float("inf"), "run", "created_at"), InvalidJournalError),
        (with_value(1e300, "facts", -1, "at"), InvalidJournalError),
        (with_value("Another goal.", "run", "goal"), InvalidJournalError),
        (with_value("queued", "run", "status"), InvalidJournalError),
        (with_value("x", "run", "inputs"), InvalidJournalError),
        (with_value({}, "run", "new_budget"), InvalidJournalError),
        (with_value(None, "run"), InvalidJournalError),
        (with_value([{}], "refusals"), InvalidJournalError),
        (with_value([{"id": 1}], "decisions"), InvalidJournalError),
        (with_value(None, "decisions"), InvalidJournalError),
        (
            with_value([VOTED | {"votes": [["ann", 1e300]]}], "votes"),
            InvalidJournalError,
        ),
        (with_value([VOTED | {"votes": [[1, 1]]}], "votes"), InvalidJournalError),
        (with_value([VOTED | {"votes": {}}], "refusals"), InvalidJournalError),
    ],
)
async def test_a_damaged_document_is_refused(
    change: Callable[[dict[str, Any]], None],
    error: type[Exception],
    first: str,
    tmp_path: Path,
) -> None:
    """By a named error, and nothing of it is stored."""
    document: dict[str, Any] = json.loads(await exported(first, "a"))
    change(document)
    async with opened_store(tmp_path / "second.db") as second:
        with pytest.raises(error):
            await import_run(second, json.dumps(document))
        assert await second.count_runs() == 0


@pytest.mark.examples
@pytest.mark.parametrize("odd", ODD)
async def test_an_odd_value_at_any_place_is_read_or_refused_by_name(
    odd: str, first: str, tmp_path: Path
) -> None:
    """Every defect of an archive is an error of this package: no overflow, no recursion, no bad digits."""
    text = await exported(first, "a")
    async with opened_store(tmp_path / "second.db") as second:
        for path in some_of(every_place(json.loads(text))):
            with suppress(PlannerExtError):
                await import_run(second, with_odd(text, path, ODD[odd]))


@pytest.mark.parametrize("status", ["queued", "failed", "quarantined"])
async def test_an_ended_run_is_nothing_else(status: str, tmp_path: Path) -> None:
    """A document that says otherwise is refused: workers would take the run again and again."""
    path = tmp_path / "first.db"
    async with open_runs(path) as runs:
        await (
            await runs.start(*world(tmp_path / "effects", settled), GOAL, run_id="a")
        ).result()
    document: dict[str, Any] = json.loads(await exported(str(path), "a"))
    document["run"]["status"] = status
    with pytest.raises(
        InvalidJournalError, match=f"it is {status}, and its journal contradicts that"
    ):
        await imported(str(tmp_path / "second.db"), json.dumps(document))


@pytest.mark.parametrize("text", ["", "[]", "{", "1", '{"schema": 1, "schema": 1}'])
async def test_text_other_than_a_run_is_refused(text: str, tmp_path: Path) -> None:
    """By a named error."""
    async with opened_store(tmp_path / "second.db") as second:
        with pytest.raises(InvalidJournalError):
            await import_run(second, text)
