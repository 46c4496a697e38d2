"""Workers under each host, for tests: the own loop, DBOS, Temporal."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any, NoReturn
from uuid import uuid4

from dbos import DBOS, DBOSConfig
from temporalio.client import Client

from planner_ext.durable import Runs
from planner_ext.durable.hosts import DbosHost, TemporalHost
from planner_ext.engine.concurrency import in_thread
from support.durable import open_runs

__all__ = ["hosted", "launched", "serve"]

QUEUE = "agents"


@asynccontextmanager
async def launched(url: str, *, inside: bool = True) -> AsyncGenerator[None]:
    """Launch an application of DBOS with a queue for runs, inside this event loop or outside."""
    config = DBOSConfig(
        name="app",
        system_database_url=url,
        executor_id=uuid4().hex,
        application_version="1",
        log_level="CRITICAL",
        run_migrations=False,
    )
    DBOS(config=config)
    if inside:
        DBOS.launch()
    else:
        await in_thread(DBOS.launch)
    try:
        await DBOS.register_queue_async(QUEUE, polling_interval_sec=0.05)
        yield
    finally:
        DBOS.destroy()


@asynccontextmanager
async def hosted(
    host: str, runs: Runs, engine: str, **options: Any
) -> AsyncGenerator[Any]:
    """Let a host drive runs.

    Args:
        host: ``dbos`` or ``temporal``.
        runs: The runs, with what to drive them with.
        engine: The URL of DBOS's database, which has its tables, or the address of the Temporal server.
        **options: Of the host.
    """
    if host == "dbos":
        async with launched(engine), DbosHost(runs, queue=QUEUE, **options) as opened:
            yield opened
    else:
        client = await Client.connect(engine)
        async with TemporalHost(runs, client, task_queue=QUEUE, **options) as opened:
            yield opened


async def serve(
    host: str, store: str, engine: str, planner: Any, kernel: Any, **options: Any
) -> NoReturn:
    """Be a worker of a store until killed.

    Args:
        host: ``own``, ``dbos`` or ``temporal``.
        store: The path or URL of the runs.
        engine: As of `hosted`; "" for ``own``.
        planner: Drives the runs.
        kernel: Its functions may be called.
        **options: Of `Runs`.
    """
    async with open_runs(store, **options) as runs:
        if host == "own":
            await runs.work(planner, kernel)
        runs.drive_with(planner, kernel)
        async with hosted(host, runs, engine, again_after=2.0):
            await asyncio.Event().wait()
    raise AssertionError("a worker ends by a signal")
