"""What people do to runs in the inbox: each action asks the hook, is recorded, and reaches the workers."""

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.durable import Approvals, Runs
from planner_ext.durable.store import open_database
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.durable import open_runs, planner_of, world
from support.inbox import drive, inbox, visitor_at
from support.values import each_of


class Shop:
    @kernel_function
    async def find(self, order: str) -> str:
        return f"{order}: one lamp"


async def record_of(store: str, run_id: str = "a") -> Any:
    async with Runs.connect(store) as runs:
        return (await runs.load(run_id)).record


async def set_status(store: str, status: str, retries: int = 2) -> None:
    database = await open_database(store)
    statement = """
        UPDATE planner_runs
        SET status = :status, owner = NULL, retries = :retries, attempts = 5, wake_at = 4e9
    """
    await database.transact((statement, {"status": status, "retries": retries}))
    await database.close()


@pytest.fixture
async def limited(tmp_path: Path) -> str:
    """A store whose run reached its limit."""
    where = str(tmp_path / "limited.db")
    script = [call("shop-find", {"order": f"A-{n}"}, id=f"find{n}") for n in range(3)]
    await drive(where, script, Shop(), max_iterations=2)
    assert (await record_of(where)).status == "limit_reached"
    return where


async def test_a_failed_run_is_retried(store: str) -> None:
    """The page says that nobody works on it; after the retry a worker may; a second retry changes nothing."""
    await set_status(store, "failed")
    async with inbox(store) as base, visitor_at(base) as ann:
        page = (await ann.get("runs/a")).text
        assert "Nobody works on it" in page
        assert "2 faults since its last reply" in page
        assert (await ann.send("runs/a/retry", {})).status_code == 200
        assert (await record_of(store)).status == "running"
        await set_status(store, "running", retries=1)
        assert "attempt 2 of 5, next at 2096-10-02" in (await ann.get("runs/a")).text
        again = await ann.send("runs/a/retry", {})
        assert again.status_code == 409 and "has not failed" in again.text
        assert (await ann.send("runs/a/destroy", {})).status_code == 404
        assert (await ann.send("runs/none/retry", {})).status_code == 404


async def test_a_run_that_reached_its_limit_is_continued(
    limited: str, tmp_path: Path
) -> None:
    """With a larger budget, which a worker takes; a number that is none is refused beside what was typed."""
    async with inbox(limited) as base, visitor_at(base) as ann:
        await ann.get("runs/a")
        wrong = {"action": "resume", "max_iterations": "many"}
        response = await ann.send("runs/a/resume", wrong)
        assert response.status_code == 409 and 'value="many"' in response.text
        assert "Round trips: expected a number" in response.text
        await ann.send("runs/a/resume", {"max_iterations": "5"})
    assert (await record_of(limited)).status == "running"
    planner, kernel = world(tmp_path / "effects", [say("Found.")])
    kernel.add_plugin(Shop(), "shop")
    async with open_runs(limited, poll_seconds=0.01) as runs:
        working = asyncio.create_task(runs.work(planner, kernel))
        await runs.wait("a")
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert (await runs.result("a")).final_answer == "Found."


async def test_a_fork_that_cannot_be_is_refused(limited: str) -> None:
    """After an iteration that the run did not make: with the reason, and what was typed."""
    async with inbox(limited) as base, visitor_at(base) as ann:
        await ann.get("runs/a")
        for at in ("7", "x", "nan"):
            fields = {"action": "fork", "at": at, "text": "Be <brief>."}
            response = await ann.send("runs/a/fork", fields)
            assert response.status_code == 409, at
            assert "Be &lt;brief&gt;." in response.text
    async with Runs.connect(limited) as runs:
        assert await runs.count() == 1


async def test_a_fork_begins_with_an_instruction(store: str) -> None:
    """The instruction is a message of the fork, and its budget makes it due."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        await ann.get("runs/a")
        response = await ann.send(
            "runs/a/fork", {"at": "0", "text": "Be brief.", "max_iterations": "9"}
        )
        assert response.status_code == 200
        name = response.url.path.rpartition("/")[2]
        assert name != "a"
    async with Runs.connect(store) as runs:
        stored = await runs.load(name)
        assert stored.record.status == "running"
        assert "Be brief." in str(stored.facts)


async def test_a_person_says_something_and_changes_the_budget(store: str) -> None:
    """Both wait for the worker under the visitor's name; a blank message is refused."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        await ann.get("runs/a")
        assert (await ann.send("runs/a/say", {"text": " "})).status_code == 409
        await ann.send("runs/a/say", {"text": "Hurry."})
        await ann.send("runs/a/budget", {"max_iterations": "40", "max_cost": "2.5"})
    async with Approvals.connect(store) as approvals:
        (waiting,) = await approvals.pending()
        assert [(one.by, one.text) for one in waiting.said] == [("ann", "Hurry.")]
    async with Runs.connect(store) as runs:
        limits = await runs.limits("a")
        assert (limits.max_iterations, limits.max_cost) == (40, 2.5)


async def test_many_runs_are_acted_on_at_once(tmp_path: Path) -> None:
    """The selected ones, or all that match the filters; each has its outcome, and a cancellation is confirmed."""
    store = str(tmp_path / "runs.db")
    async with Runs.connect(store) as runs:
        for number in range(60):
            await runs.submit(f"Goal {number}", run_id=f"run-{number:02}")
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get("runs")
        chosen = {"action": "cancel", "item": ["run-01", "run-02"]}
        response = await ann.send("runs", chosen)
        assert "0 of 2 cancelled." in response.text
        assert "Confirm that the run is to end" in response.text
        await ann.get("runs")
        response = await ann.send("runs", {**chosen, "confirm": "yes"})
        assert "2 of 2 cancelled." in response.text
        await ann.get("runs")
        every = {"action": "cancel", "every": "yes", "confirm": "yes"}
        response = await ann.send("runs?goal=Goal+1", every)
        assert "10 of 10 cancelled." in response.text
        await ann.get("runs")
        assert (await ann.send("runs", {"action": "no"})).status_code == 404
        assert (await ann.send("runs", {**every, "form_token": ""})).status_code == 403
    async with Runs.connect(store) as runs:
        assert await runs.count(status="stopped") == 12


@each_of("action", ["retry", "resume", "budget", "say", "fork", "cancel"])
async def test_each_action_asks_the_hook(store: str, action: str) -> None:
    """A refusal is shown with its reason, and nothing is changed."""
    asked: list[str] = []

    def authorize(request: Any) -> str:
        if request.action != "decide":  # the list asks what the visitor may decide
            asked.append(f"{request.action} {request.by} {request.run_id}")
        return "only on Mondays"

    if action in ("retry", "resume"):
        await set_status(store, "failed")
    before = await record_of(store)
    fields = {"text": "x", "at": "0", "confirm": "yes", "max_iterations": "9"}
    async with (
        inbox(store, authorize=authorize) as base,
        visitor_at(base, "ann") as ann,
    ):
        await ann.get("runs/a")
        response = await ann.send(f"runs/a/{action}", fields)
    assert response.status_code == 409 and "only on Mondays" in response.text
    name = "set_budget" if action == "budget" else action
    assert asked[0] == f"{name} ann a"
    assert await record_of(store) == before
    async with Runs.connect(store) as runs:
        assert await runs.count() == 1


async def test_a_failed_run_is_not_drawn_as_working(tmp_path: Path) -> None:
    """A call in flight when the run was set aside is in doubt, and its bar ends then."""
    store = str(tmp_path / "runs.db")
    started = asyncio.Event()

    class Slow:
        @kernel_function
        async def find(self, order: str) -> str:
            started.set()
            await asyncio.Event().wait()
            return order

    kernel = Kernel()
    script = [call("shop-find", {"order": "A-1"}, id="find"), say("Done.")]
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Slow(), "shop")
    async with open_runs(store, grace_seconds=0) as runs:
        await runs.start(planner_of(), kernel, "Find.", run_id="a")
        await started.wait()
    await set_status(store, "quarantined")
    async with Runs.connect(store) as runs:
        stored = await runs.load("a")
        timeline = stored.timeline(now=time.time() + 9_000)
        assert timeline.iterations[0].calls[0].outcome == "in_doubt"
        assert timeline.until is not None
        assert timeline.until < stored.record.updated_at + 60
    async with inbox(store) as base, visitor_at(base) as ann:
        page = (await ann.get("runs/a")).text
        assert "Nobody works on it" in page and "A worker drives it" not in page


async def test_two_thousand_calls_are_opened_with_details_on_demand(
    tmp_path: Path,
) -> None:
    """The page has a row for each call; what one received and returned is on the page of its iteration."""
    store = str(tmp_path / "runs.db")
    batches = [
        calls(
            *(
                call("shop-find", {"order": f"A-{place}-{n}"}, id=f"c{place}-{n}")
                for n in range(50)
            )
        )
        for place in range(40)
    ]
    await drive(store, [*batches, say("Done.")], Shop(), max_iterations=60)
    async with inbox(store) as base, visitor_at(base) as ann:
        began = time.process_time()
        page = (await ann.get("runs/a")).text
        assert time.process_time() - began < 2.5  # one second, on a machine at rest
        assert page.count('class="fn">shop-find') == 2_000
        assert "A-7-3: one lamp" not in page
        (link,) = set(re.findall(r'href="/(runs/a\?iteration=7)"', page))
        part = (await ann.get(link)).text
        assert "A-7-3: one lamp" in part and "A-8-3" not in part
        assert "All iterations" in part
