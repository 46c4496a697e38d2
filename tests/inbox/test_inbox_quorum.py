"""A call that several persons have to approve, in the inbox: each signs in and has one vote."""

from pathlib import Path

import pytest
from starlette.requests import Request

from planner_ext import ApprovalPolicy, Approve
from planner_ext.durable import Approvals
from support.durable import GOAL, effects_in, open_runs, world
from support.inbox import inbox, visitor_at

PAY = "approvals/a%2F1%2Fpay"
TWO = ApprovalPolicy.from_dict(
    {
        "default": "allow",
        "rules": [
            {
                "function": "pay",
                "action": "ask",
                "quorum": 2,
                "escalates_in": 14_400,
                "escalates_to": ["lead"],
            }
        ],
    }
)


async def by_header(request: Request) -> str | None:
    """Sign in as a host application might."""
    return request.headers.get("x-user")


async def drive(store: str, effects: Path) -> str:
    """Drive the run to its next pause or end; return its status."""
    planner, kernel = world(effects, interceptors=[TWO])
    async with open_runs(store, poll_seconds=0.01) as runs:
        handle = await runs.start(planner, kernel, GOAL, run_id="a")
        return (await handle.result()).status


@pytest.fixture
async def voting_store(tmp_path: Path) -> str:
    """A store whose run ``a`` waits for two persons."""
    store = str(tmp_path / "two.db")
    assert await drive(store, tmp_path / "effects") == "paused"
    return store


async def test_two_persons_approve_it(voting_store: str, tmp_path: Path) -> None:
    """List and page say how many have, and who; a second vote of one is refused by name; then a worker goes on."""
    async with (
        inbox(voting_store, sign_in=by_header) as base,
        visitor_at(base, None) as visitor,
    ):
        visitor.client.headers["x-user"] = "ann"
        page = (await visitor.get(PAY)).text
        assert "0 of 2" in page
        assert 'to <span class="chip">lead</span>' in page
        assert "for the rest of the run" not in page
        assert "Answer later calls so, too" not in page
        response = await visitor.send(PAY, {"decision": "approve"})
        assert response.status_code == 200
        assert "1 of 2: ann" in response.text
        assert "1 of 2: ann" in (await visitor.get("")).text

        page = (await visitor.get(PAY)).text
        assert "You may not approve this here" in page

        again = await visitor.decide(PAY, "approve")
        assert again.status_code == 409
        assert "one person counts once" in again.text

        visitor.client.headers["x-user"] = "bo"
        response = await visitor.decide(PAY, "approve")
        assert "by <strong><bdi>ann, bo</bdi></strong>" in response.text
    assert await drive(voting_store, tmp_path / "effects") == "answered"
    assert effects_in(tmp_path / "effects")[-1] == "pay 5"


async def test_many_calls_at_once_are_voted_on(voting_store: str) -> None:
    """The outcome of a vote is not that the call is approved, but how many have."""
    async with (
        inbox(voting_store, sign_in=by_header) as base,
        visitor_at(base, None) as visitor,
    ):
        visitor.client.headers["x-user"] = "ann"
        async with Approvals.connect(voting_store) as approvals:
            item = await approvals.show("a/1/pay")
        await visitor.get("")
        picked = {"item": f"{item.fingerprint} {item.id}", "decision": "approve"}
        page = (await visitor.send("approvals", picked)).text
        assert "approved, 1 of 2: ann" in page


async def test_a_typed_name_has_no_vote(voting_store: str) -> None:
    """Who signs in with the shared token could be anybody: the page says what is needed."""
    async with inbox(voting_store) as base, visitor_at(base, "ann") as ann:
        page = (await ann.get(PAY)).text
        assert "You may not approve this here" in page
        assert "only typed" in page
        response = await ann.decide(PAY, "approve")
        assert response.status_code == 409
        assert "only typed" in response.text


async def test_a_vote_elsewhere_shows_in_open_pages(voting_store: str) -> None:
    """The mark that open pages compare changes with a vote."""
    async with open_runs(voting_store) as runs:
        before = (await runs.marks()).waiting
        async with Approvals.connect(voting_store, verified=True) as approvals:
            await approvals.decide("a/1/pay", Approve(by="ann"))
        assert (await runs.marks()).waiting != before
