"""The kernel and planner of both programs of step 7: each process builds its own, as two servers would."""

import json
import os
from pathlib import Path
from typing import Annotated

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Budget,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
    requires_approval,
)
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say

__all__ = ["CHECKPOINT", "KEY", "Orders", "build_kernel", "build_planner", "spent"]

CHECKPOINT = Path("step07_checkpoint.json")
"""In the current directory. In your application it is a row of a table, or a message in a queue."""

KEY = os.environ.get("CHECKPOINT_KEY", "for this sample only").encode()
"""Signs the checkpoint, so that a forged approval in it is refused. Keep yours secret."""

BUDGET = Budget(max_iterations=6, max_tool_calls=3)
"""For the whole run, however many processes it takes."""


class Orders:
    """The orders of a lamp shop, and the money that went back."""

    def __init__(self) -> None:
        self.paid = {"A-1007": 128.0}
        self.refunds: list[tuple[str, float]] = []

    @kernel_function(description="What a customer ordered and paid.")
    def find(self, order: Annotated[str, "Such as A-1007"]) -> dict[str, object]:
        """Look an order up; one that is not there is an error, which the model reads."""
        return {"order": order, "lamps": 4, "paid": self.paid[order]}

    @requires_approval(prompt="May this money go back?")
    @kernel_function(description="Refund an amount of what was paid for an order, in euros.")
    def refund(self, order: str, amount: float) -> str:
        """Pay back, and never more than was paid."""
        if not 0 < amount <= self.paid[order]:
            raise ValueError(f"Between 0 and {self.paid[order]:.2f} euros can be refunded for {order}.")
        self.paid[order] -= amount
        self.refunds.append((order, amount))
        return f"{amount:.2f} euros refunded for {order}"


def build_kernel(orders: Orders) -> Kernel:
    kernel = Kernel()
    kernel.add_service(chat_service(clerk))
    kernel.add_plugin(orders, "orders")
    return kernel


def build_planner() -> FunctionCallingStepwisePlanner:
    return FunctionCallingStepwisePlanner("chat", FunctionCallingStepwisePlannerOptions(budget=BUDGET, plan=False))


def spent(result: FunctionCallingStepwisePlannerResult) -> str:
    trips = f"{result.iterations} of {BUDGET.max_iterations} round trips"
    return f"{trips}, {result.tool_calls} of {BUDGET.max_tool_calls} function calls"


# The replies of the scripted model. Like a real one it knows only the messages of the run, so it continues in the
# second process where it stopped in the first.


def clerk(request: ScriptedRequest) -> ScriptedReply:
    match results(request):
        case []:
            return call("orders-find", {"order": "A-1007"})
        case [found]:
            order = json.loads(found)
            return call("orders-refund", {"order": order["order"], "amount": order["paid"]})
        case outcomes:
            return say(f"Dear customer, we are sorry for the broken lamp: {outcomes[-1]}.")
