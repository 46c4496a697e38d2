"""The scripted server starts, stops and loses clients without a trace."""

import json
import socket
import threading
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from planner_ext.testing import (
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    say,
)
from planner_ext.testing.server import HttpRequest, HttpResponse, LoopbackServer

COMPLETIONS = "/v1/chat/completions"
BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "What is 1 + 2?"}]}
)
STREAMED_BODY = json.dumps(json.loads(BODY) | {"stream": True})


def connect(server: ScriptedOpenAIServer) -> HTTPConnection:
    return HTTPConnection(urlsplit(server.url).netloc)


def ask(connection: HTTPConnection) -> str:
    """The text of one answer; the connection stays open."""
    connection.request("POST", COMPLETIONS, BODY)
    return json.loads(connection.getresponse().read())["choices"][0]["message"][
        "content"
    ]


def test_starting_and_stopping_again_changes_nothing() -> None:
    """Both may be called any number of times; the URL is there only while the server runs."""
    server = ScriptedOpenAIServer([])
    with pytest.raises(RuntimeError, match="use it in a with statement, or call start"):
        _ = server.url
    server.start()
    url = server.url
    server.start()

    assert server.url == url
    server.stop()
    server.stop()
    with pytest.raises(RuntimeError):
        _ = server.url


def test_the_script_continues_after_a_restart() -> None:
    """A server that was away answers with the next reply, and counts on."""
    server = ScriptedOpenAIServer([say("before"), say("after")])
    texts: list[str] = []
    for _ in range(2):
        with server:
            connection = connect(server)
            texts.append(ask(connection))
            connection.close()

    assert texts == ["before", "after"]
    assert [request.index for request in server.requests] == [0, 1]


def test_stopping_closes_connections_that_are_kept_open() -> None:
    """A client that keeps its connection does not keep the server: no thread is left and the port is closed."""
    before = set(threading.enumerate())
    server = ScriptedOpenAIServer([say("3")])
    server.start()
    connection, late = connect(server), connect(server)
    ask(connection)
    server.stop()

    assert set(threading.enumerate()) <= before
    with pytest.raises(ConnectionError):
        ask(connection)
    with pytest.raises(ConnectionError):
        late.connect()
    connection.close()


def test_an_error_in_the_body_of_the_with_statement_still_stops_the_server() -> None:
    """A failing test leaves no server behind."""
    server = ScriptedOpenAIServer([])
    with pytest.raises(KeyError), server:
        raise KeyError

    with pytest.raises(RuntimeError):
        _ = server.url


def test_one_connection_carries_many_requests() -> None:
    """The connection stays open after answers, refusals and unknown paths alike."""
    with ScriptedOpenAIServer([say("a"), say("b")]) as server:
        connection = connect(server)
        connection.connect()
        first = connection.sock
        statuses: list[int] = []
        for path, body in [
            (COMPLETIONS, BODY),
            ("/nowhere", BODY),
            (COMPLETIONS, "{}"),
            (COMPLETIONS, STREAMED_BODY),
        ]:
            connection.request("POST", path, body)
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)

        assert connection.sock is first
        connection.close()

    assert statuses == [200, 404, 400, 200]


@pytest.mark.parametrize("body", [BODY, STREAMED_BODY], ids=["plain", "streamed"])
def test_a_client_may_leave_in_the_middle(
    body: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A client that is gone when its answer comes disturbs neither the next one nor the terminal."""
    asked, left = threading.Event(), threading.Event()

    def slow(request: ScriptedRequest) -> ScriptedReply:
        if request.index == 0:
            asked.set()
            left.wait()
        return say("x" * 1_000_000)

    with ScriptedOpenAIServer(slow, chunk_size=1000) as server:
        leaving = connect(server)
        leaving.request("POST", COMPLETIONS, body)
        asked.wait()
        leaving.close()
        left.set()
        staying = connect(server)

        assert len(ask(staying)) == 1_000_000
        staying.close()

    assert capfd.readouterr() == ("", "")
    assert server.refused == []


def test_half_a_request_is_not_counted() -> None:
    """A client that leaves before its body is sent has asked nothing."""
    with ScriptedOpenAIServer([say("never")]) as server:
        address = urlsplit(server.url)
        with socket.create_connection(
            (str(address.hostname), address.port or 0)
        ) as connection:
            connection.sendall(
                b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 100\r\n\r\n{"
            )
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""

    assert (server.requests, server.refused) == ([], [])


def test_a_defect_of_the_server_is_not_silent(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Only a client that leaves is ignored: any other failure in a connection's thread is printed."""

    def broken(request: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError(request.path)

    server = LoopbackServer(broken)
    connection = HTTPConnection("127.0.0.1", server.port)
    connection.request("GET", "/v1/models")
    with pytest.raises(ConnectionError):
        connection.getresponse()
    connection.close()
    server.stop()

    assert "ZeroDivisionError: /v1/models" in capfd.readouterr().err
