"""Options that name a file: one that cannot be used is named, with exit code 2, and no traceback."""

from pathlib import Path

import pytest

from support.command_line import Command

NAMES = ("x" * 300, "folder", "missing/x", "shop.py/x")

LINES = (
    "run go --kernel shop:kernel --policy {}",
    "run go --kernel shop:kernel --store {}",
    "replay {}",
    "runs list --store {}",
    "runs import {} --store s.db",
    "runs backup {} --store s.db",
    "approvals list --store {}",
    "workers --store {}",
    "budgets list --store {}",
    "worker --app shop:kernel --store {}",
    "serve --store {}",
    "compare --markdown {}",
)


@pytest.mark.parametrize(
    "name", NAMES, ids=["too long", "folder", "missing", "below a file"]
)
@pytest.mark.parametrize("line", LINES)
def test_a_file_that_cannot_be_used_is_named(
    command: Command, here: Path, line: str, name: str
) -> None:
    """For each defect of its name or of what is there."""
    (here / "folder").mkdir()
    outcome = command(*line.format(name).split())
    assert (outcome.code, "Traceback" in outcome.err) == (2, False)
    assert outcome.err
