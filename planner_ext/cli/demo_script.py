"""What the demo's model says. It is a script, but one that reads: every number in it comes from a function's result."""

import json
import time
from collections.abc import Callable
from datetime import date
from typing import Any, TypeAlias, cast

from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say

__all__ = ["GOAL", "insatiable_model", "order_script"]

GOAL = "Reserve order A-1007 in Hamburg. Tell Ann what it costs in euros, and when it arrives."

_THINKS_FOR = 0.25
"""Seconds that the model takes for a reply, so that a person can follow."""

Step: TypeAlias = Callable[[ScriptedRequest], ScriptedReply]


def insatiable_model(request: ScriptedRequest) -> ScriptedReply:
    """Call a function whenever there is one; answer only where functions are withdrawn."""
    if request.tools:
        return call("export-status")
    return say(f"Not finished: {request.messages[-1]['content']} when I last looked.")


def order_script() -> list[Step]:
    """List the model's replies for `GOAL`: a plan, three calls at once, a failure, the way around it, the answer."""
    return [_slowly(step) for step in (_plan, _look_up, _reserve, _find_out_why, _reserve_elsewhere, _answer)]


def _plan(_: ScriptedRequest) -> ScriptedReply:
    return say(
        "1. Look up the order, the warehouses and today's date, all at once.\n"
        "2. Reserve the articles.\n"
        "3. Convert the price, and count the days until the parcel is there.\n"
        "4. Hand over the answer."
    )


def _look_up(_: ScriptedRequest) -> ScriptedReply:
    return calls(
        call("orders-find", {"order_id": "A-1007"}),
        call("warehouse-sites"),
        call("calendar-today"),
        text="Three things to look up. None needs another, so I ask for all of them at once.",
    )


def _reserve(request: ScriptedRequest) -> ScriptedReply:
    order = _results(request)["orders-find"]
    return call("warehouse-reserve", {"sku": order["sku"], "quantity": order["quantity"], "site": "Hamburg"})


def _find_out_why(request: ScriptedRequest) -> ScriptedReply:
    order = _results(request)["orders-find"]
    return calls(
        call("warehouse-stock", {"sku": order["sku"]}),
        text="Hamburg could not do it. I see where the lamps are.",
    )


def _reserve_elsewhere(request: ScriptedRequest) -> ScriptedReply:
    results = _results(request)
    order, site = results["orders-find"], _site_with_enough(results)
    return calls(
        call("warehouse-reserve", {"sku": order["sku"], "quantity": order["quantity"], "site": site}),
        call("currency-convert", {"amount": order["total"], "source": order["currency"], "target": "EUR"}),
        call(
            "calendar-add_working_days",
            {"start": results["calendar-today"], "days": results["warehouse-sites"][site]},
        ),
        text=f"{site} has enough. The price and the date I can ask for in the same breath.",
    )


def _answer(request: ScriptedRequest) -> ScriptedReply:
    results = _results(request)
    order, reserved = results["orders-find"], results["warehouse-reserve"]
    arrival = date.fromisoformat(results["calendar-add_working_days"])
    answer = (
        f"{order['customer']}, your {reserved['reserved']} lamps are reserved in {reserved['site']}; Hamburg had only "
        f"{results['warehouse-stock']['Hamburg']}. They cost {results['currency-convert']:.2f} EUR "
        f"({order['total']:.2f} {order['currency']}) and arrive on {arrival:%A}, {arrival.isoformat()}."
    )
    return call("UserInteraction-SendFinalAnswer", {"answer": answer})


def _site_with_enough(results: dict[str, Any]) -> str:
    wanted = results["orders-find"]["quantity"]
    return next(site for site, count in results["warehouse-stock"].items() if count >= wanted)


def _results(request: ScriptedRequest) -> dict[str, Any]:
    """Read the functions' results out of the transcript, by function; of two, the later one."""
    names: dict[str, str] = {}
    results: dict[str, Any] = {}
    for message in cast("list[dict[str, Any]]", request.messages):
        for made in message.get("tool_calls") or ():
            names[made["id"]] = made["function"]["name"]
        if message["role"] == "tool":
            results[names[message["tool_call_id"]]] = _parsed(message["content"])
    return results


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _slowly(step: Step) -> Step:
    def slow(request: ScriptedRequest) -> ScriptedReply:
        time.sleep(_THINKS_FOR)
        return step(request)

    return slow
