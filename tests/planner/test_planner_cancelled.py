"""A cancelled run leaves through every door with its history and a checkpoint, on the exception that is propagated."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.hitl_manager import Approve, Checkpoint, Defer
from planner_ext.plugin import PlannerPlugin
from planner_ext.session import ToolUseSession
from planner_ext.testing import ScriptedChatCompletion, call, say
from support.narrow import run_of
from support.planner import check_sendable, drained, kernel_of, planner_with
from support.values import each_of


class World:
    """A run that stands still, in its first request or in its function; and again where that cleans up."""

    def __init__(self, place: str) -> None:
        self.began = asyncio.Event()
        self.cleans = asyncio.Event()
        self.stuck, self.cleans_up = True, False
        script = (
            [call("w-wait"), say("Done."), say("Done.")]
            if place == "function"
            else [say("Done."), say("Done.")]
        )
        self.service = ScriptedChatCompletion(
            script, before_reply=self._stand if place == "request" else None
        )
        self.kernel = kernel_of(self.service, w=self)
        self.history = ChatHistory()
        self.history.add_user_message("go")

    async def _stand(self, *_: Any) -> None:
        self.began.set()
        if self.stuck:
            try:
                await asyncio.Future()
            finally:
                if self.cleans_up:
                    self.cleans.set()
                    await asyncio.Future()

    @kernel_function
    async def wait(self) -> str:
        await self._stand()
        return "waited"

    def settings(self) -> PromptExecutionSettings:
        return PromptExecutionSettings(
            function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
        )


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


async def planner(world: World) -> None:
    await planner_with(plan=False).invoke(world.kernel, "go")


async def planner_streamed(world: World) -> None:
    await drained(planner_with(plan=False).invoke_stream(world.kernel, "go"))


async def service(world: World) -> None:
    wrapped = FunctionInvokingChatCompletion(world.service)
    await wrapped.get_chat_message_contents(
        world.history, world.settings(), kernel=world.kernel
    )


async def service_streamed(world: World) -> None:
    wrapped = FunctionInvokingChatCompletion(world.service)
    await read(
        wrapped.get_streaming_chat_message_contents(
            world.history, world.settings(), kernel=world.kernel
        )
    )


async def handler(world: World) -> None:
    await read(ToolCallHandler(world.kernel).invoke(world.history))


async def handler_streamed(world: World) -> None:
    await read(ToolCallHandler(world.kernel).invoke_stream(world.history))


async def session(world: World) -> None:
    await ToolUseSession(world.kernel).prompt("go")


async def session_streamed(world: World) -> None:
    await read(ToolUseSession(world.kernel).prompt_streaming("go"))


async def nested(world: World) -> None:
    """The outermost run is the one that is carried."""
    world.kernel.add_plugin(PlannerPlugin(planner_with("default", plan=False)), "inner")
    outer = ScriptedChatCompletion(
        [call("inner-reach_goal", {"goal": "go"})], service_id="outer"
    )
    world.kernel.add_service(outer)
    await planner_with("outer", plan=False).invoke(world.kernel, "the outer goal")


DOORS = [
    planner,
    planner_streamed,
    service,
    service_streamed,
    handler,
    handler_streamed,
    session,
    session_streamed,
]
every_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)
both_places = each_of("place", ["request", "function"])
Door = Callable[[World], Coroutine[Any, Any, None]]


async def an_hour_passes(after: asyncio.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the event loop's clock forward, once a run stands still: nothing has to be waited for."""
    await after.wait()
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 3600)


def cancellation_in(error: BaseException | None) -> BaseException:
    """Find the cancellation that carries the run behind what ``wait_for`` and ``timeout`` make of it."""
    while error is not None and not hasattr(error, "checkpoint"):
        error = error.__cause__ or error.__context__
    assert isinstance(error, asyncio.CancelledError)
    return error


async def check(error: BaseException, world: World, place: str) -> None:
    """Its history can be sent, and its checkpoint resumed."""
    history, checkpoint = run_of(error).chat_history, run_of(error).checkpoint
    check_sendable(history)
    results = [
        str(message.items[0].result)
        for message in history.messages
        if message.role == "tool"
    ]
    assert results == (
        []
        if place == "request"
        else ["Cancelled while it ran; whether it took effect is not known."]
    )
    world.stuck = False
    again = Checkpoint.from_json(checkpoint.to_json())
    result = await planner_with(plan=False).resume(
        world.kernel, again, budget=Budget(max_iterations=5)
    )
    assert (result.status, result.final_answer) == ("answered", "Done.")


@every_door
@both_places
async def test_a_cancelled_task_carries_its_run(door: Door, place: str) -> None:
    """``task.cancel()`` with a message: the very exception, with the message, comes out."""
    world = World(place)
    task = asyncio.create_task(door(world))
    await world.began.wait()
    task.cancel("enough")
    with pytest.raises(asyncio.CancelledError, match="enough") as caught:
        await task
    assert task.cancelled()
    await check(caught.value, world, place)


@every_door
@both_places
async def test_a_task_that_is_cancelled_again_carries_its_run(
    door: Door, place: str
) -> None:
    """The second cancellation reaches what cleans up; the run still answers its calls, and comes out whole."""
    world = World(place)
    world.cleans_up = True
    task = asyncio.create_task(door(world))
    await world.began.wait()
    task.cancel()
    await world.cleans.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    await check(caught.value, world, place)


@every_door
@both_places
@each_of("way", ["wait_for", "timeout"])
async def test_a_timeout_around_a_run_has_it_among_its_causes(
    door: Door, place: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``asyncio.wait_for`` and ``asyncio.timeout`` raise TimeoutError; its cause is the cancellation with the run."""
    world = World(place)
    passing = asyncio.create_task(an_hour_passes(world.began, monkeypatch))
    with pytest.raises(TimeoutError) as caught:
        if way == "wait_for":
            await asyncio.wait_for(door(world), 3600)
        else:
            async with asyncio.timeout(3600):
                await door(world)
    await passing
    assert caught.value.__cause__ is cancellation_in(caught.value)
    await check(cancellation_in(caught.value), world, place)


async def test_a_task_group_cancels_a_run_that_carries_itself() -> None:
    """A task of the group that looks at its own cancellation finds the run on it."""
    world = World("function")
    seen: list[BaseException] = []

    async def watching() -> None:
        try:
            await planner(world)
        except asyncio.CancelledError as error:
            seen.append(error)
            raise

    async def fail() -> None:
        await world.began.wait()
        raise ValueError("sibling")

    with pytest.raises(ExceptionGroup):
        async with asyncio.TaskGroup() as group:
            group.create_task(watching())
            group.create_task(fail())
    await check(cancellation_in(seen[0]), world, "function")


async def test_a_cancelled_task_carries_its_outermost_run() -> None:
    """A nested run is cancelled with the one around it, and does not take its place."""
    world = World("request")
    task = asyncio.create_task(nested(world))
    await world.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert (
        str(run_of(caught.value).chat_history.messages[-2].items[0].name)
        == "inner-reach_goal"
    )


async def test_a_cancelled_task_carries_its_resumed_run() -> None:
    """Cancelled in the function that was approved."""
    world = World("function")
    made = planner_with(plan=False, interceptors=[lambda _: Defer()])
    paused = await made.invoke(world.kernel, "go")
    decisions = {paused.pending[0].id: Approve(by="ann")}
    task = asyncio.create_task(made.resume(world.kernel, paused.checkpoint, decisions))
    await world.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    await check(caught.value, world, "function")


async def test_a_run_that_is_cancelled_while_its_resume_is_recorded_is_carried() -> (
    None
):
    """Nothing has started yet: its checkpoint is the one that was resumed."""
    world, watches = World("function"), asyncio.Event()

    async def observer(fact: Any) -> None:
        if fact.type == "Resumed":
            watches.set()
            await asyncio.Future()

    paused = await planner_with(plan=False, interceptors=[lambda _: Defer()]).invoke(
        world.kernel, "go"
    )
    decisions = {paused.pending[0].id: Approve(by="ann")}
    made = planner_with(plan=False, observers=[observer])
    task = asyncio.create_task(made.resume(world.kernel, paused.checkpoint, decisions))
    await watches.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    check_sendable(run_of(caught.value).chat_history)
    world.stuck = False
    result = await planner_with(plan=False).resume(
        world.kernel, run_of(caught.value).checkpoint, decisions
    )
    assert (result.status, result.final_answer) == ("answered", "Done.")


async def test_what_ends_the_program_carries_its_run() -> None:
    """KeyboardInterrupt passes as it is, with the run."""

    def leave(*_: Any) -> None:
        raise KeyboardInterrupt

    kernel = kernel_of(
        ScriptedChatCompletion([call("math-add", {"a": 1, "b": 2}), say("Done.")])
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        await planner_with(plan=False, iteration_completed=leave).invoke(kernel, "go")
    check_sendable(run_of(caught.value).chat_history)
