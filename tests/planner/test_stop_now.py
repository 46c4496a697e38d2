"""``StopHandle.stop(now=True)``: what is under way is interrupted, at every door, and the history stays valid."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    Defer,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    StopHandle,
    ToolCallHandler,
    ToolUseSession,
)
from planner_ext.errors import PlannerInvalidConfigurationError
from planner_ext.events import CallFinished, RequestFailed
from planner_ext.iteration import ToolExecution
from planner_ext.testing import ScriptedChatCompletion, ScriptedOpenAIServer, call, say
from support.planner import (
    ADD,
    GOAL,
    Math,
    both_ways,
    check_sendable,
    invoke,
    kernel_of,
    planner_with,
    resume,
)
from support.stock import every_result


class Waits:
    """Functions that wait until a test has ended; ``reached`` is set when one has begun."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.released = threading.Event()
        self.cancelled = False

    @kernel_function
    async def hang(self) -> str:
        self.reached.set()
        try:
            return await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    @kernel_function
    def block(self) -> str:
        self.reached.set()
        self.released.wait(60)
        return "released"


@pytest.fixture
def waits() -> Generator[Waits]:
    waits = Waits()
    yield waits
    waits.released.set()


def kernel_with(waits: Waits, script: Any) -> Kernel:
    return kernel_of(ScriptedChatCompletion(script), waits=waits, math=Math())


@contextmanager
def stopping(waits: Waits, *, reason: str = "enough") -> Generator[StopHandle]:
    """Stop from another thread, as soon as something is under way."""
    stop = StopHandle()

    def when_reached() -> None:
        waits.reached.wait(60)
        stop.stop(reason, now=True)

    thread = threading.Thread(target=when_reached)
    thread.start()
    yield stop
    waits.reached.set()
    thread.join()


def asked() -> tuple[ChatHistory, PromptExecutionSettings]:
    history = ChatHistory()
    history.add_user_message(GOAL)
    return history, PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )


Outcome = tuple[str, str, ChatHistory]
"""Status and reason of what was stopped, and its history."""


async def of_planner(kernel: Kernel, stop: StopHandle, streamed: bool) -> Outcome:
    result = await invoke(
        planner_with(plan=False), kernel, streamed=streamed, stop=stop
    )
    assert result.chat_history is not None
    return result.status, result.reason, result.chat_history


async def of_service(kernel: Kernel, stop: StopHandle, streamed: bool) -> Outcome:
    history, settings = asked()
    service: Any = FunctionInvokingChatCompletion(kernel.get_service())  # pyright: ignore[reportArgumentType]
    if streamed:
        chunks = service.get_streaming_chat_message_content(
            history, settings, kernel=kernel, stop=stop
        )
        metadata = [chunk async for chunk in chunks][-1].metadata
    else:
        metadata = (
            await service.get_chat_message_content(
                history, settings, kernel=kernel, stop=stop
            )
        ).metadata
    return metadata["status"], metadata["reason"], history


async def of_handler(kernel: Kernel, stop: StopHandle, streamed: bool) -> Outcome:
    history, _ = asked()
    handler = ToolCallHandler(kernel)
    messages: AsyncGenerator[Any] = (
        handler.invoke_stream if streamed else handler.invoke
    )(history, stop=stop)
    metadata = [message async for message in messages][-1].metadata
    return metadata["status"], metadata["reason"], history


async def of_session(kernel: Kernel, stop: StopHandle, streamed: bool) -> Outcome:
    session = ToolUseSession(kernel)
    if streamed:
        assert [text async for text in session.prompt_streaming(GOAL, stop=stop)] == []
    else:
        assert await session.prompt(GOAL, stop=stop) == ""
    return "stopped", "enough", session.history()


DOORS = [of_planner, of_service, of_handler, of_session]
Door = Callable[[Kernel, StopHandle, bool], Awaitable[Outcome]]


@both_ways
@pytest.mark.parametrize(
    ("door", "function"),
    [*((door, "waits-hang") for door in DOORS), (of_planner, "waits-block")],
)
async def test_a_function_under_way_is_interrupted(
    waits: Waits, door: Door, function: str, streamed: bool
) -> None:
    """Async or in a thread: the model would read that its effect is not known; what ran before is kept."""
    kernel = kernel_with(waits, [ADD, call(function), say("never asked for")])
    with stopping(waits) as stop:
        status, reason, history = await door(kernel, stop, streamed)
    assert (status, reason) == ("stopped", "enough")
    check_sendable(history)
    texts = [
        str(item.result)
        for m in history.messages
        if m.role == "tool"
        for item in every_result(m)
    ]
    assert texts[0] == "3"
    assert "Whether it took effect is not known" in texts[1]
    assert waits.cancelled == (function == "waits-hang")


@both_ways
@pytest.mark.parametrize("door", DOORS)
async def test_a_request_under_way_is_interrupted(
    waits: Waits, door: Door, streamed: bool
) -> None:
    """Over real HTTP: the endpoint never answers the second request, and the run does not wait for it."""

    def script(request: Any) -> Any:
        if request.index == 0:
            return ADD
        waits.reached.set()
        waits.released.wait(60)
        return say("too late")

    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            kernel = kernel_of(
                OpenAIChatCompletion("scripted", service_id="chat", async_client=client)
            )
            with stopping(waits) as stop:
                status, reason, history = await door(kernel, stop, streamed)
        waits.released.set()
    assert (status, reason) == ("stopped", "enough")
    assert len(server.requests) == 2
    check_sendable(history)


@both_ways
async def test_what_was_interrupted_is_recorded(waits: Waits, streamed: bool) -> None:
    """The call counts as started, and as cancelled; the run continues from its checkpoint."""
    kernel = kernel_with(waits, [call("waits-hang"), say("Done.")])
    planner = planner_with(plan=False, execution=ToolExecution(on_error="raise"))
    with stopping(waits) as stop:
        result = await invoke(planner, kernel, streamed=streamed, stop=stop)
    (finished,) = [fact for fact in result.facts if isinstance(fact, CallFinished)]
    assert (finished.outcome, result.tool_calls) == ("cancelled", 1)
    again = await resume(planner, kernel, result.checkpoint, streamed=streamed)
    assert (again.status, again.final_answer) == ("answered", "Done.")


@both_ways
async def test_a_request_that_was_interrupted_is_charged(
    waits: Waits, streamed: bool
) -> None:
    """The endpoint may bill it; the record says that the run was stopped."""

    async def never(_: Any) -> None:
        waits.reached.set()
        await asyncio.Future()

    kernel = kernel_of(ScriptedChatCompletion([say("never")], before_reply=never))
    with stopping(waits) as stop:
        result = await invoke(
            planner_with(plan=False), kernel, streamed=streamed, stop=stop
        )
    (failed,) = [fact for fact in result.facts if isinstance(fact, RequestFailed)]
    assert result.status == "stopped"
    assert result.iterations == 1
    assert failed.reason == "The run was stopped."


@both_ways
async def test_a_nested_run_is_interrupted(waits: Waits, streamed: bool) -> None:
    """What runs inside a planner's function stops with the run around it, and its calls are counted."""
    inner = kernel_with(waits, [call("waits-hang"), say("never")])
    outer = kernel_of(
        ScriptedChatCompletion(
            [call("inner-reach_goal", {"goal": "Wait."}), say("never")]
        )
    )
    outer.add_plugin(PlannerPlugin(planner_with(plan=False), kernel=inner), "inner")
    with stopping(waits) as stop:
        result = await invoke(
            planner_with(plan=False), outer, streamed=streamed, stop=stop
        )
    assert (result.status, result.reason) == ("stopped", "enough")
    assert (result.iterations, result.tool_calls) == (2, 2)
    assert waits.cancelled


@both_ways
async def test_a_person_who_is_asked_is_not_waited_for(
    waits: Waits, streamed: bool
) -> None:
    """An approver at hand that does not answer: the call does not run, and the stop says why."""

    async def deferring(_: object) -> Defer:
        return Defer()

    async def approver(_: object) -> Approve:
        waits.reached.set()
        return await asyncio.Future()

    planner = planner_with(plan=False, interceptors=[deferring], approver=approver)
    kernel = kernel_with(waits, [ADD, say("never")])
    with stopping(waits) as stop:
        result = await invoke(planner, kernel, streamed=streamed, stop=stop)
    assert result.status == "stopped"
    assert result.reason == "enough"
    assert result.tool_calls == 0
    check_sendable(result.chat_history)


@both_ways
async def test_a_resumed_run_is_interrupted(waits: Waits, streamed: bool) -> None:
    """After a pause, too."""

    async def deferring(_: object) -> Defer:
        return Defer()

    planner = planner_with(plan=False, interceptors=[deferring])
    kernel = kernel_with(waits, [call("waits-hang"), say("never")])
    paused = await invoke(planner, kernel, streamed=streamed)
    decisions = {paused.pending[0].id: Approve()}
    with stopping(waits) as stop:
        result = await resume(
            planner,
            kernel,
            paused.checkpoint,
            streamed=streamed,
            decisions=decisions,
            stop=stop,
        )
    assert (result.status, result.reason) == ("stopped", "enough")


async def test_a_stop_may_become_an_interruption(waits: Waits) -> None:
    """A second stop with ``now`` does not wait any longer; the first reason stays."""
    kernel = kernel_with(waits, [call("waits-hang"), say("never")])
    stop = StopHandle()
    run = asyncio.create_task(planner_with(plan=False).invoke(kernel, GOAL, stop=stop))
    await asyncio.to_thread(waits.reached.wait, 60)
    stop.stop("first")
    stop.stop("second", now=True)
    result = await run
    assert (result.status, result.reason) == ("stopped", "first")
    with pytest.raises(
        PlannerInvalidConfigurationError, match="now must be True or False"
    ):
        stop.stop(now=1)  # pyright: ignore[reportArgumentType]  (junk, on purpose)
