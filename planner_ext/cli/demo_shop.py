"""The applications of the demo, and the scripts of their models.

The functions compute with made-up data; every number in an answer is a result.
"""

import asyncio
import json
import time
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Annotated

from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    requires_approval,
)
from planner_ext.durable import effect
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from planner_ext.testing.script import results_of

ORDER_GOAL = "Reserve order A-1007 in Hamburg. Tell Ann what it costs in euros, and when it arrives."

_THINKS_FOR = 0.25
"""Seconds that a reply takes, so that a person can follow."""

_ORDERS = {
    "A-1007": {
        "customer": "Ann",
        "sku": "LAMP-02",
        "quantity": 4,
        "total": 98.0,
        "currency": "USD",
    }
}
_PER_DOLLAR = {"USD": 1.0, "EUR": 0.92, "GBP": 0.79}

Sku = Annotated[str, "The article's stock number"]


class Orders:
    """Orders by number."""

    @kernel_function
    async def find(
        self, order_id: Annotated[str, "The order's number, such as A-1007"]
    ) -> dict[str, object]:
        """Find an order by its number."""
        await asyncio.sleep(0.2)
        if order_id not in _ORDERS:
            raise LookupError(f"There is no order {order_id}.")
        return dict(_ORDERS[order_id])


class OutOfStockError(Exception):
    """A warehouse has too little to reserve."""


@dataclass
class Warehouse:
    """The stock of each site."""

    stock_by_site: dict[str, dict[str, int]] = field(
        default_factory=lambda: {
            "Hamburg": {"LAMP-02": 1, "BULB-E27": 80},
            "Lyon": {"LAMP-02": 9},
        }
    )

    @kernel_function
    async def sites(self) -> dict[str, int]:
        """List the warehouses, with the working days that a parcel from each is on its way."""
        await asyncio.sleep(0.15)
        return {"Hamburg": 1, "Lyon": 2}

    @kernel_function
    async def stock(self, sku: Sku) -> dict[str, int]:
        """Count an article in every warehouse."""
        await asyncio.sleep(0.15)
        return {
            site: articles.get(sku, 0) for site, articles in self.stock_by_site.items()
        }

    @kernel_function
    async def reserve(
        self,
        sku: Sku,
        quantity: Annotated[int, "How many pieces"],
        site: Annotated[str, "Name of the warehouse"],
    ) -> dict[str, object]:
        """Reserve some pieces of an article in one warehouse."""
        await asyncio.sleep(0.25)
        there = self.stock_by_site[site].get(sku, 0)
        if there < quantity:
            raise OutOfStockError(f"{site} has {there} {sku}, not {quantity}")
        self.stock_by_site[site][sku] = there - quantity
        return {"site": site, "reserved": quantity, "left": there - quantity}


class Currency:
    """Fixed exchange rates."""

    @kernel_function
    async def convert(
        self,
        amount: float,
        source: Annotated[str, "ISO code of the amount's currency"],
        target: Annotated[str, "ISO code of the wanted currency"],
    ) -> float:
        """Convert an amount of money."""
        await asyncio.sleep(0.1)
        return round(amount / _PER_DOLLAR[source] * _PER_DOLLAR[target], 2)


class Calendar:
    """Dates, counted from a fixed Thursday, so that every demo is the same."""

    @kernel_function
    async def today(self) -> str:
        """Today's date."""
        await asyncio.sleep(0.05)
        return "2026-03-05"

    @kernel_function
    async def add_working_days(
        self, start: Annotated[str, "ISO date"], days: int
    ) -> str:
        """The date some working days after a date."""
        await asyncio.sleep(0.05)
        day = date.fromisoformat(start)
        while days > 0:
            day += timedelta(days=1)
            days -= day.weekday() < 5
        return day.isoformat()


def order_kernel() -> Kernel:
    """Make the lamp shop's kernel, without a service."""
    kernel = Kernel()
    for plugin in (Orders(), Warehouse(), Currency(), Calendar()):
        kernel.add_plugin(plugin, type(plugin).__name__.lower())
    return kernel


def order_script(request: ScriptedRequest) -> ScriptedReply:
    """Reach `ORDER_GOAL`: a plan, three calls at once, a failure, the way around it."""
    time.sleep(_THINKS_FOR)
    return (
        _ORDER_REPLIES[request.index]
        if request.index < len(_ORDER_REPLIES)
        else _order_answer(request)
    )


_ORDER_REPLIES = (
    say(
        "1. Look up the order, the warehouses and today's date, all at once.\n"
        "2. Reserve the articles.\n"
        "3. Convert the price, and count the days until the parcel is there.\n"
        "4. Hand over the answer."
    ),
    calls(
        call("orders-find", {"order_id": "A-1007"}),
        call("warehouse-sites"),
        call("calendar-today"),
        text="Three things to look up. None needs another, so I ask for all of them at once.",
    ),
    call("warehouse-reserve", {"sku": "LAMP-02", "quantity": 4, "site": "Hamburg"}),
    calls(
        call("warehouse-stock", {"sku": "LAMP-02"}),
        text="Hamburg could not do it. I see where the lamps are.",
    ),
    calls(
        call("warehouse-reserve", {"sku": "LAMP-02", "quantity": 4, "site": "Lyon"}),
        call("currency-convert", {"amount": 98.0, "source": "USD", "target": "EUR"}),
        call("calendar-add_working_days", {"start": "2026-03-05", "days": 2}),
        text="Lyon has enough. The price and the date I can ask for in the same breath.",
    ),
)


def _order_answer(request: ScriptedRequest) -> ScriptedReply:
    results = results_of(request)
    order, reserved, stock = (
        json.loads(results[name])
        for name in ("orders-find", "warehouse-reserve", "warehouse-stock")
    )
    euros = float(results["currency-convert"])
    arrival = date.fromisoformat(results["calendar-add_working_days"])
    answer = (
        f"{order['customer']}, your {reserved['reserved']} lamps are reserved in {reserved['site']}; Hamburg had only "
        f"{stock['Hamburg']}. They cost {euros:.2f} EUR ({order['total']:.2f} {order['currency']}) and arrive on "
        f"{arrival:%A}, {arrival.isoformat()}."
    )
    return call("UserInteraction-SendFinalAnswer", {"answer": answer})


REFUND_GOAL = "Refund the broken lamp of order A-1007."

REFUND_LEDGER = "refunds.jsonl"
"""The shop's ledger, in the current directory: a line for each refund that was made."""


class RefundShop:
    """Paid orders, and refunds."""

    @kernel_function
    def find(self, order: Annotated[str, "Such as A-1007"]) -> dict[str, object]:
        """What was ordered and paid."""
        return {"order": order, "lamps": 4, "paid": 98.0}

    @effect("keyed")
    @requires_approval(prompt="May this money go back?")
    @kernel_function
    def refund(self, order: str, amount: float, idempotency_key: str) -> str:
        """Refund an amount, in US dollars."""
        if not 0 < amount <= 98.0:
            raise ValueError(
                f"Between 0 and 98.00 dollars can be refunded for {order}."
            )
        ledger = Path(REFUND_LEDGER)
        lines = (
            ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else []
        )
        if all(json.loads(line)["key"] != idempotency_key for line in lines):
            with ledger.open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps(
                        {"key": idempotency_key, "order": order, "amount": amount}
                    )
                    + "\n"
                )
        return f"{amount:.2f} dollars refunded for {order}"


def refund_kernel() -> Kernel:
    """Make the kernel; the environment names the endpoint."""
    kernel = Kernel()
    kernel.add_service(OpenAIChatCompletion())
    kernel.add_plugin(RefundShop(), "shop")
    return kernel


def refund_app() -> tuple[FunctionCallingStepwisePlanner, Kernel]:
    """Make a worker's application."""
    return FunctionCallingStepwisePlanner(
        options=FunctionCallingStepwisePlannerOptions(plan=False)
    ), refund_kernel()


def refund_script(request: ScriptedRequest) -> ScriptedReply:
    """Find the order, refund all of it (too much), and report what was refunded."""
    match results_of(request):
        case {"shop-refund": outcome}:
            return say(f"Dear customer, we are sorry: {outcome}.")
        case {"shop-find": found}:
            order = json.loads(found)
            return call(
                "shop-refund", {"order": order["order"], "amount": order["paid"]}
            )
        case _:
            return call("shop-find", {"order": "A-1007"})
