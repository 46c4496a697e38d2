"""Kept runs whose functions make runs with a kernel and rules of their own: decided, recovered and refused alike."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Deny, FunctionCallingStepwisePlannerResult
from planner_ext.approval.decisions import Defer, ToolCall
from planner_ext.core.errors import RunRefusedError
from planner_ext.durable import Approvals, Runs, effect
from planner_ext.testing import ScriptedChatCompletion, ScriptedRequest, call, say
from planner_ext.testing.crash import CRASH_POINTS
from support.durable import GOAL, Shop, decide_all, effects_in, planner_of, turn
from support.processes import Lives

KILLED = -9
PATH = "call_1/call_1"


def above_fifty(asked: ToolCall) -> Defer | None:
    amount = asked.arguments.get("amount", 0)
    return Defer("So much?") if amount > 50 else None


def office_of(
    folder: Path,
    *,
    asks: Any = None,
    seconds: float = 0.0,
    sells: bool = True,
    **rules: Any,
) -> Kernel:
    """Make an office whose function makes a run in a shop that the office does not know."""

    def script(request: ScriptedRequest) -> Any:
        with (folder / "requests").open("a") as file:
            file.write("asked\n")
        shops = any("Shop." in str(one.get("content")) for one in request.messages)
        asked = asks or call("shop-pay", {"amount": 7})
        return [asked if shops else call("office-buy"), say("Done.")][turn(request)]

    shop = Kernel(services=[ScriptedChatCompletion(script)])
    if sells:
        shop.add_plugin(Shop(folder / "effects", seconds), "shop")

    class Office:
        @effect("idempotent")
        @kernel_function
        async def buy(self) -> str:
            return (await planner_of(**rules).invoke(shop, "Shop.")).final_answer

    kernel = Kernel(services=[ScriptedChatCompletion(script)])
    kernel.add_plugin(Office(), "office")
    return kernel


async def see_through(
    store: str, folder: Path, **options: Any
) -> FunctionCallingStepwisePlannerResult:
    """Drive the run to its end, and decide each question."""
    kernel = office_of(folder, **options)
    async with Runs.sqlite(store, poll_seconds=0.01, max_deaths=100) as runs:
        handle = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
        result = await handle.result()
        while result.status == "paused":
            await decide_all(store)
            result = await handle.result()
    return result


def life(store: str, folder: Path, seconds: float) -> None:
    rules: dict[str, Any] = {"interceptors": [above_fifty]}
    asyncio.run(see_through(store, folder, seconds=seconds, **rules))


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(
            point, marks=[] if point == "after_decision" else [pytest.mark.kills]
        )
        for point in CRASH_POINTS
    ],
)
async def test_a_run_of_code_goes_on_after_a_kill(
    point: str, lives: Lives, tmp_path: Path
) -> None:
    """Killed twice at any named point: its effect once, each request charged, none lost but by the deaths."""
    store = str(tmp_path / "runs.db")
    seconds = 0.2 if point == "mid_tool" else 0.0
    codes = [
        lives.live(life, store, tmp_path, seconds, PLANNER_EXT_CRASH_AT=point)
        for _ in range(2)
    ]
    result = await see_through(store, tmp_path, interceptors=[above_fifty])
    assert codes[0] == KILLED or point == "mid_parallel"
    assert (result.status, result.final_answer) == ("answered", "Done.")
    in_doubt = str(result.facts).count("It is done.")
    assert len(effects_in(tmp_path / "effects")) in (1, 1 - in_doubt)
    requests = effects_in(tmp_path / "requests")
    assert len(requests) <= result.iterations <= len(requests) + codes.count(KILLED)


async def test_a_decision_that_does_not_fit_there_leaves_its_row_open(
    tmp_path: Path,
) -> None:
    """In a process where the function is gone: the row says so, nothing runs, and a further decision counts."""
    store = str(tmp_path / "runs.db")
    async with Runs.sqlite(store) as runs:
        first = office_of(tmp_path)
        handle = await runs.start(planner_of(), first, GOAL, run_id="order-7")
        await handle.result()
    await decide_all(store)
    async with Runs.sqlite(store) as runs, Approvals.connect(store) as approvals:
        closed = office_of(tmp_path, sells=False)
        handle = await runs.start(planner_of(), closed, GOAL, run_id="order-7")
        assert (await handle.result()).status == "paused"
        (again,) = await approvals.pending()
        assert again.path == PATH
        assert "no longer what was asked about" in (again.problem or "")
        assert await approvals.decide(again.id, Deny("no", by="ann"))
        assert (await handle.result()).status == "answered"
    assert effects_in(tmp_path / "effects") == []


async def test_an_edit_there_is_reviewed_by_the_rules_of_its_run(
    tmp_path: Path,
) -> None:
    """It waits again, as what it is now; approved, that runs."""
    store = str(tmp_path / "runs.db")
    kernel = office_of(tmp_path, interceptors=[above_fifty])
    async with Runs.sqlite(store) as runs, Approvals.connect(store) as approvals:
        handle = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
        await handle.result()
        (asked,) = await approvals.pending()
        await approvals.decide(asked.id, Approve(by="ann", arguments={"amount": 70}))
        assert (await handle.result()).status == "paused"
        (again,) = await approvals.pending()
        assert (again.prompt, again.arguments) == ("So much?", {"amount": 70})
        await approvals.decide(again.id, Approve(by="bob"))
        assert (await handle.result()).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 70"]


async def test_the_guards_of_a_run_of_code_are_guards_of_the_kept_run(
    tmp_path: Path,
) -> None:
    """A process whose code has lost its rule leaves the run to others; the decision is not used up."""
    store = str(tmp_path / "runs.db")
    ruled = office_of(tmp_path, interceptors=[above_fifty])
    async with Runs.sqlite(store) as runs:
        started = await runs.start(planner_of(), ruled, GOAL, run_id="order-7")
        await started.result()
    await decide_all(store)
    async with Runs.sqlite(store) as runs:
        free = office_of(tmp_path)
        started = await runs.start(planner_of(), free, GOAL, run_id="order-7")
        with pytest.raises(RunRefusedError, match="above_fifty"):
            await started.result()
    assert effects_in(tmp_path / "effects") == []
    async with Runs.sqlite(store) as runs:
        started = await runs.start(planner_of(), ruled, GOAL, run_id="order-7")
        assert (await started.result()).status == "answered"
    assert effects_in(tmp_path / "effects") == ["pay 7"]


class Namesake:
    """Another shop, whose function may be called again."""

    @effect("idempotent")
    @kernel_function
    async def book(self, order: int) -> str:
        raise AssertionError("another function has run")


def books(store: str, folder: Path) -> None:
    kernel = office_of(folder, asks=call("shop-book", {"order": 7}), seconds=0.2)
    kernel.add_plugin(Namesake(), "shop")

    async def run() -> None:
        async with Runs.sqlite(store) as runs:
            handle = await runs.start(planner_of(), kernel, GOAL, run_id="order-7")
            await handle.result()

    asyncio.run(run())


async def test_a_call_in_doubt_there_has_the_effect_of_its_own_function(
    lives: Lives, tmp_path: Path
) -> None:
    """And not of a function around that has the same name: what happens once is not repeated."""
    store = str(tmp_path / "runs.db")
    code = lives.live(books, store, tmp_path, PLANNER_EXT_CRASH_AT="after_tool")
    assert code == KILLED
    asks = call("shop-book", {"order": 7})
    result = await see_through(store, tmp_path, asks=asks)
    assert result.status == "answered"
    assert effects_in(tmp_path / "effects") == ["book 7"]
