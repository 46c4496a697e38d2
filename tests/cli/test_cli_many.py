"""``runs retry``, ``cancel``, ``budget`` and ``delete`` act on one run, or on all that filters let pass."""

import sys
from io import StringIO
from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import STORE, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")


def statuses(command: Command) -> dict[str, str]:
    """Read the status of each run."""
    listed = command("runs", "list", *STORE, "--json").document
    return {one["run_id"]: one["status"] for one in listed}


def submit(command: Command, *names: str, tag: str) -> None:
    for name in names:
        words = (
            "runs",
            "submit",
            "Refund it.",
            "--create",
            "--run-id",
            name,
            "--tag",
            tag,
        )
        assert command(*words, *STORE).code == 0


def test_many_runs_are_cancelled_and_deleted(command: Command) -> None:
    """They are counted first, ``--dry-run`` changes nothing, and no other run is touched."""
    submit(command, "a", "b", tag="test")
    submit(command, "c", tag="real")
    cancel = ("runs", "cancel", "--tag", "test", *STORE)
    assert command(*cancel, "--dry-run").out == "2 runs would be cancelled.\n"
    assert {*statuses(command).values()} == {"queued"}
    assert command(*cancel, "--yes").out == "2 of 2 runs cancelled.\n"
    assert statuses(command) == {"a": "stopped", "b": "stopped", "c": "queued"}
    delete = ("runs", "delete", "--tag", "test", *STORE, "--yes")
    assert command(*delete).out == "2 of 2 runs deleted.\n"
    assert statuses(command) == {"c": "queued"}
    assert command(*cancel, "--yes").out == "0 of 0 runs cancelled.\n"


def test_many_runs_get_a_budget(command: Command) -> None:
    """Each keeps its other limits."""
    submit(command, "a", "b", tag="test")
    done = command(
        "runs", "budget", "--tag", "test", *STORE, "--max-cost", "2", "--yes"
    )
    assert done.code == 0
    assert done.out.startswith("2 of 2 runs given another budget")


def test_a_person_is_asked_first(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The question says how many there are; without a yes nothing changes."""
    submit(command, "a", "b", tag="test")
    monkeypatch.setattr(sys, "stdin", StringIO("n\n"))
    refused = command("runs", "cancel", "--tag", "test", *STORE)
    assert (refused.code, refused.out.strip()) == (1, "")
    assert "2 runs will be cancelled. Continue?" in refused.err
    assert {*statuses(command).values()} == {"queued"}


def test_failed_runs_are_left_to_a_worker(command: Command) -> None:
    """The command drives nothing: a worker does, and ends them."""
    submit(command, "a", tag="test")
    work = ("worker", *STORE, "--once", "--retries", "0", "--app")
    assert command(*work, "till:failing").code == 3
    assert statuses(command) == {"a": "failed"}
    retried = command("runs", "retry", "--error", "500", *STORE, "--yes")
    assert retried.out == "1 of 1 run left to a worker.\n"
    assert statuses(command) == {"a": "running"}
    assert command(*work, "till:app").code == 0
    assert statuses(command) == {"a": "paused"}
    again = command("runs", "retry", "a", *STORE)
    assert (again.code, again.out) == (1, "")
    assert "a has not failed, and is not in quarantine; nothing changed." in again.words


def test_a_run_that_the_hook_refuses_stays(command: Command, here: Path) -> None:
    """The others are acted on; the refusal is said, and the exit code tells."""
    (here / "rule.py").write_text(
        "class App:\n"
        "    def authorize(self, request):\n"
        "        return request.run_id != 'b'\n"
        "\n\ndef app():\n    from till import app\n"
        "    made = App()\n    made.planner, made.kernel = app()\n    return made\n"
    )
    submit(command, "a", "b", "c", tag="test")
    words = ("runs", "cancel", "--tag", "test", *STORE, "--yes", "--app", "rule:app")
    done = command(*words, "--by", "ann")
    assert (done.code, done.out.splitlines()[-1]) == (2, "2 of 3 runs cancelled.")
    assert "'ann' may not cancel run 'b'" in done.words
    assert statuses(command) == {"a": "stopped", "b": "queued", "c": "stopped"}


@pytest.mark.parametrize(
    "words", [(), ("a", "--status", "failed")], ids=["neither", "both"]
)
def test_a_run_or_filters_are_given(command: Command, words: tuple[str, ...]) -> None:
    """Neither and both are refused: a command without filters would change every run."""
    submit(command, "a", tag="test")
    refused = command("runs", "cancel", *words, *STORE, "--yes")
    assert (refused.code, refused.out) == (2, "")
    assert "give the name of one run, or filters" in refused.words
    assert statuses(command) == {"a": "queued"}


def test_all_runs_are_paused_and_resumed(command: Command) -> None:
    """A worker drives none meanwhile; the numbers of the store say since when, by whom and why."""
    submit(command, "a", tag="test")
    pause = ("runs", "pause-all", *STORE, "--by", "ann", "--reason", "wrong account")
    assert (command(*pause).code, command(*pause).code) == (0, 1)
    shown = command("runs", "stats", *STORE).out.splitlines()[-1]
    assert shown.startswith("all paused          since ")
    assert shown.endswith("by ann: wrong account")
    assert command("runs", "stats", *STORE, "--json").document["hold"]["by"] == "ann"
    work = ("worker", *STORE, "--once", "--app", "till:app")
    assert command(*work).code == 0
    assert statuses(command) == {"a": "queued"}
    assert command("runs", "resume-all", *STORE).code == 0
    assert command("runs", "resume-all", *STORE).code == 1
    assert command(*work).code == 0
    assert statuses(command) == {"a": "paused"}
