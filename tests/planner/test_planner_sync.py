"""``invoke_sync``: a run for code that is not async, with or without an event loop running around it."""

import asyncio
import signal
import threading
from typing import Any

import pytest
from semantic_kernel.functions import kernel_function

from planner_ext import Budget
from planner_ext.engine.concurrency import run_sync
from planner_ext.errors import LimitReachedError, PlannerInvalidConfigurationError
from planner_ext.testing import call, say
from support.planner import ADD, GOAL, final, never_stops, planner_with, scripted


def test_a_script_gets_its_result() -> None:
    """Without a running loop a goal is reached in this thread."""
    kernel, service = scripted([ADD, final()])
    result = planner_with(plan=False, require_final_answer_function=True).invoke_sync(kernel, GOAL)
    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert len(service.requests) == 2


async def test_a_notebook_gets_its_result() -> None:
    """Under a running loop the run has its own, in another thread, and the call waits for it."""
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
    planner = planner_with(budget=Budget(max_iterations=1, on_limit="raise"), plan=False)

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


async def test_an_interrupt_cancels_what_runs() -> None:
    """Ctrl-C while the call waits cancels the coroutine, and is raised once that has ended."""
    ended: list[str] = []

    async def work() -> None:
        try:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_sync(work)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended == ["cancelled"]
