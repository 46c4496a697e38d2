"""Chat completion services: how one is selected, what its connector takes, and how a request is sent to it.

A transport takes messages and returns the connector's response; it knows no transcript,
budget or reply.
"""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast
from urllib.parse import urlsplit

from pydantic import ValidationError
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import (
    FunctionChoiceBehavior,
    PromptExecutionSettings,
)
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.const import DEFAULT_SERVICE_NAME
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    StreamingChatMessageContent,
)
from semantic_kernel.exceptions import KernelServiceNotFoundError
from semantic_kernel.functions import KernelArguments, KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.values import frozen
from planner_ext.sk.chat.connectors import NEUTRAL, Connector, connector_of
from planner_ext.sk.chat.reply import corrected, corrected_chunks
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import InvalidSettingsError, ServiceNotFoundError
from planner_ext.sk.functions.conversion import validation_details
from planner_ext.sk.functions.toolset import RequestBehavior, ToolSet
from planner_ext.sk.messages import calls_of

# The service of a run, and its settings.


def select_service(
    kernel: Kernel,
    service_id: str | None,
    arguments: KernelArguments,
    settings: PromptExecutionSettings | None = None,
) -> tuple[ChatCompletionClientBase, PromptExecutionSettings]:
    """Select service and settings as the kernel's ``select_ai_service`` does.

    ``settings`` are used instead of the arguments', which Semantic Kernel's conversion
    would change.

    Raises:
        PlannerInvalidConfigurationError: If there is no such chat completion service,
            it does not take the settings, or a value is of another class.
    """
    instance_of("kernel", kernel, Kernel)
    asked = copy(instance_of("arguments", arguments, KernelArguments))
    if service_id is not None and not instance_of("service_id", service_id, str):
        raise _not_found(kernel, service_id)
    given = {
        key: value.model_copy(deep=True)
        for key, value in (arguments.execution_settings or {}).items()
    }
    if settings is not None:
        instance_of("settings", settings, PromptExecutionSettings)
        given = {
            service_id
            or settings.service_id
            or DEFAULT_SERVICE_NAME: settings.model_copy(deep=True)
        }
    elif service_id is not None:
        own = given.get(service_id) or given.get(DEFAULT_SERVICE_NAME)
        given = {service_id: own or PromptExecutionSettings(service_id=service_id)}
    asked.execution_settings = given or None
    try:
        service, selected = kernel.select_ai_service(
            arguments=asked, type=ChatCompletionClientBase
        )
    except KernelServiceNotFoundError as error:
        raise _not_found(kernel, service_id) from error
    except ValidationError as error:
        raise _unfit(error) from error
    if not isinstance(service, ChatCompletionClientBase):
        raise _not_found(kernel, service_id)
    return service, selected


def kernel_with_service(kernel: Kernel, service: ChatCompletionClientBase) -> Kernel:
    """Copy a kernel with this service first, in place of one with its id."""
    others = {
        key: one
        for key, one in cast("dict[str, Any]", kernel.services).items()
        if key != service.service_id
    }
    return kernel_with_services(kernel, {service.service_id: service, **others})


def kernel_with_services(
    kernel: Kernel, services: dict[str, AIServiceClientBase]
) -> Kernel:
    """Copy a kernel with other services; changes to the copy do not affect the kernel.

    ``Kernel.clone`` would copy filters deeply, ``copy`` would share the dictionaries.
    """
    filters = (
        "function_invocation_filters",
        "prompt_rendering_filters",
        "auto_function_invocation_filters",
    )
    parts: dict[str, Any] = {name: list(getattr(kernel, name)) for name in filters}
    selector = kernel.ai_service_selector
    return Kernel(
        plugins=dict(kernel.plugins),
        services=services,
        ai_service_selector=selector,
        **parts,
    )


def _not_found(kernel: Kernel, service_id: str | None) -> ServiceNotFoundError:
    wanted = (
        "a chat completion service"
        if service_id is None
        else f"a chat completion service {service_id!r}"
    )
    there = ", ".join(
        f"{key!r} ({type(service).__name__})"
        for key, service in kernel.services.items()
    )
    return ServiceNotFoundError(
        f"This run needs {wanted}; the kernel has {there or 'no service'}. Add one with kernel.add_service(...)."
    )


def connector_settings(
    service: ChatCompletionClientBase,
    settings: PromptExecutionSettings | None,
    **update: Any,
) -> PromptExecutionSettings:
    """Copy settings into the connector's class, and update them; Semantic Kernel's conversion changes them."""
    wanted = service.get_prompt_execution_settings_class()
    if settings is None:
        return wanted()
    if isinstance(settings, wanted):
        return settings.model_copy(update=update)
    own = {
        "function_choice_behavior": None,
        "extension_data": dict(settings.extension_data),
    }
    try:
        converted = wanted.from_prompt_execution_settings(
            settings.model_copy(update=own)
        )
    except ValidationError as error:
        raise _unfit(error) from error
    update.setdefault("function_choice_behavior", settings.function_choice_behavior)
    return converted.model_copy(update=update)


def _unfit(error: ValidationError) -> InvalidSettingsError:
    return InvalidSettingsError(
        f"The settings must be ones that the connector takes, as {error.title} does{validation_details(error)}. "
        "Nothing was sent."
    )


# What is sent where a connector refuses or loses a part of a conversation.

NO_FUNCTION = KernelFunctionMetadata(
    name="no_function_is_left",
    description="Not a function: none can be called any more. Answer in text.",
    is_prompt=False,
)
"""Offered in place of withdrawn functions, to a provider that insists on one."""


def has_calls(messages: Iterable[ChatMessageContent]) -> bool:
    """Whether any message has calls or results."""
    return any(
        message.role == AuthorRole.TOOL or calls_of(message) for message in messages
    )


def sent(
    messages: list[ChatMessageContent], connector: Connector
) -> list[ChatMessageContent]:
    """Write messages as a connector and its provider take them; the list itself where nothing has to change."""
    if connector in NEUTRAL:
        return messages
    from planner_ext.sk.chat.rewritten import rewritten  # noqa: PLC0415  (only for connectors that need it)

    return rewritten(messages, connector)


# How a request is sent to a connector.


def address_of(service: ChatCompletionClientBase) -> str:
    """Return a service's address without query and password; "" if it does not say it."""
    try:
        parts = urlsplit(service.service_url() or "")
        port = f":{parts.port}" if parts.port else ""
    except (ValueError, AttributeError, TypeError):
        return ""
    if not parts.hostname:
        return ""
    return f"{parts.scheme}://{parts.hostname}{port}{parts.path}"


def endpoint_of(service: ChatCompletionClientBase) -> str:
    """Name a service with its address."""
    return f"{service.service_id} {address_of(service)}".rstrip()


@frozen
class ChatRequest:
    """One request, independent of connectors.

    Attributes:
        messages: The same list while messages are only appended, else a new one.
        last: Sent instead of the newest message, in this request only.
        choice: The tool choice if functions are offered, else None.
        offered: The functions, and the caller's own schemas; None without.
    """

    messages: list[ChatMessageContent]
    last: ChatMessageContent | None = None
    settings: PromptExecutionSettings
    choice: Literal["auto", "required", "none"] | None = None
    offered: ToolSet | None = None

    @property
    def sent(self) -> list[ChatMessageContent]:
        """The messages as they are sent, in a new list."""
        return (
            list(self.messages)
            if self.last is None
            else [*self.messages[:-1], self.last]
        )


@dataclass(slots=True)
class GenericTransport:
    """Sends requests with the connector's public methods, which convert the whole history each time."""

    service: ChatCompletionClientBase
    _: KW_ONLY
    kernel: Kernel | None
    arguments: KernelArguments | None

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        """Send a request; return a message for each choice."""
        messages = await self.service.get_chat_message_contents(**self._given(request))
        return [corrected(message) for message in messages]

    async def stream(
        self, request: ChatRequest
    ) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Send a request; yield the chunks of the first choice."""
        stream = self.service.get_streaming_chat_message_contents(
            **self._given(request)
        )
        async with aclosing(corrected_chunks(stream)) as groups:
            async for group in groups:
                for chunk in group:
                    if chunk is not None and chunk.choice_index == 0:  # pyright: ignore[reportUnnecessaryComparison]
                        yield chunk

    def _given(self, request: ChatRequest) -> dict[str, Any]:
        behavior = None
        if request.choice is not None and (tools := request.offered) is not None:
            behavior = RequestBehavior.of(
                tools.metadata, request.choice, schemas=tools.schemas
            )
        history = ChatHistory.model_construct(messages=request.sent)
        given = request_arguments(
            self.service, history, request.settings, behavior, self.kernel
        )
        return {**given, "arguments": self.arguments}


def request_arguments(
    service: ChatCompletionClientBase,
    history: ChatHistory,
    settings: PromptExecutionSettings,
    behavior: FunctionChoiceBehavior | None,
    kernel: Kernel | None,
) -> dict[str, Any]:
    """Return the arguments of a connector's methods for one request, as its provider takes them.

    A history that needs no change is passed on itself; see `sent`.
    """
    connector = connector_of(service)
    messages = sent(history.messages, connector)
    if (
        behavior is not None
        and behavior.type_ is FunctionChoiceType.NONE
        and not connector.takes_none
    ):
        behavior = None
    if (
        behavior is None
        and connector.needs_tools
        and has_calls(messages)
        and not getattr(settings, "tools", None)
    ):
        behavior = RequestBehavior.of([NO_FUNCTION], "auto")
        kernel = kernel or Kernel()
    if behavior is not None and connector.needs_description and kernel is not None:
        behavior = _described(behavior, kernel)
    settings = connector_settings(service, settings, function_choice_behavior=behavior)
    if messages is not history.messages and messages != history.messages:
        history = ChatHistory.model_construct(messages=messages)
    return {"chat_history": history, "settings": settings, "kernel": kernel}


def _described(
    behavior: FunctionChoiceBehavior, kernel: Kernel
) -> FunctionChoiceBehavior:
    """Describe functions by their names where they have no description."""
    offered = [
        function
        if function.description
        else function.model_copy(update={"description": function.fully_qualified_name})
        for function in behavior.get_config(kernel).available_functions or ()
    ]
    choice = "auto"
    if behavior.type_ is not None:
        choice = behavior.type_.value
    return RequestBehavior.of(offered, choice, schemas=getattr(behavior, "schemas", ()))
