"""How a function runs: its result, its faults, its time, and what it is given."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.filters.functions.function_invocation_context import (
    FunctionInvocationContext,
)
from semantic_kernel.functions import KernelArguments, KernelFunction, kernel_function

from planner_ext.engine.ports import Finished
from planner_ext.sk.functions.execution import ToolExecution
from support.functions import FILTERED, Bench, Filter, passing, request, state_of
from support.narrow import as_type


@FILTERED
async def test_a_function_runs_and_its_result_is_json(
    filters: tuple[Filter, ...],
) -> None:
    """The model reads JSON, not Python."""
    bench = Bench(*filters)
    assert await bench.run("lights-switch", {"room": "hall"}) == Finished(
        outcome="ok", text='{"room":"hall","on":true}'
    )
    assert bench.lights.seen == [("hall", True)]


@FILTERED
async def test_a_result_that_cannot_be_copied_is_kept(
    filters: tuple[Filter, ...],
) -> None:
    """The result is written, never deep-copied: the model reads what was done."""
    finished = await Bench(*filters).run("lights-lock")
    assert finished.outcome == "ok"
    assert finished.text.startswith('{"lock":"<unlocked')


@FILTERED
async def test_the_applications_arguments_are_shared_and_not_changed(
    filters: tuple[Filter, ...],
) -> None:
    """A function gets the application's arguments and settings beside the model's, in an object of its own."""
    settings = PromptExecutionSettings(service_id="chat")
    arguments = KernelArguments(
        settings=settings, user="ann", what="the application's", other=threading.Lock()
    )
    before = dict(arguments)
    got: list[KernelArguments] = []

    async def look(
        context: FunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        got.append(context.arguments)
        context.arguments["added"] = "by a filter"
        await next(context)

    bench = Bench(*filters, function_filters=(look,), arguments=arguments)
    assert (await bench.run("lights-own", {"what": "lamp"})).text == "lamp of ann"
    assert got[0] is not arguments
    assert got[0].execution_settings == {"chat": settings}
    assert dict(arguments) == before


@FILTERED
async def test_a_parameter_named_settings_is_passed(
    filters: tuple[Filter, ...],
) -> None:
    """``settings`` is an argument like another."""
    assert (
        await Bench(*filters).run("lights-dim", {"settings": "evening"})
    ).text == "evening"


@FILTERED
async def test_null_for_an_optional_is_none_and_hides_the_applications_value(
    filters: tuple[Filter, ...],
) -> None:
    """The function gets None, neither the text "None" nor what the application has under that name."""
    bench = Bench(*filters, arguments=KernelArguments(label="the application's"))
    await bench.run("lights-name", {"label": None})
    await bench.run("lights-name", {"label": "mine"})
    await bench.run("lights-name")
    assert bench.lights.seen == [None, "mine", "the application's"]


@FILTERED
async def test_a_failing_function_is_reported_without_detail(
    filters: tuple[Filter, ...],
) -> None:
    """The model reads that it failed; the record has the exception."""
    finished = await Bench(*filters).run("lights-fail")
    assert (finished.outcome, finished.text) == (
        "failed",
        "The function lights-fail failed.",
    )
    assert finished.error == "ValueError: password is hunter2"
    assert isinstance(finished.exception, ValueError)


@FILTERED
async def test_detail_is_given_on_request_and_cut(filters: tuple[Filter, ...]) -> None:
    """``include_error_detail`` adds type and message, within bounds."""
    bench = Bench(*filters, execution=ToolExecution(include_error_detail=True))
    assert (
        await bench.run("lights-fail")
    ).text == "The function lights-fail failed: ValueError: password is hunter2"

    @kernel_function(name="verbose")
    async def verbose() -> None:
        raise RuntimeError("\ud800" + "x" * 10_000)

    bench.offered["lights-verbose"] = as_type(
        KernelFunction, bench.kernel.add_function("lights", verbose)
    )
    text = (await bench.run("lights-verbose")).text
    assert 2000 <= len(text) < 2100
    text.encode()


async def test_an_exception_without_a_text_is_still_recorded() -> None:
    """Nothing about an exception can break the record."""

    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    async def mute(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        raise MuteError

    finished = await Bench(mute).run("lights-name")
    assert (finished.outcome, finished.error) == (
        "failed",
        "MuteError: its text cannot be read",
    )


@FILTERED
async def test_an_argument_that_cannot_be_converted_is_explained(
    filters: tuple[Filter, ...],
) -> None:
    """A constructor of the application's own is left to the run: the model reads its refusal, under all options."""
    finished = await Bench(*filters).run("lights-aim", {"lamp": "first"})
    assert finished.outcome == "failed"
    assert finished.text == (
        'The argument "lamp" of lights-aim cannot be converted to Lamp. The function was not run. '
        "Call it again with a corrected argument."
    )


@FILTERED
async def test_a_function_is_timed_out(filters: tuple[Filter, ...]) -> None:
    """After its time a function is cancelled, and its effect is said to be unknown."""
    finished = await Bench(
        *filters, execution=ToolExecution(timeout={"lights-wait": 0.01})
    ).run("lights-wait")
    assert finished.outcome == "timed_out"
    assert finished.text == (
        "The function lights-wait did not answer within 0.01 seconds; whether it took effect is not known."
    )
    assert isinstance(finished.exception, TimeoutError)


@FILTERED
async def test_a_synchronous_function_is_timed_out(filters: tuple[Filter, ...]) -> None:
    """A blocked thread is abandoned."""
    release = threading.Event()

    @kernel_function(name="block")
    def block() -> None:
        release.wait()

    bench = Bench(*filters, execution=ToolExecution(timeout=0.01))
    bench.offered["lights-block"] = as_type(
        KernelFunction, bench.kernel.add_function("lights", block)
    )
    try:
        assert (await bench.run("lights-block")).outcome == "timed_out"
    finally:
        release.set()


async def test_a_function_that_answers_a_timeout_with_an_error_is_timed_out() -> None:
    """What a function raises when its time is up is not why it failed."""
    assert (
        await Bench(execution=ToolExecution(timeout=0.01)).run("lights-stubborn")
    ).outcome == "timed_out"


async def test_a_timeout_error_of_a_function_is_a_failure() -> None:
    """TimeoutError raised by a function is an error like another."""
    finished = await Bench(execution=ToolExecution(timeout=60)).run(
        "lights-slow_answer"
    )
    assert (finished.outcome, finished.error) == (
        "failed",
        "TimeoutError: the lamp did not answer",
    )


async def test_the_timeout_does_not_count_a_filter_that_waits() -> None:
    """An auto-function-invocation filter may wait for a person longer than its function may run."""
    answered = asyncio.Event()

    async def ask_a_person(
        context: Any, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        await answered.wait()
        await next(context)

    bench = Bench(ask_a_person, execution=ToolExecution(timeout=0.01, threads=False))
    running = asyncio.create_task(bench.run("lights-switch", {"room": "hall"}))
    await asyncio.wait([running], timeout=0.05)
    assert not running.done()
    answered.set()
    assert (await running).outcome == "ok"


@FILTERED
async def test_cancellation_reaches_the_function_and_is_raised(
    filters: tuple[Filter, ...],
) -> None:
    """Cancelling the run cancels what runs."""
    bench = Bench(*filters)
    running = asyncio.create_task(bench.run("lights-wait"))
    await bench.lights.waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@FILTERED
async def test_a_cancelled_error_of_a_function_is_a_failure(
    filters: tuple[Filter, ...],
) -> None:
    """CancelledError without a cancellation does not end the run."""
    finished = await Bench(*filters).run("lights-cancelled")
    assert (finished.outcome, finished.error) == ("failed", "CancelledError")


@FILTERED
async def test_an_exit_is_a_failure_of_the_function(
    filters: tuple[Filter, ...],
) -> None:
    """SystemExit ends the call that raised it, and no other."""
    finished = await Bench(*filters).run("lights-leave")
    assert (finished.outcome, finished.error) == (
        "failed",
        "LeftByError: SystemExit: 3",
    )


async def test_a_function_that_is_gone_is_answered() -> None:
    """A function that was withdrawn before its call runs does not run."""
    bench = Bench()
    call = request("lights-switch", {"room": "hall"})
    checked = bench.functions.check(call)
    del bench.offered["lights-switch"]
    state = state_of(call, checked, by="", edited=None, index=0, count=1)
    finished = await bench.functions.run(call, checked, index=0, state=state)
    assert finished.outcome == "failed"
    assert finished.text.startswith('There is no function "lights-switch".')
    assert bench.lights.seen == []


async def test_arguments_are_logged_at_debug_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing above DEBUG holds what the model sent."""
    caplog.set_level(logging.DEBUG)
    await Bench(passing).run("lights-switch", {"room": "secret room"})
    assert [
        one
        for one in caplog.records
        if "secret room" in one.getMessage() and one.levelno > logging.DEBUG
    ] == []
