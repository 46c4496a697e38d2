"""The base errors of the package, and how values and errors are written in messages.

    PlannerExtError
    ├── IllegalTransitionError        a fact cannot happen in this state
    ├── InvalidLimitError             a limit or option has an invalid value
    ├── EndedRunError                 the run has ended, and cannot be continued or changed
    ├── UnansweredRunError            the run ended without an answer, or waits
    │   └── LimitExceededError        ... because of a limit
    ├── RunRefusedError               this process lacks a control that the run began under
    ├── NotAFunctionError             a decorator was applied to something other than a function
    └── InvalidJournalError           a journal or checkpoint cannot be read
        ├── UnusableCheckpointError   ... as it is altered, or not signed with the key
        └── NewerSchemaError          ... as a newer version of this package wrote it

``planner_ext.errors`` draws the whole tree: the errors of the doors derive from these.
"""

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from reprlib import Repr
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

_T = TypeVar("_T")


class PlannerExtError(Exception):
    """The base of all errors that this package raises.

    An error of a lower floor is raised as the class that a door has for it, which is
    also one of Semantic Kernel's. A door declares that class by ``class
    InvalidOptionError(..., door_of=InvalidLimitError)``; once it is imported,
    ``InvalidLimitError(...)`` makes an ``InvalidOptionError``.

    Attributes:
        may_pass: Whether the same may succeed later, so that a kept run is retried.
        outage: The endpoint that did not work, for which a kept run waits, and the
            seconds after which it wants the next request; 0.0 if it does not say.
            None for any other error.
    """

    may_pass: ClassVar[bool] = False
    outage: tuple[str, float] | None = None
    _raised_as: ClassVar[type["PlannerExtError"]]

    def __init_subclass__(
        cls, *, door_of: type["PlannerExtError"] | None = None
    ) -> None:
        super().__init_subclass__()
        cls._raised_as = cls
        if door_of is not None:
            door_of._raised_as = cls

    if not TYPE_CHECKING:  # a signature here would be that of every error

        def __new__(cls, *values, **options):
            """Make the error, of the class that is declared for it at the door."""
            return super().__new__(cls._raised_as, *values, **options)


PlannerExtError._raised_as = PlannerExtError  # pyright: ignore[reportPrivateUsage]  (no __init_subclass__ sets its own)


class IllegalTransitionError(PlannerExtError):
    """A fact cannot happen in this state: the journal is damaged, or this package has a defect."""


class InvalidLimitError(PlannerExtError):
    """A limit or option has an invalid value; the message names it, what it takes and what it got."""


class EndedRunError(PlannerExtError):
    """The run has ended, and cannot be continued or changed."""


class UnansweredRunError(PlannerExtError):
    """The run ended without an answer, or waits."""


class LimitExceededError(UnansweredRunError):
    """A limit of its budget ended the run without an answer."""


class NotAFunctionError(PlannerExtError, TypeError):
    """A decorator of this package was applied to something other than a function."""


class RunRefusedError(PlannerExtError):
    """This process lacks a control that the run began under, or a function in which the run waits; nothing ran."""


class InvalidJournalError(PlannerExtError):
    """A journal or checkpoint is truncated, altered or foreign; nothing of it was used."""


class UnusableCheckpointError(InvalidJournalError):
    """A checkpoint is truncated, altered, unsigned, wrongly signed, too new, or of a kept run; nothing ran."""


class NewerSchemaError(InvalidJournalError):
    """A newer version of this package wrote the journal or checkpoint."""


_WAITING = {
    "paused": "Calls wait for a decision; resume the run with decisions.",
    "asked": "The model asks, and its questions wait for an answer; resume the run with Supply(text) for each.",
}


def waiting_text(status: str) -> str:
    """Say what a run of this status waits for, or ""."""
    return _WAITING.get(status, "")


def not_answered(
    *, status: str, reason: str, limit: str | None, **carried: Any
) -> UnansweredRunError:
    """Make the error for a run without an answer, with the other attributes given."""
    reason = reason or waiting_text(status)
    if limit == "max_tool_calls":
        reason = f"Max number of tool call reached. {reason}"
    kind = LimitExceededError if status == "limit_reached" else UnansweredRunError
    error = kind(reason or f"The run ended {status}.")
    vars(error).update(status=status, limit=limit, **carried)
    return error


_PARTS: Mapping[object, tuple[str, str]] = {
    "policy": ("interceptors", "interceptors=[ApprovalPolicy.from_yaml(path)]"),
    "policies": ("interceptors", "interceptors=[ApprovalPolicy.from_yaml(path)]"),
    "authorize": ("approval", "approval=ApprovalSettings(authorize=...)"),
    "price": (
        "max_cost",
        "price=... beside budget=: it is an option of planner, service, handler and session",
    ),
}
"""The option that a misplaced name belongs to, and how it is written, by the name."""


def nearest(name: object, names: Iterable[str]) -> str:
    """Suggest the nearest of these names, or return ""."""
    known = [*names]
    option, written = _PARTS.get(name, ("", ""))
    if option in known:
        return f" Write {written}."
    found = get_close_matches(str(name), known, n=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def suggests_names(kind: type[_T]) -> type[_T]:
    """Decorate a dataclass: an unknown field is refused with the nearest one."""
    construct: Callable[..., None] = kind.__init__
    known = tuple(inspect.signature(construct).parameters)[1:]

    @wraps(construct)
    def checked(self: object, *values: object, **fields: object) -> None:
        for name in fields:
            if name not in known:
                hint = nearest(name, known)
                listed = ", ".join(known)
                raise TypeError(
                    f"{kind.__name__} has no field {name!r}.{hint} Its fields are {listed}."
                )
        construct(self, *values, **fields)

    type.__setattr__(kind, "__init__", checked)
    return kind


_BY_ID = "Name the calls: decisions={call.id: Approve(by=...)}; pending has the ids."

_PLACES: Mapping[tuple[str, str], str] = {
    (
        "service_id",
        "Kernel",
    ): "The kernel is given to each run: planner.invoke(kernel, goal).",
    (
        "service_id",
        "FunctionCallingStepwisePlannerOptions",
    ): "Give them by name: options=...",
    (
        "service_id",
        "ChatCompletionClientBase",
    ): "Add the service to the kernel, and give its service_id.",
    (
        "options",
        "Kernel",
    ): "The kernel is given to each run: planner.invoke(kernel, goal).",
    (
        "options",
        "Budget",
    ): "It is one of the options: FunctionCallingStepwisePlannerOptions(budget=...).",
    (
        "options",
        "dict",
    ): "Make them of it: FunctionCallingStepwisePlannerOptions(**options).",
    ("The goal", "Kernel"): "The kernel comes first: invoke(kernel, goal).",
    ("kernel", "str"): "The kernel comes first, then the text.",
    (
        "kernel",
        "ChatCompletionClientBase",
    ): "Add the service to a kernel: kernel.add_service(service).",
    (
        "kernel",
        "Checkpoint",
    ): "The kernel comes first: resume(kernel, checkpoint, decisions).",
    (
        "kernel",
        "FunctionCallingStepwisePlanner",
    ): "The planner comes first, then the kernel.",
    ("kernel", "NoneType"): "Make one: Kernel(services=[...], plugins={...}).",
    ("planner", "Kernel"): "The planner comes first, then the kernel.",
    ("inner", "Kernel"): "Give the service in it: kernel.get_service(service_id).",
    ("inner", "str"): "Give the service itself: kernel.get_service(service_id).",
    (
        "checkpoint",
        "Kernel",
    ): "The kernel comes first: resume(kernel, checkpoint, decisions).",
    (
        "checkpoint",
        "FunctionCallingStepwisePlannerResult",
    ): "Give its checkpoint: result.checkpoint.",
    (
        "checkpoint",
        "ChatMessageContent",
    ): "Give its checkpoint: message.metadata['checkpoint'].",
    (
        "checkpoint",
        "AgentResponseItem",
    ): "Give its checkpoint: response.metadata['checkpoint'].",
    (
        "checkpoint",
        "dict",
    ): "Of a message's metadata give the entry 'checkpoint'; decisions come after the checkpoint.",
    ("checkpoint", "Path"): "Read the file: path.read_text().",
    (
        "checkpoint",
        "NoneType",
    ): "A message of a run that was answered has none: look at its status first.",
    ("agent", "AgentThread"): "The agent comes first, then the thread.",
    (
        "agent",
        "ChatCompletionClientBase",
    ): "Give the agent that has this service; a service has a resume of its own.",
    ("thread", "AgentResponseItem"): "Give its thread: response.thread.",
    ("thread", "ChatHistory"): "Make one of it: ChatHistoryAgentThread(history).",
    ("thread", "ChatCompletionAgent"): "The agent comes first, then the thread.",
    ("arguments", "dict"): "Make them of it: KernelArguments(**arguments).",
    ("arguments", "ChatHistory"): "Give it by name: chat_history=...",
    (
        "arguments",
        "PromptExecutionSettings",
    ): "Give them in arguments: KernelArguments(settings=...).",
    (
        "The goal",
        "ChatHistory",
    ): "Give the text, and the conversation by name: chat_history=...",
    ("The goal", "ChatMessageContent"): "Give its text: message.content.",
    ("chat_history", "list"): "Make one of it: ChatHistory(messages=[...]).",
    (
        "chat_history",
        "str",
    ): "Make one: history = ChatHistory(); history.add_user_message(text).",
    ("budget", "int"): "Say what it limits: Budget(max_iterations=...).",
    ("decision", "type"): "Make one of the class: Approve(by=...).",
    ("decision", "bool"): "Give Approve(by=...), or Deny(reason).",
    ("decision", "str"): "Give Approve(by=...), or Deny(reason).",
    ("decisions", "Approve"): _BY_ID,
    ("decisions", "Deny"): _BY_ID,
    ("decisions", "Supply"): _BY_ID,
    ("decisions", "list"): _BY_ID,
    ("decisions", "NoneType"): "Without decisions give {}: the run stays paused.",
    ("policy", "str"): "Read the file: ApprovalPolicy.from_yaml(path).",
    ("policy", "Path"): "Read the file: ApprovalPolicy.from_yaml(path).",
    ("policy", "dict"): "Read the data: ApprovalPolicy.from_dict(data).",
    (
        "interceptors",
        "str",
    ): "Read the file: interceptors=[ApprovalPolicy.from_yaml(path)].",
    (
        "interceptors",
        "Path",
    ): "Read the file: interceptors=[ApprovalPolicy.from_yaml(path)].",
    (
        "interceptors",
        "dict",
    ): "Read the data: interceptors=[ApprovalPolicy.from_dict(data)].",
}
"""Where a misplaced value belongs, by the argument and the value's class."""


def way_out(name: str, value: object) -> str:
    """Say where a misplaced value belongs, or return ""."""
    kinds = (kind.__name__ for kind in type(value).__mro__)
    return next(
        (f" {_PLACES[name, kind]}" for kind in kinds if (name, kind) in _PLACES), ""
    )


def require(name: str, fits: bool, expected: str, value: object) -> None:
    """Refuse a value that does not fit: says what it must be, what it is, and where it belongs.

    Raises:
        InvalidLimitError: If it does not fit.
    """
    if not fits:
        raise InvalidLimitError(
            f"{name} must be {expected}; got {shown(value)}.{way_out(name, value)}"
        )


_MOST_CHARACTERS = 160
_MOST_SEEN = 400
_FUNCTIONS = (FunctionType, BuiltinFunctionType)
_PLAIN = (bool, float, complex, bytes, Enum, type(None))


def shown(value: object) -> str:
    """Write a value for an error message, in one line of at most 160 characters.

    An object is shown by its class alone: its ``repr`` may be long, or secret.
    """
    text = ""
    with suppress(Exception):
        text = _SHOWN.repr(value)
    text = text or _of_class(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def described(error: BaseException) -> str:
    """Write the type and text of an exception in one line, even if its ``__str__`` fails."""
    name = type(error).__name__
    text = text_of(error)
    return f"{name}: {text}" if text else name


def text_of(value: object) -> str:
    """Return ``str`` of an object, even if its ``__str__`` fails."""
    with suppress(Exception, SystemExit):
        return str.__str__(str(value))
    return "its text cannot be read"


@contextmanager
def reading(
    what: str, error: type[PlannerExtError], *, way_out: str = ""
) -> Generator[None]:
    """Turn every defect of what others may have written into one named error; ``what`` is its subject.

    Raises:
        PlannerExtError: ``error``, and those of newer versions as they are.
    """
    try:
        yield
    except (NewerSchemaError, error):
        raise
    except Exception as problem:  # a document may hold anything
        seen = described(problem)
        seen = seen if len(seen) <= _MOST_SEEN else f"{seen[:_MOST_SEEN]}..."
        raise error(
            f"{what} damaged: {seen.rstrip('.')}. {way_out}".rstrip()
        ) from problem


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: ``1 round trip``, ``2 round trips``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def seconds(value: float) -> str:
    """Write a number of seconds: to the hundredth below ten, else whole."""
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


class _Shown(Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxlong = self.maxother = 80
        self.maxlevel = 3

    def repr_instance(self, x: object, level: int) -> str:
        if type(x) in _PLAIN or isinstance(x, Enum):
            text = repr(x)
            return text if len(text) <= self.maxother else f"{text[: self.maxother]}..."
        if isinstance(x, str):
            return self.repr_str(str.__str__(x), level)
        if isinstance(x, type):
            return type.__repr__(x)
        return repr(x) if isinstance(x, _FUNCTIONS) else _of_class(x)


def _of_class(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1] in 'AEIOU' else 'a'} {name}"


_SHOWN = _Shown()
