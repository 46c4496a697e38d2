"""Between iterations: how functions run, the iteration-completed callback, and how to stop a run."""

from planner_ext.core.limits import Price
from planner_ext.core.values import Usage
from planner_ext.engine.engine import StopHandle
from planner_ext.engine.ports import Clock
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
from planner_ext.sk.options import RunOptions

__all__ = [
    "Clock",
    "FunctionInvocationIterationContext",
    "IterationCallback",
    "Price",
    "RunOptions",
    "StopHandle",
    "ToolExecution",
    "Usage",
    "after_seconds",
    "all_of",
    "at_cost",
    "at_token_fraction",
    "when_flagged",
]
