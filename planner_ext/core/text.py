"""Text of models, functions and persons, made safe to show."""

import re
import unicodedata
from typing import TypeGuard

from planner_ext.core.errors import require

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
_UNSEEN = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufff8\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Controls, and what Unicode calls default ignorable: no name differs by it to the eye."""


def is_unicode(value: object) -> TypeGuard[str]:
    """Return whether a value is text without lone surrogates, which cannot be sent."""
    return isinstance(value, str) and not any(
        "\ud800" <= one <= "\udfff" for one in value
    )


def person_of(name: str) -> str:
    """Return what all spellings of a person's name have in common: case, blanks, forms and unseen characters differ."""
    seen = unicodedata.normalize("NFKC", _UNSEEN.sub("", name))
    return " ".join(seen.casefold().split())


def check_goal(goal: object) -> None:
    """Refuse a goal without text, or that cannot be sent.

    Raises:
        InvalidLimitError: Says what it is.
    """
    fits = is_unicode(goal) and bool(goal.strip())
    require("The goal", fits, "a text that is not empty and valid Unicode", goal)


def printable(text: str) -> str:
    """Escape what could move the cursor or reorder lines."""
    return text.translate(_UNPRINTABLE)


def one_line(text: str) -> str:
    """Put a text on one line, with one blank for every run of white space."""
    return " ".join(printable(text).split())
