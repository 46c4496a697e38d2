"""``--policy`` and ``--ask-all`` apply wherever a stored run is continued; the environment can name the store."""

import shlex
from pathlib import Path

import pytest

from support.command_line import Command
from support.durable_shop import APP, CALL, GOAL, RUN, STORE, refunds, till

__all__ = ["till"]

pytestmark = pytest.mark.usefixtures("till")

ASKS = "default: ask\nrules:\n  - {plugin: shop, function: find, action: allow}\n"
FIND = "order-7/0/call_1"


@pytest.fixture(params=["--policy", "--ask-all"])
def guards(request: pytest.FixtureRequest, here: Path) -> tuple[str, ...]:
    """The options that let a person decide on calls."""
    (here / "asks.yaml").write_text(ASKS)
    return ("--policy", "asks.yaml") if request.param == "--policy" else ("--ask-all",)


def test_a_stored_run_keeps_its_guards(
    command: Command, here: Path, guards: tuple[str, ...]
) -> None:
    """Without them, worker and ``runs resume`` refuse the run and leave it as it is; with them, they continue it."""
    (here / "equal.yaml").write_text(
        "# the same\n"
        + ASKS.replace("{plugin: shop, ", "{reason: Reads only., plugin: shop, ")
    )
    began = command(*RUN, *guards)
    assert began.code == 4
    id = FIND if guards == ("--ask-all",) else CALL
    assert command("approvals", "approve", id, *STORE).code == 0
    missing = "unmatched" if guards == ("--ask-all",) else "the approval policy"
    for again in (
        ("runs", "resume", "order-7", *STORE, "--kernel", "till:kernel"),
        ("worker", *STORE, *APP, "--once"),
        RUN,
    ):
        refused = command(*again)
        assert (refused.code, refused.out) == (2, "")
        assert missing in refused.err
        assert "Traceback" not in refused.err
    assert (
        command("approvals", "show", id, *STORE, "--json").document["status"]
        == "decided"
    )
    assert refunds(here) == []
    equal = tuple("equal.yaml" if word == "asks.yaml" else word for word in guards)
    worked = command("worker", *STORE, *APP, "--once", *equal)
    assert worked.code == 0
    assert (refunds(here) == [98.0]) == (id == CALL)
    if id == FIND:
        assert "order-7/1/" in command("approvals", "list", *STORE).out


def test_the_suggested_command_has_the_same_guards(
    command: Command, here: Path, guards: tuple[str, ...]
) -> None:
    """Copied unchanged, it continues the run."""
    began = command(*RUN, *guards)
    (line,) = [line for line in began.err.splitlines() if "runs resume" in line]
    assert command(*shlex.split(line)[1:]).code == 4
    assert refunds(here) == []


def test_a_workers_policy_is_checked_before_it_works(
    command: Command, here: Path
) -> None:
    """An invalid policy file, and two options that contradict each other, are named with exit code 2."""
    (here / "asks.yaml").write_text(ASKS)
    (here / "broken.yaml").write_text("rules: []\n")
    for options, said in (
        (("--policy", "broken.yaml"), "The policy lacks default"),
        (("--policy", "other.yaml"), "--policy other.yaml cannot be read"),
        (
            ("--policy", "asks.yaml", "--ask-all"),
            "--ask-all and --policy contradict each other",
        ),
    ):
        refused = command("worker", *STORE, *APP, "--once", *options)
        assert (refused.code, refused.out) == (2, "")
        assert said in refused.err
        assert len(refused.err.splitlines()) == 1


def test_the_environment_names_the_store_of_every_command(
    command: Command, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``PLANNER_EXT_STORE`` replaces ``--store``, for ``run`` and the worker, too."""
    monkeypatch.setenv("PLANNER_EXT_STORE", "runs.db")
    assert (
        command(
            "run", GOAL, "--kernel", "till:kernel", "--no-plan", "--run-id", "order-7"
        ).code
        == 4
    )
    assert (here / "runs.db").exists()
    assert CALL in command("approvals", "list").out
    assert command("approvals", "approve", CALL).code == 0
    assert command("worker", *APP, "--once").code == 0
    assert refunds(here) == [98.0]
    _, listed = command("runs", "list").out.splitlines()
    assert listed.startswith("answered ")
    assert command("runs", "show", "order-7").code == 0
    contradicted = command("run", GOAL, "--kernel", "till:kernel", "--timeout", "5")
    assert contradicted.code == 2
    assert "PLANNER_EXT_STORE" in contradicted.err
