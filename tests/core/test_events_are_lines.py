"""``str(event)``: one line for a log or a terminal; ``repr`` keeps everything."""

import dataclasses
import typing
from types import SimpleNamespace

import pytest

from planner_ext.core.facts import (
    LINE_WIDTH,
    CallFinished,
    EventLine,
    RequestFailed,
    StopRequested,
)
from planner_ext.core.values import Usage
from planner_ext.events import Fact, PlannerEvent, ResultReady
from support.values import each_of


def test_an_event_is_one_short_line() -> None:
    """Long texts are cut, line breaks are escaped, and times, digests and defaults are left to ``repr``."""
    fact = CallFinished(
        iteration=0,
        index=1,
        call_id="call_2",
        function="a-b",
        outcome="ok",
        result="one\ntwo" * 99,
        at=1.0,
    )
    line = str(fact)
    assert line.startswith(
        "CallFinished iteration=0 index=1 call_id='call_2' function='a-b' outcome='ok' result='one\\n"
    )
    assert len(line) == 120
    assert "at=1.0" not in line
    assert "at=1.0" in repr(fact)


def test_a_result_is_a_line_with_its_status_and_answer() -> None:
    """The last event of a stream names how the run ended, and not the whole result."""
    result = SimpleNamespace(status="answered", final_answer="42" * 99, facts=())
    line = str(ResultReady(result=result))
    assert line.startswith("ResultReady status='answered' final_answer='4242")
    assert len(line) == LINE_WIDTH


@each_of("kind", [*typing.get_args(Fact), *typing.get_args(PlannerEvent)], ids=str)
def test_every_event_of_a_stream_is_a_line(kind: type) -> None:
    """Each fact, each delta and the result share the base, and stay values."""
    plain = typing.get_origin(kind) or kind
    assert issubclass(plain, EventLine)
    assert dataclasses.is_dataclass(plain)


def test_a_line_has_what_was_said_and_nothing_else() -> None:
    """Times, defaults, and all values but text and numbers are omitted."""
    failed = RequestFailed(
        iteration=2, reason="lost", usage=Usage(prompt_tokens=1), at=5.0, seconds=6.0
    )
    assert str(failed) == "RequestFailed iteration=2 reason='lost'"


@pytest.mark.parametrize(("more", "whole"), [(0, True), (1, False)])
def test_a_line_of_the_greatest_width_is_whole(more: int, whole: bool) -> None:
    """One character more, and it ends in an ellipsis at that width."""
    bare = str(StopRequested(reason="", at=0.0))
    line = str(StopRequested(reason="r" * (LINE_WIDTH - len(bare) + more), at=0.0))
    assert len(line) == LINE_WIDTH
    assert line.endswith("'") == whole
    assert line.endswith("…") == (not whole)
