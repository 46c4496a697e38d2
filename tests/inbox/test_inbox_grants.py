"""Grants in the inbox: given with a decision, listed, revoked under the visitor's name."""

from pathlib import Path

from planner_ext import Approve
from planner_ext.durable import Approvals, Grant, GrantRecord
from support.inbox import inbox, visitor_at

PAY = "approvals/a%2F1%2Fpay"


async def grants(store: str) -> list[GrantRecord]:
    async with Approvals.connect(store) as approvals:
        return await approvals.grants()


async def test_a_decision_gives_a_grant(store: str) -> None:
    """With a lifetime, uses and conditions as they were typed; the page of grants shows it."""
    terms = {"expires_in": "3600", "uses": "3", "arguments": '{"amount": {"le": 100}}'}
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        await ann.get(PAY)
        response = await ann.send(PAY, {"decision": "approve", **terms})
        assert response.status_code == 200
        page = (await ann.get("grants")).text
    (grant,) = await grants(store)
    assert (grant.decision.kind, grant.decision.by) == ("approve", "ann")
    assert grant.as_dict()["terms"] == {
        "expires_in": 3600,
        "uses": 3,
        "arguments": {"amount": {"le": 100}},
    }
    assert "shop-pay" in page and "0 of 3" in page and grant.id in page


async def test_a_decision_without_a_lifetime_gives_none(store: str) -> None:
    """The form's default is this call alone."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.decide(PAY, "approve", expires_in="", uses="", arguments="")
        assert "No grant holds." in (await ann.get("grants")).text
    assert await grants(store) == []


async def test_terms_that_cannot_be_used_are_shown_again(store: str) -> None:
    """The call still waits, and the form holds what was typed, beside the problem."""
    async with inbox(store) as base, visitor_at(base) as ann:
        response = await ann.decide(PAY, "approve", expires_in="3600", arguments="<100")
    assert response.status_code == 409
    assert "The terms of the grant cannot be used" in response.text
    assert 'value="&lt;100"' in response.text and "<details open>" in response.text
    assert await grants(store) == []


async def test_a_grant_is_revoked_on_its_page(store: str, tmp_path: Path) -> None:
    """Under the visitor's name; one that does not exist is named, a forged form refused."""
    async with Approvals.connect(store) as approvals:
        grant = await approvals.grant(
            "a/1/pay", Approve(by="ann"), Grant(expires_in=60)
        )
    async with inbox(store) as base, visitor_at(base, "bo") as bo:
        await bo.get("grants")
        assert (await bo.send("grants", {"grant": "x"})).status_code == 404
        response = await bo.send("grants", {"grant": grant})
        assert response.status_code == 200 and "No grant holds." in response.text
        assert (
            await bo.client.post("grants", data={"grant": grant})
        ).status_code == 403
    assert await grants(store) == []
