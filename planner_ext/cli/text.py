"""Text from models and functions, made fit for a terminal: no control characters, one line, wrapped as it arrives."""

import json
import re
from datetime import UTC, datetime

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

__all__ = ["TextFlow", "exact", "exact_json", "moment_text", "one_line", "printable", "shortened"]

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


def exact(text: str) -> str:
    """Escape, as JSON does, whatever a terminal would obey or not show: what is decided on may hide nothing."""
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def exact_json(value: object, *, indent: int | None = None) -> str:
    """Write a value as JSON in which everything can be seen; see `exact`."""
    return exact(json.dumps(value, ensure_ascii=False, indent=indent))


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
