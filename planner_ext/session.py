"""``ToolUseSession``: a conversation in which the session (closed loop) or its caller (open loop) runs the functions.

The session copies every message it is given and returns copies. Rejected input leaves
the conversation unchanged.
"""

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, Unpack, cast

from pydantic import ValidationError
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import (
    FunctionChoiceBehavior,
    PromptExecutionSettings,
)
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
)
from semantic_kernel.exceptions import ServiceInvalidExecutionSettingsError
from semantic_kernel.functions import KernelArguments

from planner_ext.approval.decisions import ReadByKey
from planner_ext.core.errors import require, shown, suggests_names
from planner_ext.core.fold import CUT_SHORT
from planner_ext.core.limits import Budget, is_count, least
from planner_ext.core.values import frozen
from planner_ext.engine.concurrency import StopHandle, streams
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.chat.history import find_problems, one_result_each, render
from planner_ext.sk.chat.reply import accepted_reply, given_arguments
from planner_ext.sk.chat.transport import select_service
from planner_ext.sk.checkpoint import Checkpoint, SigningKey
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import (
    InvalidHistoryError,
    InvalidOptionError,
    InvalidReplyError,
    InvalidSettingsError,
    RunNotAnsweredError,
    SessionBusyError,
)
from planner_ext.sk.functions.conversion import InvalidArguments, parse_object
from planner_ext.sk.functions.execution import ToolExecution, result_text
from planner_ext.sk.messages import calls_of, requested_calls, text_of, with_items
from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.run.context import checked_messages
from planner_ext.sk.run.options import RunOptions, takes_run_options
from planner_ext.sk.run.outcome import run_not_answered
from planner_ext.sk.run.resume import leave_behind

__all__ = ["AutomaticToolUseConfig", "Messages", "OpenCall", "ToolUseSession"]

logger = logging.getLogger(__name__)

Messages: TypeAlias = (
    ChatMessageContent
    | FunctionResultContent
    | Iterable[ChatMessageContent | FunctionResultContent]
)
"""One message, or several in order, a ``ChatHistory`` included; a bare result is its
tool message."""


@frozen
class OpenCall(ReadByKey):
    """A function call of the model that the session's caller answers.

    Attributes:
        fully_qualified_name: As the model used it, unchecked.
        raw_arguments: The JSON text as received, or "{}".
    """

    id: str
    fully_qualified_name: str
    raw_arguments: str = ""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The parsed arguments, not validated against a function.

        Raises:
            InvalidReplyError: If the text is not a JSON object. Answer the call with a
                result that says so.
        """
        parsed = parse_object(self.raw_arguments)
        if isinstance(parsed, InvalidArguments):
            raise InvalidReplyError(
                f"Expected one JSON object as arguments of {self.fully_qualified_name} ({self.id}); those received "
                f"{parsed.message} The text is in raw_arguments; tell the model with call.result(...)."
            )
        return parsed

    def result(self, value: Any) -> ChatMessageContent:
        """Make the tool message that answers the call, to be appended to the session.

        Args:
            value: What the function returned. Text stays, None becomes "", everything
                else becomes JSON.
        """
        content = FunctionResultContent(
            id=self.id, name=self.fully_qualified_name, result=result_text(value)
        )
        return ChatMessageContent(role=AuthorRole.TOOL, items=[content])


def _copied(
    name: str, given: object, *, text_allowed: bool = True
) -> list[ChatMessageContent]:
    """Copy messages deeply, each result into a separate message; a text becomes a user message."""
    if isinstance(given, str) and text_allowed:
        if not given.strip():
            raise InvalidOptionError(
                f"{name} must not be an empty text; got {shown(given)}."
            )
        return [ChatMessageContent(role=AuthorRole.USER, content=given)]
    if isinstance(
        given, ChatMessageContent | FunctionResultContent | str
    ) or not isinstance(given, Iterable):
        given = (given,)
    messages: list[ChatMessageContent] = []
    for message in cast("Iterable[object]", given):
        if isinstance(message, FunctionResultContent):
            messages.append(deepcopy(message).to_chat_message_content())
        elif isinstance(message, ChatMessageContent):
            messages.append(deepcopy(message))
        else:
            raise InvalidOptionError(
                f"{name} must be messages of Semantic Kernel; got {shown(message)}. Make one with "
                "ChatMessageContent(role=..., content=...)."
            )
    return one_result_each(render(messages))


def _open_calls(messages: Sequence[ChatMessageContent]) -> tuple[OpenCall, ...]:
    answered: set[str | None] = set()
    for message in reversed(messages):
        if message.role != AuthorRole.TOOL:
            return tuple(call for call in _calls(message) if call.id not in answered)
        answered |= {
            item.id for item in message.items if isinstance(item, FunctionResultContent)
        }
    return ()


def _calls(message: ChatMessageContent) -> list[OpenCall]:
    requested = ()
    if message.role == AuthorRole.ASSISTANT:
        requested = requested_calls(message)
    return [
        OpenCall(
            id=call.id,
            fully_qualified_name=call.name,
            raw_arguments=given_arguments(call.arguments),
        )
        for call in requested
    ]


def _with_added(
    messages: Sequence[ChatMessageContent], added: Sequence[ChatMessageContent]
) -> list[ChatMessageContent]:
    """Add messages to a conversation; only calls that were open may stay without a result."""
    waiting = _open_calls(messages)
    if (
        waiting
        and added
        and [call.id for call in _calls(added[0])] == [call.id for call in waiting]
    ):
        added = added[1:]
    combined = [*messages, *added]
    still_open = [call for call in _open_calls(combined) if call in waiting]
    problems = find_problems([*combined, *(call.result("") for call in still_open)])
    problems = [*problems, *_misplaced(combined, len(messages))]
    if problems:
        raise InvalidHistoryError(
            "Expected function calls and their results in pairs, each result after its call; found "
            f"{'; '.join(problems)}. Append both together; nothing was added."
        )
    return combined


def _misplaced(messages: Sequence[ChatMessageContent], first: int) -> Generator[str]:
    for place, message in enumerate(messages[first:], first):
        calls = {
            item.id or ""
            for item in message.items
            if isinstance(item, FunctionCallContent)
        }
        results = {
            item.id or ""
            for item in message.items
            if isinstance(item, FunctionResultContent)
        }
        role = message.role.value
        if role != AuthorRole.ASSISTANT:
            yield from (
                f"message {place}: the call {one!r} in a {role} message"
                for one in sorted(calls - results)
            )
        if role != AuthorRole.TOOL:
            yield from (
                f"message {place}: the result {one!r} in a {role} message"
                for one in sorted(results - calls)
            )


def _checked_prompt(
    messages: list[ChatMessageContent], *, closed: bool
) -> list[ChatMessageContent]:
    if problems := find_problems(messages):
        raise InvalidHistoryError(
            "Expected a conversation in which every function call has its result before the next prompt; found "
            f"{'; '.join(problems)}. Append the results first; nothing was sent."
        )
    if not messages:
        raise InvalidOptionError(
            "prompt needs a text or messages; got none, and the session is empty."
        )
    if closed and messages[-1].role == AuthorRole.ASSISTANT:
        raise InvalidOptionError(
            "The last message of a prompt must not be the assistant's in closed loop: which of several replies should "
            "begin with it? Add a user message, or prefill in open loop: AutomaticToolUseConfig(enabled=False)."
        )
    return messages


def _as_reply(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Merge the reply to an open-loop request into at most one message, its ids reissued."""
    if not messages:
        return []
    reply, _ = accepted_reply(messages)
    if (
        calls_of(reply)
        and reply.finish_reason is not None
        and reply.finish_reason.value in CUT_SHORT
    ):
        items: list[Any] = [
            item for item in reply.items if not isinstance(item, FunctionCallContent)
        ]
        if text_of(reply):
            return [with_items(reply, items, reply.metadata)]
        return []
    return [reply]


@suggests_names
@frozen
class AutomaticToolUseConfig:
    """Choose who runs the functions that the model calls.

    Attributes:
        enabled: True (closed loop): the session runs them. False (open loop): the
            caller runs them.
        max_tool_calls: Functions that one prompt may start in closed loop, failures
            included; 0 or more. A batch beyond it does not run, and the prompt raises
            `LimitReachedError`.

    Raises:
        PlannerInvalidConfigurationError: If a value is invalid; the message names the
            field.
    """

    enabled: bool = True
    max_tool_calls: int = 8

    def __post_init__(self) -> None:
        enabled = self.enabled
        fits = isinstance(enabled, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
        require("AutomaticToolUseConfig.enabled", fits, "True or False", enabled)
        most = self.max_tool_calls
        fits = is_count(most, least=0)
        name = "AutomaticToolUseConfig.max_tool_calls"
        require(name, fits, "a whole number, 0 or more", most)


_CLOSED_LOOP = AutomaticToolUseConfig()


@dataclass(slots=True)
class _Turn:
    """A prompt in progress, with a weak reference to its stream."""

    stream: "weakref.ref[AsyncGenerator[str, None]] | None" = None

    @property
    def abandoned(self) -> bool:
        """Whether the stream was garbage collected: the event loop is about to close it."""
        return self.stream is not None and self.stream() is None


class ToolUseSession:
    """A conversation with a model that may call the kernel's functions.

    In closed loop a prompt runs the functions and returns the text of the last reply.
    In open loop it returns the text of one reply; its calls are `pending` until the
    caller appends their results, and ``prompt()`` continues.

    A prompt that raises, is cancelled, or whose stream is closed early keeps what
    cannot be undone: once calls have results, its messages stay, and ``prompt()``
    continues from there. Otherwise the session is as it was.

    While a prompt is answered, `prompt` and `append` raise `SessionBusyError`. A
    session does not pause: a deferred call or an open question raises
    `RunNotAnsweredError` with a checkpoint for `ToolCallHandler.resume`. A decision
    after a later prompt of the session, in the same process, is refused unless
    ``late="allow"``.
    """

    @takes_run_options
    def __init__(
        self,
        kernel: Kernel,
        *,
        initial_prompts: Messages = (),
        tool_use_config: AutomaticToolUseConfig = _CLOSED_LOOP,
        service_id: str | None = None,
        settings: PromptExecutionSettings | None = None,
        arguments: KernelArguments | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        """Begin a conversation; nothing is sent.

        Args:
            kernel: Its functions may be called; read again for each request.
            initial_prompts: Messages that the conversation begins with.
            tool_use_config: Who runs the functions, and how many of them one prompt may
                start.
            service_id: The service to use; None leaves it to the kernel's own
                selection.
            settings: Of every request; None takes those of the arguments, or the
                service's defaults. Their function choice behaviour selects the
                functions that are offered; without one, all are.
            arguments: The application's arguments, for functions and service selection.
            **options: See `planner_ext.iteration.RunOptions`. In open loop only
                ``on_invalid_history`` has an effect. Of two limits on tool calls the
                tighter holds; without a ``budget`` it raises (``on_limit="raise"``).
                Without ``execution`` the model reads the message of a function's error
                (``include_error_detail=True``).

        Raises:
            PlannerInvalidConfigurationError: If there is no such service, or an option
                cannot be used.
            InvalidHistoryError: If the initial prompts hold half of a pair of call and
                result.
        """
        config = instance_of("tool_use_config", tool_use_config, AutomaticToolUseConfig)
        self._kernel = kernel
        self._repairs = options.get("on_invalid_history") == "repair"
        self._messages = _with_added(
            (),
            self._fit(_copied("initial_prompts", initial_prompts, text_allowed=False)),
        )
        self._closed = config.enabled
        self._arguments = KernelArguments() if arguments is None else copy(arguments)
        service, chosen = select_service(kernel, service_id, self._arguments, settings)
        behavior = _behavior(chosen.function_choice_behavior, closed=config.enabled)
        self._settings = chosen.model_copy(
            update={"function_choice_behavior": behavior}
        )
        self._refuse_format(
            getattr(chosen, "response_format", None)
            or chosen.extension_data.get("response_format")
        )
        options["budget"] = _budget(options.get("budget"), config.max_tool_calls)
        if options.get("execution") is None:
            options["execution"] = ToolExecution(include_error_detail=True)
        invoking = FunctionInvokingChatCompletion(service, **options)
        self._service: ChatCompletionClientBase = invoking
        self._key = invoking.options.checkpoint_key
        self._lock = asyncio.Lock()
        self._turn = _Turn()
        self._waiting = ""

    @property
    def pending(self) -> tuple[OpenCall, ...]:
        """The calls that wait for results, in the model's order.

        In closed loop: of functions known only by their schema, or returned by a budget
        or a denial.
        """
        return _open_calls(self._messages)

    def append(self, messages: str | Messages) -> None:
        """Add messages to the conversation without asking the model.

        Args:
            messages: A text is a user message. Calls and results come in pairs; the
                results of `pending` calls may be appended one by one.

        Raises:
            InvalidHistoryError: If half of a pair is missing, naming the ids; nothing
                was added.
            SessionBusyError: If a prompt is being answered.
        """
        added = _copied("messages", messages)
        if self._lock.locked():
            raise _busy()
        self._messages = _with_added(self._messages, added)

    def history(self) -> ChatHistory:
        """Return a deep copy of all messages, without those of a prompt that is being answered."""
        return ChatHistory(messages=deepcopy(self._messages))

    async def prompt(
        self,
        prompt: str | Messages | None = None,
        *,
        response_format: Any = None,
        stop: StopHandle | None = None,
    ) -> str:
        """Ask the model, and wait for its answer.

        Args:
            prompt: A text is a user message; messages may hold pairs of call and
                result. None continues with the messages that were appended.
            response_format: The reply's form, as the service's settings take it. Open
                loop only.
            stop: Ends a closed loop from outside: running functions finish, no request
                follows, the answer is "".

        Returns:
            The text of the last reply, after all functions. Of a reply that was cut
            short or refused by a filter it is what arrived, or "".

        Raises:
            PlannerInvalidConfigurationError: If there is nothing to answer; in closed
                loop, with a response format or a prefilled reply. Nothing was sent.
            InvalidHistoryError: If a call has no result. Nothing was sent.
            SessionBusyError: If another prompt is being answered.
            LimitReachedError: At a limit, with the history and what was spent. The
                batch beyond it did not run.
            RunNotAnsweredError: If an interceptor deferred a call, or a question stayed
                open.
        """
        async with self._only(_Turn()):
            settings = self._settings_with(response_format)
            with self._answering(prompt) as history:
                replies = await self._service.get_chat_message_contents(
                    history, settings, **self._request(stop)
                )
                return "".join(_text(reply, self._key) for reply in replies)

    @streams
    def prompt_streaming(
        self,
        prompt: str | Messages | None = None,
        *,
        response_format: Any = None,
        stop: StopHandle | None = None,
    ) -> AsyncGenerator[str]:
        """Ask the model as `prompt` does, and yield the text of each reply as it arrives.

        Yields:
            Non-empty pieces of text. Closing the stream early cancels running work.
        """
        turn = _Turn()
        stream = self._stream(prompt, response_format, stop, turn)
        turn.stream = weakref.ref(stream)
        return stream

    async def _stream(
        self,
        prompt: str | Messages | None,
        response_format: Any,
        stop: StopHandle | None,
        turn: _Turn,
    ) -> AsyncGenerator[str]:
        async with self._only(turn):
            settings = self._settings_with(response_format)
            with self._answering(prompt) as history:
                groups = self._service.get_streaming_chat_message_contents(
                    history, settings, **self._request(stop)
                )
                async with aclosing(groups):
                    async for group in groups:
                        text = "".join(_text(chunk, self._key) for chunk in group)
                        if text:
                            yield text

    @asynccontextmanager
    async def _only(self, turn: _Turn) -> AsyncGenerator[None]:
        """Acquire the turn, or raise; an abandoned stream is awaited."""
        if self._lock.locked() and not self._turn.abandoned:
            raise _busy()
        async with self._lock:
            self._turn = turn
            yield

    @contextmanager
    def _answering(self, prompt: str | Messages | None) -> Generator[ChatHistory]:
        """Yield a working copy of the conversation; keep it if it was answered, or cannot be undone."""
        added = [] if prompt is None else _copied("prompt", prompt)
        asked = _checked_prompt(
            self._fit([*self._messages, *added]), closed=self._closed
        )
        history = ChatHistory(messages=asked)
        try:
            yield history
        except BaseException as error:
            if history.messages != asked:
                self._messages = self._kept(history, len(asked))
            if isinstance(error, RunNotAnsweredError) and error.checkpoint is not None:
                self._leave_behind(error.checkpoint.run_id)
            raise
        self._messages = self._kept(history, len(asked))
        self._leave_behind("")

    def _leave_behind(self, waiting: str) -> None:
        """Leave the waiting run of an earlier prompt: this is a later turn."""
        if self._waiting:
            leave_behind(self._waiting)
        self._waiting = waiting

    def _fit(self, messages: list[ChatMessageContent]) -> list[ChatMessageContent]:
        return (
            checked_messages(messages, "repair", self._kernel)
            if self._repairs
            else messages
        )

    def _kept(self, history: ChatHistory, asked: int) -> list[ChatMessageContent]:
        if self._closed:
            return list(history.messages)
        return [*history.messages[:asked], *_as_reply(history.messages[asked:])]

    def _settings_with(self, response_format: Any) -> PromptExecutionSettings:
        """Put a response format into a copy of the settings; refused in closed loop."""
        self._refuse_format(response_format)
        if response_format is None:
            return self._settings
        settings = self._settings.model_copy()
        try:
            settings.response_format = response_format  # pyright: ignore[reportAttributeAccessIssue]
        except (
            ValidationError,
            ValueError,
            ServiceInvalidExecutionSettingsError,
        ) as error:
            raise InvalidSettingsError(
                f"response_format must be one that {type(settings).__name__} takes; got {shown(response_format)}: "
                f"{error}"
            ) from error
        return settings

    def _refuse_format(self, response_format: Any) -> None:
        if self._closed and response_format is not None:
            raise InvalidOptionError(
                "response_format cannot be used in closed loop: which of several replies should have it? Got "
                f"{shown(response_format)}. Use open loop: AutomaticToolUseConfig(enabled=False)."
            )

    def _request(self, stop: StopHandle | None) -> dict[str, Any]:
        return {
            "kernel": self._kernel,
            "arguments": copy(self._arguments),
            "stop": stop,
            "store_final": True,
        }


def _busy() -> SessionBusyError:
    return SessionBusyError(
        "Expected one prompt at a time; another one of this session is being answered. Await it, or close its stream "
        "(contextlib.aclosing does), or use a session for each conversation."
    )


def _behavior(
    given: FunctionChoiceBehavior | None, *, closed: bool
) -> FunctionChoiceBehavior:
    """Keep the functions that a behaviour offers; the session chooses who runs them."""
    if given is None:
        return BoundedFunctionChoiceBehavior.Auto(
            auto_invoke=closed, maximum_use_attempts=None
        )
    behavior = given.model_copy()
    if (
        behavior.type_ is not FunctionChoiceType.NONE
        and behavior.auto_invoke_kernel_functions != closed
    ):
        behavior.auto_invoke_kernel_functions = closed
    return behavior


def _budget(given: Budget | None, max_tool_calls: int) -> Budget:
    budget = (
        Budget(on_limit="raise")
        if given is None
        else instance_of("budget", given, Budget)
    )
    if budget.max_tool_calls is not None and budget.max_tool_calls > max_tool_calls:
        logger.warning(
            "The budget's max_tool_calls=%d cannot be reached: max_tool_calls=%d of the session's tool_use_config is "
            "less. Give AutomaticToolUseConfig(max_tool_calls=%d).",
            budget.max_tool_calls,
            max_tool_calls,
            budget.max_tool_calls,
        )
    return replace(budget, max_tool_calls=least(budget.max_tool_calls, max_tool_calls))


def _text(message: ChatMessageContent, key: SigningKey | None) -> str:
    """Return the text of a reply or a chunk; raise `RunNotAnsweredError` if the run waits."""
    if message.metadata.get("status") not in ("paused", "asked"):
        return text_of(message)
    checkpoint = Checkpoint.of_run(
        Checkpoint.from_json(message.metadata["checkpoint"], key).facts, key
    )
    state = checkpoint.state()
    raise run_not_answered(
        state,
        checkpoint,
        "A function call was deferred, or a question left open, and a session does not wait. Resume the checkpoint of "
        "this error with ToolCallHandler, decide in an interceptor, answer in the service's clarifier, or use open "
        "loop: AutomaticToolUseConfig(enabled=False).",
    )
