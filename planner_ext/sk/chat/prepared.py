"""A prepared request to OpenAI: what the client builds for each request is built once for each client.

The client builds the first request. Later ones differ from it in their body alone, as long as everything that its
address and headers come from is the same. A prepared request goes through the client's own HTTP client, with its hooks,
limits and time-outs.

Only a good response is read here. If the request fails, or is answered with anything but a chat completion, the client
makes its request as usual, and finds this outcome as that of its first attempt: retries, waits, headers and errors are
the client's own.

`USED` has the client's methods that this stands for. Before each request their sources are checked. Where one was
changed, patched or wrapped, and where a key or header has another origin than the client's fields, the client makes
the request.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary

from openai import AsyncOpenAI, AsyncStream, BaseModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from planner_ext.sk.members import is_own

USED: Mapping[str, str] = {
    "request": "52506e6c8ba17cff",
    "_build_request": "23cad049a0154f76",
    "_build_headers": "c5876332cda1627e",
    "_prepare_options": "93373687583dc38a",
    "_prepare_request": "0f06e1f4d4b2b982",
    "_send_request": "147648f402885861",
    "_process_response": "796f8bd54be85374",
}
"""Methods of `AsyncOpenAI`, with the digests of their sources."""

_OTHER_ORIGINS: Final = ("_api_key_provider", "workload_identity", "_provider_runtime", "_idempotency_header")
"""Fields of a client that, if set, give each request headers of its own."""

_client_log = logging.getLogger("openai._base_client")


class ReadCompletion(ChatCompletion):
    """The type that the client is asked for; constructing it returns a `ChatCompletion`."""

    @classmethod
    def construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Any:
        """Read a response: the client calls this with its JSON."""
        return _read(ChatCompletion, values)


class ReadChunk(ChatCompletionChunk):
    """The type that the client is asked for; constructing it returns a `ChatCompletionChunk`."""

    @classmethod
    def construct(cls, _fields_set: set[str] | None = None, **values: Any) -> Any:
        """Read a chunk: the client calls this with its JSON."""
        return _read(ChatCompletionChunk, values)


def _read(kind: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    try:
        return kind.model_validate(values)
    except ValidationError:
        return kind.construct(**values)


class Chunks(AsyncStream[ReadChunk]):
    """The chunks of a streamed response.

    A plain chunk is read from its line. Anything else, the end included, is left to the client's own reader, from that
    line on.
    """

    async def __stream__(self) -> AsyncIterator[Any]:
        """Read the chunks; the client's class calls this once."""
        source = self.response.aiter_bytes()
        unread = b""
        failure: Exception | None = None
        try:
            async for piece in source:
                *events, unread = (unread + piece).split(b"\n\n")
                for place, event in enumerate(events):
                    chunk = _plain_chunk(event)
                    if chunk is None:
                        unread = b"\n\n".join([*events[place:], unread])
                        break
                    yield chunk
                else:
                    continue
                break
        except Exception as error:  # the client's own reader names it
            failure = error
        rest = _Rest(self.response, unread, source, failure)
        async for chunk in AsyncStream[ReadChunk](cast_to=ReadChunk, response=cast("Any", rest), client=self._client):
            yield chunk


def _plain_chunk(event: bytes) -> ChatCompletionChunk | None:
    """Read a server-sent event that is one line of data with a chunk; None if it is anything else."""
    if not event.startswith(b"data: {") or b"\n" in event or b"\r" in event:
        return None
    try:
        chunk = ChatCompletionChunk.model_validate_json(event[6:])
    except ValidationError:
        return None
    return None if chunk.model_extra and "error" in chunk.model_extra else chunk


class _Rest:
    """A response of which the beginning was read."""

    def __init__(self, response: Any, unread: bytes, source: AsyncIterator[bytes], failure: Exception | None) -> None:
        self._response = response
        self._unread = unread
        self._source = source
        self._failure = failure

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        yield self._unread
        if self._failure is not None:
            raise self._failure
        async for piece in self._source:
            yield piece


class _Building(AsyncOpenAI):
    """A client that keeps the requests that it builds."""

    _built: list[Any]

    def _build_request(self, options: Any, **given: Any) -> Any:
        request = super()._build_request(options, **given)
        self._built.append(request)
        return request


class _AfterFirstAttempt(AsyncOpenAI):
    """A client whose first attempt was made already, with this outcome."""

    _outcome: Any

    async def _send_request(self, request: Any, **given: Any) -> Any:
        outcome = self._outcome
        if outcome is None:
            return await super()._send_request(request, **given)
        self._outcome = None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


for _kind in (_Building, _AfterFirstAttempt):
    _kind.__name__ = AsyncOpenAI.__name__  # the client sends it as its name


def _view(client: AsyncOpenAI, kind: type[AsyncOpenAI], **own: Any) -> AsyncOpenAI:
    """Make a client of another class with the fields of this one."""
    view = object.__new__(kind)
    view.__dict__ = {**client.__dict__, **own}
    return view


class _Prepared(NamedTuple):
    """A request that the client built.

    Attributes:
        origin: Everything that its address and headers came from.
        request: The request.
        headers: Its headers without the length of its body and without cookies.
    """

    origin: tuple[Any, ...]
    request: Any
    headers: list[tuple[bytes, bytes]]

    def with_body(self, content: bytes, cookies: Any) -> Any:
        """Make a request that differs in its body and its cookies."""
        built = self.request
        length = (b"Content-Length", b"%d" % len(content))
        request = type(built)(
            built.method,
            built.url,
            headers=[*self.headers, length],
            cookies=cookies,
            stream=type(built.stream)(content),
            extensions=built.extensions,
        )
        request.read()  # hooks may look at the body
        return request


_PREPARED: WeakKeyDictionary[AsyncOpenAI, _Prepared] = WeakKeyDictionary()


async def post(client: AsyncOpenAI, *, path: str, content: bytes, options: Any, stream: bool) -> Any:
    """Send a body as the client's ``post`` does, by a prepared request where the client would send the same.

    Args:
        client: The client.
        path: The path of the request.
        content: The body.
        options: Options of the request, as ``post`` takes them.
        stream: Whether the response is streamed.

    Returns:
        A `ChatCompletion`, or an `AsyncStream` of chunks.
    """
    given: Any = {"path": path, "content": content, "options": options, "stream": stream}
    given |= {"cast_to": ReadCompletion, "stream_cls": Chunks}
    origin = _origin(client, path, options)
    if origin is None:
        return await client.post(**given)
    prepared = _PREPARED.get(client)
    if prepared is None or prepared.origin != origin:
        built: list[Any] = []
        response = await _view(client, _Building, _built=built).post(**given)
        headers = [item for item in built[0].headers.raw if item[0].lower() not in (b"content-length", b"cookie")]
        _PREPARED[client] = _Prepared(origin, built[0], headers)
        return response
    http: Any = client._client
    try:
        outcome = await http.send(prepared.with_body(content, http.cookies), stream=stream)
    except Exception as error:  # the client decides what it is
        outcome = error
    else:
        if stream and outcome.is_success:
            return Chunks(cast_to=ReadChunk, response=outcome, client=client)
        if not stream and (completion := _completion(outcome)) is not None:
            return completion
    return await _view(client, _AfterFirstAttempt, _outcome=outcome).post(**given)


def _completion(response: Any) -> ChatCompletion | None:
    """Read a response; None if it is anything but a chat completion in JSON."""
    kind = response.headers.get("content-type", "").partition(";")[0]
    if not response.is_success or not kind.endswith("json"):
        return None
    try:
        completion = ChatCompletion.model_validate_json(response.content)
    except ValidationError:
        return None
    completion._request_id = response.headers.get("x-request-id")
    return completion


def _origin(client: AsyncOpenAI, path: str, options: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """List everything that address and headers of a request come from; None if the client has to make it."""
    fields = client.__dict__
    http: Any = client._client
    ordinary = (
        type(client) is AsyncOpenAI
        and all(is_own(getattr(AsyncOpenAI, name, None), digest, "openai") for name, digest in USED.items())
        and USED.keys().isdisjoint(fields)
        and not any(fields.get(name) for name in _OTHER_ORIGINS)
        and options.keys() == {"security"}
        and type(http).build_request.__module__.partition(".")[0] in ("httpx", "httpx2")
        and not client._strict_response_validation
        and not _client_log.isEnabledFor(logging.DEBUG)
    )
    if not ordinary:
        return None
    custom = dict(client._custom_headers)
    sent = http.headers.raw
    return (
        path,
        options,
        client.api_key,
        client.organization,
        client.project,
        client.base_url,
        client.timeout,
        custom,
        dict(client._custom_query),
        client.max_retries,
        http,
        sent,
        http.params,
    )
