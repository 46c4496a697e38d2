"""The open batch: all calls are reviewed before any runs, and all run to their end, also where one fails."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any, assert_never

from planner_ext.approval.decisions import (
    Approve,
    Defer,
    Deny,
    Supply,
    ToolCall,
    digest_of,
    edited_text,
    fingerprint_of,
    takes_no_more,
)
from planner_ext.core.accounts import Account, CallWaits, Tab
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallLeft,
    CallStarted,
    CallsWithheld,
    Fact,
    FurtherQuestion,
    HappenedInside,
    ModelAsked,
    NestedCallStarted,
    StopRequested,
    facts_inside,
)
from planner_ext.core.limits import Budget
from planner_ext.core.machine import ReviewCalls, RunCalls, limit_of_restart
from planner_ext.core.state import Batch, Call, path_of
from planner_ext.core.values import RequestedCall, ResolvedCall
from planner_ext.engine.concurrency import GRACE, OutOfTime, StopHandle
from planner_ext.engine.journal import Recorder
from planner_ext.engine.ports import (
    Finished,
    Functions,
    Ports,
    Reviewed,
    current_circuit,
)

_UNTOUCHED = Reviewed()
"""The review of a call that no gate watches."""

FINAL_ANSWER_ACCEPTED = "The final answer was accepted."
"""What the model reads as the result of the final-answer call."""


def _first_decision(
    run_id: str, batch: Batch, index: int, resolved: ResolvedCall, at: float
) -> CallDecided:
    request = batch.calls[index].request
    more: dict[str, Any] = {"verdict": "run"}
    match resolved.kind:
        case "final_answer":
            more = {
                "verdict": "final_answer",
                "answer": FINAL_ANSWER_ACCEPTED,
                "final_answer": resolved.answer,
            }
        case "question":
            more = {"verdict": "defer", "prompt": resolved.answer}
        case "external":
            more = {"verdict": "external"}
        case "unknown" | "invalid" | "read":
            more = {
                "verdict": "answer",
                "answer": resolved.answer,
                "reason": resolved.kind,
            }
        case "function":
            pass
        case _:
            assert_never(resolved.kind)
    if resolved.kind in ("function", "question"):
        digest = digest_of(resolved.function, resolved.arguments)
        fingerprint = fingerprint_of(
            run_id, batch.iteration, request.id, digest, resolved.signature
        )
        more |= {"digest": digest, "fingerprint": fingerprint}
        if resolved.said is not None:
            more["repetition"] = digest_of(resolved.function, resolved.said)
    return CallDecided(
        iteration=batch.iteration,
        index=index,
        call_id=request.id,
        function=resolved.function,
        kind=resolved.kind,
        nested=resolved.nested,
        signature=resolved.signature,
        arguments=resolved.converted,
        at=at,
        **more,
    )


def is_as_decided(resolved: ResolvedCall, fact: CallDecided) -> bool:
    """Return whether a call that was resolved again is the one that was decided."""
    same = resolved.kind == "function" and fact.digest == digest_of(
        resolved.function, resolved.arguments
    )
    return same and takes_no_more(fact.signature, resolved.signature)


def apply_decision(
    fact: CallDecided,
    reviewed: Reviewed,
    functions: Functions,
    request: RequestedCall,
    run_id: str,
) -> CallDecided:
    """Record a decision on a call that could run; invalid edited arguments deny it."""
    decision = reviewed.decision
    question = reviewed.question
    if question is not None:
        fact = replace(fact, source=question.source, roles=tuple(question.roles))
    if reviewed.arguments is not None:
        edited = _with_edit(fact, reviewed, functions, request, run_id)
        decision, fact = (
            (edited, fact) if isinstance(edited, Deny) else (decision, edited)
        )
    match decision:
        case None:
            return fact
        case Approve(always=always, by=by):
            return replace(
                fact,
                verdict="run",
                approved=True,
                by=by or "",
                reason="",
                sticky=always,
            )
        case Deny(reason=reason, by=by):
            refused = "The call was refused and did not run"
            answer = f"{refused}: {reason}" if reason else f"{refused}."
            return replace(
                fact, verdict="deny", answer=answer, reason=reason, by=by or ""
            )
        case Supply(result=result, by=by):
            text = functions.encode(result)
            return replace(
                fact, verdict="answer", answer=text, reason="supplied", by=by or ""
            )
        case (
            Defer(
                prompt=prompt, expires_in=expires_in, roles=roles, panel=panel
            ) as asked
        ):
            expires_at = None if expires_in is None else fact.at + expires_in
            further = tuple(map(_further, reviewed.further))
            return replace(
                fact,
                verdict="defer",
                prompt=prompt or "",
                summary=asked.summary or fact.summary,
                asked_by=asked.asked_by,
                expires_at=expires_at,
                roles=tuple(roles),
                panel=panel,
                further=further,
            )
        case _:
            assert_never(decision)


def _further(question: Defer) -> FurtherQuestion:
    roles = tuple(question.roles)
    return FurtherQuestion(
        prompt=question.prompt or "",
        roles=roles,
        source=question.source,
        expires_in=question.expires_in,
        asked_by=question.asked_by,
        panel=question.panel,
    )


def _with_edit(
    fact: CallDecided,
    reviewed: Reviewed,
    functions: Functions,
    request: RequestedCall,
    run_id: str,
) -> CallDecided | Deny:
    """Put in edited arguments, or deny invalid ones; equal ones change nothing."""
    assert reviewed.arguments is not None, "a review with an edit"
    try:
        text = edited_text(reviewed.arguments)
    except ValueError as error:
        problem = str(error)
    else:
        resolved = functions.check(request, text)
        if resolved.kind == "function" and resolved.function == fact.function:
            digest = digest_of(resolved.function, resolved.arguments)
            if digest == fact.digest:
                return fact
            edited = text if resolved.converted is None else resolved.converted
            fingerprint = fingerprint_of(
                run_id, fact.iteration, fact.call_id, digest, fact.signature
            )
            return replace(
                fact,
                edited=edited,
                digest=digest,
                fingerprint=fingerprint,
                by=reviewed.edited_by or "",
            )
        problem = resolved.answer
    by = None
    if not isinstance(reviewed.decision, Defer | None):
        by = reviewed.decision.by
    return Deny(f"The edited arguments cannot be used. {problem}", by)


class CallFailedError(PlannerExtError):
    """A function failed in a run with ``raise_errors``; the cause is its own exception."""

    def __init__(self, function: str, error: str) -> None:
        super().__init__(f"The function {function} failed: {error}")
        self.function = function


class BudgetHandle:
    """Gives one run other limits while it is driven, from any task or thread.

    The run takes the newest before its next action; what is under way ends as it began.
    """

    def __init__(self) -> None:
        self._given: tuple[Budget, str] | None = None

    def change(self, limits: Budget, *, by: str = "") -> None:
        """Set the limits."""
        self._given = limits, by

    def take(self) -> tuple[Budget, str] | None:
        """Return, once, the newest limits and who set them."""
        given = self._given
        self._given = None
        return given

    def next_message(self) -> tuple[str, str] | None:
        """Return, once, what was said next to the run, and by whom; only to a kept run."""
        return None


class Calls:
    """Reviews and runs the calls of one run's replies."""

    def __init__(
        self, journal: Recorder, ports: Ports, stop: StopHandle, account: Account
    ) -> None:
        self._journal = journal
        self._ports = ports
        self._stop = stop
        self._account = account
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = asyncio.Semaphore(ports.max_threads or sys.maxsize)
        self._restarting = asyncio.Lock()
        # The calls of the open batch, by iteration and index.
        self._resolved: dict[tuple[int, int], ResolvedCall] = {}
        self._failed: tuple[str, Finished] | None = None
        self._out: PlannerExtError | None = None

    async def review(self, action: ReviewCalls) -> None:
        """Decide these calls of the open batch, and record it."""
        batch = self._journal.state.batch
        self._failed = None
        assert batch is not None
        resolved = {
            index: self._ports.functions.check(batch.calls[index].request)
            for index in action.indexes
        }
        self._resolved = {
            (batch.iteration, index): call for index, call in resolved.items()
        }
        facts = await self._decide(batch, resolved)
        await self._journal.record_decisions(facts)
        unknown = next(
            (fact.function for fact in facts if fact.kind == "unknown"), None
        )
        if (
            unknown is not None
            and self._ports.stop_on_unknown
            and self._journal.state.stopping is None
        ):
            reason = f"The model called {unknown}, which is no function of this run."
            await self._journal.record(
                StopRequested(reason=reason, at=self._journal.now())
            )

    async def _decide(
        self, batch: Batch, resolved: dict[int, ResolvedCall]
    ) -> Sequence[CallDecided]:
        """Decide every call before any decision is recorded: no call runs before all were seen."""
        state = self._journal.state
        at = self._journal.now()
        gate = self._ports.gate
        facts = [
            _first_decision(state.run_id, batch, index, call, at)
            for index, call in resolved.items()
        ]
        if state.cut:
            facts = self._read_on(facts, resolved)
        gated = [
            fact
            for fact in facts
            if fact.kind == "function"
            and gate is not None
            and gate.watches(fact.function)
        ]
        if gate is None or not gated:
            return facts
        calls = [tool_call_of(batch, fact, resolved[fact.index]) for fact in gated]
        with self._journal.persons_time():
            decisions = await self._journal.in_time(
                gate.review(calls, state), person=True
            )
        if isinstance(decisions, OutOfTime) and self._stop.now:
            return []  # the stop answers them
        if isinstance(decisions, OutOfTime):
            answer = (
                "Not executed: it was not decided before the time of the run was over."
            )
            late = {
                fact.index: replace(
                    fact, verdict="answer", answer=answer, reason="limit"
                )
                for fact in gated
            }
            return [late.get(fact.index, fact) for fact in facts]
        made = {
            fact.index: reviewed
            for fact, reviewed in zip(gated, decisions, strict=True)
        }
        # After the review, which may take its time: questions expire from now on.
        at = self._journal.now()
        decided = [
            apply_decision(
                replace(fact, at=at),
                made.get(fact.index, _UNTOUCHED),
                self._ports.functions,
                batch.calls[fact.index].request,
                state.run_id,
            )
            for fact in facts
        ]
        return [
            replace(fact, parameters=resolved[fact.index].parameters)
            if fact.verdict == "defer"
            else fact
            for fact in decided
        ]

    def _read_on(
        self, facts: list[CallDecided], resolved: dict[int, ResolvedCall]
    ) -> list[CallDecided]:
        """Answer the calls that read on in a result, up to `MOST_READS`."""
        from planner_ext.core.results import MOST_READS, NOT_READ, piece_of  # noqa: PLC0415  (only where a result was cut)

        state = self._journal.state
        count = self._ports.count_tokens
        most = None
        if count is not None:
            most = state.rules.limits.max_result_tokens
        read = list(facts)
        places = [place for place, fact in enumerate(facts) if fact.kind == "read"]
        for place in places[:MOST_READS]:
            fact = facts[place]
            answer, is_piece = piece_of(
                state.cut, resolved[fact.index].arguments, most, count or len
            )
            read[place] = (
                replace(fact, answer=answer)
                if is_piece
                else replace(fact, answer=answer, kind="invalid")
            )
        for place in places[MOST_READS:]:
            read[place] = replace(facts[place], answer=NOT_READ)
        return read

    async def run(self, action: RunCalls) -> None:
        """Run these calls of the open batch, as many at once as may.

        Raises:
            CallFailedError: If one failed and ``raise_errors`` is set; all have their
                results.
        """
        self._account.starting(action.indexes)
        self._loop = asyncio.get_running_loop()
        try:
            if self._ports.max_concurrency == 1 or len(action.indexes) == 1:
                for index in action.indexes:
                    await self._run_call(index, action, nullcontext())
            else:
                await self._run_concurrently(action)
        finally:
            self._account.starting(())
        if self._out is not None:
            raise self._out
        if self._failed is not None and self._ports.raise_errors:
            function, finished = self._failed
            raise CallFailedError(function, finished.error) from finished.exception

    async def _run_concurrently(self, action: RunCalls) -> None:
        limit = self._ports.max_concurrency
        slots = (
            nullcontext()
            if limit is None or limit >= len(action.indexes)
            else asyncio.Semaphore(limit)
        )
        try:
            async with asyncio.TaskGroup() as group:
                for index in action.indexes:
                    group.create_task(self._run_call(index, action, slots))
        except BaseExceptionGroup as faults:
            # An adapter's, a store's or an observer's fault: the first is raised bare,
            # as from one call.
            raise faults.exceptions[0] from None

    async def _run_call(
        self, index: int, action: RunCalls, slots: AbstractAsyncContextManager[object]
    ) -> None:
        """Run one call, unless the run is to stop or the call is no longer as decided."""
        async with slots:
            batch = self._journal.state.batch
            assert batch is not None
            call = batch.calls[index]
            assert call.decided is not None
            if not call.left and self._may_not_start():
                return
            resolved = self._resolved_again(call.request, call.decided)
            if resolved is None:
                answer = "Not executed: the function or its parameters changed after the call was decided."
                at = self._journal.now()
                fact = CallsWithheld(
                    iteration=action.iteration,
                    indexes=(index,),
                    answer=answer,
                    limit=None,
                    at=at,
                )
                await self._journal.record(fact)
                return
            waits = resolved.threaded and self._threads.locked()
            async with self._threads if resolved.threaded else nullcontext():
                if not (
                    waits
                    and (
                        self._may_not_start() or self._journal.state.ending is not None
                    )
                ):
                    await self._start_call(index, call, resolved, action)

    async def _start_call(
        self,
        index: int,
        call: Call,
        resolved: ResolvedCall,
        action: RunCalls,
    ) -> None:
        started = CallStarted(
            iteration=action.iteration,
            index=index,
            call_id=call.request.id,
            function=resolved.function,
            at=self._journal.now(),
        )
        if not call.left:
            await self._record_start(started)
        state = self._journal.state
        ended: Finished | OutOfTime | None = None
        with Tab(self._account, index, self, threaded=resolved.threaded) as tab:
            running = self._ports.functions.run(
                call.request, resolved, index=index, state=state
            )
            try:
                ended = await self._journal.in_time(
                    running, patience=GRACE if resolved.nested else 0.0
                )
            except (CallWaits, BaseExceptionGroup):
                if not self._waits(tab):
                    raise
            waits = self._waits(tab)
        if waits and call.left and self._call(index).runs is call.runs:
            ended = _not_made_again(
                resolved.function
            )  # else it would be called again for ever
            waits = False
        out = None
        if resolved.nested and current_circuit.get() is not None:
            from planner_ext.core.causes import outage_in  # noqa: PLC0415  (only in a worker)

            out = outage_in(ended)
            self._out = self._out or out
        if ended is None or waits or out:
            await self._journal.record(
                CallLeft(
                    iteration=started.iteration,
                    index=index,
                    call_id=started.call_id,
                    function=started.function,
                    spent=tab.spent,
                    at=self._journal.now(),
                )
            )
            with self._account.lock:
                del self._account.tabs[index]
            return
        finished = (
            _interrupted(resolved.function, self._stop)
            if isinstance(ended, OutOfTime)
            else ended
        )
        if finished.outcome not in ("ok", "cancelled") and self._failed is None:
            self._failed = (resolved.function, finished)
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
                brought=tuple(sorted(tab.brought)),
                at=self._journal.now(),
            )
        )
        with self._account.lock:
            del self._account.tabs[index]

    def _call(self, index: int) -> Call:
        batch = self._journal.state.batch
        assert batch is not None, "a call that runs is in the open batch"
        return batch.calls[index]

    def _waits(self, tab: Tab) -> bool:
        """Return whether a run in a call waits for a person, whatever the function around it made of that."""
        return self._call(tab.index).waits_inside and tab.can_wait

    @property
    def is_kept(self) -> bool:
        """See `Recorder.is_kept`."""
        return self._journal.is_kept

    def records(self, tab: Tab, /) -> bool:
        """Return whether what happens here, inside a call, can be recorded: not while this loop is blocked."""
        return tab.threaded or asyncio.get_running_loop() is self._loop

    def facts_inside(self, tab: Tab, run: int, /) -> list[Fact]:
        """List what has happened in a run of a call of the open batch."""
        batch = self._journal.state.batch
        assert batch is not None, "a call that runs is in the open batch"
        return facts_inside(self._journal.facts, batch.iteration, tab.index, run)

    async def happened(
        self,
        tab: Tab,
        run: int,
        fact: Fact,
        applied: Callable[[], None],
        *,
        streamed: bool,
    ) -> None:
        """Record what happened in a run of a call; in that run alone if the call has ended."""
        loop = self._loop
        assert loop is not None, "a call that runs was begun in a loop"
        if asyncio.get_running_loop() is not loop:
            recorded = self.happened(tab, run, fact, applied, streamed=streamed)
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(recorded, loop))
            return
        batch = self._journal.state.batch
        if tab.closed or batch is None:
            applied()
            return
        inside = HappenedInside(
            iteration=batch.iteration, index=tab.index, run=run, fact=fact
        )
        await self._journal.record(inside, streamed=streamed, tab=tab, applied=applied)

    async def restart(self, tab: Tab) -> bool:
        """Record one more start of a call before it happens; return False if it may not."""
        async with self._restarting:  # two starts at once are counted in turn
            state = self._journal.state
            at = self._journal.now()
            if (
                tab.closed
                or self._may_not_start()
                or self._call(tab.index).waits_inside
                or limit_of_restart(state, tab.index, at) is not None
            ):
                return False
            batch = state.batch
            assert batch is not None, "a call that runs is in the open batch"
            call = batch.calls[tab.index]
            function = call.decided_fact.function
            shared = self._account.shared
            try:
                if self._account.restart(function) is not None:
                    return False
                if shared is not None and await shared.reserve(calls=1) is not None:
                    return False
                again = CallStarted(
                    iteration=batch.iteration,
                    index=tab.index,
                    call_id=call.request.id,
                    function=function,
                    attempt=call.starts + 1,
                    at=at,
                )
                await self._record_start(again)
            finally:
                self._account.restarted()
        return True

    async def _record_start(self, started: CallStarted) -> None:
        """Record a start before it happens, in the journals around a nested run first."""
        if self._ports.within is not None and self._ports.run is None:
            await self._ports.within.record_call(started.function)
        await self._journal.record(started)

    async def record(self, tab: Tab, function: str | None) -> None:
        """Record a request (None), or the start of a function, that a call's function makes.

        A loop that the function runs in its own thread waits for the record. Any other
        loop may block this one meanwhile: what happens in it is not recorded.
        """
        if not self.is_kept:
            return
        loop = self._loop
        assert loop is not None, "a call that runs was begun in a loop"
        if asyncio.get_running_loop() is not loop:
            if tab.threaded:
                await asyncio.wrap_future(
                    asyncio.run_coroutine_threadsafe(self.record(tab, function), loop)
                )
        elif not tab.closed:  # the end of a call charges what it took
            batch = self._journal.state.batch
            assert batch is not None, "a call that runs is in the open batch"
            at = self._journal.now()
            # The fold counts what is set to zero here.
            usage = replace(tab.taken, iterations=0, tool_calls=0, calls_by_function={})
            taken: dict[str, Any] = {
                "iteration": batch.iteration,
                "index": tab.index,
                "usage": usage,
                "at": at,
            }
            asked = function is None
            await self._journal.record(
                ModelAsked(**taken)
                if asked
                else NestedCallStarted(function=function, **taken)
            )

    def _may_not_start(self) -> bool:
        """Return whether no further call starts; those that start together run to their ends."""
        terminated = (
            self._journal.state.ending is not None
            and self._ports.max_concurrency is not None
        )
        return (
            self._stop.reason is not None
            or terminated
            or (self._journal.timed and self._journal.left() <= 0)
        )

    def _resolved_again(
        self, request: RequestedCall, decision: CallDecided
    ) -> ResolvedCall | None:
        """Resolve the call again if another activation did, or it was edited; None if it changed."""
        known = self._resolved.get((decision.iteration, decision.index))
        if known is not None and decision.edited is None:
            return known
        resolved = self._ports.functions.check(request, decision.edited)
        return resolved if is_as_decided(resolved, decision) else None


def tool_call_of(batch: Batch, fact: CallDecided, resolved: ResolvedCall) -> ToolCall:
    """Show a call as interceptors see it."""
    return ToolCall(
        id=fact.call_id,
        path=path_of(fact.call_id),
        plugin_name=resolved.plugin_name,
        function_name=resolved.function_name,
        fully_qualified_name=resolved.function,
        arguments=deepcopy(
            dict(resolved.arguments)
        ),  # a copy: what was fingerprinted is what runs
        raw_arguments=batch.calls[fact.index].request.arguments,
        iteration=fact.iteration,
        index=fact.index,
        batch_size=len(batch.calls),
        fingerprint=fact.fingerprint,
        signature=fact.signature,
    )


def _not_made_again(function: str) -> Finished:
    text = f"The function {function} was called again, and did not make the run that was to go on in it."
    return Finished(outcome="failed", text=text, error=text)


def _interrupted(function: str, stop: StopHandle) -> Finished:
    if stop.now:
        text = f"The function {function} was interrupted: the run was stopped. Whether it took effect is not known."
        return Finished(outcome="cancelled", text=text, error=f"Stopped: {stop.reason}")
    text = f"The function {function} did not answer before the time of the run was over; whether it took effect is "
    return Finished(
        outcome="timed_out",
        text=f"{text}not known.",
        error="OutOfTime: a time limit of the run passed",
    )
