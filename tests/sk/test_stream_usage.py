"""What a caller sums over the chunks of a stream is what the server counted; and every end says why."""

from collections.abc import AsyncIterable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    Defer,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.testing import Script, ScriptedReply, call, calls, say
from support.planner import both_ways, invoke, openai_kernel, planner_with
from support.served import Served, Tools, asked, question
from support.values import each_of

Serve = Callable[..., Served]
ADD = call("t-add", {"a": 1, "b": 2})

SCRIPTS: dict[str, Script] = {
    "one trip": [say("Three.")],
    "several trips": [calls(ADD, text="Let me see."), ADD, say("Three, I think.")],
    "a batch": [calls(ADD, call("t-echo", {"text": "y"})), say("Three.")],
    "at the limit": lambda request: ADD if request.tools else say("Enough."),
}


async def summed(chunks: AsyncIterable[Any]) -> int:
    """Sum the usage as Microsoft's samples do: over all chunks that have one."""
    usage = CompletionUsage(prompt_tokens=0, completion_tokens=0)
    async for chunk in chunks:
        if chunk.metadata.get("usage"):
            usage += chunk.metadata["usage"]
    return (usage.prompt_tokens or 0) + (usage.completion_tokens or 0)


def of_service(
    service: FunctionInvokingChatCompletion, kernel: Kernel, behavior: Any
) -> AsyncIterable[Any]:
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=behavior)
    history = ChatHistory()
    history.add_user_message("What is 1 + 2?")
    return service.get_streaming_chat_message_content(history, settings, kernel=kernel)


def of_agent(
    service: FunctionInvokingChatCompletion, kernel: Kernel, behavior: Any
) -> AsyncIterable[Any]:
    agent = ChatCompletionAgent(
        service=service, kernel=kernel, function_choice_behavior=behavior
    )
    return agent.invoke_stream("What is 1 + 2?")


def of_handler(
    service: FunctionInvokingChatCompletion, kernel: Kernel, behavior: Any
) -> AsyncIterable[Any]:
    kernel.add_service(service)
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=behavior)
    history = ChatHistory()
    history.add_user_message("What is 1 + 2?")
    return ToolCallHandler(kernel, settings=settings).invoke_stream(history)


@each_of("script", SCRIPTS)
@pytest.mark.parametrize("door", [of_service, of_agent, of_handler])
async def test_streamed_usage_is_reported_once(
    serve: Serve, door: Any, script: str
) -> None:
    """Over several trips, with tools in between and at a limit, in service, agent and handler."""
    kernel = Tools().kernel()
    served = serve(SCRIPTS[script])
    service = FunctionInvokingChatCompletion(
        served.connector, budget=Budget(max_iterations=4)
    )
    assert (
        await summed(door(service, kernel, FunctionChoiceBehavior.Auto()))
        == served.server.total_tokens
    )


@pytest.mark.parametrize(
    "behavior", [None, FunctionChoiceBehavior.Auto(auto_invoke=False)]
)
async def test_usage_of_a_stream_that_passes_through_is_reported_once(
    serve: Serve, kernel: Kernel, behavior: Any
) -> None:
    """Without a loop there is one request, and its usage is on the last chunk."""
    served = serve([say("Three, I think.")])
    stream = of_service(
        FunctionInvokingChatCompletion(served.connector), kernel, behavior
    )
    assert await summed(stream) == served.server.total_tokens


async def deferring(_: object) -> Defer:
    return Defer()


ENDS: dict[str, tuple[Script, dict[str, Any], str]] = {
    "limit_reached": (
        SCRIPTS["at the limit"],
        {"budget": Budget(max_iterations=2)},
        "max_iterations=2",
    ),
    "incomplete": (
        [ScriptedReply(text="Thr", finish_reason="length")],
        {},
        "finish_reason is length",
    ),
    "paused": ([ADD], {"interceptors": [deferring]}, "resume the run with decisions"),
    "stopped": (
        [ADD],
        {"budget": Budget(max_iterations=1, on_limit="stop")},
        "max_iterations=1",
    ),
}


@each_of("end", ENDS)
async def test_the_metadata_says_why_there_is_no_answer(
    serve: Serve, kernel: Kernel, end: str, streamed: bool
) -> None:
    """``reason`` is in the metadata of every run that was not answered."""
    history = question()
    script, options, reason = ENDS[end]
    service = FunctionInvokingChatCompletion(serve(script).connector, **options)
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    answer = await asked(service, history, kernel, settings, streamed=streamed)
    assert reason in answer.metadata["reason"]


async def test_an_answered_run_has_no_reason(
    serve: Serve, kernel: Kernel, history: ChatHistory, tools: Tools, streamed: bool
) -> None:
    """An answer needs none; calls that are returned to the caller do."""
    service = FunctionInvokingChatCompletion(serve([ADD, say("Three."), ADD]).connector)
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    answer = await asked(service, history, kernel, settings, streamed=streamed)
    assert "reason" not in answer.metadata
    settings.function_choice_behavior = FunctionChoiceBehavior.Auto(auto_invoke=False)
    returned = await asked(service, history, kernel, settings, streamed=streamed)
    assert "returned to the caller" in returned.metadata["reason"]
    assert tools.seen == [(1, 2)]


REFUSED = ScriptedReply(refusal="I cannot help with that.")
FORM: dict[str, Any] = {
    "type": "object",
    "properties": {"total": {"type": "integer"}},
    "required": ["total"],
}


@both_ways
async def test_a_refusal_ends_the_planner(streamed: bool) -> None:
    """A refusal is not asked for again: one request, and the end names it."""
    async with openai_kernel(lambda _: REFUSED) as (kernel, server):
        planner = planner_with(
            "chat", plan=False, max_iterations=8, response_format=FORM
        )
        result = await invoke(planner, kernel, streamed=streamed)
    assert len(server.requests) == 1
    assert (result.status, result.final_answer) == ("incomplete", "")
    assert (
        result.reason
        == "The model refused to answer (refusal): I cannot help with that."
    )


@pytest.mark.parametrize("behavior", [None, BoundedFunctionChoiceBehavior.Auto()])
async def test_a_refusal_ends_a_request(
    serve: Serve, kernel: Kernel, history: ChatHistory, behavior: Any, streamed: bool
) -> None:
    """A service with a ``response_format`` in its settings returns the refusal's text, and says what it is."""
    served = serve(lambda _: REFUSED)
    service = FunctionInvokingChatCompletion(served.connector)
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": FORM}}
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=behavior, response_format=form
    )
    answer = await asked(service, history, kernel, settings, streamed=streamed)
    assert (answer.text, answer.metadata["status"]) == (
        "I cannot help with that.",
        "incomplete",
    )
    assert "refusal" in answer.metadata["reason"]
    assert len(served.server.requests) == 1


@both_ways
async def test_a_refusal_without_a_form_is_the_answer(
    serve: Serve, kernel: Kernel, history: ChatHistory, streamed: bool
) -> None:
    """Where no form is asked for, the caller gets the refusal's text as the answer."""
    service = FunctionInvokingChatCompletion(serve(lambda _: REFUSED).connector)
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    answer = await asked(service, history, kernel, settings, streamed=streamed)
    assert (answer.text, answer.metadata["status"]) == (
        "I cannot help with that.",
        "answered",
    )
