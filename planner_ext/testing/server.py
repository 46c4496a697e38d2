"""An OpenAI-compatible server on this machine whose model is a script.

To a client it behaves like ``api.openai.com``: the same JSON, stream and refusals. It
knows neither Semantic Kernel nor a planner.
"""

import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple, Self

from planner_ext.core.values import Usage, frozen
from planner_ext.testing.rules import find_violation, is_object, object_of, tool_names
from planner_ext.testing.script import (
    Script,
    ScriptedFault,
    ScriptedReply,
    ScriptedRequest,
    ScriptExhaustedError,
    ScriptReader,
    completion_body,
    completion_chunks,
    count_tokens,
    error_body,
)

_JSON = "application/json"
_POLL_SECONDS = 0.02
"""How long a stop may wait until the accepting thread checks for it."""


class HttpRequest(NamedTuple):
    """A request that was read to its end; ``path`` is without the query."""

    method: str
    path: str
    body: bytes


@frozen
class HttpResponse:
    """A response to write.

    Attributes:
        parts: The body; streamed, each part is a chunk.
        dropped: Announce one byte more, then close the connection. Not with
            ``streamed``.
    """

    status: int
    content_type: str
    parts: tuple[bytes, ...]
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    streamed: bool = False
    dropped: bool = False


class LoopbackServer(ThreadingTCPServer):
    """An HTTP/1.1 server on 127.0.0.1, started by the constructor, in background threads.

    After ``stop`` no socket, thread or warning is left. ``respond`` is called in a
    connection's thread.
    """

    # http.server's own class looks up the name of its address, and may wait for that.
    request_queue_size = 128
    # A server that is never stopped does not keep the interpreter alive.
    daemon_threads = True

    def __init__(self, respond: Callable[[HttpRequest], HttpResponse]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.respond = respond
        self._connections: list[tuple[threading.Thread, socket.socket]] = []
        self._accepting = threading.Thread(
            target=self.serve_forever, args=(_POLL_SECONDS,), daemon=True
        )
        self._accepting.start()

    @property
    def port(self) -> int:
        """The port that the operating system chose."""
        return self.socket.getsockname()[1]

    def stop(self) -> None:
        """Close the connections, and wait for their threads. Call this once only."""
        self.shutdown()
        self._accepting.join()
        for thread, connection in self._connections:
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one connection in a separate thread."""
        thread = threading.Thread(
            target=self.process_request_thread,
            args=(request, client_address),
            daemon=True,
        )
        self._connections = [pair for pair in self._connections if pair[0].is_alive()]
        thread.start()
        self._connections.append((thread, request))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print an error of a connection's thread, unless the client has disconnected."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client left in the middle of its request
            self.close_connection = True
            return
        assert isinstance(self.server, LoopbackServer)
        path = self.path.partition("?")[0]
        request = HttpRequest(method=self.command, path=path, body=body)
        self._write(self.server.respond(request))

    do_GET = do_POST  # noqa: N815  (the name that http.server looks up)

    def _write(self, response: HttpResponse) -> None:
        parts = response.parts
        framing = (
            "Content-Length",
            str(sum(map(len, response.parts)) + response.dropped),
        )
        if response.streamed:
            parts = tuple(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))
            framing = ("Transfer-Encoding", "chunked")
        self.send_response(response.status)
        for name, value in (
            ("Content-Type", response.content_type),
            *response.headers.items(),
            framing,
        ):
            self.send_header(name, value)
        self.end_headers()
        for part in parts:
            self.wfile.write(part)
        self.close_connection = self.close_connection or response.dropped


class ScriptedOpenAIServer:
    """Serves a script at ``http://127.0.0.1:{port}/v1`` from a background thread.

        with ScriptedOpenAIServer([call("math-add", {"a": 1, "b": 2}), say("3")]) as server:
            client = AsyncOpenAI(base_url=server.url, api_key="any")

    ``POST /v1/chat/completions`` (plain and streamed) takes the script's next item, one
    request at a time. A request may name any model. It gets status 400, which clients
    do not retry, if it breaks a rule of OpenAI's, if no item is left, or if its item
    fails; ``refused`` lists it.

    All properties but ``url`` may be read at any time, and from any thread.

    Args:
        script: A list of replies and faults, or a function of the request (called in a
            server thread).
        chunk_size: Characters per streamed piece of text or arguments, at least 1.
        models: What ``GET /v1/models`` lists.

    Raises:
        TypeError: If ``script`` is not a script.
        ValueError: If ``chunk_size`` is less than 1.
    """

    def __init__(
        self,
        script: Script,
        *,
        chunk_size: int = 8,
        models: Iterable[str] = ("scripted",),
    ) -> None:
        self._reader = ScriptReader(script, chunk_size)
        self._models = tuple(models)
        self._lifecycle = threading.Lock()
        self._running: LoopbackServer | None = None
        # One request at a time. Readers need no lock: values are replaced or appended to atomically.
        self._turn = threading.Lock()
        self._requests: list[ScriptedRequest] = []
        self._refused: list[str] = []
        self._usage = Usage()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start serving. After a stop the script continues, at another port."""
        with self._lifecycle:
            if self._running is None:
                self._running = LoopbackServer(self._respond)

    def stop(self) -> None:
        """Close every connection and wait for the threads."""
        with self._lifecycle:
            if self._running is not None:
                self._running.stop()
                self._running = None

    @property
    def url(self) -> str:
        """The base URL for an OpenAI client.

        Raises:
            RuntimeError: If the server is not running.
        """
        running = self._running
        if running is None:
            raise RuntimeError(
                "The server is not running: use it in a with statement, or call start()."
            )
        return f"http://127.0.0.1:{running.port}/v1"

    @property
    def requests(self) -> list[ScriptedRequest]:
        """A new list of the requests that reached the model, without the refused ones."""
        return list(self._requests)

    @property
    def refused(self) -> list[str]:
        """A new list of the reasons of the refused requests."""
        return list(self._refused)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all replies, as billed, whether or not the client read them."""
        return self._usage.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """Completion tokens of all replies."""
        return self._usage.completion_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and completion tokens of all replies."""
        return self._usage.total_tokens

    def _respond(self, request: HttpRequest) -> HttpResponse:
        match request.method, request.path:
            case "POST", "/v1/chat/completions":
                with self._turn:
                    return self._complete(request.body)
            case "GET", "/v1/models":
                common = {"object": "model", "created": 0, "owned_by": "scripted"}
                return json_response(
                    {
                        "object": "list",
                        "data": [{"id": name, **common} for name in self._models],
                    }
                )
            case _:
                text = f"Invalid URL ({request.method} {request.path})"
                return json_response(
                    error_body(text, type="invalid_request_error"), status=404
                )

    def _complete(self, raw: bytes) -> HttpResponse:
        try:
            body: object = json.loads(raw)
        except ValueError:
            body = None
        if not is_object(body):
            return self._refuse(
                "We could not parse the JSON body of your request: expected an object."
            )
        violation = find_violation(body)
        if violation is not None:
            return self._refuse(violation.message, param=violation.param)
        request = ScriptedRequest(
            index=len(self._requests),
            messages=body["messages"],
            tools=tool_names(body),
            tool_choice=body.get("tool_choice"),
            stream=body.get("stream") is True,
            body=body,
        )
        self._requests.append(request)
        try:
            answer = self._reader.answer(request)
        except ScriptExhaustedError as error:
            return self._refuse(str(error), code="script_exhausted")
        except Exception as error:  # the script is the user's code
            return self._refuse(
                f"The script failed at request {request.index}: {error!r}",
                code="script_failed",
            )
        match answer:
            case ScriptedReply():
                usage = count_tokens(
                    answer, messages=request.messages, tools=body.get("tools")
                )
                self._usage += usage
                return _reply_response(answer, request, usage, self._reader.chunk_size)
            case ScriptedFault():
                return _fault_response(answer, request)
            case _:
                problem = f"Request {request.index} met {answer!r}, which only ScriptedChatCompletion can raise"
                return self._refuse(
                    f"{problem}; put a ScriptedFault into the script.",
                    code="script_failed",
                )

    def _refuse(
        self, message: str, *, param: str | None = None, code: str | None = None
    ) -> HttpResponse:
        self._refused.append(message)
        return json_response(
            error_body(message, type="invalid_request_error", param=param, code=code),
            status=400,
        )


def _reply_response(
    reply: ScriptedReply, request: ScriptedRequest, usage: Usage, chunk_size: int
) -> HttpResponse:
    model = str(request.body["model"])
    if not request.stream:
        return json_response(
            completion_body(reply, index=request.index, model=model, usage=usage)
        )
    options = object_of(request.body.get("stream_options"))
    reported = usage if options.get("include_usage") is True else None
    chunks = completion_chunks(
        reply, index=request.index, model=model, usage=reported, chunk_size=chunk_size
    )
    parts = tuple(
        f"data: {data}\n\n".encode() for data in (*map(json.dumps, chunks), "[DONE]")
    )
    return HttpResponse(
        status=200, content_type="text/event-stream", parts=parts, streamed=True
    )


def _fault_response(fault: ScriptedFault, request: ScriptedRequest) -> HttpResponse:
    status = fault.status or (200 if fault.drop else 500)
    content_type = _JSON
    body = fault.body
    if body is None and fault.drop:
        begun = _reply_response(
            ScriptedReply(text="Once"),
            request,
            Usage(prompt_tokens=1, completion_tokens=1),
            4,
        )
        # A stream breaks off in the event after the text, so that some text arrives.
        *whole, last = begun.parts[:3]
        content_type = begun.content_type
        half = last[: len(last) // 2]
        body = b"".join([*whole, half]).decode()
    elif body is None:
        kind = (
            "server_error"
            if status >= 500
            else "rate_limit_error"
            if status == 429
            else "invalid_request_error"
        )
        body = error_body(f"Scripted fault with status {status}.", type=kind)
    text = body if isinstance(body, str) else json.dumps(body)
    return HttpResponse(
        status=status,
        content_type=fault.content_type or content_type,
        parts=(text.encode(),),
        headers=fault.headers,
        dropped=fault.drop,
    )


def json_response(body: Mapping[str, object], *, status: int = 200) -> HttpResponse:
    """Respond with JSON."""
    return HttpResponse(
        status=status, content_type=_JSON, parts=(json.dumps(body).encode(),)
    )
