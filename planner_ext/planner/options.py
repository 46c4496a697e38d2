"""The planner's options: all those of the removed planner, with their names and defaults, and this package's own."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SkipValidation,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.functions import KernelFunctionMetadata
from semantic_kernel.kernel_pydantic import KernelBaseModel

from planner_ext.approval.decisions import ApprovalSettings, Interceptor
from planner_ext.core.errors import nearest, shown
from planner_ext.core.limits import Budget, Price, least
from planner_ext.engine.gate import Approver, CheckForIntervention, PreInvoke
from planner_ext.engine.ports import Clock, Observer
from planner_ext.sk.checkpoint import DecisionsTaken, SigningKey
from planner_ext.sk.checks import callable_with, non_negative
from planner_ext.sk.errors import InvalidOptionError, PlannerInvalidConfigurationError
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.sk.functions.questions import Clarifier
from planner_ext.sk.run.iteration import IterationCallback
from planner_ext.sk.run.options import DEFAULTS, CheckedOptions, RunOptions

if TYPE_CHECKING:
    from planner_ext.budgets import SharedBudget
    from planner_ext.sk.run.answers import CheckAnswer
else:
    SharedBudget = CheckAnswer = (
        Any  # only a run that has one loads its module; `CheckedOptions.of` checks the values
    )


class FunctionCallingStepwisePlannerOptions(KernelBaseModel):
    """The options of a planner; a run never changes them.

    Attributes:
        max_iterations: As of `planner_ext.Budget`; if both are given, the smaller
            applies. A budget given to ``resume`` defaults to it. None means no limit.
        control: How many tool rounds one step may chain. ``iterations_metadata``: as
            many as the budget leaves, charged from the metadata (option 2 of the ADR
            "Automatic tool calling controls", corrected). ``use_attempts``: one, then a
            plain reply closes the step (option 1). ``pre_invoke``: until ``pre_invoke``
            refuses a call; then one request without functions asks for the answer
            (option 3).
        plan: Whether to ask the model for a plan first; a text is used as the plan. No
            plan is made with fewer than two round trips left, or for a
            ``chat_history``.
        charge_plan: Whether the plan request counts as a round trip.
        require_final_answer_function: Whether only ``UserInteraction-SendFinalAnswer``
            ends a run. Questions are then offered, and a plain reply that ends in a
            question mark ends the run ``asked``.
        response_format: The format of the final answer: a pydantic model, a JSON
            schema, or OpenAI's ``response_format``. Only requests without functions
            carry it. If an answer lacks it, the model is asked again, with the problem,
            as long as the budget lasts; then the run ends ``limit_reached`` with the
            answer as it is, or with ``max_iterations=None`` ``incomplete`` after ten
            times. A checkpoint does not hold it: ``resume`` needs it again.
        excluded_plugins: Plugins whose functions are neither offered nor named in the
            plan request. A name that the kernel lacks is refused when a run begins.
            ``UserInteraction`` is the planner's own.
        excluded_functions: The same for functions, by fully qualified or function name.
        get_available_functions: Returns the kernel's functions to offer, given these
            options and the goal.
        get_initial_plan: Returns the YAML of the plan prompt (variables: goal,
            available_functions, name_delimiter).
        get_step_prompt: Returns the template that opens the steps (variables: goal,
            initial_plan).
        execution_settings: Of every request; None uses those of the arguments, or the
            service's defaults.
        max_tokens: The tokens of a request and its reply together, divided by
            ``max_tokens_ratio`` into ``max_completion_tokens`` and, with the rest,
            ``max_prompt_tokens``.
        max_tokens_ratio: The share for the completion, from 0 to 1.
        max_completion_tokens: Maximum tokens of a reply, set in each request's
            settings; a run whose settings have no such field is refused. None and 0
            leave the settings as they are.
        budget, shared_budgets, price, execution, approval, interceptors, pre_invoke,
            check_for_intervention, approver, iteration_completed, clarifier,
            max_clarifications, check_answer, observers, clock, min_iteration_time_ms,
            max_prompt_tokens, on_invalid_history, strict_finish_reason, checkpoint_key,
            name, agent_id: See `planner_ext.iteration.RunOptions`.

    Raises:
        PlannerInvalidConfigurationError: If an option is unknown or invalid; names it.
            Also on assignment, which then changes nothing.
    """

    model_config = ConfigDict(extra="forbid")

    max_iterations: int | None = 15
    control: Literal["iterations_metadata", "use_attempts", "pre_invoke"] = (
        "iterations_metadata"
    )
    plan: bool | str = True
    charge_plan: bool = True
    require_final_answer_function: bool = False
    response_format: type[BaseModel] | Mapping[str, Any] | None = Field(
        default=None, validate_default=False
    )
    excluded_plugins: set[str] = Field(default_factory=set[str])
    excluded_functions: set[str] = Field(default_factory=set[str])
    get_available_functions: (
        Callable[
            ["FunctionCallingStepwisePlannerOptions", str | None],
            list[KernelFunctionMetadata],
        ]
        | None
    ) = None
    get_initial_plan: Callable[[], str] | None = None
    get_step_prompt: Callable[[], str] | None = None
    execution_settings: PromptExecutionSettings | None = None
    max_tokens: int | None = None
    max_tokens_ratio: float | None = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    max_completion_tokens: int | None = None

    # The options of every door: `CheckedOptions.of` checks them.
    budget: Budget | None = None
    shared_budgets: SkipValidation[Sequence[SharedBudget]] = ()
    price: SkipValidation[Price | None] = None
    execution: ToolExecution | None = None
    approval: ApprovalSettings | None = None
    interceptors: SkipValidation[Sequence[Interceptor]] = ()
    pre_invoke: SkipValidation[PreInvoke | None] = None
    check_for_intervention: SkipValidation[CheckForIntervention | None] = None
    approver: SkipValidation[Approver | None] = None
    iteration_completed: SkipValidation[IterationCallback | None] = None
    clarifier: SkipValidation[Clarifier | None] = None
    max_clarifications: SkipValidation[int | None] = None
    check_answer: SkipValidation[CheckAnswer | None] = None
    observers: SkipValidation[Sequence[Observer]] = ()
    clock: SkipValidation[Clock | None] = None
    min_iteration_time_ms: SkipValidation[int | None] = 0
    max_prompt_tokens: SkipValidation[int | None] = None
    on_invalid_history: SkipValidation[Literal["refuse", "repair"]] = "refuse"
    strict_finish_reason: bool = False
    checkpoint_key: bytes | None = Field(default=None, exclude=True, repr=False)
    name: SkipValidation[str | None] = None
    agent_id: SkipValidation[str | None] = None

    if not TYPE_CHECKING:  # hidden, as pydantic hides its own: visible ones let a misspelt option pass unchecked

        def __init__(self, **options: Any) -> None:
            with _named_errors():
                super().__init__(**options)

        def __setattr__(self, name: str, value: object) -> None:
            before = dict(vars(self))
            given = set(self.model_fields_set)
            try:
                with _named_errors():
                    super().__setattr__(name, value)
            except PlannerInvalidConfigurationError:
                # Checks across several options run after pydantic has assigned the value.
                vars(self).update(before)
                object.__setattr__(self, "__pydantic_fields_set__", given)
                raise

    @property
    def run_options(self) -> RunOptions:
        """@private The options of every door, with the smaller ``max_iterations``."""
        options: Any = {name: getattr(self, name) for name in DEFAULTS}
        options["budget"] = self._spendable
        return options

    @property
    def _spendable(self) -> Budget:
        budget = self.budget or Budget()
        if "max_iterations" in self.model_fields_set or budget.max_iterations is None:
            return replace(
                budget, max_iterations=least(budget.max_iterations, self.max_iterations)
            )
        return budget

    @field_validator("get_available_functions", mode="before")
    @classmethod
    def _check_get_available_functions(cls, value: object) -> object:
        return callable_with(
            "get_available_functions", value, ("these options", "the goal")
        )

    @field_validator("response_format", mode="plain")
    @classmethod
    def _check_response_format(cls, value: Any) -> Any:
        from planner_ext.sk.run.form import response_form  # noqa: PLC0415  (only where an answer has a form)

        response_form(value)
        return value

    @field_validator("max_iterations", mode="before")
    @classmethod
    def _check_max_iterations(cls, value: object) -> object:
        Budget(max_iterations=value)  # pyright: ignore[reportArgumentType]  (this is what checks it)
        return value

    @field_validator("max_tokens", "max_completion_tokens", mode="before")
    @classmethod
    def _check_count(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        return non_negative(str(info.field_name), value)

    @field_validator("checkpoint_key", mode="plain")
    @classmethod
    def _check_key(cls, value: object) -> bytes | None:
        return SigningKey.of(value)

    @model_validator(mode="after")
    def _check_whole(self) -> "FunctionCallingStepwisePlannerOptions":
        """Derive the shares of ``max_tokens`` as the removed planner did, unless given; check the rest."""
        if self.control == "pre_invoke" and self.pre_invoke is None:
            raise InvalidOptionError(
                "control='pre_invoke' needs a callback; got none. Pass pre_invoke=, or choose another control."
            )
        total = self.max_tokens
        ratio = self.max_tokens_ratio
        shares: dict[str, int | None] = {
            "max_completion_tokens": None,
            "max_prompt_tokens": None,
        }
        if total is not None and ratio is not None:
            shares = {
                "max_completion_tokens": int(total * ratio),
                "max_prompt_tokens": int(total * (1 - ratio)),
            }
        # Past __setattr__: a derived share is not one that was given.
        vars(self).update(
            {
                name: share
                for name, share in shares.items()
                if name not in self.model_fields_set
            }
        )
        CheckedOptions.of(DecisionsTaken(), **self.run_options)
        return self


@contextmanager
def _named_errors() -> Generator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        place = map(str, first["loc"][:1])
        name = ".".join(place) or "the options"
        known = ", ".join(sorted(FunctionCallingStepwisePlannerOptions.model_fields))
        is_unknown = first["type"] in ("extra_forbidden", "no_such_attribute")
        near = nearest(name, FunctionCallingStepwisePlannerOptions.model_fields)
        if is_unknown:
            raise InvalidOptionError(
                f"There is no option {name}; got {shown(first['input'])}.{near} Known options: {known}."
            ) from error
        raise InvalidOptionError(
            f"{name} cannot be used: {first['msg']}; got {shown(first['input'])}."
        ) from error
