"""What a paused run waits for, as the stores and the doors list it."""

from dataclasses import replace

from planner_ext.approval.decisions import IN_DOUBT_PROMPT, waiting_calls
from planner_ext.core.fold import fold
from support.core import PAUSED, RESUMED, began, calls, decided, replied, run_started


def test_a_question_about_a_call_in_doubt_does_not_expire() -> None:
    """The expiry was of the question whether it may run; whether it ran is asked until somebody says so."""
    deferred = decided(0, verdict="defer", expires_at=5.0)
    approved = replace(deferred, verdict="run", person=True)
    facts = [run_started(), replied(calls("f")), deferred, PAUSED, RESUMED, approved, began(0), PAUSED]
    (waiting,) = waiting_calls(fold(facts))
    assert (waiting.in_doubt, waiting.decided.expires_at, waiting.decided.prompt) == (True, None, IN_DOUBT_PROMPT)
