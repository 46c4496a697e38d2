"""A script hands out its answers in order, names its calls, and says clearly when it cannot answer."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_ext.core.errors import PlannerExtError
from planner_ext.core.values import Usage
from planner_ext.testing import (
    ScriptedCall,
    ScriptedFault,
    ScriptedReply,
    ScriptedRequest,
    ScriptExhaustedError,
    call,
    calls,
    say,
)
from planner_ext.testing.script import Script, ScriptReader, count_tokens, deltas
from support.values import each_of


def answers(script: Script, number: int) -> list[object]:
    """What the first requests get."""
    reader = ScriptReader(script)
    return [
        reader.answer(ScriptedRequest(index=index, messages=[]))
        for index in range(number)
    ]


def ids(replies: list[object]) -> list[str | None]:
    return [
        item.id
        for reply in replies
        if isinstance(reply, ScriptedReply)
        for item in reply.calls
    ]


def test_the_constructors_make_plain_values() -> None:
    """``say``, ``call`` and ``calls`` are short for the values that they return."""
    assert say("hi") == ScriptedReply(text="hi")
    assert call("a-f") == ScriptedReply(calls=(ScriptedCall(name="a-f", arguments={}),))
    assert call("a-f", "", id="x") == ScriptedReply(
        calls=(ScriptedCall(name="a-f", arguments="", id="x"),)
    )
    assert calls(call("a-f"), call("a-g"), text="both") == ScriptedReply(
        text="both", calls=(ScriptedCall(name="a-f"), ScriptedCall(name="a-g"))
    )


def test_arguments_are_compact_json_in_the_letters_of_their_language() -> None:
    """A mapping is encoded without spaces and without escaping letters; text is left as it is."""
    assert (
        ScriptedCall(name="a-f", arguments={"to": "Zoë", "cc": []}).arguments_text
        == '{"to":"Zoë","cc":[]}'
    )
    assert (
        ScriptedCall(name="a-f", arguments='{"a": 1, "b"').arguments_text
        == '{"a": 1, "b"'
    )


def test_the_finish_reason_follows_from_the_reply() -> None:
    """``tool_calls`` with calls, ``stop`` without, and what the script says where it says something."""
    assert (call("a-f").ended_by, say("hi").ended_by) == ("tool_calls", "stop")
    assert ScriptedReply(text="half", finish_reason="length").ended_by == "length"


def test_ids_count_the_calls_of_the_whole_script() -> None:
    """The n-th call of a script is ``call_n`` in every run; explicit ids are kept, the empty one included."""
    script = [
        calls(call("a-f"), call("a-f", id="mine")),
        say("between"),
        calls(call("a-f"), call("a-f", id="")),
    ]

    assert ids(answers(script, 3)) == ["call_1", "mine", "call_3", ""]
    assert ids(answers(lambda _: call("a-f"), 3)) == ["call_1", "call_2", "call_3"]


def test_an_exhausted_script_says_how_long_it_was() -> None:
    """One request more than replies raises an error of this package that names both numbers and the way out."""
    with pytest.raises(
        ScriptExhaustedError, match=r"has 2 replies and request 2 asked .* Add a reply"
    ) as raised:
        answers([say("one"), say("two")], 3)

    assert isinstance(raised.value, PlannerExtError)


def test_a_function_answers_every_request() -> None:
    """A script that is a function sees each request and never ends."""
    script = answers(lambda request: say(f"answer {request.index}"), 3)

    assert script == [say("answer 0"), say("answer 1"), say("answer 2")]


def test_an_item_may_decide_when_it_is_asked() -> None:
    """A function among the replies gets the request that has come to it."""
    script = [say("first"), lambda request: say(str(request.index))]

    assert answers(script, 2) == [say("first"), say("1")]


def test_a_script_may_be_endless() -> None:
    """A script is read one item at a time."""
    assert answers((say(str(number)) for number in itertools.count()), 3) == [
        say("0"),
        say("1"),
        say("2"),
    ]


def test_faults_and_exceptions_are_answers() -> None:
    """Each one replaces one reply."""
    fault, gone = ScriptedFault(status=429), ConnectionError("gone")

    assert answers([fault, gone, lambda _: gone, say("back")], 4) == [
        fault,
        gone,
        gone,
        say("back"),
    ]


@each_of(
    "script", [["hello"], "hello", lambda _: None], ids=["item", "text", "function"]
)
def test_an_invalid_answer_is_refused_with_the_way_out(script: Script) -> None:
    """Anything in place of a reply names itself and the constructors of replies."""
    with pytest.raises(
        TypeError,
        match=r"request 0 met .*say\(\.\.\.\) and call\(\.\.\.\) make replies",
    ):
        answers(script, 1)


def test_a_single_reply_is_refused_as_a_script() -> None:
    """A reply by itself is refused when the script is made, with what a script is."""
    with pytest.raises(TypeError, match="A script is a list of replies"):
        ScriptReader(say("alone"))  # pyright: ignore[reportArgumentType]  # junk, on purpose


def test_tokens_are_given_or_a_quarter_of_the_characters() -> None:
    """Without given counts a reply costs a quarter of its characters, at least one; messages and tools both count."""
    messages = [{"role": "user", "content": "x" * 400}]

    assert count_tokens(ScriptedReply(), messages=[], tools=None) == Usage(
        prompt_tokens=1, completion_tokens=1
    )
    assert count_tokens(say("x" * 40), messages=messages, tools=None) == Usage(
        prompt_tokens=107, completion_tokens=10
    )
    assert (
        count_tokens(
            call("a-f", "x" * 37), messages=messages, tools=["y" * 397]
        ).prompt_tokens
        == 207
    )
    assert (
        count_tokens(call("a-f", "x" * 37), messages=[], tools=None).completion_tokens
        == 10
    )
    given = ScriptedReply(prompt_tokens=0, completion_tokens=7)
    assert count_tokens(given, messages=messages, tools=None) == Usage(
        prompt_tokens=0, completion_tokens=7
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(
    text=st.none() | st.text(),
    arguments=st.lists(st.dictionaries(st.text(), json_values) | st.text(), max_size=4),
    chunk_size=st.integers(1, 12),
)
def test_the_pieces_of_a_stream_are_the_reply(
    text: str | None, arguments: list[dict[str, object] | str], chunk_size: int
) -> None:
    """However finely it is cut, the pieces put together are the text and the arguments of each call."""
    reply = calls(*(call("a-f", each) for each in arguments), text=text)

    pieces = [delta for delta, _ in deltas(reply, chunk_size=chunk_size)]
    texts = [piece.get("content") or "" for piece in pieces]
    parts = [part for piece in pieces for part in piece.get("tool_calls", ())]
    found = [(part["index"], part["function"].get("arguments", "")) for part in parts]
    sent = [
        "".join(piece for call, piece in found if call == index)
        for index in range(len(arguments))
    ]

    assert "".join(texts) == (text or "")
    assert all(len(piece) <= chunk_size for piece in texts)
    assert [
        each if isinstance(original, str) else json.loads(each)
        for original, each in zip(arguments, sent, strict=True)
    ] == arguments
