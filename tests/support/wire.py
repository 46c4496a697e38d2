"""A server on this machine that answers with given bytes, and keeps what it receives."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self


class Received(NamedTuple):
    """A request: its first line, its headers in their order and spelling, and its body."""

    line: str
    headers: tuple[tuple[str, str], ...]
    body: Any


@dataclass(frozen=True)
class Answer:
    """Bytes to write, part by part, and whether the connection is then kept, closed, or left without a word."""

    parts: tuple[bytes, ...]
    then: str = "keep"


def answer(
    body: bytes,
    *,
    status: int = 200,
    kind: str = "application/json",
    then: str = "keep",
    **sent: str,
) -> Answer:
    """Answer with a body whose length is announced; ``sent`` are headers."""
    return Answer(
        (
            head(
                status,
                **{"Content-Type": kind, "Content-Length": str(len(body))},
                **sent,
            )
            + body,
        ),
        then,
    )


def streamed(*pieces: bytes, then: str = "end", **sent: str) -> Answer:
    """Answer with pieces that are read one by one; to ``keep`` is to leave out the end."""
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece]
    ending = [b"0\r\n\r\n"] if then == "end" else []
    start = head(
        200,
        **{"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"},
        **sent,
    )
    return Answer((start, *chunks, *ending), "keep" if then == "end" else then)


def head(status: int, **headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} Any",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


@dataclass
class Wire:
    """Answers requests in turn, the last answer for ever; use it as ``async with``."""

    answers: list[Answer] = field(default_factory=list[Answer])
    seen: list[Received] = field(default_factory=list[Received])
    received: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self.connections = 0
        self._open: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._open:
            writer.transport.abort()
        await asyncio.gather(
            *(task for task in self._open.values() if task is not None)
        )

    def will(self, answers: Iterable[Answer]) -> None:
        """Answer so from now on, to requests that count anew."""
        self.answers = [*answers]
        self.seen = []

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._open[writer] = asyncio.current_task()
        self.connections += 1
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            del self._open[writer]
            writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Read a request and answer it; whether another may follow."""
        line, *headers = (
            (await reader.readuntil(b"\r\n\r\n"))
            .decode("latin-1")
            .strip()
            .split("\r\n")
        )
        pairs = tuple(
            (name, value)
            for name, _, value in (each.partition(": ") for each in headers)
        )
        body = await reader.readexactly(
            int({name.lower(): value for name, value in pairs}.get("content-length", 0))
        )
        self.seen.append(Received(line, pairs, json.loads(body) if body else None))
        self.received.set()
        now = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for part in now.parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        if now.then == "hang":
            await reader.readexactly(1)
        return now.then == "keep"
