"""The commands and their groups; each imports its implementation, which takes seconds."""

from typing import Annotated

import typer

import planner_ext
from planner_ext.cli import options as cli
from planner_ext.cli.command import RUN, Exit, add_group, app, command
from planner_ext.cli.text import Terminal


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"planner-ext {planner_ext.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None: ...


@command(app)
def demo() -> Exit:
    """Show what the package does: offline, no key, seconds.

    First a model that never stops calling functions: Semantic Kernel's own loop and
    this package's side by side. Then a goal with a plan, functions that run at the same
    time, a failure and the way around it. Last a refund that a person decides, in
    processes of their own, one of which is killed.

    Examples:
      planner-ext demo

    Exit codes:
      0    every number agrees
      1    a number does not
    """
    from planner_ext.cli.demo import run_demo

    return run_demo(Terminal())


@command(app, exit_codes=RUN)
def run(goal: cli.GoalArgs, options: cli.RunOptions, by: cli.By) -> Exit:
    """Reach a GOAL with the functions of a kernel.

    Progress goes to stderr, the answer to stdout; without an answer, stdout stays
    empty. When calls wait for a decision, the terminal asks: approve, deny, edit,
    always or quit. The terminal asks the model's questions, too. What is left
    undecided, a run with --store leaves in its store, with exit code 4.

    Examples:
      planner-ext run "What does a lamp cost?" --kernel shop:make_kernel --model gpt-4o
      planner-ext run "Refund order 7." --kernel shop:make_kernel --ask-all --store runs.db
    """
    if goal.store is not None:
        from planner_ext.cli.drive import start_run

        return start_run(goal, goal.store, options, by=by)
    if goal.run_id is not None:
        problem = (
            f"it names a run in a store; give --store, too, or {cli.STORE_VARIABLE}."
        )
        raise typer.BadParameter(problem, param_hint="--run-id")
    from planner_ext.cli.run import run_goal

    return run_goal(goal, options, by=by)


@command(app)
def compare(args: cli.CompareArgs) -> Exit:
    """Compare ways to limit a tool-calling loop: the options of Semantic Kernel's ADR as written, and corrected.

    Offline, in seconds: a scripted model behind a real HTTP server that counts
    requests. With a real model (--base-url, --model or --kernel) round trips are
    counted at the connector; retries inside an SDK are not seen.

    Examples:
      planner-ext compare --only never-ending --max-iterations 3
      planner-ext compare --kernel shop:make_kernel --goal "What does a lamp cost?" --html page.html

    Exit codes:
      0    no corrected option made a round trip too many, broke a history or failed
      1    one did; what the other options do does not matter
      2    something on the command line or in the kernel cannot be used
      130  interrupted with Ctrl-C
    """
    from planner_ext.cli.compare import run_compare

    return run_compare(args)


@command(app)
def replay(args: cli.ReplayArgs) -> Exit:
    """Replay a recorded run of a planner without its model, and print the differences.

    No model is called. Calls are decided as in the recorded run: one that did not run
    then does not run now, and one that a person approved then returns its recorded
    result without being called.

    Examples:
      planner-ext replay tests/cassettes/refund.json
      planner-ext replay tests/cassettes/refund.json --kernel shop:make_kernel

    Exit codes:
      0    as recorded
      1    a prompt, a function's schema or a result differs
      2    the cassette or the kernel cannot be used
      130  interrupted with Ctrl-C
    """
    from planner_ext.cli.replay import replay_cassette

    return replay_cassette(args)


@command(app)
def worker(args: cli.WorkerArgs) -> Exit:
    """Continue runs whose process died, that a fault interrupted, that were decided, or whose question has expired.

    As many workers as wanted share a store. When a worker ends, however it ends, the
    others take its runs. On SIGTERM or Ctrl-C its calls in flight end first; a second
    signal ends it at once. A run that began with --policy or --ask-all is continued by
    a worker that has them, too; any other worker leaves it as it is.

    Examples:
      planner-ext worker --store runs.db --app shop:make_app
      planner-ext worker --store postgresql://ann@host/runs --app shop:make_app --once

    Exit codes:
      0    stopped by SIGTERM or Ctrl-C; with --once, nothing is left to do
      2    the store, the application, the policy or the worker's name cannot be used; with --once, a run began under a
           policy, --ask-all or interceptors that this worker lacks, and is left as it is
      3    with --once: a fault interrupted a run, which is kept; a later worker tries it again
    """
    from planner_ext.cli.drive import work

    return work(args)


@command(app)
def serve(args: cli.ServeArgs) -> Exit:
    """Serve the inbox of a store: web pages on which people decide waiting calls, and read runs.

    The printed address contains the token for signing in. The command needs no kernel
    and no functions.

    Examples:
      planner-ext serve --store runs.db
      planner-ext serve --store postgresql://ann@host/runs --host 0.0.0.0 --public-url https://inbox.example.com

    Exit codes:
      0    stopped by SIGTERM or Ctrl-C
      2    the store, the address or an option cannot be used
    """
    from planner_ext.cli.serve import serve_inbox

    return serve_inbox(args)


@command(app)
def workers(store: cli.Store, as_json: cli.Json = False) -> Exit:
    """List the workers of a store: which of them live, where, and which runs each drives.

    A worker lives if its process holds its lock and showed itself within its lease. One
    that died is listed for a day.

    Examples:
      planner-ext workers --store runs.db
    """
    from planner_ext.cli.runs import list_workers

    return list_workers(store, as_json=as_json)


@command(app)
def budgets(args: cli.BudgetArgs) -> Exit:
    """List what was used of the budgets that runs share, the newest periods first, or reset one of them.

    Examples:
      planner-ext budgets --store runs.db --budget 'per user'
      planner-ext budgets --store runs.db --budget 'per user' --key alice --reset
    """
    from planner_ext.cli.runs import show_budgets

    return show_budgets(args)


add_group(
    "runs",
    "planner_ext.cli.runs",
    "List, show, resume, retry, fork, cancel, delete, move and back up runs.",
)
add_group(
    "store",
    "planner_ext.cli.migrate",
    "Check and migrate the tables of a store, and set how long it keeps what has ended.",
)
add_group(
    "approvals",
    "planner_ext.cli.approvals",
    "List, show and decide the calls and questions that wait in a store; needs no kernel and no functions.",
)
