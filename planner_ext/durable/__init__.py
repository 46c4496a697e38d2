"""Runs that survive their process: stores, workers that drive runs from them, and approvals decided from elsewhere.

``planner-ext runs backup FILE`` copies an SQLite file while workers write, ``pg_dump``
a PostgreSQL database. In a restored copy, unfinished runs repeat what they did after
the copy was made: cancel or check them before a worker starts. ``planner-ext runs prune
--older-than 30d --status answered`` deletes old runs, ``runs export`` writes one to a
file, and ``runs import`` adds it to a store.

A store that a newer version of this package wrote is refused, unless it allows this
version. Only ``planner-ext store migrate`` changes the tables of a store.

    runs             `Runs` and `RunsClient`: start, submit, resume, cancel and read runs
    worker           drives runs: from the claim to their next pause or end
    outages          which endpoints are out, and when they are tried again
    hosts            `DbosHost` and `TemporalHost`: an engine says when and where a run is driven
    driven           when the calls of driven runs may start
    heartbeat        which workers live
    approvals        `Approvals`: lists what waits for a person, and stores the decision in its row
    grants           decisions that answer the same question about later calls; used by the writer
    authorization    asks the application's hook
    notices          delivers notices of runs that paused, ended or failed
    writer           writes the facts of one run, and the rows that are derived from them: run, approvals, notices
    store            all other statements: a method is a transaction
    database         the port of a database, and its tables
    sqlite, postgres the two databases
    records          the values in rows: runs, approvals, decisions
    inputs           what a run is submitted with, a new budget, and what is said to it, as JSON
    retention        how long what has ended is kept, and how a person is forgotten
    listing          filters for a list of runs, and the numbers of a store
    migration        changes the tables to the schema that this version needs
    chain            links the facts of a journal, and signs the last link
    verify           compares journals with their links and heads
    archive          a run as a JSON document, exported and imported
    gauge            the numbers of a store as metrics
    options          the options of a worker, and when it retries a run
    errors           the errors of a store
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner_ext.approval.decisions import DecisionRecord, DecisionRequest
    from planner_ext.approval.policy import Grant
    from planner_ext.core.errors import RunRefusedError
    from planner_ext.durable.approvals import Approvals
    from planner_ext.durable.errors import (
        ApprovalRefusedError,
        NotAuthorizedError,
        RunConflictError,
        RunFencedError,
        StoreError,
        UnknownRunError,
        WorkerInUseError,
    )
    from planner_ext.durable.grants import GrantRecord
    from planner_ext.durable.heartbeat import WorkerRecord
    from planner_ext.durable.inputs import RunInputs, SaidMessage
    from planner_ext.durable.listing import (
        CallFilters,
        Hold,
        RunFilters,
        RunStats,
        StoreMarks,
    )
    from planner_ext.durable.notices import NoticeRecord, RunNotice
    from planner_ext.durable.options import RetryPolicy, WorkerOptions
    from planner_ext.durable.records import PendingApproval, RunRecord, StoredRun
    from planner_ext.durable.retention import Retention
    from planner_ext.durable.runs import RunResult, Runs, RunsClient, SubmittedRun
    from planner_ext.durable.worker import Due, Next, RunHandle
    from planner_ext.engine.activation import DurablePlanner
    from planner_ext.engine.effects import NoEffect, TookEffect, effect

__all__ = [
    "ApprovalRefusedError",
    "Approvals",
    "CallFilters",
    "DecisionRecord",
    "DecisionRequest",
    "Due",
    "DurablePlanner",
    "Grant",
    "GrantRecord",
    "Hold",
    "Next",
    "NoEffect",
    "NotAuthorizedError",
    "NoticeRecord",
    "PendingApproval",
    "Retention",
    "RetryPolicy",
    "RunConflictError",
    "RunFencedError",
    "RunFilters",
    "RunHandle",
    "RunInputs",
    "RunNotice",
    "RunRecord",
    "RunRefusedError",
    "RunResult",
    "RunStats",
    "Runs",
    "RunsClient",
    "SaidMessage",
    "StoreError",
    "StoreMarks",
    "StoredRun",
    "SubmittedRun",
    "TookEffect",
    "UnknownRunError",
    "WorkerInUseError",
    "WorkerOptions",
    "WorkerRecord",
    "effect",
]

_MODULES = {
    "approval.decisions": ("DecisionRecord", "DecisionRequest"),
    "approval.policy": ("Grant",),
    "core.errors": ("RunRefusedError",),
    "durable.approvals": ("Approvals",),
    "durable.grants": ("GrantRecord",),
    "durable.inputs": ("RunInputs", "SaidMessage"),
    "durable.heartbeat": ("WorkerRecord",),
    "durable.notices": ("NoticeRecord", "RunNotice"),
    "durable.listing": (
        "CallFilters",
        "Hold",
        "RunFilters",
        "RunStats",
        "StoreMarks",
    ),
    "durable.options": ("RetryPolicy", "WorkerOptions"),
    "durable.records": ("PendingApproval", "RunRecord", "StoredRun"),
    "durable.retention": ("Retention",),
    "durable.runs": ("RunResult", "Runs", "RunsClient", "SubmittedRun"),
    "durable.worker": ("Due", "Next", "RunHandle"),
    "engine.activation": ("DurablePlanner",),
    "engine.effects": ("NoEffect", "TookEffect", "effect"),
}
"""Where each name is defined; the others are errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next(
        (module for module, names in _MODULES.items() if name in names),
        "durable.errors",
    )
    value = globals()[name] = getattr(import_module(f"planner_ext.{module}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
