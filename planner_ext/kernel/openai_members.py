"""Whether Semantic Kernel's OpenAI connectors and the openai client are inside what our encoding was made for.

The encoding takes the place of some methods and calls others, most of them private. Each is looked at before each
request, by itself and not by a version number: one that was changed, patched or wrapped sends the request the
connector's own way, which is slower and never wrong.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, cast

from openai import AsyncAzureOpenAI, AsyncOpenAI
from openai.resources.chat.completions import AsyncCompletions
from semantic_kernel.connectors.ai.open_ai import AzureChatCompletion, OpenAIChatCompletion
from semantic_kernel.connectors.ai.open_ai.services.open_ai_model_types import OpenAIModelTypes
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings

__all__ = ["BODY_FIELDS", "CALLED", "REPLACED", "is_as_expected", "is_own", "keeps_its_fields", "source_digest"]

logger = logging.getLogger(__name__)

REPLACED: Mapping[str, str] = {
    "get_chat_message_contents": "5507742c0e3dc6f1",
    "get_streaming_chat_message_contents": "4b8eba9df5e5b029",
    "_inner_get_chat_message_contents": "30f0a649f1ad1762",
    "_inner_get_streaming_chat_message_contents": "4aa5a6cb0100fc62",
    "_prepare_chat_history_for_request": "d18d4ace92ca63a1",
    "_send_request": "80f1ddbd0009fd3e",
    "_send_completion_request": "8bcc8ad59490e0b4",
    "_update_function_choice_settings_callback": "437d3d94f17070c5",
}
"""Methods of the connector that are not called, and the digests of the sources of which we do the work."""

CALLED: Mapping[str, tuple[str, ...]] = {
    "_handle_structured_output": ("request_settings", "settings"),
    "_get_metadata_from_chat_response": ("response",),
    "_get_metadata_from_streaming_chat_response": ("response",),
    "_create_chat_message_content": ("response", "choice", "response_metadata"),
    "_create_streaming_chat_message_content": ("chunk", "choice", "chunk_metadata", "function_invoke_attempt"),
    "store_usage": ("response",),
}
"""Methods of the connector that are called, and the parameters that they are given by position."""

_POSTED = ("cast_to", "content", "options", "stream", "stream_cls")
"""What the client's ``post`` is given by name."""


def _body_fields() -> frozenset[str]:
    return frozenset(inspect.signature(AsyncCompletions.create).parameters) - {"self"}


BODY_FIELDS = _body_fields()
"""What the client takes as a request; it raises TypeError for a setting of any other name."""


def is_as_expected(service: Any) -> bool:
    """Whether requests to a connector may go past its own methods."""
    client = service.client
    kind, client_kind = cast("tuple[Any, Any]", (type(service), type(client)))
    return (
        kind in (OpenAIChatCompletion, AzureChatCompletion)
        and service.ai_model_type == OpenAIModelTypes.CHAT
        and service.__dict__.keys() <= kind.model_fields.keys()  # a method put on the object itself
        and all(is_own(getattr(kind, name, None), digest) for name, digest in REPLACED.items())
        and all(_takes(getattr(kind, name, None), taken) for name, taken in CALLED.items())
        and client_kind in (AsyncOpenAI, AsyncAzureOpenAI)
        and _is_openais(getattr(client.chat.completions.create, "__func__", None))
        and _takes_named(getattr(client_kind, "post", None))
    )


def keeps_its_fields(settings: PromptExecutionSettings) -> bool:
    """Whether settings are written as Semantic Kernel writes them."""
    kind: Any = type(settings)
    stock: Any = PromptExecutionSettings
    return kind.prepare_settings_dict is stock.prepare_settings_dict


@lru_cache(maxsize=64)
def is_own(method: Any, digest: str) -> bool:
    """Whether a method is Semantic Kernel's, unwrapped, with the source of this digest."""
    own = isinstance(method, FunctionType) and method.__globals__["__name__"].startswith("semantic_kernel.")
    if own and source_digest(method) == digest:
        return True
    logger.info("Requests are encoded anew each time: %r is not what it was when our encoding was written.", method)
    return False


def source_digest(method: Callable[..., Any]) -> str:
    """Digest a function's source: 16 hexadecimal digits, "" where there is none to be read."""
    try:
        source = inspect.getsource(method)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


@lru_cache(maxsize=64)
def _takes(method: Any, taken: tuple[str, ...]) -> bool:
    """Whether a method can be called with these and nothing else, by position."""
    if not callable(method):
        return False
    parameters = [*inspect.signature(method).parameters.values()][1:]
    return tuple(p.name for p in parameters[: len(taken)]) == taken and all(
        p.default is not p.empty for p in parameters[len(taken) :]
    )


@lru_cache(maxsize=8)
def _is_openais(create: Any) -> bool:
    """Whether the client's method is the package's own; tracing libraries wrap it, and then it has to be called."""
    return isinstance(create, FunctionType) and create.__globals__["__name__"].startswith("openai.")


@lru_cache(maxsize=8)
def _takes_named(post: Any) -> bool:
    return callable(post) and set(_POSTED) <= inspect.signature(post).parameters.keys()
