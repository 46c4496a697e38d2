"""What lists of a store say of their length, and what the command line says of a store that cannot be used."""

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from planner_ext.durable import runs
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
    assert sorted(
        row["run_id"] for row in json.loads(first.out) + json.loads(rest.out)
    ) == ["a", "b", "c"]
    past = command(what, "list", *STORE, "--offset", "9")
    assert (past.code, past.out, past.err) == (0, "", "0 of 3, after the first 9.\n")


def test_a_damaged_row_is_named_and_not_taken_for_none(
    command: Command, here: Path
) -> None:
    """The list says which run's row is damaged, that one row is missing, and how to list the rest."""
    for name in "abc":
        assert command(*WAITS, name).code == 4
    with closing(sqlite3.connect(here / "runs.db")) as database, database:
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
    assert (
        "queued, running, paused, failed, quarantined, answered, incomplete, limit_reached, stopped"
        in refused.err
    )


@pytest.mark.parametrize("damage", ["cut", "directory", "table", "long"])
def test_a_store_that_cannot_be_used_is_one_sentence(
    command: Command, here: Path, damage: str
) -> None:
    """Exit code 2 and a paragraph for every command, and no traceback."""
    assert command(*WAITS, "a").code == 4
    path, where = here / "runs.db", "runs.db"
    if damage == "cut":
        os.truncate(path, 4096)
    elif damage == "directory":
        path.unlink()
        path.mkdir()
    elif damage == "table":
        with closing(sqlite3.connect(path)) as database, database:
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
    for words in (
        ("run", GOAL, "--kernel", "till:kernel"),
        ("worker", "--app", "till:app", "--once"),
    ):
        refused = command(*words, "--store", where)
        assert refused.code == 2
        assert "Error: The store " in refused.err
        assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    "where",
    [
        "postgresql://ann:sesame",
        "host=localhost password=sesame",
        "mysql://a:sesame@h/db",
    ],
)
def test_no_command_shows_a_password(
    command: Command, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the address is written."""
    monkeypatch.setattr(runs, "_PATIENCE_SECONDS", 0.1)
    for words in (
        ("runs", "list"),
        ("approvals", "list"),
        ("run", GOAL),
        ("worker", "--app", "till:app", "--once"),
    ):
        refused = command(*words, "--store", where)
        assert refused.code == 2
        assert "sesame" not in refused.out + refused.err


def test_runs_are_listed_by_filters(command: Command, here: Path) -> None:
    """By several statuses, goal, worker and age; the whole row is in the JSON, and its columns in the lines."""
    assert command(*WAITS, "a").code == 4
    with closing(sqlite3.connect(here / "runs.db")) as database, database:
        database.execute(
            "INSERT INTO planner_runs (run_id, goal, status, problem, created_at, updated_at, iterations, tokens, cost)"
            " VALUES ('b', '\"Sell a lamp.\"', 'failed', '\"no answer\"', 0, 0, 1234, 56789, 0.25)"
        )
    database.close()
    chosen = {
        ("--status", "failed", "--status", "paused"): ["a", "b"],
        ("--goal", "sell a"): ["b"],
        ("--worker", "w1"): [],
        ("--older-than", "1d"): ["b"],
        ("--newer-than", "1h"): ["a"],
        ("--created-before", "2020-01-01"): ["b"],
        ("--created-after", "2020-01-01T00:00:00", "--status", "paused"): ["a"],
    }
    for words, names in chosen.items():
        assert [
            row["run_id"]
            for row in command("runs", "list", *STORE, *words, "--json").document
        ] == names
    (row,) = command("runs", "list", *STORE, "--status", "paused", "--json").document
    assert (row["iterations"], row["tool_calls"], row["waits_for"], row["cost"]) == (
        2,
        1,
        "shop-refund",
        None,
    )
    _, line = command("runs", "list", *STORE, "--status", "failed").out.splitlines()
    assert line.split()[:6] == ["failed", "1,234", "0", "56,789", "0.25", "1970-01-01"]
    assert line.endswith("  b    no answer  Sell a lamp.")
    assert (
        command("runs", "list", *STORE, "--goal", "nothing").err
        == "No such run in runs.db.\n"
    )
    assert (
        "expected a number and d, h, m or s"
        in command("runs", "list", *STORE, "--older-than", "soon").err
    )


def test_a_terminal_gets_a_table_of_runs(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head, and within the width of the terminal; what a person or a model wrote cannot move the cursor."""
    assert command(*WAITS, "a").code == 4
    with closing(sqlite3.connect(here / "runs.db")) as database, database:
        database.execute(
            "UPDATE planner_runs SET goal = ?",
            (json.dumps("Refund\x1b[2J the lamp. " * 100),),
        )
    database.close()
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    listed = command("runs", "list", *STORE)
    head, figures, waits, goal = listed.out.splitlines()
    assert head.split() == [
        "status",
        "iterations",
        "calls",
        "tokens",
        "cost",
        "changed",
        "run",
    ]
    assert figures.split()[:3] == ["paused", "2", "1"]
    assert figures.endswith("  a")
    assert waits == "    waits for shop-refund"
    assert goal.startswith("    Refund\N{REPLACEMENT CHARACTER}[2J the lamp. Refund")
    assert len(goal) == 80
    assert "\x1b[2J" not in listed.out


def test_a_long_name_leaves_the_status_of_a_run_in_sight(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each run begins with its status, and its name stays whole, to be copied."""
    name = "refund-of-the-broken-lamp-" + "7" * 40
    assert command(*WAITS, name).code == 4
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    _, figures, named, *_ = command("runs", "list", *STORE).out.splitlines()
    assert figures.split()[:3] == ["paused", "2", "1"]
    assert named == f"    {name}"


def test_the_numbers_of_a_store_are_printed(command: Command) -> None:
    """As lines, or as one JSON document."""
    assert command(*WAITS, "a").code == 4
    stats = command("runs", "stats", *STORE, "--json").document
    assert stats["oldest_approval_seconds"] >= 0
    assert (
        stats["total"],
        stats["by_status"]["paused"],
        stats["by_status"]["failed"],
    ) == (1, 1, 0)
    lines = dict(
        line.split(maxsplit=1)
        for line in command("runs", "stats", *STORE).out.splitlines()
    )
    assert (lines["runs"], lines["paused"], lines["failed"]) == ("1", "1", "0")
