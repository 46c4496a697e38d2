"""Step 22: what differs between Semantic Kernel's own loop and this one, in eight small situations.

Both get the same model, functions and filters. Why each differs: guides/adopt.md.

Run it:

    python samples/step22_stock_loop.py

Output:

    Semantic Kernel
      results: [{'EUR': 128.0}, 'slow']
      tokens told: 236 of 390
      no result: [None]
      an error: ['An error occurred while invoking the function shop-broken: the password is 1234']
      a filter that skips: [None]
      a filter that calls twice: 2 runs
      streamed, at its limit: ''
      a failed request: ServiceResponseException
    planner_ext
      results: ['slow', '{"EUR":128.0}']
      tokens told: 390 of 390
      no result: ['']
      an error: ['The function shop-broken failed.']
      a filter that skips: ['Not executed: a filter of the application did not run this function.']
      a filter that calls twice: 1 runs
      streamed, at its limit: 'So far.'
      a failed request: ServiceCallError
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, FunctionResultContent
from semantic_kernel.filters import AutoFunctionInvocationContext
from semantic_kernel.functions import kernel_function

from planner_ext import BoundedFunctionChoiceBehavior, FunctionInvokingChatCompletion
from planner_ext.testing import (
    Script,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)

Next = Callable[[AutoFunctionInvocationContext], Awaitable[None]]
Filter = Callable[[AutoFunctionInvocationContext, Next], Awaitable[None]]
Loop = Callable[[ChatCompletionClientBase], ChatCompletionClientBase]


class Shop:
    """Functions that end in different ways."""

    def __init__(self) -> None:
        self.runs = 0

    @kernel_function
    async def slow(self) -> str:
        """End last."""
        await asyncio.sleep(0.05)
        return "slow"

    @kernel_function
    async def price(self) -> dict[str, float]:
        """Return no text."""
        self.runs += 1
        return {"EUR": 128.0}

    @kernel_function
    async def nothing(self) -> None:
        """Return nothing."""

    @kernel_function
    async def broken(self) -> str:
        """Fail with a secret."""
        raise ValueError("the password is 1234")


async def twice(context: AutoFunctionInvocationContext, next: Next) -> None:
    await next(context)
    await next(context)


async def skip(context: AutoFunctionInvocationContext, next: Next) -> None:  # noqa: ARG001  (the filter's parameters)
    return


class Chat:
    """One conversation with a loop."""

    def __init__(self, service: ChatCompletionClientBase, kernel: Kernel, server: ScriptedOpenAIServer) -> None:
        self.service, self.kernel, self.server = service, kernel, server
        self.shop = Shop()
        self.history = ChatHistory()
        self.history.add_user_message("Go.")
        auto = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)  # Semantic Kernel's loop honours it, too
        self.settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=auto)
        kernel.add_plugin(self.shop, "shop")

    async def ask(self) -> ChatMessageContent:
        """Return the last message."""
        message = await self.service.get_chat_message_content(self.history, self.settings, kernel=self.kernel)
        assert message is not None
        return message

    async def stream(self) -> str:
        """Return the text that arrives."""
        chunks = self.service.get_streaming_chat_message_contents(self.history, self.settings, kernel=self.kernel)
        return "".join([str(chunk[0]) async for chunk in chunks])

    @property
    def results(self) -> list[Any]:
        """The results in the history, in order."""
        items = (item for message in self.history for item in message.items)
        return [item.result for item in items if isinstance(item, FunctionResultContent)]


@asynccontextmanager
async def chat(loop: Loop, script: Script, *filters: Filter) -> AsyncGenerator[Chat]:
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(api_key="none", base_url=server.url, max_retries=0) as client:
            added = [(id(one), one) for one in filters]  # as `Kernel.add_filter` keeps them, whose types are partial
            kernel = Kernel(auto_function_invocation_filters=added)
            yield Chat(loop(OpenAIChatCompletion("m", async_client=client)), kernel, server)


def on_and_on(request: ScriptedRequest) -> ScriptedReply:
    return call("shop-price") if request.tools else say("So far.")


async def show(name: str, loop: Loop) -> None:
    print(name)
    async with chat(loop, [calls(call("shop-slow"), call("shop-price")), say("Done.")]) as one:
        message = await one.ask()
        print("  results:", one.results)
        print("  tokens told:", message.metadata["usage"].prompt_tokens, "of", one.server.prompt_tokens)
    for title, function, filters in (
        ("no result", "shop-nothing", ()),
        ("an error", "shop-broken", ()),
        ("a filter that skips", "shop-price", (skip,)),
    ):
        async with chat(loop, [call(function), say("Done.")], *filters) as one:
            await one.ask()
            print(f"  {title}: {one.results}")
    async with chat(loop, [call("shop-price"), say("Done.")], twice) as one:
        await one.ask()
        print("  a filter that calls twice:", one.shop.runs, "runs")
    async with chat(loop, on_and_on) as one:
        print(f"  streamed, at its limit: {await one.stream()!r}")
    async with chat(loop, [ScriptedFault(status=400)]) as one:
        try:
            await one.ask()
        except Exception as error:
            print("  a failed request:", type(error).__name__)


async def main() -> None:
    logging.disable(logging.ERROR)
    await show("Semantic Kernel", lambda service: service)
    await show("planner_ext", FunctionInvokingChatCompletion)


if __name__ == "__main__":
    asyncio.run(main())
