"""What the commands on a store print, refuse and return; in this process, with real SQLite files."""

import json
import re
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from planner_ext.cli.store import command_on, store_name
from support.command_line import Command
from support.durable_shop import APP, CALL, GOAL, RUN, STORE, refunds, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")


@pytest.fixture
def paused(command: Command, here: Path, till: None) -> Path:
    """A run that waits for a person, and its store."""
    assert command(*RUN).code == 4
    return here / "runs.db"


def resumed(command: Command, *options: str) -> tuple[int, str]:
    """Resume the run, and return the exit code and the answer."""
    outcome = command(
        "runs", "resume", "order-7", *STORE, "--kernel", "till:kernel", *options
    )
    return outcome.code, outcome.out


# Approvals.


@pytest.mark.usefixtures("paused")
def test_what_waits_is_listed_exactly_as_it_will_run(command: Command) -> None:
    """The list has id, function, whole arguments and question; as JSON it has every field."""
    listed = command("approvals", "list", *STORE)
    assert (listed.code, listed.err) == (0, "")
    assert listed.out.startswith(
        f"{CALL}\n    shop-refund\n    May this money go back?\n      order: A-1007\n      amount: 98.0\n"
    )
    assert "May this money go back?" in listed.out
    same = command("approvals", "list", *STORE, "--text", "refund", "--run", "order-7")
    assert same.out == listed.out
    none = command("approvals", "list", *STORE, "--role", "nobody")
    assert none.err == "Nothing such waits in runs.db.\n"
    (waiting,) = json.loads(command("approvals", "list", *STORE, "--json").out)
    shown = command("approvals", "show", CALL, *STORE, "--json").document
    assert waiting == shown
    assert shown["arguments"] == {"order": "A-1007", "amount": 98.0}
    assert (shown["status"], shown["goal"], shown["in_doubt"], shown["decided_at"]) == (
        "open",
        GOAL,
        False,
        None,
    )
    assert shown["fingerprint"] in command("approvals", "show", CALL, *STORE).out


@pytest.mark.usefixtures("paused")
def test_the_first_decision_counts(command: Command) -> None:
    """The second decision gets exit code 1 and a message, and changes nothing."""
    assert (
        command(
            "approvals", "deny", CALL, "--reason", "not today", "--by", "ann", *STORE
        ).code
        == 0
    )
    second = command("approvals", "approve", CALL, "--by", "bo", *STORE)
    assert (second.code, second.out) == (1, "")
    assert "decided already" in second.err
    assert command("approvals", "list", *STORE).err == "Nothing waits in runs.db.\n"
    left = command("runs", "show", "order-7", *STORE)
    assert "1 call decided or expired meanwhile: a worker continues" in left.err
    assert "waits for your decision" not in left.err
    assert resumed(command)[0] == 0
    shown = command("runs", "show", "order-7", *STORE)
    assert re.search(r"shop-refund +not run +The call was refused", shown.err)


def test_edited_arguments_that_do_not_fit_are_refused(
    command: Command, paused: Path, here: Path
) -> None:
    """At once, or by a worker: the call waits and says why. Another edit is taken; text in the call stays text."""
    unfit = command("approvals", "edit", CALL, "amount=many", *STORE)
    assert (
        unfit.code,
        "do not fit shop-refund: \"amount\": 'many' is not of type 'number'"
        in unfit.err,
    ) == (2, True)
    assert command("approvals", "edit", CALL, "amount=null", *STORE).code == 0
    done = command("worker", *STORE, *APP, "--once")
    assert done.code == 0
    assert "waits again" in done.err
    assert (
        '"amount" must be number, not null' in command("approvals", "list", *STORE).out
    )
    assert '"amount" must be number' in command("approvals", "show", CALL, *STORE).out
    edited = command("approvals", "edit", CALL, "order=7", "amount=20", *STORE)
    assert '{"order": "7", "amount": 20}' in edited.out
    assert resumed(command) == (
        0,
        "Dear customer, we are sorry: 20.00 dollars refunded for 7.\n",
    )
    assert refunds(here) == [20.0]


@pytest.mark.usefixtures("paused")
def test_an_argument_is_edited_in_an_editor(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name alone opens it; what the edit changes is printed. Without an editor the name needs a value."""
    refused = command("approvals", "edit", CALL, "order", *STORE)
    assert (refused.code, "EDITOR" in refused.err) == (2, True)
    monkeypatch.setenv("EDITOR", "sed -i s/1007/1008/")
    edited = command("approvals", "edit", CALL, "order", *STORE)
    assert edited.code == 0
    assert "order:\n  - A-1007\n  + A-1008\n" in edited.out


@pytest.mark.usefixtures("paused")
def test_arguments_may_be_given_whole_and_a_result_in_their_place(
    command: Command, here: Path
) -> None:
    """One JSON object replaces all arguments; a supplied result is what the model reads, and nothing runs."""
    whole = '{"order": "A-1007", "amount": 1}'
    assert whole in command("approvals", "edit", CALL, whole, *STORE).out
    assert (
        command(
            "run", GOAL, "--kernel", "till:kernel", "--no-plan", "--run-id", "b", *STORE
        ).code
        == 4
    )
    supplied = command("approvals", "supply", "b/1/call_2", "paid by hand", *STORE)
    assert 'its result is "paid by hand"' in supplied.out
    assert command("worker", *STORE, *APP, "--once").code == 0
    assert refunds(here) == [1.0]
    assert (
        command("runs", "show", "b", *STORE).out
        == "Dear customer, we are sorry: paid by hand.\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("show", "order-7/1/call_9"),
            "No call with the id 'order-7/1/call_9' ever waited in this store.",
        ),
        (
            ("approve", "nobody"),
            "No call with the id 'nobody' ever waited in this store.",
        ),
        (
            ("approve", CALL, "--always", "never"),
            'always must be "function", "arguments" or None; got \'never\'',
        ),
        (("edit", CALL, "amount"), "Expected NAME=VALUE, such as amount=20"),
        (("edit", CALL, '{"amount": '), "Expected the arguments as one JSON object"),
        (
            ("edit", CALL, "amount=NaN"),
            "Expected a decision that can be written as JSON",
        ),
    ],
)
@pytest.mark.usefixtures("paused")
def test_a_decision_that_cannot_be_taken_is_refused_in_words(
    command: Command, words: tuple[str, ...], said: str
) -> None:
    """Exit code 2, one paragraph on stderr, no traceback; the call still waits."""
    refused = command("approvals", *words, *STORE)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith("Error: ")
    assert said in refused.err
    assert len(refused.err.splitlines()) == 1
    assert (
        command("approvals", "show", CALL, *STORE, "--json").document["status"]
        == "open"
    )


@pytest.mark.parametrize(
    "words",
    [
        ("approvals", "list"),
        ("runs", "list"),
        ("runs", "show", "a"),
        ("runs", "cancel", "a"),
    ],
)
def test_a_store_that_is_not_there_is_not_made(
    command: Command, here: Path, words: tuple[str, ...]
) -> None:
    """Reading a store does not create it: a mistyped path is an error."""
    looked = command(*words, "--store", "other.db")
    assert (looked.code, looked.err) == (
        2,
        f"Error: There is no store {here / 'other.db'}. Give the file that the workers use. A worker, "
        "or runs submit --create, makes a new one.\n",
    )
    assert not (here / "other.db").exists()


def test_a_file_other_than_a_store_is_named(command: Command, here: Path) -> None:
    """A file with something else in it is refused by every command, and not changed."""
    (here / "runs.db").write_text(
        "not a database, but long enough to be read as one's header" * 20
    )
    before = (here / "runs.db").read_bytes()
    for words in (
        ("approvals", "list", *STORE),
        ("runs", "list", *STORE),
        RUN,
        ("worker", *STORE, *APP, "--once"),
    ):
        refused = command(*words)
        assert refused.code == 2
        assert "it is not an SQLite database" in refused.err
    assert (here / "runs.db").read_bytes() == before


def test_an_altered_row_is_refused_by_name(command: Command, paused: Path) -> None:
    """Arguments that were changed in the database are not shown as if they would run."""
    with closing(sqlite3.connect(paused)) as database, database:
        database.execute(
            "UPDATE planner_approvals SET call = replace(call, '98.0', '9.0')"
        )
    database.close()
    refused = command("approvals", "approve", CALL, *STORE)
    assert refused.code == 2
    assert "was altered" in refused.err
    listed = command("approvals", "list", *STORE)
    assert (listed.code, listed.out) == (0, "")
    assert f"The row of approval '{CALL}' was altered" in listed.err


def test_the_environment_may_name_the_store(
    command: Command, monkeypatch: pytest.MonkeyPatch, paused: Path
) -> None:
    """An address may hold a password, and a command line can be read by others."""
    monkeypatch.setenv("PLANNER_EXT_STORE", str(paused))
    assert CALL in command("approvals", "list").out


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ("runs.db", "runs.db"),
        (
            "postgresql://ann:secret@host:5432/db?x=1",
            "postgresql://ann:***@host:5432/db?x=1",
        ),
        ("postgresql://ann:se@c/ret@host/db", "postgresql://ann:***@host/db"),
        (
            "postgresql://host/db?user=ann&password=secret&x=1",
            "postgresql://host/db?user=ann&password=***&x=1",
        ),
        ("postgresql://ann@/db?host=/run/pg", "postgresql://ann@/db?host=/run/pg"),
    ],
)
def test_a_password_is_never_printed(
    where: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands that are suggested name the store without it, or leave it out where the environment has it."""
    assert store_name(where) == named
    assert shlex.split(command_on(where, "approvals", "list"))[-1] == named
    monkeypatch.setenv("PLANNER_EXT_STORE", where)
    assert command_on(where, "approvals", "list") == "planner-ext approvals list"


# Runs.


@pytest.mark.usefixtures("paused")
def test_a_run_is_begun_once(command: Command) -> None:
    """The same command finds the run, which waits or has ended; another goal under its name is refused."""
    assert command(*RUN).code == 4
    other = command("run", "Something else.", *RUN[2:])
    assert other.code == 2
    assert "with another goal" in other.err
    assert command("approvals", "approve", CALL, *STORE).code == 0
    assert command(*RUN, "--json").document["run_id"] == "order-7"
    answered = command(*RUN)
    assert (answered.code, answered.out) == (
        0,
        "Dear customer, we are sorry: 98.00 dollars refunded for A-1007.\n",
    )


@pytest.mark.usefixtures("paused")
def test_runs_are_listed_and_shown(command: Command) -> None:
    """The list names its columns; a run is shown with what happened and what waits, and is not resumed."""
    listed = command("runs", "list", *STORE)
    head, line = listed.out.splitlines()
    assert head.split()[-3:] == ["run", "why", "goal"]
    assert line.split()[:3] == ["paused", "2", "1"]
    assert "  order-7  shop-refund  " in line
    assert line.endswith(f"  {GOAL}")
    (record,) = json.loads(command("runs", "list", *STORE, "--json").out)
    assert (record["run_id"], record["status"], record["goal"], record["owner"]) == (
        "order-7",
        "paused",
        GOAL,
        None,
    )
    assert (
        command("runs", "list", *STORE, "--status", "answered").err
        == "No run is answered in runs.db.\n"
    )
    shown = command("runs", "show", "order-7", *STORE)
    assert (shown.code, shown.out) == (0, "")
    assert '→ shop-find(order="A-1007")' in shown.err
    assert "paused: 2 round trips, 1 function call" in shown.err
    assert f"call        {CALL}, fingerprint" in shown.err
    assert f"approvals approve {CALL} --store runs.db" in shown.err
    assert (
        command("runs", "show", "order-7", *STORE, "--json").document["pending"][0][
            "id"
        ]
        == "call_2"
    )
    assert command("runs", "show", "nobody", *STORE).code == 2


def test_a_limit_is_raised_when_a_run_is_resumed(command: Command) -> None:
    """A run that spent its round trips continues with more; those made count."""
    limited = command(
        "run",
        GOAL,
        "--kernel",
        "till:restless",
        "--no-plan",
        "--max-iterations",
        "2",
        "--run-id",
        "a",
        *STORE,
    )
    assert (limited.code, limited.out) == (1, "no\n")
    more = command(
        "runs",
        "resume",
        "a",
        *STORE,
        "--kernel",
        "till:restless",
        "--max-iterations",
        "4",
        "--json",
    )
    assert (more.code, more.document["iterations"], more.document["limit"]) == (
        1,
        4,
        "max_iterations",
    )


def make_due(here: Path) -> None:
    """Let the time of every retry come."""
    with closing(sqlite3.connect(here / "runs.db")) as database, database:
        database.execute(
            "UPDATE planner_runs SET wake_at = 1 WHERE wake_at IS NOT NULL"
        )


def test_a_fault_leaves_the_run_in_its_store(command: Command, here: Path) -> None:
    """Exit code 3, the command that resumes it is shown, and it works; a worker leaves it until its retry is due."""
    failed = command(
        "run",
        GOAL,
        "--kernel",
        "till:failing",
        "--no-plan",
        "--run-id",
        "order-7",
        *STORE,
    )
    assert (failed.code, failed.out) == (3, "")
    assert (
        "planner-ext runs resume order-7 --kernel till:failing --store runs.db"
        in failed.err
    )
    assert command("worker", *STORE, "--app", "till:failing", "--once").code == 0
    make_due(here)
    interrupted = command(
        "worker", *STORE, "--app", "till:failing", "--once", "--retries", "1"
    )
    assert interrupted.code == 3
    assert "run order-7 fault " in interrupted.err
    assert "run order-7 failed: " in interrupted.err
    shown = command("runs", "show", "order-7", *STORE)
    assert (shown.code, "Problem: " in shown.err, "failed" in shown.err) == (
        0,
        True,
        True,
    )
    assert resumed(command)[0] == 4


@pytest.mark.usefixtures("paused")
def test_a_run_in_quarantine_is_shown_and_resumed(command: Command, here: Path) -> None:
    """The list, the result and the run itself say why; no worker takes it; resumed, it continues where it was."""
    problem = "Its worker's process ended 3 times while it was driven, in the call shop-refund (refund)."
    with closing(sqlite3.connect(here / "runs.db")) as database, database:
        database.execute(
            "UPDATE planner_runs SET status = 'quarantined', problem = ?",
            (json.dumps(problem),),
        )
    listed = command("runs", "list", "--status", "quarantined", *STORE)
    assert (listed.code, problem in listed.out) == (0, True)
    shown = command("runs", "show", "order-7", *STORE)
    assert (
        shown.code,
        f"Problem: {problem}" in shown.err,
        "quarantined" in shown.err,
    ) == (0, True, True)
    result = command("runs", "result", "order-7", *STORE)
    assert (result.code, result.out, problem in result.err) == (3, "", True)
    assert command("worker", *STORE, "--app", "till:kernel", "--once").code == 0
    assert (
        json.loads(command("runs", "stats", *STORE, "--json").out)["by_status"][
            "quarantined"
        ]
        == 1
    )
    assert command("approvals", "approve", CALL, "--by", "ann", *STORE).code == 0
    assert resumed(command)[0] == 0
    assert len(refunds(here)) == 1


@pytest.mark.usefixtures("paused")
def test_a_run_is_cancelled_once(command: Command, here: Path) -> None:
    """Nothing that waits is run; the second time there is nothing to cancel."""
    assert (
        command(
            "runs",
            "cancel",
            "order-7",
            "--reason",
            "changed my mind",
            "--by",
            "ann",
            *STORE,
        ).code
        == 0
    )
    assert command("runs", "cancel", "order-7", *STORE).code == 1
    assert command("approvals", "approve", CALL, *STORE).code == 2
    assert (
        "Cancelled by ann: changed my mind"
        in command("runs", "show", "order-7", *STORE).err
    )
    assert refunds(here) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((*STORE, "--timeout", "5"), "--timeout and --store contradict each other"),
        (("--run-id", "a"), "give --store, too"),
        ((*STORE, "--run-id", "a/b"), "run_id must be 1 to 200 characters"),
    ],
)
def test_options_that_contradict_each_other_are_named(
    command: Command, options: tuple[str, ...], said: str
) -> None:
    """Exit code 2 before anything is asked of the model."""
    refused = command("run", GOAL, "--kernel", "till:kernel", *options)
    assert refused.code == 2
    assert said in " ".join(refused.err.split())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("till", "--app must be module:factory"),
        ("till:nothing", "--app till:nothing: the module 'till' has no 'nothing'."),
        (
            "till:broken",
            "--app till:broken: the factory raised LookupError: no such till",
        ),
        (
            "till:pair_of_kernels",
            "must give (planner, kernel), (planner, kernel, arguments_for) or a kernel; got Kernel",
        ),
    ],
)
def test_an_application_that_cannot_be_used_is_named(
    command: Command, path: str, said: str
) -> None:
    """Exit code 2, with the option, what was expected and what was found."""
    refused = command("worker", *STORE, "--app", path, "--once")
    assert refused.code == 2
    assert said in refused.err
