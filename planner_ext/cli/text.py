"""Text from models and functions, made fit for a terminal: no control characters, one line, wrapped as it arrives."""

import re

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.text import Text

__all__ = ["TextFlow", "one_line", "printable", "shortened"]

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


def one_line(text: str) -> str:
    """Put a text on one line, every run of white space being one blank."""
    return " ".join(printable(text).split())


def shortened(text: str, cells: int, mark: str) -> str:
    """Cut a line to a number of terminal cells, with a mark where something is missing."""
    if cell_len(text) <= cells:
        return text
    room = max(cells - cell_len(mark), 1)
    return chop_cells(text, room)[0].rstrip() + mark


class TextFlow:
    """Prints a text while it arrives, indented and wrapped at words; a word is printed once it is whole."""

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
        self.started = False

    def write(self, text: str) -> None:
        """Take a piece of the text."""
        *whole, self._pending = re.split(r"(?<=\s)(?=\S)|(?<=\S)(?=\s)", self._pending + printable(text))
        for piece in whole:
            self._piece(piece)
        if cell_len(self._pending) > self._room:
            self._piece(self._pending)
            self._pending = ""

    def close(self) -> None:
        """Print what is left, and end the line."""
        if self._pending.strip():
            self._piece(self._pending)
        self._pending = self._gap = ""
        if self._column:
            self._console.print()
        self._column = self._empty_lines = 0

    def _piece(self, piece: str) -> None:
        if not piece.isspace():
            return self._word(piece)
        lines = piece.count("\n")
        self._gap = piece.rpartition("\n")[2]
        if lines and self.started:
            if self._column:
                self._console.print()
            self._column, self._empty_lines = 0, min(lines - 1, 1)
        return None

    def _word(self, word: str) -> None:
        gap = " " if self._column and self._gap else self._gap[:_DEEPEST]
        for part in chop_cells(word, self._room):
            if self._column and self._column + cell_len(gap + part) > self._room:
                self._console.print()
                self._column, gap = 0, ""
            self._print(gap + part)
            gap = ""
        self._gap = ""

    def _print(self, text: str) -> None:
        before = "" if self._column else "\n" * self._empty_lines + " " * self._indent
        self._console.print(before, Text(text, self._style), sep="", end="", soft_wrap=True)
        self._column += cell_len(text)
        self._empty_lines = 0
        self.started = True
