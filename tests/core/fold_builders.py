"""What the tests of the fold share: one fact of each kind, and an open batch."""

from core_builders import (
    PAUSED,
    RESUMED,
    added,
    began,
    calls,
    completed,
    decided,
    ended,
    finished,
    planned,
    replied,
    run_started,
    says,
    stop,
    withheld,
)

from planner_ext.core.facts import Fact

ONE_OF_EACH: list[Fact] = [
    run_started(),
    planned(),
    added(),
    replied(says("hello")),
    decided(0),
    withheld(0),
    began(0),
    finished(0),
    completed(),
    stop(),
    PAUSED,
    RESUMED,
    ended(),
]


BATCH = (run_started(), replied(calls("f", "g")))


CALLED = (*BATCH, decided(0), decided(1, "g"))
