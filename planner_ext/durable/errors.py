"""What a store can say no to; none of it needs Semantic Kernel, so that an approver's process starts fast.

StoreError (PlannerExtError)     a store that cannot be used: missing, locked, full, read-only, not reached, damaged
├── RunFencedError               another worker has gone on with the run; this one stops before its next side effect
└── WorkerInUseError             the worker's name belongs to a process that lives
UnknownRunError                  no run has this name
RunRefusedError                  this process lacks a policy, interceptor or setting that the run began under
RunConflictError                 the name belongs to a run with another goal
ApprovalRefusedError             a decision that cannot be taken: unknown, expired, altered, or made for another call
"""

from planner_ext.core.errors import PlannerExtError

__all__ = [
    "ApprovalRefusedError",
    "DuplicateRowError",
    "RunConflictError",
    "RunFencedError",
    "RunRefusedError",
    "StoreError",
    "UnknownRunError",
    "WorkerInUseError",
]


class StoreError(PlannerExtError):
    """A store cannot be used; names what is wrong and the way out. What was recorded before stays recorded."""


class DuplicateRowError(StoreError):
    """A row with this key is there already: how a database tells the store; never leaves ``planner_ext.durable``."""


class RunFencedError(StoreError):
    """Another worker, or whoever cancelled it, has gone on with this run; here it stops before its next side effect."""


class WorkerInUseError(StoreError):
    """Two workers were given one name; the second is refused, since the first would be taken for dead with it."""


class UnknownRunError(PlannerExtError):
    """The store has no run of this name."""


class RunConflictError(PlannerExtError):
    """A run of this name is there already, and has another goal."""


class RunRefusedError(PlannerExtError):
    """A process has less of a say in a run's calls than the run began under; names what is missing. Nothing ran."""


class ApprovalRefusedError(PlannerExtError):
    """A decision cannot be taken: its call is unknown, expired or altered, or it was made for another one."""
