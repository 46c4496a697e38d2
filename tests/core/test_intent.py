"""Whether a request may have been sent already, as far as a journal can tell."""

from typing import Any

import pytest

from planner_ext.core.facts import Fact
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import may_have_asked
from planner_ext.core.state import Phase
from support.core import (
    SAMPLES,
    began,
    calls,
    completed,
    decided,
    finished,
    model_asked,
    replied,
    request_failed,
    run_started,
    says,
)
from support.values import each_of

ROUND: tuple[Fact, ...] = (replied(calls("f")), decided(0), began(0), finished(0))


@each_of(
    ("facts", "may"),
    [
        ((run_started(),), True),
        ((run_started(plan=True),), True),
        ((run_started(), replied(says("done"))), False),
        ((run_started(), replied(calls("f"))), False),
        ((run_started(), *ROUND), True),
        ((run_started(), *ROUND, completed()), True),
        (
            (run_started(limits=Budget(max_iterations=1, on_limit="stop")), *ROUND),
            False,
        ),
        (
            (
                run_started(limits=Budget(max_active_seconds=1.5, on_limit="stop")),
                *ROUND,
            ),
            True,
        ),
        ((run_started(), request_failed()), False),
        ((run_started(), request_failed(), model_asked()), True),
    ],
    ids=str,
)
def test_a_request_that_follows_the_last_fact_may_have_been_sent(
    facts: tuple[Fact, ...], may: bool
) -> None:
    """The last fact announces it, the end of an iteration may not be written yet, and a failure announces nothing."""
    assert may_have_asked(fold(facts)) is may


def test_a_failed_request_is_followed_by_one_that_is_recorded() -> None:
    """From its reply on, facts announce requests as before."""
    facts: list[Fact] = [run_started()]
    seen: list[str] = []
    for fact in (request_failed(), model_asked(), replied(says("done"))):
        facts.append(fact)
        seen.append(fold(facts).intent)
    assert seen == ["failed", "recorded", "implied"]


@pytest.mark.parametrize(
    "facts",
    [
        (*SAMPLES[Phase.COMPLETING], request_failed(), completed()),
        (
            run_started(),
            replied(calls("ask")),
            decided(0, "ask"),
            request_failed(),
            decided(0, "ask"),
        ),
    ],
    ids=["completed", "decided"],
)
def test_what_a_store_may_hold_back_announces_no_request(
    facts: tuple[Any, ...],
) -> None:
    """After a decision or the end of an iteration a failed request is still the last word on requests."""
    assert fold(facts).intent == "failed"
