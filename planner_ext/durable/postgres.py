"""Runs in PostgreSQL: the shared statements over psycopg, exactly once also where the connection breaks.

A transaction whose connection is lost during the commit may or may not have been committed. So each connection has one
row in ``planner_commits``, and every writing transaction leaves a fresh token there; reading the row afterwards tells
whether it was. While a server restarts, transactions wait. Nothing is lost, and nothing is recorded twice.
"""

import asyncio
import hashlib
import logging
import re
import shlex
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, LiteralString, TypeVar, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from planner_ext.durable.database import GET_SCHEMA, TABLE_SCHEMA, Execute, Row, Step, Value, check_tables, migration
from planner_ext.durable.errors import DuplicateRowError, StoreError, WorkerInUseError, redacted, without_passwords
from planner_ext.engine.document import SCHEMA

__all__ = [
    "ACTIVATION",
    "DBOS_TABLES",
    "QUEUE",
    "VERSION",
    "VERSION_NUMBERS",
    "PostgresDatabase",
    "PostgresWorkers",
    "may_retry",
]

logger = logging.getLogger(__name__)

_Connection = psycopg.AsyncConnection[Row]

_COMMITS = """
    CREATE TABLE IF NOT EXISTS planner_commits (
        connection TEXT PRIMARY KEY,
        token TEXT NOT NULL,
        at TIMESTAMPTZ NOT NULL DEFAULT now()
    )
"""
_ADD_CONNECTION = "INSERT INTO planner_commits (connection, token) VALUES (%(connection)s, '') ON CONFLICT DO NOTHING"
_REMOVE_CONNECTIONS = "DELETE FROM planner_commits WHERE connection = %(connection)s OR at < now() - interval '7 days'"
_SIGN = """
    INSERT INTO planner_commits (connection, token) VALUES (%(connection)s, %(token)s)
    ON CONFLICT (connection) DO UPDATE SET token = EXCLUDED.token, at = now()
"""
_SIGNED = "SELECT token FROM planner_commits WHERE connection = %(connection)s FOR UPDATE"
"""Waits until the lost connection's server process has released the row."""

_TABLES_LOCK = 0x706C616E6E6572  # "planner"
_SETUP = """
    SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
_LEAVE_SECONDS = 5.0
"""How long closing waits for a server that does not answer."""
_KEEPALIVES = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""Seconds and probes after which a vanished machine is noticed; PostgreSQL's own default is two hours."""

_LOCK_IS_HELD = """
    SELECT EXISTS (
        SELECT 1 FROM pg_locks
        WHERE locktype = 'advisory' AND objsubid = 1 AND granted
          AND (CAST(classid AS bigint) << 32) | CAST(objid AS bigint) = :key
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
"""

DBOS_TABLES = "planner_ext_dbos"
"""The PostgreSQL schema with DBOS's tables."""
QUEUE = "planner_ext"
ACTIVATION = "planner_ext.segment"
"""The name of an activation in DBOS's tables; older stores have it."""
VERSION_NUMBERS = (SCHEMA, TABLE_SCHEMA)
VERSION = "planner_ext-{}.{}".format(*VERSION_NUMBERS)
"""Pinned: DBOS's default is a hash of the source, with which the next release would not see queued activations."""

_ENQUEUE = f"""
    SELECT {DBOS_TABLES}.enqueue_workflow(
        workflow_name => :name, queue_name => :queue, workflow_id => :key, app_version => :version,
        positional_args => ARRAY[to_json(CAST(:run_id AS text))]
    )
"""
"""DBOS's own function in PostgreSQL, for processes in which it is not launched; an existing activation stays."""

_ACTIVATION_TABLES = f"""
    SELECT table_name FROM information_schema.columns
    WHERE table_schema = '{DBOS_TABLES}' AND column_name = 'workflow_uuid'
    ORDER BY table_name = 'workflow_status', table_name
"""  # noqa: S608  (both are this module's own text)
"""DBOS's tables with rows of activations, the one that others refer to as the last."""

_DELETE_ACTIVATIONS = f"""
    DELETE FROM {DBOS_TABLES}.%s WHERE workflow_uuid IN (
        SELECT run_id || ':' || n FROM planner_runs, generate_series(
            0, (SELECT COUNT(*) FROM planner_journal WHERE planner_journal.run_id = planner_runs.run_id)
        ) AS n
        WHERE owner = :owner
    )
"""  # noqa: S608  (likewise)
"""Deletes the rows of activations, which are named after a run and the length of its journal when they start."""

_TRANSIENT = ("08", "40", "53300", "57P")
"""Beginnings of SQLSTATEs that a retry may cure: a lost connection, a conflict, no free slot, a restarting server."""

_WAYS_OUT = {
    "28": "Check the user and the password in the URL.",
    "3D000": "Create the database, or name another one in the URL.",
    "42501": "Grant the user the rights on the tables, or create them with a user who has them.",
    "42": "Was the store made by another version? Use that version, or another database.",
    "53100": "Free space on the server's disk; the run continues from its last recorded step.",
    "53300": "Raise max_connections, or let fewer workers run.",
    "25006": "This server takes no writes, as a standby does; use the primary's address.",
}
"""The way out by the beginning of the SQLSTATE; the longest match counts."""

_NOT_REACHED = "Start the server, or check host and port in the URL; runs continue from their last recorded step."

_REACHED = "Look into the server's log for more; runs continue from their last recorded step."

_Result = TypeVar("_Result")


class PostgresDatabase:
    """A PostgreSQL database with the tables of a store; implements `planner_ext.durable.database.Database`.

    Args:
        url: ``postgresql://...``.
        connections: The number of connections; each runs one transaction at a time.
        patience: Seconds to wait for an unreachable server.
    """

    now: ClassVar[str] = "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
    skip_locked: ClassVar[str] = "FOR UPDATE SKIP LOCKED"
    age: ClassVar[str] = f"""
        LEAST({now} - seen_at,
              CAST(EXTRACT(EPOCH FROM clock_timestamp() - pg_postmaster_start_time()) AS DOUBLE PRECISION))
    """

    def __init__(self, url: str, *, connections: int = 4, patience: float = 60.0) -> None:
        self._url = url
        self._patience = patience
        self._sessions = [_Session(url) for _ in range(connections)]
        self._free: asyncio.LifoQueue[_Session] = asyncio.LifoQueue()
        for session in self._sessions:
            self._free.put_nowait(session)
        self._closed = False
        self._writing: set[asyncio.Task[Sequence[Sequence[Row]]]] = set()

    async def open(self, *, patience: float = 0.0) -> None:
        """Reach the server, and create the tables where they do not exist; existing ones need no right to.

        Args:
            patience: Seconds to wait for a server that cannot be reached, or is starting.

        Raises:
            StoreError: If the server cannot be reached or used.
            NewerSchemaError: If the tables were made by a newer version of this package.
        """

        async def prepare() -> None:
            async with await _connect(self._url) as connection:
                await _prepare(connection)

        with _as_store_errors(self._url):
            await _with_retries(prepare, seconds=patience)

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in one transaction; a writing one completes even if its caller is cancelled.

        Raises:
            DuplicateRowError: If a key exists.
            StoreError: If the database cannot be used, or was unreachable for longer than the patience.
        """
        if self._closed:
            raise StoreError("The store was closed. Use it inside its async with block.")
        if all(statement.lstrip().startswith("SELECT") for statement, _ in steps):
            async with self._session() as session:
                return await _with_retries(partial(session.read, steps), seconds=self._patience)
        task = asyncio.create_task(self._commit(steps))
        self._writing.add(task)
        task.add_done_callback(self._written)
        return await asyncio.shield(task)

    async def backup(self, path: Path) -> None:
        """Refuse, and name the server's tool."""
        raise StoreError(
            f"{_server_of(self._url)} is a PostgreSQL database, which pg_dump backs up while workers write: pg_dump "
            f"--format=custom --file={shlex.quote(str(path))} {shlex.quote(redacted(self._url))}. pg_restore reads it."
        )

    async def more_to_delete(self) -> Sequence[str]:
        """List the statements that delete the activations of runs from DBOS's tables, if these exist."""
        tables = (await self.transact((_ACTIVATION_TABLES, {})))[0]
        return [_DELETE_ACTIVATIONS % table for table in tables]

    async def announce(self, run_id: str) -> None:
        """Queue the first activation of a run in DBOS's tables, which the first worker makes.

        Raises:
            StoreError: If no worker has made the tables yet, or the database cannot be used.
        """
        activation = {"name": ACTIVATION, "queue": QUEUE, "run_id": run_id, "key": f"{run_id}:0", "version": VERSION}
        await self.transact((_ENQUEUE, activation))

    @contextmanager
    def session(self, *, timeout: float) -> Generator[Execute]:
        """Open a session; a server that does not answer ends it after the timeout."""
        where = _conninfo(self._url, tcp_user_timeout=str(int(timeout * 1000)))
        with _as_store_errors(self._url), psycopg.connect(where, autocommit=True) as connection:
            connection.execute("SET synchronous_commit = off")

            def execute(statement: str, values: Mapping[str, Value]) -> Sequence[Row]:
                cursor = connection.execute(_query(statement), dict(values))
                return cursor.fetchall() if cursor.description else ()

            yield execute

    async def holds_lock(self, worker_id: str) -> bool:
        """Whether a session holds a worker's lock."""
        return (await self.transact((_LOCK_IS_HELD, {"key": _key(worker_id)})))[0][0] == (True,)

    async def close(self) -> None:
        """Wait for every transaction to end, and close the connections."""
        self._closed = True
        await asyncio.gather(*self._writing, return_exceptions=True)
        for session in self._sessions:
            await session.leave()

    def _written(self, task: asyncio.Task[Sequence[Sequence[Row]]]) -> None:
        self._writing.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it for a cancelled caller

    @asynccontextmanager
    async def _session(self) -> "AsyncGenerator[_Session]":
        session = await self._free.get()
        try:
            with _as_store_errors(self._url):
                yield session
        finally:
            self._free.put_nowait(session)

    async def _commit(self, steps: Sequence[Step]) -> Sequence[Sequence[Row]]:
        """Perform steps and commit. If the connection breaks, find out whether they were committed; if not, retry."""
        async with self._session() as session:
            while True:
                token = uuid.uuid4().hex
                connection, rows = await _with_retries(partial(session.write, steps, token), seconds=self._patience)
                try:
                    await connection.execute("COMMIT")
                except (psycopg.Error, OSError) as error:
                    if not may_retry(error):
                        raise
                    if not await _with_retries(partial(session.is_committed, token), seconds=self._patience):
                        continue
                return rows


class _Session:
    """One connection, opened on first use, and its row in ``planner_commits``, inserted on its first write."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = uuid.uuid4().hex
        self._connection: _Connection | None = None
        self._entered = False

    async def read(self, steps: Sequence[Step]) -> Sequence[Sequence[Row]]:
        connection = await self._connected()
        try:
            async with connection.pipeline():
                cursors = [await connection.execute(_query(statement), dict(values)) for statement, values in steps]
            return [await cursor.fetchall() for cursor in cursors]
        except asyncio.CancelledError:  # the answer of the server has no reader any more
            await connection.close()
            raise

    async def write(self, steps: Sequence[Step], token: str) -> tuple[_Connection, Sequence[Sequence[Row]]]:
        """Perform steps in a transaction that is left open, and fetch what they return."""
        connection = await self._connected()
        if not self._entered:  # before the transaction, so that `is_committed` waits for the row
            await connection.execute(_ADD_CONNECTION, {"connection": self._name})
            self._entered = True
        try:
            async with connection.pipeline():
                await connection.execute("BEGIN")
                cursors = [await connection.execute(_query(statement), dict(values)) for statement, values in steps]
                await connection.execute(_SIGN, {"token": token, "connection": self._name})
            return connection, [await cursor.fetchall() if cursor.description else () for cursor in cursors]
        except BaseException:
            try:
                await connection.rollback()
            except psycopg.Error:
                await connection.close()
            raise

    async def is_committed(self, token: str) -> bool:
        """Return whether the transaction that wrote this token was committed."""
        connection = await self._connected()
        rows = await (await connection.execute(_SIGNED, {"connection": self._name})).fetchall()
        return rows == [(token,)]

    async def leave(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error, TimeoutError):  # an unreachable server has ended the session already
                if self._entered:
                    async with asyncio.timeout(_LEAVE_SECONDS):
                        await self._connection.execute(_REMOVE_CONNECTIONS, {"connection": self._name})
            await self._connection.close()
        self._connection, self._entered = None, False

    async def _connected(self) -> _Connection:
        if self._connection is None or self._connection.closed:
            self._connection = await _connect(self._url)
        return self._connection


class PostgresWorkers:
    """Registers this process as a worker of a database: each worker holds a lock in a session of its process.

    Implements `planner_ext.durable.heartbeat.WorkerLocks`.

    Attributes:
        name: The worker's name; one process may have it at a time.
        worker_id: A globally unique id; a restarted worker gets a new one.

    Args:
        url: ``postgresql://...``.
        name: The worker's name.
        patience: Seconds to wait for an unreachable server.
    """

    def __init__(self, url: str, name: str, *, patience: float = 60.0) -> None:
        self.name = name
        self.worker_id = f"{name}/{uuid.uuid4().hex}"
        self._url = url
        self._patience = patience
        self._connection: _Connection | None = None
        self._turn = asyncio.Lock()
        self._left = False

    async def keep(self) -> None:
        """Acquire the locks; acquire them again if the session was lost, for instance by a restart of the server.

        Raises:
            WorkerInUseError: If a living process has the name.
            StoreError: If the database cannot be used.
        """
        await self._ask("SELECT 1")

    async def alive(self, worker_id: str) -> bool:
        """Whether a worker's session lives.

        Raises:
            WorkerInUseError: If this worker's own session was lost, and another living process took the name.
            StoreError: If the database cannot be used.
        """
        return await self._ask(_LOCK_IS_HELD, key=_key(worker_id)) == (True,)

    async def leave(self) -> None:
        """End the session, and with it the locks."""
        async with self._turn:
            self._left = True
            if self._connection is not None:
                await self._connection.close()

    async def _ask(self, question: str, **values: int) -> Row | None:
        """Query in this worker's session, restored if it was lost: a worker without one may not judge others."""

        async def ask() -> Row | None:
            if self._left:
                raise StoreError(f"The worker {self.name!r} has left the store. Use it inside its async with block.")
            if self._connection is None or self._connection.closed:
                self._connection = await self._locked()
            return await (await self._connection.execute(_query(question), values)).fetchone()

        async with self._turn:
            with _as_store_errors(self._url):
                return await _with_retries(ask, seconds=0 if self._connection is None else self._patience)

    async def _locked(self) -> _Connection:
        connection = await _connect(self._url)
        try:
            for name in (self.name, self.worker_id):
                taken = await (await connection.execute("SELECT pg_try_advisory_lock(%s)", (_key(name),))).fetchone()
                if taken != (True,):
                    raise WorkerInUseError(
                        f"The worker {self.name!r} is in use by a process that lives. Give each worker another name; "
                        "the name of a worker that has just died is free within seconds."
                    )
        except BaseException:
            await connection.close()
            raise
        return connection


def _key(name: str) -> int:
    """Map a name to its lock number: the first eight bytes of a digest, so that two names do not collide."""
    digest = hashlib.sha256(f"planner_ext worker {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _conninfo(url: str, **more: str) -> str:
    options = {name: str(value) for name, value in _KEEPALIVES.items()}
    return make_conninfo(url, connect_timeout="10", application_name="planner_ext", **options, **more)


async def _connect(url: str) -> _Connection:
    """Open a connection on which commits wait for the disk and a vanished machine is noticed."""
    connection = await psycopg.AsyncConnection.connect(_conninfo(url), autocommit=True)
    try:
        await connection.execute(_SETUP)
        for name, value in _KEEPALIVES.items():
            await connection.execute(cast("LiteralString", f"SET tcp_{name} = {value}"))
    except BaseException:
        await connection.close()
        raise
    return connection


async def _prepare(connection: _Connection) -> None:
    """Create or migrate the tables under a lock, since concurrent creation fails; current ones need no right to.

    The lock ends with the connection. It is taken before the transaction: one that had waited for it would not see that
    another worker has created the tables meanwhile, since `to_regclass` answers from a cache.
    """
    if await _schema_number(connection) == TABLE_SCHEMA:
        return
    await connection.execute("SELECT pg_advisory_lock(%s)", (_TABLES_LOCK,))
    async with connection.transaction():
        for statement in (_COMMITS, *migration(await _schema_number(connection))):
            await connection.execute(_query(statement))


async def _schema_number(connection: _Connection) -> int:
    """Return the schema number of the tables; 0 without tables."""
    there = await (await connection.execute("SELECT to_regclass('planner_schema') IS NOT NULL")).fetchone()
    if there != (True,):
        return 0
    row = await (await connection.execute(_query(GET_SCHEMA))).fetchone()
    number = 0 if row is None or row[0] is None else int(row[0])
    check_tables("This database", number)
    return number


@cache
def _query(statement: str) -> LiteralString:
    """Convert a statement to psycopg's placeholders; its text is the package's own, outside data are in the values."""
    return cast("LiteralString", re.sub(r":([a-z_]+)", r"%(\1)s", statement))


async def _with_retries(attempt: Callable[[], Awaitable[_Result]], *, seconds: float) -> _Result:
    """Retry until the server is reachable or the patience runs out; any other error is raised at once."""
    loop = asyncio.get_running_loop()
    deadline, wait, said = loop.time() + seconds, 0.05, False
    while True:
        try:
            return await attempt()
        except (psycopg.Error, OSError) as error:
            if not may_retry(error) or loop.time() + wait > deadline:
                raise
            if wait >= 1.0 and not said:
                said = True
                logger.warning("PostgreSQL cannot be reached; waiting %.0f seconds at most.", deadline - loop.time())
        await asyncio.sleep(wait)
        wait = min(wait * 2, 1.0)


def may_retry(error: BaseException | None) -> bool:
    """Return whether a retry may help: the server is unreachable, restarts, or asks for a retry."""
    if isinstance(error, OSError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) and not _is_refusal(error)
    return error.sqlstate.startswith(_TRANSIENT)


def _is_refusal(error: psycopg.Error) -> bool:
    """Return whether the server answered and refused; while connecting, psycopg sets no SQLSTATE for that."""
    return any(word in str(error) for word in ("does not exist", "authentication failed", "invalid connection option"))


@contextmanager
def _as_store_errors(url: str) -> Generator[None]:
    """Convert a PostgreSQL error to a `StoreError` with the problem, the place and the way out, but no password."""
    try:
        yield
    except (psycopg.errors.UniqueViolation, psycopg.errors.NotNullViolation) as error:
        raise DuplicateRowError(f"A row with this key is there already: {error}") from error
    except (psycopg.Error, OSError, UnicodeError) as error:
        said = " ".join(str(error).split()).rstrip(".?") or type(error).__name__
        text = f"PostgreSQL at {_server_of(url)} cannot be used: {said}. {_way_out(error)}"
        is_clean = without_passwords(str(error), url) == str(error)
        raise StoreError(without_passwords(text, url)) from (error if is_clean else None)


def _way_out(error: psycopg.Error | OSError | UnicodeError) -> str:
    state = error.sqlstate if isinstance(error, psycopg.Error) else None
    if isinstance(error, psycopg.DataError | UnicodeError):
        return "Give a name that there may be: without NUL characters and lone surrogates."
    if isinstance(error, psycopg.ProgrammingError) and state is None:
        return "Give a URL such as postgresql://user@host/database."
    if state is None and isinstance(error, psycopg.Error) and _is_refusal(error):
        return "Check the user, the password and the name of the database in the URL."
    if fitting := [begin for begin in _WAYS_OUT if (state or "").startswith(begin)]:
        return _WAYS_OUT[max(fitting, key=len)]
    return _REACHED if state is not None and not state.startswith(_TRANSIENT) else _NOT_REACHED


def _server_of(url: str) -> str:
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "an invalid address"
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"{host}{port}, database {parts.get('dbname') or parts.get('user') or 'of the user'!s}"
