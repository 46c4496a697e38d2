"""Which histories may be sent, and how they are repaired: checked against the rules of a server as strict as OpenAI."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext import FunctionInvokingChatCompletion
from planner_ext.core.values import CallResult
from planner_ext.errors import InvalidHistoryError
from planner_ext.sk.chat.history import (
    check_history,
    find_problems,
    render,
    repair_history,
)
from planner_ext.sk.messages import INSIDE
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from planner_ext.testing.rules import find_violation
from support.served import Answer, Served, Tools
from support.stock import sent_calls
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]


def text(role: AuthorRole, words: str = "words") -> ChatMessageContent:
    return ChatMessageContent(role=role, items=[TextContent(text=words)])


def calling(*ids: str | None) -> ChatMessageContent:
    items: list[Any] = [
        FunctionCallContent(id=id, name="t-add", arguments="{}") for id in ids
    ]
    return ChatMessageContent(role=AuthorRole.ASSISTANT, items=items)


def answering(*ids: str | None, result: str = "3") -> ChatMessageContent:
    items: list[Any] = [
        FunctionResultContent(id=id, name="t-add", result=result) for id in ids
    ]
    return ChatMessageContent(role=AuthorRole.TOOL, items=items)


USER = text(AuthorRole.USER)

INVALID = {
    "dangling": ([USER, calling("a")], "message 1: the call 'a' has no result"),
    "half-answered": (
        [USER, calling("a", "b"), answering("b")],
        "message 1: the call 'a' has no result",
    ),
    "interrupted": (
        [USER, calling("a"), USER, answering("a")],
        "message 1: the call 'a' has no result",
    ),
    "late": (
        [USER, calling("a"), USER, answering("a")],
        "message 3: a result for no call before it: 'a'",
    ),
    "orphan": (
        [USER, answering("a")],
        "message 1: a result for no call before it: 'a'",
    ),
    "foreign": (
        [USER, calling("a"), answering("a"), answering("z")],
        "message 3: a result for no call .*'z'",
    ),
    "duplicate": (
        [USER, calling("a"), answering("a"), answering("a")],
        "message 3: a second result .*'a'",
    ),
    "twice-the-id": (
        [USER, calling("a", "a"), answering("a"), answering("a")],
        "message 1: the call id 'a' twice",
    ),
}


@each_of("name", INVALID)
async def test_a_history_that_may_not_be_sent_is_refused(
    ask: Ask, serve: Serve, name: str
) -> None:
    """The error names the message's place, the id and the way out; nothing is sent and nothing changed."""
    messages, problem = INVALID[name]
    served = serve([say("Never sent.")])
    history = ChatHistory(messages=list(messages))
    with pytest.raises(
        InvalidHistoryError,
        match=f"{problem}.*Answer or remove .*on_invalid_history='repair'",
    ):
        await ask(FunctionInvokingChatCompletion(served.connector), to=history)
    assert served.server.requests == []
    assert served.server.refused == []
    assert history.messages == messages


@each_of("name", INVALID)
async def test_a_history_is_repaired_on_request(
    ask: Ask, serve: Serve, name: str
) -> None:
    """``on_invalid_history="repair"`` repairs the caller's history in place, and the server takes it."""
    served = serve([calls(call("t-add", {"a": 1, "b": 2}, id="new")), say("Three.")])
    history = ChatHistory(messages=[*INVALID[name][0], USER])
    service = FunctionInvokingChatCompletion(
        served.connector, on_invalid_history="repair"
    )
    answer = await ask(service, to=history)
    assert (answer.text, served.server.refused) == ("Three.", [])
    assert find_problems(history.messages) == []
    assert [m.role for m in history.messages[-2:]] == ["assistant", "tool"]


async def test_a_complete_pair_of_the_callers_is_fine(
    ask: Ask, serve: Serve, tools: Tools
) -> None:
    """A call that the caller ran itself, with its result, may stand in the history; later calls are automatic."""
    served = serve([call("t-add", {"a": 1, "b": 2}), say("Done.")])
    history = ChatHistory(messages=[USER, calling("mine"), answering("mine")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector), to=history)
    assert answer.text == "Done."
    assert tools.seen == [(1, 2)]
    assert served.server.refused == []
    assert len(history.messages) == 5


async def test_text_beside_a_callers_call_is_sent(ask: Ask) -> None:
    """A message of the caller's with text and a call is sent with both, and stays the caller's own object."""
    both = ChatMessageContent(
        role=AuthorRole.ASSISTANT, items=[TextContent(text="See:"), *calling("a").items]
    )
    inner = ScriptedChatCompletion([say("Done.")])
    history = ChatHistory(messages=[USER, both, answering("a")])
    await ask(FunctionInvokingChatCompletion(inner), to=history)
    sent = inner.requests[0].messages[1]
    assert (sent["content"], len(sent_calls(sent))) == ("See:", 1)
    assert history.messages[1] is both


@each_of(
    ("unusual", "sent"),
    [
        ([calling("a", "b"), answering("a", "b")], ["3", "3"]),
        ([calling(None), answering(None)], ["3"]),
        (
            [
                calling("a"),
                answering("a"),
                ChatMessageContent(role=AuthorRole.TOOL, items=[]),
            ],
            ["3"],
        ),
        ([text(AuthorRole.TOOL, "No result in here.")], []),
        ([ChatMessageContent(role=AuthorRole.ASSISTANT, items=[])], []),
    ],
    ids=[
        "merged-results",
        "without-ids",
        "empty-tool-message",
        "tool-message-without-result",
        "empty-reply",
    ],
)
async def test_what_semantic_kernel_leaves_behind_is_sent_right_or_refused(
    ask: Ask, serve: Serve, unusual: list[ChatMessageContent], sent: list[str]
) -> None:
    """Messages of stock loops that OpenAI refuses as they are: sent in a form it takes, or refused by name."""
    served = serve([say("Done.")])
    history = ChatHistory(messages=[USER, *unusual, USER])
    try:
        await ask(FunctionInvokingChatCompletion(served.connector), to=history)
    except InvalidHistoryError:
        assert served.server.requests == []
    else:
        assert [
            m["content"]
            for m in served.server.requests[0].messages
            if m["role"] == "tool"
        ] == sent
    assert served.server.refused == []


IDS = st.sampled_from(["a", "b", "c"])
MESSAGES = st.one_of(
    st.sampled_from([AuthorRole.USER, AuthorRole.ASSISTANT, AuthorRole.SYSTEM]).map(
        text
    ),
    st.lists(IDS, min_size=1, max_size=3).map(lambda ids: calling(*ids)),
    IDS.map(answering),
)
HISTORIES = st.lists(MESSAGES, max_size=8)


def sent(messages: list[ChatMessageContent]) -> dict[str, Any]:
    return {
        "model": "m",
        "messages": [text(AuthorRole.USER).to_dict(), *(m.to_dict() for m in messages)],
    }


@given(HISTORIES)
def test_what_passes_is_what_openai_takes(messages: list[ChatMessageContent]) -> None:
    """A history has problems exactly where the strict server would refuse it."""
    assert bool(find_problems(messages)) == (find_violation(sent(messages)) is not None)


@given(HISTORIES)
def test_a_repaired_history_is_valid(messages: list[ChatMessageContent]) -> None:
    """With any defect in a history, once repaired the strict server takes it."""
    repaired = repair_history(messages)
    assert find_problems(repaired) == []
    assert find_violation(sent(repaired)) is None


@given(HISTORIES)
def test_repairing_again_changes_nothing(messages: list[ChatMessageContent]) -> None:
    """Repairing is idempotent."""
    repaired = repair_history(messages)
    assert repair_history(repaired) == repaired


@given(HISTORIES)
def test_repairing_changes_no_valid_history(messages: list[ChatMessageContent]) -> None:
    """A history that may be sent comes back with the very same messages."""
    if not find_problems(messages):
        assert list(map(id, repair_history(messages))) == list(map(id, messages))


@given(HISTORIES)
def test_repairing_leaves_the_callers_messages_alone(
    messages: list[ChatMessageContent],
) -> None:
    """The list and the messages given are not changed; messages that need no repair are in the result as they were."""
    before = [(id(message), message.model_dump()) for message in messages]
    repaired = repair_history(messages)
    assert [(id(message), message.model_dump()) for message in messages] == before
    kept = {id(message) for message in repaired}
    assert all(
        id(m) in kept
        for m in messages
        if m.role in (AuthorRole.USER, AuthorRole.SYSTEM)
    )


def test_a_sound_result_keeps_its_metadata_when_another_is_repaired() -> None:
    """Repairing one call leaves the message of another's result as it was, metadata and all."""
    sound = answering("a")
    sound.metadata["cost"] = 3
    repaired = repair_history([USER, calling("a", "b"), sound])
    assert sound in repaired
    assert repaired[2].metadata == {"cost": 3}


def test_checking_raises_every_problem_at_once() -> None:
    """The error lists all problems, so that they can be repaired together."""
    with pytest.raises(
        InvalidHistoryError,
        match=r"message 0: .*'z'.*message 1: the call 'a'.*call 'b'",
    ):
        check_history([answering("z"), calling("a"), calling("b")])


@each_of("name", ["lights-switch", "bare", "a-b-c", "-f", "p-", ""])
@each_of("inside", [(), ("lights-look",)])
def test_the_message_of_a_result_is_what_semantic_kernel_makes(
    name: str, inside: tuple[str, ...]
) -> None:
    """Messages are copies of a function's first one: equal in values, set fields and JSON, and they share nothing."""
    results = [
        CallResult(call_id=f"c{at}", name=name, text=f"text {at}", inside=inside)
        for at in range(2)
    ]
    rendered = render(results)
    for result, message in zip(results, rendered, strict=True):
        content = FunctionResultContent(
            id=result.call_id, name=name, result=result.text
        )
        if inside:
            content.metadata[INSIDE] = [*inside]
        made = ChatMessageContent(role=AuthorRole.TOOL, items=[content])
        assert type(message) is type(made)
        assert vars(message) == vars(made)
        assert vars(message.items[0]) == vars(content)
        assert message.model_fields_set == made.model_fields_set
        assert message.items[0].model_fields_set == content.model_fields_set
        assert message.__getstate__() == made.__getstate__()
        assert content.__getstate__() == message.items[0].__getstate__()
        assert message.model_dump_json() == made.model_dump_json()
        assert message.model_dump_json(exclude_unset=True) == made.model_dump_json(
            exclude_unset=True
        )
    first, second = rendered
    first.items[0].metadata["changed"] = True
    first.metadata["changed"] = True
    first.items.append(TextContent(text="changed"))
    assert second == render(results)[1]
