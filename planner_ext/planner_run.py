"""One run of the planner, from its first new fact to its result."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from planner_ext.core.facts import Fact
from planner_ext.engine import StopHandle
from planner_ext.events import PlannerEvent, ResultReady, TextDelta
from planner_ext.kernel.loop import Loop
from planner_ext.kernel.options import instance_of
from planner_ext.kernel.outcome import raise_at_limit
from planner_ext.kernel.taken import NOTHING_TAKEN, Taking
from planner_ext.planner_result import FunctionCallingStepwisePlannerResult, result_of
from planner_ext.ports import Emit
from planner_ext.streaming import watch

__all__ = ["PlannerRun"]


class PlannerRun:
    """Goes on from a journal with new facts: that the run started, or that it was resumed and what was decided."""

    def __init__(
        self,
        loop: Loop,
        facts: Sequence[Fact],
        first: Callable[[], Awaitable[Sequence[Fact]]],
        stop: StopHandle | None,
        taking: Taking = NOTHING_TAKEN,
    ) -> None:
        self._loop = loop
        self._facts = tuple(facts)
        self._first = first
        self._taking = taking
        self._stop = None if stop is None else instance_of("stop", stop, StopHandle)

    async def result(self, emit: Emit | None = None) -> FunctionCallingStepwisePlannerResult:
        """Run to the next pause or end.

        Raises:
            LimitReachedError: At a limit, where the budget says so.
            DecisionRefusedError: If this planner has taken one of the decisions before; nothing was recorded.
            Exception: On a fault; whatever kind it is of, it carries the history and a checkpoint as attributes.
        """
        engine = self._loop.engine(self._facts, emit=emit, stop=self._stop)
        first = await self._first()
        with self._taking.held(engine):
            for fact in first:
                await engine.record(fact)
            await self._loop.drive(engine)
        key = self._loop.checkpoint_key
        raise_at_limit(engine.state, engine.facts, key)
        written = self._loop.chat.messages(engine.state.transcript)
        return result_of(engine.state, tuple(engine.facts), self._loop.form, written=written, key=key)

    async def events(self) -> AsyncGenerator[PlannerEvent, None]:
        """Run, and yield what happens; the result comes last."""
        results: list[FunctionCallingStepwisePlannerResult] = []

        async def run(emit: Emit) -> None:
            results.append(await self.result(emit))

        async with aclosing(watch(run)) as events:
            async for event in events:
                if not isinstance(event, TextDelta) or event.text:
                    yield event
        yield ResultReady(result=results[0])
