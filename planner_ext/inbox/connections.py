"""Limits of connections, and of the time until a request's headers are there.

uvicorn lacks them: a client that sends nothing would hold connections for ever. Behind
a proxy all connections are the proxy's, and its own limits count.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from ipaddress import IPv6Address, ip_address
from typing import Any, Final, Protocol, TypeAlias

HEADER_SECONDS: Final = 10.0
"""From a connection, or the first bytes of a further request, until the headers are there."""

MOST_CONNECTIONS: Final = 100
"""Of one client at a time; a browser holds up to six, and one for each open page."""

_NETWORK_BITS: Final = 64
"""Of an IPv6 address: the network of one household or machine."""


def client_of(host: str | None) -> str:
    """Name a client by its address, of IPv6 by its network; "" without one."""
    try:
        address = ip_address((host or "").partition("%")[0])
    except ValueError:
        return host or ""
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return f"{IPv6Address(int(address) >> _NETWORK_BITS << _NETWORK_BITS)}/{_NETWORK_BITS}"
    return str(address)


class Timer(Protocol):
    """What is called later unless it is cancelled."""

    def cancel(self) -> None:
        """Do not call it."""
        ...


CallLater: TypeAlias = Callable[[float, Callable[[], None]], Timer]


def _call_later(seconds: float, callback: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, callback)


def limited(
    protocol: Callable[..., Any],
    *,
    header_seconds: float = HEADER_SECONDS,
    most_connections: int = MOST_CONNECTIONS,
    call_later: CallLater = _call_later,
) -> Callable[..., asyncio.Protocol]:
    """Limit the connections that a protocol of uvicorn serves.

    Args:
        protocol: uvicorn's class: ``config.http_protocol_class``.
        header_seconds: The time until the headers of a request are there.
        most_connections: The limit for one client at a time.
        call_later: Calls a function after some seconds.
    """
    clients: Counter[str] = Counter()

    def make(**options: Any) -> asyncio.Protocol:
        return _Limited(
            protocol(**options), clients, header_seconds, most_connections, call_later
        )

    return make


class _Limited(asyncio.Protocol):
    """Passes everything on, and closes the connection at a limit."""

    def __init__(
        self,
        inner: Any,
        clients: Counter[str],
        header_seconds: float,
        most_connections: int,
        call_later: CallLater,
    ) -> None:
        self._inner = inner
        self._call_later = call_later
        self._clients = clients
        self._header_seconds = header_seconds
        self._most_connections = most_connections
        self._client = ""
        self._transport: Any = None
        self._refused = False
        self._late: Timer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        # A Unix socket has no peer's name.
        peer: Any = transport.get_extra_info("peername") or ("",)
        self._client = client_of(str(peer[0]))
        self._clients[self._client] += 1
        if self._clients[self._client] > self._most_connections:
            self._refused = True
            self._close(
                "503 Service Unavailable",
                "This address has too many connections to the inbox. Close some.",
            )
            return
        self._inner.connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            self._inner.data_received(data)
            self._wait()

    def eof_received(self) -> bool | None:
        return None if self._refused else self._inner.eof_received()

    def pause_writing(self) -> None:
        if not self._refused:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if not self._refused:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients[self._client] -= 1
        if self._clients[self._client] <= 0:
            del self._clients[self._client]
        if self._late is not None:
            self._late.cancel()
        if not self._refused:
            self._inner.connection_lost(exc)

    def _wait(self) -> None:
        """Begin to wait for a request's headers, unless one is being answered."""
        if self._is_answering():
            if self._late is not None:
                self._late.cancel()
                self._late = None
        elif self._late is None:
            self._late = self._call_later(self._header_seconds, self._end)

    def _is_answering(self) -> bool:
        cycle = self._inner.cycle
        return cycle is not None and not cycle.response_complete

    def _end(self) -> None:
        self._late = None
        if not self._is_answering() and not self._transport.is_closing():
            self._close(
                "408 Request Timeout",
                f"No request arrived within {self._header_seconds:g} seconds.",
            )

    def _close(self, status: str, said: str) -> None:
        head = (
            f"HTTP/1.1 {status}\r\ncontent-type: text/plain\r\n"
            f"content-length: {len(said)}\r\nconnection: close\r\n\r\n"
        )
        self._transport.write((head + said).encode())
        self._transport.close()
