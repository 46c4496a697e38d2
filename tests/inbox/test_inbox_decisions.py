"""What people do in the inbox: every decision reaches the store under the name of who is signed in."""

from planner_ext.durable import Approvals
from support.inbox import inbox, visitor_at

PAY = "approvals/a%2F1%2Fpay"


async def test_a_call_is_approved_on_its_page(store: str) -> None:
    """A visitor reads exactly what will run, approves it, and sees the decision under their name."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        listed = (await ann.get("")).text
        assert "shop-pay" in listed and PAY in listed
        shown = (await ann.get(PAY)).text
        assert "Really?" in shown and "Settle the order." in shown and "done book 1" in shown
        response = await ann.send(PAY, {"decision": "approve"})
        assert response.status_code == 200 and "by <strong><bdi>ann</bdi></strong>" in response.text
        assert "Nothing waits." in (await ann.get("")).text
    async with Approvals.connect(store) as approvals:
        call = await approvals.show("a/1/pay")
        assert call.decision is not None and (call.decision.kind, call.decision.by) == ("approve", "ann")
