"""Semantic Kernel's messages: their texts, their calls, and the usage that a reply reports.

Nothing that a caller or a connector owns is changed; what must differ is copied.
"""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import reduce
from operator import add
from typing import Any, Final, NamedTuple, TypeVar, cast

from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel, ValidationError
from pydantic_core import to_jsonable_python
from semantic_kernel.connectors.ai import CompletionUsage
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.core.limits import is_count
from planner_ext.core.values import Message, RequestedCall, Usage

M = TypeVar("M", bound=ChatMessageContent)


class AssistantMessage(ChatMessageContent):
    """An assistant message that is sent with both its text and its calls.

    Semantic Kernel's own leaves out the text (chat_message_content.py, ``to_dict``).
    """

    def to_dict(
        self, role_key: str = "role", content_key: str = "content"
    ) -> dict[str, Any]:
        """Write the message as a connector sends it."""
        sent = super().to_dict(role_key=role_key, content_key=content_key)
        if "tool_calls" in sent and (text := text_of(self)):
            sent[content_key] = text
        return sent


INSIDE: Final = "planner_ext.inside"
"""Metadata: the functions whose results may be part of this; no model reads it."""


def names_inside(metadata: Mapping[str, Any]) -> frozenset[str]:
    """Read the functions whose results may be part of a result or message."""
    names: Any = metadata.get(INSIDE)
    listed = cast("list[object]", names) if isinstance(names, list) else []
    return frozenset(name for name in listed if isinstance(name, str))


def names_in(messages: Iterable[Message]) -> frozenset[str]:
    """Name the functions that messages have a call or a result of, directly or inside."""
    names = set[str]()
    for message in map(load_message, messages):
        names |= names_inside(message.metadata)
        for item in message.items:
            if isinstance(item, FunctionCallContent | FunctionResultContent):
                names.add(name_of(item))
                names |= names_inside(item.metadata)
    return frozenset(names - {""})


def with_names_of(
    after: Sequence[ChatMessageContent], before: Sequence[ChatMessageContent]
) -> tuple[ChatMessageContent, ...]:
    """Copy messages; the last says which functions were in those that they replace."""
    if not after or not (lost := names_in(before) - names_in(after)):
        return tuple(after)
    *others, last = after
    names = sorted(lost | names_inside(last.metadata))
    return *others, last.model_copy(
        update={"metadata": {**last.metadata, INSIDE: names}}
    )


def text_of(message: ChatMessageContent) -> str:
    """Join all text of a message; Semantic Kernel's ``content`` is its first piece only."""
    return "".join(item.text for item in message.items if isinstance(item, TextContent))


def with_one_text(items: list[Any], separator: str = "") -> list[Any]:
    """Join the texts among items into one, which comes first."""
    texts = [item for item in items if isinstance(item, TextContent)]
    if len(texts) < 2:
        return items
    whole = texts[0].model_copy(
        update={"text": separator.join(item.text for item in texts)}
    )
    return [whole, *(item for item in items if not isinstance(item, TextContent))]


def calls_of(message: ChatMessageContent) -> list[FunctionCallContent]:
    """List the function calls of a message."""
    return [item for item in message.items if isinstance(item, FunctionCallContent)]


def assistant_text(text: str, **fields: Any) -> ChatMessageContent:
    """Make an assistant message of a text, which may be empty."""
    return ChatMessageContent(
        role=AuthorRole.ASSISTANT, items=[TextContent(text=text)], **fields
    )


def load_message(message: Message) -> ChatMessageContent:
    """Return a message, or read it from its JSON."""
    if isinstance(message, ChatMessageContent):
        return message
    values: Any = message
    match values:
        case {"items": list()}:
            values = {
                **values,
                "items": [*values["items"]],
            }  # Semantic Kernel adds a content to this list
        case _:
            pass
    return ChatMessageContent.model_validate(values)


def with_items(
    message: ChatMessageContent, items: list[Any], metadata: dict[str, Any]
) -> AssistantMessage:
    """Copy a message with other items, which are not validated."""
    values: dict[str, Any] = {
        name: getattr(message, name) for name in ChatMessageContent.model_fields
    }
    given = (message.model_fields_set & values.keys()) | {"items", "metadata"}
    return AssistantMessage.model_construct(
        given, **(values | {"items": items, "metadata": metadata})
    )


# The calls of a reply.

ACCEPTED_ID = re.compile("[!-~]+")
"""Ids that servers accept: visible ASCII; some are signatures of thousands of characters."""


def name_of(call: FunctionCallContent | FunctionResultContent) -> str:
    """Name the function as the kernel would, with any separator of the connector."""
    if call.plugin_name and call.function_name:
        return f"{call.plugin_name}-{call.function_name}"
    return call.name or call.function_name


def new_call_id() -> str:
    """Make the id of a call that came without one that servers accept."""
    return f"call_{uuid.uuid4().hex[:24]}"


def requested_call(
    call: FunctionCallContent, used: set[str] | None = None
) -> RequestedCall:
    """Read one call of a reply: its name as the kernel has it, its arguments as JSON text.

    Its id is added to those ``used``; one that is missing, used or refused by servers
    is replaced. None keeps the id.
    """
    own = call.id or ""
    if used is not None:
        if own in used or not ACCEPTED_ID.fullmatch(own):
            own = new_call_id()
        used.add(own)
    arguments = call.arguments or ""
    if isinstance(call.arguments, Mapping):
        plain = to_jsonable_python(
            dict(call.arguments), bytes_mode="base64", fallback=str
        )
        arguments = json.dumps(plain, ensure_ascii=False)
    return RequestedCall(id=own, name=name_of(call), arguments=str(arguments))


def requested_calls(message: ChatMessageContent) -> tuple[RequestedCall, ...]:
    """List a message's calls as the core knows them."""
    return tuple(map(requested_call, calls_of(message)))


def with_own_ids(message: ChatMessageContent) -> ChatMessageContent:
    """Give each call of a reply a unique id."""
    used: set[str] = set()
    items: list[Any] = []
    for item in message.items:
        if isinstance(item, FunctionCallContent):
            call = requested_call(item, used)
            items.append(
                item.model_copy(update={"id": call.id, "arguments": call.arguments})
            )
        else:
            items.append(item)
    if used:
        return with_items(message, items, message.metadata)
    return message


# The usage that a reply reports. Each connector names tokens in its own way, and some omit part of their SDK's report:
# `usage_in` reads both. A count that is not a positive integer is ignored.

_KEYS = ("iterations", "Iterations")
"""Our key, and that of the ADR "Automatic tool calling controls"."""

_MOST = 2**53
"""Larger counts are not believed: JSON cannot carry them exactly."""

_DEEPEST = 4
"""How many levels of parts a usage object may have."""


class EstimatedUsage(CompletionUsage):
    """Semantic Kernel's usage of a reply that did not report all tokens."""

    estimated_tokens: int = 0


class _Names(NamedTuple):
    """One API's names for tokens; a dot leads into a nested field.

    Those of ``prompt`` and of ``completion`` are summed; of ``cached`` the first
    counts.
    """

    prompt: tuple[str, ...]
    completion: tuple[str, ...]
    cached: tuple[str, ...]
    total: str


_APIS = (
    # Semantic Kernel, OpenAI, Mistral, Azure AI Inference
    _Names(
        ("prompt_tokens",),
        ("completion_tokens",),
        ("prompt_tokens_details.cached_tokens",),
        "total_tokens",
    ),
    # Anthropic, whose input_tokens exclude cached ones; OpenAI's Responses, whose input_tokens include them
    _Names(
        ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
        ("output_tokens",),
        ("cache_read_input_tokens", "input_tokens_details.cached_tokens"),
        "total_tokens",
    ),
    # Bedrock, which excludes cached tokens, too
    _Names(
        ("inputTokens", "cacheWriteInputTokens", "cacheReadInputTokens"),
        ("outputTokens",),
        ("cacheReadInputTokens",),
        "totalTokens",
    ),
    # Google AI and Vertex AI: thoughts are billed as tokens received
    _Names(
        ("prompt_token_count", "tool_use_prompt_token_count"),
        ("candidates_token_count", "thoughts_token_count"),
        ("cached_content_token_count",),
        "total_token_count",
    ),
    # Ollama
    _Names(("prompt_eval_count",), ("eval_count",), (), ""),
)

_COUNTS = frozenset(
    name
    for api in _APIS
    for name in (*api.prompt, *api.completion, *api.cached, api.total)
)


def read_iterations(metadata: Mapping[str, Any]) -> int:
    """Read a reply's number of round trips; 1 unless it is a valid count."""
    for value in map(metadata.get, _KEYS):
        if is_count(value, least=1):
            return value
    return 1


def read_usage(reported: object) -> Usage:
    """Read the tokens from a connector's usage object or mapping; 0 for what it does not yield."""
    if (
        type(reported) is CompletionUsage
        and (usage := _read_stock(reported)) is not None
    ):
        return usage
    reported = _unwrapped(reported)
    names = _names_in(reported)
    if names is None:
        return Usage()
    prompt = _sum(reported, names.prompt)
    completion = _sum(reported, names.completion)
    rest = max(_count(reported, names.total) - prompt - completion, 0)
    if not prompt:  # the total beyond the other half, if it is reported
        prompt = rest
    elif not completion:
        completion = rest
    cached = next(
        (count for path in names.cached if (count := _count(reported, path))), 0
    )
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=min(cached, prompt),
    )


def usage_in(message: ChatMessageContent) -> Usage:
    """Read a reply's tokens: the larger of each count in its metadata and its SDK's response."""
    usage = read_usage(message.metadata.get("usage"))
    response = message.inner_content
    if response is None:
        return usage
    places = (part_of(response, "usage"), part_of(response, "usage_metadata"), response)
    for reported in (*places, part_of(part_of(response, "metadata"), "usage")):
        more = read_usage(reported)
        usage = Usage(
            prompt_tokens=max(usage.prompt_tokens, more.prompt_tokens),
            completion_tokens=max(usage.completion_tokens, more.completion_tokens),
            cached_tokens=max(usage.cached_tokens, more.cached_tokens),
        )
    return usage


def with_usage(message: M, usage: Usage) -> M:
    """Set the usage in a message's metadata; a connector's equal object is kept."""
    reported = message.metadata.get("usage")
    if reported is None and not usage.total_tokens:
        return message
    if type(reported) is CompletionUsage and _read_stock(reported) == usage:
        return message
    if (
        _is_sound(reported)
        and not usage.estimated_tokens
        and read_usage(reported) == usage
    ):
        return message
    return message.model_copy(
        update={"metadata": {**message.metadata, "usage": as_reported(usage)}}
    )


def without_usage(message: M) -> M:
    """Set the usage in a message's metadata to None, where it has one."""
    if message.metadata.get("usage") is None:
        return message
    return message.model_copy(update={"metadata": {**message.metadata, "usage": None}})


def as_reported(usage: Usage) -> CompletionUsage | None:
    """Convert tokens to Semantic Kernel's usage; None for 0 tokens."""
    if not usage.total_tokens:
        return None
    values: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
    }
    if usage.cached_tokens:
        values["prompt_tokens_details"] = PromptTokensDetails(
            cached_tokens=usage.cached_tokens
        )
    if usage.estimated_tokens:
        return EstimatedUsage(**values, estimated_tokens=usage.estimated_tokens)
    return CompletionUsage(**values)


def loaded(usage: Any) -> Any:
    """Read Semantic Kernel's own usage from its JSON; else return what is given."""
    usage = _unwrapped(usage)
    for kind in (CompletionUsage, EstimatedUsage):
        if (
            isinstance(usage, dict)
            and cast("dict[str, Any]", usage).keys() <= kind.model_fields.keys()
        ):
            with suppress(ValidationError):
                return kind.model_validate(usage)
    return cast("Any", usage)


def add_reported(first: Any, second: Any) -> Any:
    """Sum the usage of two requests, in the connector's type if it is one connector."""
    first = _unwrapped(first)
    second = _unwrapped(second)
    if first is None or second is None:
        return second if first is None else first
    if type(first) is type(second) and (
        type(first) is CompletionUsage or _adds_up(first)
    ):
        return first + second
    if _names_in(first) is _names_in(second) and _fields(first) and _fields(second):
        return _combine(first, second, add)
    own = [as_reported(read_usage(given)) for given in (first, second)]
    return add_reported(*own)


def merge_reported(first: Any, second: Any) -> Any:
    """Merge two reports of one stream: the larger of each number, since reports are cumulative."""
    if first is None or second is None:
        return second if first is None else first
    return _combine(_unwrapped(first), _unwrapped(second), max)


def _unwrapped(reported: Any) -> Any:
    """Unwrap usage from the tuple of one that Semantic Kernel's Mistral connector reports."""
    if not isinstance(reported, tuple | list):
        return reported
    parts = cast("Sequence[Any]", reported)
    return parts[0] if len(parts) == 1 else parts


def _names_in(reported: object) -> _Names | None:
    if reported is None or isinstance(reported, str | int | float):
        return None
    return next(
        (n for n in _APIS if _sum(reported, (*n.prompt, *n.completion, n.total))), None
    )


def _read_stock(reported: CompletionUsage) -> Usage | None:
    """Read most connectors' usage type without searching for names; None if incomplete or invalid."""
    prompt = reported.prompt_tokens
    completion = reported.completion_tokens
    details = reported.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    if not (type(prompt) is int and type(completion) is int and type(cached) is int):
        return None
    if not (0 < prompt < _MOST and 0 < completion < _MOST and 0 <= cached <= prompt):
        return None
    return Usage(
        prompt_tokens=prompt, completion_tokens=completion, cached_tokens=cached
    )


def _sum(reported: object, paths: tuple[str, ...]) -> int:
    return sum(_count(reported, path) for path in paths)


def _count(reported: object, path: str) -> int:
    value = reduce(part_of, path.split("."), reported)
    if is_count(value, least=1) and value < _MOST:
        return value
    return 0


def part_of(reported: object, name: str) -> object:
    """Read a field of an SDK's object or mapping; None if it is missing."""
    if isinstance(reported, Mapping):
        return cast("Mapping[object, object]", reported).get(name)
    return getattr(reported, name, None)


def _is_sound(reported: object) -> bool:
    fields = vars(reported) if _adds_up(reported) else _fields(reported)
    counts = [
        value for name, value in fields.items() if name in _COUNTS and value is not None
    ]
    whole = bool(counts) and all(isinstance(value, int) for value in counts)
    return whole and all(_is_sane(value, depth=_DEEPEST) for value in fields.values())


def _is_sane(value: object, *, depth: int) -> bool:
    if isinstance(value, int | float):
        return not isinstance(value, bool) and 0 <= value < _MOST
    if value is None or isinstance(value, str):
        return True
    return depth > 0 and all(
        _is_sane(part, depth=depth - 1) for part in _fields(value).values()
    )


def _adds_up(reported: Any) -> bool:
    return (
        not _fields(reported)
        and hasattr(reported, "__add__")
        and hasattr(reported, "__dict__")
    )


def _combine(first: Any, second: Any, combine: Callable[[Any, Any], Any]) -> Any:
    if isinstance(first, int | float) and isinstance(second, int | float):
        sane = [value for value in (first, second) if _is_sane(value, depth=0)]
        if len(sane) == 2:
            return combine(first, second)
        return next(iter(sane), None)
    one = _fields(first)
    other = _fields(second)
    if not one or not other:
        return first if one else second
    both = {
        key: _combine(value, other[key], combine)
        for key, value in one.items()
        if other.get(key) is not None
    }
    values = {
        **one,
        **{key: value for key, value in other.items() if value is not None},
        **both,
    }
    models = [given for given in (first, second) if isinstance(given, BaseModel)]
    widest = max(models, key=lambda model: len(type(model).model_fields), default=None)
    if widest is None:
        return values
    return widest.model_copy(update=values)


def _fields(reported: object) -> dict[str, Any]:
    if isinstance(reported, BaseModel):
        return dict(reported)
    return (
        dict(cast("Mapping[str, Any]", reported))
        if isinstance(reported, Mapping)
        else {}
    )
