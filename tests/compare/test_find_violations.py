"""`find_violations`: valid histories have no violation; an invalid one names the message at fault."""

import pytest

from planner_ext.compare import ShownCall, ShownMessage, ShownResult, find_violations

USER = ShownMessage(role="user", text="Go on.")
SAID = ShownMessage(role="assistant", text="Done.")


def asks(*ids: str) -> ShownMessage:
    """A reply that calls once for each id."""
    return ShownMessage(role="assistant", calls=tuple(ShownCall(id=one, name="a-f", arguments="{}") for one in ids))


def tells(*ids: str) -> ShownMessage:
    """A message with a result for each id."""
    return ShownMessage(role="tool", results=tuple(ShownResult(call_id=one, name="a-f", text="1") for one in ids))


@pytest.mark.parametrize(
    "history",
    [
        (),
        (USER, SAID),
        (USER, asks("1"), tells("1"), SAID),
        (USER, asks("1", "2"), tells("2"), tells("1"), SAID),
        (USER, asks("1", "2"), tells("1", "2")),
        (USER, asks("1"), tells("1"), asks("1"), tells("1"), SAID),
    ],
    ids=["empty", "plain", "one call", "two results in any order", "two results in one message", "an id used again"],
)
def test_a_history_in_which_every_call_has_its_result_is_valid(history: tuple[ShownMessage, ...]) -> None:
    """A valid history has no violations."""
    assert find_violations(history) == ()


@pytest.mark.parametrize(
    ("history", "place", "text"),
    [
        ((USER, asks("1")), 1, "the call 1 of a-f has no result"),
        ((USER, asks("1"), USER, tells("1")), 1, "the call 1 of a-f has no result"),
        ((USER, asks("1", "2"), tells("1"), SAID), 1, "the call 2 of a-f has no result"),
        ((USER, tells("1"), SAID), 1, "a result for 1, which nothing called"),
        ((tells("1"),), 0, "a result for 1, which nothing called"),
        ((USER, asks("1"), tells("1"), tells("2")), 3, "a result for 2, which nothing called"),
        ((USER, asks("1"), tells("1"), tells("1")), 3, "a second result for the call 1"),
        ((USER, asks("1"), tells("1", "1")), 2, "a second result for the call 1"),
        ((USER, asks("1", "1"), tells("1")), 1, "two calls have the id 1"),
        ((USER, asks(""), tells("")), 1, "a call without an id"),
        ((USER, ShownMessage(role="assistant")), 1, "a reply with neither text nor calls"),
    ],
)
def test_a_violation_is_reported_at_its_message(history: tuple[ShownMessage, ...], place: int, text: str) -> None:
    """The first violation names the message at fault and the ids."""
    first = find_violations(history)[0]
    assert (first.place, first.text) == (place, f"message {place}: {text}")


def test_violations_come_in_the_order_of_the_messages() -> None:
    """All of them, the earliest message first."""
    found = find_violations((asks("1"), USER, asks("2"), tells("3")))
    assert [violation.place for violation in found] == [0, 2, 3]
