"""The command line shows who decided what, and which decisions were refused."""

import json
import re

import pytest

from support.command_line import Command
from support.durable_shop import APP, CALL, GOAL, RUN, STORE, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

ASKED = {"order": "A-1007", "amount": 98}


def test_every_command_says_who_decided_what_and_what_was_refused(
    command: Command,
) -> None:
    """In words and as JSON: the call's own command, the run's, and what running and resuming print."""
    assert command(*RUN).code == 4
    assert (
        command("approvals", "edit", CALL, "amount=null", "--by", "eve", *STORE).code
        == 0
    )
    assert command("worker", *STORE, *APP, "--once").code == 0
    edited = command("approvals", "edit", CALL, "amount=20", "--by", "ann", *STORE)
    assert "is approved" not in edited.out
    assert "not checked" in edited.out
    assert (
        command(
            "approvals", "deny", CALL, "--reason", "too much", "--by", "bo", *STORE
        ).code
        == 1
    )

    shown = command("approvals", "show", CALL, *STORE, "--json").document
    decision, refused = shown["decision"], shown["refused"]
    assert (decision["kind"], decision["by"], decision["refused"]) == (
        "approve",
        "ann",
        "",
    )
    assert (decision["requested"], decision["arguments"]) == (
        ASKED,
        {**ASKED, "amount": 20},
    )
    assert decision["at"] == shown["decided_at"]
    assert [(one["kind"], one["by"], one["reason"]) for one in refused] == [
        ("approve", "eve", ""),
        ("deny", "bo", "too much"),
    ]
    assert '"amount" must be number' in refused[0]["refused"]
    assert "by 'ann'" in refused[1]["refused"]
    words = command("approvals", "show", CALL, *STORE).out
    assert "approve by ann" in words
    run_so_far = (
        r"\nthe user\n.*\nthe model, .*\n  calls shop-refund\n    order: A-1007"
    )
    assert re.search(run_so_far, words, re.DOTALL) is not None
    assert "in place of" in words
    assert "deny by bo" in words

    resumed = command(
        "runs", "resume", "order-7", *STORE, "--kernel", "till:kernel", "--json"
    )
    (taken,) = resumed.document["decisions"]
    assert (taken["by"], taken["requested"], taken["arguments"]) == (
        "ann",
        ASKED,
        {**ASKED, "amount": 20},
    )
    shown = command("runs", "show", "order-7", *STORE, "--json").document
    assert shown["decisions"] == [taken]
    assert [(one["call"], one["by"]) for one in shown["refused"]] == [
        (CALL, "eve"),
        (CALL, "bo"),
    ]
    in_words = command("runs", "show", "order-7", *STORE).err
    assert "    ann: approve shop-refund(" in in_words
    assert "Decision on call_2 shop-refund: approve by ann" in in_words
    assert (
        'with {"order": "A-1007", "amount": 20} in place of {"order": "A-1007", "amount": 98'
        in in_words
    )
    assert f"Decision not taken on {CALL}: deny by bo" in in_words


def test_what_waits_says_who_decided_as_json(command: Command) -> None:
    """An undecided call says so, and lists the decisions on it that were refused."""
    assert command(*RUN).code == 4
    (waiting,) = json.loads(command("approvals", "list", *STORE, "--json").out)
    assert (waiting["decision"], waiting["refused"]) == (None, [])
    approved = command("approvals", "approve", CALL, "--by", "ann", *STORE)
    assert "is approved with the arguments shown" in approved.out


def test_an_approval_may_name_the_call_that_was_read(command: Command) -> None:
    """For a call that waits with other arguments meanwhile it is refused, and so is a grant."""
    assert command(*RUN).code == 4
    read = command("approvals", "show", CALL, *STORE, "--json").document
    for more in ((), ("--for", "1h", "--later-only")):
        other = ("approvals", "approve", CALL, *STORE, "--fingerprint", "0" * 64)
        refused = command(*other, *more)
        assert refused.code == 2
        assert "other arguments" in refused.err
    edited = command(
        "approvals", "edit", CALL, "amount=20", *STORE, "--fingerprint", "0" * 64
    )
    assert edited.code == 2
    own = ("--fingerprint", read["fingerprint"])
    assert command("approvals", "approve", CALL, *STORE, *own).code == 0


def test_what_is_not_drawn_is_marked_in_every_text_about_a_call(
    command: Command,
) -> None:
    """In the goal, and in the reason why a decision was not taken."""
    given = ["Refund\u200b it." if one == GOAL else one for one in RUN]
    assert command(*given).code == 4
    other = ("approvals", "approve", CALL, *STORE, "--fingerprint", "f\u200bf")
    assert command(*other).code == 2
    words = command("approvals", "show", CALL, *STORE).out
    assert "Refund\\u200b it." in words
    assert "its fingerprint is f\\u200bf" in words
    assert "\u200b" not in words
