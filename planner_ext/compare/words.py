"""The words and figures that terminal, page and Markdown share."""

from typing import NamedTuple

from planner_ext.compare.comparison import Comparison, Run

__all__ = ["Finding", "counted", "ending", "findings", "one_line", "seconds"]

_ENDINGS = {"limit_reached": "limit", "answered": "answered"}


def ending(status: str) -> str:
    """Say in a word how a run ended."""
    return _ENDINGS.get(status, status.replace("_", " "))


def seconds(value: float) -> str:
    """Write seconds with as many places as mean something."""
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def one_line(text: str) -> str:
    """Put a text on one line of a terminal, without what a terminal would obey instead of show."""
    return "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in " ".join(text.split()))


def counted(number: int, noun: str) -> str:
    """Write a number and what it counts: ``1 round trip``, ``2 round trips``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class Finding(NamedTuple):
    """Something wrong with a run; grave is what was spent beyond the budget, and what cannot be gone on with."""

    text: str
    grave: bool


def findings(comparison: Comparison, run: Run) -> tuple[Finding, ...]:
    """List what is wrong with a run, the worst first; nothing for one that is as it should be."""
    told = run.tokens_told
    grave = (
        (run.over_budget, f"{counted(run.over_budget, 'round trip')} over the budget"),
        (run.tools_past_budget, f"{counted(run.tools_past_budget, 'function call')} past the budget"),
        (run.broken, "history broken"),
        (run.status == "failed", "failed"),
    )
    light = (
        (not run.answer, "no answer"),
        (run.answer and comparison.unfinished(run), "ran out where another option finished"),
        (run.charged != run.trips, f"believes it made {counted(run.charged, 'round trip')}"),
        (told is not None and told != run.tokens_summed, f"tells of {told or 0:,} of {run.tokens_summed:,} tokens"),
    )
    return (
        *(Finding(text, grave=True) for is_so, text in grave if is_so),
        *(Finding(text, grave=False) for is_so, text in light if is_so),
    )
