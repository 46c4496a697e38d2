"""The application of the demo's last part, as each of its processes makes it: a shop that can pay money back, once.

Its ledger is a file in the current directory, to which each refund adds a line. The model is a script behind the
endpoint that the environment names; like a real one it knows of the run what the messages say.
"""

import json
from pathlib import Path
from typing import Annotated, Any, cast

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.durable import effect
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say

__all__ = ["GOAL", "LEDGER", "Shop", "app", "kernel", "refund_script"]

GOAL = "Refund the broken lamp of order A-1007."

LEDGER = "refunds.jsonl"
"""The shop's ledger: one line for each refund that was made."""


class Shop:
    """What was paid, and what went back."""

    @kernel_function(description="What was ordered and paid.")
    def find(self, order: Annotated[str, "Such as A-1007"]) -> dict[str, object]:
        """Look an order up."""
        return {"order": order, "lamps": 4, "paid": 98.0}

    @effect("keyed")
    @requires_approval(prompt="May this money go back?")
    @kernel_function(description="Refund an amount, in US dollars.")
    def refund(self, order: str, amount: float, idempotency_key: str) -> str:
        """Pay back; asked again under the same key, as a payment service would, only say that it was done."""
        if not 0 < amount <= 98.0:
            raise ValueError(f"Between 0 and 98.00 dollars can be refunded for {order}.")
        ledger = Path(LEDGER)
        lines = ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
        if all(json.loads(line)["key"] != idempotency_key for line in lines):
            with ledger.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": idempotency_key, "order": order, "amount": amount}) + "\n")
        return f"{amount:.2f} dollars refunded for {order}"


def kernel() -> Kernel:
    """Make the kernel; the environment names the endpoint, as Semantic Kernel reads it."""
    made = Kernel()
    made.add_service(OpenAIChatCompletion())
    made.add_plugin(Shop(), "shop")
    return made


def app() -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make what a worker drives runs with."""
    return FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(plan=False)), kernel()


def refund_script(request: ScriptedRequest) -> ScriptedReply:
    """Look the order up, refund all of it (which is too much), and report what was refunded."""
    messages = cast("list[dict[str, Any]]", request.messages)
    match [message["content"] for message in messages if message["role"] == "tool"]:
        case []:
            return call("shop-find", {"order": "A-1007"})
        case [found]:
            order = json.loads(found)
            return call("shop-refund", {"order": order["order"], "amount": order["paid"]})
        case outcomes:
            return say(f"Dear customer, we are sorry: {outcomes[-1]}.")
