"""A call that needs a person inside an orchestration of Semantic Kernel: what the guide on agents says of it."""

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from semantic_kernel.agents import (
    ChatCompletionAgent,
    ChatHistoryAgentThread,
    ConcurrentOrchestration,
    HandoffOrchestration,
    OrchestrationHandoffs,
    SequentialOrchestration,
)
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import Approve, FunctionInvokingChatCompletion
from planner_ext.agent import resume_agent
from planner_ext.errors import InvalidHistoryError
from planner_ext.hitl_manager import Defer, ToolCall
from planner_ext.testing import call, say
from support.served import Served

Serve = Callable[..., Served]

PAY = call("shop-pay", {"order": 7})


class Shop:
    def __init__(self) -> None:
        self.paid: list[int] = []

    @kernel_function
    async def pay(self, order: int) -> str:
        self.paid.append(order)
        return f"paid {order}"


async def asks(tool: ToolCall) -> Defer:
    return Defer()


def agent_at(
    served: Served, shop: Shop, name: str, **options: Any
) -> ChatCompletionAgent:
    service = FunctionInvokingChatCompletion(served.connector, **options)
    plugins: list[KernelPlugin | object] = [KernelPlugin.from_object("shop", shop)]
    return ChatCompletionAgent(
        service=service, name=name, instructions=f"I am {name}.", plugins=plugins
    )


@asynccontextmanager
async def runtime() -> AsyncGenerator[InProcessRuntime]:
    one = InProcessRuntime()
    one.start()
    yield one
    await one.stop()


async def result_of(orchestration: Any) -> Any:
    async with runtime() as one:
        running = await orchestration.invoke("Pay order 7.", one)
        return await running.get(timeout=60)


async def test_an_approver_holds_the_call(serve: Serve) -> None:
    """Asked in place, the person decides while the orchestration waits; the next agent reads the answer."""

    async def approver(tool: ToolCall) -> Approve:
        return Approve(by="ann")

    served, shop = (
        serve([PAY, say("Order 7 is paid."), say("Thank you for your payment.")]),
        Shop(),
    )
    clerk = agent_at(served, shop, "Clerk", interceptors=[asks], approver=approver)
    writer = agent_at(served, shop, "Writer")
    result = await result_of(SequentialOrchestration(members=[clerk, writer]))
    assert str(result) == "Thank you for your payment."
    assert shop.paid == [7]
    assert served.server.refused == []


async def test_the_next_agent_is_refused(serve: Serve) -> None:
    """An agent that is given the answer of one that waits is refused by name: it would take the pause for an answer."""
    served, shop = serve([PAY, say("Thank you for waiting.")]), Shop()
    members: Any = [
        agent_at(served, shop, "Clerk", interceptors=[asks]),
        agent_at(served, shop, "Writer"),
    ]
    with pytest.raises(InvalidHistoryError, match="'Clerk' waits for a decision"):
        await result_of(SequentialOrchestration(members=members))
    assert (len(served.server.requests), shop.paid) == (1, [])


@pytest.mark.parametrize("kind", [SequentialOrchestration, ConcurrentOrchestration])
async def test_the_last_agent_is_resumed_by_its_checkpoint(
    serve: Serve, kind: Any
) -> None:
    """The result has the checkpoint; the thread is the orchestration's own, and an empty one is filled."""
    served, shop = serve([PAY, say("Order 7 is paid.")]), Shop()
    clerk = agent_at(served, shop, "Clerk", interceptors=[asks])
    result = await result_of(kind(members=[clerk]))
    message = result[0] if isinstance(result, list) else result
    thread = ChatHistoryAgentThread()
    done = await resume_agent(
        clerk, thread, message.metadata["checkpoint"], {"call_1": Approve()}
    )
    assert (str(done), shop.paid) == ("Order 7 is paid.", [7])
    roles = [one.role async for one in thread.get_messages()]
    assert roles == ["user", "assistant", "tool", "assistant"]


async def test_a_handoff_shows_the_pause_to_its_callback(serve: Serve) -> None:
    """The orchestration ends its task there; the callback has the message whose checkpoint is resumed."""
    served, shop, seen = serve([PAY, say("Order 7 is paid.")]), Shop(), list[Any]()
    clerk, writer = (
        agent_at(served, shop, "Clerk", interceptors=[asks]),
        agent_at(served, shop, "Writer"),
    )
    handoffs = OrchestrationHandoffs().add(clerk, writer, "Thanks the customer")
    members: Any = [clerk, writer]
    orchestration: Any = HandoffOrchestration(
        members=members, handoffs=handoffs, agent_response_callback=seen.append
    )
    await result_of(orchestration)
    assert seen[-1].metadata["status"] == "paused"
    assert shop.paid == []
    assert len(served.server.requests) == 1
    given: Any = (seen[-1].metadata["checkpoint"], {"call_1": Approve()})
    assert (
        str(await resume_agent(clerk, ChatHistoryAgentThread(), *given))
        == "Order 7 is paid."
    )
