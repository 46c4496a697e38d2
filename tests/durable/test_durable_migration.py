"""Old and new versions share a store: only a command migrates it, and older processes continue where they can.

The next version is this one with one more schema: a column that is added, or a table that changes its name.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from test_durable_schema import execute, made

from planner_ext.core.errors import NewerSchemaError
from planner_ext.durable import Approvals, Runs, StoreError
from planner_ext.durable.database import SCHEMAS, Schema
from planner_ext.durable.migration import migrate
from planner_ext.durable.store import opened_store
from planner_ext.testing import ScriptedReply, ScriptedRequest, say
from support.durable import (
    BATCH,
    GOAL,
    PAY,
    decide_all,
    effects_in,
    open_runs,
    turn,
    world,
)

__all__ = ["made"]

ADDED = Schema(
    number=2,
    reader=1,
    statements=(
        "ALTER TABLE planner_runs ADD COLUMN mood TEXT",
        "CREATE TABLE planner_moods (mood TEXT PRIMARY KEY)",
    ),
)
CHANGED = Schema(
    number=2,
    reader=2,
    statements=("ALTER TABLE planner_refusals RENAME TO planner_no",),
)


@contextmanager
def version(schema: Schema) -> Iterator[None]:
    """Be the next version, whose schema this is."""
    SCHEMAS.append(schema)
    try:
        yield
    finally:
        SCHEMAS.remove(schema)


def schemas(store: str) -> list[tuple[int, int]]:
    return execute(store, "SELECT schema, reader FROM planner_schema ORDER BY schema")


async def begun(store: str, tmp_path: Path, name: str) -> None:
    """Drive a run until it waits for a person."""
    async with open_runs(store) as runs:
        made = world(tmp_path / "effects", [PAY])
        await (await runs.start(*made, GOAL, run_id=name)).result()


async def ended(store: str, tmp_path: Path) -> set[str]:
    """Decide what waits, continue all runs, and return how they ended."""
    await decide_all(store)
    async with open_runs(store) as runs:
        made = world(tmp_path / "effects", lambda _: say("Paid."))
        for handle in await runs.recover(*made):
            await handle.result()
        return {one.status for one in await runs.list()}


@pytest.mark.parametrize("opening", [Runs.connect, Approvals.connect, opened_store])
async def test_a_newer_version_does_not_migrate_by_looking(
    opening: Any, made: str
) -> None:
    """Whatever opens the store: it is refused with the command that migrates it, and older processes stay."""
    async with opened_store(made):
        pass
    with (
        version(ADDED),
        pytest.raises(StoreError, match=r"Nothing was changed.* store migrate"),
    ):
        async with opening(made):
            pass
    assert schemas(made) == [(1, 1)]
    async with opened_store(made):
        pass


async def test_both_versions_work_on_what_was_only_added(
    made: str, tmp_path: Path
) -> None:
    """While a worker of the old version lives: each continues the runs of the other."""
    await begun(made, tmp_path, "of the old")
    async with open_runs(made) as old:
        with version(ADDED):
            found = await migrate(made)
        assert (found.number, found.keeps_older) == (1, True)
        assert schemas(made) == [(1, 1), (2, 1)]
        script = [PAY]
        handle = await old.start(
            *world(tmp_path / "effects", script), GOAL, run_id="of a living one"
        )
        assert (await handle.result()).status == "paused"
    with version(ADDED):
        assert await ended(made, tmp_path) == {"answered"}
        await begun(made, tmp_path, "of the new")
    assert await ended(made, tmp_path) == {"answered"}


async def test_a_worker_drives_on_while_its_store_is_migrated(
    made: str, tmp_path: Path
) -> None:
    """Amid calls and requests of many runs: none fails, or repeats anything; a breaking change is refused."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        return [BATCH, say("Done.")][turn(request)]

    effects = tmp_path / "effects"
    names = [f"run-{number}" for number in range(12)]
    async with open_runs(made, poll_seconds=0.01) as runs:
        for name in names:
            await runs.submit(GOAL, run_id=name)
        handles = await runs.recover(*world(effects, script, seconds=0.2))
        with version(CHANGED), pytest.raises(StoreError, match="these live"):
            await migrate(made)
        with version(ADDED):
            await migrate(made)
        for handle in handles:
            assert (await handle.result()).status == "answered"
        records = await runs.list()
    assert {(one.problem, one.retries, one.deaths) for one in records} == {("", 0, 0)}
    assert len(effects_in(effects)) == 3 * len(names)


async def test_a_change_ends_older_versions(made: str) -> None:
    """It waits until their workers have ended; then they are refused by name, and nothing is written."""
    async with open_runs(made):
        with (
            version(CHANGED),
            pytest.raises(StoreError, match=r"Older workers cannot .* live: worker-"),
        ):
            await migrate(made)
    assert schemas(made) == [(1, 1)]
    with version(CHANGED):
        await migrate(made)
    with pytest.raises(NewerSchemaError, match="for versions that know 2; this"):
        async with Runs.connect(made):
            pass


async def test_a_migration_is_whole_or_nothing(made: str) -> None:
    """A statement that fails leaves the store as it was, for all versions."""
    async with opened_store(made):
        pass
    broken = Schema(
        number=2, reader=1, statements=(*ADDED.statements, "CREATE nonsense")
    )
    with version(broken), pytest.raises(StoreError):
        await migrate(made)
    assert schemas(made) == [(1, 1)]
    with version(ADDED):
        await migrate(made)
        assert (await migrate(made)).missing == ()


async def test_a_new_store_of_the_next_version_is_as_a_migrated_one(
    made: str, tmp_path: Path
) -> None:
    """It went through all schemas, and this version works on it."""
    with version(ADDED):
        await begun(made, tmp_path, "a")
    assert schemas(made) == [(1, 1), (2, 1)]
    assert await ended(made, tmp_path) == {"answered"}


async def test_what_only_looks_creates_no_store(made: str) -> None:
    """Neither a file nor tables in a database; the message says how one is made."""
    with pytest.raises(StoreError, match=r"There is no store .*--create"):
        async with Approvals.connect(made):
            pass
    if "://" in made:
        assert execute(
            made, "SELECT COUNT(*) FROM pg_tables WHERE schemaname = 'public'"
        ) == [(0,)]
    else:
        assert not glob(f"{made}*")
