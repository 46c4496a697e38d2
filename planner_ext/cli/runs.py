"""``planner-ext runs``: the runs of a store, listed, shown, resumed and cancelled."""

import asyncio
from typing import Annotated

import typer

from planner_ext.cli.options import (
    EXIT_CODES,
    AskAll,
    BaseUrl,
    By,
    Json,
    JsonDocument,
    KernelPath,
    Limit,
    Model,
    MoreIterations,
    Offset,
    Policy,
    Store,
    decider,
)

__all__ = ["runs"]

runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, resume and cancel kept runs.")

Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]
Status = Annotated[
    str | None,
    typer.Option(
        metavar="STATUS", help="Only runs that are running, paused, answered, incomplete, limit_reached or stopped."
    ),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why, for the record.")]


@runs.command("list")
def list_(
    store: Store, status: Status = None, limit: Limit = 50, offset: Offset = 0, as_json: JsonDocument = False
) -> None:
    """List runs, those that moved last first."""
    from planner_ext.cli.durable_runs import list_runs  # noqa: PLC0415  (only where it is called)
    from planner_ext.cli.durable_store import told  # noqa: PLC0415  (likewise)

    raise typer.Exit(
        told(lambda: asyncio.run(list_runs(store, status=status, limit=limit, offset=offset, as_json=as_json)))
    )


@runs.command()
def show(run: Name, store: Store, as_json: Json = False) -> None:
    """Show what happened in a run, what waits, and its answer."""
    from planner_ext.cli.durable_run import show_run  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.cli.durable_store import told  # noqa: PLC0415  (likewise)

    raise typer.Exit(told(lambda: show_run(run, store, as_json=as_json)))


@runs.command(epilog=EXIT_CODES)
def resume(  # noqa: PLR0917  (options by name on the command line)
    run: Name,
    store: Store,
    kernel: KernelPath = None,
    base_url: BaseUrl = None,
    model: Model = None,
    max_iterations: MoreIterations = None,
    policy: Policy = None,
    ask_all: AskAll = False,
    as_json: Json = False,
) -> None:
    """Continue a run here, with what was decided meanwhile.

    Give it the kernel that it began with, and its --policy or --ask-all: without these it is refused, and nothing runs.
    """
    from planner_ext.cli.durable_run import Kept, resume_kept  # noqa: PLC0415  (Semantic Kernel takes its time)
    from planner_ext.cli.journey import Setup  # noqa: PLC0415  (likewise)

    setup = Setup(
        kernel=kernel, base_url=base_url, model=model, policy=policy, ask_all=ask_all, stream=False, as_json=as_json
    )
    raise typer.Exit(resume_kept(Kept(store=store, run_id=run), setup, max_iterations=max_iterations))


@runs.command()
def cancel(run: Name, store: Store, reason: Reason = "", by: By = None) -> None:
    """End a run for good, whoever drives it; nothing that waits is run."""
    from planner_ext.cli.durable_run import cancel_kept  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.cli.durable_store import told  # noqa: PLC0415  (likewise)

    raise typer.Exit(told(lambda: asyncio.run(cancel_kept(run, store, by=decider(by), reason=reason))))
