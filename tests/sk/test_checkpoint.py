"""A run as JSON text: it comes back as it was, or is refused by name; and what must not be in it is not."""

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    ImageContent,
    TextContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext import Budget, FunctionInvokingChatCompletion
from planner_ext.core.facts import RunStarted
from planner_ext.core.fold import fold
from planner_ext.errors import InvalidJournalError, PlannerException
from planner_ext.hitl_manager import Checkpoint
from planner_ext.sk.chat.history import render
from planner_ext.sk.errors import InvalidCheckpointError
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.examples import some_of, tried
from support.odd import ODD, every_place, with_odd
from support.served import Answer, Tools, asked
from support.stock import add_filter
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]

ADD = call("t-add", {"a": 1, "b": 2})
SCRIPT = [
    calls(ADD, call("t-fail"), call("t-no"), text="Let me see."),
    calls(ADD, call("t-echo", '{"text": "é{}"}')),
]
BUDGET = Budget(
    max_iterations=2, max_calls_per_function={"t-add": 9}, on_limit="return_calls"
)
KEY = b"the signing key"


async def limited(history: ChatHistory, tools: Tools, **options: Any) -> Answer:
    """Run into the limit with a batch open: of all ends the one with most in its journal."""
    given: dict[str, Any] = {"budget": BUDGET, **options}
    service = FunctionInvokingChatCompletion(ScriptedChatCompletion(SCRIPT), **given)
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    arguments = KernelArguments(api_key="s3cret", connection=object())
    return await asked(
        service, history, tools.kernel(), settings, streamed=False, arguments=arguments
    )


@pytest.fixture
async def text(history: ChatHistory, tools: Tools) -> str:
    return (await limited(history, tools)).metadata["checkpoint"]


async def test_a_printed_checkpoint_names_its_run_and_shows_no_message(
    text: str,
) -> None:
    """In a log or a traceback a checkpoint is one short line: the conversation in it stays out."""
    checkpoint = Checkpoint.from_json(text)
    assert (
        repr(checkpoint)
        == f"Checkpoint(run_id={checkpoint.run_id!r}, {len(checkpoint.facts)} facts)"
    )


async def test_a_checkpoint_comes_back_as_it_was(text: str) -> None:
    """Text to checkpoint to text is the same text, and the state is the same to the last count."""
    checkpoint = Checkpoint.from_json(text)
    assert checkpoint.to_json() == text
    state = checkpoint.state()
    assert (state.usage.iterations, state.usage.tool_calls) == (2, 2)
    assert state.rules.limits == BUDGET
    assert checkpoint.run_id == state.run_id
    assert fold(checkpoint.facts) == state


async def test_the_messages_of_a_checkpoint_are_those_of_the_run(
    text: str, history: ChatHistory
) -> None:
    """The transcript read back from JSON is sent exactly as the history that the run left."""
    messages = render(Checkpoint.from_json(text).state().transcript)
    assert [message.to_dict() for message in messages] == [
        message.to_dict() for message in history.messages
    ]


async def test_a_checkpoint_is_plain_data_with_a_schema_number(text: str) -> None:
    """JSON as the standard has it, ``schema`` an integer at its top."""

    def refuse(name: str) -> None:
        raise AssertionError(name)

    data = json.loads(text, parse_constant=refuse)
    assert type(data["schema"]) is int
    assert data.keys() == {"schema", "kind", "facts"}


async def test_the_applications_arguments_are_not_in_it(text: str) -> None:
    """Neither names nor values of the application's arguments are stored."""
    for secret in ("api_key", "s3cret", "connection"):
        assert secret not in text


async def test_the_arguments_are_not_in_it_with_filters_either(
    history: ChatHistory, tools: Tools
) -> None:
    """Filters, which see the arguments, do not make them part of the record."""
    kernel = tools.kernel()

    async def passing(context: Any, next: Any) -> None:
        await next(context)

    add_filter(kernel, "auto_function_invocation", passing)
    add_filter(kernel, "function_invocation", passing)
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(SCRIPT), budget=BUDGET
    )
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    arguments = KernelArguments(api_key="s3cret")
    answer = await asked(
        service, history, kernel, settings, streamed=False, arguments=arguments
    )
    assert "s3cret" not in answer.metadata["checkpoint"]
    assert "s3cret" not in history.model_dump_json()


async def test_a_signed_checkpoint_is_read_with_its_key(text: str) -> None:
    """Signed text is read with the key it was signed with, and without looking at the signature where none is asked."""
    checkpoint = Checkpoint.from_json(text)
    signed = checkpoint.to_json(KEY)
    assert Checkpoint.from_json(signed, KEY).to_json() == text
    assert Checkpoint.from_json(signed).to_json() == text
    assert KEY.decode() not in signed


def altered(text: str, **changes: Any) -> str:
    return json.dumps({**json.loads(text), **changes})


async def test_with_a_key_unsigned_and_wrongly_signed_text_is_refused(
    text: str,
) -> None:
    """No signature, another key, an altered fact, schema or signature: refused, and the way out is said."""
    signed = Checkpoint.from_json(text).to_json(KEY)
    facts = json.loads(signed)["facts"]
    facts[0]["rules"]["limits"]["max_iterations"] = 99
    for forged in (
        text,
        Checkpoint.from_json(text).to_json(b"another key"),
        altered(signed, facts=facts),
        altered(signed, facts=json.loads(signed)["facts"][:-1]),
        altered(signed, signature=""),
        altered(signed, signature=None),
        altered(signed, signature=["x"]),
        altered(signed, signature="é"),
    ):
        with pytest.raises(InvalidCheckpointError, match="signed with this key"):
            Checkpoint.from_json(forged, KEY)


async def test_formatting_does_not_break_a_signature(text: str) -> None:
    """A store that formats the JSON, indented and sorted, keeps the checkpoint valid."""
    signed = Checkpoint.from_json(text).to_json(KEY)
    again = json.dumps(json.loads(signed), indent=2, sort_keys=True, ensure_ascii=False)
    assert Checkpoint.from_json(again, KEY) == Checkpoint.from_json(text)


@each_of("key", ["text", b"", 7], ids=repr)
async def test_an_invalid_key_is_refused_by_name(text: str, key: Any) -> None:
    """A key that is empty, or not of bytes, is an error that says so: it would protect nothing."""
    with pytest.raises(PlannerException, match="key"):
        Checkpoint.from_json(text).to_json(key)
    with pytest.raises(PlannerException, match="key"):
        Checkpoint.from_json(text, key)


async def test_a_newer_checkpoint_is_refused(text: str) -> None:
    """A schema number above ours: refused, naming both numbers and the way out."""
    with pytest.raises(
        InvalidCheckpointError, match=r"schema 2; .* reads up to 1.*newer one"
    ):
        Checkpoint.from_json(altered(text, schema=2))


@each_of("schema", [None, "1", True, 0, 1.5])
async def test_a_schema_that_is_not_a_number_is_refused(text: str, schema: Any) -> None:
    """The schema of a checkpoint is a number; anything else is refused."""
    with pytest.raises(InvalidCheckpointError, match="schema number"):
        Checkpoint.from_json(altered(text, schema=schema))


@each_of(
    "damaged",
    [
        *("", "null", "[]", "{}", '"text"', "[" * 100_000),
        '{"schema": 1, "kind": "checkpoint"}',
        '{"schema": 1, "kind": "checkpoint", "facts": {}}',
    ],
)
def test_text_other_than_a_checkpoint_is_refused(damaged: str) -> None:
    """Any other text is refused by name, as our error and Semantic Kernel's."""
    with pytest.raises(InvalidCheckpointError, match=r"Expected|damaged") as raised:
        Checkpoint.from_json(damaged)
    assert isinstance(raised.value, InvalidJournalError)
    assert isinstance(raised.value, PlannerException)


def test_a_checkpoint_without_a_run_is_refused() -> None:
    """A journal without facts does not describe a run."""
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json('{"schema":1,"kind":"checkpoint","facts":[]}')


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_truncated_checkpoint_is_refused(
    text: str, data: st.DataObject
) -> None:
    """Cut anywhere, it is refused by name."""
    with pytest.raises(InvalidCheckpointError):
        Checkpoint.from_json(text[: data.draw(st.integers(0, len(text) - 1))])


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.text(max_size=3),
    st.just([]),
    st.just({}),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [
        path,
        *(place for key, child in items for place in places(child, (*path, key))),
    ]


@settings(tried(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_an_altered_checkpoint_is_a_run_or_refused(
    text: str, data: st.DataObject
) -> None:
    """With any value in any place, the text is refused by name, or is a run whose messages can be read."""
    whole = json.loads(text)
    *path, last = data.draw(
        st.sampled_from([place for place in places(whole) if place])
    )
    holder = whole
    for key in path:
        holder = holder[key]
    if isinstance(holder, list) and data.draw(st.booleans()):
        del holder[last]
    else:
        holder[last] = data.draw(JUNK)
    try:
        checkpoint = Checkpoint.from_json(json.dumps(whole))
    except InvalidCheckpointError:
        return
    render(checkpoint.state().transcript)


def started(*messages: ChatMessageContent) -> Checkpoint:
    run = RunStarted(run_id="r", rules=fold(()).rules, messages=messages, at=0.0)
    return Checkpoint((run,))


@each_of(
    "message",
    [
        ChatMessageContent(
            role=AuthorRole.USER, items=[TextContent(text="half a pair: \ud83d")]
        ),
        ChatMessageContent(
            role=AuthorRole.USER,
            items=[TextContent(text="x", metadata={"signature": b"\xff\x00"})],
        ),
        ChatMessageContent(
            role=AuthorRole.USER,
            items=[TextContent(text="x")],
            metadata={"raw": b"\xff", "n": {1}},
        ),
        ChatMessageContent(
            role=AuthorRole.USER,
            items=[TextContent(text="x")],
            metadata={"score": float("nan")},
        ),
        ChatMessageContent(
            role=AuthorRole.USER,
            items=[ImageContent(data_uri="data:image/jpeg;base64,/9j/AA==")],
        ),
    ],
    ids=["surrogate", "bytes", "message-bytes", "nan", "image"],
)
def test_any_message_can_be_kept(message: ChatMessageContent) -> None:
    """What connectors and callers put into messages never keeps a run from being written down, and read again."""
    text = started(message).to_json()
    (read,) = render(Checkpoint.from_json(text).state().transcript)
    assert read.to_dict() == message.to_dict()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


async def test_a_limited_run_of_gemini_can_be_kept(ask: Ask) -> None:
    """A reply whose metadata has bytes, as Gemini's thought signatures are, does not make a limited run fail."""
    inner = ScriptedChatCompletion(
        [ADD, say("Enough.")], metadata={"thought_signature": b"\xff\x00"}
    )
    answer = await ask(
        FunctionInvokingChatCompletion(inner, budget=Budget(max_iterations=2))
    )
    assert (answer.text, answer.metadata["status"]) == ("Enough.", "limit_reached")
    assert (
        Checkpoint.from_json(answer.metadata["checkpoint"]).state().usage.iterations
        == 2
    )


async def test_the_returned_metadata_survives_json(
    ask: Ask, history: ChatHistory
) -> None:
    """All metadata of a limited run's message can be written as JSON with the history, checkpoint included."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(SCRIPT), budget=Budget(max_iterations=1)
    )
    answer = await ask(service)
    history.add_message(answer.message)
    loaded = ChatHistory.model_validate_json(history.model_dump_json())
    assert loaded.messages[-1].metadata["checkpoint"] == answer.metadata["checkpoint"]
    assert Checkpoint.from_json(loaded.messages[-1].metadata["checkpoint"]).run_id


@pytest.mark.examples
@each_of("odd", ODD)
def test_an_odd_value_at_any_place_is_read_or_refused_by_name(
    text: str, odd: str
) -> None:
    """Every defect of a checkpoint is an InvalidCheckpointError: no overflow, no recursion, no bad digits."""
    for path in some_of(every_place(json.loads(text))):
        with suppress(InvalidCheckpointError):
            Checkpoint.from_json(with_odd(text, path, ODD[odd])).to_json()
