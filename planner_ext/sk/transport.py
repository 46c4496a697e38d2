"""Chat completion services: how one is selected, how connectors differ, and how a request is sent to one.

A transport does not know about transcripts, budgets or replies: it takes messages, and returns the connector's
response. `GenericTransport` works with every connector; a faster one falls back on it.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, TypeVar, cast

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.const import DEFAULT_SERVICE_NAME
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FinishReason,
    StreamingChatMessageContent,
    TextContent,
)
from semantic_kernel.exceptions import KernelServiceNotFoundError
from semantic_kernel.functions import KernelArguments, KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.sk.errors import ServiceNotFoundError
from planner_ext.sk.messages import calls_of, part_of, text_of, usage_in, with_usage
from planner_ext.sk.options import instance_of
from planner_ext.sk.toolset import RequestBehavior

__all__ = [
    "NO_FUNCTION",
    "ChatRequest",
    "GenericTransport",
    "connector_of",
    "connector_settings",
    "has_calls",
    "kernel_with_service",
    "kernel_with_services",
    "received",
    "select_service",
]

M = TypeVar("M", bound=ChatMessageContent)

# The service of a run, and its settings.


def select_service(
    kernel: Kernel,
    service_id: str | None,
    arguments: KernelArguments,
    settings: PromptExecutionSettings | None = None,
) -> tuple[ChatCompletionClientBase, PromptExecutionSettings]:
    """Select the service and the settings as the kernel does, with ``select_ai_service``.

    Args:
        kernel: Holds the services.
        service_id: The service to use; None uses the kernel's selector and the arguments' execution settings.
        arguments: The application's arguments; not changed, although Semantic Kernel's conversion would.
        settings: Used instead of the arguments' execution settings.

    Raises:
        PlannerInvalidConfigurationError: If there is no such service, it is not a chat completion service, or kernel or
            arguments are of another class.
    """
    instance_of("kernel", kernel, Kernel)
    asked = copy(instance_of("arguments", arguments, KernelArguments))
    if service_id is not None and (not isinstance(service_id, str) or not service_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _not_found(kernel, service_id)
    given = {key: value.model_copy(deep=True) for key, value in (arguments.execution_settings or {}).items()}
    if settings is not None:
        given = {service_id or settings.service_id or DEFAULT_SERVICE_NAME: settings.model_copy(deep=True)}
    elif service_id is not None:
        own = given.get(service_id) or given.get(DEFAULT_SERVICE_NAME)
        given = {service_id: own or PromptExecutionSettings(service_id=service_id)}
    asked.execution_settings = given or None
    try:
        service, selected = kernel.select_ai_service(arguments=asked, type=ChatCompletionClientBase)
    except KernelServiceNotFoundError as error:
        raise _not_found(kernel, service_id) from error
    if not isinstance(service, ChatCompletionClientBase):
        raise _not_found(kernel, service_id)
    return service, selected


def kernel_with_service(kernel: Kernel, service: ChatCompletionClientBase) -> Kernel:
    """Copy a kernel with this service first, replacing one with its id."""
    others = {key: one for key, one in cast("dict[str, Any]", kernel.services).items() if key != service.service_id}
    return kernel_with_services(kernel, {service.service_id: service, **others})


def kernel_with_services(kernel: Kernel, services: dict[str, AIServiceClientBase]) -> Kernel:
    """Copy a kernel with other services; changes to the copy do not affect the kernel.

    ``Kernel.clone`` would copy filters deeply, ``copy`` would share the dictionaries.
    """
    filters = ("function_invocation_filters", "prompt_rendering_filters", "auto_function_invocation_filters")
    parts: dict[str, Any] = {name: list(getattr(kernel, name)) for name in filters}
    selector = kernel.ai_service_selector
    return Kernel(plugins=dict(kernel.plugins), services=services, ai_service_selector=selector, **parts)


def _not_found(kernel: Kernel, service_id: str | None) -> ServiceNotFoundError:
    wanted = "a chat completion service" if service_id is None else f"a chat completion service {service_id!r}"
    there = ", ".join(f"{key!r} ({type(service).__name__})" for key, service in kernel.services.items())
    return ServiceNotFoundError(
        f"This run needs {wanted}; the kernel has {there or 'no service'}. Add one with kernel.add_service(...)."
    )


def connector_settings(
    service: ChatCompletionClientBase, settings: PromptExecutionSettings | None
) -> PromptExecutionSettings:
    """Copy settings into the connector's own class; Semantic Kernel's conversion would change the caller's."""
    wanted = service.get_prompt_execution_settings_class()
    if settings is None:
        return wanted()
    if isinstance(settings, wanted):
        return settings.model_copy()
    own = {"function_choice_behavior": None, "extension_data": dict(settings.extension_data)}
    converted = wanted.from_prompt_execution_settings(settings.model_copy(update=own))
    return converted.model_copy(update={"function_choice_behavior": settings.function_choice_behavior})


# How connectors differ: one table, by the module of a connector's class, so that no SDK need be installed.

NO_FUNCTION = KernelFunctionMetadata(
    name="no_function_is_left",
    description="Not a function: none can be called any more. Answer in text.",
    is_prompt=False,
)
"""Offered in place of the functions that are withdrawn, to a provider that insists on one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """The properties of a connector; the defaults fit OpenAI's and unknown ones.

    Attributes:
        provider: Its provider in ``genai-prices``; "" if the list does not have it.
        joins: Which messages must be joined into one. ``results``: the results of a batch, and all system messages.
            ``turns``: also neighbouring messages of the same side. None joins nothing.
        takes_none: Whether its requests can send the tool choice "none".
        needs_tools: Whether its provider refuses calls and results in a request that offers no function.
    """

    provider: str = ""
    joins: Literal["results", "turns"] | None = None
    takes_none: bool = True
    needs_tools: bool = False


_PACKAGE = "semantic_kernel.connectors.ai."

_KNOWN = {
    # Anthropic's API accepts the choice "none", but Semantic Kernel's settings refuse it.
    "anthropic": Connector(provider="anthropic", joins="results", takes_none=False, needs_tools=True),
    "azure_ai_inference": Connector(provider="azure"),
    # Bedrock has no choice "none": Semantic Kernel sends no function at all for it.
    "bedrock": Connector(provider="aws", joins="turns", takes_none=False, needs_tools=True),
    # Semantic Kernel's connectors for Google join results, too, but they change the caller's messages.
    "google": Connector(provider="google", joins="results"),
    "mistral_ai": Connector(provider="mistral"),
    "ollama": Connector(takes_none=False),
    "open_ai": Connector(provider="openai"),
}


def connector_of(service: AIServiceClientBase) -> Connector:
    """Return the properties of a connector, of its base class, or of the connector in a wrapper."""
    while (inner := getattr(service, "inner", None)) is not None:
        service = inner
    modules = (kind.__module__ for kind in type(service).__mro__)
    known = next((module for module in modules if module.startswith(_PACKAGE)), "")
    return _KNOWN.get(known.removeprefix(_PACKAGE).partition(".")[0], Connector())


def has_calls(messages: Sequence[ChatMessageContent]) -> bool:
    """Whether any message has calls or results."""
    return any(message.role == AuthorRole.TOOL or calls_of(message) for message in messages)


def _joined(messages: Sequence[ChatMessageContent], joins: Literal["results", "turns"]) -> list[ChatMessageContent]:
    """Copy messages, and join those that a provider wants joined; the system messages come first, as one text."""
    system = [message for message in messages if message.role == AuthorRole.SYSTEM]
    if len(system) > 1:
        texts: list[Any] = [TextContent(text="\n\n".join(map(text_of, system)))]
        system = [system[0].model_copy(update={"items": texts})]
    written = system
    for message in (one for one in messages if one.role != AuthorRole.SYSTEM):
        if written and _is_next_to(written[-1].role, message.role, joins):
            written[-1] = written[-1].model_copy(update={"items": [*written[-1].items, *message.items]})
        else:
            written.append(message)
    return written


def _is_next_to(role: AuthorRole, following: AuthorRole, joins: Literal["results", "turns"]) -> bool:
    """Whether a message of the following role is joined with the one before it; results count as the user's side."""
    if joins == "results":
        return role == following == AuthorRole.TOOL
    return role == following or (role == AuthorRole.TOOL and following == AuthorRole.USER)


def _one_text(message: ChatMessageContent) -> ChatMessageContent:
    """Copy a message with all its text in one item: most connectors send only the first text item of a message."""
    texts = [item for item in message.items if isinstance(item, TextContent)]
    if len(texts) < 2:
        return message
    whole = texts[0].model_copy(update={"text": text_of(message)})
    items = [whole, *(item for item in message.items if not isinstance(item, TextContent))]
    return message.model_copy(update={"items": items})


_CUT_SHORT = {
    "length": FinishReason.LENGTH,
    "model_context_window_exceeded": FinishReason.LENGTH,
    "guardrail_intervened": FinishReason.CONTENT_FILTER,
    "recitation": FinishReason.CONTENT_FILTER,
    "blocklist": FinishReason.CONTENT_FILTER,
    "prohibited_content": FinishReason.CONTENT_FILTER,
    "spii": FinishReason.CONTENT_FILTER,
}
"""Finish reasons of Ollama, Bedrock and Google that Semantic Kernel does not know: such a reply is not whole."""


def received(message: M) -> M:
    """Add the parts of an SDK's response that its connector omits: the usage, and that the reply was cut short.

    A complete message is returned itself; nothing is changed in place.
    """
    if message.finish_reason is None and (reason := _cut_short(message.inner_content)) is not None:
        message = message.model_copy(update={"finish_reason": reason})
    return with_usage(message, usage_in(message))


def _cut_short(response: Any) -> FinishReason | None:
    """Read the finish reason from a response of Ollama, Bedrock (plain or an event of a stream) or Google."""
    if response is None:
        return None
    stop = part_of(response, "messageStop") or response
    candidate = next(iter(cast("Sequence[object]", part_of(response, "candidates") or ())), None)
    reasons = (part_of(stop, "done_reason"), part_of(stop, "stopReason"), part_of(candidate, "finish_reason"))
    texts = (str(getattr(reason, "value", reason)).lower() for reason in reasons)  # some are of an SDK's enumeration
    return next((_CUT_SHORT[text] for text in texts if text in _CUT_SHORT), None)


# How a request is sent to a connector.


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request, independent of connectors.

    Attributes:
        messages: The messages to send. It is the same list while messages are only appended, and a new list if earlier
            messages are changed.
        last: Sent instead of the newest message, in this request only; None sends the newest message.
        settings: A copy for this request, without a behaviour.
        choice: The tool choice if functions are offered, else None.
        functions: The kernel functions offered; the same tuple while the functions are the same.
        schemas: The caller's own tool schemas, offered in addition.
    """

    messages: list[ChatMessageContent]
    last: ChatMessageContent | None = None
    settings: PromptExecutionSettings
    choice: Literal["auto", "required", "none"] | None = None
    functions: tuple[KernelFunctionMetadata, ...] = ()
    schemas: tuple[Any, ...] = ()

    @property
    def sent(self) -> list[ChatMessageContent]:
        """The messages as they are sent, in a new list."""
        return list(self.messages) if self.last is None else [*self.messages[:-1], self.last]


@dataclass(slots=True)
class GenericTransport:
    """Sends requests with the connector's public methods, which convert the whole history each time.

    The connector's exceptions pass through. For ``joins`` see `Connector`.
    """

    service: ChatCompletionClientBase
    _: KW_ONLY
    kernel: Kernel | None
    arguments: KernelArguments | None
    joins: Literal["results", "turns"] | None = None

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        """Send a request; return a message for each choice of the response."""
        messages = await self.service.get_chat_message_contents(**self._given(request))
        return [_one_text(received(message)) for message in messages]

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Send a request; yield the chunks of the response's first choice."""
        async with aclosing(self.service.get_streaming_chat_message_contents(**self._given(request))) as groups:
            async for group in groups:
                for chunk in group:
                    if chunk is not None and chunk.choice_index == 0:  # pyright: ignore[reportUnnecessaryComparison]
                        yield received(chunk)

    def _given(self, request: ChatRequest) -> dict[str, Any]:
        """Convert a request to the arguments of the connector's methods."""
        sent, settings = request.sent, request.settings  # a new list: connectors may add to it
        if self.joins is not None:
            sent = _joined(sent, self.joins)
        if request.choice is not None:
            behavior = RequestBehavior.of(list(request.functions), request.choice, schemas=request.schemas)
            settings = settings.model_copy(update={"function_choice_behavior": behavior})
        return {
            "chat_history": ChatHistory.model_construct(messages=sent),
            "settings": settings,
            "kernel": self.kernel,
            "arguments": self.arguments,
        }
