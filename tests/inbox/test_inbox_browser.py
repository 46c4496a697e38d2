"""The inbox in a real browser: what people see and do in it, what they cannot do, and what a foreign page cannot do."""

import os
import re
from collections.abc import AsyncGenerator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, expect

from planner_ext import Deny
from planner_ext.durable import Approvals, PendingApproval, Runs
from planner_ext.durable.store import open_database
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, calls, say
from support.browser import needs_chromium, problems_everywhere, problems_of, window
from support.command_line import COMMAND
from support.inbox import TOKEN, inbox
from support.processes import Lives
from support.till import (
    GOAL,
    REFUND,
    Till,
    application,
    asks,
    leave_in_doubt,
    leave_waiting,
    refunds,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_chromium]

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\u202e\u200bx\x1b[2J"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of its own for each test."""
    return tmp_path / "runs.db"


@pytest_asyncio.fixture(loop_scope="session")
async def address(store: Path) -> AsyncGenerator[str]:
    """Serve the store, which need not exist yet."""
    async with inbox(store, authorize=lambda _: True) as base:
        yield base


async def sign_in(page: Page, name: str = "ann") -> None:
    """Send the form of the sign-in, and open the list."""
    fields: dict[str, str | float | bool] = {"token": TOKEN, "name": name, "next": ""}
    await page.request.post("/sign-in", form=fields)
    await page.goto("/")
    await expect(page.get_by_role("banner")).to_contain_text(f"Signed in as {name}")


async def the_call(
    store: Path, approval_id: str = "order-7/0/refund-0"
) -> PendingApproval:
    """Read a call as the store has it."""
    async with Approvals.connect(store) as approvals:
        return await approvals.show(approval_id)


async def test_the_printed_link_signs_in(
    browser: Browser, lives: Lives, store: Path
) -> None:
    """``planner-ext serve`` prints a link; who follows it and gives a name sees what waits; signing out ends it."""
    await leave_waiting(store)
    with lives.program(
        *COMMAND, "serve", "--store", str(store), "--port", "0", cwd=store.parent
    ) as process:
        line = process.stdout.readline()
        found = re.search(r"(http://\S+?)/sign-in\?token=\S+", line)
        assert found is not None, line
        async with window(browser, found[1]) as page:
            await page.goto(found[0])
            await page.get_by_label("Your name").fill("ann")
            await page.keyboard.press("Enter")
            await expect(page.get_by_role("link", name="till-refund")).to_be_visible()
            await page.get_by_role("button", name="Sign out").click()
            await page.goto("/")
            await expect(page.get_by_text("till-refund")).to_have_count(0)


async def test_an_approved_call_runs(
    browser: Browser, address: str, store: Path
) -> None:
    """The page shows function, arguments and goal; approved, a worker runs it, and the run's page shows who decided."""
    await leave_waiting(store)
    async with window(browser, address) as page:
        await sign_in(page)
        await page.get_by_role("link", name="till-refund").click()
        for text in (
            "A-1007",
            "129.9",
            "broken",
            GOAL,
            "Refund this customer?",
            "treasurer",
        ):
            await expect(page.get_by_text(text).first).to_be_visible()
        await page.get_by_role("button", name="Approve", exact=True).click()
        await expect(page.get_by_role("status")).to_contain_text("approved")
        call = await the_call(store)
        assert call.decision is not None
        assert (call.decision.kind, call.decision.by) == ("approve", "ann")
        till = Till()
        async with Runs.sqlite(store, authorize=lambda _: True) as runs:
            result = await (
                await runs.start(
                    *application([say("Done.")], till), GOAL, run_id="order-7"
                )
            ).result()
        assert (result.status, till.done[0]["amount"]) == ("answered", 129.9)
        await page.goto("/runs/order-7")
        await expect(page.get_by_text("ann").last).to_be_visible()


async def test_a_call_is_edited_in_a_form(
    browser: Browser, address: str, store: Path
) -> None:
    """The form has a field for each parameter; what cannot be used keeps what was typed; what can is what runs."""
    await leave_waiting(store)
    async with window(browser, address) as page:
        await sign_in(page)
        await page.get_by_role("link", name="till-refund").click()
        await page.get_by_text("edited arguments").click()
        amount, note = page.get_by_label("amount"), page.get_by_label("note")
        await expect(amount).to_have_value("129.9")
        await amount.fill("much")
        await note.fill("as agreed")
        await page.get_by_role("button", name="Look at the changes").click()
        await expect(page.get_by_role("alert")).to_contain_text("amount")
        await expect(note).to_have_value("as agreed")
        await amount.fill("20")
        await page.get_by_role("button", name="Look at the changes").click()
        changes = page.get_by_role("status", name="What this changes")
        for line in ("- 129.9", "+ 20", "+ as agreed"):
            await expect(changes).to_contain_text(line)
        await page.get_by_role("button", name="Approve with these arguments").click()
        await expect(page.get_by_role("status")).to_contain_text("approved")
    call = await the_call(store)
    assert call.decision is not None
    assert call.decision.arguments is not None
    assert {
        name: call.decision.arguments[name] for name in ("order", "amount", "note")
    } == {
        "order": "A-1007",
        "amount": 20,
        "note": "as agreed",
    }


async def test_a_call_is_denied_with_a_reason(
    browser: Browser, address: str, store: Path
) -> None:
    """The model reads the reason."""
    await leave_waiting(store)
    async with window(browser, address) as page:
        await sign_in(page)
        await page.get_by_role("link", name="till-refund").click()
        await page.get_by_label("Reason", exact=True).fill("It was repaired.")
        await page.get_by_role("button", name="Deny", exact=True).click()
        await expect(page.get_by_role("status")).to_contain_text("denied")
    heard: list[str] = []

    def listens(request: ScriptedRequest) -> ScriptedReply:
        heard.extend(
            str(message["content"])
            for message in request.messages
            if message["role"] == "tool"
        )
        return say("Then not.")

    async with Runs.sqlite(store, authorize=lambda _: True) as runs:
        result = await (
            await runs.start(*application(listens), GOAL, run_id="order-7")
        ).result()
    assert result.status == "answered"
    assert "It was repaired." in heard[-1]


async def test_a_question_is_answered(
    browser: Browser, address: str, store: Path
) -> None:
    """A question of the model has a field for the answer, and no other decision."""
    await leave_waiting(store, [asks("Which of the two lamps?")])
    async with window(browser, address) as page:
        await sign_in(page)
        await page.get_by_role("link", name="A question of the model").click()
        await expect(page.get_by_text("Which of the two lamps?").first).to_be_visible()
        await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
        await page.get_by_label("Your answer").fill("The green one.")
        await page.get_by_role("button", name="Answer", exact=True).click()
        await expect(page.get_by_role("status")).to_contain_text("answered")
    call = await the_call(store, "order-7/0/asks")
    assert call.decision is not None
    assert (call.decision.by, call.decision.result) == ("ann", "The green one.")


async def test_a_call_in_doubt_is_marked_or_run_again(
    browser: Browser, address: str, store: Path
) -> None:
    """The page says that it may have taken effect; marked as done, the model reads its outcome."""
    await leave_in_doubt(store)
    await leave_in_doubt(store, run_id="again")
    async with window(browser, address) as page:
        await sign_in(page)
        await expect(page.get_by_text("may have taken effect")).to_have_count(2)
        await page.get_by_role("link", name="till-send").first.click()
        await page.get_by_label("It was done").fill("sent at noon")
        await page.get_by_role("button", name="Mark as done").click()
        await expect(page.get_by_role("status")).to_contain_text("sent at noon")
        await page.get_by_role("link", name="Back to the inbox").click()
        await page.get_by_role("link", name="till-send").click()
        await page.get_by_role("button", name="Run it again").click()
        await expect(page.get_by_role("status")).to_contain_text("approved")
    decisions = [
        (await the_call(store, f"{run}/0/send")).decision for run in ("letter", "again")
    ]
    assert [one and (one.kind, one.by, one.result) for one in decisions] == [
        ("supply", "ann", "sent at noon"),
        ("approve", "ann", None),
    ]


async def test_many_calls_are_decided_at_once(
    browser: Browser, address: str, store: Path
) -> None:
    """The selected ones are, the others are not."""
    await leave_waiting(
        store,
        [refunds(*({"order": f"A-{number}", "amount": number} for number in range(5)))],
    )
    async with window(browser, address) as page:
        await sign_in(page)
        boxes = page.get_by_role("checkbox", name=re.compile("till-refund"))
        await expect(boxes).to_have_count(5)
        for place in (0, 2, 3):
            await boxes.nth(place).check()
        await page.get_by_role("button", name="Approve").click()
        await expect(page.get_by_role("status")).to_have_text("3 of 3 approved.")
        await page.get_by_role("link", name="Back to the inbox").click()
        await expect(boxes).to_have_count(2)
    decided = [
        (await the_call(store, f"order-7/0/refund-{number}")).decision
        for number in range(5)
    ]
    assert [one is not None and one.kind == "approve" for one in decided] == [
        True,
        False,
        True,
        True,
        False,
    ]


async def test_the_second_of_two_people_sees_whose_decision_it_was(
    browser: Browser, address: str, store: Path
) -> None:
    """Both have the page open. The first decision counts: a live page says so at once, any other when one is sent."""
    await leave_waiting(store)
    async with (
        window(browser, address) as first,
        window(browser, address) as live,
        window(browser, address, java_script_enabled=False) as plain,
    ):
        for page, name in ((first, "ann"), (live, "cleo"), (plain, "bob")):
            await sign_in(page, name)
            await page.get_by_role("link", name="till-refund").click()
        await plain.get_by_label("Reason", exact=True).fill("No.")
        await first.get_by_role("button", name="Approve", exact=True).click()
        await expect(first.get_by_role("status")).to_contain_text("approved by ann")
        await expect(live.get_by_role("status")).to_contain_text("approved by ann")
        await expect(live.get_by_role("button", name="Deny")).to_have_count(0)
        await plain.get_by_role("button", name="Deny", exact=True).click()
        await expect(plain.get_by_role("alert")).to_contain_text("ann")
    call = await the_call(store)
    assert call.decision is not None
    assert (call.decision.kind, call.decision.by, call.refused[0].by) == (
        "approve",
        "ann",
        "bob",
    )


async def test_a_question_that_expires_while_it_is_read_is_not_decided(
    browser: Browser, address: str, store: Path
) -> None:
    """The page says so when the time comes, and a decision that is sent nevertheless does not count."""
    await leave_waiting(store)
    async with (
        window(browser, address) as page,
        window(browser, address, java_script_enabled=False) as plain,
    ):
        for one in (page, plain):
            await sign_in(one)
        await leave_waiting(
            store, [call("till-quick", {"order": "A-1"}, id="quick")], run_id="quick"
        )
        for one in (page, plain):
            await one.goto("/approvals/quick%2F0%2Fquick")
            await expect(
                one.get_by_role("button", name="Approve", exact=True)
            ).to_be_visible()
        await expect(page.get_by_text("has expired")).to_be_visible()
        await expect(
            page.get_by_role("button", name="Approve", exact=True)
        ).to_have_count(0)
        await plain.get_by_role("button", name="Approve", exact=True).click()
        await expect(plain.get_by_role("alert")).to_contain_text("expired")
    assert (await the_call(store, "quick/0/quick")).decision is None


async def test_two_hundred_calls_can_be_worked_through(
    browser: Browser, address: str, store: Path
) -> None:
    """Each is reachable, the oldest first, and the page stays quick."""
    wanted = [{"order": f"A-{number:04}", "amount": number} for number in range(200)]
    await leave_waiting(store, [refunds(*wanted)])
    async with window(browser, address) as page:
        await sign_in(page)
        seen: list[str] = []
        while True:
            seen += re.findall(r"A-\d{4}", await page.get_by_role("main").inner_text())
            older = page.get_by_role("link", name="After")
            if not await older.count():
                break
            async with page.expect_navigation():
                await older.click()
        assert sorted(set(seen)) == [one["order"] for one in wanted]
        assert await problems_of(page) == []


async def test_a_forged_request_decides_nothing(
    browser: Browser, address: str, store: Path
) -> None:
    """Without the form's token, or from another site, a request with the person's cookie is refused."""
    await leave_waiting(store)
    call = await the_call(store)
    async with window(browser, address) as page:
        await sign_in(page)
        for headers in (
            {},
            {"Origin": "https://evil.example"},
            {"Sec-Fetch-Site": "cross-site"},
        ):
            answer = await page.request.post(
                f"/approvals/{call.id.replace('/', '%2F')}",
                form={
                    "decision": "approve",
                    "fingerprint": call.fingerprint,
                    "form_token": "guessed",
                },
                headers=headers,
            )
            assert answer.status == 403
        assert (
            await page.request.get("/", headers={"Host": "evil.example"})
        ).status == 403
    assert (await the_call(store)).decision is None


async def test_hostile_texts_are_shown_and_do_nothing(
    browser: Browser, address: str, store: Path
) -> None:
    """Markup in goal, function, arguments, ids and results is text, and what is invisible is spelled out."""
    script = [
        calls(
            call(f"till-{HOSTILE}", {}, id="first"),
            call("till-find", {"order": HOSTILE}, id="second"),
        ),
        calls(
            call(
                "till-refund",
                {"order": HOSTILE, "amount": 1, "note": f"</pre>{HOSTILE}"},
                id=HOSTILE,
            ),
            text=f"I think: {HOSTILE}",
        ),
    ]
    name = "</title><script>alert(3)</script>"
    await leave_waiting(store, script, run_id=name.replace("/", "\\"), goal=HOSTILE)
    async with window(browser, address) as page:
        page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
        await sign_in(page)
        for step in ("list", "approval", "run"):
            if step == "approval":
                await page.get_by_role("link", name="till-refund").click()
            if step == "run":
                await page.get_by_role(
                    "link", name=name.replace("/", "\\\\")
                ).first.click()
            text = await page.get_by_role("main").inner_text()
            assert "<script>alert(1)</script>" in text, step
            assert "\\u202e" in text, step
            assert "\\u200b" in text, step
            assert not re.search("[\u202e\u200b\x1b]", await page.content()), step
            assert await page.locator("main script, main img").count() == 0
            assert await problems_of(page) == [], step


async def test_everything_needed_works_without_javascript(
    browser: Browser, address: str, store: Path
) -> None:
    """Sign in, read, edit, approve, decide several, deny: with forms alone."""
    await leave_waiting(
        store,
        [refunds(*({"order": f"A-{number}", "amount": number} for number in range(4)))],
    )
    async with window(browser, address, java_script_enabled=False) as page:
        await sign_in(page)
        links, status = (
            page.get_by_role("link", name="till-refund"),
            page.get_by_role("status"),
        )
        await links.first.click()
        await page.get_by_text("edited arguments").click()
        await page.get_by_label("amount").fill("7")
        await page.get_by_role("button", name="Look at the changes").click()
        await page.get_by_role("button", name="Approve with these arguments").click()
        await expect(status).to_contain_text("approved")
        await page.goto("/")
        await expect(links).to_have_count(3)
        await links.first.click()
        await page.get_by_role("button", name="Deny", exact=True).click()
        await expect(status).to_contain_text("denied")
        await page.goto("/")
        for box in await page.get_by_role(
            "checkbox", name=re.compile("till-refund")
        ).all():
            await box.check()
        await page.get_by_role("button", name="Deny", exact=True).click()
        await expect(status).to_have_text("2 of 2 denied.")


async def test_the_keyboard_suffices(
    browser: Browser, address: str, store: Path
) -> None:
    """Tab reaches the call and its decision in the order of reading, with a visible focus; Enter decides."""
    await leave_waiting(store)
    async with window(browser, address) as page:
        await sign_in(page)
        await tab_to(page, "till-refund")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/approvals/**")
        passed = await tab_to(page, "Approve")
        assert "Deny" not in passed
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("status")).to_contain_text("approved")
    assert (await the_call(store)).decision is not None


async def tab_to(page: Page, wanted: str) -> list[str]:
    """Press Tab until the focus is on an element with this text; return the texts before it."""
    passed: list[str] = []
    for _ in range(40):
        await page.keyboard.press("Tab")
        text, outline = await page.evaluate(
            "(at => [(at.textContent || '').trim(), getComputedStyle(at).outlineStyle])(document.activeElement)"
        )
        assert outline != "none", text
        if text == wanted:
            return passed
        passed.append(text)
    raise AssertionError(f"{wanted} is not reached: {passed}")


async def test_the_list_follows_what_other_processes_do(
    browser: Browser, address: str, store: Path
) -> None:
    """What starts to wait appears, and what is decided elsewhere goes, without a click; what is selected stays so."""
    await leave_waiting(store)
    async with window(browser, address) as page:
        await sign_in(page)
        boxes = page.get_by_role("checkbox", name=re.compile("till-refund"))
        await expect(boxes).to_have_count(1)
        await leave_waiting(store, run_id="order-8")
        await expect(boxes).to_have_count(2)
        await boxes.nth(1).check()
        await expect(page).to_have_title(re.compile("2"))
        async with Approvals.connect(store, authorize=lambda _: True) as approvals:
            await approvals.decide("order-7/0/refund-0", Deny(by="bob"))
        await expect(boxes).to_have_count(1)
        await expect(boxes).to_be_checked()


async def test_twenty_calls_are_decided_by_keyboard(
    browser: Browser, address: str, store: Path
) -> None:
    """Two keys approve a call and open the next; one is denied with a reason, one edited; no mouse, no list between."""
    wanted = [{"order": f"A-{number:02}", "amount": number} for number in range(20)]
    await leave_waiting(store, [refunds(*wanted)])
    async with window(browser, address) as page:
        await sign_in(page)
        pressed = 0

        async def press(*keys: str) -> None:
            nonlocal pressed
            await page.wait_for_selector("html[data-keys]")
            for key in keys:
                await page.keyboard.press(key)
            pressed += len(keys)

        await press("j", "Enter")
        seen: list[str] = []
        for place in range(20):
            await page.wait_for_url(
                lambda url: "approvals" in url and urlsplit(url).path not in seen
            )
            seen.append(urlsplit(page.url).path)
            if folder := os.environ.get("INBOX_FILM"):  # a picture of each decision
                await page.screenshot(path=f"{folder}/{place:02}.png")
            if place == 7:
                await press("d")
                await page.keyboard.type("a reason, all of it")
                await expect(page.get_by_label("Reason", exact=True)).to_be_focused()
                await press("Tab", "Tab", "Tab", "Enter")
            elif place == 8:
                await press("e")
                await page.get_by_label("amount").fill("1")
                look = page.get_by_role("button", name="Look at the changes")
                await look.press("Enter")
                decide = page.get_by_role("button", name="Approve with these")
                await decide.press("Enter")
                await expect(page.get_by_role("status").first).to_contain_text(
                    "approved"
                )
                await press("j")
            else:
                await press("a", "Enter")
        await expect(
            page.get_by_text("Nothing waits for your decision")
        ).to_be_visible()
        assert len(set(seen)) == 20
        assert pressed == 2 + 18 * 2 + 5 + 2
    async with Approvals.connect(store) as approvals:
        decided = await approvals.decisions(limit=100)
    kinds = [one.decision.kind for one in decided if one.decision is not None]
    assert (kinds.count("approve"), kinds.count("deny")) == (19, 1)


async def test_nothing_moves_under_the_cursor(
    browser: Browser, address: str, store: Path
) -> None:
    """What is decided elsewhere stays in its place and cannot be selected; what is new is added behind."""
    batch = refunds(*({"order": f"A-{n}", "amount": n} for n in range(4)))
    await leave_waiting(store, [batch])
    async with window(browser, address) as page:
        await sign_in(page)
        boxes = page.get_by_role("checkbox", name=re.compile("till-refund"))
        await boxes.nth(0).check()
        await boxes.nth(2).check()
        last = page.get_by_role("link", name="till-refund").nth(3)
        place = await last.bounding_box()
        async with Approvals.connect(store, authorize=lambda _: True) as approvals:
            first, *_ = await approvals.pending()
            await approvals.decide(first.id, Deny(by="bob"))
        await expect(page.get_by_text("no longer waits")).to_be_visible()
        await leave_waiting(store, run_id="order-8")
        await expect(page.get_by_text("order-8/0/refund-0")).to_be_visible()
        assert await last.bounding_box() == place
        await expect(boxes).to_have_count(4)
        await expect(page.locator("#selected")).to_have_text(", 1")
        await page.get_by_label("Select all").check()
        await expect(page.locator("#selected")).to_have_text(", 4")
        await page.get_by_role("button", name="Approve").click()
        await expect(page.get_by_role("status")).to_have_text("4 of 4 approved.")


async def test_every_page_is_legible_and_labelled(
    browser: Browser, address: str, store: Path
) -> None:
    """Landmarks, headings, labels, contrast of 4.5, nothing wider than the window: with every fold open."""
    await leave_waiting(store)
    await leave_waiting(
        store, [asks("Which? " + "x" * 300)], run_id="a-long-name-" + "y" * 150
    )
    async with window(browser, address) as page:
        await page.goto("/")
        assert await problems_everywhere(page) == []
        await sign_in(page)
        addresses = [
            "/",
            "/?text=A-1007",
            "/decisions",
            "/runs",
            "/runs?status=failed",
            "/runs/order-7",
            "/runs/none",
        ]
        addresses += [
            await link.get_attribute("href") or ""
            for link in await page.locator("main a.fn").all()
        ]
        for address in addresses:
            await page.goto(address)
            assert await problems_everywhere(page) == [], address


async def test_a_run_is_cancelled_with_a_confirmation(
    browser: Browser, store: Path, address: str
) -> None:
    """The button is behind a summary and does nothing until the box is checked; then the run has ended."""
    await leave_waiting(store)
    async with window(browser, address) as page:
        await sign_in(page)
        await page.goto("/runs/order-7")
        await page.get_by_text("Cancel this run").click()
        await page.get_by_role("button", name="Cancel the run").click()
        assert (await the_call(store)).status == "open"
        assert not await problems_of(page)
        await page.get_by_label("Reason").fill("Not this one.")
        await page.get_by_label("End order-7 for good").check()
        await page.get_by_role("button", name="Cancel the run").click()
        await expect(page.get_by_role("article").first).to_contain_text(
            "Cancelled by ann: Not this one."
        )
        await expect(page.get_by_text("Cancel this run")).to_have_count(0)
    assert (await the_call(store)).status == "closed"


async def test_a_huge_argument_does_not_keep_its_page_from_opening(
    browser: Browser, store: Path, address: str
) -> None:
    """Both ends of it are there, what is left out is said, and the call is decided; other places edit it."""
    huge = {**REFUND, "reason": "It broke.\n" + "\n" * 1_000_000 + "Pay bob."}
    await leave_waiting(store, [refunds(huge), say("Refunded.")])
    async with window(browser, address) as page:
        await sign_in(page)
        await page.get_by_role("link", name="till-refund").click()
        reason = page.locator(
            ".subject .part", has_text="left out: the exact JSON has them"
        )
        await expect(reason).to_contain_text("It broke.")
        await expect(reason).to_contain_text("Pay bob.")
        await expect(page.get_by_text("too long to be edited here")).to_be_visible()
        await page.get_by_role("button", name="Approve", exact=True).click()
        await expect(page.get_by_role("status")).to_contain_text("approved")


async def test_a_call_that_expired_says_what_follows(
    browser: Browser, store: Path, address: str
) -> None:
    """Its page offers no decision; the page of its run says that a worker is waited for, and no person."""
    quick = call("till-quick", {"order": "A-7"}, id="quick")
    await leave_waiting(store, [quick, say("Nobody came.")])
    database = await open_database(str(store))
    await database.transact(
        ("UPDATE planner_approvals SET expires_at = asked_at + 0.001", {})
    )
    await database.close()
    async with window(browser, address) as page:
        await sign_in(page)
        await page.goto("/approvals/order-7%2F0%2Fquick")
        await expect(page.get_by_role("heading", name="Expired")).to_be_visible()
        await expect(page.get_by_role("status")).to_contain_text("A worker continues")
        await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
        await page.goto("/runs/order-7")
        await expect(page.get_by_text("Waits for a worker")).to_be_visible()
        assert await problems_everywhere(page) == []
