"""The oracle: which functions started without a question to an entitled person, by the contract and the record."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from entitlement.record import Answer, Event, Record, Replied, Spoiled, Started, Waited
from entitlement.rules import Arguments, Asked, Chain, Guards, Question, may_decide
from entitlement.scenarios import Call, Scenario

__all__ = ["Violation", "not_run", "violations"]


@dataclass(frozen=True)
class Violation:
    """What broke the contract: the promise, and the call."""

    promise: str
    call: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.promise}: {self.call} {self.detail}".rstrip()


def violations(record: Record) -> list[Violation]:
    """List what broke the contract, in order."""
    oracle = _Oracle(record.scenario)
    return [found for event in record.events for found in oracle.read(event)]


def not_run(record: Record) -> list[Violation]:
    """List the calls of the outermost runs that no one refused, whose questions were approved, and that did not run."""
    oracle = _Oracle(record.scenario)
    for event in record.events:
        list(oracle.read(event))
    due = [call for _, _, call in record.scenario.calls() if oracle.is_due(call)]
    return [
        Violation("did not run", call.id, repr(call))
        for call in due
        if id(call) not in oracle.started
    ]


@dataclass(frozen=True)
class _Place:
    """Where a call is made: its run, the turn, and the functions and planners around it, the outermost first."""

    run: str
    turn: int
    around: tuple[Call, ...]


@dataclass
class _Oracle:
    scenario: Scenario
    places: dict[int, _Place] = field(default_factory=dict[int, _Place])
    starts: list[str] = field(default_factory=list[str])
    starts_before: dict[tuple[str, int], int] = field(
        default_factory=dict[tuple[str, int], int]
    )
    answers: list[Answer] = field(default_factory=list[Answer])
    started: set[int] = field(default_factory=set[int])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    spoiled: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    def __post_init__(self) -> None:
        for prompt in self.scenario.prompts:
            self._place(prompt.name, prompt.turns, ())

    def _place(
        self, run: str, turns: tuple[tuple[Call, ...], ...], around: tuple[Call, ...]
    ) -> None:
        for number, turn in enumerate(turns):
            for call in turn:
                self.places[id(call)] = _Place(run, number, around)
                self._place(call.id, call.turns, (*around, call))

    def read(self, event: Event) -> Iterator[Violation]:
        """Take in what happened next."""
        match event:
            case Replied(run, turn):
                self.starts_before[run, turn] = len(self.starts)
            case Waited():
                yield from self._waits(event)
            case Answer():
                self._take(event)
            case Spoiled(call):
                place = self.places[id(call)]
                self.refused[id(call)] = "what should have decided it said no decision"
                if self.scenario.door != "filter" and not (
                    place.around and place.around[-1].inner == "invoke"
                ):
                    self.spoiled.add((place.run, place.turn))
            case Started():
                yield from self._start(event)

    # What the rules say

    def _guards(self, call: Call) -> Guards:
        around, guards = (
            [one.inner for one in self.places[id(call)].around],
            self.scenario.guards,
        )
        if (
            guards.filter is not None and "colleague" in around
        ):  # its kernel has no filter
            guards = Guards(
                (
                    replace(guards.chains[0], marks=guards.filter.marks),
                    *guards.chains[1:],
                )
            )
        if "planner" in around and self.scenario.inside != Chain():
            guards = replace(guards, chains=(*guards.chains, self.scenario.inside))
        return guards

    def _afters(self, call: Call) -> list[bool]:
        """Say whether a call comes after one of ``look``; both where the contract leaves it open."""
        place = self.places[id(call)]
        if self.scenario.door == "filter":
            return [True, False]
        outermost = (
            self.places[id(place.around[0])] if place.around else place
        )  # siblings of one batch are not before
        before = self.starts_before.get((outermost.run, outermost.turn), 0)
        if "look" in self.starts[:before]:
            return [True]
        is_open = place.around and "look" in self.starts
        return [True, False] if is_open or self._is_in_history(call) else [False]

    def _is_in_history(self, call: Call) -> bool:
        """Say whether an earlier prompt had a call of ``look``: in a history it counts though it may not have run."""
        place = self.places[id(call)]
        run = place.around[0] if place.around else call
        runs = [
            self.places[id(other)].run
            for _, _, other in self.scenario.calls()
            if _name(other) == "look"
        ]
        return self.places[id(run)].run != self.scenario.prompts[0].name and bool(runs)

    def _judged(self, call: Call, arguments: Arguments) -> list[Asked]:
        guards = self._guards(call)
        return [
            guards.judge(_name(call), arguments, after=after)
            for after in self._afters(call)
        ]

    def _made_by_interceptors(self, call: Call) -> list[Arguments]:
        """List what a call may run with where no person edits it."""
        guards, found = self._guards(call), [call.arguments]
        for after in self._afters(call):
            found += guards.edits(_name(call), call.arguments, after=after)
        return found

    def is_due(self, call: Call) -> bool:
        """Say whether a call of an outermost run is to run if each person asked approves it."""
        place = self.places[id(call)]
        if place.around or call.inner or self.spoiled:
            return False
        guards = self._guards(call)
        for after in self._afters(call):
            given, edited = (
                call.arguments,
                list(guards.edits(_name(call), call.arguments, after=after)),
            )
            given = edited[0] if edited else given
            if guards.judge(_name(call), given, after=after) == "never":
                return False
        return True

    # What people said

    def _may(self, answer: Answer) -> list[Question]:
        """List the questions that the author of this answer may answer."""
        if answer.void:
            return []
        arguments = _plain(answer.call, answer.arguments)
        questions = _questions(self._judged(answer.call, arguments))
        if self._is_second(
            answer
        ):  # the filter asks somebody else, who has the same roles
            guards = self._guards(answer.call)
            for after in self._afters(answer.call):
                questions += guards.may_ask(_name(answer.call), arguments, after=after)
        trusted = (
            answer.inline and answer.hook == "none"
        )  # an application without a hook, which asks by itself
        return [
            one
            for one in questions
            if {*one.roles} == {*answer.roles}
            if trusted or may_decide(answer.person, one.roles, answer.hook)
        ]

    def _is_second(self, answer: Answer) -> bool:
        """Say whether people with these roles had approved the call before, with the same arguments."""
        before = takewhile(lambda one: one is not answer, self.answers)
        same = [
            one
            for one in before
            if one.call is answer.call and one.roles == answer.roles
        ]
        return any(
            one.says == "approve" and one.final == answer.arguments for one in same
        )

    def _take(self, answer: Answer) -> None:
        self.answers.append(answer)
        if answer.says in ("deny", "supply") and self._may(answer):
            self.refused[id(answer.call)] = f"{answer.person} said {answer.says}"

    def _approved(self, call: Call, arguments: Arguments, question: Question) -> bool:
        """Say whether a person who may answer this question has approved the call, or all of its like."""
        for answer in self.answers:
            if answer.says != "approve":
                continue
            answered = self._may(answer)
            is_this = answer.call is call and _plain(call, answer.final) == arguments
            if is_this and any(
                set(one.roles) == set(question.roles) for one in answered
            ):
                return True
            if (
                answer.always is None
                or question not in answered
                or not self._is_alike(answer.call, call)
            ):
                continue
            if answer.always == "function" or _plain(call, answer.final) == arguments:
                return True
        return False

    def _is_alike(self, one: Call, other: Call) -> bool:
        """Say whether a call is of the same function in the same run."""
        if self.scenario.door == "filter":  # a stock kernel has no runs
            return False
        return (
            _name(one) == _name(other)
            and self.places[id(one)].run == self.places[id(other)].run
        )

    def _edited_by_person(self, call: Call, arguments: Arguments) -> bool:
        return any(
            answer.call is call
            and answer.edited is not None
            and dict(answer.edited) == arguments
            for answer in self.answers
            if answer.says == "approve" and self._may(answer)
        )

    # What is to hold

    def _waits(self, waits: Waited) -> Iterator[Violation]:
        guards, arguments, afters = (
            self._guards(waits.call),
            _plain(waits.call, waits.arguments),
            self._afters(waits.call),
        )
        questions = [
            one
            for after in afters
            for one in guards.may_ask(_name(waits.call), arguments, after=after)
        ]
        if not questions:
            yield Violation(
                "waits though nobody asks", waits.call.id, str(dict(waits.arguments))
            )
        elif all({*one.roles} != {*waits.roles} for one in questions):
            yield Violation(
                "is shown with other roles",
                waits.call.id,
                f"{waits.roles} instead of {questions}",
            )

    def _start(self, event: Started) -> Iterator[Violation]:
        self.starts.append(event.function)
        call = event.call or self._guessed(event)
        if call is None:
            yield Violation(
                "ran though nobody called it",
                event.function,
                str(dict(event.arguments)),
            )
            return
        place, arguments = self.places[id(call)], _plain(call, event.arguments)
        shown = f"{event.function} {dict(event.arguments)}"
        if id(call) in self.started:
            yield Violation("ran twice", call.id, shown)
        self.started.add(id(call))
        if (why := self.refused.get(id(call))) is not None:
            yield Violation("ran though it was refused", call.id, f"{shown}: {why}")
        elif (place.run, place.turn) in self.spoiled:
            yield Violation(
                "ran beside a call that could not be decided", call.id, shown
            )
        elif event.function != _name(call):
            yield Violation("another function ran", call.id, shown)
        elif call.inner is None and not self._is_known(call, arguments):
            yield Violation("ran with arguments that nobody gave", call.id, shown)
        else:
            judged = self._judged(call, arguments)
            if all(one == "never" for one in judged):
                yield Violation(
                    f"ran though a rule is against it: {self._how(call)}",
                    call.id,
                    shown,
                )
            elif not any(self._is_approved(call, arguments, one) for one in judged):
                yield Violation(
                    f"ran though nobody entitled was asked: {self._how(call)}",
                    call.id,
                    f"{shown}: {judged}",
                )

    def _is_known(self, call: Call, arguments: Arguments) -> bool:
        return arguments in self._made_by_interceptors(call) or self._edited_by_person(
            call, arguments
        )

    def _is_approved(self, call: Call, arguments: Arguments, asked: Asked) -> bool:
        return asked != "never" and all(
            self._approved(call, arguments, one) for one in asked
        )

    def _how(self, call: Call) -> str:
        """Guess how a call came to run, for the reader of the violation."""
        own = [
            answer
            for answer in self.answers
            if answer.call is call and answer.says == "approve"
        ]
        if (void := next((answer.void for answer in own if answer.void), "")) != "":
            return f"a decision that is {void}"
        if any(self._may(answer) and answer.edited is not None for answer in own):
            return "an edit that nobody reviewed"
        if own:
            return "the decision of one who may not"
        kept = [
            answer
            for answer in self.answers
            if answer.always and _name(answer.call) == _name(call)
        ]
        same = [
            answer
            for answer in kept
            if self.places[id(answer.call)].run == self.places[id(call)].run
        ]
        if same:
            return (
                "always, of another question"
                if any(map(self._may, same))
                else "always, of one who may not"
            )
        return "always, of another run" if kept else "no decision"

    def _guessed(self, event: Started) -> Call | None:
        """Find the call that a function began for, of several decided at once: first one that was not refused."""
        found: list[Call] = []
        for answer in self.answers:
            same = _name(answer.call) == event.function and dict(answer.final) == dict(
                event.arguments
            )
            if (
                same
                and answer.says == "approve"
                and id(answer.call) not in self.started
            ):
                found.append(answer.call)
        found.sort(key=lambda call: id(call) in self.refused)
        return found[0] if found else None


def _name(call: Call) -> str:
    return call.inner or call.function


def _questions(judged: list[Asked]) -> list[Question]:
    return [one for asked in judged if asked != "never" for one in asked]


def _plain(call: Call, arguments: Arguments) -> dict[str, Any]:
    """Leave out what the rules are not about: the goal of what runs inside a call."""
    return {} if call.inner else dict(arguments)
