"""A request that offers no functions to invoke: one round trip of the connector, and what it cost in the metadata."""

from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, aclosing
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent

from planner_ext.core.fold import CUT_SHORT
from planner_ext.core.values import Status
from planner_ext.kernel.accepted import accepted_reply
from planner_ext.kernel.assembly import ReplyAssembly
from planner_ext.kernel.charged import Charge
from planner_ext.kernel.chat import named_errors, no_reply
from planner_ext.kernel.connectors import received
from planner_ext.kernel.loop import FunctionNames, check_service, connector_settings
from planner_ext.kernel.messages import calls_of, merge_reply, text_of
from planner_ext.kernel.offer import Offer
from planner_ext.kernel.service_run import store
from planner_ext.kernel.usage import read_iterations

__all__ = ["pass_through", "pass_through_streaming"]


async def pass_through(
    inner: ChatCompletionClientBase,
    chat_history: ChatHistory,
    settings: PromptExecutionSettings,
    kwargs: dict[str, Any],
    request: AbstractContextManager[Charge],
) -> list[ChatMessageContent]:
    """Ask the connector once; calls in the reply are the caller's to run."""
    stored = kwargs.pop("store_final", False)
    settings = _request_settings(inner, settings, kwargs.get("kernel"))
    with request as charge, named_errors(inner):
        messages = await inner.get_chat_message_contents(chat_history, settings, **kwargs)
        charge(messages[0] if messages else None)
    if not messages:
        raise no_reply("a response without choices")
    messages = [*map(received, messages)]
    if stored:
        messages = [_accepted(message, kwargs.get("kernel")) for message in messages]
        for message in messages:
            store(chat_history, message)
    own = [_one_request(message.metadata) | _ended(message) for message in messages]
    return [m.model_copy(update={"metadata": metadata}) for m, metadata in zip(messages, own, strict=True)]


async def pass_through_streaming(
    inner: ChatCompletionClientBase,
    chat_history: ChatHistory,
    settings: PromptExecutionSettings,
    kwargs: dict[str, Any],
    request: AbstractContextManager[Charge],
) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
    """Ask the connector once, as a stream; calls in the reply are the caller's to run."""
    stored, reply = kwargs.pop("store_final", False), ReplyAssembly()
    settings = _request_settings(inner, settings, kwargs.get("kernel"))
    ended: dict[str, Any] = {}
    last: StreamingChatMessageContent | None = None
    with request as charge, named_errors(inner):
        try:
            async with aclosing(inner.get_streaming_chat_message_contents(chat_history, settings, **kwargs)) as stream:
                async for chunks in stream:
                    complete = [chunk and received(chunk) for chunk in chunks]
                    for chunk in complete:
                        if chunk is not None:  # pyright: ignore[reportUnnecessaryComparison]
                            reply.add(chunk)
                            if chunk.finish_reason is not None:
                                ended = _ended(reply.message())
                            chunk.metadata = _one_request(chunk.metadata) | ended
                            last = chunk
                    yield complete
        finally:  # of a stream that is left early, what came
            charge(reply.message() if reply.any else None)
    if last is not None and reply.any and not ended:
        own: dict[str, Any] = {"items": [], "metadata": last.metadata | _ended(reply.message())}
        yield [last.model_copy(update=own)]
    if not reply.any:
        raise no_reply("a stream without any choice")
    if stored:
        store(chat_history, _accepted(reply.message(), kwargs.get("kernel")))


def _accepted(message: ChatMessageContent, kernel: Kernel | None) -> ChatMessageContent:
    """Write a reply for the history, in which every later request sends it."""
    return accepted_reply(merge_reply([message]), () if kernel is None else FunctionNames(kernel))[0]


def _request_settings(
    inner: ChatCompletionClientBase, settings: PromptExecutionSettings, kernel: Kernel | None
) -> PromptExecutionSettings:
    """Refuse functions that the connector would ignore, and let it invoke none by itself."""
    behavior = settings.function_choice_behavior
    if behavior is None or kernel is None or behavior.type_ is FunctionChoiceType.NONE:
        return settings
    own = connector_settings(inner, settings)
    check_service(inner, own, Offer(kernel, behavior, own))
    return own.model_copy(update={"function_choice_behavior": None}) if behavior.auto_invoke_kernel_functions else own


def _ended(message: ChatMessageContent) -> dict[str, Any]:
    """Say how one request ended: with calls that are the caller's to run it is not answered yet."""
    cut = message.finish_reason is not None and message.finish_reason.value in CUT_SHORT
    status: Status = "incomplete" if cut or not (calls_of(message) or text_of(message)) else "answered"
    return {"status": "stopped" if status == "answered" and calls_of(message) else status, "limit": None}


def _one_request(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "iterations": read_iterations(metadata), "tool_calls": 0}
