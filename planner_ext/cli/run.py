"""``planner-ext run``: one goal on the user's kernel, watched, within a budget."""

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from planner_ext import Budget, FunctionCallingStepwisePlannerResult
from planner_ext.cli.ask import Desk
from planner_ext.cli.checkpoint_file import CheckpointFile
from planner_ext.cli.conduct import Work, conduct, is_terminal
from planner_ext.cli.journey import Journey, Setup
from planner_ext.errors import PlannerInvalidConfigurationError

__all__ = ["Goal", "run_goal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is asked of one run, as it stands on the command line.

    Attributes:
        questions: How many questions the model may ask; None offers it none.
        plan: None plans where there are functions to plan with.
        timeout: Seconds; None is no timeout.
        checkpoint: Where the run is kept instead of asking about calls that wait.
    """

    text: str
    max_iterations: int = 15
    max_tool_calls: int | None = None
    questions: int | None = None
    plan: bool | None = None
    timeout: float | None = None
    checkpoint: Path | None = None


def run_goal(goal: Goal, setup: Setup) -> int:
    """Reach a goal, print what there is to print, and return the exit code."""
    file = None if goal.checkpoint is None else CheckpointFile(goal.checkpoint)

    def begin(console: Console) -> Work:
        if file is not None:
            file.check_place()
        if goal.timeout is not None and not 0 < goal.timeout < math.inf:
            raise PlannerInvalidConfigurationError(
                f"--timeout must be a number of seconds above 0; got {goal.timeout:g}."
            )
        journey = Journey(setup, console, file=file)

        def first() -> FunctionCallingStepwisePlannerResult:
            journey.open(
                timeout=goal.timeout,
                plan=goal.plan,
                max_iterations=goal.max_iterations,
                budget=Budget(max_tool_calls=goal.max_tool_calls),
                max_clarifications=goal.questions,
            )
            return journey.start(goal.text)

        desk = Desk(console, by=setup.by) if file is None and is_terminal() else None
        return Work(setup=setup, journey=journey, first=first, file=file, desk=desk)

    return conduct(setup, begin, file)
