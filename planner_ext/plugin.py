"""A planner as a plugin: another planner, an agent or the application hands it a goal, and reads its answer."""

import re
from copy import copy
from typing import Annotated, Any

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext.core.errors import shown
from planner_ext.planner import FunctionCallingStepwisePlanner
from planner_ext.planner.result import FunctionCallingStepwisePlannerResult
from planner_ext.sk.errors import (
    LimitReachedError,
    NestedRunRefusedError,
    PlannerInvalidConfigurationError,
    PromptTooLargeError,
)
from planner_ext.sk.nested import Around, around_of, mark_planner
from planner_ext.sk.options import instance_of

__all__ = ["PlannerPlugin"]

_NAME = re.compile(r"[0-9A-Za-z_]+")
_DESCRIPTION = "Reach a goal: plan it, carry it out with functions, and tell the answer."


class PlannerPlugin:
    """Offers a planner as one function with a required ``goal``: ``kernel.add_plugin(PlannerPlugin(planner), "name")``.

    Called by the model of another run of this package (planner, service, handler or session) it spends that run's
    budget: each nested call of a batch gets an equal share of what is left, less the round trip that is kept for the
    answer. The planner's own budget holds besides. When the call ends, what was spent is charged; where it fails, is
    cancelled or never ends, its whole share is, unless it failed because a request was refused before it was sent.
    Shared are ``max_iterations``, ``max_tool_calls``, ``max_total_tokens``, ``max_cost``, ``max_active_seconds`` and
    ``deadline``; limits by function, of repeats and in a row are each run's own, and so are interceptors, which belong
    to the planner's options. The plan request is charged in any case.

    Whoever stops the run around with its `StopHandle` stops the runs inside it. Nobody can be asked in there: a call
    that would wait for a person is denied, and a question to the user is the function's result. A planner is not
    offered inside its own runs, at whatever depth, and is refused if it is called all the same. What happens in a
    nested run is in its own journal, not in that of the run around it.

    In a stock kernel's loop, or called by the application outside of any run, it runs on the planner's own budget.
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
            planner: Reaches the goals.
            kernel: Whose services and functions it uses; None is the kernel that the function is called on.
            function_name: What the function is called: letters, digits and underscores.
            description: What the planner is good for, as the calling model reads it.

        Raises:
            PlannerInvalidConfigurationError: Naming what cannot be used.
        """
        self._planner = instance_of("planner", planner, FunctionCallingStepwisePlanner)
        self._kernel = None if kernel is None else instance_of("kernel", kernel, Kernel)
        if not _NAME.fullmatch(instance_of("function_name", function_name, str)):
            raise PlannerInvalidConfigurationError(
                f"function_name may have letters, digits and underscores; got {shown(function_name)}."
            )

        @kernel_function(name=function_name, description=description)
        async def reach_goal(
            goal: Annotated[str, "The goal, with everything that has to be known for it"],
            kernel: Annotated[Kernel, {"include_in_function_choices": False}],
            arguments: Annotated[KernelArguments, {"include_in_function_choices": False}],
        ) -> Annotated[str, "The answer"]:
            return await self._reach(goal, kernel, arguments)

        mark_planner(reach_goal, self._planner)
        self.reach_goal = reach_goal  # Semantic Kernel finds functions among the attributes

    async def _reach(self, goal: str, kernel: Kernel, arguments: KernelArguments) -> str:
        given = copy(arguments)
        del given["goal"]  # the model's, for this function
        around = around_of()
        if around is None:
            return _told(await self._planner.invoke(self._kernel or kernel, goal, given))
        if any(planner is self._planner for planner in around.planners):
            raise NestedRunRefusedError("This planner is running already; it cannot be called inside a run of its own.")
        if around.tab.share is None:
            raise NestedRunRefusedError(
                "A function of a run called this planner, and nothing of that run's budget is set aside for it. Let "
                "the model call the planner's function itself, or call it after the run."
            )
        return await self._paid(around, kernel, goal, given)

    async def _paid(self, around: Around, kernel: Kernel, goal: str, arguments: KernelArguments) -> str:
        """Run on the share of the call; all of it is spent where the run comes to no end that says what was."""
        tab = around.tab
        if tab.lost or (tab.left().iterations or 1) <= 0:
            raise NestedRunRefusedError("Nothing is left of the budget that was set aside for this call.")
        tab.lost = True
        try:
            answer = _told(await self._planner.invoke(self._kernel or kernel, goal, arguments, stop=around.stop))
        except LimitReachedError as error:
            answer = f"There is no answer: {error}"
        except (PlannerInvalidConfigurationError, PromptTooLargeError):  # no request was under way
            tab.lost = False
            raise
        tab.lost = False
        return answer


def _told(result: FunctionCallingStepwisePlannerResult) -> str:
    """Write a result as the calling model reads it."""
    match result.status:
        case "answered":
            return result.final_answer
        case "asked":
            questions: list[Any] = [call.arguments.get("question", "") for call in result.pending]
            return f"There is no answer yet; it has to be known first: {' '.join(map(str, questions))}".rstrip()
        case _ if result.final_answer:
            return f"{result.final_answer}\n\n(This was cut short. {result.reason})"
        case _:
            return f"There is no answer: {result.reason or result.status}"
