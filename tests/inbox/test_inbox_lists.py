"""The lists: what waits, oldest first and in parts, and the runs with their filters."""

import re
import time
from pathlib import Path

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import requires_approval
from planner_ext.durable import Runs
from planner_ext.durable.store import open_database
from planner_ext.testing import call, calls, say
from support.inbox import drive, inbox, visitor_at

WAITING = 200


class Shop:
    @requires_approval
    @kernel_function
    async def pay(self, amount: int) -> str:
        return f"paid {amount}"


async def test_two_hundred_that_wait_are_read_in_parts(tmp_path: Path) -> None:
    """Each part shows fifty, all of them are reached by links, each call once, and a part takes little time to make."""
    store = str(tmp_path / "runs.db")
    batch = calls(
        *(call("shop-pay", {"amount": n}, id=f"pay{n:03}") for n in range(WAITING))
    )
    await drive(store, [batch, say("Settled.")], Shop())
    async with inbox(store) as base, visitor_at(base) as ann:
        found: list[str] = []
        path: str | None = ""
        seconds: list[float] = []
        while path is not None:
            start = time.process_time()
            page = (await ann.get(path)).text
            seconds.append(time.process_time() - start)
            part = re.findall(r'class="fn" href="/approvals/([^"]*)"', page)
            assert len(part) == 50 and f"of {WAITING}" in page
            found += part
            after = re.findall(r'rel="next" href="/([^"]*)"', page)
            path = after[0] if after else None
        assert sorted(found) == [f"a%2F0%2Fpay{n:03}" for n in range(WAITING)]
        assert min(seconds) < 0.5
        assert (
            "Nothing waits" in (await ann.get("?offset=1000")).text
            and 'rel="prev"' in ann.page
        )
        for offset in ("-1", "x", "9" * 40, ""):
            assert (await ann.get(f"?offset={offset}")).status_code == 200


@pytest.fixture
async def runs_store(tmp_path: Path) -> str:
    """A store with 60 queued runs, and one that has ended."""
    store = str(tmp_path / "runs.db")
    await drive(store, [say("Done.")], Shop(), run_id="ended", goal="An end & a goal")
    async with Runs.connect(store) as runs:
        for number in range(60):
            await runs.submit(f"Goal {number}", run_id=f"run-{number:02}")
    database = await open_database(store)
    await database.transact(
        ("UPDATE planner_runs SET created_at = 86400 WHERE run_id = 'run-07'", {})
    )
    await database.close()
    return store


async def test_runs_are_filtered_and_read_in_parts(runs_store: str) -> None:
    """By status, goal, worker and date, alone or together; links to other parts keep the filter."""
    async with inbox(runs_store) as base, visitor_at(base) as ann:

        async def found(query: str) -> list[str]:
            return re.findall(
                r'href="/runs/([^"?]*)"', (await ann.get(f"runs?{query}")).text
            )

        assert len(await found("")) == 50 and "61" in ann.page
        assert len(await found("offset=50")) == 11
        assert await found("status=answered") == ["ended"]
        assert await found("goal=end+%26+A") == ["ended"]
        assert await found("goal=goal+07") == []
        assert await found("created_before=1970-01-03") == ["run-07"]
        assert await found("created_before=1970-01-03&goal=8") == []
        assert await found("worker=nobody") == []
        assert len(await found("status=answered&status=queued")) == 50
        await found("status=queued&goal=Goal")
        (link,) = re.findall(r'rel="next" href="/([^"]*)"', ann.page)
        assert link.replace("&amp;", "&") == "runs?status=queued&goal=Goal&offset=50"
        assert len(await found(link.replace("&amp;", "&").partition("?")[2])) == 10
        assert (await ann.get("runs?created_after=yesterday")).status_code == 200
        assert "Expected a date" in ann.page
        assert (await ann.get("runs?status=nothing")).status_code == 200


async def test_each_run_has_a_page(runs_store: str) -> None:
    """A run that has not begun has one, too; a run that is not there is named."""
    async with inbox(runs_store) as base, visitor_at(base) as ann:
        for name, text in (("ended", "An end &amp; a goal"), ("run-00", "Goal 0")):
            assert (await ann.get(f"runs/{name}")).status_code == 200
            assert text in ann.page
        assert (await ann.get("runs/nothing")).status_code == 404
        assert "There is no run" in ann.page


async def test_a_pause_of_all_runs_is_on_every_page(store: str) -> None:
    """Whoever decides reads why nothing happens then, from when on, and by whose order."""
    async with (
        Runs.connect(store) as runs,
        inbox(store) as base,
        visitor_at(base) as ann,
    ):
        await runs.pause_all(by="eve", reason="<b>Fire.</b>")
        for page in ("", "runs", "approvals/a%2F1%2Fpay"):
            text = (await ann.get(page)).text
            assert "All runs of this store are paused since" in text
            assert "by eve: &lt;b&gt;Fire.&lt;/b&gt;" in text
        await runs.resume_all()
        assert "are paused" not in (await ann.get("")).text


async def test_a_damaged_journal_does_not_hide_what_waits(store: str) -> None:
    """A call is bound by its fingerprint: it can be decided although its run cannot be read, and its page says so."""
    database = await open_database(store)
    await database.transact(
        ("UPDATE planner_journal SET fact = 'damaged' WHERE seq = 3", {})
    )
    await database.close()
    async with inbox(store) as base, visitor_at(base) as ann:
        assert (await ann.get("approvals/a%2F1%2Fpay")).status_code == 200
        assert "The run cannot be read" in ann.page and "shop-pay" in ann.page
        assert (await ann.get("runs/a")).status_code == 500
        assert "Row 3 of run" in ann.page
