"""The guides: every block of a guide runs in the order in which it stands, in one folder, and prints what is below it.

A ``python`` block whose first line names a file is written to that file and run; so is the new side of a ``diff``
block. Another block that begins with a file's name is that file. An ``sh`` block is typed line by line. What these
print is the ``text`` block that follows, if one does; "..." in it stands for anything. A ``console`` block does not
run, since it needs a network, a second terminal or a person: its options are compared with the command's help. Hunks, a
``diff`` block that begins with "@@", are compared with their files in ``test_apps.py``, as is what stands below them.
"""

import os
import re
import shlex
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

import pytest
from typer.testing import CliRunner

import planner_ext
from planner_ext.cli.app import app
from support.command_line import COMMAND
from support.processes import Lives
from support.values import each_of, stem

ROOT = Path(__file__).parents[2]
OLD_SQLITE = sqlite3.sqlite_version_info < (3, 42)
GUIDES = sorted((ROOT / "samples" / "guides").glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"[#+ ]*?# ([\w.]+)\n")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a guide, and what it is said to print."""

    kind: str
    text: str
    printed: str | None

    @property
    def file(self) -> str:
        """The name in its first line, or ""."""
        named = NAMED.match(self.text)
        return named[1] if named else ""


def blocks_of(guide: Path) -> list[Block]:
    """Read the blocks of a guide."""
    found = [(match[1], match[2]) for match in BLOCK.finditer(guide.read_text("utf-8"))]
    below = [text if kind == "text" else None for kind, text in found[1:]]
    found = [
        Block(*one, printed)
        for one, printed in zip(found, [*below, None], strict=True)
        if one[0] != "text"
    ]
    return [block for block in found if not block.text.startswith("@@")]


def new_side(diff: str) -> str:
    """Apply a diff that shows a whole program."""
    return "".join(
        line[1:] or "\n"
        for line in diff.splitlines(keepends=True)
        if not line.startswith("-")
    )


def environment(folder: Path) -> dict[str, str]:
    """Leave out of the environment what names an endpoint or a store."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OPENAI_", "PLANNER_EXT_"))
    }
    places = (Path(planner_ext.__file__).parent.parent, folder)
    return {
        **own,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "COLUMNS": "120",
        # As the entry point does where the package is installed.
        "PYTEST_PLUGINS": "planner_ext.pytest_plugin",
    }


def typed(lives: Lives, folder: Path, line: str) -> str:
    """Run a line of a shell block, which fails if it begins with "!"; return what it printed."""
    words = shlex.split(line.removeprefix("! "), comments=True)
    env = environment(folder)
    modules = {
        "planner-ext": COMMAND,
        "pytest": ("-m", "pytest", "-p", "no:cacheprovider"),
    }
    if words[0] in modules:
        done = lives.run(*modules[words[0]], *words[1:], cwd=folder, env=env)
    else:
        command = [lives.python if words[0] == "python" else words[0], *words[1:]]
        done = subprocess.run(
            command,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == line.startswith("! "), (
        f"{line}\n{done.stdout}{done.stderr}"
    )
    return done.stdout


def help_of(command: list[str]) -> str:
    """Return the help of a command of ``planner-ext``."""
    shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "120"})
    assert shown.exit_code == 0, command
    return shown.output


def assert_printed(printed: str, expected: str) -> None:
    """Compare what was printed with what the guide shows."""
    pattern = ".*".join(re.escape(part) for part in expected.strip().split("..."))
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), (
        f"printed:\n{printed}\nshown:\n{expected}"
    )


@pytest.mark.parametrize("guide", GUIDES, ids=stem)
def test_every_block_of_a_guide_runs(
    guide: Path,
    lives: Lives,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From top to bottom, in one folder: programs and commands end well, and print what the guide shows."""
    if guide.stem == "engines" and OLD_SQLITE and sys.version_info >= (3, 12):
        pytest.skip("DBOS on Python 3.12 and later needs SQLite 3.42 in a file")
    copy(guide.parent / "shop.py", tmp_path)
    if "TEMPORAL_ADDRESS" in guide.read_text("utf-8"):
        monkeypatch.setenv(
            "TEMPORAL_ADDRESS", request.getfixturevalue("temporal").address
        )
    for block in blocks_of(guide):
        printed = ""
        if block.file:
            text = new_side(block.text) if block.kind == "diff" else block.text
            (tmp_path / block.file).write_text(text, "utf-8")
        if block.kind in ("python", "diff"):
            file = tmp_path / block.file
            done = lives.run(str(file), cwd=tmp_path, env=environment(tmp_path))
            assert (done.returncode, done.stderr) == (0, ""), block.file
            printed = done.stdout
        if block.kind == "sh":
            printed = "".join(
                typed(lives, tmp_path, line) for line in block.text.splitlines()
            )
        if block.printed is not None:
            assert_printed(printed, block.printed)


@each_of("guide", GUIDES, ids=stem)
def test_a_guide_is_short_and_its_blocks_are_known(guide: Path) -> None:
    """At most 100 lines besides hunks; every program has a name, and every block is of a kind that is checked."""
    text = re.sub(
        r"^```diff\n@@.*?^```$",
        "",
        guide.read_text("utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    assert len(text.splitlines()) <= 100
    blocks = blocks_of(guide)
    assert {block.kind for block in blocks} <= {
        "python",
        "diff",
        "sh",
        "console",
        "yaml",
        "csharp",
    }
    assert [
        block.text
        for block in blocks
        if block.kind in ("python", "diff", "yaml") and not block.file
    ] == []


@each_of("guide", GUIDES, ids=stem)
def test_commands_that_do_not_run_have_these_options(guide: Path) -> None:
    """Each option of a ``console`` block is in the help of its command."""
    lines = [
        line
        for block in blocks_of(guide)
        if block.kind == "console"
        for line in block.text.splitlines()
    ]
    for line in (line for line in lines if line.startswith("planner-ext ")):
        words = shlex.split(line.removesuffix("&"), comments=True)
        command = words[1 : 3 if words[1] in ("runs", "approvals") else 2]
        options = [word for word in words if word.startswith("--")]
        assert [option for option in options if option not in help_of(command)] == []


def test_the_list_of_samples_names_every_guide() -> None:
    """The README of the samples links each of them."""
    listed = (ROOT / "samples" / "README.md").read_text("utf-8")
    assert [
        guide.name for guide in GUIDES if f"(guides/{guide.name})" not in listed
    ] == []
