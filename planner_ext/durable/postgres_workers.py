"""Which processes live, as PostgreSQL knows it: each holds a lock in a session that ends with it, however it dies."""

import asyncio
import hashlib
import uuid
from typing import LiteralString

import psycopg

from planner_ext.durable.database import Row
from planner_ext.durable.errors import StoreError, WorkerInUseError
from planner_ext.durable.names import check_worker_id
from planner_ext.durable.postgres import Connection, connect, patiently
from planner_ext.durable.postgres_errors import cause_of, store_error

__all__ = ["PostgresWorkers"]

_TAKE = "SELECT pg_try_advisory_lock(%s)"
_HELD = """
    SELECT EXISTS (
        SELECT 1 FROM pg_locks
        WHERE locktype = 'advisory' AND objsubid = 1 AND granted
          AND (classid::bigint << 32) | objid::bigint = %s
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
"""


class PostgresWorkers:
    """This process among the workers of a database; implements `planner_ext.durable.liveness.Workers`.

    Attributes:
        name: What it was called; only one process may have the name at a time.
        worker_id: Its name among all workers that ever were: one that is started again is another one.
    """

    def __init__(self, url: str, name: str, *, patience: float = 60.0) -> None:
        """Name the worker.

        Args:
            url: ``postgresql://...``.
            name: What it is called.
            patience: Seconds for which a server that went away is waited for.

        Raises:
            StoreError: If the name cannot be used.
        """
        check_worker_id(name)
        self.name = name
        self.worker_id = f"{name}/{uuid.uuid4().hex}"
        self._url = url
        self._patience = patience
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._left = False

    async def keep(self) -> None:
        """Take the locks; take them again where the session was lost, as when the server restarted.

        Raises:
            WorkerInUseError: If a process that lives has the name.
            StoreError: If the database cannot be used.
        """
        await self._ask("SELECT 1")

    async def alive(self, worker_id: str) -> bool:
        """Whether a worker's session lives.

        Raises:
            WorkerInUseError: If this worker's own session was lost, and a process that lives has the name.
            StoreError: If the database cannot be used.
        """
        return await self._ask(_HELD, _key(worker_id)) == (True,)

    async def leave(self) -> None:
        """End the session, and with it the locks."""
        async with self._turn:
            self._left = True
            if self._connection is not None:
                await self._connection.close()

    async def _ask(self, question: LiteralString, *values: int) -> Row | None:
        """Ask in this worker's session, taken again if need be: who has none may not judge others."""

        async def ask() -> Row | None:
            if self._left:
                raise StoreError(f"The worker {self.name!r} has left the store. Use it inside its async with block.")
            if self._connection is None or self._connection.closed:
                self._connection = await self._locked()
            return await (await self._connection.execute(question, values)).fetchone()

        async with self._turn:
            try:
                return await patiently(ask, seconds=0 if self._connection is None else self._patience)
            except (psycopg.Error, OSError) as error:
                raise store_error(self._url, error) from cause_of(self._url, error)

    async def _locked(self) -> Connection:
        connection = await connect(self._url)
        try:
            for name in (self.name, self.worker_id):
                taken = await (await connection.execute(_TAKE, (_key(name),))).fetchone()
                if taken != (True,):
                    raise WorkerInUseError(
                        f"The worker {self.name!r} is in use by a process that lives. Give each worker a name of its "
                        "own; that of one that has just died is free within seconds."
                    )
        except BaseException:
            await connection.close()
            raise
        return connection


def _key(name: str) -> int:
    """Turn a name into the number that is locked: the first eight bytes of a digest, so that no two meet."""
    digest = hashlib.sha256(f"planner_ext worker {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
