"""Many runs at once: they are found by what is known of them, and each is acted on as a single one."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Budget
from planner_ext.core.facts import Ended
from planner_ext.durable import (
    NotAuthorizedError,
    RetryPolicy,
    Runs,
    StoreError,
    UnknownRunError,
)
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.runs import RunsClient
from planner_ext.durable.store import opened_store
from planner_ext.testing import ScriptedFault, ScriptedReply, ScriptedRequest, say
from support.durable import BATCH, GOAL, PAY, open_runs, store_neutral, turn, world


async def found(runs: RunsClient, **filters: Any) -> list[str]:
    """Name the runs that filters let pass; a list and a count agree."""
    names = [run_id async for run_id in runs.find(**filters)]
    assert await runs.count(**filters) == len(names)
    assert sorted(one.run_id for one in await runs.list(**filters)) == sorted(names)
    return names


async def drive(
    runs: Runs, tmp_path: Path, name: str, script: Any, tags: Sequence[str] = ()
) -> None:
    """Drive a run until it ends, waits or fails."""
    made = world(tmp_path / "effects", script)
    handle = await runs.start(*made, GOAL, run_id=name, tags=tags)
    try:
        await handle.result()
    except Exception as error:
        assert "503" in str(error) or "failed" in str(error)


async def test_runs_are_found_by_function_fault_and_tag(
    store: str, tmp_path: Path
) -> None:
    """A function that the model asked for, and no other text of it; a part of a fault; a whole tag, in its case."""
    tempting = say('"function":"shop-pay","kind":')
    async with open_runs(store, retry=RetryPolicy(attempts=1)) as runs:
        await drive(runs, tmp_path, "pays", [PAY], tags=("nightly", "tenant 7"))
        await drive(runs, tmp_path, "talks", [tempting], tags=("night",))
        await drive(runs, tmp_path, "fails", [ScriptedFault(status=503)])
        assert await found(runs, function="shop-pay") == ["pays"]
        assert await found(runs, function="shop") == []
        assert await found(runs, error="503") == ["fails"]
        assert await found(runs, tag="night") == ["talks"]
        assert await found(runs, tag="tenant 7", status="paused") == ["pays"]
        assert await found(runs, tag="Nightly") == []
        (listed,) = await runs.list(tag="nightly")
        assert listed.tags == ("nightly", "tenant 7")


def settles(request: ScriptedRequest) -> ScriptedReply:
    """Call three tools, then answer."""
    return [BATCH, say("Done.")][turn(request)]


async def test_all_runs_are_found_while_they_change(store: str) -> None:
    """More than one page of them, each once, although each leaves the list when it is cancelled."""
    async with Runs.connect(store) as runs:
        for number in range(450):
            await runs.submit(GOAL, run_id=f"run-{number}", tags=["many"])
        names: list[str] = []
        async for run_id in runs.find(status="queued", tag="many"):
            names.append(run_id)
            await runs.cancel(run_id)
        assert len(names) == len({*names}) == 450
        assert await runs.count(status="queued") == 0


async def test_a_run_that_was_answered_is_not_cancelled(
    store: str, tmp_path: Path
) -> None:
    """Its answer was there, and only its end was not recorded yet: it ends answered, and nobody is told otherwise."""
    async with open_runs(store) as runs:
        await drive(runs, tmp_path, "r", [say("Done.")])
        facts = len((await runs.load("r")).facts)
        await runs._store.database.transact(
            ("DELETE FROM planner_journal WHERE seq = :last", {"last": facts - 1}),
            ("UPDATE planner_runs SET status = 'running'", {}),
        )
        assert not await runs.cancel("r", by="ann")
        result = await runs.result("r")
        assert (result.status, result.final_answer) == ("answered", "Done.")


async def test_many_cancel_runs_that_end_by_themselves(
    store: str, tmp_path: Path
) -> None:
    """Two people cancel all, while a worker drives them: each run ends once; of a stopped one, one of them reads so."""
    won: list[str] = []

    async def cancel_all(client: RunsClient) -> None:
        async for run_id in client.find(tag="many"):
            if await client.cancel(run_id):
                won.append(run_id)

    async with (
        open_runs(store, poll_seconds=0.01) as runs,
        Runs.connect(store) as ann,
        Runs.connect(store) as bo,
    ):
        for number in range(40):
            await ann.submit(GOAL, run_id=f"run-{number}", tags=["many"])
        made = world(tmp_path / "effects", settles)
        handles = await runs.recover(*made)
        await asyncio.gather(cancel_all(ann), cancel_all(bo))
        await asyncio.gather(*(handle.result() for handle in handles))
        ends = {one.run_id: one.status for one in await runs.list(limit=100)}
        assert {*ends.values()} <= {"answered", "stopped"}
        stopped = [name for name, status in ends.items() if status == "stopped"]
        assert sorted(won) == sorted(stopped)
        for run_id in ends:
            facts = (await runs.load(run_id)).facts
            assert sum(isinstance(fact, Ended) for fact in facts) == 1


async def test_a_worker_continues_what_is_retried(store: str, tmp_path: Path) -> None:
    """The failed run alone, and not in the process that asks; another run is not changed."""
    async with open_runs(store, retry=RetryPolicy(attempts=1)) as runs:
        await drive(runs, tmp_path, "fails", [ScriptedFault(status=503)])
        await drive(runs, tmp_path, "waits", [PAY])
        async with Runs.connect(store) as client:
            assert await client.retry("fails")
            assert not await client.retry("fails")
            assert not await client.retry("waits")
            with pytest.raises(UnknownRunError):
                await client.retry("nobody")
            assert (await client.result("fails")).status == "running"
        (handle,) = await runs.recover(*world(tmp_path / "effects", [say("Done.")]))
        assert (await handle.result()).status == "answered"


async def test_a_retry_is_asked_of_the_hook(store: str, tmp_path: Path) -> None:
    """One that it refuses changes nothing."""

    def of_ann(request: Any) -> bool:
        return request.by == "ann"

    options: Any = {"retry": RetryPolicy(attempts=1), "authorize": of_ann}
    async with open_runs(store, **options) as runs:
        await drive(runs, tmp_path, "fails", [ScriptedFault(status=503)])
        with pytest.raises(NotAuthorizedError, match="'bo' may not retry run 'fails'"):
            await runs.retry("fails", by="bo")
        async with Runs.connect(store) as client:
            with pytest.raises(NotAuthorizedError, match="which this process lacks"):
                await client.retry("fails", by="ann")
        assert await runs.count(status="failed") == 1
        assert await runs.retry("fails", by="ann")


async def test_tags_go_where_the_run_goes(store: str, tmp_path: Path) -> None:
    """Into its fork, and through a document into another store; a second submission does not change them."""
    async with open_runs(store) as runs:
        await runs.submit(GOAL, run_id="a", tags=["one", "two"])
        await runs.submit(GOAL, run_id="a", tags=["three"])
        (handle,) = await runs.recover(*world(tmp_path / "effects", [say("Done.")]))
        await handle.result()
        await runs.fork("a", at=-1, new_run_id="b")
        assert await found(runs, tag="two") == ["a", "b"]
        assert await found(runs, tag="three") == []
    async with opened_store(store) as opened:
        document = await export_run(opened, "a")
    async with opened_store(tmp_path / "other.db") as other:
        await import_run(other, document)
        assert (await other.record("a")).tags == ("one", "two")


@store_neutral("tag", ["", "two\nlines", "x" * 201])
async def test_a_tag_is_one_line(tag: str, store: str) -> None:
    """Any other text is refused by name, and nothing is submitted."""
    async with Runs.connect(store) as runs:
        with pytest.raises(StoreError, match="a tag must be 1 to 200 characters"):
            await runs.submit(GOAL, budget=Budget(max_iterations=1), tags=[tag])
        assert await runs.count() == 0
