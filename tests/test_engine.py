"""The engine over fake ports: order, concurrency, stopping, cancellation, interception, pausing, storing.

Messages are plain dicts; time is a fake clock; whatever has to happen in an order is ordered by events, never by sleep.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import pytest

from planner_ext.approval.decisions import Approve, Decision, Defer, Deny, Supply, ToolCall
from planner_ext.approval.fingerprint import digest_of
from planner_ext.core.actions import AskModel
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    Ended,
    Fact,
    IterationCompleted,
    Paused,
    Resumed,
    Rules,
    RunStarted,
    StopRequested,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import Limits
from planner_ext.core.state import Phase, State
from planner_ext.core.values import CallResult, Checked, Entry, Reply, RequestedCall, Usage
from planner_ext.engine import CallFailedError, Engine, StopHandle
from planner_ext.journal import dump_journal, load_journal
from planner_ext.ports import Emit, Event, Finished, Ports, TextDelta

GOAL = {"role": "user", "text": "goal"}
PLAIN = ["ModelReplied", "CallDecided", "CallStarted", "CallFinished", "IterationCompleted", "ModelReplied", "Ended"]


class FakeClock:
    """Time that moves when told to, and when slept."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


@dataclass
class FakeChat:
    """Says its turns in order: a text, the names of functions to call, a reply, or an error to raise."""

    turns: list[Any]
    on_ask: Callable[[], object] = lambda: None
    requests: list[AskModel] = field(default_factory=list)
    sent: list[Sequence[Entry]] = field(default_factory=list)

    async def ask(self, transcript: Sequence[Entry], request: AskModel, emit: Emit | None) -> Reply:
        self.requests.append(request)
        self.sent.append(tuple(transcript))
        if isinstance(waiting := self.on_ask(), Awaitable):
            await waiting
        turn = self.turns[len(self.requests) - 1]
        if isinstance(turn, BaseException):
            raise turn
        if emit is not None and isinstance(turn, str):
            await emit(TextDelta(text=turn, iteration=request.iteration))
        return turn if isinstance(turn, Reply) else _reply(turn)


def _reply(turn: str | Sequence[str]) -> Reply:
    if isinstance(turn, str):
        return Reply(message={"role": "assistant", "text": turn}, text=turn, finish_reason="stop")
    calls = tuple(RequestedCall(id=f"c{index}", name=name, arguments="{}") for index, name in enumerate(turn))
    message = {"role": "assistant", "text": "", "calls": [call.id for call in calls]}
    return Reply(message=message, calls=calls, finish_reason="tool_calls", usage=Usage(prompt_tokens=1))


@dataclass
class FakeFunctions:
    """Functions that exist unless they are called unknown, bad, final or mine; each does what it is told."""

    does: dict[str, Callable[[], Any]] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    version: int = 0

    def check(self, call: RequestedCall, edited: str | None = None) -> Checked:
        kinds: dict[str, Any] = {"unknown": "unknown", "bad": "invalid", "final": "final_answer", "mine": "external"}
        kind = kinds.get(call.name, "function")
        if edited is not None and "bad" in edited:
            kind = "invalid"
        arguments = {"version": self.version, "edited": edited} if kind == "function" else {}
        answer = {"invalid": "Bad arguments.", "unknown": "No such function.", "final_answer": "42"}.get(kind, "")
        return Checked(kind=kind, function=call.name, function_name=call.name, arguments=arguments, answer=answer)

    async def run(self, call: RequestedCall, checked: Checked, *, index: int, state: State) -> Finished:
        self.trace.append(f"start {call.name}")
        result = self.does.get(call.name, lambda: None)()
        if isinstance(result, Awaitable):
            result = await result
        self.trace.append(f"end {call.name}")
        edited = checked.arguments["edited"]
        return result if isinstance(result, Finished) else Finished(outcome="ok", text=f"{call.name}({edited or ''})")

    def encode(self, result: Any) -> str:
        return f"encoded {result}"


class FakePrompts:
    """Says what it is asked to say, in so many words."""

    async def plan_request(self) -> tuple[Any, ...]:
        return ({"role": "user", "text": "plan?"},)

    async def opening(self, plan: str) -> tuple[Any, ...]:
        return (GOAL, {"role": "assistant", "text": plan})

    def message(self, purpose: str) -> Any:
        return {"role": "user", "text": purpose}


@dataclass
class FakeGate:
    """Decides by the function's name; approves what it does not know."""

    decisions: Mapping[str, Decision] = field(default_factory=dict)
    on_review: Callable[[], None] = lambda: None
    seen: list[tuple[ToolCall, ...]] = field(default_factory=list)
    unwatched: Set[str] = frozenset()

    def watches(self, function: str) -> bool:
        return function not in self.unwatched

    async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision]:
        self.seen.append(tuple(calls))
        self.on_review()
        return [self.decisions.get(call.function_name, Approve()) for call in calls]


@dataclass
class FakeHook:
    """Asks for the same each time an iteration is completed."""

    asked: Mapping[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    seen: list[State] = field(default_factory=list)

    async def completed(self, state: State) -> Mapping[str, Any]:
        self.seen.append(state)
        if self.error is not None:
            raise self.error
        return self.asked


class FakeStore:
    """Keeps facts as a table with a unique position does; every append lets other tasks run first."""

    def __init__(self, fail_on: str = "") -> None:
        self.rows: dict[int, Fact] = {}
        self.fail_on = fail_on

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        await _let_others_run()
        for offset, fact in enumerate(facts):
            if fact.type == self.fail_on:
                raise OSError("disk full")
            if seq + offset in self.rows:
                raise OSError(f"row {seq + offset} exists")
            self.rows[seq + offset] = fact


async def _let_others_run() -> None:
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


def started(**rules: Any) -> RunStarted:
    """Begin a run."""
    return RunStarted(run_id="run", rules=Rules(**rules), messages=(GOAL,), goal="goal", at=1000.0)


def engine_of(
    *turns: Any,
    facts: Sequence[Fact] | None = None,
    emit: Emit | None = None,
    stop: StopHandle | None = None,
    rules: Mapping[str, Any] | None = None,
    **ports: Any,
) -> Engine:
    """Make an engine over fakes."""
    chat = turns[0] if turns and isinstance(turns[0], FakeChat) else FakeChat(list(turns))
    world: dict[str, Any] = {"functions": FakeFunctions(), "prompts": FakePrompts(), "clock": FakeClock(), **ports}
    facts = (started(**(rules or {})),) if facts is None else facts
    return Engine(facts, Ports(chat=chat, **world), emit=emit, stop=stop)


def types_of(facts: Sequence[Fact]) -> list[str]:
    """Name the facts after the start."""
    return [fact.type for fact in facts[1:]]


def results_of(state: State) -> list[str]:
    """List what the model reads as results."""
    return [entry.text for entry in state.transcript if isinstance(entry, CallResult)]


def again(engine: Engine) -> tuple[Fact, ...]:
    """Send a journal through its JSON text."""
    return load_journal(dump_journal(engine.facts, lambda message: message))


async def refused_with(engine: Engine, error: type[BaseException]) -> BaseException:
    """Run an engine that raises; return what it raised."""
    with pytest.raises(error) as caught:
        await engine.run()
    return caught.value


class Meeting:
    """Functions that wait until all of them run at once: whoever is alone waits for ever."""

    def __init__(self, size: int) -> None:
        self.barrier = asyncio.Barrier(size)

    async def join(self) -> None:
        await self.barrier.wait()


# Order


async def test_a_run_records_what_happened_in_order() -> None:
    """One tool round and an answer are seven facts; the journal folds to the engine's own state."""
    engine = engine_of(["f"], "done")
    state = await engine.run()
    assert types_of(engine.facts) == PLAIN
    assert state.ended is not None
    assert (state.ended.status, state.ended.answer) == ("answered", "done")
    assert fold(engine.facts) == state


async def test_a_planned_run_opens_with_its_plan() -> None:
    """The plan is asked for first, without functions, and its opening is what the next request sends."""
    chat = FakeChat(["the plan", "done"])
    engine = engine_of(chat, rules={"plan": True})
    await engine.run()
    assert types_of(engine.facts) == ["Planned", "ModelReplied", "Ended"]
    assert chat.requests[0] == AskModel(iteration=-1, offer=False, tool_choice=None, withheld=None)
    assert chat.sent == [({"role": "user", "text": "plan?"},), (GOAL, {"role": "assistant", "text": "the plan"})]


async def test_a_step_is_announced_by_the_planners_own_message() -> None:
    """The message between steps is written by the prompts and sent with the next request."""
    chat = FakeChat([["f"], "closed", "done"])
    engine = engine_of(chat, rules={"rounds_per_step": 1})
    await engine.run()
    assert "MessageAdded" in types_of(engine.facts)
    assert chat.sent[2][-1] == {"role": "user", "text": "step"}


async def test_all_calls_are_decided_before_any_starts() -> None:
    """The whole batch is reviewed at once, and every decision is recorded before the first start."""
    gate = FakeGate()
    engine = engine_of(["f", "g", "h"], "done", gate=gate)
    await engine.run()
    order = types_of(engine.facts)
    assert max(i for i, kind in enumerate(order) if kind == "CallDecided") < order.index("CallStarted")
    assert [[call.function_name for call in batch] for batch in gate.seen] == [["f", "g", "h"]]


async def test_results_stand_in_call_order_whatever_ended_first() -> None:
    """The first call ends last; its result still comes first."""
    done = asyncio.Event()
    functions = FakeFunctions(does={"f": done.wait, "g": done.set})
    engine = engine_of(["f", "g"], "done", functions=functions)
    state = await engine.run()
    assert [fact.index for fact in engine.facts if isinstance(fact, CallFinished)] == [1, 0]
    assert results_of(state) == ["f()", "g()"]


async def test_calls_of_a_batch_run_at_once() -> None:
    """Without a cap all calls of a batch are under way together."""
    meeting = Meeting(5)
    functions = FakeFunctions(does=dict.fromkeys("fghij", meeting.join))
    state = await engine_of(list("fghij"), "done", functions=functions).run()
    assert len(results_of(state)) == 5


@pytest.mark.parametrize("cap", [2, 3])
async def test_a_cap_on_concurrency_is_reached_and_never_passed(cap: int) -> None:
    """As many calls as allowed run at once, and not one more."""
    meeting, running, most = Meeting(cap), 0, 0

    async def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await meeting.join()
        running -= 1

    functions = FakeFunctions(does=dict.fromkeys("fghijk", work))
    await engine_of(list("fghijk"), "done", functions=functions, max_concurrency=cap).run()
    assert most == cap


async def test_a_cap_of_one_is_one_after_the_other() -> None:
    """With ``max_concurrency=1`` a call starts when the one before it has ended, in call order."""
    functions = FakeFunctions(does=dict.fromkeys("fgh", _let_others_run))
    await engine_of(["f", "g", "h"], "done", functions=functions, max_concurrency=1).run()
    assert functions.trace == ["start f", "end f", "start g", "end g", "start h", "end h"]


# Stopping


async def test_a_run_stopped_before_its_first_request_makes_none() -> None:
    """A stop that was asked for before the run began is honoured before anything is sent."""
    chat, stop = FakeChat([]), StopHandle()
    stop.stop("enough")
    engine = engine_of(chat, stop=stop)
    state = await engine.run()
    assert chat.requests == []
    assert types_of(engine.facts) == ["StopRequested", "Ended"]
    assert state.ended is not None
    assert (state.ended.status, state.ended.reason) == ("stopped", "enough")


async def test_the_first_reason_to_stop_stays() -> None:
    """A handle asked twice keeps its first reason; one that nobody asked has none."""
    stop = StopHandle()
    assert stop.reason is None
    stop.stop("first")
    stop.stop("second")
    assert stop.reason == "first"


@pytest.mark.parametrize("cap", [1, 2])
async def test_a_stop_between_the_calls_of_a_batch_starts_no_further_one(cap: int) -> None:
    """What runs finishes; what had not started is answered "not executed"; no request follows."""
    stop, chat = StopHandle(), FakeChat([["f", "g", "h"]])
    functions = FakeFunctions(does={"f": lambda: stop.stop("enough")})
    state = await engine_of(chat, functions=functions, stop=stop, max_concurrency=cap).run()
    assert functions.trace == ["start f", "end f"]
    assert results_of(state) == ["f()"] + ["Not executed: the run was stopped. enough"] * 2
    assert len(chat.requests) == 1


async def test_a_stop_while_a_request_is_under_way_keeps_its_answer() -> None:
    """An answer that comes in while the run is being stopped is kept; calls that come in are not run."""
    stop = StopHandle()
    state = await engine_of(FakeChat(["done"], on_ask=stop.stop), stop=stop).run()
    assert state.ended is not None
    assert (state.ended.status, state.ended.answer) == ("answered", "done")
    functions = FakeFunctions()
    state = await engine_of(FakeChat([["f"]], on_ask=stop.stop), stop=stop, functions=functions).run()
    assert functions.trace == []
    assert state.ended is not None
    assert state.ended.status == "stopped"


async def test_a_stop_during_review_lets_nothing_start() -> None:
    """A stop that comes while a decider thinks is honoured before the first call."""
    stop, functions = StopHandle(), FakeFunctions()
    state = await engine_of(["f"], functions=functions, stop=stop, gate=FakeGate(on_review=stop.stop)).run()
    assert functions.trace == []
    assert state.ended is not None
    assert state.ended.status == "stopped"


async def test_a_run_that_has_not_begun_does_nothing() -> None:
    """An engine over an empty journal has nothing to do, stopped or not."""
    stop = StopHandle()
    stop.stop()
    engine = engine_of(facts=(), stop=stop)
    assert (await engine.run()).phase is Phase.NEW
    assert engine.facts == []


async def test_a_filter_that_terminates_ends_the_run_after_its_batch() -> None:
    """The rest of the batch still runs, the results stay, and no request follows."""
    chat = FakeChat([["f", "g"]])
    over = Finished(outcome="ok", text="last", terminate=True)
    state = await engine_of(chat, functions=FakeFunctions(does={"f": lambda: over}), max_concurrency=1).run()
    assert results_of(state) == ["last", "g()"]
    assert state.ended is not None
    assert state.ended.status == "stopped"


async def test_a_filter_that_terminates_ends_an_interrupted_run_after_its_batch_too() -> None:
    """A run that is gone on with from the middle of that batch runs the rest of it, as it would have anyway."""
    over = Finished(outcome="ok", text="last", terminate=True)
    functions = FakeFunctions(does={"f": lambda: over})
    whole = engine_of(["f", "g"], functions=functions, max_concurrency=1)
    await whole.run()
    place = types_of(whole.facts).index("CallFinished") + 2
    assert whole.facts[place - 1].type == "CallFinished"
    resumed = engine_of(facts=load_journal(dump_journal(whole.facts[:place], lambda message: message)))
    await resumed.run()
    assert resumed.facts == whole.facts


async def test_a_call_to_an_unknown_function_can_stop_the_run() -> None:
    """Where it is asked for, an unknown function ends the run by name; the other calls are not run."""
    functions = FakeFunctions()
    state = await engine_of(["f", "unknown"], functions=functions, stop_on_unknown=True).run()
    assert functions.trace == []
    assert state.ended is not None
    assert "unknown" in state.ended.reason
    assert results_of(state)[1] == "No such function."
    state = await engine_of(["unknown"], "done").run()
    assert state.ended is not None
    assert state.ended.status == "answered"


# Cancellation and faults


@pytest.mark.parametrize("cap", [None, 2, 1])
async def test_cancelling_in_the_middle_of_a_batch_answers_every_call(cap: int | None) -> None:
    """Running calls are cancelled, every call has its answer, the run is ended, and the cancellation goes on."""
    begun, cancelled = asyncio.Event(), []

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("g")
            raise

    functions = FakeFunctions(does={"g": hang})
    engine = engine_of(["f", "g", "unknown", "h"], functions=functions, max_concurrency=cap)
    task = asyncio.create_task(engine.run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["g"]
    state = fold(engine.facts)
    assert state.phase is Phase.ENDED
    assert [entry.call_id for entry in state.transcript if isinstance(entry, CallResult)] == ["c0", "c1", "c2", "c3"]
    assert results_of(state)[:3] == [
        "f()",
        "Cancelled while it ran; whether it took effect is not known.",
        "No such function.",
    ]
    assert state.ended is not None
    assert (state.ended.status, state.ended.reason) == ("stopped", "The run was cancelled.")


async def test_cancelling_a_request_leaves_the_run_as_it_was() -> None:
    """Nothing is recorded for a request that was cancelled: the run can go on from there."""
    asked = asyncio.Event()

    async def hang() -> None:
        asked.set()
        await asyncio.Event().wait()

    engine = engine_of(FakeChat([], on_ask=hang))
    task = asyncio.create_task(engine.run())
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.state.phase is Phase.ASKING
    assert types_of(engine.facts) == []


async def test_a_failing_request_raises_and_leaves_the_run_resumable() -> None:
    """What the connector raises leaves as it is; the same journal goes on with another connector."""
    engine = engine_of(["f"], ConnectionError("down"))
    await refused_with(engine, ConnectionError)
    assert engine.state.phase is Phase.ASKING
    state = await engine_of("done", facts=again(engine)).run()
    assert state.ended is not None
    assert state.ended.answer == "done"
    assert results_of(state) == ["f()"]


@pytest.mark.parametrize("names", [["f"], ["f", "g"]])
async def test_a_fault_in_the_adapter_answers_the_batch_and_is_raised_as_it_is(names: list[str]) -> None:
    """A fault leaves the engine as itself, never wrapped, however many calls ran beside it; every call is answered."""

    def fault() -> None:
        raise LookupError("defect")

    engine = engine_of(names, functions=FakeFunctions(does={"f": fault}))
    await refused_with(engine, LookupError)
    assert len(results_of(engine.state)) == len(names)
    assert engine.state.ended is not None
    assert engine.state.ended.reason == "The run failed."


async def test_a_failed_function_can_be_raised_once_its_batch_is_answered() -> None:
    """Where it is asked for, the first failure is raised with its cause, after every call of the batch has ended."""
    error = ValueError("boom")
    failed = Finished(outcome="failed", text="It failed.", error="ValueError: boom", exception=error)
    functions = FakeFunctions(does={"f": lambda: failed})
    engine = engine_of(["f", "g"], functions=functions, raise_errors=True)
    raised = await refused_with(engine, CallFailedError)
    assert isinstance(raised, CallFailedError)
    assert raised.function == "f"
    assert raised.__cause__ is error
    assert results_of(engine.state) == ["It failed.", "g()"]


async def test_the_first_of_several_failures_is_raised_and_without_one_nothing() -> None:
    """The failure that came first is the one that is named; a run in which all went well is raised for nothing."""
    functions = FakeFunctions(
        does={
            "g": lambda: Finished(outcome="failed", text="first", error="KeyError: first"),
            "h": lambda: Finished(outcome="timed_out", text="second", error="TimeoutError: second"),
        }
    )
    engine = engine_of(["f", "g", "h"], functions=functions, raise_errors=True, max_concurrency=1)
    assert "KeyError: first" in str(await refused_with(engine, CallFailedError))
    state = await engine_of(["f"], "done", raise_errors=True).run()
    assert state.ended is not None
    assert state.ended.status == "answered"


def test_a_raised_failure_is_an_error_of_this_package() -> None:
    """One root catches everything that is raised on purpose."""
    assert issubclass(CallFailedError, PlannerExtError)


async def test_a_run_that_raised_a_failure_can_be_resumed() -> None:
    """The journal of a run that raised goes on with a resumption, as after any other fault."""
    failed = Finished(outcome="failed", text="It failed.", error="ValueError: boom")
    engine = engine_of(["f"], functions=FakeFunctions(does={"f": lambda: failed}), raise_errors=True)
    await refused_with(engine, CallFailedError)
    resumed = engine_of("done", facts=[*again(engine), Resumed(at=1000.0)])
    state = await resumed.run()
    assert state.ended is not None
    assert state.ended.answer == "done"


async def test_a_failed_function_is_by_default_a_result() -> None:
    """The model reads the failure and the run goes on."""
    failed = Finished(outcome="failed", text="It failed.", error="ValueError: boom")
    state = await engine_of(["f"], "done", functions=FakeFunctions(does={"f": lambda: failed})).run()
    assert results_of(state) == ["It failed."]
    assert state.ended is not None
    assert state.ended.status == "answered"


# Watching


async def test_observers_that_raise_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
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
    assert [event for event in events if not isinstance(event, TextDelta)] == watched.facts[1:]
    assert [type(event).__name__ for event in events[-3:]] == ["TextDelta", "ModelReplied", "Ended"]


async def test_watchers_are_told_in_the_order_of_the_journal() -> None:
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
    """The facts that answer the open batch are told like any others, so that no span and no count stays open."""
    seen: list[Fact] = []

    def fault() -> None:
        raise LookupError("defect")

    engine = engine_of(["f", "g"], functions=FakeFunctions(does={"f": fault}), observers=(seen.append,))
    await refused_with(engine, LookupError)
    assert seen == engine.facts[1:]
    assert isinstance(seen[-1], Ended)


async def test_followers_are_told_first_and_with_the_state() -> None:
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


# Time


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


async def test_the_plan_request_keeps_its_distance_too() -> None:
    """The first trip waits for the plan request's least time; without one nothing ever waits."""
    clock = FakeClock()
    await engine_of("plan", "done", rules={"plan": True}, clock=clock, min_iteration_seconds=10).run()
    assert clock.slept == [10]
    clock = FakeClock()
    await engine_of(["f"], "done", clock=clock).run()
    assert clock.slept == []


async def test_a_deadline_that_passes_while_a_request_waits_is_kept() -> None:
    """A deadline is checked when the request is due, not before the wait: the next one offers no functions."""
    clock = FakeClock()
    deadline = datetime.fromtimestamp(clock.now() + 5, UTC)
    limits = Limits(deadline=deadline)
    engine = engine_of(["f"], "done", rules={"limits": limits}, clock=clock, min_iteration_seconds=10)
    state = await engine.run()
    assert state.ended is not None
    assert (state.ended.status, state.ended.limit, clock.slept) == ("limit_reached", "deadline", [10])


async def test_active_seconds_are_what_the_run_worked() -> None:
    """Requests and functions count; the wait for a person does not, in whatever engine the run goes on."""
    clock = FakeClock()
    functions = FakeFunctions(does={"f": lambda: setattr(clock, "time", clock.time + 3)})
    chat = FakeChat([["f"], ["g"]], on_ask=lambda: setattr(clock, "time", clock.time + 2))
    engine = engine_of(chat, functions=functions, clock=clock, gate=FakeGate({"g": Defer()}))
    state = await engine.run()
    assert state.phase is Phase.PAUSED
    assert state.ledger.usage.active_seconds == 7
    clock.time += 500
    facts = [*again(engine), Resumed(at=clock.now()), replace(decision_of(engine), verdict="run", at=clock.now())]
    chat = FakeChat(["done"], on_ask=lambda: setattr(clock, "time", clock.time + 1))
    state = await engine_of(chat, facts=facts, functions=functions, clock=clock).run()
    assert state.ledger.usage.active_seconds == 8


async def test_a_deadline_that_passes_in_review_lets_nothing_start() -> None:
    """Time is looked at before each batch, after the review: a decider may have taken an hour."""
    clock, functions = FakeClock(), FakeFunctions()
    gate = FakeGate(on_review=lambda: setattr(clock, "time", clock.time + 3600))
    limits = Limits(deadline=datetime.fromtimestamp(clock.now() + 60, UTC), on_limit="stop")
    engine = engine_of(["f"], clock=clock, functions=functions, gate=gate, rules={"limits": limits})
    state = await engine.run()
    assert functions.trace == []
    assert state.ended is not None
    assert state.ended.limit == "deadline"


async def test_a_question_expires_counted_from_when_it_was_put() -> None:
    """A deferred call's time to answer starts when it is deferred, not when its review began."""
    clock = FakeClock()
    gate = FakeGate({"f": Defer(expires_in=60)}, on_review=lambda: setattr(clock, "time", clock.time + 3600))
    engine = engine_of(["f"], clock=clock, gate=gate)
    await engine.run()
    assert decision_of(engine).expires_at == clock.now() + 60


# Interception


def decision_of(engine: Engine) -> CallDecided:
    """Return the last decision of a journal."""
    return [fact for fact in engine.facts if isinstance(fact, CallDecided)][-1]


async def test_a_gate_sees_a_call_as_it_would_run() -> None:
    """Names, validated arguments, the text as sent, the place in the batch, and a fingerprint that is recorded."""
    gate = FakeGate()
    engine = engine_of(["unknown", "f"], "done", gate=gate)
    await engine.run()
    (call,) = gate.seen[0]
    assert (call.id, call.function_name, call.fully_qualified_name, call.raw_arguments) == ("c1", "f", "f", "{}")
    assert (call.iteration, call.index, call.batch_size) == (0, 1, 2)
    assert call.arguments == {"version": 0, "edited": None}
    assert call.fingerprint == decision_of(engine).fingerprint != ""


async def test_a_gate_is_not_asked_about_calls_that_cannot_run() -> None:
    """Unknown and invalid calls, the final answer and the caller's functions are nobody's to approve."""
    gate = FakeGate()
    await engine_of(["unknown", "bad", "final"], gate=gate).run()
    await engine_of(["mine"], gate=gate).run()
    assert gate.seen == []


async def test_a_call_that_nobody_watches_runs_unseen() -> None:
    """The gate is shown the calls it watches, and no others; those run."""
    functions, gate = FakeFunctions(), FakeGate({"f": Deny(), "g": Deny()}, unwatched={"f"})
    await engine_of(["f", "g"], "done", functions=functions, gate=gate).run()
    assert [[call.function_name for call in calls] for calls in gate.seen] == [["g"]]
    assert functions.trace == ["start f", "end f"]


async def test_an_approved_call_runs_and_says_who_approved() -> None:
    """The decider and the stickiness of an approval are recorded."""
    engine = engine_of(["f"], "done", gate=FakeGate({"f": Approve(by="ann", always="function")}))
    state = await engine.run()
    assert (decision_of(engine).by, decision_of(engine).verdict) == ("ann", "run")
    assert state.sticky == {"function:f"}
    assert results_of(state) == ["f()"]


async def test_edited_arguments_are_used_and_shown() -> None:
    """The function gets the edited arguments; the journal keeps them beside the original."""
    engine = engine_of(["f"], "done", gate=FakeGate({"f": Approve(arguments={"a": "ü"})}))
    state = await engine.run()
    assert results_of(state) == ['f({"a":"ü"})']
    assert state.transcript[1].edited == (("c0", '{"a":"ü"}'),)
    assert decision_of(engine).digest == digest_of("f", {"version": 0, "edited": '{"a":"ü"}'})


async def test_edited_arguments_that_cannot_be_used_deny_the_call() -> None:
    """An edit is validated as the model's arguments are; a bad one runs nothing, and the reason is recorded."""
    functions = FakeFunctions()
    gate = FakeGate({"f": Approve(arguments={"bad": 1}, by="ann")})
    engine = engine_of(["f"], "done", functions=functions, gate=gate)
    await engine.run()
    assert functions.trace == []
    assert (decision_of(engine).verdict, decision_of(engine).by) == ("deny", "ann")
    assert "Bad arguments." in decision_of(engine).reason


@pytest.mark.parametrize("value", [object(), {1}, float("nan")], ids=["object", "set", "nan"])
async def test_edited_arguments_that_are_no_json_deny_the_call(value: object) -> None:
    """What could not be sent to the model as arguments is no edit: nothing runs, and the reason is recorded."""
    functions = FakeFunctions()
    engine = engine_of(["f"], "done", functions=functions, gate=FakeGate({"f": Approve(arguments={"a": value})}))
    await engine.run()
    assert functions.trace == []
    assert decision_of(engine).verdict == "deny"
    assert "JSON" in decision_of(engine).reason


@pytest.mark.parametrize(
    ("reason", "read"),
    [
        ("too much", "The call was refused and did not run: too much"),
        ("", "The call was refused and did not run."),
    ],
)
async def test_a_denied_call_does_not_run_and_says_why(reason: str, read: str) -> None:
    """The model reads that the call was refused, with the reason where there is one; the others run."""
    functions = FakeFunctions()
    engine = engine_of(["f", "g"], "done", functions=functions, gate=FakeGate({"f": Deny(reason, by="ann")}))
    state = await engine.run()
    assert functions.trace == ["start g", "end g"]
    assert results_of(state) == [read, "g()"]


async def test_what_was_shown_cannot_be_changed_by_whoever_sees_it() -> None:
    """A decider that writes into the arguments it was shown changes nothing: what was fingerprinted is what runs."""

    class Careless(FakeGate):
        async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision]:
            for call in calls:
                call.arguments.update(edited="changed")  # type: ignore[attr-defined]
            return [Approve() for _ in calls]

    engine = engine_of(["f"], "done", gate=Careless())
    state = await engine.run()
    assert "f(changed)" not in results_of(state)
    assert decision_of(engine).digest == digest_of("f", {"version": 0, "edited": None})


async def test_a_supplied_result_stands_for_the_call() -> None:
    """The function does not run; the model reads the supplied value, encoded as a result would be."""
    functions = FakeFunctions()
    engine = engine_of(["f"], "done", functions=functions, gate=FakeGate({"f": Supply({"a": 1}, by="ann")}))
    state = await engine.run()
    assert functions.trace == []
    assert results_of(state) == ["encoded {'a': 1}"]
    assert decision_of(engine).reason == "supplied"


async def test_a_deferred_call_pauses_the_run_as_a_value() -> None:
    """Nothing runs, nothing is asked, the question and its expiry are recorded, and the engine returns."""
    functions, chat = FakeFunctions(), FakeChat([["f", "g"]])
    engine = engine_of(chat, functions=functions, gate=FakeGate({"g": Defer(prompt="really?", expires_in=60)}))
    state = await engine.run()
    assert state.phase is Phase.PAUSED
    assert functions.trace == []
    assert (decision_of(engine).prompt, decision_of(engine).expires_at) == ("really?", 1060.0)
    assert await engine.run() == state
    assert len(chat.requests) == 1


async def test_a_paused_run_goes_on_in_another_process_as_if_it_had_never_paused() -> None:
    """From JSON, with a new engine and an approval, the run ends as the uninterrupted one does."""
    turns: list[Any] = [["f", "g"], "done"]
    whole = await engine_of(*turns).run()
    engine = engine_of(*turns, gate=FakeGate({"g": Defer()}))
    await engine.run()
    approved = replace(decision_of(engine), verdict="run", by="ann")
    resumed = engine_of("done", facts=[*again(engine), Resumed(at=1000.0), approved])
    state = await resumed.run()
    assert state.transcript == whole.transcript
    assert state.ledger == whole.ledger
    assert state.ended == whole.ended


async def test_a_function_that_changed_since_it_was_approved_does_not_run() -> None:
    """What was approved is what runs: a call that now resolves to something else is answered instead."""
    engine = engine_of(["f", "g"], gate=FakeGate({"f": Defer()}))
    await engine.run()
    approved = replace(next(f for f in engine.facts if isinstance(f, CallDecided)), verdict="run")
    functions = FakeFunctions(version=2)
    resumed = engine_of("done", facts=[*again(engine), Resumed(at=1000.0), approved], functions=functions)
    state = await resumed.run()
    assert functions.trace == []
    assert len([fact for fact in resumed.facts if isinstance(fact, CallsWithheld)]) == 2
    assert all("changed after the call was decided" in text for text in results_of(state))


async def test_a_gate_that_does_not_decide_every_call_fails_the_run() -> None:
    """Fewer decisions than calls are a defect of the gate: nothing runs, and every call is answered."""

    class Short(FakeGate):
        async def review(self, calls: Sequence[ToolCall], state: State) -> Sequence[Decision]:
            return [Approve()]

    functions = FakeFunctions()
    engine = engine_of(["f", "g"], gate=Short(), functions=functions)
    await refused_with(engine, ValueError)
    assert functions.trace == []
    assert len(results_of(engine.state)) == 2


# The iteration-completed callback


async def test_the_callback_is_told_once_the_results_are_stored() -> None:
    """It sees the results in the transcript, before the next request, and only where a function was called."""
    hook, chat = FakeHook(), FakeChat([["f"], ["unknown"], "done"])
    await engine_of(chat, hook=hook).run()
    assert [results_of(state) for state in hook.seen] == [["f()"]]


async def test_the_callback_can_end_the_run() -> None:
    """Terminating keeps the results, makes no further request and gives its reason."""
    chat = FakeChat([["f"]])
    state = await engine_of(chat, hook=FakeHook({"terminate": True, "reason": "too dear"})).run()
    assert state.ended is not None
    assert (state.ended.status, state.ended.reason) == ("stopped", "too dear")
    assert results_of(state) == ["f()"]


async def test_the_callback_can_compact_the_transcript() -> None:
    """The next request sends what the callback put in place."""
    chat = FakeChat([["f"], "done"])
    engine = engine_of(chat, hook=FakeHook({"messages": ("compact",)}))
    await engine.run()
    assert chat.sent[1] == ("compact",)
    assert next(f for f in engine.facts if isinstance(f, IterationCompleted)).messages == ("compact",)


async def test_a_callback_that_raises_leaves_the_run_resumable() -> None:
    """What the callback raises leaves as it is; the results are kept, and the same journal goes on."""
    engine = engine_of(["f"], hook=FakeHook(error=KeyError("defect")))
    await refused_with(engine, KeyError)
    assert results_of(engine.state) == ["f()"]
    state = await engine_of("done", facts=again(engine)).run()
    assert state.ended is not None
    assert state.ended.answer == "done"


# Storing


async def test_every_fact_is_stored_at_its_place() -> None:
    """The store holds the journal, row by row, also of calls that run at once."""
    store = FakeStore()
    engine = engine_of(["f", "g", "h"], "done", store=store)
    await engine.run()
    assert [store.rows[seq] for seq in sorted(store.rows)] == engine.facts[1:]
    assert sorted(store.rows) == list(range(1, len(engine.facts)))


async def test_a_start_that_cannot_be_stored_starts_nothing() -> None:
    """A failing store is raised before the side effect, and the journal is what the store holds."""
    functions, store = FakeFunctions(), FakeStore(fail_on="CallStarted")
    engine = engine_of(["f"], functions=functions, store=store)
    await refused_with(engine, OSError)
    assert functions.trace == []
    assert types_of(engine.facts) == [store.rows[seq].type for seq in sorted(store.rows)]


async def test_a_stored_run_that_is_cancelled_leaves_its_calls_in_doubt() -> None:
    """Where a store has the journal, nothing is made up on cancellation: the next life finds the call started."""
    begun, store = asyncio.Event(), FakeStore()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    engine = engine_of(["f"], functions=FakeFunctions(does={"f": hang}), store=store)
    task = asyncio.create_task(engine.run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert types_of(engine.facts)[-1] == "CallStarted"
    state = await engine_of(facts=again(engine)).run()
    assert state.phase is Phase.PAUSED


async def test_stopping_a_run_with_a_call_in_doubt_says_so() -> None:
    """A call that a dead process had started is never said to have not run."""
    engine, stop = engine_of(["f"], "done"), StopHandle()
    await engine.run()
    facts = [fact for fact in engine.facts if not isinstance(fact, CallFinished | IterationCompleted)][:4]
    assert isinstance(facts[-1], CallStarted)
    stop.stop("enough")
    state = await engine_of(facts=facts, stop=stop).run()
    assert [text for text in results_of(state) if text.startswith("Not executed")] == []


async def test_a_stop_is_recorded_once() -> None:
    """However often the engine looks, the wish to stop is one fact."""
    stop = StopHandle()
    engine = engine_of(FakeChat([["f"]], on_ask=stop.stop), stop=stop)
    await engine.run()
    assert len([fact for fact in engine.facts if isinstance(fact, StopRequested)]) == 1
