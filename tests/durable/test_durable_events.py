"""The events of a kept run: what a stream yields, for any number of readers and any worker."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.durable import Approvals, RunHandle, UnknownRunError
from planner_ext.durable.store import opened_store
from planner_ext.engine.document import dump_facts
from planner_ext.events import (
    CallFinished,
    CallStarted,
    Ended,
    Fact,
    ModelReplied,
    Paused,
    ResultReady,
    RunStarted,
    TextDelta,
)
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.durable import (
    GOAL,
    deciding_life,
    effects_in,
    on_sqlite,
    open_runs,
    pays,
    turn,
    world,
)
from support.processes import Lives

LOOK = calls(call("shop-label", {"order": 1}, id="label"), text="I look at the label.")
ANSWER = "It is settled, and here is some text in pieces."


def looks(request: ScriptedRequest) -> Any:
    """Call a tool, then answer."""
    return [LOOK, say(ANSWER)][turn(request)]


async def drained(handle: RunHandle[Any]) -> list[Any]:
    """Read all events of a handle."""
    return [event async for event in handle.events()]


def facts_in(events: list[Any]) -> list[Fact]:
    """Return the facts among events."""
    return [event for event in events if not isinstance(event, TextDelta | ResultReady)]


def text_in(events: list[Any], iteration: int) -> str:
    """Return the text that arrived in an iteration."""
    return "".join(
        event.text
        for event in events
        if isinstance(event, TextDelta) and event.iteration == iteration
    )


async def journal_of(store: str, run_id: str) -> list[Any]:
    """Return the facts of a run in its store, as JSON values."""
    async with opened_store(store) as opened:
        return dump_facts((await opened.load(run_id)).facts)


@on_sqlite
@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
async def test_a_kept_run_yields_what_a_stream_yields(
    store: str, tmp_path: Path, streaming: bool
) -> None:
    """Text before its reply if requests are streamed, the facts of the result in order, and last the result."""
    planner, kernel = world(tmp_path / "effects", looks)
    service = ScriptedChatCompletion(looks)
    kernel.add_service(service, overwrite=True)
    streamed = [event async for event in planner.invoke_stream(kernel, GOAL)]
    async with open_runs(store) as runs:
        handle = await runs.start(
            planner, kernel, GOAL, run_id="a", streaming=streaming
        )
        events = await drained(handle)
    assert [request.stream for request in service.requests] == [
        True,
        True,
        streaming,
        streaming,
    ]
    last = events[-1]
    assert isinstance(last, ResultReady)
    assert last.result.final_answer == ANSWER
    facts = facts_in(events)
    assert facts == list(last.result.facts)
    assert dump_facts(facts) == await journal_of(store, "a")
    shown = [
        type(event)
        for event in streamed
        if streaming or not isinstance(event, TextDelta)
    ]
    assert [type(event) for event in events] == shown
    if streaming:
        for event in facts:
            if isinstance(event, ModelReplied):
                assert (
                    text_in(events[: events.index(event)], event.iteration)
                    == event.text
                )


@pytest.mark.parametrize("streaming", [False, True], ids=["plain", "streaming"])
async def test_a_pause_ends_the_events_and_a_decision_elsewhere_continues_them(
    store: str, tmp_path: Path, lives: Lives, streaming: bool
) -> None:
    """The result is the pause; read again after another process has decided, all facts come, and the answer."""
    async with open_runs(store, poll_seconds=0.02) as runs:
        handle = await runs.start(
            *world(tmp_path / "effects", pays), GOAL, run_id="a", streaming=streaming
        )
        paused = await drained(handle)
        assert isinstance(paused[-2], Paused)
        assert paused[-1].result.status == "paused"
        assert lives.live(deciding_life, store, tmp_path / "report") == 0
        answered = await drained(handle)
    assert answered[-1].result.status == "answered"
    before = facts_in(paused)
    after = facts_in(answered)
    assert dump_facts(after[: len(before)]) == dump_facts(before)
    assert dump_facts(after) == await journal_of(store, "a")
    assert text_in(answered, 1) == ("Paid." if streaming else "")
    assert effects_in(tmp_path / "effects") == ["pay 5"]


@on_sqlite
async def test_a_resumed_run_is_streamed(store: str, tmp_path: Path) -> None:
    """The handle of a resume has the whole journal, and the text of the requests that it makes."""
    async with open_runs(store) as runs:
        planner, kernel = world(tmp_path / "effects", pays)
        await (await runs.start(planner, kernel, GOAL, run_id="a")).result()
        async with Approvals.connect(store) as approvals:
            (item,) = await approvals.pending()
        handle = await runs.resume(
            "a",
            planner,
            kernel,
            decisions={item.call_id: Approve(by="ann")},
            streaming=True,
        )
        events = await drained(handle)
    assert dump_facts(facts_in(events)) == await journal_of(store, "a")
    assert text_in(events, 0) == ""
    assert text_in(events, 1) == "Paid."


def driving_life(store: str, effects: Path, seconds: float) -> None:
    """Drive a run whose tool takes its time."""

    async def drive() -> None:
        async with open_runs(store, worker_id="first", poll_seconds=0.02) as runs:
            await (
                await runs.start(
                    *world(effects, looks, seconds=seconds), GOAL, run_id="a"
                )
            ).result()

    asyncio.run(drive())


async def until_recorded(store: str, kind: type[Fact]) -> None:
    """Wait until a run in another process has recorded a fact."""
    async with opened_store(store) as opened:
        while True:
            try:
                facts = (await opened.load("a")).facts
            except UnknownRunError:  # it has not begun
                facts = ()
            if any(isinstance(fact, kind) for fact in facts):
                return
            await asyncio.sleep(0.01)


async def test_the_facts_of_a_run_that_another_process_drives(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """They come as they are recorded, each once; when that process is killed, this one continues the run."""
    effects = tmp_path / "effects"
    first = lives.begin(driving_life, store, effects, 60.0)
    await until_recorded(store, CallStarted)
    async with open_runs(store, worker_id="second", poll_seconds=0.02) as runs:
        handle = await runs.start(
            *world(effects, looks), GOAL, run_id="a", streaming=True
        )
        events: list[Any] = []
        async with asyncio.timeout(120):
            async for event in handle.events():
                events.append(event)
                if isinstance(event, CallStarted) and first.is_alive():
                    assert first.pid is not None
                    os.kill(first.pid, signal.SIGKILL)
                    first.join()
    assert events[-1].result.final_answer == ANSWER
    assert dump_facts(facts_in(events)) == await journal_of(store, "a")
    assert [type(event) for event in facts_in(events)].count(CallFinished) == 1
    assert text_in(events, 0) == ""
    assert text_in(events, 1) == ANSWER


async def test_a_run_that_another_process_ends_has_its_result_here(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """The facts of the other process, and then the result that is in the journal."""
    first = lives.begin(driving_life, store, tmp_path / "effects", 0.3)
    await until_recorded(store, ModelReplied)
    async with open_runs(store, worker_id="second", poll_seconds=0.02) as runs:
        events = await drained(
            await runs.start(*world(tmp_path / "effects", looks), GOAL, run_id="a")
        )
    first.join()
    assert (first.exitcode, events[-1].result.final_answer) == (0, ANSWER)
    assert dump_facts(facts_in(events)) == await journal_of(store, "a")
    assert effects_in(tmp_path / "effects") == ["label 1"]


class Held:
    """A model that waits with its first reply until it may begin, with its second until it is let go."""

    def __init__(self, effects: Path) -> None:
        self.begin = asyncio.Event()
        self.asked = asyncio.Event()
        self.go = asyncio.Event()
        self.planner, self.kernel = world(effects, looks)
        self.kernel.add_service(
            ScriptedChatCompletion(looks, before_reply=self._wait), overwrite=True
        )

    async def _wait(self, request: ScriptedRequest) -> None:
        if turn(request) == 0:
            await self.begin.wait()
        else:
            self.asked.set()
            await self.go.wait()


async def read(stream: AsyncGenerator[Any, None], kind: type[Any]) -> list[Any]:
    """Read a stream up to the first event of a kind."""
    events: list[Any] = []
    async for event in stream:
        events.append(event)
        if isinstance(event, kind):
            return events
    raise AssertionError("it has ended")


async def test_readers_begin_late_leave_and_come_again(
    store: str, tmp_path: Path
) -> None:
    """Each gets all facts once, from the first on; one that leaves ends nothing, and one may come after the end."""
    held = Held(tmp_path / "effects")
    async with open_runs(store) as runs:
        handle = await runs.start(
            held.planner, held.kernel, GOAL, run_id="a", streaming=True
        )
        async with aclosing(handle.events()) as early:
            begun = await read(early, RunStarted)
            held.begin.set()
            begun += await read(early, CallFinished)
            await held.asked.wait()
            async with aclosing(handle.events()) as leaving:
                await read(leaving, CallFinished)
            late = asyncio.create_task(drained(handle))
            held.go.set()
            begun += [event async for event in early]
        readers = [begun, await late, await drained(handle)]
    journal = await journal_of(store, "a")
    for events in readers:
        assert dump_facts(facts_in(events)) == journal
        assert events[-1].result.final_answer == ANSWER
    assert text_in(readers[0], 0) == "I look at the label."
    assert text_in(readers[0], 1) == text_in(readers[1], 1) == ANSWER


@on_sqlite
async def test_a_slow_reader_does_not_slow_the_run(store: str, tmp_path: Path) -> None:
    """It stands still until the run has ended; then it gets every fact, and the text of the last reply whole."""
    async with open_runs(store) as runs:
        handle = await runs.start(
            *world(tmp_path / "effects", looks), GOAL, run_id="a", streaming=True
        )
        async with aclosing(handle.events()) as slow:
            events: list[Any] = [await anext(slow)]
            result = await handle.result()
            events += [event async for event in slow]
    assert events[-1].result is result
    assert facts_in(events) == list(result.facts)
    assert text_in(events, 1) == ANSWER


async def test_a_cancelled_reader_leaves_the_run_running(tmp_path: Path) -> None:
    """Its task ends at once; the run continues to its end."""
    held = Held(tmp_path / "effects")
    async with open_runs(tmp_path / "runs.db") as runs:
        handle = await runs.start(held.planner, held.kernel, GOAL, run_id="a")
        held.begin.set()
        reader = asyncio.create_task(drained(handle))
        await held.asked.wait()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        held.go.set()
        assert (await handle.result()).final_answer == ANSWER


@on_sqlite
async def test_a_fault_is_raised_where_the_result_would_be(
    store: str, tmp_path: Path
) -> None:
    """The facts before it come first; started again, the run tells each fact once, those of the first try included."""
    planner, kernel = world(tmp_path / "effects", looks)
    faults = [ValueError("no luck")]

    def script(request: ScriptedRequest) -> Any:
        if turn(request) == 1 and faults:
            raise faults.pop()
        return looks(request)

    kernel.add_service(ScriptedChatCompletion(script), overwrite=True)
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a", streaming=True)
        events: list[Any] = []
        with pytest.raises(Exception, match="no luck"):
            async for event in handle.events():
                events.append(event)
        again = await drained(
            await runs.start(planner, kernel, GOAL, run_id="a", streaming=True)
        )
    assert any(isinstance(event, CallFinished) for event in events)
    assert isinstance(again[-2], Ended)
    assert dump_facts(facts_in(again)) == await journal_of(store, "a")
    assert effects_in(tmp_path / "effects") == ["label 1"]


async def test_a_reader_leaves_out_the_facts_that_it_has(tmp_path: Path) -> None:
    """With ``after``, the first facts are left out, and the rest comes as for any other reader."""
    async with open_runs(tmp_path / "runs.db") as runs:
        handle = await runs.start(*world(tmp_path / "effects", looks), GOAL, run_id="a")
        result = await handle.result()
        events = [event async for event in handle.events(after=3)]
    assert dump_facts(facts_in(events)) == dump_facts(result.facts[3:])


async def test_events_are_read_and_not_awaited(tmp_path: Path) -> None:
    """Awaited by mistake, they say how they are read."""
    async with open_runs(tmp_path / "runs.db") as runs:
        handle = await runs.start(*world(tmp_path / "effects", looks), GOAL)
        events: Any = handle.events()
        with pytest.raises(TypeError, match="async for event in events"):
            await events
