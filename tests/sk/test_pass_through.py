"""A request that invokes nothing says how it ended, as every other does: under every behaviour, plain and streamed."""

from collections.abc import Awaitable, Callable
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

from planner_ext import BoundedFunctionChoiceBehavior, FunctionInvokingChatCompletion
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, call, say
from support.served import Answer, Served, question
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]
ADD = call("t-add", {"a": 1, "b": 2})

BEHAVIORS = {
    "none": None,
    "returns": FunctionChoiceBehavior.Auto(auto_invoke=False),
    "none-invoke": FunctionChoiceBehavior.NoneInvoke(),
    "bounded-none-invoke": BoundedFunctionChoiceBehavior.NoneInvoke(),
    "required": FunctionChoiceBehavior.Required(auto_invoke=False),
    "invokes": FunctionChoiceBehavior.Auto(),
}
ENDS = {
    "text": (say("Hi."), "answered"),
    "cut": (ScriptedReply(text="Hi", finish_reason="length"), "incomplete"),
    "filtered": (ScriptedReply(text="", finish_reason="content_filter"), "incomplete"),
}


@each_of("end", ENDS)
@each_of("behavior", BEHAVIORS)
async def test_status_and_limit_are_in_the_metadata(
    ask: Ask, serve: Serve, behavior: str, end: str
) -> None:
    """Beside iterations, usage and tool calls; a stream has them on its last chunk."""
    reply, status = ENDS[end]
    served = serve([reply])
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=BEHAVIORS[behavior]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    metadata = (await ask(service, to=question(), settings=settings)).metadata
    assert metadata["status"] == status
    assert metadata["limit"] is None
    assert metadata["iterations"] == 1
    assert metadata["tool_calls"] == 0
    assert metadata["usage"].prompt_tokens > 0


@each_of("behavior", ["returns", "required"])
async def test_calls_that_are_returned_do_not_answer(
    ask: Ask, serve: Serve, behavior: str
) -> None:
    """Their status is that of a run whose calls are returned."""
    served = serve([ADD])
    settings = OpenAIChatPromptExecutionSettings(
        function_choice_behavior=BEHAVIORS[behavior]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service, to=question(), settings=settings)
    assert [name for name, _ in answer.calls] == ["t-add"]
    assert answer.metadata["status"] == "stopped"
    assert answer.metadata["limit"] is None


@each_of("kernel", [None, Kernel()], ids=["no-kernel", "empty-kernel"])
async def test_several_answers_have_status_and_limit(
    serve: Serve, history: ChatHistory, kernel: Any, streamed: bool
) -> None:
    """No kernel, or nothing in it, and several answers asked for."""
    served = serve([say("Hi.")])
    service = FunctionInvokingChatCompletion(served.connector)
    settings = OpenAIChatPromptExecutionSettings(number_of_responses=2)
    if streamed:
        stream = service.get_streaming_chat_message_contents(
            history, settings, kernel=kernel
        )
        messages = [chunk async for chunks in stream for chunk in chunks][-1:]
    else:
        messages = await service.get_chat_message_contents(
            history, settings, kernel=kernel
        )
    assert [(m.metadata["status"], m.metadata["limit"]) for m in messages] == [
        ("answered", None)
    ]


async def test_the_scripted_service_and_a_stream_without_finish_reason(
    history: ChatHistory, streamed: bool
) -> None:
    """A connector that never says that it has finished gets a last chunk that does."""
    service = FunctionInvokingChatCompletion(ScriptedChatCompletion([say("Hi.")]))
    settings = PromptExecutionSettings()
    if not streamed:
        message = await service.get_chat_message_content(history, settings)
        assert message is not None
        assert message.metadata["status"] == "answered"
        return
    chunks = [
        chunk
        async for chunk in service.get_streaming_chat_message_content(history, settings)
    ]
    assert chunks[-1] is not None
    assert chunks[-1].metadata["status"] == "answered"
    assert "".join(str(chunk) for chunk in chunks) == "Hi."
