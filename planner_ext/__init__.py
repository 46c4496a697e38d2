"""A bounded, interruptible, auditable agent loop for Semantic Kernel."""

from planner_ext.approval.decisions import Approve, Deny
from planner_ext.approval.marks import requires_approval
from planner_ext.approval.policy import ApprovalPolicy
from planner_ext.handler import ToolCallHandler
from planner_ext.kernel.approval_filter import ApprovalFilter
from planner_ext.kernel.behavior import BoundedFunctionChoiceBehavior
from planner_ext.kernel.budget import Budget
from planner_ext.kernel.service import FunctionInvokingChatCompletion
from planner_ext.planner import FunctionCallingStepwisePlanner
from planner_ext.planner_options import FunctionCallingStepwisePlannerOptions
from planner_ext.planner_result import FunctionCallingStepwisePlannerResult, UserInteraction

__all__ = [
    "ApprovalFilter",
    "ApprovalPolicy",
    "Approve",
    "BoundedFunctionChoiceBehavior",
    "Budget",
    "Deny",
    "FunctionCallingStepwisePlanner",
    "FunctionCallingStepwisePlannerOptions",
    "FunctionCallingStepwisePlannerResult",
    "FunctionInvokingChatCompletion",
    "ToolCallHandler",
    "UserInteraction",
    "requires_approval",
]
