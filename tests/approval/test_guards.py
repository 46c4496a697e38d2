"""Who has a say before a call, compared between the process that began a run and the one that continues it."""

import pytest

from planner_ext.approval.policy import missing_guards
from planner_ext.core.facts import Guards


@pytest.mark.parametrize(
    ("before", "now", "missing"),
    [
        (5.0, 5.0, []),
        (5.0, 4.0, []),
        (None, 5.0, []),
        (5.0, 6.0, ["expires_in is now 6.0 instead of 5.0"]),
        (5.0, None, ["expires_in is now None instead of 5.0"]),
    ],
)
def test_a_question_may_not_stay_open_for_longer(before: float | None, now: float | None, missing: list[str]) -> None:
    """A process whose questions are open for longer, or without end, has less of a say than the run began with."""
    assert missing_guards(Guards(expires_in=before), Guards(expires_in=now), ()) == missing
