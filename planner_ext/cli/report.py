"""How a command ends: the exit codes, the answer on stdout, and everything else on stderr."""

import json
import sys
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.text import Text

from planner_ext import FunctionCallingStepwisePlannerResult
from planner_ext.cli.show import print_answer, spent_line
from planner_ext.cli.text import printable

__all__ = [
    "ANSWERED",
    "FAULT",
    "INTERRUPTED",
    "NO_ANSWER",
    "PAUSED",
    "UNUSABLE",
    "complain",
    "exit_code",
    "say",
    "stderr_console",
    "tell",
]

ANSWERED = 0
NO_ANSWER = 1
UNUSABLE = 2
FAULT = 3
PAUSED = 4
INTERRUPTED = 130


def exit_code(result: FunctionCallingStepwisePlannerResult) -> int:
    """Say with which code a run's outcome leaves the process."""
    return {"answered": ANSWERED, "paused": PAUSED, "asked": PAUSED}.get(result.status, NO_ANSWER)


def stderr_console() -> Console:
    """Make the console for everything that is not the answer."""
    return Console(file=sys.stderr, markup=False, highlight=False, emoji=False)


def complain(console: Console, text: str) -> None:
    """Say in a paragraph what is wrong."""
    say(console, Text.assemble(("Error: ", "bold red"), printable(text)))


def say(console: Console, text: Text) -> None:
    """Print a paragraph; only a terminal gets it wrapped, so that a log can be searched."""
    console.print(text, soft_wrap=not console.is_terminal)


def tell(result: FunctionCallingStepwisePlannerResult, out: TextIO, console: Console, *, as_json: bool) -> None:
    """Say how it went on stderr, and the answer on stdout: framed for a person, as it is for a pipe."""
    if as_json:
        out.write(json.dumps(_document(result), indent=2) + "\n")
    elif result.final_answer and out.isatty():
        print_answer(Console(file=out, markup=False, highlight=False, emoji=False), result)
    elif result.final_answer:
        out.write(result.final_answer + "\n")
    out.flush()
    if result.reason:
        say(console, Text(printable(result.reason)))
    say(console, Text(spent_line(result), "dim"))


def _document(result: FunctionCallingStepwisePlannerResult) -> dict[str, object]:
    """Write a result as plain JSON values; the messages as OpenAI's API has them."""
    return {
        "status": result.status,
        "final_answer": result.final_answer,
        "iterations": result.iterations,
        "tool_calls": result.tool_calls,
        "usage": {**asdict(result.usage), "total_tokens": result.usage.total_tokens},
        "limit": result.limit,
        "reason": result.reason,
        "pending": [call.as_dict() for call in result.pending],
        "plan": result.plan,
        "chat_history": [message.to_dict() for message in result.chat_history or ()],
    }
