"""A bounded, interruptible, auditable agent loop for Semantic Kernel."""

from planner_ext.kernel.behavior import BoundedFunctionChoiceBehavior
from planner_ext.kernel.budget import Budget
from planner_ext.kernel.service import FunctionInvokingChatCompletion
from planner_ext.planner import FunctionCallingStepwisePlanner
from planner_ext.planner_options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner_result import FunctionCallingStepwisePlannerResult, UserInteraction

__all__ = [
    "BoundedFunctionChoiceBehavior",
    "Budget",
    "FunctionCallingStepwisePlanner",
    "FunctionCallingStepwisePlannerOptions",
    "FunctionCallingStepwisePlannerResult",
    "FunctionInvokingChatCompletion",
    "UserInteraction",
]
