"""What the service's tests share: a plugin that remembers, a model behind real HTTP, and one way to ask, two wires."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    StreamingChatMessageContent,
)
from semantic_kernel.functions import kernel_function

from planner_ext.testing import Script, ScriptedOpenAIServer, say
from support.stock import stock


@dataclass
class Tools:
    """A plugin ``t`` that remembers every call: quick, slow and failing ones."""

    seen: list[Any] = field(default_factory=list[Any])
    started: asyncio.Event = field(default_factory=asyncio.Event)
    cancelled: bool = False
    loaded: Kernel | None = None

    @kernel_function(description="Adds two numbers.")
    async def add(self, a: int, b: int) -> int:
        self.seen.append((a, b))
        return a + b

    @kernel_function
    async def echo(self, text: str = "") -> str:
        self.seen.append(text)
        return text

    @kernel_function
    async def fail(self) -> str:
        self.seen.append("fail")
        raise RuntimeError("password=hunter2")

    @kernel_function
    async def hang(self) -> str:
        """Wait for ever; say when it began, and whether it was cancelled."""
        self.started.set()
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def kernel(self) -> Kernel:
        kernel = Kernel()
        kernel.add_plugin(self, "t")
        return kernel


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture
def kernel(tools: Tools) -> Kernel:
    return tools.kernel()


def question() -> ChatHistory:
    """Make a history with a question."""
    history = ChatHistory()
    history.add_user_message("What is 1 + 2?")
    return history


@pytest.fixture
def history() -> ChatHistory:
    return question()


@dataclass
class Served:
    """A server whose model is a script, and Semantic Kernel's OpenAI connector to it."""

    server: ScriptedOpenAIServer
    connector: OpenAIChatCompletion


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Served]]:
    async with AsyncExitStack() as stack:

        def serve(script: Script, *, max_retries: int = 0, **options: Any) -> Served:
            server = stack.enter_context(ScriptedOpenAIServer(script, **options))
            client = AsyncOpenAI(
                base_url=server.url, api_key="any", max_retries=max_retries
            )
            stack.push_async_callback(client.close)
            return Served(
                server,
                OpenAIChatCompletion(
                    "scripted", service_id="served", async_client=client
                ),
            )

        yield serve


@pytest.fixture
def resend(serve: Callable[..., Served]) -> Callable[[ChatHistory], Awaitable[None]]:
    """Send a history over HTTP to a server as strict as OpenAI: it is refused unless each call has its one result."""

    async def resend(history: ChatHistory) -> None:
        served = serve([say("Understood.")])
        settings = PromptExecutionSettings(service_id="served")
        (message,) = await served.connector.get_chat_message_contents(history, settings)
        assert (message.content, served.server.refused) == ("Understood.", [])

    return resend


@dataclass
class Answer:
    """The outcome of one question; ``message`` is what a caller would add to the history.

    Of a stream, that is the sum of the chunks after the last tool message, or that message if a filter ended the run.
    """

    message: ChatMessageContent
    metadata: dict[str, Any]
    chunks: list[StreamingChatMessageContent]

    @property
    def text(self) -> str:
        return "".join(getattr(item, "text", "") for item in self.message.items)

    @property
    def calls(self) -> list[tuple[str, Any]]:
        return [
            (i.name or "", i.arguments)
            for i in self.message.items
            if isinstance(i, FunctionCallContent)
        ]


async def asked(
    service: ChatCompletionClientBase,
    history: ChatHistory,
    kernel: Kernel | None,
    settings: PromptExecutionSettings,
    *,
    streamed: bool,
    **keywords: Any,
) -> Answer:
    if kernel is not None:
        keywords["kernel"] = kernel
    if not streamed:
        message = await service.get_chat_message_content(history, settings, **keywords)
        assert message is not None
        return Answer(message, message.metadata, [])
    chunks: list[StreamingChatMessageContent] = []
    async for group in service.get_streaming_chat_message_contents(
        history, settings, **keywords
    ):
        chunks += group
    after = max(
        (at + 1 for at, chunk in enumerate(chunks) if chunk.role == AuthorRole.TOOL),
        default=0,
    )
    message = reduce(add, chunks[after:] or chunks[-1:])
    return Answer(message, chunks[-1].metadata, chunks)


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def ask(
    streamed: bool, kernel: Kernel, history: ChatHistory
) -> Callable[..., Awaitable[Answer]]:
    """Ask a service, plain and then streamed, with the shared kernel and history unless others are given."""

    async def ask(
        service: ChatCompletionClientBase,
        behavior: FunctionChoiceBehavior | None = None,
        *,
        to: ChatHistory | None = None,
        kernel: Kernel | None = kernel,
        settings: PromptExecutionSettings | None = None,
        **keywords: Any,
    ) -> Answer:
        if settings is None:
            chosen: Any = stock.Auto() if behavior is None else behavior
            settings = PromptExecutionSettings(function_choice_behavior=chosen)
        return await asked(
            service,
            history if to is None else to,
            kernel,
            settings,
            streamed=streamed,
            **keywords,
        )

    return ask
