"""Calls whose process dies: batches of several kinds, edited and sticky approvals, and limits that hold over lives."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve, Budget, FunctionCallingStepwisePlannerResult
from planner_ext.core.facts import CallDecided, CallStarted, RequestFailed
from planner_ext.durable import Approvals, Runs, worker
from planner_ext.hitl_manager import ApprovalSettings
from planner_ext.testing import Script, ScriptedRequest, call, calls, say
from planner_ext.testing.crash import CrashingStore
from support.durable import (
    BATCH,
    GOAL,
    PAY,
    check_history,
    decide_all,
    effects_in,
    turn,
    world,
)


class Killed(BaseException):
    """Ends a life at any point, as a kill would: no handler catches it."""


def kill() -> None:
    """End this life."""
    raise Killed


Die = Callable[[str | None], None]


@pytest.fixture
def die(monkeypatch: pytest.MonkeyPatch) -> Die:
    """Let each life from now on end at a point, or none."""

    def at(point: str | None) -> None:
        if point is None:
            monkeypatch.undo()
        else:
            monkeypatch.setattr(
                worker,
                "_with_crash_points",
                lambda writer: CrashingStore(writer, point, end=kill),
            )

    return at


class World:
    """One run that lives several times, and its traces."""

    def __init__(self, folder: Path, script: Script, **options: Any) -> None:
        self.store, self.effects = folder / "runs.db", folder / "effects"
        self._script, self._options = script, options

    async def live(self) -> FunctionCallingStepwisePlannerResult | None:
        """Live for one activation; None where that ended in the midst."""
        async with Runs.sqlite(self.store) as runs:
            handle = await runs.start(
                *world(self.effects, self._script, **self._options), GOAL, run_id="r"
            )
            try:
                return await handle.result()
            except Killed:
                return None

    async def end(self) -> FunctionCallingStepwisePlannerResult:
        """Live until the run ends, and decide each question."""
        while (result := await self.live()) is None or result.status == "paused":
            await decide_all(self.store)
        return result

    @property
    def done(self) -> Counter[str]:
        """Count the effects, by the name of the tool."""
        return Counter(line.split()[0] for line in effects_in(self.effects))


def turns(*replies: Any) -> Callable[[ScriptedRequest], Any]:
    """Reply by the turn that the history shows."""
    return lambda request: replies[turn(request)]


@pytest.mark.parametrize(
    "point", ["after_intent", "mid_parallel", "after_tool", "after_outcome"]
)
async def test_a_batch_of_all_kinds_settles(
    point: str, die: Die, tmp_path: Path
) -> None:
    """Of three calls at once, ``once`` is asked about and the others run again, each under one key and one result."""
    run = World(tmp_path, turns(BATCH, say("Done.")))
    die(point)
    assert await run.live() is None
    die(None)
    result = await run.end()
    check_history(result, ["book", "label", "charge"])
    assert (result.status, result.tool_calls) == ("answered", 3)
    assert run.done["book"] <= 1
    assert run.done["label"] in (1, 2)
    assert run.done["charge"] in (1, 2)
    keys = {
        line.split()[2] for line in effects_in(run.effects) if line.startswith("charge")
    }
    assert keys == {"r/0/charge"}


@pytest.mark.parametrize(
    "point",
    ["after_intent", "after_tool", "after_outcome", "after_pause", "after_decision"],
)
@pytest.mark.parametrize("on_deferred", ["hold_all", "run_safe_first"])
async def test_calls_beside_one_that_waits_survive(
    point: str, on_deferred: Any, die: Die, tmp_path: Path
) -> None:
    """Whether the others run before the pause or after it, a life that ends makes none of them run unasked again."""
    batch = calls(
        call("shop-pay", {"amount": 5}, id="pay"),
        call("shop-book", {"order": 1}, id="book"),
    )
    run = World(
        tmp_path,
        turns(batch, say("Done.")),
        approval=ApprovalSettings(on_deferred=on_deferred),
    )
    die(point)
    while (first := await run.live()) is not None:
        assert first.status == "paused", "it never came to the point"
        await decide_all(run.store)
    die(None)
    result = await run.end()
    check_history(result, ["pay", "book"])
    assert result.status == "answered"
    assert run.done["pay"] <= 1
    assert run.done["book"] <= 1
    in_doubt = sum(
        isinstance(fact, CallDecided) and fact.reason == "supplied"
        for fact in result.facts
    )
    assert run.done["pay"] + run.done["book"] + in_doubt >= 2


@pytest.mark.parametrize("point", ["after_decision", "after_intent"])
async def test_what_a_person_edited_is_what_runs_in_another_life(
    point: str, die: Die, tmp_path: Path
) -> None:
    """The arguments of the approval, and not the model's, also where they are asked about again."""
    run = World(tmp_path, turns(PAY, say("Paid.")))
    await run.live()
    async with Approvals.connect(run.store) as approvals:
        assert await approvals.decide(
            "r/0/pay", Approve(arguments={"amount": 3}, by="ann")
        )
    die(point)
    assert await run.live() is None
    die(None)
    result = await run.live()
    if point == "after_intent":
        assert result is not None
        async with Approvals.connect(run.store) as approvals:
            (item,) = await approvals.pending()
            assert (item.in_doubt, dict(item.arguments)) == (True, {"amount": 3})
            assert await approvals.decide(
                item.id, Approve(by="ann", fingerprint=item.fingerprint)
            )
        result = await run.live()
    assert result is not None
    assert (result.status, effects_in(run.effects)) == ("answered", ["pay 3"])


@pytest.mark.parametrize(
    "point", ["after_intent", "after_outcome", "after_model_saved"]
)
async def test_an_approval_for_good_holds_in_other_lives(
    point: str, die: Die, tmp_path: Path
) -> None:
    """Given once for the function, it is not asked for again, however often the process dies."""
    more = [call("shop-pay", {"amount": n}, id=f"pay{n}") for n in range(3)]
    run = World(tmp_path, turns(*more, say("Paid.")))
    await run.live()
    async with Approvals.connect(run.store) as approvals:
        assert await approvals.decide("r/0/pay0", Approve(by="ann", always="function"))
    die(point)
    assert await run.live() is None
    die(None)
    result = await run.end()
    asked = [
        fact.call_id
        for fact in result.facts
        if isinstance(fact, CallDecided) and fact.verdict == "defer"
    ]
    assert asked == ["pay0"]
    assert max(Counter(effects_in(run.effects)).values()) == 1


@pytest.mark.parametrize(
    "point", ["after_model_saved", "after_outcome", "mid_parallel"]
)
async def test_a_budget_is_one_budget_over_all_lives(
    point: str, die: Die, tmp_path: Path
) -> None:
    """Three lives die at the point, and the limits still end the run where one life would have.

    A life that dies where a request may have been under way costs a round trip.
    """

    def labels(request: ScriptedRequest) -> Any:
        if not request.tools:
            return say("Out of calls.")
        return calls(
            *(
                call("shop-label", {"order": n}, id=f"label{turn(request)}{n}")
                for n in range(2)
            )
        )

    async def ended(folder: Path, lives: int) -> FunctionCallingStepwisePlannerResult:
        run = World(folder, labels, budget=Budget(max_iterations=9, max_tool_calls=6))
        for _ in range(lives):
            die(point)
            await run.live()
        die(None)
        return await run.end()

    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    one, many = await ended(tmp_path / "one", 0), await ended(tmp_path / "many", 3)
    lost = sum(isinstance(fact, RequestFailed) for fact in many.facts)
    if point != "mid_parallel":  # there the other call may have ended, too
        assert (lost > 0) is (point == "after_outcome")
    assert (many.status, many.limit, many.iterations) == (
        one.status,
        one.limit,
        one.iterations + lost,
    )
    assert many.tool_calls == one.tool_calls
    assert sum(isinstance(fact, CallStarted) for fact in many.facts) >= one.tool_calls
