"""The timeline of a run: what its journal tells a reader, as values.

`TimelineReader` reads fact by fact, and knows what each one changed. Page, terminal,
inbox and AG-UI draw from it. Times are in seconds since the epoch. Texts are not
escaped.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, ClassVar, Literal, TypeAlias, cast

from planner_ext.approval.decisions import (
    DecisionKind,
    DecisionRecord,
    kind_of,
    record_of,
)
from planner_ext.approval.waiting import present_status
from planner_ext.core import facts
from planner_ext.core.fold import apply
from planner_ext.core.limits import LIMIT_OF_PART, Budget
from planner_ext.core.machine import may_have_asked
from planner_ext.core.state import Phase, State
from planner_ext.core.values import Cut, Message, RequestedCall, Usage, frozen
from planner_ext.engine.document import dump_message
from planner_ext.engine.journal import is_in_doubt, is_lost


@frozen
class TimelineMessage:
    """A message that was sent to the model, or its reply.

    Attributes:
        others: A line for each part that is not text.
    """

    role: str
    text: str
    others: tuple[str, ...] = ()


@frozen
class Spending:
    """The consumption of one limit of a run.

    Attributes:
        name: The limit's name in `Budget`.
        function: Of ``max_calls_per_function``.
        used: Round trips, calls, tokens, US dollars, or seconds; of a deadline, since
            the start.
        limit: In the same unit.
        nested: The part that nested runs and prompts used.
    """

    name: str
    function: str = ""
    used: float
    limit: float
    nested: float = 0.0


@frozen
class FailedRequest:
    """A request without a reply.

    Attributes:
        ended: When it failed, or its loss was noticed.
        lost: Whether its process ended before the reply was recorded.
    """

    started: float
    ended: float
    reason: str
    charged: int
    lost: bool


@frozen
class ModelRequest:
    """The request of one iteration.

    Attributes:
        started: When the latest attempt was sent; after a failure, until the next one
            is, when that came.
        ended: When the reply arrived, or the failure after which no attempt was sent
            yet; None while it is under way.
        charged, usage: Without those of failed attempts.
        model: The model's name in the reply, or "".
        withheld: The limit because of which no functions were offered.
        failed: The attempts before the latest one.
    """

    started: float
    ended: float | None = None
    charged: int = 0
    usage: Usage = Usage()
    model: str = ""
    finish_reason: str | None = None
    withheld: str | None = None
    failed: tuple[FailedRequest, ...] = ()


CallOutcome: TypeAlias = Literal[
    "requested",  # not decided yet
    "ready",  # decided, and not started yet
    "waiting",  # for a person's decision or answer
    "in_doubt",  # started when its process ended: a person decides
    "running",
    "ok",
    "failed",
    "timed_out",
    "cancelled",
    "denied",
    "expired",
    "answered",  # by a person, the clarifier, or the run itself, without running
    "unknown",  # no such function
    "invalid",  # unusable arguments
    "withheld",  # because of a limit, a stop, or a final answer
    "final_answer",
    "returned",  # to the caller of the run
]
"""How a call ended, or its present state."""


@frozen
class CallAttempt:
    """One execution of a call's function; without ``ended`` it runs, or its process ended."""

    started: float
    ended: float | None = None


@frozen
class TimelineCall:
    """One call of an iteration.

    Attributes:
        function: Fully qualified; before resolution, as the model wrote it.
        requested: JSON text of the arguments as the model sent them.
        arguments: JSON text of those that the function received, or would receive.
        asked: When a person was first asked to decide it.
        prompt: What that person read.
        roles: Who may decide it; empty for anyone.
        expires: When it stops waiting.
        ended: When its result was recorded.
        result: What the model reads; ``cut`` says how much of it at once.
        error: Type and message of the exception, or why it did not run.
        nested: Whether a run may be made in it.
        spent: What its function charged: requests and nested calls.
        runs: The runs that its function made, in order, as far as they are recorded;
            only in a `Timeline`.
    """

    index: int
    id: str
    function: str
    requested: str
    arguments: str
    outcome: CallOutcome = "requested"
    asked: float | None = None
    prompt: str = ""
    roles: tuple[str, ...] = ()
    expires: float | None = None
    decisions: tuple[DecisionRecord, ...] = ()
    attempts: tuple[CallAttempt, ...] = ()
    ended: float | None = None
    result: str = ""
    cut: Cut | None = None
    error: str = ""
    nested: bool = False
    spent: Usage | None = None
    runs: "tuple[Timeline, ...]" = ()

    @property
    def started(self) -> float | None:
        """When its function first started."""
        if self.attempts:
            return self.attempts[0].started
        return None

    @property
    def shown(self) -> int | None:
        """Characters of a cut result that the model read at once."""
        return None if self.cut is None else self.cut.shown


EventKind: TypeAlias = Literal[
    "paused",
    "resumed",
    "crashed",
    "stopped",
    "budget",
    "refused",
    "question",
    "check",
    "said",
    "callback",
    "violation",
    "ended",
]
"""``refused``: by a shared budget; ``check``: an answer was refused; ``callback``: the
iteration-completed callback ended the run; ``violation``: servers would refuse the
history."""


@frozen
class TimelineEvent:
    """An event of the run other than a request or a call.

    Attributes:
        text: The question, reason, problem or change; "" if the kind says all.
        answer: The answer to a question.
        by: Who answered or made the change; "" if unknown.
    """

    at: float
    kind: EventKind
    text: str = ""
    answer: str | None = None
    by: str = ""


GapKind: TypeAlias = Literal["paused", "left", "crashed", "retry"]
"""``left``: the run had ended, or no process drove it; ``crashed``: its process had
ended; ``retry``: between two attempts of a request."""


@frozen
class Gap:
    """A period in which the run was idle; while it still waits ``ended`` is None."""

    started: float
    ended: float | None
    kind: GapKind


@frozen
class TimelineIteration:
    """One request with its reply, and what followed until the next request.

    Attributes:
        number: From 0; -1 is the plan request.
        messages: Added since the previous request, except replies and results.
        replaced: Whether they replaced the whole transcript.
        ended: The time of its last fact.
    """

    number: int
    messages: tuple[TimelineMessage, ...] = ()
    replaced: bool = False
    request: ModelRequest
    reply: TimelineMessage | None = None
    calls: tuple[TimelineCall, ...] = ()
    events: tuple[TimelineEvent, ...] = ()
    gaps: tuple[Gap, ...] = ()
    ended: float

    @property
    def started(self) -> float:
        """When its first attempt was sent."""
        return (
            self.request.failed[0].started
            if self.request.failed
            else self.request.started
        )


@frozen
class Timeline:
    """The timeline of a run.

    Attributes:
        status: As in a result; ``running``; or ``queued`` without any fact. For a run
            of a store, replace it with that of its `RunRecord`.
        limit: The limit that ended it.
        reason: Why it ended; "" if it was answered.
        started: None without any fact, or without known times.
        until: The time of the newest fact, or ``now``.
        spent: What the run was charged.
        spending: The consumption of each limit that is set.
        lives: The activations that drove it, as far as its facts show.
    """

    run_id: str = ""
    goal: str = ""
    status: str = "queued"
    limit: str | None = None
    reason: str = ""
    started: float | None = None
    ended: float | None = None
    until: float = 0.0
    spent: Usage = Usage()
    spending: tuple[Spending, ...] = ()
    lives: int = 0
    plan: str = ""
    answer: str = ""
    iterations: tuple[TimelineIteration, ...] = ()

    @property
    def events(self) -> tuple[TimelineEvent, ...]:
        """The events of all iterations."""
        return tuple(
            event for iteration in self.iterations for event in iteration.events
        )

    @property
    def calls(self) -> tuple[TimelineCall, ...]:
        """The calls of all iterations."""
        return tuple(call for iteration in self.iterations for call in iteration.calls)


def timeline_of(journal: Iterable[facts.Fact], *, now: float | None = None) -> Timeline:
    """Compute the timeline of a run.

    Args:
        journal: The run's facts: of a result, a checkpoint, a store or a stream.
        now: The end of unfinished work; None: the time of the newest fact.

    Raises:
        IllegalTransitionError: If a fact cannot follow the ones before it.
    """
    reader = TimelineReader()
    for fact in journal:
        reader.read(fact)
    return reader.timeline(now)


class TimelineReader:
    """Reads the journal of one run, fact by fact."""

    def __init__(self) -> None:
        self.state = State()
        self.calls: list[TimelineCall] = []
        self._changed: set[int] = set()
        self._iterations: list[TimelineIteration] = []
        self._started: float | None = None
        self._plan = ""
        self._lives = 0
        self._before_stop = 0.0
        self._messages: tuple[TimelineMessage, ...] = ()
        self._replaced = False
        self._inside: dict[tuple[int, int], TimelineReader] = {}

    def read(self, fact: facts.Fact) -> list[TimelineCall]:
        """Take in the next fact; return the calls that it changed.

        Raises:
            IllegalTransitionError: If the fact cannot follow the ones before it.
        """
        after = apply(self.state, fact)
        self._changed = set()
        if self._follows_crash(fact):
            self._crash(fact)
        if isinstance(fact, facts.HappenedInside):
            self._happened_inside(fact, after.usage - self.state.usage)
        read = self._readers.get(fact.type)
        if read is not None:
            read(self, fact)
        if self._iterations:
            self._change(ended=max(self._iterations[-1].ended, fact.at))
        self.state = after
        return [self.calls[index] for index in sorted(self._changed)]

    def timeline(self, now: float | None = None) -> Timeline:
        """Return the timeline so far; ``now`` as in `timeline_of`."""
        state = self.state
        end = state.ended
        if self._started is None:
            return Timeline(until=now or 0.0)
        until = max(state.at, now or 0.0)
        iterations = tuple(self._all_iterations())
        return Timeline(
            run_id=state.run_id,
            goal=state.goal,
            status=present_status(state),
            limit=None if end is None else end.limit,
            reason="" if end is None else end.reason,
            started=self._started,
            ended=None if end is None else end.at,
            until=until,
            spent=state.usage,
            spending=tuple(
                _spending(
                    state, iterations, self._started, until if end is None else end.at
                )
            ),
            lives=self._lives,
            plan=self._plan,
            answer="" if end is None else end.answer,
            iterations=iterations,
        )

    # The newest iteration, and the calls of its reply.

    @property
    def _replied(self) -> bool:
        return not self._iterations or self._iterations[-1].reply is not None

    @property
    def _is_own_request(self) -> bool:
        """Whether a request made now is the run's own, and not a clarifier's."""
        return self.state.phase in (Phase.PLANNING, Phase.ASKING, Phase.COMPLETING)

    @property
    def _next_number(self) -> int:
        if self.state.phase is Phase.PLANNING:
            return -1
        return self.state.iteration

    def _all_iterations(self) -> Iterator[TimelineIteration]:
        yield from self._iterations[:-1]
        if self._iterations:
            yield replace(self._iterations[-1], calls=self._calls_with_runs())
        if (
            self.state.ended is None
            and self._replied
            and self._is_own_request
            and may_have_asked(self.state)
        ):
            yield self._new_iteration(self._next_number, self.state.at)

    def _new_iteration(self, number: int, started: float) -> TimelineIteration:
        return TimelineIteration(
            number=number,
            messages=self._messages,
            replaced=self._replaced,
            request=ModelRequest(started=started),
            ended=started,
        )

    def _open(self, number: int, started: float) -> None:
        if not self._replied:
            return
        if self._iterations:
            self._change(calls=self._calls_with_runs())
        self.calls = []
        self._inside = {}
        self._iterations.append(self._new_iteration(number, started))
        self._messages = ()
        self._replaced = False

    def _calls_with_runs(self) -> tuple[TimelineCall, ...]:
        calls = list(self.calls)
        for index, _ in sorted(self._inside):
            runs = tuple(
                reader.timeline()
                for (of, _), reader in sorted(self._inside.items(), key=_number)
                if of == index
            )
            calls[index] = replace(calls[index], runs=runs)
        return tuple(calls)

    def _change(self, **changes: Any) -> None:
        self._iterations[-1] = replace(self._iterations[-1], **changes)

    def _change_request(self, **changes: Any) -> None:
        self._change(request=replace(self._iterations[-1].request, **changes))

    def _change_call(self, index: int, **changes: Any) -> None:
        self.calls[index] = replace(self.calls[index], **changes)
        self._changed.add(index)

    def _add_event(self, at: float, kind: EventKind, **more: Any) -> None:
        if not self._iterations:
            self._open(self._next_number, at)
        event = TimelineEvent(at=at, kind=kind, **more)
        self._change(events=(*self._iterations[-1].events, event))

    def _add_gap(self, kind: GapKind, started: float, ended: float | None) -> None:
        gap = Gap(started=started, ended=ended, kind=kind)
        self._change(gaps=(*self._iterations[-1].gaps, gap))

    def _end_pause(self, at: float) -> None:
        *earlier, pause = self._iterations[-1].gaps
        self._change(gaps=(*earlier, replace(pause, ended=at)))

    def _follows_crash(self, fact: facts.Fact) -> bool:
        """Whether only a process that found the run interrupted writes this fact."""
        match fact:
            case facts.RequestFailed():
                return is_lost(fact)
            case facts.CallDecided(verdict="run", person=False):
                return self.calls[fact.index].outcome == "running"
            case facts.CallFinished():
                running = self.calls[fact.index].outcome == "running"
                return running and is_in_doubt(fact) and self.state.stopping is None
            case facts.Paused():
                return any(call.outcome == "running" for call in self.calls)
            case facts.CallLeft(index=index):
                assert self.state.batch is not None, "a call is left in a batch"
                waits = self.state.batch.calls[index].waits_inside
                return self.calls[index].outcome == "running" and not waits
            case facts.HappenedInside(index=index):
                failed = facts.unwrapped(fact)
                running = self.calls[index].outcome == "running"
                lost = isinstance(failed, facts.RequestFailed) and is_lost(failed)
                return running and lost
            case _:
                return False

    def _crash(self, fact: facts.Fact) -> None:
        """Note that the process ended after the newest fact; started calls are in doubt."""
        before = self.state.at
        self._lives += 1
        if isinstance(fact, facts.RequestFailed) and self._is_own_request:
            self._open(fact.iteration, before)
        for index, call in enumerate(self.calls):
            if call.outcome == "running":
                self._change_call(index, outcome="in_doubt")
        self._add_event(before, "crashed")
        self._add_gap("crashed", before, fact.at)

    # One function for each kind of fact that shows; ``state`` is the fold before it.

    def _run_started(self, fact: facts.RunStarted) -> None:
        self._started = fact.at
        self._lives = 1
        self._messages = tuple(map(_read_message, fact.messages))

    def _model_asked(self, fact: facts.ModelAsked) -> None:
        if fact.index is not None or not self._is_own_request:
            return
        if not self._replied and self.state.intent == "failed":
            self._add_gap("retry", self.state.at, fact.at)
        self._open(fact.iteration, fact.at)
        self._change_request(started=fact.at, ended=None)

    def _request_failed(self, fact: facts.RequestFailed) -> None:
        if not self._is_own_request:
            return
        self._open(fact.iteration, self.state.at)
        request = self._iterations[-1].request
        failed = FailedRequest(
            started=request.started,
            ended=fact.at,
            reason=fact.reason,
            charged=facts.cost_of(fact, self.state.rules).iterations,
            lost=is_lost(fact),
        )
        self._change_request(
            started=fact.at, ended=fact.at, failed=(*request.failed, failed)
        )

    def _planned(self, fact: facts.Planned) -> None:
        self._plan = fact.plan
        self._open(-1, self.state.at)
        charged = facts.cost_of(fact, self.state.rules).iterations
        self._change_request(ended=fact.at, charged=charged, usage=fact.usage)
        self._change(reply=TimelineMessage(role="assistant", text=fact.plan))
        self._replace_messages(fact.messages)

    def _model_replied(self, fact: facts.ModelReplied) -> None:
        self._open(fact.iteration, self.state.at)
        self._change_request(
            ended=fact.at,
            charged=facts.cost_of(fact, self.state.rules).iterations,
            usage=fact.usage,
            model=_field(fact.message, "ai_model_id"),
            finish_reason=fact.finish_reason,
            withheld=fact.withheld,
        )
        # The calls have lines of their own.
        message = _read_message(fact.message, with_calls=False)
        self._change(
            number=fact.iteration,
            reply=replace(message, text=fact.text or message.text),
        )
        self.calls = [_requested(index, call) for index, call in enumerate(fact.calls)]
        self._changed.update(range(len(self.calls)))

    def _call_decided(self, fact: facts.CallDecided) -> None:
        assert self.state.batch is not None, "calls are decided in a batch"
        call = self.calls[fact.index]
        request = self.state.batch.calls[fact.index].request
        record = record_of(fact, request)
        repeated = record is not None and any(
            replace(one, at=record.at) == record for one in call.decisions
        )
        asks = fact.verdict == "defer"
        settled = not asks and fact.verdict not in ("run", "external")
        self._change_call(
            fact.index,
            function=fact.function,
            arguments=fact.arguments_of(request),
            outcome=_outcome_of(fact),
            asked=fact.at if asks and call.asked is None else call.asked,
            prompt=fact.prompt or call.prompt,
            roles=fact.roles or call.roles,
            expires=fact.expires_at if asks else None,
            decisions=call.decisions
            if record is None or repeated
            else (*call.decisions, record),
            ended=fact.at if settled else None,
            result=fact.answer if settled else "",
            cut=fact.cut,
            error=fact.reason
            if fact.verdict == "answer" and kind_of(fact) not in ("supply", "expire")
            else "",
            nested=fact.nested,
            spent=self._spent_by(fact.index),
        )

    def _calls_withheld(self, fact: facts.CallsWithheld) -> None:
        for index in fact.indexes:
            self._change_call(
                index,
                outcome="withheld",
                ended=fact.at,
                result=fact.answer,
                error=fact.limit or "",
                spent=self._spent_by(index),
            )

    def _call_started(self, fact: facts.CallStarted) -> None:
        attempts = (*self.calls[fact.index].attempts, CallAttempt(started=fact.at))
        self._change_call(
            fact.index, function=fact.function, outcome="running", attempts=attempts
        )

    def _happened_inside(self, fact: facts.HappenedInside, charged: Usage) -> None:
        reader = self._inside.setdefault((fact.index, fact.run), TimelineReader())
        reader.read(fact.fact)
        spent = self.calls[fact.index].spent
        if charged != Usage():
            spent = charged if spent is None else spent + charged
        before = self.calls[fact.index]
        self.calls[fact.index] = replace(before, outcome="running", spent=spent)
        if before.outcome != "running":
            self._changed.add(fact.index)

    def _call_left(self, fact: facts.CallLeft) -> None:
        assert self.state.batch is not None, "a call is left in a batch"
        waits = self.state.batch.calls[fact.index].waits_inside
        self._change_call(
            fact.index,
            outcome="waiting" if waits else "running",
            spent=self._spent_by(fact.index, fact.spent),
        )

    def _call_finished(self, fact: facts.CallFinished) -> None:
        call = self.calls[fact.index]
        *earlier, last = call.attempts
        if call.outcome == "running":
            last = replace(last, ended=fact.at)
        self._change_call(
            fact.index,
            outcome=fact.outcome,
            attempts=(*earlier, last),
            ended=fact.at,
            result=fact.result,
            cut=fact.cut,
            error=fact.error,
            spent=self._spent_by(fact.index, fact.spent),
        )

    def _spent_by(self, index: int, spent: Usage | None = None) -> Usage | None:
        assert self.state.batch is not None, "calls are charged in a batch"
        before = self.calls[index].spent
        recorded = self.state.batch.calls[index].recorded
        if spent is None and recorded != Usage():
            spent = recorded
        if before is None or spent is None:
            return spent or before
        return before + spent

    def _clarified(self, fact: facts.Clarified) -> None:
        question = (
            fact.question
            if fact.denied is None
            else f"{fact.question} ({fact.denied or 'not answered'})"
        )
        self._add_event(
            fact.at, "question", text=question, answer=fact.answer, by=fact.by
        )
        if fact.index is not None and fact.answer is not None:
            outcome: CallOutcome = "answered" if fact.denied is None else "denied"
            self._change_call(
                fact.index, outcome=outcome, ended=fact.at, result=fact.answer
            )

    def _iteration_completed(self, fact: facts.IterationCompleted) -> None:
        if fact.terminate:
            self._add_event(fact.at, "callback", text=fact.reason)
        if fact.messages is not None:
            self._replace_messages(fact.messages)

    def _replace_messages(self, messages: Iterable[Message]) -> None:
        self._messages = tuple(map(_read_message, messages))
        self._replaced = True

    def _message_added(self, fact: facts.MessageAdded) -> None:
        message = _read_message(fact.message)
        self._messages = (*self._messages, message)
        if fact.purpose == "said":
            self._add_event(fact.at, "said", text=message.text, by=fact.by)

    def _answer_checked(self, fact: facts.AnswerChecked) -> None:
        if fact.problem:
            self._add_event(fact.at, "check", text=fact.problem)

    def _stop_requested(self, fact: facts.StopRequested) -> None:
        if self.state.phase is Phase.PAUSED:
            self._end_pause(fact.at)
        self._add_event(fact.at, "stopped", text=fact.reason)
        self._before_stop = self.state.at

    def _budget_changed(self, fact: facts.BudgetChanged) -> None:
        self._add_event(
            fact.at, "budget", text=_changed_limits(self.state, fact.limits), by=fact.by
        )

    def _shared_budgets_checked(self, fact: facts.SharedBudgetsChecked) -> None:
        if fact.limit is not None:
            self._add_event(fact.at, "refused", text=fact.reason)

    def _paused(self, fact: facts.Paused) -> None:
        for index, call in enumerate(self.calls):
            if call.outcome == "in_doubt" and call.asked is None:
                self._change_call(index, asked=fact.at)
        self._add_event(fact.at, "paused")
        self._add_gap("paused", fact.at, None)

    def _resumed(self, fact: facts.Resumed) -> None:
        self._lives += 1
        if self.state.phase is Phase.PAUSED:
            self._end_pause(fact.at)
        elif self._iterations:
            self._add_gap("left", self.state.at, fact.at)
        self._add_event(
            fact.at, "resumed", text=_changed_limits(self.state, fact.limits)
        )

    def _ended(self, fact: facts.Ended) -> None:
        if fact.returned:
            for index, call in enumerate(self.calls):
                if call.ended is None and call.outcome != "returned":
                    self._change_call(index, outcome="returned")
        self._add_event(fact.at, "ended", text=fact.reason)
        if (
            self.state.stopping is not None
            and fact.at - self._before_stop > fact.seconds + _NOTICED
        ):
            # The run was idle when it was stopped.
            self._add_gap("left", self._before_stop, fact.at)

    _readers: ClassVar[dict[str, Callable[[Any, Any], None]]] = {
        "RunStarted": _run_started,
        "Planned": _planned,
        "MessageAdded": _message_added,
        "ModelAsked": _model_asked,
        "RequestFailed": _request_failed,
        "ModelReplied": _model_replied,
        "CallDecided": _call_decided,
        "CallsWithheld": _calls_withheld,
        "CallStarted": _call_started,
        "CallFinished": _call_finished,
        "CallLeft": _call_left,
        "Clarified": _clarified,
        "IterationCompleted": _iteration_completed,
        "AnswerChecked": _answer_checked,
        "StopRequested": _stop_requested,
        "BudgetChanged": _budget_changed,
        "SharedBudgetsChecked": _shared_budgets_checked,
        "Paused": _paused,
        "Resumed": _resumed,
        "Ended": _ended,
    }


def _number(item: tuple[tuple[int, int], TimelineReader]) -> tuple[int, int]:
    return item[0]


_NOTICED = 1.0
"""Idle seconds before a stop that are not shown as a gap: times are rounded."""


def _outcome_of(fact: facts.CallDecided) -> CallOutcome:
    if fact.verdict != "answer":
        return _OUTCOME_OF_VERDICT[fact.verdict]
    decision = kind_of(fact)
    return (
        _OUTCOME_OF_KIND.get(fact.kind, "withheld")
        if decision is None
        else _OUTCOME_OF_DECISION[decision]
    )


_OUTCOME_OF_VERDICT: dict[str, CallOutcome] = {
    "run": "ready",
    "defer": "waiting",
    "deny": "denied",
    "external": "returned",
    "final_answer": "final_answer",
}
_OUTCOME_OF_DECISION: dict[DecisionKind, CallOutcome] = {
    "supply": "answered",
    "expire": "expired",
    "deny": "denied",
}
_OUTCOME_OF_KIND: dict[str, CallOutcome] = {
    "unknown": "unknown",
    "invalid": "invalid",
    "read": "answered",
}


def _spending(
    state: State, iterations: Iterable[TimelineIteration], started: float, at: float
) -> Iterator[Spending]:
    limits = state.rules.limits
    calls = (call for iteration in iterations for call in iteration.calls)
    spent = (call.spent for call in calls if call.spent is not None)
    inside = sum(spent, Usage())
    for part, name in LIMIT_OF_PART.items():
        limit = getattr(limits, name)
        if limit is not None:
            yield Spending(
                name=name,
                used=state.usage.by_part[part],
                limit=limit,
                nested=inside.by_part[part],
            )
    if limits.deadline is not None:
        yield Spending(
            name="deadline",
            used=at - started,
            limit=limits.deadline.timestamp() - started,
        )
    for function, limit in limits.max_calls_per_function.items():
        starts = state.usage.calls_by_function.get(function, 0)
        yield Spending(
            name="max_calls_per_function", function=function, used=starts, limit=limit
        )
    in_row = {
        "max_consecutive_errors": state.errors_in_row,
        "max_repeated_calls": max(state.calls_by_digest.values(), default=0),
        "max_repeated_denials": state.denials_in_row,
    }
    for name, count in in_row.items():
        limit = getattr(limits, name)
        if limit is not None:
            yield Spending(name=name, used=count, limit=limit)


def _changed_limits(state: State, after: Budget | None) -> str:
    before = state.rules.limits
    changes = [
        f"{name} {getattr(before, name)} → {getattr(after, name)}"
        for name in (() if after is None else Budget.__dataclass_fields__)
        if getattr(before, name) != getattr(after, name)
    ]
    return ", ".join(changes)


def _requested(index: int, call: RequestedCall) -> TimelineCall:
    return TimelineCall(
        index=index,
        id=call.id,
        function=call.name,
        requested=call.arguments,
        arguments=call.arguments,
    )


# Messages: Semantic Kernel's objects, or their JSON; read without that library.

_LONGEST_DATA = 500
"""Characters of a part that is not text beyond which its size is shown instead."""


def _field(message: Message, name: str) -> str:
    value = (
        cast("dict[str, Any]", message).get(name)
        if isinstance(message, dict)
        else getattr(message, name, None)
    )
    return value if isinstance(value, str) else ""


def _read_message(message: Message, *, with_calls: bool = True) -> TimelineMessage:
    dumped = dump_message(message)
    if not isinstance(dumped, dict):
        return TimelineMessage(role="", text=str(dumped))
    values = cast("dict[str, Any]", dumped)
    items = values.get("items")
    listed = cast("list[Any]", items if isinstance(items, list) else [])
    parts = [cast("dict[str, Any]", part) for part in listed if isinstance(part, dict)]
    texts = [part["text"] for part in parts if _is_text(part)]
    text = (
        "\n".join(texts)
        if parts
        else str(values.get("content") or values.get("text") or "")
    )
    shown = (
        part
        for part in parts
        if with_calls or part.get("content_type") != "function_call"
    )
    others = tuple(_described(part) for part in shown if not _is_text(part))
    return TimelineMessage(role=str(values.get("role", "")), text=text, others=others)


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("content_type") == "text" and isinstance(part.get("text"), str)


def _described(part: dict[str, Any]) -> str:
    match part:
        case {"content_type": "function_call"}:
            return f"calls {part.get('name')}({part.get('arguments') or ''})"
        case {"content_type": "function_result"}:
            return f"returns {part.get('name')}: {part.get('result')}"
        case _:
            kind = part.get("content_type", "part")
            given = {
                name: value
                for name, value in part.items()
                if name not in ("content_type", "metadata") and value
            }
            shown = (
                f"{name}: {len(value):,} characters"
                if len(value) > _LONGEST_DATA and name != "text"
                else f"{name}: {value}"
                for name, value in ((name, str(value)) for name, value in given.items())
            )
            return f"{kind}, {', '.join(shown)}"
