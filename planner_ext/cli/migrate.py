"""``planner-ext store``: the schema of a store."""

from dataclasses import asdict

import typer

from planner_ext.cli import options as cli
from planner_ext.cli.command import DONE, ExitCode, command
from planner_ext.cli.store import say, store_name
from planner_ext.cli.text import json_document
from planner_ext.durable.migration import StoreSchema, migrate

group = typer.Typer(rich_markup_mode=None)


@command(group, name="check")
async def check_store(store: cli.Store, as_json: cli.Json = False) -> int:
    """Say which schema a store has, and whether this version can use it; changes nothing.

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
        text = f"{store_name(store)} has schema {found.number}, for versions that know {found.reader}."
        print(f"{text} {_changes(found)}")
    return ExitCode.NO_ANSWER if found.missing else ExitCode.ANSWERED


@command(group, exit_codes=DONE, name="migrate")
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


def _changes(found: StoreSchema) -> str:
    if not found.missing:
        return "There is nothing to migrate."
    older = (
        "older workers continue meanwhile"
        if found.keeps_older
        else "end all processes of older versions first"
    )
    return f"This version needs schema {found.missing[-1].number}; {older}."
