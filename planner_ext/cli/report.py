"""How a run is told at its end: its exit code, the answer on stdout, and everything else on stderr."""

import json
from dataclasses import asdict
from typing import TextIO

from rich.console import Console
from rich.text import Text

from planner_ext import FunctionCallingStepwisePlannerResult
from planner_ext.cli.console import ANSWERED, NO_ANSWER, PAUSED, say
from planner_ext.cli.show import print_answer, spent_line
from planner_ext.cli.text import printable

__all__ = ["document", "exit_code", "tell"]


def exit_code(result: FunctionCallingStepwisePlannerResult) -> int:
    """Say with which code a run's outcome leaves the process."""
    return {"answered": ANSWERED, "paused": PAUSED, "asked": PAUSED}.get(result.status, NO_ANSWER)


def tell(
    result: FunctionCallingStepwisePlannerResult, out: TextIO, console: Console, *, as_json: bool, run_id: str = ""
) -> None:
    """Say how it went on stderr, and the answer on stdout: framed for a person, as it is for a pipe."""
    if as_json:
        named = {"run_id": run_id} if run_id else {}
        out.write(json.dumps({**named, **document(result)}, indent=2) + "\n")
    elif result.final_answer and out.isatty():
        print_answer(Console(file=out, markup=False, highlight=False, emoji=False), result)
    elif result.final_answer:
        out.write(result.final_answer + "\n")
    out.flush()
    if result.reason:
        say(console, Text(printable(result.reason)))
    say(console, Text(spent_line(result), "dim"))


def document(result: FunctionCallingStepwisePlannerResult) -> dict[str, object]:
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
        "decisions": [record.as_dict() for record in result.decisions],
        "plan": result.plan,
        "chat_history": [message.to_dict() for message in result.chat_history or ()],
    }
