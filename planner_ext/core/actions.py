"""What the machine can ask for next. Imperatives; the engine performs them and records what came of it."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from planner_ext.core.limits import BudgetShare, RemainingLimit
from planner_ext.core.values import Status

__all__ = [
    "Action",
    "AddMessage",
    "AskModel",
    "AskPerson",
    "AskPlan",
    "CheckAnswer",
    "CompleteIteration",
    "Finish",
    "Pause",
    "ReviewCalls",
    "RunCalls",
    "WithholdCalls",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlan:
    """Make the plan request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskModel:
    """Make one request with the transcript.

    Attributes:
        iteration: The 0-based number of this trip.
        offer: Whether functions are offered.
        tool_choice: ``auto`` or ``required`` where they are; ``none`` keeps their schema in the request although
            they are not offered.
        withheld: The limit for whose sake they are not offered, or None.
        structured: Whether the answer is wanted in its form, should no functions go with the request.
        left: What is left of the budget, as far as the model is to be told; this request is not charged yet.
    """

    iteration: int
    offer: bool
    tool_choice: Literal["auto", "required", "none"] | None
    withheld: str | None
    structured: bool = False
    left: tuple[RemainingLimit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewCalls:
    """Resolve, check and decide these calls of the open batch; none of them has run."""

    iteration: int
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCalls:
    """Run these calls of the open batch; all settle, whatever becomes of one.

    Attributes:
        share: What each nested run among them may spend; None where there is none.
    """

    iteration: int
    indexes: tuple[int, ...]
    share: BudgetShare | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WithholdCalls:
    """Answer these calls of the open batch without running them."""

    iteration: int
    indexes: tuple[int, ...]
    answer: str
    limit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteIteration:
    """The results are in the transcript: tell the iteration-completed callback, if a function was called."""

    iteration: int
    called: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddMessage:
    """Tell the model that the next step is due, that the final-answer function is owed, or the answer in its form.

    Attributes:
        problem: What is wrong with the form of the answer.
    """

    purpose: Literal["step", "insist", "structure"]
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckAnswer:
    """Hold an answer against the form that it has to be in."""

    answer: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPerson:
    """Put a question of the model, or its plain reply, to whoever answers for the user.

    Attributes:
        question: Its words.
        iteration: The trip in which it was asked.
        index: The place of the call that asks; None for a plain reply.
        trips: Round trips that the answer may take, so that one is left to use it; None where they are not limited.
    """

    question: str
    iteration: int
    index: int | None
    trips: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Leave the run as a value until a person has decided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """End the run."""

    status: Status
    answer: str = ""
    limit: str | None = None
    reason: str = ""
    returned: bool = False


Action: TypeAlias = (
    AskPlan
    | AskModel
    | AskPerson
    | ReviewCalls
    | RunCalls
    | WithholdCalls
    | CompleteIteration
    | AddMessage
    | CheckAnswer
    | Pause
    | Finish
)
