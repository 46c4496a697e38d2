"""This package's planner under each of its three controls: the ADR's options, corrected. No plan, so the same work."""

from collections.abc import Callable
from contextlib import aclosing
from typing import Literal

from planner_ext.compare.stage import Outcome, Play, Stage, opened, why
from planner_ext.core.limits import Ledger
from planner_ext.events import ResultReady
from planner_ext.planner import FunctionCallingStepwisePlanner
from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner.result import FunctionCallingStepwisePlannerResult
from planner_ext.sk.errors import PlannerException

__all__ = ["corrected"]


def corrected(control: Literal["use_attempts", "iterations_metadata", "pre_invoke"]) -> Play:
    """Make an option of one control."""

    async def play(stage: Stage) -> Outcome:
        options = FunctionCallingStepwisePlannerOptions(
            max_iterations=stage.max_iterations,
            control=control,
            plan=False,
            pre_invoke=_while_below(stage.max_iterations) if control == "pre_invoke" else None,
        )
        planner = FunctionCallingStepwisePlanner(stage.service.service_id, options)
        try:
            return _outcome(await _result(planner, stage))
        except Exception as error:  # whatever an endpoint does to an option is a finding
            return _failed(error, stage)

    return play


def _while_below(budget: int) -> Callable[[int, str, object], bool]:
    """The callback of the ADR's option 3: calls proceed while round trips are left."""

    def proceed(iteration: int, name: str, arguments: object) -> bool:  # noqa: ARG001  (the callback's signature)
        return iteration < budget

    return proceed


async def _result(planner: FunctionCallingStepwisePlanner, stage: Stage) -> FunctionCallingStepwisePlannerResult:
    if not stage.streaming:
        return await planner.invoke(stage.kernel, stage.goal)
    async with aclosing(planner.invoke_stream(stage.kernel, stage.goal)) as events:
        async for event in events:
            if isinstance(event, ResultReady):
                return event.result
    raise AssertionError("a stream ends with its result")


def _outcome(result: FunctionCallingStepwisePlannerResult) -> Outcome:
    assert result.chat_history is not None
    return Outcome(
        status=result.status,
        answer=result.final_answer,
        charged=result.iterations,
        tokens=result.usage.total_tokens or None,
        history=result.chat_history,
    )


def _failed(error: Exception, stage: Stage) -> Outcome:
    """Tell of a run that a fault ended by what its error carries."""
    planners = error if isinstance(error, PlannerException) else PlannerException()
    ledger = planners.checkpoint.state().ledger if planners.checkpoint is not None else Ledger()
    return Outcome(
        status="failed",
        answer="",
        charged=ledger.iterations,
        tokens=ledger.usage.total_tokens or None,
        history=planners.chat_history or opened(stage.goal),
        error=why(error),
    )
