"""Runs that are submitted by a process that drives none: queued with their inputs, driven by workers, awaited."""

import asyncio
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import Approve, Budget, FunctionCallingStepwisePlanner
from planner_ext.core.facts import Ended, RunStarted
from planner_ext.durable import (
    Approvals,
    RunConflictError,
    Runs,
    StoreError,
    UnknownRunError,
)
from planner_ext.errors import (
    LimitReachedError,
    PlannerInvalidConfigurationError,
    RunNotAnsweredError,
)
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.durable import (
    GOAL,
    PAY,
    decide_all,
    effects_in,
    open_runs,
    planner_of,
    store_neutral,
    turn,
    world,
)
from support.postgres import PostgresServer
from support.processes import Lives

LONG_SECONDS = 240.0


@asynccontextmanager
async def working(
    store: str | Path,
    app: tuple[FunctionCallingStepwisePlanner, Kernel],
    **options: Any,
) -> AsyncGenerator[Runs, None]:
    """Let a worker live in this process."""
    async with open_runs(store, poll_seconds=0.01) as runs:
        work = asyncio.create_task(runs.work(*app, **options))
        try:
            yield runs
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def test_a_client_lists_and_cancels_runs(store: str, tmp_path: Path) -> None:
    """A client, of which a process may have several, needs neither planner nor kernel, and takes no worker's name."""
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")])
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        async with Runs.connect(store) as client, Runs.connect(store) as other:
            assert [record.run_id for record in await client.list(status="paused")] == [
                "order-7"
            ]
            assert await other.cancel("order-7", by="ann")
            assert await client.count(status="stopped") == 1
            assert isinstance((await client.load("order-7")).facts[-1], Ended)


async def test_a_submitted_run_is_driven_by_a_worker_through_its_pause(
    store: str, tmp_path: Path
) -> None:
    """It waits, queued, for a worker; its result tells what waits for a person, and called again, how it ended."""
    async with Runs.connect(store, poll_seconds=0.01) as client:
        submitted = await client.submit(GOAL, run_id="order-7")
        assert [(record.status, record.owner) for record in await client.list()] == [
            ("queued", None)
        ]
        with pytest.raises(TimeoutError):
            await submitted.result(timeout=0.05)
        queued = await client.result("order-7")
        assert (queued.status, queued.iterations, queued.pending) == ("queued", 0, ())
        async with working(store, world(tmp_path / "effects", [PAY, say("Paid.")])):
            paused = await submitted.result(timeout=120)
            assert [call.id for call in paused.pending] == ["order-7/0/pay"]
            assert (
                paused.status,
                paused.goal,
                paused.iterations,
                paused.final_answer,
            ) == ("paused", GOAL, 1, "")
            await decide_all(store)
            ended = await submitted.result(timeout=120)
        assert (
            ended.status,
            ended.final_answer,
            ended.iterations,
            ended.tool_calls,
        ) == ("answered", "Paid.", 2, 1)
        assert (ended.limit, ended.reason, ended.problem, ended.pending) == (
            None,
            "",
            "",
            (),
        )
        assert await client.result("order-7") == ended
    assert effects_in(tmp_path / "effects") == ["pay 5"]


@pytest.mark.parametrize("submitter", ["client", "worker"])
async def test_a_submitted_run_begins_at_a_hint(
    submitter: str, postgres_url: str, tmp_path: Path
) -> None:
    """In PostgreSQL it waits for no poll of a worker."""
    app = world(tmp_path / "effects", [say("Hello.")])
    async with (
        open_runs(postgres_url, poll_seconds=LONG_SECONDS) as runs,
        Runs.connect(postgres_url) as client,
    ):
        work = asyncio.create_task(runs.work(*app))
        submitted = await (client if submitter == "client" else runs).submit(
            "greet", run_id="r"
        )
        async with asyncio.timeout(LONG_SECONDS / 2):
            await client.wait("r")
        assert (await client.result(submitted.run_id)).final_answer == "Hello."
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def test_a_run_is_submitted_before_any_worker_came(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """The first worker of a database finds what waits for it."""
    empty = postgres.create("submitted_first")
    async with Runs.connect(empty) as client:
        submitted = await client.submit("greet")
        async with working(empty, world(tmp_path / "effects", [say("Hello.")])):
            assert (await submitted.result(timeout=120)).final_answer == "Hello."


async def test_a_run_is_submitted_once(store: str, tmp_path: Path) -> None:
    """The same name with the same goal and inputs is the run that is there; with others it is refused by name."""
    async with Runs.connect(store) as client:
        given: dict[str, Any] = {
            "arguments": {"tenant": "a", "limits": [1, 2.5]},
            "budget": Budget(max_tool_calls=3),
        }
        for _ in range(2):
            assert (
                await client.submit(GOAL, run_id="order-7", **given)
            ).run_id == "order-7"
        assert await client.count() == 1
        with pytest.raises(
            RunConflictError, match=r"with another goal: 'Settle the order\.'"
        ):
            await client.submit("greet", run_id="order-7", **given)
        changes: list[dict[str, Any]] = [
            {"arguments": {"tenant": "b"}},
            {"budget": Budget(max_tool_calls=4)},
            {"budget": None},
        ]
        for change in changes:
            with pytest.raises(
                RunConflictError,
                match="'order-7' is there already, with other arguments or another",
            ):
                await client.submit(GOAL, run_id="order-7", **given | change)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"goal": " "}, "The goal must be a text that is not empty"),
        ({"goal": "caf\udce9"}, r"and valid Unicode; got 'caf\\udce9'"),
        (
            {"arguments": {"when": datetime.now(UTC)}},
            r"arguments\['when'\] must be a JSON value",
        ),
        (
            {"arguments": {"rate": float("nan")}},
            r"arguments\['rate'\] must be a JSON value",
        ),
        (
            {"arguments": {"pair": (1, 2)}},
            r"arguments\['pair'\] would be read as \[1, 2\]",
        ),
        (
            {"arguments": {"deep": {"by": {1: 2}}}},
            r"arguments\['deep'\] would be read as",
        ),
        ({"arguments": {7: "x"}}, "arguments must have texts as names; got 7"),
        ({"arguments": ["x"]}, "arguments must map names to JSON values"),
        ({"budget": {"max_tool_calls": 1}}, "budget must be of the class Budget"),
    ],
)
async def test_what_no_store_can_hold_is_refused_by_name(
    given: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    """Before anything is stored."""
    async with Runs.connect(tmp_path / "runs.db") as client:
        with pytest.raises(PlannerInvalidConfigurationError, match=problem):
            await client.submit(**{"goal": GOAL, **given})
        assert await client.count() == 0


class Desk:
    """A function that writes down the arguments that the application has for it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @kernel_function
    def note(self, arguments: KernelArguments) -> str:
        self.file.write_text(
            json.dumps(
                {name: arguments[name] for name in sorted(arguments) if name != "self"}
            )
        )
        return "noted"


def desk(file: Path) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """An application with such a function."""
    kernel = Kernel()
    kernel.add_service(
        ScriptedChatCompletion(
            lambda request: say("Noted.") if turn(request) else call("desk-note")
        )
    )
    kernel.add_plugin(Desk(file), "desk")
    return planner_of(), kernel


@store_neutral(
    "of_worker",
    [{"tenant": "a", "token": "t"}, None],
    ["with-arguments_for", "without"],
)
async def test_submitted_arguments_reach_the_functions(
    of_worker: dict[str, str] | None, store: str, tmp_path: Path
) -> None:
    """They are given to the planner; an argument that the worker has itself cannot be replaced by a submitted one."""

    def arguments_for(run_id: str) -> KernelArguments | None:
        return None if of_worker is None else KernelArguments(None, **of_worker)

    async with working(
        store, desk(tmp_path / "noted"), arguments_for=arguments_for
    ) as runs:
        submitted = await runs.submit(
            GOAL, arguments={"tenant": "b", "order": {"number": 7}}
        )
        assert (await submitted.result(timeout=120)).status == "answered"
    noted = json.loads((tmp_path / "noted").read_text())
    expected = {"tenant": "b", "order": {"number": 7}, **(of_worker or {})}
    assert {name: noted.get(name) for name in expected} == expected


def noting_life(store: str, file: Path) -> None:
    """Work until the process is killed."""

    async def work() -> None:
        async with working(store, desk(file)):
            await asyncio.Event().wait()

    asyncio.run(work())


async def test_a_submitted_run_has_its_inputs_in_every_life(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """A worker that takes over a run of a killed one has the arguments, and counts on within the budget."""
    async with Runs.connect(store) as client:
        submitted = await client.submit(
            GOAL, arguments={"tenant": "b"}, budget=Budget(max_iterations=7)
        )
        killed = lives.begin(
            noting_life,
            store,
            tmp_path / "noted",
            PLANNER_EXT_CRASH_AT="after_model_saved",
        )
        await asyncio.to_thread(killed.join, 60)
        assert (killed.exitcode, (tmp_path / "noted").exists()) == (-9, False)
        async with working(store, desk(tmp_path / "noted")):
            assert (await submitted.result(timeout=120)).iterations == 2
        begun = (await client.load(submitted.run_id)).facts[0]
    assert json.loads((tmp_path / "noted").read_text())["tenant"] == "b"
    assert isinstance(begun, RunStarted)
    assert begun.rules.limits.max_iterations == 7


async def test_a_submitted_budget_replaces_that_of_the_planner(
    store: str, tmp_path: Path
) -> None:
    """In every life of the run, and where it has no max_iterations, the planner's holds."""
    planner, kernel = world(
        tmp_path / "effects",
        lambda _: PAY,
        budget=Budget(max_tool_calls=9, max_iterations=6),
        interceptors=[lambda _: Approve()],
    )
    async with working(store, (planner, kernel)) as runs:
        submitted = await runs.submit(
            GOAL, budget=Budget(max_tool_calls=2, on_limit="stop")
        )
        result = await submitted.result(timeout=120)
        begun = (await runs.load(submitted.run_id)).facts[0]
    assert (result.status, result.limit, result.tool_calls) == (
        "limit_reached",
        "max_tool_calls",
        2,
    )
    assert "max_tool_calls" in result.reason
    assert isinstance(begun, RunStarted)
    assert begun.rules.limits == Budget(
        max_tool_calls=2, on_limit="stop", max_iterations=6
    )
    with pytest.raises(
        LimitReachedError, match="Max number of tool call reached"
    ) as caught:
        result.raise_for_status()
    assert (caught.value.limit, caught.value.tool_calls) == ("max_tool_calls", 2)


async def test_a_result_raises_on_request(tmp_path: Path) -> None:
    """An answered one returns itself; a missing run raises."""
    async with working(
        tmp_path / "runs.db", world(tmp_path / "effects", [say("Hello."), PAY])
    ) as runs:
        answered = await (await runs.submit("greet")).result(timeout=120)
        assert answered.raise_for_status() is answered
        paused = await (await runs.submit(GOAL)).result(timeout=120)
        with pytest.raises(RunNotAnsweredError, match="Calls wait for a decision"):
            paused.raise_for_status()
        with pytest.raises(UnknownRunError, match="no run 'order-8'"):
            await runs.result("order-8")


async def test_a_submitted_run_that_fails_says_why(store: str, tmp_path: Path) -> None:
    """Its result comes with the last fault, and raises it on request only."""

    def arguments_for(run_id: str) -> KernelArguments:
        raise PlannerInvalidConfigurationError("No tenant has this run.")

    async with working(
        store, world(tmp_path / "effects", []), arguments_for=arguments_for
    ) as runs:
        result = await (await runs.submit(GOAL)).result(timeout=120)
    assert (result.status, result.iterations) == ("failed", 0)
    assert "No tenant has this run." in result.problem
    with pytest.raises(RunNotAnsweredError, match=r"No tenant has this run\."):
        result.raise_for_status()


async def test_a_started_run_takes_what_it_was_submitted_with(
    store: str, tmp_path: Path
) -> None:
    """A process may drive a queued run itself, by its name."""
    planner, kernel = world(
        tmp_path / "effects", [PAY], interceptors=[lambda _: Approve()]
    )
    async with open_runs(store) as runs:
        await runs.submit(
            GOAL, run_id="order-7", budget=Budget(max_tool_calls=0, on_limit="stop")
        )
        result = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
    assert (result.status, result.limit) == ("limit_reached", "max_tool_calls")


async def test_a_queued_run_is_cancelled(store: str, tmp_path: Path) -> None:
    """No worker begins it."""
    async with Runs.connect(store) as client:
        submitted = await client.submit(GOAL, run_id="order-7")
        assert await client.cancel("order-7", by="ann", reason="wrong order")
        result = await submitted.result(timeout=120)
        assert (result.status, result.reason) == (
            "stopped",
            "Cancelled by ann: wrong order",
        )
        async with working(store, world(tmp_path / "effects", [])):
            assert await client.result("order-7") == result


async def test_damaged_inputs_are_refused_by_name(tmp_path: Path) -> None:
    """For each damage of the row; the run is not begun without them."""
    store = tmp_path / "runs.db"
    for text in (
        "{",
        "[]",
        '{"arguments": 7}',
        '{"budget": {"max_tool_calls": -1}}',
        '{"budget": 7}',
    ):
        async with Runs.connect(store) as client:
            run_id = (await client.submit(GOAL)).run_id
            with closing(sqlite3.connect(store)) as database, database:
                database.execute("UPDATE planner_runs SET inputs = ?", (text,))
            database.close()
            with pytest.raises(
                StoreError, match=f"The inputs of run '{run_id}' are damaged"
            ):
                await client.load(run_id)


def working_life(store: str, effects: Path) -> None:
    """Work until killed."""

    async def work() -> None:
        async with working(store, world(effects, [PAY, say("Paid.")])):
            await asyncio.Event().wait()

    asyncio.run(work())


async def test_a_run_is_submitted_to_workers_of_another_process(
    store: str, tmp_path: Path, lives: Lives
) -> None:
    """Each step may be in another process: who submits, works, approves and waits share only the store."""
    effects = tmp_path / "effects"
    async with Runs.connect(store, poll_seconds=0.02) as client:
        worker = lives.begin(working_life, store, effects)
        submitted = await client.submit(GOAL, run_id="order-7")
        assert (await submitted.result(timeout=120)).status == "paused"
        async with Approvals.connect(store) as approvals:
            assert await approvals.decide("order-7/0/pay", Approve(by="ann"))
        ended = await submitted.result(timeout=120)
        assert (ended.status, ended.final_answer) == ("answered", "Paid.")
        worker.kill()
        worker.join()
    assert effects_in(effects) == ["pay 5"]


def test_a_submitter_needs_no_semantic_kernel(tmp_path: Path) -> None:
    """Submitting, reading a result and listing work in a process in which Semantic Kernel cannot be imported."""
    program = """
import asyncio, sys
sys.modules["semantic_kernel"] = None
from planner_ext.core.limits import Budget
from planner_ext.durable import Runs

async def main():
    async with Runs.connect("runs.db") as client:
        run = await client.submit("greet", arguments={"tenant": "a"}, budget=Budget(max_iterations=3))
        print((await client.result(run.run_id)).status, len(await client.list(status="queued")))

asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "queued 1\n")
