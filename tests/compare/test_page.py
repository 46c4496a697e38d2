"""The comparison as a page: whole, self-contained, safe, legible, and as wide as its window."""

import html
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from planner_ext.compare import Comparison
from planner_ext.compare.page import page_of

VOID = {"meta", "br", "rect", "line", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """Reads a page and keeps what the tests ask about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, attribute: str) -> list[str]:
        """All values of an attribute."""
        return [value for _, name, value in self.attributes if name == attribute]


@pytest.fixture(scope="module")
def text(comparison: Comparison) -> str:
    """The page."""
    return page_of(comparison)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    """The page, read."""
    return Page(text)


def test_the_page_is_whole(page: Page, text: str) -> None:
    """Every element is closed where it should be; title, language and encoding are there."""
    assert page.open == []
    assert text.startswith("<!doctype html>")
    assert page.elements["main"] == page.elements["h1"] == 1
    assert page.elements["title"] == 1 + page.elements["figure"]
    assert page.values("lang") == ["en"]
    assert "utf-8" in page.values("charset")


def test_the_page_fetches_nothing(page: Page, text: str) -> None:
    """No script, no image, no style sheet, no font: it works from a mail attachment. Links lead to the sources."""
    forbidden = {
        "script",
        "link",
        "img",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "audio",
        "video",
        "source",
    }
    assert forbidden & page.elements.keys() == set()
    assert page.values("src") == page.values("srcset") == page.values("style") == []
    assert {tag for tag, name, _ in page.attributes if name == "href"} == {"a"}
    assert {
        value.partition(":")[0] for value in page.values("href") if value[0] != "#"
    } == {"https"}
    assert not re.search(r"@import|@font-face|javascript:", text)
    assert {found for found in re.findall(r"url\(([^)]*)\)", text)} == {"#over"}


def test_links_and_labels_lead_somewhere(page: Page) -> None:
    """Every id is there once; every link and every label finds its own."""
    ids = Counter(page.values("id"))
    assert {count for count in ids.values()} == {1}
    wanted = [
        value.removeprefix("#") for value in page.values("href") if value[0] == "#"
    ]
    wanted += [
        name for value in page.values("aria-labelledby") for name in value.split()
    ]
    assert set(wanted) <= ids.keys()


def test_there_are_charts_tables_and_messages_for_every_run(
    page: Page, comparison: Comparison
) -> None:
    """One overview, then three charts, a table and a timeline for each option that ran, script by script."""
    scripts, ran = len(comparison.scripts), sum(run.offered for run in comparison.runs)
    assert page.elements["figure"] == 1 + 3 * scripts
    assert page.elements["table"] == 1 + scripts
    assert (
        page.values("class").count("folded run")
        == page.values("class").count("steps")
        == ran
    )
    assert page.values("class").count("absent") == len(comparison.runs) - ran


def test_a_chart_says_in_words_what_it_shows(page: Page) -> None:
    """Who cannot see the bars hears them."""
    said = " ".join(page.text)
    assert "option 2, as written: 6, 1 of them over budget" in said
    assert page.elements["desc"] == page.elements["figure"]


def test_a_reader_sees_why(page: Page) -> None:
    """The message that breaks a history is marked, and so is the place where the budget is used up."""
    said = " ".join(page.text)
    assert (
        "✗ messages[10]: an assistant message with 'tool_calls' must be followed by"
        in said
    )
    assert "the budget of 5 round trips is used up" in said
    assert "OpenAI would refuse 10 of these 15 requests" in said
    assert "event bad" in page.values("class")


def test_what_a_model_says_cannot_become_markup(spoilt: Comparison) -> None:
    """Texts, names and errors are shown as they are."""
    text = page_of(spoilt)
    page = Page(text)
    assert page.open == []
    assert page.elements["script"] == 0
    assert "alert(1)" in html.unescape(text)
    assert any("Corrected options broke promises" in piece for piece in page.text)


INKS = ("ink", "quiet", "accent-ink", "bad-ink", "good-ink")
PAIRS = [(ink, back) for ink in INKS for back in ("page", "panel", "well")]
PAIRS += [
    ("bad-ink", "bad"),
    ("quiet", "bad"),
    ("on-accent", "accent-ink"),
    ("poor-ink", "poor"),
    ("good-ink", "good"),
]
SHAPES = [("theirs", "page"), ("accent", "page"), ("over", "page")]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_can_be_distinguished(text: str, scheme: int) -> None:
    """Text has a contrast of 4.5 or more, bars of 3 or more, as WCAG 2 AA asks, light and dark."""
    colours = dict(
        re.findall(
            r"--([\w-]+): (#[0-9a-f]{6});",
            re.findall(r":root \{(.*?)\}", text, re.S)[scheme],
        )
    )

    def contrast(front: str, back: str) -> float:
        dark, light = sorted((luminance(colours[front]), luminance(colours[back])))
        return (light + 0.05) / (dark + 0.05)

    assert [pair for pair in PAIRS if contrast(*pair) < 4.5] == []
    assert [pair for pair in SHAPES if contrast(*pair) < 3.0] == []


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on the path")
def test_nothing_is_wider_than_the_window(text: str, tmp_path: Path) -> None:
    """In Chromium at 1280 and 390 pixels the page scrolls down only, with everything unfolded."""
    assert CHROMIUM is not None
    unfolded = html.escape(text.replace("<details", "<details open"))
    frames = "".join(
        f'<iframe width="{width}" height="900" srcdoc="{unfolded}"></iframe>'
        for width in (1280, 390)
    )
    measure = """<script>onload = () => { document.title = [...document.querySelectorAll("iframe")].map(frame => {
        const inner = frame.contentWindow, page = frame.contentDocument;
        return `${page.scrollingElement.scrollWidth}/${inner.innerWidth}/${page.querySelectorAll("li").length}`;
    }).join(" ") }</script>"""
    harness = tmp_path / "harness.html"
    harness.write_text(
        f"<!doctype html><meta charset='utf-8'><title>-</title>{frames}{measure}",
        "utf-8",
    )
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-sync",
    ]
    flags += [
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [CHROMIUM, *flags, "--dump-dom", harness.as_uri()],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=120,
    )
    title = re.search(r"<title>([^<]*)</title>", done.stdout)
    assert title is not None, done.stderr
    widths = [
        [int(number) for number in frame.split("/")] for frame in title[1].split()
    ]
    assert [window for _, window, _ in widths] == [1280, 390]
    assert all(lines > 700 for _, _, lines in widths)
    assert all(width <= window for width, window, _ in widths), title[1]
