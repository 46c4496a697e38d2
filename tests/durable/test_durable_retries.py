"""A fault of the endpoint, of the application or of the store is retried by any worker, and then parked."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion

from planner_ext import Budget
from planner_ext.durable import RetryPolicy, RunRecord, Runs, StoreError
from planner_ext.durable.options import is_final
from planner_ext.durable.store import JournalStore, opened_store
from planner_ext.errors import (
    InvalidJournalError,
    InvalidOptionError,
    InvalidReplyError,
    PlannerInvalidConfigurationError,
    RunNotAnsweredError,
    ServiceCallError,
)
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedOpenAIServer,
    call,
    say,
)
from support.durable import (
    GOAL,
    PAY,
    SetClock,
    Shop,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    planner_of,
    world,
)
from support.processes import Lives
from support.stock import scripted_by
from support.values import each_of

SOON = RetryPolicy(first_delay=0.05, attempts=4)
LIMIT_SECONDS = 120
BUSY, FORBIDDEN = ScriptedFault(status=500), ScriptedFault(status=401)
UNREADABLE = ScriptedFault(status=200, body="<html>")


def working_life(store: str, effects: Path, url: str) -> None:
    """Drive due runs with the model at an address, until killed."""

    async def work() -> None:
        kernel = Kernel()
        client = AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
        kernel.add_service(
            OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
        )
        kernel.add_plugin(Shop(effects), "shop")
        async with open_runs(store, poll_seconds=0.02, retry=SOON) as runs:
            await runs.work(planner_of(), kernel)

    asyncio.run(work())


@asynccontextmanager
async def worked(
    lives: Lives, store: str, folder: Path, script: Script
) -> AsyncIterator[JournalStore]:
    """Enter the run ``r``, and let one worker live beside it, whose model follows a script."""
    async with opened_store(store) as opened:
        assert await opened.create("r", GOAL, owner=None, at=1.0)
        with ScriptedOpenAIServer(script) as server:
            process = lives.begin(working_life, store, folder / "effects", server.url)
            try:
                yield opened
                assert process.is_alive()
            finally:
                process.kill()
                process.join()


async def reached(store: JournalStore, status: str) -> RunRecord:
    """Wait until the run has a status."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while (record := await store.record("r")).status != status:  # noqa: ASYNC110  (only another process tells)
            await asyncio.sleep(0.02)
    return record


@on_sqlite
async def test_a_passing_fault_is_retried_by_the_worker_that_lives(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """The endpoint answers 500 three times, then well: the run is answered, and nothing was started again."""
    script = [
        BUSY,
        BUSY,
        call("shop-label", {"order": 1}, id="label"),
        BUSY,
        say("Done."),
    ]
    async with worked(lives, store, tmp_path, script) as opened:
        record = await reached(opened, "answered")
    assert (record.problem, record.wake_at) == ("", None)
    assert effects_in(tmp_path / "effects") == ["label 1"]


async def test_a_lasting_fault_fails_the_run_which_can_be_resumed(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """After the attempts it is failed, with its last fault; resumed, it is answered, as is its next handle."""
    async with worked(lives, store, tmp_path, [UNREADABLE] * SOON.attempts) as opened:
        record = await reached(opened, "failed")
        assert (record.retries, record.owner, record.wake_at) == (
            SOON.attempts,
            None,
            None,
        )
        assert record.problem.startswith("InvalidReplyError: ")
    planner, kernel = world(tmp_path / "effects", [say("Done.")])
    async with open_runs(store) as runs:
        assert (
            await (await runs.resume("r", planner, kernel)).result()
        ).status == "answered"
        assert (await runs.list(status="answered"))[0].retries == 0


@on_sqlite
async def test_a_final_fault_fails_the_run_at_once(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """A key that is refused is not tried again."""
    async with worked(lives, store, tmp_path, [FORBIDDEN]) as opened:
        assert (await reached(opened, "failed")).retries == 1


@on_sqlite
async def test_a_reply_resets_the_count(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """A long run on a shaky endpoint does not fail by the sum of its faults."""
    shaky = [UNREADABLE, UNREADABLE, UNREADABLE]
    script = [
        *shaky,
        call("shop-label", {"order": 1}, id="a"),
        *shaky,
        call("shop-label", {"order": 2}, id="b"),
        *shaky,
    ]
    async with worked(lives, store, tmp_path, [*script, say("Done.")]) as opened:
        await reached(opened, "answered")


@on_sqlite
async def test_arguments_that_cannot_be_had_are_asked_for_again(
    store: str, tmp_path: Path
) -> None:
    """A fault of the application ends nothing; a run that waited still waits, and the retry takes the decision."""
    effects = tmp_path / "effects"
    planner, kernel = world(effects, [PAY, say("Paid.")])
    tries: list[str] = []

    def arguments_for(run_id: str) -> Any:
        tries.append(run_id)
        if len(tries) < 3:
            raise LookupError("no tenant")

    async with open_runs(store, poll_seconds=0.02, retry=SOON) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="r")
        assert (await handle.result()).status == "paused"
        await decide_all(store)
        work = asyncio.create_task(
            runs.work(planner, kernel, arguments_for=arguments_for)
        )
        async with opened_store(store) as opened:
            await reached(opened, "answered")
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    assert tries == ["r"] * 3
    assert effects_in(effects) == ["pay 5"]


async def test_a_run_that_ends_here_is_not_taken_for_one_that_was_ended_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may read the end of its own run in the store before the write of it returns: it drives on."""
    planner, kernel = world(tmp_path / "effects", [say("Done.")])
    tries: list[str] = []
    async with Runs.sqlite(tmp_path / "runs.db") as runs:
        write = JournalStore.append

        async def append(self: JournalStore, run_id: str, *steps: Any) -> None:
            await write(self, run_id, *steps)
            if (await self.record(run_id)).status == "answered":
                runs._pool.runner.driven.stores[run_id].abandon()
                await asyncio.sleep(0)

        monkeypatch.setattr(JournalStore, "append", append)
        await runs.submit(GOAL, run_id="r")
        (handle,) = await runs.recover(planner, kernel, arguments_for=tries.append)
        assert (await handle.result()).status == "answered"
    assert tries == ["r"]


@pytest.mark.parametrize("begins", ["before", "while"])
async def test_a_run_that_is_resumed_is_not_ended_by_its_old_end(
    begins: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker reads the end before it resumes the run, or while it records that: nothing is asked twice."""
    reading, resumed, asked, told = (asyncio.Event() for _ in range(4))

    class Model(ScriptedChatCompletion):
        async def _inner_get_chat_message_contents(self, *given: Any) -> Any:
            if begins == "before":
                await reading.wait()
            if resumed.is_set():
                asked.set()
                await told.wait()
            return await super()._inner_get_chat_message_contents(*given)

    append, read = JournalStore.append, JournalStore.changed_elsewhere

    async def append_once_read(self: JournalStore, run_id: str, *steps: Any) -> None:
        if resumed.is_set():
            await reading.wait()
        await append(self, run_id, *steps)

    async def read_late(self: JournalStore, owner: str) -> Any:
        is_driven = "order-7" in runs._pool.runner.driven.stores
        if reading.is_set():
            told.set()
        elif begins == "before" or (resumed.is_set() and is_driven):
            reading.set()
            await asked.wait()
            return [("order-7", True, None, "")], False
        return await read(self, owner)

    monkeypatch.setattr(JournalStore, "append", append_once_read)
    monkeypatch.setattr(JournalStore, "changed_elsewhere", read_late)
    planner, kernel = world(
        tmp_path / "effects", budget=Budget(max_tool_calls=1, on_limit="stop")
    )
    script = [
        call("shop-label", {"order": 1}),
        call("shop-label", {"order": 2}),
        say("Printed."),
    ]
    kernel.add_service(scripted_by(Model, script), overwrite=True)
    async with Runs.sqlite(tmp_path / "runs.db", poll_seconds=0.01) as runs:
        limited = await runs.start(planner, kernel, GOAL, run_id="order-7")
        assert (await limited.result()).status == "limit_reached"
        resumed.set()
        handle = await runs.resume(
            "order-7", planner, kernel, budget=Budget(max_tool_calls=9)
        )
        result = await handle.result()
    assert (result.status, result.iterations) == ("answered", 3)


async def test_a_run_that_waits_still_waits_after_a_fault(tmp_path: Path) -> None:
    """The driving of a paused run that faulted, and then changed nothing, leaves it paused and not due."""
    planner, kernel = world(tmp_path / "effects", [PAY])
    faults = iter([LookupError("no tenant")])

    class Flaky:
        def journaled(
            self, kernel: Any, activation: Any, *, arguments: Any = None
        ) -> Any:
            for fault in faults:
                raise fault
            return planner.journaled(kernel, activation, arguments=arguments)

    async with Runs.sqlite(tmp_path / "runs.db", retry=SOON) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="r")).result()
        with pytest.raises(LookupError):
            await (await runs.resume("r", Flaky(), kernel)).result()
        assert [record.status for record in await runs.list()] == ["running"]
        assert (
            await (await runs.resume("r", Flaky(), kernel)).result()
        ).status == "paused"
        (record,) = await runs.list()
        assert (record.status, record.problem, record.wake_at) == ("paused", "", None)
        assert await runs.recover(planner, kernel) == []


async def test_a_retry_is_due_in_time_whatever_the_clocks_of_workers_show(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's clock is an hour ahead when it plans the retry, the other one's an hour behind when it looks."""
    real = time.time
    planner, kernel = world(tmp_path / "effects", [say("Done.")])

    def lacks(_: str) -> Any:
        raise LookupError("no tenant")

    async with open_runs(
        store, retry=SOON, poll_seconds=0.02, clock=SetClock()
    ) as runs:
        await runs.submit(GOAL, run_id="r")
        runs.drive_with(planner, kernel, arguments_for=lacks)
        with monkeypatch.context() as ahead:
            ahead.setattr(time, "time", lambda: real() + 3600.0)
            assert not (await runs.activate("r")).ended
        with monkeypatch.context() as behind:
            behind.setattr(time, "time", lambda: real() - 3600.0)
            work = asyncio.create_task(runs.work(planner, kernel))
            async with asyncio.timeout(LIMIT_SECONDS / 4):
                while await runs.count(status="answered") < 1:  # noqa: ASYNC110  (the worker has no handle)
                    await asyncio.sleep(0.02)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def test_a_worker_whose_clock_is_ahead_takes_no_retry_early(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead, it would use up the tries of all runs at once."""
    real = time.time
    app = world(tmp_path / "effects", [say("Done.")])
    async with open_runs(store, poll_seconds=0.02, clock=SetClock()) as runs:
        assert await runs._store.create("r", GOAL, owner=runs.worker_id, at=1.0)
        counts: dict[str, Any] = {
            "retries": 1,
            "attempts": 5,
            "deaths": 0,
            "progress": 0,
        }
        assert await runs._store.park(
            "r",
            seen=runs.worker_id,
            status="running",
            problem="It is out.",
            at=real(),
            delay=60.0,
            **counts,
        )
        monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
        runs.drive_with(*app)
        assert await runs.recover(*app) == []
        assert (await runs.due()).runs == ()
        seconds = (await runs.activate("r")).seconds
        assert seconds is not None
        assert 0.0 < seconds <= 60.0


async def test_a_run_that_is_fenced_at_each_write_is_driven_with_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its database refuses a null as it refuses a second row; the worker does not try in a tight loop."""
    caplog.set_level("INFO")
    path = tmp_path / "runs.db"
    async with Runs.sqlite(path, poll_seconds=0.1) as runs:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute(
                "CREATE TRIGGER damage BEFORE INSERT ON planner_journal WHEN NEW.run_id IS NOT NULL "
                "BEGIN INSERT INTO planner_journal (run_id, seq, schema, fact) VALUES (NULL, 0, 1, ''); END"
            )
        app = world(tmp_path / "effects", [say("Done.")])
        await runs.start(*app, GOAL, run_id="r")
        began: list[float] = []
        async with asyncio.timeout(LIMIT_SECONDS / 4):
            while (fences := caplog.text.count("continues elsewhere")) < 9:
                if fences and not began:
                    began.append(time.monotonic())
                await asyncio.sleep(0.005)
        assert time.monotonic() - began[0] >= 0.6


async def test_who_waits_for_a_run_of_another_worker_hears_that_it_failed(
    tmp_path: Path,
) -> None:
    """The wait ends, and does not drive the run beside its retries."""
    planner, kernel = world(tmp_path / "effects", [say("Done.")])
    async with (
        Runs.sqlite(tmp_path / "runs.db") as runs,
        Runs.sqlite(tmp_path / "runs.db", poll_seconds=0.02) as other,
    ):
        assert await runs._store.create("r", GOAL, owner=runs.worker_id, at=1.0)
        waiting = asyncio.create_task(
            (await other.start(planner, kernel, GOAL, run_id="r")).result()
        )
        await asyncio.sleep(0.05)
        counts: dict[str, Any] = {
            "retries": 5,
            "attempts": 5,
            "deaths": 0,
            "progress": 0,
            "at": 2.0,
        }
        assert await runs._store.park(
            "r", seen=runs.worker_id, status="failed", problem="It is out.", **counts
        )
        with pytest.raises(
            RunNotAnsweredError,
            match=r"Run 'r' failed: It is out\. Resume it to try again\.",
        ):
            await waiting


@each_of(
    ("error", "final"),
    [
        (ServiceCallError("500"), False),
        (InvalidReplyError("no choices"), False),
        (StoreError("the disk is full"), False),
        (LookupError("no tenant"), False),
        (InvalidOptionError("max_iterations"), True),
        (InvalidJournalError("row 1"), True),
    ],
)
def test_a_fault_is_final_if_a_retry_cannot_cure_it(
    error: Exception, final: bool
) -> None:
    """Options, journals and runs that cannot be used are final; endpoints, stores and applications recover."""
    assert is_final(error) is final


@each_of(
    ("status", "final"),
    [(400, True), (401, True), (404, True), (408, False), (409, False)],
)
def test_a_status_of_a_client_error_is_final(status: int, final: bool) -> None:
    """Wherever it stands in the chain of causes; a timeout, a conflict and too many requests pass."""
    cause = LookupError("of a connector")
    cause.status_code = status  # pyright: ignore[reportAttributeAccessIssue]  # as the SDKs' errors have
    error = ServiceCallError("failed")
    error.__cause__ = cause
    assert is_final(error) is final


def test_delays_grow_up_to_the_longest() -> None:
    """Each is twice the last, with up to one first delay more, and none is longer than the longest."""
    policy = RetryPolicy(first_delay=2.0, max_delay=20.0)
    for retry, least in enumerate((2.0, 4.0, 8.0, 16.0, 20.0, 20.0), start=1):
        assert least <= policy.delay(retry) <= min(least + 2.0, 20.0)
    assert policy.delay(10**6) == 20.0


@each_of(
    "option",
    [{"attempts": 0}, {"attempts": True}, {"first_delay": 0}, {"max_delay": "1"}],
)
def test_a_policy_that_means_nothing_is_refused_by_name(option: dict[str, Any]) -> None:
    """The message names the option."""
    with pytest.raises(PlannerInvalidConfigurationError, match=next(iter(option))):
        RetryPolicy(**option)
