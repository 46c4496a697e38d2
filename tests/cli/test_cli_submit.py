"""Runs that the command line submits to workers: their results, and their budgets."""

import subprocess
import sys
from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import APP, CALL, GOAL, STORE, refunds, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

SUBMIT = ("runs", "submit", GOAL, "--run-id", "order-7", *STORE, "--create")
RESULT = ("runs", "result", "order-7", *STORE)
WORK = ("worker", *STORE, *APP, "--once")


def test_a_run_is_submitted_worked_on_decided_and_answered(
    command: Command, here: Path
) -> None:
    """Each command may be in another process; the exit code of ``result`` says where the run stands."""
    submitted = command(*SUBMIT)
    assert (submitted.code, submitted.out) == (0, "order-7\n")
    assert "planner-ext runs result order-7 --wait --store runs.db" in submitted.err
    queued = command(*RESULT)
    assert (queued.code, queued.out) == (1, "")
    assert queued.err.startswith("queued: 0 round trips, 0 function calls,")
    assert command(*WORK).code == 0
    paused = command(*RESULT, "--wait")
    assert (paused.code, paused.out) == (4, "")
    assert "waits for a decision" in paused.err
    assert f"planner-ext approvals show {CALL} --store runs.db" in paused.err
    assert command("approvals", "approve", CALL, *STORE).code == 0
    assert command(*WORK).code == 0
    answered = command(*RESULT, "--wait")
    assert (answered.code, answered.out) == (
        0,
        "Dear customer, we are sorry: 98.00 dollars refunded for A-1007.\n",
    )
    assert answered.err.startswith("answered: 3 round trips, 2 function calls,")
    assert refunds(here) == [98.0]


def test_a_result_is_one_document(command: Command) -> None:
    """With ``--json``: what a script needs to show and to decide what waits."""
    assert (
        command(*SUBMIT, "--argument", "tenant=acme", "--argument", "limits=[1]").code
        == 0
    )
    assert command(*WORK).code == 0
    result = command(*RESULT, "--json")
    document = result.document
    assert (result.code, result.err) == (4, "")
    assert (document["run_id"], document["status"], document["goal"]) == (
        "order-7",
        "paused",
        GOAL,
    )
    assert (
        document["iterations"],
        document["usage"]["total_tokens"] > 0,
        document["problem"],
    ) == (2, True, "")
    (waiting,) = document["pending"]
    assert (waiting["id"], waiting["arguments"]) == (
        CALL,
        {"order": "A-1007", "amount": 98.0},
    )


def test_a_run_is_submitted_once(command: Command) -> None:
    """Again with the same inputs it is the same run; with others, or with what cannot be used, exit code 2."""
    limited = (*SUBMIT, "--max-tool-calls", "3", "--argument", "tenant=acme")
    assert [command(*limited).out for _ in range(2)] == ["order-7\n"] * 2
    for other in (
        SUBMIT,
        (*SUBMIT, "--max-tool-calls", "4", "--argument", "tenant=acme"),
    ):
        refused = command(*other)
        assert (refused.code, refused.out) == (2, "")
        assert "with other arguments or another budget" in " ".join(refused.err.split())
    for wrong, said in (
        ("--argument=tenant", "--argument NAME=VALUE"),
        ("--max-tool-calls=-1", "max_tool_calls must"),
    ):
        refused = command("runs", "submit", GOAL, *STORE, wrong)
        assert (refused.code, said in " ".join(refused.err.split())) == (2, True)
    assert len(command("runs", "list", *STORE, "--json").document) == 1


def test_what_is_said_is_shown_to_who_decides_and_then_read(
    command: Command, here: Path
) -> None:
    """In the list and in the whole call, with who said it; after the end it is refused."""
    words = ("runs", "say", "order-7", "Hurry, please.", *STORE)
    assert command(*SUBMIT).code == 0
    assert command(*WORK).code == 0
    assert command(*words, "--by", "eve").code == 0
    for shown in (("list",), ("show", CALL)):
        printed = command("approvals", *shown, *STORE).out
        assert "said by eve, " in printed and "Hurry, please." in printed
    (waiting,) = command("approvals", "list", *STORE, "--json").document
    assert [one["text"] for one in waiting["said"]] == ["Hurry, please."]
    assert command("approvals", "approve", CALL, *STORE).code == 0
    assert command(*WORK).code == 0
    assert command(*RESULT).code == 0
    assert len(refunds(here)) == 1
    told = command("runs", "show", "order-7", *STORE).words
    assert "something was said by eve" in told
    late = command(*words)
    assert (late.code, "has ended (answered)" in late.words) == (2, True)


def test_a_budget_changes_the_limits_that_it_names(
    command: Command, here: Path
) -> None:
    """Of a queued and of a paused run, of which the rest stays; an ended run is resumed instead."""
    assert command(*SUBMIT, "--max-iterations", "9").code == 0
    assert (
        command("runs", "budget", "order-7", *STORE, "--max-tool-calls", "2").code == 0
    )
    assert (
        command("runs", "budget", "order-7", *STORE, "--max-total-tokens", "90000").code
        == 0
    )
    assert command(*WORK).code == 0
    assert (
        command(
            "runs", "budget", "order-7", *STORE, "--max-tool-calls", "1", "--by", "ann"
        ).code
        == 0
    )
    assert command("approvals", "approve", CALL, *STORE).code == 0
    assert command(*WORK).code == 0
    ended = command(*RESULT, "--json")
    assert (ended.code, ended.document["status"], ended.document["limit"]) == (
        1,
        "limit_reached",
        "max_tool_calls",
    )
    assert refunds(here) == []
    late = command("runs", "budget", "order-7", *STORE, "--max-tool-calls", "9")
    assert late.code == 2
    assert "planner-ext runs resume" in " ".join(late.err.split())
    assert "at least one limit" in command("runs", "budget", "order-7", *STORE).err


def test_a_submitter_needs_no_semantic_kernel(here: Path) -> None:
    """Submitting a run, reading its result and setting its budget import no Semantic Kernel."""
    commands = [
        (SUBMIT, 0),
        (("runs", "budget", "order-7", *STORE, "--max-iterations", "3"), 0),
        (RESULT, 1),
    ]
    program = f"""
import sys
from planner_ext.cli.__main__ import main
for words, code in {commands!r}:
    sys.argv = ["planner-ext", *words]
    try:
        main()
    except SystemExit as ended:
        assert ended.code == code, words
assert not sys.modules.keys() & {{"semantic_kernel", "openai", "planner_ext.planner"}}
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, "order-7\n"), done.stderr


def test_a_run_is_submitted_with_its_place_in_the_order(command: Command) -> None:
    """Its priority, and its earliest start, which the list names; no worker takes it before."""
    order = ("--priority", "7", "--not-before", "2999-01-31T06:00:00")
    assert command(*SUBMIT, *order).code == 0
    assert command(*WORK).code == 0
    (run,) = command("runs", "list", *STORE, "--json").document
    assert (run["status"], run["priority"]) == ("queued", 7)
    assert run["waits_for"].startswith("its start at 2999-01-")
