"""Step 15: a run that survives its process, kept in one SQLite file.

Each of `begin`, `decide` and `work` could run in a separate process, on another day: they share only the file. A
process may be killed at any point; the next one continues after the last recorded fact. ``planner-ext run --store``,
``planner-ext approvals`` and ``planner-ext worker`` do the same on the command line.

Run it:

    python samples/step15_durable.py

Output:

    the shop: paused after 2 round trips
    ann: orders-refund {"order": "A-1007", "amount": 128.0}? Yes, but 32.0
    bo: too late
    a worker: answered after 3 round trips and 2 function calls
    Dear customer, we are sorry for the broken lamp: 32.00 euros refunded for A-1007.
    refunds made: {'order-7/1/call_2': 32.0}
"""

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory

from model import chat_service, results
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Deny,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.durable import Approvals, Runs, effect
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say

RUN = "order-7"  # a name of yours: starting a run of this name again continues it


class Orders:
    """The orders of a lamp shop, and the money that went back."""

    def __init__(self) -> None:
        self.refunds: dict[str, float] = {}

    @effect("idempotent")  # interrupted by a crash, it simply runs again
    @kernel_function(description="What a customer ordered and paid.")
    def find(self, order: str) -> dict[str, object]:
        """Look an order up."""
        return {"order": order, "lamps": 4, "paid": 128.0}

    @effect("keyed")  # runs again with the same key, by which the payment service recognises a repetition
    @requires_approval(prompt="May this money go back?")
    @kernel_function(description="Refund an amount of what was paid for an order, in euros.")
    def refund(self, order: str, amount: float, idempotency_key: str) -> str:
        """Pay back, once for each key."""
        self.refunds.setdefault(idempotency_key, amount)
        return f"{self.refunds[idempotency_key]:.2f} euros refunded for {order}"


def application(orders: Orders | None = None) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    kernel = Kernel()
    kernel.add_service(chat_service(clerk))
    kernel.add_plugin(orders or Orders(), "orders")
    return FunctionCallingStepwisePlanner("chat", FunctionCallingStepwisePlannerOptions(plan=False)), kernel


async def begin(file: Path, orders: Orders) -> None:
    planner, kernel = application(orders)
    async with Runs.sqlite(file) as runs:
        handle = await runs.start(planner, kernel, "One lamp of order A-1007 came broken. Refund it.", run_id=RUN)
        result = await handle.result()
    print(f"the shop: {result.status} after {result.iterations} round trips")


async def decide(file: Path) -> None:
    async with Approvals.connect(file) as approvals:  # needs neither planner nor kernel
        for item in await approvals.pending():
            edited = {**item.arguments, "amount": 32.0}  # one lamp of four
            print(f"ann: {item.fully_qualified_name} {json.dumps(dict(item.arguments))}? Yes, but {edited['amount']}")
            # The fingerprint: if somebody edited the call since it was read, this decision is refused.
            yes = Approve(arguments=edited, by="ann", fingerprint=item.fingerprint)
            await approvals.decide(item.id, yes)
            if not await approvals.decide(item.id, Deny("no money", by="bo")):
                print("bo: too late")


async def work(file: Path, orders: Orders) -> None:
    planner, kernel = application(orders)
    async with Runs.sqlite(file) as runs:
        for handle in await runs.recover(planner, kernel):  # all due runs; ``runs.work`` does it for ever
            result = await handle.result()
            spent = f"{result.iterations} round trips and {result.tool_calls} function calls"
            print(f"a worker: {result.status} after {spent}")
            print(result.final_answer)


async def main() -> None:
    orders = Orders()
    with TemporaryDirectory() as folder:
        file = Path(folder) / "runs.db"
        await begin(file, orders)
        await decide(file)
        await work(file, orders)
    print(f"refunds made: {orders.refunds}")


def clerk(request: ScriptedRequest) -> ScriptedReply:
    match results(request):
        case []:
            return call("orders-find", {"order": "A-1007"})
        case [found]:
            order = json.loads(found)
            return call("orders-refund", {"order": order["order"], "amount": order["paid"]})
        case outcomes:
            return say(f"Dear customer, we are sorry for the broken lamp: {outcomes[-1]}.")


if __name__ == "__main__":
    asyncio.run(main())
