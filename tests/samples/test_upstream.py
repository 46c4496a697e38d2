"""The notes for other projects: each program still fails as its note says, on the versions that are installed."""

import os
import re
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest

from support.postgres import PostgresServer, find_programs
from support.processes import Lives
from support.values import stem

NOTES = sorted((Path(__file__).parents[2] / "samples" / "upstream").glob("*.md"))
PROGRAM = re.compile(
    r"^```python\n# (\w+)\.py\n(.*?)^```\n```text\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
PROGRAMS = [
    pytest.param(text, said.strip(), id=f"{stem(note)}-{name}")
    for note in NOTES
    for name, text, said in PROGRAM.findall(note.read_text("utf-8"))
]


def test_there_are_programs() -> None:
    """Each note has at least one."""
    assert all(PROGRAM.search(note.read_text("utf-8")) for note in NOTES)


DATABASE = "DBOS_SYSTEM_DATABASE_URL"
"""The variable in which a program finds its database."""
NAMED = {"semantic-kernel": (1, 45), "openai": (3, 57), "dbos": (3, 4)}
OLDER = [
    name
    for name, named in NAMED.items()
    if tuple(map(int, version(name).split(".")[:2])) < named
]


@pytest.mark.skipif(bool(OLDER), reason=f"older than the notes: {', '.join(OLDER)}")
@pytest.mark.parametrize(("program", "said"), PROGRAMS)
def test_a_note_is_still_true(
    program: str, said: str, lives: Lives, tmp_path: Path
) -> None:
    """The program fails by its assertion, with the message in the note; once it does not, the note has served."""
    needs_server = DATABASE in program
    if needs_server and find_programs() is None:
        pytest.skip("no PostgreSQL here")
    # A server of its own: the program makes it read-only.
    with PostgresServer() if needs_server else nullcontext() as server:
        given = {} if server is None else {DATABASE: server.url()}
        done = lives.run("-c", program, cwd=tmp_path, env=os.environ | given)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1] == f"AssertionError: {said}"
