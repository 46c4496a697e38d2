"""Every error of this package.

PlannerExtError                              all of them
├── PlannerException (KernelException)       those that leave through a door of Semantic Kernel
│   ├── PlannerInvalidConfigurationError     a goal, option, limit or service that cannot be used
│   ├── PromptTooLargeError                  a request over max_prompt_tokens, which was not sent
│   ├── InvalidHistoryError                  a history that may not be sent
│   ├── ServiceCallError                     a request failed (ServiceResponseException)
│   ├── InvalidPriceError                    price= gave no amount of US dollars for a reply
│   ├── InvalidReplyError                    a response that is no reply (ServiceInvalidResponseError)
│   ├── NestedRunRefusedError                a planner called in a run that set nothing aside for it
│   ├── ToolExecutionError                   a function failed, and on_error is "raise"
│   ├── SessionBusyError                     a session that is answering another prompt
│   ├── DecisionRefusedError                 a decision that cannot be taken
│   ├── InvalidCheckpointError               a checkpoint that cannot be read (InvalidJournalError)
│   └── RunNotAnsweredError                  raise_for_status() of a run without an answer
│       └── LimitReachedError                ... that a limit ended
├── InvalidJournalError                      a journal that cannot be read
│   └── NewerSchemaError                     ... by a version as old as this one
├── StoreError                               a store of runs that cannot be used
│   ├── RunFencedError                       ... where somebody else goes on with the run
│   └── WorkerInUseError                     ... where a living worker has the name
├── UnknownRunError                          a store has no run of this name
├── RunConflictError                         ... or one with another goal
├── ApprovalRefusedError                     a decision that a store cannot take
├── InvalidPolicyError                       a policy that cannot be read
├── InvalidLimitError                        a limit of the core that means nothing
├── NotAFunctionError (TypeError)            a decorator on something else than a function
└── IllegalTransitionError                   a journal that contradicts itself

Every exception that ends a run, ``asyncio.CancelledError`` included, has its history and a checkpoint as attributes
``chat_history`` and ``checkpoint``. ``asyncio.wait_for`` and ``asyncio.timeout`` raise a TimeoutError in place of the
cancellation, which is its ``__cause__``: read ``error.__cause__.checkpoint``.
"""

from planner_ext.approval.policy import InvalidPolicyError
from planner_ext.core.errors import (
    IllegalTransitionError,
    InvalidJournalError,
    InvalidLimitError,
    NewerSchemaError,
    NotAFunctionError,
    PlannerExtError,
)
from planner_ext.durable.errors import (
    ApprovalRefusedError,
    RunConflictError,
    RunFencedError,
    StoreError,
    UnknownRunError,
    WorkerInUseError,
)
from planner_ext.sk.approval import DecisionRefusedError
from planner_ext.sk.checkpoint import InvalidCheckpointError
from planner_ext.sk.errors import (
    InvalidHistoryError,
    InvalidPriceError,
    InvalidReplyError,
    LimitReachedError,
    NestedRunRefusedError,
    PlannerException,
    PlannerInvalidConfigurationError,
    PromptTooLargeError,
    RunNotAnsweredError,
    ServiceCallError,
    SessionBusyError,
    ToolExecutionError,
)

__all__ = [
    "ApprovalRefusedError",
    "DecisionRefusedError",
    "IllegalTransitionError",
    "InvalidCheckpointError",
    "InvalidHistoryError",
    "InvalidJournalError",
    "InvalidLimitError",
    "InvalidPolicyError",
    "InvalidPriceError",
    "InvalidReplyError",
    "LimitReachedError",
    "NestedRunRefusedError",
    "NewerSchemaError",
    "NotAFunctionError",
    "PlannerException",
    "PlannerExtError",
    "PlannerInvalidConfigurationError",
    "PromptTooLargeError",
    "RunConflictError",
    "RunFencedError",
    "RunNotAnsweredError",
    "ServiceCallError",
    "SessionBusyError",
    "StoreError",
    "ToolExecutionError",
    "UnknownRunError",
    "WorkerInUseError",
]
