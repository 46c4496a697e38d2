"""Handles a service's request: as a run, which keeps the caller's history up to date, or as one round trip."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
    StreamingTextContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext.core.facts import (
    AnswerChecked,
    CallDecided,
    CallFinished,
    CallsWithheld,
    Clarified,
    Fact,
    IterationCompleted,
    MessageAdded,
    ModelReplied,
)
from planner_ext.core.fold import CUT_SHORT, cut_short_text
from planner_ext.core.state import Phase, State
from planner_ext.core.values import Status, frozen
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.engine import Engine, watch
from planner_ext.engine.ports import Emit, Event, TextDelta
from planner_ext.sk.charging.view import Charge
from planner_ext.sk.chat.reply import (
    ReplyAssembly,
    accepted_reply,
    corrected_chunks,
    has_form,
    reply_ended_by,
    whole,
)
from planner_ext.sk.chat.resumed import ResumedHistory, resumed_history
from planner_ext.sk.chat.round_trip import named_errors, no_reply
from planner_ext.sk.chat.transport import connector_settings, request_arguments
from planner_ext.sk.checkpoint import Taking
from planner_ext.sk.checks import instance_of, one_of
from planner_ext.sk.functions.execution import sendable
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.sk.messages import calls_of, read_iterations, text_of, without_usage
from planner_ext.sk.run.context import FunctionNames, RunContext, check_service
from planner_ext.sk.run.outcome import raise_at_limit
from planner_ext.sk.run.resume import Late, refuse_late
from planner_ext.sk.run.returned import PAUSED_TEXT, final_message, returned_message

_SETTLING = (CallDecided, CallsWithheld, CallFinished, Clarified)
"""Facts with which the last call of a batch may have got its result."""

_SHOWN = (TextDelta, ModelReplied, IterationCompleted, AnswerChecked)
"""Events that make chunks, and the ones after which a caller may leave before calls begin."""


@frozen
class ServiceRequest:
    """The caller's arguments of a request, except history and settings; checked."""

    kernel: Kernel
    arguments: KernelArguments | None = None
    stop: StopHandle | None = None
    store_final: bool = False
    late: Late = "refuse"

    def __post_init__(self) -> None:
        instance_of("kernel", self.kernel, Kernel)
        instance_of("store_final", self.store_final, bool)
        one_of("late", self.late, ("refuse", "allow"))
        for name, kind in (("arguments", KernelArguments), ("stop", StopHandle)):
            value = getattr(self, name)
            if value is not None:
                instance_of(name, value, kind)


@dataclass(kw_only=True, eq=False)
class ServiceRun:
    """Drives one run, and adds each settled batch to the caller's history at once.

    Attributes:
        facts: The journal that is resumed.
        new: The facts after it: started, or resumed with the decisions of ``taking``.
        known: How many messages of the transcript are already in the history.
        transcript: The messages of a resumed run, which the history may lack.
        resumed: That history, brought up to date.
        added: The messages that were added since.
        final: The message for the caller.
    """

    history: ChatHistory
    context: RunContext
    request: ServiceRequest
    new: Sequence[Fact]
    known: int
    facts: Sequence[Fact] = ()
    taking: Taking | None = None
    transcript: Sequence[ChatMessageContent] | None = None
    resumed: ResumedHistory | None = field(default=None, init=False)
    added: list[ChatMessageContent] = field(
        default_factory=list[ChatMessageContent], init=False
    )
    final: ChatMessageContent | None = field(default=None, init=False)
    _ends_with_results: bool = field(default=False, init=False)

    async def message(self) -> ChatMessageContent:
        """Run, and return the message for the caller."""
        return self._returned(await self._drive())

    async def chunks(
        self, ai_model_id: str
    ) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Run, and yield the chunks for the caller."""
        stream = _Stream(ai_model_id)
        engines: list[Engine] = []

        async def run(emit: Emit) -> None:
            async def show(event: Event) -> None:
                if isinstance(event, _SHOWN) and not (
                    isinstance(event, TextDelta) and _has_calls_alone(event.chunk)
                ):
                    await emit(event)

            engines.append(await self._drive(show, stream))

        async with aclosing(watch(run)) as events:
            async for event in events:
                for chunk in stream.chunks(event):
                    yield chunk
        for chunk in stream.last(self._returned(engines[0])):
            yield chunk

    async def _drive(
        self, emit: Emit | None = None, stream: "_Stream | None" = None
    ) -> Engine:
        follow = partial(self._follow, stream)
        engine = self.context.engine(self.facts, emit=emit, follow=follow)
        with nullcontext() if self.taking is None else self.taking.reserve(engine):
            if self.transcript is not None:
                returned = returned_message(engine.state, self.facts)
                resumed = resumed_history(
                    self.history, self.transcript, engine.state, self.facts, returned
                )
                if self.request.late == "refuse":
                    refuse_late(engine.state, resumed.later_turn)
                self.history.messages[:] = resumed.messages
                self.resumed = resumed
            await self.context.drive(engine, self.new)
        return engine

    def _returned(self, engine: Engine) -> ChatMessageContent:
        key = self.context.options.checkpoint_key
        raise_at_limit(engine.state, engine.facts, key)
        message = final_message(engine.state, engine.facts, key)
        metadata = message.metadata
        if metadata["status"] == "paused" and self.context.parent is None:
            from planner_ext.sk.run.orchestration import raise_in_orchestration  # noqa: PLC0415  (only at a pause)

            raise_in_orchestration(engine.state, engine.facts, key, metadata["pending"])
        if self.request.store_final and engine.state.ended is not None:
            _store(self.history, message)
        self.final = message
        return message

    def _follow(self, stream: "_Stream | None", state: State, fact: Fact) -> None:
        if state.ending is not None or (
            isinstance(fact, CallFinished) and fact.terminate
        ):
            self._ends_with_results = True
        if state.phase is Phase.COMPLETING and isinstance(fact, _SETTLING):
            added = self._add(state)
            if stream is not None:
                calls = [
                    message for message in added if message.role != AuthorRole.TOOL
                ]
                stream.settled[fact.iteration] = (
                    calls if self._ends_with_results else added
                )
        elif state.phase is Phase.ASKING and isinstance(fact, Clarified | MessageAdded):
            self._add(state)
        elif isinstance(fact, IterationCompleted) and fact.messages is not None:
            self.known = 0
            self.history.messages[:] = self._added(state)

    def _add(self, state: State) -> list[ChatMessageContent]:
        added = self._added(state)
        self.history.messages.extend(added)
        self.added += added
        return added

    def _added(self, state: State) -> list[ChatMessageContent]:
        transcript = self.context.chat.messages(state.transcript)
        known = self.known
        self.known = len(transcript)
        return transcript[known:]


def _store(history: ChatHistory, message: ChatMessageContent) -> None:
    if calls_of(message) or text_of(message):
        history.add_message(message)


class _Stream:
    """Builds chunks with their round trip and one model id, so that those of a round trip can be added up.

    Text is passed on as it arrives. Calls are sent whole, once their batch has its
    results or they are returned to the caller.
    """

    def __init__(self, ai_model_id: str) -> None:
        self.settled: dict[int, list[ChatMessageContent]] = {}
        self._model = ai_model_id
        self._trip = 0
        self._text: list[str] = []
        self._said = ""

    def chunks(self, event: Event) -> Iterator[StreamingChatMessageContent]:
        assert isinstance(event, _SHOWN), "no other event is passed on"
        if isinstance(event, AnswerChecked):
            if event.problem:
                refused = {"refused_answer": event.answer, "reason": event.problem}
                yield self._message(AuthorRole.ASSISTANT, (), metadata=refused)
            return
        # An answered question is not part of the answer.
        if event.iteration != self._trip:
            self._trip = event.iteration
            self._text = []
        if isinstance(event, TextDelta):
            yield self._passed_on(event)
        elif event.iteration in self.settled:
            messages = self.settled.pop(event.iteration)
            self._text = []
            calls = [
                call for message in messages for call in _numbered(calls_of(message))
            ]
            results = [
                each
                for message in messages
                for each in message.items
                if isinstance(each, FunctionResultContent)
            ]
            for role, items in (
                (AuthorRole.ASSISTANT, calls),
                (AuthorRole.TOOL, results),
            ):
                if items:
                    yield self._message(role, items)

    def _passed_on(self, delta: TextDelta) -> StreamingChatMessageContent:
        """Copy a chunk without its calls and its usage: the last chunk has that of all requests."""
        chunk: StreamingChatMessageContent = delta.chunk
        self._text.append(delta.text)
        self._said = (self._said + delta.text)[-len(PAUSED_TEXT) :]
        items = [
            item for item in chunk.items if not isinstance(item, FunctionCallContent)
        ]
        own = {
            "items": items,
            "function_invoke_attempt": delta.iteration,
            "ai_model_id": self._model,
        }
        return without_usage(chunk.model_copy(update=own))

    def last(
        self, message: ChatMessageContent
    ) -> Iterator[StreamingChatMessageContent]:
        """Build the last chunk: the final message's metadata, and what was not sent yet.

        Results come last, as in Semantic Kernel's loop. An agent passes no chunk with
        results on, so one before it has the metadata, and alone the usage.
        """
        ends_with_results = message.role == AuthorRole.TOOL
        text = text_of(message)
        is_sent = text == sendable("".join(self._text))
        items: list[Any] = _numbered(calls_of(message))
        if not items or not is_sent:
            unsent = "" if ends_with_results or is_sent else text
            if message.metadata["status"] != "paused" and (
                self._said + unsent
            ).endswith(PAUSED_TEXT):
                unsent += "\n"  # an agent keeps the text of a stream alone, and a model must not make its thread wait
            items.append(StreamingTextContent(choice_index=0, text=unsent))
        yield self._message(
            AuthorRole.ASSISTANT,
            items,
            metadata=message.metadata,
            finish_reason=message.finish_reason,
        )
        if ends_with_results:
            rest = {
                name: value
                for name, value in message.metadata.items()
                if name != "usage"
            }
            yield self._message(AuthorRole.TOOL, message.items, metadata=rest)

    def _message(
        self, role: AuthorRole, items: Sequence[Any], **fields: Any
    ) -> StreamingChatMessageContent:
        return StreamingChatMessageContent(
            role=role,
            items=[*items],
            choice_index=0,
            ai_model_id=self._model,
            function_invoke_attempt=self._trip,
            **fields,
        )


def _has_calls_alone(chunk: StreamingChatMessageContent) -> bool:
    """Whether nothing of a chunk is passed on: it only holds pieces of calls, or results."""
    if chunk.role == AuthorRole.TOOL:
        return True
    calls = bool(chunk.items) and all(
        isinstance(item, FunctionCallContent) for item in chunk.items
    )
    return calls and chunk.finish_reason is None


def _numbered(calls: Sequence[FunctionCallContent]) -> list[Any]:
    """Give calls the indexes of streamed calls, so that adding chunks up does not merge two."""
    return [
        call.model_copy(update={"index": place}) for place, call in enumerate(calls)
    ]


async def pass_through(
    inner: ChatCompletionClientBase,
    chat_history: ChatHistory,
    settings: PromptExecutionSettings,
    kwargs: dict[str, Any],
    request: AbstractAsyncContextManager[Charge],
) -> list[ChatMessageContent]:
    """Ask the connector once; the caller must run the calls in the reply."""
    stored = kwargs.pop("store_final", False)
    settings = _request_settings(inner, settings, kwargs.get("kernel"))
    async with request as charge:
        with named_errors(inner):
            behavior = settings.function_choice_behavior
            given = request_arguments(
                inner, chat_history, settings, behavior, kwargs.get("kernel")
            )
            messages = await inner.get_chat_message_contents(**{**kwargs, **given})
        charge(messages[0] if messages else None)
    if not messages:
        raise no_reply("a response without choices")
    messages = [whole(message) for message in messages]
    if stored:
        messages = [_accepted(message, kwargs.get("kernel")) for message in messages]
        for message in messages:
            _store(chat_history, message)
    own = [
        _one_request(message.metadata) | _ended(message, in_form=has_form(settings))
        for message in messages
    ]
    return [
        m.model_copy(update={"metadata": metadata})
        for m, metadata in zip(messages, own, strict=True)
    ]


@dataclass(eq=False)
class _Passing:
    """Passes on the chunks of one request, and closes them with one that has its usage and status."""

    reply: ReplyAssembly
    in_form: bool
    _ended: dict[str, Any] = field(default_factory=dict[str, Any])
    _last: StreamingChatMessageContent | None = None

    def passed_on(
        self, chunk: StreamingChatMessageContent | None
    ) -> StreamingChatMessageContent | None:
        """Take a chunk, or the None that some connectors yield; return it without usage, or None if empty."""
        if chunk is None:
            return None
        self.reply.add(chunk)
        if chunk.finish_reason is not None:
            self._ended = _ended(self.reply.message(), in_form=self.in_form)
        chunk.metadata = _one_request(chunk.metadata) | self._ended
        self._last = chunk
        return (
            without_usage(chunk)
            if chunk.items or chunk.finish_reason is not None
            else None
        )

    def closing(self) -> StreamingChatMessageContent:
        if self._last is None or not self.reply.is_reply:
            raise no_reply("a stream without any choice")
        whole = self.reply.message()
        metadata = {
            **self._last.metadata,
            **_ended(whole, in_form=self.in_form),
            "usage": whole.metadata.get("usage"),
        }
        return self._last.model_copy(
            update={"items": [], "finish_reason": None, "metadata": metadata}
        )


async def pass_through_streaming(
    inner: ChatCompletionClientBase,
    chat_history: ChatHistory,
    settings: PromptExecutionSettings,
    kwargs: dict[str, Any],
    request: AbstractAsyncContextManager[Charge],
) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
    """As `pass_through`, as a stream."""
    stored = kwargs.pop("store_final", False)
    reply = ReplyAssembly()
    settings = _request_settings(inner, settings, kwargs.get("kernel"))
    passing = _Passing(reply, in_form=has_form(settings))
    async with request as charge:
        with named_errors(inner):
            try:
                behavior = settings.function_choice_behavior
                given = request_arguments(
                    inner, chat_history, settings, behavior, kwargs.get("kernel")
                )
                stream = inner.get_streaming_chat_message_contents(
                    **{**kwargs, **given}
                )
                async with aclosing(corrected_chunks(stream)) as groups:
                    async for chunks in groups:
                        if passed := [
                            each
                            for chunk in chunks
                            if (each := passing.passed_on(chunk)) is not None
                        ]:
                            yield passed
            finally:  # if the stream is closed early, the chunks so far
                charge(reply.message() if reply.is_reply else None)
    yield [passing.closing()]
    if stored:
        _store(chat_history, _accepted(reply.message(), kwargs.get("kernel")))


def _accepted(message: ChatMessageContent, kernel: Kernel | None) -> ChatMessageContent:
    return accepted_reply([message], () if kernel is None else FunctionNames(kernel))[0]


def _request_settings(
    inner: ChatCompletionClientBase,
    settings: PromptExecutionSettings,
    kernel: Kernel | None,
) -> PromptExecutionSettings:
    behavior = settings.function_choice_behavior
    if behavior is None or kernel is None or behavior.type_ is FunctionChoiceType.NONE:
        return settings
    own = connector_settings(inner, settings)
    check_service(inner, own, ToolSet(kernel, behavior, own))
    return (
        own.model_copy(update={"function_choice_behavior": None})
        if behavior.auto_invoke_kernel_functions
        else own
    )


def _ended(message: ChatMessageContent, *, in_form: bool) -> dict[str, Any]:
    """Return how one request ended, as metadata; with calls to run it is not answered."""
    ended_by = reply_ended_by(message, in_form=in_form)
    if ended_by in CUT_SHORT:
        return _end("incomplete", cut_short_text(ended_by, text_of(message)))
    if calls_of(message):
        return _end(
            "stopped", "The calls are returned to the caller, who has to run them."
        )
    return (
        _end("answered")
        if text_of(message)
        else _end("incomplete", "The reply has neither text nor calls.")
    )


def _end(status: Status, reason: str = "") -> dict[str, Any]:
    return {"status": status, "limit": None, **({"reason": reason} if reason else {})}


def _one_request(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "iterations": read_iterations(metadata), "tool_calls": 0}
