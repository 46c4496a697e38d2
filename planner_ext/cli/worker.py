"""``planner-ext worker``: goes on with the runs of a store whenever there is something to do for one."""

from typing import Annotated

import typer

from planner_ext.cli.options import AskAll, Policy, Store

__all__ = ["EXIT_CODES", "worker"]

EXIT_CODES = """\b
Exit codes:
  0    told to end, by SIGTERM or Ctrl-C; or with --once, nothing is left to do
  2    the store, the application, the policy or the worker's name cannot be used; or with --once, a run began under
       a policy, --ask-all or interceptors that this worker lacks, and is left as it is
  3    with --once: a fault interrupted a run, which is kept
"""

AppPath = Annotated[
    str,
    typer.Option(
        "--app",
        metavar="MODULE:FACTORY",
        help="What drives the runs: a function without arguments, async or not, that returns (planner, kernel), or "
        "(planner, kernel, arguments_for) with a function that gives a run's arguments by its name. A kernel alone "
        "gets a planner with default options. The current directory is importable.",
    ),
]
Once = Annotated[bool, typer.Option("--once", help="Do what is due now, and end.")]
WorkerId = Annotated[
    str | None, typer.Option(metavar="NAME", help="This worker's name; no two that live may share one.")
]
AtOnce = Annotated[int, typer.Option("--max-concurrency", metavar="N", min=1, help="How many runs go on at once.")]


def worker(  # noqa: PLR0917  (options by name on the command line)
    store: Store,
    app: AppPath,
    once: Once = False,
    worker_id: WorkerId = None,
    max_concurrency: AtOnce = 100,
    policy: Policy = None,
    ask_all: AskAll = False,
) -> None:
    """Continue runs whose process died, that were decided, or whose question has expired.

    As many workers as wanted share a store. One that ends, however it ends, leaves its runs to the others. A run that
    began with --policy or --ask-all is continued by a worker that has them, too; another one leaves it as it is.
    """
    from planner_ext.cli.durable_store import told  # noqa: PLC0415  (only where it is called)
    from planner_ext.cli.durable_worker import Shift, work  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    shift = Shift(
        store=store,
        app=app,
        once=once,
        worker_id=worker_id,
        max_concurrency=max_concurrency,
        policy=policy,
        ask_all=ask_all,
    )
    raise typer.Exit(told(lambda: work(shift)))
