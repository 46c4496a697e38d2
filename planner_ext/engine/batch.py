"""The calls of the open batch: all are reviewed before any runs, and all settle, whatever becomes of one."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from planner_ext.approval.decisions import (
    Approve,
    Decision,
    Defer,
    Deny,
    Supply,
    ToolCall,
    digest_of,
    digests_of,
    fingerprint_of,
    takes_no_more,
)
from planner_ext.core.accounts import Account
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import CallDecided, CallFinished, CallStarted, CallsWithheld, StopRequested
from planner_ext.core.limits import BudgetShare
from planner_ext.core.machine import ReviewCalls, RunCalls, limit_of_restart
from planner_ext.core.state import State
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.engine.concurrency import GRACE, OutOfTime
from planner_ext.engine.journal import Recorder
from planner_ext.engine.ports import Finished, Functions, Ports

__all__ = [
    "CallFailedError",
    "Calls",
    "Restart",
    "StopHandle",
    "apply_decision",
    "describe_call",
    "first_verdict",
    "is_as_decided",
    "restart_of_call",
]

# From a requested call to a recorded decision: fingerprint it, show it, and put a verdict into words.

FINAL_ANSWER_ACCEPTED = "The final answer was accepted."
"""What stands in the transcript as the result of the final-answer call."""


def first_verdict(state: State, index: int, checked: ResolvedCall, at: float) -> CallDecided:
    """Record what a checked call of the open batch comes to as long as nobody objects.

    A ``function`` runs, the final answer is taken, a question waits, a call of the caller's own function goes back to
    the caller, and an unknown or unusable one is answered.
    """
    batch = state.batch
    assert batch is not None
    request = batch.calls[index].request
    digest = fingerprint = ""
    if checked.kind in _BOUND:
        digest = digest_of(checked.function, checked.arguments)
        fingerprint = fingerprint_of(state.run_id, batch.iteration, request.id, digest, checked.signature)
    return CallDecided(
        iteration=batch.iteration,
        index=index,
        call_id=request.id,
        function=checked.function,
        kind=checked.kind,
        nested=checked.nested,
        asks_model=checked.asks_model,
        digest=digest,
        signature=checked.signature,
        fingerprint=fingerprint,
        arguments=checked.converted,
        at=at,
        **_verdict(checked),
    )


_BOUND = frozenset({"function", "question"})
"""Kinds of calls that somebody may decide."""


def _verdict(checked: ResolvedCall) -> dict[str, Any]:
    match checked.kind:
        case "function":
            return {"verdict": "run"}
        case "final_answer":
            return {"verdict": "final_answer", "answer": FINAL_ANSWER_ACCEPTED, "final_answer": checked.answer}
        case "question":
            return {"verdict": "defer", "prompt": checked.answer}
        case "external":
            return {"verdict": "external"}
        case "unknown" | "invalid":
            return {"verdict": "answer", "answer": checked.answer, "reason": checked.kind}


def is_as_decided(checked: ResolvedCall, fact: CallDecided) -> bool:
    """Whether a call that was checked again is the one that was decided; older journals say nothing of parameters."""
    same = checked.kind == "function" and fact.digest in digests_of(checked.function, checked.arguments)
    return same and takes_no_more(fact.signature, checked.signature)


def describe_call(state: State, fact: CallDecided, checked: ResolvedCall) -> ToolCall:
    """Show a call that could run as interceptors see it."""
    batch = state.batch
    assert batch is not None
    return ToolCall(
        id=fact.call_id,
        plugin_name=checked.plugin_name,
        function_name=checked.function_name,
        fully_qualified_name=checked.function,
        arguments=deepcopy(dict(checked.arguments)),  # theirs to hold: what was fingerprinted is what runs
        raw_arguments=batch.calls[fact.index].request.arguments,
        iteration=fact.iteration,
        index=fact.index,
        batch_size=len(batch.calls),
        fingerprint=fact.fingerprint,
        signature=fact.signature,
    )


def apply_decision(fact: CallDecided, decision: Decision, functions: Functions, state: State) -> CallDecided:
    """Record what a decider said of a call that could run.

    Edited arguments are validated as the model's are; where they do not pass, the call is denied.
    """
    match decision:
        case Approve(arguments=None):
            return replace(fact, verdict="run", approved=True, by=decision.by or "", sticky=decision.always)
        case Approve():
            return _edited(fact, decision, functions, state)
        case Deny(reason=reason, by=by):
            return replace(fact, verdict="deny", answer=_refusal(reason), reason=reason, by=by or "")
        case Supply(result=result, by=by):
            text = functions.encode(result)
            return replace(fact, verdict="answer", answer=text, reason="supplied", by=by or "")
        case Defer(prompt=prompt, expires_in=expires_in):
            expires_at = None if expires_in is None else fact.at + expires_in
            return replace(fact, verdict="defer", prompt=prompt or "", expires_at=expires_at)


def _refusal(reason: str) -> str:
    return f"The call was refused and did not run: {reason}" if reason else "The call was refused and did not run."


def _unusable(decision: Approve, problem: str) -> Deny:
    return Deny(f"The edited arguments cannot be used. {problem}", decision.by)


def _edited(fact: CallDecided, decision: Approve, functions: Functions, state: State) -> CallDecided:
    batch = state.batch
    assert batch is not None
    try:
        text = json.dumps(decision.arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        return apply_decision(fact, _unusable(decision, f"They are no JSON: {error}"), functions, state)
    checked = functions.check(batch.calls[fact.index].request, text)
    if checked.kind != "function" or checked.function != fact.function:
        return apply_decision(fact, _unusable(decision, checked.answer), functions, state)
    return replace(
        fact,
        verdict="run",
        approved=True,
        by=decision.by or "",
        sticky=decision.always,
        edited=text if checked.converted is None else checked.converted,
        digest=digest_of(checked.function, checked.arguments),
    )


Restart: TypeAlias = Callable[[], Awaitable[str | None]]
"""Records that the running call is about to start once more; gives why it may not, or None."""

_RESTART: ContextVar[Restart] = ContextVar("planner_ext_restart")


def restart_of_call() -> Restart | None:
    """Find how the call that is being run is started once more; None outside of every call."""
    return _RESTART.get(None)


class CallFailedError(PlannerExtError):
    """A function failed and the run was told to raise; the cause is the function's own exception."""

    def __init__(self, function: str, error: str) -> None:
        super().__init__(f"The function {function} failed: {error}")
        self.function = function


class StopHandle:
    """Asks a run to stop, from wherever; made by the caller, and given to one run as ``stop=``.

    The run looks at it before each request and before each call: functions that run already finish, no further one
    starts, no further request is made, and the results so far are kept. So do the runs of planners that it calls as
    functions, see `planner_ext.plugin.PlannerPlugin`.
    """

    def __init__(self) -> None:
        self._reason: str | None = None

    def stop(self, reason: str = "The caller asked the run to stop.") -> None:
        """Ask the run to stop; the first reason stays."""
        if self._reason is None:
            self._reason = reason

    @property
    def reason(self) -> str | None:
        """Why the run is to stop; None while nobody has asked."""
        return self._reason


@dataclass(slots=True)
class _Batch:
    """What the engine remembers of the open batch beside the state; all of it can be computed again."""

    iteration: int = -1
    checked: dict[int, ResolvedCall] = field(default_factory=dict[int, ResolvedCall])
    failed: tuple[str, Finished] | None = None


class Calls:
    """Reviews and runs the calls of one run's replies."""

    def __init__(self, journal: Recorder, ports: Ports, stop: StopHandle, account: Account) -> None:
        self._journal = journal
        self._ports = ports
        self._stop = stop
        self._account = account
        self._batch = _Batch()
        self._threads = asyncio.Semaphore(ports.max_threads or sys.maxsize)
        self._restarting = asyncio.Lock()

    async def review(self, action: ReviewCalls) -> None:
        """Decide these calls of the open batch, and record what was decided of each."""
        batch = self._journal.state.batch
        assert batch is not None
        self._batch = _Batch(iteration=action.iteration)
        for index in action.indexes:
            self._batch.checked[index] = self._ports.functions.check(batch.calls[index].request)
        facts = await self._decide(action.indexes)
        for fact in facts:
            await self._journal.record(fact)
        unknown = next((fact.function for fact in facts if fact.kind == "unknown"), None)
        if unknown is not None and self._ports.stop_on_unknown and self._journal.state.stopping is None:
            reason = f"The model called {unknown}, which is no function of this run."
            await self._journal.record(StopRequested(reason=reason, at=self._journal.now()))

    async def _decide(self, indexes: Sequence[int]) -> list[CallDecided]:
        """Decide every call before any is recorded, so that no call runs before all were seen."""
        state, checked, at = self._journal.state, self._batch.checked, self._journal.now()
        facts = [first_verdict(state, index, checked[index], at) for index in indexes]
        gate = self._ports.gate
        gated = [fact for fact in facts if fact.kind == "function" and gate is not None and gate.watches(fact.function)]
        if gate is None or not gated:
            return facts
        calls = [describe_call(state, fact, checked[fact.index]) for fact in gated]
        with self._journal.persons_time():
            decisions = await self._journal.in_time(gate.review(calls, state), person=True)
        if isinstance(decisions, OutOfTime):
            undecided = {fact.index for fact in gated}
            return [_too_late(fact) if fact.index in undecided else fact for fact in facts]
        decided = {
            fact.index: decision for fact, decision in zip(gated, decisions, strict=True) if decision is not None
        }
        at = self._journal.now()  # afterwards: a review may take its time, and questions expire from now on
        facts = [replace(fact, at=at) for fact in facts]
        return [
            apply_decision(fact, decided[fact.index], self._ports.functions, state) if fact.index in decided else fact
            for fact in facts
        ]

    async def run(self, action: RunCalls) -> None:
        """Run these calls of the open batch, as many at once as may.

        Raises:
            CallFailedError: If one failed and ``raise_errors`` is set; all have their results.
        """
        self._account.starting(action.indexes, action.share)
        try:
            await self._run_calls(action)
        finally:
            self._account.starting((), None)
        if self._batch.failed is not None and self._ports.raise_errors:
            function, finished = self._batch.failed
            raise CallFailedError(function, finished.error) from finished.exception

    async def _run_calls(self, action: RunCalls) -> None:
        limit = self._ports.max_concurrency
        if limit == 1 or len(action.indexes) == 1:
            for index in action.indexes:
                await self._run_call(index, action.share)
        else:
            slots = asyncio.Semaphore(limit) if limit is not None and limit < len(action.indexes) else None
            try:
                async with asyncio.TaskGroup() as group:
                    for index in action.indexes:
                        group.create_task(self._run_call(index, action.share, slots))
            except BaseExceptionGroup as faults:  # of an adapter, a store or a watcher: as it would leave a single call
                raise faults.exceptions[0] from None

    async def _run_call(self, index: int, share: BudgetShare | None, slots: asyncio.Semaphore | None = None) -> None:
        """Run one call of the open batch, unless the run is to stop or the call is no longer what was decided."""
        if slots is not None:
            async with slots:
                return await self._run_call(index, share)
        state = self._journal.state
        batch = state.batch
        assert batch is not None
        call = batch.calls[index]
        assert call.decided is not None
        if self._is_over(state):
            return None
        checked = self._checked(index, call.request, call.decided)
        if checked is None:
            answer = "Not executed: the function or its parameters changed after the call was decided."
            fact = CallsWithheld(
                iteration=batch.iteration, indexes=(index,), answer=answer, limit=None, at=self._journal.now()
            )
            return await self._journal.record(fact)
        if not checked.threaded:
            return await self._start_call(index, call.request, checked, share)
        waits = self._threads.locked()
        async with self._threads:
            if waits and (self._is_over(self._journal.state) or self._journal.state.ending is not None):
                return None
            return await self._start_call(index, call.request, checked, share)

    async def _start_call(
        self, index: int, request: RequestedCall, checked: ResolvedCall, share: BudgetShare | None
    ) -> None:
        """Run a call that may start, and record its beginning and its end."""
        started = CallStarted(
            iteration=self._journal.state.iteration - 1,
            index=index,
            call_id=request.id,
            function=checked.function,
            reserved=share if checked.nested else None,
            at=self._journal.now(),
        )
        await self._journal.record(started)
        state = self._journal.state  # which knows by now what was set aside for the call
        tab = self._account.tab(index, started.reserved)
        before = _RESTART.set(partial(self._restart, started))
        try:
            with tab:
                running = self._ports.functions.run(request, checked, index=index, state=state)
                ended = await self._journal.in_time(running, patience=GRACE if checked.nested else 0.0)
        finally:
            _RESTART.reset(before)
        finished = _interrupted(checked.function) if isinstance(ended, OutOfTime) else ended
        if finished.outcome != "ok" and self._batch.failed is None:
            self._batch.failed = (checked.function, finished)
        await self._journal.record(
            CallFinished(
                iteration=started.iteration,
                index=index,
                call_id=started.call_id,
                function=started.function,
                outcome=finished.outcome,
                result=finished.text,
                error=finished.error,
                terminate=finished.terminate,
                spent=tab.spent,
                at=self._journal.now(),
            )
        )
        self._account.settle(index)

    async def _restart(self, started: CallStarted) -> str | None:
        """Record one more start of a call before it happens; give why it may not happen, or None."""
        async with self._restarting:  # two starts at once are counted one after the other
            state, at = self._journal.state, self._journal.now()
            call = None if state.batch is None else state.batch.calls[started.index]
            if call is None or call.answer is not None or state.iteration != started.iteration + 1:
                return "the call has ended"
            if self._is_over(state):
                return "the run is to stop"
            if (limit := limit_of_restart(state, started.index, at)) is not None:
                return f"the limit {limit} was reached"
            if (limit := self._account.restart(started.function)) is not None:
                return f"the limit {limit} was reached"
            await self._journal.record(replace(started, attempt=call.starts + 1, reserved=None, at=at))
            self._account.restarted()
        return None

    def _is_over(self, state: State) -> bool:
        """Whether no further call of the batch starts: a stop, a time limit, or a filter that terminates.

        Calls that start together run to their ends, whichever of them terminates.
        """
        terminated = state.ending is not None and self._ports.max_concurrency is not None
        return self._stop.reason is not None or terminated or (self._journal.timed and self._journal.left() <= 0)

    def _checked(self, index: int, request: RequestedCall, decision: CallDecided) -> ResolvedCall | None:
        """Resolve an approved call again where that was done in another life, or where it was edited since."""
        batch = self._journal.state.batch
        known = self._batch.checked.get(index)
        if known is not None and decision.edited is None and batch and batch.iteration == self._batch.iteration:
            return known
        checked = self._ports.functions.check(request, decision.edited)
        return checked if is_as_decided(checked, decision) else None


def _too_late(fact: CallDecided) -> CallDecided:
    answer = "Not executed: it was not decided before the time of the run was over."
    return replace(fact, verdict="answer", answer=answer, reason="limit")


def _interrupted(function: str) -> Finished:
    text = f"The function {function} did not answer before the time of the run was over; whether it took effect is "
    return Finished(outcome="timed_out", text=f"{text}not known.", error="OutOfTime: a time limit of the run passed")
