"""A run that ends its worker's process again and again is set aside, and does no harm to the runs beside it."""

import asyncio
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Approve
from planner_ext.core.facts import CallFinished, CallStarted, Fact
from planner_ext.durable import Approvals, RunFencedError, Runs, effect, worker
from planner_ext.durable import driven as driven_runs
from planner_ext.durable.driven import DrivenRuns, DrivenStore
from planner_ext.durable.store import JournalStore, opened_store
from planner_ext.errors import PlannerInvalidConfigurationError, RunNotAnsweredError
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.durable import (
    GOAL,
    PAY,
    decide_all,
    effects_in,
    open_runs,
    planner_of,
    run_life,
    turn,
)
from support.durable import world as shop
from support.processes import Lives

LIMIT_SECONDS = 120
HEALTHY = [f"healthy-{number}" for number in range(5)]
POISON = "Take the poison."


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
        goal = next(
            str(message["content"])
            for message in request.messages
            if message["role"] == "user"
        )
        number = turn(request)
        if goal == POISON:
            return call("shop-poison", id="drink")
        if goal == "venom":
            return call("shop-venom", id="bite")
        if (folder / "closed").exists():
            return say("Closed.")
        pair = (
            call(
                "shop-sell",
                {"run": goal, "number": 2 * number + each},
                id=f"{number}-{each}",
            )
            for each in (0, 1)
        )
        return calls(*pair)

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Pharmacy(folder / "effects"), "shop")
    return planner_of(max_iterations=10_000), kernel


def working_life(store: str, folder: Path, worker_id: str | None = None) -> None:
    """Drive due runs, until killed."""

    async def work() -> None:
        async with open_runs(store, worker_id=worker_id, poll_seconds=0.05) as runs:
            await runs.work(*world(folder))

    asyncio.run(work())


class Unstored:
    """A writer that stores nothing."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        """Store nothing."""


def driving(driven: DrivenRuns, run_id: str) -> DrivenStore:
    """Drive a run whose facts are stored nowhere."""
    return DrivenStore(cast("Any", Unstored(run_id)), driven)


async def started(store: DrivenStore, index: int) -> None:
    """Start a call of a run."""
    place: Any = {
        "iteration": 0,
        "index": index,
        "call_id": str(index),
        "function": "f",
    }
    await store.append("", 0, [CallStarted(**place, at=1.0)])


async def ended(store: DrivenStore, index: int) -> None:
    """End a call of a run."""
    place: Any = {
        "iteration": 0,
        "index": index,
        "call_id": str(index),
        "function": "f",
    }
    await store.append("", 0, [CallFinished(**place, outcome="ok", result="", at=1.0)])


async def died(
    lives: Lives, store: str, folder: Path, worker_id: str | None = None
) -> None:
    """Let a worker live until it dies."""
    assert (
        await asyncio.to_thread(lives.live, working_life, store, folder, worker_id)
        == -signal.SIGKILL
    )


async def restarted(
    lives: Lives, store: str, folder: Path, opened: JournalStore, workers: int
) -> None:
    """Let workers live, each started again when it dies, until the poison is set aside and all others are answered.

    The poison is retried when the others are busy.
    """
    retry = "UPDATE planner_runs SET wake_at = :at WHERE run_id = 'poison'"
    await opened.database.transact((retry, {"at": time.time() + 3600}))
    with ExitStack() as stack:
        living: list[Any] = []
        async with asyncio.timeout(LIMIT_SECONDS):
            while await opened.count_runs(status="answered") < len(HEALTHY):
                if len(effects_in(folder / "effects")) > 2 * len(HEALTHY):
                    await opened.database.transact(
                        (
                            f"{retry} AND wake_at > :now",
                            {"at": 1.0, "now": time.time() + 600},
                        )
                    )
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
        assert (record.status, record.deaths, record.owner, record.wake_at) == (
            "quarantined",
            3,
            None,
            None,
        )
        place = "while it was driven, in the call shop-poison (drink)."
        assert record.problem == f"Its worker's process ended 3 times {place}"
        sold = Counter(effects_in(tmp_path / "effects"))
        assert sold.pop("poison") == 3
        assert set(sold.values()) == {1}
        for name in HEALTHY:
            facts = (await opened.load(name)).facts
            begun = [fact.call_id for fact in facts if isinstance(fact, CallStarted)]
            ends = sum(isinstance(fact, CallFinished) for fact in facts)
            assert len(begun) == len(set(begun)) == ends


class Antidote(Pharmacy):
    """Ends no process."""

    @effect("idempotent")
    @kernel_function(description="Ends the process, and may run again.")
    def poison(self) -> None:
        pass


async def test_the_first_death_in_a_call_is_logged_with_those_that_quarantine(
    lives: Lives, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says three from the first one on, as the guide does."""
    store = str(tmp_path / "runs.db")
    async with opened_store(store) as opened:
        assert await opened.create("poison", POISON, owner=None, at=1.0)
    await died(lives, store, tmp_path, "w1")
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion([say("Fine.")]))
    kernel.add_plugin(Antidote(tmp_path / "effects"), "shop")
    async with open_runs(store) as runs:
        (handle,) = await runs.recover(planner_of(), kernel)
        assert (await handle.result()).status == "answered"
    line = "run poison taken over: worker w1 is gone; death 1, quarantine at 3"
    assert line in caplog.messages


async def test_the_deaths_of_a_worker_that_keeps_its_name_are_counted(
    lives: Lives, tmp_path: Path
) -> None:
    """A service that is started again under the name it had is another life: after three the run is set aside."""
    store = str(tmp_path / "runs.db")
    async with opened_store(store) as opened:
        assert await opened.create("poison", POISON, owner=None, at=1.0)
        for _ in range(3):
            await died(lives, store, tmp_path, "service")
        async with open_runs(store, worker_id="service") as runs:
            assert await runs.recover(*world(tmp_path)) == []
        assert ((record := await opened.record("poison")).status, record.deaths) == (
            "quarantined",
            3,
        )


async def test_what_its_function_declares_changes_nothing(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """A call that asks a person before it runs again is counted, too, however often the person says yes."""
    async with opened_store(store) as opened:
        assert await opened.create("venom", "venom", owner=None, at=1.0)
        async with asyncio.timeout(LIMIT_SECONDS):
            while (record := await opened.record("venom")).status != "quarantined":
                process = lives.begin(working_life, store, tmp_path)
                while (
                    process.is_alive()
                    and (await opened.record("venom")).status != "quarantined"
                ):
                    async with Approvals.connect(
                        store
                    ) as approvals:  # also what is in doubt
                        for item in await approvals.pending():
                            await approvals.decide(item.id, Approve(by="ann"))
                    await asyncio.sleep(0.05)
                process.kill()
                process.join()
    assert record.deaths == 3
    assert effects_in(tmp_path / "effects") == ["venom"] * 3


async def test_a_quarantined_run_is_driven_by_none_and_can_be_resumed(
    store: str, tmp_path: Path
) -> None:
    """Its next handle says why it is set aside; resumed, nothing is counted against it, and its decision is taken."""
    planner, kernel = shop(tmp_path / "effects", [PAY, say("Paid.")])
    async with (
        open_runs(store, poll_seconds=0.02, max_deaths=1) as runs,
        opened_store(store) as opened,
    ):
        waiting = await runs.start(planner, kernel, GOAL, run_id="r")
        assert (await waiting.result()).status == "paused"
        await decide_all(store)
        assert await opened.claim("r", "gone", seen=None)
        assert await runs.recover(planner, kernel) == []
        with pytest.raises(
            RunNotAnsweredError,
            match=r"Run 'r' is in quarantine: Its worker's process ended 1 times",
        ):
            await waiting.result()
        assert (
            await (await runs.resume("r", planner, kernel)).result()
        ).status == "answered"
        (record,) = await runs.list()
        assert (record.deaths, record.problem) == (0, "")
    assert effects_in(tmp_path / "effects") == ["pay 5"]


class Crowd:
    """A function that may run again, and returns once several calls of it run at once.

    Args:
        effects: The file that gets a line of each call.
        size: How many.
    """

    def __init__(self, effects: Path, size: float) -> None:
        self._effects = effects
        self._size = size
        self._calls = 0
        self._full = asyncio.Event()

    @effect("idempotent")
    @kernel_function(description="Waits for the others.")
    async def wait(self) -> str:
        with self._effects.open("a") as file:
            file.write("wait\n")
        self._calls += 1
        if self._calls >= self._size:
            self._full.set()
        await self._full.wait()
        return "done"


def crowd(effects: Path, size: float) -> tuple[Any, Kernel]:
    """Make a planner and a kernel with one call a run."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        return [call("shop-wait", id="wait"), say("Done.")][turn(request)]

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Crowd(effects, size), "shop")
    return planner_of(), kernel


def crowded_life(store: str, effects: Path) -> None:
    """Drive due runs, whose calls never return."""

    async def work() -> None:
        async with open_runs(store, poll_seconds=0.02) as runs:
            await runs.work(*crowd(effects, math.inf))

    asyncio.run(work())


async def killed_in_calls(lives: Lives, store: str, folder: Path, kills: int) -> None:
    """Kill the worker of three runs so often while all of them are in a call."""
    async with opened_store(store) as opened:
        for number in range(3):
            assert await opened.create(f"r{number}", GOAL, owner=None, at=1.0)
    for _ in range(kills):
        await killed_after(lives, store, folder / "effects", 3)


async def killed_after(lives: Lives, store: str, effects: Path, calls: int) -> None:
    """Kill a worker of the three runs once it has begun so many calls."""
    before = len(effects_in(effects))
    process = lives.begin(crowded_life, store, effects)
    async with asyncio.timeout(LIMIT_SECONDS):
        while len(effects_in(effects)) < before + calls:  # noqa: ASYNC110  (only a file tells)
            await asyncio.sleep(0.02)
    process.kill()
    process.join()


async def answered_again(store: str, app: tuple[Any, Kernel], **options: Any) -> int:
    """Let a worker answer the three runs; return the deaths of each."""
    async with (
        open_runs(store, poll_seconds=0.02, **options) as runs,
        asyncio.timeout(LIMIT_SECONDS / 4),
    ):
        work = asyncio.create_task(runs.work(*app))
        while await runs.count(status="answered") < 3:  # noqa: ASYNC110  (the worker has no handle)
            await asyncio.sleep(0.02)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        (deaths,) = {record.deaths for record in await runs.list()}
        return deaths


async def test_runs_that_were_in_calls_together_continue_together(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """Two kills of their worker say nothing of any of them: none waits until the others have ended."""
    await killed_in_calls(lives, store, tmp_path, 2)
    assert await answered_again(store, crowd(tmp_path / "effects", 3)) == 2


async def test_a_death_of_several_sets_none_of_them_aside(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """As often as would set one of them aside: each is driven alone then, and shows that it is innocent."""
    await killed_in_calls(lives, store, tmp_path, 2)
    app = crowd(tmp_path / "effects", 1)
    assert await answered_again(store, app, max_deaths=2) == 2


async def test_the_last_of_those_that_died_together_is_not_set_aside(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """Two end two more workers, each alone; the third was alone in none, whoever took the others."""
    await killed_in_calls(lives, store, tmp_path, 3)
    effects = tmp_path / "effects"
    for _ in range(2):
        await killed_after(lives, store, effects, 1)
    async with open_runs(store, poll_seconds=0.02) as runs:
        work = asyncio.create_task(runs.work(*crowd(effects, 1)))
        async with asyncio.timeout(LIMIT_SECONDS / 4):
            while any(one.unfinished for one in await runs.list()):  # noqa: ASYNC110  (the worker has no handle)
                await asyncio.sleep(0.02)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        ends = sorted(one.status for one in await runs.list())
    assert ends == ["answered", "quarantined", "quarantined"]


async def died_in_requests(store: str, deaths: int, *names: str) -> None:
    """Let the worker of runs die in a request, for the last of so many times."""
    async with opened_store(store) as opened:
        for name in names:
            assert await opened.create(name, GOAL, owner=None, at=1.0)
            assert await opened.claim(name, "gone", seen=None, counts=(deaths - 1, 0))


async def test_whoever_died_in_a_request_runs_in_parallel_again(
    store: str, tmp_path: Path
) -> None:
    """After two kills thirty runs are driven at once: which of them was the cause, if any, is not known."""
    names = [f"r{number}" for number in range(30)]
    await died_in_requests(store, 2, *names)
    planner, kernel = shop(tmp_path / "effects", lambda _: say("Done."))
    async with open_runs(store) as runs:
        handles = await runs.recover(planner, kernel)
        assert {handle.run_id for handle in handles} == {*names}
        results = await asyncio.gather(*(handle.result() for handle in handles))
        assert {result.status for result in results} == {"answered"}
        assert {record.deaths for record in await runs.list()} == {2}


async def test_a_run_that_records_nothing_between_deaths_is_put_back_and_then_set_aside(
    store: str, tmp_path: Path
) -> None:
    """It waits for a random time, so that the others continue; at the square of the limit it is in quarantine."""
    await died_in_requests(store, 8, "suspect")
    await died_in_requests(store, 9, "poison")
    planner, kernel = shop(tmp_path / "effects", lambda _: say("Done."))
    async with open_runs(store) as runs:
        assert await runs.recover(planner, kernel) == []
        records = {record.run_id: record for record in await runs.list()}
        suspect, poison = records["suspect"], records["poison"]
        assert (suspect.status, suspect.deaths, suspect.owner) == ("running", 8, None)
        assert suspect.wake_at is not None
        assert suspect.wake_at <= time.time() + 300
        assert (poison.status, poison.deaths) == ("quarantined", 9)
        assert poison.problem.endswith("in a request, or beside another run's call.")


async def test_deaths_before_a_call_began_do_not_count_against_it(
    lives: Lives, store: str, tmp_path: Path
) -> None:
    """A run that died with its reply and no call begun is not set aside at its first death in a call."""
    effects = tmp_path / "effects"
    for point in ("after_model_saved", "after_intent"):
        killed = lives.live(
            run_life, store, effects, "r", 0.0, PLANNER_EXT_CRASH_AT=point
        )
        assert killed == -signal.SIGKILL
    async with open_runs(store, poll_seconds=0.02, max_deaths=2) as runs:
        waiting = await runs.start(*shop(effects), GOAL, run_id="r")
        assert (await waiting.result()).status == "paused"
        (record,) = await runs.list()
    assert record.deaths == 1


def short_life(store: str, effects: Path) -> None:
    """Take the run that is due, and die before anything of it is recorded."""

    def die(_: str) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    async def live() -> None:
        async with open_runs(store, poll_seconds=0.02) as runs:
            await runs.work(*shop(effects), arguments_for=die)

    asyncio.run(live())


@pytest.mark.parametrize(("others", "status"), [(1, "paused"), (3, "quarantined")])
async def test_deaths_before_a_call_is_begun_again_do_not_count_against_it(
    others: int, status: str, lives: Lives, store: str, tmp_path: Path
) -> None:
    """One death was in the call; the next workers recorded nothing, which sets it aside at the square of the limit."""
    effects = tmp_path / "effects"
    point = {"PLANNER_EXT_CRASH_AT": "after_intent"}
    deaths = [lives.live(run_life, store, effects, "r", 0.0, **point)]
    deaths += [lives.live(short_life, store, effects) for _ in range(others)]
    assert {*deaths} == {-signal.SIGKILL}
    async with (
        open_runs(store, poll_seconds=0.02, max_deaths=2) as runs,
        asyncio.timeout(LIMIT_SECONDS),
    ):
        runs.drive_with(*shop(effects))
        while not (await runs.list(status=status)):
            await runs.recover(*shop(effects))
            await asyncio.sleep(0.02)
        (record,) = await runs.list()
    assert record.deaths == 1 + others


async def test_a_run_is_not_taken_from_the_next_worker_of_a_dead_ones_name(
    lives: Lives, tmp_path: Path
) -> None:
    """Whoever found the owner dead, and then waited for the calls of others, claims that owner's run alone."""
    path, effects = tmp_path / "runs.db", tmp_path / "effects"
    killed = lives.live(
        run_life, path, effects, "r", 0.0, "b", PLANNER_EXT_CRASH_AT="after_intent"
    )
    assert killed == -signal.SIGKILL
    async with Runs.sqlite(path, worker_id="a") as waits:
        claims = waits._pool.claims
        examined = await claims.examine_or_quarantine((await waits.list())[0])
        assert examined is not None
        async with Runs.sqlite(path, worker_id="b") as lives_now:
            (earlier,) = await lives_now.list()
            assert await claims.store.claim("r", "b", seen=earlier.owner)
            assert await claims.dead() == set()
            assert not await claims.take(examined)
            assert not await claims._park(examined, status="running", problem="")
            assert (await waits.list())[0].owner == "b"


async def test_a_run_waits_to_be_driven_alone_and_keeps_others_from_starting_calls() -> (
    None
):
    """It is alone when the calls of others have ended, and until it has recorded a reply; its own batch is parallel."""
    driven = DrivenRuns()
    async with driving(driven, "a") as a, driving(driven, "b") as b:
        await started(a, 0)
        alone = asyncio.create_task(driven.alone("b", 30))
        await asyncio.sleep(0)
        with pytest.raises(
            asyncio.CancelledError
        ):  # of the same batch: the engine starts it again
            await started(a, 1)
        assert not alone.done()
        await ended(a, 0)
        assert await alone
        await started(b, 0)
        await started(b, 1)
        later = asyncio.create_task(started(a, 2))
        await ended(b, 1)
        await later
        assert (len(a.calls), len(b.calls), driven.is_taken) == (1, 1, False)


async def test_a_call_that_hangs_keeps_neither_side_waiting_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who wants to be alone gives up after a while, and who is alone is so for a while."""
    monkeypatch.setattr(driven_runs, "_LONGEST_SECONDS", 0.05)
    driven = DrivenRuns()
    async with driving(driven, "a") as a, driving(driven, "b") as b:
        await started(a, 0)
        assert not await driven.alone("b", 0.05)
        await started(b, 0)
        await ended(b, 0)
        async with driving(driven, "c") as c:
            assert not await driven.alone("c", 0.05)
            await ended(a, 0)
            assert await driven.alone("c", 30)
            await started(c, 0)
            await started(a, 1)
    assert await driven.alone("d", 30)
    driven.together("d")
    async with driving(driven, "e") as e:
        await started(e, 0)


async def test_a_run_that_cannot_be_driven_alone_is_put_back(
    lives: Lives, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a call that hangs it is not driven, and due again later; its death is counted once."""
    monkeypatch.setattr(worker, "_ALONE_SECONDS", 0.2)
    path, effects = tmp_path / "runs.db", tmp_path / "effects"
    killed = lives.live(
        run_life, path, effects, "r", 0.0, PLANNER_EXT_CRASH_AT="after_intent"
    )
    assert killed == -signal.SIGKILL
    async with (
        Runs.sqlite(path, poll_seconds=0.02) as runs,
        driving(runs._pool.runner.driven, "busy") as busy,
    ):
        await started(busy, 0)
        (handle,) = await runs.recover(*shop(effects))
        with pytest.raises(RunFencedError, match="left to another worker, or to later"):
            await handle.result()
        (record,) = await runs.list()
        assert (record.deaths, record.owner, record.status) == (1, None, "running")
        assert record.wake_at is not None
        await ended(busy, 0)
        waiting = await runs.start(*shop(effects), GOAL, run_id="r")
        assert (await waiting.result()).status == "paused"


@pytest.mark.parametrize("deaths", [0, True, "3"])
async def test_a_number_of_deaths_that_means_nothing_is_refused_by_name(
    deaths: Any, tmp_path: Path
) -> None:
    """Before a file is made for it."""
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match="max_deaths must be a whole number, 1 or more",
    ):
        async with Runs.sqlite(tmp_path / "runs.db", max_deaths=deaths):
            pass
