"""Which database a path or an address means."""

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from planner_ext.durable.database import Database
from planner_ext.durable.errors import StoreError

if TYPE_CHECKING:
    from planner_ext.durable.dbos_segments import DbosSegments
    from planner_ext.durable.postgres import PostgresDatabase
    from planner_ext.durable.postgres_workers import PostgresWorkers

__all__ = ["is_address", "open_database", "open_segments"]


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
    if "://" in text and not text.startswith(("postgresql://", "postgres://")):
        raise StoreError(f"Expected a path or a postgresql:// address; got {text!r}.")
    return "://" in text


async def open_segments(url: str, name: str) -> "tuple[PostgresDatabase, PostgresWorkers, DbosSegments]":
    """Open the PostgreSQL database of a store as the worker of this name, and DBOS beside it.

    Raises:
        WorkerInUseError: If a process that lives has the name.
        StoreError: If the database or DBOS cannot be used.
    """
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
