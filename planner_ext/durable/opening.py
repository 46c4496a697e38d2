"""Which database a path or an address means."""

from pathlib import Path

from planner_ext.durable.database import Database
from planner_ext.durable.errors import StoreError

__all__ = ["open_database"]


async def open_database(where: str | Path, *, create: bool = True) -> Database:
    """Open the SQLite file at a path, or the PostgreSQL database at a ``postgresql://`` address.

    Args:
        where: The path or address.
        create: Whether a file that is not there is made.

    Raises:
        StoreError: If it cannot be used; says why, and the way out.
    """
    text = str(where)
    if text.startswith(("postgresql://", "postgres://")):
        from planner_ext.durable.postgres import PostgresDatabase  # noqa: PLC0415  (an optional dependency)

        database = PostgresDatabase(text)
        await database.open()
        return database
    if "://" in text:
        raise StoreError(f"Expected a path or a postgresql:// address; got {text!r}.")
    from planner_ext.durable.sqlite import SqliteDatabase  # noqa: PLC0415  (likewise not for everybody)

    return await SqliteDatabase.open(Path(where), create=create)
