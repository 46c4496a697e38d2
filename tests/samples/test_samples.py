"""Every sample as a newcomer meets it: run as its header says, it prints what its header says.

Nothing that the samples print depends on the clock, the machine or chance, so nothing is masked.
"""

import ast
import os
import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

import planner_ext
from planner_ext.testing import ScriptedOpenAIServer, say
from support.processes import Lives
from support.values import each_of, stem

SAMPLES = Path(__file__).parents[2] / "samples"
OUTPUT = re.compile(
    r"^Output(?:, if you answer (?P<typed>\w+))?:\n\n(?P<printed>(?: {4}.*\n|\n)+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run a sample, and what its header says that it prints."""

    file: Path
    typed: str
    printed: str

    @property
    def step(self) -> str:
        """``step07`` of ``step07a_pause.py``."""
        return self.file.name[:6]

    def __str__(self) -> str:
        return f"{self.file.stem}-{self.typed}".rstrip("-")


def header(file: Path) -> str:
    """Read a sample's module docstring."""
    return ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""


def runs_of(file: Path) -> list[Run]:
    """Read in a sample's header how it can be run."""
    found = OUTPUT.finditer(header(file) + "\n")
    return [
        Run(file, match["typed"] or "", dedent(match["printed"]).strip())
        for match in found
    ]


PROGRAMS = sorted(
    file
    for file in SAMPLES.glob("step*.py")
    if '__name__ == "__main__"' in file.read_text("utf-8")
)
RUNS = [run for file in PROGRAMS for run in runs_of(file)]


def environment(**more: str) -> dict[str, str]:
    """Leave out of the environment what names an endpoint."""
    own = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OPENAI_")
    }
    return own | {"PYTHONPATH": str(Path(planner_ext.__file__).parent.parent), **more}


@pytest.mark.parametrize("step", sorted({run.step for run in RUNS}))
def test_a_sample_prints_what_its_header_says(
    step: str, lives: Lives, tmp_path: Path
) -> None:
    """A sample exits cleanly, complains of nothing, and prints exactly the output in its header.

    The files of a step run one after the other in one directory.
    """
    for run in (run for run in RUNS if run.step == step):
        done = lives.run(
            str(run.file), cwd=tmp_path, env=environment(), typed=run.typed + "\n"
        )
        seen = (done.returncode, done.stderr, done.stdout.strip())
        assert seen == (0, "", run.printed), str(run)


@each_of("file", PROGRAMS, ids=stem)
def test_a_header_says_how_to_run_the_sample(file: Path) -> None:
    """A header names the step, the command that runs the file, and what it prints."""
    text = header(file)
    assert text.startswith(f"Step {int(file.name[4:6])}")
    assert f"\n    python samples/{file.name}\n" in text
    assert runs_of(file)


def test_the_steps_are_numbered_without_a_gap() -> None:
    """Steps are numbered from 1 without gaps, but for those that are services."""
    services = {16, 19}
    numbers = {int(file.name[4:6]) for file in PROGRAMS} | services
    assert sorted(numbers) == list(range(1, max(numbers) + 1))


def test_the_readme_names_every_file_once() -> None:
    """The list of samples links every file of the folder, and no other; files of its folders may be beside them."""
    links = re.findall(r"\]\(([^)]+)\)", (SAMPLES / "README.md").read_text("utf-8"))
    there = [
        file.name
        for file in SAMPLES.iterdir()
        if file.suffix in (".py", ".yaml", ".json")
    ]
    assert sorted(link for link in links if "/" not in link) == sorted(there)


def test_a_real_endpoint_answers_where_the_environment_names_one(
    lives: Lives, tmp_path: Path
) -> None:
    """With Semantic Kernel's variables for OpenAI set, a sample asks that endpoint, and its own script says nothing."""
    with ScriptedOpenAIServer(
        [say("1. Ask nobody."), say("Both cost the same.")]
    ) as server:
        env = environment(
            OPENAI_API_KEY="any",
            OPENAI_BASE_URL=server.url,
            OPENAI_CHAT_MODEL_ID="real",
        )
        done = lives.run(str(SAMPLES / "step01_first_run.py"), cwd=tmp_path, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[:2] == [
        "1. Ask nobody.",
        "answered: Both cost the same.",
    ]
    assert [request.body["model"] for request in server.requests] == ["real", "real"]
