"""Who watches sees what happens as it happens; time counts while a run works, and not while it waits."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from planner_ext.approval.decisions import Defer
from planner_ext.core.facts import (
    CallStarted,
    Clarified,
    Ended,
    Fact,
    Paused,
    Resumed,
)
from planner_ext.core.limits import Budget
from planner_ext.core.machine import AskModel
from planner_ext.core.state import Phase
from planner_ext.core.values import Reply, TranscriptItem
from planner_ext.engine.engine import watch
from planner_ext.engine.ports import Emit, Event, TextDelta
from support.engine import (
    PLAIN,
    FakeChat,
    FakeClock,
    FakeFunctions,
    FakeGate,
    _let_others_run,
    again,
    decision_of,
    engine_of,
    refused_with,
    types_of,
)


async def test_observers_that_raise_change_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failing observer is logged by name; the run, and the other observers, do not notice."""
    seen: list[str] = []

    def broken(fact: Fact) -> None:
        raise RuntimeError("sync")

    async def broken_later(fact: Fact) -> None:
        raise RuntimeError("async")

    async def watches(fact: Fact) -> None:
        seen.append(fact.type)

    engine = engine_of(["f"], "done", observers=(broken, broken_later, watches))
    with caplog.at_level(logging.ERROR):
        await engine.run()
    assert types_of(engine.facts) == PLAIN == seen
    assert "broken" in caplog.text
    assert "broken_later" in caplog.text


async def test_a_watched_run_tells_its_facts_and_its_text() -> None:
    """Deltas come before the reply they belong to; facts come as they are recorded; the journal is the same."""
    events: list[Event] = []

    async def emit(event: Event) -> None:
        events.append(event)

    watched, plain = engine_of(["f"], "done", emit=emit), engine_of(["f"], "done")
    await watched.run()
    await plain.run()
    assert watched.facts == plain.facts
    assert [
        event for event in events if not isinstance(event, TextDelta)
    ] == watched.facts[1:]
    assert [type(event).__name__ for event in events[-3:]] == [
        "TextDelta",
        "ModelReplied",
        "Ended",
    ]


async def test_watchers_get_facts_in_the_order_of_the_journal() -> None:
    """A watcher that takes its time over one fact is not told a later one first, though calls run at once."""
    seen: list[Fact] = []

    async def slow(fact: Fact) -> None:
        if isinstance(fact, CallStarted) and fact.index == 0:
            for _ in range(5):
                await _let_others_run()
        seen.append(fact)

    engine = engine_of(["f", "g"], "done", observers=(slow,))
    await engine.run()
    assert seen == engine.facts[1:]


async def test_observers_hear_how_a_run_ended_that_a_fault_ended() -> None:
    """Observers get the facts that answer the open batch, like any others, so that no span and no count stays open."""
    seen: list[Fact] = []

    def fault() -> None:
        raise LookupError("defect")

    engine = engine_of(
        ["f", "g"], functions=FakeFunctions(does={"f": fault}), observers=(seen.append,)
    )
    await refused_with(engine, LookupError)
    assert seen == engine.facts[1:]
    assert isinstance(seen[-1], Ended)


async def test_followers_get_facts_first_and_with_the_state() -> None:
    """A follower sees each fact with the state after it, before any observer does."""
    order: list[str] = []
    engine = engine_of(
        "done",
        follow=lambda state, fact: order.append(f"follow {fact.type} {state.phase}"),
        observers=(lambda fact: order.append(f"observe {fact.type}"),),
    )
    await engine.run()
    assert order == [
        "follow ModelReplied answering",
        "observe ModelReplied",
        "follow Ended ended",
        "observe Ended",
    ]


@pytest.mark.parametrize("moment", [Ended, Paused])
async def test_a_watcher_that_fails_at_the_end_does_not_undo_it(moment: type) -> None:
    """A run that has paused, or returned its calls, stays so when its last event cannot be delivered."""

    async def emit(event: Event) -> None:
        if isinstance(event, moment):
            raise ConnectionResetError("the consumer is gone")

    name = "mine" if moment is Ended else "f"
    engine = engine_of([name], emit=emit, gate=FakeGate({"f": Defer()}))
    await refused_with(engine, ConnectionResetError)
    assert isinstance(engine.facts[-1], moment)


async def test_requests_keep_their_distance() -> None:
    """The next request starts no sooner than the least time after the last one did; time spent meanwhile counts."""
    clock = FakeClock()

    def work() -> None:
        clock.time += 4

    engine = engine_of(
        ["f"], ["g"], ["h"], "done",
        clock=clock,
        functions=FakeFunctions(does={"f": work, "h": lambda: setattr(clock, "time", clock.time + 99)}),
        min_iteration_seconds=10,
    )  # fmt: skip
    await engine.run()
    assert clock.slept == [6, 10]


async def test_the_plan_request_keeps_its_distance() -> None:
    """The first trip waits for the plan request's least time; without one nothing ever waits."""
    clock = FakeClock()
    await engine_of(
        "plan", "done", rules={"plan": True}, clock=clock, min_iteration_seconds=10
    ).run()
    assert clock.slept == [10]
    clock = FakeClock()
    await engine_of(["f"], "done", clock=clock).run()
    assert clock.slept == []


async def test_a_deadline_that_passes_while_a_request_waits_is_kept() -> None:
    """The wait ends with the deadline, and so does the run: no request follows."""
    clock = FakeClock()
    deadline = datetime.fromtimestamp(clock.now() + 5, UTC)
    limits = Budget(deadline=deadline)
    chat = FakeChat([["f"], "done"])
    engine = engine_of(
        chat, rules={"limits": limits}, clock=clock, min_iteration_seconds=10
    )
    state = await engine.run()
    assert state.ended is not None
    assert state.ended.status == "limit_reached"
    assert state.ended.limit == "deadline"
    assert clock.slept == [5]
    assert (len(chat.requests), state.usage.iterations) == (1, 1)


async def test_active_seconds_are_what_the_run_worked() -> None:
    """Requests and functions count; the wait for a person does not, in every engine that continues the run."""
    clock = FakeClock()
    functions = FakeFunctions(
        does={"f": lambda: setattr(clock, "time", clock.time + 3)}
    )
    chat = FakeChat(
        [["f"], ["g"]], on_ask=lambda: setattr(clock, "time", clock.time + 2)
    )
    engine = engine_of(
        chat, functions=functions, clock=clock, gate=FakeGate({"g": Defer()})
    )
    state = await engine.run()
    assert state.phase is Phase.PAUSED
    assert state.usage.active_seconds == 7
    clock.time += 500
    facts = [
        *again(engine),
        Resumed(at=clock.now()),
        replace(decision_of(engine), verdict="run", at=clock.now()),
    ]
    chat = FakeChat(["done"], on_ask=lambda: setattr(clock, "time", clock.time + 1))
    state = await engine_of(chat, facts=facts, functions=functions, clock=clock).run()
    assert state.usage.active_seconds == 8


async def test_a_deadline_that_passes_in_review_lets_nothing_start() -> None:
    """Time is looked at before each batch, after the review: a decider may have taken an hour."""
    clock, functions = FakeClock(), FakeFunctions()
    gate = FakeGate(on_review=lambda: setattr(clock, "time", clock.time + 3600))
    limits = Budget(
        deadline=datetime.fromtimestamp(clock.now() + 60, UTC), on_limit="stop"
    )
    engine = engine_of(
        ["f"], clock=clock, functions=functions, gate=gate, rules={"limits": limits}
    )
    state = await engine.run()
    assert functions.trace == []
    assert state.ended is not None
    assert state.ended.limit == "deadline"


async def test_a_question_expires_counted_from_when_it_was_put() -> None:
    """A deferred call's time to answer starts when it is deferred, not when its review began."""
    clock = FakeClock()
    gate = FakeGate(
        {"f": Defer(expires_in=60)},
        on_review=lambda: setattr(clock, "time", clock.time + 3600),
    )
    engine = engine_of(["f"], clock=clock, gate=gate)
    await engine.run()
    assert decision_of(engine).expires_at == clock.now() + 60


async def test_a_request_that_the_time_limit_left_behind_streams_nothing_more() -> None:
    """A connector that ignores its cancellation may still receive: its text does not reach this run."""
    clock, left_behind, late = FakeClock(), asyncio.Event(), asyncio.Event()

    class Stubborn(FakeChat):
        async def ask(
            self,
            transcript: Sequence[TranscriptItem],
            request: AskModel,
            emit: Emit | None,
        ) -> Reply:
            assert emit is not None
            await emit(TextDelta(text="in time", iteration=0))
            clock.time += 60
            try:
                await asyncio.Future()
            except asyncio.CancelledError:
                await left_behind.wait()
            await emit(TextDelta(text="late", iteration=0))
            late.set()
            raise AssertionError("nothing reads it")

    async def emit(event: Event) -> None:
        events.append(event)

    events: list[Event] = []
    engine = engine_of(
        Stubborn([]),
        emit=emit,
        clock=clock,
        rules={"limits": Budget(max_active_seconds=10)},
    )
    await engine.run()
    left_behind.set()
    await late.wait()
    assert [event.text for event in events if isinstance(event, TextDelta)] == [
        "in time"
    ]
    assert types_of(engine.facts) == ["RequestFailed", "Ended"]


async def test_a_consumer_that_is_slower_than_many_calls_receives_everything_in_order() -> (
    None
):
    """Calls that run at once may each be one event further ahead than a consumer is given; none is lost."""

    async def run(emit: Emit) -> str:
        await asyncio.gather(
            *(emit(TextDelta(text=str(number), iteration=0)) for number in range(300))
        )
        return "done"

    received: list[str] = []
    async for event in watch(run):
        assert isinstance(event, TextDelta)
        received.append(event.text)
        await _let_others_run()
    assert received == [str(number) for number in range(300)]


async def test_a_question_without_a_clarifier_is_left_open() -> None:
    """A run that began with a clarifier and is driven without one takes the model's plain reply as it is."""
    engine = engine_of("where?", rules={"clarifier": True})
    state = await engine.run()
    (clarified,) = [fact for fact in engine.facts if isinstance(fact, Clarified)]
    assert clarified.answer is None
    assert clarified.by == ""
    assert clarified.usage.iterations == 0
    assert state.ended is not None
    assert (state.ended.status, state.ended.answer) == ("answered", "where?")
