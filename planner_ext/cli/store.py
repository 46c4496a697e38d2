"""The store that ``--store`` names: opened, named in commands, and listed in parts. Imports nothing heavy."""

import os
import shlex
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from planner_ext import durable
from planner_ext.cli.text import printable, say, stderr_console
from planner_ext.durable.errors import redacted
from planner_ext.durable.store import is_address, open_database

if TYPE_CHECKING:
    from planner_ext.durable import Runs
    from planner_ext.durable.store import JournalStore

__all__ = ["STORE_VARIABLE", "command_on", "opened_runs", "opened_store", "print_part", "store_name"]

STORE_VARIABLE = "PLANNER_EXT_STORE"
"""The environment variable in place of ``--store``: other users of the machine can read a command line."""


@asynccontextmanager
async def opened_store(where: str) -> AsyncGenerator["JournalStore", None]:
    """Open a store that exists, to read it.

    Raises:
        StoreError: If there is no store, or it cannot be used.
    """
    from planner_ext.durable.store import JournalStore  # noqa: PLC0415  (takes its time to import)

    store = JournalStore(await open_database(where, create=False))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def opened_runs(where: str, *, worker_id: str | None = None) -> AsyncGenerator["Runs", None]:
    """Open a store to drive runs in it; an SQLite file is made if there is none.

    Raises:
        StoreError: If it cannot be used.
        WorkerInUseError: If a living worker has this name.
    """
    opening = durable.Runs.dbos if is_address(where) else durable.Runs.sqlite
    async with opening(where, worker_id=worker_id) as opened:
        yield opened


def store_name(where: str) -> str:
    """Name a store; a password in its address is not shown."""
    return printable(redacted(where))


def command_on(where: str, *words: str) -> str:
    """Write a command of this program on a store, for a shell; without the password that may be in its address."""
    known = os.environ.get(STORE_VARIABLE) == where
    option = [] if known else ["--store", store_name(where)]
    return shlex.join(["planner-ext", *words, *option])


def print_part(shown: int, *, limit: int, offset: int, total: int) -> None:
    """Print on stderr which part of a list is shown; nothing if it is the whole list."""
    if shown == total:
        return
    text = f"{shown} of {total}" + (f", after the first {offset}" if offset else "")
    more = f"; --offset {offset + limit} shows the next" if offset + limit < total else ""
    say(stderr_console(), f"{text}{more}.")
