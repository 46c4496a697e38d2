"""The service in its places: a kernel's service, ``invoke_prompt``, ``ChatCompletionAgent``, twenty runs at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    ChatHistory,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
)
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from support.narrow import as_type, present
from support.served import Served, Tools, asked
from support.stock import first_result

Serve = Callable[..., Served]
Resend = Callable[[ChatHistory], Awaitable[None]]

ADD = call("t-add", {"a": 1, "b": 2})
TWO_TOOLS = [
    calls(ADD, call("t-echo", {"text": "x"}), text="Let me see."),
    say("Three."),
]


def kernel_with(service: ChatCompletionClientBase, tools: Tools) -> Kernel:
    kernel = tools.kernel()
    kernel.add_service(service)
    return kernel


async def test_a_prompt_is_answered_with_the_metadata(
    serve: Serve, tools: Tools
) -> None:
    """``kernel.invoke_prompt`` runs the functions, and its result carries the final message's metadata."""
    served = serve(TWO_TOOLS)
    kernel = kernel_with(FunctionInvokingChatCompletion(served.connector), tools)
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    result = await kernel.invoke_prompt(
        "What is {{$what}}?", arguments=KernelArguments(settings, what="1 + 2")
    )
    assert str(result) == "Three."
    (metadata,) = present(result).metadata["metadata"]
    assert metadata["iterations"] == 2
    assert metadata["tool_calls"] == 2
    assert metadata["status"] == "answered"
    assert served.server.requests[0].messages == [
        {"role": "user", "content": "What is 1 + 2?"}
    ]
    assert served.server.refused == []


async def test_a_prompt_is_answered_as_a_stream(serve: Serve, tools: Tools) -> None:
    """``kernel.invoke_prompt_stream`` streams the text, and its last chunk carries the metadata."""
    kernel = kernel_with(
        FunctionInvokingChatCompletion(serve(TWO_TOOLS).connector), tools
    )
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    chunks: list[StreamingChatMessageContent] = []
    async for group in kernel.invoke_prompt_stream(
        "What is 1 + 2?", arguments=KernelArguments(settings)
    ):
        chunks += [
            as_type(StreamingChatMessageContent, chunk)
            for chunk in as_type(list, group)
        ]
    assert "".join(chunk.content for chunk in chunks) == "Let me see.Three."
    assert chunks[-1].metadata["iterations"] == 2


async def test_a_kernels_selection_finds_the_wrapper(
    serve: Serve, tools: Tools
) -> None:
    """The kernel gives it out as its chat completion service, with the settings class of the connector."""
    service = FunctionInvokingChatCompletion(serve([]).connector, service_id="bounded")
    kernel = kernel_with(service, tools)
    assert kernel.get_service("bounded", type=ChatCompletionClientBase) is service
    chosen, settings = kernel.select_ai_service(
        arguments=KernelArguments(), type=ChatCompletionClientBase
    )
    assert chosen is service
    assert type(settings) is service.get_prompt_execution_settings_class()


async def test_a_bounded_behaviour_survives_the_kernels_settings(
    serve: Serve, tools: Tools
) -> None:
    """Attempts given in the arguments' settings still bound the run after the kernel's conversions and copies."""
    served = serve(lambda request: ADD if request.tools else say("Enough."))
    kernel = kernel_with(FunctionInvokingChatCompletion(served.connector), tools)
    behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=2)
    settings = PromptExecutionSettings(
        service_id="served", function_choice_behavior=behavior
    )
    result = await kernel.invoke_prompt("Go.", arguments=KernelArguments(settings))
    assert (str(result), len(served.server.requests)) == ("Enough.", 3)


def agent_with(service: ChatCompletionClientBase, tools: Tools) -> ChatCompletionAgent:
    return ChatCompletionAgent(
        service=service,
        name="Adder",
        instructions="Add.",
        plugins=[tools_plugin(tools)],
    )


def tools_plugin(tools: Tools) -> Any:
    return tools.kernel().get_plugin("t")


async def thread_history(thread: Any) -> ChatHistory:
    return ChatHistory(messages=[message async for message in thread.get_messages()])


@pytest.mark.parametrize("how", ["get_response", "invoke", "invoke_stream"])
async def test_an_agent_answers_and_keeps_its_thread(
    serve: Serve, tools: Tools, resend: Resend, how: str
) -> None:
    """In ``ChatCompletionAgent`` tools run once, the answer comes out, and the thread can go on for a second turn."""
    served = serve([*TWO_TOOLS, ADD, say("Still three.")])
    agent = agent_with(FunctionInvokingChatCompletion(served.connector), tools)
    thread = ChatHistoryAgentThread()
    answers: list[str] = []
    for question in ("What is 1 + 2?", "Sure?"):
        if how == "get_response":
            answers.append(
                str((await agent.get_response(question, thread=thread)).message)
            )
        elif how == "invoke":
            answers += [
                str(response.message)
                async for response in agent.invoke(question, thread=thread)
            ]
        else:
            stream = agent.invoke_stream(question, thread=thread)
            answers.append(
                "".join([str(response.message) async for response in stream])
            )
    assert [answer.removeprefix("Let me see.") for answer in answers] == [
        "Three.",
        "Still three.",
    ]
    assert tools.seen.count((1, 2)) == 2 and tools.seen.count("x") == 1
    kept = await thread_history(thread)
    assert [message.role for message in kept.messages] == [
        *("user", "assistant", "tool", "tool", "assistant"),
        *("user", "assistant", "tool", "assistant"),
    ]
    assert served.server.refused == []
    await resend(kept)


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_an_agent_shows_its_intermediate_messages(
    serve: Serve, tools: Tools, streamed: bool
) -> None:
    """``on_intermediate_message`` sees each message with calls and each result once, in order."""
    agent = agent_with(
        FunctionInvokingChatCompletion(serve(TWO_TOOLS).connector), tools
    )
    seen: list[str] = []

    async def show(message: Any) -> None:
        kinds = (FunctionCallContent, FunctionResultContent)
        seen.extend(
            f"{message.role.value} {item.id}"
            for item in message.items
            if isinstance(item, kinds)
        )

    invoke = agent.invoke_stream if streamed else agent.invoke
    async for _ in invoke("What is 1 + 2?", on_intermediate_message=show):
        pass
    assert seen == [
        "assistant call_1",
        "assistant call_2",
        "tool call_1",
        "tool call_2",
    ]


@pytest.mark.parametrize("limit", ["answer", "stop"])
@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_an_agents_thread_survives_a_limit(
    serve: Serve, tools: Tools, limit: Any, streamed: bool
) -> None:
    """After a turn that ends at its budget the thread's next turn can be sent, whether there was an answer or not."""
    served = serve(lambda request: ADD if request.tools else say("Enough."))
    service = FunctionInvokingChatCompletion(
        served.connector, budget=Budget(max_iterations=2, on_limit=limit)
    )
    agent, thread = agent_with(service, tools), ChatHistoryAgentThread()
    invoke = agent.invoke_stream if streamed else agent.invoke
    for question in ("Go.", "Go on."):
        async for _ in invoke(question, thread=thread):
            pass
    assert len(served.server.requests) == 4
    assert served.server.refused == []


def echoing(request: ScriptedRequest) -> ScriptedReply:
    """A model that echoes each question once through the function."""
    last = request.messages[-1]
    return (
        call("t-echo", {"text": str(last["content"])})
        if last["role"] == "user"
        else say(f"Got {last['content']}")
    )


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
async def test_twenty_runs_at_once_do_not_mix(
    serve: Serve, tools: Tools, streamed: bool
) -> None:
    """One service in twenty concurrent runs: each has its own question, calls, charges and history."""
    served = serve(echoing)
    service = FunctionInvokingChatCompletion(
        served.connector, budget=Budget(max_iterations=3, max_tool_calls=1)
    )
    kernel = tools.kernel()
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    histories = [ChatHistory() for _ in range(20)]
    for number, own in enumerate(histories):
        own.add_user_message(f"question {number}")
    answers = await asyncio.gather(
        *(asked(service, own, kernel, settings, streamed=streamed) for own in histories)
    )
    assert [answer.text for answer in answers] == [
        f"Got question {number}" for number in range(20)
    ]
    assert {(a.metadata["iterations"], a.metadata["tool_calls"]) for a in answers} == {
        (2, 1)
    }
    assert (
        sum(a.metadata["usage"].prompt_tokens for a in answers)
        == served.server.prompt_tokens
    )
    for number, own in enumerate(histories):
        assert [str(first_result(message).result) for message in own.messages[2:]] == [
            f"question {number}"
        ]
    assert served.server.refused == []


async def test_a_function_may_use_the_service_itself(
    serve: Serve, tools: Tools, history: ChatHistory
) -> None:
    """A prompt function, run as a tool, asks the same service: its request is charged to the run that calls it."""
    served = serve(
        [
            call("p-inner", {"what": "tea"}),
            say("Tea is nice."),
            say("They say: tea is nice."),
        ]
    )
    service = FunctionInvokingChatCompletion(served.connector)
    kernel = kernel_with(service, tools)
    kernel.add_function(
        "p", function_name="inner", prompt="Say something about {{$what}}."
    )
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    answer = await asked(service, history, kernel, settings, streamed=False)
    assert (answer.text, answer.metadata["iterations"]) == ("They say: tea is nice.", 3)
    assert served.server.requests[1].messages == [
        {"role": "user", "content": "Say something about tea."}
    ]
    assert first_result(history.messages[2]).result == "Tea is nice."
