"""What every command prints with: exit codes, paragraphs on stderr, complaints. Imports nothing heavy."""

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from planner_ext.cli.text import printable

__all__ = [
    "ANSWERED",
    "FAULT",
    "INTERRUPTED",
    "NO_ANSWER",
    "PAUSED",
    "UNUSABLE",
    "complain",
    "complaints_of",
    "say",
    "stderr_console",
    "stdout_console",
]

ANSWERED = 0
NO_ANSWER = 1
UNUSABLE = 2
FAULT = 3
PAUSED = 4
INTERRUPTED = 130


def stdout_console() -> Console:
    """Make the console for what was asked for."""
    return Console(markup=False, highlight=False, emoji=False)


def stderr_console() -> Console:
    """Make the console for everything that is not the answer."""
    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False)


def complain(console: Console, text: str) -> None:
    """Say in a paragraph what is wrong."""
    say(console, Text.assemble(("Error: ", "bold red"), printable(text)))


def say(console: Console, text: Text) -> None:
    """Print a paragraph; only a terminal gets it wrapped, so that a log can be searched."""
    console.print(text, soft_wrap=not console.is_terminal)


@contextmanager
def complaints_of(name: str) -> Generator[None]:
    """Say what a logger warns of, too; the command line leaves logs alone otherwise."""

    class Complaints(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            complain(stderr_console(), record.getMessage())

    logger, handler = logging.getLogger(name), Complaints(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
