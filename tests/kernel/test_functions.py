import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import PromptExecutionSettings
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters.auto_function_invocation.auto_function_invocation_context import (
    AutoFunctionInvocationContext,
)
from semantic_kernel.filters.functions.function_invocation_context import FunctionInvocationContext
from semantic_kernel.functions import FunctionResult, KernelArguments, KernelFunction, kernel_function

from planner_ext.core.facts import CallDecided, CallStarted, ModelReplied, Rules, RunStarted
from planner_ext.core.fold import fold
from planner_ext.core.state import State
from planner_ext.core.values import Checked, RequestedCall, Usage
from planner_ext.kernel.execution import ToolExecution
from planner_ext.kernel.functions import NOT_RUN_BY_FILTER, KernelFunctions
from planner_ext.ports import Finished, Functions

Filter = Callable[[Any, Callable[[Any], Awaitable[None]]], Awaitable[None]]


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
    def own(self, what: str, user: Annotated[str, {"include_in_function_choices": False}]) -> str:
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


class Bench:
    """A kernel with the plugin, and the functions under test over it."""

    def __init__(self, *filters: Filter, function_filters: tuple[Filter, ...] = (), **options: Any) -> None:
        self.lights = Lights()
        self.kernel = Kernel()
        self.kernel.add_plugin(self.lights, "lights")
        self.final = self.kernel.add_function("planner", send_final_answer)
        for one in filters:
            self.kernel.add_filter("auto_function_invocation", one)
        for one in function_filters:
            self.kernel.add_filter("function_invocation", one)
        self.offered: dict[str, KernelFunction] = {
            function.fully_qualified_name: function
            for plugin in self.kernel.plugins.values()
            for function in plugin.functions.values()
        }
        self.history = ChatHistory()
        given: dict[str, Any] = {
            "offered": lambda: self.offered,
            "schema_only": lambda: frozenset({"remote-call"}),
            "arguments": None,
            "execution": ToolExecution(),
            "final_answer": self.final,
            "history": lambda state: self.history,
        }
        self.functions = KernelFunctions(self.kernel, **(given | options))

    def check(self, name: str, arguments: Mapping[str, Any] | str = "", edited: str | None = None) -> Checked:
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


def request(name: str, arguments: Mapping[str, Any] | str = "", *, id: str = "call_0") -> RequestedCall:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return RequestedCall(id=id, name=name, arguments=text)


def state_of(call: RequestedCall, checked: Checked, *, by: str, edited: str | None, index: int, count: int) -> State:
    """A run in its third trip, whose batch is decided and whose call has started."""
    calls = tuple(call if at == index else request("lights-fail", id=f"call_{at}") for at in range(count))
    decided = [
        CallDecided(
            iteration=2,
            index=at,
            call_id=one.id,
            function=one.name,
            kind="function",
            verdict="run",
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
        usage=Usage(),
        iterations=1,
        offered=True,
        withheld=None,
        at=0,
        seconds=0,
    )
    started = CallStarted(iteration=2, index=index, call_id=call.id, function=checked.function, at=0)
    return fold([RunStarted(run_id="r", rules=Rules(), messages=(), at=0), replied, *decided, started])


async def passing(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    await next(context)


FILTERED = pytest.mark.parametrize("filters", [(), (passing,)], ids=["plain", "filtered"])
"""Promises that hold whether or not the kernel has auto-function-invocation filters."""


def test_it_is_the_engines_functions() -> None:
    """The class satisfies the port."""
    functions: Functions = Bench().functions
    assert functions.encode({"a": None}) == '{"a":null}'


# What a call is


def test_a_call_of_an_offered_function_is_resolved_and_validated() -> None:
    """A good call is a function with its names and arguments."""
    assert Bench().check("lights-switch", '{"room": "hall"}') == Checked(
        kind="function",
        function="lights-switch",
        plugin_name="lights",
        function_name="switch",
        arguments={"room": "hall"},
    )


@pytest.mark.parametrize("name", ["switch", "Lights-switch", "lights.switch", "lights_switch", "", "lights-", "lights"])
def test_only_the_exact_name_resolves(name: str) -> None:
    """A bare name, another case or another separator is unknown, and the answer names what exists."""
    checked = Bench().check(name, '{"room": "hall"}')
    assert (checked.kind, checked.function, dict(checked.arguments)) == ("unknown", name, {})
    assert checked.answer.startswith(f'There is no function "{name}". Call one of these by its exact name: lights-')
    assert "lights-switch" in checked.answer
    assert checked.answer.endswith("planner-SendFinalAnswer, remote-call.")


def test_a_function_that_exists_and_is_not_offered_is_unknown() -> None:
    """What was not offered with the request does not run."""
    bench = Bench()
    del bench.offered["lights-fail"]
    assert bench.check("lights-fail").kind == "unknown"


def test_the_list_of_functions_is_bounded() -> None:
    """A kernel with hundreds of functions does not fill the model's context."""
    bench = Bench()
    bench.offered = {f"p-f{number}": bench.final for number in range(300)}
    answer = bench.check("no" * 500).answer
    assert "p-f49, and 251 more." in answer
    assert len(answer) < 1000


def test_without_functions_the_answer_says_so() -> None:
    """Nothing is offered: the model is told to answer."""
    bench = Bench(schema_only=frozenset)
    bench.offered = {}
    assert bench.check("p-f").answer == (
        'There is no function "p-f", and no other may be called now. Answer without functions.'
    )


def test_a_function_known_by_schema_only_is_external() -> None:
    """The caller must run it; its arguments are none of ours."""
    assert Bench().check("remote-call", "not even JSON") == Checked(
        kind="external", function="remote-call", arguments={}
    )


def test_bad_arguments_are_answered() -> None:
    """Invalid arguments carry a message the model can act on."""
    checked = Bench().check("lights-switch", '{"room": "hall", "colour": "red"}')
    assert (checked.kind, checked.function, dict(checked.arguments)) == ("invalid", "lights-switch", {})
    assert '"colour" is not a parameter' in checked.answer


def test_edited_arguments_replace_the_models() -> None:
    """An edit is validated like the model's own."""
    bench = Bench()
    assert bench.check("lights-switch", "nonsense", '{"room": "attic"}').arguments == {"room": "attic"}
    assert bench.check("lights-switch", '{"room": "hall"}', '{"attic": 1}').kind == "invalid"


@pytest.mark.parametrize(("sent", "answer"), [("done", "done"), (42, "42"), (True, "true")])
def test_the_final_answer_is_taken_as_text(sent: Any, answer: str) -> None:
    """The planner's own function is recognised, and its answer is text."""
    checked = Bench().check("planner-SendFinalAnswer", {"answer": sent})
    assert (checked.kind, checked.answer) == ("final_answer", answer)


@pytest.mark.parametrize(
    "arguments", ["", '{"answer": " "}', '{"answer": null}', '{"answer": {"a": 1}}', '{"text": "done"}', "done"]
)
def test_a_malformed_final_answer_is_invalid(arguments: str) -> None:
    """The model is told how to send it."""
    checked = Bench().check("planner-SendFinalAnswer", arguments)
    assert checked.kind == "invalid"
    assert "planner-SendFinalAnswer" in checked.answer


def test_the_final_answer_function_is_recognised_by_identity() -> None:
    """A function of the application with the same name is a function like another."""
    assert Bench(final_answer=None).check("planner-SendFinalAnswer", {"answer": "x"}).kind == "function"
    assert Bench(final_answer=Bench().final).check("planner-SendFinalAnswer", {"answer": "x"}).kind == "function"


# How a function runs


@FILTERED
async def test_a_function_runs_and_its_result_is_json(filters: tuple[Filter, ...]) -> None:
    """The model reads JSON, not Python."""
    bench = Bench(*filters)
    assert await bench.run("lights-switch", {"room": "hall"}) == Finished(
        outcome="ok", text='{"room":"hall","on":true}'
    )
    assert bench.lights.seen == [("hall", True)]


@FILTERED
async def test_a_result_that_cannot_be_copied_is_kept(filters: tuple[Filter, ...]) -> None:
    """The result is written, never deep-copied: what was done is told."""
    finished = await Bench(*filters).run("lights-lock")
    assert finished.outcome == "ok"
    assert finished.text.startswith('{"lock":"<unlocked')


@FILTERED
async def test_the_applications_arguments_are_shared_and_not_changed(filters: tuple[Filter, ...]) -> None:
    """A function gets the application's arguments and settings beside the model's, in an object of its own."""
    settings = PromptExecutionSettings(service_id="chat")
    arguments = KernelArguments(settings=settings, user="ann", what="the application's", other=threading.Lock())
    before = dict(arguments)
    got: list[KernelArguments] = []

    async def look(context: FunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
        got.append(context.arguments)
        context.arguments["added"] = "by a filter"
        await next(context)

    bench = Bench(*filters, function_filters=(look,), arguments=arguments)
    assert (await bench.run("lights-own", {"what": "lamp"})).text == "lamp of ann"
    assert got[0] is not arguments
    assert got[0].execution_settings == {"chat": settings}
    assert dict(arguments) == before


@FILTERED
async def test_a_parameter_named_settings_is_passed(filters: tuple[Filter, ...]) -> None:
    """``settings`` is an argument like another."""
    assert (await Bench(*filters).run("lights-dim", {"settings": "evening"})).text == "evening"


@FILTERED
async def test_null_for_an_optional_is_none_and_hides_the_applications_value(filters: tuple[Filter, ...]) -> None:
    """The function gets None, neither the text "None" nor what the application has under that name."""
    bench = Bench(*filters, arguments=KernelArguments(label="the application's"))
    await bench.run("lights-name", {"label": None})
    await bench.run("lights-name", {"label": "mine"})
    await bench.run("lights-name")
    assert bench.lights.seen == [None, "mine", "the application's"]


@FILTERED
async def test_a_failing_function_is_reported_without_detail(filters: tuple[Filter, ...]) -> None:
    """The model reads that it failed; the record has the exception."""
    finished = await Bench(*filters).run("lights-fail")
    assert (finished.outcome, finished.text) == ("failed", "The function lights-fail failed.")
    assert finished.error == "ValueError: password is hunter2"
    assert isinstance(finished.exception, ValueError)


@FILTERED
async def test_detail_is_told_on_request_and_cut(filters: tuple[Filter, ...]) -> None:
    """``include_error_detail`` adds type and message, within bounds."""
    bench = Bench(*filters, execution=ToolExecution(include_error_detail=True))
    assert (await bench.run("lights-fail")).text == "The function lights-fail failed: ValueError: password is hunter2"

    @kernel_function(name="verbose")
    async def verbose() -> None:
        raise RuntimeError("\ud800" + "x" * 10_000)

    bench.offered["lights-verbose"] = bench.kernel.add_function("lights", verbose)
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
    assert (finished.outcome, finished.error) == ("failed", "MuteError: its text cannot be read")


@FILTERED
async def test_an_argument_that_cannot_be_converted_is_explained(filters: tuple[Filter, ...]) -> None:
    """The model's own mistake is told to it, whatever ``include_error_detail`` says."""
    finished = await Bench(*filters).run("lights-group", {"lights": ["first"]})
    assert finished.outcome == "failed"
    assert finished.text == (
        'The argument "lights" of lights-group cannot be converted to list[int]. The function was not run. '
        "Call it again with a corrected argument."
    )


@FILTERED
async def test_a_function_is_timed_out(filters: tuple[Filter, ...]) -> None:
    """After its time a function is cancelled, and its effect is said to be unknown."""
    finished = await Bench(*filters, execution=ToolExecution(timeout={"lights-wait": 0.01})).run("lights-wait")
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
    bench.offered["lights-block"] = bench.kernel.add_function("lights", block)
    try:
        assert (await bench.run("lights-block")).outcome == "timed_out"
    finally:
        release.set()


async def test_a_function_that_answers_a_timeout_with_an_error_is_timed_out() -> None:
    """What a function raises when its time is up is not why it failed."""
    assert (await Bench(execution=ToolExecution(timeout=0.01)).run("lights-stubborn")).outcome == "timed_out"


async def test_a_timeout_error_of_a_function_is_a_failure() -> None:
    """TimeoutError raised by a function is an error like another."""
    finished = await Bench(execution=ToolExecution(timeout=60)).run("lights-slow_answer")
    assert (finished.outcome, finished.error) == ("failed", "TimeoutError: the lamp did not answer")


async def test_the_timeout_does_not_count_a_filter_that_waits() -> None:
    """An auto-function-invocation filter may wait for a person longer than its function may run."""
    answered = asyncio.Event()

    async def ask_a_person(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        await answered.wait()
        await next(context)

    bench = Bench(ask_a_person, execution=ToolExecution(timeout=0.01, threads=False))
    running = asyncio.create_task(bench.run("lights-switch", {"room": "hall"}))
    await asyncio.wait([running], timeout=0.05)
    assert not running.done()
    answered.set()
    assert (await running).outcome == "ok"


@FILTERED
async def test_cancellation_reaches_the_function_and_is_raised(filters: tuple[Filter, ...]) -> None:
    """Cancelling the run cancels what runs."""
    bench = Bench(*filters)
    running = asyncio.create_task(bench.run("lights-wait"))
    await bench.lights.waiting.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


@FILTERED
async def test_a_cancelled_error_of_a_function_is_a_failure(filters: tuple[Filter, ...]) -> None:
    """CancelledError that nobody asked for does not end the run."""
    finished = await Bench(*filters).run("lights-cancelled")
    assert (finished.outcome, finished.error) == ("failed", "CancelledError")


@FILTERED
async def test_what_ends_the_program_passes(filters: tuple[Filter, ...]) -> None:
    """SystemExit is not a failure of a function."""
    with pytest.raises(SystemExit):
        await Bench(*filters).run("lights-leave")


async def test_a_function_that_is_gone_is_answered() -> None:
    """A function that is no longer offered when its call runs does not run."""
    bench = Bench()
    call = request("lights-switch", {"room": "hall"})
    checked = bench.functions.check(call)
    del bench.offered["lights-switch"]
    state = state_of(call, checked, by="", edited=None, index=0, count=1)
    finished = await bench.functions.run(call, checked, index=0, state=state)
    assert finished.outcome == "failed"
    assert finished.text.startswith('There is no function "lights-switch".')
    assert bench.lights.seen == []


async def test_arguments_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing above DEBUG holds what the model sent."""
    caplog.set_level(logging.DEBUG)
    await Bench(passing).run("lights-switch", {"room": "secret room"})
    assert [one for one in caplog.records if "secret room" in one.getMessage() and one.levelno > logging.DEBUG] == []


# What filters see and do


async def test_an_auto_filter_sees_the_call_as_semantic_kernel_shows_it() -> None:
    """Function, arguments, history, settings and positions are those of the kernel's own loop."""
    seen: list[AutoFunctionInvocationContext] = []

    async def look(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
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
    assert (context.function_count, context.request_sequence_index, context.function_sequence_index) == (3, 2, 1)
    content = context.function_call_content
    assert content is not None
    assert (content.id, content.name, content.arguments) == ("call_1", "lights-switch", '{"room": "hall"}')
    assert (content.plugin_name, content.function_name) == ("lights", "switch")


async def test_a_filter_sees_edited_arguments_as_the_call() -> None:
    """What a person put in place of the model's arguments is what the call says."""
    contents: list[Any] = []

    async def look(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
        contents.append((context.arguments["room"], context.function_call_content.arguments))  # type: ignore[union-attr]
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

    async def stop(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
        await next(context)
        context.terminate = True

    assert await Bench(stop).run("lights-name") == Finished(outcome="ok", text="named", terminate=True)


def result_of(context: Any, value: Any) -> FunctionResult:
    return FunctionResult(function=context.function.metadata, value=value)


@pytest.mark.parametrize("name", ["lights-name", "lights-fail"])
@pytest.mark.parametrize("in_place", [True, False])
async def test_a_filters_result_replaces_the_functions(name: str, in_place: bool) -> None:
    """What a filter sets is what the model reads, after a result and after an error."""

    async def put(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
        await next(context)
        if in_place:
            context.function_result.value = {"cached": True}  # type: ignore[union-attr]
        else:
            context.function_result = result_of(context, {"cached": True})

    finished = await Bench(put).run(name)
    assert (finished.outcome, finished.text, finished.exception) == ("ok", '{"cached":true}', None)


@pytest.mark.parametrize("kind", ["auto", "function"])
async def test_a_filter_may_answer_in_place_of_the_function(kind: str) -> None:
    """A cache does not run the function."""

    async def cache(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        setattr(context, "function_result" if kind == "auto" else "result", result_of(context, "cached"))

    bench = Bench(cache) if kind == "auto" else Bench(passing, function_filters=(cache,))
    assert (await bench.run("lights-name")).text == "cached"
    assert bench.lights.seen == []


@FILTERED
@pytest.mark.parametrize("kind", ["auto", "function"])
async def test_a_filter_that_runs_nothing_is_said_to(kind: str, filters: tuple[Filter, ...]) -> None:
    """A refusal without words is not the text "None"."""

    async def refuse(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        return

    bench = Bench(*filters, refuse) if kind == "auto" else Bench(*filters, function_filters=(refuse,))
    assert await bench.run("lights-name") == Finished(outcome="ok", text=NOT_RUN_BY_FILTER)
    assert bench.lights.seen == []


async def test_a_filter_that_takes_the_result_away_leaves_nothing() -> None:
    """A function that ran is not said to have been skipped."""

    async def drop(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
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

    bench = Bench(break_down) if kind == "auto" else Bench(passing, function_filters=(break_down,))
    finished = await bench.run("lights-name")
    assert (finished.outcome, finished.text) == ("failed", "The function lights-name failed.")
    assert finished.error == "KeyError: 'filter'"
    assert finished.terminate is (kind == "auto")


async def test_a_filter_may_try_again() -> None:
    """The last attempt counts."""
    attempts: list[Any] = []

    async def retry(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
        await next(context)
        attempts.append(context.function_result.value)  # type: ignore[union-attr]
        context.arguments["lights"] = [1, 2]
        await next(context)

    finished = await Bench(retry).run("lights-group", {"lights": ["first"]})
    assert (finished.outcome, finished.text, finished.error) == ("ok", "3", "")
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
@pytest.mark.parametrize("change", CHANGES)
async def test_approved_arguments_cannot_be_changed_by_a_filter(kind: str, change: Callable[[Any], None]) -> None:
    """An approval is for what the approver saw: after a change, by whichever filter, nothing runs."""

    async def alter(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        change(context)
        await next(context)

    bench = Bench(alter) if kind == "auto" else Bench(passing, function_filters=(alter,))
    bench.offered["lights-switch"] = bench.kernel.add_plugin(Rooms(), "rooms")["switch"]
    rooms: Any = bench.offered["lights-switch"].method.__self__  # type: ignore[attr-defined]
    finished = await bench.run("lights-switch", {"room": ["hall"]}, by="ann")
    assert (finished.outcome, finished.text) == (
        "failed",
        "The function lights-switch was not run: a filter of the application changed what had been approved.",
    )
    assert rooms.seen == []
    edited = await bench.run("lights-switch", {"room": "attic"}, edited='{"room": ["hall"]}')
    assert edited.error.startswith("ApprovedArgumentsChangedError")
    assert (await bench.run("lights-switch", {"room": ["hall"]})).text == "switched"


async def test_an_approved_function_cannot_be_exchanged_by_a_filter() -> None:
    """Another function in its place is a change as well."""
    bench = Bench()

    async def exchange(context: AutoFunctionInvocationContext, next: Callable[[Any], Awaitable[None]]) -> None:
        context.function = bench.offered["lights-leave"]
        await next(context)

    bench.kernel.add_filter("auto_function_invocation", exchange)
    assert "changed what had been approved" in (await bench.run("lights-name", by="ann")).text


@FILTERED
async def test_an_approved_call_runs_as_any_other(filters: tuple[Filter, ...]) -> None:
    """Filters that leave the model's arguments alone are no obstacle, nor is a null, nor the application's own."""

    async def add_user(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
        context.arguments["user"] = "bob"
        assert context.function.fully_qualified_name.startswith("lights-")
        await next(context)

    bench = Bench(*filters, function_filters=(add_user,), arguments=KernelArguments(on=threading.Lock(), user="ann"))
    assert (await bench.run("lights-own", {"what": "lamp"}, by="ann")).text == "lamp of bob"
    assert (await bench.run("lights-name", {"label": None}, by="ann")).text == "named"
    assert (await bench.run("lights-fail", by="ann")).text == "The function lights-fail failed."
