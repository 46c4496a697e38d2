"""The planner's options: every one of the removed planner's by name and default, and ours."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.functions import KernelFunctionMetadata
from semantic_kernel.kernel_pydantic import KernelBaseModel

from planner_ext.core.errors import shown
from planner_ext.core.limits import Limits
from planner_ext.engine.ports import Observer
from planner_ext.sk.approval import ApprovalSettings
from planner_ext.sk.budget import Budget, tightest
from planner_ext.sk.checkpoint import SigningKey
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.execution import ToolExecution
from planner_ext.sk.options import callable_with
from planner_ext.sk.structured import response_form

__all__ = ["FunctionCallingStepwisePlannerOptions"]


class FunctionCallingStepwisePlannerOptions(KernelBaseModel):
    """How a planner works. Nothing in it is changed by a run.

    Attributes:
        max_iterations: Round trips of one run, plan and answer included; never exceeded. Charged from ``iterations`` in
            each reply's metadata. Checked before each request; the last one offers no functions, so that there is an
            answer. The same as ``budget.max_iterations``: where one of them is given it holds, of both the smaller; a
            budget that replaces a run's in ``resume`` has it from here unless it says its own. None is no limit.
        budget: Further limits, and what happens at one; see `Budget`.
        control: How many tool rounds one step may chain: ``iterations_metadata``: as many as the budget leaves, charged
            from the metadata (option 2 of the ADR "Automatic tool calling controls", corrected); ``use_attempts``: one,
            then a plain reply closes the step (option 1); ``pre_invoke``: until ``pre_invoke`` refuses a call, after
            which one request without functions asks for the answer (option 3). The budget holds under each of them.
        plan: Whether a plan is asked for first; a text is taken as the plan, and none is asked for. No plan is made
            where fewer than two round trips are left, nor where a run goes on from a given ``chat_history``.
        charge_plan: Whether the plan request counts as a round trip.
        require_final_answer_function: Whether only ``UserInteraction-SendFinalAnswer`` ends a run, and no plain reply.
            A plain reply that ends in a question mark then waits for an answer: the run ends ``asked``.
        response_format: What the final answer has to be: a pydantic model, a JSON schema, or OpenAI's
            ``response_format``. Only requests without functions carry it. An answer that is in the form already is
            taken; another one is asked for again, told what is wrong, as long as the budget lasts. Then the run ends
            ``limit_reached`` with the answer as it is; with ``max_iterations=None``, ``incomplete`` after ten times. It
            is no part of a checkpoint: ``resume`` needs it again.
        execution: How functions are run; see `ToolExecution`.
        approval: What becomes of calls that nobody decided, that were denied, and that wait; see `ApprovalSettings`.
        interceptors: Asked, in order, about every call of a batch before any of it runs; the first decision wins. A
            policy is one of them.
        pre_invoke: Asked about each call with the 1-based round trip, the function's name and its arguments; False
            refuses it, True is no objection.
        iteration_completed: Called after the results of a batch are stored and before the next request.
        clarifier: Answers what the model asks with ``UserInteraction-AskUser``, and is shown every plain reply before
            that counts as final; see `Clarifier`. None leaves questions to a person: the run ends ``asked``.
        max_clarifications: How many questions of a run are answered, by the clarifier or a person; a call over it is
            told to go on without, a plain reply counts as final. None is no limit, 0 offers no questions. Questions are
            offered with this, a ``clarifier`` or ``require_final_answer_function``.
        observers: Called with each fact of a run once it is recorded, and with the `planner_ext.events.RunInfo` of its
            run where they take two arguments; what they raise is logged and changes nothing.
        clock: Time, as ``now``, ``monotonic`` and ``sleep``; None is the machine's.
        min_iteration_time_ms: Least milliseconds from the start of one round trip to the next.
        excluded_plugins: Plugins whose functions are neither offered nor named in the plan request. Checked when a run
            begins: a name that the kernel does not have is refused. ``UserInteraction`` is the planner's own.
        excluded_functions: The same for functions, by fully qualified name or by their own.
        get_available_functions: Gives the functions of the kernel to offer, from these options and the goal; exclusions
            hold for them, too.
        get_initial_plan: Gives the YAML of the plan prompt (variables: goal, available_functions, name_delimiter).
        get_step_prompt: Gives the template that opens the steps (variables: goal, initial_plan).
        execution_settings: Settings of every request; None takes those of the arguments, or the service's defaults.
        max_tokens: Of a request and its reply: with ``max_tokens_ratio``, sets ``max_completion_tokens``, and
            ``max_prompt_tokens`` to the rest.
        max_tokens_ratio: The share of ``max_tokens`` that the completion may take, from 0 to 1.
        max_completion_tokens: Most tokens of a reply: ``max_tokens`` of each request's settings, or what their class
            calls it; a run whose settings have no such field is refused. None and 0 leave the settings as they are.
        max_prompt_tokens: Most tokens of a request, functions included; counted, or estimated, before it is sent. One
            over it is not sent: `PromptTooLargeError`. None and 0 are no limit.
        on_invalid_history: A ``chat_history`` with an unanswered call, an orphan or a second result is refused before
            anything is sent (``refuse``), or mended in the run's copy (``repair``).
        strict_finish_reason: Whether a finish reason that contradicts the reply's content is an error.
        checkpoint_key: Signs every checkpoint that leaves, of results and of errors (HMAC-SHA256), and refuses every
            other one in ``resume`` and ``cancel``. None signs with the key of a `FunctionInvokingChatCompletion` that
            is the kernel's service, if that has one; a key here takes the place of its key. The key is in no ``repr``,
            dump, error or checkpoint, and is left behind where the options are pickled. A run that is kept in a store
            is not signed there: who can write to the database can change it.

    Raises:
        PlannerInvalidConfigurationError: If an option is unknown or its value cannot be used, naming it; when it is
            assigned likewise, and then nothing is changed.
    """

    model_config = ConfigDict(extra="forbid")

    max_iterations: int | None = 15
    budget: Budget | None = None
    control: Literal["iterations_metadata", "use_attempts", "pre_invoke"] = "iterations_metadata"
    plan: bool | str = True
    charge_plan: bool = True
    require_final_answer_function: bool = False
    response_format: Any = None
    execution: ToolExecution | None = None
    approval: ApprovalSettings | None = None
    interceptors: Sequence[Any] = ()
    pre_invoke: Any = None
    iteration_completed: Any = None
    clarifier: Any = None
    max_clarifications: int | None = None
    observers: Sequence[Observer] = ()
    clock: Any = None
    min_iteration_time_ms: int | None = 0
    excluded_plugins: set[str] = Field(default_factory=set[str])
    excluded_functions: set[str] = Field(default_factory=set[str])
    get_available_functions: (
        Callable[["FunctionCallingStepwisePlannerOptions", str | None], list[KernelFunctionMetadata]] | None
    ) = None
    get_initial_plan: Callable[[], str] | None = None
    get_step_prompt: Callable[[], str] | None = None
    execution_settings: PromptExecutionSettings | None = None
    max_tokens: int | None = None
    max_tokens_ratio: float | None = Field(default=0.1, ge=0, le=1, allow_inf_nan=False)
    max_completion_tokens: int | None = None
    max_prompt_tokens: int | None = None
    on_invalid_history: Literal["refuse", "repair"] = "refuse"
    strict_finish_reason: bool = False
    checkpoint_key: bytes | None = Field(default=None, exclude=True, repr=False)

    def __init__(self, **options: Any) -> None:
        with _named_errors():
            super().__init__(**options)

    if not TYPE_CHECKING:  # hidden, as pydantic hides its own: a visible one lets a misspelt assignment pass unchecked

        def __setattr__(self, name: str, value: object) -> None:
            before, given = dict(vars(self)), set(self.model_fields_set)
            try:
                with _named_errors():
                    super().__setattr__(name, value)
            except PlannerInvalidConfigurationError:
                # What is checked on the whole is checked after pydantic has assigned it.
                vars(self).update(before)
                object.__setattr__(self, "__pydantic_fields_set__", given)
                raise

    @property
    def limits(self) -> Limits:
        """The budget, ``max_iterations`` included."""
        own, budget = Limits(max_iterations=self.max_iterations), (self.budget or Budget()).limits
        only_there = budget.max_iterations is not None and "max_iterations" not in self.model_fields_set
        return budget if only_there else tightest(budget, own)

    @field_validator("get_available_functions", mode="before")
    @classmethod
    def _check_get_available_functions(cls, value: object) -> object:
        return callable_with("get_available_functions", value, "these options", "the goal")

    @field_validator("response_format", mode="before")
    @classmethod
    def _check_response_format(cls, value: object) -> object:
        response_form(value)
        return value

    @field_validator("max_iterations", mode="before")
    @classmethod
    def _check_max_iterations(cls, value: object) -> object:
        Budget(max_iterations=value)  # pyright: ignore[reportArgumentType]  (this is what checks it)
        return value

    @field_validator(
        "min_iteration_time_ms",
        "max_tokens",
        "max_completion_tokens",
        "max_prompt_tokens",
        "max_clarifications",
        mode="before",
    )
    @classmethod
    def _check_count(cls, value: object) -> object:
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
            return value
        raise ValueError("it takes a whole number, 0 or more, or None")

    @field_validator("checkpoint_key", mode="plain")
    @classmethod
    def _check_key(cls, value: object) -> bytes | None:
        return SigningKey.of(value)

    @model_validator(mode="after")
    def _check_control(self) -> "FunctionCallingStepwisePlannerOptions":
        if self.control == "pre_invoke" and self.pre_invoke is None:
            raise PlannerInvalidConfigurationError(
                "control='pre_invoke' needs a callback; got none. Pass pre_invoke=, or choose another control."
            )
        return self

    @model_validator(mode="after")
    def _share_max_tokens(self) -> "FunctionCallingStepwisePlannerOptions":
        """Derive the shares of ``max_tokens`` as the removed planner did; what is set by itself stays."""
        total, ratio = self.max_tokens, self.max_tokens_ratio
        shares: dict[str, int | None] = {"max_completion_tokens": None, "max_prompt_tokens": None}
        if total is not None and ratio is not None:
            shares = {"max_completion_tokens": int(total * ratio), "max_prompt_tokens": int(total * (1 - ratio))}
        # Past __setattr__: a derived share is not one that was given.
        vars(self).update({name: share for name, share in shares.items() if name not in self.model_fields_set})
        return self


@contextmanager
def _named_errors() -> Generator[None]:
    """Name the option that pydantic refuses.

    Raises:
        PlannerInvalidConfigurationError: With what was seen, and the known options where it is none of them.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"][:1]) or "the options"
        known = ", ".join(sorted(FunctionCallingStepwisePlannerOptions.model_fields))
        hint = f" Known options: {known}." if first["type"] in ("extra_forbidden", "no_such_attribute") else ""
        raise PlannerInvalidConfigurationError(
            f"{name} cannot be used: {first['msg']}; got {shown(first['input'])}.{hint}"
        ) from error
