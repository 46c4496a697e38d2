"""What a run is at one moment: the fold of its facts so far.

These values have no slots, unlike all others: each fact makes new ones of them, and to copy a dict of fields takes
a fraction of the time of copying slots one by one, see `planner_ext.core.change`. There are only a few at a time.
"""

from dataclasses import dataclass
from enum import StrEnum

from planner_ext.core.facts import AnswerChecked, CallDecided, Ended, ModelReplied, Rules
from planner_ext.core.limits import Ledger
from planner_ext.core.shares import Share
from planner_ext.core.sharing import Row
from planner_ext.core.values import Entry, Message, RequestedCall

__all__ = ["Batch", "Call", "Phase", "State"]


class Phase(StrEnum):
    """Where a run stands; what may happen next in each is in `planner_ext.core.transitions`."""

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
        starts: How often it was started, since it was decided; more than once where a filter ran it again.
        answer: What the model will read as its result; None while that is open.
        erred: Whether it counts as an error: failed, unknown or with unusable arguments.
        asked: Whether it is a question that the clarifier was asked, and left open.
        reserved: The share of the budget that was set aside for it when it started, or None.
    """

    request: RequestedCall
    decided: CallDecided | None = None
    starts: int = 0
    answer: str | None = None
    erred: bool = False
    asked: bool = False
    reserved: Share | None = None

    @property
    def started(self) -> bool:
        """Whether it was started since it was decided."""
        return self.starts > 0


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The calls of one reply, until each has its result.

    Attributes:
        undecided: How many calls have no decision.
        unanswered: How many calls have no result.
    """

    iteration: int
    message: Message
    text: str
    calls: Row[Call]
    undecided: int
    unanswered: int


@dataclass(frozen=True, kw_only=True)
class State:
    """A run at one moment.

    Attributes:
        transcript: What the model has been told and has said, settled batches only: always fit to be sent.
        iteration: The 0-based number of the next trip.
        rounds: Tool rounds of this request so far; what ``use_attempts`` counts.
        step_rounds: Tool rounds of this step so far.
        planned: Whether a plan was made.
        batch: The open batch, or None.
        called: Whether a function was started in the batch that settled last.
        reply: The last reply without calls, or None.
        asked: Whether the clarifier was shown that reply, and left it as it is.
        clarifications: Questions that were answered.
        final_answer: What the final-answer function was given, or None.
        checked: What the last answer was found to be, where it has to be in a form, or None.
        structuring: How often the answer was asked for again, in its form; once it was, no other reply is due.
        limit: The first limit that was reached, while its consequence is due.
        stopping: Why the run is to stop, or None.
        ending: Why it is to stop once the open batch has settled, or None.
        reask: Whether the next request goes without functions because of a denied call.
        sticky: What was approved for the rest of the run: see `planner_ext.core.batches.sticky_keys`.
        at: The time of the newest fact.
        ended: The fact that ended the run, or None.
    """

    phase: Phase = Phase.NEW
    run_id: str = ""
    goal: str = ""
    rules: Rules = Rules()
    transcript: tuple[Entry, ...] = ()
    ledger: Ledger = Ledger()
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
    structuring: int = 0
    limit: str | None = None
    stopping: str | None = None
    ending: str | None = None
    reask: bool = False
    sticky: frozenset[str] = frozenset()
    at: float = 0.0
    ended: Ended | None = None
