"""What the tests of functions share: a plugin, a bench to run its functions on, and a filter that passes."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from types import SimpleNamespace
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelFunction, kernel_function

from planner_ext.core.facts import (
    CallDecided,
    CallStarted,
    ModelReplied,
    Rules,
    RunStarted,
)
from planner_ext.core.fold import fold
from planner_ext.core.state import State
from planner_ext.core.values import RequestedCall, ResolvedCall, Usage
from planner_ext.engine.ports import Finished
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.sk.functions.toolset import Tool, tool_of
from planner_ext.sk.run.tools import KernelFunctions
from support.stock import add_filter

Filter = Callable[[Any, Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Lamp:
    """A type of the application's own, which only its constructor converts to."""

    def __init__(self, number: int) -> None:
        self.number = number + 0


class Lights:
    """A plugin that remembers what reached it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.waiting = asyncio.Event()

    @kernel_function
    def switch(self, room: str, on: bool = True) -> dict[str, Any]:
        self.seen.append((room, on))
        return {"room": room, "on": on}

    @kernel_function
    async def wait(self) -> None:
        self.waiting.set()
        await asyncio.Event().wait()

    @kernel_function
    def fail(self) -> None:
        raise ValueError("password is hunter2")

    @kernel_function
    def dim(self, settings: str, level: int | None = 7) -> str:
        self.seen.append((settings, level))
        return settings

    @kernel_function
    def name(self, label: str | None = None) -> str:
        self.seen.append(label)
        return "named"

    @kernel_function
    def group(self, lights: list[int]) -> str:
        return f"{sum(lights)}"

    @kernel_function
    def aim(self, lamp: Lamp) -> str:
        return f"{lamp.number}"

    @kernel_function
    def own(
        self, what: str, user: Annotated[str, {"include_in_function_choices": False}]
    ) -> str:
        self.seen.append((what, user))
        return f"{what} of {user}"

    @kernel_function
    async def cancelled(self) -> None:
        raise asyncio.CancelledError

    @kernel_function
    async def slow_answer(self) -> str:
        raise TimeoutError("the lamp did not answer")

    @kernel_function
    async def stubborn(self) -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise RuntimeError("interrupted") from None
        return ""

    @kernel_function
    async def lock(self) -> Any:
        return {"lock": threading.Lock(), "none": None}

    @kernel_function
    def leave(self) -> None:
        raise SystemExit(3)


@kernel_function(name="SendFinalAnswer")
def send_final_answer(answer: str) -> str:
    return answer


class _Offer(SimpleNamespace):
    """The part of a `ToolSet` that calls read; a test may put other functions in it."""

    @property
    def tools(self) -> dict[str, Tool]:
        return {name: tool_of(function) for name, function in self.functions.items()}


class Bench:
    """A kernel with the plugin, and the functions under test over it."""

    def __init__(
        self,
        *filters: Filter,
        function_filters: tuple[Filter, ...] = (),
        **options: Any,
    ) -> None:
        self.lights = Lights()
        self.kernel = Kernel()
        self.kernel.add_plugin(self.lights, "lights")
        self.final = self.kernel.add_function("planner", send_final_answer)
        for one in filters:
            add_filter(self.kernel, "auto_function_invocation", one)
        for one in function_filters:
            add_filter(self.kernel, "function_invocation", one)
        functions: dict[str, KernelFunction] = {
            function.fully_qualified_name: function
            for plugin in self.kernel.plugins.values()
            for function in plugin.functions.values()
        }
        self.tools = _Offer(
            functions=functions, schema_only=frozenset({"remote-call"}), reads=False
        )
        self.history = ChatHistory()
        given: dict[str, Any] = {
            "tools": self.tools,
            "arguments": None,
            "execution": ToolExecution(),
            "final_answer": self.final,
            "history": self._history,
        }
        self.functions = KernelFunctions(self.kernel, **(given | options))

    def _history(self, state: State) -> ChatHistory:
        return self.history

    @property
    def offered(self) -> dict[str, KernelFunction]:
        return self.tools.functions

    @offered.setter
    def offered(self, functions: dict[str, KernelFunction]) -> None:
        self.tools.functions = functions

    def check(
        self,
        name: str,
        arguments: Mapping[str, Any] | str = "",
        edited: str | None = None,
    ) -> ResolvedCall:
        return self.functions.check(request(name, arguments), edited)

    async def run(
        self,
        name: str,
        arguments: Mapping[str, Any] | str = "",
        *,
        by: str = "",
        edited: str | None = None,
        index: int = 0,
        count: int = 1,
    ) -> Finished:
        call = request(name, arguments, id=f"call_{index}")
        checked = self.functions.check(call, edited)
        assert checked.kind == "function", checked
        state = state_of(call, checked, by=by, edited=edited, index=index, count=count)
        return await self.functions.run(call, checked, index=index, state=state)


def request(
    name: str, arguments: Mapping[str, Any] | str = "", *, id: str = "call_0"
) -> RequestedCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return RequestedCall(id=id, name=name, arguments=text)


def state_of(
    call: RequestedCall,
    checked: ResolvedCall,
    *,
    by: str,
    edited: str | None,
    index: int,
    count: int,
) -> State:
    """A run in its third trip, whose batch is decided and whose call has started."""
    calls = tuple(
        call if at == index else request("lights-fail", id=f"call_{at}")
        for at in range(count)
    )
    decided = [
        CallDecided(
            iteration=2,
            index=at,
            call_id=one.id,
            function=one.name,
            kind="function",
            verdict="run",
            approved=bool(by),
            by=by,
            edited=edited if at == index else None,
            at=0,
        )
        for at, one in enumerate(calls)
    ]
    replied = ModelReplied(
        iteration=2,
        message="reply",
        text="",
        calls=calls,
        finish_reason="tool_calls",
        usage=Usage(iterations=1),
        offered=True,
        withheld=None,
        at=0,
        seconds=0,
    )
    started = CallStarted(
        iteration=2, index=index, call_id=call.id, function=checked.function, at=0
    )
    return fold(
        [
            RunStarted(run_id="r", rules=Rules(), messages=(), at=0),
            replied,
            *decided,
            started,
        ]
    )


async def passing(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    await next(context)


FILTERED = pytest.mark.parametrize(
    "filters", [(), (passing,)], ids=["plain", "filtered"]
)


"""Promises that hold whether or not the kernel has auto-function-invocation filters."""
