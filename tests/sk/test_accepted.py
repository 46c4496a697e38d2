"""Under any name that a model gives a function, the next request is accepted, and the model reads the name it used."""

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.core.values import CallResult
from planner_ext.errors import InvalidHistoryError
from planner_ext.hitl_manager import Checkpoint, Defer, Supply
from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.sk.chat.history import find_problems, repair_history
from planner_ext.sk.chat.reply import accepted_name, accepted_reply, given_arguments
from planner_ext.sk.functions.conversion import quoted
from planner_ext.sk.messages import calls_of
from planner_ext.testing import (
    ScriptedCall,
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedReply,
    call,
    calls,
    say,
)
from support.narrow import as_type
from support.served import Answer, Served, Tools, question
from support.stock import first_call, first_result
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]

REFUSED = {
    "prefixed": "functions.t-add",
    "channel": "t-add<|channel|>commentary",
    "empty": "",
    "long": "t-" + "a" * 63,
    "very-long": "x" * 5000,
    "blank": "t add",
    "blanks": "   ",
    "line": "t-add\n",
    "unicode": "t-addé",
    "emoji": "\N{WRENCH}",
    "surrogate": "t-add\ud800",
    "path": "t/add",
    "json": '{"name": "t-add"}',
}
EVERY_NAME = each_of("name", REFUSED.values())
ADD = call("t-add", {"a": 1, "b": 2})
BROKEN = {
    "half": '{"a": 1, "b',
    "text": "one and two",
    "list": "[1, 2]",
    "nan": '{"a": NaN}',
    "blank": " \n",
}


def sent_calls(served: Served, request: int = -1) -> list[dict[str, Any]]:
    """List the calls in a request, as they were sent."""
    messages: Any = served.server.requests[request].messages
    return [each for message in messages for each in message.get("tool_calls") or ()]


def sent_results(served: Served, request: int = -1) -> list[str]:
    messages: Any = served.server.requests[request].messages
    return [message["content"] for message in messages if message["role"] == "tool"]


@EVERY_NAME
async def test_a_name_that_servers_refuse_is_answered_and_written_so_that_they_accept_it(
    ask: Ask, serve: Serve, name: str
) -> None:
    """The call is answered as unknown, with its name; the one beside it runs; the conversation continues."""
    tools = Tools()
    history = question()
    served = serve(
        [calls(call(name, {"a": 1}), ADD), say("Three."), say("Still three.")]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, to=history, kernel=tools.kernel())
    assert answer.text == "Three."
    assert tools.seen == [(1, 2)]
    assert served.server.refused == []
    unknown, known = sent_calls(served)
    assert unknown["function"]["name"].startswith("unknown_")
    assert known["function"] == {"name": "t-add", "arguments": '{"a":1,"b":2}'}
    told, three = sent_results(served)
    assert told.startswith(f"There is no function {quoted(name)}.")
    assert three == "3"
    history.add_message(answer.message)
    history.add_user_message("Sure?")
    assert (await ask(service, to=history)).text == "Still three."
    assert served.server.refused == []


@EVERY_NAME
async def test_a_name_that_servers_refuse_does_not_end_a_handler_planner_or_session(
    serve: Serve, streamed: bool, name: str
) -> None:
    """Through each door the next request is accepted, and history, checkpoint and journal hold the same call."""
    bad = call(name, {"a": 1})
    served = serve(
        [
            bad,
            say("Handled."),
            bad,
            say("Planned."),
            bad,
            say("Said."),
            say("Said again."),
        ]
    )
    kernel = Tools().kernel()
    kernel.add_service(served.connector)

    history = ChatHistory()
    history.add_user_message("Go.")
    handler = ToolCallHandler(kernel)
    async for _ in (
        handler.invoke_stream(history) if streamed else handler.invoke(history)
    ):
        pass
    assert history.messages[-1].content == "Handled."

    planner = FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    )
    result = await planner.invoke(kernel, "Go.")
    assert result.final_answer == "Planned."
    loaded = Checkpoint.from_json(result.checkpoint.to_json()).state()
    (mine,) = [
        item for message in result.chat_history or () for item in calls_of(message)
    ]
    assert (
        as_type(dict, loaded.transcript[1])["items"][0]["name"]
        == mine.name
        == accepted_name(name)
    )
    assert as_type(CallResult, loaded.transcript[2]).name == mine.name

    session = ToolUseSession(kernel)
    assert await session.prompt("Go.") == "Said."
    assert await session.prompt("Again.") == "Said again."
    assert served.server.refused == []


async def test_a_name_that_resembles_a_functions_runs_nothing(
    ask: Ask, serve: Serve, tools: Tools
) -> None:
    """The name written into the history is never that of a function, so no reader of the history calls one."""
    served = serve(
        [calls(call("t_add", {"a": 1}), call("t.add", {"a": 1})), say("Nothing.")]
    )
    await ask(FunctionInvokingChatCompletion(served.connector))
    assert [each["function"]["name"] for each in sent_calls(served)] == [
        "t_add",
        "unknown_t_add",
    ]
    assert tools.seen == []


@each_of("name", [None, "t-echo"])
@each_of("arguments", [None, "{}"])
@each_of("identity", [None, "c1"])
async def test_a_call_with_nulls_in_it_is_answered(
    serve: Serve,
    name: str | None,
    arguments: str | None,
    identity: str | None,
) -> None:
    """A server that sends null for a name, arguments or an id gets back what it accepts."""
    asked = {
        "id": identity,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    choice = {
        "index": 0,
        "finish_reason": "tool_calls",
        "message": {"role": "assistant", "tool_calls": [asked]},
    }
    body = {
        "id": "r",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
    }
    served = serve([ScriptedFault(status=200, body=body), say("Done.")])
    kernel = Tools().kernel()
    kernel.add_service(served.connector)
    async for message in ToolCallHandler(kernel).invoke(question()):
        assert message.content == "Done."
    assert served.server.refused == []


@each_of("identity", ["", " ", "call\n1", "cäll", "\ud800"], ids=range(5))
async def test_an_id_that_servers_refuse_is_reissued(
    ask: Ask, serve: Serve, identity: str
) -> None:
    """Call and result get an id that is accepted; the one beside it keeps its own."""
    pair = (
        ScriptedCall(name="t-echo", arguments={"text": "a"}, id=identity),
        *ADD.calls,
    )
    tools = Tools()
    served = serve([ScriptedReply(calls=pair), say("Done.")])
    service = FunctionInvokingChatCompletion(served.connector)
    await ask(service, to=question(), kernel=tools.kernel())
    first, second = sent_calls(served)
    assert first["id"].startswith("call_") and 1 <= len(first["id"]) <= 40
    assert second["id"] == "call_2"
    assert tools.seen == ["a", (1, 2)]
    assert served.server.refused == []


@each_of(
    "identity", ["c", "x" * 40, "functions.t-add:0", "chatcmpl-tool-0123456789abcdef"]
)
async def test_an_id_that_servers_accept_is_kept(
    ask: Ask, serve: Serve, identity: str
) -> None:
    """An id goes back as it came."""
    served = serve(
        [ScriptedReply(calls=(ScriptedCall(name="t-echo", id=identity),)), say("Done.")]
    )
    await ask(FunctionInvokingChatCompletion(served.connector), to=question())
    assert [each["id"] for each in sent_calls(served)] == [identity]


@each_of("text", BROKEN.values(), ids=BROKEN)
async def test_arguments_in_a_history_are_always_one_json_object(
    ask: Ask, serve: Serve, text: str
) -> None:
    """A server that parses what it is sent can, and the model reads what it had sent; nothing ran."""
    tools = Tools()
    served = serve([call("t-add", text), say("Done.")])
    service = FunctionInvokingChatCompletion(served.connector)
    await ask(service, to=question(), kernel=tools.kernel())
    (sent,) = sent_calls(served)
    assert json.loads(sent["function"]["arguments"]) == (
        {} if text.isspace() else {"invalid_json": text}
    )
    assert tools.seen == []
    assert served.server.refused == []


async def test_a_reply_is_always_the_assistants(kernel: Kernel) -> None:
    """Role and speaker that a server would refuse do not enter the history; a lone surrogate in its text neither."""
    message = ChatMessageContent(
        role=AuthorRole.USER, name="a b", items=[TextContent(text="so\ud800")]
    )
    written, _ = accepted_reply([message])
    assert written.role == AuthorRole.ASSISTANT
    assert written.name is None
    assert written.content == "so\N{REPLACEMENT CHARACTER}"


async def test_a_long_name_that_was_offered_is_kept(kernel: Kernel) -> None:
    """Servers that accept longer names get them back, from this run, a resumed one, and a caller's history."""

    class Plugin:
        @kernel_function(name="f" * 70)
        def long(self) -> str:
            return "ran"

    kernel.add_plugin(Plugin(), "p")
    name = "p-" + "f" * 70
    model = ScriptedChatCompletion(
        [call(name), say("Stopped."), say("Resumed."), say("Again.")]
    )
    kernel.add_service(model)
    options = FunctionCallingStepwisePlannerOptions(
        plan=False, budget=Budget(max_iterations=2)
    )
    planner = FunctionCallingStepwisePlanner(options=options)
    first = await planner.invoke(kernel, "Go.")
    loaded = Checkpoint.from_json(first.checkpoint.to_json())
    second = await planner.resume(kernel, loaded, budget=Budget(max_iterations=5))
    third = await planner.invoke(kernel, "Go.", chat_history=second.chat_history)
    assert third.final_answer == "Again."
    assert {calls_of(request.history[1])[0].name for request in model.requests[1:]} == {
        name
    }


def test_what_is_accepted_is_returned_itself() -> None:
    """A reply that servers accept is returned as it is, not as a copy."""
    item = FunctionCallContent(id="c", name="t-add", arguments='{ "a":1 }')
    message = ChatMessageContent(role=AuthorRole.ASSISTANT, items=[item])
    assert accepted_reply([message])[0].items[0] is item


@EVERY_NAME
def test_a_history_with_such_a_name_is_refused_or_repaired(name: str) -> None:
    """A caller's history is refused by name; on request it is repaired, call and result alike, once for all."""
    history = ChatHistory()
    history.add_user_message("Go.")
    call_item = FunctionCallContent(
        id="c", name=name, function_name=name, arguments="{}"
    )
    result = FunctionResultContent(id="c", name=name, function_name=name, result="none")
    history.add_message(
        ChatMessageContent(role=AuthorRole.ASSISTANT, items=[call_item])
    )
    history.add_message(ChatMessageContent(role=AuthorRole.TOOL, items=[result]))
    (problem,) = find_problems(history.messages, ())
    assert problem.startswith(f"message 1: the function name {quoted(name)}")
    mended = repair_history(history.messages, ())
    assert find_problems(mended, ()) == []
    assert (
        first_call(mended[1]).name
        == first_result(mended[2]).name
        == accepted_name(name)
    )
    assert all(
        new is old for new, old in zip(repair_history(mended, ()), mended, strict=True)
    )
    assert history.messages[1].items[0] is call_item


async def test_a_callers_history_is_refused_unsent(
    ask: Ask, serve: Serve, history: ChatHistory
) -> None:
    """The default refuses, naming the way out; repair sends it."""
    bad = FunctionCallContent(id="c", name="functions.t-add", arguments="{")
    history.add_message(ChatMessageContent(role=AuthorRole.ASSISTANT, items=[bad]))
    history.add_message(
        ChatMessageContent(
            role=AuthorRole.TOOL,
            items=[FunctionResultContent(id="c", name="x", result="3")],
        )
    )
    served = serve([say("Three.")])
    with pytest.raises(
        InvalidHistoryError, match=r'function name "functions.t-add".*repair'
    ):
        await ask(FunctionInvokingChatCompletion(served.connector))
    assert served.server.requests == []
    await ask(
        FunctionInvokingChatCompletion(served.connector, on_invalid_history="repair")
    )
    (sent,) = sent_calls(served)
    assert sent["function"] == {
        "name": "unknown_functions_t-add",
        "arguments": '{"invalid_json": "{"}',
    }
    assert served.server.refused == []


async def test_a_paused_batch_with_such_a_name_is_resumed(
    serve: Serve, kernel: Kernel
) -> None:
    """The call beside it waits for a person; the checkpoint is believed, and altered ones are not."""
    served = serve(
        [
            calls(call("functions.t-add", "{"), call("t-echo", {"text": "x"})),
            say("Done."),
        ]
    )
    kernel.add_service(served.connector)
    options = FunctionCallingStepwisePlannerOptions(
        plan=False, interceptors=[lambda call: Defer()]
    )
    planner = FunctionCallingStepwisePlanner(options=options)
    paused = await planner.invoke(kernel, "Go.")
    text = paused.checkpoint.to_json()
    supplied = {paused.pending[0].id: Supply("seen")}
    result = await planner.resume(kernel, Checkpoint.from_json(text), supplied)
    assert (result.final_answer, served.server.refused) == ("Done.", [])
    altered = Checkpoint.from_json(
        text.replace("unknown_functions_t-add", "unknown_functions_t-pay")
    )
    with pytest.raises(Exception, match="altered"):
        await planner.resume(kernel, altered, supplied)


async def test_in_open_loop_the_caller_sees_what_the_model_sent(
    serve: Serve, streamed: bool
) -> None:
    """The open call has the arguments as received; the history that is sent next is accepted."""
    served = serve(
        [
            calls(call("functions.t-add", "half{"), call("t-add", {"a": 1, "b": 2})),
            say("Done."),
        ]
    )
    kernel = Tools().kernel()
    kernel.add_service(served.connector)
    session = ToolUseSession(
        kernel, tool_use_config=AutomaticToolUseConfig(enabled=False)
    )
    if streamed:
        assert [piece async for piece in session.prompt_streaming("Go.")] == []
    else:
        await session.prompt("Go.")
    first, second = session.pending
    assert (first.fully_qualified_name, first.raw_arguments) == (
        "unknown_functions_t-add",
        "half{",
    )
    session.append([first.result("There is no such function."), second.result(3)])
    assert await session.prompt() == "Done."
    assert served.server.refused == []


@each_of(
    "text",
    [
        *BROKEN.values(),
        "{}",
        '{"a": 1}',
        '{"invalid_json": "{}"}',
        '{"invalid_json": 1}',
    ],
)
def test_arguments_as_the_model_gave_them_are_read_back(text: str) -> None:
    """What the model sent is found again in what the history holds."""
    item = FunctionCallContent(id="c", name="t-add", arguments=text)
    written, _ = accepted_reply(
        [ChatMessageContent(role=AuthorRole.ASSISTANT, items=[item])]
    )
    (held,) = calls_of(written)
    assert given_arguments(str(held.arguments)) == ("{}" if text.isspace() else text)


async def test_calls_that_go_back_to_the_caller_are_accepted_too(
    ask: Ask, serve: Serve, history: ChatHistory
) -> None:
    """At a limit that returns the calls, the message can be added, answered and sent."""
    served = serve([calls(call("functions.t-add"), ADD), say("Done.")])
    budget = Budget(max_tool_calls=0, on_limit="return_calls")
    answer = await ask(FunctionInvokingChatCompletion(served.connector, budget=budget))
    message = answer.message
    history.add_message(
        ChatMessageContent(role=AuthorRole.ASSISTANT, items=list(message.items))
    )
    for item in calls_of(message):
        result = FunctionResultContent(id=item.id, name=item.name, result="no")
        history.add_message(ChatMessageContent(role=AuthorRole.TOOL, items=[result]))
    assert (await ask(FunctionInvokingChatCompletion(served.connector))).text == "Done."
    assert served.server.refused == []
