"""A kept run that is followed from a terminal while other processes drive it."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import APP, CALL, GOAL, RUN, STORE, till
from support.processes import Lives
from support.terminal import Session

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

FOLLOW = ("runs", "show", "order-7", *STORE, "--follow")
WORK = ("worker", *STORE, *APP, "--once")


def test_a_run_is_followed_from_the_queue_to_its_answer(
    lives: Lives, command: Command, here: Path
) -> None:
    """New facts appear as they come, in the form of ``run``; it ends with the exit code of ``runs result``."""
    limits = (
        "--max-iterations",
        "9",
        "--max-tool-calls",
        "3",
        "--max-total-tokens",
        "90000",
    )
    assert (
        command(
            "runs", "submit", GOAL, "--run-id", "order-7", "--create", *STORE, *limits
        ).code
        == 0
    )
    session = Session(lives, here, *FOLLOW, term="xterm")
    session.see("queued, waits for a worker")
    assert command(*WORK).code == 0
    assert session.end() == 4
    assert "Round trip 1 of 9 (3 function calls, 90,000 tokens left)" in session.shown
    assert "waits for the model (8 round trips, 2 function calls, 89," in session.shown
    assert (
        '? shop-refund(order="A-1007", amount=98.0) waits for a decision'
        in session.shown
    )
    assert f"planner-ext approvals approve {CALL} --store runs.db" in session.shown
    assert command("approvals", "approve", CALL, *STORE).code == 0
    again = Session(lives, here, *FOLLOW)
    again.see("Round trip 2 of 9")
    assert command(*WORK).code == 0
    assert again.end() == 0
    assert "Answer" in again.shown
    assert "98.00 dollars refunded for A-1007." in again.shown


def test_ctrl_c_ends_only_the_view(lives: Lives, command: Command, here: Path) -> None:
    """A fault is shown with the time of the next try; the run that was followed continues without the terminal."""
    assert command(*RUN[:2], "--kernel", "till:failing", *RUN[4:]).code == 3
    session = Session(lives, here, *FOLLOW)
    session.see("a fault; attempt 2 of 5, next at")
    session.interrupt()
    assert session.end() == 130
    assert "Traceback" not in session.shown
    shown = command("runs", "show", "order-7", *STORE)
    assert "Waits for attempt 2 of 5, next at" in shown.err
    with closing(sqlite3.connect(here / "runs.db")) as store:
        store.execute("UPDATE planner_runs SET wake_at = NULL")
        store.commit()
    assert command(*WORK).code == 0
    assert command("runs", "result", "order-7", *STORE).code == 4


def test_a_fault_of_a_run_that_is_tried_again_already_has_no_time(
    lives: Lives, command: Command, here: Path
) -> None:
    """A follower may look only then: the line has the problem alone."""
    assert command(*RUN[:2], "--kernel", "till:failing", *RUN[4:]).code == 3
    with closing(sqlite3.connect(here / "runs.db")) as store:
        store.execute("UPDATE planner_runs SET wake_at = NULL")
        store.commit()
    session = Session(lives, here, *FOLLOW)
    session.see("a fault; ")
    session.interrupt()
    session.end()
    assert "a fault; :" not in session.shown


def test_the_exit_code_is_that_of_the_result(command: Command) -> None:
    """Of a run that failed or ended before, too, and with ``--json``; an unknown run cannot be followed."""
    assert (
        command(
            "runs",
            "submit",
            GOAL,
            "--run-id",
            "order-7",
            "--create",
            *STORE,
            "--create",
        ).code
        == 0
    )
    assert (
        command(
            "worker", *STORE, "--app", "till:failing", "--once", "--retries", "0"
        ).code
        == 3
    )
    failed = command(*FOLLOW)
    assert (failed.code, failed.out) == (3, "")
    assert "Problem: " in failed.err
    assert command("runs", "cancel", "order-7", *STORE).code == 0
    cancelled = command(*FOLLOW, "--json")
    assert (cancelled.code, cancelled.document["status"]) == (1, "stopped")
    assert command("runs", "show", "other", *STORE, "--follow").code == 2
