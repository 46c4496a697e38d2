"""Text of models, functions and people for a decision: what deceives the eye is marked in its place.

Marked is what is drawn as nothing, and what of another script poses as Latin. A mark is
the character as JSON escapes it, or the number of a run of blanks. Shown as they are:
the sequences that Unicode recommends as emoji, and joiners where a script needs them,
by the rules of RFC 5892, appendix A.
"""

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from functools import cache
from itertools import chain
from typing import NamedTuple

from planner_ext.core.errors import counted
from planner_ext.core.text import one_line

BLANKS = 2
"""The most blanks in a row where a decision is made: more would hide what follows."""
INDENT = 40
"""The most blanks in a row of a text that is shown with its lines."""
_MOST_MARKS = 2
"""The most combining marks of no script on one character."""
_MOST_OF_SCRIPT = 5
"""The most combining marks of a script on one character."""

_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\U00013441\U00013442\U00016fe4\U0001bca0-\U0001bca3\U0001d159"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that are drawn as nothing: ``Default_Ignorable_Code_Point`` of the Unicode
Character Database (DerivedCoreProperties.txt, 15.1), and letters and symbols with a
blank glyph."""
_ALIKE = (
    "аеорсухѕіјһԁԛԝӏѵүАВЕЅІЈКМНОРСТУХҮԌԚԜӀѴονρυϲϳΑΒΕΖΗΙΚΜΝΟΡΤΥΧϹͿօոսհցզՕՍԼ"
    "\u13a0-\u13f5\u2c80-\u2cff\ua4d0-\ua4fd"
)
"""Letters of other scripts that look like Latin ones, of Unicode's confusables.txt
(UTS 39): Cyrillic, Greek and Armenian; all of Cherokee, Coptic and Lisu."""
_SIGNS_ALIKE = "\u2044\u2215\u2216\u2024\u2236\ua789\u037e\u01c3\u201a\u29f8"
"""Signs that look like those of ASCII in paths, addresses and code."""
_POSES = re.compile(f"[{_ALIKE}{_SIGNS_ALIKE}]")
_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")
_WORD = re.compile(f"[^\\W\\d_]+|[{_SIGNS_ALIKE}]")
_ALL_POSE = re.compile(f"[{_ALIKE}]{{2,}}|[{_SIGNS_ALIKE}]")
_JOINERS = "\u200c\u200d"
_TEXT_STYLE = "\ufe0e"
_EMOJI_STYLE = "\ufe0f"
_IN_EMOJI = re.compile("[\u200d\ufe0e\ufe0f\U000e0020-\U000e007f]")
"""What joins or styles the characters of an emoji."""


class Stretch(NamedTuple):
    """A piece of a line: characters as they are, or the mark of some that are not seen."""

    start: int
    end: int
    mark: str = ""


def stretches_of(line: str, *, blanks: int = BLANKS) -> Iterator[Stretch]:
    """Divide a line into what is drawn and what is marked.

    More ``blanks`` in a row are marked by their number.
    """
    start = 0
    for stretch in _marked(line, blanks):
        if start < stretch.start:
            yield Stretch(start, stretch.start)
        yield stretch
        start = stretch.end
    if start < len(line):
        yield Stretch(start, len(line))


def visible(text: str, *, blanks: int = BLANKS) -> str:
    """Mark control and invisible characters; line ends stay.

    More ``blanks`` in a row are marked by their number.
    """
    return "\n".join(_visible(line, blanks) for line in text.split("\n"))


def visible_line(text: str) -> str:
    """Make a text visible on one line."""
    return visible(one_line(text))


def exact(text: str) -> str:
    """Put a text on one line with everything in it visible, for a decision."""
    return visible(json.dumps(text, ensure_ascii=False)[1:-1])


def exact_json(value: object, *, indent: int | None = None) -> str:
    """Write a value as JSON with everything in it visible."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    written = (line.lstrip(" ") for line in lines)
    return "\n".join(
        " " * (len(line) - len(own)) + _visible(own, BLANKS)
        for line, own in zip(lines, written, strict=True)
    )


def _visible(line: str, blanks: int) -> str:
    if line.isascii() and line.isprintable() and " " * (blanks + 1) not in line:
        return line
    return "".join(
        stretch.mark or line[stretch.start : stretch.end]
        for stretch in stretches_of(line, blanks=blanks)
    )


def _marked(line: str, blanks: int) -> Iterator[Stretch]:
    """List the stretches of a line that are not drawn, in their order."""
    runs = (
        Stretch(*run.span(), f"\\<{len(run[0])} blanks>")
        for run in re.finditer(f" {{{blanks + 1},}}", line)
    )
    if line.isascii() and line.isprintable():
        return runs
    return iter(sorted(chain(runs, _unseen(line))))


def _unseen(line: str) -> Iterator[Stretch]:
    emoji = _in_emoji(line)
    posing = _posing(line)
    marks = _MOST_OF_SCRIPT  # at the beginning of a line, a mark has no character to combine with
    for place, character in enumerate(line):
        most = _MOST_OF_SCRIPT
        if unicodedata.category(character) in _COMBINING:
            marks += 1
            most = _MOST_MARKS if _is_of_no_script(character) else most
        else:
            marks = _MOST_OF_SCRIPT if character == " " else 0
        seen = character.isprintable() and not _UNSEEN.match(character)
        if (
            place in posing
            or marks > most
            or not (
                seen
                or place in emoji
                or (character in _JOINERS and _is_joiner(line, place))
            )
        ):
            mark = json.dumps(character)[1:-1]
            yield Stretch(place, place + 1, mark)


def _posing(line: str) -> Set[int]:
    """Find what poses as Latin: letters among Latin ones, and a word or sign of such alone beside a Latin word."""
    found = set[int]()
    for token in re.finditer(r"\S+", line):
        if not (_POSES.search(token[0]) and _LATIN.search(token[0])):
            continue
        for word in _WORD.finditer(line, *token.span()):
            if _LATIN.search(word[0]) or _ALL_POSE.fullmatch(word[0]):
                found.update(one.start() for one in _POSES.finditer(line, *word.span()))
    return found


_COMBINING = frozenset({"Mn", "Me"})


def _is_of_no_script(mark: str) -> bool:
    return unicodedata.name(mark, "").startswith("COMBINING ")


def _in_emoji(line: str) -> Set[int]:
    """Find the characters that join or style those of an emoji, in a recommended sequence."""
    found = set[int]()
    for joiner in _IN_EMOJI.finditer(line):
        place = joiner.start()
        if place not in found:
            found.update(_emoji_around(line, place))
    return found


def _emoji_around(line: str, place: int) -> Iterable[int]:
    """Return the places of the emoji whose first joiner is here: its second or third character."""
    known = _emoji()
    for start in (max(place - 2, 0), max(place - 1, 0)):
        for end in range(min(start + _LONGEST_EMOJI, len(line)), place, -1):
            if line[start:end] in known:
                return range(start, end)
    in_color = line[max(place - 1, 0) : place] + _EMOJI_STYLE
    if line[place] == _TEXT_STYLE and in_color in known:
        return (place,)
    return ()


_LONGEST_EMOJI = 10
"""Characters of the longest emoji."""


@cache
def _emoji() -> Set[str]:
    """Load the sequences that Unicode recommends as emoji; none without the library ``emoji``."""
    try:
        from emoji import EMOJI_DATA  # noqa: PLC0415  (an extra, only for a text with such a sequence)
    except ImportError:
        return frozenset()
    return frozenset(EMOJI_DATA)


def _is_joiner(line: str, place: int) -> bool:
    """Whether a script needs a joiner, or what keeps letters apart, in this place."""
    from idna import core  # noqa: PLC0415  (only for a text with such a character)

    with suppress(ValueError):  # beside a character that has no name
        return core.valid_contextj(line, place)
    return False


_RIGHT_TO_LEFT = frozenset({"R", "AL", "AN"})


def duration_text(seconds: float) -> str:
    """Format a duration in the largest unit of which there is more than one."""
    left = int(seconds)
    spans = (
        (left // 86_400, "day"),
        (left // 3_600, "hour"),
        (left // 60, "minute"),
        (left, "second"),
    )
    longest = next((span for span in spans if span[0] > 1), (left, "second"))
    return counted(*longest)


def has_right_to_left(text: str) -> bool:
    """Whether a text has letters or numbers that are written from right to left."""
    return not text.isascii() and any(
        unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in text
    )


def is_shown_whole(text: str, *, blanks: int = INDENT) -> bool:
    """Whether nothing in a text has to be marked but line ends and tabs."""
    lines: Iterable[str] = text.replace("\t", " ").split("\n")
    return not any(any(_marked(line, blanks)) for line in lines)
