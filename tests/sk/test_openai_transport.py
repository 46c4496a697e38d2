"""Our encoding sends what Semantic Kernel's connectors send, and brings back what they bring back."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import (
    AzureChatPromptExecutionSettings,
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    ImageContent,
    TextContent,
)

from planner_ext.sk.chat.openai import OpenAITransport
from planner_ext.sk.chat.transport import ChatRequest, GenericTransport
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.sk.messages import AssistantMessage
from planner_ext.testing import call as call_of
from planner_ext.testing import calls, say
from support.openai import (
    KEY,
    Endpoint,
    Refused,
    azure_service,
    both_ways,
    openai_service,
)
from support.values import each_of

SETTINGS = OpenAIChatPromptExecutionSettings
SCHEMA = {
    "type": "function",
    "function": {"name": "mine", "parameters": {"type": "object", "properties": {}}},
}


class City(BaseModel):
    """What a structured output is asked to be."""

    name: str
    people: int | None = None


def message(role: AuthorRole, *items: Any, **fields: Any) -> ChatMessageContent:
    return ChatMessageContent(role=role, items=[*items], **fields)


def conversation() -> list[ChatMessageContent]:
    """One of each kind of message, with what is awkward to write as JSON."""
    user, assistant, tool = AuthorRole.USER, AuthorRole.ASSISTANT, AuthorRole.TOOL
    picture = ImageContent(data=b"\x89PNG", data_format="base64", mime_type="image/png")
    asked = FunctionCallContent(id="c1", name="t-add", arguments='{"a": 1, "b": 2}')
    parsed = FunctionCallContent(
        id="c2", name="t-echo", arguments={"text": 'é "quoted" \u2028 \x00'}
    )
    return [
        message(AuthorRole.SYSTEM, TextContent(text="Be brief.")),
        message(AuthorRole.DEVELOPER, TextContent(text="Use tools.")),
        message(user, TextContent(text='Grüße 👋 "quoted" \\ \n \x7f'), name="ann"),
        message(
            user,
            TextContent(text="What is this?"),
            picture,
            ImageContent(uri="https://example.org/a.png"),
        ),
        message(user, TextContent(text="one"), TextContent(text="two")),
        message(assistant, asked, parsed),
        message(tool, FunctionResultContent(id="c1", name="t-add", result="3")),
        message(
            tool, FunctionResultContent(id="c2", name="t-echo", result={"as": None})
        ),
        AssistantMessage(role=assistant, items=[TextContent(text="Looking."), asked]),
        message(tool, FunctionResultContent(id="c1", name="t-add", result=3)),
        message(assistant, TextContent(text="")),
        message(user),
    ]


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture(params=["openai", "openai developer", "azure", "azure deployed"])
async def service(
    request: pytest.FixtureRequest, endpoint: Endpoint
) -> AsyncIterator[Any]:
    """Each connector that our encoding is for."""
    kind, _, variant = request.param.partition(" ")
    if kind == "openai":
        service: Any = openai_service(
            endpoint.origin, **({"instruction_role": "developer"} if variant else {})
        )
    else:
        service = azure_service(endpoint.origin, deployed=bool(variant))
    yield service
    await service.client.close()


def offered(
    kernel: Kernel, *schemas: dict[str, Any], included: list[str] | None = None
) -> ToolSet:
    filters: Any = None if included is None else {"included_functions": included}
    return ToolSet(
        kernel, FunctionChoiceBehavior.Auto(filters=filters), SETTINGS(tools=[*schemas])
    )


SETTINGS_OF_EACH_KIND = {
    "none": SETTINGS(),
    "everything": SETTINGS(
        temperature=0.5,
        top_p=1,
        max_completion_tokens=9,
        seed=3,
        stop=["\n"],
        user="ann",
        logit_bias={7: 1.5},
        metadata={"a": "b"},
        store=False,
        parallel_tool_calls=True,
        reasoning_effort="low",
        ai_model_id="model-b",
    ),
    "extra_body": SETTINGS(
        extra_body={"top_k": 5, "temperature": 0.1, "deep": {"a": [1]}}, temperature=0.9
    ),
    "extra_body_tools": SETTINGS(extra_body={"tools": [SCHEMA]}),
    "json": SETTINGS(response_format={"type": "json_object"}),
    "model": SETTINGS(response_format=City),
    "schema": SETTINGS(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {}},
        }
    ),
    "own_tools": SETTINGS(
        tools=[SCHEMA], tool_choice="auto", parallel_tool_calls=False
    ),
    "stale": SETTINGS(messages=[{"role": "user", "content": "old"}], stream=True),
    "azure": AzureChatPromptExecutionSettings(
        extra_body={"data_sources": [{"type": "x"}]}
    ),
}


@each_of("kind", SETTINGS_OF_EACH_KIND)
async def test_settings_and_functions_are_sent_as_the_connector_sends_them(
    kind: str, endpoint: Endpoint, kernel: Kernel
) -> None:
    """Every setting, with functions offered and without, beside the caller's own schemas: the bodies are equal."""
    service, settings = (
        openai_service(endpoint.origin),
        SETTINGS_OF_EACH_KIND[kind].model_copy(deep=True),
    )
    for choice in (None, "auto", "required", "none"):
        request = ChatRequest(
            messages=conversation()[:3],
            settings=settings,
            choice=choice,
            offered=None if choice is None else offered(kernel, SCHEMA),
        )
        for streamed in (False, True):
            await both_ways(
                service, request, endpoint, streamed=streamed, kernel=kernel
            )
    assert settings == SETTINGS_OF_EACH_KIND[kind]
    await service.client.close()


async def test_what_goes_out_and_comes_back_is_what_the_connector_makes_of_it(
    service: Any, endpoint: Endpoint, streamed: bool
) -> None:
    """Bodies of all kinds of messages, replies, chunks, their metadata and the client's objects in them are equal."""
    request = ChatRequest(messages=conversation(), settings=SETTINGS())
    for reply in (
        say("Grüße."),
        calls(call_of("t-add", {"a": 1}), call_of("t-echo"), text="Looking."),
    ):
        endpoint.reply = reply
        ours, stock = await both_ways(service, request, endpoint, streamed=streamed)
        assert [each.model_dump() for each in ours] == [
            each.model_dump() for each in stock
        ]
        assert [each.inner_content for each in ours] == [
            each.inner_content for each in stock
        ]
        assert [type(each.inner_content) for each in ours] == [
            type(each.inner_content) for each in stock
        ]
        assert [each.model_fields_set for each in ours] == [
            each.model_fields_set for each in stock
        ]
    assert service.total_tokens == (0 if streamed else 4 * 5)


async def test_a_request_has_the_headers_that_the_client_gives_it(
    endpoint: Endpoint, streamed: bool
) -> None:
    """Authentication, the application's headers, content type and the client's own are the same both ways."""
    sent: list[dict[str, str]] = []

    async def note(request: Any) -> None:
        sent.append(
            {
                k: v
                for k, v in request.headers.items()
                if k not in ("content-length", "x-stainless-async")
            }
        )

    client = AsyncOpenAI(
        base_url=f"{endpoint.origin}/v1",
        api_key=KEY,
        organization="org",
        default_headers={"x-app": "mine"},
        http_client=DefaultAsyncHttpxClient(event_hooks={"request": [note]}),
    )
    service = OpenAIChatCompletion("model-a", async_client=client)
    await both_ways(
        service,
        ChatRequest(messages=conversation(), settings=SETTINGS()),
        endpoint,
        streamed=streamed,
    )
    ours, stock = sent
    assert ours.pop("idempotency-key", "") != KEY
    stock.pop("idempotency-key", "")
    assert ours == stock
    assert ours["authorization"] == f"Bearer {KEY}"
    await client.close()


async def test_a_growing_conversation_is_sent_whole(endpoint: Endpoint) -> None:
    """Messages that were added since the last request are sent after those before, each once."""
    service = openai_service(endpoint.origin)
    messages: list[ChatMessageContent] = []
    transport, stock = (
        OpenAITransport(service, Refused()),
        GenericTransport(service, kernel=Kernel(), arguments=None),
    )
    for added in conversation():
        messages.append(added)
        request = ChatRequest(messages=messages, settings=SETTINGS())
        for way in (transport, stock):
            await way.ask(request)
        assert endpoint.seen[-2] == endpoint.seen[-1]
    await service.client.close()


async def test_another_list_is_another_conversation(endpoint: Endpoint) -> None:
    """What was kept of one list is not sent for another, nor for the same one after it was shortened."""
    service = openai_service(endpoint.origin)
    transport = OpenAITransport(service, Refused())
    messages = conversation()
    for sent in (messages, [messages[0]], messages, []):
        await transport.ask(ChatRequest(messages=sent, settings=SETTINGS()))
        assert len(endpoint.seen[-1][1]["messages"]) == len(sent)
    del messages[2:]
    await transport.ask(ChatRequest(messages=messages, settings=SETTINGS()))
    assert len(endpoint.seen[-1][1]["messages"]) == 2
    await service.client.close()


async def test_other_functions_are_other_schemas(
    endpoint: Endpoint, kernel: Kernel
) -> None:
    """Schemas are kept for as long as the same functions are offered, and no longer."""
    service = openai_service(endpoint.origin)
    transport = OpenAITransport(service, Refused())
    both = offered(kernel)
    for tools in (
        both,
        offered(kernel, included=["t-echo"]),
        offered(kernel, SCHEMA),
        both,
    ):
        await transport.ask(
            ChatRequest(
                messages=conversation(),
                settings=SETTINGS(),
                choice="auto",
                offered=tools,
            )
        )
        names = [tool["function"]["name"] for tool in endpoint.seen[-1][1]["tools"]]
        assert names == [*tools.functions, *tools.schema_only]
    await service.client.close()


async def test_a_stream_that_is_left_gives_its_connection_back(
    endpoint: Endpoint,
) -> None:
    """Leaving a stream early closes the response."""
    endpoint.reply = say("A long story. " * 50)
    service = openai_service(endpoint.origin)
    transport = OpenAITransport(service, Refused())
    stream = transport.stream(ChatRequest(messages=conversation(), settings=SETTINGS()))
    chunk = await anext(stream)
    assert chunk.choice_index == 0
    await stream.aclose()
    history = ChatHistory()
    history.add_user_message("Still there?")
    endpoint.reply = say("Yes.")
    (answer,) = await service.get_chat_message_contents(history, SETTINGS())
    assert answer.content == "Yes."
    await service.client.close()
