"""Loops of other frameworks: programs that read a trial and report, and are judged from outside."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from planner_ext.compare import Option, OptionInfo, process, run_comparison
from planner_ext.compare.peers import adapters, metadata_of, peer_options
from planner_ext.compare.process import Given, measure_costs, run_program
from planner_ext.compare.strategies import OPTIONS
from planner_ext.errors import PlannerInvalidConfigurationError

PEERS = Path(__file__).parents[2] / "samples" / "peers"


def program(file: Path, *, offers: tuple[str, ...] = ()) -> Option:
    """An adapter that runs in the environment of the tests."""
    info = OptionInfo(
        key="peer", name="peer", short="peer", about="", corrected=False, offers=offers
    )
    return Option(info, None, (sys.executable, str(file)))


def test_every_adapter_pins_what_it_measures() -> None:
    """Its metadata name the framework, whose package is pinned, and what it offers."""
    assert set(adapters()) == {
        "agent-framework",
        "bare-loop",
        "langchain",
        "openai-agents",
        "pydantic-ai",
    }
    for file in adapters().values():
        metadata = metadata_of(file)
        package = metadata["tool"]["planner-ext"]["package"]
        assert any(
            needed.startswith((f"{package}==", f"{package}[")) and "==" in needed
            for needed in metadata["dependencies"]
        )


def test_a_loop_in_another_process_is_judged_like_the_others() -> None:
    """The bare loop over real HTTP: counted by endpoint and desk, its history continued, its limits as declared."""
    scripts = [
        "never-ending",
        "asks-a-model-inside",
        "cut-short",
        "limit-of-calls",
        "veto",
        "cancelled",
        "nested-run",
    ]
    bare = program(PEERS / "bare_loop.py", offers=("veto",))
    compared = asyncio.run(
        run_comparison(options=["option-2-corrected", bare], scripts=scripts)
    )
    runs = {run.script: run for run in compared.of_option("peer")}
    assert (
        runs["never-ending"].trips,
        runs["never-ending"].tools_run,
        runs["never-ending"].history_valid,
    ) == (5, 4, True)
    assert runs["asks-a-model-inside"].over_budget == 4
    assert runs["cut-short"].breaches == ("a cut reply is given as the answer",)
    assert (runs["veto"].tools_run, runs["veto"].answer) == (1, "The order is A-3007.")
    assert "cannot be continued" in runs["cancelled"].first_violation
    assert not runs["limit-of-calls"].offered
    assert not runs["nested-run"].offered


def test_an_answer_that_the_model_never_gave_does_not_count(tmp_path: Path) -> None:
    """A text that a loop gives in the place of an answer does not count as one."""
    file = tmp_path / "talks.py"
    file.write_text(
        'print(\'{"status": "answered", "answer": "The limit was reached."}\')\n'
    )
    compared = asyncio.run(
        run_comparison(options=["option-2", program(file)], scripts=["direct-answer"])
    )
    assert compared.of_option("peer")[0].answer == ""


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("raise SystemExit('no such model')", "exit code 1: no such model"),
        ("print('nonsense')", "exit code 0"),
    ],
)
def test_a_program_that_fails_is_a_finding(
    tmp_path: Path, code: str, problem: str
) -> None:
    """It is named with its exit code and its last words; the others are still compared."""
    (tmp_path / "broken.py").write_text(code)
    compared = asyncio.run(
        run_comparison(
            options=["option-2-corrected", program(tmp_path / "broken.py")],
            scripts=["direct-answer"],
        )
    )
    ours, peer = compared.runs
    assert (ours.status, peer.status) == ("answered", "failed")
    assert problem in peer.error


WAITS = """
import sys, time
pipe = open(sys.argv[1], "w")
print("here", file=pipe, flush=True)
time.sleep(60)
"""


async def test_an_interrupted_comparison_leaves_no_process(tmp_path: Path) -> None:
    """A program that still runs is killed: what it held open is closed."""
    os.mkfifo(tmp_path / "pipe")
    command = (sys.executable, "-c", WAITS, str(tmp_path / "pipe"))
    waiting = Option(OPTIONS["option-1"].info, None, command)
    task = asyncio.ensure_future(
        run_program(waiting, Given(goal="", model_url="", functions=()))
    )
    with await asyncio.to_thread(open, tmp_path / "pipe") as pipe:
        assert await asyncio.to_thread(pipe.readline) == "here\n"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(pipe.read) == ""


def test_an_invalid_adapter_is_refused(tmp_path: Path) -> None:
    """The message names those that there are, or what the file lacks."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="agent-framework, bare-loop, langchain"
    ):
        peer_options(["crew"], tell=print)
    (tmp_path / "plain.py").write_text("print()\n")
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="expected script metadata with dependencies",
    ):
        peer_options([str(tmp_path / "plain.py")], tell=print)


def test_the_cost_of_a_round_trip_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """At four lengths, in a process for each loop, of the same work; an adapter is measured as an option is."""
    lengths = (1, 2, 4, 8)
    monkeypatch.setattr(process, "ROUND_TRIPS", lengths)
    ours, bare = asyncio.run(
        measure_costs([OPTIONS["option-2-corrected"], program(PEERS / "bare_loop.py")])
    )
    for cost in (ours, bare):
        assert cost.error == ""
        assert cost.round_trips == lengths
        assert len(cost.milliseconds) == 4
        assert all(figure > 0 for figure in cost.milliseconds)
