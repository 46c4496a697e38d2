"""The journal of one run: the recorder of its facts, and the facts that end it from outside."""

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Final, TypeVar

from planner_ext.core import facts
from planner_ext.core.accounts import Tab
from planner_ext.core.fold import apply, apply_decisions, fold
from planner_ext.core.machine import (
    ENDED_WAITING,
    IN_DOUBT,
    AskPlan,
    CompleteIteration,
    Finish,
    Pause,
    WithholdCalls,
    may_have_asked,
    next_action,
)
from planner_ext.core.state import OpenRun, Phase, State, open_runs
from planner_ext.core.values import Usage, updated
from planner_ext.engine.concurrency import (
    GRACE,
    STEP,
    Outlasting,
    OutOfTime,
    Raised,
    StopHandle,
    SystemClock,
    caught,
    in_time,
)
from planner_ext.engine.log import log_facts
from planner_ext.engine.ports import Emit, Ports, RunInfo

_FACT_OF: dict[type[object], Callable[..., facts.Fact]] = {
    WithholdCalls: facts.CallsWithheld,
    CompleteIteration: facts.IterationCompleted,
    Pause: facts.Paused,
    Finish: facts.Ended,
}


def plain_fact(
    action: WithholdCalls | CompleteIteration | Pause | Finish,
    *,
    at: float,
    **more: Any,
) -> facts.Fact:
    """Turn an action that needs no adapter into its fact, with further values."""
    values = {name: getattr(action, name) for name in action.__dataclass_fields__}
    return _FACT_OF[type(action)](**values, at=at, **more)


def cancellation_reason(by: str, reason: str) -> str:
    """Say who cancelled a run and why, for the record and for the model."""
    who = f"Cancelled by {by}" if by else "Cancelled"
    text = f"{who}: {reason}" if reason else f"{who}."
    return text.encode(errors="replace").decode()  # neither can hold a lone surrogate


REQUEST_LOST = "The process that made the request has ended."


def lost_request(state: State, *, at: float) -> tuple[facts.RequestFailed, ...]:
    """Return the request that may have been under way when a run's process ended, as a fact."""
    if not may_have_asked(state):
        return ()
    iteration = -1 if isinstance(next_action(state), AskPlan) else state.iteration
    return (
        facts.RequestFailed(
            iteration=iteration,
            reason=REQUEST_LOST,
            usage=Usage(iterations=1),
            at=at,
            seconds=0.0,
        ),
    )


def lost_requests(state: State, *, at: float) -> tuple[facts.Fact, ...]:
    """List the requests that may have been under way, as facts, also in the runs inside: see `lost_request`."""
    return tuple(
        run.wrapped(fact)
        for run in open_runs(state)
        for fact in lost_request(run.state, at=at)
    )


def is_lost(fact: facts.RequestFailed) -> bool:
    """Return whether a request's process ended before its reply was recorded."""
    return fact.reason == REQUEST_LOST


def is_in_doubt(fact: facts.CallFinished) -> bool:
    """Return whether a started call was cancelled and not seen to end."""
    return fact.outcome == "cancelled" and fact.result == IN_DOUBT


def stopping_facts(
    state: State,
    *,
    reason: str,
    at: float,
    seconds: float = 0.0,
    spent: Mapping[int, Usage] | None = None,
) -> tuple[facts.Fact, ...]:
    """List the facts that end a run now: started calls cancelled, the others not executed.

    ``spent`` is what the started calls have spent, by index; ``seconds`` the active
    time.
    """
    ending: list[facts.Fact] = [facts.StopRequested(reason=reason, at=at)]
    batch = state.batch
    for index, call in enumerate(batch.calls if batch is not None else ()):
        if (
            batch is not None
            and call.started
            and call.answer is None
            and call.decided is not None
        ):
            for number, run in enumerate(call.runs):
                if run.phase in (Phase.NEW, Phase.ENDED):
                    continue
                inside = OpenRun(state=run, place=((batch.iteration, index, number),))
                last = stopping_facts(run, reason=reason, at=at)
                ending += map(inside.wrapped, last)
            cancelled = facts.CallFinished(
                iteration=batch.iteration,
                index=index,
                call_id=call.request.id,
                function=call.decided.function,
                outcome="cancelled",
                result=ENDED_WAITING if call.waits_inside else IN_DOUBT,
                spent=(spent or {}).get(index),
                at=at,
            )
            ending.append(cancelled)
    state = reduce(apply, ending, state)
    while (action := next_action(state)) is not None:
        assert isinstance(action, CompleteIteration | WithholdCalls | Finish), (
            "a stopping run asks for nothing else"
        )
        timed = (
            {}
            if isinstance(action, WithholdCalls)
            else {"seconds": seconds if isinstance(action, Finish) else 0.0}
        )
        ending.append(plain_fact(action, at=at, **timed))
        state = apply(state, ending[-1])
    return tuple(ending)


logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_INSTANT: Final = 1e-3
"""Seconds that count as zero: sums of times are inexact."""

_IN_HAND: Final = (facts.Planned, facts.ModelReplied, facts.CallFinished)

_LOOK: Final = 0.02
"""Seconds after which a clock that is not the machine's is read again."""


class Recorder:
    """Stores, applies and publishes the facts of one run, and measures its time."""

    def __init__(
        self,
        facts: Iterable[facts.Fact],
        ports: Ports,
        emit: Emit | None,
        stop: StopHandle | None = None,
    ) -> None:
        self.facts = list(facts)
        self.state = fold(self.facts)
        self.now = ports.clock.now
        self._ports = ports
        self._emit = emit
        self._stop = stop
        self._recording = asyncio.Lock()
        self._within = None if ports.run is None else ports.within
        self._watched = (
            ports.store is not None
            or bool(ports.observers)
            or emit is not None
            or self._within is not None
        )
        self._mark = ports.clock.monotonic()
        self._worked = 0.0
        self._active_until = math.inf
        self._step = STEP if type(ports.clock) is SystemClock else _LOOK
        self._observers = [
            (observer, takes_run(observer)) for observer in ports.observers
        ]

    def lap(self) -> float:
        """Return the active seconds since the last call."""
        now = self._ports.clock.monotonic()
        seconds = self._worked + now - self._mark
        self._mark = now
        self._worked = 0.0
        return seconds

    @contextmanager
    def persons_time(self) -> Generator[None]:
        """Do not count the time in this context as active."""
        self._worked = self.lap()
        try:
            yield
        finally:
            self._mark = self._ports.clock.monotonic()

    @property
    def is_kept(self) -> bool:
        """Whether a store keeps the journal, or one around it."""
        within = self._within
        return self._ports.store is not None or (within is not None and within.is_kept)

    @property
    def timed(self) -> bool:
        """Whether time is limited, here or around."""
        limits = self.state.rules.limits
        return (
            limits.max_active_seconds is not None or self.left_to_deadline() < math.inf
        )

    def as_of_now(self) -> State:
        """Return the state with the time that is not recorded yet, if the run limits time itself."""
        state = self.state
        limits = self.state.rules.limits
        if limits.deadline is None and limits.max_active_seconds is None:
            return state
        now = self._ports.clock.monotonic()
        usage = state.usage
        active = usage.active_seconds + self._worked + now - self._mark
        if limits.max_active_seconds is not None:
            self._active_until = now + limits.max_active_seconds - active
            active = (
                limits.max_active_seconds
                if abs(self._active_until - now) < _INSTANT
                else active
            )
        else:
            self._active_until = math.inf
        return updated(
            state, at=self.now(), usage=updated(usage, active_seconds=active)
        )

    def left(self) -> float:
        """Return the seconds until the first time limit; active time as `as_of_now` computed it last."""
        return min(
            self._active_until - self._ports.clock.monotonic(), self.left_to_deadline()
        )

    def left_to_deadline(self) -> float:
        """Return the seconds until the deadline or a time limit around; persons' time counts."""
        deadline = self.state.rules.limits.deadline
        own = math.inf if deadline is None else deadline.timestamp() - self.now()
        within = self._ports.within
        if within is None:
            return own
        return min(own, within.seconds_left())

    async def in_time(
        self,
        work: Coroutine[Any, Any, _T],
        *,
        person: bool = False,
        patience: float = 0.0,
    ) -> _T | OutOfTime:
        """Await work until a time limit passes or a stop interrupts it.

        Only the deadline interrupts what may wait for a ``person``.
        """
        if not self.timed or (person and self.left_to_deadline() == math.inf):
            return (
                await work
                if self._stop is None
                else await in_time(work, None, patience=patience, stop=self._stop)
            )
        left = self.left_to_deadline if person else self.left
        return await in_time(
            work, left, step=self._step, patience=patience, stop=self._stop
        )

    @property
    def interruption(self) -> str:
        """Why `in_time` interrupts work."""
        is_stop = self._stop is not None and self._stop.now
        return (
            "The run was stopped." if is_stop else "A time limit of the run has passed."
        )

    async def record(
        self,
        fact: facts.Fact,
        *,
        streamed: bool = True,
        tab: Tab | None = None,
        applied: Callable[[], None] | None = None,
    ) -> None:
        """Store a fact, apply it, then notify observers and stream, in the journal's order.

        A result that is longer than the budget allows is cut for the model. What
        happened in a run of the call of ``tab`` is ``applied`` there with nothing in
        between; where that call has ended, nothing is recorded here. Where the journal
        is kept, a reply or a result outlasts a cancellation: nobody could tell it again.
        """
        if self.state.rules.limits.max_result_tokens is not None:
            fact = self._cut(fact, self.state.rules.limits.max_result_tokens)
        if not self._watched:
            # Nothing is awaited, so nothing can come in between.
            return self._apply(fact, tab, applied)
        recording = self._record(fact, tab, applied, streamed=streamed)
        if isinstance(facts.unwrapped(fact), _IN_HAND) and self.is_kept:
            return await Outlasting(recording)
        return await recording

    async def _record(
        self,
        fact: facts.Fact,
        tab: Tab | None,
        applied: Callable[[], None] | None,
        *,
        streamed: bool,
    ) -> None:
        async with self._recording:
            if tab is not None and tab.closed:
                return self._apply(fact, tab, applied)
            apply_here = partial(self._apply, fact, tab, applied)
            if self._within is not None and self._ports.run is not None:
                run = self._ports.run
                await self._within.happened(run, fact, apply_here, streamed=streamed)
            else:
                if self._ports.store is not None:
                    await self._ports.store.append(
                        self.state.run_id, len(self.facts), (fact,)
                    )
                apply_here()
            await self._notify(fact)
            if self._emit is not None and streamed:
                await self._emit(fact)

    async def record_decisions(self, decided: Sequence[facts.CallDecided]) -> None:
        """Record the decisions on the open batch, in one step where nothing watches."""
        if self._watched or self.state.rules.limits.max_result_tokens is not None:
            for fact in decided:
                await self.record(fact)
        elif decided:
            self._advance(apply_decisions(self.state, decided), decided)

    def _cut(self, fact: facts.Fact, most: int) -> facts.Fact:
        count = self._ports.count_tokens
        match fact:
            case (
                facts.CallFinished(result=text)
                | facts.CallDecided(verdict="answer", reason="supplied", answer=text)
            ):
                from planner_ext.core.results import cut_of  # noqa: PLC0415  (only where results are limited)

                cut = (
                    None
                    if count is None or fact.cut is not None
                    else cut_of(text, most, count)
                )
                if cut is None:
                    return fact
                return replace(fact, cut=cut)
            case _:
                return fact

    async def terminate(self, reason: str, *, spent: Mapping[int, Usage]) -> None:
        """Answer the open batch and end the run; then notify the observers: no stream reads on."""
        ending = stopping_facts(
            self.state, reason=reason, at=self.now(), seconds=self.lap(), spent=spent
        )
        if self._within is not None:
            for fact in ending:
                await self.record(fact, streamed=False)
            return
        for fact in ending:
            self._apply(fact)
        for fact in ending:
            await self._notify(fact)

    async def _notify(self, fact: facts.Fact) -> None:
        """Call the observers; one that is still busy at a time limit is not called again."""
        for observer in tuple(self._observers):
            if isinstance(
                await self.in_time(self._observe(observer, fact), patience=GRACE),
                OutOfTime,
            ):
                self._observers.remove(observer)
                logger.error(
                    "The observer %r hangs on %s; the run ends without it.",
                    observer[0],
                    fact.type,
                )

    async def _observe(self, observer: tuple[Any, bool], fact: facts.Fact) -> None:
        observe, takes_run = observer
        more = (
            (RunInfo(run_id=self.state.run_id, goal=self.state.goal),)
            if takes_run
            else ()
        )

        async def observed() -> None:
            waiting = observe(fact, *more)
            if waiting is not None:
                await waiting

        if isinstance(outcome := await caught(observed()), Raised):
            problem = "The observer %r failed on %s; the run continues."
            logger.error(problem, observe, fact.type, exc_info=outcome.error)

    def _apply(
        self,
        fact: facts.Fact,
        tab: Tab | None = None,
        applied: Callable[[], None] | None = None,
    ) -> None:
        if tab is None or not tab.closed:
            self._advance(apply(self.state, fact), (fact,))
        if applied is not None:
            applied()

    def _advance(self, state: State, applied: Sequence[facts.Fact]) -> None:
        self.state = state
        self.facts.extend(applied)
        if self._ports.store is None and self._within is None:
            log_facts(state, applied, kept=False)
        if self._ports.follow is not None:
            for fact in applied:
                self._ports.follow(state, fact)


def takes_run(observer: Any) -> bool:
    """Return whether an observer requires a second argument."""
    try:
        parameters = inspect.signature(observer).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return False
    needed = [
        one
        for one in parameters
        if one.default is one.empty and one.kind in _BY_POSITION
    ]
    return len(needed) == 2


_BY_POSITION = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
