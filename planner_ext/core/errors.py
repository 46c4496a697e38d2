"""The root of every error of this package, and the errors that the core itself can meet.

The core knows nothing of Semantic Kernel; the errors which leave through one of its doors are in
``planner_ext.errors`` and derive from these.

    PlannerExtError
    ├── IllegalTransitionError     a fact that cannot follow the state it was applied to
    ├── InvalidLimitError          a limit whose value means nothing
    ├── NotAFunctionError          a decorator of this package on something else than a function
    └── InvalidJournalError        a journal or checkpoint that cannot be read
        └── NewerSchemaError       written by a newer version of this package
"""

__all__ = [
    "IllegalTransitionError",
    "InvalidJournalError",
    "InvalidLimitError",
    "NewerSchemaError",
    "NotAFunctionError",
    "PlannerExtError",
]


class PlannerExtError(Exception):
    """Anything that this package raises on purpose."""


class IllegalTransitionError(PlannerExtError):
    """A fact was applied to a state in which it cannot happen: a damaged journal, or a defect of this package."""


class InvalidLimitError(PlannerExtError):
    """A limit was given a value that means nothing; the message names the field, what it takes and what it got."""


class NotAFunctionError(PlannerExtError, TypeError):
    """A decorator of this package was put on something else than a function, or given that in its place."""


class InvalidJournalError(PlannerExtError):
    """A journal or checkpoint is truncated, altered or not one of ours; nothing of it was used."""


class NewerSchemaError(InvalidJournalError):
    """A journal or checkpoint was written by a newer version of this package than the one that reads it."""
