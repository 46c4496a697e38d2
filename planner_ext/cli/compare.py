"""``planner-ext compare``: the options of the ADR side by side, in the terminal, as JSON, as a page or in a document.

The comparison itself is `planner_ext.compare`; here is what stands on the command line, and where the results go.
"""

import asyncio
import json
import sys
from contextlib import AsyncExitStack, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from planner_ext.compare import Comparison, Live

__all__ = ["EXIT_CODES", "compare"]

EXIT_CODES = """\b
Exit codes:
  0    no corrected option made a round trip too many, broke a history or failed
  1    one did; what the other options do does not matter
  2    something on the command line or in the kernel cannot be used
  130  interrupted with Ctrl-C
"""

_HOLDS, _FAILS, _UNUSABLE, _INTERRUPTED = 0, 1, 2, 130


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
    asked = _Asked(
        max_iterations=max_iterations,
        only=tuple(only or ()),
        html=html,
        markdown=markdown,
        base_url=base_url,
        model=model,
        kernel=kernel,
        goal=goal,
    )
    raise typer.Exit(_compare(asked, as_json=as_json))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What stands on the command line."""

    max_iterations: int
    only: tuple[str, ...]
    html: Path | None
    markdown: Path | None
    base_url: str | None
    model: str | None
    kernel: str | None
    goal: str | None


def _compare(asked: _Asked, *, as_json: bool) -> int:
    """Compare, tell, and return the exit code."""
    from planner_ext.errors import PlannerInvalidConfigurationError  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    errors = Console(stderr=True, markup=False, highlight=False, emoji=False)
    try:
        _check(asked)
        with redirect_stdout(sys.stderr):  # what a kernel's own code prints is not in the way of a document
            comparison = _measure(asked, errors)
        _write(asked, comparison)
    except (PlannerInvalidConfigurationError, OSError, ValueError) as error:
        errors.print(f"planner-ext compare: {error}", style="red", soft_wrap=True)
        return _UNUSABLE
    except KeyboardInterrupt:
        errors.print("Interrupted.", style="red")
        return _INTERRUPTED
    _tell(comparison, as_json=as_json)
    for file in (file for file in (asked.html, asked.markdown) if file is not None):
        errors.print(f"Written: {file}", style="dim", soft_wrap=True)
    return _HOLDS if comparison.holds else _FAILS


def _check(asked: _Asked) -> None:
    """Refuse what would only be found wrong once everything was measured.

    Raises:
        PlannerInvalidConfigurationError: Options that cannot be used together.
        OSError: A file that cannot be written or read.
        ValueError: A document without the markers.
    """
    from planner_ext.compare.markdown import with_table  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.errors import PlannerInvalidConfigurationError  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    if (asked.kernel is None) != (asked.goal is None):
        given, missing = ("--kernel", "--goal") if asked.goal is None else ("--goal", "--kernel")
        raise PlannerInvalidConfigurationError(f"{given} needs {missing}: your own kernel is asked for your own goal.")
    if asked.html is not None and not asked.html.parent.is_dir():
        raise PlannerInvalidConfigurationError(f"--html {asked.html}: there is no directory {asked.html.parent}.")
    if asked.markdown is not None:
        try:
            with_table(asked.markdown.read_text("utf-8"), "")
        except ValueError as error:
            raise PlannerInvalidConfigurationError(f"--markdown {asked.markdown}: {error}") from None


def _measure(asked: _Asked, console: Console) -> "Comparison":
    """Run the comparison; in a terminal, say how far it is."""
    from planner_ext.cli.kernels import start_factory  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    made = None if asked.kernel is None else start_factory(asked.kernel)
    status = console.status("compares", spinner="line") if console.is_interactive else None

    def progress(done: int, all_of_them: int, what: str) -> None:
        if status is not None:
            status.update(f"{done} of {all_of_them}: {what}")

    with status or nullcontext():
        return asyncio.run(_run(asked, made, progress))


async def _run(asked: _Asked, made: object, progress: Any) -> "Comparison":
    from planner_ext.compare import run_comparison  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    options, scripts = _keys(asked.only)
    async with AsyncExitStack() as stack:
        return await run_comparison(
            max_iterations=asked.max_iterations,
            options=options,
            scripts=scripts,
            live=await _live(asked, made, stack),
            progress=progress,
        )


def _keys(only: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Tell options from scripts.

    Raises:
        PlannerInvalidConfigurationError: A key is neither.
    """
    from planner_ext.compare.options import OPTIONS  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.compare.scripts import SCRIPTS  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.errors import PlannerInvalidConfigurationError  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    for key in only:
        if key not in OPTIONS and key not in SCRIPTS:
            raise PlannerInvalidConfigurationError(
                f"--only {key}: there is neither such an option ({', '.join(OPTIONS)}) nor such a script "
                f"({', '.join(SCRIPTS)})."
            )
    return [key for key in only if key in OPTIONS], [key for key in only if key in SCRIPTS]


async def _live(asked: _Asked, made: object, stack: AsyncExitStack) -> "Live | None":
    """Find the real model that was asked for, if any."""
    from planner_ext.cli.kernels import kernel_of, openai_service  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.compare import Live  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    named = asked.base_url is not None or asked.model is not None
    if asked.kernel is None and not named:
        return None
    service = openai_service(asked.base_url, asked.model) if named else None
    if service is not None:
        stack.push_async_callback(service.client.close)
    kernel = None if asked.kernel is None else await kernel_of(made, asked.kernel)
    return Live(kernel=kernel, service=service, goal=asked.goal)


def _write(asked: _Asked, comparison: "Comparison") -> None:
    from planner_ext.compare.markdown import markdown_of, with_table  # noqa: PLC0415  (Semantic Kernel takes its time to import)
    from planner_ext.compare.page import page_of  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    if asked.html is not None:
        asked.html.write_text(page_of(comparison), "utf-8", errors="replace")
    if asked.markdown is not None:
        document = with_table(asked.markdown.read_text("utf-8"), markdown_of(comparison))
        asked.markdown.write_text(document, "utf-8", errors="replace")


def _tell(comparison: "Comparison", *, as_json: bool) -> None:
    from planner_ext.compare.table import print_comparison  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    if as_json:
        print(json.dumps(comparison.as_dict(), indent=2))
    else:
        print_comparison(Console(markup=False, highlight=False, emoji=False), comparison)
