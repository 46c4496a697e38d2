"""The queue: what waits is found, walked through and decided, one after the other or many at once."""

import csv
import io
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import requires_approval
from planner_ext.durable import Approvals, Runs
from planner_ext.testing import ScriptedChatCompletion, call, calls, say
from support.durable import open_runs, planner_of
from support.inbox import TOKEN, Visitor, drive, inbox, visitor_at


class Till:
    """A till: refunds wait for the treasurer, letters for anyone."""

    @requires_approval(roles=["treasurer"])
    @kernel_function
    async def refund(self, order: str, amount: float) -> str:
        return f"refunded {amount}"

    @requires_approval(expires_in=3000)
    @kernel_function
    async def write(self, to: str) -> str:
        return f"wrote to {to}"


REFUNDS = [("A-1", 5), ("A-2", 7), ("A-1", 5)]


@pytest.fixture
async def store(tmp_path: Path) -> str:
    """Two runs: three refunds, two of which are equal, and a letter."""
    where = str(tmp_path / "runs.db")
    batch = calls(
        *(
            call("shop-refund", {"order": order, "amount": amount}, id=f"refund{place}")
            for place, (order, amount) in enumerate(REFUNDS)
        )
    )
    await drive(where, [batch, say("Done.")], Till(), run_id="a", goal="Refund Ann.")
    letter = call("shop-write", {"to": "Bö"}, id="letter")
    await drive(where, [letter, say("Done.")], Till(), run_id="b", goal="Write.")
    return where


def found(page: str) -> list[str]:
    """Return the ids of the calls that a list shows."""
    return re.findall(r'class="fn" href="/approvals/([^"?]*)', page)


async def test_what_waits_is_found_by_what_is_known_of_it(store: str) -> None:
    """By text, function, role, run and expiry, alone or together; what cannot match is said."""
    ids = {
        "": ["a%2F0%2Frefund0", "a%2F0%2Frefund1", "a%2F0%2Frefund2", "b%2F0%2Fletter"],
        "text=A-2": ["a%2F0%2Frefund1"],
        "text=b%C3%B6": ["b%2F0%2Fletter"],
        "text=refund+ann": [
            "a%2F0%2Frefund0",
            "a%2F0%2Frefund1",
            "a%2F0%2Frefund2",
        ],
        "function=shop-write": ["b%2F0%2Fletter"],
        "role=treasurer&text=A-2": ["a%2F0%2Frefund1"],
        "role=treasure": [],
        "run_id=b": ["b%2F0%2Fletter"],
        "expires_in=3600": ["b%2F0%2Fletter"],
        "expires_in=60": [],
        "tag=none": [],
    }
    async with inbox(store) as base, visitor_at(base) as ann:
        for query, expected in ids.items():
            assert found((await ann.get(f"?{query}")).text) == expected, query
            assert ("matches these filters" in ann.page) is (expected == [])


async def test_equal_calls_are_a_list_of_their_own(store: str) -> None:
    """A call says how many ask the same; they are read once, and all selected without JavaScript."""
    async with inbox(store, authorize=lambda _: True) as base, visitor_at(base) as ann:
        await ann.get("")
        assert ann.page.count("2 equal calls wait") == 2
        (link, _) = re.findall(r'href="/(\?equal_to=[0-9a-f]+)"', ann.page)
        assert found((await ann.get(link)).text) == [
            "a%2F0%2Frefund0",
            "a%2F0%2Frefund2",
        ]
        assert "Select all 2 that are shown" in ann.page
        await ann.get(f"{link}&select=all")
        assert ann.page.count(" checked>") == 2


async def test_groups_of_equal_calls_are_decided_together(store: str) -> None:
    """One line a group, with its number; a selected group is all calls that the page counted, and no later one."""
    async with inbox(store, authorize=lambda _: True) as base, visitor_at(base) as ann:
        await ann.get("?groups=yes&run_id=a")
        assert re.findall(r"<strong>(\d+) \S</strong>", ann.page) == ["2"]
        assert ">list each</a>" in ann.page and "equal calls wait" not in ann.page
        items = re.findall(r'name="item" value="([^"]*)"', ann.page)
        assert [len(text.split()) for text in items] == [4, 2]
        assert "Select all 3 that are shown" in ann.page
        response = await ann.send(
            "approvals?groups=yes", {"decision": "approve", "item": items[:1]}
        )
        assert "2 of 2 approved." in response.text
        assert 'href="/?groups=yes"' in response.text
    async with Approvals.connect(store) as approvals:
        assert [one.call_id for one in await approvals.pending("a")] == ["refund1"]


async def test_a_list_of_the_oldest_calls_says_what_it_leaves_out(
    tmp_path: Path,
) -> None:
    """Grouped, or restricted to a person, it has the 500 oldest; the others are counted, and one click away."""
    where = str(tmp_path / "runs.db")
    letters = (call("shop-write", {"to": "Bö"}, id=f"letter{n:03}") for n in range(502))
    await drive(where, [calls(*letters), say("Done.")], Till())
    async with inbox(where, authorize=lambda _: True) as base, visitor_at(base) as ann:
        for path in ("?groups=yes", "", "?function=shop-write"):
            page = unescape((await ann.get(path)).text)
            assert "The 2 later ones" in page and "wait for others" not in page
            (later,) = re.findall(r'href="/([^"]*offset=500)"', page)
            assert found((await ann.get(later)).text) == [
                "a%2F0%2Fletter500",
                "a%2F0%2Fletter501",
            ]
            assert "later ones" not in ann.page


async def test_the_list_has_what_the_visitor_may_decide(store: str) -> None:
    """Where a hook decides who may, others' calls are left out, counted, and one click away."""

    def authorize(request: Any) -> bool:
        return "treasurer" not in request.call.roles or request.by == "tess"

    async with (
        inbox(store, authorize=authorize) as base,
        visitor_at(base, "bo") as bo,
        visitor_at(base, "tess") as tess,
    ):
        assert found((await bo.get("")).text) == ["b%2F0%2Fletter"]
        assert "3 wait for others" in bo.page
        assert len(found((await bo.get("?person=")).text)) == 4
        assert len(found((await tess.get("")).text)) == 4
        assert found((await tess.get("?person=bo")).text) == ["b%2F0%2Fletter"]
        response = await bo.decide("approvals/b%2F0%2Fletter", "approve next")
        assert "Nothing waits for your decision" in response.text


async def test_approve_and_next_walks_through_the_list(store: str) -> None:
    """Each decision opens the next call of the filtered list, the last one the list; a call may be skipped."""
    async with inbox(store, authorize=lambda _: True) as base, visitor_at(base) as ann:
        path = "approvals/a%2F0%2Frefund1?role=treasurer"
        response = await ann.decide(path, "approve next")
        assert response.url.raw_path.endswith(b"refund2?role=treasurer")
        response = await ann.send(
            "approvals/a%2F0%2Frefund2?role=treasurer", {"decision": "deny next"}
        )
        assert response.url.raw_path.endswith(b"refund0?role=treasurer")
        response = await ann.get("next?after=a%2F0%2Frefund0")
        assert response.url.raw_path.endswith(b"letter")
        await ann.get("approvals/a%2F0%2Frefund0?role=treasurer")
        response = await ann.send(
            "approvals/a%2F0%2Frefund0?role=treasurer", {"decision": "approve next"}
        )
        assert response.url.raw_path == b"/?role=treasurer"


async def test_many_decisions_can_be_loaded_again(store: str) -> None:
    """The answer is a redirect to a page that shows their outcomes, to nobody else, and decides nothing."""
    async with (
        inbox(store, authorize=lambda _: True) as base,
        visitor_at(base, "ann") as ann,
        visitor_at(base, "bob") as bob,
    ):
        await ann.get("")
        items = re.findall(r'name="item" value="([^"]*)"', ann.page)
        response = await ann.send("approvals", {"decision": "approve", "item": items})
        assert response.history[0].status_code == 303
        assert "4 of 4 approved." in response.text
        again = await ann.get(response.url.path)
        assert "4 of 4 approved." in again.text
        assert (await bob.get(response.url.path)).url.path == "/decisions"


async def test_what_was_typed_survives_a_sign_in(store: str) -> None:
    """A decision that arrives without a session decides nothing; after the sign-in its text is there again."""
    path = "approvals/a%2F0%2Frefund1"
    async with (
        inbox(store, authorize=lambda _: True) as base,
        visitor_at(base, "ann") as ann,
    ):
        await ann.get(path)
        ann.client.cookies.clear()
        response = await ann.send(path, {"decision": "deny", "reason": "Too <much>"})
        assert response.status_code == 401
        fields = {name: ann.hidden(name) for name in ("next", "typed")}
        assert fields["typed"]
        await ann.send("sign-in", {"token": TOKEN, "name": "ann", **fields})
        assert 'value="Too &lt;much&gt;"' in ann.page
        assert "nothing was decided" in ann.page
        async with Approvals.connect(store) as approvals:
            assert (await approvals.show("a/0/refund1")).status == "open"
        await ann.send(path, {"decision": "deny", "reason": "Too <much>"})
        async with Approvals.connect(store) as approvals:
            assert (await approvals.show("a/0/refund1")).status == "decided"


async def test_a_form_of_an_earlier_session_keeps_its_text(store: str) -> None:
    """It is refused, and what was typed is shown with the reason."""
    path = "approvals/a%2F0%2Frefund1"
    async with (
        inbox(store, authorize=lambda _: True) as base,
        visitor_at(base, "ann") as ann,
    ):
        await ann.get(path)
        wrong = {"decision": "edit", "argument-1": "6", "form_token": "old"}
        response = await ann.send(path, wrong)
        assert response.status_code == 403
        assert 'value="6"' in response.text
        assert "another session" in response.text


async def decided(store: str, ann: Visitor) -> None:
    await ann.decide("approvals/a%2F0%2Frefund0", "edit", **{"argument-1": "4"})
    await ann.decide("approvals/a%2F0%2Frefund1", "deny", reason="=1+1")


async def test_decisions_are_listed_with_what_they_changed(store: str) -> None:
    """Who, what, when, edited from and to; by person, kind, function and day; as a page, CSV and JSON."""
    async with (
        inbox(store, authorize=lambda _: True) as base,
        visitor_at(base, "ann") as ann,
        visitor_at(base, "bob") as bob,
    ):
        await decided(store, ann)
        await bob.decide("approvals/b%2F0%2Fletter", "approve")
        counts = {
            "": 3,
            "by=ann": 2,
            "by=an": 0,
            "kind=deny": 1,
            "function=shop-write": 1,
            "by=ann&kind=approve": 1,
            "role=treasurer": 2,
            "run_id=b": 1,
            "decided_after=2000-01-01": 3,
            "decided_before=2000-01-01": 0,
        }
        for query, number in counts.items():
            page = (await ann.get(f"decisions?{query}")).text
            assert len(found(page)) == number, query
        await ann.get("decisions?kind=approve&by=ann")
        assert "<bdi>order: &#34;A-1&#34;</bdi>" in ann.page
        for text in ('data-sign="removed"', 'data-sign="added"', "ann"):
            assert text in ann.page
        assert "Expected a date" in (await ann.get("decisions?decided_after=x")).text
        rows = (await ann.client.get("decisions.json?by=ann")).json()
        assert [(row["decision"], row["by"]) for row in rows] == [
            ("deny", "ann"),
            ("approve", "ann"),
        ]
        edited = rows[1]
        assert (edited["requested"]["amount"], edited["arguments"]["amount"]) == (5, 4)
        text = (await ann.client.get("decisions.csv")).text
        lines = list(csv.DictReader(io.StringIO(text)))
        assert [line["function"] for line in lines] == [
            "shop-write",
            "shop-refund",
            "shop-refund",
        ]
        assert lines[1]["reason"] == "'=1+1"  # a spreadsheet does not compute it
        assert (await ann.client.get("decisions.json?by=nobody")).json() == []
        assert (await ann.client.get("decisions.xml")).status_code == 404


async def test_a_notice_has_the_address_of_each_call(store: str) -> None:
    """Where the inbox's address is known, text and JSON lead to the page of the call."""
    notices: list[Any] = []
    script = [call("shop-write", {"to": "c/d"}, id="letter"), say("Done.")]
    async with Runs.connect(store) as runs:
        await runs.set_inbox("https://inbox.example.com/approve/")
    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(script))
    kernel.add_plugin(Till(), "shop")
    async with open_runs(store, poll_seconds=0.01, on_paused=notices.append) as runs:
        handle = await runs.start(planner_of(), kernel, "Write.", run_id="c")
        await handle.result()
    address = "https://inbox.example.com/approve/approvals/c%2F0%2Fletter"
    (notice,) = [one for one in notices if one.run_id == "c"]
    assert notice.text.endswith(address)
    assert notice.as_dict()["pending"][0]["address"] == address
