"""One round trip through a connector of Semantic Kernel, plain or streamed.

The seam between transcript and request: the history is rendered here, incrementally,
and nowhere else.
"""

import logging
from collections.abc import Generator, Mapping, Sequence
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext.core.facts import Failure
from planner_ext.core.limits import RemainingLimit
from planner_ext.core.machine import AskModel
from planner_ext.core.values import Reply, TranscriptItem, Usage
from planner_ext.engine.ports import (
    Emit,
    TextDelta,
    current_circuit,
)
from planner_ext.sk.chat.connectors import connector_of
from planner_ext.sk.chat.history import render
from planner_ext.sk.chat.prices import RequestMeter
from planner_ext.sk.chat.reply import (
    ReplyAssembly,
    accepted_reply,
    has_form,
    reply_ended_by,
)
from planner_ext.sk.chat.transport import (
    ChatRequest,
    GenericTransport,
    endpoint_of,
)
from planner_ext.sk.errors import (
    InvalidReplyError,
)
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.sk.messages import read_iterations, read_usage, text_of, with_usage

if TYPE_CHECKING:
    from planner_ext.sk.chat.openai import OpenAITransport

_logger = logging.getLogger(__name__)

_TOOL_SETTINGS = ("tools", "tool_choice", "tool_config")
"""The settings that hold functions which are offered."""


@dataclass(eq=False)
class KernelChat:
    """Asks one connector for one run. Implements `planner_ext.engine.ports.Chat`.

    Attributes:
        plan_settings, answer_settings: Settings in which these requests differ.
    """

    service: ChatCompletionClientBase
    settings: PromptExecutionSettings
    _: KW_ONLY
    kernel: Kernel | None
    arguments: KernelArguments | None
    tools: ToolSet
    meter: RequestMeter
    streaming: bool
    strict_finish_reason: bool = False
    plan_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    answer_settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    _rendered: list[ChatMessageContent] = field(
        default_factory=list[ChatMessageContent], init=False
    )
    _entries: Sequence[TranscriptItem] = field(default=(), init=False)
    _transport: "GenericTransport | OpenAITransport" = field(init=False)

    def __post_init__(self) -> None:
        self._connector = connector_of(self.service)
        self._in_form = bool(self.answer_settings) or has_form(self.settings)
        generic = GenericTransport(
            self.service, kernel=self.kernel, arguments=self.arguments
        )
        self._transport = generic
        if type(self.service).__module__.startswith(
            "semantic_kernel.connectors.ai.open_ai."
        ):
            try:
                from planner_ext.sk.chat.openai import OpenAITransport  # noqa: PLC0415  (loaded for these connectors only)
            except ImportError as error:
                _logger.info("Requests are encoded anew each time: %s.", error)
            else:
                self._transport = OpenAITransport(self.service, generic)

    def messages(
        self, transcript: Sequence[TranscriptItem]
    ) -> list[ChatMessageContent]:
        """Write a transcript as messages, reusing those of its earlier entries."""
        return list(self._written(transcript))

    def _written(
        self, transcript: Sequence[TranscriptItem]
    ) -> list[ChatMessageContent]:
        """Return a transcript's messages: the same list while transcripts only grow."""
        if transcript is not self._entries:
            known = len(self._entries)
            if self._entries != transcript[:known]:
                self._rendered = []
                known = 0
            self._rendered += render(transcript[known:])
            self._entries = transcript
        return self._rendered

    async def ask(
        self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None
    ) -> Reply:
        """Send the transcript and return the reply; raises as `named_errors` does."""
        self.tools.reads = request.reads
        self.tools.refresh()
        sent = self._request(transcript, request)
        tools = self.tools if request.tool_choice else None
        meter = self.meter
        if meter.max_prompt_tokens:
            meter.check(sent.sent, tools)
        with named_errors(self.service):
            messages = await self._send(sent, request.iteration, emit)
        message, calls = accepted_reply(messages, self.tools.functions)
        usage = read_usage(message.metadata.get("usage"))
        if meter.estimates:
            usage = meter.used(usage, sent.sent, tools, message)
        message = with_usage(message, usage)
        reason = reply_ended_by(message, in_form=self._in_form)
        if (
            self.strict_finish_reason
            and self._connector.says_calls
            and (reason == "tool_calls") != bool(calls)
        ):
            raise InvalidReplyError(
                f"Expected finish_reason tool_calls exactly where there are calls; got {reason!r} with {len(calls)} "
                "calls. Set strict_finish_reason=False to judge replies by their content."
            )
        return Reply(
            message=message,
            text=text_of(message),
            calls=calls,
            finish_reason=reason,
            usage=replace(usage, iterations=read_iterations(message.metadata)),
            functions_available=self.tools.available,
        )

    def failure(self, error: BaseException) -> Failure:
        """Say how far a request came; see `Chat`."""
        from planner_ext.sk.chat.faults import failure_of  # noqa: PLC0415  (only where a request fails)

        return failure_of(error)

    def estimated(
        self, transcript: Sequence[TranscriptItem], request: AskModel
    ) -> Usage:
        """Estimate what a request without a reply has used; see `Chat`."""
        if not self.meter.estimates:
            return Usage()
        self.tools.refresh()
        sent = self._request(transcript, request).sent
        return self.meter.used(
            Usage(), sent, self.tools if request.tool_choice else None, None
        )

    def _request(
        self, transcript: Sequence[TranscriptItem], request: AskModel
    ) -> ChatRequest:
        update: dict[str, Any] = {}
        if request.iteration < 0:
            update |= {
                k: v
                for k, v in self.plan_settings.items()
                if k in type(self.settings).model_fields
            }
        messages = self._written(transcript)
        if (
            request.structured
            and not (request.offer and self.tools.available)
            and self._may_ask_for_form(messages)
        ):
            update |= self.answer_settings
        choice = request.tool_choice
        tools = self.tools
        if choice == "none" and not self._connector.takes_none:
            choice = None
        offered = choice is not None and bool(tools.functions)
        if choice == "none" and not offered and tools.schemas:
            update["tool_choice"] = choice
        elif choice is None:
            update |= {
                key: None
                for key in _TOOL_SETTINGS
                if vars(self.settings).get(key) is not None
            }
        return ChatRequest(
            messages=messages,
            last=with_budget_note(messages, request.left) if request.left else None,
            settings=self.settings.model_copy(update=update)
            if update
            else self.settings,
            choice=choice if offered else None,
            offered=tools if offered else None,
        )

    def _may_ask_for_form(self, messages: Sequence[ChatMessageContent]) -> bool:
        """Whether the form may be sent: OpenAI refuses ``json_object`` where no message speaks of JSON."""
        if self.answer_settings.get("response_format") != {"type": "json_object"}:
            return True
        return any("json" in text_of(message).lower() for message in messages)

    async def _send(
        self, request: ChatRequest, iteration: int, emit: Emit | None
    ) -> list[ChatMessageContent]:
        if not self.streaming:
            messages = await self._transport.ask(request)
            if not messages:
                raise no_reply("a response without choices")
            return messages
        assembly = ReplyAssembly()
        async with aclosing(self._transport.stream(request)) as chunks:
            async for chunk in chunks:
                text = assembly.add(chunk)
                if emit is not None:
                    await emit(TextDelta(text=text, iteration=iteration, chunk=chunk))
        if not assembly.is_reply:
            raise no_reply("a stream without any choice")
        return [assembly.message()]


# The errors of a request.


def no_reply(seen: str) -> InvalidReplyError:
    """Make the error for a response that is not a reply."""
    return InvalidReplyError(
        f"Expected a reply with at least one choice; the service answered with {seen}. "
        "The history is as it was: the request can be made again."
    )


@contextmanager
def named_errors(service: ChatCompletionClientBase) -> Generator[None]:
    """Make a request; convert a connector's exceptions as `planner_ext.sk.chat.faults` does.

    Raises:
        InvalidReplyError: If the connector could not read the response.
        ServiceCallError: If the request failed otherwise, or its endpoint is out.
    """
    circuit = current_circuit.get()
    reached = nullcontext("") if circuit is None else circuit(endpoint_of(service))
    with reached as problem:
        try:
            if problem:
                raise ConnectionRefusedError(problem)
            yield
        except Exception as error:
            from planner_ext.sk.chat.faults import named  # noqa: PLC0415  (only where a request fails)

            named_error = named(error, service)
            if named_error is error:
                raise
            raise named_error from error


# The budget note: what is left of the budget, sent to the model with one request and kept nowhere.

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
    """Copy the newest message with what is left of each limit at its end; None if there is nothing to add.

    The note is not a message of its own: after a tool message some providers accept
    only an assistant's. Earlier messages stay the same, for prompt caches. An
    assistant's message, which the model continues, gets no note.
    """
    if not left or not messages or messages[-1].role == AuthorRole.ASSISTANT:
        return None
    note = f"[Budget left, this request included: {'; '.join(map(_described, left))}.]"
    newest = messages[-1]
    *items, last = newest.items or [None]
    match last:
        case TextContent():
            items.append(
                last.model_copy(update={"text": f"{last.text}\n\n{note}".lstrip()})
            )
        case FunctionResultContent():
            items.append(
                last.model_copy(update={"result": f"{last.result}\n\n{note}".lstrip()})
            )
        case _:
            items = [*newest.items, TextContent(text=note)]
    return newest.model_copy(update={"items": items})


def _described(item: RemainingLimit) -> str:
    if item.name == "deadline":
        return f"{item.left:.0f} seconds to the deadline"
    left, limit = (
        str(value) if isinstance(value, int) else f"{value:.4g}"
        for value in (item.left, item.limit)
    )
    return f"{left} of {limit} {_UNITS[item.name]}"
