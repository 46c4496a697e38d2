"""The commands that keep a store for years: runs are deleted, pruned, exported and imported, the file is backed up."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import RUN, STORE, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")


def test_a_run_is_deleted(command: Command) -> None:
    """A paused one only with ``--force``; a second time there is no such run."""
    assert command(*RUN).code == 4
    refused = command("runs", "delete", "order-7", *STORE)
    assert (refused.code, refused.out) == (2, "")
    assert "'order-7' cannot be deleted: it is paused" in refused.err
    deleted = command("runs", "delete", "order-7", "--force", *STORE)
    assert (deleted.code, deleted.out, deleted.err) == (0, "", "order-7 is deleted.\n")
    again = command("runs", "delete", "order-7", *STORE)
    assert (again.code, "There is no run 'order-7'" in again.err) == (2, True)


def test_old_runs_are_pruned(command: Command, here: Path) -> None:
    """By the time since their last change and their status; ``--dry-run`` only counts."""
    for name in ("a", "b"):
        assert command(*RUN[:-3], name, *STORE).code == 4
        assert command("runs", "cancel", name, *STORE).code == 0
    with closing(sqlite3.connect(here / "runs.db")) as database:
        database.execute("UPDATE planner_runs SET updated_at = updated_at - 31 * 86400 WHERE run_id = 'a'")
        database.commit()
    prune = ("runs", "prune", "--status", "stopped", *STORE, "--older-than")
    assert command(*prune, "30d", "--dry-run").out == "1 run would be deleted.\n"
    assert command(*prune, "32d").out == "0 runs deleted.\n"
    assert command(*prune, "30d").out == "1 run deleted.\n"
    assert command(*prune, "0s").out == "1 run deleted.\n"
    for words, said in (((*prune, "month"), "30d"), ((*prune[:3], "paused", *prune[4:], "1d"), "quarantined")):
        refused = command(*words)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err
