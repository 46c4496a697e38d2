"""The model reads what is left of the budget, through every door, and the history does not keep it."""

import json
from collections.abc import Sequence
from itertools import pairwise

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
)
from planner_ext.testing import ScriptedChatCompletion, ScriptedRequest, say
from support.planner import (
    ADD,
    both_ways,
    invoke,
    kernel_of,
    never_stops,
    openai_kernel,
    planner_with,
    resume,
)

MARK = "[Budget left"


def heard(requests: Sequence[ScriptedRequest]) -> list[str]:
    """List what each request says of the budget; fail where it is said before the newest message."""
    for request in requests:
        assert not any(MARK in json.dumps(message) for message in request.messages[:-1])
    texts = [str(request.messages[-1].get("content")) for request in requests]
    return [MARK + text.partition(MARK)[2] if MARK in text else "" for text in texts]


def check_beginnings(requests: Sequence[ScriptedRequest]) -> None:
    """Each request begins with what the one before it sent, but for the words at its end."""
    for before, after in pairwise(requests):
        assert [
            json.dumps(message)
            for message in after.messages[: len(before.messages) - 1]
        ] == [json.dumps(message) for message in before.messages[:-1]]
        newest = after.messages[len(before.messages) - 1]
        told_then = str(before.messages[-1]["content"]).partition(f"\n\n{MARK}")[0]
        assert newest == {**before.messages[-1], "content": told_then}


@both_ways
async def test_each_request_says_what_is_left(streamed: bool) -> None:
    """Each request says what is left then; history, facts and checkpoint do not contain it."""
    planner = planner_with(
        plan=False, budget=Budget(max_iterations=3, max_tool_calls=9, tell_budget=True)
    )
    async with openai_kernel(never_stops) as (kernel, server):
        result = await invoke(planner, kernel, streamed=streamed)
    assert heard(server.requests) == [
        f"{MARK}, this request included: {trips} of 3 round trips; {calls} of 9 tool calls.]"
        for trips, calls in [(3, 9), (2, 8), (1, 7)]
    ]
    check_beginnings(server.requests)
    assert result.chat_history is not None
    assert result.checkpoint is not None
    assert (
        MARK not in result.chat_history.model_dump_json() + result.checkpoint.to_json()
    )
    assert MARK not in repr(result.facts)


async def test_a_soft_threshold_keeps_quiet_until_it_is_near() -> None:
    """With a share, nothing is said before that much of a limit is left; also after a pause in another process."""
    planner = planner_with(plan=False, budget=Budget(max_iterations=4, tell_budget=0.5))
    async with openai_kernel(never_stops) as (kernel, server):
        result = await invoke(planner, kernel)
        assert [bool(text) for text in heard(server.requests)] == [
            False,
            False,
            True,
            True,
        ]
        await resume(
            planner,
            kernel,
            result.checkpoint,
            budget=Budget(max_iterations=6, tell_budget=1.0),
        )
    assert [text[37:] for text in heard(server.requests)[4:]] == [
        "2 of 6 round trips.]",
        "1 of 6 round trips.]",
    ]


async def test_a_planned_run_says_what_is_left_after_its_plan() -> None:
    """The plan request is about the goal alone; from the first step on the model hears what the plan has left."""
    planner = planner_with(max_iterations=4, budget=Budget(tell_budget=True))
    async with openai_kernel(
        lambda request: say("A plan.") if not request.index else never_stops(request)
    ) as (
        kernel,
        server,
    ):
        await invoke(planner, kernel)
    assert [text[37:38] for text in heard(server.requests)] == ["", "3", "2", "1"]


def budgeted() -> tuple[Kernel, ScriptedChatCompletion, FunctionInvokingChatCompletion]:
    inner = ScriptedChatCompletion([ADD, say("3")])
    return (
        kernel_of(inner),
        inner,
        FunctionInvokingChatCompletion(
            inner, budget=Budget(max_tool_calls=2, tell_budget=True)
        ),
    )


@both_ways
async def test_a_service_says_what_is_left_and_keeps_nothing(streamed: bool) -> None:
    """Through the service: the caller's history and the service's message know nothing of what was told."""
    kernel, inner, service = budgeted()
    history = ChatHistory()
    history.add_user_message("What is 1 + 2?")
    settings = PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    if streamed:
        async for _ in service.get_streaming_chat_message_contents(
            history, settings, kernel=kernel
        ):
            pass
    else:
        await service.get_chat_message_contents(history, settings, kernel=kernel)
    assert [text[37:] for text in heard(inner.requests)] == [
        "2 of 2 tool calls.]",
        "1 of 2 tool calls.]",
    ]
    check_beginnings(inner.requests)
    assert MARK not in history.model_dump_json()


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_handler_says_what_is_left(streamed: bool) -> None:
    """Through the handler, whose budget it is, over a service of the kernel."""
    inner = ScriptedChatCompletion([ADD, say("3")])
    handler = ToolCallHandler(
        kernel_of(inner), budget=Budget(max_iterations=9, tell_budget=True)
    )
    history = ChatHistory()
    history.add_user_message("What is 1 + 2?")
    async for _ in (
        handler.invoke_stream(history) if streamed else handler.invoke(history)
    ):
        pass
    assert [text[37:] for text in heard(inner.requests)] == [
        "9 of 9 round trips.]",
        "8 of 9 round trips.]",
    ]
    assert MARK not in history.model_dump_json()


async def test_a_wrapped_services_setting_is_kept() -> None:
    """A planner that wraps a service with ``tell_budget`` says what is left as the service would; both budgets hold."""
    inner = ScriptedChatCompletion([ADD, say("3")])
    service = FunctionInvokingChatCompletion(
        inner, budget=Budget(max_tool_calls=2, tell_budget=True)
    )
    await invoke(
        planner_with(plan=False, max_iterations=5), kernel_of(service), streamed=False
    )
    assert heard(inner.requests)[0].endswith("5 of 5 round trips; 2 of 2 tool calls.]")
