"""How the command is found and asked for help: ``-h`` at every level, completion, ``python -m planner_ext``."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from planner_ext.cli.app import app
from support.command_line import Command
from support.values import each_of

GROUPS = [(), ("runs",), ("approvals",), ("store",)]


def levels() -> list[tuple[str, ...]]:
    """List every command, and every group of commands, by its words."""
    found: list[tuple[str, ...]] = []

    def walk(command: object, words: tuple[str, ...]) -> None:
        found.append(words)
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, (*words, name))

    walk(get_command(app), ())
    return found


@pytest.mark.parametrize("words", levels(), ids=" ".join)
def test_help_is_given_at_every_level(command: Command, words: tuple[str, ...]) -> None:
    """``-h`` is ``--help``."""
    short, long = command(*words, "-h"), command(*words, "--help")
    assert (short.code, short.out) == (0, long.out)
    assert short.out.lstrip().startswith(" ".join(("Usage: planner-ext", *words)))


@pytest.mark.parametrize(
    "words", [words for words in levels() if words not in GROUPS], ids=" ".join
)
def test_the_help_of_a_command_has_examples_and_exit_codes(
    command: Command, words: tuple[str, ...]
) -> None:
    """Each example and each exit code has a separate line; an example begins with the command."""
    shown = command(*words, "--help").out
    assert f"\n  Examples:\n    planner-ext {' '.join(words)}" in shown
    assert "\n  Exit codes:\n    0    " in shown
    assert max(map(len, shown.splitlines())) <= 120


def shell(here: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash, in which ``planner-ext`` is this interpreter's module."""
    program = (
        f'planner-ext() {{ "{sys.executable}" -m planner_ext "$@"; }}; {line}; exit $?'
    )
    environment = os.environ | {"HOME": str(here), "SHELL": "/bin/bash"}
    return subprocess.run(
        ["bash", "-c", program],
        cwd=here,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_package_runs_as_a_module(here: Path) -> None:
    """``python -m planner_ext`` is the command."""
    done = shell(here, "planner-ext --version")
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (
        0,
        "planner-ext",
        "",
    )


def test_completion_is_shown_and_installed(here: Path) -> None:
    """The shell's own script, which the command answers with its words."""
    done = shell(
        here, "planner-ext --show-completion && planner-ext --install-completion"
    )
    assert done.returncode == 0, done.stderr
    assert "complete -o default -F _planner_ext_completion planner-ext" in done.stdout
    assert (
        "_PLANNER_EXT_COMPLETE=complete_bash"
        in (here / ".bash_completions" / "planner-ext.sh").read_text()
    )
    words = shell(
        here,
        "export COMP_WORDS='planner-ext ru' COMP_CWORD=1 _PLANNER_EXT_COMPLETE=complete_bash; planner-ext",
    )
    assert words.stdout.split() == ["run", "runs"]


@pytest.mark.parametrize("words", GROUPS, ids=" ".join)
def test_a_group_says_whole_what_each_command_does(
    command: Command, words: tuple[str, ...]
) -> None:
    """No sentence of the list of commands is cut off."""
    assert "..." not in command(*words, "--help").out.partition("Commands:")[2]


@each_of("words", [words for words in levels() if words], ids=" ".join)
def test_every_option_is_explained(words: tuple[str, ...]) -> None:
    """No option has only its name."""
    shown: Any = get_command(app)
    for word in words:
        shown = shown.commands[word]
    assert [param.name for param in shown.params if not param.help] == []
