"""What a run leaves behind: the caller's history in order and fit to be sent on every path, all else unchanged."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
)
from planner_ext.engine.concurrency import StopHandle
from planner_ext.errors import ServiceCallError, ToolExecutionError
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedFault,
    ScriptedReply,
    call,
    calls,
    say,
)
from support.served import Answer, Served, Tools, asked, question
from support.stock import add_filter, first_result
from support.values import each_of

Ask = Callable[..., Awaitable[Answer]]
Serve = Callable[..., Served]
Resend = Callable[[ChatHistory], Awaitable[None]]

ADD = call("t-add", {"a": 1, "b": 2})
AUTO = FunctionChoiceBehavior.Auto


def shape(history: ChatHistory) -> list[tuple[str, list[str | None]]]:
    """Each message by role, with the ids of its calls or results."""
    kinds = (FunctionCallContent, FunctionResultContent)
    return [
        (m.role.value, [item.id for item in m.items if isinstance(item, kinds)])
        for m in history.messages
    ]


async def test_calls_and_results_are_added_and_the_answer_is_not(
    ask: Ask, resend: Resend, history: ChatHistory
) -> None:
    """The history gets each message with calls and its results, not the final message, which is safe to add."""
    script = [
        calls(ADD, call("t-echo", {"text": "x"}), text="Two."),
        ADD,
        say("Three."),
    ]
    answer = await ask(FunctionInvokingChatCompletion(ScriptedChatCompletion(script)))
    assert shape(history) == [
        ("user", []),
        ("assistant", ["call_1", "call_2"]),
        ("tool", ["call_1"]),
        ("tool", ["call_2"]),
        ("assistant", ["call_3"]),
        ("tool", ["call_3"]),
    ]
    assert [first_result(m).name for m in history.messages if m.role == "tool"] == [
        "t-add",
        "t-echo",
        "t-add",
    ]
    assert answer.message.role == "assistant"
    history.add_message(answer.message)
    history.add_user_message("And now?")
    await resend(history)


async def test_results_stand_in_call_order(ask: Ask, history: ChatHistory) -> None:
    """Calls run at once, whichever ends first; their results stand in the order of the calls."""
    last_done = asyncio.Event()
    ended: list[str] = []

    class Race:
        @kernel_function
        async def first(self) -> str:
            await last_done.wait()
            ended.append("first")
            return "1"

        @kernel_function
        async def last(self) -> str:
            ended.append("last")
            last_done.set()
            return "2"

    kernel = Kernel()
    kernel.add_plugin(Race(), "r")
    inner = ScriptedChatCompletion(
        [calls(call("r-first"), call("r-last")), say("Done.")]
    )
    await ask(FunctionInvokingChatCompletion(inner), kernel=kernel)
    assert ended == ["last", "first"]
    assert [str(first_result(m).result) for m in history.messages[2:]] == ["1", "2"]


HALF = '{"a": 1, "b'
ENDS: dict[
    str, tuple[list[Any], dict[str, Any], dict[str, Any], type[Exception] | None]
] = {
    "answered": ([ADD, say("3")], {}, {}, None),
    "attempts": ([ADD, say("3")], {}, {"maximum_use_attempts": 1}, None),
    "last-trip": ([ADD, say("3")], {"budget": Budget(max_iterations=2)}, {}, None),
    "stop": (
        [ADD, calls(ADD, ADD)],
        {"budget": Budget(max_iterations=2, on_limit="stop")},
        {},
        None,
    ),
    "too-many": (
        [ADD, calls(ADD, ADD), say("3")],
        {"budget": Budget(max_tool_calls=2)},
        {},
        None,
    ),
    "mixed": (
        [calls(ADD, call("t-fail"), call("t-no"), call("t-add", HALF)), say("3")],
        {},
        {},
        None,
    ),
    "raise": (
        [calls(ADD, call("t-fail"))],
        {"execution": ToolExecution(on_error="raise")},
        {},
        ToolExecutionError,
    ),
    "unknown": (
        [calls(ADD, call("t-no"))],
        {"execution": ToolExecution(stop_on_unknown_function=True)},
        {},
        None,
    ),
    "timeout": (
        [calls(ADD, call("t-hang")), say("3")],
        {"execution": ToolExecution(timeout=0.01)},
        {},
        None,
    ),
    "cut-text": (
        [ADD, ScriptedReply(text="It is", finish_reason="length")],
        {},
        {},
        None,
    ),
    "cut-call": (
        [ADD, ScriptedReply(calls=call("t-add", HALF).calls, finish_reason="length")],
        {},
        {},
        None,
    ),
    "empty": ([ADD, ScriptedReply()], {}, {}, None),
    "fault": ([ADD, ScriptedFault()], {}, {}, ServiceCallError),
    "dropped": ([ADD, ScriptedFault(drop=True)], {}, {}, ServiceCallError),
}


@each_of("end", ENDS)
async def test_every_end_leaves_a_history_that_can_be_sent(
    ask: Ask, serve: Serve, resend: Resend, end: str
) -> None:
    """However a run ends, each call has its one result right after it; with the returned message added, too."""
    history = question()
    script, options, attempts, error = ENDS[end]
    served = serve(script)
    service = FunctionInvokingChatCompletion(served.connector, **options)
    behavior = BoundedFunctionChoiceBehavior.Auto(**attempts)
    if error is not None:
        with pytest.raises(error):
            await ask(service, behavior, to=history)
    else:
        answer = await ask(service, behavior, to=history)
        history_with_answer = ChatHistory(messages=[*history.messages, answer.message])
        history_with_answer.add_user_message("And now?")
        await resend(history_with_answer)
    assert shape(history)[1:3] == [
        ("assistant", shape(history)[1][1]),
        ("tool", shape(history)[1][1][:1]),
    ]
    await resend(history)
    assert served.server.refused == []


@pytest.mark.parametrize("how", ["filter", "handle"])
async def test_a_run_that_is_stopped_keeps_its_results(
    ask: Ask,
    tools: Tools,
    kernel: Kernel,
    resend: Resend,
    history: ChatHistory,
    how: str,
) -> None:
    """Stopped by a filter's ``terminate`` or by a handle: results are kept, every call is answered, no request more."""
    stop = StopHandle()

    async def end(context: Any, next: Any) -> None:
        await next(context)
        if how == "filter":
            context.terminate = True
        else:
            stop.stop("Enough.")

    add_filter(kernel, "auto_function_invocation", end)
    inner = ScriptedChatCompletion(
        [calls(ADD, call("t-echo", {"text": "x"}), call("t-no")), say("Never sent.")]
    )
    answer = await ask(FunctionInvokingChatCompletion(inner), stop=stop)
    assert answer.text == ""
    assert answer.metadata["status"] == "stopped"
    assert len(inner.requests) == 1
    assert str(first_result(history.messages[2]).result) == "3"
    assert [role for role, _ in shape(history)] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "tool",
    ]
    await resend(history)


@pytest.mark.parametrize("beside", [(), (ADD,)], ids=["alone", "in-a-batch"])
async def test_a_cancelled_run_answers_its_calls(
    tools: Tools,
    kernel: Kernel,
    resend: Resend,
    history: ChatHistory,
    streamed: bool,
    beside: tuple[Any, ...],
) -> None:
    """Cancelled while a function runs: it is cancelled, its call is answered, the cancellation continues."""
    inner = ScriptedChatCompletion([calls(call("t-hang"), *beside), say("Never sent.")])
    settings = PromptExecutionSettings(function_choice_behavior=AUTO())
    service = FunctionInvokingChatCompletion(inner)
    run = asyncio.create_task(
        asked(service, history, kernel, settings, streamed=streamed)
    )
    await tools.started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert (tools.cancelled, len(inner.requests)) == (True, 1)
    assert len(history.messages) == 3 + len(beside)
    await resend(history)


async def test_a_cancelled_request_leaves_the_history_as_it_was(
    tools: Tools, kernel: Kernel, history: ChatHistory, streamed: bool
) -> None:
    """Cancelled while the model is asked: nothing is added, and nothing of the request is left running."""
    asking = asyncio.Event()

    async def wait(request: Any) -> None:
        asking.set()
        await asyncio.Future()

    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion([say("Never.")], before_reply=wait)
    )
    settings = PromptExecutionSettings(function_choice_behavior=AUTO())
    before = asyncio.all_tasks()
    run = asyncio.create_task(
        asked(service, history, kernel, settings, streamed=streamed)
    )
    await asking.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(history.messages) == 1
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize("beside", [(), (ADD,)], ids=["alone", "in-a-batch"])
async def test_a_function_that_swallows_its_cancellation_does_not_continue(
    kernel: Kernel, history: ChatHistory, streamed: bool, beside: tuple[Any, ...]
) -> None:
    """The run ends at its cancellation even where a function hides it: no request is made after it."""
    started = asyncio.Event()

    class Stubborn:
        @kernel_function
        async def stay(self) -> str:
            started.set()
            try:
                return await asyncio.Future()
            except asyncio.CancelledError:
                return "I am still here."

    kernel.add_plugin(Stubborn(), "s")
    inner = ScriptedChatCompletion([calls(call("s-stay"), *beside), say("Never sent.")])
    settings = PromptExecutionSettings(function_choice_behavior=AUTO())
    service = FunctionInvokingChatCompletion(inner)
    run = asyncio.create_task(
        asked(service, history, kernel, settings, streamed=streamed)
    )
    await started.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(inner.requests) == 1


def snapshot(
    settings: PromptExecutionSettings, arguments: KernelArguments, kernel: Kernel
) -> list[Any]:
    behavior = settings.function_choice_behavior
    return [
        settings.model_dump(),
        dict(settings.extension_data),
        (id(behavior), behavior and behavior.model_dump()),
        {key: (id(value), repr(value)) for key, value in arguments.items()},
        {
            key: value.model_dump()
            for key, value in (arguments.execution_settings or {}).items()
        },
        {
            name: {f.name: (id(f), f.metadata.model_dump()) for f in p}
            for name, p in kernel.plugins.items()
        },
        dict(kernel.services),
        [
            list(getattr(kernel, f"{kind}_filters"))
            for kind in ("auto_function_invocation", "function_invocation")
        ],
    ]


@pytest.mark.parametrize(
    "kind", [PromptExecutionSettings, OpenAIChatPromptExecutionSettings]
)
async def test_nothing_of_the_callers_is_changed(
    ask: Ask,
    serve: Serve,
    tools: Tools,
    kernel: Kernel,
    history: ChatHistory,
    kind: type[PromptExecutionSettings],
) -> None:
    """Settings, behaviour, arguments and kernel are afterwards what they were, to the last field and identity."""
    earlier = ChatMessageContent(
        role=AuthorRole.ASSISTANT,
        items=[FunctionCallContent(id="c", name="t-add", arguments="{}")],
    )
    result = ChatMessageContent(
        role=AuthorRole.TOOL,
        items=[FunctionResultContent(id="c", name="t-add", result={"x": [1]})],
    )
    history.messages[:0] = [earlier, result]
    messages = [(id(message), message.model_dump()) for message in history.messages]
    settings = kind(
        temperature=0.5,
        function_choice_behavior=AUTO(filters={"excluded_functions": ["t-hang"]}),
    )
    arguments = KernelArguments(
        PromptExecutionSettings(service_id="x", top_p=0.1),
        tenant={"name": "acme"},
        a=40,
    )

    async def passing(context: Any, next: Any) -> None:
        await next(context)

    add_filter(kernel, "auto_function_invocation", passing)
    before = snapshot(settings, arguments, kernel)
    script = [calls(ADD, call("t-fail")), call("t-echo", {"text": "x"}), say("Done.")]
    service = FunctionInvokingChatCompletion(
        serve(script).connector, budget=Budget(max_iterations=3)
    )
    await ask(service, settings=settings, arguments=arguments)
    assert snapshot(settings, arguments, kernel) == before
    assert [
        (id(message), message.model_dump())
        for message in history.messages[: len(messages)]
    ] == messages
    assert tools.seen == [(1, 2), "fail", "x"]


async def test_a_history_can_be_kept_as_json(
    ask: Ask, resend: Resend, history: ChatHistory
) -> None:
    """What a run adds survives ``model_dump_json``: the next request is the same, text beside calls included."""
    inner = ScriptedChatCompletion(
        [calls(ADD, text="Let me see."), say("3"), say("Again.")]
    )
    service = FunctionInvokingChatCompletion(inner)
    answer = await ask(service, arguments=KernelArguments(secret=object()))
    history.add_message(answer.message)
    loaded = ChatHistory.model_validate_json(history.model_dump_json())
    await ask(service, to=loaded)
    assert inner.requests[2].messages[:3] == inner.requests[1].messages
    await resend(loaded)


async def test_a_history_can_be_put_into_a_prompt(
    ask: Ask, history: ChatHistory
) -> None:
    """The history can be printed and rendered by a prompt template, its calls and results included."""
    inner = ScriptedChatCompletion([calls(ADD, text="Let me see."), say("3")])
    await ask(FunctionInvokingChatCompletion(inner))
    rendered = history.to_prompt()
    assert rendered == str(history)
    assert [
        message.to_dict() for message in ChatHistory.from_rendered_prompt(rendered)
    ][2:] == [{"role": "tool", "content": "3", "tool_call_id": "call_1"}]
    assert "Let me see." in rendered and "t-add" in rendered


async def test_limited_turns_do_not_pile_up(ask: Ask, history: ChatHistory) -> None:
    """Of a conversation whose every turn reaches its limit, a turn's metadata grows with the turn, not beyond."""
    service = FunctionInvokingChatCompletion(
        ScriptedChatCompletion(lambda request: say("Enough.")),
        budget=Budget(max_iterations=1),
    )
    sizes: list[int] = []
    for _ in range(8):
        answer = await ask(service)
        sizes.append(len(answer.metadata["checkpoint"]))
        history.add_message(answer.message)
        history.add_user_message("Go on.")
    growth = [after - before for before, after in pairwise(sizes)]
    assert max(growth) < 3 * growth[0]


async def test_two_hundred_tool_turns_take_no_more_stack(
    ask: Ask, history: ChatHistory
) -> None:
    """The loop is a loop: the two-hundredth call is made from the same depth as the first."""
    depths: list[int] = []

    class Deep:
        @kernel_function
        async def deep(self) -> int:
            frame, depth = sys._getframe(), 0
            while frame.f_back is not None:
                frame, depth = frame.f_back, depth + 1
            depths.append(depth)
            return depth

    kernel = Kernel()
    kernel.add_plugin(Deep(), "d")
    inner = ScriptedChatCompletion([*[call("d-deep")] * 200, say("Done.")])
    unlimited = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None)
    answer = await ask(FunctionInvokingChatCompletion(inner), unlimited, kernel=kernel)
    assert answer.text == "Done."
    assert answer.metadata["iterations"] == 201
    assert len(set(depths)) == 1
    assert len(history.messages) == 401
