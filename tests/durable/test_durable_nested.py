"""Runs inside runs of a store: they wait, are decided, and go on over the death of any process."""

import asyncio
from pathlib import Path

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Budget, FunctionCallingStepwisePlannerResult
from planner_ext.core.errors import RunRefusedError
from planner_ext.core.facts import CallFinished
from planner_ext.durable import Approvals, Grant, Runs, effect
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedAnswer,
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.crash import CRASH_POINTS
from planner_ext.timeline import page_of, timeline_of
from support.durable import GOAL, Shop, decide_all, effects_in, planner_of
from support.planner import planner_with
from support.processes import Lives

KILLED = -9

DESKS = calls(
    call("outer-reach_goal", {"goal": "Ask the desk."}),
    call("desk-reach_goal", {"goal": "Pay two."}),
)


def shop_of(folder: Path, *, seconds: float = 0.0) -> Kernel:
    """Make a shop with a desk that pays, and another desk around it."""

    def script(request: ScriptedRequest) -> ScriptedAnswer:
        said = str(next(one for one in request.messages if one["role"] == "user"))
        answered = any(one["role"] == "tool" for one in request.messages)
        with (folder / "requests").open("a") as file:
            file.write("asked\n")
        if answered:
            return say("Done.")
        if GOAL in said:
            return DESKS
        if "Ask the desk" in said:
            paid_one = call("desk-reach_goal", {"goal": "Pay one."})
            return calls(call("shop-book", {"order": 1}), paid_one)
        return call("shop-pay", {"amount": 1 if "one" in said else 2})

    kernel = Kernel(services=[ScriptedChatCompletion(script)])
    kernel.add_plugin(Shop(folder / "effects", seconds), "shop")
    desk = planner_with(plan=False, excluded_plugins={"outer"})
    kernel.add_plugin(PlannerPlugin(desk), "desk")
    kernel.add_plugin(PlannerPlugin(planner_with(plan=False)), "outer")
    return kernel


async def see_through(
    store: str, folder: Path, *, seconds: float = 0.0
) -> FunctionCallingStepwisePlannerResult:
    """Drive the run to its end, and decide each question."""
    kernel = shop_of(folder, seconds=seconds)
    async with Runs.sqlite(store, poll_seconds=0.01, max_deaths=100) as runs:
        handle = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
        result = await handle.result()
        while result.status == "paused":
            await decide_all(store)
            result = await handle.result()
    return result


def life(store: str, folder: Path, seconds: float) -> None:
    asyncio.run(see_through(store, folder, seconds=seconds))


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point, marks=[] if point == "after_decision" else [pytest.mark.kills]
        )
        for point in CRASH_POINTS
    ],
)
async def test_runs_inside_go_on_after_a_kill(
    point: str, lives: Lives, tmp_path: Path
) -> None:
    """Killed twice at any named point: each effect once, each request charged, none lost but by the deaths."""
    store = str(tmp_path / "runs.db")
    seconds = 0.2 if point == "mid_tool" else 0.0
    codes = [
        lives.live(life, store, tmp_path, seconds, PLANNER_EXT_CRASH_AT=point)
        for _ in range(2)
    ]
    result = await see_through(store, tmp_path)
    assert codes[0] == KILLED
    assert (result.status, result.final_answer) == ("answered", "Done.")
    done = [line.split()[0] for line in effects_in(tmp_path / "effects")]
    in_doubt = str(result.facts).count("It is done.")
    assert done.count("pay") <= 2
    assert done.count("book") <= 1
    assert len(done) >= 3 - in_doubt
    requests = effects_in(tmp_path / "requests")
    assert len(requests) <= result.iterations <= len(requests) + codes.count(KILLED)


async def test_a_grant_answers_what_waits_inside(tmp_path: Path) -> None:
    """At both depths: nobody is asked, and each use is counted."""
    store = str(tmp_path / "runs.db")
    kernel = shop_of(tmp_path)
    async with Runs.sqlite(store) as runs, Approvals.connect(store) as approvals:
        first = await runs.start(planner_of(), kernel, GOAL, run_id="first")
        assert (await first.result()).status == "paused"
        asked = (await approvals.pending())[0].id
        given = Approve(by="ann")
        await approvals.grant(asked, given, Grant(expires_in=60))

        later = await runs.start(planner_of(), kernel, GOAL, run_id="later")
        assert (await later.result()).status == "answered"

        (grant,) = await approvals.grants()
    assert grant.used == 2
    done = [line.split()[0] for line in effects_in(tmp_path / "effects")]
    assert done.count("pay") == 2


async def test_what_waits_inside_is_decided_by_its_row(tmp_path: Path) -> None:
    """Its id begins with the run inside, its row belongs to the run around; a decision by path is taken, too."""
    store = str(tmp_path / "runs.db")
    async with Runs.sqlite(store) as runs:
        started = await runs.start(
            planner_of(), shop_of(tmp_path), GOAL, run_id="order-7"
        )
        await started.result()
        pending = await runs.approvals().pending()
        waiting = {one.path: (one.id, one.run_id, one.goal) for one in pending}
        assert (
            sorted(waiting) == ["call_1/call_2/call_2", "call_2/call_1"]
            or len(waiting) == 2
        )
        assert {run_id for _, run_id, _ in waiting.values()} == {"order-7"}
        assert all(id_.startswith("order-7/0/") for id_, _, _ in waiting.values())
        assert {goal for _, _, goal in waiting.values()} == {"Pay one.", "Pay two."}
        decisions = {path: Approve(by="ann") for path in waiting}
        resumed = await runs.resume(
            "order-7", planner_of(), shop_of(tmp_path), decisions=decisions
        )
        result = await resumed.result()
    assert result.status == "answered"
    assert {one.call for one in result.decisions} == set(waiting)
    timeline = timeline_of(result.facts)
    inside = [run for one in timeline.calls for run in one.runs]
    assert [run.goal for run in inside] == ["Ask the desk.", "Pay two."]
    assert "Pay one." in page_of([timeline])


async def test_a_function_of_a_kept_run_resumes_the_run_that_it_made(
    tmp_path: Path,
) -> None:
    """Its checkpoint is no copy of what the store runs: the run around it records both lives."""

    class Desk:
        @effect("idempotent")
        @kernel_function(description="Prints two labels.")
        async def labels(self, kernel: Kernel) -> str:
            planner = planner_with(
                plan=False, budget=Budget(max_tool_calls=1, on_limit="stop")
            )
            first = await planner.invoke(kernel, "Print two.")
            more = Budget(max_tool_calls=2)
            both = await planner.resume(kernel, first.checkpoint, budget=more)
            return f"{first.status}, {both.status}"

    label = call("shop-label", {"order": 1})
    again = call("shop-label", {"order": 2})
    script = [call("desk-labels"), label, again, again, say("Both."), say("Done.")]
    kernel = Kernel(services=[ScriptedChatCompletion(script)])
    kernel.add_plugin(Shop(tmp_path / "effects"), "shop")
    kernel.add_plugin(Desk(), "desk")
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        started = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
        result = await started.result()
    assert result.status == "answered"
    (made,) = [fact.result for fact in result.facts if isinstance(fact, CallFinished)]
    assert made == "limit_reached, answered"


async def test_the_guards_of_a_run_inside_are_guards_of_the_kept_run(
    tmp_path: Path,
) -> None:
    """A process whose nested planner has lost its rule is refused by name; nothing runs."""
    store = str(tmp_path / "runs.db")

    def ruled(call: object) -> None:
        return None

    kernel = shop_of(tmp_path)
    kernel.plugins.pop("desk")
    desk = planner_with(plan=False, excluded_plugins={"outer"}, interceptors=[ruled])
    kernel.add_plugin(PlannerPlugin(desk), "desk")
    async with Runs.sqlite(store) as runs:
        started = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
        await started.result()
    await decide_all(store)
    async with Runs.sqlite(store) as runs:
        started = await runs.start(
            planner_of(), shop_of(tmp_path), GOAL, run_id="order-7"
        )
        with pytest.raises(RunRefusedError, match="ruled"):
            await started.result()
    assert not any("pay" in line for line in effects_in(tmp_path / "effects"))
    async with Runs.sqlite(store) as runs:
        started = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
        assert (await started.result()).status == "answered"


class Stranger:
    """Has the name of a planner's function, and does something else."""

    @kernel_function
    async def reach_goal(self, goal: str) -> str:
        raise AssertionError("another function has run")


@pytest.mark.parametrize("moment", ["paused", "running"])
async def test_a_run_inside_is_left_to_a_process_that_has_its_function(
    moment: str, lives: Lives, tmp_path: Path
) -> None:
    """Without it the run is refused by name and no try is used up; the decision, or what had begun, stays."""
    store = str(tmp_path / "runs.db")
    if moment == "running":
        lives.live(life, store, tmp_path, 0.0, PLANNER_EXT_CRASH_AT="after_outcome")
    else:
        async with Runs.sqlite(store) as runs:
            started = await runs.start(
                planner_of(), shop_of(tmp_path), GOAL, run_id="order-7"
            )
            await started.result()
        await decide_all(store)
    async with Runs.sqlite(store) as runs:
        (before,) = await runs.list()
        kernel = shop_of(tmp_path)
        kernel.add_plugin(Stranger(), "outer")
        with pytest.raises(RunRefusedError, match="outer-reach_goal is not here"):
            await (await runs.resume("order-7", planner_of(), kernel)).result()
        (after,) = await runs.list()
    assert (after.status, after.retries, after.problem) == (before.status, 0, "")
    assert (await see_through(store, tmp_path)).status == "answered"
