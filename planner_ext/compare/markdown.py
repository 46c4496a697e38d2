"""A comparison as Markdown, for a document: the first script in full, and of all of them what goes wrong.

Holds nothing that differs from one time to the next, so that a test can say whether a document is stale.
"""

from collections.abc import Iterable, Sequence

from planner_ext.compare.comparison import Comparison, Run
from planner_ext.compare.words import ending

__all__ = ["TABLE_BEGINS", "TABLE_ENDS", "markdown_of", "with_table"]

TABLE_BEGINS = "<!-- table: planner-ext compare -->"
TABLE_ENDS = "<!-- /table -->"

_COLUMNS = (
    "option",
    "round trips",
    "over budget",
    "charged",
    "tools run",
    "past budget",
    "tokens summed",
    "tokens told",
    "status",
    "answer",
    "history",
)


def markdown_of(comparison: Comparison) -> str:
    """Write it down, without wall times."""
    first = comparison.scripts[0]
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions if name != "python")
    allowed = f"{comparison.max_iterations} round trips allowed"
    parts = [
        f"Measured with {versions}. The script *{first.name}*, {allowed}:",
        _table(_COLUMNS, (_row(comparison, run) for run in comparison.of_script(first.key))),
    ]
    if len(comparison.scripts) > 1:
        names = [script.name for script in comparison.scripts]
        rows = (
            (option.name, *(_fault(comparison, run) for run in comparison.of_option(option.key)))
            for option in comparison.options
        )
        parts += [
            f"What goes wrong in each script, {allowed}:",
            _table(("option", *names), rows),
            "+n: round trips over the budget. broken: OpenAI refuses the history that is left, or a request before.\n"
            "silent: there is no answer. unfinished: the budget ran out where another option finished. ·: nothing.",
        ]
    return "\n\n".join(parts)


def with_table(document: str, table: str) -> str:
    """Put a table between the markers of a document.

    Raises:
        ValueError: The document does not have both markers, in order.
    """
    head, begins, rest = document.partition(TABLE_BEGINS)
    _, ends, tail = rest.partition(TABLE_ENDS)
    if not begins or not ends:
        raise ValueError(f"expected a document with the lines {TABLE_BEGINS} and {TABLE_ENDS}, in this order")
    return f"{head}{begins}\n\n{table}\n\n{ends}{tail}"


def _row(comparison: Comparison, run: Run) -> Sequence[str]:
    return (
        comparison.option(run.option).name,
        str(run.trips),
        f"+{run.over_budget}" if run.over_budget else "0",
        str(run.charged),
        str(run.tools_run),
        f"+{run.tools_past_budget}" if run.tools_past_budget else "0",
        f"{run.tokens_summed:,}",
        "nothing" if run.tokens_told is None else f"{run.tokens_told:,}",
        ending(run.status),
        "yes" if run.answer else "no",
        "valid" if run.history_valid else "broken",
    )


def _fault(comparison: Comparison, run: Run) -> str:
    faults = (
        (run.over_budget, f"+{run.over_budget}"),
        (run.broken, "broken"),
        (run.status == "failed", "failed"),
        (not run.answer, "silent"),
        (run.answer and comparison.unfinished(run), "unfinished"),
    )
    return ", ".join(text for is_so, text in faults if is_so) or "·"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    alignment = [":--", *("--:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, alignment, *rows))
