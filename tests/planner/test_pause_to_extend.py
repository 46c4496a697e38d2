"""A run that a limit ended continues with a larger budget, through every door, and is answered."""

from datetime import UTC, datetime
from typing import Any

import pytest
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
from planner_ext.hitl_manager import Checkpoint
from planner_ext.iteration import Usage
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from support.planner import (
    Clock,
    Math,
    both_ways,
    check_sendable,
    invoke,
    kernel_of,
    planner_with,
    resume,
)
from support.values import each_of

SOON = datetime.fromtimestamp(1_000_015, UTC)
LIMITS: dict[str, Any] = {
    "max_iterations": 2,
    "max_tool_calls": 1,
    "max_total_tokens": 20,
    "max_cost": 0.015,
    "max_active_seconds": 15,
    "deadline": SOON,
    "max_calls_per_function": {"math-add": 1},
    "max_repeated_calls": 1,
}
ON_LIMIT = ["answer", "stop", "return_calls"]
NEEDED = 4
"""Additions before the model answers by itself."""


def adds_four_times(request: ScriptedRequest) -> ScriptedReply:
    """Add until there are four sums, then answer; without functions, answer at once."""
    done = sum(
        message["role"] == "tool" and message["content"] == "3"
        for message in request.messages
    )
    if not request.tools:
        return say("Cut short.")
    return call("math-add", {"a": 1, "b": 2}) if done < NEEDED else say("Four sums.")


def model_of(clock: Clock) -> ScriptedChatCompletion:
    """Make a model each of whose requests takes ten seconds."""

    async def takes_ten_seconds(_: ScriptedRequest) -> None:
        clock.seconds += 10

    return ScriptedChatCompletion(adds_four_times, before_reply=takes_ten_seconds)


def budget(limit: str, on_limit: Any) -> Budget:
    return Budget(**{limit: LIMITS[limit]}, on_limit=on_limit)


def a_cent(model: str, usage: Usage) -> float:
    return 0.01


def check_first(status: str, limit: str | None, expected: str, sums: list[Any]) -> None:
    assert (status, limit) == ("limit_reached", expected)
    assert len(sums) < NEEDED


every_limit = each_of("limit", LIMITS)
ended_in_each_way = pytest.mark.parametrize(
    ("on_limit", "streamed"),
    [("answer", False), ("answer", True), ("stop", True), ("return_calls", False)],
)
every_way = each_of("on_limit", ON_LIMIT)


@every_limit
@ended_in_each_way
async def test_a_planners_run_is_extended(
    limit: str, on_limit: Any, streamed: bool
) -> None:
    """After every end at a limit, from JSON and with a larger budget, the planner's run is answered."""
    clock, math = Clock(), Math()
    kernel = kernel_of(model_of(clock), math=math)
    planner = planner_with(
        plan=False, budget=budget(limit, on_limit), price=a_cent, clock=clock
    )
    first = await invoke(planner, kernel, streamed=streamed)
    check_first(first.status, first.limit, limit, math.sums)
    assert first.checkpoint is not None

    checkpoint = Checkpoint.from_json(first.checkpoint.to_json())
    larger = Budget(max_iterations=20, on_limit=on_limit)
    result = await resume(planner, kernel, checkpoint, streamed=streamed, budget=larger)
    assert result.status == "answered"
    assert result.final_answer == "Four sums."
    assert len(math.sums) == NEEDED
    assert result.iterations > first.iterations
    check_sendable(result.chat_history)


@every_limit
@ended_in_each_way
async def test_a_services_run_is_extended(
    limit: str, on_limit: str, streamed: bool
) -> None:
    """The same through the service, whose history is brought up to date."""
    clock, math = Clock(), Math()
    inner = model_of(clock)
    kernel, history = kernel_of(inner, math=math), ChatHistory()
    history.add_user_message("Add 1 and 2, four times.")
    service = FunctionInvokingChatCompletion(
        inner, budget=budget(limit, on_limit), price=a_cent, clock=clock
    )
    settings = PromptExecutionSettings(
        function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
    )
    asked: dict[str, Any] = {"kernel": kernel}
    if streamed:
        *_, last = [
            chunk
            async for chunk in service.get_streaming_chat_message_content(
                history, settings, **asked
            )
        ]
    else:
        last = await service.get_chat_message_content(history, settings, **asked)
    assert last is not None
    check_first(last.metadata["status"], last.metadata["limit"], limit, math.sums)

    given: Any = (history, last.metadata["checkpoint"], {}, settings)
    if streamed:
        *_, end = [
            chunk
            async for chunk in service.resume_streaming(
                *given, budget=Budget(), **asked
            )
        ]
    else:
        end = await service.resume(*given, budget=Budget(), **asked)
    assert (end.metadata["status"], len(math.sums)) == ("answered", NEEDED)
    check_sendable(history)


@every_way
@both_ways
async def test_a_handlers_run_is_extended(on_limit: str, streamed: bool) -> None:
    """The same through the handler; its history ends with the answer."""
    clock, math = Clock(), Math()
    history = ChatHistory()
    history.add_user_message("Add 1 and 2, four times.")
    handler = ToolCallHandler(
        kernel_of(model_of(clock), math=math),
        budget=budget("max_tool_calls", on_limit),
        clock=clock,
    )
    first = handler.invoke_stream(history) if streamed else handler.invoke(history)
    *_, last = [message async for message in first]
    check_first(
        last.metadata["status"], last.metadata["limit"], "max_tool_calls", math.sums
    )

    way = handler.resume_stream if streamed else handler.resume
    *_, end = [
        message
        async for message in way(
            history, last.metadata["checkpoint"], {}, budget=Budget()
        )
    ]
    assert (end.metadata["status"], len(math.sums)) == ("answered", NEEDED)
    assert history.messages[-1].content == "Four sums."
    check_sendable(history)
