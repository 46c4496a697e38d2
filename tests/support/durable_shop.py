"""A user's module whose refunds wait for a person, and the words that every test of kept runs begins with."""

import json
from pathlib import Path

import pytest

__all__ = ["APP", "CALL", "GOAL", "RUN", "STORE", "TILL", "refunds", "till"]

TILL = """
import asyncio

from semantic_kernel import Kernel
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import FunctionCallingStepwisePlanner, FunctionCallingStepwisePlannerOptions
from planner_ext.cli.demo_shop import RefundShop, refund_script
from planner_ext.testing import ScriptedChatCompletion, ScriptedFault, call, say

print("imported")
find = call("shop-find", {"order": "A-1007"})


def kernel():
    made = Kernel()
    made.add_service(ScriptedChatCompletion(refund_script))
    made.add_plugin(RefundShop(), "shop")
    return made


def app():
    return FunctionCallingStepwisePlanner(options=FunctionCallingStepwisePlannerOptions(plan=False)), kernel()


async def app_with_arguments():
    def arguments_for(run_id):
        print("arguments for", run_id)
        return KernelArguments(tenant="a")

    return (*app(), arguments_for)


def failing():
    made = kernel()
    made.add_service(ScriptedChatCompletion([ScriptedFault(status=500)]), overwrite=True)
    return made


class Slow:
    @kernel_function(description="Takes its time.")
    async def pay(self) -> str:
        await asyncio.sleep(60)
        return "paid"


def slow():
    made = Kernel()
    made.add_service(ScriptedChatCompletion(slow_script))
    made.add_plugin(Slow(), "slow")
    return made


def slow_script(request):
    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    return say(f"Result: {results[0]}") if results else call("slow-pay")


def restless():
    made = Kernel()
    made.add_service(ScriptedChatCompletion(lambda request: find if request.tools else say("no")))
    made.add_plugin(RefundShop(), "shop")
    return made


def pair_of_kernels():
    return kernel(), kernel()


def broken():
    raise LookupError("no such till")
"""

STORE = ("--store", "runs.db")
APP = ("--app", "till:app")
GOAL = "Refund the broken lamp."
RUN = (
    "run",
    GOAL,
    "--kernel",
    "till:kernel",
    "--no-plan",
    "--run-id",
    "order-7",
    *STORE,
)
CALL = "order-7/1/call_2"


@pytest.fixture
def till(here: Path) -> None:
    """The module ``till`` in the current directory."""
    (here / "till.py").write_text(TILL)


def refunds(here: Path) -> list[float]:
    """The amounts in the shop's own ledger."""
    ledger = here / "refunds.jsonl"
    return (
        [json.loads(line)["amount"] for line in ledger.read_text().splitlines()]
        if ledger.exists()
        else []
    )
