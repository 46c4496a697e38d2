"""Calls are seen before any runs; decisions bind; the callback and the store have their say."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from planner_ext.approval.decisions import (
    Approve,
    Defer,
    Deny,
    Supply,
    ToolCall,
    digest_of,
)
from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallStarted,
    CallsWithheld,
    IterationCompleted,
    Resumed,
    StopRequested,
)
from planner_ext.core.fold import sticky_keys
from planner_ext.core.state import Phase, State
from planner_ext.core.values import EditedReply, RequestedCall, ResolvedCall
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.ports import Reviewed
from support.engine import (
    FakeChat,
    FakeFunctions,
    FakeGate,
    FakeHook,
    FakeStore,
    again,
    decision_of,
    engine_of,
    refused_with,
    results_of,
    types_of,
)
from support.narrow import as_type
from support.values import each_of


async def test_a_gate_sees_a_call_as_it_would_run() -> None:
    """Names, validated arguments, the text as sent, the place in the batch, and a fingerprint that is recorded."""
    gate = FakeGate()
    engine = engine_of(["unknown", "f"], "done", gate=gate)
    await engine.run()
    (call,) = gate.seen[0]
    assert call.id == "c1"
    assert call.function_name == "f"
    assert call.fully_qualified_name == "f"
    assert call.raw_arguments == "{}"
    assert call.iteration == 0
    assert call.index == 1
    assert call.batch_size == 2
    assert call.arguments == {"version": 0, "edited": None}
    assert call.fingerprint == decision_of(engine).fingerprint != ""


async def test_what_a_gate_does_to_the_arguments_it_sees_changes_nothing() -> None:
    """A gate holds a copy, on every level: a call runs with the arguments that were fingerprinted."""

    class Nested(FakeFunctions):
        def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
            return replace(
                super().check(call, edited), arguments={"edited": ["as decided"]}
            )

    gate = FakeGate()
    gate.on_review = lambda: gate.seen[0][0].arguments["edited"].append("by the gate")
    engine = engine_of(["f"], "done", functions=Nested(), gate=gate)
    assert results_of(await engine.run()) == ["f(['as decided'])"]


async def test_a_gate_is_not_asked_about_calls_that_cannot_run() -> None:
    """Unknown and invalid calls, the final answer and the caller's functions need no approval."""
    gate = FakeGate()
    await engine_of(["unknown", "bad", "final"], gate=gate).run()
    await engine_of(["mine"], gate=gate).run()
    assert gate.seen == []


async def test_an_unwatched_call_runs_unseen() -> None:
    """The gate is shown the calls it watches, and no others; those run."""
    functions, gate = (
        FakeFunctions(),
        FakeGate({"f": Deny(), "g": Deny()}, unwatched={"f"}),
    )
    await engine_of(["f", "g"], "done", functions=functions, gate=gate).run()
    assert [[call.function_name for call in calls] for calls in gate.seen] == [["g"]]
    assert functions.trace == ["start f", "end f"]


async def test_an_approved_call_runs_and_says_who_approved() -> None:
    """The decider and the stickiness of an approval are recorded."""
    engine = engine_of(
        ["f"], "done", gate=FakeGate({"f": Approve(by="ann", always="function")})
    )
    state = await engine.run()
    assert decision_of(engine).by == "ann"
    assert decision_of(engine).verdict == "run"
    assert decision_of(engine).approved is True
    assert state.sticky == {sticky_keys("f", "", "", source="", roles=())["function"]}
    assert results_of(state) == ["f()"]


async def test_edited_arguments_are_used_and_shown() -> None:
    """The function gets the edited arguments; the journal keeps them beside the original."""
    engine = engine_of(
        ["f"], "done", gate=FakeGate({"f": Approve(arguments={"a": "ü"})})
    )
    state = await engine.run()
    assert results_of(state) == ['f({"a":"ü"})']
    assert as_type(EditedReply, state.transcript[1]).edited == (("c0", '{"a":"ü"}'),)
    assert decision_of(engine).digest == digest_of(
        "f", {"version": 0, "edited": '{"a":"ü"}'}
    )


async def test_edited_arguments_that_cannot_be_used_deny_the_call() -> None:
    """An edit is validated as the model's arguments are; a bad one runs nothing, and the reason is recorded."""
    functions = FakeFunctions()
    gate = FakeGate({"f": Approve(arguments={"bad": 1}, by="ann")})
    engine = engine_of(["f"], "done", functions=functions, gate=gate)
    await engine.run()
    assert functions.trace == []
    assert (decision_of(engine).verdict, decision_of(engine).by) == ("deny", "ann")
    assert "Bad arguments." in decision_of(engine).reason


@each_of("value", [object(), {1}, float("nan")], ids=["object", "set", "nan"])
async def test_edited_arguments_that_are_not_json_deny_the_call(value: object) -> None:
    """An edit whose arguments could not be sent to the model is invalid: nothing runs, and the reason is recorded."""
    functions = FakeFunctions()
    engine = engine_of(
        ["f"],
        "done",
        functions=functions,
        gate=FakeGate({"f": Approve(arguments={"a": value})}),
    )
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
    engine = engine_of(
        ["f", "g"],
        "done",
        functions=functions,
        gate=FakeGate({"f": Deny(reason, by="ann")}),
    )
    state = await engine.run()
    assert functions.trace == ["start g", "end g"]
    assert results_of(state) == [read, "g()"]


async def test_what_was_shown_cannot_be_changed_by_a_decider() -> None:
    """A decider that writes into the arguments it was shown changes nothing: what was fingerprinted is what runs."""

    class Careless(FakeGate):
        async def review(
            self, calls: Sequence[ToolCall], state: State
        ) -> Sequence[Reviewed]:
            for call in calls:
                call.arguments.update(edited="changed")  # pyright: ignore[reportAttributeAccessIssue]  # declared read-only
            return [Reviewed(decision=Approve()) for _ in calls]

    engine = engine_of(["f"], "done", gate=Careless())
    state = await engine.run()
    assert "f(changed)" not in results_of(state)
    assert decision_of(engine).digest == digest_of("f", {"version": 0, "edited": None})


async def test_a_supplied_result_stands_for_the_call() -> None:
    """The function does not run; the model reads the supplied value, encoded as a result would be."""
    functions = FakeFunctions()
    engine = engine_of(
        ["f"],
        "done",
        functions=functions,
        gate=FakeGate({"f": Supply({"a": 1}, by="ann")}),
    )
    state = await engine.run()
    assert functions.trace == []
    assert results_of(state) == ["encoded {'a': 1}"]
    assert decision_of(engine).reason == "supplied"


async def test_a_deferred_call_pauses_the_run_as_a_value() -> None:
    """Nothing runs, nothing is asked, the question and its expiry are recorded, and the engine returns."""
    functions, chat = FakeFunctions(), FakeChat([["f", "g"]])
    engine = engine_of(
        chat,
        functions=functions,
        gate=FakeGate({"g": Defer(prompt="really?", expires_in=60)}),
    )
    state = await engine.run()
    assert state.phase is Phase.PAUSED
    assert functions.trace == []
    assert (decision_of(engine).prompt, decision_of(engine).expires_at) == (
        "really?",
        1060.0,
    )
    assert await engine.run() == state
    assert len(chat.requests) == 1


async def test_a_paused_run_continues_in_another_process_as_if_it_had_never_paused() -> (
    None
):
    """From JSON, with a new engine and an approval, the run ends as the uninterrupted one does."""
    turns: list[Any] = [["f", "g"], "done"]
    whole = await engine_of(*turns).run()
    engine = engine_of(*turns, gate=FakeGate({"g": Defer()}))
    await engine.run()
    approved = replace(decision_of(engine), verdict="run", by="ann")
    resumed = engine_of("done", facts=[*again(engine), Resumed(at=1000.0), approved])
    state = await resumed.run()
    assert state.transcript == whole.transcript
    assert state.usage == whole.usage
    assert state.ended == whole.ended


async def test_a_function_that_changed_since_it_was_approved_does_not_run() -> None:
    """What was approved is what runs: a call that now resolves to something else is answered instead."""
    engine = engine_of(["f", "g"], gate=FakeGate({"f": Defer()}))
    await engine.run()
    approved = replace(
        next(f for f in engine.facts if isinstance(f, CallDecided)), verdict="run"
    )
    functions = FakeFunctions(version=2)
    resumed = engine_of(
        "done",
        facts=[*again(engine), Resumed(at=1000.0), approved],
        functions=functions,
    )
    state = await resumed.run()
    assert functions.trace == []
    assert len([fact for fact in resumed.facts if isinstance(fact, CallsWithheld)]) == 2
    assert all(
        "changed after the call was decided" in text for text in results_of(state)
    )


async def test_a_gate_that_does_not_decide_every_call_fails_the_run() -> None:
    """Fewer decisions than calls are a defect of the gate: nothing runs, and every call is answered."""

    class Short(FakeGate):
        async def review(
            self, calls: Sequence[ToolCall], state: State
        ) -> Sequence[Reviewed]:
            return [Reviewed(decision=Approve())]

    functions = FakeFunctions()
    engine = engine_of(["f", "g"], gate=Short(), functions=functions)
    await refused_with(engine, ValueError)
    assert functions.trace == []
    assert len(results_of(engine.state)) == 2


async def test_the_callback_runs_once_the_results_are_stored() -> None:
    """It sees the results in the transcript, before the next request, and only where a function was called."""
    hook, chat = FakeHook(), FakeChat([["f"], ["unknown"], "done"])
    await engine_of(chat, hook=hook).run()
    assert [results_of(state) for state in hook.seen] == [["f()"]]


async def test_the_callback_can_end_the_run() -> None:
    """Terminating keeps the results, makes no further request and gives its reason."""
    chat = FakeChat([["f"]])
    state = await engine_of(
        chat, hook=FakeHook({"terminate": True, "reason": "too dear"})
    ).run()
    assert state.ended is not None
    assert (state.ended.status, state.ended.reason) == ("stopped", "too dear")
    assert results_of(state) == ["f()"]


async def test_the_callback_can_compact_the_transcript() -> None:
    """The next request sends what the callback put in place."""
    chat = FakeChat([["f"], "done"])
    engine = engine_of(chat, hook=FakeHook({"messages": ("compact",)}))
    await engine.run()
    assert chat.sent[1] == ("compact",)
    assert next(
        f for f in engine.facts if isinstance(f, IterationCompleted)
    ).messages == ("compact",)


async def test_a_callback_that_raises_leaves_the_run_resumable() -> None:
    """What the callback raises leaves as it is; the results are kept, and the same journal continues."""
    engine = engine_of(["f"], hook=FakeHook(error=KeyError("defect")))
    await refused_with(engine, KeyError)
    assert results_of(engine.state) == ["f()"]
    state = await engine_of("done", facts=again(engine)).run()
    assert state.ended is not None
    assert state.ended.answer == "done"


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
    assert types_of(engine.facts) == [
        store.rows[seq].type for seq in sorted(store.rows)
    ]


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
    facts = [
        fact
        for fact in engine.facts
        if not isinstance(fact, CallFinished | IterationCompleted)
    ][:4]
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


async def test_an_edit_to_the_same_arguments_is_none() -> None:
    """What runs is what the model wanted, and the decision records no edit."""

    class Equal(FakeFunctions):
        def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
            return super().check(call)

    gate = FakeGate({"f": Approve(arguments={"version": 0})})
    engine = engine_of(["f"], "done", functions=Equal(), gate=gate)
    assert results_of(await engine.run()) == ["f()"]
    assert decision_of(engine).edited is None
