"""Each parser of what others wrote, on the texts that once broke it and on changed ones, for a second or two.

``python tests/benchmarks/fuzz.py`` looks longer.
"""

import inspect
import json
import signal
import sys
from pathlib import Path

import pytest

from fuzzing.mutation import executed, fuzz
from fuzzing.subjects import SUBJECTS
from support.processes import Lives

FOUND = json.loads(Path(__file__).with_name("found.json").read_text())
"""By parser: texts that broke a promise."""


@pytest.mark.parametrize("parser", SUBJECTS)
async def test_the_promises_of_a_parser_hold(parser: str, tmp_path: Path) -> None:
    """Only the package's errors; no hang; what is read is written; nothing is decided that was not shown."""
    async with SUBJECTS[parser](tmp_path) as subject:
        for text in FOUND.get(parser, ()):
            await executed(subject.check, text)
        report = await fuzz(subject, seed=7, executions=len(subject.seeds) + 60)
    assert not report.findings, "\n".join(
        trace for _, trace in report.findings.values()
    )
    assert report.outcomes["read"], "every text was refused"


async def test_a_fuzzer_writes_everything_it_reads(tmp_path: Path) -> None:
    """A text that is nested as deeply as can be read is not reported as a defect of the inbox."""
    here = len(inspect.stack(0))
    async with SUBJECTS["inbox"](tmp_path) as subject:
        for depth in range(
            sys.getrecursionlimit() - here - 25, sys.getrecursionlimit() - here
        ):
            await executed(
                subject.check,
                f'{{"method": "GET", "target": {"[" * depth}{"]" * depth}}}',
            )


def test_a_fuzzer_that_is_ended_prints_its_figures(
    lives: Lives, tmp_path: Path
) -> None:
    """SIGTERM, as a limit of time sends it, ends the fuzzing after the text at hand."""
    script = Path(__file__).parents[1] / "benchmarks" / "fuzz.py"
    with lives.program(str(script), "all", cwd=tmp_path) as running:
        assert running.stderr.readline() == "Fuzzes checkpoint.\n"
        running.send_signal(signal.SIGTERM)
        out = running.stdout.read()
        assert running.wait() == 0
    assert out.startswith("checkpoint: 0.")
    assert out.count("\n") == 1
