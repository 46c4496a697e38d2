"""Runs that are stopped, cancelled or hit by a fault: what happened is kept, every call is answered."""

import asyncio

import pytest

from planner_ext.core.errors import InvalidJournalError, PlannerExtError
from planner_ext.core.facts import (
    BudgetChanged,
    MessageAdded,
    RequestFailed,
    Resumed,
)
from planner_ext.core.fold import fold
from planner_ext.core.limits import Budget
from planner_ext.core.state import Phase
from planner_ext.core.values import CallResult, Usage
from planner_ext.engine.batch import BudgetHandle, CallFailedError
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.ports import Finished
from support.core import SAMPLES
from support.engine import (
    FakeChat,
    FakeClock,
    FakeFunctions,
    FakeGate,
    FakeHook,
    FakeStore,
    again,
    engine_of,
    refused_with,
    results_of,
    types_of,
)
from support.journal import through_json
from support.values import each_of


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


async def test_a_stop_while_a_request_waits_for_its_time_makes_none() -> None:
    """A stop that comes in the least time between two requests is seen before the second one is sent."""
    stop, chat = StopHandle(), FakeChat([["f"], "never asked for"])

    class Stopping(FakeClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            stop.stop("enough")

    state = await engine_of(
        chat, stop=stop, clock=Stopping(), min_iteration_seconds=5.0
    ).run()
    assert len(chat.requests) == 1
    assert state.ended is not None
    assert (state.ended.status, state.ended.reason) == ("stopped", "enough")


async def test_the_first_reason_to_stop_stays() -> None:
    """A handle asked twice keeps its first reason; one that was not asked has no reason."""
    stop = StopHandle()
    assert stop.reason is None
    stop.stop("first")
    stop.stop("second")
    assert stop.reason == "first"


@pytest.mark.parametrize("cap", [1, 2])
async def test_a_stop_between_the_calls_of_a_batch_starts_no_further_one(
    cap: int,
) -> None:
    """What runs finishes, also beside it; what had not started is answered "not executed"; no request follows."""
    stop, chat = StopHandle(), FakeChat([["f", "g", "h"]])
    functions = FakeFunctions(does={"f": lambda: stop.stop("enough")})
    state = await engine_of(
        chat, functions=functions, stop=stop, max_concurrency=cap
    ).run()
    began = ["f", "g"][:cap]
    assert [line for line in functions.trace if line.startswith("start")] == [
        f"start {name}" for name in began
    ]
    not_executed = ["Not executed: the run was stopped. enough"] * (3 - cap)
    assert results_of(state) == [*(f"{name}()" for name in began), *not_executed]
    assert len(chat.requests) == 1


async def test_a_stop_while_a_request_is_under_way_keeps_its_answer() -> None:
    """An answer that comes in while the run is being stopped is kept; calls that come in are not run."""
    stop = StopHandle()
    state = await engine_of(FakeChat(["done"], on_ask=stop.stop), stop=stop).run()
    assert state.ended is not None
    assert (state.ended.status, state.ended.answer) == ("answered", "done")
    functions = FakeFunctions()
    state = await engine_of(
        FakeChat([["f"]], on_ask=stop.stop), stop=stop, functions=functions
    ).run()
    assert functions.trace == []
    assert state.ended is not None
    assert state.ended.status == "stopped"


async def test_a_stop_during_review_lets_nothing_start() -> None:
    """A stop that comes while a decider thinks is honoured before the first call."""
    stop, functions = StopHandle(), FakeFunctions()
    state = await engine_of(
        ["f"], functions=functions, stop=stop, gate=FakeGate(on_review=stop.stop)
    ).run()
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
    """Calls that started with it end, the results stay, and no request follows."""
    chat = FakeChat([["f", "g"]])
    over = Finished(outcome="ok", text="last", terminate=True)
    state = await engine_of(
        chat, functions=FakeFunctions(does={"f": lambda: over})
    ).run()
    assert results_of(state) == ["last", "g()"]
    assert state.ended is not None
    assert state.ended.status == "stopped"


@pytest.mark.parametrize(
    ("cap", "order"), [(1, ["f", "g", "h"]), (2, ["slow", "f", "g", "h"])]
)
async def test_a_filter_that_terminates_keeps_the_calls_that_wait_for_a_slot_from_starting(
    cap: int, order: list[str]
) -> None:
    """What runs beside it ends; a call that waits for its turn is answered "not executed", and is not counted."""
    terminated = asyncio.Event()

    async def terminate() -> Finished:
        terminated.set()
        return Finished(outcome="ok", text="last", terminate=True)

    functions = FakeFunctions(does={"f": terminate, "slow": terminated.wait})
    chat = FakeChat([order])
    state = await engine_of(chat, functions=functions, max_concurrency=cap).run()
    refused = (
        "Not executed: the run was stopped. A filter asked to end the run after f."
    )
    assert results_of(state) == ["slow()"] * (cap - 1) + ["last", refused, refused]
    assert (state.usage.tool_calls, len(chat.requests)) == (cap, 1)
    assert state.ended is not None
    assert (state.ended.status, state.iteration) == ("stopped", 1)


async def test_a_filter_that_terminates_ends_an_interrupted_run_after_its_batch_too() -> (
    None
):
    """A run that is resumed from the middle of that batch runs the rest of it, as it would have anyway."""
    over = Finished(outcome="ok", text="last", terminate=True)
    functions = FakeFunctions(does={"f": lambda: over})
    whole = engine_of(["f", "g"], functions=functions, max_concurrency=1)
    await whole.run()
    place = types_of(whole.facts).index("CallFinished") + 2
    assert whole.facts[place - 1].type == "CallFinished"
    resumed = engine_of(facts=through_json(whole.facts[:place]))
    await resumed.run()
    assert resumed.facts == whole.facts


async def test_a_call_to_an_unknown_function_can_stop_the_run() -> None:
    """Where it is asked for, an unknown function ends the run by name; the other calls are not run."""
    functions = FakeFunctions()
    state = await engine_of(
        ["f", "unknown"], functions=functions, stop_on_unknown=True
    ).run()
    assert functions.trace == []
    assert state.ended is not None
    assert "unknown" in state.ended.reason
    assert results_of(state)[1] == "No such function."
    state = await engine_of(["unknown"], "done").run()
    assert state.ended is not None
    assert state.ended.status == "answered"


@each_of("cap", [None, 2, 1])
async def test_cancelling_in_the_middle_of_a_batch_answers_every_call(
    cap: int | None,
) -> None:
    """Running calls are cancelled, every call has its answer, the run is ended, and the cancellation continues."""
    begun, cancelled = asyncio.Event(), []

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append("g")
            raise

    functions = FakeFunctions(does={"g": hang})
    engine = engine_of(
        ["f", "g", "unknown", "h"], functions=functions, max_concurrency=cap
    )
    task = asyncio.create_task(engine.run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["g"]
    state = fold(engine.facts)
    assert state.phase is Phase.ENDED
    assert [
        entry.call_id for entry in state.transcript if isinstance(entry, CallResult)
    ] == ["c0", "c1", "c2", "c3"]
    assert results_of(state)[:3] == [
        "f()",
        "Cancelled while it ran; whether it took effect is not known.",
        "No such function.",
    ]
    assert state.ended is not None
    assert (state.ended.status, state.ended.reason) == (
        "stopped",
        "The run was cancelled.",
    )


class SharedSum:
    """A shared budget that allows everything, and sums it; its store may hang when it is settled."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.settles = asyncio.Event()
        self.hangs = hangs
        self.iterations = 0

    def begin(self, facts: object) -> None: ...

    def charge(self, spent: Usage) -> None:
        self.iterations += spent.iterations

    async def reserve(self, *, requests: int = 0, **_: object) -> None:
        self.iterations += requests

    async def settle(self, *, kept: int) -> None:
        self.settles.set()
        if self.hangs:
            await asyncio.Event().wait()


@pytest.mark.parametrize("lost", ["ModelReplied", "RequestFailed"])
async def test_a_reply_that_cannot_be_recorded_is_charged_once_to_a_shared_budget(
    lost: str,
) -> None:
    """It was charged when it came; that the journal is not written makes no second request of it."""
    shared = SharedSum()
    chat = FakeChat(["done" if lost == "ModelReplied" else RuntimeError("down")])
    engine = engine_of(chat, shared=shared, store=FakeStore(fail_on=lost))
    with pytest.raises((OSError, RuntimeError)):
        await engine.run()
    assert shared.iterations == 1


async def test_a_second_cancellation_interrupts_one_step_of_the_end_alone() -> None:
    """While a shared budget is settled: every call still has its answer, and the run its end."""
    begun, budget = asyncio.Event(), SharedSum(hangs=True)

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    engine = engine_of(
        ["f", "g", "h"], functions=FakeFunctions(does={"g": hang}), shared=budget
    )
    task = asyncio.create_task(engine.run())
    await begun.wait()
    task.cancel()
    await budget.settles.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    state = fold(engine.facts)
    assert state.phase is Phase.ENDED
    assert [
        entry.call_id for entry in state.transcript if isinstance(entry, CallResult)
    ] == ["c0", "c1", "c2"]


async def test_cancelling_a_request_charges_it_and_leaves_the_run_resumable() -> None:
    """It may have reached the server; the next request is recorded before it is sent."""
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
    (failed,) = [fact for fact in engine.facts if isinstance(fact, RequestFailed)]
    assert failed.reason == "The request was cancelled."
    assert failed.usage.iterations == 1
    assert failed.usage.estimated_tokens == 7
    resumed = engine_of("done", facts=again(engine))
    await resumed.run()
    assert types_of(resumed.facts) == [
        "RequestFailed",
        "ModelAsked",
        "ModelReplied",
        "Ended",
    ]
    assert resumed.state.usage.iterations == 2


async def test_a_failing_request_raises_and_leaves_the_run_resumable() -> None:
    """An exception of the connector leaves as it is; the same journal continues with another connector."""
    engine = engine_of(["f"], ConnectionError("down"))
    await refused_with(engine, ConnectionError)
    assert engine.state.phase is Phase.ASKING
    state = await engine_of("done", facts=again(engine)).run()
    assert state.ended is not None
    assert state.ended.answer == "done"
    assert results_of(state) == ["f()"]


@pytest.mark.parametrize("names", [["f"], ["f", "g"]])
async def test_a_fault_in_the_adapter_answers_the_batch_and_is_raised_as_it_is(
    names: list[str],
) -> None:
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
    failed = Finished(
        outcome="failed", text="It failed.", error="ValueError: boom", exception=error
    )
    functions = FakeFunctions(does={"f": lambda: failed})
    engine = engine_of(["f", "g"], functions=functions, raise_errors=True)
    raised = await refused_with(engine, CallFailedError)
    assert isinstance(raised, CallFailedError)
    assert raised.function == "f"
    assert raised.__cause__ is error
    assert results_of(engine.state) == ["It failed.", "g()"]


async def test_the_first_of_several_failures_is_raised_and_without_one_nothing() -> (
    None
):
    """The failure that came first is the one that is named; a run in which all went well is raised for nothing."""
    functions = FakeFunctions(
        does={
            "g": lambda: Finished(
                outcome="failed", text="first", error="KeyError: first"
            ),
            "h": lambda: Finished(
                outcome="timed_out", text="second", error="TimeoutError: second"
            ),
        }
    )
    engine = engine_of(
        ["f", "g", "h"], functions=functions, raise_errors=True, max_concurrency=1
    )
    assert "KeyError: first" in str(await refused_with(engine, CallFailedError))
    state = await engine_of(["f"], "done", raise_errors=True).run()
    assert state.ended is not None
    assert state.ended.status == "answered"


def test_a_raised_failure_is_an_error_of_this_package() -> None:
    """One root catches everything that is raised on purpose."""
    assert issubclass(CallFailedError, PlannerExtError)


async def test_a_run_that_raised_a_failure_can_be_resumed() -> None:
    """The journal of a run that raised continues with a resumption, as after any other fault."""
    failed = Finished(outcome="failed", text="It failed.", error="ValueError: boom")
    engine = engine_of(
        ["f"], functions=FakeFunctions(does={"f": lambda: failed}), raise_errors=True
    )
    await refused_with(engine, CallFailedError)
    resumed = engine_of("done", facts=[*again(engine), Resumed(at=1000.0)])
    state = await resumed.run()
    assert state.ended is not None
    assert state.ended.answer == "done"


async def test_a_failed_function_is_by_default_a_result() -> None:
    """The model reads the failure and the run continues."""
    failed = Finished(outcome="failed", text="It failed.", error="ValueError: boom")
    state = await engine_of(
        ["f"], "done", functions=FakeFunctions(does={"f": lambda: failed})
    ).run()
    assert results_of(state) == ["It failed."]
    assert state.ended is not None
    assert state.ended.status == "answered"


async def test_a_new_budget_is_taken_before_the_next_action() -> None:
    """It is a fact with its author and its time, and holds from there on; the run takes it once."""
    budget, clock = BudgetHandle(), FakeClock()

    def work() -> None:
        clock.time += 2.0
        budget.change(Budget(max_iterations=9), by="bob")
        budget.change(Budget(max_iterations=2), by="ann")

    chat = FakeChat([["f"], "the last one"])
    engine = engine_of(
        chat, functions=FakeFunctions({"f": work}), clock=clock, new_budget=budget.take
    )
    state = await engine.run()
    (changed,) = [fact for fact in engine.facts if isinstance(fact, BudgetChanged)]
    assert changed.limits == Budget(max_iterations=2)
    assert changed.by == "ann"
    assert changed.seconds == 2.0
    assert types_of(engine.facts)[3:6] == [
        "CallFinished",
        "BudgetChanged",
        "IterationCompleted",
    ]
    assert (chat.requests[1].offer, chat.requests[1].withheld) == (
        False,
        "max_iterations",
    )
    assert state.ended is not None
    assert state.ended.limit == "max_iterations"


async def test_a_paused_or_ended_run_takes_no_new_budget() -> None:
    """It waits for the run's next life; a resume has a budget of its own."""
    budget = BudgetHandle()
    budget.change(Budget(max_iterations=2))
    engine = engine_of(facts=SAMPLES[Phase.PAUSED], new_budget=budget.take)
    assert (await engine.run()).phase is Phase.PAUSED
    assert budget.take() == (Budget(max_iterations=2), "")


async def test_a_request_that_did_not_reach_the_server_is_not_charged() -> None:
    """It is still recorded, so that no later life takes it for one that was lost."""
    engine = engine_of(ConnectionRefusedError("no"))
    await refused_with(engine, ConnectionRefusedError)
    (failed,) = [fact for fact in engine.facts if isinstance(fact, RequestFailed)]
    assert failed.reason == "ConnectionRefusedError: no"
    assert failed.usage.iterations == 0
    assert failed.usage == Usage()


async def test_a_fault_before_a_request_charges_none() -> None:
    """The callback fails after a batch: the request that was due was not made, and is recorded as such."""
    engine = engine_of(["f"], hook=FakeHook(error=ValueError("bad")))
    await refused_with(engine, ValueError)
    assert [
        fact.usage.iterations
        for fact in engine.facts
        if isinstance(fact, RequestFailed)
    ] == [0]
    assert engine.state.usage.iterations == 1


async def test_a_journal_that_ends_before_a_request_is_charged_for_it() -> None:
    """Another life may have made the request: this one charges it, with an estimate, before it asks again."""
    engine = engine_of("done", rules={"limits": Budget(max_iterations=2)})
    await engine.begin([])
    await engine.run()
    assert types_of(engine.facts) == [
        "RequestFailed",
        "ModelAsked",
        "ModelReplied",
        "Ended",
    ]
    assert (engine.state.usage.iterations, engine.state.usage.estimated_tokens) == (
        2,
        7,
    )


@each_of(
    "phase",
    [Phase.PAUSED, Phase.ENDED, Phase.REVIEWING, Phase.CALLING, Phase.ANSWERING],
)
async def test_a_journal_that_ends_where_no_request_is_due_is_not_charged(
    phase: Phase,
) -> None:
    """A checkpoint of a pause or an end, and a run that died amid its calls."""
    engine = engine_of(facts=SAMPLES[phase])
    await engine.begin([])
    assert types_of(engine.facts) == types_of(SAMPLES[phase])


async def test_a_store_that_fails_does_not_hide_why_the_request_failed() -> None:
    """The failed request cannot be recorded; the run ends with its own error."""
    store = FakeStore(fail_on="RequestFailed")
    await refused_with(
        engine_of(ConnectionResetError("gone"), store=store), ConnectionResetError
    )
    assert store.rows == {}


async def test_an_estimate_that_fails_does_not_hide_why_the_request_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The request is charged without its tokens."""

    class Chat(FakeChat):
        def estimated(self, transcript: object, request: object) -> Usage:
            raise LookupError

    engine = engine_of(Chat([ConnectionResetError("gone")]))
    await refused_with(engine, ConnectionResetError)
    (failed,) = [fact for fact in engine.facts if isinstance(fact, RequestFailed)]
    assert failed.usage == Usage(iterations=1)
    assert "cannot be estimated" in caplog.text


async def test_what_is_said_is_recorded_before_the_next_request() -> None:
    """Not while calls are open; before the first request, after a batch, and after a reply that is then no answer."""
    said = {0: "first", 1: "second", 2: "third"}
    chat = FakeChat([["f"], "an answer", "the last one"])

    def next_message() -> tuple[str, str] | None:
        text = said.pop(len(chat.requests), None)
        return None if text is None else (text, "ann")

    engine = engine_of(chat, next_message=next_message)
    state = await engine.run()
    added = [fact for fact in engine.facts if isinstance(fact, MessageAdded)]
    assert {(fact.purpose, fact.by) for fact in added} == {("said", "ann")}
    assert types_of(engine.facts)[0] == "MessageAdded"
    order = types_of(engine.facts)
    between = order[order.index("CallDecided") : order.index("IterationCompleted")]
    assert "MessageAdded" not in between
    assert state.usage.iterations == len(chat.requests) == 3
    assert state.ended is not None
    assert state.ended.answer == "the last one"


async def test_a_run_that_only_takes_budgets_is_said_nothing() -> None:
    """The handle of a run that is not kept has no messages."""
    engine = engine_of("an answer", next_message=BudgetHandle().next_message)
    await engine.run()
    assert types_of(engine.facts) == ["ModelReplied", "Ended"]


async def test_a_journal_whose_answer_is_checked_needs_the_check() -> None:
    """Without one the answer is not accepted; the error names what is missing."""
    engine = engine_of("an answer", rules={"checked": True})
    error = await refused_with(engine, InvalidJournalError)
    assert "check_answer" in str(error)
