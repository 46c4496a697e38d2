"""What can be decided of a call, and the call as a decider sees it: resolved, validated, fingerprinted."""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, cast

from planner_ext.core.errors import PlannerExtError
from planner_ext.core.shown import shown

__all__ = [
    "Approve",
    "Decision",
    "Defer",
    "Deny",
    "Interceptor",
    "InvalidDecisionError",
    "Supply",
    "ToolCall",
    "is_duration",
    "problem_of",
]


class InvalidDecisionError(PlannerExtError):
    """A decision cannot be taken; names the call. None of the decisions given with it was taken, nothing ran.

    Attributes:
        call_id: The call that it was given for; None where it names no call.
        changed: Whether the call would by now get another value than was asked about. A resume without a decision on it
            has it wait as that, with its own fingerprint.
    """

    def __init__(self, message: str, *, call_id: str | None = None, changed: bool = False) -> None:
        super().__init__(message)
        self.call_id = call_id
        self.changed = changed


@dataclass(frozen=True, slots=True)
class Approve:
    """Let the call run: this function, with these arguments, once.

    Where a filter of the kernel changes the function, or an argument that the model could give, the call does not run
    and the model reads so. Parameters hidden from the model are the application's: a filter may fill them. The same
    holds for what a policy allows, by a rule or by its default. A call that no interceptor decided is not bound: a
    filter may change its arguments, though never its function.

    Attributes:
        arguments: Arguments to use in place of the model's; validated like those. None keeps the model's.
        always: Approve the same without asking for the rest of the run: every call of this ``"function"``, or only
            this function with these ``"arguments"``. None approves this call alone.
        by: Who decided, for the record.
        fingerprint: What the decision was made for; where it is given, it must match the pending call's.
    """

    arguments: Mapping[str, Any] | None = None
    always: Literal["function", "arguments"] | None = None
    by: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class Deny:
    """Do not run the call; the model reads that it was refused, and why. A blank reason becomes ""."""

    reason: str = ""
    by: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.reason, str) and not self.reason.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            object.__setattr__(self, "reason", "")


@dataclass(frozen=True, slots=True)
class Supply:
    """Do not run the call; give the model this result instead, encoded as a function's result would be."""

    result: Any
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Defer:
    """Ask a person: the run pauses as a value until the call is decided.

    Attributes:
        prompt: What the person is asked.
        expires_in: Seconds after which the question is no longer open; None uses the run's setting.
    """

    prompt: str | None = None
    expires_in: float | None = None


Decision: TypeAlias = Approve | Deny | Supply | Defer
"""What becomes of a call that was asked about."""


def problem_of(decision: Decision) -> str | None:
    """Say what is wrong with a decision whose fields mean nothing, or None: it came from code that nobody checked."""
    match decision:
        case Approve(arguments=arguments, always=always, by=by):
            if always not in (None, "function", "arguments"):
                return f'always must be "function", "arguments" or None; got {shown(always)}'
            if arguments is not None and not _is_object(arguments):
                return f"arguments must map parameter names to values; got {type(arguments).__name__}"
            return _text_problem("by", by)
        case Deny(reason=reason, by=by):
            return _text_problem("reason", reason) or _text_problem("by", by)
        case Supply(by=by):
            return _text_problem("by", by)
        case Defer(prompt=prompt, expires_in=expires_in):
            if expires_in is not None and not is_duration(expires_in):
                expected = f"a number of seconds above 0 and below {_LONGEST_WAIT:g}"
                return f"expires_in must be {expected}; got {shown(expires_in)}"
            return _text_problem("prompt", prompt)


_LONGEST_WAIT = 1e9
"""Seconds, some thirty years: what is further off is a mistake, and no date."""


def _text_problem(name: str, value: object) -> str | None:
    return None if value is None or isinstance(value, str) else f"{name} must be text; got {shown(value)}"


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(key, str) for key in cast("Mapping[object, object]", value))


def is_duration(value: object) -> bool:
    """Say whether a value is a number of seconds that a question can wait for."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST_WAIT


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call as interceptors see it: the function that will really run, with the arguments it will really get.

    Attributes:
        id: The call's id, unique within its batch.
        arguments: What the function gets from the model, as JSON values, each converted to its parameter's type: "7"
            for an int is 7. An argument that the model left out is not in it, whatever the function's default or the
            application's value. Change nothing in it, answer ``Approve(arguments=...)`` instead.
        raw_arguments: The JSON text that the model sent, in its own spelling.
        iteration: The 0-based trip of the loop.
        index: The call's place in its batch, from 0.
        fingerprint: Digest of run, iteration, id, function and arguments.
        prompt: What a person is asked, where an approver is shown the call; "" for nothing in particular.
        signature: What the function takes, ``name=digest`` of each parameter; "" where that is not known.
    """

    id: str
    plugin_name: str
    function_name: str
    fully_qualified_name: str
    arguments: Mapping[str, Any]
    raw_arguments: str
    iteration: int
    index: int
    batch_size: int
    fingerprint: str
    prompt: str = ""
    signature: str = ""


class Interceptor(Protocol):
    """Has a say before a call runs. A plain function, sync or async, satisfies it; None is no opinion."""

    def __call__(self, call: ToolCall, /) -> Decision | Awaitable[Decision | None] | None:
        """Decide, or return None to leave it to the others."""
        ...
