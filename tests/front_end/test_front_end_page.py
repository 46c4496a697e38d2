"""The CopilotKit page of the samples in a real browser, at another origin than the service that it talks to."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Browser, ConsoleMessage, Page, Request, expect

from planner_ext import Approve
from planner_ext.durable import Approvals
from support.browser import needs_chromium
from support.front_end import Desk, built_page, by_role, desk, needs_npm

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    needs_chromium,
    needs_npm,
]


@pytest.fixture(scope="module")
def page_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the page once."""
    return built_page(tmp_path_factory.mktemp("front_end"))


@asynccontextmanager
async def opened(
    browser: Browser, service: Desk, *, may_fail: bool = False
) -> AsyncGenerator[Page]:
    """Open the page in a window of its own; fail if it logs an error."""
    wrong: list[str] = []

    def hear(told: ConsoleMessage) -> None:
        if told.type == "error":
            wrong.append(told.text)

    context = await browser.new_context(base_url=service.page)
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("console", hear)
    try:
        page = await context.new_page()
        await page.goto(f"/index.html?thread=thread&agent={service.agent}")
        yield page
    finally:
        await context.close()
    assert may_fail or not wrong, wrong


async def send(page: Page, text: str) -> None:
    """Type a message, and send it."""
    box = page.get_by_placeholder("Type a message...")
    await box.fill(text)
    await box.press("Enter")


async def sees(page: Page, text: str) -> None:
    """Wait until the page shows a text."""
    await expect(page.get_by_text(text).last).to_be_visible()


async def press(page: Page, button: str) -> None:
    """Press the first button of this name."""
    await page.get_by_role("button", name=button, exact=True).first.click()


async def test_a_person_chats_decides_and_answers(
    browser: Browser, page_folder: Path, tmp_path: Path
) -> None:
    """Text, a tool, a call approved, edited and denied, two at once, and a question; a reload shows all of it."""
    async with (
        desk(tmp_path / "runs.db", page_folder) as service,
        opened(browser, service) as page,
    ):
        await send(page, "Hello.")
        await sees(page, "Good morning.")
        await send(page, "Price?")
        await sees(page, "shop-price → lamp: 42")
        await send(page, "Pay.")
        await press(page, "Approve")
        await sees(page, "Done: paid 5.0")
        await send(page, "Pay.")
        await page.get_by_label("Really pay?").fill('{"amount": 3}')
        await press(page, "Approve")
        await sees(page, "Done: paid 3.0")
        await send(page, "Pay.")
        await press(page, "Deny")
        await sees(page, "Done: The call was refused and did not run")
        await send(page, "Pay both.")
        await expect(page.get_by_role("button", name="Approve")).to_have_count(2)
        await press(page, "Approve")
        await sees(page, "Answered.")
        assert service.shop.paid == [5.0, 3.0], "sent once both are answered"
        await press(page, "Approve")
        await sees(page, "Done: paid 5.0, paid 7.0")
        await send(page, "Ask me.")
        await page.get_by_label("Which one?").fill("The lamp.")
        await press(page, "Answer")
        await sees(page, "Done: The lamp.")
        assert service.shop.paid == [5.0, 3.0, 5.0, 7.0]
        before = await page.get_by_test_id("copilot-message-list").inner_text()
        await page.reload()
        await sees(page, "Done: The lamp.")
        after = await page.get_by_test_id("copilot-message-list").inner_text()
        assert after == before


async def test_a_call_waits_through_a_reload_of_the_page(
    browser: Browser, page_folder: Path, tmp_path: Path
) -> None:
    """The card is there again, and its answer counts."""
    async with (
        desk(tmp_path / "runs.db", page_folder) as service,
        opened(browser, service) as page,
    ):
        await send(page, "Pay.")
        await expect(page.get_by_role("button", name="Approve")).to_be_visible()
        await page.reload()
        await press(page, "Approve")
        await sees(page, "Done: paid 5.0")
        assert service.shop.paid == [5.0]


def says_hurry(request: Request) -> bool:
    """Whether a request brings the message, and not only what was there before it."""
    return request.method == "POST" and "Hurry" in (request.post_data or "")


async def test_a_chat_goes_on_by_itself_and_hears_what_is_typed(
    browser: Browser, page_folder: Path, tmp_path: Path
) -> None:
    """Its user may not decide: a text says who may, a message meanwhile reaches the run, and so does the decision."""
    async with (
        desk(tmp_path / "runs.db", page_folder) as service,
        opened(browser, service) as page,
    ):
        await send(page, "Refund.")
        await sees(page, "shop-refund waits for manager.")
        await expect(page.get_by_role("button", name="Approve")).to_have_count(0)
        async with page.expect_event("requestfinished", says_hurry):
            await send(page, "Hurry, please.")
        async with Approvals.connect(service.store, authorize=by_role) as approvals:
            (call,) = await approvals.pending()
            assert [one.text for one in call.said] == ["Hurry, please."]
            await approvals.decide(call.id, Approve(by="mia"))
        await sees(page, "Done: refunded 5.0")
        assert service.shop.paid == [-5.0]
        await expect(page.get_by_text("Hurry, please.")).to_have_count(1)


async def test_a_limit_and_a_fault_are_told(
    browser: Browser, page_folder: Path, tmp_path: Path
) -> None:
    """Why the run was ended is a text; after a fault the chat is still there."""
    async with (
        desk(tmp_path / "runs.db", page_folder) as service,
        opened(browser, service, may_fail=True) as page,
    ):
        await send(page, "Loop.")
        await sees(page, "The run was ended: The limit max_tool_calls=2 was reached.")
        await send(page, "Fail.")
        await expect(page.get_by_role("alert")).to_have_text(
            "The run failed on the server."
        )
        await page.reload()
        await sees(page, "A message tries it again.")
        assert "10.0.0.7" not in await page.content()
