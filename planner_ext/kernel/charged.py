"""Single requests that a function of a run makes: charged to its call before they are sent, tokens and cost after."""

from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Any

from pydantic import PrivateAttr
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.connectors.ai.text_completion_client_base import TextCompletionClientBase
from semantic_kernel.contents import AuthorRole, ChatMessageContent, StreamingTextContent, TextContent
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.core.accounts import Tab
from planner_ext.core.shares import Spent
from planner_ext.core.values import Usage
from planner_ext.kernel.budget import Price
from planner_ext.kernel.nested import Around, around_of, nothing_left
from planner_ext.kernel.prices import checked_price, price_of
from planner_ext.kernel.prompt_size import PromptSize
from planner_ext.kernel.usage import merge_reported, read_iterations, usage_in

__all__ = ["Charge", "ChargedTextCompletion", "charged"]

Charge = Callable[[ChatMessageContent | None], None]
"""Called with the reply to a request, or with None where there was no reply."""


@contextmanager
def charged(
    around: Around | None,
    service: AIServiceClientBase,
    settings: PromptExecutionSettings,
    price: Price | None,
    sent: Sequence[ChatMessageContent],
) -> Generator[Charge]:
    """Charge one request to the call that makes it; outside of every run nothing is charged.

    Args:
        around: The call, and its run.
        service: Which is asked.
        settings: Of the request.
        price: How the service counts cost; None is as the run around does.
        sent: The messages of the request, without its functions. Where tokens or cost are limited, what the reply does
            not report of its tokens is estimated from them; and so are those of a request that nobody waits for.

    Yields:
        What has to be called with the reply.

    Raises:
        LimitReachedError: If nothing is left for the request.
        NestedRunRefusedError: If the call has ended, or its run is to stop.
    """
    if around is None:
        yield lambda _: None
        return
    around.check()
    left = around.tab.left()
    counted = price_of(service, settings, price or around.price, left.cost)
    model: str = getattr(settings, "ai_model_id", None) or service.ai_model_id
    counted = None if counted is None else checked_price(counted, model)

    def spent(reply: ChatMessageContent) -> Usage:
        usage = usage_in(reply)
        if counted is not None or left.tokens is not None:
            usage = PromptSize(service, settings, 0).completed(usage, sent, None, reply)
        return usage if counted is None else replace(usage, cost=counted(reply.ai_model_id or model, usage))

    request, expected = object(), spent(ChatMessageContent(role=AuthorRole.ASSISTANT, content=""))
    if (limit := around.tab.take_request()) is not None:
        raise nothing_left(limit)
    around.tab.expect(request, expected)

    def charge(reply: ChatMessageContent | None) -> None:
        if reply is not None:
            more = Spent(iterations=read_iterations(reply.metadata) - 1, usage=spent(reply))
            around.tab.charge(more, instead_of=request)

    try:
        yield charge
    except Exception:
        around.tab.charge(Spent(), instead_of=request)
        raise


class ChargedTextCompletion(TextCompletionClientBase):
    """A text completion service whose requests are charged to the call of a run that makes them."""

    _inner: TextCompletionClientBase = PrivateAttr()
    _tab: Tab = PrivateAttr()

    def __init__(self, inner: TextCompletionClientBase, tab: Tab) -> None:
        super().__init__(ai_model_id=inner.ai_model_id, service_id=inner.service_id)
        self._inner = inner
        self._tab = tab

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Name the inner service's settings class."""
        return self._inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """Give the inner service's URL."""
        return self._inner.service_url()

    async def get_text_contents(self, prompt: str, settings: PromptExecutionSettings) -> list[TextContent]:
        """Ask the inner service.

        Raises:
            LimitReachedError: If nothing is left of the run's budget for the request.
            NestedRunRefusedError: If the call has ended, or its run is to stop.
        """
        with charged(around_of(self._tab), self._inner, settings, None, [_said(prompt)]) as charge:
            texts = await self._inner.get_text_contents(prompt, settings)
            charge(_said("".join(text.text for text in texts), texts[0]) if texts else None)
            return texts

    async def get_streaming_text_contents(
        self, prompt: str, settings: PromptExecutionSettings
    ) -> AsyncGenerator[list[StreamingTextContent], Any]:
        """Ask the inner service for a stream; raises as `get_text_contents` does."""
        last: StreamingTextContent | None = None
        usage: Any = None
        said = ""
        with charged(around_of(self._tab), self._inner, settings, None, [_said(prompt)]) as charge:
            try:
                async with aclosing(self._inner.get_streaming_text_contents(prompt, settings)) as stream:
                    async for chunks in stream:
                        for chunk in chunks:
                            last, said = chunk, said + (chunk.text or "")
                            usage = merge_reported(usage, chunk.metadata.get("usage"))
                        yield chunks
            finally:  # of a stream that is left early, what came
                if last is not None:
                    charge(_said(said, last.model_copy(update={"metadata": {**last.metadata, "usage": usage}})))


def _said(text: str, content: TextContent | None = None) -> ChatMessageContent:
    """Write a text as a message, with what came with it."""
    message = ChatMessageContent(role=AuthorRole.ASSISTANT, content=text)
    if content is None:
        return message
    return message.model_copy(update={"metadata": content.metadata, "inner_content": content.inner_content})
