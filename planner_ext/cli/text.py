"""Text from models and functions, made fit for a terminal: harmless to print, exact where it is decided on."""

import json
import re
import unicodedata
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

__all__ = [
    "TextFlow",
    "cut_in_the_middle",
    "exact",
    "exact_json",
    "folded_lines",
    "moment_text",
    "one_line",
    "printable",
    "shortened",
    "visible",
]

_CONTROL = (*range(0x20), *range(0x7F, 0xA0))
_BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_UNPRINTABLE = {code: "\N{REPLACEMENT CHARACTER}" for code in (*_CONTROL, *_BIDIRECTIONAL, *range(0xD800, 0xE000))} | {
    ord("\n"): "\n",
    ord("\t"): " ",
    ord("\r"): None,
    0x2028: "\n",
    0x2029: "\n",
}

_DEEPEST = 8
"""Cells that a line of the text may be indented by itself."""


def printable(text: str) -> str:
    """Take out what a terminal would obey instead of show: a model's text may move no cursor and reorder no line."""
    return text.translate(_UNPRINTABLE)


_UNSEEN = re.compile(
    "[\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u202a-\u202e\u2060-\u206f\u2800\u3164"
    "\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffc\U00013441\U00013442\U00016fe4\U0001bca0-\U0001bca3\U0001d159"
    "\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""Characters that are drawn as nothing although some of them count as letters: ``Default_Ignorable_Code_Point`` of the
Unicode Character Database (DerivedCoreProperties.txt, 15.1), and the letters and symbols whose glyph is blank."""

_RUN = re.compile(r" {3,}")
_MOST_MARKS = 2
"""Combining marks on one character that no language exceeds; more of them are drawn over other lines."""


def visible(text: str) -> str:
    """Escape, as JSON does, whatever a terminal would obey or not show; lines stay lines, blanks in a row are counted.

    A character is shown where it has a glyph of its own. Marks are shown on a character that they belong to.
    """
    return "\n".join(map(_visible, text.split("\n")))


def exact(text: str) -> str:
    """Write a text on one line so that everything in it can be seen: what is decided on may hide nothing."""
    return visible(json.dumps(text, ensure_ascii=False)[1:-1])


def exact_json(value: object, *, indent: int | None = None) -> str:
    """Write a value as JSON in which everything can be seen; see `visible`."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    written = (line.lstrip(" ") for line in lines)
    return "\n".join(" " * (len(line) - len(own)) + _visible(own) for line, own in zip(lines, written, strict=True))


def _visible(line: str) -> str:
    if not (line.isascii() and line.isprintable()):
        line = "".join(_escaped(line))
    return _RUN.sub(lambda run: f"\\<{len(run[0])} blanks>", line)


def _escaped(line: str) -> Iterator[str]:
    marks = _MOST_MARKS  # at the beginning of a line there is nothing that a mark could stand on
    for character in line:
        if unicodedata.category(character) in _MARKS:
            marks += 1
        else:
            marks = _MOST_MARKS if character == " " else 0
        seen = character.isprintable() and marks <= _MOST_MARKS and not _UNSEEN.match(character)
        yield character if seen else json.dumps(character)[1:-1]


_MARKS = frozenset({"Mn", "Me"})


def cut_in_the_middle(text: str, *, cells: int, lines: int) -> str:
    """Fold a text at a number of cells, and leave out its middle where that makes more lines than it may take.

    Returns:
        The text itself where it fits; else its beginning, a line that says how much is missing, and its end.
    """
    head = list(islice(_folded(text, cells), lines + 1))
    if len(head) <= lines:
        return text
    half = max((lines - 1) // 2, 1)
    first, last = head[:half], [*_folded(text[-cells * lines :], cells)][-half:]
    missing = len(text) - sum(map(len, (*first, *last)))
    return "\n".join((*first, f"[ ... {missing:,} characters are not shown here ... ]", *last))


def folded_lines(text: str, cells: int) -> int:
    """Count the lines of a text that is folded at a number of cells."""
    return sum(1 for _ in _folded(text, cells))


def _folded(text: str, cells: int) -> Iterator[str]:
    for line in text.split("\n"):
        for start in range(0, max(len(line), 1), _PIECE):
            yield from chop_cells(line[start : start + _PIECE], cells) or ("",)


_PIECE = 4096
"""Characters that are folded at once, so that the beginning of a text costs the same however long it is."""


def moment_text(moment: datetime) -> str:
    """Write a moment by the clock of this machine's place, and how long ago it was or how soon it will be."""
    seconds = (moment - datetime.now(UTC)).total_seconds()
    left = int(abs(seconds))
    spans = ((left // 86_400, "day"), (left // 3_600, "hour"), (left // 60, "minute"), (left, "second"))
    number, unit = next(((number, unit) for number, unit in spans if number > 1), (left, "second"))
    span = f"{number} {unit}{'' if number == 1 else 's'}"
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}, {span} {'from now' if seconds > 0 else 'ago'}"


def one_line(text: str) -> str:
    """Put a text on one line, every run of white space being one blank."""
    return " ".join(printable(text).split())


def shortened(text: str, cells: int, mark: str) -> str:
    """Cut a line to a number of terminal cells, with a mark where something is missing."""
    head = text[: cells * 4]  # enough of it, however long the text is
    if len(head) == len(text) and cell_len(head) <= cells:
        return text
    return chop_cells(head, max(cells - cell_len(mark), 1))[0].rstrip() + mark


class TextFlow:
    """Prints a text while it arrives, indented and wrapped at words; a word is printed once it is whole.

    Attributes:
        empty: Whether no text has arrived so far.
    """

    def __init__(self, console: Console, *, width: int, indent: int, style: str) -> None:
        """Start at the beginning of a line; the text takes ``width`` cells, the indent among them."""
        self._console = console
        self._indent = indent
        self._room = max(width - indent, 10)
        self._style = style
        self._pending = ""
        self._gap = ""
        self._column = 0
        self._empty_lines = 0
        self._started = False
        self._printed: list[str] = []
        self.empty = True

    def write(self, text: str) -> None:
        """Take a piece of the text."""
        self.empty = self.empty and not text
        *whole, self._pending = re.split(r"(?<=\s)(?=\S)|(?<=\S)(?=\s)", self._pending + printable(text))
        for piece in whole:
            self._piece(piece)
        if cell_len(self._pending) > self._room:
            self._piece(self._pending)
            self._pending = ""
        self._print()

    def close(self) -> None:
        """Print what is left, and end the line."""
        if self._pending.strip():
            self._piece(self._pending)
        if self._column:
            self._end_line()
        self._pending = self._gap = ""
        self._empty_lines = 0
        self._print()

    def _piece(self, piece: str) -> None:
        if not piece.isspace():
            return self._word(piece)
        lines = piece.count("\n")
        self._gap = piece.rpartition("\n")[2]
        if lines and self._started:
            if self._column:
                self._end_line()
            self._empty_lines = min(lines - 1, 1)
        return None

    def _word(self, word: str) -> None:
        gap = " " if self._column and self._gap else self._gap[:_DEEPEST]
        for part in chop_cells(word, self._room):
            if self._column and self._column + cell_len(gap + part) > self._room:
                self._end_line()
                gap = ""
            if not self._column:
                self._printed.append("\n" * self._empty_lines + " " * self._indent)
            self._printed.append(gap + part)
            self._column += cell_len(gap + part)
            self._empty_lines, gap = 0, ""
        self._gap = ""
        self._started = True

    def _end_line(self) -> None:
        self._printed.append("\n")
        self._column = 0

    def _print(self) -> None:
        if self._printed:
            self._console.print(Text("".join(self._printed), self._style), end="", soft_wrap=True)
            self._printed.clear()
