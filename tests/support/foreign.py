"""Functions whose parameters come from a schema: of a real MCP server, and of a real HTTP API with its document."""

import json
import threading
import warnings
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from mcp import types
from mcp.server.lowlevel import Server
from mcp.shared.memory import create_connected_server_and_client_session
from semantic_kernel import Kernel
from semantic_kernel.connectors.mcp import MCPStdioPlugin
from semantic_kernel.connectors.openapi_plugin import OpenAPIFunctionExecutionParameters

RESERVED = ("arguments", "service", "kernel", "execution_settings")
"""The names under which Semantic Kernel passes objects of the application."""

TEXT = {"type": "string"}


@asynccontextmanager
async def mcp_tool(
    properties: Mapping[str, Any], required: tuple[str, ...] = (), name: str = "lookup"
) -> AsyncGenerator[tuple[MCPStdioPlugin, list[dict[str, Any]]]]:
    """Run an MCP server with one tool, connected in memory; give its plugin, and what the tool was called with."""
    server: Any = Server("weather")
    called: list[dict[str, Any]] = []
    schema = {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
    }

    @server.list_tools()
    async def list_tools() -> list[types.Tool]:  # pyright: ignore[reportUnusedFunction]  # called by the server
        return [
            types.Tool(name=name, description="Looks a place up.", inputSchema=schema)
        ]

    @server.call_tool()
    async def call_tool(_: str, arguments: dict[str, Any]) -> list[types.TextContent]:  # pyright: ignore[reportUnusedFunction]  # likewise
        called.append(arguments)
        return [types.TextContent(type="text", text="sunny")]

    async with create_connected_server_and_client_session(server) as session:
        plugin = MCPStdioPlugin(
            "weather", "unused", session=session, load_prompts=False
        )
        await plugin.load_tools()
        yield plugin, called


@dataclass
class Api:
    """An HTTP API on loopback that answers everything, and remembers what it was asked.

    Attributes:
        url: Where it listens.
        queries: Of each request, the parameters in its address.
        bodies: Of each request, the JSON of its body, or None.
    """

    url: str
    queries: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    paths: list[str] = field(default_factory=list[str])
    bodies: list[Any] = field(default_factory=list[Any])

    def add_to(
        self,
        kernel: Kernel,
        operation: Mapping[str, Any],
        path: str = "/find",
        method: str = "get",
        **options: Any,
    ) -> None:
        """Add an operation to a kernel as the function ``api-find``."""
        document: dict[str, Any] = {
            "openapi": "3.0.0",
            "info": {"title": "Places", "version": "1"},
            "servers": [{"url": self.url}],
            "paths": {
                path: {
                    method: {
                        "operationId": "find",
                        "responses": {"200": {"description": "ok"}},
                        **operation,
                    }
                }
            },
        }
        settings = OpenAPIFunctionExecutionParameters(
            server_url_validation_allowed_base_urls=[self.url], **options
        )
        with (
            warnings.catch_warnings()
        ):  # Semantic Kernel uses a class that its library has deprecated
            warnings.simplefilter("ignore", DeprecationWarning)
            kernel.add_plugin_from_openapi(
                "api", openapi_parsed_spec=document, execution_settings=settings
            )


def in_query(*names: str, required: bool = False) -> dict[str, Any]:
    """Declare parameters of an operation that stand in its address."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": required, "schema": TEXT}
            for name in names
        ]
    }


@contextmanager
def api() -> Generator[Api]:
    """Run the API."""
    made: Api

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            made.paths.append(parts.path)
            made.queries.append(dict(parse_qsl(parts.query)))
            size = int(self.headers.get("content-length") or 0)
            made.bodies.append(json.loads(self.rfile.read(size)) if size else None)
            self.send_response(200)
            self.send_header("content-length", "5")
            self.end_headers()
            self.wfile.write(b"found")

        def do_PUT(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Api(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}
    )
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
