"""How a run is ended from outside: a stop handle, a consumer that leaves, a cancelled task."""

import asyncio
from contextlib import suppress
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext.events import CallStarted, Fact, ModelReplied, TextDelta
from planner_ext.iteration import StopHandle, ToolExecution
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import (
    ADD,
    PLAN,
    Math,
    both_ways,
    check_sendable,
    final,
    invoke,
    kernel_of,
    planner_with,
    resume,
    scripted,
)
from support.stock import first_result


class Gate:
    """A plugin whose function waits until a test lets it continue, and remembers how it ended."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.open = asyncio.Event()
        self.ended: list[str] = []

    async def reached(self) -> None:
        """Wait until the function runs, and not for ever: a run that failed before it must fail the test."""
        async with asyncio.timeout(120):
            await self.entered.wait()

    @kernel_function
    async def wait(self) -> str:
        self.entered.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("done")
        return "done"


def kernel_with_gate(script: Any) -> tuple[Any, ScriptedChatCompletion, Gate]:
    service, gate = ScriptedChatCompletion(script), Gate()
    return kernel_of(service, gate=gate, math=Math()), service, gate


@both_ways
async def test_a_run_that_is_stopped_before_it_began_makes_no_request(
    streamed: bool,
) -> None:
    """A handle that was used already ends the run at once, with its reason."""
    kernel, service = scripted([PLAN])
    stop = StopHandle()
    stop.stop("lunch")
    result = await invoke(planner_with(), kernel, streamed=streamed, stop=stop)

    assert result.status == "stopped"
    assert result.reason == "lunch"
    assert result.final_answer == ""
    assert (service.requests, result.iterations) == ([], 0)


@both_ways
async def test_another_task_may_stop_a_run(streamed: bool) -> None:
    """Functions that run finish and their results are kept; no further one starts, no further request is made."""
    kernel, service, gate = kernel_with_gate(
        [PLAN, calls(call("gate-wait"), ADD), final()]
    )
    stop = StopHandle()
    planner = planner_with(execution=ToolExecution(max_concurrency=1))
    run = asyncio.create_task(invoke(planner, kernel, streamed=streamed, stop=stop))
    await gate.reached()
    stop.stop("enough")
    gate.open.set()
    result = await run

    assert result.status == "stopped"
    assert result.reason == "enough"
    assert len(service.requests) == 2
    assert (gate.ended, result.tool_calls) == (["done"], 1)
    check_sendable(result.chat_history)
    assert result.chat_history is not None
    answers = [
        str(first_result(message).result)
        for message in result.chat_history.messages[-2:]
    ]
    assert answers[0] == "done"
    assert "Not executed" in answers[1]


@both_ways
async def test_a_stopped_run_can_be_resumed(streamed: bool) -> None:
    """A stop is an end as a value: resumed, the run continues where it was, without running anything again."""
    kernel, service, gate = kernel_with_gate([PLAN, call("gate-wait"), final()])
    stop = StopHandle()
    run = asyncio.create_task(
        invoke(planner_with(), kernel, streamed=streamed, stop=stop)
    )
    await gate.reached()
    stop.stop()
    gate.open.set()
    stopped = await run
    result = await resume(planner_with(), kernel, stopped.checkpoint, streamed=streamed)

    assert stopped.status == "stopped"
    assert result.status == "answered"
    assert result.final_answer == "It is 3."
    assert gate.ended == ["done"]
    assert result.iterations == 3
    assert len(service.requests) == 3


@both_ways
async def test_an_answer_that_has_come_is_kept(streamed: bool) -> None:
    """A stop that comes while the last reply arrives does not throw the answer away."""
    stop = StopHandle()

    async def stopping(request: ScriptedRequest) -> None:
        stop.stop()

    kernel, _ = scripted([say("It is 3.")], before_reply=stopping)
    result = await invoke(
        planner_with(plan=False), kernel, streamed=streamed, stop=stop
    )

    assert (result.status, result.final_answer) == ("answered", "It is 3.")


@both_ways
async def test_a_handle_stops_one_run_only(streamed: bool) -> None:
    """A stop handle belongs to the run it was given to; the planner's other runs continue."""
    stop = StopHandle()
    stop.stop()
    kernel, _ = scripted([PLAN, final()])
    planner = planner_with()
    stopped = await invoke(planner, kernel, streamed=streamed, stop=stop)
    result = await invoke(planner, kernel, streamed=streamed)

    assert (stopped.status, result.status) == ("stopped", "answered")


async def test_leaving_a_stream_cancels_what_runs() -> None:
    """When ``aclose`` returns, the function that ran has been cancelled and no task of the run is left."""
    kernel, service, gate = kernel_with_gate([PLAN, call("gate-wait"), final()])
    before = asyncio.all_tasks()
    stream = planner_with().invoke_stream(kernel, "goal")
    async for event in stream:
        if isinstance(event, CallStarted):
            break
    await gate.reached()
    await stream.aclose()

    assert gate.ended == ["cancelled"]
    assert asyncio.all_tasks() == before
    assert len(service.requests) == 2


async def test_leaving_a_resumed_stream_cancels_what_runs() -> None:
    """The same holds for a stream that continues from a checkpoint."""
    kernel, _, gate = kernel_with_gate([PLAN, say(""), call("gate-wait")])
    ended = await planner_with().invoke(kernel, "goal")
    before = asyncio.all_tasks()
    stream = planner_with().resume_stream(kernel, ended.checkpoint)
    async for event in stream:
        if isinstance(event, CallStarted):
            break
    await gate.reached()
    await stream.aclose()

    assert gate.ended == ["cancelled"]
    assert asyncio.all_tasks() == before


async def test_leaving_a_stream_while_text_comes_leaves_nothing_running() -> None:
    """A consumer that has read enough of the text leaves no request and no task behind."""
    kernel, _ = scripted(
        [say("A very long plan, which comes in many pieces."), final()]
    )
    before = asyncio.all_tasks()
    stream = planner_with().invoke_stream(kernel, "goal")
    async for event in stream:
        if isinstance(event, TextDelta):
            break
    await stream.aclose()

    assert asyncio.all_tasks() == before


async def test_an_unread_stream_runs_nothing() -> None:
    """Nothing happens before the first event is asked for."""
    kernel, service = scripted([PLAN])
    stream = planner_with().invoke_stream(kernel, "goal")
    await stream.aclose()

    assert service.requests == []


@both_ways
async def test_cancelling_cancels_the_functions_and_is_raised(streamed: bool) -> None:
    """A cancelled run cancels the function that runs, waits for it, and raises; no task is left."""
    kernel, service, gate = kernel_with_gate([PLAN, call("gate-wait"), final()])
    before = asyncio.all_tasks()
    run = asyncio.create_task(invoke(planner_with(), kernel, streamed=streamed))
    await gate.reached()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run

    assert (gate.ended, len(service.requests)) == (["cancelled"], 2)
    assert asyncio.all_tasks() == before


@both_ways
async def test_a_timeout_around_a_run_ends_it(streamed: bool) -> None:
    """``asyncio.timeout`` works as elsewhere: the run is cancelled, and TimeoutError is what the caller gets."""
    kernel, _, gate = kernel_with_gate([PLAN, call("gate-wait"), final()])
    scope = asyncio.timeout(None)
    run = asyncio.create_task(entered_then_expire(gate, scope))
    with pytest.raises(TimeoutError):
        async with scope:
            await invoke(planner_with(), kernel, streamed=streamed)
    await run

    assert gate.ended == ["cancelled"]


async def entered_then_expire(gate: Gate, scope: asyncio.Timeout) -> None:
    await gate.reached()
    scope.reschedule(0)


@both_ways
async def test_observers_learn_how_a_cancelled_run_ended(streamed: bool) -> None:
    """An audit trail made of facts is complete: observers get the cancelled call and the end of the run, too."""
    told: list[Fact] = []
    kernel, _, gate = kernel_with_gate([PLAN, call("gate-wait"), final()])
    run = asyncio.create_task(
        invoke(planner_with(observers=[told.append]), kernel, streamed=streamed)
    )
    await gate.reached()
    run.cancel()
    with suppress(asyncio.CancelledError):
        await run

    assert [fact.type for fact in told][-2:] == ["IterationCompleted", "Ended"]
    assert [fact.outcome for fact in told if fact.type == "CallFinished"] == [
        "cancelled"
    ]


@both_ways
async def test_a_filter_of_the_application_may_end_a_run(streamed: bool) -> None:
    """``context.terminate`` in a filter ends the run after the batch, every call answered, no further request."""
    kernel, service, _ = kernel_with_gate(
        [PLAN, calls(ADD, call("math-add", {"a": 3, "b": 4})), final()]
    )

    async def terminating(context: Any, next: Any) -> None:
        await next(context)
        context.terminate = True

    kernel.add_filter("auto_function_invocation", terminating)
    result = await invoke(planner_with(), kernel, streamed=streamed)

    assert (result.status, len(service.requests)) == ("stopped", 2)
    check_sendable(result.chat_history)


@both_ways
async def test_a_stop_before_the_second_reply_keeps_the_first_batch(
    streamed: bool,
) -> None:
    """Calls that came with a stop pending are answered as not executed, and nothing of them runs."""
    stop = StopHandle()
    math = Math()

    async def stopping(request: ScriptedRequest) -> None:
        if request.index == 2:
            stop.stop("no more")

    kernel = kernel_of(
        ScriptedChatCompletion([PLAN, ADD, ADD], before_reply=stopping), math=math
    )
    result = await invoke(planner_with(), kernel, streamed=streamed, stop=stop)

    assert result.status == "stopped"
    assert len(math.sums) == 1
    assert result.tool_calls == 1
    assert sum(isinstance(fact, ModelReplied) for fact in result.facts) == 2
    check_sendable(result.chat_history)
