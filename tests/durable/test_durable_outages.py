"""An endpoint that is busy, failing or not reached is waited for: no try is used up, and no refusal charged."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.exceptions.kernel_exceptions import KernelInvokeException
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, PlannerPlugin
from planner_ext.budgets import BudgetStore, SharedBudget
from planner_ext.core.errors import PlannerExtError
from planner_ext.core.facts import CallFinished, ModelReplied, RequestFailed
from planner_ext.durable import RetryPolicy, RunRecord, Runs, RunsClient
from planner_ext.durable.options import is_final
from planner_ext.durable.outages import Outages
from planner_ext.errors import PlannerInvalidConfigurationError, ServiceCallError
from planner_ext.testing import (
    Script,
    ScriptedAnswer,
    ScriptedFault,
    ScriptedOpenAIServer,
    ScriptedRequest,
    call,
    say,
)
from support.durable import GOAL, SetClock, Shop, open_runs, planner_of, turn
from support.planner import Clock
from support.values import each_of

SOON = RetryPolicy(first_delay=0.02, max_delay=0.05, attempts=2)
LIMIT_SECONDS = 60
BUSY = ScriptedFault(status=503)
BROKEN = ScriptedFault(drop=True)


@asynccontextmanager
async def kernel_at(url: str, folder: Path) -> AsyncIterator[Kernel]:
    """Enter a kernel whose model is at an address, and whose client repeats no request."""
    async with AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
        kernel = Kernel()
        kernel.add_service(
            OpenAIChatCompletion(ai_model_id="scripted", async_client=client)
        )
        kernel.add_plugin(Shop(folder / "effects"), "shop")
        yield kernel


async def worked(
    store: str | Path, folder: Path, script: Script, *, runs: int = 1, **options: Any
) -> tuple[list[RunRecord], ScriptedOpenAIServer]:
    """Let one worker drive runs until they are at rest; each may be tried once after a fault of its own."""
    with ScriptedOpenAIServer(script) as server:
        async with (
            kernel_at(server.url, folder) as kernel,
            open_runs(store, poll_seconds=0.01, retry=SOON) as opened,
        ):
            for number in range(runs):
                await opened.submit(GOAL, run_id=f"r{number}")
            work = asyncio.create_task(opened.work(planner_of(**options), kernel))
            async with asyncio.timeout(LIMIT_SECONDS):
                while any(one.unfinished for one in await opened.list()):  # noqa: ASYNC110  (the store tells)
                    await asyncio.sleep(0.02)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            return await opened.list(), server


@each_of("status", [408, 429, 503])
async def test_a_refusal_uses_up_no_try_and_no_trip(
    status: int, tmp_path: Path
) -> None:
    """A run with two tries is answered after any number of refusals, which its budget does not notice."""
    busy = [ScriptedFault(status=status)] * 3
    script = [*busy, call("shop-label", {"order": 1}, id="a"), *busy, say("Done.")]
    (record,), server = await worked(
        tmp_path / f"{status}.db", tmp_path, script, max_iterations=3
    )
    assert (record.status, record.iterations, record.retries) == ("answered", 2, 0)
    assert (record.problem, record.outage_at, record.wake_at) == ("", None, None)
    assert len(server.requests) == 8


@pytest.mark.parametrize("fault", [BUSY, ScriptedFault()])
async def test_a_run_that_waits_for_its_next_try_is_not_shown_at_work(
    fault: ScriptedFault, tmp_path: Path
) -> None:
    """Its timeline ends when it began to wait, and no request is under way, for its endpoint or after a fault."""
    with ScriptedOpenAIServer([fault]) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            open_runs(tmp_path / "runs.db", poll_seconds=60) as runs,
        ):
            handle = await runs.start(planner_of(), kernel, GOAL, run_id="r")
            with pytest.raises(PlannerExtError):
                await handle.result()
            stored = await runs.load("r")
            assert stored.record.wake_at is not None
            timeline = stored.timeline(now=stored.record.updated_at + 3600)
    assert timeline.until == stored.record.updated_at
    (iteration,) = timeline.iterations
    assert iteration.request.ended is not None


async def test_a_connection_that_breaks_after_sending_is_waited_for_and_charged(
    store: str, tmp_path: Path
) -> None:
    """The server may have processed it: two of these leave nothing of two trips."""
    (record,), server = await worked(
        store, tmp_path, [BROKEN, BUSY, BROKEN, say("Done.")], max_iterations=2
    )
    assert (record.status, record.iterations) == ("limit_reached", 2)
    assert len(server.requests) == 3


async def test_a_final_status_fails_at_once_and_is_not_charged(tmp_path: Path) -> None:
    """A key that is refused is no outage."""
    script = [ScriptedFault(status=401)]
    (record,), _ = await worked(tmp_path / "runs.db", tmp_path, script)
    assert (record.status, record.iterations) == ("failed", 0)


async def test_many_runs_do_not_knock(store: str, tmp_path: Path) -> None:
    """While an endpoint is out one request at a time tries it, whatever the number of runs; then all go on."""
    out = 8

    def answer(request: ScriptedRequest) -> ScriptedAnswer:
        return BUSY if request.index < out else say("Done.")

    records, server = await worked(store, tmp_path, answer, runs=30)
    assert {record.status for record in records} == {"answered"}
    assert len(server.requests) == out + 30


async def test_a_list_says_since_when_a_run_waits(store: str, tmp_path: Path) -> None:
    """So does its row, until a reply comes; what happened is in its journal, by kind."""
    with ScriptedOpenAIServer([]) as gone:
        address = gone.url
    clock = Clock()
    clock.seconds += 10.0  # 13:46:50; the store's clock goes on meanwhile
    retry = RetryPolicy(attempts=2)
    async with (
        kernel_at(address, tmp_path) as kernel,
        open_runs(store, clock=clock, retry=retry) as runs,
    ):
        with pytest.raises(ServiceCallError, match="No connection was made"):
            await (await runs.start(planner_of(), kernel, GOAL, run_id="r")).result()
        (record,) = await runs.list()
        assert record.status == "running"
        assert record.outage_at == pytest.approx(clock.now(), abs=10.0)
        since = r"the endpoint since 1970-01-12 13:46:\d\d UTC"
        assert re.fullmatch(since, record.waits_for)
        failed = [
            fact.failure
            for fact in (await runs.load("r")).facts
            if isinstance(fact, RequestFailed)
        ]
        assert failed == ["unsent"]


async def test_a_run_waits_for_hours_and_then_fails(tmp_path: Path) -> None:
    """All night with two tries; past the limit it is failed, with the fault that it had; resumed, it waits anew."""
    clock = Clock()
    retry = RetryPolicy(attempts=2, outage_seconds=36_000.0)
    tries = 0
    with ScriptedOpenAIServer(lambda _: BUSY) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            Runs.sqlite(tmp_path / "runs.db", clock=clock, retry=retry) as runs,
        ):
            runs.drive_with(planner_of(), kernel)
            await runs.submit(GOAL, run_id="r")
            begun = clock.now()
            really_begun = time.monotonic()
            while not (then := await runs.activate("r")).ended:
                assert then.seconds is not None
                clock.seconds += then.seconds
                # The store's clock goes on meanwhile, so some activations are early.
                tries += then.seconds > 1
            (record,) = await runs.list()
            assert then.status == record.status == "failed"
            really = time.monotonic() - really_begun
            assert clock.now() - begun == pytest.approx(36_000.0, abs=really)
            assert record.problem.startswith("ServiceCallError: ")
            assert (record.iterations, record.retries, record.outage_at) == (0, 0, None)
            assert 60 < tries < 400

            with pytest.raises(ServiceCallError):
                await (await runs.resume("r", planner_of(), kernel)).result()
            (record,) = await runs.list()
            assert record.status == "running"
            assert record.outage_at == pytest.approx(clock.now(), abs=10.0)


@each_of("hours", [-1, 1])
async def test_a_clock_that_was_set_shortens_and_prolongs_no_wait_for_an_endpoint(
    hours: int, store: str, tmp_path: Path
) -> None:
    """The worker that tries next has a clock that is wrong by an hour, and the run may wait for half of one."""
    real = time.time
    retry = RetryPolicy(first_delay=0.01, max_delay=0.02, outage_seconds=1800.0)
    with ScriptedOpenAIServer(lambda _: BUSY) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            open_runs(store, retry=retry, clock=SetClock()) as runs,
        ):
            name = f"r{hours}"
            runs.drive_with(planner_of(), kernel)
            await runs.submit(GOAL, run_id=name)
            await runs.activate(name)
            before = await runs._store.record(name)
            assert before.outage_at == pytest.approx(real(), abs=LIMIT_SECONDS)
            with pytest.MonkeyPatch.context() as clock:
                clock.setattr(time, "time", lambda: real() + hours * 3600.0)
                while len(server.requests) < 2:
                    await runs.activate(name)
            after = await runs._store.record(name)
    assert (after.status, after.outage_at) == ("running", before.outage_at)


@each_of("function", ["desk-reach_goal", "prompts-ask"])
async def test_a_run_inside_waits_for_its_endpoint(
    function: str, tmp_path: Path
) -> None:
    """The model is not told that the function failed: the run around waits, and continues; no refusal is charged."""
    inner = "Look it up."
    outages = [BUSY] * 3

    def answer(request: ScriptedRequest) -> ScriptedAnswer:
        first = str(request.messages[-1]["content"])
        if first == inner:
            return outages.pop() if outages else say("Found.")
        goal = {"goal": inner} if function == "desk-reach_goal" else {"input": inner}
        return [call(function, goal), say("Done.")][turn(request)]

    with ScriptedOpenAIServer(answer) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            open_runs(tmp_path / f"{function}.db", retry=SOON) as runs,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            kernel.add_plugin(PlannerPlugin(planner_of()), "desk")
            kernel.add_function("prompts", function_name="ask", prompt="{{$input}}")
            runs.drive_with(planner_of(), kernel)
            await runs.submit(GOAL, run_id="r")
            while not (then := await runs.activate("r")).ended:  # noqa: ASYNC110  (the run says when)
                await asyncio.sleep(then.seconds or 0.0)
            stored = await runs.load("r")
    assert (stored.record.status, stored.record.retries) == ("answered", 0)
    assert stored.record.iterations == 3
    assert [
        (fact.outcome, fact.result)
        for fact in stored.facts
        if isinstance(fact, CallFinished)
    ] == [("ok", "Found.")]


class Persistent:
    """Functions that ask a model until they have an answer, or give up."""

    @kernel_function
    async def ask(self, kernel: Kernel) -> str:
        for _ in range(50):
            with suppress(KernelInvokeException):
                return str(await kernel.invoke_prompt("Look it up."))
        return ""

    @kernel_function
    async def plan(self, kernel: Kernel) -> str:
        for _ in range(50):
            with suppress(PlannerExtError):
                return (await planner_of().invoke(kernel, "Look it up.")).final_answer
        return ""

    @kernel_function
    async def ask_two_at_once(self, kernel: Kernel) -> str:
        asking = [kernel.invoke_prompt("Look it up.") for _ in range(2)]
        await asyncio.gather(*asking, return_exceptions=True)
        return ""


async def refused_inside(function: str, refusals: int, folder: Path) -> list[Any]:
    """Refuse requests of a function.

    Return how its run ended, how many requests it made, and what the run and a shared budget were charged.
    """
    inside: list[ScriptedAnswer] = []

    def answer(request: ScriptedRequest) -> ScriptedAnswer:
        if "Look it up." in str(request.messages):
            is_refused = len(inside) < refusals
            inside.append(ScriptedFault(status=401) if is_refused else say("Found."))
            return inside[-1]
        return [call(f"code-{function}"), say("Done.")][turn(request)]

    budgets = BudgetStore.memory()
    shared = SharedBudget("all", store=budgets, max_iterations=4)
    with ScriptedOpenAIServer(answer) as server:
        async with (
            kernel_at(server.url, folder) as kernel,
            open_runs(folder / f"{function}{refusals}.db") as runs,
        ):
            kernel.add_plugin(Persistent(), "code")
            planner = planner_of(max_iterations=4, shared_budgets=[shared])
            result = await (await runs.start(planner, kernel, GOAL)).result()
    (used,) = await budgets.usage()
    assert result.final_answer == "Done."
    return [result.status, len(inside), result.iterations, used.iterations]


@each_of("function", ["ask", "plan"])
async def test_a_function_that_is_refused_once_is_charged_for_no_refusal(
    function: str, tmp_path: Path
) -> None:
    """Neither to the run, nor to a budget that it shares."""
    assert await refused_inside(function, 1, tmp_path) == ["answered", 2, 3, 3]


@each_of("function", ["ask", "plan"])
async def test_a_function_that_asks_for_ever_is_bounded_by_the_budget(
    function: str, tmp_path: Path
) -> None:
    """What it asks after a refusal is charged, also in a run of its own; one trip stays for the answer."""
    outcome = await refused_inside(function, 1000, tmp_path)
    assert outcome == ["limit_reached", 3, 4, 4]


async def test_refusals_that_were_under_way_together_are_free(tmp_path: Path) -> None:
    """An outage that meets the requests of one function at once uses up none of its budget."""
    outcome = await refused_inside("ask_two_at_once", 1000, tmp_path)
    assert outcome == ["answered", 2, 2, 2]


@each_of("on_limit", ["answer", "stop"])
async def test_a_deadline_ends_the_wait(on_limit: Any, tmp_path: Path) -> None:
    """At that second, and not at the next try, which may be an hour later."""
    clock = Clock()
    deadline = datetime.fromtimestamp(clock.now() + 60.0, UTC)
    budget = Budget(deadline=deadline, on_limit=on_limit)
    with ScriptedOpenAIServer(lambda _: BUSY) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            Runs.sqlite(tmp_path / f"{on_limit}.db", clock=clock) as runs,
        ):
            runs.drive_with(planner_of(clock=clock), kernel)
            await runs.submit(GOAL, run_id="r", budget=budget)
            while not (then := await runs.activate("r")).ended:
                assert then.seconds is not None
                clock.seconds += then.seconds
            (record,) = await runs.list()
    assert record.status == "limit_reached"
    assert clock.now() == pytest.approx(deadline.timestamp())


async def test_a_retry_by_another_process_is_tried_at_once(
    store: str, tmp_path: Path
) -> None:
    """A person says that the endpoint is back, to whichever process: the worker does not wait for its own next try."""
    hours = RetryPolicy(first_delay=3600.0, max_delay=3600.0, outage_seconds=0.1)
    with ScriptedOpenAIServer([BUSY, say("Done.")]) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            open_runs(store, poll_seconds=0.01, retry=hours) as runs,
            RunsClient.connect(store, poll_seconds=0.01) as elsewhere,
            asyncio.timeout(LIMIT_SECONDS),
        ):
            submitted = await runs.submit(GOAL, run_id="r")
            work = asyncio.create_task(runs.work(planner_of(), kernel))
            assert (await submitted.result()).status == "failed"
            assert len(server.requests) == 1
            assert await elsewhere.retry("r")
            assert (await submitted.result()).status == "answered"
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


async def test_a_policy_that_never_retries_waits_for_no_endpoint(
    tmp_path: Path,
) -> None:
    """``attempts=1`` fails the run at once."""
    retry = RetryPolicy(attempts=1)
    with ScriptedOpenAIServer([BUSY]) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            Runs.sqlite(tmp_path / "runs.db", retry=retry) as runs,
        ):
            with pytest.raises(ServiceCallError):
                await (await runs.start(planner_of(), kernel, GOAL)).result()
            assert (await runs.list())[0].status == "failed"
    with pytest.raises(PlannerInvalidConfigurationError, match="outage_seconds"):
        RetryPolicy(outage_seconds=0)


@each_of(
    ("headers", "least"),
    [
        ({"retry-after": "120"}, 120.0),
        ({"retry-after-ms": "90000"}, 90.0),
        ({"retry-after": "Fri, 01 Jan 2100 00:00:00 GMT"}, 3600.0),
        ({"retry-after": "soon"}, 1.0),
        ({"retry-after": "inf"}, 1.0),
        ({"retry-after": "1 Jan 2026 00:5955942359"}, 1.0),
    ],
)
async def test_retry_after_is_honoured(
    headers: dict[str, str], least: float, tmp_path: Path
) -> None:
    """In seconds, milliseconds or as a date; an endpoint that asks for more than an hour is tried each hour."""
    clock = Clock()
    path = tmp_path / f"{headers}.db"
    retry = RetryPolicy(outage_seconds=10_000.0)
    with ScriptedOpenAIServer([ScriptedFault(status=429, headers=headers)]) as server:
        async with (
            kernel_at(server.url, tmp_path) as kernel,
            Runs.sqlite(path, clock=clock, retry=retry) as runs,
        ):
            runs.drive_with(planner_of(), kernel)
            await runs.submit(GOAL, run_id="r")
            then = await runs.activate("r")
    assert then.seconds is not None
    assert least <= then.seconds <= least + 2.0


class OutError(ServiceCallError):
    """An endpoint is out."""

    outage = ("a", 0.0)


def refused(outages: Outages) -> bool:
    """Return whether a request to the endpoint would not be sent."""
    with outages.request("a") as problem:
        return bool(problem)


async def test_one_request_at_a_time_tries_an_endpoint_that_is_out() -> None:
    """Others are refused meanwhile, and before it is due; a try that breaks off, or a person, lets the next one try."""
    clock = Clock()
    outages = Outages(clock, RetryPolicy(first_delay=10.0))

    def failed() -> None:
        with pytest.raises(OutError), outages.request("a") as problem:
            assert not problem
            raise OutError("503")

    failed()
    assert refused(outages)
    clock.seconds += 20.0
    with pytest.raises(asyncio.CancelledError), outages.request("a"):
        assert refused(outages)
        raise asyncio.CancelledError
    failed()
    clock.seconds += 19.0
    assert refused(outages)
    clock.seconds += 11.0
    with outages.request("a") as problem:
        assert not problem
    assert not refused(outages)
    failed()
    outages.heed(1)  # by a person who revived a run before the endpoint was out
    outages.heed(1)
    assert refused(outages)
    outages.heed(2)
    assert not refused(outages)


class WeekError(ServiceCallError):
    """An endpoint asks not to be asked for a week."""

    outage = ("a", 7 * 86_400.0)


def test_a_week_of_retry_after_does_not_hold_back_a_worker() -> None:
    """A mistaken header, or a quota that somebody raises meanwhile, is found out within the hour."""
    clock = Clock()
    outages = Outages(clock, RetryPolicy())
    with pytest.raises(WeekError), outages.request("a"):
        raise WeekError("429")
    assert 3600.0 <= outages.delay("a", 0.0) <= 3601.0
    clock.seconds += 3599.0
    assert refused(outages)
    clock.seconds += 1.0
    assert not refused(outages)


async def test_requests_that_were_under_way_count_as_one_fault() -> None:
    """A hundred that fail together do not double the delay a hundred times."""
    clock = Clock()
    outages = Outages(clock, RetryPolicy(first_delay=1.0))
    waiting = [outages.request("a") for _ in range(100)]
    for one in waiting:
        one.__enter__()
    error = OutError("503")
    for one in waiting:
        assert not one.__exit__(OutError, error, None)
    clock.seconds += 2.0
    assert not refused(outages)


def shares(facts: Sequence[Any]) -> dict[str, int]:
    """Count the requests of a journal by how they ended."""
    ends = [
        fact.failure if isinstance(fact, RequestFailed) else "replied"
        for fact in facts
        if isinstance(fact, RequestFailed | ModelReplied)
    ]
    return {end: ends.count(end) for end in ends}


async def test_refusals_are_counted_apart(tmp_path: Path) -> None:
    """The journal says of each request whether it was refused, or may have been processed."""
    path = tmp_path / "runs.db"
    await worked(path, tmp_path, [BUSY, BUSY, BROKEN, say("Done.")])
    async with Runs.sqlite(path) as runs:
        counts = shares((await runs.load("r0")).facts)
    counts.pop("unsent", None)
    assert counts == {"refused": 2, "processed": 1, "replied": 1}


def test_an_outage_is_not_final() -> None:
    """So an application's own ``is_final`` decides before the wait."""
    assert not is_final(OutError("503"))
