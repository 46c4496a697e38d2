"""Stock Semantic Kernel, without any loop of ours: three ways to ask it, plain and streamed, and an approval filter."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments

from planner_ext import ApprovalFilter, ApprovalPolicy
from support.approval import BOTH_CALLS, World, asked, world
from support.stock import add_filter, stock
from support.values import each_of

POLICY = ApprovalPolicy.from_dict(
    {"default": "allow", "rules": [{"function": "refund", "action": "ask"}]}
)
"""Asks about every refund; an ``allow`` default leaves marked functions marked."""

Kinds = tuple[Literal["auto_function_invocation", "function_invocation"], ...]
AUTO: Kinds = ("auto_function_invocation",)
FUNCTION: Kinds = ("function_invocation",)
BOTH: Kinds = (*AUTO, *FUNCTION)


def settings() -> PromptExecutionSettings:
    """Make settings with Semantic Kernel's own automatic invocation."""
    return PromptExecutionSettings(function_choice_behavior=stock.Auto())


def guarded(
    script: Any = BOTH_CALLS, *, by: ApprovalFilter, under: Kinds = AUTO, **plugins: Any
) -> World:
    """Make a world whose kernel has a filter, under one or both types."""
    here = world(script, **plugins)
    for kind in under:
        add_filter(here.kernel, kind, by)
    return here


@dataclass(frozen=True)
class Entry:
    """A way to have stock Semantic Kernel answer and run functions."""

    kind: Literal["prompt", "agent", "chat"]
    streamed: bool

    def __str__(self) -> str:
        return f"{self.kind}-{'streamed' if self.streamed else 'plain'}"

    async def ask(self, to: World, arguments: KernelArguments | None = None) -> None:
        """Ask; its outcome is in the requests that were made, and in what ran."""
        if self.kind == "prompt":
            await self._prompt(to, arguments)
        elif self.kind == "agent":
            await self._agent(to, arguments)
        else:
            await chat(to, asked(), streamed=self.streamed, arguments=arguments)

    async def _prompt(self, to: World, arguments: KernelArguments | None) -> None:
        given = KernelArguments(settings=settings())
        values: dict[str, Any] = {**arguments} if arguments else {}
        for name, value in values.items():
            given[name] = value
        if self.streamed:
            async for _ in to.kernel.invoke_prompt_stream(
                "Refund order 7.", arguments=given
            ):
                pass
        else:
            await to.kernel.invoke_prompt("Refund order 7.", arguments=given)

    async def _agent(self, to: World, arguments: KernelArguments | None) -> None:
        agent = agent_of(to)
        if self.streamed:
            async for _ in agent.invoke_stream("Refund order 7.", arguments=arguments):
                pass
        else:
            await agent.get_response("Refund order 7.", arguments=arguments)


ENTRIES = [
    Entry(kind, streamed)
    for kind in ("prompt", "agent", "chat")
    for streamed in (False, True)
]
every_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)
two_entries = pytest.mark.parametrize("entry", [ENTRIES[0], ENTRIES[5]], ids=str)
"""One plain and one streamed: for long tables, whose rows are not about the entry."""
each_entry_under = pytest.mark.parametrize(
    ("entry", "under"),
    [*zip(ENTRIES, [AUTO, FUNCTION, BOTH] * 2, strict=True)],
    ids=lambda value: str(value),
)
"""Each entry, plain and streamed, with a filter under one type or both: there is one stock loop behind them."""
under_each = each_of("under", [AUTO, FUNCTION, BOTH])


def agent_of(to: World) -> ChatCompletionAgent:
    """Make a stock agent over a world's kernel."""
    return ChatCompletionAgent(
        kernel=to.kernel,
        service=to.service,
        name="Shop",
        function_choice_behavior=stock.Auto(),
    )


async def chat(
    to: World,
    history: ChatHistory,
    *,
    streamed: bool = False,
    arguments: KernelArguments | None = None,
) -> list[Any]:
    """Have the stock service answer a history, which it brings up to date itself; list what it gave."""
    given: dict[str, Any] = {"kernel": to.kernel, "arguments": arguments}
    if not streamed:
        return [await to.service.get_chat_message_content(history, settings(), **given)]
    return [
        one
        async for one in to.service.get_streaming_chat_message_content(
            history, settings(), **given
        )
    ]


def read(to: World) -> list[str]:
    """List what the model read of its calls with the second request."""
    assert to.requests == 2, to.service.requests
    return [
        str(message["content"])
        for message in to.service.requests[1].messages
        if message["role"] == "tool"
    ]
