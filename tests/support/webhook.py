"""A webhook on loopback that remembers what it was sent, and refuses as often as a test wants."""

import json
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = ["ReceivedNotice", "WebhookServer"]


class ReceivedNotice:
    """One request: its headers, its text, and the status that it was answered with."""

    def __init__(self, headers: dict[str, str], text: str, status: int) -> None:
        self.headers, self.text, self.status = headers, text, status

    @property
    def body(self) -> Any:
        """The text as JSON values."""
        return json.loads(self.text)


class WebhookServer:
    """A real HTTP server; answers with the given statuses, and 204 from then on.

    Attributes:
        received: The requests, in order.
    """

    def __init__(self, statuses: Sequence[int] = (), *, location: str = "") -> None:
        self.received: list[ReceivedNotice] = []
        self._statuses = [*statuses]
        self._arrived = threading.Condition()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                text = self.rfile.read(length).decode()
                if len(text.encode()) < length:
                    return  # its sender has gone
                with outer._arrived:
                    status = outer._statuses.pop(0) if outer._statuses else 204
                    headers = {
                        name.lower(): value for name, value in self.headers.items()
                    }
                    outer.received.append(ReceivedNotice(headers, text, status))
                    outer._arrived.notify_all()
                self.send_response(status)
                if location:
                    self.send_header("location", location)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.01},
            daemon=True,
        )
        self.url = f"http://127.0.0.1:{self._server.server_port}/hooks/s3cret-path"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(self, number: int, *, seconds: float = 120.0) -> list[ReceivedNotice]:
        """Wait until this many requests have arrived, and return them."""
        with self._arrived:
            arrived = self._arrived.wait_for(
                lambda: len(self.received) >= number, seconds
            )
        assert arrived, f"expected {number} requests; there were {len(self.received)}"
        return self.received
