"""A tool choice in the settings: it is never ignored, at no door."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.testing import call, say
from support.served import Answer, Served, Tools, question
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]
AUTO = FunctionChoiceBehavior.Auto
CHOICES = each_of("choice", ["none", "required"])


def settings_with(
    choice: Any, *, generic: bool, behavior: FunctionChoiceBehavior | None
) -> PromptExecutionSettings:
    """Settings with a tool choice: in a field, or among the extension data."""
    kind = PromptExecutionSettings if generic else OpenAIChatPromptExecutionSettings
    return kind(tool_choice=choice, function_choice_behavior=behavior)


async def planner(kernel: Kernel, settings: PromptExecutionSettings) -> None:
    options = FunctionCallingStepwisePlannerOptions(
        execution_settings=settings, plan=False
    )
    await FunctionCallingStepwisePlanner(options=options).invoke(kernel, "Go.")


async def handler(kernel: Kernel, settings: PromptExecutionSettings) -> None:
    history = ChatHistory()
    history.add_user_message("Go.")
    async for _ in ToolCallHandler(kernel, settings=settings).invoke(history):
        pass


async def session(kernel: Kernel, settings: PromptExecutionSettings) -> None:
    await ToolUseSession(kernel, settings=settings).prompt("Go.")


async def open_session(kernel: Kernel, settings: PromptExecutionSettings) -> None:
    await ToolUseSession(
        kernel, settings=settings, tool_use_config=AutomaticToolUseConfig(enabled=False)
    ).prompt("Go.")


@CHOICES
@each_of("generic", [False, True], ids=["openai", "generic"])
@pytest.mark.parametrize("door", [planner, handler, session, open_session])
async def test_a_tool_choice_that_contradicts_is_refused_at_every_door(
    serve: Serve, door: Any, choice: Any, generic: bool
) -> None:
    """It is named with the way out, and nothing is sent."""
    kernel = Tools().kernel()
    served = serve([call("t-add", {"a": 1, "b": 2}), say("Done.")])
    kernel.add_service(served.connector)
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"tool_choice=.*NoneInvoke"
    ):
        await door(kernel, settings_with(choice, generic=generic, behavior=None))
    assert served.server.requests == []


@CHOICES
@each_of("behavior", [AUTO(), AUTO(auto_invoke=False)], ids=["invokes", "passes"])
async def test_the_service_refuses_a_tool_choice_that_contradicts(
    ask: Ask, serve: Serve, choice: Any, behavior: FunctionChoiceBehavior
) -> None:
    """Where functions are offered, invoked or not, plain and streamed."""
    served = serve([call("t-add", {"a": 1, "b": 2}), say("Done.")])
    settings = settings_with(choice, generic=False, behavior=behavior)
    with pytest.raises(
        PlannerInvalidConfigurationError, match=r"tool_choice=.*NoneInvoke"
    ):
        await ask(FunctionInvokingChatCompletion(served.connector), settings=settings)
    assert served.server.requests == []


@each_of("choice", ["auto", None])
async def test_what_does_not_contradict_is_taken(
    ask: Ask, serve: Serve, choice: Any
) -> None:
    """``auto`` is what is sent anyway."""
    served = serve([call("t-add", {"a": 1, "b": 2}), say("Done.")])
    settings = settings_with(choice, generic=False, behavior=AUTO())
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, to=question(), settings=settings)
    assert answer.text == "Done."


async def test_without_functions_it_is_the_callers(ask: Ask, serve: Serve) -> None:
    """A request without a behaviour goes as the settings have it."""
    served = serve([say("Done.")])
    tool = {
        "type": "function",
        "function": {
            "name": "mine",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    settings = OpenAIChatPromptExecutionSettings(tools=[tool], tool_choice="none")
    await ask(FunctionInvokingChatCompletion(served.connector), settings=settings)
    assert served.server.requests[0].tool_choice == "none"
