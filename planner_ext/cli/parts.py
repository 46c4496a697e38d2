"""A call's arguments for a terminal: the parts of `planner_ext.readable`, as lines that lose nothing."""

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.text import Text

from planner_ext.cli.text import Terminal
from planner_ext.readable.parts import (
    Folded,
    Line,
    Part,
    folded,
    numbered,
)
from planner_ext.readable.plain import heading, isolated

_STYLES = {
    "mark": "bold white on red",
    "quiet": "dim",
    "name": "cyan",
    "keyword": "magenta",
    "string": "green",
    "number": "yellow",
    "comment": "italic dim",
    "added": "bold green",
    "removed": "bold red",
}
_NARROWEST = 10
"""Cells that a text has at least, however narrow the terminal is."""


def drawn_parts(
    console: Terminal, parts: Iterable[Part], *, fold: bool, width: int | None = None
) -> list[Text]:
    """Draw parts as lines.

    Args:
        console: Where they are printed.
        parts: The parts.
        fold: Whether the middle of a long part is counted only.
        width: The cells of a line; None does not wrap.
    """
    drawing = _Drawing(console, fold, width)
    return [line for part in parts for line in drawing.part(part)]


def wrapped(
    console: Terminal, text: Text, width: int | None, indent: int = 0
) -> list[Text]:
    """Wrap a text; the lines after the first are indented."""
    if width is None or text.cell_len <= width:
        return [text]
    first, *_ = text.wrap(console, max(width, _NARROWEST), overflow="fold")
    start = len(first.plain)
    blanks = len(text.plain[start:]) - len(text.plain[start:].lstrip(" "))
    rest = text[start + blanks :]
    room = max(width - indent, _NARROWEST)
    more = rest.wrap(console, room, overflow="fold") if rest.plain else ()
    return [first, *(Text(" " * indent) + line for line in more)]


def with_note(lines: Folded[Text], noun: str) -> list[Text]:
    """Join the lines of what is folded, with a note in place of its middle."""
    note = Text(f"[ ... {len(lines.middle):,} {noun} are not shown here ... ]", "dim")
    return [*lines.head, *([note] if lines.middle else ()), *lines.tail]


class _Drawing:
    def __init__(self, console: Terminal, fold: bool, width: int | None) -> None:
        self._console = console
        self._fold = fold
        self._width = width

    def part(self, part: Part) -> Iterator[Text]:
        note = heading(part)
        label = Text(self._console.encodable(part.label), "bold")
        if part.kind == "value":
            line = label + Text(": ") + self._line(part.lines[0], part)
            line += Text(f"  ({self._console.encodable(note)})" if note else "", "dim")
            yield from wrapped(self._console, line, self._width, 4)
            return
        label += Text(f" ({self._console.encodable(note)})" if note else "", "dim")
        yield from wrapped(self._console, label + Text(":"), self._width, 4)
        drawn = self._rows(part) if part.kind == "table" else self._lines(part)
        noun = "rows" if part.kind == "table" else "lines"
        shown = with_note(folded(drawn), noun) if self._fold else drawn
        gutter = 0 if part.kind == "table" else len(str(len(part.lines))) + 4
        for line in shown:
            yield from wrapped(self._console, Text("  ") + line, self._width, gutter)

    def _lines(self, part: Part) -> list[Text]:
        if part.kind == "change":
            return [self._line(line, part) for line in part.lines]
        width = len(str(len(part.lines)))
        return [
            Text(f"{number:>{width}}  ", "dim") + self._line(line, part)
            for number, line in numbered(part.lines)
        ]

    def _rows(self, part: Part) -> list[Text]:
        """Draw a table, or where it is too wide, its rows as names and values."""
        rows = [[self._line(cell, part) for cell in row] for row in part.rows]
        heads = [Text(self._console.encodable(name), "bold") for name in part.columns]
        widths = [
            max(cell.cell_len for cell in column)
            for column in zip(heads, *rows, strict=True)
        ]
        if self._width is None or sum(widths) + 2 * len(widths) <= self._width:
            return [_row(cells, widths) for cells in (heads, *rows)]
        return [
            Text(", ").join(
                head + Text(": ") + cell
                for head, cell in zip(heads, row, strict=True)
                if cell.plain
            )
            for row in rows
        ]

    def _line(self, line: Line, part: Part) -> Text:
        text = Text()
        for piece in line:
            shown = self._console.encodable(isolated(piece, part))
            text.append(shown, _STYLES.get(piece.kind, ""))
        return text


def _row(cells: Sequence[Text], widths: Sequence[int]) -> Text:
    padded = (
        cell + Text(" " * (width - cell_len(cell.plain)))
        for cell, width in zip(cells, widths, strict=True)
    )
    row = Text("  ").join(padded)
    row.rstrip()
    return row
