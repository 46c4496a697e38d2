"""A bounded, interruptible, auditable agent loop for Semantic Kernel.

A name is imported when it is first asked for (PEP 562): Semantic Kernel takes seconds to import, and not every part of
the package needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

_MODULES = {
    "ApprovalFilter": "kernel.approval_filter",
    "ApprovalPolicy": "approval.policy",
    "Approve": "approval.decisions",
    "BoundedFunctionChoiceBehavior": "kernel.behavior",
    "Budget": "kernel.budget",
    "Deny": "approval.decisions",
    "FunctionCallingStepwisePlanner": "planner",
    "FunctionCallingStepwisePlannerOptions": "planner_options",
    "FunctionCallingStepwisePlannerResult": "planner_result",
    "FunctionInvokingChatCompletion": "kernel.service",
    "ToolCallHandler": "handler",
    "UserInteraction": "planner_result",
    "requires_approval": "approval.marks",
}
"""Where each name lives."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
