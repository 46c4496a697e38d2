"""Every error of this package.

PlannerExtError                              the root
├── PlannerException (KernelException)       the errors that leave through a door of Semantic Kernel
│   ├── PlannerInvalidConfigurationError     configuration; raised before any request
│   │   ├── InvalidOptionError               an option, argument or limit has an invalid value
│   │   │   ├── InvalidSettingsError         no kernel, or other settings (ServiceInvalidExecutionSettingsError)
│   │   │   └── InvalidBehaviorError         a behaviour that there is not (ServiceInitializationError)
│   │   ├── ServiceNotFoundError             the kernel has no service that fits (KernelServiceNotFoundError)
│   │   └── RunEndedError                    the run has ended and cannot be resumed or cancelled
│   ├── PromptTooLargeError                  a request would exceed max_prompt_tokens; it was not sent
│   ├── InvalidHistoryError                  the history has unpaired calls and results, or waits
│   ├── ServiceCallError                     a request failed (ServiceResponseException)
│   ├── InvalidReplyError                    the response is not a reply (ServiceInvalidResponseError)
│   ├── InvalidPriceError                    price= did not return an amount of US dollars
│   ├── NestedRunRefusedError                a function asked for a run or a call that its own run does not allow
│   ├── ToolExecutionError                   a function failed, and on_error is "raise"
│   ├── SessionBusyError                     the session is answering another prompt
│   ├── DecisionRefusedError                 a decision does not fit the call
│   ├── InvalidCheckpointError               a checkpoint cannot be read (InvalidJournalError)
│   └── RunNotAnsweredError                  raise_for_status() of a run without an answer
│       └── LimitReachedError                ... which a limit ended
├── InvalidJournalError                      a journal cannot be read
│   └── NewerSchemaError                     ... because a newer version wrote it
├── StoreError                               a store of runs cannot be used
│   ├── RunFencedError                       ... because another process continues the run
│   └── WorkerInUseError                     ... because a living worker has this name
├── UnknownRunError                          the store has no run of this name
├── RunConflictError                         the store has a run of this name with another goal or other inputs
├── RunRefusedError                          this process lacks a guard (policy, interceptor) of the run
├── ApprovalRefusedError                     the store cannot take this decision
│   └── NotAuthorizedError                   ... or this action: who asks may not (RunRefusedError)
├── InvalidForkError                         a run has no further request after this iteration
├── InvalidPolicyError                       a policy cannot be read
├── InvalidLimitError                        a limit of the core has an invalid value
├── NotAFunctionError (TypeError)            a decorator was applied to something else than a function
└── IllegalTransitionError                   a journal contradicts itself

The lower floors raise errors of their own, without Semantic Kernel; where its adapters
are loaded, as by this module, each is of the class of this tree that derives from it.
So what `Budget` refuses is a PlannerInvalidConfigurationError.

An exception that ends a run, ``asyncio.CancelledError`` included, carries the run as
its attributes ``chat_history`` and ``checkpoint``. ``asyncio.wait_for`` and
``asyncio.timeout`` replace the cancellation by a TimeoutError: read
``error.__cause__.checkpoint``.
"""

from planner_ext.approval.policy import InvalidPolicyError
from planner_ext.core.errors import (
    IllegalTransitionError,
    InvalidJournalError,
    InvalidLimitError,
    NewerSchemaError,
    NotAFunctionError,
    PlannerExtError,
    RunRefusedError,
)
from planner_ext.durable.errors import (
    ApprovalRefusedError,
    NotAuthorizedError,
    RunConflictError,
    RunFencedError,
    StoreError,
    UnknownRunError,
    WorkerInUseError,
)
from planner_ext.engine.journal import InvalidForkError
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidBehaviorError,
    InvalidCheckpointError,
    InvalidHistoryError,
    InvalidOptionError,
    InvalidPriceError,
    InvalidReplyError,
    InvalidSettingsError,
    LimitReachedError,
    NestedRunRefusedError,
    PlannerException,
    PlannerInvalidConfigurationError,
    PromptTooLargeError,
    RunEndedError,
    RunNotAnsweredError,
    ServiceCallError,
    ServiceNotFoundError,
    SessionBusyError,
    ToolExecutionError,
)

__all__ = [
    "ApprovalRefusedError",
    "DecisionRefusedError",
    "IllegalTransitionError",
    "InvalidBehaviorError",
    "InvalidCheckpointError",
    "InvalidForkError",
    "InvalidHistoryError",
    "InvalidJournalError",
    "InvalidLimitError",
    "InvalidOptionError",
    "InvalidPolicyError",
    "InvalidPriceError",
    "InvalidReplyError",
    "InvalidSettingsError",
    "LimitReachedError",
    "NestedRunRefusedError",
    "NewerSchemaError",
    "NotAFunctionError",
    "NotAuthorizedError",
    "PlannerException",
    "PlannerExtError",
    "PlannerInvalidConfigurationError",
    "PromptTooLargeError",
    "RunConflictError",
    "RunEndedError",
    "RunFencedError",
    "RunNotAnsweredError",
    "RunRefusedError",
    "ServiceCallError",
    "ServiceNotFoundError",
    "SessionBusyError",
    "StoreError",
    "ToolExecutionError",
    "UnknownRunError",
    "WorkerInUseError",
]
