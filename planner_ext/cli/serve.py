"""Serves the inbox of a store on this machine until a signal ends it."""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast
from urllib.parse import quote, urlsplit

from planner_ext.cli.options import ServeArgs
from planner_ext.cli.store import acting, say, store_name
from planner_ext.cli.streams import on_signals
from planner_ext.core.errors import PlannerExtError

try:
    import uvicorn

    from planner_ext.inbox import Token, app
    from planner_ext.inbox.connections import limited
    from planner_ext.inbox.security import LOOPBACK
except ModuleNotFoundError as missing:
    name = (missing.name or "").partition(".")[0]
    if name == "planner_ext":
        raise
    problem = (
        f'The inbox needs {name}. Install it with: pip install "planner-ext[inbox]"'
    )
    raise PlannerExtError(problem) from None


class _Server(uvicorn.Server):
    """A server that leaves signals to the command."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Do nothing: the command handles signals."""
        yield


async def serve_inbox(args: ServeArgs) -> None:
    """Serve until SIGTERM or Ctrl-C, and print the address with its token."""
    public = urlsplit(args.public_url or "")
    allowed = [*filter(None, [public.hostname]), *(args.allow_host or ())]
    if args.host not in LOOPBACK and not allowed:
        raise PlannerExtError(
            f"--host {args.host} lets other machines reach the inbox, where anyone with the token may decide. If that "
            "is intended, put a TLS proxy in front of it, and name it for browsers: --public-url "
            "https://inbox.example.com, or --allow-host inbox.example.com."
        )
    token = Token(args.token, user=args.user, hosts=(*LOOPBACK, *allowed))
    async with acting(args) as client:
        if args.public_url is not None:
            await client.set_inbox(args.public_url)
        application = app(client, sign_in=token)
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            server_header=False,
            ws="none",
            root_path=public.path.rstrip("/"),
        )
        config.load()
        config.http_protocol_class = cast(
            "type[asyncio.Protocol]", limited(config.http_protocol_class)
        )
        server = _Server(config)

        def end() -> None:
            server.should_exit = True
            application.state.live.close()  # an open stream would keep its connection, and so the server

        on_signals(end)
        with _listening(args) as listener:
            name = (args.allow_host or [args.host])[0]
            place = f"[{name}]" if ":" in name else name
            address = f"http://{place}:{listener.getsockname()[1]}"
            say(
                f"The inbox of {store_name(args.store)}. Anyone with this address may decide:"
            )
            root = (args.public_url or address).rstrip("/")
            print(f"{root}/sign-in?token={quote(token.value)}", flush=True)
            await server.serve(sockets=[listener])


@contextmanager
def _listening(args: ServeArgs) -> Generator[socket.socket]:
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise PlannerExtError(
            f"{args.host}, port {args.port}, cannot be used: {error}. Give another --port."
        ) from error
    with listener:
        # asyncio sets this for sockets that it made: else a page waits 40 ms for the
        # browser to acknowledge its headers.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        yield listener
