"""One reply of many calls: a cap on them, a cap on threads, and calls that wait have not started."""

import threading
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import Budget
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import CallDecided, CallFinished, CallStarted
from planner_ext.iteration import ToolExecution
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import check_sendable, invoke, kernel_of, planner_with
from support.stock import add_filter
from support.values import each_of


class Tools:
    def __init__(self) -> None:
        self.most = self.running = self.ran = 0
        self.lock = threading.Lock()

    @kernel_function
    def work(self, number: int) -> int:
        with self.lock:
            self.running += 1
            self.ran += 1
            self.most = max(self.most, self.running)
        with self.lock:
            self.running -= 1
        return number


def asking_for(*counts: int) -> ScriptedChatCompletion:
    replies = [
        calls(*(call("t-work", {"number": number}) for number in range(count)))
        for count in counts
    ]
    return ScriptedChatCompletion([*replies, say("Done.")])


async def test_a_reply_of_too_many_calls_runs_none() -> None:
    """Each call is answered with the limit's name, no question is asked, and the model may make fewer."""
    asked: list[Any] = []
    tools, service = Tools(), asking_for(4, 3)
    planner = planner_with(
        plan=False, budget=Budget(max_calls_per_reply=3), interceptors=[asked.append]
    )
    result = await invoke(planner, kernel_of(service, t=tools))
    assert result.status == "answered"
    assert result.tool_calls == 3
    assert tools.ran == 3
    assert len(asked) == 3
    refused = [
        message["content"]
        for message in service.requests[1].messages
        if message["role"] == "tool"
    ]
    assert (
        refused
        == [
            "Not executed: one reply may have max_calls_per_reply=3 calls, and this one has 4; none of them ran. Make "
            "fewer calls at once."
        ]
        * 4
    )
    check_sendable(result.chat_history)


async def test_by_default_a_reply_has_at_most_1024_calls() -> None:
    """1,024 run, 1,025 do not; without the limit they do."""
    for count, given, ran in [
        (1024, {}, 1024),
        (1025, {}, 0),
        (1025, {"max_calls_per_reply": None}, 1025),
    ]:
        tools = Tools()
        result = await planner_with(plan=False, budget=Budget(**given)).invoke(
            kernel_of(asking_for(count), t=tools), "go"
        )
        assert (result.status, tools.ran) == ("answered", ran)


@pytest.mark.parametrize(("given", "most"), [({}, 64), ({"max_threads": 3}, 3)])
async def test_synchronous_functions_wait_for_a_thread_before_they_start(
    given: dict[str, Any], most: int
) -> None:
    """No more of them have started and not finished, at any moment, than there may be threads."""
    tools = Tools()
    planner = planner_with(plan=False, execution=ToolExecution(**given))
    result = await planner.invoke(kernel_of(asking_for(200), t=tools), "go")
    running = peak = 0
    for fact in result.facts:
        running += isinstance(fact, CallStarted) - isinstance(fact, CallFinished)
        peak = max(peak, running)
    assert peak == most
    assert tools.ran == 200
    assert result.tool_calls == 200
    assert tools.most <= most


async def test_a_call_that_waits_for_a_thread_does_not_start_after_a_stop() -> None:
    """Nor after a filter that terminates: it is answered "not executed"."""
    tools = Tools()
    kernel = kernel_of(asking_for(5), t=tools)

    async def end(context: Any, next: Any) -> None:
        await next(context)
        context.terminate = True

    add_filter(kernel, "auto_function_invocation", end)

    result = await planner_with(
        plan=False, execution=ToolExecution(max_threads=2)
    ).invoke(kernel, "go")
    assert result.status == "stopped"
    assert result.tool_calls == 2
    assert tools.ran == 2
    check_sendable(result.chat_history)


@each_of("value", [0, -1, True, 2.5, "many"])
def test_a_limit_that_means_nothing_is_refused(value: Any) -> None:
    """Naming the option."""
    with pytest.raises(PlannerInvalidConfigurationError, match="max_calls_per_reply"):
        Budget(max_calls_per_reply=value)
    with pytest.raises(PlannerInvalidConfigurationError, match="max_threads"):
        ToolExecution(max_threads=value)


async def test_a_thousand_denied_calls_are_a_thousand_answers() -> None:
    """The answers are in the order of the calls."""
    service = asking_for(1000)
    planner = planner_with(
        plan=False,
        pre_invoke=lambda iteration, name, arguments: arguments["number"] % 2 == 0,
    )
    result = await planner.invoke(kernel_of(service, t=Tools()), "go")
    denied = [
        fact.index
        for fact in result.facts
        if isinstance(fact, CallDecided) and fact.verdict == "deny"
    ]
    assert denied == list(range(1, 1000, 2))
    request: ScriptedRequest = service.requests[1]
    answers = [
        str(message["content"])
        for message in request.messages
        if message["role"] == "tool"
    ]
    assert [answer == str(number) for number, answer in enumerate(answers)] == [
        number % 2 == 0 for number in range(1000)
    ]
