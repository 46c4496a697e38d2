"""The only loop: perform the next action, record what came of it, until the run pauses or ends.

Plain, streamed and resumed runs are this one loop; whoever wants to watch passes ``emit``. What is to be done is
decided by `planner_ext.core.machine`; everything that touches the world is behind `planner_ext.ports`.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planner_ext.approval.fingerprint import digest_of
from planner_ext.core.actions import (
    Action,
    AddMessage,
    AskModel,
    AskPlan,
    CompleteIteration,
    Finish,
    Pause,
    ReviewCalls,
    RunCalls,
    WithholdCalls,
)
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    Ended,
    Fact,
    IterationCompleted,
    MessageAdded,
    ModelReplied,
    Paused,
    Planned,
    StopRequested,
)
from planner_ext.core.fold import apply, fold
from planner_ext.core.machine import next_action
from planner_ext.core.settle import stopping_facts
from planner_ext.core.state import Phase, State
from planner_ext.core.values import Checked, RequestedCall
from planner_ext.ports import Emit, Finished, Observer, Ports
from planner_ext.review import apply_decision, describe_call, first_verdict

__all__ = ["CallFailedError", "Engine", "StopHandle"]

logger = logging.getLogger(__name__)


class CallFailedError(PlannerExtError):
    """A function failed and the run was told to raise; the cause is the function's own exception."""

    def __init__(self, function: str, error: str) -> None:
        super().__init__(f"The function {function} failed: {error}")
        self.function = function


class StopHandle:
    """Asks a run to stop, from wherever; made by the caller, and given to one run as ``stop=``.

    The run looks at it before each request and before each call: functions that run already finish, no further one
    starts, no further request is made, and the results so far are kept.
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
    checked: dict[int, Checked] = field(default_factory=dict[int, Checked])
    failed: tuple[str, Finished] | None = None


class Engine:
    """Drives one run over its journal.

    Attributes:
        facts: The journal so far.
        state: Its fold.
    """

    def __init__(
        self,
        facts: Iterable[Fact],
        ports: Ports,
        *,
        emit: Emit | None = None,
        stop: StopHandle | None = None,
    ) -> None:
        self.facts = list(facts)
        self.state = fold(self.facts)
        self._ports = ports
        self._emit = emit
        self._stop = stop or StopHandle()
        self._batch = _Batch()
        self._recording = asyncio.Lock()
        self._mark = ports.clock.monotonic()
        self._asked_at: float | None = None

    async def run(self) -> State:
        """Go on until the run pauses or ends; return the last state.

        Whatever is raised, and on cancellation, every call of the open batch is answered first.

        Raises:
            CallFailedError: If a function failed and ``raise_errors`` is set.
            Exception: Whatever the connector or the store raises.
        """
        self._mark = self._ports.clock.monotonic()
        try:
            while (action := await self._next()) is not None:
                await self._perform(action)
        except BaseException as error:
            if self.state.batch is not None and self._running and self._ports.store is None:
                await self._end(
                    "The run was cancelled." if isinstance(error, asyncio.CancelledError) else "The run failed."
                )
            raise
        return self.state

    async def record(self, fact: Fact) -> None:
        """Add a fact to the journal, then tell everybody who watches; one after the other, in the journal's order."""
        async with self._recording:
            if self._ports.store is not None:
                await self._ports.store.append(self.state.run_id, len(self.facts), (fact,))
            self._note(fact)
            for observer in self._ports.observers:
                await _observe(observer, fact)
            if self._emit is not None:
                await self._emit(fact)

    def _note(self, fact: Fact) -> None:
        self.state = apply(self.state, fact)
        self.facts.append(fact)
        if self._ports.follow is not None:
            self._ports.follow(self.state, fact)

    async def _end(self, reason: str) -> None:
        """Answer every call of the open batch and end the run; then tell the observers, since nobody else listens."""
        facts = stopping_facts(self.state, reason=reason, at=self._ports.clock.now(), seconds=self._lap())
        for fact in facts:
            self._note(fact)
        for fact in facts:
            for observer in self._ports.observers:
                await _observe(observer, fact)

    @property
    def _running(self) -> bool:
        return self.state.phase not in (Phase.NEW, Phase.PAUSED, Phase.ENDED)

    async def _next(self) -> Action | None:
        if self._stop.reason is not None and self._running and self.state.stopping is None:
            await self.record(StopRequested(reason=self._stop.reason, at=self._ports.clock.now()))
        return next_action(self.state)

    async def _perform(self, action: Action) -> None:
        match action:
            case AskPlan():
                await self._ask_plan()
            case AskModel():
                await self._ask(action)
            case ReviewCalls():
                await self._review(action)
            case RunCalls():
                await self._run_calls(action)
            case CompleteIteration():
                await self._complete_iteration(action)
            case AddMessage() | WithholdCalls() | Pause() | Finish():
                await self.record(self._plain_fact(action))

    def _plain_fact(self, action: AddMessage | WithholdCalls | Pause | Finish) -> Fact:
        """Turn an action that needs nothing of the world into its fact."""
        at = self._ports.clock.now()
        match action:
            case AddMessage(purpose=purpose):
                return MessageAdded(message=self._ports.prompts.message(purpose), purpose=purpose, at=at)
            case WithholdCalls(iteration=iteration, indexes=indexes, answer=answer, limit=limit):
                return CallsWithheld(iteration=iteration, indexes=indexes, answer=answer, limit=limit, at=at)
            case Pause():
                return Paused(at=at, seconds=self._lap())
            case Finish(status=status, answer=answer, limit=limit, reason=reason, returned=returned):
                return Ended(
                    status=status,
                    answer=answer,
                    limit=limit,
                    reason=reason,
                    returned=returned,
                    at=at,
                    seconds=self._lap(),
                )

    async def _ask_plan(self) -> None:
        prompts = self._ports.prompts
        request = AskModel(iteration=-1, offer=False, tool_choice=None, withheld=None)
        await self._pace()
        reply = await self._ports.chat.ask(await prompts.plan_request(), request, self._emit)
        planned = Planned(
            plan=reply.text,
            messages=self.state.transcript,
            iterations=reply.iterations,
            usage=reply.usage,
            at=self._ports.clock.now(),
            seconds=self._lap(),
        )
        try:
            planned = replace(planned, messages=await prompts.opening(reply.text))
        finally:  # a template that fails does not take back the request, nor what it cost
            await self.record(planned)

    async def _ask(self, action: AskModel) -> None:
        await self._pace()
        reply = await self._ports.chat.ask(self.state.transcript, action, self._emit)
        await self.record(
            ModelReplied(
                iteration=action.iteration,
                message=reply.message,
                text=reply.text,
                calls=reply.calls,
                finish_reason=reply.finish_reason,
                usage=reply.usage,
                iterations=reply.iterations,
                offered=action.offer and reply.functions_available,
                withheld=action.withheld if reply.functions_available else None,
                at=self._ports.clock.now(),
                seconds=self._lap(),
            )
        )

    async def _pace(self) -> None:
        """Keep the least time between the starts of two requests."""
        clock, least = self._ports.clock, self._ports.min_iteration_seconds
        if least > 0 and self._asked_at is not None:
            wait = self._asked_at + least - clock.monotonic()
            if wait > 0:
                await clock.sleep(wait)
        self._asked_at = clock.monotonic()

    async def _review(self, action: ReviewCalls) -> None:
        batch = self.state.batch
        assert batch is not None
        self._batch = _Batch(iteration=action.iteration)
        for index in action.indexes:
            self._batch.checked[index] = self._ports.functions.check(batch.calls[index].request)
        facts = await self._decide(action.indexes)
        for fact in facts:
            await self.record(fact)
        unknown = next((fact.function for fact in facts if fact.kind == "unknown"), None)
        if unknown is not None and self._ports.stop_on_unknown and self.state.stopping is None:
            reason = f"The model called {unknown}, which is no function of this run."
            await self.record(StopRequested(reason=reason, at=self._ports.clock.now()))

    async def _decide(self, indexes: Sequence[int]) -> list[CallDecided]:
        """Decide every call before any is recorded, so that no call runs before all were seen."""
        state, checked, at = self.state, self._batch.checked, self._ports.clock.now()
        facts = [first_verdict(state, index, checked[index], at) for index in indexes]
        gated = [fact for fact in facts if fact.kind == "function"]
        if self._ports.gate is None or not gated:
            return facts
        calls = [describe_call(state, fact, checked[fact.index]) for fact in gated]
        decisions = await self._ports.gate.review(calls, state)
        decided = {fact.index: decision for fact, decision in zip(gated, decisions, strict=True)}
        at = self._ports.clock.now()  # afterwards: a review may take its time, and questions expire from now on
        facts = [replace(fact, at=at) for fact in facts]
        return [
            apply_decision(fact, decided[fact.index], self._ports.functions, state) if fact.index in decided else fact
            for fact in facts
        ]

    async def _run_calls(self, action: RunCalls) -> None:
        limit = self._ports.max_concurrency
        if limit == 1 or len(action.indexes) == 1:
            for index in action.indexes:
                await self._run_call(index)
        else:
            slots = asyncio.Semaphore(limit or len(action.indexes))
            try:
                async with asyncio.TaskGroup() as group:
                    for index in action.indexes:
                        group.create_task(self._run_call(index, slots))
            except BaseExceptionGroup as faults:  # of an adapter, a store or a watcher: as it would leave a single call
                raise faults.exceptions[0] from None
        if self._batch.failed is not None and self._ports.raise_errors:
            function, finished = self._batch.failed
            raise CallFailedError(function, finished.error) from finished.exception

    async def _run_call(self, index: int, slots: asyncio.Semaphore | None = None) -> None:
        """Run one call of the open batch, unless the run is to stop or the call is no longer what was decided."""
        if slots is not None:
            async with slots:
                return await self._run_call(index)
        state, clock = self.state, self._ports.clock
        batch = state.batch
        assert batch is not None
        call = batch.calls[index]
        assert call.decided is not None
        if self._stop.reason is not None:
            return None
        checked = self._checked(index, call.request, call.decided)
        if checked is None:
            answer = "Not executed: the function or its parameters changed after the call was decided."
            fact = CallsWithheld(iteration=batch.iteration, indexes=(index,), answer=answer, limit=None, at=clock.now())
            return await self.record(fact)
        started = CallStarted(
            iteration=batch.iteration,
            index=index,
            call_id=call.request.id,
            function=checked.function,
            at=clock.now(),
        )
        await self.record(started)
        finished = await self._ports.functions.run(call.request, checked, index=index, state=state)
        if finished.outcome != "ok" and self._batch.failed is None:
            self._batch.failed = (checked.function, finished)
        await self.record(
            CallFinished(
                iteration=started.iteration,
                index=index,
                call_id=started.call_id,
                function=started.function,
                outcome=finished.outcome,
                result=finished.text,
                error=finished.error,
                terminate=finished.terminate,
                at=clock.now(),
            )
        )
        return None

    def _checked(self, index: int, request: RequestedCall, decision: CallDecided) -> Checked | None:
        """Resolve an approved call again where that was done in another life, or where it was edited since."""
        batch = self.state.batch
        known = self._batch.checked.get(index)
        if known is not None and decision.edited is None and batch and batch.iteration == self._batch.iteration:
            return known
        checked = self._ports.functions.check(request, decision.edited)
        same = checked.kind == "function" and digest_of(checked.function, checked.arguments) == decision.digest
        return checked if same else None

    async def _complete_iteration(self, action: CompleteIteration) -> None:
        asked: dict[str, Any] = {}
        if action.called and self._ports.hook is not None:
            asked = dict(await self._ports.hook.completed(self.state))
        self._batch = _Batch()
        await self.record(
            IterationCompleted(
                iteration=action.iteration,
                called=action.called,
                at=self._ports.clock.now(),
                seconds=self._lap(),
                **asked,
            )
        )

    def _lap(self) -> float:
        """Seconds of activity since this was last asked."""
        now = self._ports.clock.monotonic()
        seconds, self._mark = now - self._mark, now
        return seconds


async def _observe(observer: Observer, fact: Fact) -> None:
    try:
        if (waiting := observer(fact)) is not None:
            await waiting
    except Exception:
        logger.exception("The observer %r failed on %s; the run goes on.", observer, fact.type)
