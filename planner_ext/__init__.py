"""A bounded, interruptible, auditable agent loop for Semantic Kernel.

Doors: each runs the same loop within a `Budget`.

    FunctionCallingStepwisePlanner     a goal in, an answer out (FunctionCallingStepwisePlannerOptions,
                                       FunctionCallingStepwisePlannerResult, UserInteraction)
    FunctionInvokingChatCompletion     the loop around any connector, itself a chat completion service
    ToolCallHandler                    the loop over a history, with an interception point
    ToolUseSession                     a conversation, in closed or open loop
    PlannerPlugin                      a planner as a function of a kernel
    BoundedFunctionChoiceBehavior      a limit of tool rounds, also in Semantic Kernel's own loop

Limits:

    Budget, Usage                      what a run may use, and what it has used
    ToolExecution                      how functions run: at once, with timeouts, in threads
    StopHandle                         ends a run from outside

Approval: an interceptor gets a call and returns Approve, Deny, Supply, Defer or None.

    ApprovalPolicy, requires_approval  interceptors as data, and a mark on a function
    ApprovalFilter                     both in a stock kernel, as a filter
    ApprovalSettings                   what a denied or deferred call does to the run
    Checkpoint                         a paused run as JSON text; resume it in any process

Modules: `planner_ext.errors`, `planner_ext.events` (facts and stream events),
`planner_ext.iteration` (between iterations), `planner_ext.hitl_manager` (interception),
`planner_ext.durable` (Runs in SQLite or PostgreSQL survive ``kill -9``), `planner_ext.inbox`,
`planner_ext.timeline` (a run as values and as a page), `planner_ext.budgets` (shared by
runs), `planner_ext.agent` (an agent's paused turn), `planner_ext.ag_ui` (front ends),
`planner_ext.testing` (scripted models, recordings), `planner_ext.compare`, and one of
each door. Command line: ``planner-ext --help``.

    planner = FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(max_iterations=5))
    result = await planner.invoke(kernel, "How much warmer is it in Lisbon than in Oslo?")
    print(result.status, result.final_answer, result.iterations)
"""

# Names are imported on first use (PEP 562): Semantic Kernel takes seconds to import.

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner_ext.approval.decisions import (
        ApprovalSettings,
        Approve,
        Defer,
        Deny,
        Supply,
        requires_approval,
    )
    from planner_ext.approval.policy import ApprovalPolicy
    from planner_ext.core.limits import Budget
    from planner_ext.core.values import Usage
    from planner_ext.durable.runs import Runs
    from planner_ext.engine.concurrency import StopHandle
    from planner_ext.handler import ToolCallHandler
    from planner_ext.planner import FunctionCallingStepwisePlanner
    from planner_ext.planner.options import FunctionCallingStepwisePlannerOptions
    from planner_ext.planner.run import FunctionCallingStepwisePlannerResult
    from planner_ext.plugin import PlannerPlugin
    from planner_ext.service import FunctionInvokingChatCompletion
    from planner_ext.session import ToolUseSession
    from planner_ext.sk.checkpoint import Checkpoint
    from planner_ext.sk.filter.approval_filter import ApprovalFilter
    from planner_ext.sk.functions.execution import ToolExecution
    from planner_ext.sk.functions.questions import UserInteraction
    from planner_ext.sk.run.behavior import BoundedFunctionChoiceBehavior

__all__ = [
    "ApprovalFilter",
    "ApprovalPolicy",
    "ApprovalSettings",
    "Approve",
    "BoundedFunctionChoiceBehavior",
    "Budget",
    "Checkpoint",
    "Defer",
    "Deny",
    "FunctionCallingStepwisePlanner",
    "FunctionCallingStepwisePlannerOptions",
    "FunctionCallingStepwisePlannerResult",
    "FunctionInvokingChatCompletion",
    "PlannerPlugin",
    "Runs",
    "StopHandle",
    "Supply",
    "ToolCallHandler",
    "ToolExecution",
    "ToolUseSession",
    "Usage",
    "UserInteraction",
    "requires_approval",
]

__version__ = "0.1.0"

_NAMES = {
    "approval.decisions": ("Approve", "Defer", "Deny", "Supply", "requires_approval"),
    "approval.policy": ("ApprovalPolicy",),
    "core.values": ("Usage",),
    "durable": ("Runs",),
    "handler": ("ToolCallHandler",),
    "hitl_manager": ("ApprovalSettings", "Checkpoint"),
    "iteration": ("StopHandle", "ToolExecution"),
    "planner": ("FunctionCallingStepwisePlanner",),
    "planner.options": ("FunctionCallingStepwisePlannerOptions",),
    "planner.run": ("FunctionCallingStepwisePlannerResult",),
    "plugin": ("PlannerPlugin",),
    "service": ("FunctionInvokingChatCompletion",),
    "session": ("ToolUseSession",),
    "sk.filter.approval_filter": ("ApprovalFilter",),
    "sk.run.behavior": ("BoundedFunctionChoiceBehavior",),
    "sk.run.options": ("Budget",),
    "sk.functions.questions": ("UserInteraction",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
"""The module of each name. `Budget` comes from the adapters' options, so that its
errors are the public classes."""


_PUBLIC = (
    "hitl_manager",
    "iteration",
    "session",
    "plugin",
    "budgets",
    "durable",
    "errors",
    "events",
    "timeline",
    "testing",
    "ag_ui",
    "inbox",
    "compare",
)
"""The modules that have further public names; the first one that has a name is the one
to import it from."""


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise import_module(f"{__name__}.core.exports").missing_name(
            __name__, name, _PUBLIC
        )
    value = globals()[name] = getattr(
        import_module(f"{__name__}.{_MODULES[name]}"), name
    )
    return value
