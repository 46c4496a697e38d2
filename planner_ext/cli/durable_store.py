"""The store that ``--store`` names: opened, named in commands, and its refusals put into words."""

import os
import shlex
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rich.text import Text

from planner_ext.cli.console import INTERRUPTED, UNUSABLE, complain, say, stderr_console
from planner_ext.cli.options import STORE_VARIABLE
from planner_ext.cli.text import printable
from planner_ext.core.errors import PlannerExtError
from planner_ext.durable.addresses import redacted
from planner_ext.durable.opening import is_address, open_database
from planner_ext.durable.store import JournalStore

if TYPE_CHECKING:
    from planner_ext.durable import Runs

__all__ = ["command_on", "opened_runs", "opened_store", "say_part", "store_name", "told"]


@asynccontextmanager
async def opened_store(where: str) -> AsyncGenerator[JournalStore, None]:
    """Open a store that is there, to read in it.

    Raises:
        StoreError: If there is none, or it cannot be used.
    """
    store = JournalStore(await open_database(where, create=False))
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def opened_runs(where: str, *, worker_id: str | None = None) -> AsyncGenerator["Runs", None]:
    """Open a store to drive runs in it; an SQLite file is made where there is none.

    Raises:
        StoreError: If it cannot be used.
        WorkerInUseError: If a living worker has this name.
    """
    from planner_ext.durable import Runs  # noqa: PLC0415  (Semantic Kernel takes its time to import)

    opened = Runs.dbos(where, worker_id=worker_id) if is_address(where) else Runs.sqlite(where, worker_id=worker_id)
    async with opened as runs:
        yield runs


def store_name(where: str) -> str:
    """Name a store; a password in its address is not shown."""
    return printable(redacted(where))


def command_on(where: str, *words: str) -> str:
    """Write a command of this program on a store, for a shell; without the password that may be in its address."""
    known = os.environ.get(STORE_VARIABLE) == where
    option = [] if known else ["--store", store_name(where)]
    return printable(shlex.join(["planner-ext", *words, *option]))


def say_part(shown: int, *, limit: int, offset: int, total: int) -> None:
    """Say which part of a list was shown, on stderr; nothing where it was all of it."""
    if shown == total:
        return
    text = f"{shown} of {total}" + (f", after the first {offset}" if offset else "")
    more = f"; --offset {offset + limit} shows the next" if offset + limit < total else ""
    say(stderr_console(), Text(f"{text}{more}."))


def told(deed: Callable[[], int]) -> int:
    """Do something with a store; what it refuses, say in a paragraph on stderr.

    Returns:
        The exit code.
    """
    try:
        return deed()
    except PlannerExtError as error:
        complain(stderr_console(), str(error))
        return UNUSABLE
    except KeyboardInterrupt:
        return INTERRUPTED
