"""A request that offers no functions to invoke: one round trip of the connector, and what it cost in the metadata."""

from collections.abc import AsyncGenerator
from typing import Any

from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent

from planner_ext.kernel.assembly import ReplyAssembly
from planner_ext.kernel.service_run import store
from planner_ext.kernel.usage import read_iterations

__all__ = ["pass_through", "pass_through_streaming"]


async def pass_through(
    inner: ChatCompletionClientBase,
    chat_history: ChatHistory,
    settings: PromptExecutionSettings,
    kwargs: dict[str, Any],
) -> list[ChatMessageContent]:
    """Ask the connector once; calls in the reply are the caller's to run."""
    stored = kwargs.pop("store_final", False)
    messages = await inner.get_chat_message_contents(chat_history, settings, **kwargs)
    for message in messages if stored else ():
        store(chat_history, message)
    return [message.model_copy(update={"metadata": _one_request(message.metadata)}) for message in messages]


async def pass_through_streaming(
    inner: ChatCompletionClientBase,
    chat_history: ChatHistory,
    settings: PromptExecutionSettings,
    kwargs: dict[str, Any],
) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
    """Ask the connector once, as a stream; calls in the reply are the caller's to run."""
    stored, reply = kwargs.pop("store_final", False), ReplyAssembly()
    async for chunks in inner.get_streaming_chat_message_contents(chat_history, settings, **kwargs):
        for chunk in chunks:
            if chunk is not None:  # pyright: ignore[reportUnnecessaryComparison]
                chunk.metadata = _one_request(chunk.metadata)
                if stored:
                    reply.add(chunk)
        yield chunks
    if stored and reply.any:
        store(chat_history, reply.message())


def _one_request(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "iterations": read_iterations(metadata), "tool_calls": 0}
