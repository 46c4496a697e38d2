"""Each parser of what others wrote, on the texts that once broke it and on changed ones, for a second or two.

``python tests/benchmarks/fuzz.py`` looks longer.
"""

import json
from pathlib import Path

import pytest

from fuzzing.mutation import executed, fuzz
from fuzzing.subjects import SUBJECTS

FOUND = json.loads(Path(__file__).with_name("found.json").read_text())
"""By parser: texts that broke a promise."""


@pytest.mark.parametrize("parser", SUBJECTS)
async def test_the_promises_of_a_parser_hold(parser: str, tmp_path: Path) -> None:
    """Only the package's errors; no hang; what is read is written; nothing is decided that was not shown."""
    async with SUBJECTS[parser](tmp_path) as subject:
        for text in FOUND.get(parser, ()):
            await executed(subject.check, text)
        report = await fuzz(subject, seed=7, executions=len(subject.seeds) + 60)
    assert not report.findings, "\n".join(trace for _, trace in report.findings.values())
    assert report.outcomes["read"], "every text was refused"
