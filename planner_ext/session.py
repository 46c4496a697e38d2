"""``ToolUseSession``: a conversation in which functions are run for the caller (closed loop), or by it (open loop)."""

import asyncio
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

from pydantic import ValidationError
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)
from semantic_kernel.exceptions import ServiceInvalidExecutionSettingsError
from semantic_kernel.functions import KernelArguments

from planner_ext.approval.decisions import Interceptor
from planner_ext.core.errors import shown
from planner_ext.core.fold import CUT_SHORT
from planner_ext.engine.engine import StopHandle
from planner_ext.engine.gate import CheckForIntervention, PreInvoke
from planner_ext.engine.ports import Clock, Observer
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.approval import ApprovalSettings
from planner_ext.sk.arguments import InvalidArguments, parse_object
from planner_ext.sk.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.budget import Budget
from planner_ext.sk.checkpoint import Checkpoint, SigningKey
from planner_ext.sk.connectors import select_service
from planner_ext.sk.errors import (
    InvalidHistoryError,
    InvalidReplyError,
    PlannerInvalidConfigurationError,
    SessionBusyError,
    not_answered,
)
from planner_ext.sk.execution import ToolExecution, result_text
from planner_ext.sk.history import find_problems, one_result_each
from planner_ext.sk.iteration import IterationCallback
from planner_ext.sk.messages import (
    as_history,
    calls_of,
    given_arguments,
    merge_reply,
    render,
    requested_calls,
    text_of,
    with_items,
)
from planner_ext.sk.options import instance_of, non_negative
from planner_ext.sk.outcome import chat_history

__all__ = [
    "AutomaticToolUseConfig",
    "Messages",
    "OpenCall",
    "ToolUseSession",
    "as_reply",
    "checked_prompt",
    "copied",
    "open_calls",
    "with_added",
]

# A session's messages: what may be added to them, which calls in them wait for results, and what may be sent.
#
# Promises that nothing of the caller's is shared or changed, and that what is refused leaves no trace. Must not know
# the loop or the service.

Messages: TypeAlias = ChatMessageContent | FunctionResultContent | Iterable[ChatMessageContent | FunctionResultContent]
"""One message, or several in order, a ``ChatHistory`` included; a result by itself is its tool message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A function call of the model that its caller has to answer.

    Attributes:
        id: The call's id; its result goes by it.
        fully_qualified_name: The name that the model used, ``plugin-function``; nothing was checked yet.
        raw_arguments: JSON text as received, "{}" where the model sent none.
    """

    id: str
    fully_qualified_name: str
    raw_arguments: str = ""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments, parsed; not validated against a function.

        Raises:
            InvalidReplyError: If the text is no JSON object. Answer the call with a result that says so.
        """
        parsed = parse_object(self.raw_arguments)
        if isinstance(parsed, InvalidArguments):
            raise InvalidReplyError(
                f"Expected one JSON object as arguments of {self.fully_qualified_name} ({self.id}); those received "
                f"{parsed.message} The text is in raw_arguments; tell the model with call.result(...)."
            )
        return parsed

    def result(self, value: Any) -> ChatMessageContent:
        """Make the tool message that answers the call, to be appended.

        Args:
            value: What the function returned, or what the model is to read instead; written as in closed loop: text as
                it is, None as "", everything else as JSON.
        """
        content = FunctionResultContent(id=self.id, name=self.fully_qualified_name, result=result_text(value))
        return ChatMessageContent(role=AuthorRole.TOOL, items=[content])


def copied(name: str, given: object, *, text_allowed: bool = True) -> list[ChatMessageContent]:
    """Copy what a caller passed as messages, deeply, each result in a message of its own.

    Args:
        name: The parameter, for errors.
        given: `Messages`, or a text, which is a user message.
        text_allowed: Whether a bare text may stand for a message.

    Raises:
        PlannerInvalidConfigurationError: If it is something else, or an empty text.
    """
    if isinstance(given, str) and text_allowed:
        if not given.strip():
            raise PlannerInvalidConfigurationError(f"{name} must not be an empty text; got {shown(given)}.")
        return [ChatMessageContent(role=AuthorRole.USER, content=given)]
    if isinstance(given, ChatMessageContent | FunctionResultContent | str) or not isinstance(given, Iterable):
        given = (given,)
    messages = [_copied(name, message) for message in cast("Iterable[object]", given)]
    return one_result_each(render(messages))


def _copied(name: str, message: object) -> ChatMessageContent:
    if isinstance(message, FunctionResultContent):
        return deepcopy(message).to_chat_message_content()
    if isinstance(message, ChatMessageContent):
        return deepcopy(message)
    raise PlannerInvalidConfigurationError(
        f"{name} must be messages of Semantic Kernel; got {shown(message)}. Make one with ChatMessageContent(role=..., "
        "content=...)."
    )


def open_calls(messages: Sequence[ChatMessageContent]) -> tuple[OpenCall, ...]:
    """List the calls at the end of a conversation that have no result yet, in their order."""
    answered: set[str | None] = set()
    for message in reversed(messages):
        if message.role != AuthorRole.TOOL:
            return tuple(call for call in _calls(message) if call.id not in answered)
        answered |= {item.id for item in message.items if isinstance(item, FunctionResultContent)}
    return ()


def _calls(message: ChatMessageContent) -> list[OpenCall]:
    requested = requested_calls(message) if message.role == AuthorRole.ASSISTANT else ()
    return [
        OpenCall(id=call.id, fully_qualified_name=call.name, raw_arguments=given_arguments(call.arguments))
        for call in requested
    ]


def with_added(messages: Sequence[ChatMessageContent], added: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Add messages to a conversation. Calls and results come in pairs; only calls that waited already may still wait.

    A pair whose call is the one that waits may be given whole: the call is not added a second time.

    Raises:
        InvalidHistoryError: If half of a pair is missing, naming the ids.
    """
    waiting = open_calls(messages)
    if waiting and added and [call.id for call in _calls(added[0])] == [call.id for call in waiting]:
        added = added[1:]
    combined = [*messages, *added]
    still = [call for call in open_calls(combined) if call in waiting]
    if problems := find_problems([*combined, *(call.result("") for call in still)]):
        raise InvalidHistoryError(
            "Expected function calls and their results in pairs, each result after its call; found "
            f"{'; '.join(problems)}. Append both together; nothing was added."
        )
    return combined


def checked_prompt(messages: list[ChatMessageContent], *, closed: bool) -> list[ChatMessageContent]:
    """Take a conversation that the model may be asked to go on with.

    Raises:
        PlannerInvalidConfigurationError: If there is nothing to answer, or a prefilled reply in closed loop.
        InvalidHistoryError: If calls and results do not match, naming the ids.
    """
    if problems := find_problems(messages):
        raise InvalidHistoryError(
            "Expected a conversation in which every function call has its result before the next prompt; found "
            f"{'; '.join(problems)}. Append the results first; nothing was sent."
        )
    if not messages:
        raise PlannerInvalidConfigurationError("prompt needs a text or messages; got none, and the session is empty.")
    if closed and messages[-1].role == AuthorRole.ASSISTANT:
        raise PlannerInvalidConfigurationError(
            "The last message of a prompt must not be the assistant's in closed loop: which of several replies should "
            "begin with it? Add a user message, or prefill in open loop: AutomaticToolUseConfig(enabled=False)."
        )
    return messages


def as_reply(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Make one message of the reply to an open-loop request, as the closed loop keeps it: at most one, ids reissued.

    Of a reply that was cut short the text is kept and its calls are not: they may not be whole.
    """
    if not messages:
        return []
    reply = merge_reply(messages)
    if calls_of(reply) and reply.finish_reason is not None and reply.finish_reason.value in CUT_SHORT:
        items: list[Any] = [item for item in reply.items if not isinstance(item, FunctionCallContent)]
        return [with_items(reply, items, reply.metadata)] if text_of(reply) else []
    return [reply]


@dataclass(frozen=True, slots=True, kw_only=True)
class AutomaticToolUseConfig:
    """Who runs the functions that the model calls.

    Attributes:
        enabled: True is closed loop: the session runs them. False is open loop: they are returned to the caller.
        max_tool_calls: Functions that one prompt may start in closed loop, failures included; 0 or more. Counted anew
            for each prompt. Checked before a batch starts, on all its calls: a batch of 3 is 3, and one that would pass
            the limit does not run at all. Then the prompt raises `LimitReachedError`.

    Raises:
        PlannerInvalidConfigurationError: If a value means nothing, naming the field.
    """

    enabled: bool = True
    max_tool_calls: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.enabled, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlannerInvalidConfigurationError(
                f"AutomaticToolUseConfig.enabled must be True or False; got {shown(self.enabled)}."
            )
        if self.max_tool_calls is None:  # pyright: ignore[reportUnnecessaryComparison]
            raise PlannerInvalidConfigurationError(
                "AutomaticToolUseConfig.max_tool_calls must be a whole number, 0 or more; got None."
            )
        non_negative("AutomaticToolUseConfig.max_tool_calls", self.max_tool_calls)


_CLOSED_LOOP = AutomaticToolUseConfig()


@dataclass(slots=True)
class _Turn:
    """One prompt that is being answered; of a stream, who reads it."""

    stream: "weakref.ref[AsyncGenerator[str, None]] | None" = None

    @property
    def abandoned(self) -> bool:
        """Whether it is a stream that nobody can read any more: the event loop is about to close it."""
        return self.stream is not None and self.stream() is None


class ToolUseSession:
    """A conversation with a model that may call the kernel's functions.

    In closed loop a prompt runs them and gives the text of the last reply. In open loop it gives the text of one reply,
    and the calls in it stand in `pending` until the caller has appended their results; then ``prompt()`` goes on. The
    messages are the same in both.

    A prompt that raises, is cancelled or whose stream is left early keeps what cannot be undone: once calls have been
    answered, the prompt's messages, those calls and their results stay, every call with its result, and ``prompt()``
    goes on from there. Otherwise the session is as it was before the prompt.

    One prompt at a time: another one meanwhile, and `append`, raise `SessionBusyError`.

    A session does not pause. Where an interceptor defers a call, or a service's clarifier leaves a question open, the
    prompt raises `RunNotAnsweredError` with status ``paused`` or ``asked`` and the checkpoint, which
    `ToolCallHandler.resume` takes; its history may begin a new session.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        initial_prompts: Messages = (),
        tool_use_config: AutomaticToolUseConfig = _CLOSED_LOOP,
        service_id: str | None = None,
        settings: PromptExecutionSettings | None = None,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        execution: ToolExecution | None = None,
        approval: ApprovalSettings | None = None,
        interceptors: Sequence[Interceptor] = (),
        pre_invoke: PreInvoke | None = None,
        check_for_intervention: CheckForIntervention | None = None,
        iteration_completed: IterationCallback | None = None,
        observers: Sequence[Observer] = (),
        clock: Clock | None = None,
        min_iteration_time_ms: int = 0,
        max_prompt_tokens: int | None = None,
        strict_finish_reason: bool = False,
        checkpoint_key: bytes | None = None,
    ) -> None:
        """Begin a conversation; nothing is sent.

        The options from ``budget`` on concern functions that the session runs: in open loop they have no part.

        Args:
            kernel: Its functions may be called; read again for each request.
            initial_prompts: Messages that the conversation begins with, such as a system message and examples.
            tool_use_config: Who runs the functions, and how many of them one prompt may start.
            service_id: The service to use; None leaves it to the kernel's own selection.
            settings: Settings of every request; None takes those of the arguments, or the service's defaults. Which
                functions are offered is their function choice behaviour's to say, all where they have none; who runs
                them is ``tool_use_config``'s.
            arguments: The application's arguments, for functions and service selection.
            budget: What else one prompt may spend, and what happens at a limit; of two limits on tool calls the tighter
                holds. None raises at the limit of ``tool_use_config``, as ``Budget(on_limit="raise")`` does.
            execution: How functions are run. None tells the model the message of a function's error, as
                ``ToolExecution(include_error_detail=True)`` does.
            approval: What becomes of calls that nobody decided, and that were denied.
            interceptors: Asked about every call of a batch before any of it runs; the first decision wins.
            pre_invoke: Asked about each call with the 1-based round trip, name and arguments; False refuses it.
            check_for_intervention: Asked about each call; True defers it, False is no objection.
            iteration_completed: Called after the results of a batch are stored and before the next request.
            observers: Told each fact of a prompt's run.
            clock: Time; None is the machine's.
            min_iteration_time_ms: Least milliseconds from the start of one round trip to the next.
            max_prompt_tokens: Most tokens of a request, functions included; one over it is not sent. None is no limit.
            strict_finish_reason: Whether a finish reason that contradicts the reply's content is an error.
            checkpoint_key: Signs the checkpoints of errors; see `FunctionInvokingChatCompletion`.

        Raises:
            PlannerInvalidConfigurationError: If there is no such service, or an option cannot be used, naming it.
            InvalidHistoryError: If the initial prompts hold half of a pair of call and result.
        """
        config = instance_of("tool_use_config", tool_use_config, AutomaticToolUseConfig)
        self._messages = with_added((), copied("initial_prompts", initial_prompts, text_allowed=False))
        self._closed = config.enabled
        self._kernel = kernel
        self._arguments = KernelArguments() if arguments is None else copy(arguments)
        service, chosen = select_service(kernel, service_id, self._arguments, settings)
        behavior = _behavior(chosen.function_choice_behavior, closed=config.enabled)
        self._settings = chosen.model_copy(update={"function_choice_behavior": behavior})
        self._refuse_format(_format_of(chosen))
        invoking = FunctionInvokingChatCompletion(
            service,
            budget=_budget(budget, config.max_tool_calls),
            execution=ToolExecution(include_error_detail=True) if execution is None else execution,
            approval=approval,
            interceptors=interceptors,
            pre_invoke=pre_invoke,
            check_for_intervention=check_for_intervention,
            iteration_completed=iteration_completed,
            observers=observers,
            clock=clock,
            min_iteration_time_ms=min_iteration_time_ms,
            max_prompt_tokens=max_prompt_tokens,
            strict_finish_reason=strict_finish_reason,
            checkpoint_key=checkpoint_key,
        )
        self._service: ChatCompletionClientBase = invoking
        self._key = invoking.options.checkpoint_key
        self._lock = asyncio.Lock()
        self._turn = _Turn()

    @property
    def pending(self) -> tuple[OpenCall, ...]:
        """The calls that wait for the caller's results, in the model's order; empty while there are none.

        In closed loop: of functions that are known by their schema only, and where a budget or a denial returns calls.
        """
        return open_calls(self._messages)

    def append(self, messages: str | Messages) -> None:
        """Add messages to the conversation without asking the model.

        Args:
            messages: A text is a user message. Calls and results come in pairs; the results of `pending` calls may come
                one by one.

        Raises:
            InvalidHistoryError: If half of a pair is missing, naming the ids; nothing was added.
            SessionBusyError: If a prompt is being answered.
        """
        added = copied("messages", messages)
        if self._lock.locked():
            raise _busy()
        self._messages = with_added(self._messages, added)

    def history(self) -> ChatHistory:
        """Copy every message of every role so far, deeply: initial prompts, calls and results included.

        What a prompt adds is in it once the prompt is answered.
        """
        return as_history(deepcopy(self._messages))

    async def prompt(
        self,
        prompt: str | Messages | None = None,
        *,
        response_format: Any = None,
        stop: StopHandle | None = None,
    ) -> str:
        """Ask the model, and wait for its answer.

        Args:
            prompt: A text is a user message; messages may hold pairs of call and result. None goes on with what was
                appended.
            response_format: Of the reply, as the service's settings take it: a pydantic model, or OpenAI's mapping.
                In open loop only.
            stop: Ends a closed loop from outside: functions that run finish, no request follows, the answer is "".

        Returns:
            The text of the last reply, after all functions; "" where there is none, never None.

        Raises:
            PlannerInvalidConfigurationError: If there is nothing to answer; in closed loop, with a response format or a
                prefilled reply. Nothing was sent.
            InvalidHistoryError: If a call has no result. Nothing was sent.
            SessionBusyError: If another prompt is being answered.
            LimitReachedError: At a limit, with the history and what was spent. The batch beyond it did not run.
            RunNotAnsweredError: If an interceptor deferred a call, or a question was left open.
        """
        async with self._only(_Turn()):
            settings = self._settings_with(response_format)
            with self._answering(prompt) as history:
                replies = await self._service.get_chat_message_contents(history, settings, **self._world(stop))
                return "".join(_spoken(reply, self._key) for reply in replies)

    def prompt_streaming(
        self,
        prompt: str | Messages | None = None,
        *,
        response_format: Any = None,
        stop: StopHandle | None = None,
    ) -> AsyncGenerator[str, None]:
        """Ask the model as `prompt` does, and give the text of every reply as it comes.

        In closed loop the text beside calls comes first, then nothing while the functions run, then what follows.

        Yields:
            Pieces of text, none of them empty. Leaving the stream early cancels what runs.
        """
        turn = _Turn()
        stream = self._stream(prompt, response_format, stop, turn)
        turn.stream = weakref.ref(stream)
        return stream

    async def _stream(
        self, prompt: str | Messages | None, response_format: Any, stop: StopHandle | None, turn: _Turn
    ) -> AsyncGenerator[str, None]:
        async with self._only(turn):
            settings = self._settings_with(response_format)
            with self._answering(prompt) as history:
                groups = self._service.get_streaming_chat_message_contents(history, settings, **self._world(stop))
                async with aclosing(groups):
                    async for group in groups:
                        if text := "".join(_spoken(chunk, self._key) for chunk in group):
                            yield text

    @asynccontextmanager
    async def _only(self, turn: _Turn) -> AsyncGenerator[None, None]:
        """Take the turn, or refuse; only a stream that was left is waited for, since its end needs nobody else."""
        if self._lock.locked() and not self._turn.abandoned:
            raise _busy()
        async with self._lock:
            self._turn = turn
            yield

    @contextmanager
    def _answering(self, prompt: str | Messages | None) -> Generator[ChatHistory, None, None]:
        """Hand out a working copy of the conversation; keep what becomes of it if it is answered, or cannot be undone.

        Raises:
            PlannerInvalidConfigurationError: If there is nothing to answer.
            InvalidHistoryError: If it may not be sent.
        """
        added = [] if prompt is None else copied("prompt", prompt)
        asked = checked_prompt([*self._messages, *added], closed=self._closed)
        history = as_history(asked)
        try:
            yield history
        except BaseException:
            if history.messages != asked:
                self._messages = self._kept(history, len(asked))
            raise
        self._messages = self._kept(history, len(asked))

    def _kept(self, history: ChatHistory, asked: int) -> list[ChatMessageContent]:
        if self._closed:
            return list(history.messages)
        return [*history.messages[:asked], *as_reply(history.messages[asked:])]

    def _settings_with(self, response_format: Any) -> PromptExecutionSettings:
        """Put a response format into a copy of the settings.

        Raises:
            PlannerInvalidConfigurationError: In closed loop, and where the service takes no such format.
        """
        self._refuse_format(response_format)
        if response_format is None:
            return self._settings
        settings = self._settings.model_copy()
        try:
            settings.response_format = response_format  # pyright: ignore[reportAttributeAccessIssue]
        except (ValidationError, ValueError, ServiceInvalidExecutionSettingsError) as error:
            raise PlannerInvalidConfigurationError(
                f"response_format must be one that {type(settings).__name__} takes; got {shown(response_format)}: "
                f"{error}"
            ) from error
        return settings

    def _refuse_format(self, response_format: Any) -> None:
        if self._closed and response_format is not None:
            raise PlannerInvalidConfigurationError(
                "response_format cannot be used in closed loop: which of several replies should have it? Got "
                f"{shown(response_format)}. Use open loop: AutomaticToolUseConfig(enabled=False)."
            )

    def _world(self, stop: StopHandle | None) -> dict[str, Any]:
        return {"kernel": self._kernel, "arguments": copy(self._arguments), "stop": stop, "store_final": True}


def _busy() -> SessionBusyError:
    return SessionBusyError(
        "Expected one prompt at a time; another one of this session is being answered. Await it, or close its stream "
        "(contextlib.aclosing does), or use a session for each conversation."
    )


def _behavior(given: FunctionChoiceBehavior | None, *, closed: bool) -> FunctionChoiceBehavior:
    """Take the functions that a behaviour offers, and who runs them from the session."""
    if given is None:
        return BoundedFunctionChoiceBehavior.Auto(auto_invoke=closed)
    behavior = given.model_copy()
    if behavior.type_ is not FunctionChoiceType.NONE and behavior.auto_invoke_kernel_functions != closed:
        behavior.auto_invoke_kernel_functions = closed
    return behavior


def _budget(given: Budget | None, max_tool_calls: int) -> Budget:
    if given is None:
        return Budget(max_tool_calls=max_tool_calls, on_limit="raise")
    own = instance_of("budget", given, Budget).max_tool_calls
    return replace(given, max_tool_calls=max_tool_calls if own is None else min(own, max_tool_calls))


def _format_of(settings: PromptExecutionSettings) -> Any:
    return getattr(settings, "response_format", None) or settings.extension_data.get("response_format")


def _spoken(message: ChatMessageContent, key: SigningKey | None) -> str:
    """Read the text of a reply or a chunk, unless it says that the run waits.

    Raises:
        RunNotAnsweredError: Then, with the run.
    """
    if message.metadata.get("status") not in ("paused", "asked"):
        return text_of(message)
    checkpoint = Checkpoint.of_run(Checkpoint.from_json(message.metadata["checkpoint"], key).facts, key)
    state = checkpoint.state()
    raise not_answered(
        status=message.metadata["status"],
        reason="A function call was deferred, or a question left open, and a session does not wait. Resume the "
        "checkpoint of this error with ToolCallHandler, decide in an interceptor, answer in the service's clarifier, "
        "or use open loop: AutomaticToolUseConfig(enabled=False).",
        limit=None,
        iterations=state.ledger.iterations,
        tool_calls=state.ledger.tool_calls,
        usage=state.ledger.usage,
        chat_history=chat_history(state),
        checkpoint=checkpoint,
    )
