"""What may stand in a session's conversation: pairs, prompts and prefills, formats, and copies of everything."""

from typing import Any

import pytest
from pydantic import BaseModel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)

from planner_ext.errors import InvalidHistoryError, PlannerInvalidConfigurationError
from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.testing import call, calls, say
from support.session import (
    CLOSED,
    OPEN,
    Talks,
    Tools,
    ask,
    call_message,
    kernel_of,
    message,
    result_message,
    served,
)
from support.values import each_of

ADD = call("t-add", {"a": 1, "b": 2})
USER = message(AuthorRole.USER, text="?")


class Sum(BaseModel):
    """A structured answer."""

    value: int


@each_of(
    "half", [[call_message("c1")], [result_message("c1")], [call_message("c1"), USER]]
)
@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_half_a_pair_is_refused(
    config: AutomaticToolUseConfig, half: list[Any]
) -> None:
    """A call without its result, or a result without its call, cannot be appended or begin a session."""
    session = ToolUseSession(
        kernel_of([]), initial_prompts=[USER], tool_use_config=config
    )
    with pytest.raises(InvalidHistoryError, match=r"'c1'.*nothing was added"):
        session.append(half)
    assert len(session.history()) == 1
    with pytest.raises(InvalidHistoryError, match="'c1'"):
        ToolUseSession(kernel_of([]), initial_prompts=half)


@each_of("role", ["user", "system", "developer", "tool", "assistant"])
@each_of(
    "item",
    [
        FunctionCallContent(id="c1", name="t-add"),
        FunctionResultContent(id="c1", name="t-add", result="3"),
    ],
)
async def test_a_lone_call_or_result_is_refused_in_a_message_of_any_role(
    role: str, item: Any
) -> None:
    """A call is the assistant's and a result a tool's; a lone one elsewhere would never be sent, or be refused."""
    session = ToolUseSession(kernel_of([]), initial_prompts=[USER])
    with pytest.raises(InvalidHistoryError, match=r"'c1'.*nothing was added"):
        session.append([ChatMessageContent(role=AuthorRole(role), items=[item])])
    assert len(session.history()) == 1


@each_of(
    "given",
    [[call_message("c1")], [USER, call_message("c1", "c2"), result_message("c1")]],
)
async def test_a_prompt_with_an_unanswered_call_is_refused(
    talk: Talks, given: list[Any]
) -> None:
    """The ids are named, nothing is sent and nothing is kept."""
    talking = talk([])
    with pytest.raises(
        InvalidHistoryError, match=r"'c\d' has no result.*nothing was sent"
    ):
        await talking.ask(given)
    assert (talking.requests, talking.shape) == (0, [])


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_a_complete_pair_is_fine_and_later_calls_are_as_ever(
    talk: Talks, config
) -> None:
    """A pair may be appended or given with the prompt; the model continues from it, calls included."""
    talking = talk([ADD, say("6.")], config)
    talking.session.append([USER, call_message("c1"), result_message("c1")])
    answer = await talking.ask_to_the_end([call_message("c2"), result_message("c2")])
    assert answer == "6."
    assert [role for role, _ in talking.shape] == [
        "user",
        *["assistant", "tool"] * 3,
        "assistant",
    ]
    assert talking.tools.seen == [(1, 2)]


async def test_results_may_come_one_by_one_and_not_twice(talk: Talks) -> None:
    """What is pending shrinks with each result; until all have come, no prompt is sent."""
    talking = talk([calls(ADD, ADD), say("Done.")], OPEN)
    session = talking.session
    await talking.ask("?")
    first, second = session.pending
    session.append(first.result(3))
    assert session.pending == (second,)
    with pytest.raises(InvalidHistoryError, match="'call_1'"):
        session.append([first.result(3)])
    with pytest.raises(InvalidHistoryError, match="'call_2' has no result"):
        await talking.ask("Never mind.")
    with pytest.raises(InvalidHistoryError, match="'call_2' has no result"):
        session.append("Never mind.")
    session.append(FunctionResultContent(id="call_2", name="t-add", result="3"))
    assert await talking.ask() == "Done."


async def test_a_pending_call_may_be_appended_with_its_result(talk: Talks) -> None:
    """Calls and results given as a pair are taken as one: the call is not there twice."""
    talking = talk([ADD, say("3.")], OPEN)
    await talking.ask("?")
    talking.session.append([call_message("call_1"), result_message("call_1")])
    assert await talking.ask() == "3."
    assert [role for role, _ in talking.shape] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


async def test_results_in_one_message_are_sent_one_by_one(streamed: bool) -> None:
    """A tool message with two results becomes two, since of one message only the first would be sent."""
    async with served([calls(ADD, ADD), say("Done.")], Tools()) as (kernel, server):
        session = ToolUseSession(kernel, tool_use_config=OPEN)
        await ask(session, "?", streamed=streamed)
        results = [
            FunctionResultContent(id=each.id, name="t-add", result="3")
            for each in session.pending
        ]
        session.append([message(AuthorRole.TOOL, *results)])
        assert await ask(session, streamed=streamed) == "Done."
        assert server.refused == []
        assert [each["role"] for each in server.requests[1].messages] == [
            "user",
            "assistant",
            "tool",
            "tool",
        ]


async def test_a_closed_loop_refuses_a_response_format(talk: Talks) -> None:
    """Open loop is named as the way; nothing is sent. The settings may not hold one either."""
    talking = talk([])
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"response_format .*closed loop.*enabled=False",
    ):
        await talking.ask("?", response_format=Sum)
    assert (talking.requests, talking.shape) == (0, [])
    with pytest.raises(PlannerInvalidConfigurationError, match="response_format"):
        talk(
            [],
            settings=PromptExecutionSettings(
                extension_data={"response_format": {"type": "json_object"}}
            ),
        )


@each_of(
    ("given", "sent"),
    [
        (Sum, "json_schema"),
        ({"type": "json_object"}, "json_object"),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"type": "object"}},
            },
            "json_schema",
        ),
    ],
)
async def test_an_open_loop_takes_a_response_format_for_one_prompt(
    streamed: bool, given: Any, sent: str
) -> None:
    """A model class or OpenAI's mapping is sent with this prompt, and not with the next."""
    async with served([say('{"value": 3}'), say("Plain.")], Tools()) as (
        kernel,
        server,
    ):
        session = ToolUseSession(kernel, tool_use_config=OPEN)
        assert (
            await ask(session, "As JSON?", streamed=streamed, response_format=given)
            == '{"value": 3}'
        )
        assert await ask(session, "And now?", streamed=streamed) == "Plain."
        first, second = (
            request.body.get("response_format") for request in server.requests
        )
        assert isinstance(first, dict)
        assert first["type"] == sent
        assert second is None


async def test_a_response_format_that_the_service_does_not_take_is_named(
    streamed: bool,
) -> None:
    """The parameter and the value are in the error; nothing is sent."""
    async with served([], Tools()) as (kernel, server):
        session = ToolUseSession(kernel, tool_use_config=OPEN)
        with pytest.raises(
            PlannerInvalidConfigurationError, match=r"response_format must be .* got 5"
        ):
            await ask(session, "?", streamed=streamed, response_format=5)
        assert server.requests == []


async def test_a_closed_loop_refuses_a_prefilled_reply(talk: Talks) -> None:
    """Neither an argument nor an appended message may end in the assistant's turn; open loop is named as the way."""
    talking = talk([say("Yes.")])
    prefill = message(AuthorRole.ASSISTANT, text="The answer is")
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"assistant's in closed loop.*enabled=False",
    ):
        await talking.ask([USER, prefill])
    talking.session.append([USER, prefill])
    with pytest.raises(PlannerInvalidConfigurationError, match="closed loop"):
        await talking.ask()
    assert talking.requests == 0
    assert await talking.ask("Is it?") == "Yes."


async def test_an_open_loop_continues_from_a_prefilled_reply(talk: Talks) -> None:
    """The prefill is sent last, and the reply stands after it."""
    talking = talk([say(" 42.")], OPEN)
    assert (
        await talking.ask([USER, message(AuthorRole.ASSISTANT, text="The answer is")])
        == " 42."
    )
    assert [each["role"] for each in talking.service.requests[0].messages] == [
        "user",
        "assistant",
    ]
    assert talking.shape[1:] == [("assistant", "The answer is"), ("assistant", " 42.")]


@each_of("given", ["", "  ", 5, [{"role": "user"}], {"role": "user"}, ["text"]])
async def test_anything_but_messages_is_refused(talk: Talks, given: Any) -> None:
    """An empty text and anything but messages is named, and leaves no trace."""
    talking = talk([])
    with pytest.raises(PlannerInvalidConfigurationError, match=r"^prompt must"):
        await talking.ask(given)
    with pytest.raises(PlannerInvalidConfigurationError, match=r"^messages must"):
        talking.session.append(given)
    assert talking.shape == []


async def test_there_has_to_be_something_to_answer(talk: Talks) -> None:
    """``prompt()`` in an empty session is refused by name."""
    with pytest.raises(PlannerInvalidConfigurationError, match="the session is empty"):
        await talk([]).ask()


def test_initial_prompts_are_messages() -> None:
    """A bare text is refused, since it does not say whose it is."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="initial_prompts must be messages"
    ):
        ToolUseSession(kernel_of([]), initial_prompts="Be brief.")  # pyright: ignore[reportArgumentType]  # junk, on purpose


async def test_the_history_is_a_copy_of_everything(talk: Talks) -> None:
    """Initial prompts of every role are in it; changing it, or what was passed, changes nothing in the session."""
    given = ChatHistory()
    for role in (
        AuthorRole.DEVELOPER,
        AuthorRole.SYSTEM,
        AuthorRole.USER,
        AuthorRole.ASSISTANT,
    ):
        given.add_message(message(role, text=role.value))
    talking = talk([ADD, say("3.")], initial_prompts=given)
    asked = message(AuthorRole.USER, text="?")
    await talking.ask(asked)
    kept = talking.shape
    assert [role for role, _ in kept] == [
        *("developer", "system", "user", "assistant"),
        *("user", "assistant", "tool", "assistant"),
    ]
    history = talking.session.history()
    for each in (*history, *given, asked):
        each.items.clear()
        each.metadata["new"] = True
    history.messages.clear()
    assert talking.shape == kept
    assert not any("new" in each.metadata for each in talking.session.history())


async def test_nothing_of_the_callers_is_changed(talk: Talks) -> None:
    """Messages, settings and arguments are as they were."""
    settings = PromptExecutionSettings(extension_data={"temperature": 0.5})
    prompts = [USER, call_message("c1"), result_message("c1")]
    before = (settings.model_dump(), [each.model_dump() for each in prompts])
    talking = talk([ADD, say("3.")], settings=settings, initial_prompts=prompts)
    await talking.ask("?")
    assert (settings.model_dump(), [each.model_dump() for each in prompts]) == before
