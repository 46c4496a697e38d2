"""A function that nothing watches is called past Semantic Kernel's ``invoke``, and nobody can tell the difference."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from dataclasses import replace
from functools import wraps
from typing import Any

import pytest
from opentelemetry.metrics import _internal as metrics
from opentelemetry.sdk.metrics import MeterProvider
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, TextContent
from semantic_kernel.functions import (
    FunctionResult,
    KernelArguments,
    KernelFunction,
    kernel_function,
)
from semantic_kernel.functions.kernel_function_from_method import (
    KernelFunctionFromMethod,
)
from semantic_kernel.utils.telemetry.model_diagnostics import function_tracer

from planner_ext import FunctionInvokingChatCompletion
from planner_ext.core.facts import CallDecided, CallFinished, CallStarted, Fact
from planner_ext.sk.functions import execution
from planner_ext.sk.functions.execution import INVOKING, STACKING
from planner_ext.sk.members import is_own, source_digest
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.functions import Bench, Lamp, passing
from support.stock import add_filter
from support.telemetry import Recording, recording
from support.values import each_of

__all__ = ["recording"]

LOGGER = "semantic_kernel.functions.kernel_function"


class SilentError(Exception):
    """An exception whose text cannot be read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Odd:
    """A plugin of functions of every kind."""

    @kernel_function
    def sync(self, a: int, b: int = 2) -> int:
        return a + b

    @kernel_function
    async def lazy(self, text: str, times: int | None = None) -> str:
        await asyncio.sleep(0)
        return text * (times or 2)

    @kernel_function
    async def nothing(self) -> None: ...

    @kernel_function
    def raises(self) -> None:
        raise ValueError("password is hunter2")

    @kernel_function
    async def raises_later(self) -> None:
        raise KeyError("lamp")

    @kernel_function
    async def raises_silently(self) -> None:
        raise SilentError

    @kernel_function
    async def cancels(self) -> None:
        raise asyncio.CancelledError

    @kernel_function
    async def exits(self) -> None:
        raise SystemExit(3)

    @kernel_function
    async def converts(self, lamp: Lamp) -> str:
        return f"{lamp.number}"

    @kernel_function
    def counts(self) -> Generator[int]:
        yield from (1, 2)

    @kernel_function
    async def counts_later(self) -> AsyncGenerator[int]:
        yield 1
        yield 2

    @kernel_function
    def awaits(self) -> Any:
        return self.lazy("later")

    @kernel_function
    async def result(self) -> FunctionResult:
        function: Any = Kernel().add_function("p", self.nothing)
        return FunctionResult(function=function.metadata, value="of its own")

    @kernel_function
    async def content(self) -> Any:
        return [TextContent(text="one"), TextContent(text="two")]

    @kernel_function
    async def unwritable(self) -> Any:
        return {"object": ..., "text": "\ud800"}

    @kernel_function
    async def injected(
        self,
        arguments: KernelArguments,
        kernel: Kernel,
        execution_settings: PromptExecutionSettings,
        what: str,
    ) -> str:
        return f"{sorted(arguments)} {sorted(kernel.plugins)} {type(execution_settings).__name__} {what}"


CALLED = calls(
    call("odd-sync", {"a": 1}, id="1"),
    call("odd-lazy", {"text": "x"}, id="2"),
    call("odd-lazy", {"text": "x", "times": 3}, id="3"),
    call("odd-nothing", id="4"),
    call("odd-raises", id="5"),
    call("odd-raises_later", id="6"),
    call("odd-raises_silently", id="7"),
    call("odd-cancels", id="8"),
    call("odd-exits", id="9"),
    call("odd-converts", {"lamp": "none"}, id="10"),
    call("odd-converts", {"lamp": 7}, id="11"),
    call("odd-counts", id="12"),
    call("odd-counts_later", id="13"),
    call("odd-awaits", id="14"),
    call("odd-result", id="15"),
    call("odd-content", id="16"),
    call("odd-unwritable", id="17"),
    call("odd-injected", {"what": "lamp"}, id="18"),
)
KERNEL_TAKING = 1
"""Calls of a function that takes the kernel: its own view of it has a filter."""


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[KernelFunction]:
    """List the functions that were called directly."""
    seen: list[KernelFunction] = []
    stock = execution._invoked_directly  # pyright: ignore[reportPrivateUsage]

    def spied(
        function: KernelFunction, context: Any
    ) -> Coroutine[Any, Any, FunctionResult | None]:
        seen.append(function)
        return stock(function, context)

    monkeypatch.setattr(execution, "_invoked_directly", spied)
    return seen


async def run_all(
    caplog: pytest.LogCaptureFixture, *, filtered: bool
) -> tuple[Any, ...]:
    """Run every function once; return the history, the facts of the calls, and the lines of the logs."""
    kernel = Kernel()
    kernel.add_plugin(Odd(), "odd")
    service = ScriptedChatCompletion([CALLED, say("Done.")])
    kernel.add_service(service)
    if filtered:
        add_filter(kernel, "function_invocation", passing)
    facts: list[Fact] = []
    ours = FunctionInvokingChatCompletion(service, observers=[facts.append])
    history = ChatHistory(system_message="Be brief.")
    settings = PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )
    caplog.clear()
    await ours.get_chat_message_content(
        history, settings, kernel=kernel, arguments=KernelArguments(user="ann")
    )
    made = [
        replace(fact, at=0.0, fingerprint="")
        for fact in facts
        if isinstance(fact, CallDecided)
    ]
    ran = [
        replace(fact, at=0.0)
        for fact in facts
        if isinstance(fact, CallStarted | CallFinished)
    ]
    by_call = sorted(ran, key=lambda fact: (fact.index, type(fact).__name__))
    lines = sorted(
        (one.name, one.levelno, str(one.msg), repr(one.args)) for one in caplog.records
    )
    return [one.model_dump() for one in history.messages], made, by_call, lines


async def test_both_ways_come_to_the_same(
    direct: list[KernelFunction],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """History, facts, errors and logs are equal: called directly, by ``invoke``, and through a filter."""
    history, made, ran, lines = await run_all(caplog, filtered=False)
    assert len(direct) == len(CALLED.calls) - KERNEL_TAKING
    assert len(history) == len(CALLED.calls) + 2
    assert {name for name, level, _, _ in lines if level == logging.ERROR} == {LOGGER}
    filtered = await run_all(caplog, filtered=True)
    monkeypatch.setattr(execution, "_is_watched", lambda *_: True)
    invoked = await run_all(caplog, filtered=False)
    assert len(direct) == len(CALLED.calls) - KERNEL_TAKING
    assert invoked == (history, made, ran, lines)
    assert filtered[:3] == (history, made, ran)
    assert set(filtered[3]) >= set(
        lines
    )  # behind a filter, an exit is an exception, which Semantic Kernel logs


async def test_a_result_says_what_it_was_made_of() -> None:
    """The result of a direct call has the function's metadata, and the arguments given and used."""
    kernel = Kernel()
    function: Any = kernel.add_function("odd", Odd().lazy)
    arguments = KernelArguments(text="x", other=1)
    direct = await execution._invoked_directly(
        function, execution._Unwatched(kernel, arguments)
    )  # pyright: ignore[reportPrivateUsage]
    assert direct == await function.invoke(kernel, arguments)
    assert direct is not None
    assert direct.metadata["used_arguments"] == {"text": "x"}


@each_of(
    ("kind", "name", "digest"),
    [(KernelFunctionFromMethod, *each) for each in INVOKING.items()]
    + [(Kernel, *each) for each in STACKING.items()],
)
def test_the_methods_that_a_direct_call_leaves_out_have_not_changed(
    kind: type, name: str, digest: str
) -> None:
    """Semantic Kernel's methods around a function are those that the direct call was written for.

    If this fails, Semantic Kernel has changed: read what the method does now, let `execution.invoked` do it too, and
    put its new digest beside the name.
    """
    assert is_own(getattr(kind, name), digest), source_digest(getattr(kind, name))


def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return method(*arguments, **keywords)

    return wrapper


Watch = Callable[[pytest.MonkeyPatch, Bench], None]


def a_meter_listens(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    patch.setattr(metrics, "_METER_PROVIDER", MeterProvider(shutdown_on_exit=False))


def a_function_has_a_meter(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    histogram = (
        MeterProvider(shutdown_on_exit=False).get_meter("own").create_histogram("own")
    )
    bench.offered["lights-lock"].invocation_duration_histogram = histogram


def diagnostics_are_sensitive(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    patch.setattr(
        function_tracer.MODEL_DIAGNOSTICS_SETTINGS,
        "enable_otel_diagnostics_sensitive",
        True,
    )


def the_stack_is_replaced(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    patch.setattr(Kernel, "construct_call_stack", wrapped(Kernel.construct_call_stack))


def the_kernel_has_its_own_stack(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    vars(bench.kernel)["construct_call_stack"] = wrapped(
        bench.kernel.construct_call_stack
    )


def a_function_has_its_own_method(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    function = bench.offered["lights-lock"]
    vars(function)["_invoke_internal"] = wrapped(function._invoke_internal)  # pyright: ignore[reportPrivateUsage]


def the_class_is_an_applications(patch: pytest.MonkeyPatch, bench: Bench) -> None:
    class Own(KernelFunctionFromMethod):
        """An application's."""

    own: Any = Own
    bench.offered["lights-lock"] = own(method=bench.lights.lock, plugin_name="lights")


def replaced(name: str) -> Watch:
    def replace(patch: pytest.MonkeyPatch, bench: Bench) -> None:
        owner = next(
            kind for kind in KernelFunctionFromMethod.__mro__ if name in vars(kind)
        )
        patch.setattr(owner, name, wrapped(getattr(owner, name)))

    replace.__name__ = f"{name}_is_wrapped"
    return replace


WATCHES: list[Watch] = [
    a_meter_listens,
    a_function_has_a_meter,
    diagnostics_are_sensitive,
    the_stack_is_replaced,
    the_kernel_has_its_own_stack,
    a_function_has_its_own_method,
    the_class_is_an_applications,
    *map(replaced, INVOKING),
]


@pytest.mark.parametrize("watch", WATCHES, ids=lambda watch: watch.__name__)
async def test_whatever_watches_sees_the_call(
    watch: Watch, direct: list[KernelFunction], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log, a meter, diagnostics, a subclass or a replaced method: the function is invoked as ever."""
    bench = Bench()
    watch(monkeypatch, bench)
    finished = await bench.run("lights-lock")
    assert finished.outcome == "ok"
    assert direct == []


async def test_a_log_at_info_has_its_lines(
    direct: list[KernelFunction], caplog: pytest.LogCaptureFixture
) -> None:
    """Semantic Kernel's lines on a call are written where its log is read."""
    with caplog.at_level(logging.INFO, logger=LOGGER):
        await Bench().run("lights-lock")
    assert "Function lights-lock succeeded." in caplog.messages
    assert direct == []


async def test_a_filter_that_is_added_during_a_run_sees_the_next_call(
    direct: list[KernelFunction],
) -> None:
    """Filters are looked for at each call."""
    bench = Bench()
    seen: list[str] = []

    async def look(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        seen.append(context.function.name)
        await next(context)

    await bench.run("lights-lock")
    add_filter(bench.kernel, "function_invocation", look)
    await bench.run("lights-lock")
    assert len(direct) == 1
    assert seen == ["lock"]


async def test_a_tracer_sees_a_span_of_each_call(
    direct: list[KernelFunction], recording: Recording
) -> None:
    """With a tracer each call has Semantic Kernel's span, with the call's id."""
    await Bench().run("lights-lock")
    span = recording.only("execute_tool lights-lock")
    assert (span.attributes or {})["gen_ai.tool.call.id"] == "call_0"
    assert direct == []


async def test_nothing_watches_where_nothing_was_set_up(
    direct: list[KernelFunction],
) -> None:
    """Everything together is as expected: else nothing is gained, and nobody would notice."""
    await Bench().run("lights-lock")
    assert len(direct) == 1
