"""The commands; each imports its implementation when it is called, since importing Semantic Kernel is slow."""

import asyncio
import io
import sys
from typing import Annotated

import typer

from planner_ext.cli.approvals import approvals
from planner_ext.cli.options import (
    RUN_EXIT_CODES,
    STORE_VARIABLE,
    By,
    CompareArgs,
    Exit,
    GoalArgs,
    Json,
    ListArgs,
    MoreIterations,
    ResumeArgs,
    RunOptions,
    Store,
    StoredRunOptions,
    WorkerArgs,
    command,
)
from planner_ext.cli.text import stdout_console

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A bounded, interruptible, auditable agent loop for Semantic Kernel.",
)

runs = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show, resume and cancel runs of a store.")

RUNS_EXIT_CODES = """\b
Exit codes:
  0    done
  1    the run had ended before; nothing changed
  2    the store or the run cannot be used
"""

WORKER_EXIT_CODES = """\b
Exit codes:
  0    stopped by SIGTERM or Ctrl-C; with --once, nothing is left to do
  2    the store, the application, the policy or the worker's name cannot be used; with --once, a run began under a
       policy, --ask-all or interceptors that this worker lacks, and is left as it is
  3    with --once: a fault interrupted a run, which is kept
"""

COMPARE_EXIT_CODES = """\b
Exit codes:
  0    no corrected option made a round trip too many, broke a history or failed
  1    one did; what the other options do does not matter
  2    something on the command line or in the kernel cannot be used
  130  interrupted with Ctrl-C
"""

DEMO_EXIT_CODES = """\b
Exit codes:
  0    every number agrees
  1    a number does not
"""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415  (only this needs it)

        print(f"planner-ext {version('planner-ext')}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[  # noqa: ARG001  (its callback does it)
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? and the run continues


@command(app, epilog=DEMO_EXIT_CODES)
def demo() -> Exit:
    """Show what the package does: offline, no key, seconds.

    First a model that never stops calling functions: Semantic Kernel's own loop and this package's side by side. Then a
    goal with a plan, functions that run at the same time, a failure and the way around it. Last a refund that a person
    decides, in processes of their own, one of which is killed.

    Examples:
      planner-ext demo
    """
    from planner_ext.cli.demo import run_demo  # noqa: PLC0415  (see above)

    return 0 if asyncio.run(run_demo(stdout_console())) else 1


@command(app, epilog=RUN_EXIT_CODES)
def run(goal: GoalArgs, options: RunOptions) -> Exit:
    """Reach a GOAL with the functions of a kernel.

    Progress goes to stderr, the answer to stdout; without an answer, stdout stays empty. When calls wait for a
    decision, the terminal asks: approve, deny, edit, always or quit. The terminal asks the model's questions, too.

    Examples:
      planner-ext run "What does a lamp cost?" --kernel shop:make_kernel --model gpt-4o
      planner-ext run "Refund order 7." --kernel shop:make_kernel --ask-all --checkpoint run.json
    """
    if goal.store is not None:
        from planner_ext.cli.runs import start_run  # noqa: PLC0415  (see above)

        return start_run(goal, goal.store, options)
    if goal.run_id is not None:
        problem = f"it names a run in a store; give --store, too, or {STORE_VARIABLE}."
        raise typer.BadParameter(problem, param_hint="--run-id")
    from planner_ext.cli.run import run_goal  # noqa: PLC0415  (see above)

    return run_goal(goal, options)


@command(app, epilog=RUN_EXIT_CODES)
def resume(args: ResumeArgs, options: RunOptions) -> Exit:
    """Resume a run that is kept in FILE: paused, at its limit, or cut short.

    Give it the kernel and the --policy or --ask-all that it began with: a checkpoint holds none of them. Without a
    decision, a terminal asks. FILE is locked meanwhile: a second process is refused. It is written before a function
    starts, when a function has ended, at each pause and at the end. A call that had started when its process was killed
    is shown as in doubt: --approve runs it again, --answer gives the model its result, --deny leaves it in doubt.

    Examples:
      planner-ext resume run.json --kernel shop:make_kernel --ask-all --approve call_1
      planner-ext resume run.json --cancel 'too late'
    """
    from planner_ext.cli.resume import resume_run  # noqa: PLC0415  (see above)

    return resume_run(args, options)


@command(app, epilog=COMPARE_EXIT_CODES)
def compare(args: CompareArgs) -> Exit:
    """Compare ways to limit a tool-calling loop: the options of Semantic Kernel's ADR as written, and corrected.

    Offline, in seconds: a scripted model behind a real HTTP server that counts what it is asked. With a real model
    (--base-url, --model or --kernel) round trips are counted at the connector; retries inside an SDK are not seen.

    Examples:
      planner-ext compare --only never-ending --max-iterations 3
      planner-ext compare --kernel shop:make_kernel --goal "What does a lamp cost?" --html page.html
    """
    from planner_ext.cli.compare import run_compare  # noqa: PLC0415  (see above)

    return run_compare(args)


@command(app, epilog=WORKER_EXIT_CODES)
def worker(args: WorkerArgs) -> Exit:
    """Continue runs whose process died, that were decided, or whose question has expired.

    As many workers as wanted share a store. When a worker ends, however it ends, the others take its runs. A run that
    began with --policy or --ask-all is continued by a worker that has them, too; any other worker leaves it as it is.

    Examples:
      planner-ext worker --store runs.db --app shop:make_app
      planner-ext worker --store postgresql://ann@host/runs --app shop:make_app --once
    """
    from planner_ext.cli.worker import work  # noqa: PLC0415  (see above)

    return work(args)


RunName = Annotated[str, typer.Argument(metavar="RUN", help="The run's name.", show_default=False)]


@command(runs, epilog=RUNS_EXIT_CODES, name="list")
def list_(args: ListArgs, status: Annotated[str | None, typer.Option(metavar="STATUS")] = None) -> Exit:
    """List runs, the ones that changed last first.

    Examples:
      planner-ext runs list --store runs.db --status paused

    Options:
        status: Only runs that are running, paused, answered, incomplete, limit_reached or stopped. Default: all.
    """
    from planner_ext.cli.store import list_runs  # noqa: PLC0415  (see above)

    return list_runs(args, status=status)


@command(runs, epilog=RUNS_EXIT_CODES, name="show")
def show_run(run: RunName, store: Store, as_json: Json = False) -> Exit:
    """Show what happened in a run, what waits, and its answer.

    Examples:
      planner-ext runs show order-7 --store runs.db
    """
    from planner_ext.cli import runs as stored  # noqa: PLC0415  (see above)

    return stored.show_run(run, store, as_json=as_json)


@command(runs, epilog=RUN_EXIT_CODES, name="resume")
def resume_run(run: RunName, store: Store, options: StoredRunOptions, max_iterations: MoreIterations = None) -> Exit:
    """Continue a run in this process, with what was decided meanwhile.

    Give it the kernel and the --policy or --ask-all that it began with: without these it is refused, and nothing runs.

    Examples:
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel
      planner-ext runs resume order-7 --store runs.db --kernel shop:make_kernel --max-iterations 30
    """
    from planner_ext.cli import runs as stored  # noqa: PLC0415  (see above)

    return stored.resume_run(run, store, options, max_iterations=max_iterations)


@command(runs, epilog=RUNS_EXIT_CODES, name="cancel")
def cancel_run(run: RunName, store: Store, by: By, reason: Annotated[str, typer.Option(metavar="TEXT")] = "") -> Exit:
    """End a run for good, whatever process drives it; no waiting call runs.

    Examples:
      planner-ext runs cancel order-7 --store runs.db --reason 'too late'

    Options:
        reason: Why, for the record.
    """
    from planner_ext.cli import runs as stored  # noqa: PLC0415  (see above)

    return stored.cancel_run(run, store, by=by, reason=reason)


app.add_typer(runs, name="runs")
app.add_typer(approvals, name="approvals")
