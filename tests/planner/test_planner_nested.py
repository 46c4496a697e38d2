"""Runs inside runs: who stops them, what is charged where nothing was sent, and what a resume finds."""

from collections.abc import Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory

from planner_ext import (
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    FunctionInvokingChatCompletion,
)
from planner_ext.hitl_manager import ApprovalSettings, Checkpoint, Defer
from planner_ext.iteration import StopHandle, ToolExecution
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.planner import (
    ADD,
    Math,
    both_ways,
    check_sendable,
    invoke,
    kernel_of,
    planner_with,
    resume,
)

DELEGATE = call("expert-reach_goal", {"goal": "Add 1 and 2."})


def nesting(
    script: Script, expert: Script, **options: Any
) -> tuple[Kernel, ScriptedChatCompletion, ScriptedChatCompletion, Math]:
    """Make a kernel with the model of the run around, that of the run inside, and a plugin for both."""
    outer = ScriptedChatCompletion(script, service_id="chat")
    inner = ScriptedChatCompletion(expert, service_id="expert")
    math = Math()
    kernel = kernel_of(outer, inner, math=math)
    kernel.add_plugin(
        PlannerPlugin(planner_with("expert", **{"plan": False, **options})), "expert"
    )
    return kernel, outer, inner, math


def stops_while_asked(stop: StopHandle) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Ask the run to stop in the middle of a request of the run inside."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        stop.stop("Enough.")
        return ADD if request.tools else say("As far as I came.")

    return reply


@both_ways
async def test_stopping_a_run_stops_the_runs_inside_it(streamed: bool) -> None:
    """Nothing further starts in there either: no function, no request; what was spent is charged."""
    stop = StopHandle()
    kernel, outer, inner, math = nesting(
        [DELEGATE, say("late")], stops_while_asked(stop)
    )
    result = await invoke(
        planner_with("chat", plan=False), kernel, streamed=streamed, stop=stop
    )
    assert result.status == "stopped"
    assert result.reason == "Enough."
    assert result.iterations == 2
    assert len(outer.requests) == 1
    assert len(inner.requests) == 1
    assert math.sums == []
    check_sendable(result.chat_history)


async def test_a_stop_reaches_through_a_service() -> None:
    """A service's handle stops the planner that its model called."""
    stop = StopHandle()
    kernel, outer, inner, math = nesting(
        [DELEGATE, say("late")], stops_while_asked(stop)
    )
    history = ChatHistory()
    history.add_user_message("Go.")
    message = await FunctionInvokingChatCompletion(outer).get_chat_message_content(
        history,
        PromptExecutionSettings(
            function_choice_behavior=BoundedFunctionChoiceBehavior.Auto()
        ),
        kernel=kernel,
        stop=stop,
    )
    assert message is not None
    assert message.metadata["status"] == "stopped"
    assert len(outer.requests) == 1
    assert len(inner.requests) == 1
    assert math.sums == []


@pytest.mark.parametrize(
    "refused",
    [{"budget": Budget(max_cost=1.0)}, {"max_prompt_tokens": 1}],
    ids=["price", "size"],
)
async def test_a_nested_request_that_is_not_sent_costs_nothing(
    refused: dict[str, Any],
) -> None:
    """Refused for an unknown price, or for the size of its prompt, a nested run has spent nothing."""
    kernel, outer, inner, _ = nesting([DELEGATE, say("On my own: 3.")], [], **refused)
    result = await invoke(planner_with("chat", plan=False), kernel)
    assert result.status == "answered"
    assert result.iterations == 2
    assert result.final_answer == "On my own: 3."
    assert (len(outer.requests), len(inner.requests)) == (2, 0)


async def test_the_functions_of_a_nested_run_that_crashed_are_counted() -> None:
    """What it started before it failed counts against the limits by function."""
    both = calls(DELEGATE, call("expert-reach_goal", {"goal": "Once more."}))
    inner = [ADD, ADD, RuntimeError("down"), ADD, say("3")]
    kernel, _, _, math = nesting([both, say("Done.")], inner)
    budget = Budget(max_iterations=30, max_calls_per_function={"math-add": 2})
    planner = planner_with(
        "chat", plan=False, execution=ToolExecution(max_concurrency=1), budget=budget
    )
    result = await invoke(planner, kernel)
    assert result.status == "answered"
    assert result.tool_calls == 4
    assert len(math.sums) == 2


@both_ways
@pytest.mark.parametrize("on_deferred", ["hold_all", "run_safe_first"])
async def test_a_nested_call_beside_one_that_waits_is_charged_once(
    on_deferred: Any, streamed: bool
) -> None:
    """Whether it runs before the pause or after it, in another process: the same usage, and one run inside."""

    async def ask_about_add(tool: Any) -> Defer | None:
        return Defer() if tool.function_name == "add" else None

    kernel, outer, inner, math = nesting(
        [calls(DELEGATE, ADD), say("Done.")], [say("3")]
    )
    planner = planner_with(
        "chat",
        plan=False,
        interceptors=[ask_about_add],
        approval=ApprovalSettings(on_deferred=on_deferred),
    )
    paused = await invoke(planner, kernel, streamed=streamed)
    before = 1 if on_deferred == "run_safe_first" else 0
    assert paused.status == "paused"
    assert len(inner.requests) == before
    assert paused.iterations == 1 + before
    checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
    decisions = {call.id: Approve(by="ann") for call in paused.pending}
    result = await resume(
        planner, kernel, checkpoint, streamed=streamed, decisions=decisions
    )
    assert result.status == "answered"
    assert result.iterations == 3
    assert result.tool_calls == 2
    assert len(outer.requests) == 2
    assert len(inner.requests) == 1
    assert math.sums == [(1, 2)]
