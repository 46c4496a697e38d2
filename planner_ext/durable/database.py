"""What a store needs of a database: steps in one transaction. Nothing else differs between the databases."""

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

__all__ = ["Database", "Row", "Step", "Value"]

Value: TypeAlias = str | int | float | None
"""What stands in a column."""

Row: TypeAlias = tuple[Value, ...]
"""One row of an answer; plain tuples in the order of the statement's columns."""

Step: TypeAlias = tuple[str, Mapping[str, Value]]
"""One statement of `planner_ext.durable.statements`, with ``:name`` placeholders, and the values for them."""


class Database(Protocol):
    """A database that holds runs."""

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in order in one transaction: all of them, durably, or none.

        Returns:
            The rows of each step; of one that returns none, no rows.

        Raises:
            DuplicateRowError: If a key is there already.
            StoreError: If the database cannot be used; the message has the way out.
        """
        ...

    async def close(self) -> None:
        """Let go of the database; what was awaited is done."""
        ...
