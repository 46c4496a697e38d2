"""A comparison as Markdown for a document: the first script in full, and the faults in all scripts.

The text is the same each time, so that a test can detect a stale document. The template is ``table.md.jinja``.
"""

from planner_ext.compare.page import TEMPLATES
from planner_ext.compare.report import Comparison

TABLE_BEGINS = "<!-- table: planner-ext compare -->"
TABLE_ENDS = "<!-- /table -->"


def markdown_of(comparison: Comparison) -> str:
    """Write the tables, without wall times."""
    return TEMPLATES.get_template("compare/table.md.jinja").render(comparison=comparison)


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
