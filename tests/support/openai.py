"""Both ways to one connector: the same request through our encoding and through Semantic Kernel's own methods."""

import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncAzureOpenAI, AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import (
    AzureChatCompletion,
    OpenAIChatCompletion,
)
from semantic_kernel.contents import ChatMessageContent, StreamingChatMessageContent

from planner_ext.core.values import Usage
from planner_ext.sk.chat.openai import OpenAITransport
from planner_ext.sk.chat.transport import ChatRequest, GenericTransport
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, say
from planner_ext.testing.script import completion_body, completion_chunks
from planner_ext.testing.server import HttpRequest, HttpResponse, LoopbackServer

KEY = "any"


@dataclass
class Endpoint:
    """Answers every request, wherever it goes, with one reply; remembers path and body of each."""

    reply: ScriptedReply = field(default_factory=lambda: say("Hi."))
    seen: list[tuple[str, dict[str, Any]]] = field(
        default_factory=list[tuple[str, dict[str, Any]]]
    )
    answer: Callable[[HttpRequest], HttpResponse] | None = None

    def respond(self, request: HttpRequest) -> HttpResponse:
        body = json.loads(request.body)
        self.seen.append((request.path, body))
        if self.answer is not None:
            return self.answer(request)
        tokens = Usage(prompt_tokens=3, completion_tokens=2)
        if body["stream"]:
            chunks = completion_chunks(
                self.reply, index=0, model="m", usage=tokens, chunk_size=4
            )
            events = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
            return HttpResponse(
                status=200,
                content_type="text/event-stream",
                parts=(*events, b"data: [DONE]\n\n"),
                streamed=True,
            )
        written = json.dumps(
            completion_body(self.reply, index=0, model="m", usage=tokens)
        ).encode()
        return HttpResponse(
            status=200, content_type="application/json", parts=(written,)
        )

    def __enter__(self) -> "Endpoint":
        self._server = LoopbackServer(self.respond)
        self.origin = f"http://127.0.0.1:{self._server.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop()


class Refused(GenericTransport):
    """Stands where nothing may go the connector's own way."""

    def __init__(self) -> None:
        super().__init__(ScriptedChatCompletion([]), kernel=None, arguments=None)

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        raise AssertionError("the request went the connector's own way")

    async def stream(
        self, request: ChatRequest
    ) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        raise AssertionError("the request went the connector's own way")
        yield


def openai_service(origin: str, **options: Any) -> OpenAIChatCompletion:
    client = AsyncOpenAI(
        base_url=f"{origin}/v1",
        api_key=KEY,
        max_retries=0,
        default_headers={"x-app": "mine"},
    )
    return OpenAIChatCompletion("model-a", async_client=client, **options)


def azure_service(
    origin: str, *, deployed: bool, **options: Any
) -> AzureChatCompletion:
    deployment: dict[str, Any] = (
        {"azure_deployment": "my deployment"} if deployed else {}
    )
    client = AsyncAzureOpenAI(
        azure_endpoint=origin,
        api_key=KEY,
        api_version="2024-10-21",
        max_retries=0,
        **deployment,
    )
    return AzureChatCompletion(
        deployment_name="my deployment", async_client=client, **options
    )


async def put(
    transport: OpenAITransport | GenericTransport,
    request: ChatRequest,
    *,
    streamed: bool,
) -> list[ChatMessageContent] | list[StreamingChatMessageContent]:
    """Send a request one way; return what came."""
    if streamed:
        return [chunk async for chunk in transport.stream(request)]
    return await transport.ask(request)


async def both_ways(
    service: Any,
    request: ChatRequest,
    endpoint: Endpoint,
    *,
    streamed: bool,
    kernel: Kernel | None = None,
) -> tuple[Any, Any]:
    """Send a request both ways, see that it is the same; return what came, ours first."""
    endpoint.seen.clear()
    ours = await put(OpenAITransport(service, Refused()), request, streamed=streamed)
    stock = await put(
        GenericTransport(service, kernel=kernel or Kernel(), arguments=None),
        request,
        streamed=streamed,
    )
    (our_path, our_body), (stock_path, stock_body) = endpoint.seen
    assert our_path == stock_path
    assert our_body == stock_body
    return ours, stock
