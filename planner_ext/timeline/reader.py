"""Computes the timeline of a run from its facts alone."""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, cast

from planner_ext.approval.decisions import present_status, record_of
from planner_ext.core import facts
from planner_ext.core.fold import apply
from planner_ext.core.limits import LIMIT_OF_PART, Budget, Consumption
from planner_ext.core.machine import IN_DOUBT, may_have_asked
from planner_ext.core.state import Phase, State
from planner_ext.core.values import Message, RequestedCall
from planner_ext.engine.document import dump_message
from planner_ext.engine.journal import REQUEST_LOST
from planner_ext.timeline.model import (
    CallAttempt,
    CallOutcome,
    EventKind,
    FailedRequest,
    Gap,
    ModelRequest,
    Spending,
    Timeline,
    TimelineCall,
    TimelineEvent,
    TimelineIteration,
    TimelineMessage,
)


def timeline_of(journal: Iterable[facts.Fact], *, now: float | None = None) -> Timeline:
    """Compute the timeline of a run.

    Args:
        journal: The run's facts: of a result, a checkpoint or a store, or those that a stream has yielded.
        now: The end of unfinished work, in seconds since the epoch; None is the time of the newest fact.

    Raises:
        IllegalTransitionError: If a fact cannot follow the ones before it.
    """
    reader = _Reader()
    for fact in journal:
        reader.read(fact)
    return reader.timeline(now)


@dataclass(slots=True)
class _Reader:
    """Reads facts one by one. ``state`` is the fold before the fact that is read, ``last`` the fact before it."""

    state: State = field(default_factory=State)
    last: facts.Fact | None = None
    begun: facts.RunStarted | None = None
    plan: str = ""
    lives: int = 0
    lost: set[int] = field(default_factory=set[int])
    before_stop: float = 0.0
    iterations: list[TimelineIteration] = field(default_factory=list[TimelineIteration])
    calls: list[TimelineCall] = field(default_factory=list[TimelineCall])
    messages: tuple[TimelineMessage, ...] = ()
    replaced: bool = False
    replied: bool = True

    def read(self, fact: facts.Fact) -> None:
        after = apply(self.state, fact)
        self._notice_crash(fact)
        if (read := self.readers.get(fact.type)) is not None:
            read(self, fact)
        if self.iterations:
            self.iterations[-1] = replace(self.iterations[-1], ended=max(self.iterations[-1].ended, fact.at))
        self.state = after
        self.last = fact

    def timeline(self, now: float | None) -> Timeline:
        state = self.state
        ended = self.state.ended
        if self.begun is None:
            return Timeline(until=now or 0.0)
        until = max(state.at, now or 0.0)
        if ended is None and may_have_asked(state) and self.replied:
            self._open(state.iteration, state.at)
        self._close_calls()
        return Timeline(
            run_id=state.run_id,
            goal=state.goal,
            status=present_status(state),
            limit=None if ended is None else ended.limit,
            reason="" if ended is None else ended.reason,
            started=self.begun.at,
            ended=None if ended is None else ended.at,
            until=until,
            spent=state.ledger,
            spending=tuple(self._spending(state, ended.at if ended is not None else until)),
            lives=self.lives,
            plan=self.plan,
            answer="" if ended is None else ended.answer,
            iterations=tuple(self.iterations),
        )

    def _spending(self, state: State, at: float) -> Iterator[Spending]:
        limits = state.rules.limits
        ledger = state.ledger
        nested = self._nested().by_part
        used = ledger.by_part
        for part, name in LIMIT_OF_PART.items():
            if (limit := getattr(limits, name)) is not None:
                yield Spending(name=name, used=used[part], limit=limit, nested=nested[part])
        assert self.begun is not None, "a run that has spent has begun"
        if limits.deadline is not None:
            start = self.begun.at
            yield Spending(name="deadline", used=at - start, limit=limits.deadline.timestamp() - start)
        for function, limit in limits.max_calls_per_function.items():
            used_by = ledger.calls_by_function.get(function, 0)
            yield Spending(name="max_calls_per_function", function=function, used=used_by, limit=limit)
        in_row = {
            "max_consecutive_errors": ledger.errors_in_row,
            "max_repeated_calls": max(ledger.calls_by_digest.values(), default=0),
            "max_repeated_denials": ledger.denials_in_row,
        }
        for name, count in in_row.items():
            if (limit := getattr(limits, name)) is not None:
                yield Spending(name=name, used=count, limit=limit)

    def _nested(self) -> Consumption:
        total = Consumption()
        for iteration in self.iterations:
            for call in iteration.calls:
                total += call.spent or Consumption()
        return total

    # The open iteration.

    def _open(self, number: int, started: float) -> None:
        """Begin an iteration with its request, unless it has begun."""
        if not self.replied:
            return
        self._close_calls()
        request = ModelRequest(started=started)
        self.iterations.append(
            TimelineIteration(
                number=number, messages=self.messages, replaced=self.replaced, request=request, ended=started
            )
        )
        self.messages = ()
        self.replaced = False
        self.replied = False

    def _close_calls(self) -> None:
        if self.calls:
            self.iterations[-1] = replace(self.iterations[-1], calls=tuple(self.calls))
            self.calls = []

    def _change(self, **changes: Any) -> None:
        self.iterations[-1] = replace(self.iterations[-1], **changes)

    def _event(self, at: float, kind: EventKind, **more: Any) -> None:
        if not self.iterations:
            self._open(-1 if self.state.rules.plan else 0, at)
        event = TimelineEvent(at=at, kind=kind, **more)
        self._change(events=(*self.iterations[-1].events, event))

    def _gap(self, kind: Literal["paused", "left", "crashed", "retry"], started: float, ended: float | None) -> None:
        gaps = self.iterations[-1].gaps
        if gaps and gaps[-1].ended is None:
            gaps = gaps[:-1]
        self._change(gaps=(*gaps, Gap(started=started, ended=ended, kind=kind)))

    def _resume_gap(self, at: float) -> None:
        """End the open pause, if any."""
        if self.iterations and (gaps := self.iterations[-1].gaps) and gaps[-1].ended is None:
            self._gap(gaps[-1].kind, gaps[-1].started, at)

    def _notice_crash(self, fact: facts.Fact) -> None:
        """Add the end of a process before a fact that only its successor writes."""
        if self.last is None or not _follows_crash(self.state, fact, self.lost):
            return
        before = self.last.at
        self.lost = {index for index, call in enumerate(self.calls) if call.outcome == "running"}
        self.lives += 1
        if isinstance(fact, facts.RequestFailed):
            self._open(fact.iteration, before)
        self._event(before, "crashed")
        self._gap("crashed", before, fact.at)

    # One function for each kind of fact on the timeline.

    def _run_started(self, fact: facts.RunStarted) -> None:
        self.begun = fact
        self.lives = 1
        self.messages = tuple(map(_read_message, fact.messages))

    def _model_asked(self, fact: facts.ModelAsked) -> None:
        if fact.index is not None:
            return
        if self.replied:
            self._open(fact.iteration, fact.at)
        elif isinstance(self.last, facts.RequestFailed) and self.iterations:
            self._gap("retry", self.last.at, fact.at)
        self._change(request=replace(self.iterations[-1].request, started=fact.at))

    def _request_failed(self, fact: facts.RequestFailed) -> None:
        assert self.last is not None, "a run starts before its requests"
        self._open(fact.iteration, self.last.at)
        request = self.iterations[-1].request
        lost = fact.reason == REQUEST_LOST
        failed = FailedRequest(
            started=request.started, ended=fact.at, reason=fact.reason, charged=fact.iterations, lost=lost
        )
        self._change(request=replace(request, started=fact.at, failed=(*request.failed, failed)))

    def _planned(self, fact: facts.Planned) -> None:
        self.plan = fact.plan
        charged = fact.iterations if self.state.rules.charge_plan else 0
        self._reply(fact, -1, TimelineMessage(role="assistant", text=fact.plan), charged=charged)
        self.messages = tuple(map(_read_message, fact.messages))
        self.replaced = True

    def _model_replied(self, fact: facts.ModelReplied) -> None:
        message = _read_message(fact.message)
        model = _field(fact.message, "ai_model_id")
        reply = replace(message, text=fact.text or message.text, others=_not_calls(message.others))
        more = {"model": model, "finish_reason": fact.finish_reason, "withheld": fact.withheld}
        self._reply(fact, fact.iteration, reply, charged=fact.iterations, **more)
        self.calls, self.lost = [_requested(index, call) for index, call in enumerate(fact.calls)], set()

    def _reply(
        self, fact: facts.Planned | facts.ModelReplied, number: int, reply: TimelineMessage, **more: Any
    ) -> None:
        assert self.last is not None, "a run starts before its replies"
        self._open(number, self.last.at)
        request = replace(self.iterations[-1].request, ended=fact.at, usage=fact.usage, **more)
        self._change(number=number, request=request, reply=reply)
        self.replied = True

    def _call_decided(self, fact: facts.CallDecided) -> None:
        assert self.state.batch is not None, "calls are decided in a batch"
        call = self.calls[fact.index]
        request = self.state.batch.calls[fact.index].request
        record = record_of(fact, request)
        repeated = record is not None and any(replace(one, at=record.at) == record for one in call.decisions)
        asks = fact.verdict == "defer"
        ended = None if asks or fact.verdict in ("run", "external") else fact.at
        self.calls[fact.index] = replace(
            call,
            function=fact.function,
            arguments=fact.arguments_of(request),
            outcome=_outcome_of(fact),
            asked=fact.at if asks and call.asked is None else call.asked,
            prompt=fact.prompt or call.prompt,
            roles=fact.roles or call.roles,
            expires=fact.expires_at if asks else None,
            decisions=call.decisions if record is None or repeated else (*call.decisions, record),
            ended=ended,
            result=fact.answer if ended is not None else "",
            shown=fact.cut and fact.cut.shown,
            error=fact.reason if fact.verdict == "answer" and fact.reason not in ("supplied", "expired") else "",
            nested=fact.nested,
            spent=self._spent_by(fact.index),
        )

    def _calls_withheld(self, fact: facts.CallsWithheld) -> None:
        for index in fact.indexes:
            self.calls[index] = replace(
                self.calls[index],
                outcome="withheld",
                ended=fact.at,
                result=fact.answer,
                error=fact.limit or "",
                spent=self._spent_by(index),
            )

    def _call_started(self, fact: facts.CallStarted) -> None:
        self.lost.discard(fact.index)
        call = self.calls[fact.index]
        self.calls[fact.index] = replace(
            call,
            function=fact.function,
            outcome="running",
            attempts=(*call.attempts, CallAttempt(started=fact.at)),
        )

    def _call_finished(self, fact: facts.CallFinished) -> None:
        call = self.calls[fact.index]
        attempts = call.attempts
        if fact.index not in self.lost:
            attempts = (*attempts[:-1], replace(attempts[-1], ended=fact.at))
        self.calls[fact.index] = replace(
            call,
            outcome=fact.outcome,
            attempts=attempts,
            ended=fact.at,
            result=fact.result,
            shown=fact.cut and fact.cut.shown,
            error=fact.error,
            spent=self._spent_by(fact.index, fact.spent),
        )

    def _spent_by(self, index: int, spent: Consumption | None = None) -> Consumption | None:
        """Return what a call is charged in all its lives: what it reports, or else has recorded."""
        assert self.state.batch is not None, "calls are charged in a batch"
        before = self.calls[index].spent
        recorded = self.state.batch.calls[index].recorded
        more = recorded if spent is None and recorded != Consumption() else spent
        return before if more is None else more if before is None else before + more

    def _clarified(self, fact: facts.Clarified) -> None:
        self._resume_gap(fact.at)
        question = fact.question if fact.denied is None else f"{fact.question} ({fact.denied or 'not answered'})"
        self._event(fact.at, "question", text=question, answer=fact.answer, by=fact.by)
        if fact.index is not None and fact.answer is not None:
            call = self.calls[fact.index]
            outcome: CallOutcome = "answered" if fact.denied is None else "denied"
            self.calls[fact.index] = replace(call, outcome=outcome, ended=fact.at, result=fact.answer)

    def _iteration_completed(self, fact: facts.IterationCompleted) -> None:
        if fact.terminate:
            self._event(fact.at, "callback", text=fact.reason)
        if fact.messages is not None:
            self.messages = tuple(map(_read_message, fact.messages))
            self.replaced = True

    def _message_added(self, fact: facts.MessageAdded) -> None:
        self.messages = (*self.messages, _read_message(fact.message))

    def _answer_checked(self, fact: facts.AnswerChecked) -> None:
        if fact.problem:
            self._event(fact.at, "check", text=fact.problem)

    def _stop_requested(self, fact: facts.StopRequested) -> None:
        self._resume_gap(fact.at)
        self._event(fact.at, "stopped", text=fact.reason)
        self.before_stop = self.state.at

    def _budget_changed(self, fact: facts.BudgetChanged) -> None:
        self._event(fact.at, "budget", text=_changed(self.state.rules.limits, fact.limits), by=fact.by)

    def _shared_budgets_checked(self, fact: facts.SharedBudgetsChecked) -> None:
        if fact.limit is not None:
            self._event(fact.at, "budget", text=fact.reason)

    def _paused(self, fact: facts.Paused) -> None:
        for index, call in enumerate(self.calls):
            if call.outcome == "running":
                asked = fact.at if call.asked is None else call.asked
                self.calls[index] = replace(call, outcome="in_doubt", asked=asked)
        self._event(fact.at, "paused")
        self._gap("paused", fact.at, None)

    def _resumed(self, fact: facts.Resumed) -> None:
        self.lives += 1
        self._resume_gap(fact.at)
        if self.state.phase is not Phase.PAUSED and self.iterations:
            self._gap("left", self.state.at, fact.at)
        changed = "" if fact.limits is None else _changed(self.state.rules.limits, fact.limits)
        self._event(fact.at, "resumed", text=changed)

    def _ended(self, fact: facts.Ended) -> None:
        if fact.returned:
            self.calls = [call if call.ended else replace(call, outcome="returned") for call in self.calls]
        self._event(fact.at, "ended", text=fact.reason)
        if self.state.stopping is not None and fact.at - self.before_stop > fact.seconds + _NOTICED:
            self._gap("left", self.before_stop, fact.at)  # it was idle when it was stopped

    readers: ClassVar[dict[str, Callable[[Any, Any], None]]] = {
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


def _follows_crash(state: State, fact: facts.Fact, lost: Collection[int]) -> bool:
    """Whether only a process that found the run interrupted writes this fact; ``lost``: calls known to be lost."""
    match fact:
        case facts.RequestFailed():
            return fact.reason == REQUEST_LOST
        case facts.CallDecided(verdict="run"):
            return fact.index not in lost and _runs(state, fact.index) and not fact.person
        case facts.CallFinished(outcome="cancelled", result=result):
            return fact.index not in lost and result == IN_DOUBT and state.stopping is None
        case facts.Paused() if state.batch is not None:
            return any(index not in lost and _runs(state, index) for index in range(len(state.batch.calls)))
        case _:
            return False


def _runs(state: State, index: int) -> bool:
    call = None if state.batch is None else state.batch.calls[index]
    return call is not None and call.started and call.answer is None


_NOTICED = 1.0
"""Idle seconds before a stop that are not shown as a gap: times are rounded."""


_OUTCOME_OF_KIND: dict[str, CallOutcome] = {
    "unknown": "unknown",
    "invalid": "invalid",
    "question": "withheld",
    "read": "answered",
}


def _outcome_of(fact: facts.CallDecided) -> CallOutcome:
    match fact.verdict:
        case "run":
            return "ready"
        case "defer":
            return "waiting"
        case "deny":
            return "denied"
        case "external":
            return "returned"
        case "final_answer":
            return "final_answer"
        case "answer" if fact.reason in ("supplied", "expired"):
            return "answered" if fact.reason == "supplied" else "expired"
        case "answer":
            return "denied" if fact.person else _OUTCOME_OF_KIND.get(fact.kind, "withheld")


def _requested(index: int, call: RequestedCall) -> TimelineCall:
    return TimelineCall(index=index, id=call.id, function=call.name, requested=call.arguments, arguments=call.arguments)


def _changed(before: Budget, after: Budget) -> str:
    """Name the limits that differ, with their new values."""
    return ", ".join(
        f"{name} {getattr(before, name)} → {getattr(after, name)}"
        for name in Budget.__dataclass_fields__
        if getattr(before, name) != getattr(after, name)
    )


# Messages: Semantic Kernel's objects, or their JSON; read without that library.

_LONGEST_DATA = 500
"""Characters of a part that is not text, such as an image, beyond which its size is shown instead."""


def _field(message: Message, name: str) -> str:
    value = cast("dict[str, Any]", message).get(name) if isinstance(message, dict) else getattr(message, name, None)
    return value if isinstance(value, str) else ""


def _read_message(message: Message) -> TimelineMessage:
    """Read role and text of a message, and describe its other parts."""
    dumped = dump_message(message)
    if not isinstance(dumped, dict):
        return TimelineMessage(role="", text=str(dumped))
    values = cast("dict[str, Any]", dumped)
    items = values.get("items")
    listed = cast("list[Any]", items if isinstance(items, list) else [])
    parts = [cast("dict[str, Any]", part) for part in listed if isinstance(part, dict)]
    texts = [part["text"] for part in parts if _is_text(part)]
    text = "\n".join(texts) if parts else str(values.get("content") or values.get("text") or "")
    others = tuple(_described(part) for part in parts if not _is_text(part))
    return TimelineMessage(role=str(values.get("role", "")), text=text, others=others)


def _is_text(part: dict[str, Any]) -> bool:
    return part.get("content_type") == "text" and isinstance(part.get("text"), str)


def _described(part: dict[str, Any]) -> str:
    match part:
        case {"content_type": "function_call"}:
            return f"{_CALLS}{part.get('name')}({part.get('arguments') or ''})"
        case {"content_type": "function_result"}:
            return f"returns {part.get('name')}: {part.get('result')}"
        case _:
            kind = part.get("content_type", "part")
            given = {name: value for name, value in part.items() if name not in ("content_type", "metadata") and value}
            shown = (
                f"{name}: {len(value):,} characters"
                if len(value) > _LONGEST_DATA and name != "text"
                else f"{name}: {value}"
                for name, value in ((name, str(value)) for name, value in given.items())
            )
            return f"{kind}, {', '.join(shown)}"


_CALLS = "calls "


def _not_calls(others: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out the calls of a reply, which are shown by themselves."""
    return tuple(text for text in others if not text.startswith(_CALLS))
