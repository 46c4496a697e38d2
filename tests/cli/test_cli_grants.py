"""The command line gives grants with a decision or alone, lists and revokes them."""

from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import CALL, RUN, STORE, refunds, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

LATER = tuple("order-8" if word == "order-7" else word for word in RUN)
WHERE = '{"amount": {"le": 100}}'


def test_a_decision_gives_a_grant_that_answers_a_later_run(
    command: Command, here: Path
) -> None:
    """Approved for an hour under a condition: the next run asks nobody, and its record names the grant."""
    assert command(*RUN).code == 4
    given = command(
        "approvals",
        "approve",
        CALL,
        "--for",
        "1h",
        "--where",
        WHERE,
        "--by",
        "ann",
        *STORE,
    )
    assert given.code == 0

    assert command(*LATER).code == 0

    assert refunds(here) == [98]
    (grant,) = command("approvals", "grants", *STORE, "--json").document
    assert (grant["used"], grant["decision"]["by"]) == (1, "ann")
    assert grant["terms"] == {
        "expires_in": 3600.0,
        "arguments": {"amount": {"le": 100}},
    }
    listed = command("approvals", "grants", *STORE).out
    assert "shop-refund: approve by ann" in listed
    assert "used 1 times" in listed
    shown = command("approvals", "show", "order-8/1/call_2", *STORE).out
    assert f"by grant {grant['id']}" in shown


def test_a_standing_no_alone_leaves_the_call_undecided_and_is_revoked(
    command: Command, here: Path
) -> None:
    """The later run is denied with the reason, the first call still waits; once revoked, a run waits again."""
    assert command(*RUN).code == 4
    denial = ("deny", CALL, "--reason", "stocktaking", "--for", "7d", "--later-only")
    assert command("approvals", *denial, *STORE).code == 0
    assert (
        command("approvals", "show", CALL, *STORE, "--json").document["status"]
        == "open"
    )

    assert command(*LATER).code == 0
    assert refunds(here) == []

    (grant,) = command("approvals", "grants", *STORE, "--json").document
    assert command("approvals", "revoke", grant["id"], *STORE).code == 0
    assert command("approvals", "revoke", grant["id"], *STORE).code == 2
    again = tuple("order-9" if word == "order-7" else word for word in RUN)
    assert command(*again).code == 4


@pytest.mark.parametrize(
    ("terms", "problem"),
    [
        (["--later-only"], "Expected a Grant"),
        (["--uses", "3"], "needs a lifetime"),
        (["--for", "1h", "--where", "amount<100"], "cannot be used"),
        (["--for", "1h", "--where", '{"amount": {"below": 1}}'], "below"),
        (["--for", "1h", "--uses", "0"], "greater than 0"),
    ],
)
def test_terms_that_cannot_be_used_change_nothing(
    terms: list[str], problem: str, command: Command
) -> None:
    """Refused by name, with exit code 2: neither is the call decided nor a grant given."""
    assert command(*RUN).code == 4
    refused = command("approvals", "approve", CALL, *terms, *STORE)
    assert (refused.code, problem in refused.err) == (2, True)
    assert (
        command("approvals", "show", CALL, *STORE, "--json").document["status"]
        == "open"
    )
    assert command("approvals", "grants", *STORE, "--json").document == []
