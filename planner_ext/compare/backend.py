"""The model of a run, scripted or real, and its functions; both note what they see."""

import json
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import httpx
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    StreamingChatMessageContent,
)
from semantic_kernel.filters import FunctionInvocationContext
from semantic_kernel.functions import KernelArguments

from planner_ext.compare.desk import Desk, Observed, desk_plugin
from planner_ext.compare.scenarios import Scenario
from planner_ext.core.values import Usage, frozen
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.chat.transport import kernel_with_service, select_service
from planner_ext.sk.messages import read_usage
from planner_ext.testing import (
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    say,
)
from planner_ext.testing.connector import OuterConnector
from planner_ext.testing.rules import find_violation
from planner_ext.testing.script import completion_body
from planner_ext.testing.server import HttpResponse, json_response


@frozen
class Live:
    """A real model in place of the scripted one. Functions really run, once for each option.

    Attributes:
        kernel: The user's own, with its service; None uses the scripts' functions, and
            requires ``service``.
        service: The connector; None uses the one that the kernel selects.
        goal: Given to each option once; None uses the goals of the scripts.
    """

    kernel: Kernel | None = None
    service: ChatCompletionClientBase | None = None
    goal: str | None = None


@frozen
class Place:
    """Where one run finds its model and its functions.

    Attributes:
        model_url: The base URL of the scripted model, "" for a real one.
        desk_url: The desk's address, "" for the functions of the user's kernel.
    """

    kernel: Kernel
    service: ChatCompletionClientBase
    model_url: str
    desk_url: str


class Backend:
    """Answers the requests and runs the functions of all runs.

    Attributes:
        name: Who answers, in words.
        live: Whether a real model does.
    """

    def __init__(
        self,
        live: Live | None,
        client: AsyncOpenAI,
        desk: Desk,
        http: httpx.AsyncClient,
    ) -> None:
        self._kernel = live.kernel if live is not None else None
        self._client = client
        self._desk = desk
        self._http = http
        self.live = live is not None
        self.name = "a scripted model behind real HTTP on this machine"
        self._service: ChatCompletionClientBase | None = None
        if live is not None:
            service = (
                live.service
                or select_service(self._kernel or Kernel(), None, KernelArguments())[0]
            )
            while isinstance(service, FunctionInvokingChatCompletion):
                # Loops are compared, so a service with its own loop is unwrapped.
                service = service.inner
            self.name = f"{service.ai_model_id} at {service.service_url() or type(service).__name__}"
            self._service = service

    @contextmanager
    def place_for(self, scenario: Scenario, observed: Observed) -> Generator[Place]:
        """Yield the place of one run."""
        inner = self._service
        server = _ForgivingServer(scenario, observed)
        url = ""
        with server if inner is None else nullcontext():
            if inner is None:
                url = server.url
                client = self._client.with_options(base_url=url)
                inner = OpenAIChatCompletion(
                    ai_model_id="scripted", service_id="scripted", async_client=client
                )
            service = _CountingChatCompletion(
                ai_model_id=inner.ai_model_id,
                service_id=inner.service_id,
                instruction_role=inner.instruction_role,
                inner=inner,
                observed=observed if self._service is not None else None,
                reports=scenario.reports,
            )
            desk_url = (
                "" if self._kernel is not None else self._desk.address_for(observed)
            )
            kernel = kernel_with_service(self._kernel or Kernel(), service)
            if desk_url:
                kernel.add_plugin(desk_plugin(desk_url, scenario.functions, self._http))
            else:
                _count_functions(kernel, observed)
            yield Place(
                kernel=kernel, service=service, model_url=url, desk_url=desk_url
            )


_inside_function: ContextVar[bool] = ContextVar("inside_function", default=False)


def _count_functions(kernel: Kernel, observed: Observed) -> None:
    """Add a filter that notes functions that the model calls, not nested ones."""

    async def note(
        context: FunctionInvocationContext,
        next: Callable[[FunctionInvocationContext], Awaitable[None]],
    ) -> None:
        if not _inside_function.get():
            observed.started(context.function.fully_qualified_name)
        token = _inside_function.set(True)
        try:
            await next(context)
        finally:
            _inside_function.reset(token)

    # Semantic Kernel keeps the innermost filter first.
    kernel.function_invocation_filters.insert(0, (id(observed), note))  # pyright: ignore[reportUnknownMemberType]


class _ForgivingServer(ScriptedOpenAIServer):
    """A scripted server that lists in ``refused`` what OpenAI would refuse, and answers it.

    Several OpenAI-compatible endpoints answer a history whose calls have no results: an
    option then continues and spends. Only that fault is accepted.
    """

    def __init__(self, scenario: Scenario, observed: Observed) -> None:
        super().__init__(lambda request: self._noted(scenario.model(_as_read(request))))
        self._refused = observed.refused
        self._observed = observed
        self._reports = scenario.reports

    def _noted(self, reply: ScriptedReply) -> ScriptedReply:
        self._observed.said += [
            reply.text or "",
            reply.refusal or "",
            *(call.arguments_text for call in reply.calls),
        ]
        return reply

    def _complete(self, raw: bytes) -> HttpResponse:
        body = json.loads(raw)
        before = self.total_tokens
        if self._observed.ended_at:
            return self._continue(body)
        violation = find_violation(body)
        if violation is not None:
            body = {**body, "messages": list(_with_results(body["messages"]))}
            if find_violation(body) is None:
                self._refused.append(violation.message)
        response = super()._complete(json.dumps(body).encode())
        if spent := self.total_tokens - before:
            self._observed.answered(spent)
        return response if self._reports else _without_usage(response)

    def _continue(self, body: dict[str, Any]) -> HttpResponse:
        """Answer a request after the end of the run, and note whether its history is valid."""
        violation = find_violation(body)
        if violation is not None:
            return self._refuse(violation.message)
        self._observed.continued = True
        reply = completion_body(
            say("You are welcome."), index=0, model="scripted", usage=Usage()
        )
        return json_response(reply)


def _as_read(request: ScriptedRequest) -> ScriptedRequest:
    """Remove functions that may not be called, as a real model does not call them."""
    if request.tool_choice == "none":
        return replace(request, tools=())
    return request


def _without_usage(response: HttpResponse) -> HttpResponse:
    body: dict[str, Any] = json.loads(response.parts[0])
    body.pop("usage", None)
    return replace(response, parts=(json.dumps(body).encode(),))


def _with_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Insert a result after each call that has none."""
    answered = {message.get("tool_call_id") for message in messages}
    for message in messages:
        yield message
        for call in message.get("tool_calls") or ():
            if call["id"] not in answered:
                yield {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": "(no result)",
                }


class _CountingChatCompletion(OuterConnector):
    """Counts a connector's round trips, those of Semantic Kernel's own loop included.

    Attributes:
        observed: None does not count.
        reports: Whether replies keep their metadata.
    """

    observed: Observed | None
    reports: bool

    async def _inner_get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings
    ) -> list[ChatMessageContent]:
        messages = await self.connector._inner_get_chat_message_contents(
            chat_history, settings
        )
        self._count(self._taken_metadata(messages))
        return messages

    async def _inner_get_streaming_chat_message_contents(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        function_invoke_attempt: int = 0,
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        reported: dict[str, Any] = {}
        ask = self.connector._inner_get_streaming_chat_message_contents
        async for chunks in ask(chat_history, settings, function_invoke_attempt):
            reported |= self._taken_metadata(chunks)
            yield chunks
        self._count(reported)

    def _count(self, metadata: Mapping[str, Any]) -> None:
        if self.observed is not None:
            self.observed.answered(read_usage(metadata.get("usage")).total_tokens)

    def _taken_metadata(self, messages: Iterable[ChatMessageContent]) -> dict[str, Any]:
        """Merge a reply's metadata, and remove what is not to be reported."""
        taken: dict[str, Any] = {}
        for message in messages:
            taken |= {
                key: value
                for key, value in message.metadata.items()
                if value is not None
            }
            message.metadata = message.metadata if self.reports else {}
        return taken
