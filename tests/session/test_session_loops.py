"""Open and closed loop: the same types, the same script, the same answer and the same history."""

import asyncio
from contextlib import aclosing

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import AuthorRole, ChatHistory

from planner_ext import BoundedFunctionChoiceBehavior, FunctionInvokingChatCompletion
from planner_ext.errors import InvalidReplyError
from planner_ext.session import OpenCall, ToolUseSession
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedPromptExecutionSettings,
    ScriptedReply,
    call,
    calls,
    say,
)
from support.session import (
    CLOSED,
    OPEN,
    Talks,
    Tools,
    ask,
    kernel_of,
    message,
    run,
    served,
    shape,
)
from support.stock import first_result
from support.values import each_of

ADD = call("t-add", {"a": 1, "b": 2})
BOTH = calls(ADD, call("t-add", {"a": 3, "b": 4}), text="Let me see. ")

CONVERSATION = [
    ("system", "Be brief."),
    ("user", "What is 1 + 2, and 3 + 4?"),
    ("assistant", 'Let me see.  call_1:t-add{"a":1,"b":2} call_2:t-add{"a":3,"b":4}'),
    ("tool", "call_1=3"),
    ("tool", "call_2=7"),
    ("assistant", 'call_3:t-add{"a":1,"b":2}'),
    ("tool", "call_3=3"),
    ("assistant", "3 and 7."),
]
SCRIPT = [BOTH, ADD, say("3 and 7.")]
BRIEF = [message(AuthorRole.SYSTEM, text="Be brief.")]


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_both_loops_come_to_the_same_answer_and_history(
    talk: Talks, config
) -> None:
    """With functions run by either side, the model is asked the same, and the session holds the same messages."""
    talking = talk(SCRIPT, config, initial_prompts=BRIEF)
    answer = await talking.ask_to_the_end("What is 1 + 2, and 3 + 4?")
    assert answer.endswith("3 and 7.")
    assert talking.shape == CONVERSATION
    assert talking.session.pending == ()
    assert talking.tools.seen == [(1, 2), (3, 4), (1, 2)]
    sent = [
        shape(ChatHistory(messages=request.history))
        for request in talking.service.requests
    ]
    assert sent == [CONVERSATION[:2], CONVERSATION[:5], CONVERSATION[:7]]
    assert {request.tools for request in talking.service.requests} == {
        ("t-add", "t-fail", "t-release", "t-wait")
    }


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_both_loops_over_http(streamed: bool, config) -> None:
    """The real OpenAI client against a server as strict as OpenAI's gives the same, and nothing is refused."""
    tools = Tools()
    async with served(SCRIPT, tools) as (kernel, server):
        session = ToolUseSession(kernel, initial_prompts=BRIEF, tool_use_config=config)
        answer = await ask(session, "What is 1 + 2, and 3 + 4?", streamed=streamed)
        while session.pending:
            session.append(
                [each.result(await run(kernel, each)) for each in session.pending]
            )
            answer = await ask(session, streamed=streamed)
        assert answer.endswith("3 and 7.")
        assert shape(session.history()) == CONVERSATION
        assert (len(server.requests), server.refused) == (3, [])
        assert server.requests[2].messages[2]["content"] == "Let me see. "


async def test_a_unary_prompt_gives_the_text_after_the_tools() -> None:
    """Of [text, tools, text] the last text alone is the answer."""
    session = ToolUseSession(kernel_of([BOTH, say("3 and 7.")]))
    assert await session.prompt("?") == "3 and 7."


async def test_a_stream_gives_the_first_text_waits_for_the_tools_and_continues() -> (
    None
):
    """Of [text, tools, text] the stream has the first text while the tools still run, and then the last."""
    tools = Tools()
    service = ScriptedChatCompletion(
        [calls(call("t-wait"), text="One moment. "), say("Waited.")], chunk_size=100
    )
    session = ToolUseSession(kernel_of(service, tools))
    async with aclosing(session.prompt_streaming("?")) as stream:
        assert await anext(stream) == "One moment. "
        following = asyncio.ensure_future(anext(stream))
        await tools.started.wait()
        assert not following.done()
        tools.go_on.set()
        assert await following == "Waited."
        assert [piece async for piece in stream] == []
    assert session.history()[-1].content == "Waited."


async def test_an_open_loop_returns_the_calls_and_runs_none(talk: Talks) -> None:
    """The text is that of the reply, the calls are pending with id, name and arguments, and no function has run."""
    talking = talk([BOTH], OPEN)
    assert await talking.ask("?") == "Let me see. "
    first, second = talking.session.pending
    assert first.id == "call_1"
    assert first.fully_qualified_name == "t-add"
    assert first.arguments == {"a": 1, "b": 2}
    assert second.arguments == {"a": 3, "b": 4}
    assert (talking.tools.seen, talking.requests) == ([], 1)


async def test_a_reply_without_text_is_an_empty_string(talk: Talks) -> None:
    """Calls alone are "" in open loop, never None."""
    assert await talk([ADD], OPEN).ask("?") == ""


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_a_reply_with_nothing_in_it_is_an_empty_string(
    talk: Talks, config
) -> None:
    """Neither text nor calls: "", and nothing of it in the history."""
    talking = talk([ScriptedReply()], config)
    assert await talking.ask("?") == ""
    assert talking.shape == [("user", "?")]


async def test_a_function_known_by_its_schema_only_is_the_callers_in_closed_loop_too(
    talk: Talks,
) -> None:
    """Its batch comes back as in open loop, and the session continues once it is answered."""
    schema = {
        "type": "function",
        "function": {"name": "browser-open", "parameters": {"type": "object"}},
    }
    settings = ScriptedPromptExecutionSettings(tools=[schema])
    talking = talk(
        [calls(call("browser-open"), ADD), say("Opened.")], settings=settings
    )
    assert await talking.ask("?") == ""
    assert [each.fully_qualified_name for each in talking.session.pending] == [
        "browser-open",
        "t-add",
    ]
    assert talking.tools.seen == []
    talking.session.append([each.result("done") for each in talking.session.pending])
    assert await talking.ask() == "Opened."


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_a_reply_that_was_cut_short_keeps_its_text_and_none_of_its_calls(
    talk: Talks, config
) -> None:
    """A truncated call is neither run nor pending; the text stays."""
    cut = ScriptedReply(text="I will", calls=ADD.calls, finish_reason="length")
    talking = talk([cut, say("Again.")], config)
    assert await talking.ask("?") == "I will"
    assert talking.session.pending == ()
    assert talking.shape == [("user", "?"), ("assistant", "I will")]
    assert await talking.ask("Go on.") == "Again."


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_a_cut_reply_without_text_is_an_empty_string(talk: Talks, config) -> None:
    """Where nothing is left of a reply the answer is "", and the question stays in the history."""
    talking = talk(
        [ScriptedReply(calls=ADD.calls, finish_reason="length"), say("Now.")], config
    )
    assert await talking.ask("?") == ""
    assert talking.shape == [("user", "?")]
    assert await talking.ask() == "Now."


async def test_calls_without_an_id_of_their_own_get_one(talk: Talks) -> None:
    """Missing and duplicate ids of an open-loop reply are reissued, so that each call can be answered."""
    same = {"a": 1, "b": 2}
    talking = talk(
        [
            calls(
                call("t-add", same, id=""),
                call("t-add", same, id="x"),
                call("t-add", same, id="x"),
            )
        ],
        OPEN,
    )
    await talking.ask("?")
    ids = [each.id for each in talking.session.pending]
    assert len(set(ids)) == 3
    assert all(ids)


async def test_malformed_arguments_are_named_and_can_be_answered(talk: Talks) -> None:
    """In open loop the arguments of a call that are no JSON object raise; the text is there, and so is a way on."""
    talking = talk([call("t-add", "{oops"), say("Sorry.")], OPEN)
    await talking.ask("?")
    (pending,) = talking.session.pending
    assert pending.raw_arguments == "{oops"
    with pytest.raises(InvalidReplyError, match=r"t-add \(call_1\).*raw_arguments"):
        _ = pending.arguments
    talking.session.append([pending.result("That was no JSON.")])
    assert await talking.ask() == "Sorry."


def test_a_result_is_written_as_the_closed_loop_writes_it() -> None:
    """Text as it is, None as "", everything else as JSON."""
    pending = OpenCall(id="c", fully_qualified_name="t-f")
    assert pending.arguments == {}
    results = [
        first_result(pending.result(value)).result
        for value in ("as is", None, {"a": [1]})
    ]
    assert results == ["as is", "", '{"a":[1]}']


@each_of("config", [OPEN, CLOSED], ids=["open", "closed"])
async def test_the_config_overrides_the_behaviour_on_who_runs_functions(
    talk: Talks, config
) -> None:
    """A behaviour narrows the functions; that it invokes them, or not, is overruled, and it is left as it was."""
    behavior = BoundedFunctionChoiceBehavior.Auto(
        auto_invoke=config is OPEN, filters={"included_functions": ["t-add"]}
    )
    settings = PromptExecutionSettings(function_choice_behavior=behavior)
    talking = talk([ADD, say("3.")], config, settings=settings)
    assert await talking.ask_to_the_end("?") == "3."
    assert talking.service.requests[0].tools == ("t-add",)
    assert behavior.auto_invoke_kernel_functions is (config is OPEN)


async def test_a_wrapped_service_is_unwrapped(streamed: bool) -> None:
    """Over a service that invokes functions by itself, an open loop still gets the calls."""
    tools = Tools()
    kernel = kernel_of([], tools)
    kernel.add_service(
        FunctionInvokingChatCompletion(ScriptedChatCompletion([ADD])), overwrite=True
    )
    session = ToolUseSession(kernel, tool_use_config=OPEN)
    assert await ask(session, "?", streamed=streamed) == ""
    assert ([each.id for each in session.pending], tools.seen) == (["call_1"], [])


async def test_a_session_continues_over_several_prompts(talk: Talks) -> None:
    """Each prompt is sent with all that came before."""
    talking = talk([ADD, say("3."), say("You asked for 1 + 2.")])
    await talking.ask("What is 1 + 2?")
    assert await talking.ask("What did I ask?") == "You asked for 1 + 2."
    assert len(talking.service.requests[-1].messages) == 5
