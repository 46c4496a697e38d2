"""``FunctionCallingStepwisePlanner``: a goal in, an answer out, within a budget that is never exceeded."""

from planner_ext.planner.planner import FunctionCallingStepwisePlanner

__all__ = ["FunctionCallingStepwisePlanner"]
