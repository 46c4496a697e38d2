"""What a run of the planner takes out of its options: prompts, rules, limits, and the functions that are offered."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_type import FunctionChoiceType
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import AuthorRole, ChatMessageContent
from semantic_kernel.functions import KernelFunction, KernelFunctionMetadata
from semantic_kernel.prompt_template import KernelPromptTemplate

from planner_ext.core.facts import Rules
from planner_ext.core.limits import Limits
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.sk.behavior import BoundedFunctionChoiceBehavior
from planner_ext.sk.budget import Budget
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.nested import planner_of
from planner_ext.sk.options import RunSettings, instance_of
from planner_ext.sk.prompts import (
    default_plan_prompt,
    default_step_prompt,
    plan_template,
    step_template,
)
from planner_ext.sk.questions import OWN_PLUGIN, own_function
from planner_ext.sk.run_context import RunContext, function_names, refuse_unknown
from planner_ext.sk.structured import ResponseForm, response_form

__all__ = [
    "PlannerTemplates",
    "answer_form",
    "check_exclusions",
    "opening",
    "own_functions",
    "planner_rules",
    "resumed_limits",
    "selected",
    "with_completion_limit",
]


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


def planner_rules(options: FunctionCallingStepwisePlannerOptions, context: RunContext, *, plan: bool) -> Rules:
    """Write down how the machine plays a run of the planner; ``plan`` is False where it begins with a history."""
    behavior, rules = context.behavior, context.rules()
    if isinstance(behavior, BoundedFunctionChoiceBehavior):
        attempts = behavior.maximum_use_attempts
    else:  # the attempts of Semantic Kernel's own are those of its loop, but where each of them forces a call
        required = behavior.type_ is FunctionChoiceType.REQUIRED
        attempts = behavior.maximum_auto_invoke_attempts or 1 if required else None
    return replace(
        rules,
        use_attempts=attempts,
        attempts_limit=rules.attempts_limit and "maximum_use_attempts",
        plan=options.plan is True and plan,
        charge_plan=options.charge_plan or context.parent is not None,
        rounds_per_step=1 if options.control == "use_attempts" else None,
        close_on_denial=options.control == "pre_invoke",
        require_final_answer=options.require_final_answer_function,
    )


async def opening(
    options: FunctionCallingStepwisePlannerOptions,
    context: RunContext,
    goal: str,
    before: Sequence[ChatMessageContent] = (),
) -> tuple[ChatMessageContent, ...]:
    """Write the messages that a run opens with; a plan that is asked for replaces them later."""
    if isinstance(options.plan, str):
        return (*before, *await context.prompts.opening(options.plan))
    return (*before, ChatMessageContent(role=AuthorRole.USER, content=goal))


def resumed_limits(budget: object, settings: RunSettings) -> Limits:
    """Return the limits of a budget that a run is resumed with; ``max_iterations`` is the options' by default.

    A journal keeps limits alone, which are accepted, too.

    Raises:
        PlannerInvalidConfigurationError: If it is not a budget.
    """
    limits = budget if type(budget) is Limits else instance_of("budget", budget, Budget).limits
    return limits if limits.max_iterations else replace(limits, max_iterations=settings.budget.max_iterations)


def answer_form(options: FunctionCallingStepwisePlannerOptions, kept: Rules | None) -> ResponseForm | None:
    """Read the form of the answer; a run that is resumed needs the one that it began with.

    Raises:
        PlannerInvalidConfigurationError: If that is missing.
    """
    form = response_form(options.response_format)
    if form is None and kept is not None and kept.structured:
        raise InvalidOptionError(
            "The run has to answer in a form, which neither a checkpoint nor a store holds; the options have no "
            "response_format. Resume it with the one that it began with."
        )
    return form


def own_functions(
    options: FunctionCallingStepwisePlannerOptions, settings: RunSettings, kernel: Kernel
) -> tuple[KernelFunction | None, KernelFunction | None]:
    """Return the functions that hand over the final answer and that ask the user; None for one that is not offered.

    Raises:
        PlannerInvalidConfigurationError: If the final answer's function is needed and excluded.
    """
    insists = options.require_final_answer_function
    answers = insists or options.plan is not False
    asks = settings.takes_questions or (insists and settings.max_clarifications != 0)
    if options.excluded_plugins or options.excluded_functions:
        if insists and _excludes(options, kernel, "SendFinalAnswer"):
            raise InvalidOptionError(
                "require_final_answer_function=True needs UserInteraction-SendFinalAnswer, which is in "
                "excluded_functions or excluded_plugins. Take it out of them, or accept a plain answer."
            )
        answers = answers and not _excludes(options, kernel, "SendFinalAnswer")
        asks = asks and not _excludes(options, kernel, "AskUser")
    return own_function("SendFinalAnswer") if answers else None, own_function("AskUser") if asks else None


def _excludes(options: FunctionCallingStepwisePlannerOptions, kernel: Kernel, name: str) -> bool:
    """Whether one of the planner's own functions is excluded, and not one of the kernel's of the same name."""
    if OWN_PLUGIN in kernel.plugins and name in kernel.plugins[OWN_PLUGIN].functions:
        return False
    return OWN_PLUGIN in options.excluded_plugins or bool({name, f"{OWN_PLUGIN}-{name}"} & options.excluded_functions)


def check_exclusions(options: FunctionCallingStepwisePlannerOptions, kernel: Kernel) -> None:
    """Refuse the exclusion of a name that the kernel does not have: a misspelt name excludes nothing.

    Raises:
        PlannerInvalidConfigurationError: Naming it, and the names that there are.
    """
    refuse_unknown("excluded_plugins", options.excluded_plugins, {*kernel.plugins, OWN_PLUGIN})
    names = function_names(kernel)
    own = {name.rpartition("-")[2] for name in names}
    refuse_unknown("excluded_functions", options.excluded_functions, names, also=own)


def selected(
    functions: Sequence[KernelFunctionMetadata],
    *,
    options: FunctionCallingStepwisePlannerOptions,
    running: Sequence[object],
    kernel: Kernel,
    goal: str,
) -> Sequence[KernelFunctionMetadata]:
    """Leave out the functions that the options exclude or do not choose, and the planners that run already.

    Raises:
        PlannerInvalidConfigurationError: If ``get_available_functions`` chose one that the kernel does not have.
    """
    if options.get_available_functions is not None:
        chosen = {function.fully_qualified_name for function in options.get_available_functions(options, goal)}
        there = {function.fully_qualified_name for function in kernel.get_full_list_of_function_metadata()}
        if unknown := sorted(chosen - there):
            raise InvalidOptionError(
                f"get_available_functions gave {', '.join(unknown)}; the kernel has "
                f"{', '.join(sorted(there)) or 'no function'}. Give functions of the kernel."
            )
        functions = [function for function in functions if function.fully_qualified_name in chosen]
    return [
        function
        for function in functions
        if function.plugin_name not in options.excluded_plugins
        and not {function.name, function.fully_qualified_name} & options.excluded_functions
        and planner_of(kernel.get_function(function.plugin_name, function.name)) not in running
    ]


_COMPLETION_LIMITS = ("max_tokens", "max_output_tokens", "max_completion_tokens", "max_new_tokens")
"""What the settings of Semantic Kernel's connectors call the most tokens of a reply."""


def with_completion_limit(settings: PromptExecutionSettings, limit: int | None) -> PromptExecutionSettings:
    """Limit a reply's tokens, by the name that the connector's settings have for that."""
    if not limit:
        return settings
    kind = type(settings)
    name = next((name for name in _COMPLETION_LIMITS if name in kind.model_fields), None)
    if name is None:
        raise InvalidOptionError(
            f"max_completion_tokens={limit} cannot be used: {kind.__name__} has none of the fields "
            f"{', '.join(_COMPLETION_LIMITS)}. Leave it out, and limit the reply in execution_settings."
        )
    return settings.model_copy(update={name: limit})
