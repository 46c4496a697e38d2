"""The note on the budget is at the end of the newest message, and nowhere else."""

from datetime import UTC, datetime

import pytest
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionResultContent,
    ImageContent,
    TextContent,
)

from planner_ext.core.limits import Budget, Left, RemainingLimit, remaining_limits
from planner_ext.core.values import Usage
from planner_ext.sk.chat.round_trip import with_budget_note
from support.narrow import as_type, present
from support.stock import first_result
from support.values import each_of


def remaining(limits: Budget, usage: Usage, at: float) -> tuple[RemainingLimit, ...]:
    """List what the model reads of a run's own limits."""
    return remaining_limits(limits, usage, Left.of(limits, usage, at))


TRIPS = RemainingLimit(name="max_iterations", left=2, limit=6)
WORDS = "[Budget left, this request included: 2 of 6 round trips.]"


def user(text: str) -> ChatMessageContent:
    return ChatMessageContent(role=AuthorRole.USER, items=[TextContent(text=text)])


def result(text: object) -> ChatMessageContent:
    return ChatMessageContent(
        role=AuthorRole.TOOL,
        items=[FunctionResultContent(id="c1", name="p-f", result=text)],
        metadata={"k": 1},
    )


def test_the_newest_text_ends_with_it() -> None:
    """It stands in a copy of the newest message, after its text; all others are sent as they are."""
    messages = [user("One."), user("Two.")]
    sent = with_budget_note(messages, (TRIPS,))
    assert sent is not None
    assert sent.to_dict() == {"role": "user", "content": f"Two.\n\n{WORDS}"}
    assert messages[1].content == "Two."


def test_a_result_ends_with_it() -> None:
    """A tool message stays one: the words follow its result, and nothing stands between call and result."""
    messages = [result('{"a":1}')]
    sent = present(with_budget_note(messages, (TRIPS,)))
    assert sent.to_dict() == {
        "role": "tool",
        "content": f'{{"a":1}}\n\n{WORDS}',
        "tool_call_id": "c1",
    }
    assert first_result(messages[0]).result == '{"a":1}'
    assert sent.metadata == {"k": 1}


@pytest.mark.parametrize("message", [user(""), result("")])
def test_an_empty_text_becomes_the_words(message: ChatMessageContent) -> None:
    """Where the newest message says nothing, the words are all it says."""
    assert present(with_budget_note([message], (TRIPS,))).to_dict()["content"] == WORDS


def test_an_image_is_followed_by_it() -> None:
    """A message without text gets one, beside what it has."""
    image = ImageContent(uri="https://example.com/a.png")
    sent = present(
        with_budget_note(
            [ChatMessageContent(role=AuthorRole.USER, items=[image])], (TRIPS,)
        )
    )
    assert sent.items[0] is image
    assert as_type(TextContent, sent.items[1]).text == WORDS


@pytest.mark.parametrize(
    "messages",
    [[], [ChatMessageContent(role=AuthorRole.ASSISTANT, content="I begin")]],
    ids=["none", "assistant"],
)
def test_nothing_is_added_to_the_models_own_message(
    messages: list[ChatMessageContent],
) -> None:
    """Without a message, and after the assistant's own, nothing is said."""
    assert with_budget_note(messages, (TRIPS,)) is None


def test_nothing_left_to_tell_is_nothing_said() -> None:
    """Without anything to tell the newest message is sent as it is."""
    messages = [user("One.")]
    assert with_budget_note(messages, ()) is None


def test_each_limit_is_named_in_words() -> None:
    """Trips, calls, tokens, dollars, seconds and the deadline are written in plain words, without needless digits."""
    left = remaining(
        Budget(
            max_iterations=10,
            max_tool_calls=4,
            max_total_tokens=5000,
            max_cost=0.5,
            max_active_seconds=60,
            deadline=datetime.fromtimestamp(1_000_030, UTC),
            tell_budget=True,
        ),
        Usage(
            iterations=3,
            tool_calls=4,
            prompt_tokens=5200,
            completion_tokens=1,
            cost=0.123456,
            active_seconds=12.3456,
        ),
        1_000_000.0,
    )
    sent = present(with_budget_note([user("")], left))
    assert sent.content == (
        "[Budget left, this request included: 7 of 10 round trips; 0 of 4 tool calls; 0 of 5000 tokens; "
        "0.3765 of 0.5 US dollars; 47.65 of 60 seconds of work; 30 seconds to the deadline.]"
    )


@each_of(("spent", "heard"), [(0, False), (7, False), (8, True), (10, True)])
def test_a_limit_is_mentioned_once_its_share_is_left(spent: int, heard: bool) -> None:
    """With tell_budget=0.25 the notes mention a limit from the request on at which a quarter of it or less is left."""
    limits = Budget(max_iterations=10, max_tool_calls=100, tell_budget=0.25)
    left = remaining(limits, Usage(iterations=spent), 0.0)
    assert [item.name for item in left] == (["max_iterations"] if heard else [])


def test_a_deadline_is_near_by_the_time_worked() -> None:
    """Of a deadline the whole is the time worked so far and the time left: after 30 s, 10 s are a quarter."""
    limits = Budget(deadline=datetime.fromtimestamp(100, UTC), tell_budget=0.25)
    worked = Usage(active_seconds=30)
    assert remaining(limits, worked, 89.0) == ()
    assert remaining(limits, worked, 90.0) == (
        RemainingLimit(name="deadline", left=10.0, limit=40.0),
    )
    assert remaining(limits, worked, 200.0)[0].left == 0


def test_without_tell_budget_nothing_is_said() -> None:
    """Without tell_budget the model hears nothing of the budget; what is not limited is never told of."""
    assert remaining(Budget(max_iterations=1), Usage(iterations=1), 0.0) == ()
    assert (
        remaining(
            Budget(max_calls_per_function={"f": 1}, tell_budget=True), Usage(), 0.0
        )
        == ()
    )
