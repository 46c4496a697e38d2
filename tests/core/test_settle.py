"""`stopping_facts`: a run is ended from any moment, with every call answered."""

import pytest

from planner_ext.core.errors import IllegalTransitionError
from planner_ext.core.facts import CallFinished, Ended, Fact, StopRequested
from planner_ext.core.fold import fold
from planner_ext.core.state import Phase
from planner_ext.core.values import CallResult
from planner_ext.engine.journal import stopping_facts
from support.core import (
    PAUSED,
    SAMPLES,
    Play,
    added,
    began,
    calls,
    decided,
    finished,
    replied,
    run_started,
    says,
)
from support.core import violations as violations_of
from support.values import each_of

TWO = (run_started(), replied(calls("f", "g")))
RUNNING = (*TWO, decided(0), decided(1, "g"), began(0), began(1, "g"))

MOMENTS: dict[str, tuple[Fact, ...]] = {
    **{
        str(phase): SAMPLES[phase]
        for phase in Phase
        if phase not in (Phase.NEW, Phase.ENDED)
    },
    "partly decided": (*TWO, decided(0, verdict="defer")),
    "partly answered": (*TWO, decided(0, verdict="deny"), decided(1, "g")),
    "waiting": (*TWO, decided(0, verdict="defer"), decided(1, "g")),
    "partly started": RUNNING[:-1],
    "all started": RUNNING,
    "partly finished": (*RUNNING, finished(1, "g")),
    "paused, in doubt": (*RUNNING[:-1], PAUSED),
    "paused before safe calls ran": (
        *TWO,
        decided(0, verdict="defer"),
        decided(1, "g"),
        PAUSED,
    ),
    "caller's function": (run_started(), replied(calls("mine")), decided(0, "mine")),
    "calls to return": (
        run_started(on_denial="return_calls"),
        *TWO[1:],
        decided(0, verdict="deny"),
        decided(1, "g"),
    ),
    "a step to announce": (
        run_started(rounds_per_step=1),
        *SAMPLES[Phase.COMPLETING][1:],
        *Play(calls("f"), rounds_per_step=1).go().facts[-1:],
        replied(says("closed"), iteration=1, offered=False),
    ),
    "a final answer to insist on": (
        run_started(require_final_answer=True),
        replied(says("hm")),
    ),
    "a step announced": (run_started(), replied(says("hm")), added("step")),
}


@each_of("moment", MOMENTS)
def test_a_run_can_be_ended_at_any_moment(moment: str) -> None:
    """The facts fold onto the run, end it, answer every call, and carry reason and time."""
    state = fold(MOMENTS[moment])
    facts = stopping_facts(state, reason="enough", at=7.0)
    after = fold([*MOMENTS[moment], *facts])
    assert after.phase is Phase.ENDED
    assert isinstance(facts[-1], Ended)
    assert StopRequested(reason="enough", at=7.0) in facts
    assert {fact.at for fact in facts} == {7.0}
    assert after.batch is None
    assert violations_of(after.transcript) == []


@each_of("moment", [name for name in MOMENTS if name != "answering"])
def test_a_run_that_was_ended_is_stopped_with_the_reason(moment: str) -> None:
    """Unless its answer had already come, the run is stopped, and says why."""
    end = stopping_facts(fold(MOMENTS[moment]), reason="enough", at=7.0)[-1]
    assert isinstance(end, Ended)
    assert end.status == "stopped"
    assert end.reason == "enough"
    assert end.answer == ""


def test_an_answer_that_had_come_is_kept() -> None:
    """A run that is ended between its answer and its end is answered."""
    end = stopping_facts(fold(SAMPLES[Phase.ANSWERING]), reason="enough", at=7.0)[-1]
    assert isinstance(end, Ended)
    assert (end.status, end.answer) == ("answered", "hello")


def test_a_started_call_is_cancelled_and_the_others_did_not_run() -> None:
    """The model reads what is known: in doubt for a started call, its result for a finished, not executed else."""
    facts = (
        run_started(),
        replied(calls("f", "g", "h")),
        *(decided(index, name) for index, name in enumerate("fgh")),
        began(0),
        began(1, "g"),
        finished(1, "g"),
    )
    ending = stopping_facts(fold(facts), reason="enough", at=7.0)
    after = fold([*facts, *ending])
    texts = [entry.text for entry in after.transcript if isinstance(entry, CallResult)]
    assert texts[0].startswith("Cancelled while it ran")
    assert texts[1] == "result of g"
    assert texts[2] == "Not executed: the run was stopped. enough"
    assert [fact.outcome for fact in ending if isinstance(fact, CallFinished)] == [
        "cancelled"
    ]


@pytest.mark.parametrize("phase", [Phase.NEW, Phase.ENDED])
def test_a_run_that_does_not_run_cannot_be_ended(phase: Phase) -> None:
    """Ending what has not begun, or has ended, is refused."""
    with pytest.raises(IllegalTransitionError):
        stopping_facts(fold(SAMPLES[phase]), reason="enough", at=7.0)
