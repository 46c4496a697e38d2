"""After every end of a run the caller's objects are unchanged; and runs of one planner are independent."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import Budget, FunctionCallingStepwisePlannerOptions
from planner_ext.errors import LimitReachedError, ServiceCallError, ToolExecutionError
from planner_ext.iteration import StopHandle, ToolExecution
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedPromptExecutionSettings,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import (
    ADD,
    PLAN,
    Math,
    both_ways,
    final,
    invoke,
    kernel_of,
    planner_with,
    scripted,
    texts,
)
from support.stock import add_filter
from support.values import each_of


def picture(kernel: Kernel, *others: Any) -> list[Any]:
    """Take down everything that a caller can see of what was passed."""
    functions = {
        (plugin.name, function.name): (id(function), function.metadata.model_dump())
        for plugin in kernel.plugins.values()
        for function in plugin.functions.values()
    }
    filters = [
        list(kernel.function_invocation_filters),
        list(kernel.prompt_rendering_filters),
        list(kernel.auto_function_invocation_filters),
    ]
    return [
        functions,
        filters,
        {key: id(value) for key, value in kernel.services.items()},
        *map(seen, others),
    ]


def seen(value: Any) -> Any:
    match value:
        case KernelArguments():
            settings = {
                key: one.model_dump()
                for key, one in (value.execution_settings or {}).items()
            }
            return dict(value), {key: repr(one) for key, one in value.items()}, settings
        case ChatHistory():
            return [id(message) for message in value.messages], value.model_dump_json()
        case FunctionCallingStepwisePlannerOptions():
            return {
                name: repr(getattr(value, name)) for name in type(value).model_fields
            }
        case _:
            return value.model_dump()


async def passing_filter(context: Any, next: Callable[[Any], Any]) -> None:
    context.arguments["from_a_filter"] = 1
    await next(context)


RUNS: dict[str, tuple[list[Any], dict[str, Any], type[Exception] | None]] = {
    "answered": ([PLAN, calls(ADD, call("math-fail")), final()], {}, None),
    "limited": ([PLAN, ADD, say("Enough.")], {"max_iterations": 3}, None),
    "raised": (
        [PLAN, ADD, ADD],
        {"max_iterations": 2, "budget": Budget(on_limit="raise")},
        LimitReachedError,
    ),
    "service-failed": ([PLAN, ADD, ConnectionError("gone")], {}, ServiceCallError),
    "function-failed": (
        [PLAN, call("math-fail")],
        {"execution": ToolExecution(on_error="raise")},
        ToolExecutionError,
    ),
    "stopped": ([PLAN], {}, None),
}


@both_ways
@pytest.mark.parametrize("history", [False, True], ids=["fresh", "with-history"])
@each_of("run", RUNS)
async def test_nothing_that_was_passed_is_changed(
    run: str, history: bool, streamed: bool
) -> None:
    """Kernel, arguments, options, settings and history are as they were, also after a limit, a fault or a stop."""
    script, more, error = RUNS[run]
    kernel = kernel_of(
        ScriptedChatCompletion(script[1:] if history else script),
        math=Math(),
        spare=Math(),
    )
    add_filter(kernel, "auto_function_invocation", passing_filter)
    add_filter(kernel, "function_invocation", passing_filter)
    behavior = FunctionChoiceBehavior.Auto(
        filters={"excluded_functions": ["math-none"]}
    )
    settings = ScriptedPromptExecutionSettings(
        temperature=0.5, function_choice_behavior=behavior
    )
    arguments = KernelArguments(
        settings=settings.model_copy(deep=True), basket=["apple"], city="Rome"
    )
    given = ChatHistory(system_message="Be brief.")
    stop = StopHandle()
    if run == "stopped":
        stop.stop()
    planner = planner_with(
        **{
            "max_iterations": 9,
            "execution_settings": settings,
            "excluded_plugins": {"spare"},
            **more,
        }
    )
    passed = (arguments, planner.options, settings, given)
    before = picture(kernel, *passed)

    running = invoke(
        planner,
        kernel,
        streamed=streamed,
        arguments=arguments,
        chat_history=given if history else None,
        stop=stop,
        user="ann",
    )
    if error is None:
        await running
    else:
        with pytest.raises(error):
            await running

    assert picture(kernel, *passed) == before


async def test_a_function_that_changes_its_arguments_changes_a_copy() -> None:
    """What a function puts into the arguments it is given does not reach the caller, nor the next call."""
    kept: list[set[str]] = []

    class Untidy:
        @kernel_function
        async def leave(self, arguments: Any) -> str:
            kept.append(set(arguments))
            arguments["left"] = "a mess"
            return ""

    kernel = kernel_of(
        ScriptedChatCompletion(
            [call("untidy-leave"), call("untidy-leave"), say("Done.")]
        ),
        untidy=Untidy(),
    )
    arguments = KernelArguments(city="Rome")
    await invoke(planner_with(plan=False), kernel, arguments=arguments)

    assert kept == [{"city"}, {"city"}]
    assert dict(arguments) == {"city": "Rome"}


@both_ways
async def test_a_result_is_not_changed_by_what_comes_after_it(streamed: bool) -> None:
    """Adding to a result's history leaves its checkpoint, and a run that is resumed from it, as they were."""
    kernel, service = scripted([PLAN, ADD, say(""), final()])
    planner = planner_with()
    ended = await invoke(planner, kernel, streamed=streamed)
    text = ended.checkpoint.to_json()
    assert ended.chat_history is not None
    ended.chat_history.add_user_message("And 4?")
    assert ended.checkpoint.to_json() == text

    await planner.resume(kernel, ended.checkpoint)
    assert texts(service.requests[3]) == texts(service.requests[2])


async def test_runs_of_one_planner_do_not_meet() -> None:
    """Many runs at the same time, of one planner over one kernel, keep their goals, histories and usages apart."""
    count = 12
    all_here = asyncio.Barrier(count)

    async def together(request: ScriptedRequest) -> None:
        await all_here.wait()

    def answer(request: ScriptedRequest) -> Any:
        goal = next(str(m["content"]) for m in request.messages if m["role"] == "user")
        if not request.tools:
            return say(f"Plan for {goal}")
        if request.messages[-1]["role"] == "user":
            return call("math-add", {"a": int(goal), "b": int(goal)})
        return final(f"{goal} twice is {request.messages[-1]['content']}")

    math = Math()
    kernel = kernel_of(ScriptedChatCompletion(answer, before_reply=together), math=math)
    planner = planner_with()
    async with asyncio.timeout(
        120
    ):  # one run that fails would leave the others waiting
        results = await asyncio.gather(
            *(invoke(planner, kernel, str(n)) for n in range(count))
        )

    for number, result in enumerate(results):
        assert result.status == "answered"
        assert result.iterations == 3
        assert result.tool_calls == 1
        assert result.final_answer == f"{number} twice is {2 * number}"
        assert result.plan == f"Plan for {number}"
    assert sorted(math.sums) == [(n, n) for n in range(count)]
    assert len({result.checkpoint.run_id for result in results}) == count


async def test_one_planner_serves_many_kernels_one_after_the_other() -> None:
    """A planner keeps nothing of a kernel: the next run sees the next kernel's functions only."""
    planner = planner_with()
    first, asked_first = scripted([PLAN, final()])
    second = Kernel()
    asked_second = ScriptedChatCompletion([PLAN, final()])
    second.add_service(asked_second)
    await invoke(planner, first)
    await invoke(planner, second)

    assert "math-add" in asked_first.requests[1].tools
    assert asked_second.requests[1].tools == ("UserInteraction-SendFinalAnswer",)
