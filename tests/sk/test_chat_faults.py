"""Invalid responses and odd replies from a real server: each a named error or outcome, nothing lost."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import (
    KernelException,
    ServiceInvalidResponseError,
    ServiceResponseException,
)

from planner_ext import FunctionInvokingChatCompletion
from planner_ext.errors import InvalidReplyError, PlannerExtError, ServiceCallError
from planner_ext.testing import (
    ScriptedCall,
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedReply,
    call,
    calls,
    say,
)
from support.served import Answer, Served, Tools, asked, question
from support.stock import first_call, first_result
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]

ADD = call("t-add", {"a": 1, "b": 2})
AUTO = PromptExecutionSettings(function_choice_behavior=FunctionChoiceBehavior.Auto())
HEAD = {"id": "x", "object": "chat.completion", "created": 1, "model": "scripted"}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def plain(
    message: Mapping[str, Any] | None, finish_reason: str | None = "stop", **more: Any
) -> str:
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": finish_reason,
        "logprobs": None,
    }
    return json.dumps({**HEAD, "choices": [choice], "usage": USAGE, **more})


def events(*datas: Any) -> str:
    return "".join(
        f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n"
        for data in datas
    )


def chunk(
    delta: Any = None, finish_reason: str | None = None, **more: Any
) -> dict[str, Any]:
    choices = (
        []
        if delta is None
        else [{"index": 0, "delta": delta, "finish_reason": finish_reason}]
    )
    return {**HEAD, "object": "chat.completion.chunk", "choices": choices, **more}


SAYS = {"role": "assistant", "content": "Hel"}
HTML = "<html><body>Bad gateway</body></html>"

UNREADABLE: dict[str, tuple[str, str, str]] = {
    "empty-choices": (
        json.dumps({**HEAD, "choices": [], "usage": USAGE}),
        events(chunk(usage=USAGE), "[DONE]"),
        "",
    ),
    "null-choices": (
        json.dumps({**HEAD, "choices": None}),
        events({**HEAD, "object": "chat.completion.chunk", "choices": None}, "[DONE]"),
        "",
    ),
    "no-choices": (
        json.dumps(HEAD),
        events({**HEAD, "object": "chat.completion.chunk"}, "[DONE]"),
        "",
    ),
    "html": (HTML, HTML, "text/html"),
    "html-as-json": (HTML, HTML, "application/json"),
    "truncated-json": (plain(SAYS)[:90], events(json.dumps(chunk(SAYS))[:60]), ""),
    "null": ("null", events("null", "[DONE]"), ""),
    "list": ("[]", events([], "[DONE]"), ""),
    "nothing": ("", "", ""),
    "no-message": (plain(None), events("[DONE]"), ""),
    "unknown-role": (
        plain({"role": "wizard", "content": "Abra"}),
        events(chunk({"role": "wizard", "content": "Abra"}), "[DONE]"),
        "",
    ),
    "unknown-finish-reason": (
        plain(SAYS, "bored"),
        events(chunk(SAYS), chunk({}, "bored"), "[DONE]"),
        "",
    ),
}


def fault(bodies: tuple[str, str, str], *, streamed: bool) -> ScriptedFault:
    kind = bodies[2] or ("text/event-stream" if streamed else "application/json")
    return ScriptedFault(status=200, body=bodies[streamed], content_type=kind)


@each_of("before", [[], [calls(ADD, text="So.")]], ids=["first", "second"])
@each_of("name", UNREADABLE)
async def test_an_invalid_response_is_named(
    ask: Ask,
    serve: Serve,
    streamed: bool,
    name: str,
    before: list[Any],
) -> None:
    """The error says what was expected, what was seen and what to do; the history is in order, and the retry works."""
    history = question()
    served = serve([*before, fault(UNREADABLE[name], streamed=streamed), say("Three.")])
    service = FunctionInvokingChatCompletion(served.connector)
    with pytest.raises(
        InvalidReplyError,
        match=r"^Expected .*The history is as it was: the request can be made again",
    ):
        await ask(service, to=history)
    assert len(history.messages) == 1 + 2 * len(before)
    assert (await ask(service, to=history)).text == "Three."
    assert served.server.refused == []


@each_of("name", ["empty-choices", "null-choices", "html"])
async def test_a_response_to_a_request_that_passes_through_is_named_too(
    ask: Ask, serve: Serve, streamed: bool, history: ChatHistory, name: str
) -> None:
    """Without a behaviour an invalid response is the same named error, never a bare one or a silent None."""
    served = serve([fault(UNREADABLE[name], streamed=streamed)])
    with pytest.raises(InvalidReplyError, match=r"^Expected "):
        await ask(
            FunctionInvokingChatCompletion(served.connector),
            settings=PromptExecutionSettings(),
        )
    assert len(history.messages) == 1


FAILING: dict[str, ScriptedFault] = {
    "500": ScriptedFault(),
    "429": ScriptedFault(status=429),
    "401": ScriptedFault(status=401),
    "dropped": ScriptedFault(drop=True),
}


@each_of("before", [[], [calls(ADD, text="So.")]], ids=["first", "second"])
@each_of("name", FAILING)
async def test_a_request_that_fails_is_named(
    ask: Ask, serve: Serve, name: str, before: list[Any]
) -> None:
    """The error names service, model and cause; it is caught as ours and as Semantic Kernel's; the retry works."""
    history = question()
    served = serve([*before, FAILING[name], say("Three.")])
    service = FunctionInvokingChatCompletion(served.connector)
    with pytest.raises(
        ServiceCallError,
        match=r"OpenAIChatCompletion 'scripted' failed.*can be made again",
    ) as raised:
        await ask(service, to=history)
    assert isinstance(raised.value, PlannerExtError)
    assert isinstance(raised.value, KernelException)
    assert isinstance(raised.value, ServiceResponseException)
    assert raised.value.__cause__ is not None
    assert len(history.messages) == 1 + 2 * len(before)
    assert (await ask(service, to=history)).text == "Three."
    assert served.server.refused == []


async def test_a_fault_has_the_history_and_checkpoint_of_its_run(
    ask: Ask, serve: Serve, history: ChatHistory
) -> None:
    """The error of a run that had begun has its messages, fit to be sent, and a checkpoint with what was spent."""
    served = serve([ADD, ScriptedFault()])
    with pytest.raises(ServiceCallError) as raised:
        await ask(FunctionInvokingChatCompletion(served.connector))
    error = raised.value
    assert error.chat_history is not None
    assert [m.role for m in error.chat_history.messages] == [
        m.role for m in history.messages
    ]
    assert error.checkpoint is not None
    assert error.checkpoint.state().usage.tool_calls == 1


async def test_retries_of_the_sdk_are_not_counted(ask: Ask, serve: Serve) -> None:
    """What the SDK repeats by itself is neither seen nor charged: one iteration for two HTTP requests."""
    served = serve(
        [ScriptedFault(headers={"retry-after-ms": "1"}), say("Three.")], max_retries=1
    )
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    assert answer.metadata["iterations"] == 1
    assert len(served.server.requests) == 2


async def test_a_reply_without_usage_is_a_reply(
    ask: Ask, serve: Serve, streamed: bool
) -> None:
    """A server that bills nothing is fine: the usage is None."""
    bodies = (
        plain(SAYS, usage=None),
        events(chunk(SAYS), chunk({}, "stop"), "[DONE]"),
        "",
    )
    answer = await ask(
        FunctionInvokingChatCompletion(
            serve([fault(bodies, streamed=streamed)]).connector
        )
    )
    assert answer.text == "Hel"
    assert answer.metadata["status"] == "answered"
    assert answer.metadata["usage"] is None


async def test_an_error_event_in_a_stream_is_named(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """An error that a server sends in the middle of a stream is named, with its words; the text before it came out."""
    error = {"error": {"message": "The engine is overloaded.", "type": "server_error"}}
    served = serve(
        [
            ScriptedFault(
                status=200,
                body=events(chunk(SAYS), error),
                content_type="text/event-stream",
            )
        ]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    texts: list[str] = []
    with pytest.raises(ServiceCallError, match="The engine is overloaded"):
        async for chunks in service.get_streaming_chat_message_contents(
            history, AUTO, kernel=kernel
        ):
            texts += [one.content for one in chunks]
    assert (texts, len(history.messages)) == (["Hel"], 1)


async def test_usage_reported_again_and_again_is_counted_once(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """A stream that reports usage so far with each chunk is charged the last report, not the sum of them."""
    reports = [
        {"prompt_tokens": 5, "completion_tokens": n, "total_tokens": 5 + n}
        for n in (1, 2, 3)
    ]
    body = events(
        *(chunk(SAYS, usage=usage) for usage in reports), chunk({}, "stop"), "[DONE]"
    )
    served = serve(
        [ScriptedFault(status=200, body=body, content_type="text/event-stream")]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    usage = (await asked(service, history, kernel, AUTO, streamed=True)).metadata[
        "usage"
    ]
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 3)


CUT = [
    ScriptedReply(text="It is"),
    ScriptedReply(calls=call("t-add", '{"a": 1, "b": 2}').calls, text="It is"),
]


@each_of("reason", ["length", "content_filter"])
@each_of("reply", CUT, ids=["text", "calls"])
@each_of("before", [[], [ADD]], ids=["first", "second"])
async def test_a_cut_reply_is_incomplete(
    ask: Ask,
    serve: Serve,
    reply: ScriptedReply,
    reason: str,
    before: list[Any],
) -> None:
    """A reply cut short does not answer the run, and no call in it runs, not even one that looks whole."""
    tools = Tools()
    history = question()
    cut = ScriptedReply(text=reply.text, calls=reply.calls, finish_reason=reason)
    served = serve([*before, cut])
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, to=history, kernel=tools.kernel())
    assert answer.text == "It is"
    assert answer.metadata["status"] == "incomplete"
    assert answer.metadata["limit"] is None
    assert answer.metadata["iterations"] == len(before) + 1
    assert len(tools.seen) == len(before)
    assert len(history.messages) == 1 + 2 * len(before)


@each_of("reply", [ScriptedReply(), say("")], ids=["null", "empty"])
async def test_an_empty_reply_is_incomplete(
    ask: Ask, serve: Serve, reply: ScriptedReply
) -> None:
    """Neither text nor calls: incomplete, with an empty text, not an answer."""
    service = FunctionInvokingChatCompletion(serve([ADD, reply]).connector)
    answer = await ask(service, to=question())
    assert answer.metadata["status"] == "incomplete"
    assert answer.text == ""


MALFORMED = {
    "half": '{"a": 1, "b',
    "text": "one and two",
    "list": "[1, 2]",
    "string": '"a"',
    "null": "null",
    "missing": '{"a": 1}',
    "unexpected": '{"a": 1, "b": 2, "c": 3}',
    "wrong-type": '{"a": "one", "b": 2}',
    "nan": '{"a": NaN, "b": 2}',
    "single-quotes": "{'a': 1, 'b': 2}",
    "deep": '{"a": ' + "[" * 5000 + "]" * 5000 + ', "b": 2}',
    "two-objects": '{"a": 1, "b": 2}{"a": 3, "b": 4}',
}


@each_of("arguments", MALFORMED.values(), ids=MALFORMED)
async def test_malformed_arguments_are_answered(
    ask: Ask, serve: Serve, arguments: str
) -> None:
    """The function does not run; the model reads what is wrong, and the run continues."""
    tools = Tools()
    served = serve([call("t-add", arguments), ADD, say("Three.")])
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, to=question(), kernel=tools.kernel())
    assert answer.text == "Three."
    assert tools.seen == [(1, 2)]
    assert answer.metadata["tool_calls"] == 1
    read = str(served.server.requests[1].messages[-1]["content"])
    assert "t-add" in read and len(read) < 1000
    assert str(served.server.requests[1].messages[1]["tool_calls"]).count("t-add") == 1
    assert served.server.refused == []


IDS = {
    "missing": ("", ""),
    "the same": ("a", "a"),
    "one missing": ("a", ""),
    "the same as ours": ("call_1", "call_1"),
}


@each_of("ids", IDS.values(), ids=IDS)
async def test_calls_without_ids_of_their_own_get_some(
    ask: Ask, serve: Serve, ids: tuple[str, str]
) -> None:
    """Calls whose ids are missing or the same run each once, and go back to the model under ids of their own."""
    batch = ScriptedReply(
        calls=tuple(
            ScriptedCall(name="t-echo", arguments={"text": text}, id=id)
            for text, id in zip("xy", ids, strict=True)
        )
    )
    tools = Tools()
    served = serve([batch, say("Done.")])
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, to=question(), kernel=tools.kernel())
    assert answer.text == "Done."
    assert sorted(tools.seen) == ["x", "y"]
    assert served.server.refused == []
    assert [
        message["content"] for message in served.server.requests[1].messages[2:]
    ] == ["x", "y"]


async def test_ids_that_come_again_later_are_kept(
    ask: Ask, serve: Serve, history: ChatHistory
) -> None:
    """The same id in a later batch is what real models send: it is left as it is, and can be sent."""
    same = call("t-add", {"a": 1, "b": 2}, id="call_0")
    served = serve([same, same, say("Done.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    assert (answer.text, served.server.refused) == ("Done.", [])
    _, asked, answered, asked_again, answered_again = history.messages
    assert [first_call(asked).id, first_call(asked_again).id] == ["call_0"] * 2
    assert [first_result(answered).id, first_result(answered_again).id] == [
        "call_0"
    ] * 2


async def test_an_error_of_the_connector_itself_passes_as_it_is(ask: Ask) -> None:
    """A connector's own named error is not renamed."""
    error = ServiceInvalidResponseError("The vendor says no.")
    with pytest.raises(
        ServiceInvalidResponseError, match="The vendor says no"
    ) as raised:
        await ask(FunctionInvokingChatCompletion(ScriptedChatCompletion([error])))
    assert raised.value is error


@each_of(
    "kind",
    [TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError],
)
async def test_a_bare_error_of_a_connector_gets_a_name(
    ask: Ask, kind: type[Exception]
) -> None:
    """What a connector raises over a response that it did not expect becomes an error with that as its cause."""
    error = kind("choices")
    with pytest.raises(InvalidReplyError, match=f"{kind.__name__}") as raised:
        await ask(FunctionInvokingChatCompletion(ScriptedChatCompletion([error])))
    assert raised.value.__cause__ is error
