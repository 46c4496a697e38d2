"""One round trip through a connector of Semantic Kernel, plain or streamed.

This is the seam between a transcript and a request: the history is rendered here, incrementally, and nowhere else.
"""

import asyncio
import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionResultContent, TextContent
from semantic_kernel.exceptions import KernelException, ServiceResponseException

from planner_ext.core.limits import RemainingLimit
from planner_ext.core.machine import AskModel
from planner_ext.core.values import Reply, TranscriptItem, Usage
from planner_ext.engine.ports import Emit, TextDelta
from planner_ext.sk.budget import Price
from planner_ext.sk.connectors import NO_FUNCTION, connector_of, has_calls
from planner_ext.sk.errors import InvalidReplyError, ServiceCallError
from planner_ext.sk.history import accepted_reply, render
from planner_ext.sk.messages import ReplyAssembly, merge_reply, text_of
from planner_ext.sk.prices import PromptSize, checked_price
from planner_ext.sk.toolset import ToolSet
from planner_ext.sk.transport import ChatRequest, ChatTransport, GenericTransport
from planner_ext.sk.usage import read_iterations, read_usage, with_usage

if TYPE_CHECKING:
    from semantic_kernel.functions import KernelArguments
__all__ = ["KernelChat", "named_errors", "no_reply", "with_budget_note"]

# What is left of the budget, told to the model with one request and kept nowhere.

_UNITS = {
    "max_iterations": "round trips",
    "max_tool_calls": "tool calls",
    "max_total_tokens": "tokens",
    "max_cost": "US dollars",
    "max_active_seconds": "seconds of work",
}


def with_budget_note(
    messages: Sequence[ChatMessageContent], left: Sequence[RemainingLimit]
) -> ChatMessageContent | None:
    """Copy the newest message with what is left added to it; None where nothing is to be said.

    It is added to the end of that message's text, and not sent as a message of its own: right after a tool message some
    providers take an assistant's turn only, and everywhere results have to follow their calls. All that stands before
    it is the same from request to request, so a prompt cache keeps what it has. Where the newest message is the
    assistant's own, a turn that it is to go on with, nothing is said.

    Args:
        messages: What is to be sent; not changed.
        left: What to say; nothing for nothing.
    """
    if not left or not messages or messages[-1].role == AuthorRole.ASSISTANT:
        return None
    newest = messages[-1]
    words = f"[Budget left, this request included: {'; '.join(_words(item) for item in left)}.]"
    return newest.model_copy(update={"items": _ending(newest.items, words)})


def _words(item: RemainingLimit) -> str:
    if item.name == "deadline":
        return f"{item.left:.0f} seconds to the deadline"
    return f"{_number(item.left)} of {_number(item.limit)} {_UNITS[item.name]}"


def _number(value: float) -> str:
    """Write a number without more digits than say something."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _ending(items: Sequence[Any], words: str) -> list[Any]:
    """Let the last text or result end with the words; what has neither gets a text."""
    last = items[-1] if items else None
    match last:
        case TextContent():
            return [*items[:-1], last.model_copy(update={"text": f"{last.text}\n\n{words}".lstrip()})]
        case FunctionResultContent():
            return [*items[:-1], last.model_copy(update={"result": f"{last.result}\n\n{words}".lstrip()})]
        case _:
            return [*items, TextContent(text=words)]


_logger = logging.getLogger(__name__)

_NO_REPLY = (TypeError, ValueError, IndexError, AttributeError, KeyError, AssertionError)
"""What connectors raise on a response that is not what they expect."""

_TOOL_SETTINGS = ("tools", "tool_choice", "tool_config")
"""Where settings hold the functions that are offered."""


class KernelChat:
    """Asks one connector. Implements `planner_ext.engine.ports.Chat`.

    Attributes:
        unanswered: Tokens, and their cost, of a request that was cancelled, estimated where estimates are wanted.
    """

    def __init__(
        self,
        service: ChatCompletionClientBase,
        settings: PromptExecutionSettings,
        *,
        kernel: Kernel | None,
        arguments: "KernelArguments | None",
        offer: ToolSet,
        streaming: bool,
        strict_finish_reason: bool = False,
        price: Price | None = None,
        max_prompt_tokens: int = 0,
        estimates: bool = False,
        plan_settings: dict[str, Any] | None = None,
        answer_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Bind a run to its connector.

        Args:
            service: The connector.
            settings: Of every request.
            kernel: Handed to the connector, with ``arguments``.
            arguments: The application's.
            offer: What requests offer.
            streaming: Whether requests are streamed.
            strict_finish_reason: Whether a finish reason that contradicts the reply's content is an error.
            price: Of a request; None counts no cost.
            max_prompt_tokens: Most tokens of a request; 0 is no limit.
            estimates: Whether tokens that a reply does not report are estimated; with a price they always are.
            plan_settings: Those of the plan request that differ.
            answer_settings: Those of the answer request that differ.

        Raises:
            PlannerInvalidConfigurationError: If the price cannot be used.
        """
        self._service = service
        self._connector = connector_of(service)
        self._settings = settings
        self._model: str = getattr(settings, "ai_model_id", None) or service.ai_model_id
        self._transport = _transport_for(service, kernel=kernel, arguments=arguments)
        self._offer = offer
        self._streaming = streaming
        self._strict = strict_finish_reason
        self._price = None if price is None else checked_price(price, self._model)
        self._estimates = estimates or price is not None
        self._size = PromptSize(service, settings, max_prompt_tokens)
        self._plan_settings = plan_settings or {}
        self._answer_settings = answer_settings or {}
        self._rendered: list[ChatMessageContent] = []
        self._entries: Sequence[TranscriptItem] = ()
        self.unanswered = Usage()

    def messages(self, transcript: Sequence[TranscriptItem]) -> list[ChatMessageContent]:
        """Write a transcript as messages; what was written before is not written again."""
        return list(self._written(transcript))

    def _written(self, transcript: Sequence[TranscriptItem]) -> list[ChatMessageContent]:
        """Bring what is written up to a transcript: the same list if that only goes on, else another one."""
        if transcript is not self._entries:
            known = len(self._entries)
            if self._entries != transcript[:known]:
                self._rendered, known = [], 0
            self._rendered += render(transcript[known:], self._offer.functions)
            self._entries = transcript
        return self._rendered

    async def ask(self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None) -> Reply:
        """Send the transcript and bring the reply back.

        Raises:
            InvalidReplyError: If the response is none.
            ServiceCallError: If the connector raised something of its own making.
            KernelException: Whatever of that kind the connector raised.
        """
        self._offer.refresh()
        sent = self._request(transcript, request)
        offer = self._offer if request.tool_choice else None
        self._size.check(sent.sent, offer)
        try:
            with named_errors(self._service):
                if self._streaming:
                    message = await self._stream(sent, request.iteration, emit)
                else:
                    message = merge_reply(self._nonempty(await self._transport.ask(sent)))
        except asyncio.CancelledError:
            if self._estimates:
                nothing = ChatMessageContent(role=AuthorRole.ASSISTANT, content="")
                self.unanswered = self._priced(nothing, self._size.completed(Usage(), sent.sent, offer, nothing))
            raise
        usage = read_usage(message.metadata.get("usage"))
        if self._estimates:
            usage = self._size.completed(usage, sent.sent, offer, message)
        return self._reply(with_usage(message, usage), usage)

    def _request(self, transcript: Sequence[TranscriptItem], request: AskModel) -> ChatRequest:
        """Write a request, with settings of its own."""
        update: dict[str, Any] = {"function_choice_behavior": None}
        if request.iteration < 0:
            update |= {k: v for k, v in self._plan_settings.items() if k in type(self._settings).model_fields}
        if request.structured and not (request.offer and self._offer.available):
            update |= self._answer_settings
        messages = self._written(transcript)
        choice, offer = request.tool_choice, self._offer
        if choice == "none" and not self._connector.takes_none:
            choice = None
        offered = choice is not None and bool(offer.functions)
        functions = offer.metadata() if offered else ()
        if choice == "none" and not offered and offer.schemas:
            update["tool_choice"] = choice
        elif choice is None:
            update |= {key: None for key in _TOOL_SETTINGS if hasattr(self._settings, key)}
            if self._connector.needs_tools and has_calls(messages):
                choice, functions = "auto", (NO_FUNCTION,)
        return ChatRequest(
            messages=messages,
            last=with_budget_note(messages, request.left),
            settings=self._settings.model_copy(update=update),
            choice=choice if functions else None,
            functions=functions,
            schemas=tuple(offer.schemas) if offered else (),
        )

    async def _stream(self, request: ChatRequest, iteration: int, emit: Emit | None) -> ChatMessageContent:
        assembly = ReplyAssembly()
        async with aclosing(self._transport.stream(request)) as chunks:
            async for chunk in chunks:
                text = assembly.add(chunk)
                if emit is not None:
                    await emit(TextDelta(text=text, iteration=iteration, chunk=chunk))
        if not assembly.any:
            raise no_reply("a stream without any choice")
        return merge_reply([assembly.message()])

    @staticmethod
    def _nonempty(messages: list[ChatMessageContent]) -> list[ChatMessageContent]:
        if not messages:
            raise no_reply("a response without choices")
        return messages

    def _priced(self, message: ChatMessageContent, usage: Usage) -> Usage:
        if self._price is None:
            return usage
        return replace(usage, cost=self._price(message.ai_model_id or self._model, usage))

    def _reply(self, message: ChatMessageContent, usage: Usage) -> Reply:
        message, calls = accepted_reply(message, self._offer.functions)
        reason = message.finish_reason.value if message.finish_reason is not None else None
        if self._strict and (reason == "tool_calls") != bool(calls):
            raise InvalidReplyError(
                f"Expected finish_reason tool_calls exactly where there are calls; got {reason!r} with {len(calls)} "
                "calls. Set strict_finish_reason=False to judge replies by their content."
            )
        return Reply(
            message=message,
            text=text_of(message),
            calls=calls,
            finish_reason=reason,
            usage=self._priced(message, usage),
            iterations=read_iterations(message.metadata),
            functions_available=self._offer.available,
        )


def _transport_for(
    service: ChatCompletionClientBase, *, kernel: Kernel | None, arguments: "KernelArguments | None"
) -> ChatTransport:
    """Choose the way to a connector: those for OpenAI and Azure OpenAI have one that grows the request."""
    generic = GenericTransport(service, kernel=kernel, arguments=arguments)
    if not type(service).__module__.startswith("semantic_kernel.connectors.ai.open_ai."):
        return generic
    try:
        from planner_ext.sk.openai import OpenAITransport  # noqa: PLC0415  (only who has the connector pays for it)
    except ImportError as error:
        _logger.info("Requests are encoded anew each time: %s.", error)
        return generic
    return OpenAITransport(service, generic)


def no_reply(seen: str) -> InvalidReplyError:
    """Make the error for a response that is none."""
    return InvalidReplyError(
        f"Expected a reply with at least one choice; the service answered with {seen}. "
        "The history is as it was: the request can be made again."
    )


@contextmanager
def named_errors(service: ChatCompletionClientBase) -> Generator[None]:
    """Name what a connector raises, and chain its cause; its own named errors pass as they are."""
    try:
        yield
    except KernelException as error:
        if type(error) is not ServiceResponseException:
            raise
        cause = error.__cause__ or error
        raise (_unreadable if isinstance(cause, _NO_REPLY) else _failed)(service, cause) from error
    except _NO_REPLY as error:
        raise _unreadable(service, error) from error
    except Exception as error:
        raise _failed(service, error) from error


def _failed(service: ChatCompletionClientBase, cause: BaseException) -> ServiceCallError:
    return ServiceCallError(
        f"The request to {type(service).__name__} {service.ai_model_id!r} failed: {_described(cause)}. "
        "The history is as it was: the request can be made again."
    )


def _unreadable(service: ChatCompletionClientBase, cause: BaseException) -> InvalidReplyError:
    return InvalidReplyError(
        f"Expected a chat completion from {type(service).__name__} {service.ai_model_id!r}; its response could not be "
        f"read as one ({_described(cause)}). Check the base URL, and that the endpoint speaks the "
        "connector's protocol. The history is as it was: the request can be made again."
    )


def _described(error: BaseException) -> str:
    """Name an error and give its words, without the full stop that the sentence around them has itself."""
    return f"{type(error).__name__}: {error}".removesuffix(".")
