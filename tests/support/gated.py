"""A worker's application whose calls and requests wait where a test says so, so that it decides what is in flight."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import FunctionCallingStepwisePlanner
from planner_ext.durable import effect
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.durable import planner_of, turn

__all__ = ["World", "application", "until"]

LIMIT_SECONDS = 120
GATED_IN = "PLANNER_EXT_TEST_GATED_IN"
"""The environment variable with the folder of the world."""


def until(met: Callable[[], object], *, seconds: float = LIMIT_SECONDS) -> None:
    """Wait for what only another process can bring about."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


class World:
    """What processes do, in a file of one line each, and the gates before which they wait.

    Every run has the goal of its own name. It asks (``NAME/ask0``), calls ``NAME/book`` and ``NAME/label`` at once,
    asks, calls ``NAME/post``, asks again and answers.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trace = folder / "trace"

    def close(self, *names: str) -> None:
        """Let these wait."""
        for name in names:
            self._gate(name).touch()

    def open(self, *names: str) -> None:
        """Let these pass."""
        for name in names:
            self._gate(name).unlink()

    def begun(self, process: int | None = None) -> list[str]:
        """List what has begun, in all processes or in one."""
        return self._lines("begins", process)

    def ended(self, process: int | None = None) -> list[str]:
        """List what has ended."""
        return self._lines("ends", process)

    async def do(self, name: str) -> str:
        """Begin, wait at the gate, and end."""
        self._note("begins", name)
        while self._gate(name).exists():  # noqa: ASYNC110  (only another process tells)
            await asyncio.sleep(0.01)
        self._note("ends", name)
        return f"done {name}"

    def do_in_thread(self, name: str) -> str:
        """Do the same without an event loop."""
        return asyncio.run(self.do(name))

    def _gate(self, name: str) -> Path:
        return self._folder / f"{name.replace('/', '-')}.gate"

    def _note(self, what: str, name: str) -> None:
        with self._trace.open("a") as file:
            file.write(f"{os.getpid()} {what} {name}\n")

    def _lines(self, what: str, process: int | None) -> list[str]:
        lines = (
            [line.split() for line in self._trace.read_text().splitlines()]
            if self._trace.exists()
            else []
        )
        return [
            name
            for pid, did, name in lines
            if did == what and process in (None, int(pid))
        ]


class Shop:
    """Functions that go through the world."""

    def __init__(self, world: World) -> None:
        self._world = world

    @kernel_function(description="Nobody may do it twice.")
    async def book(self, name: str) -> str:
        return await self._world.do(name)

    @effect("idempotent")
    @kernel_function(description="May be done twice.")
    async def label(self, name: str) -> str:
        return await self._world.do(name)

    @kernel_function(description="Nobody may do it twice, and nobody can interrupt it.")
    def post(self, name: str) -> str:
        return self._world.do_in_thread(name)


def application() -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make the planner and the kernel of a worker."""
    world = World(Path(os.environ[GATED_IN]))

    def goal_of(request: ScriptedRequest) -> str:
        return str(
            next(
                message["content"]
                for message in request.messages
                if message["role"] == "user"
            )
        )

    def answer(request: ScriptedRequest) -> ScriptedReply:
        goal = goal_of(request)
        first = calls(
            call("shop-book", {"name": f"{goal}/book"}, id="book"),
            call("shop-label", {"name": f"{goal}/label"}, id="label"),
        )
        return [
            first,
            call("shop-post", {"name": f"{goal}/post"}, id="post"),
            say("Done."),
        ][turn(request)]

    async def ask(request: ScriptedRequest) -> None:
        await world.do(f"{goal_of(request)}/ask{turn(request)}")

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(answer, before_reply=ask))
    kernel.add_plugin(Shop(world), "shop")
    return planner_of(), kernel
