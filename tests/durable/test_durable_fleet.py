"""A simulated fleet: workers, store, endpoint, people and clocks under one seed; see `support.fleet`."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SECONDS = os.environ.get("PLANNER_EXT_FLEET_SECONDS", "4")
"""How long worlds are played, from the first seed on; each one takes a second."""
FIRST = os.environ.get("PLANNER_EXT_FLEET_FIRST", "0")


def played(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Play worlds in a process whose sets of texts have one order."""
    return subprocess.run(
        [sys.executable, "-m", "support.fleet", *arguments],
        cwd=TESTS,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_fleet_keeps_its_promises_whatever_fails_when() -> None:
    """Once only, recorded, asked and charged before; nothing in doubt that is known, nothing stranded.

    Where one is broken, the output names the seed: ``python -m support.fleet --seed N`` plays it again.
    """
    done = played("--first", FIRST, "--seconds", SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"worlds": ' in done.stdout


def test_a_seed_is_played_again() -> None:
    """The same seed gives the same world, step by step, in another process."""
    first = played("--seed", "7")
    again = played("--seed", "7")
    assert first.returncode == 0, first.stdout[-1000:] + first.stderr
    assert first.stdout == again.stdout


def test_a_broken_promise_is_found() -> None:
    """Functions that claim to be repeatable, and are not, take effect twice in the first worlds."""
    done = played("--mutant", "--seconds", SECONDS)
    assert done.returncode == 1
    assert re.match(r"seed \d+: once: ", done.stdout)
