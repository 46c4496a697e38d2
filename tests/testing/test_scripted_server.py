"""The scripted server answers OpenAI's client over real HTTP as OpenAI does, and leaves nothing behind."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import AsyncOpenAI
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessageFunctionToolCall,
)

from planner_ext.testing import (
    Script,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedReply,
    call,
    calls,
    say,
)
from support.narrow import as_type
from support.values import each_of

QUESTION: Any = {"role": "user", "content": "What is 1 + 2?"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "math-add",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]

LOST = r"Connection error|peer closed"  # OpenAI's client wraps the transport's error, an older one does not

both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)


@asynccontextmanager
async def client_of(
    server: ScriptedOpenAIServer, max_retries: int = 0
) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=server.url, api_key="any", max_retries=max_retries
    ) as client:
        yield client


async def ask(client: AsyncOpenAI, **others: object) -> ChatCompletion:
    return await client.chat.completions.create(
        **{"model": "m", "messages": [QUESTION], **others}
    )


async def stream(client: AsyncOpenAI, **others: object) -> list[ChatCompletionChunk]:
    request = {"model": "m", "messages": [QUESTION], "stream": True, **others}
    return [chunk async for chunk in await client.chat.completions.create(**request)]


async def ask_either_way(client: AsyncOpenAI, *, streamed: bool) -> object:
    return await (stream(client) if streamed else ask(client))


def raw(
    server: ScriptedOpenAIServer, method: str, path: str, body: bytes
) -> tuple[int, dict[str, dict[str, object]]]:
    """Status and JSON of a request that no client of OpenAI would make."""
    connection = http.client.HTTPConnection(str(urlsplit(server.url).netloc))
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


# --- replies ---


async def test_a_plain_answer_has_the_shape_of_openais() -> None:
    """Text, finish reason, the model that was asked for, and usage that adds up."""
    with ScriptedOpenAIServer(
        [ScriptedReply(text="3", prompt_tokens=70, completion_tokens=2)]
    ) as server:
        async with client_of(server) as client:
            completion = await ask(client, model="gpt-4o")

    assert ChatCompletion.model_validate(completion.model_dump()) == completion
    assert (completion.model, completion.object) == ("gpt-4o", "chat.completion")
    (choice,) = completion.choices
    assert (
        choice.message.content,
        choice.message.tool_calls,
        choice.finish_reason,
    ) == ("3", None, "stop")
    assert completion.usage is not None
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (
        70,
        2,
    )
    assert completion.usage.total_tokens == 72


async def test_calls_stand_beside_text() -> None:
    """Each call has its id, name and arguments, malformed ones as they are scripted."""
    reply = calls(
        call("math-add", {"a": 1, "b": 2}),
        call("math-add", "{half", id=""),
        text="Both.",
    )
    with ScriptedOpenAIServer([reply]) as server:
        async with client_of(server) as client:
            (choice,) = (await ask(client)).choices

    assert (choice.message.content, choice.finish_reason) == ("Both.", "tool_calls")
    items = [
        as_type(ChatCompletionMessageFunctionToolCall, item)
        for item in choice.message.tool_calls or ()
    ]
    made = [(item.id, item.function.name, item.function.arguments) for item in items]
    assert made == [("call_1", "math-add", '{"a":1,"b":2}'), ("", "math-add", "{half")]


async def test_a_stream_comes_in_the_order_of_openais() -> None:
    """Role, text in pieces, each call with id and name and then its arguments in pieces, finish reason, usage."""
    reply = calls(call("math-add", {"a": 1}), call("math-add", {}), text="Adding.")
    with ScriptedOpenAIServer([reply], chunk_size=5) as server:
        async with client_of(server) as client:
            chunks = await stream(client, stream_options={"include_usage": True})

    *with_choice, last = chunks
    choices = [chunk.choices[0] for chunk in with_choice]
    assert [(choice.delta.role, choice.delta.content) for choice in choices[:3]] == [
        ("assistant", ""),
        (None, "Addin"),
        (None, "g."),
    ]
    pieces = [piece for choice in choices for piece in choice.delta.tool_calls or ()]
    seen = [
        (each.index, each.id, each.function.name, each.function.arguments)
        for each in pieces
        if each.function
    ]
    assert seen == [
        (0, "call_1", "math-add", ""),
        (0, None, None, '{"a":'),
        (0, None, None, "1}"),
        (1, "call_2", "math-add", ""),
        (1, None, None, "{}"),
    ]
    assert [choice.finish_reason for choice in choices] == [None] * (
        len(choices) - 1
    ) + ["tool_calls"]
    assert [chunk.usage for chunk in with_choice] == [None] * len(with_choice)
    assert last.choices == []
    assert last.usage is not None
    assert {chunk.id for chunk in chunks} == {"chatcmpl-0"}


async def test_a_stream_has_usage_only_if_asked() -> None:
    """Without ``include_usage`` the last chunk is the one with the finish reason."""
    with ScriptedOpenAIServer([say("3")]) as server:
        async with client_of(server) as client:
            chunks = await stream(client)

    assert chunks[-1].choices[0].finish_reason == "stop"
    assert [chunk.usage for chunk in chunks] == [None] * len(chunks)


async def test_a_refusal_is_sent_as_one() -> None:
    """A refusal stands in its own field, plain and streamed."""
    with ScriptedOpenAIServer(
        lambda _: ScriptedReply(refusal="I will not add."), chunk_size=6
    ) as server:
        async with client_of(server) as client:
            plain = (await ask(client)).choices[0].message
            chunks = await stream(client)

    assert (plain.content, plain.refusal) == (None, "I will not add.")
    assert (
        "".join(chunk.choices[0].delta.refusal or "" for chunk in chunks)
        == "I will not add."
    )


async def test_models_are_listed() -> None:
    """``GET /v1/models`` names the models that the server was given."""
    with ScriptedOpenAIServer([], models=["small", "large"]) as server:
        async with client_of(server) as client:
            assert [model.id async for model in client.models.list()] == [
                "small",
                "large",
            ]


# --- what it remembers ---


@both_ways
async def test_requests_show_what_was_asked(streamed: bool) -> None:
    """A request shows messages, functions offered, choice, whether it is a stream, and the whole body."""
    with ScriptedOpenAIServer([say("3")]) as server:
        async with client_of(server) as client:
            await (stream if streamed else ask)(
                client, tools=TOOLS, tool_choice="auto", temperature=0.5
            )
        (request,) = server.requests

    assert (request.index, request.messages, request.tools) == (
        0,
        [QUESTION],
        ("math-add",),
    )
    assert (request.tool_choice, request.stream, request.history) == (
        "auto",
        streamed,
        [],
    )
    assert request.body["temperature"] == 0.5


async def test_a_named_choice_and_withdrawn_tools_are_seen() -> None:
    """The object that names a function is given as it is; a request without tools has neither."""
    named = {"type": "function", "function": {"name": "math-add"}}
    with ScriptedOpenAIServer(lambda _: say("3")) as server:
        async with client_of(server) as client:
            await ask(client, tools=TOOLS, tool_choice=named)
            await ask(client)

    assert [(request.tools, request.tool_choice) for request in server.requests] == [
        (("math-add",), named),
        ((), None),
    ]


async def test_totals_are_the_tokens_of_all_replies() -> None:
    """What the answers reported, plain and streamed, added up; still there after the server stopped."""
    with ScriptedOpenAIServer(
        lambda request: say("x" * 40 * (request.index + 1))
    ) as server:
        async with client_of(server) as client:
            plain = (await ask(client)).usage
            streamed = (await stream(client, stream_options={"include_usage": True}))[
                -1
            ].usage

    assert plain is not None
    assert streamed is not None
    assert (plain.completion_tokens, streamed.completion_tokens) == (10, 20)
    assert server.prompt_tokens == plain.prompt_tokens + streamed.prompt_tokens
    assert server.completion_tokens == 30
    assert server.total_tokens == plain.total_tokens + streamed.total_tokens


async def test_a_script_may_look_at_its_server() -> None:
    """A function of the request sees what the server has counted so far, and waits for nothing."""
    with ScriptedOpenAIServer(
        lambda _: say(f"{len(server.requests)} asked, {server.total_tokens} used")
    ) as server:
        async with client_of(server) as client:
            assert (await ask(client)).choices[0].message.content == "1 asked, 0 used"


async def test_many_clients_share_one_script() -> None:
    """Requests at the same time are taken one by one: every reply is given once and every index stands once."""
    with ScriptedOpenAIServer([say(str(number)) for number in range(40)]) as server:
        async with client_of(server) as one, client_of(server) as other:
            completions = await asyncio.gather(
                *(ask(client) for client in [one, other] * 20)
            )

    assert sorted(
        int(each.choices[0].message.content or "") for each in completions
    ) == list(range(40))
    assert [request.index for request in server.requests] == list(range(40))


# --- faults ---


async def test_a_status_becomes_the_clients_error() -> None:
    """A fault without a body is an OpenAI error of its status."""
    with ScriptedOpenAIServer(
        [ScriptedFault(), ScriptedFault(status=429), ScriptedFault(status=401)]
    ) as server:
        async with client_of(server) as client:
            with pytest.raises(
                openai.InternalServerError, match="Scripted fault with status 500"
            ):
                await ask(client)
            with pytest.raises(openai.RateLimitError):
                await stream(client)
            with pytest.raises(openai.AuthenticationError):
                await ask(client)

    assert len(server.requests) == 3
    assert server.refused == []


async def test_a_repeated_request_takes_the_next_item() -> None:
    """What the client repeats by itself is one more request here."""
    fault = ScriptedFault(status=429, headers={"retry-after-ms": "1"})
    with ScriptedOpenAIServer([fault, fault, say("at last")]) as server:
        async with client_of(server, max_retries=2) as client:
            completion = await ask(client)

    assert completion.choices[0].message.content == "at last"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("body", "choices"), [({"choices": []}, []), ({"choices": None}, None)]
)
async def test_a_body_is_sent_as_it_is(
    body: dict[str, object], choices: object
) -> None:
    """An answer without choices reaches the client."""
    with ScriptedOpenAIServer([ScriptedFault(status=200, body=body)]) as server:
        async with client_of(server) as client:
            assert (await ask(client)).choices == choices


async def test_an_answer_may_be_no_json() -> None:
    """HTML in place of JSON reaches the client as text, and cut JSON fails in it."""
    html = ScriptedFault(
        status=200, body="<html>Sign in</html>", content_type="text/html"
    )
    cut = ScriptedFault(status=200, body='{"id": "x", "cho')
    with ScriptedOpenAIServer([html, cut]) as server:
        async with client_of(server) as client:
            assert str(await ask(client)) == "<html>Sign in</html>"
            with pytest.raises(json.JSONDecodeError):
                await ask(client)


async def test_a_connection_may_break_in_the_middle_of_an_answer() -> None:
    """A plain answer is lost; of a streamed one some text arrives before the connection is."""
    with ScriptedOpenAIServer(lambda _: ScriptedFault(drop=True)) as server:
        async with client_of(server) as client:
            with pytest.raises(openai.APIConnectionError):
                await ask(client)
            text: list[str | None] = []
            with pytest.raises(Exception, match=LOST):
                async for chunk in await client.chat.completions.create(
                    model="m", messages=[QUESTION], stream=True
                ):
                    text.append(chunk.choices[0].delta.content)

    assert text == ["", "Once"]


async def test_a_dropped_body_arrives_before_the_drop() -> None:
    """With a body, exactly that body is sent before the connection breaks."""
    event = (
        'data: {"id": "x", "choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n'
    )
    fault = ScriptedFault(body=event, content_type="text/event-stream", drop=True)
    with ScriptedOpenAIServer([fault]) as server:
        async with client_of(server) as client:
            chunks = await client.chat.completions.create(
                model="m", messages=[QUESTION], stream=True
            )
            assert (await anext(chunks)).choices[0].delta.content == "Hel"
            with pytest.raises(Exception, match=LOST):
                await anext(chunks)


# --- refusals ---


@both_ways
async def test_an_exhausted_script_is_refused_once(streamed: bool) -> None:
    """A request too many gets a 400 that says how long the script was, so the client does not repeat it."""
    with ScriptedOpenAIServer([say("one")]) as server:
        async with client_of(server, max_retries=2) as client:
            await ask_either_way(client, streamed=streamed)
            with pytest.raises(
                openai.BadRequestError, match="1 replies and request 1 asked"
            ) as raised:
                await ask_either_way(client, streamed=streamed)

    assert raised.value.code == "script_exhausted"
    assert len(server.requests) == 2
    assert len(server.refused) == 1


@both_ways
async def test_a_request_that_breaks_a_rule_is_refused(streamed: bool) -> None:
    """OpenAI's rules hold here: a 400 names the message and the ids, and the model is not asked."""
    called = {
        "id": "a",
        "type": "function",
        "function": {"name": "math-add", "arguments": "{}"},
    }
    messages = [QUESTION, {"role": "assistant", "tool_calls": [called]}, QUESTION]
    with ScriptedOpenAIServer([say("never")]) as server:
        async with client_of(server) as client:
            with pytest.raises(
                openai.BadRequestError,
                match=r"messages\[1\].* before messages\[2\].*: a\.",
            ) as raised:
                await (stream if streamed else ask)(client, messages=messages)

    assert raised.value.param == "messages[1].tool_calls"
    assert server.requests == []
    assert server.refused == [as_type(dict, raised.value.body)["message"]]


@each_of(
    ("script", "reason"),
    [
        (
            [ValueError("no such weather")],
            "only ScriptedChatCompletion can raise; put a ScriptedFault",
        ),
        (lambda request: {}[request.index], "failed at request 0: KeyError"),
        ([None], "request 0 met None"),
    ],
    ids=["exception", "failing-function", "no-answer"],
)
async def test_a_script_that_fails_is_answered(script: Script, reason: str) -> None:
    """What goes wrong in a script reaches the client by name, and is not lost in a thread."""
    with ScriptedOpenAIServer(script) as server:
        async with client_of(server) as client:
            with pytest.raises(openai.BadRequestError, match=reason):
                await ask(client)

    assert len(server.refused) == 1
    assert server.total_tokens == 0


@each_of("body", [b"{", b"[]", b"", b"\xff"])
def test_a_body_is_a_json_object(body: bytes) -> None:
    """Anything else is refused with an OpenAI error body."""
    with ScriptedOpenAIServer([say("never")]) as server:
        status, answer = raw(server, "POST", "/v1/chat/completions", body)

    assert status == 400
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert len(server.refused) == 1


@each_of(
    ("method", "path"),
    [
        ("GET", "/"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/models"),
        ("POST", "/v1/embeddings?x=1"),
    ],
)
def test_an_unknown_path_is_not_found(method: str, path: str) -> None:
    """A path that is not served gets a 404 with an OpenAI error body."""
    with ScriptedOpenAIServer([]) as server:
        status, answer = raw(server, method, path, b"{}")

    assert status == 404
    assert (
        answer["error"]["message"] == f"Invalid URL ({method} {path.partition('?')[0]})"
    )
