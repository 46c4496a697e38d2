"""A prepared request to OpenAI: what the client builds for each request is built once for each client.

The client builds the first request. Later ones differ in body and cookies alone, as
long as everything that address and headers come from is the same. They go through the
client's own HTTP client, with its hooks, limits and time-outs.

Any outcome but a good response is handed to the client as that of its first attempt:
retries, waits and errors are its own. Where a member in `USED` was changed, patched or
wrapped, or a key or header has another origin than the client's fields, the client
makes the request.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from functools import lru_cache
from operator import attrgetter
from types import FunctionType
from typing import Any, Final, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary, ref

import openai
from openai import AsyncOpenAI, AsyncStream, BaseModel
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import ValidationError

from planner_ext.sk.members import is_own

USED: Mapping[str, str] = {
    "AsyncOpenAI.post": "18ad3d5008f9be64",
    "AsyncOpenAI.request": "52506e6c8ba17cff",
    "AsyncOpenAI._build_request": "23cad049a0154f76",
    "AsyncOpenAI._build_headers": "c5876332cda1627e",
    "AsyncOpenAI._prepare_url": "aba8dd1b1567623f",
    "AsyncOpenAI._auth_headers": "dc0ed5567f73ee2d",
    "AsyncOpenAI._auth_query": "2c515a90c275b6ad",
    "AsyncOpenAI._bearer_auth": "d908b6a52967879e",
    "AsyncOpenAI.base_url": "0c36c7b5ccb6d991",
    "AsyncOpenAI.default_headers": "f5c1bbc751c602dd",
    "AsyncOpenAI.default_query": "d2d42cc13a743939",
    "AsyncOpenAI.user_agent": "41cc4eefb19e5892",
    "AsyncOpenAI.platform_headers": "7b5d6e07978ae275",
    "AsyncOpenAI.custom_auth": "5895ba865ce92f2e",
    "AsyncOpenAI._prepare_options": "93373687583dc38a",
    "AsyncOpenAI._prepare_request": "0f06e1f4d4b2b982",
    "AsyncOpenAI._send_request": "147648f402885861",
    "AsyncOpenAI._send_with_auth_retry": "9933f5c3cbba9c04",
    "AsyncOpenAI._process_response": "796f8bd54be85374",
    "AsyncOpenAI._process_response_data": "4406fcb1a3ae4105",
    "AsyncOpenAI._make_sse_decoder": "63ab2f64e2463254",
    "AsyncStream.__init__": "79a8f6a085c2c04d",
    "AsyncStream.__stream__": "381c66f37dd55cb8",
    "AsyncStream._iter_events": "afe83a0e0ef594c7",
    "_streaming_cleanup.drain_response_async": "9a28df3f1ae3bdf9",
    "_base_client.BaseClient.default_headers": "7850119483de9bcf",
    "_base_client.AsyncAPIClient._prepare_options": "ba28bf69fb852b7e",
    "_base_client.AsyncAPIClient._send_request": "39b00245a936773a",
    "_base_client.AsyncAPIClient.custom_auth": "c1803c9fcb70ab37",
    "_response.AsyncAPIResponse.parse": "d080f3621c5cae4b",
    "_response.AsyncAPIResponse._parse": "44f5e2b9d1902cad",
    "lib._client_auth.async_auth_headers": "0258c895deed1488",
    "lib._client_auth.async_bearer_auth": "5d0d191640a9dfc2",
    "lib._client_auth.asyncbase_url": "f9f63da12842ee20",
    "lib._client_auth.asynccustom_auth": "f0ef13eb7ac1f2d8",
    "lib._client_auth.async_prepare_options": "29662896c76abba7",
    "lib._client_auth.async_prepare_request": "6ce092fc19bacbf8",
    "lib._client_auth.async_send_request": "3c67bd15e620d104",
    "lib._client_auth.async_send_with_auth_retry": "6e81092a6c179c16",
}
"""Members of the package `openai`, with the digests of their sources."""

_OF_CLIENT: Final = [
    name.removeprefix("AsyncOpenAI.")
    for name in USED
    if name.startswith("AsyncOpenAI.")
]
_members = attrgetter(*_OF_CLIENT)
_NAMES: Final = frozenset(_OF_CLIENT)

_OTHER_ORIGINS: Final = (
    "_api_key_provider",
    "workload_identity",
    "_provider_runtime",
    "_idempotency_header",
)
"""Fields of a client that, if set, give each request headers of its own."""

_OF_ONE_REQUEST: Final = (
    "content-length",
    "transfer-encoding",
    "cookie",
    "x-stainless-raw-response",
)
"""Headers that, if an application sets them, leave no request like another."""

_ORDINARY: Final = {"security": {"bearer_auth": True}}
"""The options of a request whose settings have neither headers, query nor time-out."""

_client_log = logging.getLogger("openai._base_client")


class ReadCompletion(ChatCompletion):
    """The type to ask the client for; constructing it returns a `ChatCompletion`."""

    @classmethod
    def construct(cls, _fields_set: set[str] | None = None, /, **values: Any) -> Any:
        """Read a response; the client calls this."""
        return _read(ChatCompletion, values)


class ReadChunk(ChatCompletionChunk):
    """The type to ask the client for; constructing it returns a `ChatCompletionChunk`."""

    @classmethod
    def construct(cls, _fields_set: set[str] | None = None, /, **values: Any) -> Any:
        """Read a chunk; the client calls this."""
        return _read(ChatCompletionChunk, values)


def _read(kind: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    try:
        return kind.model_validate(values, strict=True)
    except ValidationError:
        return kind.construct(**values)


_ClientsChunks = AsyncStream[ReadChunk]

_DONE: Final = b"data: [DONE]"
_DRAIN_SECONDS: Final = 0.1  # the client's own limit


class Chunks(AsyncStream[ReadChunk]):
    """The chunks of a streamed response.

    A plain chunk, and the usual end, is read from its line. Anything else is left to
    the client's own reader, from that line on.
    """

    async def __stream__(self) -> AsyncIterator[Any]:
        """Read the chunks; the client's class calls this once."""
        rest = _Rest(self.response)
        try:
            while (events := await rest.events()) is not None:
                for place, event in enumerate(events):
                    if event.startswith(_DONE):
                        await rest.drain()
                        return
                    chunk = _plain_chunk(event)
                    if chunk is None:
                        rest.put_back(events[place:])
                        break
                    yield chunk
                else:
                    continue
                break
            async for chunk in _ClientsChunks(
                cast_to=ReadChunk, response=cast("Any", rest), client=self._client
            ):
                yield chunk
        finally:
            await self.response.aclose()


def _plain_chunk(event: bytearray) -> ChatCompletionChunk | None:
    """Read an event that is one line of data with a chunk; else None."""
    if not event.startswith(b"data: {") or b"\n" in event:
        return None
    try:
        chunk = ChatCompletionChunk.model_validate_json(event[6:], strict=True)
    except ValidationError:
        return None
    return None if chunk.model_extra and "error" in chunk.model_extra else chunk


class _Rest:
    """A streamed response: its events, and what comes after them for the client's own reader."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self._pieces = response.aiter_bytes()
        self._unread = bytearray()
        self._failure: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._response, name)

    async def events(self) -> list[bytearray] | None:
        """Read the events that the next piece completes; None if the rest is for the client's reader."""
        try:
            piece = await anext(self._pieces)
        except StopAsyncIteration:
            return None
        except Exception as error:  # the client's own reader names it
            self._failure = error
            return None
        self._unread += piece
        if b"\r" in piece:  # lines that end otherwise
            return None
        if b"\n" not in piece:
            return []
        *events, self._unread = self._unread.split(b"\n\n")
        return events

    def put_back(self, events: list[bytearray]) -> None:
        self._unread = bytearray(b"\n\n").join([*events, self._unread])

    async def drain(self) -> None:
        """Read to the end, if it comes at once: then the connection can be used again."""
        if self._response.http_version == "HTTP/1.1":
            with contextlib.suppress(Exception):
                async with asyncio.timeout(_DRAIN_SECONDS):
                    async for _ in self._pieces:
                        pass

    async def aiter_bytes(self) -> AsyncIterator[bytes]:
        yield bytes(self._unread)
        if self._failure is not None:
            raise self._failure
        async for piece in self._pieces:
            yield piece


class _Prepared(NamedTuple):
    """What the requests of a client have in common; ``origin`` is what all of it comes from."""

    origin: tuple[Any, ...]
    kind: Any
    body: Any
    method: str
    url: Any
    headers: Any
    timeout: dict[str, Any]

    def request(self, content: bytes, cookies: Any) -> Any:
        request = self.kind(
            self.method,
            self.url,
            headers=self.headers,
            cookies=cookies,
            stream=self.body(content),
            extensions={"timeout": self.timeout.copy()},
        )
        request.headers["Content-Length"] = str(len(content))
        request.read()  # hooks may look at the body
        return request


_PREPARED: WeakKeyDictionary[AsyncOpenAI, _Prepared] = WeakKeyDictionary()


class _Building(AsyncOpenAI):
    """A client that prepares its later requests by its first."""

    __slots__ = ("prepared",)

    prepared: _Prepared | None

    def _build_request(self, options: Any, **given: Any) -> Any:
        request = super()._build_request(options, **given)
        if self.prepared is None:
            self.prepared = _prepared(self, options.url, request)
        return request


class _AfterFirstAttempt(AsyncOpenAI):
    """A client whose first attempt was made already, with this outcome."""

    __slots__ = ("outcome",)

    outcome: Any

    async def _send_request(self, request: Any, **given: Any) -> Any:
        outcome = self.outcome
        if outcome is None:
            return await super()._send_request(request, **given)
        self.outcome = None
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


_Kind = TypeVar("_Kind", bound=AsyncOpenAI)

for _kind in (_Building, _AfterFirstAttempt):
    _kind.__name__ = AsyncOpenAI.__name__  # the client sends it as its name


def _view(client: AsyncOpenAI, kind: type[_Kind]) -> _Kind:
    view = object.__new__(kind)
    view.__dict__ = client.__dict__
    return view


async def post(
    client: AsyncOpenAI, *, path: str, content: bytes, options: Any, stream: bool
) -> Any:
    """Send a body as the client's ``post`` does, by a prepared request where that sends the same.

    Returns:
        A `ChatCompletion`, or an `AsyncStream` of chunks.
    """
    known = _is_known(client)
    given: Any = {
        "path": path,
        "content": content,
        "options": options,
        "stream": stream,
    }
    given |= {
        "cast_to": ReadCompletion,
        "stream_cls": Chunks if known else _ClientsChunks,
    }
    if not known or options != _ORDINARY or not _is_ordinary(client):
        return await client.post(**given)
    prepared = _PREPARED.get(client)
    if prepared is None or prepared.origin != _origin(client, path):
        building = _view(client, _Building)
        building.prepared = None
        response = await building.post(**given)
        if building.prepared is not None:
            _PREPARED[client] = building.prepared
        return response
    http = client.__dict__["_client"]
    try:
        outcome = await http.send(
            prepared.request(content, http.cookies), stream=stream
        )
    except Exception as error:  # the client decides what it is
        outcome = error
    else:
        if stream and outcome.is_success:
            return Chunks(cast_to=ReadChunk, response=outcome, client=client)
        if not stream and (completion := _completion(outcome)) is not None:
            return completion
    after = _view(client, _AfterFirstAttempt)
    after.outcome = outcome
    return await after.post(**given)


def _completion(response: Any) -> ChatCompletion | None:
    kind = response.headers.get("content-type", "").partition(";")[0]
    if not response.is_success or not kind.endswith("json"):
        return None
    try:
        completion: Any = ChatCompletion.model_validate_json(
            response.content, strict=True
        )
    except ValidationError:
        return None
    completion._request_id = response.headers.get("x-request-id")
    return completion


def _is_known(client: Any) -> bool:
    try:
        members = _members(AsyncOpenAI)
    except AttributeError:
        return False
    return (
        _are_own(members, cast("Any", AsyncStream).__stream__)
        and _NAMES.isdisjoint(client.__dict__)
        and not client._strict_response_validation
    )


@lru_cache(maxsize=8)
def _are_own(*_seen: Any) -> bool:
    """Whether all members have their digests; ``_seen`` are those that may be patched meanwhile."""
    return all(is_own(_member(name), digest, "openai") for name, digest in USED.items())


def _member(name: str) -> Any:
    try:
        member = attrgetter(name)(openai)
    except AttributeError:
        return None
    return getattr(member, "fget", member)


def _is_ordinary(client: Any) -> bool:
    fields = client.__dict__
    http: Any = client._client
    kind = cast("Any", type(http))
    return (
        type(client) is AsyncOpenAI
        and not any(fields.get(name) for name in _OTHER_ORIGINS)
        and kind.__module__.partition(".")[0] in ("httpx", "httpx2", "openai")
        and _builds_itself(kind.build_request)
        and "build_request" not in http.__dict__
        and not _client_log.isEnabledFor(logging.DEBUG)
    )


@lru_cache(maxsize=8)
def _builds_itself(build_request: Any) -> bool:
    own = isinstance(build_request, FunctionType)
    return own and build_request.__globals__["__name__"].partition(".")[0] in (
        "httpx",
        "httpx2",
    )


def _origin(client: Any, path: str) -> tuple[Any, ...]:
    """List what address and headers of a request come from, in the form in which they are sent.

    Numbers and what can change in place are text: 60 is not sent as 60.0 is. The HTTP
    client is not held, since its hooks may hold the client.
    """
    http = client._client
    return (
        path,
        client.api_key,
        client.organization,
        client.project,
        client._base_url,
        repr(client.timeout),
        client.max_retries,
        dict(client._custom_headers),
        repr(client._custom_query),
        ref(http),
        http.headers.raw,
        http.params.multi_items(),
    )


def _prepared(client: Any, path: str, request: Any) -> _Prepared | None:
    """Prepare requests by one that a client built; None if each has headers of its own."""
    http = client._client
    given = {name.lower() for name in (*client._custom_headers, *http.headers)}
    if not given.isdisjoint(_OF_ONE_REQUEST):
        return None
    headers = request.headers.copy()
    headers.pop("cookie", None)
    return _Prepared(
        origin=_origin(client, path),
        kind=type(request),
        body=type(request.stream),
        method=request.method,
        url=request.url,
        headers=headers,
        timeout=request.extensions["timeout"].copy(),
    )
