"""Parts of a call drawn as plain text, for a notice; and what every drawing without markup needs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import repeat

from planner_ext.approval.decisions import ToolCall, json_object
from planner_ext.readable.parts import (
    Line,
    Part,
    Piece,
    folded,
    marks_text,
    numbered,
    parts_of,
    plain,
)
from planner_ext.readable.text import (
    exact,
    exact_json,
    has_right_to_left,
    visible,
    visible_line,
)

_ISOLATE = "\N{FIRST STRONG ISOLATE}"
_END_ISOLATE = "\N{POP DIRECTIONAL ISOLATE}"


def text_of(parts: Iterable[Part]) -> str:
    """Draw parts as text; the middle of a long one is counted only."""
    return "\n".join(line for part in parts for line in _lines(part))


def notice_text(
    head: str, calls: Iterable[ToolCall], addresses: Iterable[str] = repeat("")
) -> str:
    """Write what waits under a heading, a paragraph for each call or question with its page's address, or ""."""
    return "\n\n".join([visible(head), *map(_paragraph, calls, addresses)])


def _paragraph(call: ToolCall, address: str) -> str:
    asks = call.kind == "question"
    name = "A question of the model" if asks else exact(call.fully_qualified_name)
    arguments = ""
    if not asks:
        arguments = text_of(parts_of(call.arguments, call.parameters))
    said = (visible(call.summary), visible(call.prompt), arguments)
    return "\n".join(filter(None, (name, *said, f"id: {exact(call.id)}", address)))


def arguments_line(written: str) -> str:
    """Write a call's JSON arguments on one line; anything but an object stays as it is."""
    with suppress(RecursionError):  # too deep to be written again
        given = json_object(written)
        if given is not None:
            texts = (f"{exact(name)}={exact_json(one)}" for name, one in given.items())
            return ", ".join(texts)
    return visible_line(written)


def isolated(piece: Piece, part: Part) -> str:
    """Return a piece's text, apart from what stands around it in the other direction."""
    if part.kind == "text" or not has_right_to_left(piece.text):
        return piece.text
    return f"{_ISOLATE}{piece.text}{_END_ISOLATE}"


def heading(part: Part) -> str:
    """Describe a part in one line after its label: what it is, its marks, its description."""
    texts = (part.note, marks_text(part), visible(part.about))
    return "; ".join(filter(None, texts))


def _lines(part: Part) -> Iterator[str]:
    note = heading(part)
    noted = f" ({note})" if note else ""
    if part.kind == "value":
        value = _drawn(part.lines[0], part)
        yield f"{part.label}: {value}{f' {noted}' if note else ''}"
        return
    yield f"{part.label}{noted}:"
    if part.kind == "table":
        yield f"    {' | '.join(part.columns)}"
        rows = [
            f"    {' | '.join(_drawn(cell, part) for cell in row)}" for row in part.rows
        ]
        yield from _folded(rows, "rows")
    else:
        width = len(str(len(part.lines)))
        drawn = [
            f"    {number:>{width}}  {_drawn(line, part)}".rstrip()
            for number, line in numbered(part)
        ]
        yield from _folded(drawn, "lines")


def _folded(lines: Sequence[str], noun: str) -> Iterator[str]:
    head, middle, tail = folded(lines)
    yield from head
    if middle:
        yield f"    [{len(middle)} more {noun}]"
    yield from tail


def _drawn(line: Line, part: Part) -> str:
    return plain(Piece(isolated(piece, part), piece.kind) for piece in line)
