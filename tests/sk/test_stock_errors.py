"""The same mistake, before Semantic Kernel's own loop and before ours: who catches the one error catches the other."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import KernelException

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionCallingStepwisePlanner,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.errors import PlannerExtError
from planner_ext.testing import ScriptedFault, say
from support.served import Served
from support.values import each_of

Serve = Callable[..., Served]
AUTO: Any = FunctionChoiceBehavior.Auto()


async def requested(
    service: ChatCompletionClientBase, streamed: bool, **fields: Any
) -> None:
    """Send a request with these settings, and the kernel among them."""
    history, kernel = ChatHistory(), fields.pop("kernel", None)
    history.add_user_message("Hello.")
    settings = OpenAIChatPromptExecutionSettings(**fields)
    if streamed:
        async for _ in service.get_streaming_chat_message_contents(
            history, settings, kernel=kernel
        ):
            pass
    else:
        await service.get_chat_message_contents(history, settings, kernel=kernel)


REQUESTS: dict[str, Callable[[Kernel], dict[str, Any]]] = {
    "no kernel": lambda _: {"function_choice_behavior": AUTO},
    "several answers": lambda kernel: {
        "function_choice_behavior": AUTO,
        "number_of_responses": 2,
        "kernel": kernel,
    },
    "the endpoint fails": lambda kernel: {
        "function_choice_behavior": AUTO,
        "kernel": kernel,
    },
    "the endpoint fails without a loop": lambda _: {},
}


@each_of("mistake", REQUESTS)
async def test_a_request_fails_with_semantic_kernels_class(
    serve: Serve, kernel: Kernel, mistake: str, streamed: bool
) -> None:
    """Our named error is also what the connector in it raises."""
    connector = serve(lambda _: ScriptedFault(status=500)).connector
    with pytest.raises(KernelException) as stock:
        await requested(connector, streamed, **REQUESTS[mistake](kernel))
    with pytest.raises(PlannerExtError) as ours:
        await requested(
            FunctionInvokingChatCompletion(connector),
            streamed,
            **REQUESTS[mistake](kernel),
        )
    assert isinstance(ours.value, stock.type)


async def of_stock_agent(kernel: Kernel) -> None:
    await ChatCompletionAgent(kernel=kernel).get_response("Hello.")


async def of_planner(kernel: Kernel) -> None:
    await FunctionCallingStepwisePlanner().invoke(kernel, "Hello.")


async def of_handler(kernel: Kernel) -> None:
    ToolCallHandler(kernel)


async def of_session(kernel: Kernel) -> None:
    ToolUseSession(kernel)


@pytest.mark.parametrize("door", [of_planner, of_handler, of_session])
async def test_a_kernel_without_a_service_is_refused_with_its_class(
    door: Callable[[Kernel], Awaitable[None]],
) -> None:
    """As an agent with that kernel, and as the kernel's own look-up does."""
    with pytest.raises(KernelException) as agent:
        await of_stock_agent(Kernel())
    with pytest.raises(KernelException) as looked_up:
        Kernel().get_service("chat")
    with pytest.raises(PlannerExtError) as ours:
        await door(Kernel())
    assert isinstance(ours.value, looked_up.type)
    assert isinstance(ours.value, agent.type)


@pytest.mark.parametrize("door", [of_planner, of_handler, of_session])
async def test_no_kernel_is_refused_with_its_class(
    serve: Serve, door: Callable[[Any], Awaitable[None]]
) -> None:
    """At every door the missing kernel is what it is to the stock loop."""
    with pytest.raises(KernelException) as stock:
        await requested(
            serve([say("Hi.")]).connector, streamed=False, function_choice_behavior=AUTO
        )
    with pytest.raises(PlannerExtError) as ours:
        await door(None)
    assert isinstance(ours.value, stock.type)


def test_an_unknown_behavior_is_refused_with_its_class() -> None:
    """The name of a behaviour that there is not."""
    with pytest.raises(KernelException) as stock:
        FunctionChoiceBehavior.from_string("sometimes")
    with pytest.raises(PlannerExtError) as ours:
        BoundedFunctionChoiceBehavior.from_string("sometimes")
    assert isinstance(ours.value, stock.type)
