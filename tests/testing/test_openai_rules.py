"""The scripted server refuses what OpenAI refuses, and says where it is wrong."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner_ext.testing.rules import find_violation
from support.values import each_of

USER: dict[str, object] = {"role": "user", "content": "What is 1 + 2?"}


def asks(*ids: str) -> dict[str, object]:
    """An assistant message that makes a call for each id."""
    return {
        "role": "assistant",
        "tool_calls": [
            {
                "id": each,
                "type": "function",
                "function": {"name": "math-add", "arguments": "{}"},
            }
            for each in ids
        ],
    }


def result(call_id: str) -> dict[str, object]:
    return {"role": "tool", "tool_call_id": call_id, "content": "3"}


def request(*messages: object, **others: object) -> dict[str, object]:
    return {"model": "m", "messages": list(messages), **others}


def offering(*names: str) -> list[object]:
    return [
        {"type": "function", "function": {"name": name, "parameters": {}}}
        for name in names
    ]


def changed_call(**changes: object) -> dict[str, object]:
    """An assistant message with one call that has something wrong with it."""
    made = {
        "id": "a",
        "type": "function",
        "function": {"name": "math-add", "arguments": "{}"},
        **changes,
    }
    return {"role": "assistant", "tool_calls": [made]}


def refusal(body: dict[str, object]) -> tuple[str, str]:
    """Parameter and message of the violation that a request must have."""
    violation = find_violation(body)
    assert violation is not None
    return violation.param, violation.message


@each_of(
    "body",
    [
        request(USER),
        request(
            {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
            USER,
        ),
        request(
            USER,
            asks("a", "b"),
            result("b"),
            result("a"),
            {"role": "assistant", "content": "3"},
            USER,
        ),
        request(USER, asks("a"), result("a"), asks("a"), result("a")),
        request(USER, {"role": "assistant", "content": None, "refusal": "No."}, USER),
        request(USER, {"role": "assistant", "content": "", "tool_calls": None}, USER),
        request(
            USER,
            tools=offering("math-add"),
            tool_choice="required",
            parallel_tool_calls=False,
        ),
        request(
            USER,
            tools=offering("math-add"),
            tool_choice={"type": "function", "function": {"name": "math-add"}},
        ),
        request(USER, tools=None, tool_choice=None, something_new=1),
    ],
)
def test_a_request_that_openai_takes_passes(body: dict[str, object]) -> None:
    """Well-formed transcripts, results in any order, ids used again later, and unknown keys are taken."""
    assert find_violation(body) is None


@each_of("messages", [None, [], {}, "hello"])
def test_messages_are_a_non_empty_array(messages: object) -> None:
    """A request without messages is refused."""
    assert refusal({"model": "m", "messages": messages})[0] == "messages"


@each_of("model", [None, "", 4])
def test_a_model_is_named(model: object) -> None:
    """A request without a model is refused."""
    assert refusal({"model": model, "messages": [USER]})[0] == "model"


@each_of(
    "message",
    ["hello", None, {}, {"role": "robot", "content": "x"}, {"role": ["user"]}],
)
def test_a_message_has_a_known_role(message: object) -> None:
    """Anything else is refused by its index."""
    param, text = refusal(request(USER, message))

    assert param == "messages[1]"
    assert "expected a message with role developer, system, user" in text


@each_of(
    "message",
    [
        {"role": "user", "content": None},
        {"role": "user"},
        {"role": "user", "content": []},
        {"role": "user", "content": None, "refusal": "No."},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": []},
        {"role": "assistant", "content": [], "tool_calls": asks("a")["tool_calls"]},
        {"role": "system", "content": 4},
    ],
)
def test_a_message_has_content(message: object) -> None:
    """Null and an empty array are refused, unless an assistant message has calls or a refusal."""
    assert refusal(request(USER, message))[0] == "messages[1].content"


def test_an_unanswered_call_is_named() -> None:
    """A call without its tool message is refused with the index of its message and the ids."""
    param, text = refusal(request(USER, asks("a", "b", "c"), result("b")))

    assert param == "messages[1].tool_calls"
    assert text.startswith(
        "messages[1]: an assistant message with 'tool_calls' must be followed by tool messages"
    )
    assert text.endswith("before the end of the messages: a, c.")


def test_a_call_is_answered_before_anything_else_is_said() -> None:
    """A user message between calls and results is refused, and the message named before which the result is missing."""
    _, text = refusal(request(USER, asks("a"), USER, result("a")))

    assert text.endswith("before messages[2] (role 'user'): a.")


@each_of(
    ("messages", "param"),
    [
        ((USER, result("a")), "messages[1].tool_call_id"),
        ((USER, asks("a"), result("b")), "messages[2].tool_call_id"),
        ((USER, asks("a"), result("a"), USER, result("a")), "messages[4].tool_call_id"),
        (
            (USER, asks("a"), {"role": "tool", "content": "3"}),
            "messages[2].tool_call_id",
        ),
    ],
)
def test_a_result_belongs_to_a_waiting_call(
    messages: tuple[object, ...], param: str
) -> None:
    """A tool message without a call right before it is refused by its index."""
    seen, text = refusal(request(*messages))

    assert seen == param
    assert "must be a response to a preceding message with 'tool_calls'" in text


def test_a_call_is_answered_once() -> None:
    """A second tool message for the same call is refused by its index and id."""
    assert refusal(
        request(USER, asks("a", "b"), result("a"), result("a"), result("b"))
    ) == (
        "messages[3].tool_call_id",
        "messages[3]: tool_call_id 'a' is already answered.",
    )


@each_of("calls", [[], {}, "add"])
def test_calls_are_a_non_empty_array(calls: object) -> None:
    """An empty array of calls is refused even beside text."""
    message = {"role": "assistant", "content": "text", "tool_calls": calls}

    assert refusal(request(USER, message))[0] == "messages[1].tool_calls"


@each_of("call_id", [None, "", 7, "x" * 41])
def test_a_call_has_an_id_of_up_to_forty_characters(call_id: object) -> None:
    """A missing, empty or too long id is refused by the place of its call."""
    assert (
        refusal(request(USER, changed_call(id=call_id)))[0]
        == "messages[1].tool_calls[0].id"
    )


def test_an_id_names_one_call() -> None:
    """Two calls of one message with the same id are refused by the place of the second."""
    assert refusal(request(USER, asks("a", "a"), result("a"))) == (
        "messages[1].tool_calls[1].id",
        "Duplicate 'messages[1].tool_calls[1].id': 'a' names two calls.",
    )


@each_of("name", [None, "", "math.add", "math add", "x" * 65, "add\n"])
def test_names_have_the_pattern_of_openai(name: object) -> None:
    """A name with other characters, or too long, is refused in a call and in a tool."""
    call = changed_call(function={"name": name, "arguments": "{}"})

    assert refusal(request(USER, call))[0] == "messages[1].tool_calls[0].function.name"
    assert refusal(
        request(USER, tools=[{"type": "function", "function": {"name": name}}])
    ) == (
        "tools[0].function.name",
        f"Invalid 'tools[0].function.name': {name!r} does not match the pattern ^[a-zA-Z0-9_-]{{1,64}}$.",
    )


@each_of("name", ["Ann Lee", "<ann>", "a" * 65])
def test_a_speaker_has_a_name_of_openais_pattern(name: str) -> None:
    """A name with a space or a bracket, as agents have, is refused by the place of its message."""
    assert refusal(request({**USER, "name": name}))[0] == "messages[0].name"


def test_json_is_asked_for_in_words_too() -> None:
    """The response format json_object alone is refused."""
    wanted = {"response_format": {"type": "json_object"}}
    assert refusal(request(USER, **wanted))[0] == "messages"
    assert find_violation(request({**USER, "content": "As JSON."}, **wanted)) is None


@pytest.mark.parametrize("arguments", [None, {"a": 1}])
def test_arguments_are_text(arguments: object) -> None:
    """Arguments other than strings are refused by the place of their call."""
    call = changed_call(function={"name": "math-add", "arguments": arguments})

    assert (
        refusal(request(USER, call))[0]
        == "messages[1].tool_calls[0].function.arguments"
    )


def test_a_tool_has_the_shape_of_a_function() -> None:
    """Tools are a non-empty array of functions."""
    assert refusal(request(USER, tools=[]))[0] == "tools"
    assert (
        refusal(request(USER, tools=[*offering("math-add"), "add"]))[0]
        == "tools[1].function.name"
    )


@each_of(
    "others",
    [{"tool_choice": "none"}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}],
)
def test_a_choice_needs_tools(others: dict[str, object]) -> None:
    """A tool choice without tools is refused, ``none`` included."""
    (key,) = others

    assert refusal(request(USER, **others)) == (
        key,
        f"Invalid value for '{key}': '{key}' is only allowed when 'tools' are specified.",
    )


@each_of(
    "choice", ["any", {"type": "function", "function": {"name": "math-sub"}}, {}, 3]
)
def test_a_choice_names_a_tool(choice: object) -> None:
    """A tool choice is one of three words or names a tool that is offered."""
    assert (
        refusal(request(USER, tools=offering("math-add"), tool_choice=choice))[0]
        == "tool_choice"
    )


@st.composite
def transcripts(draw: st.DrawFn) -> list[dict[str, object]]:
    """User messages and batches of calls, each answered right away in some order."""
    messages: list[dict[str, object]] = []
    for size in draw(st.lists(st.integers(0, 4), min_size=1, max_size=5)):
        batch = [f"call_{number}" for number in range(size)]
        messages.append(asks(*batch) if batch else USER)
        messages += [result(each) for each in draw(st.permutations(batch))]
    return messages


@given(transcripts())
def test_every_answered_transcript_passes_and_none_with_a_hole(
    messages: list[dict[str, object]],
) -> None:
    """A transcript in which each call is answered is taken; without or with twice any one tool message it is not."""
    assert find_violation(request(*messages)) is None

    for position, message in enumerate(messages):
        if message["role"] == "tool":
            before, after = messages[:position], messages[position + 1 :]
            assert find_violation(request(*before, *after)) is not None
            assert (
                find_violation(
                    request(*itertools.chain(before, [message, message], after))
                )
                is not None
            )
