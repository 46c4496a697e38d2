"""``FunctionCallingStepwisePlanner``: a goal in, an answer out, within a budget that is never exceeded."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction, KernelFunctionMetadata, KernelPlugin

from planner_ext.approval.decisions import Decision
from planner_ext.core.facts import Fact, Rules, RunStarted
from planner_ext.core.fold import fold
from planner_ext.core.limits import Limits
from planner_ext.core.settle import stopping_facts
from planner_ext.engine import StopHandle
from planner_ext.events import PlannerEvent
from planner_ext.kernel.behavior import BoundedFunctionChoiceBehavior
from planner_ext.kernel.budget import Budget, tightest
from planner_ext.kernel.checkpoint import Checkpoint
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.loop import Loop, checked_messages, connector_settings, new_run_id
from planner_ext.kernel.offer import Offer
from planner_ext.kernel.options import LoopOptions
from planner_ext.kernel.prompts import PlannerPrompts, default_plan_prompt, default_step_prompt, plan_template
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
        self.options = options or FunctionCallingStepwisePlannerOptions()
        self._plan_config, self._plan_settings = plan_template(
            self.options.get_initial_plan() if self.options.get_initial_plan else default_plan_prompt
        )
        self._step_template = self.options.get_step_prompt() if self.options.get_step_prompt else default_step_prompt
        loop_options = LoopOptions.of(
            budget=self.options.budget,
            execution=self.options.execution,
            approval=self.options.approval,
            interceptors=tuple(self.options.interceptors),
            pre_invoke=self.options.pre_invoke,
            iteration_completed=self.options.iteration_completed,
            clock=self.options.clock,
            min_iteration_time_ms=self.options.min_iteration_time_ms,
            strict_finish_reason=self.options.strict_finish_reason,
            observers=tuple(self.options.observers),
        )
        trips = Limits(max_iterations=self.options.max_iterations)
        self._loop_options = replace(loop_options, budget=tightest(loop_options.budget, trips))

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
            PlannerInvalidConfigurationError: If the goal is empty, or there is no chat completion service.
            InvalidHistoryError: If the ``chat_history`` may not be sent.
            LimitReachedError: At a limit, where the budget says ``on_limit="raise"``.
            ServiceCallError: If a request fails; it carries history and checkpoint.
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
        async for event in run.events():
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
            budget: Replaces the run's limits; what was spent stays spent. None keeps them.
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
        async for event in run.events():
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
        state = checkpoint.state()
        if state.ended is not None:
            raise PlannerInvalidConfigurationError(
                f"The run of this checkpoint has ended ({state.ended.status}); only one that waits can be cancelled."
            )
        who = f"Cancelled by {by}" if by else "Cancelled"
        facts = stopping_facts(
            state, reason=f"{who}: {reason}" if reason else f"{who}.", at=self._loop_options.clock.now()
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
        before = checked_messages(chat_history.messages if chat_history else (), self.options.on_invalid_history)
        setting = self._setting(kernel, question, arguments, streaming=streaming)

        async def started() -> Sequence[Fact]:
            fact = RunStarted(
                run_id=new_run_id(),
                rules=self._rules(setting, plan=chat_history is None),
                messages=await self._opening(setting, before, plan=chat_history is None),
                goal=question,
                at=self._loop_options.clock.now(),
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
        state = given.checkpoint.state()
        if state.ended is not None and state.ended.status == "answered":
            raise PlannerInvalidConfigurationError(
                "The run of this checkpoint was answered; there is nothing to resume. Invoke with a new goal."
            )
        setting = self._setting(kernel, state.goal, arguments, streaming=streaming)
        facts = given.facts(setting.loop.functions, self._loop_options.clock.now())

        async def resumed() -> Sequence[Fact]:
            return facts

        return PlannerRun(setting.loop, given.checkpoint.facts, resumed, stop)

    def _setting(self, kernel: Kernel, goal: str, arguments: KernelArguments, *, streaming: bool) -> "_Setting":
        """Find the service, its settings and the functions for one run."""
        service, settings = select_service(kernel, self.service_id, arguments, self.options.execution_settings)
        service, options = unwrapped(service, self._loop_options)
        if self.options.max_completion_tokens is not None and hasattr(settings, "max_tokens"):
            settings = settings.model_copy(update={"max_tokens": self.options.max_completion_tokens})
        settings = connector_settings(service, settings)
        behavior = settings.function_choice_behavior or BoundedFunctionChoiceBehavior.Auto()
        final_answer = self._final_answer()
        own = () if final_answer is None else (final_answer,)
        offer = Offer(kernel, behavior, settings, own=own, select=lambda found: self._selected(found, goal))
        prompts = PlannerPrompts(
            kernel=kernel,
            arguments=arguments,
            goal=goal,
            plan_config=self._plan_config,
            step_template=self._step_template,
            functions=offer.metadata,
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
        bounded = behavior if isinstance(behavior, BoundedFunctionChoiceBehavior) else None
        return Rules(
            limits=setting.options.budget,
            plan=self.options.plan is True and plan and _room_for_plan(setting.options.budget),
            charge_plan=self.options.charge_plan,
            use_attempts=bounded.use_attempts if bounded else None,
            attempts_limit="maximum_use_attempts" if bounded else "",
            rounds_per_step=1 if self.options.control == "use_attempts" else None,
            close_on_denial=self.options.control == "pre_invoke",
            require_final_answer=self.options.require_final_answer_function,
            on_denial=setting.options.approval.on_denial,
            on_deferred=setting.options.approval.on_deferred,
        )

    async def _opening(
        self, setting: "_Setting", before: Sequence[ChatMessageContent], *, plan: bool
    ) -> tuple[ChatMessageContent, ...]:
        """Write the messages that a run opens with; a plan that is asked for takes their place later."""
        if plan and isinstance(self.options.plan, str):
            return await setting.prompts.opening(self.options.plan)
        return (*before, ChatMessageContent(role=AuthorRole.USER, content=setting.goal))

    def _final_answer(self) -> KernelFunction | None:
        if self.options.plan is False and not self.options.require_final_answer_function:
            return None
        return KernelPlugin.from_object("UserInteraction", UserInteraction()).functions["SendFinalAnswer"]

    def _selected(self, functions: Sequence[KernelFunctionMetadata], goal: str) -> Sequence[KernelFunctionMetadata]:
        """Leave out what the options exclude."""
        options = self.options
        if options.get_available_functions is not None:
            functions = options.get_available_functions(options, goal)
        return [
            function
            for function in functions
            if function.plugin_name not in options.excluded_plugins
            and function.fully_qualified_name not in options.excluded_functions
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What one run works with."""

    loop: Loop
    prompts: PlannerPrompts
    options: LoopOptions
    behavior: FunctionChoiceBehavior
    goal: str


def _room_for_plan(limits: Limits) -> bool:
    """A plan needs a second round trip to be of any use."""
    return limits.max_iterations is None or limits.max_iterations >= 2


def _merged(arguments: KernelArguments | None, kwargs: dict[str, Any]) -> KernelArguments:
    merged = KernelArguments() if arguments is None else copy(arguments)
    for name, value in kwargs.items():
        merged[name] = value
    return merged
