import asyncio
import contextvars
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Annotated, Any, Literal, Optional

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import (
    KernelArguments,
    KernelFunction,
    KernelFunctionFromPrompt,
    kernel_function,
)
from semantic_kernel.functions.kernel_function_from_method import (
    KernelFunctionFromMethod,
)

from planner_ext.engine.concurrency import Raised, caught, in_thread
from planner_ext.errors import LeftByError
from planner_ext.sk.errors import PlannerInvalidConfigurationError
from planner_ext.sk.functions.execution import ToolExecution, runnable
from planner_ext.sk.functions.toolset import tool_of
from support.values import each_of


def function_of(method: Callable[..., Any]) -> KernelFunctionFromMethod:
    return KernelFunctionFromMethod(kernel_function(method), plugin_name="p")


def prepared(function: KernelFunction, *, threads: bool) -> KernelFunction:
    return runnable(function, tool_of(function), threads=threads)


async def value_of(function: KernelFunction, **arguments: Any) -> Any:
    result = await function.invoke(Kernel(), KernelArguments(**arguments))
    assert result is not None
    return result.value


def test_the_defaults_run_all_at_once_in_threads_without_a_timeout() -> None:
    """Without options calls run together, in threads, for as long as they take, and tell the model no detail."""
    execution = ToolExecution()
    assert execution.max_concurrency is None
    assert execution.threads is True
    assert execution.include_error_detail is False
    assert execution.timeout_of("p-f") is None


def test_a_number_is_the_timeout_of_every_function() -> None:
    """One timeout holds for all functions."""
    assert ToolExecution(timeout=2.5).timeout_of("p-f") == 2.5


def test_a_mapping_is_the_timeout_of_the_functions_it_names() -> None:
    """A mapping goes by fully qualified name; a function that it does not name has no timeout."""
    execution = ToolExecution(timeout={"p-f": 1})
    assert (execution.timeout_of("p-f"), execution.timeout_of("p-g")) == (1, None)


@each_of(
    ("field", "value"),
    [
        ("max_concurrency", 0),
        ("max_concurrency", True),
        ("max_concurrency", 1.0),
        ("timeout", 0),
        ("timeout", True),
        ("timeout", -1.0),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", "5"),
        ("timeout", {"p-f": 0}),
        ("timeout", {"p-f": None}),
        ("timeout", {1: 1}),
        ("on_error", "ignore"),
        ("include_error_detail", 1),
        ("stop_on_unknown_function", None),
        ("threads", "yes"),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(field: str, value: Any) -> None:
    """The error names the field and shows what was seen."""
    given: dict[str, Any] = {field: value}
    seen = next(iter(value.items())) if isinstance(value, dict) else (value,)
    with pytest.raises(
        PlannerInvalidConfigurationError,
        match=rf"ToolExecution\.{field}.* must be .*; got ",
    ) as raised:
        ToolExecution(**given)
    assert any(repr(one) in str(raised.value) for one in seen)


async def test_a_synchronous_function_runs_beside_the_event_loop() -> None:
    """A synchronous function that waits for the event loop gets what it waits for."""
    loop, main = asyncio.get_running_loop(), threading.get_ident()

    def ask() -> tuple[str, int]:
        return asyncio.run_coroutine_threadsafe(
            asyncio.sleep(0, "answer"), loop
        ).result(), threading.get_ident()

    answer, thread = await value_of(prepared(function_of(ask), threads=True))
    assert answer == "answer"
    assert thread != main


async def test_without_threads_a_synchronous_function_runs_on_the_event_loop() -> None:
    """``threads`` off leaves a function as it is, the very same object."""

    def f() -> int:
        return threading.get_ident()

    function = function_of(f)
    assert prepared(function, threads=False) is function
    assert await value_of(function) == threading.get_ident()


async def test_the_kernels_own_function_is_not_changed() -> None:
    """What runs is a copy with the same class, name and metadata; the kernel's function keeps its method."""

    def f() -> str:
        return "done"

    function = function_of(f)
    copy = prepared(function, threads=True)
    assert function.method is f
    assert copy is not function
    assert type(copy) is type(function)
    assert copy.metadata is function.metadata


async def an_async_function() -> str:
    return "async"


@wraps(an_async_function)
def a_wrapped_async_function() -> Any:
    return an_async_function()


async def an_async_generator_function() -> Any:
    yield "async"


class AsyncCallable:
    __name__ = "callable"

    async def __call__(self) -> str:
        return "async"


@each_of(
    "method",
    [
        an_async_function,
        a_wrapped_async_function,
        an_async_generator_function,
        AsyncCallable(),
    ],
)
async def test_functions_that_do_not_block_stay_on_the_event_loop(
    method: Callable[..., Any],
) -> None:
    """Coroutine and generator functions, wrapped ones and callable objects are run as they are."""
    function = function_of(method)
    assert prepared(function, threads=True) is function
    assert await value_of(function) in ("async", ["async"])


def generator() -> Iterator[int]:
    yield 1


async def async_generator() -> Any:
    yield 1


@each_of(
    ("made_by", "value"),
    [(generator, [1]), (async_generator, [1]), (an_async_function, "async"), (str, "")],
)
async def test_what_a_synchronous_function_returns_is_awaited_or_listed(
    made_by: Callable[[], Any], value: object
) -> None:
    """A thread changes nothing of what Semantic Kernel does with coroutines and generators that a function returns."""

    def make() -> Any:
        return made_by()

    assert await value_of(function_of(make)) == value
    assert await value_of(prepared(function_of(make), threads=True)) == value


def test_functions_that_have_no_method_are_left_alone() -> None:
    """A prompt function is run as it is."""
    prompt = KernelFunctionFromPrompt(
        function_name="f", plugin_name="p", prompt="Hello"
    )
    assert prepared(prompt, threads=True) is prompt


def optional(p: Annotated[Optional[int], "as older code writes it"] = None) -> Any:  # noqa: UP045  (as older code writes it)
    return p


def literal(p: Literal["a"]) -> Any:
    return p


def demanded(p: int | None) -> Any:
    return p


def hidden(p: Annotated[str | None, {"include_in_function_choices": False}]) -> Any:
    return p


@each_of(
    ("method", "arguments", "value"),
    [
        (optional, {"p": 5}, 5),
        (optional, {}, None),
        (literal, {"p": "a"}, "a"),
        (demanded, {}, None),
        (demanded, {"p": 1}, 1),
    ],
)
@pytest.mark.parametrize("threads", [True, False])
async def test_parameters_that_semantic_kernel_cannot_pass_are_passed(
    method: Callable[..., Any], arguments: dict[str, Any], value: object, threads: bool
) -> None:
    """Annotated optionals, literals, and optionals without a default reach the function."""
    assert (
        await value_of(prepared(function_of(method), threads=threads), **arguments)
        == value
    )


async def test_a_missing_hidden_argument_stays_an_error() -> None:
    """What only the application can give is not made up."""
    with pytest.raises(TypeError, match="missing 1 required"):
        await value_of(prepared(function_of(hidden), threads=True))


async def test_context_variables_reach_the_thread() -> None:
    """A function in a thread sees the caller's context variables; what it sets stays there."""
    variable = contextvars.ContextVar("variable", default="default")
    variable.set("of the caller")

    def work() -> str:
        seen = variable.get()
        variable.set("of the thread")
        return seen

    assert await in_thread(work) == "of the caller"
    assert variable.get() == "of the caller"


async def test_stop_iteration_in_a_thread_is_an_error_like_another() -> None:
    """StopIteration, which no future takes, arrives as RuntimeError instead of hanging the wait."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(partial(next, iter(())))


async def test_what_ends_the_program_is_an_error_of_its_thread() -> None:
    """SystemExit in a function's thread reaches the caller as an exception, which names it."""
    with pytest.raises(LeftByError, match="SystemExit: 3"):
        await in_thread(partial(sys.exit, 3))


async def test_a_cancelled_wait_abandons_its_thread() -> None:
    """The wait ends at once; the thread continues by itself, and its late outcome is ignored."""
    started, released, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        released.wait()
        ended.set()

    waiting = asyncio.create_task(in_thread(work))
    await asyncio.to_thread(started.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not ended.is_set()
    released.set()
    await asyncio.to_thread(ended.wait)


def test_an_abandoned_thread_does_not_keep_the_program_alive() -> None:
    """The interpreter ends while a function that never returns still runs."""
    program = """
import asyncio, threading
from planner_ext.engine.concurrency import in_thread

async def main():
    try:
        async with asyncio.timeout(0.01):
            await in_thread(threading.Event().wait)
    except TimeoutError:
        print("timed out")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout == "timed out\n"


async def test_caught_returns_what_work_raises() -> None:
    """An error is a value, a result is itself."""

    async def fail() -> None:
        raise ValueError("no")

    outcome = await caught(fail())
    assert isinstance(outcome, Raised)
    assert isinstance(outcome.error, ValueError)
    assert await caught(asyncio.sleep(0, "result")) == "result"


async def test_caught_tells_a_cancellation_of_the_task_from_one_inside_it() -> None:
    """A cancelled error without a cancellation is a value; the cancellation of the task is raised."""

    async def stray() -> None:
        raise asyncio.CancelledError

    assert isinstance(await caught(stray()), Raised)
    task = asyncio.create_task(caught(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
