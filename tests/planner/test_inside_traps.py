"""Around runs that wait in functions: filters, siblings, time, templates, and the cases of other projects."""

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Budget, Checkpoint, Deny
from planner_ext.approval.decisions import Decision
from planner_ext.core.facts import HappenedInside, Paused
from planner_ext.durable import Runs, effect
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.desks import TWO, Bank, Hidden, World, goal_in, once, pays, tool_results
from support.planner import Clock, both_ways, invoke, planner_with

pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)
"""Semantic Kernel looks at every attribute of an agent that is added as a plugin, deprecated ones among them."""

CLERK = call("clerk-reach_goal", {"goal": "Pay 3."}, id="call_1")
PATH = "call_1/call_1"
YES = Approve(by="ann")

Next = Callable[[Any], Awaitable[None]]


def _pays_three(request: ScriptedRequest) -> Any:
    return once(call("bank-pay", {"account": 3}, id="call_1"))(request)


async def swallows(context: Any, next: Next) -> None:
    try:
        await next(context)
    except BaseException:
        context.result = None


async def tries_again(context: Any, next: Next) -> None:
    try:
        await next(context)
    except BaseException:
        await next(context)


async def calls_twice(context: Any, next: Next) -> None:
    try:
        await next(context)
    finally:
        await next(context)


@pytest.mark.parametrize("around", [swallows, tries_again, calls_twice])
async def test_a_filter_around_a_function_in_which_a_run_waits_changes_nothing(
    around: Any,
) -> None:
    """Whatever it makes of the function's leave: the call waits, has no result before the decision, and pays once."""
    world = World(once(CLERK))

    async def only_there(context: Any, next: Next) -> None:
        if context.function.name == "reach_goal":
            await around(context, next)
        else:
            await next(context)

    world.kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, only_there)
    paused = await world.planner.invoke(world.kernel, "Go.")
    seen = 0
    while paused.status == "paused":
        assert len(tool_results(world.services["top"].requests[-1])) == 0
        seen += 1
        assert seen <= 2, "it waits for ever"
        paused = await world.resume(paused, {one.path: YES for one in paused.pending})
    assert paused.status == "answered"
    assert world.bank.paid == [3] * seen
    assert seen == 1 or around is calls_twice
    assert paused.iterations == world.sent


class Gathers:
    """Code that takes whatever its runs raise for their results."""

    @effect("idempotent")
    @kernel_function(description="Works.")
    async def work(self, kernel: Hidden) -> str:
        clerk = planner_with("clerk", plan=False)
        runs = [clerk.invoke(kernel, f"Pay {n}.") for n in (1, 2)]
        ended = await asyncio.gather(*runs, return_exceptions=True)
        return " ".join(str(getattr(one, "final_answer", one)) for one in ended)


async def test_code_that_gathers_what_its_runs_raise_has_no_result_while_they_wait() -> (
    None
):
    """Both runs wait, go on one after the other, and each pays once."""
    world = World(once(call("gathers-work")))
    world.kernel.add_plugin(Gathers(), "gathers")
    result = await world.planner.invoke(world.kernel, "Go.")
    for left in (2, 1):
        assert len(result.pending) == left
        result = await world.resume(result, {result.pending[0].path: YES})
    assert (result.status, result.final_answer) == ("answered", "paid 1 paid 2")
    assert sorted(world.bank.paid) == [1, 2]
    assert result.iterations == world.sent == 6


class Slow:
    """A function that ends only once it is let go."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.ran = 0

    @kernel_function(description="Works long.")
    async def work(self) -> str:
        self.ran += 1
        await self.let_go.wait()
        return "worked"


async def test_a_sibling_in_flight_ends_and_is_not_called_again() -> None:
    """Its result stays in the batch, whichever ends first.

    Restates test_nested_graph_interrupts_parallel in
    libs/langgraph/tests/test_pregel.py of langchain-ai/langgraph.
    """
    world = World(once(calls(CLERK, call("slow-work"))))
    slow = Slow()
    world.kernel.add_plugin(slow, "slow")
    paused: Any = None
    async for event in world.planner.invoke_stream(world.kernel, "Go."):
        if isinstance(event, HappenedInside) and isinstance(event.fact, Paused):
            slow.let_go.set()
        paused = getattr(event, "result", None)
    assert [one.path for one in paused.pending] == [PATH]
    result = await world.resume(paused, {PATH: YES})
    assert result.final_answer == "paid 3 worked"
    assert (slow.ran, world.bank.paid) == (1, [3])
    assert result.iterations == world.sent == 4


@pytest.mark.parametrize("where", ["inside", "around"])
async def test_a_deadline_that_passes_during_the_pause_ends_the_run_that_has_it(
    where: str,
) -> None:
    """The approved call does not run; a run around that has time goes on with what its function says of it."""
    clock = Clock()
    budget = Budget(deadline=datetime.fromtimestamp(clock.seconds + 10, UTC))
    timed = {"clock": clock, "budget": budget}
    world = World(
        once(CLERK),
        options=timed if where == "around" else {"clock": clock},
        inner=timed if where == "inside" else {"clock": clock},
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    clock.seconds += 100
    result = await world.resume(paused, {PATH: YES})
    assert world.bank.paid == []
    if where == "around":
        assert (result.status, result.limit) == ("limit_reached", "deadline")
    else:
        assert result.status == "answered"
        assert "deadline" in result.final_answer
    assert result.iterations == world.sent


async def test_functions_in_the_instructions_of_an_agent_run_once() -> None:
    """An agent that goes on is not rendered again, and its model reads the instructions that it had."""
    world = World(once(call("helper-helper", {"messages": "Pay 9."})))
    bank = Bank()
    service = ScriptedChatCompletion(pays)
    kernel = Kernel(services=[service])
    kernel.add_plugin(bank, "bank")
    agent = ChatCompletionAgent(
        kernel=kernel, name="helper", instructions="You have {{bank.look}} it."
    )
    world.kernel.add_plugin(agent, "helper")
    paused = await world.planner.invoke(world.kernel, "Go.")
    result = await world.resume(paused, {PATH: YES})
    assert (result.final_answer, bank.paid, bank.looked) == ("paid 9", [9], 1)
    assert ["seen" in str(one.messages[0]["content"]) for one in service.requests] == [
        True,
        True,
    ]
    assert result.iterations == world.sent + len(service.requests)
    assert result.tool_calls == 3


async def test_a_worker_that_leaves_does_so_at_the_boundary_of_a_run_inside(
    tmp_path: Path,
) -> None:
    """What is in flight inside ends; no further request or call is made, and the next worker goes on from there."""
    begun, gate = asyncio.Event(), asyncio.Event()

    class Gated:
        ran = 0

        @kernel_function(description="Counts.")
        async def count(self) -> str:
            self.ran += 1
            begun.set()
            await gate.wait()
            return "counted"

    gated = Gated()

    def script(request: ScriptedRequest) -> Any:
        if "Count." in goal_in(request):
            return once(call("gated-count"))(request)
        return once(call("desk-reach_goal", {"goal": "Count."}))(request)

    service = ScriptedChatCompletion(script)
    kernel = Kernel(services=[service])
    kernel.add_plugin(gated, "gated")
    kernel.add_plugin(PlannerPlugin(planner_with(plan=False)), "desk")
    store = tmp_path / "runs.db"
    async with Runs.sqlite(store) as runs:
        await runs.start(planner_with(plan=False), kernel, "Go.", run_id="r")
        await begun.wait()
        closing = asyncio.create_task(runs.close())
        await asyncio.sleep(0)
        gate.set()
        await closing
    assert (gated.ran, len(service.requests)) == (1, 2)
    async with Runs.sqlite(store) as runs:
        started = await runs.start(planner_with(plan=False), kernel, "Go.", run_id="r")
        result = await started.result()
    assert (result.status, result.final_answer) == ("answered", "counted")
    assert gated.ran == 1
    assert result.iterations == len(service.requests) == 4


async def test_a_denial_inside_is_read_by_the_model_that_called() -> None:
    """The run inside goes on to its end, and the one around has its answer.

    Restates test_agent_as_tool_rejected_nested_approval_resumes_run in
    tests/test_agent_as_tool.py of openai/openai-agents-python.
    """
    world = World(once(CLERK))
    paused = await world.planner.invoke(world.kernel, "Go.")
    result = await world.resume(paused, {PATH: Deny("not today", by="ann")})
    (read,) = tool_results(world.services["clerk"].requests[-1])
    assert "not today" in read
    assert (result.status, result.final_answer) == ("answered", read)
    assert (world.bank.paid, len(world.services["clerk"].requests)) == ([], 2)


async def test_runs_with_equal_call_ids_have_decisions_of_their_own() -> None:
    """Decided in the other order, each run pays or not as was said of it.

    Restates test_agent_tool_run_result_keeps_same_call_isolated_by_scope in
    tests/test_agent_tool_state.py of openai/openai-agents-python.
    """
    world = World(once(CLERK))
    world.kernel.remove_service("clerk")
    world.kernel.add_service(ScriptedChatCompletion(_pays_three, service_id="clerk"))
    first = await world.planner.invoke(world.kernel, "Go.")
    second = await world.planner.invoke(world.kernel, "Go.")
    (one,), (other,) = first.pending, second.pending
    assert (one.path, one.arguments) == (other.path, other.arguments)
    denied = await world.planner.resume(
        world.kernel, second.checkpoint, {PATH: Deny("no", by="ann")}
    )
    assert (denied.status, world.bank.paid) == ("answered", [])
    approved = await world.planner.resume(world.kernel, first.checkpoint, {PATH: YES})
    assert (approved.status, world.bank.paid) == ("answered", [3])
    assert approved.iterations == denied.iterations == 4


@both_ways
async def test_each_level_ends_once_after_a_decision_two_runs_deep(
    streamed: bool,
) -> None:
    """After its saved state is read, an approved call neither waits again nor is passed over.

    Restates test_nested_agent_tool_hitl_resume_survives_json_round_trip_after_gc in
    tests/test_run_state.py of openai/openai-agents-python, and
    test_doubly_nested_graph_interrupts in libs/langgraph/tests/test_pregel.py of
    langchain-ai/langgraph.
    """
    world = World(once(call("expert-reach_goal", {"goal": "Look deep."})))
    paused = await invoke(world.planner, world.kernel, "Go.", streamed=streamed)
    (waiting,) = paused.pending
    assert waiting.path.count("/") == 2
    result = await world.resume(paused, {waiting.path: YES})
    assert result.status == "answered"
    assert (world.bank.looked, world.bank.paid) == (1, [1])
    assert [len(one.requests) for one in world.services.values()] == [2, 2, 2]


async def test_a_run_inside_that_waits_twice_is_not_begun_twice() -> None:
    """Each resume goes on behind what has run, in the run inside and in the one around.

    Restates test_double_interrupt_subgraph in libs/langgraph/tests/test_pregel.py of
    langchain-ai/langgraph.
    """

    def in_turn(request: ScriptedRequest) -> Any:
        turns = [call("bank-look"), *(call("bank-pay", {"account": n}) for n in (1, 2))]
        done = len(tool_results(request))
        return say("done") if done == len(turns) else turns[done]

    world = World(
        once(calls(call("bank-look"), call("expert-reach_goal", {"goal": "Both."}))),
        expert=in_turn,
    )
    result = await world.planner.invoke(world.kernel, "Go.")
    for account in (1, 2):
        (waiting,) = result.pending
        assert waiting.arguments == {"account": account}
        result = await world.resume(result, {waiting.path: YES})
    assert (result.status, world.bank.paid, world.bank.looked) == (
        "answered",
        [1, 2],
        2,
    )
    assert result.iterations == world.sent == 6


async def test_two_processes_that_read_one_saved_state_do_not_meet() -> None:
    """Each goes on from the state as it was saved, and changes nothing of the other's.

    Restates test_agent_as_tool_preserves_scope_for_nested_tool_context in
    tests/test_agent_as_tool.py of openai/openai-agents-python.
    """
    world = World(once(TWO))
    paused = await world.planner.invoke(world.kernel, "Go.")
    saved = paused.checkpoint.to_json()
    decisions: dict[str, Decision] = {one.path: YES for one in paused.pending}
    ends: list[Any] = []
    for _ in range(2):
        checkpoint = Checkpoint.from_json(saved)
        ends.append(
            await world.new_planner().resume(world.kernel, checkpoint, decisions)
        )
    assert [one.status for one in ends] == ["answered", "answered"]
    assert ends[0].iterations == ends[1].iterations == 8
    assert paused.checkpoint.to_json() == saved
