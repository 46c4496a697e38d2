"""The service's other options: its clock, its observers, and how functions are run."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import Budget, FunctionInvokingChatCompletion
from planner_ext.core.facts import Fact
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.served import Answer, Tools
from support.stock import first_result

Ask = Callable[..., Awaitable[Answer]]

ADD = call("t-add", {"a": 1, "b": 2})


class ManualClock:
    """A clock whose time passes only in its own sleeps."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


async def test_iterations_keep_their_least_time(ask: Ask) -> None:
    """``min_iteration_time_ms`` is from start to start, on the given clock, and never before the first request."""
    clock = ManualClock()
    inner = ScriptedChatCompletion([ADD, ADD, say("Three.")])
    await ask(
        FunctionInvokingChatCompletion(inner, clock=clock, min_iteration_time_ms=500)
    )
    assert clock.slept == [0.5, 0.5]


async def test_by_default_nothing_waits(ask: Ask) -> None:
    """Without the option no time is spent waiting."""
    clock = ManualClock()
    await ask(
        FunctionInvokingChatCompletion(
            ScriptedChatCompletion([ADD, say("Three.")]), clock=clock
        )
    )
    assert clock.slept == []


async def test_observers_see_the_same_facts_plain_and_streamed(ask: Ask) -> None:
    """Observers, async or not, get each fact in order."""
    seen: list[str] = []
    other: list[str] = []

    async def watch(fact: Fact) -> None:
        other.append(fact.type)

    inner = ScriptedChatCompletion([calls(ADD, call("t-no")), say("Three.")])
    await ask(
        FunctionInvokingChatCompletion(
            inner, observers=[lambda fact: seen.append(fact.type), watch]
        )
    )
    assert seen == other
    assert seen == [
        "RunStarted",
        "ModelReplied",
        "CallDecided",
        "CallDecided",
        "CallStarted",
        "CallFinished",
        "IterationCompleted",
        "ModelReplied",
        "Ended",
    ]


async def test_an_observer_that_fails_changes_nothing(
    ask: Ask, caplog: pytest.LogCaptureFixture
) -> None:
    """What an observer raises is logged with its name; the run and the other observers continue."""
    seen: list[str] = []

    def broken_observer(fact: Fact) -> None:
        raise RuntimeError("no")

    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("Three.")]),
        observers=[broken_observer, lambda fact: seen.append(fact.type)],
    )
    with caplog.at_level(logging.ERROR, "planner_ext"):
        assert (await ask(service)).text == "Three."
    assert seen[-1] == "Ended"
    assert any("broken_observer" in record.getMessage() for record in caplog.records)


async def test_observers_get_the_started_call_before_the_function_runs(
    ask: Ask, tools: Tools
) -> None:
    """An observer sees ``CallStarted`` before the function's effect, and ``CallFinished`` after it."""
    seen: list[tuple[str, int]] = []
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([ADD, say("Three.")]),
        observers=[lambda fact: seen.append((fact.type, len(tools.seen)))],
    )
    await ask(service)
    assert ("CallStarted", 0) in seen
    assert ("CallFinished", 1) in seen


@pytest.mark.parametrize(("limit", "most"), [(None, 4), (2, 2), (1, 1)])
async def test_only_so_many_functions_run_at_once(
    ask: Ask, limit: int | None, most: int
) -> None:
    """``max_concurrency`` caps the functions of a batch that run together; all run, and 1 keeps call order."""
    running, highest, order = 0, 0, []

    class Busy:
        @kernel_function
        async def work(self, n: int) -> int:
            nonlocal running, highest
            order.append(n)
            running += 1
            highest = max(highest, running)
            for _ in range(5):
                await asyncio.sleep(0)
            running -= 1
            return n

    kernel = Kernel()
    kernel.add_plugin(Busy(), "b")
    batch = calls(*(call("b-work", {"n": n}) for n in range(4)))
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([batch, say("Done.")]),
        execution=ToolExecution(max_concurrency=limit),
    )
    await ask(service, kernel=kernel)
    assert (highest, sorted(order)) == (most, [0, 1, 2, 3])
    assert order == sorted(order) or limit != 1


async def test_detail_of_an_error_is_shown_where_asked_for(
    ask: Ask, history: ChatHistory
) -> None:
    """``include_error_detail`` lets the model read type and text of what a function raised."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([call("t-fail"), say("Oh.")]),
        execution=ToolExecution(include_error_detail=True),
    )
    await ask(service)
    assert "RuntimeError: password=hunter2" in str(
        first_result(history.messages[-1]).result
    )


async def test_a_failing_function_loses_no_siblings_result(
    ask: Ask, tools: Tools, history: ChatHistory
) -> None:
    """All calls of a batch settle; the others' results are there."""
    inner = ScriptedChatCompletion(
        [calls(call("t-fail"), ADD, call("t-echo", {"text": "x"})), say("Done.")]
    )
    answer = await ask(FunctionInvokingChatCompletion(inner))
    results = [str(first_result(message).result) for message in history.messages[2:]]
    assert results == ["The function t-fail failed.", "3", "x"]
    assert answer.metadata["tool_calls"] == 3


async def test_active_time_is_measured_on_the_clock(ask: Ask, tools: Tools) -> None:
    """A limit on active time counts what the clock says passed, waiting between iterations included."""
    clock = ManualClock()
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(
            lambda request: ADD if request.tools else say("Enough.")
        ),
        clock=clock,
        min_iteration_time_ms=1000,
        budget=Budget(max_active_seconds=2.5),
    )
    answer: Any = await ask(service)
    assert (answer.metadata["limit"], answer.text) == ("max_active_seconds", "")
    assert len(tools.seen) == 3
