"""Runs that survive their process: stores, workers that drive runs from them, and approvals decided from elsewhere.

A name is imported when it is first asked for (PEP 562): an approver's process needs nothing of Semantic Kernel.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner_ext.approval.pending import DecisionRecord
    from planner_ext.durable.approvals import Approvals
    from planner_ext.durable.errors import (
        ApprovalRefusedError,
        RunConflictError,
        RunFencedError,
        RunRefusedError,
        StoreError,
        UnknownRunError,
        WorkerInUseError,
    )
    from planner_ext.durable.handle import RunHandle
    from planner_ext.durable.records import PendingApproval, RunRecord, StoredRun
    from planner_ext.durable.runs import Runs
    from planner_ext.durable.segment import DurablePlanner
    from planner_ext.engine.effects import NoEffect, TookEffect, effect

__all__ = [
    "ApprovalRefusedError",
    "Approvals",
    "DecisionRecord",
    "DurablePlanner",
    "NoEffect",
    "PendingApproval",
    "RunConflictError",
    "RunFencedError",
    "RunHandle",
    "RunRecord",
    "RunRefusedError",
    "Runs",
    "StoreError",
    "StoredRun",
    "TookEffect",
    "UnknownRunError",
    "WorkerInUseError",
    "effect",
]

_MODULES = {
    "Approvals": "durable.approvals",
    "DecisionRecord": "approval.pending",
    "DurablePlanner": "durable.segment",
    "NoEffect": "engine.effects",
    "PendingApproval": "durable.records",
    "RunHandle": "durable.handle",
    "RunRecord": "durable.records",
    "Runs": "durable.runs",
    "StoredRun": "durable.records",
    "TookEffect": "engine.effects",
    "effect": "engine.effects",
}
"""Where each name lives; the others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"planner_ext.{_MODULES.get(name, 'durable.errors')}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
