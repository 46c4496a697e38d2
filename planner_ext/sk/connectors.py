"""Which chat completion service a run uses, and with which settings."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.const import DEFAULT_SERVICE_NAME
from semantic_kernel.contents import AuthorRole, ChatMessageContent, FinishReason, TextContent
from semantic_kernel.exceptions import KernelServiceNotFoundError
from semantic_kernel.functions import KernelArguments, KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.sk.errors import ServiceNotFoundError
from planner_ext.sk.messages import calls_of, text_of
from planner_ext.sk.options import instance_of
from planner_ext.sk.usage import part_of, usage_in, with_usage

__all__ = ["NO_FUNCTION", "Connector", "connector_of", "has_calls", "joined", "one_text", "received", "select_service"]

# How Semantic Kernel's connectors differ in what a run has to know of them.
#
# One table, looked up by the module of a connector's class: the SDKs behind them need not be installed. A connector
# that is not in it is taken for one like OpenAI's.

M = TypeVar("M", bound=ChatMessageContent)

NO_FUNCTION = KernelFunctionMetadata(
    name="no_function_is_left",
    description="Not a function: none can be called any more. Answer in text.",
    is_prompt=False,
)
"""What is offered in place of the functions that are withdrawn, where a provider insists that there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connector:
    """What is particular about a connector.

    Attributes:
        provider: Its provider in ``genai-prices``; "" where the list does not have it.
        joins: Whether the results of a batch have to be sent in one message, and all that the system says in one
            (``results``), and neighbouring messages of one side, too (``turns``); None for neither.
        takes_none: Whether its requests can say the tool choice "none".
        needs_tools: Whether its provider refuses calls and results in a request that offers no function.
    """

    provider: str = ""
    joins: Literal["results", "turns"] | None = None
    takes_none: bool = True
    needs_tools: bool = False


_PACKAGE = "semantic_kernel.connectors.ai."

_KNOWN = {
    # Anthropic's API takes the choice "none", and Semantic Kernel's settings refuse it.
    "anthropic": Connector(provider="anthropic", joins="results", takes_none=False, needs_tools=True),
    "azure_ai_inference": Connector(provider="azure"),
    # Bedrock has no choice "none": Semantic Kernel sends no function at all for it.
    "bedrock": Connector(provider="aws", joins="turns", takes_none=False, needs_tools=True),
    # Semantic Kernel's connectors for Google join results, too, but in the messages that they were given.
    "google": Connector(provider="google", joins="results"),
    "mistral_ai": Connector(provider="mistral"),
    "ollama": Connector(takes_none=False),
    "open_ai": Connector(provider="openai"),
}

_OTHER = Connector()


def connector_of(service: AIServiceClientBase) -> Connector:
    """Find out what is particular about a connector, or about the one that its class derives from."""
    for kind in type(service).__mro__:
        if kind.__module__.startswith(_PACKAGE):
            return _KNOWN.get(kind.__module__.removeprefix(_PACKAGE).partition(".")[0], _OTHER)
    return _OTHER


def has_calls(messages: Sequence[ChatMessageContent]) -> bool:
    """Whether there are calls or results among the messages."""
    return any(message.role == AuthorRole.TOOL or calls_of(message) for message in messages)


def joined(messages: Sequence[ChatMessageContent], joins: Literal["results", "turns"]) -> list[ChatMessageContent]:
    """Copy messages with those in one that a provider wants in one; the system's come first, as one text."""
    system = [message for message in messages if message.role == AuthorRole.SYSTEM]
    rest = [message for message in messages if message.role != AuthorRole.SYSTEM]
    if len(system) > 1:
        texts: list[Any] = [TextContent(text="\n\n".join(map(text_of, system)))]
        system = [system[0].model_copy(update={"items": texts})]
    written: list[ChatMessageContent] = system
    for message in rest:
        if written and _is_next_to(written[-1].role, message.role, joins):
            written[-1] = written[-1].model_copy(update={"items": [*written[-1].items, *message.items]})
        else:
            written.append(message)
    return written


def _is_next_to(role: AuthorRole, following: AuthorRole, joins: Literal["results", "turns"]) -> bool:
    """Whether a message of the following role is sent in the one before it: results are the user's side."""
    if joins == "results":
        return role == following == AuthorRole.TOOL
    return role == following or (role == AuthorRole.TOOL and following == AuthorRole.USER)


def one_text(message: ChatMessageContent) -> ChatMessageContent:
    """Copy a message with all its text in one item: most connectors send the first item of a message's text alone."""
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
"""Finish reasons of Ollama, Bedrock and Google for which Semantic Kernel has no word: such a reply is not whole."""


def received(message: M) -> M:
    """Complete a message or chunk of a connector with what its SDK's response says and the connector left out.

    That is the usage, and a finish reason that tells that the reply was cut short. What is complete is returned as it
    is; nothing is changed in place.
    """
    if message.finish_reason is None and (reason := _cut_short(message.inner_content)) is not None:
        message = message.model_copy(update={"finish_reason": reason})
    return with_usage(message, usage_in(message))


def _cut_short(response: Any) -> FinishReason | None:
    """Read a finish reason off a response of Ollama, Bedrock (plain or an event of a stream) or Google."""
    if response is None:
        return None
    stop = part_of(response, "messageStop") or response
    candidate = next(iter(cast("Sequence[object]", part_of(response, "candidates") or ())), None)
    told = (part_of(stop, "done_reason"), part_of(stop, "stopReason"), part_of(candidate, "finish_reason"))
    return next((_CUT_SHORT[text] for value in told if (text := _text(value)) in _CUT_SHORT), None)


def _text(value: object) -> str:
    """Write a reason in small letters, be it a text or a member of an SDK's enumeration."""
    return str(getattr(value, "value", value)).lower()


def select_service(
    kernel: Kernel,
    service_id: str | None,
    arguments: KernelArguments,
    settings: PromptExecutionSettings | None = None,
) -> tuple[ChatCompletionClientBase, PromptExecutionSettings]:
    """Select the service and the settings as the kernel does, with ``select_ai_service``.

    Args:
        kernel: Where the services are.
        service_id: The one to use; None leaves it to the kernel's selector and the arguments' execution settings.
        arguments: The application's; not changed, although Semantic Kernel's conversion would.
        settings: Used in place of the arguments' execution settings.

    Raises:
        PlannerInvalidConfigurationError: If there is no such service, or it is no chat completion service; if kernel or
            arguments are none.
    """
    instance_of("kernel", kernel, Kernel)
    asked = copy(instance_of("arguments", arguments, KernelArguments))
    if service_id is not None and (not isinstance(service_id, str) or not service_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ServiceNotFoundError(_not_found(kernel, service_id))
    asked.execution_settings = _settings_to_ask_with(service_id, arguments, settings)
    try:
        service, selected = kernel.select_ai_service(arguments=asked, type=ChatCompletionClientBase)
    except KernelServiceNotFoundError as error:
        raise ServiceNotFoundError(_not_found(kernel, service_id)) from error
    if not isinstance(service, ChatCompletionClientBase):
        raise ServiceNotFoundError(_not_found(kernel, service_id))
    return service, selected


def _settings_to_ask_with(
    service_id: str | None, arguments: KernelArguments, settings: PromptExecutionSettings | None
) -> dict[str, PromptExecutionSettings] | None:
    given = {key: value.model_copy(deep=True) for key, value in (arguments.execution_settings or {}).items()}
    if settings is not None:
        return {service_id or settings.service_id or DEFAULT_SERVICE_NAME: settings.model_copy(deep=True)}
    if service_id is None:
        return given or None
    for_it = given.get(service_id) or given.get(DEFAULT_SERVICE_NAME) or PromptExecutionSettings(service_id=service_id)
    return {service_id: for_it}


def _not_found(kernel: Kernel, service_id: str | None) -> str:
    wanted = "a chat completion service" if service_id is None else f"a chat completion service {service_id!r}"
    there = ", ".join(f"{key!r} ({type(service).__name__})" for key, service in kernel.services.items())
    return f"This run needs {wanted}; the kernel has {there or 'no service'}. Add one with kernel.add_service(...)."
