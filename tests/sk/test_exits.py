"""What would end more than a call, such as ``SystemExit``, ends that call; an interrupt passes, the call in doubt."""

import argparse
import asyncio
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator, BaseModel
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import ApprovalFilter, Approve, Budget, Defer, ToolExecution
from planner_ext.core.facts import CallFinished
from planner_ext.core.machine import IN_DOUBT
from planner_ext.errors import ServiceCallError
from planner_ext.testing import call, calls, say
from support.approval import (
    DOORS,
    Door,
    World,
    asked,
    every_door,
    one_door,
    planner_with,
    results,
    three_doors,
    world,
)
from support.approval_filter import chat
from support.stock import add_filter
from support.values import each_of

LEAVES: dict[str, Callable[[], BaseException]] = {
    "exit": lambda: SystemExit(2),
    "interrupt": KeyboardInterrupt,
    "close": GeneratorExit,
    "cancelled": asyncio.CancelledError,
    "stop": lambda: StopIteration(3),
    "group": lambda: BaseExceptionGroup("two", [SystemExit(2), KeyboardInterrupt()]),
}

of_each_kind = each_of("make", LEAVES.values(), ids=LEAVES)


def _leaves() -> None:
    raise SystemExit(2)


def _parsed(text: str) -> str:
    parser = argparse.ArgumentParser("report")
    parser.add_argument("name")
    parser.parse_args([text])
    return text


class Command(BaseModel):
    """A value that the application parses."""

    name: Annotated[str, AfterValidator(_parsed)]


class Desk:
    """Functions that raise what a test says."""

    def __init__(
        self, make: Callable[[], BaseException] = lambda: SystemExit(2)
    ) -> None:
        self._make = make

    @kernel_function(description="Raises in its thread.")
    def leave(self) -> str:
        raise self._make()

    @kernel_function(description="Raises on the event loop.")
    async def leave_async(self) -> str:
        await asyncio.sleep(0)
        raise self._make()

    @kernel_function(description="Raises in the middle of its results.")
    def leave_midway(self) -> Any:
        yield "one"
        raise self._make()

    @kernel_function(description="Parses what the model wrote, as a command would.")
    def report(self, name: str) -> str:
        return _parsed(name)

    @kernel_function(description="Takes a value that is parsed before it runs.")
    def send(self, command: Command) -> str:
        return command.name

    @kernel_function(description="Calls a function of this run's kernel.")
    async def delegate(self, kernel: Kernel) -> str:
        try:
            return str(
                await kernel.invoke(plugin_name="desk", function_name="leave_async")
            )
        except Exception as error:
            return f"It failed: {type(error).__name__}"

    @kernel_function(description="Works.")
    def work(self) -> str:
        return "worked"


def desk(
    *names: str,
    make: Callable[[], BaseException] = lambda: SystemExit(2),
    **arguments: Any,
) -> World:
    """Make a world whose model calls functions of the desk at once, and then answers."""
    script = [calls(*(call(f"desk-{name}", arguments) for name in names)), say("Done.")]
    return world(script, desk=Desk(make))


@of_each_kind
@each_of("name", ["leave", "leave_midway"])
async def test_what_a_synchronous_function_raises_in_its_thread_is_its_error(
    make: Callable[[], BaseException], name: str
) -> None:
    """For every exception, an interrupt included: the model reads that the call failed; its sibling has its result."""
    here = desk(name, "work", make=make)
    result = await planner_with().invoke(here.kernel, "Report.")
    assert result.chat_history is not None
    assert results(result.chat_history) == [
        f"The function desk-{name} failed.",
        "worked",
    ]


@every_door
@each_of("name", ["leave", "leave_async"])
@each_of(
    "execution",
    [{}, {"timeout": 60}, {"max_concurrency": 1}, {"threads": False}],
    ids=str,
)
async def test_an_exit_is_the_error_of_its_call(
    door: Door, name: str, execution: dict[str, Any]
) -> None:
    """At each door, in a thread or on the loop, with a timeout or without: the run continues to its answer."""
    outcome = await door.ask(desk(name, "work"), execution=ToolExecution(**execution))
    assert (outcome.text, results(outcome.history)) == (
        "Done.",
        [f"The function desk-{name} failed.", "worked"],
    )


@one_door
async def test_a_limit_of_time_does_not_let_an_exit_out(door: Door) -> None:
    """Under ``max_active_seconds`` each call has a task of its own, and an exit stays in it as well."""
    outcome = await door.ask(
        desk("leave_async", "work"), budget=Budget(max_active_seconds=600)
    )
    assert results(outcome.history) == [
        "The function desk-leave_async failed.",
        "worked",
    ]


async def test_the_record_names_what_was_raised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """``argparse`` on the model's text exits, and the journal says so."""
    here = desk("report", name="--help")
    result = await planner_with().invoke(here.kernel, "Report.")
    (ended,) = [fact for fact in result.facts if isinstance(fact, CallFinished)]
    assert result.final_answer == "Done."
    assert ended.outcome == "failed"
    assert ended.error == "LeftByError: SystemExit: 0"
    assert "usage: report" in capsys.readouterr().out


async def test_an_exit_while_an_argument_is_read_is_an_invalid_argument(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A validator of the application that parses the model's text ends no process."""
    here = desk("send", command={"name": "--help"})
    result = await planner_with().invoke(here.kernel, "Report.")
    assert (result.final_answer, result.tool_calls) == ("Done.", 0)
    capsys.readouterr()


@one_door
async def test_an_exit_inside_a_function_that_a_function_calls_is_an_error_there(
    door: Door,
) -> None:
    """``kernel.invoke`` raises in the function around it, which may handle that."""
    outcome = await door.ask(desk("delegate"))
    assert results(outcome.history) == ["It failed: KernelInvokeException"]


async def _exits(*_: Any) -> None:
    raise SystemExit(2)


def _exits_at_once(*_: Any) -> None:
    raise SystemExit(2)


@one_door
@each_of("kind", ["auto_function_invocation", "function_invocation"])
async def test_an_exit_in_a_filter_is_the_error_of_the_call(
    door: Door, kind: Any
) -> None:
    """Each kind of filter; the function did not run."""
    here = desk("work")

    async def leaves(context: Any, next: Any) -> None:
        raise SystemExit(2)

    add_filter(here.kernel, kind, leaves)
    outcome = await door.ask(here)
    assert results(outcome.history) == ["The function desk-work failed."]


@three_doors
@each_of("exits", [_exits, _exits_at_once], ids=["async", "sync"])
async def test_an_exit_in_an_interceptor_or_approver_denies(
    door: Door, exits: Any
) -> None:
    """Who cannot decide does not let a call run."""
    intercepted = await door.ask(desk("work"), interceptors=[exits])

    async def asks(_: Any) -> Defer:
        return Defer()

    approved = await door.ask(desk("work"), interceptors=[asks], approver=exits)
    for outcome in (intercepted, approved):
        (refusal,) = results(outcome.history)
        assert refusal.endswith("It could not be decided.")


@one_door
@each_of("exits", [_exits, _exits_at_once], ids=["async", "sync"])
async def test_an_exit_in_an_observer_changes_nothing(door: Door, exits: Any) -> None:
    """It is logged, and the run ends with its answer."""
    outcome = await door.ask(desk("work"), observers=[exits])
    assert (outcome.text, results(outcome.history)) == ("Done.", ["worked"])


@three_doors
@each_of("exits", [_exits, _exits_at_once], ids=["async", "sync"])
@each_of("error", [SystemExit(2), asyncio.CancelledError()], ids=["exit", "cancelled"])
async def test_what_a_callback_raises_is_an_error_of_the_run(
    door: Door, exits: Any, error: BaseException
) -> None:
    """The iteration-completed callback ends the run with an exception, as any other failure of it does."""

    async def raises_later(_: Any) -> None:
        raise error

    def raises(_: Any) -> None:
        raise error

    callback = raises if exits is _exits_at_once else raises_later
    with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
        await door.ask(desk("work"), iteration_completed=callback)
    assert caught.value.__cause__ is error


async def test_an_exit_of_a_clarifier_is_an_error_of_the_run() -> None:
    """The question stays open, and the process lives."""
    here = world(
        [call("UserInteraction-AskUser", {"question": "Which?"}), say("Done.")]
    )
    with pytest.raises(RuntimeError, match="SystemExit: 2"):
        await planner_with(clarifier=_exits, max_clarifications=1).invoke(
            here.kernel, "Report."
        )


@pytest.mark.parametrize("door", [door for door in DOORS if not door.streamed], ids=str)
@each_of("make", [KeyboardInterrupt, GeneratorExit], ids=["interrupt", "close"])
async def test_an_interrupt_on_the_loop_passes_and_leaves_the_call_in_doubt(
    door: Door, make: Callable[[], BaseException]
) -> None:
    """It reaches the caller with the run, whose history says that it is unknown whether the call took effect.

    A stream's run has a task of its own, which hands an interrupt to its event loop, and so to the loop's caller.
    """
    with pytest.raises(make) as caught:  # pyright: ignore[reportArgumentType, reportCallIssue]
        await door.ask(desk("leave_async", make=make))
    assert results(vars(caught.value)["chat_history"]) == [IN_DOUBT]


@three_doors
async def test_a_resumed_call_that_exits_has_failed(door: Door) -> None:
    """What a person approved runs after the pause, and its exit is its error."""

    async def asks(_: Any) -> Defer:
        return Defer()

    here = desk("leave")
    paused = await door.ask(here, interceptors=[asks])
    resumed = await door.resume(
        here, paused.checkpoint, {paused.waiting[0]: Approve()}, interceptors=[asks]
    )
    assert results(resumed.history) == ["The function desk-leave failed."]


@each_of("kind", ["auto_function_invocation", "function_invocation"])
@each_of("name", ["leave", "leave_async"])
async def test_an_exit_under_an_approval_filter_is_the_error_of_its_call(
    kind: Any, name: str
) -> None:
    """A stock kernel continues, both after a call that its approver approved and after one that is resumed."""

    async def approver(_: Any) -> Approve:
        return Approve()

    asks = ApprovalFilter(lambda _: Defer(), approver=approver)
    here = desk(name)
    add_filter(here.kernel, kind, asks)
    await chat(here, asked())
    assert here.requests == 2

    waits, history, there = ApprovalFilter(lambda _: Defer()), asked(), desk(name)
    add_filter(there.kernel, "auto_function_invocation", waits)
    await chat(there, history)
    await waits.resume(there.kernel, history, {"call_1": Approve()})
    assert results(history) == [f"The function desk-{name} failed."]


@pytest.mark.parametrize("door", [door for door in DOORS if door.streamed], ids=str)
async def test_a_close_in_a_streamed_run_is_an_error_with_the_run(door: Door) -> None:
    """Handed on as it is, it would close the reader of the stream."""
    with pytest.raises(RuntimeError, match="GeneratorExit") as caught:
        await door.ask(desk("leave_async", make=GeneratorExit))
    assert results(vars(caught.value)["chat_history"]) == [IN_DOUBT]


class _UntoldError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise ValueError("no text")

    __repr__ = __str__


async def _untold(*_: Any) -> None:
    raise _UntoldError


@one_door
async def test_an_exception_without_a_text_is_reported_as_any_other(door: Door) -> None:
    """Of a function, an interceptor, an observer; Semantic Kernel's own log line may fail there."""
    failed = await door.ask(desk("leave", "work", make=_UntoldError))
    assert results(failed.history) == ["The function desk-leave failed.", "worked"]
    observed = await door.ask(desk("work"), observers=[_untold])
    assert results(observed.history) == ["worked"]
    denied = await door.ask(desk("work"), interceptors=[_untold])
    assert results(denied.history)[0].endswith("It could not be decided.")


@three_doors
async def test_a_connector_that_fails_without_a_text_is_a_named_error(
    door: Door,
) -> None:
    """The error of the request names the class."""

    def fails(_: Any) -> Any:
        raise _UntoldError

    with pytest.raises(ServiceCallError, match="_UntoldError: its text cannot be read"):
        await door.ask(world(fails))
