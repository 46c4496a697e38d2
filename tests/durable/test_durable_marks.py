"""What changes with a store, on every database: the marks that a poll compares, and the inbox that follows them."""

from pathlib import Path

from planner_ext import Approve, Deny
from planner_ext.durable import Approvals, Runs
from planner_ext.durable.store import open_database
from support.durable import GOAL, decide_all, open_runs, world
from support.inbox import inbox, visitor_at


async def pause(store: str, tmp_path: Path, run_id: str) -> None:
    planner, kernel = world(tmp_path / "effects")
    async with open_runs(store, poll_seconds=0.01) as runs:
        assert (
            await (await runs.start(planner, kernel, GOAL, run_id=run_id)).result()
        ).status == "paused"


async def test_marks_change_with_what_they_stand_for(
    store: str, tmp_path: Path
) -> None:
    """A new call, a decision, and a call that waits again change the mark of what waits; reading changes none."""
    async with Runs.connect(store) as runs:
        nothing = await runs.marks()
        assert nothing.number == 0
        await pause(store, tmp_path, "a")
        one = await runs.marks()
        assert (
            one.number == 1
            and one.waiting != nothing.waiting
            and one.runs != nothing.runs
        )
        assert await runs.marks() == one
        await pause(store, tmp_path, "b")
        two = await runs.marks()
        assert two.number == 2 and two.waiting != one.waiting
        approvals = runs.approvals()
        await approvals.decide("a/1/pay", Deny(by="ann"))
        decided = await runs.marks()
        assert decided.number == 1 and decided.waiting not in (one.waiting, two.waiting)
        database = await open_database(store)
        await database.transact(
            (
                "UPDATE planner_approvals SET status = 'open', problem = '\"no\"' WHERE id = 'a/1/pay'",
                {},
            )
        )
        await database.close()
        await runs.pause_all(by="ann", reason="Fire.")
        held = await runs.marks()
        assert held.hold is not None
        assert (held.hold.by, held.hold.reason) == ("ann", "Fire.")
        await runs.resume_all()
        again = await runs.marks()
        assert held.waiting != again.waiting and held.runs != again.runs
        assert again.number == 2 and again.waiting != two.waiting
    await decide_all(store)


async def test_the_inbox_serves_every_database(store: str, tmp_path: Path) -> None:
    """What waits in it is listed, shown and decided, and its runs have their pages."""
    await pause(store, tmp_path, "a")
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        assert "shop-pay" in (await ann.get("")).text
        assert (await ann.get("runs?goal=settle&status=paused")).text.count(
            'href="/runs/a"'
        ) == 1
        assert (await ann.get("runs/a")).status_code == 200
        assert (
            await ann.decide("approvals/a%2F1%2Fpay", "edit", **{"argument-0": "3"})
        ).status_code == 200
        late = await ann.send("approvals/a%2F1%2Fpay", {"decision": "approve"})
        assert late.status_code in (403, 409)
    async with Approvals.connect(store) as approvals:
        decision = (await approvals.show("a/1/pay")).decision
        assert decision is not None and (decision.by, decision.arguments) == (
            "ann",
            {"amount": 3},
        )
        assert not await approvals.decide("a/1/pay", Approve(by="bob"))
