"""What governs the loop between round trips: how functions are run, what is told after each batch, how to stop."""

from planner_ext.core.values import Usage
from planner_ext.engine.engine import StopHandle
from planner_ext.sk.execution import ToolExecution
from planner_ext.sk.iteration import (
    FunctionInvocationIterationContext,
    IterationCallback,
    after_seconds,
    all_of,
    at_cost,
    at_token_fraction,
    when_flagged,
)

__all__ = [
    "FunctionInvocationIterationContext",
    "IterationCallback",
    "StopHandle",
    "ToolExecution",
    "Usage",
    "after_seconds",
    "all_of",
    "at_cost",
    "at_token_fraction",
    "when_flagged",
]
