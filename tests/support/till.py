"""Runs that wait for people in all ways, left to a store."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.durable import Runs
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedReply,
    call,
    calls,
    say,
)

__all__ = [
    "GOAL",
    "REFUND",
    "Till",
    "application",
    "asks",
    "leave_in_doubt",
    "leave_waiting",
    "refunds",
]

GOAL = "Refund the broken lamp."
REFUND = {"order": "A-1007", "amount": 129.9, "reason": "broken"}


class Till:
    """Functions that a person has to allow; ``done`` tells what ran."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.sends = asyncio.Event()

    @requires_approval(prompt="Refund this customer?", roles=("treasurer",))
    @kernel_function(description="Refunds an order.")
    async def refund(
        self,
        order: Annotated[str, "The order's number."],
        amount: Annotated[float, "Euros, at most what was paid."],
        reason: Annotated[str, "Why."] = "",
        notify: Annotated[bool, "Whether the customer gets a letter."] = True,
        note: Annotated[str, "A line for the ledger."] = "",
        tags: Annotated[list[str] | None, "Words to find it by."] = None,
    ) -> str:
        self.done.append(
            {
                "order": order,
                "amount": amount,
                "reason": reason,
                "notify": notify,
                "note": note,
            }
        )
        return f"{amount} refunded"

    @requires_approval(expires_in=6.0)
    @kernel_function(description="Refunds an order if somebody is quick.")
    async def quick(self, order: str) -> str:
        self.done.append({"order": order})
        return "refunded"

    @kernel_function(description="Sends a letter; it hangs.")
    async def send(self, to: str) -> str:
        self.sends.set()
        await asyncio.Event().wait()
        return f"sent to {to}"

    @kernel_function(description="Finds an order.")
    async def find(self, order: str) -> str:
        return f"{order}: one lamp, paid 129.90"


def refunds(*wanted: dict[str, Any]) -> ScriptedReply:
    """Ask for refunds, all in one reply."""
    return calls(
        *(
            call("till-refund", one, id=f"refund-{place}")
            for place, one in enumerate(wanted or (REFUND,))
        )
    )


def asks(question: str) -> ScriptedReply:
    """Ask the user something."""
    return call("UserInteraction-AskUser", {"question": question}, id="asks")


async def _leave_open(question: object) -> None:
    return None


def application(
    script: Script, till: Till | None = None
) -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a planner whose questions wait for a person, and a kernel with the till."""
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(till or Till(), "till")
    options = FunctionCallingStepwisePlannerOptions(
        plan=False, clarifier=_leave_open, max_clarifications=3
    )
    return FunctionCallingStepwisePlanner(options=options), kernel


async def leave_waiting(
    store: Path,
    script: Script | None = None,
    *,
    run_id: str = "order-7",
    goal: str = GOAL,
    till: Till | None = None,
) -> None:
    """Drive a run until it waits for a person, and leave it to the store."""
    async with Runs.sqlite(store) as runs:
        script = [refunds(), say("The lamp is refunded.")] if script is None else script
        handle = await runs.start(*application(script, till), goal, run_id=run_id)
        await handle.result()
        assert (await runs.load(run_id)).record.status == "paused"


async def leave_in_doubt(store: Path, *, run_id: str = "letter") -> None:
    """Leave a run whose process ended while a letter was sent: whether it was sent is not known."""
    script, till = [call("till-send", {"to": "ann"}, id="send"), say("Sent.")], Till()
    async with Runs.sqlite(store, grace_seconds=0) as runs:
        await runs.start(*application(script, till), "Write to ann.", run_id=run_id)
        await till.sends.wait()
    await leave_waiting(store, script, run_id=run_id, goal="Write to ann.")
