"""Text of others, made safe to show."""

from planner_ext.core.errors import seconds
from planner_ext.core.text import one_line, printable
from planner_ext.readable.text import exact, exact_json, visible
from support.values import each_of


@each_of(
    ("text", "shown"),
    [
        ("a\tb\r\nc", "a b\nc"),
        ("\x1b[2J", "\N{REPLACEMENT CHARACTER}[2J"),
        ("a\u202eb\u2028c", "a\N{REPLACEMENT CHARACTER}b\nc"),
        ("\ud800", "\N{REPLACEMENT CHARACTER}"),
    ],
)
def test_a_text_cannot_move_the_cursor(text: str, shown: str) -> None:
    assert printable(text) == shown


@each_of(
    ("text", "shown"),
    [
        ("two  blanks", "two  blanks"),
        ("three   blanks", "three\\<3 blanks>blanks"),
        ("a\u200bb", "a\\u200bb"),
        ("a\nb\x00", "a\nb\\u0000"),
        ("\u0301", "\\u0301"),
        ("a\u0301\u0301", "a\u0301\u0301"),
        ("a\u0301\u0301\u0301b\u0301", "a\u0301\u0301\\u0301b\u0301"),
        (" \u0301", " \\u0301"),
    ],
)
def test_what_is_drawn_as_nothing_is_escaped(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_indents_may_stay_where_no_decision_is_made() -> None:
    assert visible("    a", blanks=4) == "    a"
    assert visible("     a", blanks=4) == "\\<5 blanks>a"


def test_an_exact_text_is_one_line() -> None:
    assert exact('a\n"b"    c') == 'a\\n\\"b\\"\\<4 blanks>c'


def test_exact_json_keeps_its_own_indents_only() -> None:
    assert exact_json({"a": {"b": "1    2"}}, indent=4) == (
        '{\n    "a": {\n        "b": "1\\<4 blanks>2"\n    }\n}'
    )


def test_one_line_has_one_blank_for_every_run_of_white_space() -> None:
    assert one_line(" a\n\n b\tc ") == "a b c"


@each_of(
    ("value", "text"),
    [(0.0, "0.00"), (9.99, "9.99"), (10.0, "10"), (12.6, "13"), (1234.0, "1,234")],
)
def test_seconds_are_exact_below_ten(value: float, text: str) -> None:
    assert seconds(value) == text


def test_what_has_a_glyph_is_shown_as_it_is() -> None:
    """Letters of any language need no escape, in a text and in JSON."""
    assert exact("Ünal 東京") == "Ünal 東京"
    assert exact_json({"city": "東京"}) == '{"city": "東京"}'
