"""Requests go the connector's own way as soon as anything inside it is not what our encoding was made for."""

import functools
import inspect
import json
import logging
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.resources.chat.completions import AsyncCompletions
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import (
    AzureChatCompletion,
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.connectors.ai.open_ai.services.open_ai_model_types import (
    OpenAIModelTypes,
)
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    StreamingChatMessageContent,
)
from semantic_kernel.utils.telemetry.model_diagnostics import decorators as diagnostics

from planner_ext import FunctionInvokingChatCompletion
from planner_ext.errors import InvalidReplyError, ServiceCallError
from planner_ext.sk.chat import openai as openai_members
from planner_ext.sk.chat.openai import CALLED, REPLACED, OpenAITransport, is_supported
from planner_ext.sk.chat.round_trip import named_errors
from planner_ext.sk.chat.transport import ChatRequest, GenericTransport
from planner_ext.sk.members import is_own, source_digest
from planner_ext.testing.script import error_body
from planner_ext.testing.server import HttpResponse
from support.openai import Endpoint, openai_service, put
from support.served import asked
from support.values import each_of

SETTINGS = OpenAIChatPromptExecutionSettings


class Counted(GenericTransport):
    """The connector's own way, counting who takes it."""

    taken = 0

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        self.taken += 1
        return await super().ask(request)

    async def stream(
        self, request: ChatRequest
    ) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        self.taken += 1
        async for chunk in super().stream(request):
            yield chunk


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as endpoint:
        yield endpoint


@pytest.fixture
async def service(endpoint: Endpoint) -> AsyncIterator[OpenAIChatCompletion]:
    service = openai_service(endpoint.origin)
    yield service
    await service.client.close()


def request(settings: Any = None) -> ChatRequest:
    history = ChatHistory(system_message="Be brief.")
    history.add_user_message("Hi.")
    return ChatRequest(messages=history.messages, settings=settings or SETTINGS())


async def takes_own_way(service: Any, *, streamed: bool, settings: Any = None) -> bool:
    """Whether a request, which has to be answered either way, goes the connector's own way."""
    own = Counted(service, kernel=None, arguments=None)
    came = await put(
        OpenAITransport(service, own), request(settings), streamed=streamed
    )
    assert "".join(each.content for each in came) == "Hi."
    return own.taken == 1


@each_of("name", REPLACED)
def test_the_methods_that_are_replaced_have_not_changed(name: str) -> None:
    """Semantic Kernel's methods in whose place our encoding works are, in their sources, those that it was written for.

    If this fails, Semantic Kernel has changed: read what the method does now, make the encoding do it too, and put its
    new digest beside the name.
    """
    for kind in (OpenAIChatCompletion, AzureChatCompletion):
        assert is_own(getattr(kind, name), REPLACED[name]), source_digest(
            getattr(kind, name)
        )


@each_of("name", CALLED)
def test_the_methods_that_are_called_have_their_parameters(name: str) -> None:
    """The methods that our encoding calls are there, with the parameters that they are given."""
    for kind in (OpenAIChatCompletion, AzureChatCompletion):
        assert (
            tuple(inspect.signature(getattr(kind, name)).parameters)[
                1 : 1 + len(CALLED[name])
            ]
            == CALLED[name]
        )


def test_the_client_is_as_expected(service: OpenAIChatCompletion) -> None:
    """All members together are as expected; otherwise the faster way would silently be off."""
    assert is_supported(service)


async def test_a_connector_as_it_is_has_its_requests_encoded(
    service: Any, streamed: bool
) -> None:
    """Nothing of the connector's own way is left where all is as expected."""
    assert not await takes_own_way(service, streamed=streamed)


async def test_a_method_that_an_application_overrides_is_called(
    endpoint: Endpoint, streamed: bool
) -> None:
    """A subclass of the connector is the application's own, with each method that it overrides."""

    class Own(OpenAIChatCompletion):
        """An application's."""

    own: Any = Own
    client = AsyncOpenAI(base_url=f"{endpoint.origin}/v1", api_key="any", max_retries=0)
    assert await takes_own_way(own("m", async_client=client), streamed=streamed)
    await client.close()


async def test_a_method_that_was_wrapped_is_called(
    service: Any, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tracing libraries wrap a connector's methods in place; so do tests. Then they are called."""
    for name in REPLACED:
        with monkeypatch.context() as patched:
            patched.setattr(
                OpenAIChatCompletion, name, wrapped(getattr(OpenAIChatCompletion, name))
            )
            assert await takes_own_way(service, streamed=streamed)


def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return method(*arguments, **keywords)

    return wrapper


async def test_a_client_whose_method_was_wrapped_is_called(
    service: Any, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries that watch the openai client see every request, with what is in it, as before: on class and object."""
    with monkeypatch.context() as patched:
        patched.setattr(AsyncCompletions, "create", wrapped(AsyncCompletions.create))
        assert await takes_own_way(service, streamed=streamed)
    monkeypatch.setattr(
        service.client.chat.completions,
        "create",
        wrapped(service.client.chat.completions.create),
    )
    assert await takes_own_way(service, streamed=streamed)


async def test_a_client_of_another_class_is_called(
    endpoint: Endpoint, streamed: bool
) -> None:
    """A subclass of the client may do anything with a request."""

    class Client(AsyncOpenAI):
        """An application's own client."""

    client = Client(base_url=f"{endpoint.origin}/v1", api_key="any", max_retries=0)
    assert await takes_own_way(
        OpenAIChatCompletion("m", async_client=client), streamed=streamed
    )
    await client.close()


def test_a_changed_member_is_noticed(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method with another source, with other arguments, or that is gone, is not taken for the one that we know."""
    changed: list[tuple[str, dict[str, Any]]] = [
        ("CALLED", {"no_such_method": ("response",)})
    ]
    changed += [("REPLACED", {**REPLACED, name: "0" * 16}) for name in REPLACED]
    changed += [
        ("CALLED", {**CALLED, name: ("renamed", *taken[1:])})
        for name, taken in CALLED.items()
    ]
    for table, members in changed:
        with monkeypatch.context() as patched:
            patched.setattr(openai_members, table, members)
            assert not is_supported(service)


def test_a_method_without_a_source_is_not_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where sources cannot be read nothing is assumed, and the log says which method it was."""
    with caplog.at_level(logging.INFO):
        assert not is_own(len, source_digest(len))
    assert "a slower way" in caplog.text


async def test_model_diagnostics_see_the_whole_request(
    service: Any,
    streamed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With Semantic Kernel's diagnostics on, its own way is taken: they log each message of the history, as ever."""
    monkeypatch.setattr(
        diagnostics.MODEL_DIAGNOSTICS_SETTINGS,
        "enable_otel_diagnostics_sensitive",
        True,
    )
    with caplog.at_level(logging.INFO, logger=diagnostics.__name__):
        assert await takes_own_way(service, streamed=streamed)
    assert "Be brief." in caplog.text


class Lean(OpenAIChatPromptExecutionSettings):
    """Settings that write themselves in their own way."""

    def prepare_settings_dict(self, **_: Any) -> dict[str, Any]:
        return {**super().prepare_settings_dict(), "temperature": 0.125}


class Wide(OpenAIChatPromptExecutionSettings):
    """Settings with fields of their own."""

    verbosity: str = "low"
    extra_headers: dict[str, str] | None = None


@pytest.mark.parametrize(
    "settings",
    [Lean(), SETTINGS(extra_body={"messages": [{"role": "user", "content": "Else."}]})],
)
async def test_settings_that_are_more_than_fields_are_written_by_the_connector(
    service: Any, endpoint: Endpoint, settings: Any, streamed: bool
) -> None:
    """Settings that write the whole request in their own way, or messages of their own, do so."""
    assert await takes_own_way(service, streamed=streamed, settings=settings)
    body = endpoint.seen[0][1]
    assert (body.get("temperature"), len(body["messages"])) in ((0.125, 2), (None, 1))


async def test_fields_of_an_applications_own_settings_are_sent(
    service: Any, endpoint: Endpoint, streamed: bool
) -> None:
    """What the client knows is sent, the rest is the client's to refuse."""
    assert not await takes_own_way(
        service, streamed=streamed, settings=Wide(extra_headers={"x-mine": "1"})
    )
    assert endpoint.seen[0][1]["verbosity"] == "low"
    assert "extra_headers" not in endpoint.seen[0][1]


async def test_a_module_that_moved_costs_time_only(
    service: Any,
    kernel: Kernel,
    streamed: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where what our encoding imports is gone, requests go the connector's own way, and the log says so."""
    monkeypatch.setitem(sys.modules, "planner_ext.sk.chat.openai", None)
    settings = SETTINGS(function_choice_behavior=FunctionChoiceBehavior.Auto())
    history = ChatHistory(system_message="Be brief.")
    with caplog.at_level(logging.INFO):
        ours = FunctionInvokingChatCompletion(service)
        answer = await asked(ours, history, kernel, settings, streamed=streamed)
    assert answer.text == "Hi."
    assert "sk.chat.openai" in caplog.text


async def test_another_kind_of_model_is_the_connectors_affair(service: Any) -> None:
    """Only chat completions are encoded."""
    service.ai_model_type = OpenAIModelTypes.TEXT
    assert not is_supported(service)


ERRORS = {
    400: error_body("No.", type="invalid_request_error", code="content_filter"),
    401: error_body("Who?", type="invalid_request_error"),
    422: error_body("Odd.", type="invalid_request_error"),
    503: error_body("Later.", type="server_error"),
    200: {"choices": None},
}


@each_of("status", ERRORS)
async def test_errors_are_the_connectors(
    service: Any, endpoint: Endpoint, status: int, streamed: bool
) -> None:
    """A refusal, a fault, a filtered prompt and an invalid reply raise the same both ways, with the same cause."""
    written = json.dumps(ERRORS[status]).encode()
    endpoint.answer = lambda _: HttpResponse(
        status=status, content_type="application/json", parts=(written,)
    )
    raised: list[BaseException] = []
    own = GenericTransport(service, kernel=None, arguments=None)
    for transport in (OpenAITransport(service, own), own):
        try:
            with named_errors(service):
                came = await put(transport, request(), streamed=streamed)
                assert came == []
        except Exception as error:
            raised.append(error)
    assert len(raised) == (0 if status == 200 and streamed else 2)
    assert len({type(error) for error in raised}) <= 1
    assert len({type(error.__cause__) for error in raised}) <= 1
    if status in (401, 422, 503):
        ours, stock = raised
        assert isinstance(ours, ServiceCallError)
        assert str(ours) == str(stock)


async def test_a_page_instead_of_a_reply_is_named(
    service: Any, endpoint: Endpoint
) -> None:
    """A server that does not speak OpenAI's protocol leads to the error that says so."""
    endpoint.answer = lambda _: HttpResponse(
        status=200, content_type="text/html", parts=(b"<html>",)
    )
    own = GenericTransport(service, kernel=None, arguments=None)
    with pytest.raises(InvalidReplyError, match="base URL"), named_errors(service):
        await put(OpenAITransport(service, own), request(), streamed=False)


async def test_what_cannot_be_encoded_is_refused_by_the_client(
    service: Any, endpoint: Endpoint, streamed: bool
) -> None:
    """A value that is no JSON raises what it always raised, and the next request is whole."""
    own = Counted(service, kernel=None, arguments=None)
    transport = OpenAITransport(service, own)
    odd = request(SETTINGS(extra_body={"set": {1, 2}}))
    with pytest.raises(InvalidReplyError, match="JSON"), named_errors(service):
        await put(transport, odd, streamed=streamed)
    assert own.taken == 1
    await put(transport, request(), streamed=streamed)
    assert (own.taken, len(endpoint.seen[-1][1]["messages"])) == (1, 2)
