"""What one run of the planner works with: its service, functions, prompts, rules and limits, out of the options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction, KernelFunctionMetadata, KernelPlugin
from semantic_kernel.prompt_template import KernelPromptTemplate

from planner_ext.core.facts import Rules
from planner_ext.core.limits import Limits
from planner_ext.kernel.behavior import BoundedFunctionChoiceBehavior
from planner_ext.kernel.budget import Budget
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.loop import Loop, connector_settings
from planner_ext.kernel.offer import Offer
from planner_ext.kernel.options import LoopOptions, instance_of
from planner_ext.kernel.prompts import (
    PlannerPrompts,
    default_plan_prompt,
    default_step_prompt,
    plan_template,
    step_template,
)
from planner_ext.kernel.selection import select_service
from planner_ext.kernel.service import unwrapped
from planner_ext.planner_options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner_result import UserInteraction
from planner_ext.ports import RunStore

__all__ = ["PlannerSetting", "PlannerTemplates", "loop_options", "setting_of"]


@dataclass(frozen=True, slots=True)
class PlannerTemplates:
    """The prompts of a planner, read once when it is made."""

    plan: KernelPromptTemplate
    plan_settings: dict[str, Any]
    step: KernelPromptTemplate

    @classmethod
    def of(cls, options: FunctionCallingStepwisePlannerOptions) -> "PlannerTemplates":
        """Read the templates of the options, or the planner's own.

        Raises:
            PlannerInvalidConfigurationError: If one of them is no template.
        """
        plan, step = options.get_initial_plan, options.get_step_prompt
        template, settings = plan_template(default_plan_prompt if plan is None else plan())
        return cls(template, settings, step_template(default_step_prompt if step is None else step()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSetting:
    """What one run works with."""

    planner: FunctionCallingStepwisePlannerOptions
    options: LoopOptions
    loop: Loop
    prompts: PlannerPrompts
    behavior: FunctionChoiceBehavior
    goal: str

    def rules(self, *, plan: bool) -> Rules:
        """Write down how the machine is to play the run; without a plan where it goes on from an earlier history."""
        required = self.behavior.type_ is FunctionChoiceType.REQUIRED
        return Rules(
            limits=self.options.budget,
            plan=self.planner.plan is True and plan,
            charge_plan=self.planner.charge_plan,
            use_attempts=_attempts(self.behavior),
            attempts_limit="" if required else "maximum_use_attempts",
            tool_choice="required" if required else "auto",
            rounds_per_step=1 if self.planner.control == "use_attempts" else None,
            close_on_denial=self.planner.control == "pre_invoke",
            require_final_answer=self.planner.require_final_answer_function,
            on_denial=self.options.approval.on_denial,
            on_deferred=self.options.approval.on_deferred,
        )

    async def opening(self, before: Sequence[ChatMessageContent]) -> tuple[ChatMessageContent, ...]:
        """Write the messages that a run opens with; a plan that is asked for takes their place later."""
        if isinstance(self.planner.plan, str):
            return (*before, *await self.prompts.opening(self.planner.plan))
        return (*before, ChatMessageContent(role=AuthorRole.USER, content=self.goal))


def loop_options(options: FunctionCallingStepwisePlannerOptions, budget: Limits | None = None) -> LoopOptions:
    """Read the options as they are now; a budget that a run is resumed with takes the place of theirs.

    Raises:
        PlannerInvalidConfigurationError: Naming the option that cannot be used.
    """
    limits = options.limits
    if budget is not None:
        given = instance_of("budget", budget, Budget).limits
        limits = given if given.max_iterations else replace(given, max_iterations=limits.max_iterations)
    read = LoopOptions.of(
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
    return replace(read, budget=limits)


def setting_of(
    planner: FunctionCallingStepwisePlannerOptions,
    templates: PlannerTemplates,
    *,
    service_id: str | None,
    kernel: Kernel,
    goal: str,
    arguments: KernelArguments,
    budget: Limits | None = None,
    store: RunStore | None = None,
    streaming: bool,
) -> PlannerSetting:
    """Find the service, its settings and the functions for one run.

    Raises:
        PlannerInvalidConfigurationError: If there is no such service, or an option cannot be used with it.
    """
    options = loop_options(planner, budget)
    service, settings = select_service(kernel, service_id, arguments, planner.execution_settings)
    service, options = unwrapped(service, options)
    settings = connector_settings(service, settings)
    if planner.max_completion_tokens and hasattr(settings, "max_tokens"):
        settings = settings.model_copy(update={"max_tokens": planner.max_completion_tokens})
    behavior = settings.function_choice_behavior or BoundedFunctionChoiceBehavior.Auto()
    final_answer = _final_answer(planner)
    offer = Offer(
        kernel,
        None if behavior.type_ is FunctionChoiceType.NONE else behavior,
        settings,
        own=() if final_answer is None else (final_answer,),
        select=lambda found: _selected(planner, kernel, found, goal),
    )
    prompts = PlannerPrompts(
        kernel=kernel,
        arguments=arguments,
        goal=goal,
        plan_template=templates.plan,
        step_template=templates.step,
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
        plan_settings=templates.plan_settings,
        store=store,
    )
    return PlannerSetting(planner=planner, options=options, loop=loop, prompts=prompts, behavior=behavior, goal=goal)


def _final_answer(planner: FunctionCallingStepwisePlannerOptions) -> KernelFunction | None:
    if planner.plan is False and not planner.require_final_answer_function:
        return None
    return KernelPlugin.from_object("UserInteraction", UserInteraction()).functions["SendFinalAnswer"]


def _selected(
    planner: FunctionCallingStepwisePlannerOptions,
    kernel: Kernel,
    functions: Sequence[KernelFunctionMetadata],
    goal: str,
) -> Sequence[KernelFunctionMetadata]:
    """Leave out what the options exclude, or do not choose."""
    if planner.get_available_functions is not None:
        chosen = {function.fully_qualified_name for function in planner.get_available_functions(planner, goal)}
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
        if function.plugin_name not in planner.excluded_plugins
        and not {function.name, function.fully_qualified_name} & planner.excluded_functions
    ]


def _attempts(behavior: FunctionChoiceBehavior) -> int | None:
    """Read the tool rounds that a behaviour allows; what it says of auto-invoking is no matter to a planner."""
    if isinstance(behavior, BoundedFunctionChoiceBehavior):
        return behavior.maximum_use_attempts
    return behavior.maximum_auto_invoke_attempts or 1 if behavior.type_ is FunctionChoiceType.REQUIRED else None
