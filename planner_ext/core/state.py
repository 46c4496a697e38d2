"""The state of a run, which is the fold of its facts, and the legal transitions.

These values have no slots: see `planner_ext.core.values.updated`.

A call of the function that asks the user is a deferred call of the kind ``question``. A
plain reply becomes a question if a clarifier can be shown it, or if it reads as one and
cannot be the answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Literal

from planner_ext.core.facts import (
    AnswerChecked,
    CallDecided,
    Ended,
    Fact,
    ModelReplied,
    Place,
    Rules,
    SharedBudgetsChecked,
    wrapped,
)
from planner_ext.core.values import (
    NOTHING,
    Message,
    RequestedCall,
    Tally,
    TranscriptItem,
    Usage,
    frozen,
)


class Phase(StrEnum):
    """The phase of a run; `TRANSITIONS` says which facts may follow in each."""

    NEW = "new"
    PLANNING = "planning"
    ASKING = "asking"
    REVIEWING = "reviewing"
    CALLING = "calling"
    COMPLETING = "completing"
    ANSWERING = "answering"
    PAUSED = "paused"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of the open batch.

    Attributes:
        decided: The newest decision.
        starts: Starts since then; more than one where a filter ran it again.
        answer: What the model will read as its result.
        erred: Whether it failed, is unknown or invalid.
        asked: Whether it is a question that the clarifier left open.
        recorded: What its function recorded before it happened.
        inside: The functions whose results may be part of its own.
        runs: The runs that its function has made, in order; one that has not begun is a
            new `State`.
        entered: How many runs it had before its last start. Those are over; the later
            ones continue when its function is called again.
        left: Whether its function was left because a run in it waits. It has no result,
            and is called again once the run may continue.
    """

    request: RequestedCall
    decided: CallDecided | None = None
    starts: int = 0
    answer: str | None = None
    erred: bool = False
    asked: bool = False
    recorded: Usage = NOTHING
    inside: frozenset[str] = frozenset()
    runs: "tuple[State, ...]" = ()
    entered: int = 0
    left: bool = False

    @property
    def started(self) -> bool:
        """Whether it was started since it was decided."""
        return self.starts > 0

    @property
    def is_open(self) -> bool:
        """Whether it was started, has no result yet, and may be called again to get it: the runs in it go on."""
        return (
            self.starts > 0
            and self.answer is None
            and self.decided is not None
            and self.decided.nested
        )

    @property
    def waits_inside(self) -> bool:
        """Whether a run that its function has made waits for a person."""
        return bool(self.runs) and any(run.phase is Phase.PAUSED for run in self.runs)

    @property
    def going_on(self) -> list[int]:
        """The runs that neither wait nor have ended, of those made since its last start."""
        still = (Phase.NEW, Phase.PAUSED, Phase.ENDED)
        made = range(self.entered, len(self.runs))
        return [run for run in made if self.runs[run].phase not in still]

    @property
    def decided_fact(self) -> CallDecided:
        """The decision on a call that was reviewed."""
        assert self.decided is not None, "the call was reviewed"
        return self.decided


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The calls of one reply, until each has its result."""

    iteration: int
    message: Message
    text: str
    calls: Sequence[Call]
    undecided: int
    unanswered: int


@dataclass(frozen=True, kw_only=True)
class State:
    """A run at one moment; `planner_ext.core` says what the other fields lead to.

    Attributes:
        transcript: Completed batches only: always valid to be sent.
        iteration: The number of the next iteration.
        sticky: As `planner_ext.core.fold.sticky_keys`.
        given: The messages that the run began with.
        cut: Whole results, by the name under which the model reads on in them.
        earlier: Functions started before the open batch, nested ones included.
        inside: Functions whose results may be part of those of earlier batches.
        intent: Which fact shows that the next request may have been sent: the last one,
            if a request follows it (``implied``), a `ModelAsked` (``recorded``), or
            none yet since the last one ``failed``.
    """

    phase: Phase = Phase.NEW
    run_id: str = ""
    goal: str = ""
    rules: Rules = Rules()
    transcript: tuple[TranscriptItem, ...] = ()
    usage: Usage = Usage()
    calls_by_digest: Tally = field(default_factory=Tally)
    errors_in_row: int = 0
    denials_in_row: int = 0
    iteration: int = 0
    rounds: int = 0
    step_rounds: int = 0
    planned: bool = False
    batch: Batch | None = None
    called: bool = False
    reply: ModelReplied | None = None
    asked: bool = False
    clarifications: int = 0
    final_answer: str | None = None
    checked: AnswerChecked | None = None
    structuring: bool = False
    refusals: int = 0
    limit: str | None = None
    refused: SharedBudgetsChecked | None = None
    stopping: str | None = None
    ending: str | None = None
    reask: bool = False
    sticky: frozenset[str] = frozenset()
    given: tuple[Message, ...] = ()
    cut: Mapping[str, str] = field(default_factory=dict[str, str])
    earlier: Mapping[str, int] = field(default_factory=dict[str, int])
    inside: frozenset[str] = frozenset()
    intent: Literal["implied", "recorded", "failed"] = "implied"
    at: float = 0.0
    ended: Ended | None = None


_P = Phase

_RUNNING = tuple(phase for phase in Phase if phase not in (_P.NEW, _P.PAUSED, _P.ENDED))

_ANYWHERE = ("StopRequested", "BudgetChanged", "SharedBudgetsChecked")

TRANSITIONS: dict[tuple[Phase, str], tuple[Phase, ...]] = {
    **{(phase, fact): (phase,) for phase in _RUNNING for fact in _ANYWHERE},
    **{
        (phase, "ModelAsked"): (phase,)
        for phase in (_P.PLANNING, _P.ASKING, _P.ANSWERING, _P.CALLING)
    },
    **{
        (phase, "RequestFailed"): (phase,)
        for phase in _RUNNING
        if phase is not _P.REVIEWING
    },
    (_P.NEW, "RunStarted"): (_P.PLANNING, _P.ASKING),
    (_P.PLANNING, "Planned"): (_P.ASKING,),
    (_P.PLANNING, "ModelReplied"): (_P.REVIEWING, _P.ANSWERING),
    (_P.PLANNING, "Ended"): (_P.ENDED,),
    (_P.ASKING, "ModelReplied"): (_P.REVIEWING, _P.ANSWERING),
    (_P.ASKING, "AnswerChecked"): (_P.ASKING,),
    (_P.ASKING, "MessageAdded"): (_P.ASKING,),
    (_P.ASKING, "Ended"): (_P.ENDED,),
    (_P.ANSWERING, "MessageAdded"): (_P.ASKING,),
    (_P.ANSWERING, "AnswerChecked"): (_P.ANSWERING,),
    (_P.ANSWERING, "Clarified"): (_P.ANSWERING, _P.ASKING),
    (_P.ANSWERING, "Paused"): (_P.PAUSED,),
    (_P.ANSWERING, "Ended"): (_P.ENDED,),
    (_P.REVIEWING, "CallDecided"): (_P.REVIEWING, _P.CALLING, _P.COMPLETING),
    (_P.REVIEWING, "CallsWithheld"): (_P.COMPLETING,),
    (_P.CALLING, "CallDecided"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "CallsWithheld"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "CallStarted"): (_P.CALLING,),
    (_P.CALLING, "NestedCallStarted"): (_P.CALLING,),
    (_P.CALLING, "HappenedInside"): (_P.CALLING,),
    (_P.CALLING, "CallLeft"): (_P.CALLING,),
    (_P.CALLING, "CallFinished"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "Clarified"): (_P.CALLING, _P.COMPLETING),
    (_P.CALLING, "Paused"): (_P.PAUSED,),
    (_P.CALLING, "Ended"): (_P.ENDED,),
    (_P.COMPLETING, "IterationCompleted"): (_P.ASKING,),
    (_P.PAUSED, "StopRequested"): (_P.CALLING, _P.ANSWERING),
    (_P.PAUSED, "Resumed"): (_P.CALLING, _P.ANSWERING),
    **{
        (phase, "Resumed"): (phase,)
        for phase in (_P.PLANNING, _P.ASKING, _P.ANSWERING, _P.COMPLETING)
    },
    (_P.ENDED, "Resumed"): (_P.PLANNING, _P.ASKING, _P.REVIEWING),
}
"""Which facts may happen in a phase, and which phases they may lead to."""


_ESCAPES = str.maketrans({character: f"%{ord(character):02X}" for character in "%/#"})


def path_of(call_id: str) -> str:
    """Write a call's id as a part of a path: see `planner_ext.approval.decisions.ToolCall.path`."""
    return call_id.translate(_ESCAPES)


def name_inside(state: State, index: int, run: int) -> str:
    """Name a run that the function of a call makes: the same in every process."""
    assert state.batch is not None, "a call runs in the open batch"
    call_id = path_of(state.batch.calls[index].request.id)
    return f"{state.run_id}/{state.batch.iteration}/{call_id}{_number(run)}"


def _number(run: int) -> str:
    return f"#{run}" if run else ""


@frozen
class OpenRun:
    """A run that has not ended, and where it is made.

    Attributes:
        state: The run.
        path: The calls around it, from the outermost run in, each followed by a ``/``;
            "" of the outermost run.
        place: The same calls as the journal names them.
    """

    state: State
    path: str = ""
    place: Place = ()

    def wrapped(self, fact: Fact) -> Fact:
        """Write a fact of this run as one of the outermost run."""
        return wrapped(fact, self.place)


def run_at(state: State, place: Place) -> State | None:
    """Return the run at a place in a run, if the calls around it are still open; else None."""
    for iteration, index, number in place:
        batch = state.batch
        if batch is None or batch.iteration != iteration:
            return None
        call = batch.calls[index]
        if call.answer is not None or number >= len(call.runs):
            return None
        state = call.runs[number]
    return state


def open_runs(state: State, path: str = "", place: Place = ()) -> Iterator[OpenRun]:
    """List a run, and the runs in its open calls that have not ended, at every depth; each after the one around it."""
    yield OpenRun(state=state, path=path, place=place)
    batch = state.batch
    if batch is None or state.ended is not None:
        return
    for index, call in enumerate(batch.calls):
        if not call.is_open:
            continue
        begun = path + path_of(call.request.id)
        for number, run in enumerate(call.runs):
            if number >= call.entered and run.phase not in (_P.NEW, _P.ENDED):
                inside = (*place, (batch.iteration, index, number))
                yield from open_runs(run, f"{begun}{_number(number)}/", inside)


ASK_USER = "UserInteraction-AskUser"
"""The function that asks the user."""

READ_RESULT: Final = "Results-read"
"""The function with which the model reads on in a result that was cut."""

_MARKS = ("?", "\uff1f", "\u061f")  # also full-width, and Arabic
_CLOSING = " \t\r\n*_`~\"'\u2019\u201d\u00bb)]"


def asks(text: str) -> bool:
    """Return whether the last line of a text ends in a question mark.

    Closing quotes, brackets and emphasis after the mark do not count.
    """
    return text.rstrip(_CLOSING).endswith(_MARKS)
