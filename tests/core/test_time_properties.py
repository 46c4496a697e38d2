"""Runs of drawn durations on a clock of their own: none is active past its limits, and each ends by name."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from planner_ext.approval.decisions import ToolCall
from planner_ext.core.facts import (
    CallFinished,
    CallStarted,
    Ended,
    Fact,
    ModelReplied,
    Planned,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.machine import AskModel
from planner_ext.core.state import State
from planner_ext.core.values import Reply, RequestedCall, ResolvedCall, TranscriptItem
from planner_ext.engine import concurrency as in_time
from planner_ext.engine import journal as recorder
from planner_ext.engine.ports import Emit, Finished, Reviewed
from support.examples import tried
from support.property_world import START, Plan, World, charged, plans

STEP = 0.5
"""Seconds of the world's clock in which work cannot be interrupted."""


@dataclass(slots=True)
class SlowWorld(World):
    """Everything takes its time, which passes in steps; some of it does not let itself be cancelled."""

    durations: tuple[float, ...] = (0.0,)
    swallows: int | None = None
    drawn: int = 0

    async def work(self) -> None:
        number, self.drawn = self.drawn, self.drawn + 1
        end = self.time + self.durations[number % len(self.durations)]
        while self.time < end:
            self.time += STEP
            try:
                for _ in range(
                    10
                ):  # turns of the event loop, in which whoever watches the clock looks at it
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                if number != self.swallows:
                    raise

    async def ask(
        self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None
    ) -> Reply:
        reply = await World.ask(self, transcript, request, emit)
        await self.work()
        return reply

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        finished = await World.run(self, call, checked, index=index, state=state)
        await self.work()
        return finished

    async def completed(self, state: State) -> Mapping[str, Any]:
        await self.work()
        return {}

    async def review(
        self, calls: Sequence[ToolCall], state: State
    ) -> Sequence[Reviewed]:
        await self.work()
        return await World.review(self, calls, state)


limits = st.builds(
    Budget,
    max_iterations=st.integers(2, 6),
    max_active_seconds=st.sampled_from([None, 2.5, 10.0]),
    deadline=st.sampled_from([None, 3.0, 12.0]).map(
        lambda seconds: (
            None if seconds is None else datetime.fromtimestamp(START + seconds, UTC)
        )
    ),
    on_limit=st.sampled_from(["answer", "stop", "return_calls"]),
)


@tried(50)
@given(
    plans,
    limits,
    st.lists(st.sampled_from([0.0, 0.5, 2.0, 5.0]), min_size=1, max_size=4).map(tuple),
    st.sampled_from([None, 0, 1, 2, 3]),
)
def test_no_run_passes_its_time(
    plan: Plan, drawn: Budget, durations: tuple[float, ...], swallows: int | None
) -> None:
    """But for a step, and for what is left behind; each history is valid, and each end that time made has its name."""
    # A service that reports no round trip for a request could be asked more often than the limit.
    turns = tuple(
        replace(turn, seconds=0.0, iterations=max(turn.iterations, 1))
        for turn in plan.turns
    )
    rules = replace(plan.rules, limits=drawn)
    world = SlowWorld(
        replace(plan, turns=turns, rules=rules, concurrency=1),
        durations=durations,
        swallows=swallows,
    )
    facts = _finished(world)
    assert world.problems == []
    end, over = facts[-1], 2 * STEP + (max(durations) if swallows is not None else 0.0)
    assert isinstance(end, Ended)
    event(f"{end.status} {end.limit}")
    if drawn.max_active_seconds is not None:
        assert fold(facts).usage.active_seconds <= drawn.max_active_seconds + over
    if drawn.deadline is not None:
        late = [fact for fact in facts if fact.at > drawn.deadline.timestamp() + over]
        assert [
            fact
            for fact in late
            if isinstance(fact, CallStarted | ModelReplied | Planned)
        ] == []
    started = [
        (fact.iteration, fact.index) for fact in facts if isinstance(fact, CallStarted)
    ]
    assert sorted(started) == sorted(
        (fact.iteration, fact.index) for fact in facts if isinstance(fact, CallFinished)
    )
    requests = world.requests + world.plan_requests * rules.charge_plan
    assert drawn.max_iterations is None or requests <= drawn.max_iterations
    assert charged(facts, rules) == fold(facts).usage.iterations


def _finished(world: SlowWorld) -> list[Fact]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_time, "GRACE", 0.01)
        patch.setattr(recorder, "_LOOK", 0.0)
        return asyncio.run(world.finish(world.start()))
