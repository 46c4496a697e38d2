"""The functions of both programs: plain Python, which knows neither framework."""

from pathlib import Path


def find(order: int) -> str:
    """What a customer paid for an order, in euros."""
    return {7: "128.00"}[order]


def refund(order: int, amount: float) -> str:
    """Refund an amount of an order, in euros."""
    with Path("refunds.txt").open("a", encoding="utf-8") as file:
        file.write(f"refunded: {amount} for order {order}\n")
    return f"{amount:.2f} refunded"
