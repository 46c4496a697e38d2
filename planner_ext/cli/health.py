"""Answers the probes of a supervisor: whether a worker's event loop works."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from planner_ext.core.errors import shown
from planner_ext.errors import PlannerInvalidConfigurationError

_PATIENCE_SECONDS = 5.0
"""How long the loop may be busy; a function that blocks it for longer is what a probe looks for."""


@contextmanager
def answering_probes(address: str, loop: asyncio.AbstractEventLoop) -> Generator[str]:
    """Answer HTTP GET on any path: 200 if the loop runs a callback within 5 seconds, else 503.

    The answers come from a thread of their own. ``address`` is a port, or HOST:PORT;
    the block gets the address in use.

    Raises:
        PlannerInvalidConfigurationError: If it cannot be listened on.
    """
    host, _, port = address.rpartition(":")

    class Probe(BaseHTTPRequestHandler):
        # Else whoever connects and sends nothing keeps a thread.
        timeout = _PATIENCE_SECONDS

        def do_GET(self) -> None:
            turned = threading.Event()
            loop.call_soon_threadsafe(turned.set)
            works = turned.wait(_PATIENCE_SECONDS)
            body = b"works\n" if works else b"the event loop is blocked\n"
            self.send_response(200 if works else 503)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: a probe comes every few seconds."""

    try:
        server = ThreadingHTTPServer((host.strip("[]"), int(port)), Probe)
    except (ValueError, OverflowError, OSError) as error:
        raise PlannerInvalidConfigurationError(
            f"--health must be a free port, or HOST:PORT; got {shown(address)}: {error}. Give another one."
        ) from error
    server.daemon_threads = True
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"{host or '*'}:{server.server_port}"
        finally:
            server.shutdown()
