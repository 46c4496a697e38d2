"""Chromium as a person uses it, and what every page must keep to: no error, no foreign request, nothing unlabelled."""

import itertools
import re
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.async_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    async_playwright,
    expect,
)

__all__ = [
    "CHROMIUM",
    "chromium",
    "needs_chromium",
    "problems_everywhere",
    "problems_of",
    "window",
]

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on the path: apt-get install chromium"
)


_PATIENCE_MILLISECONDS = 120_000
expect.set_options(timeout=_PATIENCE_MILLISECONDS)

_ANSWERED_SO = re.compile(
    r"Failed to load resource: the server responded with a status of 4(01|04|09|22)"
)


@asynccontextmanager
async def chromium() -> AsyncGenerator[Browser]:
    """Start the Chromium of this machine."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def window(
    browser: Browser, address: str, **options: Any
) -> AsyncGenerator[Page]:
    """Open a window with cookies of its own; fail if its pages log an error or ask another host for anything.

    What a content security policy refuses is logged as an error; so is a page that is answered with an error, which is
    no fault.
    """
    wrong: list[str] = []

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not _ANSWERED_SO.match(
            message.text
        ):
            wrong.append(f"{message.text} ({message.location.get('url')})")

    def follow(request: Request) -> None:
        if urlsplit(request.url).netloc != urlsplit(
            address
        ).netloc and not request.url.startswith("data:"):
            wrong.append(f"asked {request.url}")

    context = await browser.new_context(
        base_url=address, reduced_motion="reduce", **options
    )
    context.set_default_timeout(_PATIENCE_MILLISECONDS)
    context.on("console", hear)
    context.on("weberror", lambda error: wrong.append(str(error.error)))
    context.on("request", follow)
    try:
        yield await context.new_page()
    finally:
        await context.close()
    assert not wrong, "\n".join(wrong)


async def problems_of(page: Page) -> list[str]:
    """List what keeps people from reading or operating a page: labels, landmarks, contrast, sizes, width."""
    await page.wait_for_load_state()
    return await page.evaluate(_AUDIT)


async def problems_everywhere(page: Page) -> list[str]:
    """List the problems of a page in a wide and in a narrow window, by day and by night, with all details open."""
    await page.wait_for_load_state()
    found: list[str] = []
    for width, scheme in itertools.product((1280, 390), ("light", "dark")):
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)
        for is_open in (False, True):
            await page.evaluate(_FOLDED, is_open)
            problems = await page.evaluate(_AUDIT)
            found += [f"{width}, {scheme}: {problem}" for problem in problems]
    return found


_FOLDED = """is_open => {
  for (const one of document.querySelectorAll("details")) one.open = is_open;
}"""


_AUDIT = """() => {
  const wrong = [], seen = new Set(), all = selector => [...document.querySelectorAll(selector)];
  const shows = el => el.checkVisibility({visibilityProperty: true}) && el.getClientRects().length;
  const name = el => el.outerHTML.slice(0, 120);
  const say = (what, el) => wrong.push(el ? `${what}: ${name(el)}` : what);
  if (!document.documentElement.lang) say("no language");
  if (!document.title.trim()) say("no title");
  for (const one of ["main", "h1"]) if (all(one).length !== 1) say(`${all(one).length} times ${one}`);
  if (document.scrollingElement.scrollWidth > innerWidth) say("wider than the window");
  for (const el of all("[id]")) seen.has(el.id) ? say("second with this id", el) : seen.add(el.id);
  for (const attribute of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
    for (const el of all(`[${attribute}]`))
      for (const id of el.getAttribute(attribute).split(/\\s+/))
        if (!document.getElementById(id)) say(`${attribute} leads nowhere`, el);
  const named = el => el.getAttribute("aria-label") || el.getAttribute("aria-labelledby");
  const label = el => (named(el) || el.textContent).trim();
  for (const el of all("input:not([type=hidden]), select, textarea"))
    if (!named(el) && ![...el.labels].some(one => one.textContent.trim())) say("no label", el);
  for (const el of all("button:not([hidden]), a, summary")) if (!label(el)) say("no name", el);
  for (const el of all("nav, section[aria-labelledby], [role=region]")) if (!label(el)) say("no name", el);
  for (const el of all("img, svg:not([aria-hidden=true])"))
    if (!el.querySelector("title") && !named(el) && !el.getAttribute("alt")) say("no text", el);
  let level = 0;
  for (const el of all("h1, h2, h3, h4, h5, h6")) {
    if (+el.tagName[1] > level + 1) say(`heading after level ${level}`, el);
    level = +el.tagName[1];
  }
  for (const el of all("button, select, textarea, input:not([type=hidden]), summary").filter(shows)) {
    const {width, height} = el.getBoundingClientRect();
    if (width < 16 || height < 16) say(`${width} x ${height} pixels`, el);
  }
  const ink = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const known = {}, parts = colour => known[colour] ??= read(colour);
  const read = colour => {
    ink.clearRect(0, 0, 1, 1); ink.fillStyle = colour; ink.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = ink.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], back) => [r, g, b].map((part, at) => part * a + back[at] * (1 - a));
  const ground = el => {
    const layers = [];
    for (let at = el; at; at = at.parentElement) layers.push(parts(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((back, layer) => over(layer, back), [255, 255, 255]);
  };
  const light = colour => {
    const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = colour.map(part => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const told = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const el = node.parentElement;
    if (!node.data.trim() || !shows(el) || el.closest(":disabled, svg, [aria-hidden=true]")) continue;
    const style = getComputedStyle(el), back = ground(el), front = over(parts(style.color), back);
    const [dark, bright] = [light(front), light(back)].sort((one, two) => one - two);
    const ratio = (bright + 0.05) / (dark + 0.05), size = parseFloat(style.fontSize);
    const least = size >= 24 || size >= 18.66 && +style.fontWeight >= 700 ? 3 : 4.5;
    const key = `${style.color} ${back}`;
    if (ratio < least && !told.has(key)) { told.add(key); say(`contrast ${ratio.toFixed(2)}`, el); }
  }
  return wrong;
}"""
