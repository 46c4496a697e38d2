"""What a user of every door writes: it has no type errors, strictly checked, and is not run."""

import asyncio
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import (
    OpenAIChatCompletion,
    OpenAIChatPromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.filters import FilterTypes
from semantic_kernel.functions import kernel_function

from planner_ext import (
    ApprovalFilter,
    ApprovalPolicy,
    ApprovalSettings,
    Approve,
    BoundedFunctionChoiceBehavior,
    Budget,
    Checkpoint,
    Defer,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    PlannerPlugin,
    Runs,
    StopHandle,
    Supply,
    ToolCallHandler,
    ToolExecution,
    ToolUseSession,
    requires_approval,
)
from planner_ext.agent import resume_agent
from planner_ext.durable import Approvals, effect
from planner_ext.events import CallFinished, ResultReady, TextDelta
from planner_ext.hitl_manager import ToolCall
from planner_ext.iteration import FunctionInvocationIterationContext, Usage
from planner_ext.testing import ScriptedChatCompletion, call, say


class Shop:
    @requires_approval(prompt="Refund?")
    @effect("keyed")
    @kernel_function(description="Refund.")
    async def refund(self, order: str, amount: float, idempotency_key: str) -> str:
        return f"{amount} for {order}"


async def ask(call: ToolCall) -> Approve | Deny | Supply | Defer | None:
    amount = call.arguments.get("amount", 0)
    return Defer("Really?", expires_in=60, roles=("lead",)) if amount > 10 else None


async def completed(context: FunctionInvocationIterationContext) -> None:
    if context.total_usage.total_tokens > 1000:
        context.terminate = True


def price(model: str, usage: Usage) -> float:
    return usage.total_tokens * 1e-6


def check(answer: str, context: Any) -> str | None:
    return None if answer else "Say something."


async def main() -> None:
    kernel = Kernel()
    kernel.add_service(OpenAIChatCompletion(ai_model_id="gpt-4.1", service_id="chat"))
    kernel.add_plugin(Shop(), "shop")
    policy = ApprovalPolicy.from_dict({"default": "ask"})
    approval_filter = ApprovalFilter(policy)
    kernel.add_filter(FilterTypes.AUTO_FUNCTION_INVOCATION, approval_filter)  # pyright: ignore[reportUnknownMemberType]  (Semantic Kernel's own)
    options = FunctionCallingStepwisePlannerOptions(
        max_iterations=15,
        budget=Budget(
            max_tool_calls=5, max_calls_per_function={"shop-refund": 1}, on_limit="stop"
        ),
        interceptors=[ask, policy],
        iteration_completed=completed,
        price=price,
        check_answer=check,
        approval=ApprovalSettings(unmatched="defer"),
        execution=ToolExecution(timeout=3, max_concurrency=1),
        plan=False,
    )
    planner = FunctionCallingStepwisePlanner("chat", options)
    stop = StopHandle()
    result = await planner.invoke(kernel, "goal", stop=stop)
    result.raise_for_status()
    for pending in result.pending:
        print(
            pending.id,
            pending.fully_qualified_name,
            pending.arguments,
            pending.path,
            pending.roles,
        )
    if result.status == "paused":
        text = result.checkpoint.to_json()
        result = await planner.resume(
            kernel,
            Checkpoint.from_json(text),
            {"a": Approve(by="ann"), "b": Deny("no")},
        )
    async for event in planner.invoke_stream(kernel, "goal"):
        match event:
            case TextDelta(text=piece):
                print(piece)
            case CallFinished(function=name, result=value):
                print(name, value)
            case ResultReady(result=last):
                print(last.status, last.usage.cost)
            case _:
                pass
    behavior = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=3)
    settings = OpenAIChatPromptExecutionSettings(function_choice_behavior=behavior)
    other = OpenAIChatPromptExecutionSettings()
    service = FunctionInvokingChatCompletion(
        OpenAIChatCompletion(ai_model_id="gpt-4.1"),
        budget=Budget(max_iterations=3),
        interceptors=[ask],
    )
    history = ChatHistory()
    message = await service.get_chat_message_content(history, settings, kernel=kernel)
    if message is not None:
        print(message.metadata["iterations"])
    handler = ToolCallHandler(
        kernel, settings=other, check_for_intervention=lambda call: True
    )
    async for message2 in handler.invoke(history):
        print(message2.content)
    session = ToolUseSession(kernel)
    print(await session.prompt("hi"))
    async for piece in session.prompt_streaming("hi"):
        print(piece)
    kernel.add_plugin(PlannerPlugin(planner, kernel=kernel, description="x"), "inner")
    agent = ChatCompletionAgent(service=service, name="a", kernel=kernel)
    thread = ChatHistoryAgentThread()
    response = await resume_agent(
        agent, thread, Checkpoint.from_json("{}"), {"a": Approve()}
    )
    print(response.message)
    async with Runs.sqlite("runs.db") as runs:
        handle = await runs.start(planner, kernel, "goal", run_id="order-7")
        kept = await handle.result()
        print(kept.final_answer)
    async with Approvals.connect("runs.db") as approvals:
        for item in await approvals.pending(limit=5):
            assert await approvals.decide(item.id, Approve(by="ann"))
    ScriptedChatCompletion([call("shop-refund", {"order": "7"}), say("done")])


if __name__ == "__main__":
    asyncio.run(main())
