"""The timelines of runs whose processes really end, and of real nested runs."""

from pathlib import Path

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    PlannerPlugin,
    requires_approval,
)
from planner_ext.testing import ScriptedChatCompletion, call, say
from planner_ext.testing.crash import CRASH_POINTS
from planner_ext.timeline import page_of, timeline_of
from support.durable import open_runs, run_life, see_through, world
from support.processes import Lives

KILLED = -9


SEEN = {
    "after_model",
    "after_intent",
    "mid_tool",
    "after_tool",
    "after_outcome",
    "mid_parallel",
}
"""Points at which something is under way that the next process finds in the journal."""


@pytest.mark.parametrize("point", CRASH_POINTS)
async def test_a_killed_process_is_seen_once(
    point: str, lives: Lives, tmp_path: Path
) -> None:
    """One death is one crash in the timeline if a request or a call was under way; what it left started is kept."""
    store, effects = tmp_path / "runs.db", tmp_path / "effects"
    seconds = 0.2 if point == "mid_tool" else 0.0
    assert (
        lives.live(
            run_life, store, effects, "order-7", seconds, PLANNER_EXT_CRASH_AT=point
        )
        == KILLED
    )
    result = await see_through(store, effects, "order-7")
    timeline = timeline_of(result.facts)
    kinds = [event.kind for event in timeline.events]
    assert kinds.count("crashed") == (point in SEEN)
    assert timeline.lives == 1 + kinds.count("crashed") + kinds.count("resumed")
    assert ("the process ended" in page_of([timeline])) == (point in SEEN)
    assert all(call.ended is not None for call in timeline.calls)


async def test_a_nested_run_shows_what_it_spent() -> None:
    """The call of a planner as a function is a nested run, whose requests and calls are part of what the run spent."""
    kernel = Kernel()
    script = [call("expert-reach_goal", {"goal": "x"}), say("done")]
    kernel.add_service(ScriptedChatCompletion(script, service_id="chat"))
    kernel.add_service(
        ScriptedChatCompletion([say("one"), say("two")], service_id="expert")
    )
    nested = FunctionCallingStepwisePlannerOptions(plan=True)
    kernel.add_plugin(
        PlannerPlugin(
            FunctionCallingStepwisePlanner(service_id="expert", options=nested)
        ),
        "expert",
    )
    options = FunctionCallingStepwisePlannerOptions(plan=False, max_iterations=6)
    result = await FunctionCallingStepwisePlanner(
        service_id="chat", options=options
    ).invoke(kernel, "Ask the expert.")
    timeline = timeline_of(result.facts)
    (call_of_expert,) = timeline.calls
    assert call_of_expert.nested
    assert call_of_expert.spent is not None
    assert call_of_expert.spent.iterations == 2
    (spending,) = timeline.spending
    assert (spending.name, spending.used, spending.limit, spending.nested) == (
        "max_iterations",
        4,
        6,
        2,
    )
    assert "nested run: 2 round trips, 0 function calls" in result.to_html()


async def test_a_call_in_which_a_run_waits_is_drawn_as_waiting() -> None:
    """As the call inside is; nothing has failed."""
    kernel = Kernel()
    asks = [call("expert-reach_goal", {"goal": "x"})]
    kernel.add_service(ScriptedChatCompletion(asks, service_id="chat"))
    pays = [call("desk-pay", {})]
    kernel.add_service(ScriptedChatCompletion(pays, service_id="expert"))

    @requires_approval
    @kernel_function
    def pay() -> str:
        """Pay."""
        return "paid"

    kernel.add_function("desk", pay)
    plain = FunctionCallingStepwisePlannerOptions(plan=False)
    expert = FunctionCallingStepwisePlanner("expert", plain)
    kernel.add_plugin(PlannerPlugin(expert), "expert")
    result = await FunctionCallingStepwisePlanner("chat", plain).invoke(kernel, "Go.")
    page = result.to_html()
    assert result.status == "paused"
    assert 'class="failed"' not in page
    assert page.count('class="waits"') >= 2


async def test_a_fork_stands_beside_its_run(tmp_path: Path) -> None:
    """What a fork has of its run is drawn once; then each goes its own way, with what happened in between."""
    book, label = call("shop-book", {"order": 1}), call("shop-label", {"order": 2})
    planner, kernel = world(tmp_path / "effects", [book, label, say("Both.")])
    async with open_runs(tmp_path / "runs.db") as runs:
        await (await runs.start(planner, kernel, "Settle.", run_id="order-7")).result()
        name = await runs.fork(
            "order-7", at=0, new_run_id="order-7b", instruction="No label."
        )
        other, kernel = world(tmp_path / "effects", [say("Booked, no label.")])
        await (
            await runs.resume(name, other, kernel, budget=Budget(max_iterations=5))
        ).result()
        page = page_of(
            [(await runs.load(run)).timeline() for run in ("order-7", "order-7b")]
        )
    assert "The first iteration is the same in both" in page
    assert "stopped: Forked after iteration 0 of run order-7." in page
    assert page.count('id="ai1"') == page.count('id="bi1"') == 1
    assert all(text in page for text in ("No label.", "Both.", "Booked, no label."))
