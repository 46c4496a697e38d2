"""``planner-ext serve``: a process that prints where to sign in, and serves until it is stopped."""

import asyncio
import re
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from planner_ext.cli.app import app as commands
from planner_ext.cli.options import ServeArgs
from planner_ext.cli.serve import _listening
from support.command_line import COMMAND
from support.inbox import Visitor
from support.processes import Forked, Lives


@contextmanager
def serving(lives: Lives, store: str, *options: str) -> Generator[tuple[str, Forked]]:
    """Start the command; yield the address that it prints, and its process."""
    words = (*COMMAND, "serve", "--store", store, "--port", "0", *options)
    with lives.program(*words, cwd=Path(store).parent) as process:
        yield process.stdout.readline().strip(), process


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT])
async def test_serve_prints_an_address_that_signs_in(
    lives: Lives, store: str, ending: signal.Signals
) -> None:
    """The address works as printed, an open stream does not hold up the end, and nothing is written of the token."""
    with serving(lives, store, "--user", "ann") as (address, process):
        match = re.fullmatch(
            r"(http://127\.0\.0\.1:\d+)/sign-in\?token=([\w-]{43})", address
        )
        assert match is not None, address
        async with httpx.AsyncClient(base_url=f"{match[1]}/", timeout=120) as client:
            visitor = Visitor(client)
            await visitor.get(address)
            response = await visitor.send(
                "sign-in", {"token": visitor.hidden("token"), "next": ""}
            )
            assert (
                response.status_code == 200
                and "shop-pay" in response.text
                and "<bdi>ann</bdi>" in response.text
            )
            async with client.stream("GET", "events") as stream:
                assert stream.status_code == 200
                process.send_signal(ending)
                assert await asyncio.to_thread(process.wait) == 0
        complaints = process.stderr.read()
        assert match[2] not in complaints and "Traceback" not in complaints


def refused(*options: str) -> str:
    outcome = CliRunner().invoke(commands, ["serve", *options])
    assert outcome.exit_code == 2
    return " ".join(outcome.output.split())


def test_other_machines_need_an_explicit_choice(store: str) -> None:
    """An address that other machines reach is refused, unless the name under which they do is given."""
    for host in ("0.0.0.0", "::", "192.0.2.1", "inbox.example.com"):
        problem = refused("--store", store, "--host", host)
        assert (
            f"--host {host} lets other machines reach the inbox" in problem
            and "--allow-host" in problem
        )


def test_a_page_is_sent_at_once(store: str) -> None:
    """The body does not wait until the browser has acknowledged the headers, which takes it 40 ms."""
    args = ServeArgs(store=store, port=0)
    with _listening(args) as listener, socket.create_connection(listener.getsockname()):
        taken, _ = listener.accept()
        with taken:
            assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_what_cannot_be_served_is_said(store: str) -> None:
    """A missing store, and an address that is not this machine's, are named."""
    assert "There is no store" in refused("--store", store + ".nothing")
    problem = refused(
        "--store", store, "--host", "192.0.2.1", "--allow-host", "inbox.example.com"
    )
    assert "192.0.2.1, port 8321, cannot be used" in problem


async def test_an_allowed_name_is_served(lives: Lives, store: str) -> None:
    """Browsers reach the inbox under a name that was allowed, and under no other."""
    with serving(lives, store, "--allow-host", "Inbox.example.com") as (address, _):
        match = re.fullmatch(
            r"http://Inbox\.example\.com:(\d+)/sign-in\?token=[\w-]{43}", address
        )
        assert match is not None, address
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{match[1]}") as client:
            for host, status in (
                ("inbox.example.com", 200),
                ("INBOX.example.com:80", 200),
                ("evil.example", 403),
            ):
                assert (
                    await client.get("/sign-in", headers={"host": host})
                ).status_code == status


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "jinja2"])
def test_without_its_extra_the_command_says_how_to_install_it(
    store: str, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing package is a message with the command that installs it."""
    for name in [*sys.modules]:
        if (
            name.startswith(("planner_ext.inbox", "planner_ext.cli.serve"))
            or name.partition(".")[0] == missing
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert (
        f'The inbox needs {missing}. Install it with: pip install "planner-ext[inbox]"'
        in refused("--store", store)
    )


async def test_one_address_has_so_many_connections_to_the_command(
    lives: Lives, store: str
) -> None:
    """A client that only opens connections gets the reason at the 101st; a request on an earlier one is answered."""
    with serving(lives, store) as (address, _):
        match = re.match(r"http://127\.0\.0\.1:(\d+)/", address)
        assert match is not None, address
        opened = [
            await asyncio.open_connection("127.0.0.1", int(match[1]))
            for _ in range(101)
        ]
        try:
            assert (await opened[100][0].read()).startswith(b"HTTP/1.1 503 ")
            opened[99][1].write(b"GET /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert (await opened[99][0].readline()).startswith(b"HTTP/1.1 ")
        finally:
            for _, writer in opened:
                writer.close()
