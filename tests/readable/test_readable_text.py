"""What is drawn as nothing is marked; what Unicode joins in an emoji or a word is shown as it is."""

import time

import regex
from hypothesis import given
from hypothesis import strategies as st

from planner_ext.readable.text import exact, has_right_to_left, is_shown_whole, visible
from support.values import each_of


@each_of(
    "text",
    [
        "⚠️",
        "⚠\ufe0e",
        "1️⃣",
        "👨‍👩‍👧",
        "👩🏽‍🚀",
        "🏳️‍🌈",
        "🇩🇪",
        "🏴󠁧󠁢󠁥󠁮󠁧󠁿",
        "می‌شود",
        "क्‍ष",
        "ကြွေ",
        "בְּ֭",
        "ཀྵྲྀ",
    ],
)
def test_what_a_script_or_an_emoji_needs_is_shown(text: str) -> None:
    """Emoji that Unicode recommends, joiners between letters that join, the marks of a script."""
    assert visible(f"a {text} b") == f"a {text} b"
    assert exact(text) == text


@each_of(
    ("text", "shown"),
    [
        ("😀\u200d😀", "😀\\u200d😀"),
        ("⚠️\ufe0f", "⚠️\\ufe0f"),
        ("a\ufe0f", "a\\ufe0f"),
        ("ab\u200ccd", "ab\\u200ccd"),
        ("ب\u200c\u200cب", "ب\\u200c\\u200cب"),
        ("دا\u200cر", "دا\\u200cر"),
        ("क\u200dष", "क\\u200dष"),
        ("🇩\u200b🇪", "🇩\\u200b🇪"),
        ("⚠\U000e0041", "⚠\\udb40\\udc41"),
        ("a" + "\u0301" * 3, "a\u0301\u0301\\u0301"),
        ("ב" + "\u05b0" * 6, "ב" + "\u05b0" * 5 + "\\u05b0"),
    ],
)
def test_what_joins_nothing_is_marked(text: str, shown: str) -> None:
    """A joiner where it changes nothing, a style on a letter, marks without end: each could hide a message."""
    assert visible(text) == shown


@each_of(
    ("text", "shown"),
    [
        ("https://p\u0430ypal.com", "https://p\\u0430ypal.com"),
        ("\u0430\u0440\u0440.com", "\\u0430\\u0440\\u0440.com"),
        ("/etc\u2044passwd", "/etc\\u2044passwd"),
        ("\u13e2ayPal", "\\u13e2ayPal"),
    ],
)
def test_what_poses_as_latin_is_marked(text: str, shown: str) -> None:
    """A letter among Latin ones, a whole word or a sign of such beside them; the form edits it as JSON."""
    assert visible(f"to {text} now") == f"to {shown} now"
    assert not is_shown_whole(text)


@each_of(
    "text",
    [
        "\u0441\u0430\u0445\u0430\u0440 и рис",
        "файл.doc",
        "IT-отдел",
        "Νίκος@x.gr",
        "5 kΩ, 3 μm, Δt, \u03b1-helix",
        "naïve Ærø",
        "1\u20442",
    ],
)
def test_words_of_another_script_are_shown(text: str) -> None:
    """Alone, beside Latin ones if a letter of theirs is no Latin one's double, and as signs of a formula."""
    assert visible(text) == text


def test_what_unicode_says_may_be_ignored_is_marked() -> None:
    """Every character that a font may draw as nothing, by Unicode's own list."""
    ignorable = regex.compile(r"\p{Default_Ignorable_Code_Point}")
    hidden = [
        code
        for code in range(0x110000)
        if ignorable.match(chr(code)) and visible(f"a{chr(code)}b") == f"a{chr(code)}b"
    ]
    assert hidden == []


@given(st.text())
def test_a_text_that_is_shown_whole_needs_no_mark(text: str) -> None:
    """Where nothing has to be marked, the text is as it is, but for tabs."""
    if is_shown_whole(text):
        assert visible(text.replace("\t", " "), blanks=40) == text.replace("\t", " ")


@each_of(
    "text",
    ["\u200d" * 100_000, "ب\u200c" * 100_000, "⚠️" * 100_000, "a" * 1_000_000],
)
def test_a_long_text_takes_time_in_proportion(text: str) -> None:
    """No text holds up the page of those who decide."""
    begun = time.process_time()
    visible(text)
    assert time.process_time() - begun < 10


def test_what_is_written_from_right_to_left_is_known() -> None:
    assert has_right_to_left("אבג") and has_right_to_left("شما")
    assert not has_right_to_left("Zoë 日本 42")
