"""The table in the ADR is the one that the command makes."""

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from planner_ext.compare import Comparison
from planner_ext.compare.page import TABLE_BEGINS, TABLE_ENDS, markdown_of, with_table
from support.values import each_of

ADR = Path(__file__).parents[2] / "adr" / "0005-automatic-tool-calling-controls.md"
REFRESH = f"planner-ext compare --markdown adr/{ADR.name}"


def without_tokens(table: str) -> str:
    """Leave out the versions and the token columns, which depend on how Semantic Kernel describes functions."""
    rows = [
        line.split(" | ")
        for line in table.splitlines()
        if not line.startswith("Measured with")
    ]
    return "\n".join(
        " | ".join(row[:6] + row[8:] if len(row) == 11 else row) for row in rows
    )


def test_the_table_is_what_was_measured(comparison: Comparison) -> None:
    """A stale table fails; tokens are compared where Semantic Kernel is of the version that was measured with."""
    document = ADR.read_text("utf-8")
    stands = document.partition(TABLE_BEGINS)[2].partition(TABLE_ENDS)[0].strip()
    measured = markdown_of(comparison)
    if f"semantic-kernel {version('semantic-kernel')}," in stands:
        strip = re.compile(r"^Measured with .*?\. ", re.M)
        assert strip.sub("", stands) == strip.sub("", measured), (
            f"The table is stale: {REFRESH}"
        )
    assert without_tokens(stands) == without_tokens(measured), (
        f"The table is stale: {REFRESH}"
    )


def test_the_table_has_no_times(comparison: Comparison) -> None:
    """Nothing in it differs from one time to the next."""
    assert "second" not in markdown_of(comparison)


def test_a_document_keeps_all_but_its_table() -> None:
    """Only what stands between the markers is replaced, however often."""
    document = f"before\n{TABLE_BEGINS}\nold\n{TABLE_ENDS}\nafter\n"
    once = with_table(document, "| new |")
    assert once == f"before\n{TABLE_BEGINS}\n\n| new |\n\n{TABLE_ENDS}\nafter\n"
    assert with_table(once, "| new |") == once


@each_of("document", ["", TABLE_BEGINS, f"{TABLE_ENDS}{TABLE_BEGINS}"])
def test_a_document_without_markers_is_refused(document: str) -> None:
    """The markers are named."""
    with pytest.raises(ValueError, match="table: planner-ext compare"):
        with_table(document, "")
