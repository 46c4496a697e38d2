"""A bounded, interruptible, auditable agent loop for Semantic Kernel.

A name is imported when it is first asked for (PEP 562): Semantic Kernel takes seconds to import, and not every part of
the package needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner_ext.approval.decisions import Approve, Deny, requires_approval
    from planner_ext.approval.policy import ApprovalPolicy
    from planner_ext.handler import ToolCallHandler
    from planner_ext.planner import FunctionCallingStepwisePlanner
    from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
    from planner_ext.planner.result import FunctionCallingStepwisePlannerResult, UserInteraction
    from planner_ext.service import FunctionInvokingChatCompletion
    from planner_ext.sk.approval_filter import ApprovalFilter
    from planner_ext.sk.behavior import BoundedFunctionChoiceBehavior
    from planner_ext.sk.budget import Budget

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
    "ApprovalFilter": "sk.approval_filter",
    "ApprovalPolicy": "approval.policy",
    "Approve": "approval.decisions",
    "BoundedFunctionChoiceBehavior": "sk.behavior",
    "Budget": "sk.budget",
    "Deny": "approval.decisions",
    "FunctionCallingStepwisePlanner": "planner.planner",
    "FunctionCallingStepwisePlannerOptions": "planner.options",
    "FunctionCallingStepwisePlannerResult": "planner.result",
    "FunctionInvokingChatCompletion": "service",
    "ToolCallHandler": "handler",
    "UserInteraction": "planner.result",
    "requires_approval": "approval.decisions",
}
"""Where each name lives."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
