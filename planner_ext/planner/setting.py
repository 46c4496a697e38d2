"""What one run of the planner works with: its service, functions, prompts, rules and limits, out of the options."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import FunctionChoiceBehavior
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.functions import KernelArguments, KernelFunction, KernelFunctionMetadata
from semantic_kernel.prompt_template import KernelPromptTemplate

from planner_ext.core.facts import Rules
from planner_ext.core.limits import Limits
from planner_ext.engine.ports import RunStore
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.service import charged_service, unwrapped
from planner_ext.sk.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.budget import Budget, Price, price_in
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.nested import current_parent_run, planner_of, tab_in
from planner_ext.sk.options import RunSettings, instance_of
from planner_ext.sk.prompts import (
    PlannerPrompts,
    default_plan_prompt,
    default_step_prompt,
    plan_template,
    step_template,
)
from planner_ext.sk.questions import OWN_PLUGIN, own_function
from planner_ext.sk.run_context import Loop, function_names, refuse_unknown
from planner_ext.sk.structured import ResponseForm, response_form
from planner_ext.sk.toolset import ToolSet
from planner_ext.sk.transport import connector_settings, select_service

__all__ = ["PlannerSetting", "PlannerTemplates", "setting_of"]


@dataclass(frozen=True, slots=True)
class PlannerTemplates:
    """The prompts of a planner, read once when it is made, and when they are set.

    Attributes:
        plan_yaml: The plan prompt as it was given.
        step_prompt: The opening of the steps, likewise.
    """

    plan_yaml: str
    step_prompt: str
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
        return cls.read(
            default_plan_prompt if plan is None else plan(), default_step_prompt if step is None else step()
        )

    @classmethod
    def read(cls, plan_yaml: str, step_prompt: str) -> "PlannerTemplates":
        """Read two texts.

        Raises:
            PlannerInvalidConfigurationError: If one of them is no template.
        """
        plan, settings = plan_template(plan_yaml)
        step = step_template(step_prompt)
        return cls(plan_yaml=plan_yaml, step_prompt=step_prompt, plan=plan, plan_settings=settings, step=step)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSetting:
    """What one run works with."""

    planner: FunctionCallingStepwisePlannerOptions
    options: RunSettings
    loop: Loop
    prompts: PlannerPrompts
    behavior: FunctionChoiceBehavior
    goal: str
    nested: bool = False

    def rules(self, *, plan: bool) -> Rules:
        """Write down how the machine is to play the run; without a plan where it goes on from an earlier history."""
        required = self.behavior.type_ is FunctionChoiceType.REQUIRED
        return Rules(
            limits=self.options.budget,
            plan=self.planner.plan is True and plan,
            charge_plan=self.planner.charge_plan or self.nested,
            use_attempts=_attempts(self.behavior),
            attempts_limit="" if required else "maximum_use_attempts",
            tool_choice="required" if required else "auto",
            rounds_per_step=1 if self.planner.control == "use_attempts" else None,
            close_on_denial=self.planner.control == "pre_invoke",
            require_final_answer=self.planner.require_final_answer_function,
            on_denial=self.options.approval.on_denial,
            on_deferred=self.options.approval.on_deferred,
            structured=self.loop.form is not None,
            clarifier=self.options.clarifier is not None,
            max_clarifications=self.options.max_clarifications,
        )

    async def opening(self, before: Sequence[ChatMessageContent]) -> tuple[ChatMessageContent, ...]:
        """Write the messages that a run opens with; a plan that is asked for takes their place later."""
        if isinstance(self.planner.plan, str):
            return (*before, *await self.prompts.opening(self.planner.plan))
        return (*before, ChatMessageContent(role=AuthorRole.USER, content=self.goal))


def _resumed(settings: RunSettings, budget: Limits | None, price: Price | None) -> RunSettings:
    """Put the budget and the price that a run is resumed with in the place of those of the settings."""
    limits = settings.budget
    if budget is not None:
        given = _limits(budget)
        limits = given if given.max_iterations else replace(given, max_iterations=limits.max_iterations)
    return settings.resumed(limits, price_in(budget) or price)


def _limits(budget: object) -> Limits:
    """Read the limits of a budget; a journal keeps limits alone, which will do as well."""
    if isinstance(budget, Limits) and not isinstance(budget, Budget):
        return budget
    return instance_of("budget", budget, Budget).limits


def setting_of(
    planner: FunctionCallingStepwisePlannerOptions,
    templates: PlannerTemplates,
    *,
    owner: object,
    settings: RunSettings,
    service_id: str | None,
    kernel: Kernel,
    goal: str,
    arguments: KernelArguments,
    budget: Limits | None = None,
    price: Price | None = None,
    kept: Rules | None = None,
    store: RunStore | None = None,
    streaming: bool,
) -> PlannerSetting:
    """Find the service, its settings and the functions for one run.

    A run that is resumed has the limits of the ``budget`` that it was given then, or of the rules that it ``kept``.

    Raises:
        PlannerInvalidConfigurationError: If there is no such service, an option cannot be used with it, or the run
            has to answer in a form that the options do not give.
    """
    # A run that is kept in a store has its own budget, wherever it begins.
    around = None if store is not None else current_parent_run(tab_in(kernel))
    options = _resumed(settings, budget, price)
    options = options if around is None else around.within(options)
    running = (owner,) if around is None else (*around.planners, owner)
    service, selected = select_service(kernel, service_id, arguments, planner.execution_settings)
    if kept is not None and budget is None:
        options = replace(options, budget=kept.limits)
    service, options = unwrapped(service, options)
    request = _with_completion_limit(connector_settings(service, selected), planner.max_completion_tokens)
    behavior = request.function_choice_behavior or BoundedFunctionChoiceBehavior.Auto()
    _check_exclusions(planner, kernel)
    final_answer, ask_user = _final_answer(planner, kernel), _ask_user(planner, options, kernel)
    form = _form(planner, kept)
    offer = ToolSet(
        kernel,
        None if behavior.type_ is FunctionChoiceType.NONE else behavior,
        request,
        own=[function for function in (final_answer, ask_user) if function is not None],
        select=lambda found: _without(running, kernel, _selected(planner, kernel, found, goal)),
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
        settings=request,
        offer=offer,
        arguments=arguments,
        options=options.under(behavior),
        streaming=streaming,
        prompts=prompts,
        final_answer=final_answer,
        ask_user=ask_user,
        plan_settings=templates.plan_settings,
        planner=owner,
        within=around,
        wrap=charged_service,
        form=None if form is None else form.within(request),
        store=store,
    )
    return PlannerSetting(
        planner=planner,
        options=options,
        loop=loop,
        prompts=prompts,
        behavior=behavior,
        goal=goal,
        nested=around is not None,
    )


_COMPLETION_LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens")
"""What the settings of Semantic Kernel's connectors call the most tokens of a reply."""


def _with_completion_limit(settings: PromptExecutionSettings, limit: int | None) -> PromptExecutionSettings:
    """Limit a reply's tokens, by the name that the connector's settings have for that."""
    if not limit:
        return settings
    kind = type(settings)
    name = next((name for name in _COMPLETION_LIMITS if name in kind.model_fields), None)
    if name is None:
        raise PlannerInvalidConfigurationError(
            f"max_completion_tokens={limit} cannot be used: {kind.__name__} has none of the fields "
            f"{', '.join(_COMPLETION_LIMITS)}. Leave it out, and limit the reply in execution_settings."
        )
    return settings.model_copy(update={name: limit})


def _form(planner: FunctionCallingStepwisePlannerOptions, kept: Rules | None) -> ResponseForm | None:
    """Read the form of the answer; a run that goes on needs the one that it began with."""
    form = response_form(planner.response_format)
    if form is None and kept is not None and kept.structured:
        raise PlannerInvalidConfigurationError(
            "The run has to answer in a form, which neither a checkpoint nor a store holds; the options have no "
            "response_format. Resume it with the one that it began with."
        )
    return form


def _final_answer(planner: FunctionCallingStepwisePlannerOptions, kernel: Kernel) -> KernelFunction | None:
    excluded = _excludes(planner, kernel, "SendFinalAnswer")
    if excluded and planner.require_final_answer_function:
        raise PlannerInvalidConfigurationError(
            "require_final_answer_function=True needs UserInteraction-SendFinalAnswer, which is in excluded_functions "
            "or excluded_plugins. Take it out of them, or accept a plain answer."
        )
    if excluded or (planner.plan is False and not planner.require_final_answer_function):
        return None
    return own_function("SendFinalAnswer")


def _ask_user(
    planner: FunctionCallingStepwisePlannerOptions, options: RunSettings, kernel: Kernel
) -> KernelFunction | None:
    insists = planner.require_final_answer_function and options.max_clarifications != 0
    if not (options.takes_questions or insists) or _excludes(planner, kernel, "AskUser"):
        return None
    return own_function("AskUser")


def _excludes(planner: FunctionCallingStepwisePlannerOptions, kernel: Kernel, name: str) -> bool:
    """Whether one of the planner's own functions is excluded, and not one of the kernel's of the same name."""
    if OWN_PLUGIN in kernel.plugins and name in kernel.plugins[OWN_PLUGIN].functions:
        return False
    return OWN_PLUGIN in planner.excluded_plugins or bool({name, f"{OWN_PLUGIN}-{name}"} & planner.excluded_functions)


def _check_exclusions(planner: FunctionCallingStepwisePlannerOptions, kernel: Kernel) -> None:
    """Refuse the exclusion of what is not there: a misspelt name excludes nothing.

    Raises:
        PlannerInvalidConfigurationError: Naming it, and what there is.
    """
    if planner.excluded_plugins:
        refuse_unknown("excluded_plugins", planner.excluded_plugins, {*kernel.plugins, OWN_PLUGIN})
    if planner.excluded_functions:
        names = function_names(kernel)
        own = {name.rpartition("-")[2] for name in names}
        refuse_unknown("excluded_functions", planner.excluded_functions, names, also=own)


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


def _without(
    running: Sequence[object], kernel: Kernel, functions: Sequence[KernelFunctionMetadata]
) -> Sequence[KernelFunctionMetadata]:
    """Leave out the planners that run already: none can be called inside its own run."""
    names = {id(planner) for planner in running}
    return [
        function
        for function in functions
        if id(planner_of(kernel.get_function(function.plugin_name, function.name))) not in names
    ]


def _attempts(behavior: FunctionChoiceBehavior) -> int | None:
    """Read the tool rounds that a behaviour allows; what it says of auto-invoking is no matter to a planner."""
    if isinstance(behavior, BoundedFunctionChoiceBehavior):
        return behavior.maximum_use_attempts
    return behavior.maximum_auto_invoke_attempts or 1 if behavior.type_ is FunctionChoiceType.REQUIRED else None
