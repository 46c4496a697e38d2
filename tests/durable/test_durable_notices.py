"""A notice of a run that paused, ended or failed: delivered at least once, by any worker, without delaying the run."""

import asyncio
import base64
import hashlib
import hmac
import logging
import os
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.durable import (
    Approvals,
    RetryPolicy,
    RunNotice,
    Runs,
    UnknownRunError,
    notices,
)
from planner_ext.durable.archive import export_run, import_run
from planner_ext.durable.store import open_database, opened_store
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.testing import ScriptedReply, ScriptedRequest, say
from support.durable import (
    GOAL,
    SetClock,
    decide_all,
    on_sqlite,
    open_runs,
    pays,
    world,
)
from support.processes import Lives
from support.webhook import WebhookServer


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry at once; the delays are measured by their own test."""
    monkeypatch.setattr(notices, "_FIRST_DELAY", 0.01)


async def drive(runs: Runs, tmp_path: Path, run_id: str = "a") -> Any:
    return await (
        await runs.start(*world(tmp_path / "effects", pays), GOAL, run_id=run_id)
    ).result()


async def rows_of(store: str, table: str = "planner_notices") -> list[Any]:
    database = await open_database(store)
    try:
        return list((await database.transact((f"SELECT * FROM {table}", {})))[0])
    finally:
        await database.close()


def in_thread(server: WebhookServer, number: int) -> Any:
    return asyncio.to_thread(server.wait_for, number)


async def test_callbacks_hear_of_a_pause_and_of_the_end(
    store: str, tmp_path: Path
) -> None:
    """Async or plain: run, goal, status, what waits with its schema, and where to decide; each once."""
    paused: asyncio.Queue[RunNotice] = asyncio.Queue()
    ended: asyncio.Queue[RunNotice] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def plain(notice: RunNotice) -> None:
        loop.call_soon_threadsafe(ended.put_nowait, notice)

    async with open_runs(
        store, poll_seconds=0.01, on_paused=paused.put, on_ended=plain
    ) as runs:
        await drive(runs, tmp_path)
        heard = await asyncio.wait_for(paused.get(), 120)
        assert (heard.run_id, heard.event, heard.status, heard.goal) == (
            "a",
            "paused",
            "paused",
            GOAL,
        )
        (call,) = heard.pending
        assert (call.id, call.fully_qualified_name, dict(call.arguments)) == (
            "a/0/pay",
            "shop-pay",
            {"amount": 5},
        )
        assert call.parameters is not None
        assert heard.where.startswith("postgresql://" if "://" in store else store)
        assert heard.as_dict()["pending"][0]["id"] == call.id
        await decide_all(store)
        await drive(runs, tmp_path)
        heard = await asyncio.wait_for(ended.get(), 120)
        assert (heard.event, heard.status, heard.pending) == ("ended", "answered", ())
    assert (paused.empty(), ended.empty()) == (True, True)
    async with open_runs(store) as runs:
        kept = await runs.notices("a")
    assert [
        (one.event, one.status, one.attempts, one.next_at, one.problem) for one in kept
    ] == [
        ("paused", "paused", 1, None, ""),
        ("ended", "answered", 1, None, ""),
    ]
    assert all(one.delivered_at is not None for one in kept)


async def test_a_store_without_listeners_has_no_notices(
    store: str, tmp_path: Path
) -> None:
    """No row, and no subscription; and an event without a listener has none either."""
    async with open_runs(store, poll_seconds=0.01) as runs:
        await drive(runs, tmp_path)
    assert (await rows_of(store), await rows_of(store, "planner_subscriptions")) == (
        [],
        [],
    )

    async with open_runs(store, poll_seconds=0.01, on_ended=lambda _: None) as runs:
        await drive(runs, tmp_path, "b")
    assert await rows_of(store) == []


async def test_a_webhook_is_retried_until_it_takes_the_notice(
    store: str, tmp_path: Path
) -> None:
    """Two refusals, then it is taken: the same id, a fresh signature of time and body, and the run is not held up."""
    with WebhookServer([500, 503]) as server:
        async with open_runs(
            store, poll_seconds=0.01, notify=server.url, notify_key="k3y"
        ) as runs:
            assert (await drive(runs, tmp_path)).status == "paused"
            received = await in_thread(server, 3)
        async with open_runs(store) as runs:
            (kept,) = await runs.notices("a")
    assert [one.status for one in received] == [500, 503, 204]
    assert (kept.attempts, kept.next_at, kept.problem) == (3, None, "")
    for one in received:
        assert one.headers["webhook-id"] == kept.id == one.body["id"]
        signed = f"{kept.id}.{one.headers['webhook-timestamp']}.{one.text}".encode()
        mac = base64.b64encode(
            hmac.new(b"k3y", signed, hashlib.sha256).digest()
        ).decode()
        assert one.headers["webhook-signature"] == f"v1,{mac}"
        assert (one.body["run_id"], one.body["event"]) == ("a", "paused")
        assert one.body["pending"][0]["fully_qualified_name"] == "shop-pay"


@on_sqlite
async def test_a_failure_is_visible_and_says_no_secret(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The row and the log name host and problem; neither the path, which may be a secret, nor the key is in them."""
    caplog.set_level(logging.DEBUG)
    with WebhookServer([500] * 3) as server:
        async with open_runs(
            store, poll_seconds=0.01, notify=server.url, notify_key="k3y-of-the-hook"
        ) as runs:
            await drive(runs, tmp_path)
            await in_thread(server, 2)
            problems = {(await runs.notices("a"))[0].problem}
            await in_thread(server, 4)
    assert problems <= {"", "_NotTakenError: 127.0.0.1 answered with status 500"}
    assert (
        "The notice that run a paused was not delivered, it is tried again in"
        in caplog.text
    )
    assert "127.0.0.1 answered with status 500" in caplog.text
    assert "s3cret-path" not in caplog.text
    assert "k3y-of-the-hook" not in caplog.text


@on_sqlite
async def test_a_redirection_is_not_followed(store: str, tmp_path: Path) -> None:
    """What a notice says goes to the host that was named, and to no other."""
    with WebhookServer() as other, WebhookServer([307], location=other.url) as server:
        async with open_runs(store, poll_seconds=0.01, notify=server.url) as runs:
            await drive(runs, tmp_path)
            received = await in_thread(server, 2)
        assert [one.status for one in received] == [307, 204]
        assert other.received == []
        assert "webhook-signature" not in received[0].headers


def killed_life(store: str, effects: Path) -> None:
    """Drive a run to its pause, and die as soon as the notice is to be delivered."""

    async def live() -> None:
        async def die(_: RunNotice) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        async with open_runs(store, on_paused=die, poll_seconds=0.01) as runs:
            await (await runs.start(*world(effects, pays), GOAL, run_id="a")).result()
            await asyncio.Event().wait()

    asyncio.run(live())


def silent_life(store: str, effects: Path) -> None:
    """Drive a run to its pause, and die before anything is delivered: the row is committed with the pause."""

    async def live() -> None:
        async with open_runs(store, poll_seconds=0.01) as runs:
            await (await runs.start(*world(effects, pays), GOAL, run_id="a")).result()
            os.kill(os.getpid(), signal.SIGKILL)

    asyncio.run(live())


@pytest.mark.parametrize("life", [killed_life, silent_life])
async def test_the_next_worker_delivers_what_a_killed_one_left(
    life: Any, store: str, tmp_path: Path, lives: Lives
) -> None:
    """Killed between the commit and the delivery, or in the delivery: nothing is lost."""
    async with open_runs(store, on_paused=lambda _: None):
        pass  # the store was asked for notices
    assert (
        await asyncio.to_thread(lives.live, life, store, tmp_path / "effects")
        == -signal.SIGKILL
    )
    (row,) = await rows_of(store)
    database = await open_database(store)
    await database.transact(
        ("UPDATE planner_notices SET next_at = 1.0", {})
    )  # as if the lease were over
    await database.close()

    with WebhookServer() as server:
        async with open_runs(store, poll_seconds=0.01, notify=server.url):
            (received,) = await in_thread(server, 1)
    assert (received.body["id"], received.body["run_id"], received.body["event"]) == (
        row[0],
        "a",
        "paused",
    )


async def test_a_notice_is_told_in_time_whatever_the_clocks_of_workers_show(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker's clock is an hour ahead when the run pauses; or also when a delivery fails, or begins and is lost."""
    real = time.time
    tried = asyncio.Queue[str]()

    async def fail(notice: RunNotice) -> None:
        await tried.put(notice.run_id)
        if notice.run_id == "lost":
            await asyncio.Event().wait()
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(notices, "_LEASE", 0.01)
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: real() + 3600.0)
        options = {"clock": SetClock(), "poll_seconds": 0.01}
        async with open_runs(store, **options, on_paused=fail) as runs:
            await drive(runs, tmp_path, "refused")
            await drive(runs, tmp_path, "lost")
            while await tried.get() != "lost":
                pass
            assert runs._notifier is not None
            monkeypatch.setattr(notices, "_LAST_SECONDS", 0.0)
        async with open_runs(store, **options) as runs:
            await drive(runs, tmp_path, "untried")
    with WebhookServer() as server:
        async with open_runs(store, poll_seconds=0.01, notify=server.url):
            received = await in_thread(server, 3)
    assert {one.body["run_id"] for one in received} == {"refused", "lost", "untried"}


async def test_a_worker_whose_clock_is_ahead_tries_no_notice_early(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour ahead, it would use up all tries of a notice at once."""
    real = time.time
    monkeypatch.setattr(notices, "_FIRST_DELAY", 60.0)
    with WebhookServer([500]) as server:
        async with open_runs(store, poll_seconds=0.01, notify=server.url) as runs:
            await drive(runs, tmp_path)
            await in_thread(server, 1)
        monkeypatch.setattr(time, "time", lambda: real() + 3600.0)
        async with open_runs(
            store, clock=SetClock(), poll_seconds=0.01, notify=server.url
        ) as runs:
            assert runs._notifier is not None
            assert not await runs._notifier._begin()
            (kept,) = await runs.notices("a")
    assert kept.attempts == 1
    assert kept.next_at is not None
    assert abs(kept.next_at.timestamp() - real() - 60.0) < 60.0


async def test_a_process_without_listeners_tells_those_who_asked(
    store: str, tmp_path: Path
) -> None:
    """A run that is cancelled from a command line, or driven by a worker without listeners, has its notice, too."""
    with WebhookServer() as server:
        async with open_runs(store, notify=server.url):
            pass
        async with open_runs(store) as runs:
            await drive(runs, tmp_path)
            assert await runs.cancel("a", by="ann", reason="too late")
        assert server.received == []
        async with open_runs(store, poll_seconds=0.01, notify=server.url):
            received = await in_thread(server, 2)
    assert sorted(one.body["event"] for one in received) == ["ended", "paused"]
    (ended,) = [one.body for one in received if one.body["event"] == "ended"]
    assert (ended["status"], "too late" in ended["problem"]) == ("stopped", True)
    (paused,) = [one.body for one in received if one.body["event"] == "paused"]
    assert paused["pending"] == []  # nothing waits any more


@on_sqlite
async def test_the_past_of_an_imported_run_has_no_notices(
    store: str, tmp_path: Path
) -> None:
    """Its pauses and its end were events of the store that it comes from."""
    async with open_runs(tmp_path / "other.db", poll_seconds=0.01) as other:
        await drive(other, tmp_path)
        await decide_all(tmp_path / "other.db")
        await drive(other, tmp_path)
    async with opened_store(tmp_path / "other.db") as opened:
        text = await export_run(opened, "a")
    async with open_runs(
        store, poll_seconds=0.01, on_paused=lambda _: None, on_ended=lambda _: None
    ) as runs:
        async with opened_store(store) as opened:
            await import_run(opened, text)
        assert await runs.notices("a") == ()


async def test_a_run_that_failed_has_a_notice(store: str, tmp_path: Path) -> None:
    """Once its faults ran out of retries, with the last one; a fault that is retried has no notice."""
    failed: asyncio.Queue[RunNotice] = asyncio.Queue()
    asked: list[int] = []

    def faults(request: ScriptedRequest) -> ScriptedReply:
        asked.append(1)
        raise ValueError("a reply that nobody can read")

    retry = RetryPolicy(attempts=2, first_delay=0.01)
    async with open_runs(
        store, poll_seconds=0.01, on_failed=failed.put, retry=retry
    ) as runs:
        working = asyncio.create_task(runs.work(*world(tmp_path / "effects", faults)))
        await runs.submit(GOAL, run_id="a")
        heard = await asyncio.wait_for(failed.get(), 120)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
    assert (heard.run_id, heard.event, heard.status, heard.pending) == (
        "a",
        "failed",
        "failed",
        (),
    )
    assert heard.problem
    assert (len(asked), failed.empty()) == (2, True)


async def test_a_run_in_quarantine_has_a_notice(store: str) -> None:
    """As one that failed, with its status and the reason; by whichever worker set it aside."""
    failed: asyncio.Queue[RunNotice] = asyncio.Queue()
    async with (
        open_runs(store, poll_seconds=0.01, on_failed=failed.put) as runs,
        opened_store(store) as other,
    ):
        await runs.submit(GOAL, run_id="a")
        counts: dict[str, Any] = {
            "retries": 0,
            "attempts": 5,
            "deaths": 3,
            "progress": 0,
        }
        assert await other.park(
            "a",
            seen=None,
            status="quarantined",
            problem="Poison.",
            at=time.time(),
            **counts,
        )
        heard = await asyncio.wait_for(failed.get(), 120)
    assert (heard.event, heard.status, heard.problem) == (
        "failed",
        "quarantined",
        "Poison.",
    )


@on_sqlite
async def test_a_hung_listener_is_not_in_the_way(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run is decided and answered, and its end is heard, while one hangs; the worker leaves in a few seconds."""
    monkeypatch.setattr(notices, "_LAST_SECONDS", 0.1)
    monkeypatch.setattr(notices, "_ATTEMPT_SECONDS", 600.0)
    hung, ended = asyncio.Event(), asyncio.Queue[RunNotice]()

    async def hang(_: RunNotice) -> None:
        hung.set()
        await asyncio.Event().wait()

    async with open_runs(
        store, poll_seconds=0.01, on_paused=hang, on_ended=ended.put
    ) as runs:
        await drive(runs, tmp_path)
        await asyncio.wait_for(hung.wait(), 120)
        async with Approvals.connect(store) as approvals:
            assert await approvals.decide("a/0/pay", Approve(by="ann"))
        assert (await drive(runs, tmp_path)).status == "answered"
        async with asyncio.timeout(120):
            assert (await ended.get()).status == "answered"
    delivered = {row[2]: row[7] is not None for row in await rows_of(store)}
    assert delivered == {
        "paused": False,
        "ended": True,
    }  # another worker delivers the first one


async def test_a_listener_that_has_heard_is_not_called_again_for_another(
    store: str, tmp_path: Path
) -> None:
    """A webhook that is down costs the callback beside it no second call, in the next worker neither."""
    heard: list[str] = []

    async def hear(notice: RunNotice) -> None:
        heard.append(notice.id)

    with WebhookServer([500, 500, 500]) as server:
        async with open_runs(
            store, poll_seconds=0.01, on_paused=hear, notify=server.url
        ) as runs:
            await drive(runs, tmp_path)
            await in_thread(server, 2)
        async with open_runs(
            store, poll_seconds=0.01, on_paused=hear, notify=server.url
        ) as runs:
            await in_thread(server, 4)
        async with open_runs(store) as runs:
            (kept,) = await runs.notices("a")
    assert (kept.attempts, kept.next_at, kept.status) == (4, None, "paused")
    assert heard == [kept.id]


@on_sqlite
async def test_a_listener_that_fails_keeps_a_notice_from_no_other(
    store: str, tmp_path: Path
) -> None:
    """The webhook takes it once, also if the callback raises; the callback is tried again."""

    def fail(notice: RunNotice) -> None:
        failed.append(notice.id)
        raise UnknownRunError("The callback looked for another run.")

    failed: list[str] = []
    with WebhookServer() as server:
        async with open_runs(
            store, poll_seconds=0.01, on_paused=fail, notify=server.url
        ) as runs:
            await drive(runs, tmp_path)
            async with asyncio.timeout(120):
                while len(failed) < 3:  # noqa: ASYNC110  (no event says so)
                    await asyncio.sleep(0.01)
            (kept,) = await runs.notices("a")
        assert len(server.received) == 1
    assert kept.problem == "UnknownRunError: The callback looked for another run."


class Clock:
    """Time that passes only while a caller waits, faster the later it is, and not while a notice is delivered."""

    def __init__(self) -> None:
        self.seconds = 1_000_000.0
        self.delivering: set[Any] = set()

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        while self.delivering:  # noqa: ASYNC110  (no event says so)
            await asyncio.sleep(0)
        self.seconds += max(seconds, (self.seconds - 1_000_000.0) / 1000)
        await asyncio.sleep(0)


async def test_delays_grow_and_a_notice_is_given_up_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each delay is twice the one before, up to a quarter of an hour; then the row and the log say why it ended."""
    monkeypatch.setattr(notices, "_FIRST_DELAY", 1.0)
    clock, tried = Clock(), list[float]()

    def fail(_: RunNotice) -> None:
        tried.append(clock.now())
        raise ConnectionError("nobody is there")

    store = str(tmp_path / "runs.db")
    async with open_runs(store, clock=clock, poll_seconds=1.0, on_ended=fail) as runs:
        assert runs._notifier is not None
        clock.delivering = runs._notifier._delivering
        planner, kernel = world(
            tmp_path / "effects", lambda _: say("Done."), clock=clock
        )
        await (await runs.start(planner, kernel, GOAL, run_id="a")).result()
        while not (kept := await runs.notices("a")) or kept[0].next_at is not None:  # noqa: ASYNC110  (only its row says)
            await asyncio.sleep(0)
    delays = [round(after - before) for before, after in pairwise(tried)]
    assert delays[:4] == sorted(delays[:4])
    assert all(
        wanted <= delay <= wanted + 2
        for delay, wanted in zip(delays, (1, 2, 4, 8, 16, 32), strict=False)
    )
    assert 900 <= delays[-1] <= 1000
    assert 80_000 < tried[-1] - tried[0] <= 86_400
    assert (kept[0].delivered_at, kept[0].problem) == (
        None,
        "ConnectionError: nobody is there",
    )
    assert "it is given up" in caplog.text


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"notify": "ftp://host/x"},
            "notify must be a URL that begins with https:// or http://",
        ),
        ({"notify": "https://"}, "notify must be a URL"),
        (
            {"notify": "https://host", "notify_key": ""},
            "notify_key must be a text that is not empty",
        ),
        (
            {"notify": "https://host", "notify_key": "whsec_ä"},
            "the rest of it must be base64",
        ),
        ({"on_paused": "print"}, "on_paused must be a function of one notice"),
    ],
)
async def test_an_option_that_cannot_be_used_is_named(
    options: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """Before the store is opened, and without the URL, which may be a secret."""
    with pytest.raises(PlannerInvalidConfigurationError, match=problem):
        async with open_runs(tmp_path / "runs.db", **options):
            pass
    assert not (tmp_path / "runs.db").exists()
