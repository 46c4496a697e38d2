"""The functions that the scripts call: a small order desk whose export never finishes."""

from typing import Annotated

from semantic_kernel.functions import kernel_function

__all__ = ["Desk"]

_STOCK = {"Hamburg": 2, "Lyon": 9, "Turin": 0}


class Desk:
    """An order desk; every answer of it is the same each time."""

    @kernel_function(description="Tell how far an export is.")
    def export_status(self, export: Annotated[str, "The export's name"]) -> str:
        """Tell that it is still running: no export ever finishes."""
        return f"{export} is still running."

    @kernel_function(description="Count the lamps in a warehouse.")
    def stock(self, site: Annotated[str, "Where the warehouse is"]) -> int:
        """Count them."""
        return _STOCK.get(site, 0)

    @kernel_function(description="Find a customer's number by name.")
    def customer(self, name: Annotated[str, "First name"]) -> str:
        """Find it."""
        return f"C-{len(name)}"

    @kernel_function(description="Find the newest order of a customer.")
    def order(self, customer: Annotated[str, "The customer's number"]) -> str:
        """Find it."""
        return f"A-{customer.removeprefix('C-')}007"

    @kernel_function(description="Tell where the parcel of an order is.")
    def parcel(self, order: Annotated[str, "The order's number"]) -> str:
        """Tell it.

        Raises:
            LookupError: There is no such order.
        """
        if order != "A-3007":
            raise LookupError(f"There is no order {order}.")
        return "Lyon"
