"""Lists follow the store: viewers hear of changes by any process, and all of them together cost one poll."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from planner_ext import Approve
from planner_ext.durable import Approvals, RunsClient, StoreError, StoreMarks
from planner_ext.durable.store import JournalStore, open_database, opened_store
from planner_ext.inbox import Token, app
from support.command_line import COMMAND
from support.inbox import TOKEN, Visitor, inbox, served, visitor_at
from support.processes import Lives


@asynccontextmanager
async def following(visitor: Visitor, path: str = "events") -> AsyncGenerator[Any]:
    """Follow the events; yields a function that waits for the next one and returns its name and data."""
    async with visitor.client.stream("GET", path) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.aiter_lines()

        async def following_event() -> tuple[str, Any]:
            async for line in lines:
                if line.startswith("event: "):
                    data = await anext(lines)
                    return line.removeprefix("event: "), json.loads(
                        data.removeprefix("data: ")
                    )
            raise EOFError

        yield following_event


async def test_a_decision_of_another_process_is_heard(store: str, lives: Lives) -> None:
    """A viewer hears what waits at once, and again when another process has decided it."""
    async with inbox(store) as base, visitor_at(base) as ann, following(ann) as heard:
        name, first = await heard()
        assert (name, first["waiting"]) == ("waiting", 1)
        assert (
            f'data-mark="{first["mark"]}"' in (await ann.get("")).text
        )  # so that no change is missed between
        words = (*COMMAND, "approvals", "approve", "a/1/pay", "--store", store)
        with lives.program(*words, cwd=Path(store).parent) as process:
            name, second = await heard()
            assert (name, second["waiting"]) == ("waiting", 0)
            assert second["mark"] != first["mark"]
            assert await asyncio.to_thread(process.wait) == 0


async def test_who_has_signed_out_hears_nothing_more(store: str) -> None:
    """A stream ends with the session that opened it: the next change is not told."""
    async with inbox(store) as base, visitor_at(base) as ann, following(ann) as heard:
        await heard()
        await ann.send("sign-out", {})
        async with Approvals.connect(store) as approvals:
            assert await approvals.decide("a/1/pay", Approve(by="bob"))
        with pytest.raises(EOFError):
            await heard()


async def test_viewers_of_runs_hear_of_runs(store: str) -> None:
    """Who watches the list of runs hears of changed runs; who watches what waits does not."""
    async with (
        inbox(store) as base,
        visitor_at(base) as ann,
        following(ann, "events?of=runs") as heard,
    ):
        name, first = await heard()
        assert name == "runs"
        async with following(ann) as waiting:
            await waiting()
            database = await open_database(store)
            await database.transact(
                ("UPDATE planner_runs SET updated_at = updated_at + 1", {})
            )
            assert (await heard())[1]["mark"] != first["mark"]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await waiting()
            await database.close()


class CountingRuns(RunsClient):
    """Runs that count how often they are polled, and fail when they should."""

    def __init__(self, store: JournalStore) -> None:
        super().__init__(store)
        self.reads, self.fails, self.failed = 0, False, asyncio.Event()

    async def marks(self) -> StoreMarks:
        self.reads += 1
        if self.fails:
            self.failed.set()
            raise StoreError("The server is starting.")
        return await super().marks()


async def test_all_viewers_share_one_poll(store: str) -> None:
    """Thirty viewers read the store as often as one does, and none at all when the last has left."""
    async with opened_store(store, create=False) as opened:
        runs = CountingRuns(opened)
        application = app(runs, sign_in=Token(TOKEN))
        application.state.live.poll_seconds = 3600
        async with served(application) as base, visitor_at(base) as ann:
            before = runs.reads
            async with AsyncExitStack() as stack:
                for _ in range(30):
                    heard = await stack.enter_async_context(following(ann))
                    assert (await heard())[1]["waiting"] == 1
                assert runs.reads - before == 1
            while application.state.live.viewers:  # noqa: ASYNC110  (a server notices a disconnection when it does)
                await asyncio.sleep(0.01)
            application.state.live.poll_seconds = 0.01
            polled = runs.reads
            await asyncio.sleep(0.1)
            assert runs.reads == polled
            async with following(ann) as heard:  # whoever comes later is served again
                assert (await heard())[1]["waiting"] == 1


async def test_a_store_that_is_gone_for_a_while_is_followed_again(store: str) -> None:
    """A poll that fails is logged, and the viewers hear of changes once the store is back."""
    async with opened_store(store, create=False) as opened:
        runs = CountingRuns(opened)
        application = app(runs, sign_in=Token(TOKEN))
        application.state.live.poll_seconds = 0.01
        async with (
            served(application) as base,
            visitor_at(base) as ann,
            following(ann) as heard,
        ):
            await heard()
            runs.failed.clear()
            runs.fails = True
            await runs.failed.wait()
            runs.fails = False
            async with Approvals.connect(store) as approvals:
                await approvals.decide("a/1/pay", Approve(by="cli"))
            assert (await heard())[1]["waiting"] == 0


async def test_a_question_that_expires_leaves_the_list(store: str) -> None:
    """Time alone changes what waits, and viewers hear of it."""
    application = app(store, sign_in=Token(TOKEN))
    application.state.live.poll_seconds = 0.01
    async with (
        served(application) as base,
        visitor_at(base) as ann,
        following(ann) as heard,
    ):
        assert (await heard())[1]["waiting"] == 1
        database = await open_database(store)
        await database.transact(
            ("UPDATE planner_approvals SET expires_at = asked_at + 0.001", {})
        )
        await database.close()
        assert (await heard())[1]["waiting"] == 0


async def test_the_end_of_the_server_ends_its_streams(store: str) -> None:
    """A server that is stopped does not wait for viewers to go."""
    async with AsyncExitStack() as stack:
        async with inbox(store) as base:
            ann = await stack.enter_async_context(visitor_at(base))
            heard = await stack.enter_async_context(following(ann))
            await heard()
        with pytest.raises(EOFError):
            await heard()
