"""``planner-ext budgets``: what was used of shared budgets, and a reset."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from planner_ext.budgets import BudgetStore
from support.budgets import noon, shared
from support.command_line import Command
from support.planner import never_stops, planner_with, scripted

STORE = ("--store", "runs.db")
HOSTILE = "eve\x1b[2J\u202e"


@pytest.fixture
def command(command: Command) -> Iterator[Command]:
    """Run the command beside a store of which two users have used something."""

    async def use() -> None:
        async with BudgetStore.sqlite(Path("runs.db")) as store:
            for key in ("alice", HOSTILE):
                budget = shared(
                    store,
                    "per user",
                    key=lambda _, key=key: key,
                    max_iterations=1,
                    max_tool_calls=2000,
                )
                planner = planner_with(
                    plan=False, clock=noon(), shared_budgets=[budget]
                )
                await planner.invoke(scripted(never_stops)[0], "Add.")

    asyncio.run(use())
    yield command


def test_budgets_are_listed_without_what_a_key_hides(command: Command) -> None:
    """Each has its period, what was used and its limits; a key from outside moves no cursor."""
    listed = command("budgets", *STORE)
    assert listed.code == 0
    assert "2026-01-31  per user  alice  max_iterations reached" in listed.out
    assert "round trips 1 of 1, calls 0 of 2,000, tokens " in listed.out
    assert "\x1b[2J" not in listed.out
    assert "\u202e" not in listed.out
    document = command("budgets", *STORE, "--json", "--key", "alice").document
    assert [
        (row["key"], row["iterations"], row["limits"]["max_tool_calls"])
        for row in document
    ] == [("alice", 1, 2000)]


def test_a_budget_is_reset_by_name(command: Command) -> None:
    """Only that of the key; one that is not there, and no name, are refused."""
    done = command(
        "budgets", *STORE, "--budget", "per user", "--key", "alice", "--reset", "--json"
    )
    assert [(row["iterations"], row["reached"]) for row in done.document] == [(0, None)]
    other = command("budgets", *STORE, "--json", "--key", HOSTILE).document
    assert [row["iterations"] for row in other] == [1]
    assert (
        "nothing was used of per user by bob"
        in command(
            "budgets", *STORE, "--budget", "per user", "--key", "bob", "--reset"
        ).err
    )
    assert "--budget" in command("budgets", *STORE, "--reset").err


def test_a_missing_store_is_not_made(command: Command) -> None:
    """A misspelt file is an error, and no file appears."""
    assert command("budgets", "--store", "run.db").code == 2
    assert not Path("run.db").exists()
