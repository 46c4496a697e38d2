"""Text of models, functions and persons, made safe to show."""

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import TypeGuard

_CONTROL = (*range(0x20), *range(0x7F, 0xA0))
_BIDIRECTIONAL = (
    0x061C,
    0x200E,
    0x200F,
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
)
_UNPRINTABLE = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*_CONTROL, *_BIDIRECTIONAL, *range(0xD800, 0xE000))
} | {
    ord("\n"): "\n",
    ord("\t"): " ",
    ord("\r"): None,
    0x2028: "\n",
    0x2029: "\n",
}


def is_unicode(value: object) -> TypeGuard[str]:
    """Return whether a value is text without lone surrogates, which cannot be sent."""
    return isinstance(value, str) and not any(
        "\ud800" <= one <= "\udfff" for one in value
    )


def printable(text: str) -> str:
    """Escape what could move the cursor or reorder lines."""
    return text.translate(_UNPRINTABLE)


_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\U00013441\U00013442\U00016fe4\U0001bca0-\U0001bca3\U0001d159"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that are drawn as nothing: ``Default_Ignorable_Code_Point`` of the Unicode
Character Database (DerivedCoreProperties.txt, 15.1), and letters and symbols with a
blank glyph."""

_BLANKS = 2
"""The most blanks in a row where a decision is made: more would hide what follows."""
_MOST_MARKS = 2
"""The most combining marks that a language puts on one character."""


def visible(text: str, *, blanks: int = _BLANKS) -> str:
    """Escape control and invisible characters as JSON does; line ends stay.

    More ``blanks`` in a row are counted instead.
    """
    return "\n".join(_visible(line, blanks) for line in text.split("\n"))


def exact(text: str) -> str:
    """Put a text on one line with everything in it visible, for a decision."""
    return visible(json.dumps(text, ensure_ascii=False)[1:-1])


def exact_json(value: object, *, indent: int | None = None) -> str:
    """Write a value as JSON with everything in it visible."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    written = (line.lstrip(" ") for line in lines)
    return "\n".join(
        " " * (len(line) - len(own)) + _visible(own)
        for line, own in zip(lines, written, strict=True)
    )


def _visible(line: str, blanks: int = _BLANKS) -> str:
    if not (line.isascii() and line.isprintable()):
        line = "".join(_escaped(line))
    return re.sub(f" {{{blanks + 1},}}", lambda run: f"\\<{len(run[0])} blanks>", line)


def _escaped(line: str) -> Iterator[str]:
    marks = _MOST_MARKS  # at the beginning of a line, a combining mark has no character to combine with
    for character in line:
        if unicodedata.category(character) in _MARKS:
            marks += 1
        else:
            marks = _MOST_MARKS if character == " " else 0
        seen = (
            character.isprintable()
            and marks <= _MOST_MARKS
            and not _UNSEEN.match(character)
        )
        yield character if seen else json.dumps(character)[1:-1]


_MARKS = frozenset({"Mn", "Me"})


def one_line(text: str) -> str:
    """Put a text on one line, with one blank for every run of white space."""
    return " ".join(printable(text).split())
