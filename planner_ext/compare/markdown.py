"""A comparison as Markdown for a document: the first script in full, and the faults in all scripts.

The text is the same each time, so that a test can detect a stale document.
"""

from collections.abc import Iterable, Sequence

from planner_ext.compare.report import Comparison, Run

__all__ = ["TABLE_BEGINS", "TABLE_ENDS", "markdown_of", "with_table"]

TABLE_BEGINS = "<!-- table: planner-ext compare -->"
TABLE_ENDS = "<!-- /table -->"

_COLUMNS = (
    *("option", "round trips", "over budget", "charged", "tools run", "past budget"),
    *("tokens summed", "tokens told", "status", "answer", "history"),
)
_FAULTS = ("broken", "failed", "silent", "unfinished")


def markdown_of(comparison: Comparison) -> str:
    """Write the tables, without wall times."""
    first = comparison.scripts[0]
    versions = ", ".join(f"{name} {version}" for name, version in comparison.versions if name != "python")
    allowed = f"{comparison.max_iterations} round trips allowed"
    figures = (
        (comparison.option(run.option).name, *(text for text, _ in run.cells()))
        for run in comparison.of_script(first.key)
    )
    parts = [f"Measured with {versions}. The script *{first.name}*, {allowed}:", _table(_COLUMNS, figures)]
    if len(comparison.scripts) > 1:
        faults = (
            (option.name, *(_faults(comparison, run) for run in comparison.of_option(option.key)))
            for option in comparison.options
        )
        parts += [
            f"What goes wrong in each script, {allowed}:",
            _table(("option", *(script.name for script in comparison.scripts)), faults),
            "+n: round trips over the budget. broken: OpenAI refuses the history that is left, or a request before.\n"
            "silent: there is no answer. unfinished: the budget ran out where another option finished. ·: nothing.",
        ]
    return "\n\n".join(parts)


def with_table(document: str, table: str) -> str:
    """Put a table between the markers of a document.

    Raises:
        ValueError: If the document does not have both markers, in order.
    """
    head, begins, rest = document.partition(TABLE_BEGINS)
    _, ends, tail = rest.partition(TABLE_ENDS)
    if not begins or not ends:
        raise ValueError(f"expected a document with the lines {TABLE_BEGINS} and {TABLE_ENDS}, in this order")
    return f"{head}{begins}\n\n{table}\n\n{ends}{tail}"


def _faults(comparison: Comparison, run: Run) -> str:
    over = [f"+{run.over_budget}"] if run.over_budget else []
    kinds = [finding.kind for finding in comparison.findings(run)]
    return ", ".join((*over, *(kind for kind in kinds if kind in _FAULTS))) or "·"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    alignment = [":--", *("--:" for _ in head[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, alignment, *rows))
