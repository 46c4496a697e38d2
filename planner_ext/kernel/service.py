"""``FunctionInvokingChatCompletion``: the bounded loop around any connector, itself a chat completion service."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar, Literal

from pydantic import PrivateAttr
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.functions import KernelArguments

from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.state import State
from planner_ext.engine import Engine, Observer, StopHandle
from planner_ext.kernel.behavior import BoundedFunctionChoiceBehavior
from planner_ext.kernel.budget import Budget
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.execution import ToolExecution
from planner_ext.kernel.loop import Loop, LoopOptions, checked_messages, connector_settings, new_run_id
from planner_ext.kernel.offer import Offer
from planner_ext.kernel.outcome import final_message, raise_at_limit
from planner_ext.kernel.prompts import NoPrompts
from planner_ext.kernel.streamed import StreamedRun
from planner_ext.kernel.usage import read_iterations
from planner_ext.ports import Clock, Emit
from planner_ext.streaming import watch

__all__ = ["FunctionInvokingChatCompletion"]


class FunctionInvokingChatCompletion(ChatCompletionClientBase):
    """A chat completion service that runs the function calls of another one, within a budget.

    It takes the place of the connector it wraps: in a kernel, in ``invoke_prompt``, in ``ChatCompletionAgent``. As with
    Semantic Kernel's own loop the messages with calls and their results are added to the history that was passed, and
    the final message is returned for the caller to add. What it adds to that message's metadata:

    - ``iterations``: round trips charged, 1 for a direct answer.
    - ``usage``: the connector's own usage, summed over all requests.
    - ``tool_calls``: functions started, failures included.
    - ``status``: ``answered``, ``incomplete``, ``limit_reached`` or ``stopped``.
    - ``limit``: the limit that was reached, or None.
    - ``checkpoint``: JSON text of a run that was not answered, from which it can be resumed.

    A request whose function choice behaviour is missing, or does not invoke functions automatically, passes through:
    one request, its calls returned to the caller. A stock ``FunctionChoiceBehavior.Auto()`` takes its 5 tool rounds;
    with a budget the tighter of the two holds.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    _inner: ChatCompletionClientBase = PrivateAttr()
    _options: LoopOptions = PrivateAttr()
    _on_invalid_history: Literal["refuse", "repair"] = PrivateAttr("refuse")

    def __init__(
        self,
        inner: ChatCompletionClientBase,
        *,
        budget: Budget | None = None,
        execution: ToolExecution | None = None,
        observers: Sequence[Observer] = (),
        clock: Clock | None = None,
        min_iteration_time_ms: int = 0,
        on_invalid_history: Literal["refuse", "repair"] = "refuse",
        strict_finish_reason: bool = False,
        service_id: str | None = None,
    ) -> None:
        """Wrap a connector.

        Args:
            inner: The connector that makes the requests.
            budget: What one request of a caller may spend; None limits nothing but what the behaviour limits.
            execution: How functions are run; None is `ToolExecution`'s defaults.
            observers: Told each fact of a run once it is recorded; what they raise is logged and changes nothing.
            clock: Time; None is the machine's.
            min_iteration_time_ms: Least milliseconds from the start of one round trip to the next.
            on_invalid_history: A history with an unanswered call, an orphan or a second result is refused before
                anything is sent (``refuse``), or mended in place (``repair``).
            strict_finish_reason: Whether a finish reason that contradicts the reply's content is an error.
            service_id: Under which the kernel knows it; None takes the inner connector's.

        Raises:
            PlannerInvalidConfigurationError: If an option cannot be used, naming it.
        """
        if not isinstance(inner, ChatCompletionClientBase):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlannerInvalidConfigurationError(
                f"inner must be a chat completion service of Semantic Kernel; got {inner!r}."
            )
        super().__init__(ai_model_id=inner.ai_model_id, service_id=service_id or inner.service_id)
        self.instruction_role = inner.instruction_role
        self._inner = inner
        self._options = LoopOptions.of(
            budget=budget,
            execution=execution,
            clock=clock,
            min_iteration_time_ms=min_iteration_time_ms,
            strict_finish_reason=strict_finish_reason,
            observers=observers,
        )
        if on_invalid_history not in ("refuse", "repair"):
            raise PlannerInvalidConfigurationError(
                f"on_invalid_history must be refuse or repair; got {on_invalid_history!r}."
            )
        self._on_invalid_history = on_invalid_history

    @property
    def inner(self) -> ChatCompletionClientBase:
        """The connector that makes the requests."""
        return self._inner

    @property
    def options(self) -> LoopOptions:
        """What it was made with, defaults filled in."""
        return self._options

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Name the inner connector's settings class."""
        return self._inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """Give the inner connector's URL."""
        return self._inner.service_url()

    async def get_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, **kwargs: Any
    ) -> list[ChatMessageContent]:
        """Answer a history, running functions on the way.

        Args:
            chat_history: Gets the messages with calls and their results; the final message is not added.
            settings: As for the inner connector; not changed.
            **kwargs: ``kernel``, needed where the settings have a function choice behaviour; ``arguments``, the
                application's; ``stop``, a `StopHandle`.

        Returns:
            The final message, alone in a list; several where several were asked for without functions.

        Raises:
            PlannerInvalidConfigurationError: If settings, kernel or budget cannot be used together.
            InvalidHistoryError: If the history may not be sent.
            InvalidReplyError: If the connector's response is no reply.
            LimitReachedError: At a limit, where the budget says ``on_limit="raise"``.
        """
        if (behavior := _invoking_behavior(settings)) is None:
            return await self._pass_through(chat_history, settings, kwargs)
        run = self._run(chat_history, settings, behavior, kwargs, streaming=False)
        engine = await run.drive(None)
        return [_returned_message(engine)]

    async def get_streaming_chat_message_contents(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, **kwargs: Any
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        """Answer a history as a stream, running functions on the way; as `get_chat_message_contents` otherwise.

        Yields:
            The connector's chunks as they come, with ``function_invoke_attempt`` telling the round trip, from 0; after
            each batch a tool message with its results; last, a chunk that carries the final message's metadata.
            Leaving the stream early cancels what runs.
        """
        if (behavior := _invoking_behavior(settings)) is None:
            async for chunks in self._pass_through_streaming(chat_history, settings, kwargs):
                yield chunks
            return
        run = self._run(chat_history, settings, behavior, kwargs, streaming=True)
        streamed = StreamedRun(self.ai_model_id)
        async for event in watch(run.drive):
            if (chunk := streamed.chunk_of(event)) is not None:
                yield [chunk]
        message = _returned_message(run.engine)
        yield [streamed.last_chunk(message, text_sent=run.engine.state.reply is not None)]

    def _run(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        behavior: FunctionChoiceBehavior,
        kwargs: dict[str, Any],
        *,
        streaming: bool,
    ) -> "_ServiceRun":
        kernel, arguments, stop = _keywords(kwargs)
        if kernel is None:
            raise PlannerInvalidConfigurationError(
                "kernel= is needed where the settings have a function choice behaviour; got none. Pass the kernel "
                "whose functions may be called."
            )
        chat_history.messages[:] = checked_messages(chat_history.messages, self._on_invalid_history)
        messages = tuple(chat_history.messages)
        follow = _HistoryFollower(chat_history)
        own_settings = connector_settings(self._inner, settings)
        loop = Loop(
            kernel=kernel,
            service=self._inner,
            settings=own_settings,
            offer=Offer(kernel, behavior, own_settings),
            arguments=arguments,
            options=self._options,
            streaming=streaming,
            prompts=NoPrompts(),
            follow=follow,
        )
        follow.loop = loop
        rules = _rules(self._options.budget, behavior)
        started = RunStarted(run_id=new_run_id(), rules=rules, messages=messages, at=self._options.clock.now())
        return _ServiceRun(loop, started, stop)

    async def _pass_through(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, kwargs: dict[str, Any]
    ) -> list[ChatMessageContent]:
        messages = await self._inner.get_chat_message_contents(chat_history, settings, **kwargs)
        return [message.model_copy(update={"metadata": _one_request(message.metadata)}) for message in messages]

    async def _pass_through_streaming(
        self, chat_history: ChatHistory, settings: PromptExecutionSettings, kwargs: dict[str, Any]
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        async for chunks in self._inner.get_streaming_chat_message_contents(chat_history, settings, **kwargs):
            for chunk in chunks:
                if chunk is not None:  # pyright: ignore[reportUnnecessaryComparison]
                    chunk.metadata = _one_request(chunk.metadata)
            yield chunks


class _ServiceRun:
    """One call of a service: an engine, made once the run has a place to emit to."""

    def __init__(self, loop: Loop, started: RunStarted, stop: StopHandle | None) -> None:
        self._loop = loop
        self._started = started
        self._stop = stop
        self.engine = loop.engine(())

    async def drive(self, emit: Emit | None) -> Engine:
        self.engine = self._loop.engine((), emit=emit, stop=self._stop)
        await self.engine.record(self._started)
        await self._loop.drive(self.engine)
        return self.engine


class _HistoryFollower:
    """Keeps the caller's history in step with a run: each settled batch, as soon as it has settled."""

    def __init__(self, history: ChatHistory) -> None:
        self._history = history
        self.loop: Loop | None = None

    def __call__(self, state: State, fact: Fact) -> None:
        if fact.type not in _SETTLING or self.loop is None:
            return
        messages = self._history.messages
        rendered = self.loop.chat.messages(state.transcript)
        if len(rendered) > len(messages):
            messages.extend(rendered[len(messages) :])


_SETTLING = frozenset({"CallDecided", "CallsWithheld", "CallFinished", "IterationCompleted"})
"""Facts after which a batch may have moved into the transcript."""


def _returned_message(engine: Engine) -> ChatMessageContent:
    raise_at_limit(engine.state, engine.facts)
    return final_message(engine.state, engine.facts)


def _invoking_behavior(settings: PromptExecutionSettings) -> FunctionChoiceBehavior | None:
    behavior = settings.function_choice_behavior
    return behavior if behavior is not None and behavior.auto_invoke_kernel_functions else None


def _keywords(kwargs: dict[str, Any]) -> tuple[Kernel | None, KernelArguments | None, StopHandle | None]:
    return kwargs.get("kernel"), kwargs.get("arguments"), kwargs.get("stop")


def _rules(budget: Budget, behavior: FunctionChoiceBehavior) -> Rules:
    """Read a behaviour's attempts: those of ``Required`` force a call in each round, and are no limit."""
    required = behavior.type_ is FunctionChoiceType.REQUIRED
    bounded = isinstance(behavior, BoundedFunctionChoiceBehavior)
    return Rules(
        limits=budget.limits,
        use_attempts=behavior.use_attempts if bounded else behavior.maximum_auto_invoke_attempts,
        attempts_limit="" if required else "maximum_use_attempts" if bounded else "maximum_auto_invoke_attempts",
        tool_choice="required" if required else "auto",
    )


def _one_request(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "iterations": read_iterations(metadata), "tool_calls": 0}
