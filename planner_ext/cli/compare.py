"""``planner-ext compare``: measures with `planner_ext.compare`, and prints the tables."""

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, nullcontext, redirect_stdout
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner_ext.cli.kernels import (
    imported_object,
    kernel_of,
    openai_service,
    start_factory,
)
from planner_ext.cli.options import CompareArgs
from planner_ext.cli.text import Terminal
from planner_ext.compare import (
    Comparison,
    Live,
    OptionInfo,
    Run,
    Scenario,
    ScriptInfo,
    run_comparison,
)
from planner_ext.compare.page import markdown_of, page_of, with_table
from planner_ext.compare.peers import peer_options
from planner_ext.compare.process import measure_costs
from planner_ext.compare.scenarios import SCRIPTS
from planner_ext.compare.strategies import OPTIONS
from planner_ext.compare.trial import option_of
from planner_ext.core.errors import counted, seconds
from planner_ext.core.text import one_line
from planner_ext.errors import PlannerInvalidConfigurationError


def run_compare(args: CompareArgs) -> int:
    """Compare, write and print the results."""
    errors = Terminal(sys.stderr)
    try:
        _check(args)
        # The output of a kernel's own code must not mix with a document.
        with redirect_stdout(sys.stderr):
            comparison = _measure(args, errors)
        if args.html is not None:
            args.html.write_text(page_of(comparison), "utf-8", errors="replace")
        if args.markdown is not None:
            document = with_table(
                args.markdown.read_text("utf-8"), markdown_of(comparison)
            )
            args.markdown.write_text(document, "utf-8", errors="replace")
    except (OSError, ValueError) as error:
        raise PlannerInvalidConfigurationError(str(error)) from error
    if args.as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        print_comparison(Terminal(), comparison, details=args.details)
    for file in filter(None, (args.html, args.markdown)):
        errors.print(f"Written: {file}", style="dim", soft_wrap=True)
    return 0 if comparison.holds else 1


def _check(args: CompareArgs) -> None:
    """Check before the measurement what would fail after it."""
    if (args.kernel is None) != (args.goal is None):
        given, missing = (
            ("--kernel", "--goal") if args.goal is None else ("--goal", "--kernel")
        )
        raise PlannerInvalidConfigurationError(
            f"{given} needs {missing}: your own kernel is asked for your own goal."
        )
    for key in args.only or ():
        if key not in OPTIONS and key not in SCRIPTS:
            raise PlannerInvalidConfigurationError(
                f"--only {key}: there is neither such an option ({', '.join(OPTIONS)}) nor such a script "
                f"({', '.join(SCRIPTS)}). Your own --option and --script always take part."
            )
    html = args.html
    if html is not None and not html.parent.is_dir():
        raise PlannerInvalidConfigurationError(
            f"--html {html}: there is no directory {html.parent}."
        )
    if args.markdown is not None:
        try:
            with_table(args.markdown.read_text("utf-8"), "")
        except ValueError as error:
            raise PlannerInvalidConfigurationError(
                f"--markdown {args.markdown}: {error}"
            ) from None


def _measure(args: CompareArgs, console: Console) -> Comparison:
    made = None
    if args.kernel is not None:
        made = start_factory(args.kernel)
    options = [
        option_of(imported_object(path, option="--option"), path)
        for path in args.option or ()
    ]
    options += peer_options(
        args.peer or [],
        tell=lambda text: console.print(text, style="dim", soft_wrap=True),
    )
    scripts = [_own_script(path) for path in args.script or ()]
    status = (
        console.status("compares", spinner="line") if console.is_interactive else None
    )

    def progress(done: int, total: int, name: str) -> None:
        if status is not None:
            status.update(f"{done} of {total}: {name}")
        elif done % _NEWS == 0:
            console.print(f"{done} of {total} runs", style="dim")

    only = args.only or ()
    own_options = [key for key in only if key in OPTIONS]
    own_scripts = [key for key in only if key in SCRIPTS]

    async def run() -> Comparison:
        async with AsyncExitStack() as stack:
            comparison = await run_comparison(
                max_iterations=args.max_iterations,
                options=[*own_options, *options],
                scripts=[*own_scripts, *scripts],
                live=await _live(args, made, stack),
                progress=progress,
            )
            if not args.cost:
                return comparison
            compared = {option.key for option in comparison.options}
            measured = [option for key, option in OPTIONS.items() if key in compared]
            costs = await measure_costs([*measured, *options])
            return replace(comparison, costs=costs)

    with status or nullcontext():
        return asyncio.run(run())


def _own_script(path: str) -> Scenario:
    found = imported_object(path, option="--script")
    if not isinstance(found, Scenario):
        raise PlannerInvalidConfigurationError(
            f"--script {path} must be made with planner_ext.compare.scenario; got {type(found).__name__}."
        )
    return found


async def _live(args: CompareArgs, made: object, stack: AsyncExitStack) -> Live | None:
    service = None
    if args.base_url is not None or args.model is not None:
        service = openai_service(args.base_url, args.model)
        stack.push_async_callback(service.client.close)
    kernel = None
    if args.kernel is not None:
        kernel = await kernel_of(made, args.kernel)
    return (
        Live(kernel=kernel, service=service, goal=args.goal)
        if kernel or service
        else None
    )


_NEWS = 25
"""Runs between two lines of progress, without a terminal."""
_WIDE = 88
"""Columns in which the options' whole names fit; narrower terminals get short names."""

_BAD = "bold red"
_POOR = "yellow"
_GOOD = "green"
_QUIET = "dim"
_STYLES = {"bad": _BAD, "poor": _POOR, "": ""}


def print_comparison(
    console: Console, comparison: Comparison, *, details: bool = True
) -> None:
    """Print a summary, the verdict and, on request, a table for each script."""
    if len(comparison.scripts) > 1:
        _print_summary(console, comparison)
    if details or len(comparison.scripts) == 1:
        for script in comparison.scripts:
            _print_script(console, comparison, script)
        console.print(Text(_LEGEND, _QUIET), "")
    if comparison.costs:
        _print_costs(console, comparison)
    for sentence in comparison.verdict:
        console.print(Padding(Text(sentence), (0, 0, 0, 2)))
    _print_verdict(console, comparison)
    took = f"{counted(len(comparison.runs), 'run')} in {seconds(comparison.wall_seconds)} seconds"
    console.print(Text(one_line(f"Answered by {comparison.endpoint}. {took}."), _QUIET))


_LEGEND = (
    "1, 2, 3: the ADR's options as written; 2 + callback: with the callback of 3; corr.: corrected, with "
    "planner_ext; 3 alone: the callback without a budget; stock: Semantic Kernel's loop under a planner; stock alone: "
    "that loop at its best; old: the removed planner; loop: written by hand. trips: requests that the endpoint "
    "answered; +over: those beyond the budget. charged: trips by the option's own count. tools: functions started; "
    "+past: those whose result no trip could read. tokens summed: of all trips; told: reported to the caller. history "
    "valid: each call has exactly one result."
)


def _print_costs(console: Console, comparison: Comparison) -> None:
    console.print(Text("Processor time of a round trip, milliseconds", "bold"))
    table = _table(console)
    for trips in comparison.costs[0].round_trips:
        table.add_column(f"{trips} trips" if trips > 1 else "1 trip", justify="right")
    for cost in comparison.costs:
        figures = [f"{figure:.1f}" for figure in cost.milliseconds] or [
            one_line(cost.error)
        ]
        name = _name(console, comparison.option(cost.option))
        table.add_row(name, *figures)
    console.print(table, "")


def _print_script(console: Console, comparison: Comparison, script: ScriptInfo) -> None:
    console.print(Text.assemble((script.name, "bold"), (f"  {script.about}", _QUIET)))
    if script.entitled:
        console.print(Text(f"{script.entitled} ({script.source})", _QUIET))
    table = _table(console)
    for head in (
        "trips\n+over",
        "charged",
        "tools\n+past",
        "tokens\nsummed",
        "tokens\ntold",
    ):
        table.add_column(head, justify="right", no_wrap=True)
    for head in ("status", "answer", "history"):
        table.add_column(head, no_wrap=True)
    table.add_column("sec", justify="right", no_wrap=True)
    runs = [run for run in comparison.of_script(script.key) if run.offered]
    for run in runs:
        name = _name(console, comparison.option(run.option))
        table.add_row(name, *_figures(run))
    console.print(table)
    for run in runs:
        if note := _note(run):
            name = _name(console, comparison.option(run.option)).plain
            text = Text.assemble((f"{name}: ", "bold"), (one_line(note), "red"))
            console.print(Padding(text, (0, 0, 0, 2)))
    console.print()


def _table(console: Console) -> Table:
    """Begin a table, of which only the options' column may wrap."""
    gap = 1 if console.width >= _WIDE else 0  # in addition to the one of the box itself
    table = Table(
        box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column("option", overflow="fold")
    return table


def _name(console: Console, option: OptionInfo) -> Text:
    name = option.name if console.width >= _WIDE else option.short
    return Text(name, "bold" if option.corrected else "")


def _figures(run: Run) -> list[Text]:
    words = {"nothing": "-", "broken": "BROKEN"}
    cells = [
        Text(words.get(cell.text, cell.text), _STYLES[cell.level])
        for cell in run.cells()
    ]
    trips = _with_excess(run.trips, run.over_budget)
    tools = _with_excess(run.tools_run, run.tools_past_budget)
    took = Text(seconds(run.wall_seconds), _QUIET)
    return [trips, cells[2], tools, *cells[5:], took]


def _with_excess(number: int, excess: int) -> Text:
    return Text.assemble(
        (str(number), _BAD if excess else ""),
        (f"{f'+{excess}' if excess else '':>4}", _BAD),
    )


def _note(run: Run) -> str:
    parts = [run.first_violation]
    if run.refused:
        parts.append(
            f"OpenAI would refuse {len(run.refused)} of the {run.trips} requests"
        )
    parts += [*run.breaches, run.error]
    return "; ".join(part.rstrip(".") for part in parts if part)


def _print_summary(console: Console, comparison: Comparison) -> None:
    """Print a row for each script, a column for each option."""
    plain = not console.encoding.lower().startswith("utf")
    broken, silent, unfinished, fine = (
        ("X", "0", "~", ".") if plain else ("✗", "∅", "~", "·")
    )
    signs = {
        "breach": ("!", _BAD),
        "broken": (broken, _BAD),
        "failed": (broken, _BAD),
        "silent": (silent, _POOR),
        "unfinished": (unfinished, _POOR),
    }

    def faults(run: Run) -> Text:
        if not run.offered:
            return Text("-", _QUIET)
        over = [(f"+{run.over_budget}", _BAD)] if run.over_budget else []
        kinds = [finding.kind for finding in comparison.findings(run)]
        others = [signs[kind] for kind in kinds if kind in signs]
        found = dict.fromkeys([*over, *others])
        return Text.assemble(*(found or [(fine, _GOOD)]))

    console.print(
        Text(
            f"What goes wrong, with {comparison.max_iterations} round trips allowed",
            "bold",
        )
    )
    columns = [
        [_head(option), *map(faults, comparison.of_option(option.key))]
        for option in comparison.options
    ]
    titles = [Text(one.name) for one in comparison.scripts]
    situations = [Text("situation"), *titles]
    for some in _fitting(columns, console.width - _width(situations)):
        table = Table(
            box=box.SIMPLE_HEAD, padding=(0, 0, 0, 0), pad_edge=False, show_edge=False
        )
        heads, *rows = zip(situations, *some, strict=True)
        table.add_column(heads[0], no_wrap=True)
        for head in heads[1:]:
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    names = ", ".join(
        f"{option.short}: {option.name}"
        for option in comparison.options
        if option.short != option.name
    )
    legend = (
        f"+n  round trips over the budget     {broken}  history broken, or failed     !  another promise broken\n"
        f"{silent}  no answer     {unfinished}  budget used up, another option finished     -  not offered     "
        f"{fine}  nothing wrong\n{names}"
    )
    console.print(Padding(Text(legend, _QUIET), (0, 0, 1, 2)))


def _head(option: OptionInfo) -> Text:
    """Head a column with a word a line."""
    words = option.short.replace(" ", "\n")
    return Text(words, "bold" if option.corrected else "")


def _width(column: Sequence[Text]) -> int:
    lines = (line for cell in column for line in cell.plain.split("\n"))
    return max(map(cell_len, lines))


def _fitting(columns: Sequence[list[Text]], width: int) -> Iterator[list[list[Text]]]:
    """Divide columns among tables, so that no word and no sign is broken."""
    some = list[list[Text]]()
    left = width
    for column in columns:
        needed = _width(column) + 1
        if some and needed > left:
            yield some
            some = []
            left = width
        some.append(column)
        left -= needed
    yield some


def _print_verdict(console: Console, comparison: Comparison) -> None:
    style = (
        ("bold green" if comparison.holds else _BAD)
        if comparison.corrected_runs
        else _POOR
    )
    console.print(Text(comparison.summary, style))
    for failure in comparison.failures:
        console.print(Text(one_line(failure), _BAD))
