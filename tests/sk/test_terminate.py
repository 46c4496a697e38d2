"""A filter that sets ``context.terminate``: the service returns what Semantic Kernel's own loop returns."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import (
    ChatCompletionAgent,
    ChatHistoryAgentThread,
    HandoffOrchestration,
    OrchestrationHandoffs,
)
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    FunctionResultContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.hitl_manager import Defer
from planner_ext.testing import call, calls, say
from support.narrow import present
from support.served import Answer, Served, Tools
from support.stock import add_filter, every_result

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]
Resend = Callable[[ChatHistory], Awaitable[None]]

BATCH = [
    calls(call("t-add", {"a": 1, "b": 2}), call("t-echo", {"text": "x"})),
    say("Never sent."),
]
RESULTS = [("call_1", "t-add", "3"), ("call_2", "t-echo", "x")]
SETTINGS = PromptExecutionSettings(
    function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
)
both_wires = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)


async def ends(context: Any, next: Any) -> None:
    await next(context)
    context.terminate = True


@pytest.fixture
def kernel(tools: Tools) -> Kernel:
    kernel = tools.kernel()
    add_filter(kernel, "auto_function_invocation", ends)
    return kernel


def results_in(message: ChatMessageContent) -> list[tuple[str, str, str]]:
    return [
        (item.id or "", item.name or "", str(item.result))
        for item in every_result(message)
    ]


async def test_the_message_with_the_results_is_returned(
    ask: Ask, serve: Serve, streamed: bool
) -> None:
    """Role, ids, names and results are those of the stock loop, plain and streamed, after one request."""
    stock, ours = serve(BATCH), serve(BATCH)
    histories = ChatHistory(), ChatHistory()
    for history in histories:
        history.add_user_message("Go.")
    expected = await ask(stock.connector, to=histories[0])
    answer = await ask(FunctionInvokingChatCompletion(ours.connector), to=histories[1])
    last = [one.chunks[-1] if streamed else one.message for one in (expected, answer)]
    assert [(message.role, results_in(message)) for message in last] == [
        ("tool", RESULTS)
    ] * 2
    assert len(stock.server.requests) == len(ours.server.requests) == 1


async def test_the_run_is_stopped_and_charged(ask: Ask, serve: Serve) -> None:
    """The message has the metadata of every other end."""
    answer = await ask(FunctionInvokingChatCompletion(serve(BATCH).connector))
    metadata = answer.metadata
    assert metadata["status"] == "stopped"
    assert metadata["iterations"] == 1
    assert metadata["tool_calls"] == 2


@pytest.mark.parametrize("added", [False, True], ids=["as-it-is", "with-the-message"])
async def test_the_history_continues(
    ask: Ask,
    serve: Serve,
    kernel: Kernel,
    history: ChatHistory,
    added: bool,
    resend: Resend,
) -> None:
    """A next turn is sent with each result once, also where the caller added the returned message."""
    served = serve([*BATCH[:1], say("Both are there.")])
    service = FunctionInvokingChatCompletion(served.connector)
    answer = await ask(service)
    await resend(history)
    if added:
        history.add_message(answer.message)
    history.add_user_message("And?")
    assert (await ask(service)).text == "Both are there."
    sent = served.server.requests[1].messages
    assert [message["role"] for message in sent] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert served.server.refused == []


async def test_a_streamed_turn_shows_each_result_once(
    serve: Serve, kernel: Kernel, history: ChatHistory
) -> None:
    """The calls come first, the results last; the metadata are there, too, and the usage once."""
    served = serve(BATCH)
    service, settings = FunctionInvokingChatCompletion(served.connector), SETTINGS
    chunks = [
        one
        async for one in service.get_streaming_chat_message_content(
            history, settings, kernel=kernel
        )
    ]
    shown = [
        item
        for one in chunks
        for item in present(one).items
        if isinstance(item, FunctionResultContent)
    ]
    assert [str(item.result) for item in shown] == ["3", "x"]
    assert present(chunks[-1]).metadata["status"] == "stopped"


async def test_a_handoff_is_that_of_the_stock_loop(serve: Serve) -> None:
    """Semantic Kernel's handoff ends a turn by ``terminate``: each agent keeps its thread, and reads it when asked."""
    script = [
        *(call("Handoff-transfer_to_Two"), call("Handoff-transfer_to_One")),
        call("Handoff-complete_task", {"task_summary": "Both were asked."}),
    ]
    requests: list[Any] = []
    for wrap in (lambda connector: connector, FunctionInvokingChatCompletion):
        served = serve(script)
        agents: list[Any] = [
            ChatCompletionAgent(
                name=name, instructions=f"I am {name}.", service=wrap(served.connector)
            )
            for name in ("One", "Two")
        ]
        handoffs = (
            OrchestrationHandoffs()
            .add(agents[0], agents[1], "To two")
            .add(agents[1], agents[0], "To one")
        )
        runtime = InProcessRuntime()
        runtime.start()
        result = await HandoffOrchestration(members=agents, handoffs=handoffs).invoke(
            "Go.", runtime
        )
        assert "Both were asked." in str(await result.get(timeout=60))
        await runtime.stop_when_idle()
        sent = [
            [message["role"] for message in request.messages]
            for request in served.server.requests
        ]
        requests.append((sent, served.server.refused))
    assert requests[0] == requests[1]
    assert requests[1][0][2] == ["system", "user", "assistant", "tool"]


@both_wires
async def test_an_agents_thread_has_each_result_once(
    serve: Serve, kernel: Kernel, resend: Resend, streamed: bool
) -> None:
    """The agent's thread ends with the results, as under the stock loop, and its next turn is sent."""
    served = serve([*BATCH[:1], BATCH[0], say("Never sent.")])
    service = FunctionInvokingChatCompletion(served.connector)
    agent = ChatCompletionAgent(service=service, kernel=kernel, name="Adder")
    thread = ChatHistoryAgentThread()
    invoke: Any = agent.invoke_stream if streamed else agent.invoke
    for _ in range(2):
        async for _ in invoke("Go.", thread=thread):
            pass
    messages = [message async for message in thread.get_messages()]
    assert [message.role for message in messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ] * 2
    await resend(ChatHistory(messages=messages))


@both_wires
async def test_a_handler_stores_no_result_twice(
    serve: Serve, kernel: Kernel, history: ChatHistory, streamed: bool
) -> None:
    """Its last message has the results, which its history has once."""
    kernel.add_service(FunctionInvokingChatCompletion(serve(BATCH).connector))
    handler = ToolCallHandler(kernel)
    seen = [
        one
        async for one in (handler.invoke_stream if streamed else handler.invoke)(
            history
        )
    ]
    assert results_in(seen[-1]) == RESULTS
    assert [message.role for message in history.messages] == [
        "user",
        "assistant",
        "tool",
        "tool",
    ]


@both_wires
async def test_a_session_has_no_text_of_it(
    serve: Serve, kernel: Kernel, streamed: bool
) -> None:
    """A prompt that a filter ended is answered by "", and the session keeps the results."""
    kernel.add_service(serve(BATCH).connector)
    session = ToolUseSession(kernel)
    if streamed:
        text = "".join([piece async for piece in session.prompt_streaming("Go.")])
    else:
        text = await session.prompt("Go.")
    roles = [message.role for message in session.history().messages]
    assert (text, roles) == ("", ["user", "assistant", "tool", "tool"])


@both_wires
async def test_a_resumed_run_returns_the_results_too(
    serve: Serve, kernel: Kernel, history: ChatHistory, streamed: bool
) -> None:
    """A call that waited runs after its approval; the filter ends the run, and the results come back."""

    async def asks(tool: Any) -> Defer | None:
        return Defer() if tool.function_name == "add" else None

    service = FunctionInvokingChatCompletion(
        serve(BATCH).connector, interceptors=[asks]
    )
    paused = present(
        await service.get_chat_message_content(history, SETTINGS, kernel=kernel)
    )
    given: Any = (
        history,
        paused.metadata["checkpoint"],
        {"call_1": Approve()},
        SETTINGS,
    )
    if streamed:
        last: Any = [
            chunk async for chunk in service.resume_streaming(*given, kernel=kernel)
        ][-1]
    else:
        last = await service.resume(*given, kernel=kernel)
    assert last.role == "tool"
    assert results_in(last) == RESULTS
    assert last.metadata["status"] == "stopped"


async def test_a_prompt_has_the_results_as_its_value(
    serve: Serve, kernel: Kernel
) -> None:
    """Read as Microsoft's samples read them: the first message of a prompt's result holds the results."""
    kernel.add_service(FunctionInvokingChatCompletion(serve(BATCH).connector))
    result = present(
        await kernel.invoke_prompt("Go.", arguments=KernelArguments(SETTINGS))
    )
    items: list[Any] = result.value[0].items
    assert [(type(item), str(item.result)) for item in items] == [
        (FunctionResultContent, text) for text in ("3", "x")
    ]


async def test_a_compacted_batch_is_returned(ask: Ask, serve: Serve) -> None:
    """The callback after the batch took the results out of the history; the caller still gets them."""

    async def compact(context: Any) -> None:
        context.messages[:] = context.messages[:1]

    service = FunctionInvokingChatCompletion(
        serve(BATCH).connector, iteration_completed=compact
    )
    answer = await ask(service)
    assert results_in(answer.chunks[-1] if answer.chunks else answer.message) == RESULTS
