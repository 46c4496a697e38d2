"""The commands that keep a store for years: runs are deleted, pruned, exported and imported, the file is backed up."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from planner_ext.durable.database import SCHEMAS, Schema
from support.command_line import Command
from support.durable_shop import CALL, RUN, STORE, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")


def test_a_run_is_deleted(command: Command) -> None:
    """A paused one only with ``--force``; the second time the run is unknown."""
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
        database.execute(
            "UPDATE planner_runs SET updated_at = updated_at - 31 * 86400 WHERE run_id = 'a'"
        )
        database.commit()
    prune = ("runs", "prune", "--status", "stopped", *STORE, "--older-than")
    assert command(*prune, "30d", "--dry-run").out == "1 run would be deleted.\n"
    assert command(*prune, "32d").out == "0 runs deleted.\n"
    assert command(*prune, "30d").out == "1 run deleted.\n"
    assert command(*prune, "0s").out == "1 run deleted.\n"
    for words, said in (
        ((*prune, "month"), "30d"),
        ((*prune[:3], "paused", *prune[4:], "1d"), "quarantined"),
    ):
        refused = command(*words)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err


def test_a_run_moves_to_another_store(command: Command, here: Path) -> None:
    """Through a new file that is its owner's alone; there it waits, is approved and resumed."""
    assert command(*RUN).code == 4
    export = ("runs", "export", "order-7", *STORE)
    written = command(*export, "--output", "order-7.json")
    assert (written.code, written.out, written.err) == (0, "", "")
    assert (here / "order-7.json").stat().st_mode & 0o777 == 0o600
    assert command(*export).out == (here / "order-7.json").read_text() + "\n"
    again = command(*export, "--output", "order-7.json")
    assert (again.code, "cannot be written: File exists" in again.err) == (2, True)

    moved = command("runs", "import", "order-7.json", "--store", "other.db")
    assert (moved.code, moved.out, moved.err) == (0, "", "order-7 is in other.db.\n")
    assert command("approvals", "approve", CALL, "--store", "other.db").code == 0
    resumed = command(
        "runs", "resume", "order-7", "--store", "other.db", "--kernel", "till:kernel"
    )
    assert (resumed.code, resumed.out) == (
        0,
        "Dear customer, we are sorry: 98.00 dollars refunded for A-1007.\n",
    )
    twice = command("runs", "import", "order-7.json", "--store", "other.db")
    assert (twice.code, "Run 'order-7' is there already" in twice.err) == (2, True)


def test_an_exported_run_is_signed_where_there_is_a_key(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a key in the environment, an unsigned or altered file is refused, and the way out is said."""
    assert command(*RUN).code == 4
    export = ("runs", "export", "order-7", *STORE, "--output")
    assert command(*export, "unsigned.json").code == 0
    monkeypatch.setenv("PLANNER_EXT_CHECKPOINT_KEY", "secret")
    assert command(*export, "signed.json").code == 0
    (here / "altered.json").write_text(
        (here / "signed.json").read_text().replace("98.0", "9800.0")
    )
    for name in ("unsigned", "altered"):
        refused = command("runs", "import", f"{name}.json", "--store", "other.db")
        assert (refused.code, "signed with this key" in refused.err) == (2, True)
    assert command("runs", "import", "signed.json", "--store", "other.db").code == 0
    missing = command("runs", "import", "nowhere.json", "--store", "other.db")
    assert (
        missing.code,
        "nowhere.json cannot be read as an exported run" in missing.err,
    ) == (2, True)


def test_a_store_is_backed_up(command: Command, here: Path) -> None:
    """The copy is a store; a file that is there stays as it is."""
    assert command(*RUN).code == 4
    done = command("runs", "backup", "copy.db", *STORE)
    assert (done.code, done.out, done.err) == (
        0,
        "",
        "runs.db is copied into copy.db.\n",
    )
    assert (
        command("runs", "list", "--store", "copy.db").out
        == command("runs", "list", *STORE).out
    )
    before = (here / "copy.db").read_bytes()
    again = command("runs", "backup", "copy.db", *STORE)
    assert (again.code, "cannot be written: File exists" in again.err) == (2, True)
    assert (here / "copy.db").read_bytes() == before


def test_the_schema_is_checked_and_migrated(command: Command) -> None:
    """By commands of their own; ``--dry-run`` prints the statements, and every other command refuses until then."""
    submit = ("runs", "submit", "Refund it.", "--run-id", "a", *STORE)
    refused = command(*submit)
    assert (refused.code, "--create" in refused.words) == (2, True)
    assert command(*submit, "--create").code == 0
    check = command("store", "check", *STORE)
    known = "runs.db has schema 1, for any version that knows schema 1."
    assert (check.code, check.out) == (0, f"{known} There is nothing to migrate.\n")

    added = "CREATE TABLE planner_moods (mood TEXT)"
    following = Schema(number=2, reader=1, statements=(added,))
    SCHEMAS.append(following)
    try:
        check = command("store", "check", *STORE)
        needs = "This version needs schema 2; older workers continue meanwhile."
        assert (check.code, check.out) == (1, f"{known} {needs}\n")
        refused = command("runs", "list", *STORE)
        assert (refused.code, "store migrate --dry-run" in refused.words) == (2, True)
        shown = command("store", "migrate", *STORE, "--dry-run")
        assert shown.out.splitlines()[0] == f"{added};"
        assert command("store", "check", *STORE).code == 1
        done = command("store", "migrate", *STORE)
        assert done.err == "runs.db has schema 2 now, and had 1.\n"
        assert command("store", "check", *STORE, "--json").document["number"] == 2
    finally:
        SCHEMAS.remove(following)
    assert command("runs", "list", *STORE).code == 0


def test_what_has_ended_is_kept_as_long_as_the_store_says(command: Command) -> None:
    """It is set by a command, which wants to know how long, and shown by the check."""
    assert command("runs", "submit", "Refund it.", *STORE, "--create").code == 0
    keep = ("store", "keep", *STORE)
    for wrong in ((), ("--everything", "--ended", "30d"), ("--ended", "month")):
        refused = command(*keep, *wrong)
        assert (refused.code, "--ended" in refused.err) == (2, True)
    kept = "It keeps runs that have ended for 30d and their journals for 36h."
    done = command(*keep, "--ended", "30d", "--journals", "36h", "--by", "ann")
    assert (done.code, done.err) == (0, f"{kept}\n")
    assert command("store", "check", *STORE).out.splitlines()[1] == kept
    document = command("store", "check", *STORE, "--json").document
    assert (document["retention"]["ended"], document["retention"]["by"]) == (
        30 * 86_400,
        "ann",
    )
    assert command(*keep, "--everything").err == "Runs that have ended are kept.\n"
    assert len(command("store", "check", *STORE).out.splitlines()) == 1


def test_a_person_is_forgotten(command: Command, here: Path) -> None:
    """Once the runs have ended; no file of the store contains the tag any more."""
    submit = ("runs", "submit", "Refund it.", "--tag", "user-7", "--create", *STORE)
    assert command(*submit).code == 0
    forget = ("runs", "forget", "--key", "user-7", *STORE)
    refused = command(*forget)
    assert (refused.code, "runs cancel --tag user-7" in refused.words) == (2, True)
    assert command("runs", "cancel", "--tag", "user-7", "--yes", *STORE).code == 0
    assert command(*forget).out == "1 run deleted.\n"
    assert not [
        path for path in here.glob("runs.db*") if b"user-7" in path.read_bytes()
    ]


def test_what_cannot_be_verified_is_refused(command: Command, here: Path) -> None:
    """Without a store or file, and with heads or a key that cannot be read; an exported run needs no store."""
    assert command("runs", "submit", "Refund it.", "--create", "--run-id", "a", *STORE)
    assert command("runs", "cancel", "a", *STORE).code == 0
    assert command("runs", "export", "a", "--output", "a.json", *STORE).code == 0
    verify = ("runs", "verify")
    (here / "key.pub").write_text("x")
    for wrong, said in (
        ((), "give a store, or a file"),
        ((*STORE, "--heads", "none.log"), "none.log cannot be read"),
        ((*STORE, "--public-key", "key.pub"), "must be an Ed25519 key"),
        (("none.json",), "none.json cannot be read"),
    ):
        refused = command(*verify, *wrong)
        assert (refused.code, said in refused.words) == (2, True), refused.err
    seen = "1 journal, 0 deletions, 0 defects; 1 journal without a head.\n"
    for which in (STORE, ("a.json",)):
        assert command(*verify, *which).out == seen
