"""The pages of runs in a real browser: legible, operable, as wide as the window, and quick for long runs."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from playwright.async_api import Browser, Page, expect

from planner_ext.timeline import page_of, timeline_of
from support.browser import needs_chromium, problems_everywhere, window
from support.timeline import eventful, forked, long

pytestmark = [pytest.mark.asyncio(loop_scope="session"), needs_chromium]


def written(file: Path, *journals: str) -> str:
    """Write a page into a file, and return its address."""
    facts = {
        "eventful": eventful(),
        "forked": forked(),
        "paused": eventful(paused=True),
        "long": long(),
    }
    file.write_text(page_of([timeline_of(facts[name]) for name in journals]), "utf-8")
    return file.as_uri()


@pytest.mark.parametrize(
    "journals", [("eventful",), ("paused",), ("eventful", "forked")], ids="-".join
)
async def test_a_page_can_be_read_and_operated(
    browser: Browser, tmp_path: Path, journals: tuple[str, ...]
) -> None:
    """Nothing lacks a name, contrast or room, with all details closed and with all of them open."""
    address = written(tmp_path / "run.html", *journals)
    async with window(browser, address) as page:
        await page.goto(address)
        assert await problems_everywhere(page) == []


async def test_details_open_by_keyboard(browser: Browser, tmp_path: Path) -> None:
    """A call's arguments and result are reached with the keyboard alone; a link leads to its iteration."""
    address = written(tmp_path / "run.html", "eventful")
    async with window(browser, address) as page:
        await page.goto(address)
        call = page.locator("summary", has_text="crm-customer")
        await call.focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_text('{"name": "Léa Morel"}')).to_be_visible()
        link = page.get_by_role("link", name="2").first
        await link.focus()
        await page.keyboard.press("Enter")
        await expect(page.locator("#i2")).to_be_in_viewport()


async def test_a_long_run_opens_without_delay(browser: Browser, tmp_path: Path) -> None:
    """2,000 facts are painted within a second, the last of them reached, and opened, within another.

    A second is one of the page's own processor time, which other programs do not shorten.
    """
    address = written(tmp_path / "run.html", "long")
    async with window(browser, address) as page:
        seconds = await processor_time(page)
        await page.goto(address)
        await page.evaluate(_PAINTED)
        opened = await seconds()
        assert opened < 1
        await page.evaluate("""() => {
            const last = [...document.querySelectorAll("details")].at(-1);
            last.open = true;
            last.scrollIntoView();
        }""")
        await page.evaluate(_PAINTED)
        assert await seconds() - opened < 1


_PAINTED = (
    """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"""
)


async def processor_time(page: Page) -> Callable[[], Awaitable[float]]:
    """Make a function that says how long the page's main thread has computed, in seconds."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def seconds() -> float:
        answer = await session.send("Performance.getMetrics")
        return next(
            one["value"] for one in answer["metrics"] if one["name"] == "TaskDuration"
        )

    return seconds
