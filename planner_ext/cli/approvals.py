"""``planner-ext approvals``: what waits in a store, decided from any process. Imports nothing heavy by itself."""

import asyncio
from collections.abc import Coroutine
from typing import Annotated

import typer

from planner_ext.cli.options import By, JsonDocument, Limit, Offset, Store, decider

__all__ = ["EXIT_CODES", "approvals"]

EXIT_CODES = """\b
Exit codes:
  0    done
  1    somebody else had decided already; nothing changed
  2    the store, the id or the decision cannot be used
"""

approvals = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show and decide the calls and questions that wait in a store; no kernel and no functions are needed.",
)

Id = Annotated[
    str,
    typer.Argument(metavar="ID", help="What waits, as the list names it: run/trip/call.", show_default=False),
]
Always = Annotated[
    str | None,
    typer.Option(
        metavar="function|arguments",
        help="For the rest of the run, ask no more about this function, or about it with these arguments.",
    ),
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; the model reads it.")]
Changes = Annotated[
    list[str],
    typer.Argument(
        metavar="NAME=VALUE",
        help="What to change, as often as needed: the value is JSON, or text. Or one JSON object in place of all "
        "arguments.",
        show_default=False,
    ),
]
Result = Annotated[
    str, typer.Argument(metavar="RESULT", help="JSON, or text; for a question, text.", show_default=False)
]


@approvals.command("list", epilog=EXIT_CODES)
def list_(store: Store, limit: Limit = 50, offset: Offset = 0, as_json: JsonDocument = False) -> None:
    """List the calls and questions that wait, those first that wait longest."""
    from planner_ext.cli.durable_approvals import list_approvals  # noqa: PLC0415  (only where it is called)

    _end(list_approvals(store, limit=limit, offset=offset, as_json=as_json))


@approvals.command(epilog=EXIT_CODES)
def show(id: Id, store: Store, as_json: JsonDocument = False) -> None:
    """Show one call in full: exactly what will run, or what the model asks, and what became of it."""
    from planner_ext.cli.durable_approvals import show_approval  # noqa: PLC0415  (likewise)

    _end(show_approval(store, id, as_json=as_json))


@approvals.command(epilog=EXIT_CODES)
def approve(id: Id, store: Store, always: Always = None, by: By = None) -> None:
    """Let a call run with the arguments that are shown; a worker takes it from there."""
    from planner_ext.cli.durable_approvals import approve_call  # noqa: PLC0415  (likewise)

    _end(approve_call(store, id, always=always, by=decider(by)))


@approvals.command(epilog=EXIT_CODES)
def deny(id: Id, store: Store, reason: Reason = "", by: By = None) -> None:
    """Do not let a call run, or leave a question without an answer."""
    from planner_ext.cli.durable_approvals import deny_call  # noqa: PLC0415  (likewise)

    _end(deny_call(store, id, reason=reason, by=decider(by)))


@approvals.command(epilog=EXIT_CODES)
def edit(id: Id, changes: Changes, store: Store, by: By = None) -> None:
    """Let a call run with other arguments.

    A worker checks them, since nothing here knows the function: if they do not pass, the call waits again and says why.
    """
    from planner_ext.cli.durable_approvals import edit_call  # noqa: PLC0415  (likewise)

    _end(edit_call(store, id, changes, by=decider(by)))


@approvals.command(epilog=EXIT_CODES)
def supply(id: Id, result: Result, store: Store, by: By = None) -> None:
    """Answer a question of the model, or do not run a call and give the model this result.

    A result is for a call in doubt, for instance, that did take effect.
    """
    from planner_ext.cli.durable_approvals import supply_result  # noqa: PLC0415  (likewise)

    _end(supply_result(store, id, result, by=decider(by)))


def _end(deed: Coroutine[None, None, int]) -> None:
    """Do it, put what is refused into words, and leave with the exit code."""
    from planner_ext.cli.durable_store import told  # noqa: PLC0415  (likewise)

    raise typer.Exit(told(lambda: asyncio.run(deed)))
