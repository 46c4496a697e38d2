"""The scripted service is a Semantic Kernel connector, and says what its script says, plain and streamed."""

import asyncio
from functools import reduce

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.completion_usage import CompletionUsage
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    FinishReason,
    FunctionCallContent,
    StreamingChatMessageContent,
)
from semantic_kernel.exceptions import ServiceInvalidExecutionSettingsError
from semantic_kernel.functions import kernel_function

from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedPromptExecutionSettings,
    ScriptedReply,
    ScriptedRequest,
    ScriptExhaustedError,
    call,
    calls,
    say,
)

both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)

MANUAL = FunctionChoiceBehavior.Auto(auto_invoke=False)


class Math:
    """A plugin."""

    @kernel_function(description="Adds two numbers.")
    def add(self, a: int, b: int) -> int:
        return a + b


@pytest.fixture
def kernel() -> Kernel:
    kernel = Kernel()
    kernel.add_plugin(Math(), "math")
    return kernel


def asked(text: str = "What is 1 + 2?") -> ChatHistory:
    chat_history = ChatHistory()
    chat_history.add_user_message(text)
    return chat_history


async def chunks(
    service: ScriptedChatCompletion,
    chat_history: ChatHistory | None = None,
    *,
    kernel: Kernel | None = None,
    behavior: FunctionChoiceBehavior | None = None,
) -> list[StreamingChatMessageContent]:
    """One streamed answer."""
    settings = PromptExecutionSettings(function_choice_behavior=behavior)
    stream = service.get_streaming_chat_message_contents(
        chat_history or asked(), settings, kernel=kernel
    )
    return [message async for messages in stream for message in messages]


async def ask(
    service: ScriptedChatCompletion,
    chat_history: ChatHistory | None = None,
    *,
    streamed: bool = False,
    kernel: Kernel | None = None,
    behavior: FunctionChoiceBehavior | None = None,
) -> ChatMessageContent:
    """One answer, plain or put together from its chunks as Semantic Kernel does it."""
    if streamed:
        found = await chunks(service, chat_history, kernel=kernel, behavior=behavior)
        return reduce(lambda left, right: left + right, found)
    settings = PromptExecutionSettings(function_choice_behavior=behavior)
    (message,) = await service.get_chat_message_contents(
        chat_history or asked(), settings, kernel=kernel
    )
    return message


# --- replies ---


@both_ways
async def test_a_reply_is_an_assistant_message_with_its_text(streamed: bool) -> None:
    """Text arrives whole, with the finish reason, the model's name and the metadata keys of the OpenAI connector."""
    service = ScriptedChatCompletion([say("The sum of both is 3.")], chunk_size=5)

    message = await ask(service, streamed=streamed)

    assert (message.role, message.content) == ("assistant", "The sum of both is 3.")
    assert (message.finish_reason, message.ai_model_id) == (
        FinishReason.STOP,
        "scripted",
    )
    assert set(message.metadata) == {
        "logprobs",
        "id",
        "created",
        "system_fingerprint",
        "usage",
    }
    assert isinstance(message.metadata["usage"], CompletionUsage)


@both_ways
async def test_calls_arrive_in_order_with_their_arguments(streamed: bool) -> None:
    """Several calls of one reply keep their order, ids, names and arguments, malformed ones as they are."""
    reply = calls(
        call("math-add", {"a": 1, "b": 2}), call("math-add", '{"a": 1, "b"', id="half")
    )

    message = await ask(
        ScriptedChatCompletion([reply], chunk_size=3), streamed=streamed
    )

    found = [item for item in message.items if isinstance(item, FunctionCallContent)]
    assert [
        (item.id, item.plugin_name, item.function_name, item.arguments)
        for item in found
    ] == [
        ("call_1", "math", "add", '{"a":1,"b":2}'),
        ("half", "math", "add", '{"a": 1, "b"'),
    ]
    assert message.finish_reason == FinishReason.TOOL_CALLS


async def test_the_first_delta_of_a_call_names_it_and_the_others_carry_its_arguments() -> (
    None
):
    """Each streamed call opens with index, id and name and no arguments; every piece after it has only its index."""
    service = ScriptedChatCompletion([call("math-add", {"a": 1, "b": 2})], chunk_size=6)

    items = [item for chunk in await chunks(service) for item in chunk.items]

    found = [
        (item.index, item.id, item.name, item.arguments)
        for item in items
        if type(item) is FunctionCallContent
    ]
    assert found == [
        (0, "call_1", "math-add", ""),
        (0, None, None, '{"a":1'),
        (0, None, None, ',"b":2'),
        (0, None, None, "}"),
    ]


async def test_usage_comes_in_a_last_chunk_of_its_own() -> None:
    """As with OpenAI, only the last chunk has usage, and it has neither text nor a finish reason."""
    service = ScriptedChatCompletion(
        [ScriptedReply(text="3", prompt_tokens=70, completion_tokens=2)]
    )

    *before, last = await chunks(service)

    assert [chunk.metadata["usage"] for chunk in before] == [None] * len(before)
    assert before[-1].finish_reason == FinishReason.STOP
    assert (last.content, last.finish_reason) == ("", None)
    assert last.metadata["usage"] == CompletionUsage(
        prompt_tokens=70, completion_tokens=2
    )


@both_ways
async def test_an_empty_reply_has_no_content(streamed: bool) -> None:
    """A reply without text and calls is an empty message that ended with ``stop``, and costs one token."""
    message = await ask(ScriptedChatCompletion([ScriptedReply()]), streamed=streamed)

    assert (message.content, message.items, message.finish_reason) == (
        "",
        [],
        FinishReason.STOP,
    )
    assert message.metadata["usage"].completion_tokens == 1


@both_ways
async def test_a_scripted_finish_reason_is_sent(streamed: bool) -> None:
    """A reply cut by a limit can be scripted; one that Semantic Kernel does not know raises as in its connector."""
    service = ScriptedChatCompletion(
        [
            ScriptedReply(text="half a", finish_reason="length"),
            ScriptedReply(text="", finish_reason="tired"),
        ]
    )

    assert (await ask(service, streamed=streamed)).finish_reason == FinishReason.LENGTH
    with pytest.raises(ValueError, match="tired"):
        await ask(service, streamed=streamed)


# --- faults ---


@both_ways
async def test_an_exhausted_script_is_an_error(streamed: bool) -> None:
    """A request too many raises, and is still recorded."""
    service = ScriptedChatCompletion([])

    with pytest.raises(ScriptExhaustedError, match=r"0 replies and request 0 asked"):
        await ask(service, streamed=streamed)

    assert len(service.requests) == 1


@both_ways
@pytest.mark.parametrize(
    "script", [[ConnectionError("gone")], lambda request: ConnectionError("gone")]
)
async def test_an_exception_in_the_script_is_raised(
    script: Script, streamed: bool
) -> None:
    """A service that fails is scripted by the exception it raises."""
    with pytest.raises(ConnectionError, match="gone"):
        await ask(ScriptedChatCompletion(script), streamed=streamed)


async def test_the_script_continues_after_an_exception() -> None:
    """A fault takes one request's place and no more."""
    service = ScriptedChatCompletion([ConnectionError("gone"), say("back")])
    with pytest.raises(ConnectionError):
        await ask(service)

    assert (await ask(service)).content == "back"


async def test_a_fault_of_http_is_refused_by_name() -> None:
    """A service has no status to answer with, and says what to script instead."""
    with pytest.raises(
        TypeError, match="only ScriptedOpenAIServer can send; put the exception"
    ):
        await ask(ScriptedChatCompletion([ScriptedFault(status=500)]))


def test_a_chunk_has_a_size() -> None:
    """A chunk size below one is refused when the service is made."""
    with pytest.raises(ValueError, match="chunk_size is the number of characters"):
        ScriptedChatCompletion([], chunk_size=0)


# --- what is seen and controlled ---


@both_ways
async def test_requests_show_what_was_asked(streamed: bool, kernel: Kernel) -> None:
    """A request shows its messages as OpenAI's JSON, the functions offered, the choice and whether it is a stream."""
    service = ScriptedChatCompletion([say("3"), say("3")])
    chat_history = asked()
    required = FunctionChoiceBehavior.Required(auto_invoke=False)

    await ask(
        service, chat_history, streamed=streamed, kernel=kernel, behavior=required
    )
    await ask(service, chat_history, streamed=streamed)

    first, second = service.requests
    assert (first.index, first.tools, first.tool_choice, first.stream) == (
        0,
        ("math-add",),
        "required",
        streamed,
    )
    assert first.messages == [{"role": "user", "content": "What is 1 + 2?"}]
    assert first.history == chat_history.messages
    assert first.body == {}
    assert (second.index, second.tools, second.tool_choice) == (1, (), None)


async def test_a_recorded_request_does_not_change_with_the_history() -> None:
    """What was asked stays as it was when messages are added later."""
    service = ScriptedChatCompletion([say("3")])
    chat_history = asked()
    await ask(service, chat_history)

    chat_history.add_user_message("And 3 + 4?")

    assert len(service.requests[0].messages) == len(service.requests[0].history) == 1


async def test_the_tools_offered_count_as_prompt_tokens(kernel: Kernel) -> None:
    """Offering functions costs tokens, as with a real model."""
    service = ScriptedChatCompletion([say("3"), say("3")])

    without = await ask(service)
    offered = await ask(service, kernel=kernel, behavior=MANUAL)

    assert (
        offered.metadata["usage"].prompt_tokens
        > without.metadata["usage"].prompt_tokens
    )


@both_ways
async def test_metadata_is_merged_over_every_reply(streamed: bool) -> None:
    """A service that reports its iterations is scripted by its metadata, fixed or by request."""
    fixed = ScriptedChatCompletion([say("a")], metadata={"iterations": 4, "id": "mine"})
    counted = ScriptedChatCompletion(
        lambda _: say("a"), metadata=lambda request: {"iterations": request.index + 1}
    )

    message = await ask(fixed, streamed=streamed)
    reported = [
        (await ask(counted, streamed=streamed)).metadata["iterations"] for _ in range(2)
    ]

    assert (message.metadata["iterations"], message.metadata["id"]) == (4, "mine")
    assert message.metadata["usage"] is not None
    assert reported == [1, 2]


async def test_a_stream_carries_extra_metadata_once() -> None:
    """Only the last chunk has it, so that it is counted once."""
    service = ScriptedChatCompletion([say("a longer text")], metadata={"iterations": 4})

    found = await chunks(service)

    assert [chunk.metadata.get("iterations") for chunk in found] == [None] * (
        len(found) - 1
    ) + [4]


@both_ways
async def test_a_request_can_be_held_and_cancelled(streamed: bool) -> None:
    """``before_reply`` blocks a request that is already recorded; cancelled there, it has taken no reply."""
    reached = asyncio.Event()

    async def hold(request: ScriptedRequest) -> None:
        if request.index == 0:
            reached.set()
            await asyncio.Event().wait()

    service = ScriptedChatCompletion([say("the first reply")], before_reply=hold)
    held = asyncio.ensure_future(ask(service, streamed=streamed))
    await reached.wait()
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held

    assert (await ask(service, streamed=streamed)).content == "the first reply"
    assert len(service.requests) == 2


# --- settings ---


@both_ways
async def test_several_responses_with_functions_are_refused(
    streamed: bool, kernel: Kernel
) -> None:
    """As with the OpenAI connector, functions need a single response; nothing is asked."""
    service = ScriptedChatCompletion([say("never")])
    several = ScriptedPromptExecutionSettings(
        function_choice_behavior=MANUAL, number_of_responses=2
    )

    with pytest.raises(
        ServiceInvalidExecutionSettingsError, match="number_of_responses"
    ):
        if streamed:
            await anext(
                service.get_streaming_chat_message_contents(
                    asked(), several, kernel=kernel
                )
            )
        else:
            await service.get_chat_message_contents(asked(), several, kernel=kernel)

    assert service.requests == []


async def test_the_callers_settings_are_left_alone(kernel: Kernel) -> None:
    """Functions are offered through a copy of the settings, general ones or the service's own."""
    service = ScriptedChatCompletion([say("3"), say("3")])
    own = ScriptedPromptExecutionSettings(
        function_choice_behavior=MANUAL, temperature=0.5
    )
    general = PromptExecutionSettings(
        function_choice_behavior=MANUAL, extension_data={"temperature": 0.5}
    )

    await service.get_chat_message_contents(asked(), own, kernel=kernel)
    await service.get_chat_message_contents(asked(), general, kernel=kernel)

    assert (own.tools, own.tool_choice, own.temperature) == (None, None, 0.5)
    assert [request.tools for request in service.requests] == [
        ("math-add",),
        ("math-add",),
    ]


async def test_a_kernel_finds_the_service_by_its_id(kernel: Kernel) -> None:
    """The service is registered like any other, and its model's name stands in what it says."""
    kernel.add_service(
        ScriptedChatCompletion([say("hello")], ai_model_id="tiny", service_id="chat")
    )

    service = kernel.get_service("chat", type=ScriptedChatCompletion)

    assert (await ask(service)).ai_model_id == "tiny"
