"""``FunctionCallingStepwisePlanner``: a goal in, an answer out, within a budget that is never exceeded."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction, KernelFunctionMetadata, KernelPlugin

from planner_ext.approval.decisions import Decision
from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.fold import fold
from planner_ext.core.limits import Limits
from planner_ext.core.settle import stopping_facts
from planner_ext.engine import StopHandle
from planner_ext.events import PlannerEvent
from planner_ext.kernel.approval import check_record
from planner_ext.kernel.behavior import BoundedFunctionChoiceBehavior
from planner_ext.kernel.budget import Budget
from planner_ext.kernel.checkpoint import Checkpoint
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.loop import Loop, checked_messages, connector_settings, new_run_id
from planner_ext.kernel.offer import Offer
from planner_ext.kernel.options import LoopOptions, instance_of
from planner_ext.kernel.prompts import (
    PlannerPrompts,
    default_plan_prompt,
    default_step_prompt,
    plan_template,
    step_template,
)
from planner_ext.kernel.resumption import Resumption
from planner_ext.kernel.selection import select_service
from planner_ext.kernel.service import unwrapped
from planner_ext.planner_options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner_result import FunctionCallingStepwisePlannerResult, UserInteraction, result_of
from planner_ext.planner_run import PlannerRun

__all__ = ["FunctionCallingStepwisePlanner"]


class FunctionCallingStepwisePlanner:
    """Reaches a goal with the functions of a kernel: plans, calls functions step by step, and answers.

    The planner that Semantic Kernel removed in 2025, by the same names; a program written for it changes its import.
    One planner may be used for many runs, also at the same time.
    """

    def __init__(
        self, service_id: str | None = None, options: FunctionCallingStepwisePlannerOptions | None = None
    ) -> None:
        """Set the planner up.

        Args:
            service_id: The chat completion service to use; None leaves it to the kernel's own selection.
            options: None is `FunctionCallingStepwisePlannerOptions`'s defaults.

        Raises:
            PlannerInvalidConfigurationError: If the options cannot be used, naming what is wrong.
        """
        self.service_id = service_id
        self.options = FunctionCallingStepwisePlannerOptions() if options is None else options
        instance_of("options", self.options, FunctionCallingStepwisePlannerOptions)
        plan, step = self.options.get_initial_plan, self.options.get_step_prompt
        self._plan_template, self._plan_settings = plan_template(default_plan_prompt if plan is None else plan())
        self._step_template = step_template(default_step_prompt if step is None else step())
        self._loop_options(None)  # which checks them

    async def invoke(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments | None = None,
        *,
        chat_history: ChatHistory | None = None,
        stop: StopHandle | None = None,
        **kwargs: Any,
    ) -> FunctionCallingStepwisePlannerResult:
        """Reach a goal.

        Args:
            kernel: Its functions may be called; it is not changed.
            question: The goal.
            arguments: The application's arguments, for functions and templates; never stored, and not changed.
            chat_history: An earlier conversation; the goal is added to a copy of it, and no plan is asked for.
            stop: Ends the run from outside.
            **kwargs: More arguments, by name.

        Returns:
            A result for every expected end: answered, limit reached, stopped, incomplete.

        Raises:
            PlannerInvalidConfigurationError: If the goal is empty, there is no chat completion service, or something
                else that was given cannot be used.
            InvalidHistoryError: If the ``chat_history`` may not be sent.
            LimitReachedError: At a limit, where the budget says ``on_limit="raise"``.
            ServiceCallError: If a request fails. This and every other exception out of a run, Semantic Kernel's own
                included, has ``chat_history`` and ``checkpoint`` as attributes.
            InvalidReplyError: If a response is no reply; likewise.
        """
        run = self._start(kernel, question, _merged(arguments, kwargs), chat_history, stop, streaming=False)
        return await run.result(None)

    async def invoke_stream(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments | None = None,
        *,
        chat_history: ChatHistory | None = None,
        stop: StopHandle | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[PlannerEvent, None]:
        """Reach a goal as `invoke` does, with streaming requests, and tell what happens.

        Yields:
            `TextDelta` for text as it arrives, the facts of the run, and last a `ResultReady` with the result. Leaving
            early cancels what runs.
        """
        run = self._start(kernel, question, _merged(arguments, kwargs), chat_history, stop, streaming=True)
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event

    async def resume(
        self,
        kernel: Kernel,
        checkpoint: Checkpoint,
        decisions: Mapping[str, Decision] | None = None,
        *,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
    ) -> FunctionCallingStepwisePlannerResult:
        """Go on with a run that is paused, that a limit or a stop ended, or that a fault interrupted.

        Args:
            kernel: Its functions may be called; need not be the one that the run began with.
            checkpoint: Of the run, from its result or its error.
            decisions: On the calls that wait, by call id; partial ones are fine. No request is made before every call
                is decided: without decisions a paused run stays paused, but for calls whose question expired.
            arguments: The application's arguments again; a checkpoint does not hold them.
            budget: Replaces the run's limits; what was spent stays spent. One without ``max_iterations`` has that of
                the options. The budget of a service that limits itself holds all the same. None keeps the limits.
            stop: Ends the run from outside.

        Raises:
            PlannerInvalidConfigurationError: If the run was answered: there is nothing to go on with.
            DecisionRefusedError: If a decision cannot be taken; then none is, and nothing runs.
            Exception: As `invoke`.
        """
        given = Resumption(checkpoint=checkpoint, decisions=decisions or {}, budget=budget)
        run = self._resume(kernel, given, _merged(arguments, {}), stop, streaming=False)
        return await run.result(None)

    async def resume_stream(
        self,
        kernel: Kernel,
        checkpoint: Checkpoint,
        decisions: Mapping[str, Decision] | None = None,
        *,
        arguments: KernelArguments | None = None,
        budget: Budget | None = None,
        stop: StopHandle | None = None,
    ) -> AsyncGenerator[PlannerEvent, None]:
        """Go on as `resume` does, and tell what happens as `invoke_stream` does."""
        given = Resumption(checkpoint=checkpoint, decisions=decisions or {}, budget=budget)
        run = self._resume(kernel, given, _merged(arguments, {}), stop, streaming=True)
        async with aclosing(run.events()) as events:
            async for event in events:
                yield event

    def cancel(self, checkpoint: Checkpoint, *, by: str = "", reason: str = "") -> FunctionCallingStepwisePlannerResult:
        """End a paused run for good: every call that waits is answered "not executed", and nothing runs.

        Args:
            checkpoint: Of the run.
            by: Who cancels, for the record and the model.
            reason: Why, likewise.

        Returns:
            The stopped run.

        Raises:
            PlannerInvalidConfigurationError: If the run has ended already.
        """
        state = instance_of("checkpoint", checkpoint, Checkpoint).state()
        check_record(state)
        if state.ended is not None:
            raise PlannerInvalidConfigurationError(
                f"The run of this checkpoint has ended ({state.ended.status}); only one that waits can be cancelled."
            )
        who = f"Cancelled by {by}" if by else "Cancelled"
        facts = stopping_facts(
            state, reason=f"{who}: {reason}" if reason else f"{who}.", at=self._loop_options(None).clock.now()
        )
        journal = (*checkpoint.facts, *facts)
        return result_of(fold(journal), journal)

    def _start(
        self,
        kernel: Kernel,
        question: str,
        arguments: KernelArguments,
        chat_history: ChatHistory | None,
        stop: StopHandle | None,
        *,
        streaming: bool,
    ) -> PlannerRun:
        if not isinstance(question, str) or not question.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise PlannerInvalidConfigurationError(f"The goal must be a text that is not empty; got {question!r}.")
        given = ChatHistory() if chat_history is None else instance_of("chat_history", chat_history, ChatHistory)
        before = checked_messages(given.messages, self.options.on_invalid_history)
        setting = self._setting(kernel, question, arguments, self._loop_options(None), streaming=streaming)

        async def started() -> Sequence[Fact]:
            fact = RunStarted(
                run_id=new_run_id(),
                rules=self._rules(setting, plan=chat_history is None),
                messages=await self._opening(setting, before),
                goal=question,
                at=setting.options.clock.now(),
            )
            return (fact,)

        return PlannerRun(setting.loop, (), started, stop)

    def _resume(
        self,
        kernel: Kernel,
        given: Resumption,
        arguments: KernelArguments,
        stop: StopHandle | None,
        *,
        streaming: bool,
    ) -> PlannerRun:
        state = instance_of("checkpoint", given.checkpoint, Checkpoint).state()
        if state.ended is not None and state.ended.status == "answered":
            raise PlannerInvalidConfigurationError(
                "The run of this checkpoint was answered; there is nothing to resume. Invoke with a new goal."
            )
        setting = self._setting(kernel, state.goal, arguments, self._loop_options(given.budget), streaming=streaming)
        if given.budget is not None:
            given = replace(given, budget=setting.options.budget)
        facts = given.facts(setting.loop.functions, setting.options.clock.now())

        async def resumed() -> Sequence[Fact]:
            return facts

        return PlannerRun(setting.loop, given.checkpoint.facts, resumed, stop)

    def _loop_options(self, budget: Limits | None) -> LoopOptions:
        """Read the options as they are now; a budget that a run is resumed with takes the place of theirs."""
        options, limits = self.options, self.options.limits
        if budget is not None:
            given = instance_of("budget", budget, Budget).limits
            limits = given if given.max_iterations else replace(given, max_iterations=limits.max_iterations)
        loop_options = LoopOptions.of(
            budget=options.budget,
            execution=options.execution,
            approval=options.approval,
            interceptors=tuple(options.interceptors),
            pre_invoke=options.pre_invoke,
            iteration_completed=options.iteration_completed,
            clock=options.clock,
            min_iteration_time_ms=options.min_iteration_time_ms,
            strict_finish_reason=options.strict_finish_reason,
            observers=tuple(options.observers),
        )
        return replace(loop_options, budget=limits)

    def _setting(
        self, kernel: Kernel, goal: str, arguments: KernelArguments, options: LoopOptions, *, streaming: bool
    ) -> "_Setting":
        """Find the service, its settings and the functions for one run."""
        service, settings = select_service(kernel, self.service_id, arguments, self.options.execution_settings)
        service, options = unwrapped(service, options)
        settings = connector_settings(service, settings)
        if self.options.max_completion_tokens and hasattr(settings, "max_tokens"):
            settings = settings.model_copy(update={"max_tokens": self.options.max_completion_tokens})
        behavior = settings.function_choice_behavior or BoundedFunctionChoiceBehavior.Auto()
        final_answer = self._final_answer()
        offer = Offer(
            kernel,
            None if behavior.type_ is FunctionChoiceType.NONE else behavior,
            settings,
            own=() if final_answer is None else (final_answer,),
            select=lambda found: self._selected(kernel, found, goal),
        )
        prompts = PlannerPrompts(
            kernel=kernel,
            arguments=arguments,
            goal=goal,
            plan_template=self._plan_template,
            step_template=self._step_template,
            functions=offer.metadata,
            hands_over=final_answer is not None,
        )
        loop = Loop(
            kernel=kernel,
            service=service,
            settings=settings,
            offer=offer,
            arguments=arguments,
            options=options.under(behavior),
            streaming=streaming,
            prompts=prompts,
            final_answer=final_answer,
            plan_settings=self._plan_settings,
        )
        return _Setting(loop=loop, prompts=prompts, options=options, behavior=behavior, goal=goal)

    def _rules(self, setting: "_Setting", *, plan: bool) -> Rules:
        behavior = setting.behavior
        required = behavior.type_ is FunctionChoiceType.REQUIRED
        return Rules(
            limits=setting.options.budget,
            plan=self.options.plan is True and plan,
            charge_plan=self.options.charge_plan,
            use_attempts=_attempts(behavior),
            attempts_limit="" if required else "maximum_use_attempts",
            tool_choice="required" if required else "auto",
            rounds_per_step=1 if self.options.control == "use_attempts" else None,
            close_on_denial=self.options.control == "pre_invoke",
            require_final_answer=self.options.require_final_answer_function,
            on_denial=setting.options.approval.on_denial,
            on_deferred=setting.options.approval.on_deferred,
        )

    async def _opening(
        self, setting: "_Setting", before: Sequence[ChatMessageContent]
    ) -> tuple[ChatMessageContent, ...]:
        """Write the messages that a run opens with; a plan that is asked for takes their place later."""
        if isinstance(self.options.plan, str):
            return (*before, *await setting.prompts.opening(self.options.plan))
        return (*before, ChatMessageContent(role=AuthorRole.USER, content=setting.goal))

    def _final_answer(self) -> KernelFunction | None:
        if self.options.plan is False and not self.options.require_final_answer_function:
            return None
        return KernelPlugin.from_object("UserInteraction", UserInteraction()).functions["SendFinalAnswer"]

    def _selected(
        self, kernel: Kernel, functions: Sequence[KernelFunctionMetadata], goal: str
    ) -> Sequence[KernelFunctionMetadata]:
        """Leave out what the options exclude, or do not choose."""
        options = self.options
        if options.get_available_functions is not None:
            chosen = {function.fully_qualified_name for function in options.get_available_functions(options, goal)}
            there = {function.fully_qualified_name for function in kernel.get_full_list_of_function_metadata()}
            if unknown := sorted(chosen - there):
                raise PlannerInvalidConfigurationError(
                    f"get_available_functions gave {', '.join(unknown)}; the kernel has "
                    f"{', '.join(sorted(there)) or 'no function'}. Give functions of the kernel."
                )
            functions = [function for function in functions if function.fully_qualified_name in chosen]
        return [
            function
            for function in functions
            if function.plugin_name not in options.excluded_plugins
            and not {function.name, function.fully_qualified_name} & options.excluded_functions
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What one run works with."""

    loop: Loop
    prompts: PlannerPrompts
    options: LoopOptions
    behavior: FunctionChoiceBehavior
    goal: str


def _attempts(behavior: FunctionChoiceBehavior) -> int | None:
    """Read the tool rounds that a behaviour allows; what it says of auto-invoking is no matter to a planner."""
    if isinstance(behavior, BoundedFunctionChoiceBehavior):
        return behavior.maximum_use_attempts
    return behavior.maximum_auto_invoke_attempts or 1 if behavior.type_ is FunctionChoiceType.REQUIRED else None


def _merged(arguments: KernelArguments | None, kwargs: dict[str, Any]) -> KernelArguments:
    merged = KernelArguments() if arguments is None else copy(arguments)
    for name, value in kwargs.items():
        merged[name] = value
    return merged
