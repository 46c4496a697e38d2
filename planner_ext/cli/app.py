"""The commands and their options; each hands over to a module of its own, imported when it is called."""

import io
import sys
from importlib.metadata import version
from typing import Annotated

import typer
from rich.console import Console

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows ? and the run goes on


@app.command()
def demo() -> None:
    """Show what the package does: offline, no key, seconds.

    First a model that never stops calling functions: Semantic Kernel's own loop and this package's side by side. Then a
    goal with a plan, functions that run at the same time, a failure and the way around it.
    """
    import asyncio  # noqa: PLC0415

    from planner_ext.cli.demo import run_demo  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    agrees = asyncio.run(run_demo(Console(markup=False, highlight=False, emoji=False)))
    raise typer.Exit(0 if agrees else 1)


_EXIT_CODES = """\b
Exit codes:
  0    answered
  1    ended without: a limit, the timeout, a pause, a reply cut short
  2    something on the command line or in the kernel cannot be used
  3    a fault, such as a failed request
  130  interrupted with Ctrl-C
"""


@app.command(epilog=_EXIT_CODES)
def run(  # noqa: PLR0917  (options by name on the command line)
    goal: Annotated[str, typer.Argument(metavar="GOAL", help="What is to be reached.", show_default=False)],
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Where the kernel comes from: a function without arguments, async or not, that returns one, or a "
            "Kernel. The current directory is importable. Left out: no functions, the model can only talk.",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="An OpenAI-compatible endpoint, such as http://localhost:8000/v1. Left out: OPENAI_BASE_URL, or "
            "OpenAI itself.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The model. With neither --model nor --base-url the kernel's own service is used. The key is "
            "OPENAI_API_KEY; an endpoint on this machine needs none.",
        ),
    ] = None,
    max_iterations: Annotated[
        int,
        typer.Option(
            metavar="N", help="Most requests to the model, plan and answer included. The last offers no functions."
        ),
    ] = 15,
    max_tool_calls: Annotated[
        int | None, typer.Option(metavar="N", help="Most function calls, failed ones included.")
    ] = None,
    plan: Annotated[
        bool | None,
        typer.Option("--plan/--no-plan", help="Ask for a plan first. Left out: where the kernel has functions."),
    ] = None,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Show text while it arrives.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as one JSON document on stdout.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Stop the run after this time; its history is kept.")
    ] = None,
) -> None:
    """Reach a GOAL with the functions of a kernel.

    Progress goes to stderr, the answer to stdout; without an answer, stdout stays empty.
    """
    from planner_ext.cli.run import Goal, run_goal  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    asked = Goal(
        text=goal,
        kernel=kernel,
        base_url=base_url,
        model=model,
        max_iterations=max_iterations,
        max_tool_calls=max_tool_calls,
        plan=plan,
        stream=stream,
        timeout=timeout,
    )
    raise typer.Exit(run_goal(asked, as_json=as_json))
