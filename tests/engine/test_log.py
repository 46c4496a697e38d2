"""The lines of a run's decisions, from its facts."""

import logging
from typing import Any

import pytest

from planner_ext.core.state import State
from planner_ext.engine.log import log_facts
from support.core import clarified, decided
from support.values import each_of


@each_of(
    ("fact", "line"),
    [
        (clarified(by="ann"), "question answered by ann"),
        (clarified(by="an\nn"), r"question answered by an\nn"),
        (clarified(None, denied="no", by="ann"), "question denied by ann"),
        (
            decided(0, verdict="answer", reason="supplied", by="ann"),
            "call f answered by ann",
        ),
        (decided(0, verdict="answer", reason="expired"), "call f expired"),
        (decided(0, verdict="answer", person=True, by="ann"), "call f denied by ann"),
        (decided(0, verdict="deny", by="ann"), "call f denied by ann"),
        (decided(0, verdict="answer"), None),
    ],
)
def test_a_decision_has_a_line_with_its_author(
    fact: Any, line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kind of decision has its word; an answer without one has no line."""
    caplog.clear()
    caplog.set_level(logging.DEBUG, "planner_ext.runs")
    log_facts(State(run_id="run"), [fact], kept=True)
    assert [record.getMessage() for record in caplog.records] == (
        [] if line is None else [f"run run {line}"]
    )
