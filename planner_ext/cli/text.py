"""Text for a terminal: consoles, paragraphs, and cutting to the available space."""

import json
import logging
import re
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from planner_ext.core.errors import counted, seconds
from planner_ext.core.text import printable
from planner_ext.readable.text import duration_text

if TYPE_CHECKING:
    from planner_ext.durable import RunResult
    from planner_ext.planner.run import FunctionCallingStepwisePlannerResult


class Signs(NamedTuple):
    """Symbols beside the words, and the spinner, that a console's encoding has."""

    call: str = "→"
    good: str = "✓"
    bad: str = "✗"
    more: str = "…"
    spinner: str = "dots"


_HANGING = Text("\n    ")
"""Continues a paragraph: a model's text must not begin a line of the command's own."""


class Terminal(Console):
    """A console that prints text literally, without markup, highlighting or emoji codes.

    Attributes:
        text_width: The cells of a readable line of text, at most 100.
        signs: The symbols beside the words.
    """

    def __init__(self, file: IO[str] | None = None, **options: Any) -> None:
        super().__init__(
            file=file, markup=False, highlight=False, emoji=False, **options
        )
        self.text_width = min(self.width, 100)
        unicode = self.encoding.lower().startswith("utf")
        self.signs = Signs() if unicode else Signs("->", "ok", "xx", "...", "line")

    def say(self, text: Text | str, style: str = "") -> None:
        """Print a paragraph, wrapped only for a terminal, so that a log can be searched."""
        paragraph = Text(text, style) if isinstance(text, str) else text
        self.print(_HANGING.join(paragraph.split("\n")), soft_wrap=not self.is_terminal)

    def complain(self, text: str, *, lead: str = "Error: ") -> None:
        """Print an error."""
        self.say(Text.assemble((lead, "bold red"), printable(text)))

    def encodable(self, text: str) -> str:
        """Escape characters that the encoding lacks: a replacement character would deceive."""
        return text.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def print_line(
        self, *parts: Text | str | tuple[str, str], indent: int | None = None
    ) -> None:
        """Print texts, each with its style, as one line; nothing in them can look like another.

        Args:
            *parts: The texts.
            indent: Of continuation lines; None indents them more than the line.
        """
        text = Text.assemble(*parts)
        if indent is None:
            indent = (
                len(text.plain) - len(text.plain.lstrip(" ")) + len(_HANGING.plain) - 1
            )
        lines: list[Text] = []
        for line in text.split("\n"):
            room = self.width - (indent if lines else 0)
            cut = self.is_terminal and line.cell_len > room
            lines += (
                line.wrap(self, max(self.width - indent, 10), overflow="fold")
                if cut
                else [line]
            )
        self.print(Text("\n" + " " * indent).join(lines), soft_wrap=True)

    def print_command(self, command: str) -> None:
        """Print a command on a line of its own, to be copied."""
        self.print(Text(f"  {printable(command)}"), soft_wrap=True)

    def print_framed(self, content: RenderableType, title: str, style: str) -> None:
        """Print something in a frame."""
        heading = Text(title, "bold")
        self.print(
            Panel(
                content,
                title=heading,
                title_align="left",
                border_style=style,
                width=self.text_width,
            )
        )


def warnings_shown() -> AbstractContextManager[None]:
    """Print the warnings of a store as errors."""

    def complain(record: logging.LogRecord) -> None:
        Terminal(sys.stderr).complain(record.getMessage())

    return _handled("planner_ext.durable", logging.WARNING, complain)


_STYLES = {logging.WARNING: "yellow", logging.ERROR: "red"}


@contextmanager
def worker_lines_shown(console: Terminal) -> Generator[None]:
    """Print the lines of `planner_ext.durable.log`, and the worker's own warnings."""

    def show(record: logging.LogRecord) -> None:
        console.print_line(
            (printable(record.getMessage()), _STYLES.get(record.levelno, ""))
        )

    with (
        _handled("planner_ext.runs", logging.INFO, show),
        _handled("planner_ext.durable", logging.WARNING, show),
    ):
        yield


@contextmanager
def _handled(
    logger_name: str, level: int, handle: Callable[[logging.LogRecord], None]
) -> Generator[None]:
    """Pass a logger's records from a level on to a function."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            handle(record)

    logger = logging.getLogger(logger_name)
    handler = Handler(level)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(min(level, logger.getEffectiveLevel()))
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


_DEEPEST = 8
"""Cells by which a line of the text may indent itself."""


def moment_text(moment: datetime) -> str:
    """Format a moment in local time, with its distance from now."""
    seconds = (moment - datetime.now(UTC)).total_seconds()
    span = duration_text(abs(seconds))
    return f"{moment.astimezone():%Y-%m-%d %H:%M:%S %Z}, {span} {'from now' if seconds > 0 else 'ago'}"


def shortened(text: str, cells: int, mark: str) -> str:
    """Cut a line to a number of cells; a mark shows that something is missing."""
    head = text[: cells * 4]  # enough of it, however long the text is
    if len(head) == len(text) and cell_len(head) <= cells:
        return text
    return chop_cells(head, max(cells - cell_len(mark), 1))[0].rstrip() + mark


class TextFlow:
    """Prints a text while it arrives, indented and wrapped, each word once it is whole.

    Attributes:
        empty: Whether no text has arrived yet.
    """

    def __init__(
        self, console: Console, *, width: int, indent: int, style: str = ""
    ) -> None:
        """Start at the beginning of a line; ``width`` includes the indent."""
        self._console = console
        self._indent = indent
        self._room = max(width - indent, 10)
        self._style = style
        self._pending = ""
        self._gap = ""
        self._column = 0
        self._empty_lines = 0
        self._started = False
        self.empty = True

    def write(self, text: str) -> None:
        """Add a piece of the text, and print its whole words."""
        self.empty = self.empty and not text
        *whole, self._pending = re.split(
            r"(?<=\s)(?=\S)|(?<=\S)(?=\s)", self._pending + printable(text)
        )
        if cell_len(self._pending) > self._room:
            whole = [*whole, self._pending]
            self._pending = ""
        self._print(map(self._placed, whole))

    def close(self) -> None:
        """Print what is left, and end the line."""
        self._print(
            [
                self._placed(self._pending) if self._pending.strip() else "",
                self._line_end(),
            ]
        )
        self._pending = self._gap = ""
        self._empty_lines = 0

    def _placed(self, piece: str) -> str:
        """Return what is printed for a word or for white space."""
        if not piece.isspace():
            return self._placed_word(piece)
        self._gap = piece.rpartition("\n")[2]
        lines = piece.count("\n")
        if not lines or not self._started:
            return ""
        self._empty_lines = min(lines - 1, 1)
        return self._line_end()

    def _placed_word(self, word: str) -> str:
        placed = ""
        gap = " " if self._column and self._gap else self._gap[:_DEEPEST]
        for part in chop_cells(word, self._room):
            if self._column and self._column + cell_len(gap + part) > self._room:
                placed += self._line_end()
                gap = ""
            if not self._column:
                placed += "\n" * self._empty_lines + " " * self._indent
            placed += gap + part
            self._column += cell_len(gap + part)
            self._empty_lines = 0
            gap = ""
        self._gap = ""
        self._started = True
        return placed

    def _line_end(self) -> str:
        end = "\n" if self._column else ""
        self._column = 0
        return end

    def _print(self, pieces: Iterable[str]) -> None:
        if text := "".join(pieces):
            self._console.print(Text(text, self._style), end="", soft_wrap=True)


def spent_line(
    result: "FunctionCallingStepwisePlannerResult | RunResult", *, ended: str = ""
) -> str:
    """Describe in one line how a run ended and what it spent."""
    usage = result.usage
    spent = [
        counted(result.iterations, "round trip"),
        counted(result.tool_calls, "function call"),
        f"{counted(usage.prompt_tokens, 'token')} in",
        f"{usage.completion_tokens:,} out",
        f"{seconds(usage.active_seconds)} s",
    ]
    status = ended or result.status.replace("_", " ") + (
        f" ({result.limit})" if result.limit else ""
    )
    return f"{status}: {', '.join(spent)}"


def json_document(value: object) -> str:
    """Write values, dates included, as a JSON document."""
    return json.dumps(value, indent=2, default=datetime.isoformat)
