"""What one client may take of the inbox: wrong tokens, connections, and time until a request's headers."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.requests import Request
from starlette.types import Message
from uvicorn.protocols.http.h11_impl import H11Protocol

from planner_ext.inbox import Token, app, security
from planner_ext.inbox.connections import client_of, limited
from planner_ext.inbox.security import RefusedFormError, form_of
from support.inbox import TOKEN, inbox, served, visitor_at
from support.values import each_of

HEADERS = b"GET /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\n"
AT_ONCE, NEVER = 0.05, 3600.0


@asynccontextmanager
async def serving(store: str, **limits: Any) -> AsyncGenerator[str]:
    """Serve the inbox as the command does, with other limits."""
    protocol: Any = limited(H11Protocol, **limits)
    async with served(app(store, sign_in=Token(TOKEN)), http=protocol) as base:
        yield base


@asynccontextmanager
async def connected(
    base: str,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    place = urlsplit(base)
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def head_of(reader: asyncio.StreamReader) -> str:
    """Read the head of a response, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = next(
        line for line in head.lower().splitlines() if line.startswith("content-length:")
    )
    return head + (await reader.readexactly(int(length.split(":")[1]))).decode()


# Wrong tokens.


def from_address(address: str) -> dict[str, str]:
    """Return the header with which a proxy on this machine names its client; uvicorn believes it."""
    return {"x-forwarded-for": address}


@pytest.mark.parametrize(
    ("eve", "others"),
    [
        ("192.0.2.1", ["192.0.2.2", "2001:db8::1"]),
        ("2001:db8:1:1::1", ["2001:db8:1:2::1", "192.0.2.1"]),
    ],
)
async def test_the_wrong_tokens_of_one_lock_out_no_one_else(
    store: str, eve: str, others: list[str]
) -> None:
    """After twenty from one address, sign-ins from every other address are compared as before."""
    async with (
        inbox(store) as base,
        visitor_at(base, None) as stranger,
        visitor_at(base, None) as ann,
    ):
        stranger.client.headers.update(from_address(eve))
        for _ in range(20):
            assert (await stranger.sign_in("eve", "guess")).status_code == 403
        assert (await stranger.sign_in("eve")).status_code == 429
        for other in others:
            ann.client.cookies.clear()
            ann.client.headers.update(from_address(other))
            assert (await ann.sign_in("ann")).status_code == 200


async def test_one_network_of_ipv6_is_one_client(store: str) -> None:
    """A client that has one of its addresses has all of them."""
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for number in range(20):
            stranger.client.headers.update(from_address(f"2001:db8::{number:x}:1"))
            assert (await stranger.sign_in("eve", "guess")).status_code == 403
        assert (await stranger.sign_in("eve", "guess")).status_code == 429


async def test_who_is_signed_in_is_never_locked_out(store: str) -> None:
    """Neither the session nor a further sign-in suffers from wrong tokens of others at the same address."""
    async with (
        inbox(store) as base,
        visitor_at(base) as ann,
        visitor_at(base, None) as eve,
    ):
        for _ in range(21):
            await eve.sign_in("eve", "guess")
        assert (await eve.sign_in("eve")).status_code == 429
        assert (await ann.get("runs")).status_code == 200
        assert (await ann.sign_in("ann")).status_code == 200


async def test_wrong_tokens_of_many_addresses_are_forgotten_in_order(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many clients are remembered; those who were wrong last stay."""
    monkeypatch.setattr(security, "_MOST_CLIENTS", 3)
    async with inbox(store) as base, visitor_at(base, None) as stranger:
        for number in range(21):
            for address in (f"192.0.2.{number}", "198.51.100.1"):
                stranger.client.headers.update(from_address(address))
                status = (await stranger.sign_in("eve", "guess")).status_code
                assert status == (
                    429 if number >= 20 and address == "198.51.100.1" else 403
                )


@each_of(
    ("host", "client"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1:2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        (None, ""),
        ("testclient", "testclient"),
    ],
)
def test_a_client_is_named_by_its_address(host: str | None, client: str) -> None:
    assert client_of(host) == client


# Headers that do not come.


@pytest.mark.parametrize("sent", [b"", b"GET / HT", HEADERS, HEADERS + b"X-Slow: a"])
async def test_a_request_whose_headers_do_not_come_ends(
    store: str, sent: bytes
) -> None:
    """A client that sends none of them, or a part, gets the reason and is disconnected."""
    async with (
        serving(store, header_seconds=AT_ONCE) as base,
        connected(base) as (reader, writer),
    ):
        writer.write(sent)
        answer = await reader.read()
        assert (
            answer.startswith(b"HTTP/1.1 408 ")
            and b"No request arrived within 0.05 seconds." in answer
        )


class Clock:
    """Calls later what is due when the test says that the time is over."""

    def __init__(self) -> None:
        self.made: list[Clock.Timer] = []

    class Timer:
        def __init__(self, callback: Callable[[], None]) -> None:
            self.callback: Callable[[], None] | None = callback

        def cancel(self) -> None:
            self.callback = None

    def call_later(self, _: float, callback: Callable[[], None]) -> "Clock.Timer":
        self.made.append(Clock.Timer(callback))
        return self.made[-1]

    def running(self) -> int:
        return sum(timer.callback is not None for timer in self.made)

    async def runs(self, *, made: int, running: int) -> None:
        """Wait until so many timers were made, and so many of them run."""
        while (len(self.made), self.running()) != (made, running):  # noqa: ASYNC110  (the server changes both)
            await asyncio.sleep(0)

    def ring(self) -> None:
        for timer in self.made:
            callback, timer.callback = timer.callback, None
            if callback is not None:
                callback()


async def test_headers_that_come_by_and_by_do_not_put_the_end_off(store: str) -> None:
    """The time runs from the first byte of a request, not from the last one."""
    clock = Clock()
    async with (
        serving(store, call_later=clock.call_later) as base,
        connected(base) as (reader, writer),
    ):
        for part in (HEADERS, b"X-Slow: a\r\n", b"X-Slow: b\r\n"):
            writer.write(part)
            await writer.drain()
            await clock.runs(made=1, running=1)
        clock.ring()
        with suppress(ConnectionResetError):  # of what the server did not read before
            assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
        assert reader.at_eof() or reader.exception() is not None
        assert len(clock.made) == 1


async def test_the_further_request_of_a_connection_is_timed_as_well(store: str) -> None:
    """A first request buys no time for the second."""
    clock = Clock()
    async with (
        serving(store, call_later=clock.call_later) as base,
        connected(base) as (reader, writer),
    ):
        writer.write(HEADERS + b"\r\n")
        assert (await head_of(reader)).startswith("HTTP/1.1 200 ")
        await clock.runs(made=1, running=0)
        writer.write(HEADERS)
        await clock.runs(made=2, running=1)
        clock.ring()
        assert (await reader.read()).startswith(b"HTTP/1.1 408 ")


async def test_what_takes_long_to_answer_is_not_ended(store: str) -> None:
    """An open stream of events, and a form that comes slowly, have their headers: nothing runs any more."""
    clock = Clock()
    async with (
        serving(store, call_later=clock.call_later) as base,
        visitor_at(base) as ann,
        ann.client.stream("GET", "events") as events,
        connected(base) as (reader, writer),
    ):
        writer.write(
            b"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 11\r\n\r\ntok"
        )
        await clock.runs(made=2, running=0)
        clock.ring()
        assert events.status_code == 200
        writer.write(b"en=wrong")
        assert (await head_of(reader)).startswith("HTTP/1.1 403 ")


async def test_a_form_that_does_not_come_is_refused() -> None:
    """By name, before anything is changed."""

    async def never() -> Message:
        return await asyncio.Future[Message]()

    request = Request({"type": "http", "method": "POST", "headers": []}, never)
    with pytest.raises(RefusedFormError, match="did not arrive within 0 seconds"):
        await form_of(request, None, seconds=0)


# Connections.


async def test_a_client_has_so_many_connections(store: str) -> None:
    """One connection more gets the reason and is closed; as soon as another one ends, there is room again."""
    async with serving(store, header_seconds=NEVER, most_connections=2) as base:
        async with connected(base), connected(base) as (reader, writer):
            writer.write(HEADERS + b"\r\n")
            assert (await head_of(reader)).startswith(
                "HTTP/1.1 200 "
            )  # so both are there
            async with connected(base) as (refused, _):
                answer = await refused.read()
                assert (
                    answer.startswith(b"HTTP/1.1 503 ")
                    and b"too many connections" in answer
                )
            writer.write(HEADERS + b"\r\n")
            assert (await head_of(reader)).startswith("HTTP/1.1 200 ")
        status = ""
        while not status.startswith(
            "HTTP/1.1 200 "
        ):  # the server hears of the end by and by
            with suppress(ConnectionResetError, BrokenPipeError):
                async with connected(base) as (reader, writer):
                    writer.write(HEADERS + b"\r\n")
                    status = await head_of(reader)


class _Transport(asyncio.Transport):
    """A connection from an address."""

    def __init__(self, address: str) -> None:
        super().__init__({"peername": (address, 1234)})
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return False


async def test_the_connections_of_one_address_take_none_of_another(store: str) -> None:
    """Each client has its own."""

    class Inner(asyncio.Protocol):
        cycle = None

    make: Callable[..., asyncio.Protocol] = limited(
        Inner, header_seconds=NEVER, most_connections=1
    )
    written: list[bytes] = []
    for address in (
        "192.0.2.1",
        "192.0.2.2",
        "192.0.2.1",
        "2001:db8::1",
        "2001:db8::2",
    ):
        connection, transport = make(), _Transport(address)
        connection.connection_made(transport)
        written.append(transport.written[:12])
    assert written == [b"", b"", b"HTTP/1.1 503", b"", b"HTTP/1.1 503"]
