"""Engines drive kept runs: each host on a real DBOS and a real Temporal server."""

import asyncio
import base64
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest
from dbos import DBOS
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function
from temporalio.client import WorkflowFailureError
from temporalio.exceptions import CancelledError

from planner_ext.durable import RetryPolicy, Runs, StoreError
from planner_ext.durable.hosts import DbosHost, TemporalHost
from planner_ext.engine.concurrency import in_thread
from planner_ext.hitl_manager import ApprovalSettings
from planner_ext.testing import ScriptedChatCompletion, ScriptedFault, call, calls, say
from support.durable import (
    GOAL,
    Shop,
    decide_all,
    effects_in,
    open_runs,
    pays,
    planner_of,
    turn,
    world,
)
from support.hosts import QUEUE, hosted, launched
from support.postgres import PostgresServer
from support.processes import Lives
from support.temporal import TemporalServer

LIMIT_SECONDS = 120


def deciding_life(store: str) -> None:
    """Decide what waits."""
    asyncio.run(decide_all(store))


async def until(met: Callable[[], Awaitable[bool]]) -> None:
    """Wait for what a host brings about."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while not await met():  # noqa: ASYNC110  (only the engine tells)
            await asyncio.sleep(0.02)


async def reached(runs: Runs, status: str, number: int = 1) -> None:
    """Wait until so many runs have a status."""

    async def counted() -> bool:
        return await runs.count(status=status) == number

    await until(counted)


@DBOS.workflow()
async def greet(name: str) -> str:
    """Be a workflow of the application."""
    return f"Hello, {name}."


class Held:
    """A function that does not return before it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.ended = 0
        self.go_on = asyncio.Event()

    @kernel_function(description="Waits.")
    async def wait(self) -> str:
        self.begun += 1
        await self.go_on.wait()
        self.ended += 1
        return "done"

    async def has_begun(self, number: int = 1) -> None:
        """Wait until so many calls have begun."""

        async def counted() -> bool:
            return self.begun == number

        await until(counted)

    def kernel(self) -> Kernel:
        """Make a kernel with the function, and a model that calls it once."""
        kernel = Kernel()
        kernel.add_service(
            ScriptedChatCompletion([call("held-wait", {}, id="wait"), say("Done.")])
        )
        kernel.add_plugin(self, "held")
        return kernel


@pytest.fixture(scope="session")
def dbos_template(postgres: PostgresServer) -> str:
    """Name a database with DBOS's tables: a copy is there much sooner."""
    DBOS.migrate(postgres.create("dbos_template"))
    return "dbos_template"


@pytest.fixture
def dbos_url(postgres: PostgresServer, dbos_template: str) -> str:
    """Make a database with DBOS's tables."""
    return postgres.create(f"dbos_{uuid4().hex}", template=dbos_template)


@pytest.fixture(params=["dbos", "temporal"])
def host(request: pytest.FixtureRequest) -> str:
    """Name a host."""
    return request.param


@pytest.fixture
def engine(request: pytest.FixtureRequest, host: str) -> str:
    """Return where the engine of the host is."""
    if host == "dbos":
        return request.getfixturevalue("dbos_url")
    return request.getfixturevalue("temporal").address


def new_name() -> str:
    """Make a run's name that no other test has: all use one Temporal server."""
    return uuid4().hex


async def test_a_run_decided_in_another_process_continues(
    host: str, engine: str, store: str, lives: Lives, tmp_path: Path
) -> None:
    """The host drives a submitted run to its pause, and after the decision to its end; its function runs once."""
    async with open_runs(store) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays))
        async with hosted(host, runs, engine):
            await runs.submit(GOAL, run_id=new_name())
            await reached(runs, "paused")
            assert await in_thread(lambda: lives.live(deciding_life, store)) == 0
            await reached(runs, "answered")
    assert effects_in(tmp_path / "effects") == ["pay 5"]


@pytest.mark.kills
async def test_a_fault_is_retried_and_a_question_expires(
    host: str, engine: str, tmp_path: Path
) -> None:
    """What is due by the clock is looked at then: the retry of a fault, the expiry of a question."""
    retry = RetryPolicy(first_delay=0.1)
    script = [
        ScriptedFault(status=500),
        call("shop-pay", {"amount": 5}, id="pay"),
        say("Not paid."),
    ]
    planner, kernel = world(
        tmp_path / "effects", script, approval=ApprovalSettings(expires_in=0.2)
    )
    async with open_runs(tmp_path / "runs.db", retry=retry) as runs:
        runs.drive_with(planner, kernel)
        async with hosted(host, runs, engine):
            await runs.submit(GOAL, run_id=new_name())
            await reached(runs, "answered")
    assert effects_in(tmp_path / "effects") == []


@pytest.mark.kills
async def test_who_leaves_ends_its_calls_and_hands_its_runs_over(
    host: str, engine: str, tmp_path: Path
) -> None:
    """A call in flight ends while the block is left, and the next worker answers; no person is asked."""
    held = Held()
    run_id = new_name()
    async with open_runs(tmp_path / "runs.db") as runs:
        runs.drive_with(planner_of(), held.kernel())
        async with hosted(host, runs, engine):
            await runs.submit(GOAL, run_id=run_id)
            await held.has_begun()
            asyncio.get_running_loop().call_soon(held.go_on.set)
    async with open_runs(tmp_path / "runs.db") as runs:
        assert (await runs.load(run_id)).record.tool_calls == 1
        kernel = Kernel()
        kernel.add_service(ScriptedChatCompletion([say("Done.")]))
        kernel.add_plugin(Held(), "held")
        runs.drive_with(planner_of(), kernel)
        async with hosted(host, runs, engine):
            await reached(runs, "answered")


@pytest.mark.kills
async def test_a_database_that_took_no_writes_strands_nothing(
    postgres: PostgresServer,
    dbos_url: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Looks end while DBOS cannot record that: their runs go on once they are decided, and their rows are cancelled."""
    database = dbos_url.partition("?")[0].rpartition("/")[2]

    def rule(is_read_only: bool) -> None:
        with psycopg.connect(postgres.url(), autocommit=True) as admin:
            admin.execute(
                f"ALTER DATABASE {database} SET default_transaction_read_only = {is_read_only}".encode()
            )
            admin.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                (database,),
            )

    async def pending() -> list[str]:
        rows = await DBOS.list_workflows_async(
            status="PENDING", load_input=False, load_output=False
        )
        return [row.workflow_id for row in rows]

    held = Held()
    kernel = Kernel()
    reply = calls(
        call("held-wait", {}, id="wait"), call("shop-pay", {"amount": 5}, id="pay")
    )
    kernel.add_service(
        ScriptedChatCompletion(lambda request: [reply, say("Paid.")][turn(request)])
    )
    kernel.add_plugin(held, "held")
    kernel.add_plugin(Shop(tmp_path / "effects"), "shop")
    async with open_runs(tmp_path / "runs.db") as runs:
        runs.drive_with(
            planner_of(approval=ApprovalSettings(on_deferred="run_safe_first")), kernel
        )
        async with hosted("dbos", runs, dbos_url, again_after=1.0):
            for number in range(4):
                await runs.submit(GOAL, run_id=f"run-{number}")
            await held.has_begun(4)
            rule(is_read_only=True)
            held.go_on.set()
            await reached(runs, "paused", 4)
            stranded = await pending()
            assert {row.partition("/")[0] for row in stranded} == {
                f"run-{number}" for number in range(4)
            }
            await decide_all(tmp_path / "runs.db")

            async def is_refused() -> bool:
                return "Due runs wait" in caplog.text

            await until(is_refused)
            rule(is_read_only=False)
            await reached(runs, "answered", 4)

            async def cleared() -> bool:
                return not set(stranded) & set(await pending())

            await until(cleared)


@pytest.mark.kills
@pytest.mark.parametrize(
    "inside", [True, False], ids=["launched-inside", "launched-outside"]
)
async def test_dbos_serves_the_applications_own_workflows(
    inside: bool, dbos_url: str, tmp_path: Path
) -> None:
    """Launched in the loop or in another thread, DBOS runs a workflow of the application beside the looks."""
    async with open_runs(tmp_path / "runs.db") as runs:
        runs.drive_with(*world(tmp_path / "effects", [say("Done.")]))
        async with launched(dbos_url, inside=inside), DbosHost(runs, queue=QUEUE):
            await runs.submit(GOAL, run_id="a")
            handle = await DBOS.enqueue_workflow_async(QUEUE, greet, "Ann")
            assert await handle.get_result() == "Hello, Ann."
            await reached(runs, "answered")


@pytest.mark.kills
async def test_dbos_may_be_destroyed_first(dbos_url: str, tmp_path: Path) -> None:
    """The end of DBOS ends the thread pool of the loop; the block of the runs is left as ever."""
    async with open_runs(tmp_path / "runs.db") as runs:
        runs.drive_with(*world(tmp_path / "effects", [say("Done.")]))
        async with launched(dbos_url):
            await DBOS.retrieve_queue_async(QUEUE)
        await runs.submit(GOAL, run_id="a")
        assert (await runs.activate("a")).status == "answered"


@pytest.mark.kills
async def test_a_host_of_dbos_needs_its_queue_and_is_alone(
    dbos_url: str, tmp_path: Path
) -> None:
    """A queue that DBOS does not have, and a second host, are refused with the way out."""
    async with open_runs(tmp_path / "runs.db") as runs, launched(dbos_url):
        with pytest.raises(
            StoreError, match=r"has no queue 'other'. Register it first"
        ):
            await DbosHost(runs, queue="other").__aenter__()
        async with DbosHost(runs, queue=QUEUE):
            with pytest.raises(StoreError, match="a DbosHost open already"):
                await DbosHost(runs, queue=QUEUE).__aenter__()


@pytest.mark.kills
async def test_a_cancelled_run_ends_its_workflow(
    temporal: TemporalServer, tmp_path: Path
) -> None:
    """A run that is cancelled while it waits for a person leaves no workflow open."""
    client = await temporal.connect()
    run_id = new_name()
    async with open_runs(tmp_path / "runs.db", poll_seconds=0.05) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays))
        async with TemporalHost(runs, client, task_queue=QUEUE):
            await runs.submit(GOAL, run_id=run_id)
            await reached(runs, "paused")
            await runs.cancel(run_id)
            assert await client.get_workflow_handle(run_id).result() == "stopped"


@pytest.mark.kills
async def test_a_cancelled_workflow_ends_its_run(
    temporal: TemporalServer, tmp_path: Path
) -> None:
    """A call that hangs is cancelled with it."""
    client = await temporal.connect()
    run_id = new_name()
    held = Held()
    async with open_runs(tmp_path / "runs.db", poll_seconds=0.05) as runs:
        runs.drive_with(planner_of(), held.kernel())
        async with TemporalHost(runs, client, task_queue=QUEUE):
            await runs.submit(GOAL, run_id=run_id)
            await held.has_begun()
            handle = client.get_workflow_handle(run_id)
            await handle.cancel()
            with pytest.raises(WorkflowFailureError) as raised:
                await handle.result()
            assert isinstance(raised.value.cause, CancelledError)
            await reached(runs, "stopped")
            assert not held.ended


@pytest.mark.kills
async def test_only_names_and_statuses_reach_temporal(
    temporal: TemporalServer, tmp_path: Path
) -> None:
    """Neither goal, arguments, results nor the text of a store's error are in a workflow's history."""
    client = await temporal.connect()
    run_id = new_name()
    path = tmp_path / "secret-path.db"
    async with open_runs(path) as runs:
        runs.drive_with(*world(tmp_path / "effects", pays))
        async with TemporalHost(runs, client, task_queue=QUEUE):
            await runs.submit("secret-goal", run_id=run_id)
            await reached(runs, "paused")
            path.rename(tmp_path / "moved.db")
            handle = client.get_workflow_handle(run_id)
            await handle.signal("wake")

            async def has_failed() -> bool:
                activities = (
                    await handle.describe()
                ).raw_description.pending_activities
                return any(activity.attempt > 1 for activity in activities)

            await until(has_failed)
            (tmp_path / "moved.db").rename(path)
            await decide_all(path)
            assert await handle.result() == "answered"
            text = (await handle.fetch_history()).to_json()
    payloads = [
        base64.b64decode(data).decode()
        for data in re.findall(r'"data": "([^"]*)"', text)
    ]
    assert {f'"{run_id}"', '"answered"'} <= set(payloads)
    for secret in ("secret", "shop", "done pay"):
        assert secret not in text
        assert not any(secret in payload for payload in payloads)


@pytest.mark.kills
async def test_runs_outlive_temporals_database(tmp_path: Path) -> None:
    """An empty server replaces the one that knew the workflows: parked runs continue."""
    store = tmp_path / "runs.db"
    with TemporalServer() as server:
        await server.connect()
        async with open_runs(store) as runs:
            runs.drive_with(*world(tmp_path / "effects", pays))
            async with hosted("temporal", runs, server.address):
                for number in range(3):
                    await runs.submit(GOAL, run_id=f"run-{number}")
                await reached(runs, "paused", 3)
                server.kill()
                server.forget()
                await decide_all(store)
                server.start()
                await reached(runs, "answered", 3)
    assert effects_in(tmp_path / "effects") == ["pay 5"] * 3
