"""One call, one start: what happens where a filter asks for a function more than once."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.durable import Runs, effect
from planner_ext.events import CallStarted
from planner_ext.iteration import ToolExecution
from planner_ext.sk.functions.execution import NotRunAgainError
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.narrow import present
from support.stock import add_filter, first_result
from support.values import each_of

KINDS = ["auto_function_invocation", "function_invocation"]
each_kind = pytest.mark.parametrize("kind", KINDS)
Next = Callable[[Any], Awaitable[None]]


class Pay:
    """Three payments; the one that may run again runs as often as it is allowed to. The first ``failing`` fail."""

    def __init__(self, failing: int = 0) -> None:
        self.ran: list[str] = []
        self.failing = failing
        self.started = asyncio.Event()
        self.hangs = False

    async def _pay(self, what: str) -> str:
        self.ran.append(what)
        self.started.set()
        if self.hangs:
            await asyncio.Event().wait()
        if len(self.ran) <= self.failing:
            raise RuntimeError("no connection")
        return f"paid {len(self.ran)}"

    @kernel_function
    async def once(self, amount: int = 1) -> str:
        return await self._pay("once")

    @effect("idempotent")
    @kernel_function
    async def again(self, amount: int = 1) -> str:
        return await self._pay("again")

    @effect("keyed")
    @kernel_function
    async def keyed(self, idempotency_key: str, amount: int = 1) -> str:
        return await self._pay(idempotency_key.rsplit("/", 1)[1])


async def twice(context: Any, next: Next) -> None:
    await next(context)
    await next(context)


async def together(context: Any, next: Next) -> None:
    await asyncio.gather(next(context), next(context))


async def retry(context: Any, next: Next) -> None:
    for attempt in range(3):
        try:
            return await next(context)
        except Exception:
            if attempt == 2:
                raise
    return None


async def ask(
    pay: Pay, reply: Any, *filters: tuple[Any, Any], **options: Any
) -> FunctionCallingStepwisePlannerResult:
    kernel, service = Kernel(), ScriptedChatCompletion([reply, say("Done.")])
    kernel.add_service(service)
    kernel.add_plugin(pay, "pay")
    for kind, one in filters:
        kernel.add_filter(kind, one)
    given = FunctionCallingStepwisePlannerOptions(plan=False, **options)
    return await FunctionCallingStepwisePlanner("scripted", given).invoke(
        kernel, "Pay."
    )


def read(result: FunctionCallingStepwisePlannerResult) -> list[str]:
    return [
        str(first_result(one).result)
        for one in present(result.chat_history).messages
        if one.role == "tool"
    ]


def approves(call: Any) -> Any:
    return Approve()


@each_kind
@each_of("approved", [True, False])
@each_of("filter", [twice, together], ids=lambda one: one.__name__)
async def test_a_second_next_runs_nothing(
    filter: Any, approved: bool, kind: str
) -> None:
    """It gives the result of the first, approved or not; one call is charged."""
    pay = Pay()
    result = await ask(
        pay,
        call("pay-once", {}),
        (kind, filter),
        interceptors=[approves] if approved else [],
    )
    assert pay.ran == ["once"]
    assert read(result) == ["paid 1"]
    assert result.tool_calls == 1


@each_kind
@each_of(("name", "ran"), [("again", ["again"] * 2), ("keyed", ["call_1"] * 2)])
@each_of("filter", [twice, together], ids=lambda one: one.__name__)
async def test_what_may_run_again_runs_and_is_charged(
    filter: Any, name: str, ran: list[str], kind: str
) -> None:
    """Each start is a fact of the run and counts; a keyed function has the same key each time."""
    pay = Pay()
    result = await ask(
        pay, call(f"pay-{name}", {}), (kind, filter), interceptors=[approves]
    )
    assert (pay.ran, result.tool_calls) == (ran, 2)
    assert [one.attempt for one in result.facts if isinstance(one, CallStarted)] == [
        1,
        2,
    ]


@each_of(
    "budget",
    [
        Budget(max_tool_calls=1),
        Budget(max_calls_per_function={"pay-again": 1}),
        Budget(max_repeated_calls=1),
    ],
    ids=["calls", "per-function", "repeated"],
)
@each_kind
@each_of("filter", [twice, together], ids=lambda one: one.__name__)
async def test_a_start_beyond_a_limit_does_not_happen(
    filter: Any, kind: str, budget: Budget
) -> None:
    """The limit holds exactly, also for what may run again; the model reads the last result."""
    pay = Pay()
    result = await ask(pay, call("pay-again", {}), (kind, filter), budget=budget)
    assert pay.ran == ["again"]
    assert read(result) == ["paid 1"]
    assert result.tool_calls == 1


@each_of("batch_over_limit", ["reject_batch", "fill_remaining"])
@each_of("max_concurrency", [1, None])
async def test_the_calls_of_a_batch_come_before_a_second_start(
    batch_over_limit: Any, max_concurrency: Any
) -> None:
    """A filter that runs the first call again takes nothing from the second, which was let in with it."""
    pay = Pay()
    budget = Budget(max_tool_calls=2, batch_over_limit=batch_over_limit)
    batch = calls(call("pay-again", {"amount": 1}), call("pay-once", {"amount": 2}))
    execution = ToolExecution(max_concurrency=max_concurrency)
    result = await ask(
        pay, batch, (KINDS[0], twice), budget=budget, execution=execution
    )
    assert (sorted(pay.ran), result.tool_calls) == (["again", "once"], 2)


async def test_a_retrying_filter_runs_again_only_what_is_declared_repeatable() -> None:
    """A failed function of effect once fails again without running; an idempotent one is tried, and each try counts."""
    pay = Pay(failing=2)
    result = await ask(pay, call("pay-once", {}), (KINDS[1], retry))
    assert pay.ran == ["once"]
    assert read(result) == ["The function pay-once failed."]
    assert result.tool_calls == 1
    pay = Pay(failing=2)
    result = await ask(pay, call("pay-again", {}), (KINDS[1], retry))
    assert len(pay.ran) == 3
    assert read(result) == ["paid 3"]
    assert result.tool_calls == 3
    pay = Pay(failing=9)
    result = await ask(
        pay, call("pay-again", {}), (KINDS[1], retry), budget=Budget(max_tool_calls=2)
    )
    assert len(pay.ran) == 2
    assert read(result) == ["The function pay-again failed."]
    assert result.tool_calls == 2


@each_kind
async def test_a_next_that_is_kept_runs_nothing_later(kind: str) -> None:
    """After the call has its result a filter cannot run it, neither again nor for the first time."""
    for filtering in (True, False):
        kept: list[Any] = []

        async def keep(
            context: Any,
            next: Next,
            filtering: bool = filtering,
            kept: list[Any] = kept,
        ) -> None:
            kept.append(lambda: next(context))
            if filtering:
                await next(context)

        pay = Pay()
        await ask(pay, call("pay-again", {}), (kind, keep))
        count = len(pay.ran)
        if kind == KINDS[0]:
            await kept[0]()
        else:
            with pytest.raises(NotRunAgainError, match="has ended"):
                await kept[0]()
        assert len(pay.ran) == count == int(filtering)


async def test_a_filter_that_loses_patience_does_not_run_it_twice() -> None:
    """Cancelled by a filter while it ran, its effect is not known: the model reads that, and nothing runs again."""
    pay = Pay()
    pay.hangs = True

    async def impatient(context: Any, next: Next) -> None:
        first = asyncio.ensure_future(next(context))
        await pay.started.wait()
        first.cancel()
        await asyncio.wait([first])
        await next(context)

    result = await ask(pay, call("pay-once", {}), (KINDS[1], impatient))
    assert (pay.ran, "its effect is not known" in read(result)[0]) == (["once"], True)


async def test_each_start_is_on_disk_before_it_happens(tmp_path: Path) -> None:
    """A kept run has its second start in the store when the function runs."""
    seen: list[int] = []
    path = tmp_path / "runs.db"

    class Looking(Pay):
        @effect("idempotent")
        @kernel_function
        async def again(self, amount: int = 1) -> str:
            facts = (await runs.load("r")).facts
            seen.append(sum(isinstance(fact, CallStarted) for fact in facts))
            return "paid"

    kernel, service = (
        Kernel(),
        ScriptedChatCompletion([call("pay-again", {}), say("Done.")]),
    )
    kernel.add_service(service)
    kernel.add_plugin(Looking(), "pay")
    add_filter(kernel, "function_invocation", twice)
    planner = FunctionCallingStepwisePlanner(
        "scripted", FunctionCallingStepwisePlannerOptions(plan=False)
    )
    async with Runs.sqlite(path) as runs:
        result = await (await runs.start(planner, kernel, "Pay.", run_id="r")).result()
    assert (seen, result.tool_calls) == ([1, 2], 2)


@each_kind
async def test_a_second_next_that_runs_nothing_is_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One approval is one start: the warning names the function, and the declaration that allows more."""
    await ask(Pay(), call("pay-once", {}), (kind, twice), interceptors=[approves])
    (warned,) = [
        one.getMessage() for one in caplog.records if one.levelname == "WARNING"
    ]
    assert "pay-once" in warned and '@effect("idempotent")' in warned


@each_kind
async def test_a_second_next_that_a_limit_forbids_names_the_limit(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A function that may run again does not beyond the budget: the warning does not advise to declare it."""
    await ask(
        Pay(), call("pay-again", {}), (kind, twice), budget=Budget(max_tool_calls=1)
    )
    (warned,) = [
        one.getMessage() for one in caplog.records if one.levelname == "WARNING"
    ]
    assert "budget" in warned and "@effect" not in warned


@each_kind
async def test_a_second_next_that_runs_is_not_logged(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the function's effect allows it there is nothing to warn of."""
    await ask(Pay(), call("pay-again", {}), (kind, twice))
    assert [one for one in caplog.records if one.levelname == "WARNING"] == []
