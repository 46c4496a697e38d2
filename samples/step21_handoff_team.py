"""Step 21: a team of agents hands a refund over, and the refund waits for a person while the team's process dies.

Semantic Kernel's orchestrations keep their agents in memory. So a call that waits ends the orchestration: its result
raises `TurnPausedError`, with the name of the agent and the checkpoint of its turn. That is text; any process with the
same agents resumes the turn with the decision.

Run it:

    python samples/step21_handoff_team.py

Output:

    the desk hands over to the clerk
    the clerk waits: orders-refund {"order": "A-1007", "amount": 32.0}
    (the process was killed)
    ann approves, in another process
    the clerk: 32.00 euros for A-1007 are on their way.
"""

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from model import chat_service, results
from semantic_kernel.agents import (
    ChatCompletionAgent,
    ChatHistoryAgentThread,
    HandoffOrchestration,
    OrchestrationHandoffs,
)
from semantic_kernel.agents.runtime import InProcessRuntime
from semantic_kernel.functions import KernelPlugin, kernel_function

from planner_ext import Approve, FunctionInvokingChatCompletion, requires_approval
from planner_ext.agent import resume_agent
from planner_ext.errors import TurnPausedError
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say


class Orders:
    """Money that goes back to customers."""

    @requires_approval
    @kernel_function(description="Refund an amount of an order, in euros.")
    def refund(self, order: str, amount: float) -> str:
        """Pay back."""
        return f"{amount:.2f} euros for {order}"


def make_team() -> dict[str, ChatCompletionAgent]:
    """Make the agents, in each process anew."""
    desk = ChatCompletionAgent(
        name="desk",
        description="Receives customers.",
        service=FunctionInvokingChatCompletion(chat_service(at_the_desk)),
    )
    clerk = ChatCompletionAgent(
        name="clerk",
        description="Refunds orders.",
        service=FunctionInvokingChatCompletion(chat_service(clerks)),
        plugins=[KernelPlugin.from_object("orders", Orders())],
    )
    return {"desk": desk, "clerk": clerk}


async def begin(kept: Path) -> None:
    """Let the team work until it has answered, or a call waits."""
    logging.disable(logging.CRITICAL)  # Semantic Kernel logs what ends an orchestration
    team = make_team()
    handoffs = OrchestrationHandoffs().add("desk", "clerk", "Hand over what is about refunds.")
    orchestration = HandoffOrchestration(members=[*team.values()], handoffs=handoffs)
    runtime = InProcessRuntime()
    runtime.start()
    result = await orchestration.invoke("One lamp of order A-1007 came broken.", runtime)
    try:
        print(await result.get())
    except TurnPausedError as paused:
        waiting = paused.pending[0]
        print(f"the {paused.agent} waits: {waiting['fully_qualified_name']} {json.dumps(waiting['arguments'])}")
        assert paused.checkpoint is not None, "a turn that waits has one"
        keep(kept, {"agent": paused.agent, "checkpoint": paused.checkpoint.to_json()})
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def keep(file: Path, waiting: dict[str, str]) -> None:
    """Write down whose turn waits, and its checkpoint; in production, a database."""
    file.write_text(json.dumps(waiting))


async def decide(waiting: dict[str, str]) -> None:
    """Resume the turn of the agent that waits."""
    agent = make_team()[waiting["agent"]]
    print("ann approves, in another process")
    decisions = {"refund": Approve(by="ann")}
    response = await resume_agent(agent, ChatHistoryAgentThread(), waiting["checkpoint"], decisions)
    print(f"the {agent.name}: {response}")


def main() -> None:
    with TemporaryDirectory() as folder:
        kept = Path(folder, "waiting.json")
        begun = subprocess.run([sys.executable, __file__, str(kept)], check=False)  # noqa: S603  (this program)
        print("(the process was killed)" if begun.returncode < 0 else "(nothing waits)", flush=True)
        asyncio.run(decide(json.loads(kept.read_text())))


# The replies of the scripted models.


def at_the_desk(_: ScriptedRequest) -> ScriptedReply:
    print("the desk hands over to the clerk")
    return call("Handoff-transfer_to_clerk", {})


def clerks(request: ScriptedRequest) -> ScriptedReply:
    paid = results(request)
    if paid:
        return say(f"{paid[-1]} are on their way.")
    return call("orders-refund", {"order": "A-1007", "amount": 32.0}, id="refund")


if __name__ == "__main__":
    if sys.argv[1:]:
        asyncio.run(begin(Path(sys.argv[1])))
    else:
        main()
