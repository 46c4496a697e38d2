"""``invoke_sync`` and ``resume_sync``: runs for code that is not async, on one event loop for the process."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, Budget, FunctionCallingStepwisePlanner
from planner_ext.engine.background import run_sync
from planner_ext.errors import (
    InvalidOptionError,
    LimitReachedError,
    PlannerInvalidConfigurationError,
)
from planner_ext.hitl_manager import Defer
from planner_ext.testing import Script, ScriptedOpenAIServer, call, say
from support.planner import (
    ADD,
    GOAL,
    final,
    kernel_of,
    never_stops,
    planner_with,
    scripted,
)


@contextmanager
def kept_alive(script: Script) -> Generator[tuple[Kernel, ScriptedOpenAIServer]]:
    """Make a kernel whose OpenAI client keeps its connections to a server; it is made and closed without a loop."""
    with ScriptedOpenAIServer(script) as server:
        client = AsyncOpenAI(base_url=server.url, api_key="any", max_retries=0)
        yield (
            kernel_of(
                OpenAIChatCompletion("scripted", service_id="chat", async_client=client)
            ),
            server,
        )
        run_sync(client.close(), door="close_sync")


def test_a_script_asks_again_and_again() -> None:
    """Many calls on one kernel with a real client: its connections live from one call to the next."""
    planner = planner_with(plan=False)
    with kept_alive([say(f"Answer {place}.") for place in range(6)]) as (
        kernel,
        server,
    ):
        answers = [planner.invoke_sync(kernel, GOAL).final_answer for _ in range(6)]
    assert answers == [f"Answer {place}." for place in range(6)]
    assert len(server.requests) == 6


def test_a_script_a_notebook_and_threads_share_the_loop() -> None:
    """With a loop around it, without one, and from threads at once: one client serves all calls."""
    planner = planner_with(plan=False)

    async def notebook(kernel: Kernel) -> str:
        return planner.invoke_sync(kernel, GOAL).final_answer

    with (
        kept_alive(lambda _: say("Yes.")) as (kernel, _),
        ThreadPoolExecutor(4) as threads,
    ):
        answers = [
            planner.invoke_sync(kernel, GOAL).final_answer,
            asyncio.run(notebook(kernel)),
        ]
        answers += threads.map(
            lambda _: planner.invoke_sync(kernel, GOAL).final_answer, range(8)
        )
        answers += [
            asyncio.run(notebook(kernel)),
            planner.invoke_sync(kernel, GOAL).final_answer,
        ]
    assert answers == ["Yes."] * 12


def test_a_paused_run_is_resumed_by_a_script() -> None:
    """``resume_sync`` continues with the decisions, over the same client, from a checkpoint and from its text."""

    async def ask(_: object) -> Defer:
        return Defer()

    with kept_alive([ADD, say("3."), ADD, say("3 again.")]) as (kernel, _):
        answers: list[str] = []
        for written in (
            lambda checkpoint: checkpoint,
            lambda checkpoint: checkpoint.to_json(),
        ):
            planner = planner_with(plan=False, interceptors=[ask])
            paused = planner.invoke_sync(kernel, GOAL)
            decisions = {paused.pending[0].id: Approve()}
            answers.append(
                planner.resume_sync(
                    kernel, written(paused.checkpoint), decisions
                ).final_answer
            )
    assert answers == ["3.", "3 again."]


def test_a_script_gets_its_result() -> None:
    """A goal is reached while this thread waits."""
    kernel, service = scripted([ADD, final()])
    result = planner_with(plan=False, require_final_answer_function=True).invoke_sync(
        kernel, GOAL
    )
    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert len(service.requests) == 2


async def test_a_notebook_gets_its_result() -> None:
    """Under a running loop the run has another one, in another thread, and the call waits for it."""
    threads: list[str] = []

    class Tools:
        @kernel_function
        async def where(self) -> str:
            """Say where it runs."""
            threads.append(threading.current_thread().name)
            return "here"

    kernel, _ = scripted([call("tools-where"), say("Done.")])
    kernel.add_plugin(Tools(), "tools")
    assert planner_with(plan=False).invoke_sync(kernel, GOAL).final_answer == "Done."
    assert threads
    assert threads != [threading.current_thread().name]


@pytest.mark.parametrize("running", [False, True])
def test_what_a_run_raises_is_raised(running: bool) -> None:
    """Errors are those of ``invoke``."""
    planner = planner_with(
        budget=Budget(max_iterations=1, on_limit="raise"), plan=False
    )

    async def notebook(goal: Any) -> None:
        planner.invoke_sync(scripted(never_stops)[0], goal)

    def ask(goal: Any) -> None:
        if running:
            asyncio.run(notebook(goal))
        else:
            planner.invoke_sync(scripted(never_stops)[0], goal)

    with pytest.raises(LimitReachedError):
        ask(GOAL)
    with pytest.raises(PlannerInvalidConfigurationError, match="goal"):
        ask("")


async def test_a_run_in_a_function_is_charged_to_the_run_around_it() -> None:
    """The call of a function is known in the thread: a planner that a function runs spends the outer budget."""
    inner, outer = planner_with(plan=False), planner_with(plan=False, max_iterations=3)

    class Tools:
        @kernel_function
        async def think(self) -> str:
            """Think."""
            return inner.invoke_sync(scripted([say("Thought.")])[0], GOAL).final_answer

    kernel, _ = scripted([call("tools-think"), say("Done.")])
    kernel.add_plugin(Tools(), "tools")
    result = await outer.invoke(kernel, GOAL)
    assert (result.final_answer, result.iterations) == ("Done.", 3)


def interrupted_in(work: Any) -> Any:
    """Interrupt the main thread as Ctrl-C does, as soon as the work says so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt) as raised:
            run_sync(work, door="wait_sync")
    finally:
        signal.signal(signal.SIGINT, before)
    return raised.value


def press_ctrl_c() -> None:
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def test_an_interrupt_cancels_what_runs() -> None:
    """Ctrl-C while the call waits cancels the coroutine, and is raised once that has ended."""
    ended: list[str] = []

    async def work() -> None:
        try:
            press_ctrl_c()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            ended.append("cancelled")
            raise

    interrupted_in(work())
    assert ended == ["cancelled"]


def test_a_second_interrupt_does_not_wait() -> None:
    """Work that ignores its cancellation is left behind at the second Ctrl-C, and ends by itself."""
    may_end, left = threading.Event(), threading.Event()

    async def work() -> None:
        try:
            press_ctrl_c()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            press_ctrl_c()
            await asyncio.to_thread(may_end.wait)
            left.set()

    interrupted_in(work())
    assert not left.is_set()
    may_end.set()
    assert left.wait(60)


def test_an_interrupted_run_can_be_resumed() -> None:
    """The ``KeyboardInterrupt`` carries history and checkpoint, as a cancellation does."""

    class Tools:
        @kernel_function
        async def hang(self) -> str:
            """Wait until interrupted."""
            press_ctrl_c()
            return await asyncio.Future()

    kernel, _ = scripted([ADD, call("tools-hang"), say("Done.")])
    kernel.add_plugin(Tools(), "tools")
    planner = planner_with(plan=False)
    interrupt = interrupted_in(planner.invoke(kernel, GOAL))
    roles = [message.role.value for message in interrupt.chat_history.messages]
    assert roles == ["user", "assistant", "tool", "assistant", "tool"]
    assert planner.resume_sync(kernel, interrupt.checkpoint).final_answer == "Done."


@pytest.mark.parametrize("door", ["invoke_sync", "resume_sync"])
def test_the_loop_does_not_wait_for_itself(door: str) -> None:
    """An async function of a run that began here gets an error that says to await, and may; nothing hangs."""
    seen: list[Exception] = []
    planner = FunctionCallingStepwisePlanner()

    class Tools:
        @kernel_function
        async def again(self) -> str:
            """Ask again, in the wrong way and then in the right one."""
            try:
                if door == "invoke_sync":
                    planner.invoke_sync(kernel, GOAL)
                else:
                    planner.resume_sync(kernel, "{}")
            except InvalidOptionError as error:
                seen.append(error)
            return "told"

    kernel, _ = scripted([call("tools-again"), say("Done.")])
    kernel.add_plugin(Tools(), "tools")
    assert planner_with(plan=False).invoke_sync(kernel, GOAL).final_answer == "Done."
    assert f"Await {door.removesuffix('_sync')} there" in str(seen[0])


def test_a_plain_function_of_a_run_may_wait() -> None:
    """A function that is not async runs in a thread: a planner that it asks spends the outer run's budget."""
    inner = planner_with(plan=False)

    class Tools:
        @kernel_function
        def think(self) -> str:
            """Think."""
            return inner.invoke_sync(scripted([say("Thought.")])[0], GOAL).final_answer

    kernel, _ = scripted([call("tools-think"), say("Done.")])
    kernel.add_plugin(Tools(), "tools")
    result = planner_with(plan=False).invoke_sync(kernel, GOAL)
    assert (result.final_answer, result.iterations) == ("Done.", 3)


def test_context_variables_reach_the_run() -> None:
    """Functions of the run see the caller's context variables."""
    tenant: ContextVar[str] = ContextVar("tenant", default="nobody")
    seen: list[str] = []

    class Tools:
        @kernel_function
        async def who(self) -> str:
            """Say for whom it runs."""
            seen.append(tenant.get())
            return tenant.get()

    for name in ("ann", "bob"):
        kernel, _ = scripted([call("tools-who"), say("Done.")])
        kernel.add_plugin(Tools(), "tools")
        reset = tenant.set(name)
        planner_with(plan=False).invoke_sync(kernel, GOAL)
        tenant.reset(reset)
    assert seen == ["ann", "bob"]


def test_an_exit_in_one_run_leaves_the_loop_to_the_others() -> None:
    """What ends an event loop, such as ``SystemExit`` in a task, ends one caller's work alone."""

    async def leave() -> None:
        await asyncio.create_task(exits())

    async def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_sync(leave(), door="leave_sync")
    kernel, _ = scripted([say("Done.")])
    assert planner_with(plan=False).invoke_sync(kernel, GOAL).final_answer == "Done."


SCRIPT = """
import os, warnings
# From Python 3.12 on, of every fork beside other threads.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
from semantic_kernel import Kernel
from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.testing import ScriptedChatCompletion, say

def ask(answer):
    kernel = Kernel(services=[ScriptedChatCompletion([say(answer)])])
    options = FunctionCallingStepwisePlannerOptions(plan=False)
    return FunctionCallingStepwisePlanner(options=options).invoke_sync(kernel, "What?").final_answer

print(ask("before"), flush=True)
if hasattr(os, "fork"):
    child = os.fork()
    if child == 0:
        print(ask("in the child"), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(ask("in the parent"), flush=True)
"""


def test_a_process_ends_cleanly_and_a_forked_one_has_its_own_loop() -> None:
    """Nothing is printed at the interpreter's end; after a fork parent and child continue."""
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    more = ["in the child", "in the parent"] if hasattr(os, "fork") else []
    assert ended.returncode == 0
    assert ended.stdout.splitlines() == ["before", *more]
    assert ended.stderr == ""
