"""What people do in the inbox: every decision reaches the store under the name of who is signed in."""

import asyncio
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Approve, PlannerPlugin, requires_approval
from planner_ext.core.state import ASK_USER
from planner_ext.durable import Approvals, PendingApproval, Runs
from planner_ext.durable.records import approval_path
from planner_ext.durable.store import open_database
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.durable import PAY as PAY_CALL
from support.durable import effects_in, open_runs, planner_of, see_through, turn, world
from support.inbox import drive, inbox, visitor_at

PAY = "approvals/a%2F1%2Fpay"


async def shown(store: str, id: str = "a/1/pay") -> PendingApproval:
    async with Approvals.connect(store) as approvals:
        return await approvals.show(id)


async def test_a_call_is_approved_on_its_page(store: str, tmp_path: Path) -> None:
    """A visitor reads exactly what will run, approves it, sees the decision under their name, and a worker takes it."""
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        listed = (await ann.get("")).text
        assert "shop-pay" in listed and PAY in listed
        page = (await ann.get(PAY)).text
        assert (
            "Really?" in page and "Settle the order." in page and "done book 1" in page
        )
        assert (await shown(store)).fingerprint in page
        response = await ann.send(PAY, {"decision": "approve"})
        assert (
            response.status_code == 200
            and "by <strong><bdi>ann</bdi></strong>" in response.text
        )
        assert "Nothing waits." in (await ann.get("")).text
    decision = (await shown(store)).decision
    assert decision is not None and (decision.kind, decision.by) == ("approve", "ann")
    await see_through(store, tmp_path / "effects", "a")
    assert effects_in(tmp_path / "effects")[-1] == "pay 5"


async def test_what_was_said_meanwhile_is_shown_to_who_decides(
    store: str, tmp_path: Path
) -> None:
    """In the list and on the call's page, as text, with who said it."""
    async with Runs.connect(store) as runs:
        await runs.say("a", "<b>Hurry</b>", by="eve")
    async with inbox(store) as base, visitor_at(base, "ann") as ann:
        for path in ("", PAY):
            page = (await ann.get(path)).text
            assert "eve" in page and "&lt;b&gt;Hurry&lt;/b&gt;" in page
        await ann.decide(PAY, "approve")
    await see_through(store, tmp_path / "effects", "a")
    assert effects_in(tmp_path / "effects")[-1] == "pay 5"


@pytest.mark.parametrize("always", ["", "function", "arguments"])
async def test_an_approval_may_hold_for_the_rest_of_the_run(
    store: str, always: str
) -> None:
    """The choices of the terminal are there: this call, this function, these arguments."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.decide(PAY, "approve", always=always)
    decision = (await shown(store)).decision
    assert decision is not None and decision.always == (always or None)


async def test_a_call_is_denied_with_a_reason(store: str) -> None:
    """The reason is kept as it was typed, for the model to read."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.decide(PAY, "deny", reason="Too much, <b>ask</b> again.")
    decision = (await shown(store)).decision
    assert decision is not None and (decision.kind, decision.reason) == (
        "deny",
        "Too much, <b>ask</b> again.",
    )


async def test_edited_arguments_are_typed(store: str, tmp_path: Path) -> None:
    """A number that is typed into the form reaches the function as a number."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.decide(PAY, "edit", **{"argument-0": "4"})
    decision = (await shown(store)).decision
    assert decision is not None and decision.arguments == {"amount": 4}
    await see_through(store, tmp_path / "effects", "a")
    assert effects_in(tmp_path / "effects")[-1] == "pay 4"


async def test_an_edit_is_looked_at_before_it_is_decided(store: str) -> None:
    """The page shows what is changed; an edit other than the one that was looked at is looked at first."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.decide(PAY, "look", **{"argument-0": "4"})
        assert 'data-sign="added"' in ann.page
        assert (await shown(store)).status == "open"
        looked_at = ann.hidden("looked_at")
        other = {"decision": "edit", "argument-0": "9", "looked_at": looked_at}
        await ann.send(PAY, other)
        assert ann.hidden("looked_at") not in ("", looked_at)
        assert (await shown(store)).status == "open"
        await ann.send(PAY, {**other, "argument-0": "4"})
    decision = (await shown(store)).decision
    assert decision is not None and decision.arguments == {"amount": 4}


async def test_a_call_says_who_asks_and_who_decides(store: str) -> None:
    """The page has the function's description, the rule that asks, and whether a hook checks who decides."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get(PAY)
        assert "this inbox does not check who may" in unescape(ann.page)
        assert "<dt>Rule</dt>" in ann.page
    async with (
        inbox(store, authorize=lambda _: False) as base,
        visitor_at(base) as bob,
    ):
        await bob.get(PAY)
        assert "You may not approve this here: " in bob.page


async def test_the_conversation_is_that_of_the_run_that_asks(tmp_path: Path) -> None:
    """A nested run has its own, with links to the runs around it; each call has its arguments, and this one a sign."""
    store = str(tmp_path / "runs.db")

    def reply(request: ScriptedRequest) -> ScriptedReply:
        goal = str(request.messages[0]["content"])
        if goal == "Close the year.":
            return call("desk-reach_goal", {"goal": "Close the day."}, id="inner")
        if goal == "Close the day.":
            return call("clerk-reach_goal", {"goal": "Refund Ann."}, id="inner")
        refunds = [{"amount": 7, "order": 1}, {"amount": 7, "order": 2}]
        return calls(
            *(
                call("shop-refund", given, id=f"refund{place}")
                for place, given in enumerate(refunds)
            )
        )

    kernel = Kernel()
    kernel.add_service(ScriptedChatCompletion(reply))
    kernel.add_plugin(Desk(), "shop")
    for name in ("desk", "clerk"):
        kernel.add_plugin(PlannerPlugin(planner_of()), name)
    async with open_runs(store) as runs:
        await (
            await runs.start(planner_of(), kernel, "Close the year.", run_id="a")
        ).result()
        id = (await runs.approvals().pending())[1].id
    async with inbox(store) as base, visitor_at(base) as ann:
        page = unescape((await ann.get(approval_path(id))).text)
    turns = page[page.index("<h2>Conversation</h2>") :]
    assert "Refund Ann." in turns and "Close the" not in turns
    lines = re.findall(r"<summary>(.*)</summary>", turns)
    assert ["this call" in line for line in lines] == [False, True]
    assert ["order=2" in line for line in lines] == [False, True]
    around = re.findall(r'<dt>Inside</dt><dd><a href="([^"]*)"><bdi>(.*?)</bdi>', page)
    assert around == [
        ("/runs/a#a/0/inner/i0", "Close the day."),
        ("/runs/a", "Close the year."),
    ]
    async with inbox(store) as base, visitor_at(base) as ann:
        assert 'id="a/0/inner/i0"' in (await ann.get("runs/a")).text


async def test_calls_that_wait_together_are_told_apart(tmp_path: Path) -> None:
    """Each link to another call of the run has its summary, the argument in which it differs, or else its id."""
    store = str(tmp_path / "runs.db")
    twice = {"amount": 7, "order": 1}
    batch = calls(
        call("shop-refund", {"amount": 7, "order": 2}, id="refund0"),
        call("shop-refund", twice, id="refund1"),
        call("shop-refund", twice, id="refund2"),
        call("shop-mail", {"to": "ann"}, id="mail0"),
        call("shop-mail", {"to": "bob"}, id="mail1"),
    )
    await drive(store, [batch, say("Settled.")], Desk())
    async with inbox(store) as base, visitor_at(base) as ann:
        mail = "approvals/a%2F0%2Fmail0"
        for path, more in (mail, []), ("runs/a", [("shop-mail", "Write to ann")]):
            page = unescape((await ann.get(path)).text)
            links = re.findall(
                r'<span class="fn">([^<]*)</span> <bdi>([^<]*)</bdi>', page
            )
            assert sorted(links) == sorted(
                [
                    ("shop-refund", "order: 2"),
                    ("shop-refund", "a/0/refund1"),
                    ("shop-refund", "a/0/refund2"),
                    ("shop-mail", "Write to bob"),
                    *more,
                ]
            )
        assert "when all are decided" in (await ann.get(mail)).text


class Desk:
    @requires_approval
    @kernel_function
    async def refund(self, amount: int, order: int) -> str:
        return f"{order}: {amount}"

    @requires_approval(summary="Write to {to}")
    @kernel_function
    async def mail(self, to: str) -> str:
        return to


async def test_roles_that_nothing_checks_are_said_to_the_approver(
    tmp_path: Path,
) -> None:
    """Without a hook: that nobody can approve it here, in words that name no parameter of the package."""
    store = str(tmp_path / "runs.db")
    await drive(store, pays(range(1)), Till())
    async with inbox(store) as base, visitor_at(base) as ann:
        page = unescape((await ann.get("approvals/a%2F0%2Fpay0")).text)
        assert page.count("Nobody can approve this here") == 1
        assert 'value="approve"' not in page and 'value="deny"' in page
        assert "authorize" not in page


async def test_a_refused_edit_keeps_what_was_typed(store: str) -> None:
    """Arguments that do not fit are refused beside their field, which still holds them; the call still waits."""
    async with inbox(store) as base, visitor_at(base) as ann:
        response = await ann.decide(PAY, "edit", **{"argument-0": "a lot"})
        assert response.status_code == 422
        assert (
            'value="a lot"' in response.text
            and "expected a whole number" in response.text
        )
        assert "<details" in response.text and " open>" in response.text
        assert (
            await ann.send(PAY, {"decision": "edit", "argument-0": "6"})
        ).status_code == 200
    assert (await shown(store)).status == "decided"


async def test_the_first_decision_wins_and_the_second_sees_whose_it_was(
    store: str,
) -> None:
    """Two people have the same page open; the one who is later reads who decided, what, and when."""
    async with (
        inbox(store) as base,
        visitor_at(base, "ann") as ann,
        visitor_at(base, "bob") as bob,
    ):
        await ann.get(PAY)
        await bob.get(PAY)
        assert (await ann.send(PAY, {"decision": "approve"})).status_code == 200
        late = await bob.send(PAY, {"decision": "deny", "reason": "no"})
        assert late.status_code == 409
        assert "The first decision counts: approve by ann, 20" in late.text
    call = await shown(store)
    assert call.decision is not None and call.decision.by == "ann"
    assert [(one.by, one.kind) for one in call.refused] == [("bob", "deny")]


async def test_two_decisions_at_the_same_time_have_one_winner(store: str) -> None:
    """Of ten people who press at once, one reads that their decision counts."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get(PAY)
        answers = await asyncio.gather(
            *(
                ann.client.post(
                    PAY,
                    data={
                        "form_token": ann.hidden("form_token"),
                        "fingerprint": ann.hidden("fingerprint"),
                        "decision": "approve",
                    },
                )
                for _ in range(10)
            )
        )
    assert sorted(answer.status_code for answer in answers) == [303, *[409] * 9]


async def test_a_decision_on_another_call_than_was_shown_is_refused(store: str) -> None:
    """A form whose fingerprint is not the call's changes nothing."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get(PAY)
        for decision in ("approve", "deny", "edit"):
            response = await ann.send(
                PAY, {"decision": decision, "fingerprint": "0" * 64, "argument-0": "5"}
            )
            assert (
                response.status_code == 409
                and "has changed since this page was loaded" in response.text
            )
    assert (await shown(store)).status == "open"


async def test_a_decision_that_does_not_fit_is_refused(store: str) -> None:
    """A call cannot be answered, or marked as done when it is not in doubt; an unknown decision changes nothing."""
    async with inbox(store) as base, visitor_at(base) as ann:
        for decision in ("answer", "done", "retry", "", "supply"):
            response = await ann.decide(PAY, decision, answer="7", result="7")
            assert response.status_code == 409
        assert (
            await ann.decide(PAY, "approve", always="everything")
        ).status_code == 409
    assert (await shown(store)).status == "open"


async def test_a_call_that_expires_while_its_page_is_open(store: str) -> None:
    """The late decision is refused with the reason, and the page no longer offers one."""
    async with inbox(store) as base, visitor_at(base) as ann:
        await ann.get(PAY)
        database = await open_database(store)
        await database.transact(
            ("UPDATE planner_approvals SET expires_at = asked_at + 0.001", {})
        )
        await database.close()
        response = await ann.send(PAY, {"decision": "approve"})
        assert response.status_code == 409 and "came too late" in response.text
        assert 'value="approve"' not in response.text and "has expired" in response.text
        assert "Nothing waits." in (await ann.get("")).text


async def test_a_question_of_the_model_is_answered(tmp_path: Path) -> None:
    """The answer reaches the model; a blank one is refused, and leaves what was typed."""
    store, question = str(tmp_path / "runs.db"), "Which order, <i>and</i> for whom?"
    script = [
        calls(call(ASK_USER, {"question": question}, id="ask")),
        say("Order 7, then."),
    ]
    planner, kernel = world(
        tmp_path / "effects", script, require_final_answer_function=True
    )
    async with Runs.sqlite(store) as runs:
        handle = await runs.start(planner, kernel, "Settle.", run_id="a")
        assert (await handle.result()).status in ("paused", "asked")
        async with inbox(runs) as base, visitor_at(base) as ann:
            page = (await ann.get("approvals/a%2F0%2Fask")).text
            assert (
                "Which order, &lt;i&gt;and&lt;/i&gt; for whom?" in page
                and 'value="approve"' not in page
            )
            blank = await ann.send(
                "approvals/a%2F0%2Fask", {"decision": "answer", "answer": "  "}
            )
            assert blank.status_code == 409 and "Write an answer" in blank.text
            for wrong in ("approve", "edit", "retry", "done"):
                assert (
                    await ann.decide("approvals/a%2F0%2Fask", wrong)
                ).status_code == 409
            await ann.decide("approvals/a%2F0%2Fask", "answer", answer="7,\r\nfor ann")
    decision = (await shown(store, "a/0/ask")).decision
    assert decision is not None and (decision.kind, decision.result, decision.by) == (
        "supply",
        "7,\nfor ann",
        "ann",
    )


class Post:
    """Sends letters; the first one hangs after it was sent, until its process is gone."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.hung = asyncio.Event()

    @kernel_function
    async def send(self, to: str) -> str:
        self.sent.append(to)
        if len(self.sent) == 1:
            self.hung.set()
            await asyncio.Event().wait()
        return f"sent to {to}"


def sends(request: ScriptedRequest) -> ScriptedReply:
    return [call("shop-send", {"to": "ann"}, id="send"), say("Done.")][turn(request)]


@pytest.mark.parametrize(("decision", "sent"), [("done", 1), ("retry", 2), ("deny", 1)])
async def test_a_call_in_doubt_is_done_or_run_again(
    tmp_path: Path, decision: str, sent: int
) -> None:
    """A call that may have taken effect shows so; done gives the model its result, retry runs it once more."""
    store, post = str(tmp_path / "runs.db"), Post()
    _, kernel = world(tmp_path / "effects", sends)
    kernel.add_plugin(post, "shop")
    planner, _ = world(tmp_path / "effects")
    async with Runs.sqlite(store, grace_seconds=0) as runs:
        await runs.start(planner, kernel, "Send.", run_id="a")
        await post.hung.wait()
    async with Runs.sqlite(store) as runs:
        assert (
            await (await runs.start(planner, kernel, "Send.", run_id="a")).result()
        ).status == "paused"
    async with Approvals.connect(store) as approvals:
        (waiting,) = await approvals.pending()
    async with inbox(store) as base, visitor_at(base) as ann:
        listed = (await ann.get("")).text
        assert "in doubt" in listed and " disabled title=" in listed  # not among many
        href = f"approvals/{waiting.id.replace('/', '%2F').replace('@', '%40')}"
        page = (await ann.get(href)).text
        assert "may have taken effect" in page
        assert 'value="approve"' not in page
        assert (
            await ann.decide(href, "edit", **{"argument-0": "bob"})
        ).status_code == 409
        assert (
            await ann.decide(href, decision, result="It was sent.")
        ).status_code == 200
    async with Runs.sqlite(store) as runs:
        result = await (await runs.start(planner, kernel, "Send.", run_id="a")).result()
    assert (result.status, len(post.sent)) == ("answered", sent)
    if decision == "done":
        assert result.chat_history is not None
        assert "It was sent." in json.dumps(
            [one.to_dict() for one in result.chat_history.messages]
        )


class Till:
    """A till whose money only a manager may pay out."""

    @requires_approval(roles=["manager"])
    @kernel_function
    async def pay(self, amount: int) -> str:
        return f"paid {amount}"


async def test_who_may_not_decide_is_refused_by_name(tmp_path: Path) -> None:
    """The hook of kept runs decides: the page names the roles, and the refusal the person and the reason."""
    store = str(tmp_path / "runs.db")
    await drive(store, [PAY_CALL, say("Paid.")], Till())

    def authorize(request: Any) -> bool | str:
        return (
            True
            if request.by == "ann"
            else f"that takes one of: {', '.join(request.call.roles)}"
        )

    async with (
        inbox(store, authorize=authorize) as base,
        visitor_at(base, "bo") as bo,
        visitor_at(base, "ann") as ann,
    ):
        assert "Nothing waits for your decision" in (await bo.get("")).text
        assert "manager" in (await bo.get("?person=")).text
        for decision, fields in (
            ("approve", {}),
            ("deny", {}),
            ("edit", {"argument-0": "1"}),
        ):
            response = await bo.decide("approvals/a%2F0%2Fpay", decision, **fields)
            assert response.status_code == 409
            assert (
                "&#39;bo&#39; may not decide &#39;a/0/pay&#39;: that takes one of: manager."
                in response.text
            )
        assert (await ann.decide("approvals/a%2F0%2Fpay", "approve")).status_code == 200
    call_ = await shown(store, "a/0/pay")
    assert call_.decision is not None and call_.decision.by == "ann"
    assert [one.by for one in call_.refused] == ["bo", "bo", "bo"]


def pays(amounts: range) -> list[ScriptedReply]:
    return [
        calls(*(call("shop-pay", {"amount": n}, id=f"pay{n}") for n in amounts)),
        say("Settled."),
    ]


class Shop:
    @requires_approval
    @kernel_function
    async def pay(self, amount: int) -> str:
        return f"paid {amount}"


async def test_many_are_decided_at_once_each_with_its_outcome(tmp_path: Path) -> None:
    """Each is bound to the fingerprint that was shown, and has a line: taken, decided before by whom, or changed."""
    store = str(tmp_path / "runs.db")
    await drive(store, pays(range(4)), Shop())
    async with (
        inbox(store) as base,
        visitor_at(base, "ann") as ann,
        visitor_at(base, "bob") as bob,
    ):
        await ann.get("")
        async with Approvals.connect(store) as approvals:
            waiting = await approvals.pending()
        assert await bob.decide("approvals/a%2F0%2Fpay1", "deny", reason="no")
        items = [f"{one.fingerprint} {one.id}" for one in waiting]
        items[2] = "0" * 64 + items[2][64:]
        response = await ann.send(
            "approvals", {"decision": "approve", "item": [*items[:3], "0 nothing"]}
        )
        text = response.text
        assert response.status_code == 200
        assert (
            text.count('class="chip good">approved') == 1
            and text.count('class="chip bad">refused') == 3
        )
        assert "The first decision counts: deny by bob" in text
        assert "has changed since this page was loaded" in text
        assert "No call with the id" in text
        await ann.get("")
        assert (
            'class="chip good">denied'
            in (
                await ann.send("approvals", {"decision": "deny", "item": items[3]})
            ).text
        )
        await ann.get("")
        assert (
            "No call was selected"
            in (await ann.send("approvals", {"decision": "approve"})).text
        )
        assert (
            await ann.send("approvals", {"decision": "edit", "item": items[3]})
        ).status_code == 403
    states = [(await shown(store, f"a/0/pay{n}")).decision for n in range(4)]
    assert [one and one.kind for one in states] == ["approve", "deny", None, "deny"]


async def test_what_a_list_cannot_show_whole_is_not_approved_among_many(
    tmp_path: Path,
) -> None:
    """Arguments that are too long for the list are decided on their page, where all of them are shown."""
    store, text = str(tmp_path / "runs.db"), "x" * 5_000 + "THE END"

    class Letters:
        @requires_approval
        @kernel_function
        async def send(self, text: str) -> str:
            return text

    await drive(
        store, [call("shop-send", {"text": text}, id="send"), say("Sent.")], Letters()
    )
    async with inbox(store) as base, visitor_at(base) as ann:
        assert (
            "THE END" not in (await ann.get("")).text and " disabled title=" in ann.page
        )
        waiting = await shown(store, "a/0/send")
        item = f"{waiting.fingerprint} {waiting.id}"
        assert (
            "open it"
            in (await ann.send("approvals", {"decision": "approve", "item": item})).text
        )
        assert (await shown(store, "a/0/send")).status == "open"
        assert "THE END" in (await ann.get("approvals/a%2F0%2Fsend")).text
        assert (
            await ann.send("approvals/a%2F0%2Fsend", {"decision": "approve"})
        ).status_code == 200


async def test_an_approval_made_elsewhere_is_shown(store: str) -> None:
    """The page of a decided call says who decided, and offers no decision."""
    async with Approvals.connect(store) as approvals:
        await approvals.decide("a/1/pay", Approve(by="cli"))
    async with inbox(store) as base, visitor_at(base) as ann:
        page = (await ann.get(PAY)).text
        assert "<bdi>cli</bdi>" in page and 'name="decision"' not in page
