"""Whole runs through Semantic Kernel's connectors and their SDKs, against servers that speak each provider's API."""

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import (
    ApprovalSettings,
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolUseSession,
)
from planner_ext.durable.options import is_final
from planner_ext.engine.document import dump_message
from planner_ext.errors import (
    InvalidReplyError,
    PlannerInvalidConfigurationError,
    ServiceCallError,
)
from planner_ext.events import RequestFailed, ResultReady
from planner_ext.iteration import Usage
from planner_ext.session import AutomaticToolUseConfig
from planner_ext.sk.chat.prices import price_of
from planner_ext.sk.messages import read_usage, text_of
from support.connectors import (
    CACHED,
    COMPLETION,
    PROMPT,
    Anthropic,
    Api,
    Bedrock,
    Chat,
    Google,
    Mistral,
    Ollama,
    Turn,
)
from support.values import each_of

# google-genai derives from a class of aiohttp that says it should not be derived from.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Inheritance class AiohttpClientSession:DeprecationWarning"
)


@dataclass
class Tools:
    """A plugin ``t`` whose first call ends after the second, so that results come in another order than calls."""

    seen: list[int] = field(default_factory=list)

    @kernel_function(description="Doubles a number.")
    async def double(self, n: int) -> str:
        self.seen.append(n)
        return f"{n} doubled is {2 * n}"


def anthropic(api: Api, stack: AsyncExitStack) -> ChatCompletionClientBase:
    sdk = pytest.importorskip("anthropic", reason="the anthropic SDK is not installed")
    from semantic_kernel.connectors.ai.anthropic import AnthropicChatCompletion

    client = sdk.AsyncAnthropic(api_key="any", base_url=api.url, max_retries=0)
    stack.push_async_callback(client.close)
    return AnthropicChatCompletion(
        "claude-sonnet-4-5", api_key="any", async_client=client
    )


def mistral(api: Api, stack: AsyncExitStack) -> ChatCompletionClientBase:
    sdk = pytest.importorskip("mistralai", reason="the mistralai SDK is not installed")
    from semantic_kernel.connectors.ai.mistral_ai import MistralAIChatCompletion

    client = sdk.Mistral(api_key="any", server_url=api.url)
    stack.push_async_exit(client)
    plain = client.chat.stream_async

    async def stream_async(**request: Any) -> Any:
        """Return the stream as the generator that the connector takes alone, see the test of the connector as it is."""
        response = await plain(**request)
        return (chunk async for chunk in response)

    client.chat.stream_async = stream_async
    return MistralAIChatCompletion(
        "mistral-large-latest", api_key="any", async_client=client
    )


def google(api: Api, stack: AsyncExitStack) -> ChatCompletionClientBase:
    sdk = pytest.importorskip(
        "google.genai", reason="the google-genai SDK is not installed"
    )
    from semantic_kernel.connectors.ai.google.google_ai import GoogleAIChatCompletion

    patched = stack.enter_context(pytest.MonkeyPatch.context())
    # After a refused connection the SDK waits for one second, and for up to nine more.
    dice = SimpleNamespace(randint=lambda *_: -1)
    patched.setattr("google.genai._api_client.random", dice)
    client = sdk.Client(api_key="any", http_options={"base_url": api.url})
    stack.callback(client.close)
    stack.push_async_callback(client.aio.aclose)
    return GoogleAIChatCompletion("gemini-2.5-flash", api_key="any", client=client)


def ollama(api: Api, stack: AsyncExitStack) -> ChatCompletionClientBase:
    sdk = pytest.importorskip("ollama", reason="the ollama SDK is not installed")
    from semantic_kernel.connectors.ai.ollama import OllamaChatCompletion

    client = sdk.AsyncClient(host=api.url)
    stack.push_async_callback(client._client.aclose)
    return OllamaChatCompletion(ai_model_id="llama3.2", client=client)


def bedrock(api: Api, stack: AsyncExitStack) -> ChatCompletionClientBase:
    sdk = pytest.importorskip("boto3", reason="the boto3 SDK is not installed")
    from botocore.config import Config
    from semantic_kernel.connectors.ai.bedrock import BedrockChatCompletion

    where = {
        "region_name": "us-east-1",
        "aws_access_key_id": "any",
        "aws_secret_access_key": "any",
    }
    once = Config(retries={"total_max_attempts": 1})
    client = sdk.client("bedrock-runtime", endpoint_url=api.url, config=once, **where)
    stack.callback(client.close)
    return BedrockChatCompletion(
        "anthropic.claude-3-5-sonnet-20240620-v1:0",
        runtime_client=client,
        client=client,
    )


def azure(api: Api, stack: AsyncExitStack) -> ChatCompletionClientBase:
    sdk = pytest.importorskip(
        "azure.ai.inference.aio", reason="the azure-ai-inference SDK is not installed"
    )
    from azure.core.credentials import AzureKeyCredential
    from semantic_kernel.connectors.ai.azure_ai_inference import (
        AzureAIInferenceChatCompletion,
    )

    client = sdk.ChatCompletionsClient(
        endpoint=api.url, credential=AzureKeyCredential("any"), retry_total=0
    )
    stack.push_async_callback(client.close)
    return AzureAIInferenceChatCompletion("Phi-4", client=client)


@dataclass(frozen=True)
class Case:
    """A connector, the API that its SDK speaks, and what can be known of one reply's usage."""

    api: type[Api]
    make: Callable[[Api, AsyncExitStack], ChatCompletionClientBase]
    cached: int = 0

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=PROMPT,
            completion_tokens=COMPLETION,
            cached_tokens=self.cached,
        )


CASES = {
    "anthropic": Case(Anthropic, anthropic, CACHED),
    "azure": Case(Chat, azure),
    "bedrock": Case(Bedrock, bedrock, CACHED),
    "google": Case(Google, google, CACHED),
    "mistral": Case(Mistral, mistral),
    "ollama": Case(Ollama, ollama),
}

CALLS = Turn(calls=(("t-double", {"n": 4}), ("t-double", {"n": 5})))
TEXT = Turn(text="Eight and ten.")


@dataclass
class World:
    api: Api
    service: ChatCompletionClientBase
    kernel: Kernel
    tools: Tools
    case: Case


@pytest.fixture(params=CASES)
async def connect(
    request: pytest.FixtureRequest,
) -> AsyncIterator[Callable[..., World]]:
    case = CASES[request.param]
    async with AsyncExitStack() as stack:

        def connect(*turns: Turn, **options: Any) -> World:
            api = stack.enter_context(case.api(turns=turns, **options))
            tools, kernel = Tools(), Kernel()
            kernel.add_plugin(tools, "t")
            service = case.make(api, stack)
            kernel.add_service(service)
            return World(api, service, kernel, tools, case)

        yield connect


@pytest.fixture(params=[False, True], ids=["plain", "streamed"])
def streamed(request: pytest.FixtureRequest) -> bool:
    return request.param


async def ask(
    world: World, history: ChatHistory, *, streamed: bool, **options: Any
) -> tuple[str, dict[str, Any]]:
    """Ask a service around the connector; give its text, and the metadata of its last message."""
    service = FunctionInvokingChatCompletion(world.service, **options)
    return await ask_service(world, service, history, streamed=streamed)


async def ask_service(
    world: World,
    service: FunctionInvokingChatCompletion,
    history: ChatHistory,
    *,
    streamed: bool,
) -> tuple[str, dict[str, Any]]:
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    if not streamed:
        message = await service.get_chat_message_content(
            history, settings, kernel=world.kernel
        )
        assert message is not None
        return text_of(message), message.metadata
    stream = service.get_streaming_chat_message_content(
        history, settings, kernel=world.kernel
    )
    chunks = [chunk async for chunk in stream if chunk is not None]
    text = "".join(str(chunk) for chunk in chunks if chunk.role != AuthorRole.TOOL)
    return text, chunks[-1].metadata


def asked() -> ChatHistory:
    history = ChatHistory()
    history.add_system_message("You double numbers.")
    history.add_user_message("Double 4 and 5.")
    return history


async def test_a_service_runs_calls_and_says_what_the_server_said(
    connect: Callable[..., World], streamed: bool
) -> None:
    """Calls run, results are sent back in call order under the names offered, and the usage is what was reported."""
    world, history = connect(CALLS, TEXT), asked()
    text, metadata = await ask(
        world, history, streamed=streamed, strict_finish_reason=True
    )
    assert (text, world.api.refused) == (TEXT.text, [])
    assert sorted(world.tools.seen) == [4, 5]
    assert metadata["iterations"] == 2
    assert metadata["tool_calls"] == 2
    assert metadata["status"] == "answered"
    assert read_usage(metadata["usage"]) == world.case.usage + world.case.usage
    results = [
        str(i.result)
        for m in history.messages
        for i in m.items
        if isinstance(i, FunctionResultContent)
    ]
    assert results == ["4 doubled is 8", "5 doubled is 10"]
    sent = json.dumps(world.api.bodies[-1])
    assert len(re.findall(r'"t(-|__)double"', sent)) == sent.count('double"') >= 3
    assert -1 < sent.find("4 doubled is 8") < sent.find("5 doubled is 10")


async def test_a_planner_runs_to_its_answer(
    connect: Callable[..., World], streamed: bool
) -> None:
    """The planner's usage is what the server reported, with a history that has system messages of its own."""
    world = connect(CALLS, CALLS, TEXT)
    history = asked()
    history.add_system_message("Be brief.")
    planner = FunctionCallingStepwisePlanner(
        None, FunctionCallingStepwisePlannerOptions(plan=False)
    )
    if streamed:
        stream = planner.invoke_stream(
            world.kernel, "Double 4 and 5, twice.", chat_history=history
        )
        *_, last = [event async for event in stream]
        assert isinstance(last, ResultReady)
        result = last.result
    else:
        result = await planner.invoke(
            world.kernel, "Double 4 and 5, twice.", chat_history=history
        )
    assert result.status == "answered"
    assert result.final_answer == TEXT.text
    assert world.api.refused == []
    assert (result.iterations, result.tool_calls) == (3, 4)
    used, one = result.usage, world.case.usage
    assert used.prompt_tokens == 3 * one.prompt_tokens
    assert used.completion_tokens == 3 * one.completion_tokens
    assert used.cached_tokens == 3 * one.cached_tokens
    assert used.estimated_tokens == 0
    assert "Be brief." in str(world.api.bodies[-1])


@each_of("last_trip", ["withdraw", "none"])
async def test_a_run_that_does_not_stop_ends_with_a_forced_answer(
    connect: Callable[..., World], streamed: bool, last_trip: Any
) -> None:
    """The last trip offers no function that can be called, in a form that the provider takes, and brings the answer."""
    world = connect(CALLS)
    budget = Budget(max_iterations=3, last_trip=last_trip)
    text, metadata = await ask(world, asked(), streamed=streamed, budget=budget)
    assert (text, world.api.refused) == ("That is all.", [])
    assert (metadata["status"], metadata["limit"]) == (
        "limit_reached",
        "max_iterations",
    )
    assert (len(world.api.bodies), metadata["tool_calls"]) == (3, 4)


async def test_a_token_limit_fires(
    connect: Callable[..., World], streamed: bool
) -> None:
    """A limit on tokens ends the run after the requests that take them, and the one forced answer."""
    world = connect(CALLS)
    budget = Budget(max_iterations=40, max_total_tokens=2 * (PROMPT + COMPLETION))
    text, metadata = await ask(world, asked(), streamed=streamed, budget=budget)
    assert text == "That is all."
    assert metadata["status"] == "limit_reached"
    assert metadata["limit"] == "max_total_tokens"
    assert (len(world.api.bodies), world.api.refused) == (3, [])


@pytest.mark.parametrize("connect", ["azure", "mistral", "ollama"], indirect=True)
async def test_a_token_limit_fires_where_the_usage_is_not_reported(
    connect: Callable[..., World], streamed: bool
) -> None:
    """What a server does not say, all or (Ollama, of a prompt in its cache) half, is estimated and so called."""
    world = connect(CALLS, reports=False)
    budget = Budget(max_iterations=40, max_total_tokens=300)
    text, metadata = await ask(world, asked(), streamed=streamed, budget=budget)
    assert text == "That is all."
    assert metadata["status"] == "limit_reached"
    assert metadata["limit"] == "max_total_tokens"
    assert 2 <= len(world.api.bodies) <= 10
    usage, reported = (
        metadata["usage"],
        COMPLETION * len(world.api.bodies) * isinstance(world.api, Ollama),
    )
    assert (
        usage.prompt_tokens + usage.completion_tokens - usage.estimated_tokens
        == reported
    )


async def test_a_paused_run_is_resumed_from_its_json(
    connect: Callable[..., World], streamed: bool
) -> None:
    """What a checkpoint keeps of a connector's messages is enough for the provider to take them again."""
    world, history = connect(CALLS, TEXT), asked()
    service = FunctionInvokingChatCompletion(
        world.service, check_for_intervention=lambda call: True
    )
    _, metadata = await ask_service(world, service, history, streamed=streamed)
    assert (metadata["status"], world.tools.seen) == ("paused", [])
    approved = {call["id"]: Approve() for call in metadata["pending"]}
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    message = await service.resume(
        ChatHistory(), metadata["checkpoint"], approved, settings, kernel=world.kernel
    )
    assert text_of(message) == TEXT.text
    assert world.api.refused == []
    assert world.tools.seen == [4, 5]
    assert read_usage(message.metadata["usage"]) == world.case.usage + world.case.usage


def from_elsewhere() -> ChatHistory:
    """A history of another provider's model, with everything in it that one of the providers here refuses."""

    def asks(call_id: str, *texts: str) -> ChatMessageContent:
        call = FunctionCallContent(id=call_id, name="t-double", arguments='{"n": 7}')
        again = call.model_copy(update={"id": f"{call_id}.2"})
        items: list[Any] = [*(TextContent(text=text) for text in texts), call, again]
        return ChatMessageContent(role=AuthorRole.ASSISTANT, items=items)

    def says(role: str, *texts: str) -> ChatMessageContent:
        items: list[Any] = [TextContent(text=text) for text in texts]
        return ChatMessageContent(role=AuthorRole(role), items=items)

    def results(call_id: str, *results: str) -> list[ChatMessageContent]:
        contents = [
            FunctionResultContent(id=each, name="t-double", result=result)
            for each, result in zip((call_id, f"{call_id}.2"), results, strict=True)
        ]
        return [
            ChatMessageContent(role=AuthorRole.TOOL, items=[content])
            for content in contents
        ]

    return ChatHistory(
        messages=[
            says("developer", "Text 1."),
            says("assistant", "Text 2."),
            says("user", "Text 3.", "Text 4."),
            asks("call|0", " "),
            *results("call|0", "Result 1.", ""),
            says("user", "Text 5."),
            says("assistant", "Text 6."),
            asks("call|0", "Text 7."),  # the id again, as some servers number theirs
            *results("call|0", "Result 2.", "Result 3."),
            says("assistant", " "),
            says("system", "Text 8."),
            says("user", " "),
            says("assistant", "Text 9."),
        ]
    )


async def test_a_history_of_another_provider_is_accepted_and_sent_whole(
    connect: Callable[..., World],
) -> None:
    """The provider accepts it, every text and result reaches it, and the caller's history stays as it was."""
    world, history = connect(CALLS, TEXT), from_elsewhere()
    before = history.model_dump_json()
    session = ToolUseSession(world.kernel, initial_prompts=history.messages)
    assert (await session.prompt("Text 10."), world.api.refused) == (TEXT.text, [])
    assert history.model_dump_json() == before
    for body in map(str, world.api.bodies):
        assert all(
            f"{name}." in body
            for name in (*(f"Text {n}" for n in range(1, 11)), "Result 1", "Result 2")
        )
    first, second = (
        body.get("messages") or body["contents"] for body in world.api.bodies
    )
    assert second[: len(first)] == first  # a prompt cache keeps it
    kept = session.history().messages[: len(history)]
    assert ChatHistory(messages=kept).model_dump_json() == before


@pytest.mark.parametrize("connect", ["google", "mistral"], indirect=True)
async def test_a_request_may_end_with_an_assistants_message(
    connect: Callable[..., World],
) -> None:
    """Where a call was denied and removed, nothing was said by the user since: the provider accepts that, too."""
    world = connect(Turn(text="I double.", calls=CALLS.calls), TEXT)
    service = FunctionInvokingChatCompletion(
        world.service,
        approval=ApprovalSettings(on_denial="reask"),
        pre_invoke=lambda *_: False,
    )
    text, metadata = await ask_service(world, service, asked(), streamed=False)
    assert text == TEXT.text
    assert metadata["status"] == "answered"
    assert world.api.refused == []


@pytest.mark.parametrize("connect", ["bedrock", "google", "mistral"], indirect=True)
async def test_results_that_a_caller_appends_are_accepted(
    connect: Callable[..., World],
) -> None:
    """An open loop: the calls are the caller's to run, and the next prompt may come right after their results."""
    world = connect(CALLS, TEXT, TEXT)
    session = ToolUseSession(
        world.kernel, tool_use_config=AutomaticToolUseConfig(enabled=False)
    )
    assert await session.prompt("Double 4 and 5.") == ""
    results = [
        FunctionResultContent(id=call.id, name="t-double", result=result)
        for call, result in zip(session.pending, ("eight", ""), strict=True)
    ]
    session.append(
        [ChatMessageContent(role=AuthorRole.TOOL, items=[result]) for result in results]
    )
    assert await session.prompt("And now?") == TEXT.text
    assert (await session.prompt("Thanks."), world.api.refused) == (TEXT.text, [])


@pytest.mark.parametrize("connect", ["bedrock"], indirect=True)
async def test_a_function_without_a_description_is_offered(
    connect: Callable[..., World],
) -> None:
    """A plugin that describes nothing is offered by its name, which the SDK takes."""
    world = connect(Turn(calls=(("t-now", {}),)), TEXT)

    @kernel_function(name="now")
    def now() -> str:
        return "noon"

    world.kernel.add_function("t", now)
    text, metadata = await ask(world, asked(), streamed=False)
    assert text == TEXT.text
    assert metadata["tool_calls"] == 1
    assert world.api.refused == []


async def test_an_empty_reply_does_not_end_a_conversation(
    connect: Callable[..., World],
) -> None:
    """A model that says nothing is asked again with the history that it left."""
    world, history = connect(Turn(), TEXT), asked()
    _, metadata = await ask(world, history, streamed=True)
    assert metadata["status"] == "incomplete"
    history.add_assistant_message("")
    history.add_user_message("Well?")
    assert (await ask(world, history, streamed=True))[0] == TEXT.text
    assert world.api.refused == []


@pytest.mark.parametrize("connect", ["anthropic", "bedrock", "ollama"], indirect=True)
async def test_a_request_without_functions_may_follow_calls(
    connect: Callable[..., World],
) -> None:
    """Functions that the caller withholds from a request are withheld in a form that the provider takes."""
    world, history = connect(TEXT), from_elsewhere()
    history.add_user_message("So?")
    service = FunctionInvokingChatCompletion(world.service)
    for behavior in (None, BoundedFunctionChoiceBehavior.NoneInvoke()):
        settings = service.instantiate_prompt_execution_settings(
            function_choice_behavior=behavior
        )
        message = await service.get_chat_message_content(
            history, settings, kernel=world.kernel
        )
        assert message is not None
        assert (text_of(message), world.api.refused) == (TEXT.text, [])


@pytest.mark.parametrize("connect", ["google"], indirect=True)
async def test_thoughts_are_not_kept_as_text(
    connect: Callable[..., World], streamed: bool
) -> None:
    """What Gemini thinks aloud is neither in the answer nor in the history."""
    world, history = (
        connect(Turn(thought="Four, so eight.", calls=CALLS.calls), TEXT),
        asked(),
    )
    text, _ = await ask(world, history, streamed=streamed)
    assert (text, world.api.refused) == (TEXT.text, [])
    assert "so eight" not in history.model_dump_json()


@pytest.mark.parametrize("connect", ["google"], indirect=True)
async def test_a_stream_may_end_with_the_usage_alone(
    connect: Callable[..., World],
) -> None:
    """Semantic Kernel raises on Gemini's last chunk without candidates; the reply before it is whole."""
    world = connect(CALLS, TEXT, usage_last=True)
    text, metadata = await ask(world, asked(), streamed=True)
    assert (text, metadata["status"]) == (TEXT.text, "answered")


@pytest.mark.parametrize("connect", ["mistral"], indirect=True)
async def test_settings_that_a_connector_does_not_take_are_named(
    connect: Callable[..., World],
) -> None:
    """Those of OpenAI's class may hold values that another class refuses: at every door, before anything is sent."""
    world = connect(TEXT)
    service = FunctionInvokingChatCompletion(world.service)
    refused = pytest.raises(
        PlannerInvalidConfigurationError,
        match=r"MistralAIChat.* \(presence_penalty: Input should",
    )
    for behavior in (None, BoundedFunctionChoiceBehavior.Auto()):
        settings = OpenAIChatPromptExecutionSettings(
            presence_penalty=-1, function_choice_behavior=behavior
        )
        with refused:
            await service.get_chat_message_content(
                asked(), settings, kernel=world.kernel
            )
    arguments = KernelArguments(
        settings=OpenAIChatPromptExecutionSettings(presence_penalty=-1)
    )
    with refused:
        await FunctionCallingStepwisePlanner(None).invoke(
            world.kernel, "Double 4.", arguments
        )
    assert world.api.bodies == []


async def test_a_request_without_a_connection_is_not_charged(
    connect: Callable[..., World],
) -> None:
    """Each SDK has an error of its own for a server that is not there; it costs no round trip."""
    world = connect(TEXT)
    world.api.__exit__()
    with pytest.raises(ServiceCallError) as caught:
        await ask(world, asked(), streamed=False)
    assert caught.value.checkpoint is not None
    *_, failed = caught.value.checkpoint.facts
    assert isinstance(failed, RequestFailed)
    assert failed.usage.iterations == 0


@pytest.mark.parametrize("status", [429, 503])
async def test_a_busy_endpoint_is_known_by_its_status(
    connect: Callable[..., World], streamed: bool, status: int
) -> None:
    """Each SDK has a place of its own for the status and for ``Retry-After``; a kept run waits for the endpoint."""
    world = connect(TEXT, status=status)
    with pytest.raises(ServiceCallError) as caught:
        await ask(world, asked(), streamed=streamed)
    assert caught.value.outage is not None
    assert caught.value.outage[1] == 7.0
    assert not is_final(caught.value)


async def test_a_refused_key_is_final(connect: Callable[..., World]) -> None:
    """No retry cures it, whatever SDK says so."""
    world = connect(TEXT, status=401)
    with pytest.raises(ServiceCallError) as caught:
        await ask(world, asked(), streamed=False)
    assert caught.value.outage is None
    assert is_final(caught.value)


async def test_a_reply_that_was_cut_is_incomplete(
    connect: Callable[..., World], streamed: bool
) -> None:
    """A reply that ran out of tokens ends the run incomplete, and no call in it runs."""
    world = connect(Turn(text="Eight and", cut=True))
    _, metadata = await ask(world, asked(), streamed=streamed)
    assert metadata["status"] == "incomplete"
    world = connect(Turn(calls=CALLS.calls, cut=True))
    _, metadata = await ask(world, asked(), streamed=streamed)
    assert (metadata["status"], world.tools.seen) == ("incomplete", [])


async def test_a_request_without_functions_says_its_usage_too(
    connect: Callable[..., World],
) -> None:
    """Where a service only passes a request on, its metadata can still be read and written as JSON."""
    world = connect(TEXT)
    service = FunctionInvokingChatCompletion(world.service)
    message = await service.get_chat_message_content(
        asked(), service.instantiate_prompt_execution_settings()
    )
    assert message is not None
    assert (text_of(message), read_usage(message.metadata["usage"])) == (
        TEXT.text,
        world.case.usage,
    )
    assert "usage" in json.loads(json.dumps(dump_message(message)))["metadata"]


async def test_the_price_list_knows_the_provider_by_its_connector(
    connect: Callable[..., World],
) -> None:
    """A model is looked up at its connector's provider, also where its URL says nothing; Ollama's has no price."""
    world = connect(TEXT)
    settings = world.service.instantiate_prompt_execution_settings()
    if isinstance(world.api, Ollama):
        with pytest.raises(
            PlannerInvalidConfigurationError,
            match="needs a price for the model 'llama3",
        ):
            price_of(world.service, settings, None, 1.0)
        return
    price = price_of(world.service, settings, None, 1.0)
    assert price is not None
    assert price("any", world.case.usage) > 0


SEVERAL: dict[str, dict[str, Any]] = {
    "azure": {"extra_parameters": {"n": 2}},
    "google": {"candidate_count": 2},
    "mistral": {"n": 2},
}


@pytest.mark.parametrize("connect", SEVERAL, indirect=True)
async def test_several_answers_are_refused_where_functions_are_offered(
    connect: Callable[..., World],
) -> None:
    """Under each connector's name for their number: the calls of alternatives do not form a batch."""
    world = connect(CALLS)
    options = next(SEVERAL[name] for name, case in CASES.items() if case is world.case)
    service = FunctionInvokingChatCompletion(world.service)
    behavior = BoundedFunctionChoiceBehavior.Auto()
    settings = service.instantiate_prompt_execution_settings(
        function_choice_behavior=behavior, **options
    )
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="must be 1 where functions are offered; got 2",
    ):
        await service.get_chat_message_content(asked(), settings, kernel=world.kernel)
    assert world.api.bodies == []


async def test_mistral_as_it_is_streams_nothing() -> None:
    """Semantic Kernel 1.45 takes no stream of the SDKs that it allows: named, and noticed here once it does."""
    async with AsyncExitStack() as stack:
        api = stack.enter_context(Mistral(turns=(TEXT,)))
        service: Any = mistral(api, stack)
        del service.async_client.chat.stream_async
        kernel = Kernel()
        kernel.add_plugin(Tools(), "t")
        world = World(api, service, kernel, Tools(), CASES["mistral"])
        with pytest.raises(InvalidReplyError, match="a stream without any choice"):
            await ask(world, asked(), streamed=True)
