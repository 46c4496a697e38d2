"""Semantic Kernel's own tool loop has the same outcome over the scripted service and over the scripted server."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, ChatMessageContent
from semantic_kernel.functions import kernel_function

from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.values import each_of

ADD_ONE_AND_TWO = call("math-add", {"a": 1, "b": 2})


@dataclass
class Model:
    """A connector whose model is a script, and what it was asked."""

    connector: ChatCompletionClientBase
    requests: Callable[[], list[ScriptedRequest]]


@asynccontextmanager
async def by_service(script: Script) -> AsyncIterator[Model]:
    service = ScriptedChatCompletion(script)
    yield Model(service, lambda: service.requests)


@asynccontextmanager
async def by_server(script: Script) -> AsyncIterator[Model]:
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            connector = OpenAIChatCompletion(
                ai_model_id="scripted", async_client=client
            )
            yield Model(connector, lambda: server.requests)
        assert server.refused == []


Open = Callable[[Script], AbstractAsyncContextManager[Model]]

both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)
both_models = pytest.mark.parametrize(
    "opened", [by_service, by_server], ids=["service", "server"]
)


@dataclass
class Math:
    """A plugin that remembers what it added."""

    sums: list[tuple[int, int]] = field(default_factory=list)

    @kernel_function(description="Adds two numbers.")
    def add(self, a: int, b: int) -> int:
        self.sums.append((a, b))
        return a + b

    def kernel(self) -> Kernel:
        kernel = Kernel()
        kernel.add_plugin(self, "math")
        return kernel


async def messages_of(
    model: Model, kernel: Kernel, behavior: FunctionChoiceBehavior, *, streamed: bool
) -> list[ChatMessageContent]:
    """All messages that come out of one question."""
    chat_history = ChatHistory()
    chat_history.add_user_message("What is 1 + 2?")
    settings = PromptExecutionSettings(function_choice_behavior=behavior)
    if not streamed:
        return await model.connector.get_chat_message_contents(
            chat_history, settings, kernel=kernel
        )
    stream = model.connector.get_streaming_chat_message_contents(
        chat_history, settings, kernel=kernel
    )
    return [message async for messages in stream for message in messages]


@both_models
@both_ways
async def test_functions_run_and_the_model_answers(
    opened: Open, streamed: bool
) -> None:
    """Calls run, their results are sent back under their ids, and the text of the last reply comes out."""
    math = Math()
    script = [
        calls(ADD_ONE_AND_TWO, call("math-add", {"a": 30, "b": 40})),
        say("They are 3 and 70."),
    ]

    async with opened(script) as model:
        messages = await messages_of(
            model, math.kernel(), FunctionChoiceBehavior.Auto(), streamed=streamed
        )
        first, second = model.requests()

    assert (
        "".join(message.content for message in messages if message.role == "assistant")
        == "They are 3 and 70."
    )
    assert sorted(math.sums) == [(1, 2), (30, 40)]
    assert (first.tools, first.tool_choice, first.stream) == (
        ("math-add",),
        "auto",
        streamed,
    )
    results = [
        (message["tool_call_id"], message["content"]) for message in second.messages[2:]
    ]
    assert sorted(results) == [("call_1", "3"), ("call_2", "70")]


@both_models
async def test_functions_are_withdrawn_at_the_limit(opened: Open) -> None:
    """After the last allowed round Semantic Kernel asks once more, and that request shows that nothing is offered."""
    math = Math()

    async with opened(
        lambda request: ADD_ONE_AND_TWO if request.tools else say("Enough.")
    ) as model:
        behavior = FunctionChoiceBehavior.Auto(maximum_auto_invoke_attempts=2)
        (message,) = await messages_of(model, math.kernel(), behavior, streamed=False)
        requests = model.requests()

    assert message.content == "Enough."
    assert [request.tools for request in requests] == [("math-add",), ("math-add",), ()]
    assert [request.tool_choice for request in requests] == ["auto", "auto", None]
    assert math.sums == [(1, 2), (1, 2)]


@both_ways
@each_of(
    "reply",
    [
        say("Plain text, in pieces."),
        calls(
            ADD_ONE_AND_TWO, call("math-add", {"a": 3, "b": 4}), text="Both at once."
        ),
        call("math-add", "{not json", id=""),
        call("math-add", {}),
        ScriptedReply(),
        ScriptedReply(text=""),
        ScriptedReply(refusal="I will not add."),
        ScriptedReply(
            text="cut",
            finish_reason="content_filter",
            prompt_tokens=5,
            completion_tokens=0,
        ),
    ],
    ids=[
        "text",
        "text-and-calls",
        "malformed",
        "no-arguments",
        "nothing",
        "empty-text",
        "refusal",
        "filtered",
    ],
)
async def test_the_service_answers_as_the_openai_connector(
    reply: ScriptedReply, streamed: bool
) -> None:
    """Message by message and chunk by chunk the service equals the real connector over real HTTP, tokens included."""
    manual, kernel = FunctionChoiceBehavior.Auto(auto_invoke=False), Math().kernel()

    async with by_service([reply]) as service, by_server([reply]) as server:
        ours = await messages_of(service, kernel, manual, streamed=streamed)
        theirs = await messages_of(server, kernel, manual, streamed=streamed)

    assert [message.model_dump() for message in ours] == [
        message.model_dump() for message in theirs
    ]
