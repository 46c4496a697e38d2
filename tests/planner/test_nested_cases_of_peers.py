"""What other projects test of approvals inside agents and subgraphs, restated; each names the test it is taken from."""

import asyncio
import json
from typing import Any

import pytest

from planner_ext import (
    Approve,
    Checkpoint,
    Deny,
    FunctionCallingStepwisePlannerResult,
    PlannerPlugin,
)
from planner_ext.core.facts import CallFinished, CallStarted
from planner_ext.errors import InvalidCheckpointError
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.testing import ScriptedRequest, call, calls, say
from support.desks import World, goal_in, once, tool_results
from support.planner import both_ways, invoke, planner_with

YES = Approve(by="ann")
NO = Deny("no", by="ann")
CLERK = call("clerk-reach_goal", {"goal": "Pay 3."}, id="shared")


async def asks_about_the_clerk(tool: ToolCall) -> Defer | None:
    return Defer() if tool.plugin_name == "clerk" else None


def in_turn(*turns: Any) -> Any:
    """Make the next of these replies with each result that is read."""

    def script(request: ScriptedRequest) -> Any:
        return turns[len(tool_results(request))]

    return script


async def decided(
    world: World, result: FunctionCallingStepwisePlannerResult, decision: Any = YES
) -> FunctionCallingStepwisePlannerResult:
    """Decide the one call that waits."""
    (waiting,) = result.pending
    return await world.resume(result, {waiting.path: decision})


async def test_a_run_that_was_approved_itself_asks_again_after_a_denial_inside() -> (
    None
):
    """An approval of the planner for all its calls covers no call in it; a denied one may be asked again.

    Restates test_nested_agent_tool_resumes_after_rejection and
    test_agent_as_tool_with_nested_approvals_propagates in
    tests/test_hitl_error_scenarios.py of openai/openai-agents-python.
    """
    world = World(once(CLERK), options={"interceptors": [asks_about_the_clerk]})
    pays = in_turn(
        call("bank-pay", {"account": 3}, id="inner-1"),
        call("bank-pay", {"account": 3}, id="inner-2"),
        say("Paid at last."),
    )
    world.scripted("clerk", pays)
    asked = await world.planner.invoke(world.kernel, "Go.")
    assert asked.pending[0].fully_qualified_name == "clerk-reach_goal"
    inside = await decided(world, asked, Approve(by="ann", always="function"))
    assert inside.pending[0].path == "shared/inner-1"
    again = await decided(world, inside, NO)
    assert (again.pending[0].path, world.bank.paid) == ("shared/inner-2", [])
    result = await decided(world, again)
    assert (result.final_answer, world.bank.paid) == ("Paid at last.", [3])


@pytest.mark.parametrize("field", ["goal", "path"])
async def test_a_saved_state_whose_outer_call_was_changed_is_refused(
    field: str,
) -> None:
    """With other arguments of the call around, or another id: before any function, hook or request.

    Restates test_changed_nested_parent_fails_before_tool_inventory_callbacks in
    tests/test_hitl_error_scenarios.py of openai/openai-agents-python.
    """
    world = World(once(CLERK))
    paused = await world.planner.invoke(world.kernel, "Go.")
    text = paused.checkpoint.to_json()
    saved = json.loads(text)
    decision = next(one for one in saved["facts"] if one["type"] == "CallDecided")
    if field == "goal":
        decision["arguments"] = '{"goal": "Pay 4."}'
    else:
        decision["call_id"] = "other"
    sent = world.sent
    with pytest.raises(InvalidCheckpointError):
        await world.planner.resume(
            world.kernel,
            Checkpoint.from_json(json.dumps(saved)),
            {paused.pending[0].path: YES},
        )
    assert (world.bank.paid, world.sent) == ([], sent)


@both_ways
async def test_an_approval_around_does_not_cover_an_equal_call_inside(
    streamed: bool,
) -> None:
    """The same function, arguments and call id, one run deeper: it waits for a decision of its own.

    Restates test_parent_approval_does_not_authorize_independent_nested_run in
    tests/test_tool_approval_call_id_reuse.py, and
    test_nested_agent_tool_does_not_inherit_parent_approvals in
    tests/test_hitl_error_scenarios.py of openai/openai-agents-python.
    """
    pay = call("bank-pay", {"account": 3}, id="shared")
    world = World(in_turn(pay, CLERK, say("Done.")))
    world.scripted("clerk", once(pay))
    first = await invoke(world.planner, world.kernel, "Go.", streamed=streamed)
    second = await decided(world, first)
    assert (second.pending[0].path, world.bank.paid) == ("shared/shared", [3])
    still = await world.resume(second, {})
    assert (still.status, world.bank.paid) == ("paused", [3])
    result = await decided(world, still)
    assert (result.status, world.bank.paid) == ("answered", [3, 3])


async def test_a_resume_that_is_cancelled_after_the_call_inside_goes_on_behind_it() -> (
    None
):
    """What the run inside had done by then is in the checkpoint of the cancellation: nothing is paid twice.

    Restates test_agent_as_tool_resume_survives_cancellation_after_nested_output_commit in
    tests/test_agent_as_tool.py of openai/openai-agents-python.
    """
    completed = asyncio.Event()
    forever = asyncio.Event()

    async def hold(context: Any) -> None:
        if not completed.is_set():
            completed.set()
            await forever.wait()

    world = World(once(CLERK), inner={"iteration_completed": hold})
    paused = await world.planner.invoke(world.kernel, "Go.")
    resuming = asyncio.create_task(decided(world, paused))
    await completed.wait()
    resuming.cancel()
    with pytest.raises(asyncio.CancelledError) as cancelled:
        await resuming
    left: Any = cancelled.value
    checkpoint = Checkpoint.from_json(left.checkpoint.to_json())
    result = await world.new_planner().resume(world.kernel, checkpoint, {})
    assert (result.status, world.bank.paid) == ("answered", [3])


@both_ways
async def test_the_call_around_begins_and_ends_once(streamed: bool) -> None:
    """However often its function is called again, and its iteration is told of once.

    Restates test_nested_agent_tool_continuation_runs_outer_callbacks_once in
    tests/test_hitl_error_scenarios.py of openai/openai-agents-python.
    """
    completed: list[int] = []

    def tell(context: Any) -> None:
        completed.append(context.iteration)

    world = World(once(CLERK), options={"iteration_completed": tell})
    paused = await invoke(world.planner, world.kernel, "Go.", streamed=streamed)
    result = await decided(world, paused)
    of_call = [
        type(fact)
        for fact in result.facts
        if isinstance(fact, CallStarted | CallFinished)
    ]
    assert (of_call, completed) == ([CallStarted, CallFinished], [0])


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("decision", [YES, NO], ids=["approve", "reject"])
@both_ways
async def test_a_decision_reaches_a_call_at_any_depth(
    streamed: bool, decision: Approve | Deny, depth: int
) -> None:
    """From a saved state, plain and streamed, with and without a yes.

    Restates test_resume_recursively_nested_agent_as_tool_decision in tests/test_run_state.py
    of openai/openai-agents-python.
    """
    world = World(once(call("desk0-reach_goal", {"goal": "Pay 3."}, id="c")))
    for level in range(depth):
        is_last = level == depth - 1
        inner = (
            call("bank-pay", {"account": 3}, id="c")
            if is_last
            else call(f"desk{level + 1}-reach_goal", {"goal": "Pay 3."}, id="c")
        )
        world.scripted(f"desk{level}", once(inner))
        desk = planner_with(f"desk{level}", plan=False)
        world.kernel.add_plugin(PlannerPlugin(desk), f"desk{level}")
    paused = await invoke(world.planner, world.kernel, "Go.", streamed=streamed)
    assert paused.pending[0].path == "/".join("c" * (depth + 1))
    result = await decided(world, paused, decision)
    assert (result.status, result.pending) == ("answered", ())
    assert world.bank.paid == ([3] if decision is YES else [])


async def test_five_runs_of_one_batch_are_decided_together() -> None:
    """Each by its own path, with its own arguments.

    Restates test_multi_resume in libs/langgraph/tests/test_pregel.py of langchain-ai/langgraph,
    and test_nested_agent_tool_interruptions_remain_distinct_across_outer_calls in
    tests/test_hitl_error_scenarios.py of openai/openai-agents-python.
    """
    accounts = range(1, 6)
    goals = [
        call("clerk-reach_goal", {"goal": f"Pay {account}."}) for account in accounts
    ]
    world = World(once(calls(*goals)))
    paused = await world.planner.invoke(world.kernel, "Go.")
    assert sorted(one.arguments["account"] for one in paused.pending) == [*accounts]
    denied = {one.path: NO for one in paused.pending if one.arguments["account"] % 2}
    approved = {one.path: YES for one in paused.pending if one.path not in denied}
    result = await world.resume(paused, {**denied, **approved})
    assert (result.status, sorted(world.bank.paid)) == ("answered", [2, 4])


async def test_a_run_that_is_made_again_later_waits_again() -> None:
    """In another iteration, under the same call id: the yes to the first covers nothing of the second.

    Restates test_interrupt_subgraph_reenter_checkpointer_true in
    libs/langgraph/tests/test_pregel.py, and
    test_stateless_state_resets_with_interrupt in
    libs/langgraph/tests/test_subgraph_persistence.py of langchain-ai/langgraph.
    """
    world = World(in_turn(CLERK, CLERK, say("Done.")))
    world.scripted("clerk", once(call("bank-pay", {"account": 3}, id="pay")))
    first = await world.planner.invoke(world.kernel, "Go.")
    second = await decided(world, first)
    assert second.pending[0].path == first.pending[0].path
    assert second.pending[0].fingerprint != first.pending[0].fingerprint
    goals = [goal_in(one) for one in world.services["clerk"].requests]
    assert goals == ["Pay 3."] * len(goals)
    result = await decided(world, second, NO)
    assert (result.status, world.bank.paid) == ("answered", [3])
