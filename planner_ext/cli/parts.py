"""A call's arguments for a terminal: the parts of `planner_ext.readable`, as lines that lose nothing."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.text import Text

from planner_ext.cli.text import Terminal
from planner_ext.readable.parts import (
    Line,
    Part,
    folded,
    numbered,
)
from planner_ext.readable.plain import heading, isolated
from planner_ext.readable.text import exact, visible_line

if TYPE_CHECKING:
    from planner_ext.durable import PendingApproval
    from planner_ext.hitl_manager import ToolCall

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
    console: Terminal,
    parts: Iterable[Part],
    *,
    most: int | None = None,
    width: int | None = None,
) -> list[Text]:
    """Draw parts as lines.

    Args:
        console: Where they are printed.
        parts: The parts.
        most: The lines or rows of a part; the middle of a longer one is counted only.
            None draws all.
        width: The cells of a line; None does not wrap.
    """
    drawing = _Drawing(console, most, width)
    return [line for part in parts for line in drawing.part(part)]


def function_text(call: "ToolCall | PendingApproval") -> str:
    """Name a call's function, with its description."""
    about = visible_line((call.parameters or {}).get("description") or "")
    name = exact(call.fully_qualified_name)
    return f"{name}: {about}" if about else name


def wrapped(
    console: Terminal, text: Text, width: int | None, indent: int = 0
) -> list[Text]:
    """Wrap a text; the lines after the first are indented."""
    if width is None or text.cell_len <= width:
        return [text]
    first, *_ = text.wrap(console, max(width, _NARROWEST), overflow="fold")
    start = len(first.plain)
    after = text.plain[start:]
    blanks = len(after) - len(after.lstrip(" "))
    rest = text[start + blanks :]
    room = max(width - indent, _NARROWEST)
    more = ()
    if rest.plain:
        more = rest.wrap(console, room, overflow="fold")
    return [first, *(Text(" " * indent) + line for line in more)]


def with_note(
    head: Sequence[Text], hidden: int, tail: Sequence[Text], noun: str
) -> list[Text]:
    """Join the lines of what is folded, with a note of how many its middle has."""
    note = Text(f"[ ... {hidden:,} {noun} are not shown here ... ]", "dim")
    return [*head, *([note] if hidden else ()), *tail]


class _Drawing:
    def __init__(self, console: Terminal, most: int | None, width: int | None) -> None:
        self._console = console
        self._most = most
        self._width = width

    def part(self, part: Part) -> Iterator[Text]:
        note = heading(part)
        label = Text(self._console.encodable(part.label), "bold")
        noted = f" ({self._console.encodable(note)})" if note else ""
        if part.kind == "value":
            line = label + Text(": ") + self._line(part.lines[0], part)
            line += Text(f" {noted}" if note else "", "dim")
            yield from wrapped(self._console, line, self._width, 4)
            return
        label += Text(noted, "dim")
        yield from wrapped(self._console, label + Text(":"), self._width, 4)
        most = part.size if self._most is None else self._most
        if part.kind == "table":
            head, *rows = self._rows(part)
            some = folded(rows, most)
            rows = with_note(some.head, len(some.middle), some.tail, "rows")
            shown = [head, *rows]
        else:
            lines = folded(numbered(part), most)
            width = 0
            if part.kind != "change":
                width = len(str(part.size))
            begin = [self._numbered(one, width, part) for one in lines.head]
            end = [self._numbered(one, width, part) for one in lines.tail]
            shown = with_note(begin, len(lines.middle), end, "lines")
        gutter = 0
        if part.kind != "table":
            gutter = len(str(part.size)) + 4
        for line in shown:
            yield from wrapped(self._console, Text("  ") + line, self._width, gutter)

    def _numbered(self, numbered: tuple[str, Line], width: int, part: Part) -> Text:
        number, line = numbered
        lead = Text(f"{number:>{width}}  " if width else "", "dim")
        drawn = lead + self._line(line, part)
        drawn.rstrip()
        return drawn

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
