"""A store on the command line: how it is opened and named, how a list of it is printed.

Imports no Semantic Kernel.
"""

import os
import shlex
import sys
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Unpack

from rich.text import Text

from planner_ext.cli import options as cli
from planner_ext.cli.command import ExitCode
from planner_ext.cli.text import Terminal, json_document
from planner_ext.core.text import printable
from planner_ext.durable import Runs, RunsClient, WorkerOptions
from planner_ext.durable.authorization import Doorkeeper
from planner_ext.durable.errors import is_address, redacted
from planner_ext.durable.store import opened_store


@asynccontextmanager
async def opened_runs(
    where: str, **options: Unpack[WorkerOptions]
) -> AsyncGenerator[Runs]:
    """Open a store to drive runs in it; a missing SQLite file is created."""
    opening = Runs.postgres if is_address(where) else Runs.sqlite
    async with opening(where, **options) as opened:
        yield opened


@asynccontextmanager
async def opened_client(
    where: str, hooks: cli.Hooks = cli.no_hooks, *, create: bool = False
) -> AsyncGenerator[RunsClient]:
    """Open a store to read its runs, or to act on them under an application's hooks."""
    # Not verified: a name given as --by is only typed.
    doorkeeper = Doorkeeper(authorize=await hooks())
    async with opened_store(where, create=create) as store:
        yield RunsClient(store, doorkeeper=doorkeeper)


def acting(
    args: cli.AppArgs, *, create: bool = False
) -> AbstractAsyncContextManager[RunsClient]:
    """Open a store to act on its runs, as the application allows."""
    return opened_client(args.store, args.hooks, create=create)


def store_name(where: str) -> str:
    """Return a store's name, without the password in its address."""
    return printable(redacted(where))


def command_on(where: str, *words: str) -> str:
    """Build a shell command on a store, without the password in its address."""
    known = os.environ.get(cli.STORE_VARIABLE) == where
    option = [] if known else ["--store", store_name(where)]
    return shlex.join(["planner-ext", *words, *option])


def say(text: str) -> None:
    """Print a sentence on stderr."""
    Terminal(sys.stderr).say(text)


def print_rows(
    rows: Sequence[object], lines: Iterable[Text], *, as_json: bool, none: str
) -> None:
    """Print a list as JSON or as lines; for an empty one, a sentence."""
    if as_json:
        print(json_document(rows))
    elif not rows:
        say(none)
    else:
        for line in lines:
            Terminal().print_line(line)


def print_page(
    args: cli.ListArgs,
    rows: Sequence[object],
    lines: Iterable[Text],
    *,
    total: int,
    none: str,
) -> None:
    """Print a part of a list, and on stderr which part it is."""
    if len(rows) != total:
        after = f", after the first {args.offset}" if args.offset else ""
        rest = args.offset + args.limit
        more = f"; --offset {rest} shows the next" if rest < total else ""
        none = f"{len(rows)} of {total}{after}{more}."
        if rows or args.as_json:
            say(none)
    print_rows(rows, lines, as_json=args.as_json, none=none)


def result_code(status: str) -> ExitCode:
    """Return the exit code for a kept run's status."""
    match status:
        case "answered":
            return ExitCode.ANSWERED
        case "paused":
            return ExitCode.PAUSED
        case "failed" | "quarantined":
            return ExitCode.FAULT
        case _:
            return ExitCode.NO_ANSWER
