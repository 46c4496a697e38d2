"""The command line shows who has approved a call that several persons have to, and when others are asked."""

import asyncio
from pathlib import Path

import pytest

from planner_ext import Approve
from planner_ext.durable import Approvals
from support.command_line import Command
from support.durable_shop import CALL, RUN, STORE, refunds, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

POLICY = """
default: allow
rules:
- {plugin: shop, function: refund, action: ask, quorum: 2, escalates_in: 14400, escalates_to: [lead]}
"""


@pytest.fixture
def two(here: Path) -> tuple[str, ...]:
    """The options of a policy under which two persons have to approve a refund."""
    (here / "two.yaml").write_text(POLICY)
    return ("--policy", "two.yaml")


async def approve(name: str) -> None:
    """Approve the call as a person who has signed in elsewhere."""
    async with Approvals.connect("runs.db", verified=True) as approvals:
        assert await approvals.decide(CALL, Approve(by=name))


def test_it_shows_who_has_approved_a_call(
    command: Command, here: Path, two: tuple[str, ...]
) -> None:
    """In the list and of the call, as text and as JSON; once two have, the run goes on."""
    assert command(*RUN, *two).code == 4
    assert "approved by 0 of 2" in command("approvals", "list", *STORE).out
    asyncio.run(approve("ann"))

    assert "approved by 1 of 2: ann" in command("approvals", "list", *STORE).out
    shown = command("approvals", "show", CALL, *STORE).out
    assert "1 of 2: ann" in shown
    assert "to lead" in shown
    document = command("approvals", "show", CALL, *STORE, "--json").document
    assert document["quorum"] == 2
    assert [vote["by"] for vote in document["votes"]] == ["ann"]
    assert document["escalates_to"] == ["lead"]

    asyncio.run(approve("bo"))
    assert command(*RUN, *two).code == 0
    assert refunds(here) == [98]


def test_a_name_that_is_typed_has_no_vote(
    command: Command, here: Path, two: tuple[str, ...]
) -> None:
    """Approving is refused with the way; a denial takes one person, and counts."""
    assert command(*RUN, *two).code == 4
    refused = command("approvals", "approve", CALL, "--by", "ann", *STORE)
    assert refused.code == 2
    assert "only typed" in refused.err
    assert command("approvals", "deny", CALL, "--by", "ann", *STORE).code == 0
    assert command(*RUN, *two).code == 0
    assert refunds(here) == []


def test_it_needs_a_store(command: Command, two: tuple[str, ...]) -> None:
    """Without one the run is refused before anything is asked."""
    kept = (*STORE, "--run-id", "order-7")
    without = tuple(word for word in RUN if word not in kept)
    refused = command(*without, *two)
    assert refused.code == 2
    assert "quorum or an escalation" in refused.err
