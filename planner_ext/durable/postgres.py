"""Runs in PostgreSQL: the shared statements over psycopg, exactly once also where the connection breaks.

A transaction whose connection is lost while it commits may or may not have happened. So each connection has a row of
its own in ``planner_commits``, and every writing transaction leaves a fresh token there: afterwards the row says which
it was. A server that restarts is waited for; what was recorded before stays, and nothing is recorded twice.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import LiteralString, TypeVar, cast

import psycopg
from psycopg.conninfo import make_conninfo

from planner_ext.core.errors import NewerSchemaError
from planner_ext.durable.database import Row, Step
from planner_ext.durable.errors import DuplicateRowError, StoreError
from planner_ext.durable.postgres_errors import cause_of, is_passing, store_error
from planner_ext.durable.statements import GET_SCHEMA, PUT_SCHEMA, TABLE_SCHEMA, TABLES, translated

__all__ = ["Connection", "PostgresDatabase", "connect", "patiently"]

Connection = psycopg.AsyncConnection[Row]

_COMMITS = """
    CREATE TABLE IF NOT EXISTS planner_commits (
        connection TEXT PRIMARY KEY,
        token TEXT NOT NULL,
        at TIMESTAMPTZ NOT NULL DEFAULT now()
    )
"""
_ENTER = "INSERT INTO planner_commits (connection, token) VALUES (%(connection)s, '') ON CONFLICT DO NOTHING"
_LEAVE = "DELETE FROM planner_commits WHERE connection = %(connection)s OR at < now() - interval '7 days'"
_SIGN = """
    INSERT INTO planner_commits (connection, token) VALUES (%(connection)s, %(token)s)
    ON CONFLICT (connection) DO UPDATE SET token = EXCLUDED.token, at = now()
"""
_SIGNED = "SELECT token FROM planner_commits WHERE connection = %(connection)s FOR UPDATE"
"""Waits for whatever the lost connection's server process still does to the row."""

_TABLES_LOCK = 0x706C616E6E6572  # "planner"
_SETUP = """
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
_KEEPALIVES = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""Seconds and probes after which a machine that has vanished is noticed; PostgreSQL's own default is two hours."""

_Result = TypeVar("_Result")


async def connect(url: str) -> Connection:
    """Open a connection on which commits wait for the disk and a vanished machine is noticed.

    Args:
        url: ``postgresql://...``, or any other connection string of libpq.

    Raises:
        psycopg.Error: If the server cannot be reached, or says no.
    """
    options = {name: str(value) for name, value in _KEEPALIVES.items()}
    where = make_conninfo(url, connect_timeout="10", application_name="planner_ext", **options)
    connection = await psycopg.AsyncConnection.connect(where, autocommit=True)
    try:
        await connection.execute(_SETUP)
        for name, value in _KEEPALIVES.items():
            await connection.execute(cast("LiteralString", f"SET tcp_{name} = {value}"))
    except BaseException:
        await connection.close()
        raise
    return connection


async def patiently(attempt: Callable[[], Awaitable[_Result]], *, seconds: float) -> _Result:
    """Try until the server is there, for as long as the patience lasts; something else that is wrong is raised at once.

    Raises:
        psycopg.Error: Of the last attempt.
    """
    loop = asyncio.get_running_loop()
    deadline, wait = loop.time() + seconds, 0.05
    while True:
        try:
            return await attempt()
        except (psycopg.Error, OSError) as error:
            if not is_passing(error) or loop.time() + wait > deadline:
                raise
        await asyncio.sleep(wait)
        wait = min(wait * 2, 1.0)


@dataclass(slots=True, eq=False)
class _Seat:
    """One of the connections, opened when it is first needed, and its name in ``planner_commits``, where it writes."""

    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    connection: Connection | None = None
    entered: bool = False


class PostgresDatabase:
    """A PostgreSQL database with the tables of a store; implements `planner_ext.durable.database.Database`.

    Args:
        url: ``postgresql://...``.
        connections: How many transactions run at once, each on a connection of its own.
        patience: Seconds for which a server that went away is waited for.
    """

    def __init__(self, url: str, *, connections: int = 4, patience: float = 60.0) -> None:
        self._url = url
        self._patience = patience
        self._free = [_Seat() for _ in range(connections)]
        self._seats = tuple(self._free)
        self._turn = asyncio.Semaphore(connections)
        self._closed = False
        self._writing: set[asyncio.Task[Sequence[Sequence[Row]]]] = set()

    async def open(self) -> None:
        """Reach the server, and create the tables where they are not there; needs no right to, where they are.

        Raises:
            StoreError: If the server cannot be reached or used.
            NewerSchemaError: If the tables were made by a newer version of this package.
        """
        try:
            connection = await connect(self._url)
            try:
                await _prepare(connection)
            finally:
                await connection.close()
        except (psycopg.Error, OSError) as error:
            raise store_error(self._url, error) from cause_of(self._url, error)

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in one transaction; one that writes goes to its end, also if whoever asked is cancelled.

        Raises:
            DuplicateRowError: If a key is there already.
            StoreError: If the database cannot be used, or was away for longer than the patience.
        """
        if self._closed:
            raise StoreError("The store was closed. Use it inside its async with block.")
        if all(statement.lstrip().startswith("SELECT") for statement, _ in steps):
            return await self._seated(lambda seat: patiently(lambda: self._read(seat, steps), seconds=self._patience))
        task = asyncio.create_task(self._seated(lambda seat: self._commit(seat, steps)))
        self._writing.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Let every transaction end, and the connections go."""
        self._closed = True
        await asyncio.gather(*self._writing, return_exceptions=True)
        for seat in self._seats:
            if seat.connection is not None:
                with suppress(psycopg.Error):  # a server that is away has let go of it already
                    if seat.entered:
                        await seat.connection.execute(_LEAVE, {"connection": seat.name})
                await seat.connection.close()
            seat.connection, seat.entered = None, False

    def _written(self, task: asyncio.Task[Sequence[Sequence[Row]]]) -> None:
        self._writing.discard(task)
        if not task.cancelled():
            task.exception()  # so that nobody complains of one that nobody waited for any more

    async def _seated(self, work: Callable[[_Seat], Awaitable[_Result]]) -> _Result:
        async with self._turn:
            seat = self._free.pop()
            try:
                return await work(seat)
            except psycopg.errors.UniqueViolation as error:
                raise DuplicateRowError(f"A row with this key is there already: {error}") from error
            except (psycopg.Error, OSError, UnicodeError) as error:
                raise store_error(self._url, error) from cause_of(self._url, error)
            finally:
                self._free.append(seat)

    async def _read(self, seat: _Seat, steps: Sequence[Step]) -> Sequence[Sequence[Row]]:
        connection = await self._connected(seat)
        try:
            async with connection.pipeline():
                cursors = [await connection.execute(_query(statement), dict(values)) for statement, values in steps]
            return [await cursor.fetchall() for cursor in cursors]
        except asyncio.CancelledError:  # in the midst of an answer that nobody will read
            await connection.close()
            raise

    async def _commit(self, seat: _Seat, steps: Sequence[Step]) -> Sequence[Sequence[Row]]:
        """Perform steps and commit; where the connection breaks in between, find out, and begin again if need be."""
        while True:
            token = uuid.uuid4().hex
            connection, rows = await patiently(
                lambda token=token: self._write(seat, steps, token), seconds=self._patience
            )
            try:
                await connection.execute("COMMIT")
            except (psycopg.Error, OSError) as error:
                if not is_passing(error):
                    raise
                if not await patiently(lambda token=token: self._signed(seat, token), seconds=self._patience):
                    continue
            return rows

    async def _write(
        self, seat: _Seat, steps: Sequence[Step], token: str
    ) -> tuple[Connection, Sequence[Sequence[Row]]]:
        """Perform steps in a transaction that is left open, and fetch what they return."""
        connection = await self._connected(seat)
        if not seat.entered:  # before the transaction, so that whoever asks for the token waits for its row
            await connection.execute(_ENTER, {"connection": seat.name})
            seat.entered = True
        try:
            async with connection.pipeline():
                await connection.execute("BEGIN")
                cursors = [await connection.execute(_query(statement), dict(values)) for statement, values in steps]
                await connection.execute(_SIGN, {"token": token, "connection": seat.name})
            return connection, [await cursor.fetchall() if cursor.description else () for cursor in cursors]
        except BaseException:
            await _roll_back(connection)
            raise

    async def _signed(self, seat: _Seat, token: str) -> bool:
        """Say whether the transaction that left this token was committed."""
        connection = await self._connected(seat)
        rows = await (await connection.execute(_SIGNED, {"connection": seat.name})).fetchall()
        return rows == [(token,)]

    async def _connected(self, seat: _Seat) -> Connection:
        if seat.connection is None or seat.connection.closed:
            seat.connection = await connect(self._url)
        return seat.connection


def _query(statement: str) -> LiteralString:
    return cast("LiteralString", translated(statement))  # constants of ours; what comes from outside is in the values


async def _roll_back(connection: Connection) -> None:
    try:
        await connection.rollback()
    except psycopg.Error:
        await connection.close()


async def _prepare(connection: Connection) -> None:
    """Create the tables under a lock, since creating one twice at once fails; check the number of those there are."""
    there = await (await connection.execute("SELECT to_regclass('planner_refusals') IS NOT NULL")).fetchone()
    if there != (True,):
        async with connection.transaction():
            await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
            for statement in (_COMMITS, *TABLES):
                await connection.execute(_query(statement))
            await connection.execute(_query(PUT_SCHEMA), {"number": TABLE_SCHEMA})
    row = await (await connection.execute(_query(GET_SCHEMA))).fetchone()
    number = row[0] if row is not None else None
    if isinstance(number, int) and number > TABLE_SCHEMA:
        raise NewerSchemaError(
            f"This database has tables of schema {number}; this version of planner_ext knows up to {TABLE_SCHEMA}. "
            "Use the version that made them, or a newer one."
        )
