"""A call's arguments as a list of readable parts: data, which HTML, the terminal and a notice draw.

No part loses anything but white space around JSON, and what is folded can be unfolded.
Of a value too long to be drawn, the beginning and the end are parts; it is said that the
exact JSON has the rest. A guess, such as that a text is SQL, chooses its colours only.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from functools import partial
from itertools import accumulate
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, cast

from planner_ext.core.errors import counted
from planner_ext.core.values import frozen
from planner_ext.readable.text import INDENT, exact, exact_json, stretches_of

Kind: TypeAlias = Literal["text", "code", "sql", "json", "table", "value", "change"]
"""``value`` has one line, ``change`` the lines that an edit adds and removes."""

PieceKind: TypeAlias = Literal[
    "",
    "mark",
    "quiet",
    "more",
    "gap",
    "name",
    "keyword",
    "string",
    "number",
    "comment",
    "added",
    "removed",
    "kept",
]
"""``mark`` stands for what is not drawn, ``quiet`` for a tab or carriage return;
``more`` begins what continues the line above, and ``gap`` stands where lines are left
out; the last three are the sign of a change."""


class Piece(NamedTuple):
    """Some characters of a line, drawn in one way."""

    text: str
    kind: PieceKind = ""


Line: TypeAlias = tuple[Piece, ...]
_T = TypeVar("_T")

MOST_LINES = 12
"""The lines of a part that are shown at once; of a longer one its beginning and end."""
_LONG = 80
"""Characters of a text that stands on lines of its own."""
_LONGEST_LINE = 400
"""Characters of a line; a longer one continues on others, so that it can be folded."""
_MOST_MEMBERS = 20
_DEEPEST = 4
"""An object or list with texts is shown member by member: so many, at so many levels."""
_MOST_COLUMNS = 8
_LONGEST_CELL = 60
_LONGEST_COLORED = 50_000
"""Characters of a code that gets colours."""
_MOST_DRAWN = 1_000
_LONGEST_DRAWN = 50_000
"""Lines and characters that are drawn of each end of a text; of a call, parts with four
times as many lines."""


@frozen
class Part:
    """One argument, or one member of an argument.

    Attributes:
        label: The name, fully visible: ``mail.body`` or ``rows[0]`` for a member.
        about: The parameter's description.
        note: What it is, such as ``SQL`` or ``JSON in a text``.
        lines: Of a table, none.
        left_out: The text between the lines that are drawn, which only the exact JSON
            has; "" where all are.
        rows: The cells of a table, under its columns.
        is_default: Whether the call does not give it.
    """

    label: str
    kind: Kind
    about: str = ""
    note: str = ""
    lines: tuple[Line, ...] = ()
    left_out: str = ""
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Line, ...], ...] = ()
    is_default: bool = False

    @property
    def marks(self) -> int:
        """The number of marks in it."""
        lines = (*self.lines, *(cell for row in self.rows for cell in row))
        return sum(piece.kind == "mark" for line in lines for piece in line)

    @property
    def size(self) -> int:
        """The number of its lines or rows."""
        return len(self.rows or self.lines)


class Folded(NamedTuple, Generic[_T]):
    """The beginning of a part, what is folded, and the end; the last two may be empty."""

    head: Sequence[_T]
    middle: Sequence[_T]
    tail: Sequence[_T]


def folded(items: Sequence[_T], most: int = MOST_LINES) -> Folded[_T]:
    """Fold the middle of what is too long; its note takes a line."""
    if len(items) <= most:
        return Folded(items, (), ())
    tail = max((most - 1) // 2, 1)
    head = max(most - 1 - tail, 1)
    return Folded(items[:head], items[head:-tail], items[-tail:])


def parts_of(
    arguments: Mapping[str, Any], parameters: Mapping[str, Any] | None = None
) -> tuple[Part, ...]:
    """List the parts of a call's arguments, and the defaults of those that it does not give.

    Args:
        arguments: JSON values, by name.
        parameters: JSON schema of the function's parameters, if known.
    """
    schemas = _members((parameters or {}).get("properties"))
    parts = list[Part]()
    room = 4 * _MOST_DRAWN
    for part in _all_parts(arguments, schemas):
        if room <= 0:
            parts.append(_REST)
            break
        parts.append(part)
        room -= part.size
    return tuple(parts)


def _all_parts(
    arguments: Mapping[str, Any], schemas: Mapping[str, Any]
) -> Iterator[Part]:
    for name, value in arguments.items():
        schema = _members(schemas.get(name))
        yield from _parts(exact(name), value, schema, depth=0)
    for name, schema in schemas.items():
        described = _members(schema)
        if name not in arguments and described.get("default") is not None:
            yield _value(exact(name), described["default"], described)


_REST = Part(
    label="...",
    kind="value",
    note="the other values are left out: the exact JSON has them",
    lines=((),),
)


def parts_written(arguments: str) -> tuple[Part, ...]:
    """List the parts of arguments as a model writes them; a text that is no JSON object is one part."""
    with suppress(ValueError, RecursionError):
        value = json.loads(arguments or "{}")
        if isinstance(value, dict):
            return parts_of(cast("dict[str, Any]", value))
    return parts_of({"": arguments})


def changes_of(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Part, ...]:
    """List what an edit changes in a call's arguments, each with the lines around it."""
    names = dict.fromkeys((*before, *after))
    parts = list[Part]()
    for name in names:
        old = _plain_lines(before, name)
        new = _plain_lines(after, name)
        lines = tuple(_changed(old, new))
        if lines:
            parts.append(Part(label=exact(name), kind="change", lines=lines))
    return tuple(parts)


def _plain_lines(arguments: Mapping[str, Any], name: str) -> list[Line]:
    if name not in arguments:
        return []
    value = arguments[name]
    if not isinstance(value, str):
        return _json_lines(exact_json(value, indent=2))
    if _has_text(value):
        return _text_lines(value)
    return [_short(value)]


def _changed(before: list[Line], after: list[Line]) -> Iterator[Line]:
    groups = SequenceMatcher(None, before, after).get_grouped_opcodes(2)
    for number, group in enumerate(groups):
        if number:
            yield (Piece("  ", "kept"), Piece("…"))
        for tag, first, last, start, end in group:
            gone = before[first:last]
            there = after[start:end]
            if tag == "equal":
                yield from ((Piece("  ", "kept"), *line) for line in there)
            else:
                yield from ((Piece("- ", "removed"), *line) for line in gone)
                yield from ((Piece("+ ", "added"), *line) for line in there)


def _members(value: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value if isinstance(value, Mapping) else {})


def _parts(
    label: str, value: Any, schema: Mapping[str, Any], *, depth: int
) -> Iterator[Part]:
    more: dict[str, Any] = {"about": _about(schema)}
    members = _named_members(label, value)
    if isinstance(value, str):
        yield _text(label, value, schema, more)
    elif (table := _table(label, value, more)) is not None:
        yield table
    elif len(members) <= _MOST_MEMBERS and depth < _DEEPEST and _has_text(value):
        for name, member in members:
            yield from _parts(name, member, {}, depth=depth + 1)
    elif len(written := exact_json(value)) <= _LONG:
        line = tuple(_json_pieces(written))
        yield Part(label=label, kind="value", lines=(line,), **more)
    else:
        written = exact_json(value, indent=2)
        lines = _drawn(written, _json_lines)
        yield Part(label=label, kind="json", **lines, **more)


def _value(label: str, value: Any, schema: Mapping[str, Any]) -> Part:
    """Show a default on one line."""
    line = tuple(_json_pieces(exact_json(value)))
    return Part(
        label=label,
        kind="value",
        about=_about(schema),
        note="default",
        lines=(line,),
        is_default=True,
    )


def _about(schema: Mapping[str, Any]) -> str:
    about = schema.get("description")
    return about if isinstance(about, str) else ""


def _named_members(label: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        members = cast("dict[str, Any]", value)
        return [(f"{label}.{exact(name)}", one) for name, one in members.items()]
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [(f"{label}[{place}]", one) for place, one in enumerate(items)]
    return []


def _has_text(value: Any, depth: int = 0) -> bool:
    """Whether a value has a text in it that JSON would put on one long line."""
    if isinstance(value, str):
        return "\n" in value or len(value) > _LONG
    if depth == _DEEPEST:
        return False
    members = _named_members("", value)
    return any(_has_text(member, depth + 1) for _, member in members)


# Texts


def _text(
    label: str, text: str, schema: Mapping[str, Any], more: Mapping[str, Any]
) -> Part:
    value = _json_in(text)
    if value is not None:
        note = "JSON in a text"
        lines = _drawn(exact_json(value, indent=2), _json_lines)
        return Part(label=label, kind="json", note=note, **lines, **more)
    language = _language_of(label, text, schema)
    is_short = not _has_text(text) and not text.startswith(("{", "["))
    if not language and is_short:
        return Part(label=label, kind="value", lines=(_short(text),), **more)
    kind: Kind = "sql" if language == "sql" else "code" if language else "text"
    note = {"sql": "SQL", "code": ""}.get(language, language.capitalize())
    lines = _drawn(text, partial(_text_lines, language=language))
    return Part(label=label, kind=kind, note=note, **lines, **more)


def _drawn(text: str, lines_of: Callable[[str], list[Line]]) -> dict[str, Any]:
    """Draw the lines of a text; of one that is too long, those of its two ends."""
    head = "\n".join(text.split("\n", _MOST_DRAWN)[:_MOST_DRAWN])[:_LONGEST_DRAWN]
    tail = "\n".join(text.rsplit("\n", _MOST_DRAWN)[-_MOST_DRAWN:])[-_LONGEST_DRAWN:]
    if len(head) + len(tail) >= len(text):
        return {"lines": tuple(lines_of(text))}
    head = head.rstrip("\n")  # a last line end is drawn as the end of the text
    left_out = text[len(head) : -len(tail)]
    lines = (*lines_of(head), _GAP, *lines_of(tail))
    return {"lines": lines, "left_out": left_out}


def _short(text: str) -> Line:
    """Show a text without quotes, unless it could be taken for another value or has outer blanks."""
    if not text or text != text.strip() or _OTHER_VALUE.match(text):
        return (*_json_pieces(exact_json(text)),)
    (line,) = _text_lines(text)
    return line


_OTHER_VALUE = re.compile(r'["\[{\d+.-]|(?:true|false|null|none)$', re.IGNORECASE)


def _text_lines(text: str, language: str = "") -> list[Line]:
    tokens = _tokens(text, language)
    starts = [*accumulate((len(token) for token, _ in tokens), initial=0)]
    kinds: list[PieceKind] = [kind for _, kind in tokens]
    lines = list[Line]()
    place = 0
    for line in text.split("\n"):
        pieces = list[Piece]()
        for start, end, mark in stretches_of(line, blanks=INDENT):
            if mark:
                is_last = end == len(line)
                pieces.append(_QUIET.get((mark, is_last), Piece(mark, "mark")))
                continue
            first = bisect_right(starts, place + start) - 1
            last = bisect_right(starts, place + end - 1) - 1
            for token in range(first, last + 1):
                left = max(starts[token] - place, start)
                right = min(starts[token + 1] - place, end)
                pieces.append(Piece(line[left:right], kinds[token]))
        place += len(line) + 1
        if place == len(text):
            lines += _cut([*pieces, _END])
            break
        lines += _cut(pieces)
    return lines


_TAB = Piece("→   ", "quiet")
_END = Piece("⏎", "quiet")
"""The end of a text's last line, if it has one."""
_GAP: Line = (Piece("", "gap"),)
_QUIET = {
    ("\\t", True): _TAB,
    ("\\t", False): _TAB,
    ("\\r", True): Piece("␍", "quiet"),
}
"""The signs of white space that is usual, by its mark and whether it ends a line."""


def _cut(pieces: Iterable[Piece]) -> Iterator[Line]:
    """Divide a line that is too long."""
    line = list[Piece]()
    room = _LONGEST_LINE
    for text, kind in pieces:
        rest = text
        while len(rest) > room:
            yield (*line, Piece(rest[:room], kind))
            rest = rest[room:]
            line = [Piece("", "more")]
            room = _LONGEST_LINE
        line.append(Piece(rest, kind))
        room -= len(rest)
    yield tuple(line)


def _tokens(text: str, language: str) -> list[tuple[str, PieceKind]]:
    """Divide a code into tokens with their colours; anything else is one token."""
    whole: list[tuple[str, PieceKind]] = [(text, "")]
    if language in ("", "code") or len(text) > _LONGEST_COLORED:
        return whole
    try:
        from pygments import lexers, token  # noqa: PLC0415  (an extra, only for code)
    except ImportError:
        return whole
    colors: dict[Any, PieceKind] = {
        token.Keyword: "keyword",
        token.Name.Builtin: "name",
        token.Name.Class: "name",
        token.Name.Decorator: "name",
        token.Name.Function: "name",
        token.Name.Tag: "name",
        token.Literal.String: "string",
        token.Literal.Number: "number",
        token.Comment: "comment",
    }
    lexer: Any = cast("Any", lexers).get_lexer_by_name(language)
    found = list[tuple[str, PieceKind]]()
    for _, type_, part in lexer.get_tokens_unprocessed(text):
        color = next((colors[kind] for kind in colors if type_ in kind), "")
        found.append((part, cast("PieceKind", color)))
    if "".join(part for part, _ in found) == text:
        return found
    return whole


_WORDS = {
    **dict.fromkeys(("code", "script", "source", "program", "snippet"), "code"),
    **dict.fromkeys(("python", "py"), "python"),
    **dict.fromkeys(("javascript", "js"), "javascript"),
    **dict.fromkeys(("bash", "shell", "sh", "command", "cmd"), "bash"),
    **dict.fromkeys(("diff", "patch"), "diff"),
    **dict.fromkeys(("yaml", "yml"), "yaml"),
    "html": "html",
    "xml": "xml",
    "json": "json",
}
"""Words in the name of a parameter or media type, and the language that they tell of."""
_SQL = re.compile(
    r"\s*(?:--[^\n]*\n\s*)*(?:select\s.*\bfrom|insert\s+into|update\s.*\bset|delete\s+from|with\s.*\bas\s*\(|merge\s+into"
    r"|(?:create|alter|drop|truncate)\s+(?:or\s+replace\s+)?(?:table|view|index|schema|database|function)|grant\s.*\bto)\b",
    re.IGNORECASE | re.DOTALL,
)
_PYTHON = re.compile(
    r"^(?:import \w|from [\w.]+ import |def \w|class \w)", re.MULTILINE
)


def _language_of(label: str, text: str, schema: Mapping[str, Any]) -> str:
    """Guess the language of a code; "" for prose."""
    if _SQL.match(text[:_LONGEST_COLORED]):
        return "sql"
    named = f"{label} {schema.get('contentMediaType', '')}"
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+", named)
    told = [_WORDS[word] for word in map(str.lower, words) if word in _WORDS]
    named_ones = (one for one in told if one != "code")
    language = next(named_ones, "code" if told else "")
    is_python = language in ("", "code") and _PYTHON.search(text)
    return "python" if is_python else language


# JSON

_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')


def _json_in(text: str) -> Any:
    """Read the object or list in a text; None if writing it again would lose anything but white space."""
    if text[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
        written = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return None
    if written == _SPACE.sub(r"\1", text):
        return value
    return None


_JSON = re.compile(
    r'(?P<name>"(?:[^"\\]|\\.)*"(?=:))|(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>-?\d[\d.eE+-]*)'
    r"|(?P<keyword>true|false|null)|.\s*"
)
_MARKED = re.compile(r"(?P<mark>\\u[0-9a-f]{4}|\\<\d+ blanks>)|(?:\\[^u<]|[^\\])+|.")


def _json_lines(written: str) -> list[Line]:
    return [line for one in written.split("\n") for line in _cut(_json_pieces(one))]


def _json_pieces(line: str) -> Iterator[Piece]:
    """Divide a line that `exact_json` wrote into its tokens."""
    start = len(line) - len(line.lstrip(" "))
    if start:
        yield Piece(line[:start])
    for token in _JSON.finditer(line, start):
        kind = cast("PieceKind", token.lastgroup or "")
        for part in _MARKED.finditer(token[0]):
            yield Piece(part[0], "mark" if part["mark"] else kind)


# Tables


def _table(label: str, value: Any, more: Mapping[str, Any]) -> Part | None:
    """Show a list of alike objects with short members as a table; None for anything else."""
    rows = cast("list[Any]", value) if isinstance(value, list) else []
    is_long = len(rows) > _MOST_DRAWN
    if len(rows) < 2 or is_long or not all(isinstance(row, dict) for row in rows):
        return None
    columns = dict.fromkeys(name for row in rows for name in row)
    cells = [[_cell(row, name) for name in columns] for row in rows]
    has_long_cell = any(None in row for row in cells)
    if not 0 < len(columns) <= _MOST_COLUMNS or has_long_cell:
        return None
    return Part(
        label=label,
        kind="table",
        note=f"{len(rows)} rows",
        columns=tuple(map(exact, columns)),
        rows=tuple(tuple(cast("list[Line]", row)) for row in cells),
        **more,
    )


def _cell(row: Mapping[str, Any], name: str) -> Line | None:
    if name not in row:
        return ()
    value = row[name]
    if isinstance(value, str) and not _has_text(value):
        return _short(value)
    written = exact_json(value)
    if len(written) > _LONGEST_CELL:
        return None
    return (*_json_pieces(written),)


# What every drawing needs


def plain(line: Iterable[Piece]) -> str:
    """Return a line's text."""
    return "".join(piece.text for piece in line)


def marks_text(part: Part) -> str:
    """Say how much of a part is marked, and how much left out; "" for nothing."""
    marked = f"{counted(part.marks, 'character')} marked" if part.marks else ""
    left_out = counted(len(part.left_out), "character")
    rest = f"{left_out} left out: the exact JSON has them" if part.left_out else ""
    return "; ".join(filter(None, (marked, rest)))


def numbered(part: Part) -> list[tuple[str, Line]]:
    """Number a part's lines from 1; what continues a line has no number."""
    found = list[tuple[str, Line]]()
    number = 0
    for line in part.lines:
        if line == _GAP:
            found.append(("...", line))
            number += part.left_out.count("\n") - 1
            continue
        continues = line[:1] == (Piece("", "more"),)
        number += not continues
        found.append(("" if continues else str(number), line))
    return found
