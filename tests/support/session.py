"""What the session's tests share: a plugin that remembers, one way to ask on two wires, and an open loop's caller."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import kernel_function

from planner_ext.session import AutomaticToolUseConfig, OpenCall, ToolUseSession
from planner_ext.testing import Script, ScriptedChatCompletion, ScriptedOpenAIServer
from support.narrow import as_type

OPEN = AutomaticToolUseConfig(enabled=False)
CLOSED = AutomaticToolUseConfig(enabled=True, max_tool_calls=8)


@dataclass
class Tools:
    """A plugin ``t`` that remembers every call."""

    seen: list[Any] = field(default_factory=list[Any])
    started: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @kernel_function(description="Adds two numbers.")
    async def add(self, a: int, b: int) -> int:
        self.seen.append((a, b))
        return a + b

    @kernel_function(description="Fails.")
    async def fail(self) -> str:
        self.seen.append("fail")
        raise RuntimeError("the warehouse is closed")

    @kernel_function(description="Waits until it may go on.")
    async def wait(self) -> str:
        self.started.set()
        await self.go_on.wait()
        self.seen.append("wait")
        return "waited"

    @kernel_function(description="Lets those that wait go on.")
    async def release(self) -> str:
        self.seen.append("release")
        self.go_on.set()
        return "released"


def kernel_of(
    script: Script | ScriptedChatCompletion, tools: Tools | None = None
) -> Kernel:
    """A kernel with the plugin and a scripted service."""
    service = (
        script
        if isinstance(script, ScriptedChatCompletion)
        else ScriptedChatCompletion(script)
    )
    kernel = Kernel(services=service)
    kernel.add_plugin(tools or Tools(), "t")
    return kernel


@dataclass
class Talk:
    """A session with a scripted model, asked plain or streamed."""

    session: ToolUseSession
    service: ScriptedChatCompletion
    tools: Tools
    streamed: bool

    async def ask(self, prompt: Any = None, **options: Any) -> str:
        return await ask(self.session, prompt, streamed=self.streamed, **options)

    async def ask_to_the_end(self, prompt: Any, **options: Any) -> str:
        """Ask, answering each call that comes back as the loop would, until no call comes back."""
        text = await self.ask(prompt, **options)
        kernel = kernel_of([], self.tools)
        while self.session.pending:
            self.session.append(
                [call.result(await run(kernel, call)) for call in self.session.pending]
            )
            text = await self.ask()
        return text

    @property
    def requests(self) -> int:
        return len(self.service.requests)

    @property
    def shape(self) -> list[tuple[str, str]]:
        return shape(self.session.history())


async def ask(
    session: ToolUseSession, prompt: Any = None, *, streamed: bool, **options: Any
) -> str:
    """Ask plain, or put a stream together: then of several texts, the one after the last tool run is not told apart."""
    if not streamed:
        return await session.prompt(prompt, **options)
    async with aclosing(session.prompt_streaming(prompt, **options)) as stream:
        pieces = [piece async for piece in stream]
    assert all(pieces)
    return "".join(pieces)


async def run(kernel: Kernel, call: OpenCall) -> Any:
    """Run a returned call by hand."""
    function = kernel.get_function_from_fully_qualified_function_name(
        call.fully_qualified_name
    )
    result = await kernel.invoke(function, **call.arguments)
    assert result is not None
    return result.value


def shape(history: ChatHistory) -> list[tuple[str, str]]:
    """Each message by role, with its text, its calls and its results, as one line."""
    return [(message.role.value, " ".join(_words(message))) for message in history]


def _words(message: ChatMessageContent) -> list[str]:
    words: list[str] = []
    for item in sorted(
        message.items, key=lambda item: isinstance(item, FunctionCallContent)
    ):
        match item:
            case FunctionCallContent():
                words.append(f"{item.id}:{item.name}{item.arguments}")
            case FunctionResultContent():
                words.append(f"{item.id}={item.result}")
            case _:
                words.append(as_type(TextContent, item).text)
    return words


def message(
    role: AuthorRole, *items: Any, text: str | None = None
) -> ChatMessageContent:
    """A message of items, or of a text."""
    if text is not None:
        return ChatMessageContent(role=role, content=text)
    return ChatMessageContent(role=role, items=list(items))


def call_message(*ids: str) -> ChatMessageContent:
    """An assistant message that calls t-add once for each id."""
    calls = [
        FunctionCallContent(id=each, name="t-add", arguments='{"a":1,"b":2}')
        for each in ids
    ]
    return message(AuthorRole.ASSISTANT, *calls)


def result_message(call_id: str, result: str = "3") -> ChatMessageContent:
    """The tool message that answers a call of t-add."""
    return message(
        AuthorRole.TOOL, FunctionResultContent(id=call_id, name="t-add", result=result)
    )


@asynccontextmanager
async def served(
    script: Script, tools: Tools
) -> AsyncGenerator[tuple[Kernel, ScriptedOpenAIServer]]:
    """A kernel whose service is Semantic Kernel's OpenAI connector, over real HTTP to a scripted server."""
    with ScriptedOpenAIServer(script) as server:
        client = AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0)
        kernel = Kernel(
            services=OpenAIChatCompletion(
                "scripted", service_id="served", async_client=client
            )
        )
        kernel.add_plugin(tools, "t")
        try:
            yield kernel, server
        finally:
            await client.close()


Talks = Callable[..., Talk]
Ask = Callable[..., Awaitable[str]]
