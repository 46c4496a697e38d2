"""Runs that survive their process: stores, workers that drive runs from them, and approvals decided from elsewhere."""

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
from planner_ext.durable.records import PendingApproval, RunRecord, StoredRun
from planner_ext.durable.runs import Runs
from planner_ext.durable.worker import DurablePlanner, RunHandle
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
