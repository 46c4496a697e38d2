"""Which database a path or an address means."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner_ext.durable.addresses import redacted
from planner_ext.durable.database import Database
from planner_ext.durable.errors import StoreError

if TYPE_CHECKING:
    from planner_ext.durable.dbos_segments import DbosSegments
    from planner_ext.durable.postgres import PostgresDatabase
    from planner_ext.durable.postgres_workers import PostgresWorkers

__all__ = ["is_address", "open_database", "open_segments"]

_CONNECTION = re.compile(r"(?i)\s*(?:postgres(?:ql)?:|(?:host|hostaddr|port|dbname|user|password|service)\s*=)")
"""What a connection string begins with that is not a URL, or that a path has made of one."""


async def open_database(where: str | Path, *, create: bool = True) -> Database:
    """Open the SQLite file at a path, or the PostgreSQL database at a ``postgresql://`` address.

    Args:
        where: The path or address.
        create: Whether a file that is not there is made.

    Raises:
        StoreError: If it cannot be used; says why, and the way out.
    """
    if is_address(where):
        try:
            from planner_ext.durable.postgres import PostgresDatabase  # noqa: PLC0415  (an optional dependency)
        except ImportError as error:
            _ask_for_extra(error)
        database = PostgresDatabase(str(where))
        await database.open()
        return database
    from planner_ext.durable.sqlite import SqliteDatabase  # noqa: PLC0415  (likewise not for everybody)

    return await SqliteDatabase.open(Path(where), create=create)


def is_address(where: str | Path) -> bool:
    """Say whether a store is a PostgreSQL database, and not a file.

    Raises:
        StoreError: If it is the address of something else.
    """
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        return True
    if "://" in text or _CONNECTION.match(text):
        raise StoreError(
            f"Expected a path or a postgresql:// address; got {redacted(text)!r}. Write an address as "
            "postgresql://user@host/database."
        )
    return False


async def open_segments(url: str, name: str) -> "tuple[PostgresDatabase, PostgresWorkers, DbosSegments]":
    """Open the PostgreSQL database of a store as the worker of this name, and DBOS beside it.

    Raises:
        WorkerInUseError: If a process that lives has the name.
        StoreError: If the database or DBOS cannot be used.
    """
    if not is_address(url):
        raise StoreError(f"Expected an address postgresql://user@host/database; got {redacted(url)!r}.")
    try:
        from planner_ext.durable.dbos_segments import DbosSegments  # noqa: PLC0415  (an optional dependency)
        from planner_ext.durable.postgres import PostgresDatabase  # noqa: PLC0415  (an optional dependency)
        from planner_ext.durable.postgres_workers import PostgresWorkers  # noqa: PLC0415  (an optional dependency)
    except ImportError as error:
        _ask_for_extra(error)
    workers, database = PostgresWorkers(url, name), PostgresDatabase(url)
    await database.open()
    segments = DbosSegments(url, database, workers)
    await segments.open()
    return database, workers, segments


def _ask_for_extra(error: ImportError) -> NoReturn:
    raise StoreError(f"Runs in PostgreSQL need more ({error}). Install planner-ext[dbos].") from error
