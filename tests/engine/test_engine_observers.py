"""An observer can tell which run a fact is of; one that takes the fact alone stays as it is."""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from planner_ext.engine.ports import Observer
from planner_ext.events import RunInfo
from support.engine import engine_of


async def test_an_observer_that_takes_two_arguments_gets_the_run() -> None:
    """Every fact comes with the run's id and goal, from the first on."""
    seen: list[tuple[str, RunInfo]] = []

    class Watcher:
        def __call__(self, fact: Any, run: RunInfo) -> None:
            seen.append((fact.type, run))

        async def watch(self, fact: Any, run: RunInfo, /) -> None:
            seen.append((fact.type, run))

    watcher = Watcher()
    engine = engine_of(
        ["f"],
        "done",
        observers=(watcher, watcher.watch, lambda fact, run: watcher(fact, run)),
    )
    await engine.run()
    assert len(seen) % 3 == 0
    assert {run for _, run in seen} == {
        RunInfo(run_id=engine.state.run_id, goal=engine.state.goal)
    }


async def test_an_observer_of_facts_alone_is_called_as_before() -> None:
    """A parameter with a default is its own, and so is what a partial has bound."""
    seen: list[object] = []

    def plain(fact: object) -> None:
        seen.append(fact)

    def with_default(fact: object, into: list[object] = seen, *, also: int = 0) -> None:
        into.append(fact)

    def bound(into: list[object], fact: object) -> None:
        into.append(fact)

    def any_number(*facts: object) -> None:
        seen.extend(facts)

    observers: tuple[Observer, ...] = (
        plain,
        with_default,
        partial(bound, seen),
        seen.append,
        any_number,
    )
    engine = engine_of(["f"], "done", observers=observers)
    before = len(engine.facts)
    await engine.run()
    assert len(seen) == 5 * (len(engine.facts) - before)
    assert not any(isinstance(fact, RunInfo) for fact in seen)


async def test_an_observer_without_a_signature_is_called_with_the_fact_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A builtin class may not say what it takes; where it fails, the error is logged and the run continues."""
    engine = engine_of(["f"], "done", observers=(type,))
    await engine.run()
    assert {record.exc_info and record.exc_info[0] for record in caplog.records} == {
        TypeError
    }
    assert engine.state.ended is not None
    assert engine.state.ended.status == "answered"


async def test_what_an_observer_waits_for_may_be_cancelled() -> None:
    """Its ``CancelledError`` is an exception like any other: the run was not cancelled, and continues."""

    async def observer(_: Any) -> None:
        waiting = asyncio.ensure_future(asyncio.Event().wait())
        waiting.cancel()
        await waiting

    state = await engine_of(["f"], "done", observers=(observer,)).run()
    assert state.ended is not None
    assert state.ended.status == "answered"


async def test_an_observer_cannot_suppress_the_cancellation_of_the_run() -> None:
    """The run ends at the fact that the observer was busy with."""
    watches = asyncio.Event()

    async def observer(_: Any) -> None:
        if not watches.is_set():
            watches.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    engine = engine_of("done", observers=(observer,))
    run = asyncio.create_task(engine.run())
    await watches.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert engine.state.ended is None
