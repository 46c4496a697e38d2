"""``planner-ext runs``: the runs of a store, listed, shown, resumed and cancelled."""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from planner_ext.cli.options import (
    RUN_EXIT_CODES,
    By,
    Exit,
    ExitCode,
    Json,
    ListArgs,
    MoreIterations,
    Store,
    StoredRunOptions,
    command,
)
from planner_ext.cli.store import opened_store, print_part, store_name
from planner_ext.cli.text import exact, moment_text, one_line, say, stderr_console, stdout_console, warnings_shown

if TYPE_CHECKING:
    from planner_ext.durable import RunRecord

__all__ = ["runs"]

runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, resume and cancel runs of a store.")

EXIT_CODES = """\b
Exit codes:
  0    done
  1    the run had ended before; nothing changed
  2    the store or the run cannot be used
"""

Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]


@command(runs, epilog=EXIT_CODES, name="list")
async def list_(args: ListArgs, status: Annotated[str | None, typer.Option(metavar="STATUS")] = None) -> int:
    """List runs, the ones that changed last first.

    Examples:
      planner-ext runs list --store runs.db --status paused

    Options:
        status: Only runs that are running, paused, answered, incomplete, limit_reached or stopped. Default: all.
    """
    async with opened_store(args.store) as store:
        with warnings_shown("planner_ext.durable"):
            records = await store.runs(status=status, limit=args.limit, offset=args.offset)
        total = await store.count_runs(status=status)
    print_part(len(records), limit=args.limit, offset=args.offset, total=total)
    if args.as_json:
        print(json.dumps([_document(record) for record in records], indent=2))
    elif not total:
        say(stderr_console(), f"No run{f' is {status}' if status else ''} in {store_name(args.store)}.")
    else:
        _print_runs(records)
    return ExitCode.ANSWERED


def _print_runs(records: list["RunRecord"]) -> None:
    console = stdout_console()
    names = max((len(exact(record.run_id)) for record in records), default=0)
    states = max((len(record.status) for record in records), default=0)
    for record in records:
        changed = moment_text(datetime.fromtimestamp(record.updated_at, UTC))
        name = (f"{exact(record.run_id):<{names}}", "bold")
        line = Text.assemble(name, f"  {record.status:<{states}}  {one_line(record.goal)}  ", (changed, "dim"))
        console.print(line, soft_wrap=True)


def _document(record: "RunRecord") -> dict[str, object]:
    times = {name: getattr(record, name) for name in ("wake_at", "created_at", "updated_at")}
    written = {name: at and datetime.fromtimestamp(at, UTC).isoformat() for name, at in times.items()}
    return {**asdict(record), **written}


@command(runs, epilog=EXIT_CODES)
def show(run: Name, store: Store, as_json: Json = False) -> Exit:
    """Show what happened in a run, what waits, and its answer.

    Examples:
      planner-ext runs show order-7 --store runs.db
    """
    from planner_ext.cli.stored_run import show_run  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    return show_run(run, store, as_json=as_json)


@command(runs, epilog=RUN_EXIT_CODES)
def resume(run: Name, store: Store, options: StoredRunOptions, max_iterations: MoreIterations = None) -> Exit:
    """Continue a run in this process, with what was decided meanwhile.

    Give it the kernel and the --policy or --ask-all that it began with: without these it is refused, and nothing runs.

    Examples:
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel --max-iterations 30
    """
    from planner_ext.cli.stored_run import resume_run  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    return resume_run(run, store, options, max_iterations=max_iterations)


@command(runs, epilog=EXIT_CODES)
def cancel(run: Name, store: Store, by: By, reason: Annotated[str, typer.Option(metavar="TEXT")] = "") -> Exit:
    """End a run for good, whatever process drives it; no waiting call runs.

    Examples:
      planner-ext runs cancel order-7 --store runs.db --reason 'too late'

    Options:
        reason: Why, for the record.
    """
    from planner_ext.cli.stored_run import cancel_run  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    return cancel_run(run, store, by=by, reason=reason)
