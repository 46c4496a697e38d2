"""``FunctionInvokingChatCompletion``: the bounded loop around any connector, itself a chat completion service."""

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self, Unpack

from pydantic import PrivateAttr
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.text_completion_client_base import (
    TextCompletionClientBase,
)
from semantic_kernel.contents import (
    ChatHistory,
    ChatMessageContent,
    StreamingChatMessageContent,
)
from semantic_kernel.functions import KernelArguments
from semantic_kernel.services.ai_service_client_base import AIServiceClientBase

from planner_ext.approval.decisions import Decision
from planner_ext.core.accounts import Tab
from planner_ext.core.errors import require
from planner_ext.core.facts import Rules, RunStarted
from planner_ext.core.fold import apply, fold
from planner_ext.core.limits import Budget
from planner_ext.engine.concurrency import StopHandle, streams
from planner_ext.sk.charging.again import (
    check_same_run,
    continued_messages,
    is_same_run,
)
from planner_ext.sk.charging.nested import ParentRun, current_parent_run
from planner_ext.sk.charging.view import Charge, ChargedTextCompletion, charged
from planner_ext.sk.checkpoint import Checkpoint, DecisionsTaken, Taking
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import InvalidSettingsError
from planner_ext.sk.functions.questions import own_function
from planner_ext.sk.functions.toolset import ToolSet
from planner_ext.sk.run.context import RunContext, checked_messages, prepare, unwrapped
from planner_ext.sk.run.inside import resumed
from planner_ext.sk.run.options import CheckedOptions, RunOptions, takes_run_options
from planner_ext.sk.run.resume import Late, ResumeRequest, as_given, given_checkpoint
from planner_ext.sk.run.returned import refuse_waiting
from planner_ext.sk.run.service import (
    ServiceRequest,
    ServiceRun,
    pass_through,
    pass_through_streaming,
)

__all__ = ["FunctionInvokingChatCompletion"]


class FunctionInvokingChatCompletion(ChatCompletionClientBase):
    """A chat completion service that runs the function calls of another one, within a budget.

    It replaces its connector in a kernel, in ``invoke_prompt``, in
    ``ChatCompletionAgent``. As with Semantic Kernel's own loop, calls and results are
    added to the history that was passed, and the final message is returned for the
    caller to add. Its metadata gets:

    - ``iterations``: round trips charged, 1 for a direct answer.
    - ``usage``: the connector's own usage, summed over all requests.
    - ``tool_calls``: functions started, failures included.
    - ``status``: ``answered``, ``incomplete``, ``paused``, ``asked``, ``limit_reached``
      or ``stopped``.
    - ``limit``: the limit that was reached, or None.
    - ``reason``: why the run was not answered; only of such a run.
    - ``pending``: the calls and questions that wait for a person, as mappings; only of
      a paused run.
    - ``checkpoint``: JSON text of a run that was not answered, for `resume`.

    A request whose function choice behaviour is missing, or does not invoke functions
    automatically, passes through: one request, whose calls are returned to the caller
    with the status ``stopped``. A stock ``FunctionChoiceBehavior.Auto()`` allows its 5
    tool rounds; with a budget, the tighter limit applies. Where a filter sets
    ``context.terminate``, the message is that of Semantic Kernel's loop: a tool message
    with the last batch's results. The history has these already: adding it changes
    nothing.

    Called by a function of a run of this package, the request spends that run's budget,
    and that run's interceptors, policies and marks apply, too.
    """

    SUPPORTS_FUNCTION_CALLING: ClassVar[bool] = True

    _inner: ChatCompletionClientBase = PrivateAttr()
    _options: CheckedOptions = PrivateAttr()
    _tab: Tab | None = PrivateAttr(None)

    @takes_run_options
    def __init__(
        self,
        inner: ChatCompletionClientBase,
        *,
        service_id: str | None = None,
        **options: Unpack[RunOptions],
    ) -> None:
        """Wrap a connector.

        Args:
            inner: The connector that makes the requests. If it is such a wrapper
                itself, its connector is used and the options of both are merged: of
                each limit the tighter applies, and its interceptors are asked after
                these.
            service_id: The id by which the kernel finds it; None uses the inner
                connector's.
            **options: See `planner_ext.iteration.RunOptions`; each call of this service
                gets the whole budget.

        Raises:
            PlannerInvalidConfigurationError: If an option is invalid; names it.
        """
        fits = isinstance(inner, ChatCompletionClientBase)  # pyright: ignore[reportUnnecessaryIsInstance]
        require("inner", fits, "a chat completion service of Semantic Kernel", inner)
        super().__init__(
            ai_model_id=inner.ai_model_id, service_id=service_id or inner.service_id
        )
        self.instruction_role = inner.instruction_role
        self._inner, self._options = unwrapped(
            inner, CheckedOptions.of(DecisionsTaken(), **options)
        )

    @property
    def inner(self) -> ChatCompletionClientBase:
        """The connector that makes the requests."""
        return self._inner

    def _charged(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        kwargs: Mapping[str, Any],
    ) -> AbstractAsyncContextManager[Charge]:
        """Charge a request that passes through to the call that makes it, and to shared budgets."""
        options = self._options
        messages = list(chat_history.messages)
        arguments = kwargs.get("arguments") or KernelArguments()
        shared_by = (
            partial(options.charges, arguments) if options.shared_budgets else None
        )
        return charged(
            self._tab,
            self._inner,
            settings,
            messages,
            options.price,
            shared_by=shared_by,
        )

    def charged_to(self, tab: Tab) -> Self:
        """@private Return a copy whose requests are charged to a call of a run."""
        copied = self.model_copy()
        copied._tab = tab
        return copied

    @property
    def options(self) -> CheckedOptions:
        """@private The options of this service, with defaults filled in."""
        return self._options

    def get_prompt_execution_settings_class(self) -> type[PromptExecutionSettings]:
        """Return the inner connector's settings class."""
        return self._inner.get_prompt_execution_settings_class()

    def service_url(self) -> str | None:
        """@private Return the inner connector's URL."""
        return self._inner.service_url()

    @property
    def total_tokens(self) -> int:
        """@private Return the inner connector's own count of tokens; 0 where it keeps none."""
        return getattr(self._inner, "total_tokens", 0)

    async def get_chat_message_contents(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        **kwargs: Any,
    ) -> list[ChatMessageContent]:
        """Answer a history, and run the functions that the model calls.

        Args:
            chat_history: Gets the messages with calls and their results.
            settings: As for the inner connector; not changed.
            **kwargs: ``kernel``, required if the settings have a function choice
                behaviour; ``arguments``, the application's; ``stop``, a `StopHandle`;
                ``store_final``, True to add the final message, too.

        Returns:
            The final message; several if the settings ask for several answers without
                functions.

        Raises:
            PlannerInvalidConfigurationError: If settings, kernel or budget cannot be
                used together.
            InvalidHistoryError: If the history is invalid.
            InvalidReplyError: If the connector's response is not a valid reply.
            PromptTooLargeError: If a request would exceed ``max_prompt_tokens``; it is
                not sent.
            LimitReachedError: Under ``on_limit="raise"``; and inside a function, if the
                budget of the outer run is used up.
            NestedRunRefusedError: Inside a function whose call has ended, or whose run
                is stopping.
        """
        if not _invokes(chat_history, settings, kwargs.get("kernel")):
            request = self._charged(chat_history, settings, kwargs)
            return await pass_through(
                self._inner, chat_history, settings, kwargs, request
            )
        run = self._start(chat_history, settings, kwargs, streaming=False)
        return [await run.message()]

    async def get_streaming_chat_message_contents(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        **kwargs: Any,
    ) -> AsyncGenerator[list[StreamingChatMessageContent], Any]:
        """Answer a history as `get_chat_message_contents` does, as a stream.

        Yields:
            The connector's chunks, with the 0-based round trip as
                ``function_invoke_attempt``; after each batch, a chunk with its calls
                and a tool message with the results; last, a chunk with the final
                message's metadata, which alone has the usage. Closing the stream early
                cancels the run.
        """
        if not _invokes(chat_history, settings, kwargs.get("kernel")):
            request = self._charged(chat_history, settings, kwargs)
            async with aclosing(
                pass_through_streaming(
                    self._inner, chat_history, settings, kwargs, request
                )
            ) as passed:
                async for group in passed:
                    yield group
            return
        run = self._start(chat_history, settings, kwargs, streaming=True)
        async with aclosing(run.chunks(self.ai_model_id)) as chunks:
            async for chunk in chunks:
                yield [chunk]

    async def get_streaming_chat_message_content(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        **kwargs: Any,
    ) -> AsyncGenerator[StreamingChatMessageContent | None, Any]:
        """Answer as `get_streaming_chat_message_contents` does, with single chunks."""
        async with aclosing(
            self.get_streaming_chat_message_contents(chat_history, settings, **kwargs)
        ) as groups:
            async for group in groups:
                yield group[0] if group else None

    async def resume(
        self,
        chat_history: ChatHistory,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision],
        settings: PromptExecutionSettings,
        *,
        kernel: Kernel,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
        store_final: bool = False,
        late: Late = "refuse",
    ) -> ChatMessageContent:
        """Resume a run that is paused, or that a limit or a stop ended.

        A checkpoint does not record that it was resumed. This service, and the
        handlers, planners and copies that share it, accept one decision on a call, and
        remember the newest 100,000; a resume that fails before a function has started
        releases its decisions. Another process would run the call again: if that can
        happen, use a planner with a store (`planner_ext.durable.Runs`).

        Args:
            chat_history: The run's history so far, or an empty one; compared by text,
                calls and results. Missing messages are added, and the message that the
                run had returned is removed.
            checkpoint: The run's `Checkpoint`, or the JSON text in the metadata of its
                last message. Anyone who can write an unsigned one can put an approval
                in it; a ``checkpoint_key`` refuses those.
            decisions: By call id. No request is made before every call is decided.
            settings: Those of the original request.
            kernel: Its functions run; it need not be the kernel that the run began
                with.
            arguments: The application's arguments again; a checkpoint does not hold
                them.
            budget: Replaces the run's limits; what was spent still counts, and a
                wrapped service's budget still applies.
            stop: Ends the run from outside.
            store_final: Whether to add the final message to the history, too.
            late: Whether to ``"refuse"`` or ``"allow"`` decisions if the history holds
                a later message of the user, or later calls. If allowed, the model does
                not read what came after the pause, and the calls are added after it.

        Returns:
            The final message, as of `get_chat_message_contents`.

        Raises:
            InvalidCheckpointError: If the checkpoint cannot be read, or is not signed
                with the ``checkpoint_key``.
            InvalidHistoryError: If the history is not that of the run, or holds results
                of its open calls; it is not changed.
            DecisionRefusedError: If a decision is invalid, was taken before, or comes
                late; then no decision is taken.
        """
        request = ServiceRequest(
            kernel=kernel,
            arguments=arguments,
            stop=stop,
            store_final=store_final,
            late=late,
        )
        run = await self._resume(
            chat_history,
            checkpoint,
            decisions,
            settings,
            request,
            budget=budget,
            streaming=False,
        )
        return await run.message()

    @streams
    async def resume_streaming(
        self,
        chat_history: ChatHistory,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision],
        settings: PromptExecutionSettings,
        *,
        kernel: Kernel,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
        store_final: bool = False,
        late: Late = "refuse",
    ) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Resume as `resume` does, as a stream of single chunks."""
        request = ServiceRequest(
            kernel=kernel,
            arguments=arguments,
            stop=stop,
            store_final=store_final,
            late=late,
        )
        run = await self._resume(
            chat_history,
            checkpoint,
            decisions,
            settings,
            request,
            budget=budget,
            streaming=True,
        )
        async with aclosing(run.chunks(self.ai_model_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _start(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        kwargs: dict[str, Any],
        *,
        streaming: bool,
    ) -> ServiceRun:
        if kwargs.get("kernel") is None:
            raise InvalidSettingsError(
                "kernel= is needed where the settings have a function choice behaviour; got None. Pass the kernel "
                "whose functions may be called."
            )
        request = ServiceRequest(
            **{
                name: kwargs[name]
                for name in ServiceRequest.__dataclass_fields__
                if name in kwargs
            }
        )
        parent = current_parent_run(self._tab)
        if parent is not None:
            parent = parent.enter(
                partial(is_same_run, goal="", messages=chat_history.messages)
            )
            continued = continued_messages(parent.tab, parent.known)
            if continued is not None:
                chat_history.messages[:] = continued
        messages = tuple(
            checked_messages(
                chat_history.messages, self._options.on_invalid_history, request.kernel
            )
        )
        if self._options.on_invalid_history == "repair":
            chat_history.messages[:] = messages
        if parent is not None and parent.known:
            check_same_run(parent.known[0], goal="", messages=messages)
            return self._continued(
                chat_history, settings, request, parent, streaming=streaming
            )
        context = self._context(
            request, settings, self._options, streaming=streaming, parent=parent
        )
        at = context.options.clock.now()
        started = RunStarted(
            run_id=context.new_run_id(),
            rules=context.rules(),
            messages=messages,
            guards=context.guards_inside(),
            at=at,
        )
        return ServiceRun(
            history=chat_history,
            context=context,
            request=request,
            new=(started,),
            known=len(messages),
        )

    def _continued(
        self,
        chat_history: ChatHistory,
        settings: PromptExecutionSettings,
        request: ServiceRequest,
        parent: ParentRun,
        *,
        streaming: bool,
    ) -> ServiceRun:
        """Continue a run whose function is called again; the history gets what has happened in it so far."""
        state = fold(parent.known)
        options = replace(
            self._options, budget=self._options.bounded(state.rules.limits)
        )
        context = self._context(
            request, settings, options, streaming=streaming, parent=parent
        )
        return ServiceRun(
            history=chat_history,
            context=context,
            request=request,
            new=(),
            known=len(state.transcript),
            facts=parent.known,
            transcript=context.chat.messages(state.transcript),
        )

    def _looked_at(
        self,
        kernel: Kernel,
        settings: PromptExecutionSettings,
        *,
        rules: Rules,
        parent: ParentRun,
    ) -> RunContext:
        """@private Prepare a run inside a call that waits, to check decisions on its calls; it is not driven."""
        options = replace(self._options, budget=self._options.bounded(rules.limits))
        request = ServiceRequest(kernel=kernel)
        return self._context(request, settings, options, streaming=False, parent=parent)

    async def _resume(
        self,
        chat_history: ChatHistory,
        checkpoint: Checkpoint | str,
        decisions: Mapping[str, Decision],
        settings: PromptExecutionSettings,
        request: ServiceRequest,
        *,
        budget: Budget | None,
        streaming: bool,
    ) -> ServiceRun:
        """Prepare a run to be resumed as `resume` says; nothing is driven or changed yet."""
        own = self._options
        _check_request(chat_history, settings)
        loaded = given_checkpoint(checkpoint, own.checkpoint_key)
        limits = None if budget is None else own.bounded(budget)
        options = replace(
            own, budget=limits or own.bounded(loaded.state().rules.limits)
        )
        made = as_given(decisions)
        given = ResumeRequest(checkpoint=loaded, decisions=made, budget=limits)
        parent = current_parent_run(self._tab)
        context = self._context(
            request, settings, options, streaming=streaming, parent=parent
        )
        taking = Taking(options.taken)
        new = await resumed(context, given, taking)
        state = apply(loaded.state(), new[0])
        return ServiceRun(
            history=chat_history,
            context=context,
            request=request,
            new=new,
            known=len(state.transcript),
            facts=loaded.facts,
            taking=taking,
            transcript=context.chat.messages(state.transcript),
        )

    def _context(
        self,
        request: ServiceRequest,
        settings: PromptExecutionSettings,
        options: CheckedOptions,
        *,
        streaming: bool,
        parent: ParentRun | None,
    ) -> RunContext:
        behavior = settings.function_choice_behavior
        asks = options.takes_questions and (
            behavior is None or behavior.type_ is not FunctionChoiceType.NONE
        )
        return prepare(
            kernel=request.kernel,
            service=self._inner,
            settings=settings,
            options=options,
            arguments=request.arguments,
            streaming=streaming,
            parent=parent,
            wrap=charged_service,
            stop=request.stop,
            ask_user=own_function("AskUser") if asks else None,
        )


def charged_service(service: AIServiceClientBase, tab: Tab) -> AIServiceClientBase:
    """@private Wrap a service that asks a model, to charge its requests to a call of a run."""
    if isinstance(service, FunctionInvokingChatCompletion):
        return service.charged_to(tab)
    if isinstance(service, ChatCompletionClientBase):
        return FunctionInvokingChatCompletion(service).charged_to(tab)
    return (
        ChargedTextCompletion(service, tab)
        if isinstance(service, TextCompletionClientBase)
        else service
    )


def _check_request(
    chat_history: ChatHistory, settings: PromptExecutionSettings
) -> None:
    instance_of("chat_history", chat_history, ChatHistory)
    instance_of("settings", settings, PromptExecutionSettings)


def _invokes(
    chat_history: ChatHistory, settings: PromptExecutionSettings, kernel: Kernel | None
) -> bool:
    _check_request(chat_history, settings)
    refuse_waiting(chat_history.messages)
    behavior = settings.function_choice_behavior
    if behavior is None or not behavior.auto_invoke_kernel_functions:
        return False
    answers = (
        getattr(settings, "number_of_responses", None)
        or settings.extension_data.get("number_of_responses")
        or 1
    )
    return (
        answers == 1 or kernel is None or ToolSet(kernel, behavior, settings).available
    )
