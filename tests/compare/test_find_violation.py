"""`find_violation`: valid histories have none; of an invalid one it names the message at fault."""

from planner_ext.compare import ShownCall, ShownMessage, ShownResult, find_violation
from support.values import each_of

USER = ShownMessage(role="user", text="Go on.")
SAID = ShownMessage(role="assistant", text="Done.")


def asks(*ids: str) -> ShownMessage:
    """A reply that calls once for each id."""
    return ShownMessage(
        role="assistant",
        calls=tuple(ShownCall(id=one, name="a-f", arguments="{}") for one in ids),
    )


def tells(*ids: str) -> ShownMessage:
    """A message with a result for each id."""
    return ShownMessage(
        role="tool",
        results=tuple(ShownResult(call_id=one, name="a-f", text="1") for one in ids),
    )


@each_of(
    "history",
    [
        (),
        (USER, SAID),
        (USER, asks("1"), tells("1"), SAID),
        (USER, asks("1", "2"), tells("2"), tells("1"), SAID),
        (USER, asks("1", "2"), tells("1", "2")),
        (USER, asks("1"), tells("1"), asks("1"), tells("1"), SAID),
    ],
    ids=[
        "empty",
        "plain",
        "one call",
        "two results in any order",
        "two results in one message",
        "an id used again",
    ],
)
def test_a_history_in_which_every_call_has_its_result_is_valid(
    history: tuple[ShownMessage, ...],
) -> None:
    """A valid history has no violation."""
    assert find_violation(history) is None


@each_of(
    ("history", "place", "text"),
    [
        (
            (USER, asks("1")),
            1,
            "did not have response messages before the end of the messages: 1",
        ),
        (
            (USER, asks("1"), USER, tells("1")),
            1,
            "did not have response messages before messages[2] (role 'user'): 1",
        ),
        (
            (USER, asks("1", "2"), tells("1"), SAID),
            1,
            "before messages[3] (role 'assistant'): 2",
        ),
        ((USER, tells("1"), SAID), 1, "no call '1' is waiting"),
        ((tells("1"),), 0, "no call '1' is waiting"),
        ((USER, asks("1"), tells("1"), tells("2")), 3, "no call '2' is waiting"),
        (
            (USER, asks("1"), tells("1"), tells("1")),
            3,
            "tool_call_id '1' is already answered",
        ),
        ((USER, asks("1"), tells("1", "1")), 2, "tool_call_id '1' is already answered"),
        ((USER, asks("1", "1"), tells("1")), 1, "'1' names two calls"),
        ((USER, asks(""), tells("")), 1, "Invalid 'messages[1].tool_calls[0].id'"),
        (
            (USER, ShownMessage(role="assistant")),
            1,
            "Invalid value for 'messages[1].content'",
        ),
    ],
)
def test_a_violation_is_reported_at_its_message(
    history: tuple[ShownMessage, ...], place: int, text: str
) -> None:
    """The first one, in OpenAI's words, which name the ids."""
    found = find_violation(history)
    assert found is not None
    assert found.place == place
    assert text in found.text
