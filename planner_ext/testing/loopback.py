"""An HTTP/1.1 server on 127.0.0.1 in background threads: it reads requests, asks one function, writes what that says.

Silent, and gone when stopped: no socket, no thread and no warning is left. It knows nothing of what is asked or
answered.
"""

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

__all__ = ["HttpRequest", "HttpResponse", "LoopbackServer"]

_POLL_SECONDS = 0.02  # how long a stop may wait for the accepting thread to look up


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRequest:
    """A request that was read to its end; ``path`` is without the query."""

    method: str
    path: str
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpResponse:
    """What to write.

    Attributes:
        status: The status code.
        content_type: The content type.
        parts: The body; of a streamed response, each part is written by itself.
        headers: Further headers.
        streamed: Chunked transfer encoding instead of a content length.
        dropped: Announce one byte more than there is, then close the connection. Not together with ``streamed``.
    """

    status: int
    content_type: str
    parts: tuple[bytes, ...]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    streamed: bool = False
    dropped: bool = False


class LoopbackServer:
    """A running server; the constructor starts it, ``stop`` ends it.

    Args:
        respond: Called with each request, in the thread of its connection, so possibly several at once.
    """

    def __init__(self, respond: Callable[[HttpRequest], HttpResponse]) -> None:
        self._server = _Server(respond)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(_POLL_SECONDS,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that the system chose."""
        return self._server.socket.getsockname()[1]

    def stop(self) -> None:
        """Close the server and its open connections, and wait for their threads. Once only."""
        self._server.shutdown()
        self._thread.join()
        self._server.close_connections()
        self._server.server_close()


class _Server(ThreadingTCPServer):
    # Not http.server's own class: that one looks up the name of its address, which may wait for a name server.
    daemon_threads = True  # a server that nobody stopped does not keep the interpreter alive
    request_queue_size = 128

    def __init__(self, respond: Callable[[HttpRequest], HttpResponse]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = respond
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._lock = threading.Lock()

    def process_request(self, request: "socket.socket | tuple[bytes, socket.socket]", client_address: Any) -> None:
        assert isinstance(request, socket.socket)
        thread = threading.Thread(target=self.process_request_thread, args=(request, client_address), daemon=True)
        with self._lock:
            self._connections[thread] = request
        thread.start()

    def process_request_thread(
        self, request: "socket.socket | tuple[bytes, socket.socket]", client_address: Any
    ) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                del self._connections[threading.current_thread()]

    def close_connections(self) -> None:
        with self._lock:
            open_now = tuple(self._connections.items())
        for thread, connection in open_now:
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    def handle_error(self, request: "socket.socket | tuple[bytes, socket.socket]", client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # a client may leave whenever it likes
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self) -> None:
        announced = self.headers.get("Content-Length") or "0"
        length = int(announced) if announced.isdecimal() else 0
        body = self.rfile.read(length)
        if len(body) < length:  # the client left in the middle of its request
            self.close_connection = True
            return
        assert isinstance(self.server, _Server)
        path = self.path.partition("?")[0]
        self._write(self.server.respond(HttpRequest(method=self.command, path=path, body=body)))

    def _write(self, response: HttpResponse) -> None:
        self.send_response(response.status)
        self.send_header("Content-Type", response.content_type)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.streamed:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for part in response.parts:
                self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            self.wfile.write(b"0\r\n\r\n")
            return
        payload = b"".join(response.parts)
        self.send_header("Content-Length", str(len(payload) + response.dropped))
        self.end_headers()
        self.wfile.write(payload)
        self.close_connection = self.close_connection or response.dropped
