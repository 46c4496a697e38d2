"""Run an app without a key: the endpoint is a script on this machine, which says the same to each question.

    python samples/offline.py help_desk/after.py
    python samples/offline.py shop_chat/after.py
    python samples/offline.py billing_api/after.py     # serves http://127.0.0.1:8000

Offline, before.py of each app runs, too. With OPENAI_API_KEY in the environment the model is a real one.
"""

import runpy
import sys
from pathlib import Path

import uvicorn
from model import openai_endpoint, results

from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say

APPS = Path(__file__).parent / "apps"


def help_desk(request: ScriptedRequest) -> ScriptedReply:
    """Reset Ada's password, and open a ticket."""
    return [
        call("AccountPlugin-find_login", {"name": "Ada"}),
        call("AccountPlugin-reset_password", {"login": "ada"}),
        call("TicketPlugin-open_ticket", {"login": "ada", "summary": "No password"}),
        say(f"Your password was {'not ' if said(request, 'refused') else ''}reset; ticket 1 is open."),
    ][replies(request)]


def shop_chat(request: ScriptedRequest) -> ScriptedReply:
    """Order two bags of Darjeeling."""
    return [
        call("orders-place_order", {"tea": "Darjeeling", "bags": 2}),
        say("Two bags are on their way." if said(request, "charged") else "Nothing was ordered."),
    ][replies(request)]


def billing_api(request: ScriptedRequest) -> ScriptedReply:
    """Let the billing agent refund the invoice of C-7 that was charged twice."""
    if "InvoicePlugin-refund" in request.tools:
        return [
            call("InvoicePlugin-list_invoices", {"customer": "C-7"}),
            call("InvoicePlugin-refund", {"invoice": "INV-1002", "amount": 49.0}),
            say("Refunded." if said(request, "euros of INV-1002") else "A clerk decides about INV-1002."),
        ][replies(request)]
    return [
        call("BillingAgent-BillingAgent", {"messages": "C-7 was charged twice for March."}),
        say("You have 49 euros back." if said(request, "Refunded.") else "A clerk decides about INV-1002."),
    ][replies(request)]


def replies(request: ScriptedRequest) -> int:
    """Count the model's replies to the last question."""
    roles = [message["role"] for message in request.messages]
    return roles[::-1][: roles[::-1].index("user")].count("assistant")


def said(request: ScriptedRequest, text: str) -> bool:
    """Tell whether a function's result since the last question has a text."""
    since = results(request)[-replies(request) :]
    return any(text in result for result in since)


def main() -> None:
    """Run the app that is named, with the arguments after its name."""
    del sys.argv[0]
    file = APPS / sys.argv[0]
    with openai_endpoint(globals()[file.parent.name]):
        app = runpy.run_path(str(file), run_name="__main__").get("app")
        if app is not None:
            uvicorn.run(app)


if __name__ == "__main__":
    main()
