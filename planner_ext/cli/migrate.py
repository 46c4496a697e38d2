"""``planner-ext store``: the schema of a store, and how long it keeps what has ended."""

from dataclasses import asdict

import typer

from planner_ext.cli import options as cli
from planner_ext.cli.command import ExitCode, command
from planner_ext.cli.store import acting, say, store_name
from planner_ext.cli.text import json_document
from planner_ext.durable.migration import StoreSchema, migrate
from planner_ext.durable.retention import Retention

group = typer.Typer(rich_markup_mode=None)


@command(group, name="check")
async def check_store(store: cli.Store, as_json: cli.Json = False) -> int:
    """Say which schema a store has, whether this version can use it, and how long it keeps what has ended.

    Examples:
      planner-ext store check --store runs.db

    Exit codes:
      0    this version can use it
      1    it must be migrated first
      2    the store cannot be used, or needs a newer version
    """
    found = await migrate(store, dry_run=True)
    if as_json:
        print(json_document(asdict(found)))
    else:
        text = f"{store_name(store)} has schema {found.number}, for any version that knows schema {found.reader}."
        print(f"{text} {_changes(found)}")
        if found.retention is not None:
            print(_kept(found.retention))
    return ExitCode.NO_ANSWER if found.missing else ExitCode.ANSWERED


@command(group, name="migrate")
async def migrate_store(store: cli.Store, dry_run: bool = False) -> None:
    """Change the tables of a store to the schema that this version needs, in one transaction.

    No other command does so: a version that needs a newer schema refuses the store
    until then. Where tables and columns are only added, older workers continue
    meanwhile; else end them first.

    Examples:
      planner-ext store migrate --store runs.db --dry-run

    Options:
        dry_run: Only print the statements.
    """
    found = await migrate(store, dry_run=dry_run)
    if dry_run:
        for schema in found.missing:
            for statement, _ in schema.steps():
                print(f"{' '.join(statement.split())};")
        say(_changes(found))
    elif found.missing:
        number = found.missing[-1].number
        say(f"{store_name(store)} has schema {number} now, and had {found.number}.")
    else:
        say(_changes(found))


@command(group, name="keep")
async def keep(
    args: cli.ActorArgs,
    ended: cli.Since = None,
    journals: cli.Since = None,
    everything: bool = False,
) -> None:
    """Set how long a store keeps runs that have ended; its workers delete older ones within the hour.

    Failed and quarantined runs are kept. What is older already is deleted, too: runs
    list --older-than shows it.

    Examples:
      planner-ext store keep --ended 30d --journals 7d --store runs.db

    Options:
        ended: When a run that has ended is deleted: 30d, 12h, 90m or 45s. Default:
            never.
        journals: When only its row is kept: name, goal, tags, status and consumption.
            Default: never.
        everything: Keep all of it, which a new store does.
    """
    if everything is not (ended is None and journals is None):
        raise typer.BadParameter(
            "give --ended, --journals or both; or --everything alone.",
            param_hint="--ended",
        )
    async with acting(args) as client:
        await client.retain(ended=ended, journals=journals, by=args.by)
        retention = await client.retention()
    say(_kept(retention))


def _kept(retention: Retention | None) -> str:
    if retention is None:
        return "Runs that have ended are kept."
    kept = [
        f"{what} for {_age(seconds)}"
        for what, seconds in (
            ("runs that have ended", retention.ended),
            ("their journals", retention.journals),
        )
        if seconds is not None
    ]
    return f"It keeps {' and '.join(kept)}."


def _age(seconds: float) -> str:
    """Write an age as the options take it."""
    units = {"d": 86_400, "h": 3_600, "m": 60}
    exact = (
        f"{seconds / size:g}{unit}"
        for unit, size in units.items()
        if seconds % size == 0
    )
    return next(exact, f"{seconds:g}s")


def _changes(found: StoreSchema) -> str:
    if not found.missing:
        return "There is nothing to migrate."
    older = (
        "older workers continue meanwhile"
        if found.keeps_older
        else "end all processes of older versions first"
    )
    return f"This version needs schema {found.missing[-1].number}; {older}."
