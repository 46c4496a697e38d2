"""Step 20: an agent whose payment waits for a person.

The connector is Semantic Kernel's own and talks HTTP; without a key, the server behind it is scripted. The agent's turn
pauses at the refund, and a further turn is refused while it waits. Thread and checkpoint are kept as text and read
again, as in another process. ``resume_agent`` takes the decision, and leaves the thread as if nobody had waited. The
second refund is cancelled.

Run it:

    python samples/step20_agent_approval.py

Output:

    paused: refunds-refund {'order': 7, 'amount': 128.0}
    refused: Is it done?
    answered: 128.00 refunded for order 7.
    refused: a second approval
    paused: refunds-refund {'order': 8, 'amount': 40.0}
    stopped: Not executed: the run was stopped. Cancelled by ann: The shop is closed.
    paid back: [(7, 128.0)]
    thread: user assistant tool assistant tool assistant user user assistant tool assistant tool
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from model import openai_endpoint, results
from semantic_kernel.agents import ChatCompletionAgent, ChatHistoryAgentThread
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import ChatHistory, FunctionResultContent
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import Approve, FunctionInvokingChatCompletion, requires_approval
from planner_ext.agent import cancel_agent, resume_agent
from planner_ext.errors import InvalidHistoryError, PlannerExtError
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Refunds:
    """What customers paid, and what they got back."""

    def __init__(self) -> None:
        self.paid_back: list[tuple[int, float]] = []

    @kernel_function(description="What a customer paid for an order.")
    def find(self, order: int) -> float:
        """Look an order up."""
        return {7: 128.0, 8: 40.0}[order]

    @requires_approval
    @kernel_function(description="Refund an amount of an order.")
    def refund(self, order: int, amount: float) -> str:
        """Pay back; there is no way to undo it."""
        self.paid_back.append((order, amount))
        return f"{amount:.2f} refunded for order {order}"


def make_agent(refunds: Refunds) -> ChatCompletionAgent:
    """Make the agent, as each process does that works on the thread."""
    service = FunctionInvokingChatCompletion(OpenAIChatCompletion(service_id="chat"))
    plugins: list[KernelPlugin | object] = [KernelPlugin.from_object("refunds", refunds)]
    return ChatCompletionAgent(service=service, name="Clerk", instructions="You refund orders.", plugins=plugins)


def shown(metadata: Mapping[str, Any]) -> str:
    """Show what a turn waits for; return the call's id."""
    (waiting,) = metadata["pending"]
    print(f"{metadata['status']}: {waiting['fully_qualified_name']} {waiting['arguments']}")
    return waiting["id"]


async def main() -> None:
    refunds = Refunds()
    thread = ChatHistoryAgentThread()
    response = await make_agent(refunds).get_response("Refund order 7.", thread=thread)
    call_id = shown(response.metadata)
    checkpoint = response.metadata["checkpoint"]
    try:
        await make_agent(refunds).get_response("Is it done?", thread=thread)
    except InvalidHistoryError:  # the way out is in its text; the question stays in the thread for the next turn
        print("refused: Is it done?")

    # Thread and checkpoint are text: they may wait in a database, and be read by another process.
    stored = ChatHistory(messages=[message async for message in thread.get_messages()]).serialize()
    thread = ChatHistoryAgentThread(ChatHistory.restore_chat_history(stored))
    decisions = {call_id: Approve(by="ann")}
    done = await resume_agent(make_agent(refunds), thread, checkpoint, decisions)
    print(f"{done.metadata['status']}: {done}")
    try:
        await resume_agent(make_agent(refunds), thread, checkpoint, decisions)
    except PlannerExtError:
        print("refused: a second approval")

    agent = make_agent(refunds)
    *_, last = [chunk async for chunk in agent.invoke_stream("Refund order 8.", thread=thread)]
    shown(last.metadata)
    stopped = await cancel_agent(agent, thread, last.metadata["checkpoint"], by="ann", reason="The shop is closed.")
    messages = [message async for message in thread.get_messages()]
    answers = [item.result for item in messages[-1].items if isinstance(item, FunctionResultContent)]
    print(f"{stopped.metadata['status']}: {answers[0]}")
    print(f"paid back: {refunds.paid_back}")
    print("thread:", *(message.role.value for message in messages))


# The replies of the scripted model.


def refund(request: ScriptedRequest) -> ScriptedReply:
    return call(
        "refunds-refund", {"order": 7 if len(results(request)) == 1 else 8, "amount": float(results(request)[-1])}
    )


def confirm(request: ScriptedRequest) -> ScriptedReply:
    return say(f"{results(request)[-1]}.")


script = [
    *(call("refunds-find", {"order": 7}), refund, confirm),
    *(call("refunds-find", {"order": 8}), refund),
]

if __name__ == "__main__":
    with openai_endpoint(script):
        asyncio.run(main())
