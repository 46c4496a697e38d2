"""Known defects of Semantic Kernel around the loop, by number: contexts, settings, retries, terminated turns."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import FunctionResult, KernelArguments, kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
)
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import ScriptedChatCompletion, ScriptedFault, call, calls, say
from support.served import Answer, Served, Tools, asked
from support.stock import add_filter, first_result, scripted_by

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]

ADD = call("t-add", {"a": 1, "b": 2})
AUTO = FunctionChoiceBehavior.Auto
SETTINGS = PromptExecutionSettings(function_choice_behavior=AUTO())
TRACE = contextvars.ContextVar("TRACE", default="the caller's")


def context() -> dict[Any, Any]:
    return dict(contextvars.copy_context())


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
async def test_defect_16_a_stream_leaves_the_consumers_context_alone(
    kernel: Kernel, history: ChatHistory, stock: bool
) -> None:
    """Between two chunks the consumer has its own context: no span and no variable of the run; the stock loop's has."""

    async def setting(context: Any, next: Any) -> None:
        TRACE.set("the filter's")
        await next(context)

    add_filter(kernel, "auto_function_invocation", setting)
    inner = ScriptedChatCompletion([calls(ADD, text="Let me see."), say("Three.")])
    service: ChatCompletionClientBase = (
        inner if stock else FunctionInvokingChatCompletion(inner)
    )
    before, changed = context(), False
    async with aclosing(
        service.get_streaming_chat_message_contents(history, SETTINGS, kernel=kernel)
    ) as stream:
        async for _ in stream:
            changed = changed or context() != before
    assert changed is stock


@pytest.mark.parametrize("stock", [False, True], ids=["ours", "stock"])
async def test_defect_16_a_stream_may_be_closed_by_another_task(
    kernel: Kernel, history: ChatHistory, caplog: pytest.LogCaptureFixture, stock: bool
) -> None:
    """Closed from another task, nothing fails to detach; with the stock loop OpenTelemetry logs that it did."""
    inner = ScriptedChatCompletion([say("A long answer in pieces.")])
    service: ChatCompletionClientBase = (
        inner if stock else FunctionInvokingChatCompletion(inner)
    )
    stream = service.get_streaming_chat_message_contents(
        history, SETTINGS, kernel=kernel
    )
    with caplog.at_level(logging.ERROR):
        await anext(stream)
        await asyncio.create_task(aclosed(stream))
    assert (
        any("Failed to detach context" in record.message for record in caplog.records)
        is stock
    )


async def aclosed(stream: AsyncGenerator[Any, None]) -> None:
    await stream.aclose()


async def test_defect_16_a_function_sees_the_callers_context(ask: Ask) -> None:
    """Context variables of the caller, such as a request id or a tracing span, reach the functions, streamed too."""
    seen: list[str] = []

    class Reads:
        @kernel_function
        async def look(self) -> str:
            seen.append(TRACE.get())
            return "seen"

        @kernel_function
        def look_in_thread(self) -> str:
            seen.append(TRACE.get())
            return "seen"

    kernel = Kernel()
    kernel.add_plugin(Reads(), "r")
    token = TRACE.set("set by the caller")
    try:
        inner = ScriptedChatCompletion(
            [calls(call("r-look"), call("r-look_in_thread")), say("Done.")]
        )
        await ask(FunctionInvokingChatCompletion(inner), kernel=kernel)
    finally:
        TRACE.reset(token)
    assert seen == ["set by the caller"] * 2


async def test_defect_18_a_behaviour_is_not_ignored_in_silence(ask: Ask) -> None:
    """Offering functions to a connector that cannot call them is an error; the stock loop just leaves them out."""

    class Mute(ScriptedChatCompletion):
        SUPPORTS_FUNCTION_CALLING = False

    with pytest.raises(PlannerInvalidConfigurationError, match="Mute"):
        await ask(
            FunctionInvokingChatCompletion(
                scripted_by(Mute, [say("No functions here.")])
            )
        )
    stock = scripted_by(Mute, [say("No functions here.")])
    assert (await ask(stock)).text == "No functions here."
    assert stock.requests[0].tools == ()


async def test_defect_19_a_bound_from_data_holds(ask: Ask) -> None:
    """A bound written down as data bounds the run, and a misspelt one is refused; stock settings drop it."""
    data = {"type": "auto", "maximum_use_attempts": 1}
    eager = lambda request: ADD if request.tools else say("Enough.")  # noqa: E731  (shorter than a function)
    inner = ScriptedChatCompletion(eager)
    await ask(
        FunctionInvokingChatCompletion(inner),
        BoundedFunctionChoiceBehavior.from_dict(data),
    )
    assert len(inner.requests) == 2
    with pytest.raises(PlannerInvalidConfigurationError, match="maximum_use_attemps"):
        BoundedFunctionChoiceBehavior.from_dict(
            {"type": "auto", "maximum_use_attemps": 1}
        )
    stock = PromptExecutionSettings(
        function_choice_behavior={**data, "auto_invoke": True}
    )
    assert stock.function_choice_behavior is not None
    assert stock.function_choice_behavior.maximum_auto_invoke_attempts == 5


async def test_defect_20_retries_of_the_sdk_are_not_counted(
    ask: Ask, serve: Serve
) -> None:
    """As documented: a retry inside the SDK is not seen and not counted; usage counts what was billed."""
    served = serve(
        [ScriptedFault(headers={"retry-after-ms": "1"}), ADD, say("Three.")],
        max_retries=2,
    )
    answer = await ask(
        FunctionInvokingChatCompletion(
            served.connector, budget=Budget(max_iterations=2)
        )
    )
    assert (answer.metadata["iterations"], len(served.server.requests)) == (2, 3)
    assert answer.metadata["usage"].prompt_tokens == served.server.prompt_tokens


async def test_defect_21_arguments_that_are_lists_reach_functions(ask: Ask) -> None:
    """Lists and objects among the application's and the model's arguments arrive as they are."""
    seen: list[Any] = []

    class Lists:
        @kernel_function
        async def take(self, mine: list[int], scopes: list[str] | None = None) -> str:
            seen.append((mine, scopes))
            return "taken"

    kernel = Kernel()
    kernel.add_plugin(Lists(), "l")
    inner = ScriptedChatCompletion([call("l-take", {"mine": [1, 2]}), say("Done.")])
    await ask(
        FunctionInvokingChatCompletion(inner),
        kernel=kernel,
        arguments=KernelArguments(scopes=["a", "b"]),
    )
    assert seen == [([1, 2], ["a", "b"])]


async def test_a_terminated_turn_has_metadata(
    ask: Ask, tools: Tools, kernel: Kernel, history: ChatHistory
) -> None:
    """A filter's ``terminate``: the results come back as in the stock loop, which says nothing of what was spent."""

    async def end(context: Any, next: Any) -> None:
        await next(context)
        context.terminate = True

    add_filter(kernel, "auto_function_invocation", end)
    inner = ScriptedChatCompletion(
        [calls(ADD, call("t-echo", {"text": "x"})), say("Never sent.")]
    )
    answer = await ask(FunctionInvokingChatCompletion(inner))
    assert answer.message.role == "tool"
    assert (answer.metadata["status"], answer.metadata["tool_calls"]) == ("stopped", 2)
    assert [str(first_result(message).result) for message in history.messages[2:]] == [
        "3",
        "x",
    ]


@pytest.mark.parametrize("how", ["raises", "skips", "replaces"])
async def test_filters_that_misbehave_leave_every_call_answered(
    ask: Ask, tools: Tools, kernel: Kernel, history: ChatHistory, how: str, serve: Serve
) -> None:
    """A filter that raises, does not go on, or puts a result in place: the call has one result, the run goes on."""

    async def odd(context: Any, next: Any) -> None:
        if how == "raises":
            raise RuntimeError("password=hunter2")
        if how == "replaces":
            context.function_result = FunctionResult(
                function=context.function.metadata, value={"put": "here"}
            )

    add_filter(kernel, "auto_function_invocation", odd)
    served = serve([calls(ADD, ADD), say("Done.")])
    answer = await ask(FunctionInvokingChatCompletion(served.connector))
    expected = {
        "raises": "The function t-add failed.",
        "skips": "Not executed: a filter of the application did not run this function.",
        "replaces": '{"put":"here"}',
    }
    assert [str(first_result(message).result) for message in history.messages[2:]] == [
        expected[how]
    ] * 2
    assert answer.text == "Done."
    assert tools.seen == []
    assert served.server.refused == []


async def test_a_kernel_may_be_shared_with_the_stock_loop(
    ask: Ask, tools: Tools, kernel: Kernel
) -> None:
    """One kernel, one history, first our loop and then Semantic Kernel's: both answer, each result stands once."""
    history = ChatHistory()
    history.add_user_message("Go.")
    inner = ScriptedChatCompletion(
        [calls(ADD, text="I look."), say("Three."), ADD, say("Still three.")]
    )
    first = await ask(FunctionInvokingChatCompletion(inner), to=history)
    history.add_message(first.message)
    history.add_user_message("Sure?")
    second = await asked(inner, history, kernel, SETTINGS, streamed=False)
    assert first.text == "Three."
    assert second.text == "Still three."
    assert len(tools.seen) == 2
    assert inner.requests[3].messages[1]["content"] == "I look."
