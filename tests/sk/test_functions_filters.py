"""What filters see of a call, what they may do, and what they may not."""

import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters.auto_function_invocation.auto_function_invocation_context import (
    AutoFunctionInvocationContext,
)
from semantic_kernel.functions import (
    FunctionResult,
    KernelArguments,
    KernelFunctionFromMethod,
    kernel_function,
)

from planner_ext.core.state import State
from planner_ext.engine.ports import Finished
from planner_ext.sk.run.tools import NOT_RUN_BY_FILTER
from support.functions import FILTERED, Bench, Filter, Lights, passing
from support.narrow import as_type, present
from support.stock import add_filter
from support.values import each_of


async def test_an_auto_filter_sees_the_call_as_semantic_kernel_shows_it() -> None:
    """Function, arguments, history, settings and positions are those of the kernel's own loop."""
    seen: list[AutoFunctionInvocationContext] = []

    async def look(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        assert context.function_result is not None
        assert context.function_result.value is None
        seen.append(context)
        await next(context)
        assert context.function_result.value == {"room": "hall", "on": True}

    settings = PromptExecutionSettings(service_id="chat")
    bench = Bench(look, settings=settings, streaming=True)
    await bench.run("lights-switch", {"room": "hall"}, index=1, count=3)
    [context] = seen
    assert context.function is bench.offered["lights-switch"]
    assert context.kernel is bench.kernel
    assert context.chat_history is bench.history
    assert context.execution_settings is settings
    assert context.is_streaming is True
    assert context.arguments == {"room": "hall"}
    assert context.function_count == 3
    assert context.request_sequence_index == 2
    assert context.function_sequence_index == 1
    content = context.function_call_content
    assert content is not None
    assert content.id == "call_1"
    assert content.name == "lights-switch"
    assert content.arguments == '{"room": "hall"}'
    assert (content.plugin_name, content.function_name) == ("lights", "switch")


async def test_a_filter_sees_edited_arguments_as_the_call() -> None:
    """What a person put in place of the model's arguments is what the call says."""
    contents: list[Any] = []

    async def look(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        contents.append(
            (
                context.arguments["room"],
                present(context.function_call_content).arguments,
            )
        )
        await next(context)

    await Bench(look).run("lights-switch", {"room": "hall"}, edited='{"room": "attic"}')
    assert contents == [("attic", '{"room": "attic"}')]


async def test_without_auto_filters_the_history_is_not_asked_for() -> None:
    """A history is built only for those who look at it."""

    def refuse(state: State) -> ChatHistory:
        raise AssertionError("nobody looks at it")

    assert (await Bench(history=refuse).run("lights-name")).text == "named"


async def test_filters_of_both_kinds_run_in_their_order() -> None:
    """The first-added filter is outermost, auto filters are outside function filters."""
    order: list[str] = []

    def named(name: str) -> Filter:
        async def mark(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
            order.append(name)
            await next(context)
            order.append(f"/{name}")

        return mark

    bench = Bench(named("a"), named("b"), function_filters=(named("c"), named("d")))
    await bench.run("lights-name")
    assert order == ["a", "b", "c", "d", "/d", "/c", "/b", "/a"]


async def test_termination_is_passed_on_with_the_result() -> None:
    """``context.terminate`` ends the run later; the result stays."""

    async def stop(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        await next(context)
        context.terminate = True

    assert await Bench(stop).run("lights-name") == Finished(
        outcome="ok", text="named", terminate=True
    )


def result_of(context: Any, value: Any) -> FunctionResult:
    return FunctionResult(function=context.function.metadata, value=value)


@pytest.mark.parametrize("name", ["lights-name", "lights-fail"])
@pytest.mark.parametrize("in_place", [True, False])
async def test_a_filters_result_replaces_the_functions(
    name: str, in_place: bool
) -> None:
    """What a filter sets is what the model reads, after a result and after an error."""

    async def put(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        await next(context)
        if in_place:
            present(context.function_result).value = {"cached": True}
        else:
            context.function_result = result_of(context, {"cached": True})

    finished = await Bench(put).run(name)
    assert finished.outcome == "ok"
    assert finished.text == '{"cached":true}'
    assert finished.exception is None


@pytest.mark.parametrize("kind", ["auto", "function"])
async def test_a_filter_may_answer_in_place_of_the_function(kind: str) -> None:
    """A cache does not run the function."""

    async def cache(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        setattr(
            context,
            "function_result" if kind == "auto" else "result",
            result_of(context, "cached"),
        )

    bench = (
        Bench(cache) if kind == "auto" else Bench(passing, function_filters=(cache,))
    )
    assert (await bench.run("lights-name")).text == "cached"
    assert bench.lights.seen == []


@FILTERED
@pytest.mark.parametrize("kind", ["auto", "function"])
async def test_a_call_that_a_filter_does_not_run_has_a_result_that_says_so(
    kind: str, filters: tuple[Filter, ...]
) -> None:
    """A refusal without words is not the text "None"."""

    async def refuse(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        return

    bench = (
        Bench(*filters, refuse)
        if kind == "auto"
        else Bench(*filters, function_filters=(refuse,))
    )
    assert await bench.run("lights-name") == Finished(
        outcome="ok", text=NOT_RUN_BY_FILTER
    )
    assert bench.lights.seen == []


async def test_a_filter_that_takes_the_result_away_leaves_nothing() -> None:
    """A function that ran is not said to have been skipped."""

    async def drop(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        await next(context)
        context.function_result = None

    assert (await Bench(drop).run("lights-name")).text == ""


@pytest.mark.parametrize("kind", ["auto", "function"])
async def test_a_filter_that_raises_fails_the_call(kind: str) -> None:
    """An error of a filter is reported like one of the function, termination included."""

    async def break_down(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        if kind == "auto":
            context.terminate = True
        raise KeyError("filter")

    bench = (
        Bench(break_down)
        if kind == "auto"
        else Bench(passing, function_filters=(break_down,))
    )
    finished = await bench.run("lights-name")
    assert (finished.outcome, finished.text) == (
        "failed",
        "The function lights-name failed.",
    )
    assert finished.error == "KeyError: 'filter'"
    assert finished.terminate is (kind == "auto")


async def test_a_filter_may_try_again() -> None:
    """The last attempt counts."""
    attempts: list[Any] = []

    async def retry(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        await next(context)
        attempts.append(present(context.function_result).value)
        context.arguments["lamp"] = 3
        await next(context)

    finished = await Bench(retry).run("lights-aim", {"lamp": "first"})
    assert finished.outcome == "ok"
    assert finished.text == "3"
    assert finished.error == ""
    assert "cannot be converted" in attempts[0]


def change_value(context: Any) -> None:
    context.arguments["room"] = "vault"


def change_inside(context: Any) -> None:
    context.arguments["room"].append("vault")


def add_argument(context: Any) -> None:
    context.arguments["on"] = False


def replace_all(context: Any) -> None:
    context.arguments = KernelArguments(room="vault")


def make_unwritable(context: Any) -> None:
    context.arguments["room"] = object()


class Rooms(Lights):
    @kernel_function
    def switch(self, room: Any, on: bool = True) -> str:
        self.seen.append((room, on))
        return "switched"


CHANGES = [change_value, change_inside, add_argument, replace_all, make_unwritable]


@pytest.mark.parametrize("kind", ["auto", "function"])
@each_of("change", CHANGES)
async def test_approved_arguments_cannot_be_changed_by_a_filter(
    kind: str, change: Callable[[Any], None]
) -> None:
    """An approval is for what the approver saw: after a change, by whichever filter, nothing runs."""

    async def alter(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        change(context)
        await next(context)

    bench = (
        Bench(alter) if kind == "auto" else Bench(passing, function_filters=(alter,))
    )
    bench.offered["lights-switch"] = bench.kernel.add_plugin(Rooms(), "rooms")["switch"]
    rooms: Any = as_type(
        KernelFunctionFromMethod, bench.offered["lights-switch"]
    ).method.__self__
    finished = await bench.run("lights-switch", {"room": ["hall"]}, by="ann")
    assert (finished.outcome, finished.text) == (
        "failed",
        "The function lights-switch was not run: a filter of the application changed what had been approved.",
    )
    assert rooms.seen == []
    edited = await bench.run(
        "lights-switch", {"room": "attic"}, edited='{"room": ["hall"]}'
    )
    assert edited.error.startswith("ApprovedArgumentsChangedError")
    assert (await bench.run("lights-switch", {"room": ["hall"]})).text == "switched"


async def test_an_approved_function_cannot_be_exchanged_by_a_filter() -> None:
    """A filter that replaces the function changes the call as well."""
    bench = Bench()

    async def exchange(
        context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]
    ) -> None:
        context.function = bench.offered["lights-leave"]
        await next(context)

    add_filter(bench.kernel, "auto_function_invocation", exchange)
    assert (
        "changed what had been approved"
        in (await bench.run("lights-name", by="ann")).text
    )


@FILTERED
async def test_an_approved_call_runs_as_any_other(filters: tuple[Filter, ...]) -> None:
    """The call runs if filters keep the model's arguments, a null among them, and change only the application's own."""

    async def add_user(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        context.arguments["user"] = "bob"
        assert context.function.fully_qualified_name.startswith("lights-")
        await next(context)

    bench = Bench(
        *filters,
        function_filters=(add_user,),
        arguments=KernelArguments(on=threading.Lock(), user="ann"),
    )
    assert (
        await bench.run("lights-own", {"what": "lamp"}, by="ann")
    ).text == "lamp of bob"
    assert (await bench.run("lights-name", {"label": None}, by="ann")).text == "named"
    assert (
        await bench.run("lights-fail", by="ann")
    ).text == "The function lights-fail failed."
