"""Changes the tables of a store to the schema that this version needs, by command alone: opening a store never does."""

from pathlib import Path

from planner_ext.core.values import frozen
from planner_ext.durable.database import GET_SCHEMA, SCHEMAS, Schema, read_schema
from planner_ext.durable.errors import DuplicateRowError, StoreError
from planner_ext.durable.heartbeat import list_workers
from planner_ext.durable.retention import GET_RETENTION, Retention, read_retention
from planner_ext.durable.store import JournalStore, open_database


@frozen
class StoreSchema:
    """The schema of a store.

    Attributes:
        number: Its schema.
        reader: The lowest schema that a version must know to use it.
        missing: The schemas that this version adds, in their order.
        retention: How long what ended is kept; None keeps all of it.
    """

    number: int
    reader: int
    missing: tuple[Schema, ...]
    retention: Retention | None

    @property
    def keeps_older(self) -> bool:
        """Whether versions that use the store now can also use it with what is missing."""
        return all(one.reader <= self.number for one in self.missing)


async def migrate(where: str | Path, *, dry_run: bool = False) -> StoreSchema:
    """Make the tables of a store those that this version needs, in one transaction; ``dry_run`` only reads.

    Returns:
        The schema as it was before.

    Raises:
        NewerSchemaError: If the tables need a newer version of this package.
        StoreError: If the store cannot be used, or a change ends what living workers
            can read.
    """
    store = JournalStore(await open_database(where, create=False, older=True))
    try:
        rows, kept = await store.database.transact((GET_SCHEMA, {}), GET_RETENTION)
        number, reader = read_schema("The store", rows)
        missing = tuple(one for one in SCHEMAS if one.number > number)
        before = StoreSchema(
            number=number,
            reader=reader,
            missing=missing,
            retention=read_retention(kept),
        )
        if dry_run or not missing:
            return before
        alive = [one.name for one in await list_workers(store) if one.alive]
        if alive and not before.keeps_older:
            raise StoreError(
                f"Older workers cannot use the new schema, and these live: {', '.join(alive)}. End them, and every "
                "other process of the older version, and migrate then."
            )
        steps = [step for schema in missing for step in schema.steps()]
        try:
            await store.database.transact(*steps)
        except DuplicateRowError as error:
            raise StoreError(
                "Another process migrated the store at the same time. Check it."
            ) from error
        return before
    finally:
        await store.close()
