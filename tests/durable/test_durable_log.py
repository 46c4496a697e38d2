"""The log lines of kept runs: one line for each event, with the run's name, under any text of a model or person."""

import logging
from pathlib import Path

import pytest

from planner_ext import Approve, Budget, Deny
from planner_ext.durable import Approvals
from planner_ext.durable.store import opened_store
from planner_ext.errors import PlannerExtError
from planner_ext.hitl_manager import Supply
from planner_ext.testing import ScriptedFault, call, calls, say
from support.durable import GOAL, PAY, on_sqlite, open_runs, world

INFO, WARNING = logging.INFO, logging.WARNING


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [
        (one.levelno, one.getMessage())
        for one in caplog.records
        if one.name == "planner_ext.runs"
    ]


@on_sqlite
async def test_each_event_of_a_run_is_one_line(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Start, pause, decision, resume and end, with the consumption of the run; other calls have no line."""
    caplog.set_level(INFO, "planner_ext.runs")
    planner, kernel = world(
        tmp_path / "effects", [call("shop-label", {"order": 1}), PAY, say("Done.")]
    )
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
        await handle.result()
        async with Approvals.connect(store) as approvals:
            await approvals.decide("order-7/1/pay", Approve(by="ann"))
        result = await handle.result()
    tokens = result.usage.prompt_tokens + result.usage.completion_tokens
    assert lines(caplog) == [
        (INFO, "run order-7 started"),
        (INFO, "run order-7 paused: 1 call waits"),
        (INFO, "run order-7 resumed"),
        (INFO, "run order-7 call shop-pay approved by ann"),
        (INFO, f"run order-7 answered: 3 iterations, 2 calls, {tokens:,} tokens"),
    ]


@on_sqlite
async def test_a_limit_is_a_warning_before_the_end(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The line names the limit; the next one says how the run ended."""
    caplog.set_level(INFO, "planner_ext.runs")
    planner, kernel = world(
        tmp_path / "effects",
        [call("shop-label", {"order": 1}), say("So far.")],
        budget=Budget(max_iterations=2),
    )
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
    assert (WARNING, "run order-7 limit max_iterations reached") in lines(caplog)
    level, last = lines(caplog)[-1]
    assert (level, last.partition(": ")[0]) == (INFO, "run order-7 limit_reached")


async def test_a_fault_and_its_retry_are_one_line_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For every text of the error; the run is named, and the error by its class."""
    caplog.set_level(INFO, "planner_ext.runs")
    planner, kernel = world(tmp_path / "effects", [ScriptedFault()])
    async with open_runs(tmp_path / "runs.db") as runs:
        with pytest.raises(PlannerExtError):
            await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
    faults = [line for level, line in lines(caplog) if level == WARNING]
    assert len(faults) == 2
    assert faults[0].startswith("run order-7 fault InvalidReplyError: ")
    assert faults[1].startswith("run order-7 retry 1 of 4 in ")


async def test_a_run_that_is_taken_over_says_from_whom(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line with the worker that is gone and the deaths so far; taking a run without an owner is not logged."""
    caplog.set_level(INFO, "planner_ext.runs")
    async with open_runs(store) as runs, opened_store(store) as other:
        for name, owner in (("order-7", "gone"), ("order-8", None)):
            assert await other.create(name, GOAL, owner=owner, at=1.0)
            handle = await runs.start(
                *world(tmp_path / "effects", [say("Done.")]), GOAL, run_id=name
            )
            assert (await handle.result()).status == "answered"
    assert [line for level, line in lines(caplog) if level == WARNING] == [
        "run order-7 taken over: worker gone is gone; death 1, quarantine at 9"
    ]


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (
            Approve(arguments={"amount": 4}, by="ann"),
            "approved with edited arguments by ann",
        ),
        (Deny("no", by="ann"), "denied by ann"),
        (Supply("paid", by="ann"), "answered by ann"),
        (Deny("no"), "denied"),
        (
            Deny("no", by="ann\nrun order-8 started\x1b[2J\u202e"),
            r"denied by ann\nrun order-8 started\u001b[2J\u202e",
        ),
        (Deny("no", by="a" * 1000), f"denied by {'a' * 500}..."),
    ],
)
async def test_a_decision_is_one_line(
    decision: Approve | Deny | Supply,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says what was decided and by whom, and no name makes a second line, or a long one."""
    caplog.set_level(INFO, "planner_ext.runs")
    store = tmp_path / "runs.db"
    async with open_runs(store) as runs:
        handle = await runs.start(
            *world(tmp_path / "effects", [PAY, say("Done.")]), GOAL, run_id="order-7"
        )
        await handle.result()
        async with Approvals.connect(store) as approvals:
            await approvals.decide("order-7/0/pay", decision)
        await handle.result()
    assert [line for _, line in lines(caplog) if "shop-pay" in line] == [
        f"run order-7 call shop-pay {said}"
    ]


async def test_a_cancelled_run_says_who_ended_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the line of its end; what waited is counted in that of its pause."""
    caplog.set_level(INFO, "planner_ext.runs")
    pays = calls(*(call("shop-pay", {"amount": number}) for number in (1, 2)))
    async with open_runs(tmp_path / "runs.db") as runs:
        await (
            await runs.start(
                *world(tmp_path / "effects", [pays]), GOAL, run_id="order-7"
            )
        ).result()
        await runs.cancel("order-7", by="ann", reason="too late")
    *_, paused, ended = [line for _, line in lines(caplog)]
    assert paused == "run order-7 paused: 2 calls wait"
    assert ended.startswith("run order-7 stopped: 1 iteration, 0 calls, ")
    assert ended.endswith("; Cancelled by ann: too late")
