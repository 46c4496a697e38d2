"""The application of the guides: a kernel with two functions, and a model that is scripted unless there is a key.

``make_kernel()`` is what an application of yours has. With ``OPENAI_API_KEY`` and ``OPENAI_CHAT_MODEL_ID`` in the
environment it talks to a real model; the answers then differ from those in the guides.
"""

import os
import re

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import ChatCompletionClientBase
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext.testing import ScriptedChatCompletion, ScriptedReply, ScriptedRequest, call, say


class Orders:
    """What customers paid, and how they get it back."""

    @kernel_function(description="What a customer paid for an order.")
    def find(self, order: int) -> float:
        """Look an order up."""
        return {7: 128.0, 8: 40.0}[order]

    @kernel_function(description="Refund an amount of an order.")
    def refund(self, order: int, amount: float) -> str:
        """Pay back."""
        return f"{amount:.2f} refunded for order {order}"


def make_kernel() -> Kernel:
    """Make a kernel with a chat service and the functions of a shop."""
    kernel = Kernel()
    kernel.add_service(service())
    kernel.add_plugin(Orders(), "orders")
    return kernel


def service() -> ChatCompletionClientBase:
    """Make the real service if the environment has a key, else a scripted one."""
    if "OPENAI_API_KEY" in os.environ:
        return OpenAIChatCompletion(service_id="chat")
    return ScriptedChatCompletion(model, service_id="chat")


def model(request: ScriptedRequest) -> ScriptedReply:
    """Reply as a model would: look the order up, refund it if that is the goal, and say what came of it.

    A goal that ends in "again and again" makes it look up one order after the other, and never answer by itself.
    """
    said = [str(message.get("content")) for message in request.messages if message["role"] == "user"]
    results = [str(message["content"]) for message in request.messages if message["role"] == "tool"]
    results = [result for result in results if not result.startswith("Not executed")]
    goal = next((text for text in said if re.search(r"order \d", text)), "order 7")
    order = int(re.findall(r"order (\d)", goal)[0])
    if not request.tools:
        return say(f"So far: {results[-1]}." if results else "1. Look the order up.\n2. Answer.")
    if not results or "again and again" in goal:
        return call("orders-find", {"order": order})
    if "Refund" in goal and len(results) == 1:
        return call("orders-refund", {"order": order, "amount": float(results[0])})
    return say(f"{results[-1]}." if "Refund" in goal else f"Order {order} cost {results[-1]}.")
