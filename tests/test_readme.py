"""The README: each program in it runs as it stands, in a process of its own, against a scripted endpoint."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from planner_ext.testing import ScriptedOpenAIServer, ScriptedReply, call, say
from support.processes import Lives, run_program

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROGRAMS = {match[1]: match[0] for match in re.finditer(r"(?<=```python\n)# (\w+\.py)\n.*?(?=```)", README, re.DOTALL)}
COMMANDS = re.findall(r"^planner-ext (?:approvals|runs).*--store.*$", README, re.MULTILINE)
WORKERS = re.findall(r"^planner-ext worker.*--store.*$", README, re.MULTILINE)
WARMTH = call("weather-temperature", {"city": "Oslo"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the README's programs, each under the name in its first line."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def environment(folder: Path, server: ScriptedOpenAIServer | None = None) -> dict[str, str]:
    """Make the environment of a program: with an endpoint, or with none."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "PLANNER_EXT_"))}
    endpoint = {"OPENAI_API_KEY": "x", "OPENAI_BASE_URL": server.url} if server is not None else {}
    return {**own, **endpoint, "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder)])}


def printed_by(lives: Lives, program: Path, server: ScriptedOpenAIServer) -> str:
    """Run a program that complains of nothing; return what it printed."""
    env = environment(program.parent, server)
    code, complaint, printed = run_program(lives, program, typed="", cwd=program.parent, env=env)
    assert (code, complaint) == (0, "")
    return printed + "\n"


def run(folder: Path, *command: str) -> str:
    """Run a command in a folder; return what it printed, errors included."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_programs_are_those_that_are_tested_here() -> None:
    """Every Python block of the README has a name, and a test below."""
    assert set(PROGRAMS) == {"weather.py", "wrap.py", "approve.py", "keep.py", "submit.py", "test_weather.py"}
    assert README.count("```python") == len(PROGRAMS)


@pytest.mark.parametrize(
    ("name", "script", "printed"),
    [
        ("weather.py", [say("1. ask"), WARMTH, say("14.5 degrees")], "answered 14.5 degrees\n3 requests, 1 calls, "),
        ("wrap.py", [WARMTH, say("It has 4.5.")], "It has 4.5. 2 answered\n"),
        (
            "approve.py",
            [say("1. ask"), WARMTH, say("It has 4.5.")],
            "weather-temperature {'city': 'Oslo'}\nanswered It has 4.5.\n",
        ),
        ("test_weather.py", [], "It has 4.5 degrees.\n"),
    ],
)
def test_a_program_prints_what_it_is_to_show(
    lives: Lives, folder: Path, name: str, script: list[ScriptedReply], printed: str
) -> None:
    """Each program runs as it stands, with the endpoint in the environment as the README says."""
    with ScriptedOpenAIServer(script) as server:
        assert printed_by(lives, folder / name, server).startswith(printed)


def test_a_kept_run_is_approved_and_worked_off_by_the_commands(lives: Lives, folder: Path) -> None:
    """The README's kept run pauses before the payment; its commands list it, approve it and show it."""
    with ScriptedOpenAIServer([say("1. pay"), call("bank-pay", {"amount": 20.0}), say("Paid.")]) as server:
        assert printed_by(lives, folder / "keep.py", server) == "paused\n"
        listed, approved, shown = (run(folder, "-m", "planner_ext", *line.split()[1:]) for line in COMMANDS)
    assert "bill-7/0/call_1" in listed
    assert "approve" in approved
    assert "bank-pay" in shown


def test_a_submitted_run_is_driven_by_a_worker(lives: Lives, folder: Path) -> None:
    """The README's worker takes the run that its program submits, which waits for the pause before the payment."""
    (worker,) = WORKERS
    with ScriptedOpenAIServer([say("1. pay"), call("bank-pay", {"amount": 30.0})]) as server:
        words = [sys.executable, "-m", "planner_ext", *worker.split()[1:]]
        env = environment(folder, server)
        with subprocess.Popen(words, cwd=folder, env=env, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            try:
                assert "runs.db" in process.stderr.readline()
                assert printed_by(lives, folder / "submit.py", server) == "paused ['bill-8/0/call_1']\n"
            finally:
                process.terminate()
            process.stderr.read()


def test_links_lead_somewhere() -> None:
    """Every relative link of the README names a file of the repository."""
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("http")]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_decision_has_its_own_number() -> None:
    """ADR numbers are unique, and the README links every ADR."""
    names = sorted(path.name for path in (ROOT / "adr").glob("*.md"))
    assert len({name[:4] for name in names}) == len(names)
    assert [name for name in names if f"adr/{name}" not in README] == []


def test_the_threat_model_names_tests_that_exist() -> None:
    """Each row of its table names at least one test file, and every file is there."""
    rows = re.findall(r"^\| \*\*.*$", (ROOT / "adr" / "0017-threat-model.md").read_text("utf-8"), re.MULTILINE)
    shown = [re.findall(r"`([\w/]+\.py)`", row.rpartition("|")[0].rpartition("|")[2]) for row in rows]
    assert all(shown)
    assert [file for files in shown for file in files if not (ROOT / "tests" / file).is_file()] == []
