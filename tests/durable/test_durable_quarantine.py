"""A run that ends its worker's process again and again is set aside, and does no harm to the runs beside it."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext.core.facts import CallFinished, CallStarted
from planner_ext.durable import dbos, effect
from planner_ext.durable.store import JournalStore, opened_store
from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, ScriptedRequest, call, calls, say
from support.durable import effects_in, open_runs, planner_of, turn
from support.processes import Lives

LIMIT_SECONDS = 120
HEALTHY = [f"healthy-{number}" for number in range(5)]
POISON = "Take the poison."


@pytest.fixture(scope="module")
def lives() -> Iterator[Lives]:
    lives = Lives()
    yield lives
    lives.close()


class Pharmacy:
    """Writes each effect into a file; two of its functions end the process."""

    def __init__(self, effects: Path) -> None:
        self._effects = effects

    def _note(self, what: str) -> None:
        with self._effects.open("a") as file:
            file.write(f"{what}\n")

    @effect("idempotent")
    @kernel_function(description="Ends the process, and may run again.")
    def poison(self) -> None:
        self._note("poison")
        os.kill(os.getpid(), signal.SIGKILL)

    @kernel_function(description="Ends the process, and may not run again unasked.")
    def venom(self) -> None:
        self._note("venom")
        os.kill(os.getpid(), signal.SIGKILL)

    @kernel_function(description="Sells something, once.")
    async def sell(self, run: str, number: int) -> str:
        self._note(f"{run} {number}")
        await asyncio.sleep(0.1)
        return "sold"


def world(folder: Path) -> tuple[Any, Kernel]:
    """Make a pharmacy that sells until the file ``closed`` is there; its runs go by their goals."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        goal = next(str(message["content"]) for message in request.messages if message["role"] == "user")
        number = turn(request)
        if goal == POISON:
            return call("shop-poison", id="drink")
        if goal == "venom":
            return call("shop-venom", id="bite")
        if (folder / "closed").exists():
            return say("Closed.")
        pair = (call("shop-sell", {"run": goal, "number": 2 * number + each}, id=f"{number}-{each}") for each in (0, 1))
        return calls(*pair)

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Pharmacy(folder / "effects"), "shop")
    return planner_of(max_iterations=10_000), kernel


def working_life(store: str, folder: Path) -> None:
    """Drive whatever is due, until killed."""
    dbos._WATCH_SECONDS, dbos._GRACE_SECONDS = 0.2, 1.0

    async def work() -> None:
        async with open_runs(store, poll_seconds=0.05) as runs:
            await runs.work(*world(folder))

    asyncio.run(work())


async def died(lives: Lives, store: str, folder: Path) -> None:
    """Let a worker live until it dies."""
    assert await asyncio.to_thread(lives.live, working_life, store, folder) == -signal.SIGKILL


async def restarted(lives: Lives, store: str, folder: Path, opened: JournalStore, workers: int) -> None:
    """Let workers live, each started anew when it dies, until the poison is set aside and all others are answered."""
    with ExitStack() as stack:
        living: list[Any] = []
        async with asyncio.timeout(LIMIT_SECONDS):
            while await opened.count_runs(status="answered") < len(HEALTHY):
                if await opened.count_runs(status="quarantined"):
                    (folder / "closed").touch()
                living = [process for process in living if process.is_alive()]
                while len(living) < workers:
                    process = lives.begin(working_life, store, folder)
                    stack.callback(process.kill)
                    living.append(process)
                await asyncio.sleep(0.05)


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_poisonous_call_is_set_aside_and_harms_no_run_beside_it(
    workers: int, lives: Lives, store: str, tmp_path: Path
) -> None:
    """After the third death it is in quarantine, by name; no call of the busy runs beside it ever was in doubt."""
    async with opened_store(store) as opened:
        assert await opened.create("poison", POISON, owner=None, at=1.0)
        await died(lives, store, tmp_path)
        for name in HEALTHY:
            assert await opened.create(name, name, owner=None, at=2.0)
        await restarted(lives, store, tmp_path, opened, workers)

        record = await opened.record("poison")
        assert (record.status, record.deaths, record.owner, record.wake_at) == ("quarantined", 3, None, None)
        place = "while it was driven, in the call shop-poison (drink)."
        assert record.problem == f"Its worker's process ended 3 times {place}"
        sold = Counter(effects_in(tmp_path / "effects"))
        assert sold.pop("poison") == 3
        assert set(sold.values()) == {1}
        for name in HEALTHY:
            facts = (await opened.load(name)).facts
            started = [fact.call_id for fact in facts if isinstance(fact, CallStarted)]
            assert started.__len__() == len(set(started)) == sum(isinstance(fact, CallFinished) for fact in facts)


async def test_what_its_function_declares_changes_nothing(lives: Lives, store: str, tmp_path: Path) -> None:
    """A call that asks a person before it runs again is counted, too, however often the person says yes."""
    async with opened_store(store) as opened:
        assert await opened.create("venom", "venom", owner=None, at=1.0)
        async with asyncio.timeout(LIMIT_SECONDS):
            while (record := await opened.record("venom")).status != "quarantined":
                process = lives.begin(working_life, store, tmp_path)
                while process.is_alive() and (await opened.record("venom")).status != "quarantined":
                    await approve(store)
                    await asyncio.sleep(0.05)
                process.kill()
                process.join()
    assert record.deaths == 3
    assert effects_in(tmp_path / "effects") == ["venom"] * 3


async def approve(store: str) -> None:
    """Approve what waits, also where it is in doubt."""
    from planner_ext import Approve
    from planner_ext.durable import Approvals

    async with Approvals.connect(store) as approvals:
        for item in await approvals.pending():
            await approvals.decide(item.id, Approve(by="ann"))
