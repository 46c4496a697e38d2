"""A prepared request is the one that the client would send, and its outcome the one that the client would have."""

import asyncio
import functools
import gc
import gzip
import json
import logging
import ssl
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any, NamedTuple

import httpx
import httpx2
import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from openai import AsyncOpenAI, AsyncStream, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from planner_ext.core.values import Usage
from planner_ext.sk.chat import prepared as module
from planner_ext.sk.chat.prepared import USED, Chunks, ReadChunk, post
from planner_ext.sk.members import is_own, source_digest
from planner_ext.testing import call, calls, say
from planner_ext.testing.script import completion_body, completion_chunks, error_body
from support.values import each_of
from support.wire import Answer, Wire, answer, head, streamed

if not hasattr(AsyncOpenAI, "_bearer_auth"):
    pytest.skip("This openai makes its own requests.", allow_module_level=True)

CONTEXT = ssl.create_default_context()
"""Made once: it takes longer than a request."""

MESSAGES: Any = [{"role": "user", "content": "Grüße."}]
OPTIONS = {"security": {"bearer_auth": True}}
TOKENS = Usage(prompt_tokens=3, completion_tokens=2)
COMPLETION = completion_body(say("Grüße."), index=0, model="m", usage=TOKENS)
GOOD = json.dumps(COMPLETION).encode()
CHUNKS = [
    chunk
    for reply in (say("Grüße 👋"), calls(call("t-add", {"a": "é"})))
    for chunk in completion_chunks(
        reply, index=0, model="m", usage=TOKENS, chunk_size=4
    )
]
EVENTS = [
    f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode() for chunk in CHUNKS
]
DONE = b"data: [DONE]\n\n"


def fine(stream: bool) -> Answer:
    return streamed(*EVENTS, DONE) if stream else answer(GOOD, x_request_id="r-0")


class Outcome(NamedTuple):
    """What a request came to, and what was seen of it."""

    read: list[Any]
    error: Any
    requests: list[Any]
    waits: list[float]


def described(value: Any) -> Any:
    """Say all that can be told of a response or chunk."""
    if not isinstance(value, openai.BaseModel):
        return (type(value), value)
    shown = value.model_dump(exclude_unset=True, warnings=False)
    return (type(value), repr(value), repr(shown), getattr(value, "_request_id", None))


def described_error(error: BaseException) -> Any:
    told = {
        name: getattr(error, name, None)
        for name in ("status_code", "request_id", "body", "code", "type", "param")
    }
    request = getattr(error, "request", None)
    sent = None if request is None else (request.method, str(request.url))
    return (type(error), str(error), repr(told), sent, type(error.__cause__))


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time and have no random part here."""
    kept: list[float] = []

    async def sleep(seconds: float) -> None:
        kept.append(seconds)

    monkeypatch.setattr("openai._base_client.anyio.sleep", sleep)
    monkeypatch.setattr("openai._base_client.random", lambda: 0.5)
    return kept


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    async with Wire() as wire:
        yield wire


def http_client(**options: Any) -> Any:
    return DefaultAsyncHttpxClient(verify=CONTEXT, **options)


def client_of(wire: Wire, **options: Any) -> AsyncOpenAI:
    if "http_client" not in options:
        options["http_client"] = http_client()
    return AsyncOpenAI(
        **{"base_url": wire.url, "api_key": "any", "max_retries": 2, **options}
    )


async def plain(client: AsyncOpenAI, stream: bool) -> Any:
    """Send a request as Semantic Kernel's connector does."""
    return await client.chat.completions.create(
        messages=MESSAGES, model="m", stream=stream
    )


async def ours(client: AsyncOpenAI, stream: bool, options: Any = OPTIONS) -> Any:
    body = json.dumps({"messages": MESSAGES, "model": "m", "stream": stream}).encode()
    return await post(
        client, path="/chat/completions", content=body, options=options, stream=stream
    )


Sender = Callable[[AsyncOpenAI, bool], Awaitable[Any]]


async def outcome(send: Awaitable[Any], wire: Wire, waits: list[float]) -> Outcome:
    """Await a request, and read its response to the end."""
    read: list[Any] = []
    failed = None
    try:
        got = await send
        if isinstance(got, AsyncStream):
            async with got as chunks:
                async for chunk in chunks:
                    read.append(described(chunk))
        else:
            read.append(described(got))
    except Exception as error:
        failed = described_error(error)
    came = Outcome(
        read, failed, [_without_length(each) for each in wire.seen], [*waits]
    )
    waits.clear()
    return came


def _without_length(received: Any) -> Any:
    """Leave out the length: ours and the client's JSON are the same but for white space."""
    return received._replace(
        headers=tuple(
            pair for pair in received.headers if pair[0].lower() != "content-length"
        )
    )


async def both(
    wire: Wire,
    waits: list[float],
    *answers: Answer,
    stream: bool,
    before: Callable[[AsyncOpenAI], None] = lambda _: None,
    **options: Any,
) -> Outcome:
    """Send a request both ways, with clients that have sent one before; see that all is equal."""
    came: list[Outcome] = []
    for send in (ours, plain):
        client = client_of(
            wire,
            **{
                name: made() if callable(made) else made
                for name, made in options.items()
            },
        )
        wire.will([fine(stream)])
        first = await outcome(send(client, stream), wire, waits)
        assert not first.error
        connections = client._client
        before(client)
        wire.will(answers or [fine(stream)])
        came.append(await outcome(send(client, stream), wire, waits))
        await client.close()
        await connections.aclose()
        assert (client in module._PREPARED) == (send is ours)
    assert came[0] == came[1]
    assert came[0].requests
    return came[0]


def problem(status: int, code: str = "odd", **sent: str) -> Answer:
    body = json.dumps(
        error_body("No.", type="invalid_request_error", code=code)
    ).encode()
    return answer(body, status=status, x_request_id="r-1", **sent)


def body_of(**fields: Any) -> Answer:
    return answer(json.dumps({**COMPLETION, **fields}).encode(), x_request_id="r-2")


REFUSALS: dict[str, tuple[Answer, ...]] = {
    "500": (problem(500),),
    "503 once": (problem(503), problem(502)),
    "429": (problem(429),),
    "429 retry-after": (problem(429, retry_after="7"),),
    "429 retry-after-ms": (problem(429, retry_after_ms="250", retry_after="7"),),
    "429 retry-after a day": (problem(429, retry_after="86400"),),
    "429 retry-after a date": (
        problem(429, retry_after="Wed, 21 Oct 2015 07:28:00 GMT"),
    ),
    "429 retry-after no number": (problem(429, retry_after="soon"),),
    "408": (problem(408),),
    "409": (problem(409),),
    "400": (problem(400),),
    "400 content_filter": (problem(400, "content_filter"),),
    "401": (problem(401),),
    "404": (problem(404),),
    "422": (problem(422),),
    "500 not to be retried": (problem(500, x_should_retry="false"),),
    "400 to be retried": (problem(400, x_should_retry="true"),),
    "502 with a page": (
        answer(b"<html>Bad gateway</html>", status=502, kind="text/html"),
    ),
    "302": (answer(b"", status=302, location="/elsewhere"), problem(404)),
    "307": (answer(b"", status=307, location="/elsewhere"), problem(404)),
    "302 to nowhere": (answer(b"", status=302),),
    "304": (Answer((head(304),), "close"),),
    "closed before the reply": (Answer((), "close"),),
    "closed in the head": (Answer((b"HTTP/1.1 200 OK\r\nConte",), "close"),),
    "no HTTP": (Answer((b"SSH-2.0-any\r\n\r\n",), "close"),),
}


@each_of("kind", REFUSALS)
@each_of("retried", [True, False], ids=["fails", "retried"])
async def test_a_request_that_fails_is_made_again_as_the_client_makes_it(
    kind: str, retried: bool, wire: Wire, waits: list[float], streamed: bool
) -> None:
    """Retries, their headers and waits, and the error, are the client's; and so is a good response at last."""
    good = (fine(streamed),) if retried else ()
    await both(wire, waits, *REFUSALS[kind], *good, stream=streamed)


BODIES: dict[str, Answer] = {
    "a page": answer(b"<html>Hi.</html>", kind="text/html"),
    "JSON that is called a page": answer(GOOD, kind="text/html"),
    "no kind": Answer((head(200, content_length=str(len(GOOD))) + GOOD,)),
    "another kind of JSON": answer(
        GOOD, kind="application/vnd.any+json; charset=utf-8"
    ),
    "bad JSON": answer(GOOD[:-3]),
    "no object": answer(b"[1, 2]"),
    "null": answer(b"null"),
    "no completion": answer(b'{"message": "Hi."}'),
    "an error with status 200": answer(b'{"error": {"message": "No."}}'),
    "null choices": body_of(choices=None),
    "no choices": body_of(choices=[]),
    "numbers as texts": body_of(
        created="1",
        usage={"prompt_tokens": "3", "completion_tokens": 2, "total_tokens": 5},
    ),
    "a number with a fraction": body_of(created=1.0),
    "true for a number": body_of(created=True),
    "a huge number": body_of(created=10**30),
    "a lone surrogate": body_of(system_fingerprint="\ud800"),
    "NaN": body_of(odd=float("nan"), vast=float("-inf")),
    "names of parameters": body_of(cls=1, kind=2, values=3, self=4),
    "a name twice": answer(GOOD[:-1] + b',"id":"other"}'),
    "deep": answer(GOOD[:-1] + b',"odd":' + b"[" * 250 + b"]" * 250 + b"}"),
    "a control character": answer(GOOD[:-1] + b',"odd":"a\tb"}'),
    "a byte order mark": answer(b"\xef\xbb\xbf" + GOOD),
    "UTF-16": answer(GOOD.decode().encode("utf-16")),
    "no UTF-8": answer(GOOD[:-1] + b',"odd":"\xff"}'),
    "an empty body": answer(b""),
    "no content": Answer((head(204),)),
    "gzip": answer(gzip.compress(GOOD), content_encoding="gzip", x_request_id="r-3"),
    "no gzip": answer(GOOD, content_encoding="gzip"),
    "closed in the body": answer(GOOD, then="close").__class__(
        (head(200, content_length="9999") + GOOD,), "close"
    ),
}


@each_of("kind", BODIES)
async def test_a_response_is_read_as_the_client_reads_it(
    kind: str, wire: Wire, waits: list[float], streamed: bool
) -> None:
    """Whether it is a completion or not, and where a stream was expected."""
    await both(wire, waits, BODIES[kind], stream=streamed)


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps({**CHUNKS[1], **fields})}\n\n".encode()


WHOLE = b"".join([*EVENTS, DONE])
STREAMS: dict[str, Answer] = {
    "in one piece": streamed(WHOLE),
    "an error in the middle": streamed(
        *EVENTS[:2], b'data: {"error": {"message": "No.", "code": "x"}}\n\n', EVENTS[2]
    ),
    "an error without a message": streamed(EVENTS[0], b'data: {"error": "No."}\n\n'),
    "an error beside a chunk": streamed(
        EVENTS[0], event(error={"message": "No."}), EVENTS[2]
    ),
    "no error beside a chunk": streamed(EVENTS[0], event(error=None), EVENTS[2], DONE),
    "CRLF": streamed(WHOLE.replace(b"\n", b"\r\n")),
    "CR": streamed(WHOLE.replace(b"\n", b"\r")),
    "no space": streamed(WHOLE.replace(b"data: ", b"data:")),
    "two spaces": streamed(WHOLE.replace(b"data: ", b"data:  ")),
    "several lines of data": streamed(
        EVENTS[0], EVENTS[1].replace(b', "', b',\ndata: "', 1), *EVENTS[2:], DONE
    ),
    "comments": streamed(b": wait\n\n", EVENTS[0], b": wait\n\n", *EVENTS[1:], DONE),
    "names of events": streamed(*(b"event: chunk\n" + each for each in EVENTS), DONE),
    "an event of threads": streamed(
        EVENTS[0], b"event: thread.any\n" + EVENTS[1], *EVENTS[2:], DONE
    ),
    "ids": streamed(*(b"id: 1\nretry: 5\n" + each for each in EVENTS), DONE),
    "empty lines": streamed(b"\n\n", EVENTS[0], b"\n", *EVENTS[1:], b"\n\n\n", DONE),
    "a byte order mark": streamed(b"\xef\xbb\xbf", WHOLE),
    "an invalid chunk": streamed(EVENTS[0], event(choices=None), EVENTS[2], DONE),
    "numbers as texts": streamed(EVENTS[0], event(created="1"), EVENTS[2], DONE),
    "no object": streamed(EVENTS[0], b"data: [1]\n\n", DONE),
    "bad JSON": streamed(EVENTS[0], b"data: {1}\n\n", DONE),
    "no UTF-8": streamed(EVENTS[0], b'data: {"odd": "\xff"}\n\n', DONE),
    "a lone surrogate": streamed(EVENTS[0], event(odd="\ud800"), DONE),
    "names of parameters": streamed(EVENTS[0], event(cls=1, values=2), DONE),
    "broken": streamed(*EVENTS[:3], EVENTS[3][:9], then="close"),
    "broken after an event": streamed(*EVENTS[:3], then="close"),
    "broken at once": streamed(then="close"),
    "no end": streamed(*EVENTS),
    "an unfinished event": streamed(*EVENTS[:3], EVENTS[3][:-1]),
    "nothing": streamed(),
    "text after the end": streamed(*EVENTS, DONE, b"data: {more", b"}\n\n"),
    "text after the end at once": streamed(WHOLE + b"data: {more}\n\n"),
    "an end with more": streamed(
        *EVENTS, DONE[:-2] + b" or not\ndata: {\nevent: thread.any\n\n", EVENTS[0]
    ),
    "an end with a name": streamed(*EVENTS, b"event: end\n" + DONE, EVENTS[0]),
    "never closed": streamed(*EVENTS, DONE, then="hang"),
    "byte by byte": streamed(
        *(WHOLE[place : place + 1] for place in range(len(WHOLE)))
    ),
    "gzip": streamed(
        *(gzip.compress(WHOLE)[place : place + 99] for place in range(0, 9999, 99)),
        content_encoding="gzip",
    ),
    "no gzip": streamed(WHOLE, content_encoding="gzip"),
}


@each_of("kind", STREAMS)
async def test_a_stream_is_read_as_the_client_reads_it(
    kind: str, wire: Wire, waits: list[float]
) -> None:
    """The same chunks, and the same error after them."""
    await both(wire, waits, STREAMS[kind], stream=True)


FRAMINGS = {
    "LF": EVENTS[0],
    "CRLF": EVENTS[0].replace(b"\n", b"\r\n"),
    "CR": EVENTS[0].replace(b"\n", b"\r"),
    "no space": EVENTS[0].replace(b"data: ", b"data:"),
    "a comment": b": wait\n\n" + EVENTS[0],
    "the name of the event": b"event: chunk\n" + EVENTS[0],
}


@each_of("framing", FRAMINGS)
async def test_a_chunk_is_read_when_it_arrives(framing: str, wire: Wire) -> None:
    """Whatever ends the lines of a server: no chunk waits for the next."""
    client = client_of(wire)
    wire.will([streamed(FRAMINGS[framing][:20], FRAMINGS[framing][20:], then="hang")])
    for _ in range(2):
        stream = await ours(client, True)
        chunk = await asyncio.wait_for(anext(stream), 10)
        assert chunk.id == CHUNKS[0]["id"]
        await stream.close()
    await client.close()


@each_of("end", ["keep", "hang"])
async def test_a_connection_is_used_again_after_a_stream(end: str, wire: Wire) -> None:
    """As with the client's own reader, the end of the body is read where there is one."""
    client = client_of(wire)
    before = wire.connections
    places: list[int] = []
    for _ in range(3):
        wire.will([streamed(*EVENTS, DONE, then="end" if end == "keep" else end)])
        async with await ours(client, stream=True) as chunks:
            places.append(len([chunk async for chunk in chunks]))
    assert places == [len(EVENTS)] * 3
    assert wire.connections - before == (1 if end == "keep" else 3)
    await client.close()


@each_of("way", ["left", "closed", "thrown"])
async def test_a_stream_that_is_left_gives_its_connection_back(
    way: str, wire: Wire
) -> None:
    """However it is left: the response is closed."""
    client = client_of(wire)
    wire.will([streamed(*EVENTS, then="hang")])
    for send in (ours, ours, plain):
        stream = await send(client, True)
        chunks = stream._iterator
        await anext(chunks)
        if way == "thrown":
            with pytest.raises(ZeroDivisionError):
                await chunks.athrow(ZeroDivisionError())
        elif way == "closed":
            await stream.close()
        else:
            await chunks.aclose()
        assert stream.response.is_closed
    await client.close()


async def test_a_server_that_is_gone_is_named_as_the_client_names_it(
    waits: list[float], streamed: bool
) -> None:
    """A connection that is refused is tried again with the client's waits."""
    came: list[Outcome] = []
    for send in (ours, plain):
        async with Wire() as wire:
            client = client_of(wire)
            wire.will([fine(streamed)])
            await outcome(send(client, streamed), wire, waits)
            wire.seen.clear()
        failed = await outcome(send(client, streamed), wire, waits)
        came.append(failed._replace(error=(*failed.error[:3], failed.error[4])))
        await client.close()
    assert came[0] == came[1]
    assert len(came[0].waits) == 2


async def test_a_reply_that_does_not_come_is_waited_for_as_the_client_waits(
    wire: Wire, waits: list[float], streamed: bool
) -> None:
    """The client's time-out holds for each attempt, and its error names it; so in the middle of a stream."""
    limit = httpx2.Timeout(5.0, read=0.2)
    silent = Answer((), "hang")
    await both(wire, waits, silent, fine(streamed), stream=streamed, timeout=limit)
    await both(wire, waits, silent, stream=streamed, timeout=limit, max_retries=0)
    if streamed:
        await both(
            wire,
            waits,
            Answer(STREAMS["never closed"].parts[:3], "hang"),
            stream=True,
            timeout=limit,
        )


async def test_a_request_that_is_cancelled_ends_its_connection(
    wire: Wire, streamed: bool
) -> None:
    """The server sees it leave, and the next request is answered."""
    client = client_of(wire)
    wire.will([fine(streamed), Answer((), "hang"), fine(streamed)])
    await outcome(ours(client, streamed), wire, [])
    wire.received.clear()
    wire.left.clear()
    task = asyncio.ensure_future(ours(client, streamed))
    await wire.received.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(wire.left.wait(), 5)
    again = await outcome(ours(client, streamed), wire, [])
    assert not again.error
    assert len(again.requests) == 3
    await client.close()


class Pieces(httpx2.AsyncByteStream):
    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


ODD_EVENTS = [
    *EVENTS[:6],
    EVENTS[0].replace(b"\n", b"\r\n"),
    EVENTS[1].replace(b"data: ", b"data:"),
    b": wait\n\n",
    b"\n",
    b"event: x\n" + EVENTS[2],
    event(choices=None),
    event(created="1"),
    b'data: {"error": {"message": "No."}}\n\n',
    b"data: {\n\n",
    b"data: [DONE] or not\ndata: x\n\n",
    DONE,
]


UNUSED = http_client()


@given(
    st.lists(st.sampled_from(ODD_EVENTS), max_size=8).map(b"".join),
    st.lists(st.integers(min_value=0, max_value=2000), max_size=12),
    st.integers(min_value=0, max_value=3),
)
@example(WHOLE, [*range(1, len(WHOLE))], 0)
def test_a_stream_may_be_cut_anywhere(
    whole: bytes, cuts: list[int], short: int
) -> None:
    """However the bytes of a stream are cut, the chunks, and the error, are those of the client's own reader."""
    text = whole[: len(whole) - short]
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    client = AsyncOpenAI(api_key="any", http_client=UNUSED)

    async def read(kind: Any, cast_to: Any) -> Any:
        request = httpx2.Request("POST", "http://any/")
        response = httpx2.Response(200, stream=Pieces(pieces), request=request)
        read: list[Any] = []
        try:
            async for chunk in kind(cast_to=cast_to, response=response, client=client):
                read.append(described(chunk))
        except Exception as error:
            read.append(described_error(error))
        return read, response.is_closed

    ours = asyncio.run(read(Chunks, ReadChunk))
    assert ours == asyncio.run(
        read(AsyncStream[ChatCompletionChunk], ChatCompletionChunk)
    )


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
"""Any JSON."""


@given(
    st.sampled_from(["id", "created", "object", "choices", "usage", "model", "odd"]),
    values,
)
def test_any_value_in_a_completion_is_read_as_the_client_reads_it(
    name: str, value: Any
) -> None:
    """A response of invalid types is left to the client; of valid ones, the objects are equal."""
    written = json.dumps({**COMPLETION, name: value}).encode()
    request = httpx2.Request("POST", "http://any/")
    response = httpx2.Response(
        200,
        content=written,
        headers={"content-type": "application/json"},
        request=request,
    )
    read = module._completion(response)
    if read is not None:
        theirs = ChatCompletion.construct(**json.loads(written))
        theirs._request_id = None
        assert described(read) == described(theirs)


# What address and headers come from


def with_headers(client: AsyncOpenAI, **headers: Any) -> None:
    client._custom_headers = {**client._custom_headers, **headers}


def changed_http(**options: Any) -> Callable[[AsyncOpenAI], None]:
    def change(client: AsyncOpenAI) -> None:
        client._client = http_client(**options)

    return change


def timeout_in_place(client: AsyncOpenAI) -> None:
    assert isinstance(client.timeout, httpx2.Timeout)
    client.timeout.read = 77


def query_in_place(client: AsyncOpenAI) -> None:
    client._custom_query["deep"]["a"].append("é")  # pyright: ignore[reportIndexIssue]


def own_cookie(client: AsyncOpenAI) -> None:
    client._client.cookies.set("mine", "1")


CHANGES: dict[str, tuple[Callable[[AsyncOpenAI], Any], dict[str, Any]]] = {
    "nothing": (lambda client: None, {}),
    "api_key": (lambda client: setattr(client, "api_key", "other"), {}),
    "base_url": (
        lambda client: setattr(client, "base_url", f"{client.base_url}other"),
        {},
    ),
    "base_url with a query": (
        lambda client: setattr(client, "base_url", f"{client.base_url}?a=1"),
        {},
    ),
    "organization": (lambda client: setattr(client, "organization", "other"), {}),
    "organization gone": (
        lambda client: setattr(client, "organization", None),
        {"organization": "one"},
    ),
    "project": (lambda client: setattr(client, "project", "other"), {}),
    "timeout": (lambda client: setattr(client, "timeout", 66), {}),
    "timeout of another type": (
        lambda client: setattr(client, "timeout", 66.0),
        {"timeout": 66},
    ),
    "no timeout": (lambda client: setattr(client, "timeout", None), {}),
    "timeout in place": (timeout_in_place, {"timeout": lambda: httpx2.Timeout(33)}),
    "timeout of the other httpx": (
        lambda client: setattr(client, "timeout", httpx.Timeout(22)),
        {},
    ),
    "max_retries": (lambda client: setattr(client, "max_retries", 0), {}),
    "headers": (lambda client: with_headers(client, **{"x-new": "1"}), {}),
    "headers in place": (
        lambda client: client._custom_headers.update({"x-new": "1"}),  # pyright: ignore
        {"default_headers": lambda: {"x-old": "1"}},
    ),
    "another user agent": (
        lambda client: with_headers(client, **{"User-Agent": "mine"}),
        {},
    ),
    "a header left out": (
        lambda client: with_headers(client, **{"X-Stainless-Lang": openai.Omit()}),
        {},
    ),
    "query": (lambda client: setattr(client, "_custom_query", {"a": 1}), {}),
    "query of another type": (
        lambda client: setattr(client, "_custom_query", {"a": True}),
        {"default_query": {"a": 1}},
    ),
    "query in place": (
        query_in_place,
        {"default_query": lambda: {"deep": {"a": ["x"]}}},
    ),
    "http client": (changed_http(), {}),
    "headers of the http client": (
        changed_http(headers={"x-http": "1", "Authorization": "Basic any"}),
        {},
    ),
    "a header of the http client": (
        lambda client: client._client.headers.update({"x-http": "1"}),
        {},
    ),
    "cookies of the user": (own_cookie, {}),
    "params": (
        lambda client: setattr(client._client, "params", {"b": "2", "a": "1"}),
        {},
    ),
    "params in another order": (
        lambda client: setattr(client._client, "params", {"b": "2", "a": "1"}),
        {"http_client": lambda: http_client(params={"a": "1", "b": "2"})},
    ),
    "auth of the http client": (
        lambda client: setattr(client._client, "auth", ("me", "secret")),
        {},
    ),
    "an address with a password": (
        lambda client: setattr(
            client, "base_url", str(client.base_url).replace("//", "//me:secret@")
        ),
        {},
    ),
    "the older httpx": (
        lambda client: client._client.headers.update({"x-http": "1"}),
        {"http_client": lambda: httpx.AsyncClient(verify=CONTEXT)},
    ),
}


@each_of("kind", CHANGES)
async def test_what_a_request_comes_from_may_change(
    kind: str, wire: Wire, waits: list[float], streamed: bool
) -> None:
    """The next request has the new address, headers and limits, in its first attempt and in its retries."""
    change, options = CHANGES[kind]
    unchanged = (await both(wire, waits, stream=streamed, **options)).requests
    changed = await both(
        wire,
        waits,
        problem(503),
        fine(streamed),
        stream=streamed,
        before=change,
        **options,
    )
    assert (changed.requests[0] == unchanged[0]) == (
        kind in ("nothing", "max_retries", "http client")
    )


async def test_cookies_that_a_server_sets_are_sent_back(
    wire: Wire, waits: list[float], streamed: bool
) -> None:
    """And replaced, and deleted, as the HTTP client does; no cookie stays in the prepared request."""
    sent: dict[bool, list[Any]] = {}
    cookies = ["a=1", "a=2; Path=/", "a=; Max-Age=0", "b=1", None]
    for send in (ours, plain):
        client = client_of(wire, organization="one")
        headers: list[Any] = []
        for place, cookie in enumerate(cookies * 2):
            if place == 4:
                client.organization = "other"  # prepared again, with cookies
            wire.will(
                [
                    Answer(
                        (add_header(fine(streamed), cookie), *fine(streamed).parts[1:])
                    )
                ]
            )
            (received,) = (await outcome(send(client, streamed), wire, waits)).requests
            headers.append(sorted(received.headers))
        await client.close()
        sent[send is ours] = headers
    assert sent[True] == sent[False]
    assert {
        value
        for headers in sent[True]
        for name, value in headers
        if name.lower() == "cookie"
    } >= {"a=1", "a=2"}


def add_header(answer: Answer, cookie: str | None) -> bytes:
    first = answer.parts[0]
    return (
        first
        if cookie is None
        else first.replace(b"\r\n", f"\r\nSet-Cookie: {cookie}\r\n".encode(), 1)
    )


OWN_HEADERS = [
    {"Cookie": "mine=1"},
    {"content-length": "9"},
    {"Transfer-Encoding": "chunked"},
    {"X-Stainless-Raw-Response": "true"},
]


@each_of("place", ["client", "http client"])
@each_of("headers", OWN_HEADERS, ids=str)
async def test_headers_that_belong_to_one_request_are_not_kept(
    headers: dict[str, str], place: str, wire: Wire, waits: list[float]
) -> None:
    """Where the application itself gives cookies or a length, the client makes each request."""
    seen: list[Any] = []

    async def note(request: Any) -> None:
        seen.append({name: value for name, value in request.headers.items()})
        request.headers["content-length"] = str(len(request.content))
        request.headers.pop("transfer-encoding", None)

    for send in (ours, plain):
        at_http = place == "http client"
        http = http_client(
            event_hooks={"request": [note]}, headers=headers if at_http else {}
        )
        client = client_of(
            wire, http_client=http, default_headers={} if at_http else headers
        )
        for _ in range(3):
            wire.will([fine(False)])
            await outcome(send(client, False), wire, waits)
        await client.close()
        assert client not in module._PREPARED
    if "content-length" not in headers:
        for each in seen:
            each.pop("content-length", None)
    assert seen[:3] == seen[3:]


async def test_hooks_see_each_request_as_it_is_built(
    wire: Wire, waits: list[float], streamed: bool
) -> None:
    """A hook may read the body, and change headers and limits: no change of one request is in the next."""

    def http() -> Any:
        count = 0

        async def change(request: Any) -> None:
            nonlocal count
            count += 1
            read = (
                json.loads(request.content)["model"]
                + json.loads(await request.aread())["model"]
            )
            request.headers.setdefault(
                "x-count", f"{count} {read} {request.extensions['timeout']}"
            )
            request.headers["x-before"] = request.headers.get("x-after", "none")
            request.headers["x-after"] = str(count)
            request.headers.pop("x-stainless-lang", None)
            request.extensions["timeout"]["read"] = 50 + count

        async def answered(response: Any) -> None:
            response.headers["x-request-id"] = f"hook {count}"

        return http_client(event_hooks={"request": [change], "response": [answered]})

    came = await both(
        wire, waits, problem(503), fine(streamed), stream=streamed, http_client=http
    )
    first, second = (dict(each.headers) for each in came.requests)
    assert "'read': 600" in first["x-count"]
    assert (first["x-before"], second["x-after"]) == ("none", "3")


async def test_a_hook_that_raises_is_the_clients(
    wire: Wire, waits: list[float], streamed: bool
) -> None:
    """An error of a hook is what it was; one that the client takes for a lost connection is tried again."""
    for error in (ZeroDivisionError, httpx2.ConnectError, httpx2.PoolTimeout):

        def http(error: Any = error) -> Any:
            count = 0

            async def check(request: Any) -> None:
                nonlocal count
                count += 1
                if count == 2:
                    raise error("No.")

            return http_client(event_hooks={"request": [check]})

        client_options: dict[str, Any] = {"http_client": http}
        if error is ZeroDivisionError:
            with pytest.raises(AssertionError):  # no request arrives
                await both(wire, waits, stream=streamed, **client_options)
        else:
            await both(wire, waits, stream=streamed, **client_options)


async def test_proxies_and_mounts_are_the_http_clients(
    wire: Wire, waits: list[float], streamed: bool
) -> None:
    """The request goes where the HTTP client sends it."""

    def proxied() -> Any:
        return http_client(proxy=f"http://me:secret@127.0.0.1:{wire.port}")

    came = await both(
        wire,
        waits,
        stream=streamed,
        http_client=proxied,
        base_url="http://example.org/v1",
    )
    assert (
        came.requests[0].line == "POST http://example.org/v1/chat/completions HTTP/1.1"
    )


async def test_a_key_that_changes_while_a_request_is_retried_is_sent(
    wire: Wire, monkeypatch: pytest.MonkeyPatch, waits: list[float]
) -> None:
    """Each attempt is built from the client's fields as they are."""
    keys: list[Any] = []
    for send in (ours, plain):
        client = client_of(wire)
        wire.will([fine(False)])
        await send(client, False)

        async def rotate(_: float, client: AsyncOpenAI = client) -> None:
            client.api_key = "fresh"

        monkeypatch.setattr("openai._base_client.anyio.sleep", rotate)
        wire.will([problem(429), fine(False)])
        await send(client, False)
        keys.append([dict(each.headers)["authorization"] for each in wire.seen])
        await client.close()
    assert keys == [["Bearer any", "Bearer fresh"]] * 2


async def test_options_of_a_copy_are_its_own(wire: Wire, waits: list[float]) -> None:
    """A client made by ``with_options`` shares the connections, and has requests of its own."""
    client = client_of(wire)
    for each in (
        client,
        client.with_options(default_headers={"x-new": "1"}, max_retries=0),
        client,
    ):
        wire.will([fine(False)])
        for send in (ours, ours, plain):
            assert not (await outcome(send(each, False), wire, waits)).error
        first, second, third = wire.seen
        assert (
            _without_length(first) == _without_length(second) == _without_length(third)
        )
        assert ("x-new", "1") in first.headers or each is client
    await client.close()


async def test_a_client_that_is_gone_is_not_kept(
    wire: Wire, waits: list[float]
) -> None:
    """What was prepared goes with its client."""
    client = client_of(wire)

    async def hook(_: Any, client: AsyncOpenAI = client) -> None:
        assert client

    client._client.event_hooks = {"request": [hook]}
    wire.will([fine(False)])
    await ours(client, False)
    assert client in module._PREPARED
    gone = weakref.ref(client)
    await client.close()
    del client, hook
    gc.collect()
    assert gone() is None


async def test_no_body_is_kept(wire: Wire) -> None:
    """A conversation that was sent is not held by what is prepared for the next."""
    client = client_of(wire)
    wire.will([fine(False)])
    await ours(client, False)
    assert not any(
        isinstance(each, (httpx2.Request, httpx2.ByteStream))
        for each in module._PREPARED[client]
    )
    await client.close()


async def test_a_client_that_is_closed_says_so(
    wire: Wire, waits: list[float], streamed: bool
) -> None:
    """The error of a closed client is its own, and no request is sent."""
    errors: list[Any] = []
    for send in (ours, plain):
        client = client_of(wire)
        wire.will([fine(streamed)])
        await outcome(send(client, streamed), wire, waits)
        await client.close()
        errors.append((await outcome(send(client, streamed), wire, waits)).error)
        assert len(wire.seen) == 1
    assert errors[0] == errors[1]
    assert errors[0][0] is RuntimeError


async def test_requests_at_once_are_each_their_own(wire: Wire, streamed: bool) -> None:
    """The first requests of a client, and later ones, may overlap."""
    client = client_of(wire)
    for _ in range(2):
        wire.will([fine(streamed)])
        came = await asyncio.gather(
            *(outcome(ours(client, streamed), wire, []) for _ in range(8))
        )
        assert not [each.error for each in came if each.error]
        assert len(set(map(repr, map(_without_length, wire.seen)))) == 1
        assert len({repr(each.read) for each in came}) == 1
    await client.close()


# Where the client itself makes the request


class Own(AsyncOpenAI):
    """An application's."""


class OwnHttp(httpx2.AsyncClient):
    """An application's."""


async def key() -> str:
    return "called"


def wrapped(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(*given: Any, **named: Any) -> Any:
        return method(*given, **named)

    return wrapper


def patch_http(client: AsyncOpenAI) -> None:
    client._client.build_request = wrapped(client._client.build_request)


def strict(client: AsyncOpenAI) -> None:
    client._strict_response_validation = True


CLIENTS: dict[str, Callable[[str], AsyncOpenAI]] = {
    "a callable key": lambda url: AsyncOpenAI(base_url=url, api_key=key),
    "a subclass": lambda url: Own(base_url=url, api_key="any"),
    "a subclass of the http client": lambda url: AsyncOpenAI(
        base_url=url, api_key="any", http_client=OwnHttp(verify=CONTEXT)
    ),
    "Azure": lambda url: openai.AsyncAzureOpenAI(
        azure_endpoint=url, azure_deployment="m", api_key="any", api_version="1"
    ),
    "strict validation": lambda url: AsyncOpenAI(
        base_url=url, api_key="any", _strict_response_validation=True
    ),
}


@each_of("kind", CLIENTS)
async def test_a_client_of_another_kind_makes_its_requests(
    kind: str, wire: Wire, streamed: bool
) -> None:
    """A key that is called for, a subclass, Azure: nothing is known of the next request."""
    client = CLIENTS[kind](wire.url)
    await makes_its_requests(client, wire, streamed)


@each_of("name", module._OTHER_ORIGINS)
async def test_a_key_or_header_of_another_origin_is_the_clients(
    name: str, wire: Wire
) -> None:
    """A provider, workload identity, a key that is called for: the client makes the request."""
    client = client_of(wire)
    assert module._is_ordinary(client)
    setattr(client, name, object())
    assert not module._is_ordinary(client)
    await client.close()


async def makes_its_requests(client: AsyncOpenAI, wire: Wire, streamed: bool) -> None:
    for _ in range(2):
        wire.will([fine(streamed)])
        for send in (ours, plain):
            assert not (await outcome(send(client, streamed), wire, [])).error
        assert _without_length(wire.seen[0]) == _without_length(wire.seen[1])
    assert client not in module._PREPARED
    await client.close()


@pytest.mark.parametrize("name", ["build_request"])
async def test_a_method_of_the_http_client_that_is_wrapped_is_called(
    name: str, wire: Wire, monkeypatch: pytest.MonkeyPatch, streamed: bool
) -> None:
    """On the class and on the instance."""
    client = client_of(wire)
    patch_http(client)
    await makes_its_requests(client, wire, streamed)
    monkeypatch.setattr(
        httpx2.AsyncClient, name, wrapped(getattr(httpx2.AsyncClient, name))
    )
    await makes_its_requests(client_of(wire), wire, streamed)


@each_of("name", [name for name in USED if name.startswith("AsyncOpenAI.")])
async def test_a_method_of_the_client_that_is_wrapped_is_called(
    name: str, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tracer's wrapper on the class or on a client, also one that comes after a first request, sees the request."""
    client = client_of(wire)
    wire.will([fine(False)])
    await ours(client, False)
    assert client in module._PREPARED
    del module._PREPARED[client]
    last = name.rpartition(".")[2]
    member = getattr(AsyncOpenAI, last)
    if not isinstance(member, property):
        with monkeypatch.context() as patched:
            patched.setattr(client, last, wrapped(getattr(client, last)))
            await ours(client, False)
            assert client not in module._PREPARED
    replaced = (
        property(wrapped(member.fget))
        if isinstance(member, property)
        else wrapped(member)
    )
    with monkeypatch.context() as patched:
        patched.setattr(AsyncOpenAI, last, replaced)
        await ours(client, False)
        assert client not in module._PREPARED
    await client.close()


async def test_a_log_of_requests_is_the_clients(
    wire: Wire, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    """Where the client's log is at DEBUG, each request is in it."""
    client = client_of(wire)
    wire.will([fine(streamed)])
    await outcome(ours(client, streamed), wire, [])
    with caplog.at_level(logging.DEBUG, logger="openai"):
        await outcome(ours(client, streamed), wire, [])
    assert "Sending HTTP Request" in caplog.text
    await client.close()


@each_of(
    "more",
    [{"headers": {"x-mine": "1"}}, {"params": {"a": 1}}, {"timeout": 9}],
    ids=str,
)
async def test_options_of_one_request_are_the_clients(
    more: dict[str, Any], wire: Wire, streamed: bool
) -> None:
    """Headers, query and time-out of one request are in it, and in no other."""
    client = client_of(wire)
    wire.will([fine(streamed)])
    for options in (OPTIONS, {**OPTIONS, **more}, OPTIONS):
        await outcome(ours(client, streamed, options), wire, [])
    first, second, third = map(_without_length, wire.seen)
    assert first == third != second
    await client.close()


async def test_retries_that_are_no_number_are_refused(
    wire: Wire, streamed: bool
) -> None:
    """What the client refuses before a request is refused before a prepared one."""
    client = client_of(wire)
    wire.will([fine(streamed)])
    await outcome(ours(client, streamed), wire, [])
    client.max_retries = -1
    with pytest.raises(ValueError, match="max_retries"):
        await ours(client, streamed)
    assert len(wire.seen) == 1
    await client.close()


# Members of openai


@each_of("name", USED)
def test_the_members_that_a_prepared_request_replaces_have_not_changed(
    name: str,
) -> None:
    """The client's members that a prepared request stands for have the sources that it was written for.

    If this fails, openai has changed: read what the member does now, make a prepared request do it too, and put its new
    digest beside the name.
    """
    AsyncOpenAI(api_key="any")  # loads what the client loads when it is made
    member = attrgetter(name)(openai)
    member = getattr(member, "fget", member)
    assert is_own(member, USED[name], "openai"), source_digest(member)


@each_of("name", USED)
async def test_a_member_that_changed_is_noticed(
    name: str, wire: Wire, monkeypatch: pytest.MonkeyPatch, fresh: None
) -> None:
    """A member with another source, or that is gone, leaves the request to the client, and streams to its reader."""
    module._are_own.cache_clear()
    monkeypatch.setattr(module, "USED", {**USED, name: "0" * 16})
    client = client_of(wire)
    for stream in (False, True):
        wire.will([fine(stream)])
        assert not isinstance(await ours(client, stream), Chunks)
    assert client not in module._PREPARED
    await client.close()


@pytest.fixture
def fresh() -> Iterator[None]:
    """Members are looked at anew afterwards."""
    yield
    module._are_own.cache_clear()
