"""The commands and their options; each hands over to a module of its own, imported when it is called."""

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

from planner_ext.cli.approvals import approvals
from planner_ext.cli.compare import EXIT_CODES as COMPARE_EXIT_CODES
from planner_ext.cli.compare import compare
from planner_ext.cli.options import (
    EXIT_CODES,
    STORE_VARIABLE,
    Answers,
    Approvals,
    AskAll,
    BaseUrl,
    By,
    Cancel,
    CheckpointPath,
    Denials,
    Edits,
    GoalText,
    Json,
    KeptIn,
    KernelPath,
    MaxIterations,
    MaxToolCalls,
    Model,
    MoreIterations,
    Plan,
    Policy,
    Questions,
    ResumedFile,
    RunId,
    Stream,
    Timeout,
    decider,
)
from planner_ext.cli.runs import runs
from planner_ext.cli.worker import EXIT_CODES as WORKER_EXIT_CODES
from planner_ext.cli.worker import worker

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A bounded, interruptible, auditable agent loop for Semantic Kernel.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? and the run goes on


@app.command()
def demo() -> None:
    """Show what the package does: offline, no key, seconds.

    First a model that never stops calling functions: Semantic Kernel's own loop and this package's side by side. Then a
    goal with a plan, functions that run at the same time, a failure and the way around it. Last a refund that a person
    decides, in processes of their own, one of which is killed.
    """
    import asyncio  # noqa: PLC0415  (with what needs it)

    from planner_ext.cli.demo import run_demo  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    agrees = asyncio.run(run_demo(Console(markup=False, highlight=False, emoji=False)))
    raise typer.Exit(0 if agrees else 1)


@app.command(epilog=EXIT_CODES)
def run(  # noqa: PLR0917  (options by name on the command line)
    goal: GoalText,
    kernel: KernelPath = None,
    base_url: BaseUrl = None,
    model: Model = None,
    max_iterations: MaxIterations = 15,
    max_tool_calls: MaxToolCalls = None,
    questions: Questions = None,
    plan: Plan = None,
    timeout: Timeout = None,
    policy: Policy = None,
    ask_all: AskAll = False,
    checkpoint: CheckpointPath = None,
    store: KeptIn = None,
    run_id: RunId = None,
    by: By = None,
    stream: Stream = True,
    as_json: Json = False,
) -> None:
    """Reach a GOAL with the functions of a kernel.

    Progress goes to stderr, the answer to stdout; without an answer, stdout stays empty. When calls wait for a
    decision, the terminal asks: approve, deny, edit, always or quit. Questions of the model are asked there, too.
    """
    from planner_ext.cli.journey import Setup  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.cli.run import Goal, run_goal  # noqa: PLC0415  (likewise)

    setup = Setup(
        kernel=kernel,
        base_url=base_url,
        model=model,
        policy=policy,
        ask_all=ask_all,
        by=decider(by),
        stream=stream and store is None,
        as_json=as_json,
    )
    asked = Goal(
        text=goal,
        max_iterations=max_iterations,
        max_tool_calls=max_tool_calls,
        questions=questions,
        plan=plan,
        timeout=timeout,
        checkpoint=checkpoint,
    )
    if store is None and run_id is None:
        raise typer.Exit(run_goal(asked, setup))
    from planner_ext.cli.durable_run import Kept, start_kept  # noqa: PLC0415  (likewise)

    if store is None:
        problem = f"it names a run in a store; give --store, too, or {STORE_VARIABLE}."
        raise typer.BadParameter(problem, param_hint="--run-id")
    raise typer.Exit(start_kept(asked, Kept(store=store, run_id=run_id), setup))


@app.command(epilog=EXIT_CODES)
def resume(  # noqa: PLR0917  (options by name on the command line)
    file: ResumedFile,
    kernel: KernelPath = None,
    base_url: BaseUrl = None,
    model: Model = None,
    approve: Approvals = None,
    deny: Denials = None,
    edit: Edits = None,
    answer: Answers = None,
    cancel: Cancel = None,
    max_iterations: MoreIterations = None,
    policy: Policy = None,
    ask_all: AskAll = False,
    by: By = None,
    stream: Stream = True,
    as_json: Json = False,
) -> None:
    """Resume a run that is kept in FILE: paused, at its limit, or cut short.

    Give it the kernel, and the --policy or --ask-all, that it was begun with: a checkpoint holds none of them. Without
    a decision, a terminal asks. FILE is locked meanwhile: a second process is refused. It is written before a function
    starts, when one has ended, at each pause and at the end. A call that had started when its process was killed is
    shown as in doubt: --approve runs it again, --answer gives the model its result, --deny leaves it with the doubt.
    """
    from planner_ext.cli.journey import Setup  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.cli.resume import Continuation, resume_run  # noqa: PLC0415  (likewise)

    setup = Setup(
        kernel=kernel,
        base_url=base_url,
        model=model,
        policy=policy,
        ask_all=ask_all,
        by=decider(by),
        stream=stream,
        as_json=as_json,
    )
    given = Continuation(
        file=file,
        approve=approve or (),
        deny=deny or (),
        edit=edit or (),
        answer=answer or (),
        cancel=cancel,
        max_iterations=max_iterations,
    )
    raise typer.Exit(resume_run(given, setup))


app.command(epilog=COMPARE_EXIT_CODES)(compare)
app.command(epilog=WORKER_EXIT_CODES)(worker)
app.add_typer(runs, name="runs")
app.add_typer(approvals, name="approvals")
