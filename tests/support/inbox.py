"""An inbox behind real HTTP on this machine, the runs that wait in it, and a visitor who reads its forms."""

import asyncio
import re
import socket
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from semantic_kernel import Kernel
from starlette.types import ASGIApp

from planner_ext.durable import RunsClient
from planner_ext.inbox import Token, app
from planner_ext.testing import Script, ScriptedChatCompletion
from support.durable import open_runs, planner_of

TOKEN = "t" * 32


@asynccontextmanager
async def served(application: ASGIApp, **options: Any) -> AsyncGenerator[str]:
    """Serve an application on a free port; yield its address."""
    # Without a log_config the process-wide loggers stay as they are, for the tests that read what was logged.
    given: dict[str, Any] = {
        "log_config": None,
        "log_level": "warning",
        "ws": "none",
        "timeout_graceful_shutdown": 1,
    }
    config = uvicorn.Config(application, **{**given, **options})
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            live = getattr(getattr(application, "state", None), "live", None)
            if live is not None:
                live.close()
            await serving


class Visitor:
    """A person with a browser that runs no script: reads pages, fills in their forms."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self.client = client
        self.page = ""

    async def get(self, path: str) -> httpx.Response:
        response = await self.client.get(path, follow_redirects=True)
        self.page = response.text
        return response

    def hidden(self, name: str) -> str:
        """Return the value of a hidden field of the page."""
        (value, *_) = re.findall(
            rf'<input type="hidden" name="{name}" value="([^"]*)"', self.page
        ) or [""]
        return unescape(value)

    async def sign_in(self, name: str = "ann", token: str = TOKEN) -> httpx.Response:
        response = await self.client.post(
            "sign-in",
            data={"token": token, "name": name, "next": ""},
            follow_redirects=True,
        )
        self.page = response.text
        return response

    async def send(
        self, path: str, fields: Mapping[str, Any], **headers: str
    ) -> httpx.Response:
        """Send a form of the page, with its hidden fields."""
        known = {
            name: self.hidden(name)
            for name in ("form_token", "fingerprint")
            if self.hidden(name)
        }
        response = await self.client.post(
            path, data={**known, **fields}, headers=headers, follow_redirects=True
        )
        self.page = response.text
        return response

    async def decide(self, path: str, decision: str, **fields: Any) -> httpx.Response:
        """Open a page, and send a decision from it."""
        await self.get(path)
        return await self.send(path, {"decision": decision, **fields})


@asynccontextmanager
async def visitor_at(base: str, name: str | None = "ann") -> AsyncGenerator[Visitor]:
    """Visit an inbox, signed in under a name unless it is None."""
    async with httpx.AsyncClient(base_url=f"{base}/", timeout=120) as client:
        visitor = Visitor(client)
        if name is not None:
            assert (await visitor.sign_in(name)).status_code == 200
        yield visitor


@asynccontextmanager
async def inbox(store: str | Path | RunsClient, **options: Any) -> AsyncGenerator[str]:
    """Serve the inbox of a store with the tests' token."""
    given: dict[str, Any] = {"sign_in": Token(TOKEN), **options}
    async with served(app(store, **given)) as base:
        yield base


async def drive(
    store: str | Path,
    script: Script,
    plugin: object,
    *,
    run_id: str = "a",
    **options: Any,
) -> Any:
    """Drive a run to its pause or end, with a plugin ``shop``."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(plugin, "shop")
    goal = options.pop("goal", "Settle the order.")
    async with open_runs(store, poll_seconds=0.01) as runs:
        return await (
            await runs.start(planner_of(**options), kernel, goal, run_id=run_id)
        ).result()
