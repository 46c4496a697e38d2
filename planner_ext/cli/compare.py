"""``planner-ext compare``: the options of the ADR side by side; the command line of `comparison`."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["EXIT_CODES", "compare"]

EXIT_CODES = """\b
Exit codes:
  0    no corrected option made a round trip too many, broke a history or failed
  1    one did; what the other options do does not matter
  2    something on the command line or in the kernel cannot be used
  130  interrupted with Ctrl-C
"""


def compare(  # noqa: PLR0917  (options by name on the command line)
    max_iterations: Annotated[
        int, typer.Option(metavar="N", min=1, help="Round trips that each run is allowed: requests to the model.")
    ] = 5,
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Only this option or script, such as option-2, iterations_metadata, never-ending or chain; may be "
            "given several times. A key that does not exist is answered with the list.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON document on stdout.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts, tables and every message.")
    ] = None,
    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the tables into this document, between the lines <!-- table: planner-ext compare --> and "
            "<!-- /table -->.",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="Ask a real model at this OpenAI-compatible endpoint. The key is OPENAI_API_KEY."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Ask this real model.")] = None,
    kernel: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FACTORY",
            help="Your own kernel, and --goal in place of the scripts. Its functions are run for real, by each option "
            "anew. With neither --model nor --base-url its own service is used.",
        ),
    ] = None,
    goal: Annotated[str | None, typer.Option(metavar="TEXT", help="What is asked of your own kernel.")] = None,
) -> None:
    """Compare ways to limit a tool-calling loop: the options of Semantic Kernel's ADR as written, and corrected.

    Offline, in seconds: a scripted model behind a real HTTP server that counts what it is asked. With a real model
    (--base-url, --model or --kernel) round trips are counted at the connector; retries inside an SDK are not seen.
    """
    from planner_ext.cli.comparison import CompareArgs, execute  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    args = CompareArgs(
        max_iterations=max_iterations,
        only=only or (),
        as_json=as_json,
        html=html,
        markdown=markdown,
        base_url=base_url,
        model=model,
        kernel=kernel,
        goal=goal,
    )
    raise typer.Exit(execute(args))
