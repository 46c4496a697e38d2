"""Incremental request encoding for OpenAI and Azure OpenAI: only new messages of a conversation are converted.

This module replaces or calls methods of Semantic Kernel's OpenAI connectors, most of
them private. If the source of one was changed, patched or wrapped, the request uses the
connector's public methods: slower, always correct.
"""

import inspect
import json
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import lru_cache
from types import FunctionType
from typing import Any, cast
from urllib.parse import quote

from openai import AsyncAzureOpenAI, AsyncOpenAI, AsyncStream, BadRequestError
from openai.resources.chat.completions import AsyncCompletions
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic_core import to_json
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.open_ai import (
    AzureChatCompletion,
    OpenAIChatCompletion,
)
from semantic_kernel.connectors.ai.open_ai.exceptions.content_filter_ai_exception import (
    ContentFilterAIException,
)
from semantic_kernel.connectors.ai.open_ai.services.open_ai_model_types import (
    OpenAIModelTypes,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    StreamingChatMessageContent,
)
from semantic_kernel.exceptions import (
    ServiceInvalidResponseError,
    ServiceResponseException,
)
from semantic_kernel.utils.telemetry.model_diagnostics import decorators as diagnostics

from planner_ext.sk.chat.prepared import post
from planner_ext.sk.chat.reply import with_refusal
from planner_ext.sk.chat.transport import ChatRequest, GenericTransport
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.sk.members import is_own

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
"""Methods of the connector that this module replaces, with the digests of their sources."""

CALLED: Mapping[str, tuple[str, ...]] = {
    "_handle_structured_output": ("request_settings", "settings"),
    "_get_metadata_from_chat_response": ("response",),
    "_get_metadata_from_streaming_chat_response": ("response",),
    "_create_chat_message_content": ("response", "choice", "response_metadata"),
    "_create_streaming_chat_message_content": (
        "chunk",
        "choice",
        "chunk_metadata",
        "function_invoke_attempt",
    ),
    "store_usage": ("response",),
}
"""Methods of the connector that are called, with the positional parameters passed."""

BODY_FIELDS = frozenset(inspect.signature(AsyncCompletions.create).parameters) - {
    "self"
}
"""The fields that the client accepts; it raises TypeError for any other."""

_POSTED = {"cast_to", "content", "options", "stream", "stream_cls"}
"""The keyword arguments of the client's ``post`` that are used here."""

_OPTIONS = {"extra_headers": "headers", "extra_query": "params", "timeout": "timeout"}
"""Settings that are sent beside the body, by the client's names."""

_encode = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":")
).encode
"""Writes JSON as the openai client does; a value that JSON cannot hold is an error."""


def is_supported(service: Any) -> bool:
    """Whether requests to a connector may bypass its own methods."""
    client = service.client
    kind, client_kind = cast("tuple[Any, Any]", (type(service), type(client)))
    return (
        kind in (OpenAIChatCompletion, AzureChatCompletion)
        and service.ai_model_type == OpenAIModelTypes.CHAT
        and service.__dict__.keys()
        <= kind.model_fields.keys()  # no method was set on the instance
        and all(
            is_own(getattr(kind, name, None), digest)
            for name, digest in REPLACED.items()
        )
        and all(
            _takes(getattr(kind, name, None), taken) for name, taken in CALLED.items()
        )
        and client_kind in (AsyncOpenAI, AsyncAzureOpenAI)
        and _is_openais(getattr(client.chat.completions.create, "__func__", None))
        and _takes_posted(getattr(client_kind, "post", None))
    )


@lru_cache(maxsize=64)
def _takes(method: Any, taken: tuple[str, ...]) -> bool:
    if not callable(method):
        return False
    parameters = [*inspect.signature(method).parameters.values()][1:]
    given = parameters[: len(taken)]
    others = parameters[len(taken) :]
    return tuple(p.name for p in given) == taken and all(
        p.default is not p.empty for p in others
    )


@lru_cache(maxsize=8)
def _is_openais(create: Any) -> bool:
    """Whether the method is OpenAI's; a tracing library's wrapper must be called instead."""
    return isinstance(create, FunctionType) and create.__globals__[
        "__name__"
    ].startswith("openai.")


@lru_cache(maxsize=8)
def _takes_posted(post: Any) -> bool:
    return callable(post) and inspect.signature(post).parameters.keys() >= _POSTED


class OpenAITransport:
    """Sends one run's requests to Semantic Kernel's own connectors for OpenAI."""

    def __init__(self, service: Any, generic: GenericTransport) -> None:
        self._service = service
        self._generic = generic
        self._source: list[ChatMessageContent] = []
        self._known = 0
        self._messages = bytearray()
        self._offered: tuple[Any, Any] = (None, ())
        self._tools = b""

    async def ask(self, request: ChatRequest) -> list[ChatMessageContent]:
        """Send a request; return a message for each choice."""
        encoded = self._encoded(request, streaming=False)
        if encoded is None:
            return await self._generic.ask(request)
        response = await self._post(encoded)
        if not isinstance(response, ChatCompletion):
            raise TypeError(
                f"a {type(response).__name__} where a ChatCompletion was expected"
            )
        metadata = self._service._get_metadata_from_chat_response(response)
        made = self._service._create_chat_message_content
        return [
            with_refusal(made(response, each, metadata)) for each in response.choices
        ]

    async def stream(
        self, request: ChatRequest
    ) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Send a request; yield the chunks of the first choice."""
        encoded = self._encoded(request, streaming=True)
        if encoded is None:
            async with aclosing(self._generic.stream(request)) as chunks:
                async for chunk in chunks:
                    yield chunk
            return
        response = await self._post(encoded)
        if not isinstance(response, AsyncStream):
            raise ServiceInvalidResponseError(
                f"Expected a stream of chunks; got a {type(response).__name__}."
            )
        model = self._model(request)
        async with cast("AsyncStream[ChatCompletionChunk]", response) as pieces:
            async for piece in pieces:
                chunk = self._chunk(piece, model)
                if chunk is not None:
                    yield chunk

    def _chunk(
        self, piece: ChatCompletionChunk, model: str
    ) -> StreamingChatMessageContent | None:
        """Convert a server's chunk; None if it holds nothing of the first choice."""
        first = next((choice for choice in piece.choices if choice.index == 0), None)
        if first is None and (piece.choices or piece.usage is None):
            return None
        metadata = self._service._get_metadata_from_streaming_chat_response(piece)
        if first is not None:
            chunk = self._service._create_streaming_chat_message_content(
                piece, first, metadata, 0
            )
            if first.delta and first.delta.refusal:
                return with_refusal(chunk)
            return chunk
        return StreamingChatMessageContent(
            role=AuthorRole.ASSISTANT,
            items=[],
            choice_index=0,
            inner_content=piece,
            ai_model_id=model,
            metadata=metadata,
            function_invoke_attempt=0,
        )

    async def _post(self, encoded: Mapping[str, Any]) -> Any:
        service = self._service
        try:
            response = await post(service.client, **encoded)
            service.store_usage(response)
        except BadRequestError as error:
            filtered = error.code == "content_filter"
            kind = ContentFilterAIException if filtered else ServiceResponseException
            raise kind(
                f"{type(service).__name__}: the request was refused", error
            ) from error
        except Exception as error:
            raise ServiceResponseException(
                f"{type(service).__name__}: the request failed", error
            ) from error
        return response

    def _encoded(
        self, request: ChatRequest, *, streaming: bool
    ) -> dict[str, Any] | None:
        """Encode a request; None if the connector's public methods must send it."""
        try:
            if diagnostics.are_model_diagnostics_enabled() or not is_supported(
                self._service
            ):
                return None
            fields, options = self._fields(request, streaming=streaming)
            tools = b""
            offered = request.offered
            if offered is not None and "tools" not in fields:
                tools = b',"tools":' + self._encoded_tools(offered)
            rest = _encode(fields)[1:-1].encode()
            messages = self._encoded_messages(request.messages, request.last)
        except Exception:  # the connector meets the same error, and raises its own
            self._source = []
            return None
        content = b'{"messages":[%b],%b%b}' % (messages, rest, tools)
        return {
            "path": self._path(request),
            "content": content,
            "options": options,
            "stream": streaming,
        }

    def _fields(
        self, request: ChatRequest, *, streaming: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a request's fields, without messages and functions, and the options of sending.

        Raises ValueError if the settings hold anything else.
        """
        settings: Any = request.settings
        kind, stock = cast("tuple[Any, Any]", (type(settings), PromptExecutionSettings))
        if kind.prepare_settings_dict is not stock.prepare_settings_dict:
            raise ValueError("the settings write themselves in their own way")
        fields: dict[str, Any] = settings.prepare_settings_dict()
        self._service._handle_structured_output(settings, fields)
        if not fields.keys() <= BODY_FIELDS:
            raise ValueError("the client does not take all settings")
        fields |= {"model": self._model(request), "stream": streaming}
        if streaming:
            fields["stream_options"] = {"include_usage": True}
        if request.choice is not None:
            fields["tool_choice"] = request.choice
            fields.pop("tools", None)
        elif "tools" not in fields:
            fields.pop("parallel_tool_calls", None)
        fields.pop("messages", None)
        options: dict[str, Any] = {"security": {"bearer_auth": True}}
        options |= {_OPTIONS[key]: fields.pop(key) for key in _OPTIONS if key in fields}
        fields |= fields.pop("extra_body", {})
        if "messages" in fields:
            raise ValueError("the settings bring messages of their own")
        return fields, options

    def _encoded_messages(
        self, messages: list[ChatMessageContent], last: ChatMessageContent | None
    ) -> bytes | bytearray:
        """Encode messages without brackets, converting only new ones; ``last`` is not cached."""
        lasting = len(messages) - (last is not None)
        if messages is not self._source or lasting < self._known:
            self._source = messages
            self._known = 0
            self._messages = bytearray()
        new = messages[self._known : lasting]
        if new:
            added = self._written(new)
            self._messages += b"," + added if self._known else added
            self._known = lasting
        if last is None:
            return self._messages
        return b"%b%b%b" % (
            self._messages,
            b"," if lasting else b"",
            self._written([last]),
        )

    def _written(self, messages: list[ChatMessageContent]) -> bytes:
        """Convert messages as the connector does, with its name for the role of instructions."""
        written = [message.to_dict() for message in messages]
        if self._service.instruction_role == "developer":
            for sent in written:
                sent["role"] = "developer" if sent["role"] == "system" else sent["role"]
        return to_json(written)[1:-1]

    def _encoded_tools(self, offered: ToolSet) -> bytes:
        if self._offered != (offered.tools, offered.schemas):
            written = [
                *(tool.offer for tool in offered.tools.values()),
                *map(_encode, offered.schemas),
            ]
            if not all(written):
                raise ValueError("a schema is not JSON")
            self._tools = f"[{','.join(written)}]".encode()
            self._offered = (offered.tools, offered.schemas)
        return self._tools

    def _model(self, request: ChatRequest) -> str:
        settings: Any = request.settings
        return settings.ai_model_id or self._service.ai_model_id

    def _path(self, request: ChatRequest) -> str:
        """Return the path, with Azure's deployment, which its client cannot read from an encoded body."""
        path = "/chat/completions"
        client = self._service.client
        if isinstance(client, AsyncAzureOpenAI) and "/deployments" not in str(
            client.base_url.path
        ):
            return f"/deployments/{quote(self._model(request), safe='')}{path}"
        return path
