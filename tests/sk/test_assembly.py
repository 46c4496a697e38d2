"""A streamed reply is put together exactly, wherever it was cut, and in linear time."""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FinishReason,
    FunctionCallContent,
    ImageContent,
    StreamingChatMessageContent,
    StreamingTextContent,
    TextContent,
)

from planner_ext.sk.chat.reply import ReplyAssembly


def chunk(
    *items: Any, finish_reason: FinishReason | None = None, **metadata: Any
) -> StreamingChatMessageContent:
    return StreamingChatMessageContent(
        role=AuthorRole.ASSISTANT,
        choice_index=0,
        items=[*items],
        finish_reason=finish_reason,
        metadata=metadata,
        ai_model_id="m",
    )


def words(text: str) -> StreamingTextContent:
    return StreamingTextContent(choice_index=0, text=text)


def piece(
    index: int | None = 0,
    *,
    id: str | None = None,
    name: str | None = None,
    arguments: Any = None,
    **more: Any,
) -> FunctionCallContent:
    return FunctionCallContent(
        index=index, id=id, name=name, arguments=arguments, **more
    )


def assembled(*chunks: StreamingChatMessageContent) -> ChatMessageContent:
    assembly = ReplyAssembly()
    for one in chunks:
        assembly.add(one)
    return assembly.message()


def calls_in(message: ChatMessageContent) -> list[tuple[str | None, str | None, Any]]:
    return [
        (item.id, item.name, item.arguments)
        for item in message.items
        if isinstance(item, FunctionCallContent)
    ]


def text_in(message: ChatMessageContent) -> str:
    return "".join(item.text for item in message.items if isinstance(item, TextContent))


@dataclass
class Whole:
    """A reply before it is cut."""

    text: str
    calls: list[tuple[str, str, str]]


def cut(text: str, places: Iterable[int]) -> list[str]:
    """Cut a text at some places; pieces may be empty."""
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


PLACES = st.lists(st.integers(0, 40), max_size=6)
NAMES = st.from_regex(r"[ab]{1,4}-[ab]{1,4}", fullmatch=True)
ARGUMENTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "{}",
            '{"text":"hello {} world"}',
            '{"a":{},"b":{}}',
            "{}{}",
            '{"a": "\\u00e9{}"}',
        ]
    ),
)


@st.composite
def streams(
    draw: st.DrawFn, *, reused: bool = False, cut_names: bool = False
) -> tuple[Whole, list[StreamingChatMessageContent]]:
    """A reply and one way to stream it: calls interleaved by index, or one after the other at index 0."""
    named = draw(st.lists(st.tuples(NAMES, ARGUMENTS), max_size=4))
    whole = Whole(
        draw(st.text(max_size=20)),
        [(f"id{n}", name, given) for n, (name, given) in enumerate(named)],
    )
    queues: list[list[Any]] = [[words(part) for part in cut(whole.text, draw(PLACES))]]
    for number, (id, name, arguments) in enumerate(whole.calls):
        index = 0 if reused else number
        names = cut(name, draw(PLACES)) if cut_names else [name]
        first, *rest = [part for part in names if part]
        pieces = [
            piece(index, id=id, name=first),
            *(piece(index, name=part) for part in rest),
        ]
        pieces += [
            piece(index, arguments=part) for part in cut(arguments, draw(PLACES))
        ]
        if reused and number:
            queues[-1] += pieces
        else:
            queues.append(pieces)
    items: list[Any] = []
    while waiting := [queue for queue in queues if queue]:
        items.append(waiting[draw(st.integers(0, len(waiting) - 1))].pop(0))
    sizes = draw(st.lists(st.integers(1, 3), min_size=len(items), max_size=len(items)))
    chunks: list[StreamingChatMessageContent] = []
    while items:
        size = sizes.pop()
        chunks.append(chunk(*items[:size]))
        items = items[size:]
    return whole, chunks


@given(streams())
def test_any_cutting_by_index_comes_together(
    stream: tuple[Whole, list[StreamingChatMessageContent]],
) -> None:
    """Text and arguments cut anywhere, interleaved by index and with text, come back to the last character."""
    whole, chunks = stream
    message = assembled(*chunks)
    assert text_in(message) == whole.text
    assert calls_in(message) == whole.calls


@given(streams(reused=True))
def test_calls_that_share_an_index_are_kept_apart(
    stream: tuple[Whole, list[StreamingChatMessageContent]],
) -> None:
    """Where a server sends every call at index 0, another id opens another call."""
    whole, chunks = stream
    assert calls_in(assembled(*chunks)) == whole.calls


@given(streams(cut_names=True))
def test_names_may_be_cut_anywhere(
    stream: tuple[Whole, list[StreamingChatMessageContent]],
) -> None:
    """A function's name that comes in pieces is whole again, even where a piece repeats the one before it."""
    whole, chunks = stream
    assert calls_in(assembled(*chunks)) == whole.calls


@given(streams())
def test_what_adding_returns_is_the_text(
    stream: tuple[Whole, list[StreamingChatMessageContent]],
) -> None:
    """Each chunk's text is returned as it is added."""
    whole, chunks = stream
    assembly = ReplyAssembly()
    assert "".join(assembly.add(one) for one in chunks) == whole.text


def test_a_header_that_comes_with_every_piece_is_taken_once() -> None:
    """Servers that repeat id and name with each delta do not make the name longer."""
    chunks = [
        chunk(piece(id="a", name="t-add", arguments=part))
        for part in ('{"a"', ":1", "}")
    ]
    assert calls_in(assembled(*chunks)) == [("a", "t-add", '{"a":1}')]


def test_calls_without_ids_are_distinguished_by_their_names() -> None:
    """Where no ids are sent, a name after arguments opens the next call."""
    chunks = [
        chunk(piece(name=name), piece(arguments="{}"))
        for name in ("t-add", "t-echo", "t-echo")
    ]
    assert calls_in(assembled(*chunks)) == [
        (None, "t-add", "{}"),
        (None, "t-echo", "{}"),
        (None, "t-echo", "{}"),
    ]


@pytest.mark.parametrize("arguments", [{}, {"a": 1}], ids=["none", "some"])
@pytest.mark.parametrize("apart", [True, False], ids=["chunks", "one-chunk"])
def test_whole_calls_without_id_and_index_are_kept_apart(
    arguments: Mapping[str, Any], apart: bool
) -> None:
    """Ollama's connector sends whole calls, arguments as a mapping, without id or index: each is a call of its own."""
    pieces = [
        piece(None, name=name, arguments=arguments)
        for name in ("t-now", "t-here", "t-here")
    ]
    chunks = [chunk(one) for one in pieces] if apart else [chunk(*pieces)]
    assert [name for _, name, _ in calls_in(assembled(*chunks))] == [
        "t-now",
        "t-here",
        "t-here",
    ]


def test_whole_calls_with_the_same_id_are_kept_apart() -> None:
    """Google's connector numbers calls within a chunk: two chunks may hold whole calls with the same id."""
    pieces = [
        piece(None, id="t-add_0", name="t-add", arguments={"a": a}) for a in (1, 2)
    ]
    called = calls_in(assembled(*(chunk(one) for one in pieces)))
    assert [arguments for _, _, arguments in called] == [{"a": 1}, {"a": 2}]


def test_what_a_connector_notes_on_a_call_is_kept() -> None:
    """A call's own metadata, such as Gemini's thought signature, which must be sent back, is not lost."""
    noted = piece(
        None,
        id="a",
        name="t-add",
        arguments={"a": 1},
        metadata={"thought_signature": b"\xff\x00"},
    )
    (call,) = assembled(chunk(noted)).items
    assert call.metadata == {"thought_signature": b"\xff\x00"}


def test_arguments_as_a_mapping_stay_one() -> None:
    """Whole arguments are passed on as they came."""
    assert calls_in(
        assembled(chunk(piece(id="a", name="t-add", arguments={"a": 1})))
    ) == [("a", "t-add", {"a": 1})]


def test_other_contents_are_kept() -> None:
    """What is neither text nor call is in the message as it came."""
    image = ImageContent(uri="https://example.org/cat.png")
    message = assembled(chunk(words("A cat: ")), chunk(image), chunk(words("there.")))
    assert (image in message.items, text_in(message)) == (True, "A cat: there.")


def test_the_message_has_what_the_chunks_said() -> None:
    """Role, model, finish reason and every metadata key are kept; null never hides what was said before."""
    message = assembled(
        chunk(words("Hi."), id="x", logprobs=None, usage=None),
        chunk(finish_reason=FinishReason.STOP, id="x", logprobs=[1]),
        chunk(
            id=None,
            logprobs=None,
            usage=CompletionUsage(prompt_tokens=5, completion_tokens=2),
        ),
    )
    assert message.role == "assistant"
    assert message.ai_model_id == "m"
    assert message.finish_reason == "stop"
    assert message.metadata["id"] == "x"
    assert message.metadata["logprobs"] == [1]
    assert message.metadata["usage"].completion_tokens == 2


def test_chunks_are_not_changed() -> None:
    """The connector's chunks are afterwards what they were."""
    chunks = [
        chunk(words("Hi."), piece(id="a", name="t-add"), id="x"),
        chunk(piece(arguments="{}")),
    ]
    before = [one.model_dump() for one in chunks]
    assembled(*chunks)
    assert [one.model_dump() for one in chunks] == before


def lines_run(work: Callable[[], object]) -> int:
    """Count the lines of Python that some work runs, each turn of a comprehension included."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def texts(count: int) -> list[StreamingChatMessageContent]:
    return [chunk(words("x")) for _ in range(count)]


def arguments(count: int) -> list[StreamingChatMessageContent]:
    return [
        chunk(piece(id="a", name="t-add")),
        *(chunk(piece(arguments="x")) for _ in range(count - 1)),
    ]


def many_calls(count: int) -> list[StreamingChatMessageContent]:
    return [
        chunk(
            piece(n // 10, id=None if n % 10 else f"id{n}", name="t-add", arguments="x")
        )
        for n in range(count)
    ]


@pytest.mark.parametrize(
    ("made", "few", "many"), [(texts, 2000, 20000), (arguments, 2000, 20000)]
)
def test_a_long_reply_takes_linear_work(
    made: Callable[[int], Any], few: int, many: int
) -> None:
    """Ten times the chunks are ten times the work, up to 20,000 chunks."""
    short, long = made(few), made(many)
    assert lines_run(lambda: assembled(*long)) < 1.2 * (many / few) * lines_run(
        lambda: assembled(*short)
    )


def test_a_reply_of_many_calls_takes_linear_work() -> None:
    """Many calls do not make each piece dearer: from some number on, twice the calls are twice the work."""
    short, long = many_calls(6000), many_calls(12000)
    assert lines_run(lambda: assembled(*long)) < 2.6 * lines_run(
        lambda: assembled(*short)
    )


def test_a_long_text_is_copied_a_few_times_only() -> None:
    """No copy of the text so far is made for each chunk: what is returned, all told, is the text once."""
    assembly = ReplyAssembly()
    returned = sum(len(assembly.add(chunk(words("x" * 10)))) for _ in range(20000))
    assert returned == len(text_in(assembly.message())) == 200_000
