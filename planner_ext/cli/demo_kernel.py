"""The kernel of the demo: a lamp shop in memory. Its data are made up; what its functions do with them is honest."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import Annotated, Any

from semantic_kernel import Kernel
from semantic_kernel.filters import FilterTypes, FunctionInvocationContext
from semantic_kernel.functions import kernel_function

__all__ = ["Calendar", "CallCounter", "Currency", "Export", "Orders", "Warehouse", "shop_kernel"]

_ORDERS: dict[str, dict[str, object]] = {
    "A-1007": {"customer": "Ann", "sku": "LAMP-02", "quantity": 4, "total": 98.0, "currency": "USD"},
    "A-1012": {"customer": "Bo", "sku": "BULB-E27", "quantity": 12, "total": 41.4, "currency": "USD"},
}

_PER_DOLLAR = {"USD": 1.0, "EUR": 0.92, "GBP": 0.79}

Site = Annotated[str, "Name of the warehouse"]
Sku = Annotated[str, "The article's stock number"]


class Orders:
    """Orders by number."""

    @kernel_function(description="Find an order by its number.")
    async def find(self, order_id: Annotated[str, "The order's number, such as A-1007"]) -> dict[str, object]:
        """Look an order up."""
        await asyncio.sleep(0.2)
        if order_id not in _ORDERS:
            raise LookupError(f"There is no order {order_id}.")
        return dict(_ORDERS[order_id])


class OutOfStockError(Exception):
    """A warehouse has less of an article than was to be reserved."""


@dataclass
class Warehouse:
    """What lies where; reserving takes it away."""

    stock_by_site: dict[str, dict[str, int]] = field(
        default_factory=lambda: {"Hamburg": {"LAMP-02": 1, "BULB-E27": 80}, "Lyon": {"LAMP-02": 9}}
    )

    @kernel_function(description="List the warehouses, with the working days that a parcel from each is on its way.")
    async def sites(self) -> dict[str, int]:
        """List the sites."""
        await asyncio.sleep(0.15)
        return {"Hamburg": 1, "Lyon": 2}

    @kernel_function(description="Count an article in every warehouse.")
    async def stock(self, sku: Sku) -> dict[str, int]:
        """Count an article."""
        await asyncio.sleep(0.15)
        return {site: articles.get(sku, 0) for site, articles in self.stock_by_site.items()}

    @kernel_function(description="Reserve some pieces of an article in one warehouse.")
    async def reserve(self, sku: Sku, quantity: Annotated[int, "How many pieces"], site: Site) -> dict[str, object]:
        """Reserve, or fail and reserve nothing."""
        await asyncio.sleep(0.25)
        there = self.stock_by_site[site].get(sku, 0)
        if there < quantity:
            raise OutOfStockError(f"{site} has {there} {sku}, not {quantity}")
        self.stock_by_site[site][sku] = there - quantity
        return {"site": site, "reserved": quantity, "left": there - quantity}


class Currency:
    """Fixed exchange rates."""

    @kernel_function(description="Convert an amount of money.")
    async def convert(
        self,
        amount: float,
        source: Annotated[str, "ISO code of the amount's currency"],
        target: Annotated[str, "ISO code of the wanted currency"],
    ) -> float:
        """Convert by way of the dollar, to the cent."""
        await asyncio.sleep(0.1)
        return round(amount / _PER_DOLLAR[source] * _PER_DOLLAR[target], 2)


@dataclass
class Calendar:
    """Dates, counted from a day of its own so that every demo tells the same story: a Thursday."""

    day: date = date(2026, 3, 5)

    @kernel_function(description="Today's date.")
    async def today(self) -> str:
        """Tell the date, as ISO 8601."""
        await asyncio.sleep(0.05)
        return self.day.isoformat()

    @kernel_function(description="The date some working days after a date.")
    async def add_working_days(self, start: Annotated[str, "ISO date"], days: int) -> str:
        """Count on, without Saturdays and Sundays."""
        await asyncio.sleep(0.05)
        day = date.fromisoformat(start)
        while days > 0:
            day += timedelta(days=1)
            days -= day.weekday() < 5
        return day.isoformat()


@dataclass
class Export:
    """A job that takes longer than anybody wants to ask."""

    files: int = 0

    @kernel_function(description="How far the export is.")
    async def status(self) -> str:
        """Tell how many files are exported; each time it is a few more."""
        self.files += 12
        return f"{self.files} of 500 files"


@dataclass
class CallCounter:
    """A function invocation filter, as any application has them: counts the functions that the kernel really ran."""

    count: int = 0

    async def __call__(
        self, context: FunctionInvocationContext, next: Callable[[FunctionInvocationContext], Awaitable[None]]
    ) -> None:
        """Count a call, and let it run."""
        self.count += 1
        await next(context)


def shop_kernel(counter: CallCounter | None = None) -> Kernel:
    """Make the kernel: orders, warehouse, currency and calendar, and no service."""
    kernel = Kernel()
    plugins: dict[str, Any] = {
        "orders": Orders(),
        "warehouse": Warehouse(),
        "currency": Currency(),
        "calendar": Calendar(),
    }
    for name, plugin in plugins.items():
        kernel.add_plugin(plugin, name)
    if counter is not None:
        kernel.add_filter(FilterTypes.FUNCTION_INVOCATION, counter)  # pyright: ignore[reportUnknownMemberType]
    return kernel
