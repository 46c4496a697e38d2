"""Chat completion services: how one is selected, and how a request is sent to one.

A transport does not know about transcripts, budgets or replies: it takes messages, and returns the connector's
response. `GenericTransport` works with every connector; a faster one falls back on it.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, cast

from pydantic import ValidationError
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.const import DEFAULT_SERVICE_NAME
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.exceptions import KernelServiceNotFoundError
from semantic_kernel.functions import KernelArguments, KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.sk.chat.connectors import NO_FUNCTION, connector_of, has_calls, sent
from planner_ext.sk.chat.reply import corrected, corrected_chunks
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import InvalidSettingsError, ServiceNotFoundError
from planner_ext.sk.functions.conversion import validation_details
from planner_ext.sk.functions.toolset import RequestBehavior

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
        PlannerInvalidConfigurationError: If there is no such service, it is not a chat completion service, it does not
            take the settings, or kernel, arguments or settings are of another class.
    """
    instance_of("kernel", kernel, Kernel)
    asked = copy(instance_of("arguments", arguments, KernelArguments))
    if service_id is not None and not instance_of("service_id", service_id, str):
        raise _not_found(kernel, service_id)
    given = {key: value.model_copy(deep=True) for key, value in (arguments.execution_settings or {}).items()}
    if settings is not None:
        instance_of("settings", settings, PromptExecutionSettings)
        given = {service_id or settings.service_id or DEFAULT_SERVICE_NAME: settings.model_copy(deep=True)}
    elif service_id is not None:
        own = given.get(service_id) or given.get(DEFAULT_SERVICE_NAME)
        given = {service_id: own or PromptExecutionSettings(service_id=service_id)}
    asked.execution_settings = given or None
    try:
        service, selected = kernel.select_ai_service(arguments=asked, type=ChatCompletionClientBase)
    except KernelServiceNotFoundError as error:
        raise _not_found(kernel, service_id) from error
    except ValidationError as error:
        raise _unfit(error) from error
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
    """Copy settings into the connector's own class; Semantic Kernel's conversion would change the caller's.

    Raises:
        InvalidOptionError: If the class does not take their values; names these.
    """
    wanted = service.get_prompt_execution_settings_class()
    if settings is None:
        return wanted()
    if isinstance(settings, wanted):
        return settings.model_copy()
    own = {"function_choice_behavior": None, "extension_data": dict(settings.extension_data)}
    try:
        converted = wanted.from_prompt_execution_settings(settings.model_copy(update=own))
    except ValidationError as error:
        raise _unfit(error) from error
    return converted.model_copy(update={"function_choice_behavior": settings.function_choice_behavior})


def _unfit(error: ValidationError) -> InvalidSettingsError:
    return InvalidSettingsError(
        f"The settings must be ones that the connector takes, as {error.title} does{validation_details(error)}. "
        "Nothing was sent."
    )


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

    The connector's exceptions pass through.
    """

    service: ChatCompletionClientBase
    _: KW_ONLY
    kernel: Kernel | None
    arguments: KernelArguments | None

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        """Send a request; return a message for each choice of the response."""
        messages = await self.service.get_chat_message_contents(**self._given(request))
        return [corrected(message) for message in messages]

    async def stream(self, request: ChatRequest) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Send a request; yield the chunks of the response's first choice."""
        stream = self.service.get_streaming_chat_message_contents(**self._given(request))
        async with aclosing(corrected_chunks(stream)) as groups:
            async for group in groups:
                for chunk in group:
                    if chunk is not None and chunk.choice_index == 0:  # pyright: ignore[reportUnnecessaryComparison]
                        yield chunk

    def _given(self, request: ChatRequest) -> dict[str, Any]:
        """Convert a request to the arguments of the connector's methods."""
        settings = request.settings
        if request.choice is not None:
            behavior = RequestBehavior.of(list(request.functions), request.choice, schemas=request.schemas)
            settings = settings.model_copy(update={"function_choice_behavior": behavior})
        history = ChatHistory.model_construct(messages=request.sent)
        given = request_arguments(self.service, history, settings, self.kernel)
        return {**given, "arguments": self.arguments}


def request_arguments(
    service: ChatCompletionClientBase, history: ChatHistory, settings: PromptExecutionSettings, kernel: Kernel | None
) -> dict[str, Any]:
    """Return the arguments of a connector's methods for one request, as it and its provider take them.

    A history that needs no change is passed on itself; see `planner_ext.sk.chat.connectors`.

    Raises:
        InvalidOptionError: If the connector does not take the settings.
    """
    connector = connector_of(service)
    behavior = settings.function_choice_behavior
    messages = sent(history.messages, connector)
    if behavior is not None and behavior.type_ is FunctionChoiceType.NONE and not connector.takes_none:
        behavior = None
    if behavior is None and connector.needs_tools and has_calls(messages) and not getattr(settings, "tools", None):
        behavior = RequestBehavior.of([NO_FUNCTION], "auto")
        kernel = kernel or Kernel()
    if behavior is not None and connector.needs_description and kernel is not None:
        behavior = _described(behavior, kernel)
    settings = connector_settings(service, settings).model_copy(update={"function_choice_behavior": behavior})
    if messages is not history.messages and messages != history.messages:
        history = ChatHistory.model_construct(messages=messages)
    return {"chat_history": history, "settings": settings, "kernel": kernel}


def _described(behavior: FunctionChoiceBehavior, kernel: Kernel) -> FunctionChoiceBehavior:
    """Describe the functions that a behaviour offers by their names where they have no description."""
    offered = [
        function if function.description else function.model_copy(update={"description": function.fully_qualified_name})
        for function in behavior.get_config(kernel).available_functions or ()
    ]
    choice = behavior.type_.value if behavior.type_ is not None else "auto"
    return RequestBehavior.of(offered, choice, schemas=getattr(behavior, "schemas", ()))
