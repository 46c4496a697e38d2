"""How the parts of the demo are set: titles, paragraphs, tables, and numbers beside what somebody else counted."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner_ext.cli.show import Signs
from planner_ext.cli.text import TextFlow

__all__ = ["Ledger", "paragraph", "table", "title"]


class Ledger:
    """What a run was charged, beside what others counted."""

    def __init__(self, rows: Sequence[tuple[str, int, str, int]]) -> None:
        """Take lines of: what is counted, what was charged, who else counted, and what."""
        self._rows = rows

    @property
    def agrees(self) -> bool:
        """Whether every number is what somebody else counted."""
        return all(charged == counted for _, charged, _, counted in self._rows)

    def table(self, signs: Signs) -> Table:
        """Write it down, a line for each number."""
        grid = Table.grid(padding=(0, 1))
        for justify in ("left", "left", "right", "left", "left", "right"):
            grid.add_column(justify=justify)
        for name, charged, who, counted in self._rows:
            sign = Text(signs.good, "green") if charged == counted else Text(signs.bad, "red")
            grid.add_row(f"{name}  ", "charged", f"{charged:,}", sign, f"{who} counted", f"{counted:,}")
        return grid


def title(console: Console, number: str, text: str) -> None:
    """Print the head of a part."""
    console.print(Text.assemble((f" {number} ", "reverse"), "  ", (text, "bold")))


def paragraph(console: Console, text: str, *, style: str = "", indent: int = 2, after: bool = True) -> None:
    """Print a text, wrapped, with an empty line after it unless that is not wanted."""
    flow = TextFlow(console, width=min(console.width, 100), indent=indent, style=style)
    flow.write(text)
    flow.close()
    if after:
        console.print()


def table(console: Console, rows: Table) -> None:
    """Print a table between empty lines."""
    console.print()
    console.print(Padding(rows, (0, 0, 0, 2), expand=False))
    console.print()
