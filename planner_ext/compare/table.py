"""A comparison in the terminal: a table for each script, then where each option goes wrong, then the verdict.

Wide terminals get whole names, narrow ones (80 columns) short ones; nothing is cut. Needs rich, which comes with the
extra ``planner-ext[cli]``.
"""

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner_ext.compare.comparison import Comparison, OptionInfo, Run, ScriptInfo
from planner_ext.compare.words import counted, ending, one_line, seconds

__all__ = ["print_comparison"]

_ROOM_FOR_NAMES = 88
"""Columns from which the options' whole names fit."""

_BAD, _POOR, _GOOD, _QUIET = "bold red", "yellow", "green", "dim"


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print all of it; what matters most comes last, where the reader's eye is."""
    page = _Page(console, comparison)
    for script in comparison.scripts:
        page.script(script)
    page.legend()
    if len(comparison.scripts) > 1:
        page.summary()
    page.verdict()


class _Page:
    def __init__(self, console: Console, comparison: Comparison) -> None:
        self._console = console
        self._comparison = comparison
        self._wide = console.width >= _ROOM_FOR_NAMES
        plain = not console.encoding.lower().startswith("utf")
        self._broken, self._silent, self._unfinished, self._fine = (
            ("X", "0", "~", ".") if plain else ("✗", "∅", "~", "·")
        )

    def script(self, script: ScriptInfo) -> None:
        """Print what the options did with one script, and below it what is wrong with their histories."""
        runs = self._comparison.of_script(script.key)
        self._console.print(Text.assemble((script.name, "bold"), (f"  {script.about}", _QUIET)))
        table = self._table()
        for head in ("trips\n+over", "charged", "tools\n+past", "tokens\nsummed", "tokens\ntold"):
            table.add_column(head, justify="right", no_wrap=True)
        for head in ("status", "answer", "history"):
            table.add_column(head, no_wrap=True)
        table.add_column("sec", justify="right", no_wrap=True)
        for run in runs:
            table.add_row(*self._cells(run))
        self._console.print(table)
        for run in runs:
            if note := _note(run):
                name = self._name(self._comparison.option(run.option))
                self._console.print(
                    Padding(Text.assemble((f"{name}: ", "bold"), (one_line(note), "red")), (0, 0, 0, 2))
                )
        self._console.print()

    def legend(self) -> None:
        """Say what the columns count."""
        allowed = self._comparison.max_iterations
        lines = (
            f"trips: requests that the endpoint answered, +over: of them beyond the budget of {allowed}. charged: what "
            "the option believes. tools: functions started, +past: of them when no trip was left to read the result. "
            "tokens summed: of all trips, told: to the option's caller. history valid: every call has its one result."
        )
        self._console.print(Text(lines, _QUIET))
        self._console.print(Text(one_line(f"Answered by {self._comparison.endpoint}."), _QUIET))
        self._console.print()

    def summary(self) -> None:
        """Print where each option goes wrong, all scripts side by side."""
        allowed = self._comparison.max_iterations
        self._console.print(Text(f"What goes wrong, with {allowed} round trips allowed", "bold"))
        table = self._table()
        for script in self._comparison.scripts:
            table.add_column(script.short, justify="right", no_wrap=True)
        for option in self._comparison.options:
            cells = [self._fault(run) for run in self._comparison.of_option(option.key)]
            table.add_row(Text(self._name(option), "bold" if option.corrected else ""), *cells)
        self._console.print(table)
        signs = (
            f"+n  round trips over the budget     {self._broken}  history broken     {self._silent}  no answer",
            f"{self._unfinished}  ran out where another option finished     {self._fine}  nothing wrong",
        )
        self._console.print(Padding(Text("\n".join(signs), _QUIET), (0, 0, 1, 2)))

    def verdict(self) -> None:
        """Say whether the corrected options keep what they promise."""
        corrected = {option.key for option in self._comparison.options if option.corrected}
        runs = sum(run.option in corrected for run in self._comparison.runs)
        if not runs:
            self._console.print(Text("No corrected option was compared.", _POOR))
        elif self._comparison.holds:
            text = f"The corrected options: none over budget, no history broken, in {counted(runs, 'run')}"
            self._console.print(
                Text(f"{text} ({seconds(self._comparison.wall_seconds)} s for everything).", "bold green")
            )
        for failure in self._comparison.failures:
            self._console.print(Text(one_line(failure), _BAD))

    def _name(self, option: OptionInfo) -> str:
        return option.name if self._wide else option.short

    def _cells(self, run: Run) -> list[Text]:
        option = self._comparison.option(run.option)
        told = "-" if run.tokens_told is None else f"{run.tokens_told:,}"
        return [
            Text(self._name(option), "bold" if option.corrected else ""),
            _with_excess(run.trips, run.over_budget),
            Text(str(run.charged), "" if run.charged == run.trips else _POOR),
            _with_excess(run.tools_run, run.tools_past_budget),
            Text(f"{run.tokens_summed:,}"),
            Text(told, "" if run.tokens_told == run.tokens_summed else _POOR),
            Text(ending(run.status), _BAD if run.status == "failed" else ""),
            Text("yes", "") if run.answer else Text("no", _POOR),
            Text("valid", "") if run.history_valid else Text("BROKEN", _BAD),
            Text(seconds(run.wall_seconds), _QUIET),
        ]

    def _fault(self, run: Run) -> Text:
        signs: list[tuple[str, str]] = []
        if run.over_budget:
            signs.append((f"+{run.over_budget}", _BAD))
        if run.broken or run.status == "failed":
            signs.append((self._broken, _BAD))
        if not run.answer:
            signs.append((self._silent, _POOR))
        elif self._comparison.unfinished(run):
            signs.append((self._unfinished, _POOR))
        return Text.assemble(*signs) if signs else Text(self._fine, _GOOD)

    def _table(self) -> Table:
        """Begin a table with the options' column, the only one that may wrap."""
        gap = 1 if self._wide else 0  # beside the one that the box itself has
        table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False)
        table.add_column("option", overflow="fold")
        return table


def _with_excess(number: int, excess: int) -> Text:
    """Write a number, and the part of it that is too much in a place of its own."""
    return Text.assemble((str(number), _BAD if excess else ""), (f"{f'+{excess}' if excess else '':>4}", _BAD))


def _note(run: Run) -> str:
    """Say what is wrong with a history, and why a run failed."""
    more = len(run.violations) - 1
    parts = [run.first_violation + (f" (and {more} more)" if more > 0 else "")]
    if run.refused:
        parts.append(f"OpenAI would refuse {len(run.refused)} of the {run.trips} requests")
    parts.append(run.error)
    return "; ".join(part for part in parts if part)
