"""``planner-ext compare``: its options, its documents and its exit codes."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import planner_ext
from planner_ext.cli import compare as command
from planner_ext.cli.app import app
from planner_ext.compare import Comparison
from planner_ext.compare.page import TABLE_BEGINS, TABLE_ENDS
from planner_ext.compare.scenarios import SCRIPTS
from planner_ext.testing import ScriptedOpenAIServer
from support.command_line import COMMAND
from support.processes import Lives
from support.values import each_of

OWN = """
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function
from planner_ext.testing import ScriptedChatCompletion, call, say


class Lights:
    @kernel_function
    def switch(self) -> str:
        print("noise")
        return "on"


def make():
    kernel = Kernel()
    kernel.add_plugin(Lights(), "lights")
    kernel.add_service(ScriptedChatCompletion(lambda asked: call("lights-switch") if asked.tools else say("On.")))
    return kernel
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, and an environment without variables of OpenAI or of terminals."""
    for name in list(os.environ):
        if name.startswith("OPENAI_") or name in (
            "FORCE_COLOR",
            "TTY_COMPATIBLE",
            "NO_COLOR",
        ):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_lights", raising=False)
    (tmp_path / "own_lights.py").write_text(OWN)
    return tmp_path


def run(*arguments: str) -> Result:
    """Run the command."""
    return CliRunner().invoke(app, ("compare", *arguments))


def stub(monkeypatch: pytest.MonkeyPatch, comparison: Comparison) -> None:
    """Replace the measurement by a finished comparison."""

    async def measured(**_: Any) -> Comparison:
        return comparison

    monkeypatch.setattr(command, "run_comparison", measured)


def test_it_compares_and_exits_with_0() -> None:
    """The table stands on stdout; options as written that overshoot change nothing."""
    result = run(
        "--only", "never-ending", "--only", "option-2", "--only", "option-2-corrected"
    )
    assert result.exit_code == 0, result.stderr
    rows = [
        line.split()[:6]
        for line in result.stdout.splitlines()
        if line.startswith("option 2")
    ]
    assert rows == [
        ["option", "2,", "as", "written", "6", "+1"],
        ["option", "2,", "corrected", "5", "5", "4"],
    ]
    assert "option 3" not in result.stdout


def test_the_number_of_round_trips_is_the_callers() -> None:
    """Every run is allowed as many."""
    result = run("--only", "never-ending", "--max-iterations", "2", "--json")
    assert {
        run["trips"]
        for run in json.loads(result.stdout)["runs"]
        if run["option"] == "option-3-corrected"
    } == {2}


def test_a_corrected_option_that_goes_wrong_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, spoilt: Comparison
) -> None:
    """It is named, on stdout and in the document."""
    stub(monkeypatch, spoilt)
    result = run()
    assert result.exit_code == 1
    assert (
        "option 1, corrected, chain: 7 round trips where 5 were allowed."
        in result.stdout
    )
    document = json.loads(run("--json").stdout)
    assert document["holds"] is False
    assert len(document["failures"]) == 2


def test_json_is_one_document_and_nothing_else() -> None:
    """Also where the user's own code prints: noise goes to stderr."""
    result = run(
        "--json",
        "--kernel",
        "own_lights:make",
        "--goal",
        "Switch.",
        "--max-iterations",
        "3",
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert {run["option"]: run["trips"] for run in document["runs"]}["option-2"] == 4
    assert document["scripts"][0]["goal"] == "Switch."
    assert "noise" in result.stderr


def test_the_page_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, comparison: Comparison
) -> None:
    """The command writes the page and also prints the table."""
    stub(monkeypatch, comparison)
    result = run("--html", "page.html")
    assert result.exit_code == 0
    assert (here / "page.html").read_text("utf-8").startswith("<!doctype html>")
    assert "Written: page.html" in result.stderr
    assert "option 2, as written" in result.stdout


def test_a_document_gets_its_table(
    here: Path, monkeypatch: pytest.MonkeyPatch, comparison: Comparison
) -> None:
    """Between the markers, and nowhere else."""
    stub(monkeypatch, comparison)
    document = here / "notes.md"
    document.write_text(f"# Title\n\n{TABLE_BEGINS}\n{TABLE_ENDS}\n\nEnd.\n")
    assert run("--markdown", "notes.md").exit_code == 0
    text = document.read_text("utf-8")
    assert text.startswith(f"# Title\n\n{TABLE_BEGINS}\n\nMeasured with")
    assert "| option 3, as written | 15 | +10 | 5 | 10 | +6 |" in text
    assert text.endswith(f"{TABLE_ENDS}\n\nEnd.\n")


def test_a_real_endpoint_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the scripts' goals and functions; its key comes from the environment."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with ScriptedOpenAIServer(SCRIPTS["never-ending"].model) as server:
        only = (
            "--only",
            "never-ending",
            "--only",
            "option-3-corrected",
            "--only",
            "option-2",
        )
        result = run("--base-url", server.url, "--model", "m", "--json", *only)
        assert result.exit_code == 0, result.stderr
        assert [one["trips"] for one in json.loads(result.stdout)["runs"]] == [6, 5]
        assert len(server.requests) == 11


@each_of(
    ("arguments", "message"),
    [
        (
            ["--only", "option-9"],
            "--only option-9: there is neither such an option (option-1,",
        ),
        (["--kernel", "own_lights:make"], "--kernel needs --goal"),
        (["--goal", "Switch."], "--goal needs --kernel"),
        (["--kernel", "nowhere:make", "--goal", "Switch."], "no module 'nowhere'"),
        (
            ["--kernel", "own_lights:make", "--goal", "Switch.", "--only", "chain"],
            "takes the place of the scripts",
        ),
        (
            ["--option", "own_lights:Lights"],
            "must be an async function of a planner_ext.compare.Trial",
        ),
        (["--option", "own_lights"], "--option must be module:"),
        (
            ["--script", "own_lights:make"],
            "must be made with planner_ext.compare.scenario",
        ),
        (["--html", "nowhere/page.html"], "there is no directory nowhere"),
        (["--markdown", "missing.md"], "missing.md"),
        (["--markdown", "own_lights.py"], "table: planner-ext compare"),
        (["--base-url", "nonsense", "--model", "m"], "--base-url must look like"),
        (["--base-url", "http://127.0.0.1:1/v1"], "No model is named"),
        (["--base-url", "https://models.invalid/v1", "--model", "m"], "OPENAI_API_KEY"),
        (["--max-iterations", "0"], "--max-iterations"),
        (["--max-iterations", "many"], "--max-iterations"),
    ],
)
def test_what_cannot_be_used_exits_with_2(arguments: list[str], message: str) -> None:
    """The message names the option and the way out; nothing is measured."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert result.stdout == ""


LOOP = """
from semantic_kernel.contents import FunctionCallContent
from planner_ext.compare import Trial, scenario
from planner_ext.testing import say


async def plain_loop(trial: Trial) -> None:
    'Asks until nothing is called.'
    while True:
        reply = await trial.ask()
        trial.charged += 1
        trial.history.add_message(reply)
        calls = [item for item in reply.items if isinstance(item, FunctionCallContent)]
        if not calls or trial.charged > 30:
            trial.status, trial.answer = "answered", reply.content
            return
        for call in calls:
            await trial.kernel.invoke_function_call(call, trial.history)


@scenario("greeting", goal="Hello!", entitled="One round trip is enough.", source="")
def greeting(request):
    'The model greets.'
    return say("Hello!")
"""


def test_a_loop_of_ones_own_is_judged_beside_the_others(here: Path) -> None:
    """Twenty lines in a module are enough; nothing of it is believed, all is counted where it arrives."""
    (here / "own_loops.py").write_text(LOOP)
    only = ("--only", "never-ending", "--only", "option-2-corrected")
    result = run(
        "--option",
        "own_loops:plain_loop",
        "--script",
        "own_loops:greeting",
        *only,
        "--json",
    )
    assert result.exit_code == 0, result.stderr
    runs = {
        (one["option"], one["script"]): one for one in json.loads(result.stdout)["runs"]
    }
    assert (
        runs["plain-loop", "never-ending"]["trips"],
        runs["plain-loop", "never-ending"]["over_budget"],
    ) == (31, 26)
    assert (
        runs["option-2-corrected", "greeting"]["answer"]
        == runs["plain-loop", "greeting"]["answer"]
        == "Hello!"
    )


def test_figures_are_printed_on_request(
    monkeypatch: pytest.MonkeyPatch, comparison: Comparison
) -> None:
    """Without --details the matrix and the verdict stand alone."""
    stub(monkeypatch, comparison)
    short, whole = run().stdout, run("--details").stdout
    assert short.startswith("What goes wrong")
    assert "told:" not in short
    assert len(whole) > 5 * len(short)
    assert "The function does not start before a person agrees" in " ".join(
        whole.split()
    )


FOREVER = """
import asyncio, os, sys
from pathlib import Path
from planner_ext.compare import option


@option("forever", offers=("recovery",))
async def forever(trial):
    "Never ends, in this process and in another one."
    if trial.folder is not None:
        Path("child").write_text(str(os.getpid()))
    while trial.folder is not None or not Path("child").exists() or not Path("child").read_text():
        await asyncio.sleep(0.05)
    print("started", flush=True)
    await asyncio.sleep(3600)
"""


def test_ctrl_c_ends_the_comparison_and_its_processes(lives: Lives, here: Path) -> None:
    """Exit code 130 and one word, for an option in this process and for one in another."""
    (here / "loops.py").write_text(FOREVER)
    chosen = (
        "--only",
        "while-loop",
        "--only",
        "never-ending",
        "--only",
        "crash",
        "--option",
        "loops:forever",
    )
    env = {**os.environ, "PYTHONPATH": str(Path(planner_ext.__file__).parents[1])}
    with lives.program(*COMMAND, "compare", *chosen, cwd=here, env=env) as running:
        assert "started\n" in iter(running.stderr.readline, "")
        running.send_signal(signal.SIGINT)
        out = running.stdout.read()
        err = running.stderr.read()
        code = running.wait()
    assert (code, out, err) == (130, "", "Interrupted.\n")
    with pytest.raises(ProcessLookupError):
        os.kill(int((here / "child").read_text()), 0)
