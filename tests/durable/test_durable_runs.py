"""Runs in a store: started once, continued by any process, recovered, resumed and cancelled."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Budget, Deny, FunctionCallingStepwisePlannerResult
from planner_ext.core.facts import CallFinished, CallStarted, Ended, RunStarted
from planner_ext.durable import (
    Approvals,
    RunConflictError,
    Runs,
    StoreError,
    UnknownRunError,
    WorkerInUseError,
    effect,
)
from planner_ext.durable.worker import Job
from planner_ext.errors import PlannerInvalidConfigurationError, ServiceCallError
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.durable import (
    BATCH,
    GOAL,
    PAY,
    check_history,
    decide_all,
    effects_in,
    on_sqlite,
    open_runs,
    planner_of,
    settles,
    store_neutral,
    world,
)


async def test_a_run_is_started_once(store: str, tmp_path: Path) -> None:
    """The same name and goal give the run that is there; ended, its result, without a request."""
    planner, kernel = world(tmp_path / "effects", [say("Hello.")])
    async with open_runs(store) as runs:
        first = await (
            await runs.start(planner, kernel, "greet", run_id="order-7")
        ).result()
        again = await (
            await runs.start(planner, kernel, "greet", run_id="order-7")
        ).result()
    async with open_runs(store) as runs:
        later = await (
            await runs.start(planner, kernel, "greet", run_id="order-7")
        ).result()

    assert [result.final_answer for result in (first, again, later)] == ["Hello."] * 3
    assert len(again.facts) == len(later.facts) == len(first.facts)


async def test_a_run_may_continue_a_conversation(store: str, tmp_path: Path) -> None:
    """The store keeps it from the start: a worker that begins the run after a fault of the first one sends it, too."""
    history = ChatHistory()
    history.add_user_message("I am Ann.")
    history.add_assistant_message("Hello, Ann.")
    planner, kernel = world(tmp_path / "effects", [say("You are Ann.")], plan=True)

    class Unable:
        def journaled(self, *given: Any, **options: Any) -> Any:
            raise OSError("full")

    goal = "Who am I?"
    async with open_runs(store) as runs:
        handle = await runs.start(
            Unable(), kernel, goal, run_id="order-7", chat_history=history
        )
        with pytest.raises(OSError, match="full"):
            await handle.result()
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, goal, run_id="order-7")
        result = await handle.result()
    assert result.chat_history is not None
    assert [message.content for message in result.chat_history.messages] == [
        "I am Ann.",
        "Hello, Ann.",
        goal,
        "You are Ann.",
    ]


async def test_two_handles_of_one_run_wait_for_one_life(
    store: str, tmp_path: Path
) -> None:
    """Started twice at once, a run is driven once."""
    planner, kernel = world(tmp_path / "effects", [say("Hello.")])
    async with open_runs(store) as runs:
        handles = [
            await runs.start(planner, kernel, "greet", run_id="order-7")
            for _ in range(2)
        ]
        results = await asyncio.gather(*(handle.result() for handle in handles))
    assert [result.final_answer for result in results] == ["Hello.", "Hello."]


async def test_a_name_belongs_to_one_goal(store: str, tmp_path: Path) -> None:
    """Another goal under a run's name is refused by name."""
    planner, kernel = world(tmp_path / "effects", [say("Hello.")])
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, "greet", run_id="order-7")).result()
        with pytest.raises(
            RunConflictError,
            match="'order-7' is there already, with another goal: 'greet'",
        ):
            await runs.start(planner, kernel, "curse", run_id="order-7")


@store_neutral("run_id", ["", "a/b", "a\n", "x" * 201, ".", ".."])
async def test_an_ambiguous_name_is_refused(
    run_id: str, store: str, tmp_path: Path
) -> None:
    """A slash would make two calls of two runs one; control characters and an empty name are refused."""
    planner, kernel = world(tmp_path / "effects")
    async with open_runs(store) as runs:
        with pytest.raises(StoreError, match="run_id must be 1 to 200 characters"):
            await runs.start(planner, kernel, GOAL, run_id=run_id)


async def test_a_pause_and_a_new_process_change_no_count(
    store: str, tmp_path: Path
) -> None:
    """The usage of a run that paused and continued elsewhere is that of one that never did."""
    through = await settled(store, tmp_path, pauses=False)
    paused = await settled(store, tmp_path, pauses=True)

    assert (
        (paused.iterations, paused.tool_calls)
        == (through.iterations, through.tool_calls)
        == (3, 4)
    )
    assert replace(paused.usage, active_seconds=0) == replace(
        through.usage, active_seconds=0
    )
    check_history(paused, ["book", "label", "charge", "pay"])


async def settled(
    store: str, folder: Path, *, pauses: bool
) -> FunctionCallingStepwisePlannerResult:
    interceptors: list[Any] = [] if pauses else [lambda _: Approve()]
    while True:
        planner, kernel = world(folder / "effects", settles, interceptors=interceptors)
        async with open_runs(store) as runs:
            result = await (
                await runs.start(
                    planner, kernel, GOAL, run_id="run-b" if pauses else "run-a"
                )
            ).result()
        if result.status != "paused":
            return result
        assert await decide_all(store) == 1


async def test_a_handle_sees_a_run_through_its_pauses(
    store: str, tmp_path: Path
) -> None:
    """``finished`` waits for each decision, and continues at once."""
    planner, kernel = world(tmp_path / "effects")
    async with open_runs(store, poll_seconds=0.01) as runs:
        handle = await runs.start(planner, kernel, GOAL)
        end = asyncio.create_task(handle.finished())
        assert (await handle.result()).status == "paused"
        await decide_all(store)
        assert (await end).final_answer == "Settled."


async def test_a_worker_takes_over_what_is_left_to_do(tmp_path: Path) -> None:
    """Runs that were interrupted or decided are recovered; those that wait, and those that ended, are left alone."""
    store, effects = tmp_path / "runs.db", tmp_path / "effects"
    held, planner, kernel = held_world([call("tool-hold", {}, id="hold")])
    async with Runs.sqlite(store, grace_seconds=0) as runs:
        for name in ("waits", "decided"):
            await (await runs.start(*world(effects, [PAY]), GOAL, run_id=name)).result()
        await (
            await runs.start(*world(effects, [say("Done.")]), GOAL, run_id="ended")
        ).result()
        await runs.start(planner, kernel, GOAL, run_id="interrupted")
        await held.begun.wait()
    async with Approvals.connect(store) as approvals:
        assert await approvals.decide("decided/0/pay", Approve())

    held.go.set()
    planner, kernel = world(effects, lambda _: say("Recovered."))
    kernel.add_plugin(held, "tool")
    async with Runs.sqlite(store) as runs:
        recovered = await runs.recover(planner, kernel)
        assert {handle.run_id for handle in recovered} == {"interrupted", "decided"}
        assert {(await handle.result()).final_answer for handle in recovered} == {
            "Recovered."
        }
        assert await runs.recover(planner, kernel) == []
        assert {record.run_id: record.status for record in await runs.list()} == {
            "waits": "paused",
            "decided": "answered",
            "ended": "answered",
            "interrupted": "answered",
        }
        assert [record.run_id for record in await runs.list(status="paused")] == [
            "waits"
        ]


async def test_a_worker_that_works_sees_decisions_by_itself(tmp_path: Path) -> None:
    """While it works, what is decided elsewhere continues; arguments are asked for by the run's name."""
    store, asked, ended = tmp_path / "runs.db", list[str](), asyncio.Event()
    observers = [lambda fact: ended.set() if isinstance(fact, Ended) else None]
    planner, kernel = world(
        tmp_path / "effects", [PAY, say("Paid.")], observers=observers
    )
    async with Runs.sqlite(store, poll_seconds=0.01) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
        await handle.result()
        worker = asyncio.create_task(
            runs.work(planner, kernel, arguments_for=asked.append)
        )
        await decide_all(store)
        await ended.wait()
        worker.cancel()
        assert (await handle.finished()).final_answer == "Paid."
    assert asked == ["order-7"]


@on_sqlite
async def test_arguments_that_cannot_be_made_are_a_fault_of_their_run_alone(
    store: str, tmp_path: Path
) -> None:
    """The run is given up again for others, and a start with arguments finishes it."""
    planner, kernel = world(tmp_path / "effects", [PAY, say("Paid.")])

    def none(run_id: str) -> None:
        raise LookupError(run_id)

    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        await decide_all(store)
        (handle,) = await runs.recover(planner, kernel, arguments_for=none)
        with pytest.raises(LookupError, match="order-7"):
            await handle.result()
        assert (
            await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        ).final_answer == "Paid."


@on_sqlite
async def test_a_fault_leaves_the_run_to_be_started_again(
    store: str, tmp_path: Path
) -> None:
    """What was recorded before it stays; this worker does not try by itself for ever."""
    script = [PAY, ConnectionError("the line is dead"), say("Paid.")]
    planner, kernel = world(
        tmp_path / "effects", script, interceptors=[lambda _: Approve()]
    )
    async with open_runs(store) as runs:
        with pytest.raises(ServiceCallError):
            await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        assert await runs.recover(planner, kernel) == []
        result = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
    assert (result.final_answer, effects_in(tmp_path / "effects")) == (
        "Paid.",
        ["pay 5"],
    )


async def test_a_run_continues_with_a_larger_budget(store: str, tmp_path: Path) -> None:
    """What a limit ended is resumed from the store; what was spent stays spent, an answered one is refused."""
    script = [PAY, PAY, say("Paid.")]
    budget = Budget(max_tool_calls=1, on_limit="stop")
    planner, kernel = world(
        tmp_path / "effects", script, budget=budget, interceptors=[lambda _: Approve()]
    )
    async with open_runs(store) as runs:
        limited = await (
            await runs.start(planner, kernel, GOAL, run_id="order-7")
        ).result()
        handle = await runs.resume(
            "order-7", planner, kernel, budget=Budget(max_tool_calls=9)
        )
        result = await handle.result()
        assert (await handle.result()).final_answer == "Paid."
        with pytest.raises(
            PlannerInvalidConfigurationError, match="'order-7' was answered"
        ):
            await (
                await runs.resume("order-7", planner, kernel, budget=Budget())
            ).result()
    assert (limited.status, limited.limit) == ("limit_reached", "max_tool_calls")
    assert (result.status, result.iterations, result.tool_calls) == ("answered", 3, 1)


@on_sqlite
async def test_decisions_may_be_given_with_the_resume(
    store: str, tmp_path: Path
) -> None:
    """By call id, as to a planner; an unknown run is refused by name."""
    planner, kernel = world(tmp_path / "effects", [PAY, say("Not paid.")])
    async with open_runs(store) as runs:
        await (await runs.start(planner, kernel, GOAL, run_id="order-7")).result()
        handle = await runs.resume(
            "order-7", planner, kernel, decisions={"pay": Deny("no", by="ann")}
        )
        assert (await handle.result()).final_answer == "Not paid."
        with pytest.raises(UnknownRunError, match="no run 'order-8'"):
            await runs.resume("order-8", planner, kernel)
    async with Approvals.connect(store) as approvals:
        assert await approvals.pending() == []


async def test_a_run_that_waits_is_cancelled(store: str, tmp_path: Path) -> None:
    """Every call is answered, nothing runs, nothing waits any more; what has ended cannot be cancelled."""
    planner, kernel = world(tmp_path / "effects", [PAY])
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="order-7")
        await handle.result()
        assert await runs.cancel("order-7", by="ann", reason="wrong order")
        assert not await runs.cancel("order-7")
        result = await handle.result()
        with pytest.raises(UnknownRunError):
            await runs.cancel("order-8")
    assert (result.status, result.reason) == (
        "stopped",
        "Cancelled by ann: wrong order",
    )
    check_history(result, ["pay"])
    async with Approvals.connect(store) as approvals:
        assert await approvals.pending() == []


class Held:
    """A tool that is held until a test lets it go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.ran = 0

    @effect("idempotent")
    @kernel_function
    async def hold(self) -> str:
        self.ran += 1
        self.begun.set()
        await self.go.wait()
        return "held"


def held_world(script: Any) -> tuple[Held, Any, Kernel]:
    held, kernel = Held(), Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(held, "tool")
    return held, planner_of(), kernel


async def test_a_run_that_another_worker_drives_is_cancelled(tmp_path: Path) -> None:
    """The worker loses its place in the journal, stops before its next step, and gives the stopped run."""
    held, planner, kernel = held_world([call("tool-hold", {}, id="hold")])
    async with (
        Runs.sqlite(tmp_path / "runs.db") as one,
        Runs.sqlite(tmp_path / "runs.db") as two,
    ):
        handle = await one.start(planner, kernel, GOAL, run_id="order-7")
        await held.begun.wait()
        assert await two.cancel("order-7", by="ann")
        held.go.set()
        result = await handle.result()
    assert (result.status, result.reason, held.ran) == (
        "stopped",
        "Cancelled by ann.",
        1,
    )
    check_history(result, ["hold"])


async def test_two_workers_make_no_call_twice(tmp_path: Path) -> None:
    """Both start the same runs at once: each call starts once, and both hear the same result."""
    store, effects = tmp_path / "runs.db", tmp_path / "effects"
    async with (
        Runs.sqlite(store, poll_seconds=0.01) as one,
        Runs.sqlite(store, poll_seconds=0.01) as two,
    ):
        handles = [
            await runs.start(
                *world(effects, [BATCH, say("Done.")]), GOAL, run_id=f"run-{n}"
            )
            for n in range(10)
            for runs in (one, two)
        ]
        results = await asyncio.gather(*(handle.result() for handle in handles))
    assert {result.final_answer for result in results} == {"Done."}
    assert sorted(effects_in(effects)) == sorted(
        line
        for n in range(10)
        for line in ("book 1", "label 2", f"charge 3 run-{n}/0/charge")
    )
    for result in results:
        started = [
            fact.call_id for fact in result.facts if isinstance(fact, CallStarted)
        ]
        assert sorted(started) == ["book", "charge", "label"]


async def test_a_worker_that_was_taken_for_dead_is_fenced(tmp_path: Path) -> None:
    """If two drive one run nevertheless, the journal lets only one record: the other gives what that one did."""
    held, planner, kernel = held_world([call("tool-hold", {}, id="hold"), say("Slow.")])
    other, same, kernel_two = held_world([say("Quick.")])
    other.go.set()
    async with (
        Runs.sqlite(tmp_path / "runs.db") as one,
        Runs.sqlite(tmp_path / "runs.db") as two,
    ):
        slow = await one.start(planner, kernel, GOAL, run_id="order-7")
        await held.begun.wait()
        quick = await two._pool.runner.drive(
            Job(run_id="order-7", planner=same, kernel=kernel_two)
        )
        held.go.set()
        result = await slow.result()
    assert quick.final_answer == result.final_answer == "Quick."
    assert len(result.facts) == len(quick.facts)
    assert sum(isinstance(fact, CallFinished) for fact in result.facts) == 1


async def test_a_workers_name_belongs_to_one_life(tmp_path: Path) -> None:
    """The second worker of a name is refused; when the first is gone, the name is free again, its lock cleared."""
    async with Runs.sqlite(tmp_path / "runs.db", worker_id="a") as runs:
        assert runs.worker_id == "a"
        with pytest.raises(
            WorkerInUseError,
            match=r"worker 'a' of .* is in use by a process that lives",
        ):
            async with Runs.sqlite(tmp_path / "runs.db", worker_id="a"):
                pass
    async with Runs.sqlite(tmp_path / "runs.db", worker_id="a"):
        pass
    with pytest.raises(StoreError, match="worker_id must be 1 to 100 letters"):
        async with Runs.sqlite(tmp_path / "runs.db", worker_id="../a"):
            pass
    assert os.listdir(tmp_path) == ["runs.db"]


@on_sqlite
async def test_the_goal_and_the_name_are_in_the_journal(
    store: str, tmp_path: Path
) -> None:
    """A run is listed with its goal and read with its facts, with any text as the goal."""
    goal = "Grüße, \x00 \N{PARTY POPPER}"
    planner, kernel = world(tmp_path / "effects", [say("Hello.")])
    async with open_runs(store) as runs:
        handle = await runs.start(planner, kernel, goal)
        await handle.result()
        (record,) = await runs.list()
        stored = await runs.load(handle.run_id)
    started = stored.facts[0]
    assert isinstance(started, RunStarted)
    assert (
        (record.run_id, record.goal)
        == (started.run_id, started.goal)
        == (handle.run_id, goal)
    )
