"""The pages of runs in a real browser: legible, operable, as wide as the window, and quick for long runs."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from playwright.async_api import Browser, expect

from planner_ext.timeline import page_of, timeline_of
from support.browser import chromium, needs_chromium, problems_of, window
from support.timeline import eventful, forked, long

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_chromium]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncGenerator[Browser]:
    """Start Chromium once for all tests."""
    async with chromium() as browser:
        yield browser


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


@pytest.mark.parametrize("colours", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "journals", [("eventful",), ("paused",), ("eventful", "forked")], ids="-".join
)
async def test_a_page_can_be_read_and_operated(
    browser: Browser,
    tmp_path: Path,
    journals: tuple[str, ...],
    width: int,
    colours: str,
) -> None:
    """Nothing lacks a name, contrast or room, with all details closed and with all of them open."""
    address = written(tmp_path / "run.html", *journals)
    size = {"width": width, "height": 900}
    async with window(browser, address, viewport=size, color_scheme=colours) as page:
        await page.goto(address)
        await page.add_style_tag(
            content=".step { content-visibility: visible !important; }"
        )
        assert await problems_of(page) == []
        await page.evaluate(
            "document.querySelectorAll('details').forEach(one => { one.open = true })"
        )
        assert await problems_of(page) == []


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
    """2,000 facts are painted within a second, the last of them reached, and opened, within another."""
    address = written(tmp_path / "run.html", "long")
    async with window(browser, address) as page:
        await page.goto(address)
        painted = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        assert await page.evaluate(painted) < 1_000
        end = """new Promise(done => {
            const began = performance.now(), all = document.querySelectorAll("details"), last = all[all.length - 1];
            last.open = true;
            last.scrollIntoView();
            requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - began)));
        })"""
        assert await page.evaluate(end) < 1_000
