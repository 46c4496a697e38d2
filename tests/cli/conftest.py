"""The command as a user starts it: in a separate process, or, where that proves no more, ``main`` in this one."""

import logging
import os
import sys
from pathlib import Path

import pytest

from planner_ext.cli.__main__ import main
from support.command_line import COMMAND, SHOP, Command, Outcome
from support.processes import Lives


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a user's module ``shop``, and an environment without a word about OpenAI or terminals."""
    (tmp_path / "shop.py").write_text(SHOP)
    for name in list(os.environ):
        if name.startswith("OPENAI_") or name in (
            "FORCE_COLOR",
            "TTY_COMPATIBLE",
            "NO_COLOR",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def process(lives: Lives, here: Path) -> Command:
    """Run the command in a separate process."""

    def run(*arguments: str) -> Outcome:
        done = lives.run(*COMMAND, *arguments, cwd=here)
        return Outcome(code=done.returncode, out=done.stdout, err=done.stderr)

    return run


@pytest.fixture
def command(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run the command in this process: the same ``main``, without two seconds of imports."""
    monkeypatch.setattr(logging, "lastResort", logging.lastResort)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str) -> Outcome:
        monkeypatch.delitem(sys.modules, "shop", raising=False)
        monkeypatch.setattr(sys, "argv", ["planner-ext", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        monkeypatch.delitem(sys.modules, "shop", raising=False)
        captured = capsys.readouterr()
        code = ended.value.code
        return Outcome(
            code=code if isinstance(code, int) else 0,
            out=captured.out,
            err=captured.err,
        )

    return run


@pytest.fixture(autouse=True)
def _no_editor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The editor of who runs the tests is not the person's."""
    for name in ("VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Answers of a person at a terminal, in order; after the last one, Ctrl-D."""
    answers: list[str] = []

    def answer() -> str:
        if not answers:
            raise EOFError
        return answers.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("planner_ext.cli.run.is_terminal", lambda: True)
    return answers
