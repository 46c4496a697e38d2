"""``PlannerPlugin``: a planner as a function that another planner, an agent or the application calls with a goal."""

import re
from copy import copy
from typing import Annotated, Any

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext.core.errors import shown
from planner_ext.planner import FunctionCallingStepwisePlanner
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult
from planner_ext.sk.charging.nested import current_parent_run, mark_planner
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import (
    InvalidOptionError,
    LimitReachedError,
    NestedRunRefusedError,
)

__all__ = ["PlannerPlugin"]

_NAME = re.compile(r"[0-9A-Za-z_]+")
_DESCRIPTION = (
    "Reach a goal: plan it, carry it out with functions, and tell the answer."
)


class PlannerPlugin:
    """A planner as one function with a required ``goal``: ``kernel.add_plugin(PlannerPlugin(planner), "name")``.

    Called in another run of this package, it spends that run's budget beside its own:
    each request and call is taken from what is left at that moment, less the iteration
    reserved for the answer. Nested runs beside each other race for the rest: give each
    planner a budget of its own where the first may leave nothing to the last. A nested
    run that fails, is cancelled or loses its process is charged what it has spent.

    The budget around covers ``max_iterations``, ``max_tool_calls``,
    ``max_total_tokens``, ``max_cost``, ``max_active_seconds``, ``deadline`` and
    ``max_calls_per_function``. Where its tokens or cost are used up, no request asks
    for an answer.

    What waits for a person in a nested run, a call or a question, pauses the runs
    around it: the outermost shows it in ``pending`` with its ``path``, and is resumed
    with a decision by that path; then the nested run continues where it paused. That needs
    functions around it that may be called again: planners, prompts, agents, and those
    declared ``@effect("idempotent")`` or ``"keyed"``. Inside another function such a
    call is denied, and a question becomes the function's result.

    The outer run's `StopHandle` stops nested runs too. A planner is not offered inside
    its own runs. What happens in a nested run is written into the journal of the run
    around it.

    In a stock kernel's loop, or outside of any run, it spends the planner's own budget.
    """

    def __init__(
        self,
        planner: FunctionCallingStepwisePlanner,
        *,
        kernel: Kernel | None = None,
        function_name: str = "reach_goal",
        description: str = _DESCRIPTION,
    ) -> None:
        """Wrap a planner.

        Args:
            planner: The planner to call.
            kernel: Provides its services and functions; None is the kernel that the
                function is called on.
            function_name: Letters, digits and underscores.
            description: What the planner can do, for the calling model.

        Raises:
            PlannerInvalidConfigurationError: If an argument is invalid; the message
                names it.
        """
        self._planner = instance_of("planner", planner, FunctionCallingStepwisePlanner)
        self._kernel = None if kernel is None else instance_of("kernel", kernel, Kernel)
        if not _NAME.fullmatch(instance_of("function_name", function_name, str)):
            raise InvalidOptionError(
                f"function_name may have letters, digits and underscores; got {shown(function_name)}."
            )

        @kernel_function(name=function_name, description=description)
        async def reach_goal(
            goal: Annotated[
                str, "The goal, with everything that has to be known for it"
            ],
            kernel: Annotated[Kernel, {"include_in_function_choices": False}],
            arguments: Annotated[
                KernelArguments, {"include_in_function_choices": False}
            ],
        ) -> Annotated[str, "The answer"]:
            return await self._reach(goal, kernel, arguments)

        mark_planner(reach_goal, self._planner, self._kernel)
        self.reach_goal = (
            reach_goal  # Semantic Kernel finds functions among the attributes
        )

    async def _reach(
        self, goal: str, kernel: Kernel, arguments: KernelArguments
    ) -> str:
        given = copy(arguments)
        del given["goal"]  # the model's, for this function
        parent = current_parent_run()
        if parent is not None and any(
            planner is self._planner for planner in parent.planners
        ):
            raise NestedRunRefusedError(
                "This planner is running already; it cannot be called inside a run of its own."
            )
        try:
            result = await self._planner.invoke(self._kernel or kernel, goal, given)
        except LimitReachedError as error:
            if parent is None:
                raise
            return f"There is no answer: {error}"
        return _text_of(result)


def _text_of(result: FunctionCallingStepwisePlannerResult) -> str:
    match result.status:
        case "answered":
            return result.final_answer
        case "asked":
            questions: list[Any] = [
                call.arguments.get("question", "") for call in result.pending
            ]
            return f"There is no answer yet; it has to be known first: {' '.join(map(str, questions))}".rstrip()
        case _ if result.final_answer:
            return f"{result.final_answer}\n\n(This was cut short. {result.reason})"
        case _:
            return f"There is no answer: {result.reason or result.status}"
