"""One comparison of everything, made once, and one that went wrong."""

import asyncio
import fcntl
import pickle
import sys
from dataclasses import replace

import pytest

from planner_ext.compare import Comparison, Run, Violation, run_comparison
from support.processes import Lives


@pytest.fixture(autouse=True)
def python(lives: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of a comparison from one that has imported everything."""
    monkeypatch.setattr(sys, "executable", lives.python)


@pytest.fixture(scope="session")
def comparison(
    tmp_path_factory: pytest.TempPathFactory, worker_id: str, lives: Lives
) -> Comparison:
    """Every option in every script, with five round trips allowed; one process of the tests makes it for all."""
    folder = (
        tmp_path_factory.getbasetemp()
    )  # of this process; above it, of the whole run
    kept = (folder if worker_id == "master" else folder.parent) / "comparison.pickle"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sys, "executable", lives.python)
                made = asyncio.run(run_comparison())
            kept.write_bytes(pickle.dumps(made))
    return pickle.loads(kept.read_bytes())


@pytest.fixture
def spoilt(comparison: Comparison) -> Comparison:
    """The same, but a corrected option exceeded its budget, another broke a history, and texts contain markup."""

    def spoil(run: Run) -> Run:
        if (run.script, run.option) == ("chain", "option-1-corrected"):
            return replace(run, trips=run.budget + 2)
        if (run.script, run.option) == ("chain", "option-3-corrected"):
            return replace(
                run,
                violation=Violation(
                    place=1, text="messages[1]: <script>alert(1)</script>\x1b[2J"
                ),
            )
        if (run.script, run.option) == ("chain", "option-1"):
            return replace(
                run,
                error="<b>",
                messages=(replace(run.messages[0], text="</p><script src='x'>&"),),
            )
        return run

    return replace(comparison, runs=tuple(spoil(run) for run in comparison.runs))
