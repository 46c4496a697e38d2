"""Requests inside a function that are left before their reply is whole: each is a round trip, and its tokens count."""

import asyncio
from typing import Any

from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import Budget, ToolCallHandler
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.inside import INNER, Hidden, ScriptedText, with_auto
from support.planner import both_ways, invoke, kernel_of, planner_with
from support.values import each_of

LONG = INNER + " please" * 80


class Hasty:
    """Functions that ask, and do not wait for the whole reply."""

    async def _peeked(self, kernel: Hidden, arguments: KernelArguments) -> str:
        async for _ in kernel.invoke_prompt_stream(LONG, arguments=arguments):
            break
        return "peeked"

    @kernel_function
    async def plain(self, kernel: Hidden) -> str:
        return await self._peeked(kernel, KernelArguments())

    @kernel_function
    async def auto(self, kernel: Hidden) -> str:
        return await self._peeked(kernel, with_auto())

    @kernel_function
    async def text(self, kernel: Hidden) -> str:
        return await self._peeked(
            kernel, KernelArguments(settings=PromptExecutionSettings(service_id="text"))
        )

    @kernel_function
    async def cancelled(self, kernel: Hidden) -> str:
        return await self._cancelled(kernel, KernelArguments())

    @kernel_function
    async def cancelled_auto(self, kernel: Hidden) -> str:
        return await self._cancelled(kernel, with_auto())

    async def _cancelled(self, kernel: Hidden, arguments: KernelArguments) -> str:
        self.asked.clear()
        task = asyncio.ensure_future(kernel.invoke_prompt(LONG, arguments=arguments))
        await self.asked.wait()
        task.cancel()
        await asyncio.wait({task})
        return "cancelled"

    def __init__(self) -> None:
        self.asked = asyncio.Event()


LIMITS: dict[str, dict[str, Any]] = {
    "max_total_tokens": {"budget": Budget(max_iterations=30, max_total_tokens=400)},
    "max_cost": {
        "budget": Budget(max_iterations=30, max_cost=0.04),
        "price": lambda model, usage: usage.total_tokens * 1e-4,
    },
}


@both_ways
@each_of("limit", LIMITS)
@each_of("way", ["plain", "auto", "text", "cancelled", "cancelled_auto"])
async def test_a_request_that_is_left_early_is_charged(
    way: str, limit: str, streamed: bool
) -> None:
    """It is one round trip, and what was sent counts: the limit on tokens or cost ends the run."""
    hasty = Hasty()

    def reply(request: ScriptedRequest) -> ScriptedReply:
        if not request.tools or INNER in str(request.messages):
            return say("some words")
        return ScriptedReply(
            calls=call(f"hasty-{way}").calls, prompt_tokens=1, completion_tokens=1
        )

    async def hold(request: ScriptedRequest) -> None:
        if INNER in str(request.messages) and way.startswith("cancelled"):
            hasty.asked.set()
            await asyncio.Future()

    chat = ScriptedChatCompletion(reply, service_id="chat", before_reply=hold)
    text = ScriptedText(ai_model_id="text", service_id="text")
    kernel = kernel_of(chat, hasty=hasty)
    kernel.add_service(text)
    result = await invoke(
        planner_with("chat", plan=False, **LIMITS[limit]), kernel, streamed=streamed
    )
    assert result.limit == limit
    assert result.iterations == len(chat.requests) + len(text.asked) <= 11


async def test_a_planner_without_a_limit_of_trips_that_fails_is_charged_with_what_it_sent() -> (
    None
):
    """Where the run around does not limit its round trips, those of a nested run that fails count as they were."""
    expert = ScriptedChatCompletion(
        [call("math-add"), RuntimeError("no line")], service_id="expert"
    )
    chat = ScriptedChatCompletion(
        [call("expert-reach_goal", {"goal": "go"}), say("done")], service_id="chat"
    )
    kernel = kernel_of(chat, expert)
    kernel.add_plugin(PlannerPlugin(planner_with("expert", plan=False)), "expert")
    history = ChatHistory()
    history.add_user_message("go")
    messages = [
        message
        async for message in ToolCallHandler(kernel, service_id="chat").invoke(history)
    ]
    assert (
        messages[-1].metadata["iterations"]
        == len(chat.requests) + len(expert.requests)
        == 4
    )
