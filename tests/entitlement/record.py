"""What happened in a situation, in order, as its functions, its model and its people saw it."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from entitlement.rules import Arguments, Hook
from entitlement.scenarios import Call, Scenario

__all__ = [
    "MISSING",
    "Answer",
    "Event",
    "Record",
    "Replied",
    "Spoiled",
    "Started",
    "Waited",
    "within",
]

MISSING = -1
"""The default of an amount that nobody gave."""

_PATH: ContextVar[tuple[str, ...]] = ContextVar("path", default=())


@contextmanager
def within(call_id: str) -> Iterator[None]:
    """Note that what happens here happens in a call."""
    token = _PATH.set((*_PATH.get(), call_id))
    try:
        yield
    finally:
        _PATH.reset(token)


@dataclass(frozen=True)
class Replied:
    """The model replied in a run."""

    run: str
    turn: int


@dataclass(frozen=True)
class Waited:
    """A call was shown as waiting for a person."""

    call: Call
    arguments: Arguments
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """A person decided a call, as it was shown to them.

    Attributes:
        says: ``approve``, ``deny``, ``supply`` or ``leave``.
        arguments: Those that were shown.
        roles: Who was to decide, as it was shown.
        edited: Those that an approval is for, where it changes them.
        always: As in an approval.
        void: Why it cannot count, from any person: the user said something else meanwhile, or it names another call.
        hook: What checks who decides, where the decision is taken.
        inline: Whether the application's own approver asked them, which is shown the roles.
    """

    call: Call
    person: str | None
    says: str
    arguments: Arguments
    roles: tuple[str, ...] = ()
    edited: Arguments | None = None
    always: str | None = None
    void: str = ""
    hook: Hook = "by roles"
    inline: bool = False

    @property
    def final(self) -> Arguments:
        """What the call is to run with."""
        return self.arguments if self.edited is None else self.edited


@dataclass(frozen=True)
class Spoiled:
    """An interceptor, approver or hook that should have decided a call returned an invalid answer."""

    call: Call


@dataclass(frozen=True)
class Started:
    """A function began, with its real arguments. The call is None where nothing tells which it was."""

    call: Call | None
    function: str
    arguments: Arguments


Event: TypeAlias = Replied | Waited | Answer | Spoiled | Started


@dataclass
class Record:
    """Everything that happened, in order.

    Attributes:
        turns: How many replies the model gave in each run.
    """

    scenario: Scenario
    events: list[Event] = field(default_factory=list[Event])
    turns: dict[str, int] = field(default_factory=lambda: defaultdict[str, int](int))

    def __post_init__(self) -> None:
        self._calls: dict[str, list[tuple[str, int, Call]]] = defaultdict(list)
        for run, turn, call in self.scenario.calls():
            self._calls[call.id].append((run, turn, call))

    def knows(self, call_id: str) -> bool:
        """Say whether a model's call has this id."""
        return call_id in self._calls

    def call_of(self, call_id: str) -> Call:
        """Find the call that an id means now: in a run that uses an id again, that of the newest reply."""
        found = self._calls[call_id]
        now = [call for run, turn, call in found if turn == self.turns[run] - 1]
        return (now or [found[-1][2]])[-1]

    def current(self) -> Call | None:
        """Find the call in which this code runs."""
        path = _PATH.get()
        return self.call_of(path[-1]) if path else None

    def add(self, event: Event) -> None:
        """Note what happened."""
        self.events.append(event)

    def take_back(self, answer: "Answer") -> None:
        """Forget an answer that was refused."""
        self.events[:] = [event for event in self.events if event is not answer]

    def started(self, function: str, **arguments: Any) -> None:
        """Note that a function began."""
        given = {name: value for name, value in arguments.items() if value != MISSING}
        self.add(Started(self.current(), function, given))
