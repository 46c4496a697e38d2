"""Every error of this package.

PlannerExtError                              the root
├── PlannerException (KernelException)       the errors of Semantic Kernel's doors
│   ├── PlannerInvalidConfigurationError     raised before any request
│   │   ├── InvalidOptionError               an option, argument or limit
│   │   │   ├── InvalidSettingsError         no kernel, or other settings (ServiceInvalidExecutionSettingsError)
│   │   │   └── InvalidBehaviorError         an unknown behaviour (ServiceInitializationError)
│   │   ├── ServiceNotFoundError             the kernel has no service that fits (KernelServiceNotFoundError)
│   │   └── RunEndedError                    an ended run cannot be resumed or cancelled
│   ├── PromptTooLargeError                  over max_prompt_tokens; not sent
│   ├── InvalidHistoryError                  unpaired calls and results, or a waiting run
│   ├── ServiceCallError                     a request failed (ServiceResponseException)
│   ├── InvalidReplyError                    the response is not a reply (ServiceInvalidResponseError)
│   ├── InvalidPriceError                    price= did not return an amount of US dollars
│   ├── AnswerCheckError                     check_answer raised, or returned neither a text nor None
│   ├── NestedRunRefusedError                the run around does not allow the function's run or call
│   ├── ToolExecutionError                   a function failed, and on_error is "raise"
│   ├── SessionBusyError                     the session is answering another prompt
│   ├── DecisionRefusedError                 a decision does not fit the call
│   ├── InvalidCheckpointError               a checkpoint cannot be read (InvalidJournalError)
│   └── RunNotAnsweredError                  raise_for_status() of a run without an answer
│       ├── LimitReachedError                ... which a limit ended
│       └── TurnPausedError                  ... an agent's turn, in an orchestration
├── InvalidJournalError                      a journal cannot be read
│   └── NewerSchemaError                     ... because a newer version wrote it
├── StoreError                               a store of runs cannot be used
│   ├── RunFencedError                       ... because another process continues the run
│   └── WorkerInUseError                     ... because a living worker has this name
├── UnknownRunError                          the store has no run of this name
├── RunConflictError                         the name belongs to another run, or the run is in use
├── RunRefusedError                          this process lacks a guard or a nested run's function
├── ApprovalRefusedError                     the store cannot take this decision
│   └── NotAuthorizedError                   ... or who asks may not do this (RunRefusedError)
├── InvalidForkError                         a run has no further request after this iteration
├── InvalidPolicyError                       a policy cannot be read
├── InvalidLimitError                        a limit of the core has an invalid value
├── LeftByError (RuntimeError)               a callback raised SystemExit, or cancelled itself
├── NotAFunctionError (TypeError)            a decorator was applied to something else
└── IllegalTransitionError                   a journal contradicts itself

The lower floors raise errors of their own; with Semantic Kernel's adapters loaded, as
by this module, each is of the class of this tree that derives from it. So what `Budget`
refuses is a PlannerInvalidConfigurationError.

An exception that ends a run, ``asyncio.CancelledError`` included, carries the run as
its attributes ``chat_history`` and ``checkpoint``. ``asyncio.wait_for`` and
``asyncio.timeout`` raise a TimeoutError instead: read ``error.__cause__.checkpoint``.
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
from planner_ext.engine.concurrency import LeftByError
from planner_ext.engine.fork import InvalidForkError
from planner_ext.sk.errors import (
    AnswerCheckError,
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
    TurnPausedError,
)

__all__ = [
    "AnswerCheckError",
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
    "LeftByError",
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
    "TurnPausedError",
    "UnknownRunError",
    "WorkerInUseError",
]
