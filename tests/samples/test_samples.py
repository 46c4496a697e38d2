"""Every sample as a newcomer meets it: run as its header says, it prints what its header says.

Nothing that the samples print depends on the clock, the machine or chance, so nothing is masked.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pytest

import planner_ext
from planner_ext.testing import ScriptedOpenAIServer, say

SAMPLES = Path(__file__).parents[2] / "samples"
OUTPUT = re.compile(r"^Output(?:, if you answer (?P<typed>\w+))?:\n\n(?P<printed>(?: {4}.*\n|\n)+)", re.MULTILINE)


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
    return [Run(file, match["typed"] or "", dedent(match["printed"]).strip()) for match in found]


PROGRAMS = sorted(file for file in SAMPLES.glob("step*.py") if '__name__ == "__main__"' in file.read_text("utf-8"))
RUNS = [run for file in PROGRAMS for run in runs_of(file)]


def execute(file: Path, *, typed: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run a sample in a process of its own; give its exit code, what it complained of, and what it printed."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
    own["PYTHONPATH"] = str(Path(planner_ext.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, str(file)],
        input=typed + "\n",
        cwd=cwd,
        env={**own, **(env or {})},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr, done.stdout.strip()


Outcomes = dict[str, Future[dict[Run, tuple[int, str, str]]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Run every sample once, several steps at a time; the runs of one step one after the other, in one directory."""

    def run_step(step: str) -> dict[Run, tuple[int, str, str]]:
        cwd = tmp_path_factory.mktemp(step)
        return {run: execute(run.file, typed=run.typed, cwd=cwd) for run in RUNS if run.step == step}

    pool = ThreadPoolExecutor(os.cpu_count())
    yield {step: pool.submit(run_step, step) for step in sorted({run.step for run in RUNS})}
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_a_sample_prints_what_its_header_says(run: Run, outcomes: Outcomes) -> None:
    """A sample exits cleanly, complains of nothing, and prints exactly the output in its header."""
    assert outcomes[run.step].result()[run] == (0, "", run.printed)


@pytest.mark.parametrize("file", PROGRAMS, ids=lambda file: file.stem)
def test_a_header_says_how_to_run_the_sample(file: Path) -> None:
    """A header names the step, the command that runs the file, and what it prints."""
    text = header(file)
    assert text.startswith(f"Step {int(file.name[4:6])}")
    assert f"\n    python samples/{file.name}\n" in text
    assert runs_of(file)


def test_the_steps_are_numbered_without_a_gap() -> None:
    """Steps count from 1; a number is left out by nobody."""
    assert sorted({int(file.name[4:6]) for file in PROGRAMS}) == list(range(1, 16))


def test_the_readme_names_every_file_once() -> None:
    """The list of samples links every file of the folder, and no other."""
    links = re.findall(r"\]\(([^)]+)\)", (SAMPLES / "README.md").read_text("utf-8"))
    there = [file.name for file in SAMPLES.iterdir() if file.suffix in (".py", ".yaml")]
    assert sorted(links) == sorted(there)


def test_a_real_endpoint_answers_where_the_environment_names_one(tmp_path: Path) -> None:
    """With Semantic Kernel's variables for OpenAI set, a sample asks that endpoint, and its own script says nothing."""
    with ScriptedOpenAIServer([say("1. Ask nobody."), say("Both cost the same.")]) as server:
        env = {"OPENAI_API_KEY": "any", "OPENAI_BASE_URL": server.url, "OPENAI_CHAT_MODEL_ID": "real"}
        code, complaint, printed = execute(SAMPLES / "step01_first_run.py", typed="", cwd=tmp_path, env=env)
    assert (code, complaint) == (0, "")
    assert printed.splitlines()[:2] == ["1. Ask nobody.", "answered: Both cost the same."]
    assert [request.body["model"] for request in server.requests] == ["real", "real"]
