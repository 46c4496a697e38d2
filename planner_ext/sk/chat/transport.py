"""Chat completion services: how one is selected, what its connector takes, and how a request is sent to it.

A transport takes messages and returns the connector's response; it knows no transcript,
budget or reply.
"""

import hashlib
import re
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import KW_ONLY, dataclass, field
from operator import is_
from typing import Any, Final, Literal, cast
from urllib.parse import urlsplit

from pydantic import ValidationError
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.const import DEFAULT_SERVICE_NAME
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    ImageContent,
    StreamingChatMessageContent,
    TextContent,
)
from semantic_kernel.exceptions import KernelServiceNotFoundError
from semantic_kernel.functions import KernelArguments, KernelFunctionMetadata
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.values import frozen
from planner_ext.sk.chat.reply import corrected, corrected_chunks
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import InvalidSettingsError, ServiceNotFoundError
from planner_ext.sk.functions.conversion import validation_details
from planner_ext.sk.functions.toolset import RequestBehavior, ToolSet
from planner_ext.sk.messages import calls_of, text_of, with_one_text

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


# What each connector refuses or loses of a conversation, and what is sent because of it.
#
# One table, by the module of a connector's class, so that no SDK need be installed. The messages of a run stay as they
# are: only the copy that is sent differs. A connector that is not in the table gets messages as they are.

NO_FUNCTION = KernelFunctionMetadata(
    name="no_function_is_left",
    description="Not a function: none can be called any more. Answer in text.",
    is_prompt=False,
)
"""Offered in place of withdrawn functions, to a provider that insists on one."""

EMPTY: Final = "(empty)"
"""Sent for blank text, to a provider that refuses it."""

_SYSTEM = AuthorRole.SYSTEM
_USER = AuthorRole.USER
_ASSISTANT = AuthorRole.ASSISTANT
_TOOL = AuthorRole.TOOL

_Turn = tuple[AuthorRole | None, AuthorRole | None]
"""The roles of two neighbouring messages; None is the start or the end."""

_CONTINUE = (ChatMessageContent(role=_USER, content="Please continue."),)
_NOTED = (ChatMessageContent(role=_ASSISTANT, content="OK."),)
_RESULTS = frozenset({(_TOOL, _TOOL)})
_ROLES = _RESULTS | {(_USER, _USER), (_ASSISTANT, _ASSISTANT)}


@frozen
class Connector:
    """The properties of a connector; the defaults fit OpenAI's and unknown ones, which need nothing.

    Attributes:
        provider: Its provider in ``genai-prices``, or "".
        takes_none: Whether its requests can send the tool choice "none".
        needs_tools: Whether its provider refuses calls and results in a request that
            offers no function.
        needs_description: Whether its SDK refuses a function without a description.
        instructions: How it sends the roles system and developer: as they ``differ``,
            all as the ``system``'s, or as ``one`` message before all others.
        takes_blank: Whether its provider accepts blank text.
        ids: The ids of calls that its provider accepts, if each occurs once; None
            accepts all.
        separator: Between plugin and function in the names of calls, which it would
            write otherwise than elsewhere; None leaves names to the connector.
        first_text: When it sends only the first text of a message; None never.
        joins: Which neighbouring messages it must join into one.
        between: What it must put between two messages.
        says_calls: Whether its finish reasons tell replies with calls from others.
    """

    provider: str = ""
    takes_none: bool = True
    needs_tools: bool = False
    needs_description: bool = False
    instructions: Literal["differ", "system", "one"] = "differ"
    takes_blank: bool = True
    ids: re.Pattern[str] | None = None
    separator: str | None = None
    first_text: Literal["always", "without_images"] | None = None
    joins: frozenset[_Turn] = frozenset()
    between: Mapping[_Turn, Sequence[ChatMessageContent]] = field(
        default_factory=dict[_Turn, Sequence[ChatMessageContent]]
    )
    says_calls: bool = True


_UNKNOWN: Final = Connector()
_OPENAI: Final = Connector(provider="openai")

_PACKAGE = "semantic_kernel.connectors.ai."

_KNOWN = {
    # The API accepts the choice "none", but Semantic Kernel's settings refuse it.
    "anthropic": Connector(
        provider="anthropic",
        takes_none=False,
        needs_tools=True,
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9_-]+"),
        first_text="always",
        joins=_RESULTS,
    ),
    "azure_ai_inference": Connector(provider="azure", first_text="without_images"),
    # There is no choice "none": Semantic Kernel sends no function at all for it.
    "bedrock": Connector(
        provider="aws",
        takes_none=False,
        needs_tools=True,
        needs_description=True,
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9_-]{1,64}"),
        joins=_ROLES | {(_TOOL, _USER)},
        between={(None, _ASSISTANT): _CONTINUE},
    ),
    # Semantic Kernel joins results here, too, but it changes the caller's messages.
    "google": Connector(
        provider="google",
        instructions="one",
        takes_blank=False,
        separator="__",
        joins=_ROLES,
        between={(None, _ASSISTANT): _CONTINUE, (_ASSISTANT, None): _CONTINUE},
        says_calls=False,
    ),
    "mistral_ai": Connector(
        provider="mistral",
        instructions="one",
        takes_blank=False,
        ids=re.compile("[a-zA-Z0-9]{9}"),
        between={(_TOOL, _USER): _NOTED, (_ASSISTANT, None): _CONTINUE},
    ),
    "ollama": Connector(
        takes_none=False,
        instructions="system",
        separator="-",
        first_text="always",
        says_calls=False,
    ),
    "open_ai": _OPENAI,
}


def connector_of(service: AIServiceClientBase) -> Connector:
    """Return the properties of a connector, its base class, or the one in a wrapper."""
    while (inner := getattr(service, "inner", None)) is not None:
        service = inner
    modules = (kind.__module__ for kind in type(service).__mro__)
    known = next((module for module in modules if module.startswith(_PACKAGE)), "")
    return _KNOWN.get(known.removeprefix(_PACKAGE).partition(".")[0], _UNKNOWN)


def has_calls(messages: Iterable[ChatMessageContent]) -> bool:
    """Whether any message has calls or results."""
    return any(message.role == _TOOL or calls_of(message) for message in messages)


def sent(
    messages: list[ChatMessageContent], connector: Connector
) -> list[ChatMessageContent]:
    """Write messages as a connector and its provider take them; see `Connector`.

    What needs no change is not copied. A message is written alike in every request, so
    that prompt caches keep it.
    """
    if connector is _OPENAI or connector is _UNKNOWN:
        return messages
    written = messages
    if connector.instructions != "differ":
        written = [
            _as_system(message) if message.role == AuthorRole.DEVELOPER else message
            for message in written
        ]
    if connector.instructions == "one":
        written = _one_system_first(written)
    return [
        _one_text(message, connector)
        for message in _ordered(_written(written, connector), connector)
    ]


def _as_system(message: ChatMessageContent) -> ChatMessageContent:
    return message.model_copy(update={"role": _SYSTEM})


def _one_system_first(
    messages: Sequence[ChatMessageContent],
) -> list[ChatMessageContent]:
    system = [message for message in messages if message.role == _SYSTEM]
    if len(system) > 1:
        texts: list[Any] = [TextContent(text="\n\n".join(map(text_of, system)))]
        system = [system[0].model_copy(update={"items": texts})]
    return [*system, *(message for message in messages if message.role != _SYSTEM)]


def _written(
    messages: Iterable[ChatMessageContent], connector: Connector
) -> Iterator[ChatMessageContent]:
    used: set[str] = set()
    ids: dict[str | None, str] = {}  # of the newest batch, by those in the history
    for message in messages:
        if connector.ids is not None and (calls := calls_of(message)):
            ids = _sent_ids(calls, used, connector.ids)
        items = [_item(item, ids, connector) for item in message.items]
        kept = [item for item in items if item is not None]
        if (items or connector.takes_blank) and all(map(is_, items, message.items)):
            yield message
        elif kept or message.role == _USER:
            yield message.model_copy(
                update={"items": kept or [TextContent(text=EMPTY)]}
            )


def _sent_ids(
    calls: Iterable[FunctionCallContent], used: set[str], accepted: re.Pattern[str]
) -> dict[str | None, str]:
    ids: dict[str | None, str] = {}
    for call in calls:
        own = call.id or ""
        if own in used or not accepted.fullmatch(own):
            own = hashlib.sha256(f"{len(used)} {own}".encode()).hexdigest()[:9]
        used.add(own)
        ids[call.id] = own
    return ids


def _item(item: Any, ids: Mapping[str | None, str], connector: Connector) -> Any:
    update: dict[str, Any] = {}
    match item:
        case TextContent():
            return item if connector.takes_blank or item.text.strip() else None
        case FunctionCallContent() if connector.separator is not None:
            name = item.custom_fully_qualified_name(connector.separator)
            update = {"name": name, "plugin_name": None, "function_name": name}
        case FunctionResultContent() if (
            not connector.takes_blank and not str(item.result).strip()
        ):
            update = {"result": EMPTY}
        case _:
            pass
    if (
        isinstance(item, FunctionCallContent | FunctionResultContent)
        and ids.get(item.id, item.id) != item.id
    ):
        update["id"] = ids[item.id]
    return item.model_copy(update=update) if update else item


def _ordered(
    messages: Iterable[ChatMessageContent], connector: Connector
) -> list[ChatMessageContent]:
    ordered: list[ChatMessageContent] = []
    last: AuthorRole | None = None
    for message in messages:
        turn = (last, message.role)
        if turn in connector.joins:
            ordered[-1] = ordered[-1].model_copy(
                update={"items": [*ordered[-1].items, *message.items]}
            )
        else:
            ordered += [*connector.between.get(turn, ()), message]
        last = None if ordered[-1].role == _SYSTEM else ordered[-1].role
    return [*ordered, *connector.between.get((last, None), ())]


def _one_text(message: ChatMessageContent, connector: Connector) -> ChatMessageContent:
    if not connector.first_text:
        return message
    if connector.first_text == "without_images" and any(
        isinstance(item, ImageContent) for item in message.items
    ):
        return message
    items = with_one_text(message.items, "" if message.role == _ASSISTANT else "\n")
    return (
        message
        if items is message.items
        else message.model_copy(update={"items": items})
    )


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
    choice = behavior.type_.value if behavior.type_ is not None else "auto"
    return RequestBehavior.of(offered, choice, schemas=getattr(behavior, "schemas", ()))
