"""Who decided what: a store says who, when, what and with which arguments, also of decisions that were refused."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve, Deny
from planner_ext.durable import ApprovalRefusedError, Approvals, DecisionRecord
from planner_ext.errors import DecisionRefusedError, InvalidCheckpointError
from planner_ext.hitl_manager import ApprovalSettings, Decision, Supply
from support.durable import GOAL, effects_in, open_runs, pays, store_neutral, world

ID = "a/0/pay"


async def paused(runs: Any, effects: Path, **options: Any) -> Any:
    handle = await runs.start(*world(effects, pays, **options), GOAL, run_id="a")
    assert (await handle.result()).status == "paused"
    return handle


def brief(record: DecisionRecord | None) -> tuple[Any, ...]:
    assert record is not None
    assert abs((datetime.now(UTC) - record.at).total_seconds()) < 60
    return (
        record.kind,
        record.by,
        record.requested,
        record.arguments,
        record.reason,
        record.result,
        record.always,
    )


ASKED = {"amount": 5}


DECIDED = [
    (Approve(by="ann"), ("approve", "ann", ASKED, ASKED, "", None, None)),
    (Approve(always="function"), ("approve", "", ASKED, ASKED, "", None, "function")),
    (
        Approve({"amount": 3}, by="bo"),
        ("approve", "bo", ASKED, {"amount": 3}, "", None, None),
    ),
    (Deny("too much", by="ann"), ("deny", "ann", ASKED, None, "too much", None, None)),
    (Supply("by hand", by="ann"), ("supply", "ann", ASKED, None, "", "by hand", None)),
]


@store_neutral(
    ("door", "decision", "said"),
    [(door, *case) for door in ("approvals", "resume") for case in DECIDED],
)
async def test_a_store_and_a_result_say_who_decided_what(
    door: str, decision: Decision, said: tuple[Any, ...], store: str, tmp_path: Path
) -> None:
    """Whichever way it was decided: the same in the row, before and after a worker took it, and in the result."""
    async with (
        open_runs(store, poll_seconds=0.01) as runs,
        Approvals.connect(store) as approvals,
    ):
        handle = await paused(runs, tmp_path / "effects")
        assert (await approvals.show(ID)).decision is None
        if door == "approvals":
            assert await approvals.decide(ID, decision)
            assert brief((await approvals.show(ID)).decision) == said
        else:
            handle = await runs.resume(
                "a", *world(tmp_path / "effects", pays), decisions={"pay": decision}
            )
        result = await handle.result()
        shown = await approvals.show(ID)
        assert (shown.status, shown.refused) == ("closed", ())
        assert brief(shown.decision) == said
        (record,) = result.decisions
        assert (brief(record), record.call, record.fully_qualified_name) == (
            said,
            "pay",
            "shop-pay",
        )


async def test_a_decision_that_was_refused_is_recorded(
    store: str, tmp_path: Path
) -> None:
    """Made for something else, impossible, second, late, not pending: who, when, what, and why it was not taken."""
    effects = tmp_path / "effects"
    async with (
        open_runs(store, poll_seconds=0.01) as runs,
        Approvals.connect(store) as approvals,
    ):
        handle = await paused(runs, effects)
        with pytest.raises(ApprovalRefusedError):
            await approvals.decide(ID, Approve(by="eve", fingerprint="0" * 64))
        with pytest.raises(ApprovalRefusedError):
            await approvals.decide(ID, Supply(float("nan"), by="nan"))
        assert await approvals.decide(ID, Approve({"amount": None}, by="ann"))
        assert (
            await handle.result()
        ).status == "paused"  # a worker found that these arguments do not fit
        with pytest.raises(DecisionRefusedError):
            resumed = await runs.resume(
                "a",
                *world(effects, pays),
                decisions={"pay": Approve({"amount": None}, by="bo")},
            )
            await resumed.result()
        with pytest.raises(DecisionRefusedError):
            resumed = await runs.resume(
                "a", *world(effects, pays), decisions={"other": Deny(by="cy")}
            )
            await resumed.result()
        (listed,) = await approvals.pending()
        assert [one.by for one in listed.refused] == ["eve", "nan", "ann", "bo"]
        assert listed.refused[2].arguments == {"amount": None}
        assert (listed.decision, listed.problem) == (None, listed.refused[2].refused)
        assert await approvals.decide(ID, Deny("no", by="dan"))
        assert not await approvals.decide(ID, Approve(by="fay"))
        with pytest.raises(DecisionRefusedError):
            resumed = await runs.resume(
                "a", *world(effects, pays), decisions={"pay": Approve(by="guy")}
            )
            await resumed.result()
        handle = await runs.resume("a", *world(effects, pays))
        assert (await handle.result()).status == "answered"
        assert not await approvals.decide(ID, Approve(by="late"))
        shown = await approvals.show(ID)
        assert brief(shown.decision)[:2] == ("deny", "dan")
        names = [one.by for one in await approvals.refused("a")]
        assert names == ["eve", "nan", "ann", "bo", "cy", "fay", "guy", "late"]
        assert {one.call for one in shown.refused} == {ID}
        reasons = {one.by: one.refused for one in await approvals.refused("a")}
        assert "was given for another call" in reasons["eve"]
        assert "can be written as JSON" in reasons["nan"]
        assert "amount" in reasons["ann"]
        assert "does not wait for one" in reasons["cy"]
        assert "by 'dan'" in reasons["fay"]
        assert "was decided before" in reasons["guy"]
        assert "by 'dan'" in reasons["late"]
    assert not effects.exists()


async def test_a_late_decision_is_recorded(store: str, tmp_path: Path) -> None:
    """One on a question that expired is kept with the question; its end names no person."""

    class Clock:
        at = 1_000.0

        def now(self) -> float:
            return self.at

    clock: Any = Clock()
    settings = ApprovalSettings(expires_in=60)
    async with open_runs(store) as runs:
        handle = await runs.start(
            *world(tmp_path / "effects", pays, approval=settings), GOAL, run_id="a"
        )
        await handle.result()
    async with Approvals.connect(store, clock=clock) as approvals:
        clock.at = (await approvals.show(ID)).asked_at.timestamp() + 61
        with pytest.raises(ApprovalRefusedError, match="too late"):
            await approvals.decide(ID, Approve(by="ann"))
        (late,) = (await approvals.show(ID)).refused
        assert (late.by, late.kind, late.arguments) == ("ann", "approve", ASKED)
        assert "too late" in late.refused


async def test_a_checkpoint_of_a_kept_run_is_not_resumed_outside_its_store(
    tmp_path: Path,
) -> None:
    """What the store has run since would run again: as a value it is refused, with the way."""
    effects = tmp_path / "effects"
    store = str(tmp_path / "runs.db")
    planner, kernel = world(effects, pays)
    async with open_runs(store) as runs, Approvals.connect(store) as approvals:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        checkpoint = (await handle.result()).checkpoint
        assert await approvals.decide(ID, Approve(by="ann"))
        assert (await handle.result()).status == "answered"
    with pytest.raises(InvalidCheckpointError, match=r"'a' is kept.*Runs\.resume"):
        await planner.resume(kernel, checkpoint, {"pay": Approve(by="bo")})
    with pytest.raises(InvalidCheckpointError, match=r"'a' is kept.*Runs\.cancel"):
        planner.cancel(checkpoint.to_json(), by="bo")
    assert effects_in(effects) == ["pay 5"]


async def test_a_call_in_doubt_says_who_had_approved_it(tmp_path: Path) -> None:
    """What waits again names the person who let it start, and the arguments that were edited."""
    from planner_ext.approval.waiting import pending_calls
    from planner_ext.core.facts import CallStarted, Paused
    from planner_ext.core.fold import fold

    planner, kernel = world(tmp_path / "effects", pays)
    result = await planner.invoke(kernel, GOAL)
    (waiting,) = result.pending
    assert waiting.decision is None
    resumed = await planner.resume(
        kernel, result.checkpoint, {"pay": Approve({"amount": 2}, by="ann")}
    )
    started = next(
        n for n, fact in enumerate(resumed.facts) if isinstance(fact, CallStarted)
    )
    (again,) = pending_calls(
        fold((*resumed.facts[: started + 1], Paused(at=0.0, seconds=0.0)))
    )
    assert (again.in_doubt, brief(again.decision)[:4]) == (
        True,
        ("approve", "ann", ASKED, {"amount": 2}),
    )
    assert again.as_dict()["decision"]["by"] == "ann"
