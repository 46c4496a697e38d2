"""A call's arguments as parts: what each is, that nothing is lost, and how they are drawn as HTML and as text."""

import json
import re
from html import unescape
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planner_ext.approval.decisions import ToolCall
from planner_ext.readable.html import html_of
from planner_ext.readable.parts import (
    Part,
    changes_of,
    folded,
    numbered,
    parts_of,
    parts_written,
    plain,
)
from planner_ext.readable.plain import notice_text, text_of
from support.values import each_of

CODE = (
    "import os\n\n\ndef f() -> int:\n\treturn 1\n\n" + "f()\n" * 20 + "os.unlink('x')"
)
ROWS = [{"order": f"A-{number}", "amount": number} for number in range(60)]


def only(value: Any, name: str = "value", **schema: Any) -> Part:
    """The one part of one argument."""
    (part,) = parts_of(
        {name: value}, {"properties": {name: schema}} if schema else None
    )
    return part


def text_in(part: Part) -> str:
    return "\n".join(plain(line) for line in part.lines)


@each_of(
    ("name", "value", "kind", "note"),
    [
        ("order", "A-7", "value", ""),
        ("amount", 2.5, "value", ""),
        ("note", "one\ntwo", "text", ""),
        ("note", "word " * 40, "text", ""),
        ("code", CODE, "code", "Python"),
        ("command", "rm -r /", "code", "Bash"),
        ("anything", "import os\nos.abort()", "code", "Python"),
        ("query", "SELECT *\nFROM orders", "sql", "SQL"),
        ("anything", "-- all\ndelete from orders", "sql", "SQL"),
        ("query", "lamps in Bern", "value", ""),
        ("config", '{"a": [1, 2]}', "json", "JSON in a text"),
        ("rows", ROWS, "table", "60 rows"),
        ("deep", {"a": {"b": list(range(40))}}, "json", ""),
    ],
)
def test_each_argument_is_shown_as_what_it_is(
    name: str, value: Any, kind: str, note: str
) -> None:
    """Texts, code, SQL, JSON in a text, tables, and values."""
    part = only(value, name)
    assert (part.kind, part.note) == (kind, note)


def test_a_text_has_its_lines() -> None:
    """No JSON escape stands for a line end, and the last line is there."""
    part = only(CODE, "code")
    assert len(part.lines) == CODE.count("\n") + 1
    assert plain(part.lines[-1]) == "os.unlink('x')"


@each_of("text", ["a\n", "a", "a\n\n", "\n\n"])
def test_texts_that_differ_in_their_end_look_different(text: str) -> None:
    """The end of a last line has a sign."""
    assert text_in(only(text, "code")).replace("⏎", "\n") == text


def test_members_that_are_texts_are_shown_as_texts() -> None:
    """A mail in an object is read as a mail."""
    parts = parts_of({"mail": {"to": "ann", "body": "Dear Ann,\n\nbye"}})
    assert [(part.label, part.kind) for part in parts] == [
        ("mail.to", "value"),
        ("mail.body", "text"),
    ]


@each_of(
    ("text", "shown"),
    [
        ("7", '"7"'),
        ("true", '"true"'),
        ("", '""'),
        ("null", '"null"'),
        (" a", '" a"'),
        ('"a"', '"\\"a\\""'),
        ("A-7", "A-7"),
    ],
)
def test_a_text_is_not_taken_for_another_value(text: str, shown: str) -> None:
    """A text that reads as a number or as null has its quotes."""
    assert text_in(only(text)) == shown


@each_of(
    "text",
    ['{"a": 1, "a": 2}', '{"a": 1.0000000000000000000001}', '{"a": 1e999}', "{a}"],
)
def test_json_that_would_be_written_otherwise_stays_a_text(text: str) -> None:
    """A name that stands twice, a number that Python rounds: the text is shown as it is."""
    part = only(text)
    assert part.note != "JSON in a text"
    assert text in text_in(part)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON))
def test_no_value_is_lost_and_no_character_hidden(arguments: dict[str, Any]) -> None:
    """Every scalar of the arguments is in some part; HTML and text have no control or format character of their own."""
    parts = parts_of(arguments)
    shown = unescape(re.sub("<[^>]*>", "", str(html_of(parts))))
    plainly = text_of(parts)
    assert "\u202e" not in shown and "\u200b" not in plainly
    if not any(part.size > 12 for part in parts):
        for number in re.findall(r"(?<![\w.])\d{4,}(?![\w.])", json.dumps(arguments)):
            assert number in shown


def test_what_a_call_leaves_out_has_its_default() -> None:
    """A default that will apply is a part of its own, with the parameter's description."""
    schema = {"properties": {"dry_run": {"default": False, "description": "Only try."}}}
    (part,) = parts_of({}, schema)
    assert (part.label, part.is_default, part.about) == ("dry_run", True, "Only try.")
    assert text_of([part]) == "dry_run: false  (default; Only try.)"


def test_a_long_part_shows_its_beginning_and_its_end() -> None:
    """What is appended to a long script is seen at once; the middle is a click away."""
    drawn = str(html_of([only(CODE, "code")]))
    outside = re.sub("<details.*?</details>", "", drawn, flags=re.DOTALL)
    assert "unlink" in re.sub("<[^>]*>", "", outside)
    assert drawn.count("<details") == 1
    assert len(re.findall("<li", drawn)) == CODE.count("\n") + 1
    assert "unlink" in text_of([only(CODE, "code")])


@given(st.lists(st.integers()), st.integers(1, 20))
def test_a_fold_loses_nothing(items: list[int], most: int) -> None:
    """Beginning, middle and end are the whole."""
    head, middle, tail = folded(items, most)
    assert [*head, *middle, *tail] == items


def test_tokens_from_right_to_left_stay_in_their_places() -> None:
    """The numbers behind a Hebrew text are not drawn before it: each token stands apart."""
    part = only(["אבג", 1, 1000])
    assert '<bdi class="string">&#34;אבג&#34;</bdi>, ' in str(html_of([part]))
    assert text_of([part]) == 'value: [\u2068"אבג"\u2069, 1, 1000]'


def test_prose_is_written_in_its_own_direction() -> None:
    """Each line of a text begins where its language begins."""
    drawn = str(html_of([only("سلام،\nHello")]))
    assert drawn.count('dir="auto"') == 2


def test_an_invisible_character_has_a_mark_with_its_name() -> None:
    """The mark stands where the character is, and the part says how many there are."""
    drawn = str(html_of([only("pay\u200bpal\nx")]))
    assert 'pay<mark title="ZERO WIDTH SPACE">\\u200b</mark>pal' in drawn
    assert "1 character marked" in drawn


def test_hostile_text_is_escaped() -> None:
    """Names, values, columns and descriptions are text."""
    evil = "<script>alert(1)</script>"
    values = (evil, f"{evil}\n", [{evil: evil}, {evil: 1}], {evil: f"{evil}\n"})
    for value in values:
        schema = {"properties": {evil: {"description": evil}}}
        assert "<script" not in str(html_of(parts_of({evil: value}, schema)))


def test_an_edit_shows_what_it_changes() -> None:
    """Only the lines that differ and those around them; a new argument, a dropped one, another type."""
    before = {"code": CODE, "amount": 7, "order": "A-7", "note": "x"}
    after = {"code": CODE.replace("unlink", "stat"), "amount": "7", "order": "A-7"}
    changes = changes_of(before, after)
    assert [part.label for part in changes] == ["code", "amount", "note"]
    lines = [plain(line) for line in changes[0].lines]
    assert lines[-2:] == ["- os.unlink('x')", "+ os.stat('x')"]
    assert len(lines) < 6
    assert [plain(line) for line in changes[2].lines] == ["- x"]
    assert changes_of(before, before) == ()


def test_a_number_and_its_text_are_a_change() -> None:
    """7 and "7" are not the same."""
    (change,) = changes_of({"amount": 7}, {"amount": "7"})
    assert [plain(line) for line in change.lines] == ["- 7", '+ "7"']


@each_of(
    "value",
    [
        "first\n" + "\n" * 1_000_000 + "last",
        "first" + "x" * 5_000_000 + "last",
        ["first", *[0] * 200_000, "last"],
        [{"row": "first"}, *[{"row": 0}] * 100_000, {"row": "last"}],
    ],
)
def test_of_a_value_too_long_to_be_drawn_both_ends_are(value: Any) -> None:
    """Its page is small, the lines keep their numbers, and it is said how much only the exact JSON has."""
    part = only(value, "text")
    drawn = html_of([part])
    assert len(drawn) < 300_000
    assert "first" in drawn and "last" in drawn
    assert "left out: the exact JSON has them" in drawn
    assert "left out: the exact JSON has them" in text_of([part])
    whole = value if isinstance(value, str) else json.dumps(value, indent=2)
    numbers = [number for number, _ in numbered(part) if number.isdigit()]
    assert numbers[-1] == str(whole.count("\n") + 1)


def test_many_long_values_are_drawn_as_far_as_one() -> None:
    """Beyond some thousand lines it is said that there are others."""
    parts = parts_of({f"part{number}": "x\n" * 1_000 for number in range(500)})
    assert sum(part.size for part in parts) < 10_000
    assert parts[0].left_out == ""
    assert "the exact JSON has them" in text_of(parts[-1:])


def test_arguments_that_are_no_object_are_one_part() -> None:
    """What a model wrote is shown, whatever it is."""
    (part,) = parts_written("{half\nof it")
    assert text_in(part) == "{half\nof it"


def test_a_notice_tells_a_person_what_waits() -> None:
    """The goal, and for each call its words and arguments; a question of the model as it is."""
    call = ToolCall(
        id="order-7/0/c1",
        fully_qualified_name="shop-pay",
        arguments={"amount": 7},
        fingerprint="f",
        prompt="May it?",
        summary="Pays 7",
    )
    asks = ToolCall(
        id="q",
        kind="question",
        fully_qualified_name="UserInteraction-AskUser",
        arguments={"question": "Which?"},
        fingerprint="f",
        prompt="Which?",
    )
    assert notice_text("Settle.", [call, asks]) == (
        "Settle.\n\nshop-pay\nPays 7\nMay it?\namount: 7\nid: order-7/0/c1\n\n"
        "A question of the model\nWhich?\nid: q"
    )
