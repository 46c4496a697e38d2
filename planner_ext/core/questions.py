"""Questions of the model: which wait, which are over their cap, and whether a plain reply is one.

A call of the function that asks the user is a deferred call of the kind ``question``. A plain reply becomes a question
where a clarifier is there to be shown it, or where it reads as one and no plain reply can be the answer.
"""

from planner_ext.core.facts import ModelReplied
from planner_ext.core.state import Batch, Call, Phase, State

__all__ = [
    "ASK_USER",
    "NO_MORE_QUESTIONS",
    "asks",
    "only_asks",
    "open_questions",
    "over_the_cap",
    "questions_left",
    "waiting_reply",
]

ASK_USER = "UserInteraction-AskUser"
"""The function that asks the user, as the model sees it."""

NO_MORE_QUESTIONS = "Not asked: no further questions are answered. Go on with what you know."
"""What the model reads of a question over the cap."""

_MARKS = ("?", "\uff1f", "\u061f")  # also full-width, and Arabic
_CLOSING = " \t\r\n*_`~\"'\u2019\u201d\u00bb)]"


def asks(text: str) -> bool:
    """Say whether a text reads as a question: its last line that is not empty ends in a question mark.

    Closing quotes, brackets and emphasis after the mark do not count.
    """
    return text.rstrip(_CLOSING).endswith(_MARKS)


def open_questions(batch: Batch) -> tuple[int, ...]:
    """List the calls of a batch that ask the user and have no answer."""
    return tuple(
        index
        for index, call in enumerate(batch.calls)
        if call.answer is None and call.decided is not None and call.decided.kind == "question"
    )


def questions_left(state: State) -> int | None:
    """Count the questions that may still be answered; None where they are not limited."""
    allowed = state.rules.max_clarifications
    return None if allowed is None else max(allowed - state.clarifications, 0)


def over_the_cap(state: State, questions: tuple[int, ...]) -> tuple[int, ...]:
    """List those of the open questions that will not be answered."""
    left = questions_left(state)
    return () if left is None else questions[left:]


def only_asks(state: State) -> bool:
    """Say whether a run waits for answers alone, and for no decision on a call."""
    if state.phase is not Phase.PAUSED:
        return False
    if state.batch is None:
        return True
    waiting = [call.decided for call in state.batch.calls if call.answer is None and not _held(call)]
    return all(decided is not None and decided.kind == "question" for decided in waiting)


def _held(call: Call) -> bool:
    """Whether a call only waits for the others of its batch."""
    return call.decided is not None and call.decided.verdict == "run" and not call.started


def waiting_reply(state: State) -> ModelReplied | None:
    """Give the plain reply that a paused run waits with, or None."""
    return state.reply if state.phase is Phase.PAUSED and state.batch is None else None
