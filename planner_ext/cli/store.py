"""The store of ``--store``: opens it, names it in commands, and lists its runs."""

import json
import os
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime

from rich.text import Text

from planner_ext.cli.options import STORE_VARIABLE, ExitCode, ListArgs
from planner_ext.cli.text import (
    exact,
    moment_text,
    one_line,
    printable,
    say,
    stderr_console,
    stdout_console,
    warnings_shown,
)
from planner_ext.durable import RunRecord, Runs
from planner_ext.durable.errors import is_address, redacted
from planner_ext.durable.store import opened_store

__all__ = ["command_on", "list_runs", "opened_runs", "print_part", "store_name"]


@asynccontextmanager
async def opened_runs(where: str, *, worker_id: str | None = None) -> AsyncGenerator[Runs, None]:
    """Open a store to drive runs in it; a missing SQLite file is created.

    Raises:
        StoreError: If it cannot be used.
        WorkerInUseError: If a living worker has this name.
    """
    opening = Runs.dbos if is_address(where) else Runs.sqlite
    async with opening(where, worker_id=worker_id) as opened:
        yield opened


def store_name(where: str) -> str:
    """Return a store's name, without the password in its address."""
    return printable(redacted(where))


def command_on(where: str, *words: str) -> str:
    """Build a shell command of this program on a store, without the password in its address."""
    known = os.environ.get(STORE_VARIABLE) == where
    option = [] if known else ["--store", store_name(where)]
    return shlex.join(["planner-ext", *words, *option])


def print_part(shown: int, *, limit: int, offset: int, total: int) -> None:
    """Print on stderr which part of a list is shown; print nothing if it is the whole list."""
    if shown == total:
        return
    text = f"{shown} of {total}" + (f", after the first {offset}" if offset else "")
    more = f"; --offset {offset + limit} shows the next" if offset + limit < total else ""
    say(stderr_console(), f"{text}{more}.")


async def list_runs(args: ListArgs, *, status: str | None) -> int:
    """Print the runs of a store; a damaged row is reported as an error."""
    async with opened_store(args.store, create=False) as store:
        with warnings_shown("planner_ext.durable"):
            records = await store.runs(status=status, limit=args.limit, offset=args.offset)
        total = await store.count_runs(status=status)
    print_part(len(records), limit=args.limit, offset=args.offset, total=total)
    if args.as_json:
        print(json.dumps([_document(record) for record in records], indent=2))
    elif not total:
        say(stderr_console(), f"No run{f' is {status}' if status else ''} in {store_name(args.store)}.")
    else:
        _print_runs(records)
    return ExitCode.ANSWERED


def _print_runs(records: list[RunRecord]) -> None:
    console = stdout_console()
    names = max((len(exact(record.run_id)) for record in records), default=0)
    states = max((len(record.status) for record in records), default=0)
    for record in records:
        changed = moment_text(_moment(record.updated_at))
        name = (f"{exact(record.run_id):<{names}}", "bold")
        line = Text.assemble(name, f"  {record.status:<{states}}  {one_line(record.goal)}  ", (changed, "dim"))
        console.print(line, soft_wrap=True)


def _document(record: RunRecord) -> dict[str, object]:
    times = {name: getattr(record, name) for name in ("wake_at", "created_at", "updated_at")}
    written = {name: None if at is None else _moment(at).isoformat() for name, at in times.items()}
    return {**asdict(record), **written}


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
