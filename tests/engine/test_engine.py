"""The engine performs what the machine asks for, and records it in order."""

import asyncio

import pytest

from planner_ext.core.errors import IllegalTransitionError, InvalidJournalError
from planner_ext.core.facts import (
    CallFinished,
)
from planner_ext.core.fold import fold
from planner_ext.core.machine import Action, AskModel
from planner_ext.engine.ports import Perform
from support.engine import (
    GOAL,
    PLAIN,
    FakeChat,
    FakeFunctions,
    FakeGate,
    Meeting,
    _let_others_run,
    engine_of,
    results_of,
    types_of,
)


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
    assert chat.requests[0] == AskModel(
        iteration=-1, offer=False, tool_choice=None, withheld=None
    )
    assert chat.sent == [
        ({"role": "user", "text": "plan?"},),
        (GOAL, {"role": "assistant", "text": "the plan"}),
    ]


async def test_a_plan_needs_prompts() -> None:
    """A run that begins with a plan request is refused where nothing writes one, before anything is sent."""
    chat = FakeChat(["the plan"])
    with pytest.raises(InvalidJournalError, match="resume this one with a planner"):
        await engine_of(chat, rules={"plan": True}, prompts=None).run()
    assert chat.sent == []


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
    assert max(
        i for i, kind in enumerate(order) if kind == "CallDecided"
    ) < order.index("CallStarted")
    assert [[call.function_name for call in batch] for batch in gate.seen] == [
        ["f", "g", "h"]
    ]


async def test_results_stand_in_call_order() -> None:
    """The first call ends last; its result still comes first."""
    done = asyncio.Event()
    functions = FakeFunctions(does={"f": done.wait, "g": done.set})
    engine = engine_of(["f", "g"], "done", functions=functions)
    state = await engine.run()
    assert [fact.index for fact in engine.facts if isinstance(fact, CallFinished)] == [
        1,
        0,
    ]
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
    await engine_of(
        list("fghijk"), "done", functions=functions, max_concurrency=cap
    ).run()
    assert most == cap


async def test_a_cap_of_one_is_one_after_the_other() -> None:
    """With ``max_concurrency=1`` a call starts when the one before it has ended, in call order."""
    functions = FakeFunctions(does=dict.fromkeys("fgh", _let_others_run))
    await engine_of(
        ["f", "g", "h"], "done", functions=functions, max_concurrency=1
    ).run()
    assert functions.trace == [
        "start f",
        "end f",
        "start g",
        "end g",
        "start h",
        "end h",
    ]


async def test_an_action_that_records_nothing_for_ever_ends_the_run_by_name() -> None:
    """The loop ends where what surrounds the actions performs none of them, and says which one it would repeat."""

    class Swallows:
        trace = ""

        def around(self, perform: Perform) -> Perform:
            async def performs_nothing(action: Action) -> None:
                await asyncio.sleep(0)

            return performs_nothing

    engine = engine_of("done", tracing=Swallows())
    with pytest.raises(IllegalTransitionError, match="would repeat AskModel for ever"):
        await engine.run()
