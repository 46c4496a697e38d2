"""What lists of a store say of their length, and what the command line says of a store that cannot be used."""

import json
import os
import sqlite3
from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import GOAL, STORE, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

WAITS = ("run", GOAL, "--kernel", "till:kernel", "--no-plan", *STORE, "--run-id")


@pytest.mark.parametrize("what", ["runs", "approvals"])
def test_a_list_says_which_part_of_it_was_shown(command: Command, what: str) -> None:
    """It says "2 of 3" on stderr with the way to the rest, also beside JSON; nothing where it was all."""
    for name in "abc":
        assert command(*WAITS, name).code == 4
    assert command(what, "list", *STORE).err == ""
    first = command(what, "list", *STORE, "--limit", "2", "--json")
    assert first.err == "2 of 3; --offset 2 shows the next.\n"
    rest = command(what, "list", *STORE, "--limit", "2", "--offset", "2", "--json")
    assert rest.err == "1 of 3, after the first 2.\n"
    assert sorted(row["run_id"] for row in json.loads(first.out) + json.loads(rest.out)) == ["a", "b", "c"]
    past = command(what, "list", *STORE, "--offset", "9")
    assert (past.code, past.out, past.err) == (0, "", "0 of 3, after the first 9.\n")


def test_a_damaged_row_is_named_and_not_taken_for_none(command: Command, here: Path) -> None:
    """The list says which run's row is damaged, that one row is missing, and how to list the rest."""
    for name in "abc":
        assert command(*WAITS, name).code == 4
    with sqlite3.connect(here / "runs.db") as database:
        database.execute("UPDATE planner_runs SET goal = '{' WHERE run_id = 'c'")
    database.close()
    listed = command("runs", "list", *STORE, "--limit", "1")
    assert (listed.code, listed.out) == (0, "")
    assert "The row of run 'c' is damaged" in " ".join(listed.err.split())
    assert listed.err.endswith("0 of 3; --offset 1 shows the next.\n")
    assert "No run" not in listed.err


def test_a_status_that_there_is_not_is_refused(command: Command) -> None:
    """Exit code 2 and those that there are; nothing is listed."""
    assert command(*WAITS, "a").code == 4
    refused = command("runs", "list", *STORE, "--status", "finished")
    assert (refused.code, refused.out) == (2, "")
    assert "queued, running, paused, failed, quarantined, answered, incomplete, limit_reached, stopped" in refused.err


@pytest.mark.parametrize("damage", ["cut", "directory", "table", "long"])
def test_a_store_that_cannot_be_used_is_one_sentence(command: Command, here: Path, damage: str) -> None:
    """Exit code 2 and a paragraph for every command, and no traceback."""
    assert command(*WAITS, "a").code == 4
    path, where = here / "runs.db", "runs.db"
    if damage == "cut":
        os.truncate(path, 4096)
    elif damage == "directory":
        path.unlink()
        path.mkdir()
    elif damage == "table":
        with sqlite3.connect(path) as database:
            database.execute("DROP TABLE planner_journal")
        database.close()
    else:
        where = "x" * 300
    for words in (
        ("runs", "list"),
        ("runs", "show", "a"),
        ("approvals", "list"),
        ("approvals", "approve", "a/1/call_1"),
    ):
        refused = command(*words, "--store", where)
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.startswith("Error: The store ")
        assert len(refused.err.splitlines()) == 1
    for words in (("run", GOAL, "--kernel", "till:kernel"), ("worker", "--app", "till:app", "--once")):
        refused = command(*words, "--store", where)
        assert refused.code == 2
        assert "Error: The store " in refused.err
        assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    "where", ["postgresql://ann:sesame", "host=localhost password=sesame", "mysql://a:sesame@h/db"]
)
def test_no_command_shows_a_password(command: Command, where: str) -> None:
    """However the address is written."""
    for words in (("runs", "list"), ("approvals", "list"), ("run", GOAL), ("worker", "--app", "till:app", "--once")):
        refused = command(*words, "--store", where)
        assert refused.code == 2
        assert "sesame" not in refused.out + refused.err
