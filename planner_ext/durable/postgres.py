"""Runs in PostgreSQL, over psycopg; a transaction happens exactly once also where the connection breaks.

A worker needs a session of its own, which holds its lock. Every other process may
connect through a pooler that gives each transaction another session.

A connection that is lost during a commit does not say whether that happened. So each
connection has a row in ``planner_commits``, where every writing transaction leaves a
fresh token: the row tells. While a server restarts, transactions wait.
"""

import asyncio
import hashlib
import logging
import math
import re
import shlex
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import ClassVar, LiteralString, Self, TypeVar, cast

import psycopg
import psycopg.sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from planner_ext.durable.database import (
    GET_SCHEMA,
    SCHEMAS,
    Execute,
    Row,
    Step,
    Value,
    Waits,
    check_schema,
)
from planner_ext.durable.errors import (
    DuplicateRowError,
    StoreError,
    WorkerInUseError,
    redacted,
    without_passwords,
)
from planner_ext.engine.concurrency import end_tasks
from planner_ext.engine.log import escaped

logger = logging.getLogger(__name__)

_Connection = psycopg.AsyncConnection[Row]

_COMMITS = """
    CREATE TABLE planner_commits (
        connection TEXT PRIMARY KEY,
        token TEXT NOT NULL,
        at TIMESTAMPTZ NOT NULL DEFAULT now()
    )
"""
_TABLES = """
    SELECT relname FROM pg_class
    WHERE relkind = 'r' AND relname LIKE 'planner\\_%' AND relname <> 'planner_workers' AND pg_table_is_visible(oid)
"""
"""Heartbeats do not wait for `PostgresDatabase.scrub`."""
_ADD_CONNECTION = "INSERT INTO planner_commits (connection, token) VALUES (%(connection)s, '') ON CONFLICT DO NOTHING"
_REMOVE_CONNECTIONS = "DELETE FROM planner_commits WHERE connection = %(connection)s OR at < now() - interval '7 days'"
_SIGN = """
    INSERT INTO planner_commits (connection, token) VALUES (%(connection)s, %(token)s)
    ON CONFLICT (connection) DO UPDATE SET token = EXCLUDED.token, at = now()
"""
_SIGNED = (
    "SELECT token FROM planner_commits WHERE connection = %(connection)s FOR UPDATE"
)
"""Waits until the lost connection's server process has released the row."""

_TABLES_LOCK = 0x706C616E6E6572  # "planner"
_HAS_TABLES = """
    SELECT EXISTS (SELECT 1 FROM pg_class WHERE relname = 'planner_schema' AND pg_table_is_visible(oid))
"""
"""After waiting for `_TABLES_LOCK`, ``to_regclass`` would answer from a cache."""
_SYNCHRONOUS = """
    SELECT set_config('synchronous_commit', 'on', {is_local}) WHERE current_setting('synchronous_commit') = 'off'
"""
_POOLER_TRIES = 10
_POOLER_SECONDS = 5.0
"""How long another session of a pooler is waited for."""
_PATIENCE_SECONDS = 60.0
"""How long a server that cannot be reached is waited for."""
_LEAVE_SECONDS = 5.0
"""How long closing waits for a server that does not answer."""
_KEEPALIVES = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3}
"""Seconds and probes after which a vanished machine is noticed; PostgreSQL's own
default is two hours."""

_HOLDS_LOCK = """
    EXISTS (
        SELECT 1 FROM pg_locks
        WHERE locktype = 'advisory' AND objsubid = 1 AND granted
          AND (CAST(classid AS bigint) << 32) | CAST(objid AS bigint) = {key}
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    )
"""
_KEY_OF_OWNER = """
    CAST(CAST('x' || encode(substr(sha256(convert_to('planner_ext worker ' || owner, 'UTF8')), 1, 8), 'hex')
              AS bit(64)) AS bigint)
"""
"""As `_key`."""
_RECENTLY_STARTED = "clock_timestamp() - pg_postmaster_start_time() < interval '5 s'"
"""A server that has just started has ended all sessions; their workers are about to
lock again."""

_CHANNEL = "planner_ext_due"
_HINT = f"SELECT pg_notify('{_CHANNEL}', '')"

_CONNECTIONS = 4
"""Those of a store; each runs one transaction at a time."""
_MISSING_SECONDS = 1.0
"""How long a worker's lock is missing until the worker counts as dead: a lost session
is opened again at once."""
_UNSURE_SECONDS = 5.0
"""How long a worker whose own session was lost judges no other: where a server failed
over, all sessions were."""
_CHECK_SECONDS = 1.0

_READ_ONLY = "25006"
_TRANSIENT = ("08", "40", "53", "57P", "58030", _READ_ONLY)
"""Beginnings of SQLSTATEs that a retry may cure: a lost connection, a conflict, no free
slot, memory or disk, a server that restarts, a disk that fails, or a server that takes no
writes while another one takes over."""

_WAYS_OUT = {
    "28": "Check the user and the password in the URL.",
    "3D000": "Create the database, or name another one in the URL.",
    "42501": "Grant the user the rights on the tables, or create them with a user who has them.",
    "42": "Was the store made by another version? Use that version, or another database.",
    "53100": "Free space on the server's disk; the run continues from its last recorded step.",
    "53300": "Raise max_connections, or let fewer workers run.",
    _READ_ONLY: "This server takes no writes, as a standby does; use the primary's address.",
}
"""The way out by the beginning of the SQLSTATE; the longest match counts."""

_NOT_REACHED = "Start the server, or check host and port in the URL; runs continue from their last recorded step."

_REACHED = (
    "Look into the server's log for more; runs continue from their last recorded step."
)

_Result = TypeVar("_Result")


class PostgresDatabase:
    """A PostgreSQL database; implements `planner_ext.durable.database.Database`.

    Args:
        url: ``postgresql://...``.
        patience: Seconds to wait for an unreachable server.
    """

    now: ClassVar[str] = (
        "CAST(EXTRACT(EPOCH FROM clock_timestamp()) AS DOUBLE PRECISION)"
    )
    age: ClassVar[str] = f"""
        LEAST({now} - seen_at,
              CAST(EXTRACT(EPOCH FROM clock_timestamp() - pg_postmaster_start_time()) AS DOUBLE PRECISION))
    """
    is_locked: ClassVar[str] = (
        f"({_HOLDS_LOCK.format(key=_KEY_OF_OWNER)} OR {_RECENTLY_STARTED})"
    )
    skip_locked: ClassVar[str] = "FOR UPDATE SKIP LOCKED"
    hints: ClassVar[Sequence[Step]] = ((_HINT, {}),)

    def __init__(self, url: str, *, patience: float = _PATIENCE_SECONDS) -> None:
        self.waits = Waits(patience, url)
        self._url = url
        self._connections = [_StoreConnection(url) for _ in range(_CONNECTIONS)]
        self._free: asyncio.LifoQueue[_StoreConnection] = asyncio.LifoQueue()
        for one in self._connections:
            self._free.put_nowait(one)
        self._closed = False
        self._writing: set[asyncio.Task[Sequence[Sequence[Row]]]] = set()

    async def open(
        self, *, patience: float = 0.0, create: bool = True, older: bool = False
    ) -> None:
        """Reach the server, within so many seconds, and create missing tables."""

        async def prepare() -> None:
            async with await _connect(self._url) as connection:
                await _prepare(connection, create=create, older=older)

        with _as_store_errors(self._url):
            await _with_retries(prepare, Waits(patience, self._url))

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in one transaction; a writing one completes even if its caller is cancelled."""
        if self._closed:
            raise StoreError(
                "The store was closed. Use it inside its async with block."
            )
        if all(statement.lstrip().startswith("SELECT") for statement, _ in steps):
            async with self._borrowed() as one:
                return await _with_retries(partial(one.read, steps), self.waits)
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

    async def scrub(self) -> None:
        """Rewrite the tables, each under a lock that nobody reads beside, and the statistics, which have samples.

        The server's log (WAL), its archive and its backups keep what was deleted.
        """
        with _as_store_errors(self._url):
            async with await _connect(self._url) as connection:
                found = await connection.execute(_TABLES)
                for (table,) in await found.fetchall():
                    name = psycopg.sql.Identifier(table)
                    command = psycopg.sql.SQL("VACUUM (FULL, ANALYZE) {}")
                    await connection.execute(command.format(name))
                await connection.execute("VACUUM (FULL) pg_statistic")
                with suppress(psycopg.errors.InsufficientPrivilege):
                    # The server removes the old files at a checkpoint.
                    await connection.execute("CHECKPOINT")

    @contextmanager
    def connection(self, *, timeout: float) -> Generator[Execute]:
        """Open a further connection; a server that does not answer ends it after the timeout."""
        where = _conninfo(self._url, tcp_user_timeout=str(int(timeout * 1000)))
        with (
            _as_store_errors(self._url),
            psycopg.connect(where, autocommit=True) as connection,
        ):
            connection.execute("SET synchronous_commit = off")

            def execute(statement: str, values: Mapping[str, Value]) -> Sequence[Row]:
                cursor = connection.execute(_query(statement), dict(values))
                return cursor.fetchall() if cursor.description else ()

            yield execute

    async def holds_lock(self, worker_id: str) -> bool:
        """Whether a session holds a worker's lock."""
        statement = f"SELECT {_HOLDS_LOCK.format(key=':key')}"
        (rows,) = await self.transact((statement, {"key": _key(worker_id)}))
        return rows[0] == (True,)

    async def close(self) -> None:
        """Wait for every transaction to end, and close the connections."""
        self._closed = True
        self.waits.leave()
        await asyncio.gather(*self._writing, return_exceptions=True)
        for one in self._connections:
            await one.leave()

    def _written(self, task: asyncio.Task[Sequence[Sequence[Row]]]) -> None:
        self._writing.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it for a cancelled caller

    @asynccontextmanager
    async def _borrowed(self) -> "AsyncGenerator[_StoreConnection]":
        one = await self._free.get()
        try:
            with _as_store_errors(self._url):
                yield one
        finally:
            self._free.put_nowait(one)

    async def _commit(self, steps: Sequence[Step]) -> Sequence[Sequence[Row]]:
        """Perform steps and commit; if the connection breaks, find out whether that happened, or retry."""
        async with self._borrowed() as one:
            while True:
                token = uuid.uuid4().hex
                connection, rows = await _with_retries(
                    partial(one.write, steps, token), self.waits
                )
                try:
                    await connection.execute("COMMIT")
                except (psycopg.Error, OSError) as error:
                    if not _may_retry(error):
                        raise
                    if not await _with_retries(
                        partial(one.is_committed, token), self.waits
                    ):
                        continue
                return rows


class _StoreConnection:
    """One connection, opened on first use, with its row in ``planner_commits``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._name = uuid.uuid4().hex
        self._connection: _Connection | None = None
        self._entered = False

    async def read(self, steps: Sequence[Step]) -> Sequence[Sequence[Row]]:
        async with self._session() as connection:
            try:
                async with connection.pipeline():
                    cursors = [
                        await connection.execute(_query(statement), dict(values))
                        for statement, values in steps
                    ]
                return [await cursor.fetchall() for cursor in cursors]
            except asyncio.CancelledError:
                # The answer of the server has no reader any more.
                await connection.close()
                raise

    async def write(
        self, steps: Sequence[Step], token: str
    ) -> tuple[_Connection, Sequence[Sequence[Row]]]:
        """Perform steps in a transaction that is left open, and fetch what they return."""
        async with self._session() as connection:
            try:
                # Before the transaction, so that `is_committed` waits for the row.
                if not self._entered:
                    await connection.execute(
                        _ADD_CONNECTION, {"connection": self._name}
                    )
                    self._entered = True
                async with connection.pipeline():
                    await connection.execute("BEGIN")
                    if _is_pooled(connection):
                        await connection.execute(_SYNCHRONOUS.format(is_local="true"))
                    cursors = [
                        await connection.execute(_query(statement), dict(values))
                        for statement, values in steps
                    ]
                    await connection.execute(
                        _SIGN, {"token": token, "connection": self._name}
                    )
                return connection, [
                    await cursor.fetchall() if cursor.description else ()
                    for cursor in cursors
                ]
            except BaseException:
                try:
                    await connection.rollback()
                except psycopg.Error:
                    await connection.close()
                raise

    async def is_committed(self, token: str) -> bool:
        """Return whether the transaction that wrote this token was committed."""
        async with self._session() as connection:
            signed = await connection.execute(_SIGNED, {"connection": self._name})
            return await signed.fetchall() == [(token,)]

    async def leave(self) -> None:
        if self._connection is not None:
            # An unreachable server has ended the session already.
            with suppress(psycopg.Error, TimeoutError):
                if self._entered:
                    async with asyncio.timeout(_LEAVE_SECONDS):
                        await self._connection.execute(
                            _REMOVE_CONNECTIONS, {"connection": self._name}
                        )
            await self._connection.close()
        self._connection = None
        self._entered = False

    @asynccontextmanager
    async def _session(self) -> "AsyncGenerator[_Connection]":
        """Yield the connection, opened if need be; close one to a server that takes no writes.

        Another server may take them at this address.
        """
        if self._connection is None or self._connection.closed:
            self._connection = await _connect(self._url)
        try:
            yield self._connection
        except psycopg.errors.ReadOnlySqlTransaction:
            await self._connection.close()
            raise


class PostgresWorkers:
    """Holds this process's lock as a worker, in a session that listens for hints, too: its loss is noticed at once.

    Attributes:
        name: One process may have it at a time.
        worker_id: A unique id; a restarted worker gets a new one.
        hinted: Set at a notification.

    Args:
        url: ``postgresql://...``.
        name: The worker's name.
    """

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.worker_id = f"{name}/{uuid.uuid4().hex}"
        self.hinted = asyncio.Event()
        self._url = url
        self._connection: _Connection
        self._keeping: asyncio.Task[None]
        self._is_held = True
        self._judges_from = 0.0
        self._missing_since: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        """Acquire the locks.

        Raises:
            WorkerInUseError: If a living process has the name.
            StoreError: If the database cannot be used, or a pooler keeps no session.
        """
        with _as_store_errors(self._url):
            self._connection = await _with_retries(
                self._locked, Waits(_PATIENCE_SECONDS, self._url)
            )
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the session, and with it the locks."""
        await end_tasks(self._keeping)
        await self._connection.close()

    def missing(self, is_locked: Mapping[str, bool]) -> set[str]:
        """Return the workers whose lock has been missing for a while; none while this worker's own was."""
        now = time.monotonic()
        self._missing_since = {
            worker_id: self._missing_since.get(worker_id, now)
            for worker_id, held in is_locked.items()
            if not held
        }
        if self.worker_id in self._missing_since:
            self._is_held = False
        if not self._is_held or now < self._judges_from:
            return set()
        return {
            worker_id
            for worker_id, since in self._missing_since.items()
            if now - since >= _MISSING_SECONDS
        }

    async def _keep(self) -> None:
        """Wait for notifications; acquire the locks again when the session was lost."""
        while True:
            try:
                while self._is_held:
                    async for _ in self._connection.notifies(timeout=_CHECK_SECONDS):
                        self.hinted.set()
            except (psycopg.Error, OSError) as error:
                logger.warning(
                    "The session of worker %r was lost: %s", self.name, escaped(error)
                )
            self._is_held = False
            await self._connection.close()
            # however long the server is away, or the lost session keeps the locks
            self._connection = await _with_retries(
                self._locked, Waits(math.inf, self._url), may_retry=_always
            )
            self._judges_from = time.monotonic() + _UNSURE_SECONDS
            self._is_held = True

    async def _locked(self) -> _Connection:
        connection = await _connect(self._url)
        try:
            if _is_pooled(connection) and not await self._keeps_session(connection):
                raise StoreError(
                    f"The worker {self.name!r} needs a session of its own, which holds its lock, and the pooler at "
                    f"{_server_of(self._url)} gives each transaction another session. Give the address of the server, "
                    "or of a pooler in session mode; Approvals and Runs.connect may use this one."
                )
            for name in (self.name, self.worker_id):
                taken = await (
                    await connection.execute(
                        "SELECT pg_try_advisory_lock(%s)", (_key(name),)
                    )
                ).fetchone()
                if taken != (True,):
                    raise WorkerInUseError(
                        f"The worker {self.name!r} is in use by a process that lives. Give each worker another name; "
                        "the name of a worker that has just died is free within seconds."
                    )
            await connection.execute(f"LISTEN {_CHANNEL}")
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _keeps_session(self, connection: _Connection) -> bool:
        """Whether a pooler keeps a connection's session while another one takes one for a transaction."""
        own = await _session_id(connection)
        try:
            async with asyncio.timeout(_POOLER_SECONDS):
                for _ in range(_POOLER_TRIES):
                    async with await _connect(self._url) as other, other.transaction():
                        if (
                            await _session_id(other) == own
                            or await _session_id(connection) != own
                        ):
                            return False
        except TimeoutError:  # the pooler has no session for the other one
            pass
        return True


def _key(name: str) -> int:
    """Map a name to its lock number: the first eight bytes of a digest."""
    digest = hashlib.sha256(f"planner_ext worker {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


def _conninfo(url: str, **more: str) -> str:
    options = {name: str(value) for name, value in _KEEPALIVES.items()}
    return make_conninfo(
        url, connect_timeout="10", application_name="planner_ext", **options, **more
    )


async def _connect(url: str) -> _Connection:
    """Open a connection on which commits wait for the disk and a vanished machine is noticed.

    Settings of a session that a pooler lends are left alone, and statements are not
    prepared in it.
    """
    connection = await psycopg.AsyncConnection.connect(_conninfo(url), autocommit=True)
    try:
        if await _session_id(connection) != connection.info.backend_pid:
            connection.prepare_threshold = None
            return connection
        await connection.execute(_SYNCHRONOUS.format(is_local="false"))
        for name, value in _KEEPALIVES.items():
            await connection.execute(cast("LiteralString", f"SET tcp_{name} = {value}"))
    except BaseException:
        await connection.close()
        raise
    return connection


def _is_pooled(connection: _Connection) -> bool:
    """Whether a connection leads to a pooler; see `_connect`."""
    return connection.prepare_threshold is None


async def _session_id(connection: _Connection) -> int:
    row = await (await connection.execute("SELECT pg_backend_pid()")).fetchone()
    assert row is not None
    return row[0]


async def _prepare(connection: _Connection, *, create: bool, older: bool) -> None:
    """Create the tables under a lock, since concurrent creation fails."""
    if await _has_tables(connection, older=older):
        return
    if not create:
        raise StoreError(
            "There is no store in this database. Give the one that the workers use. A worker, or runs submit "
            "--create, makes a new one."
        )
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock(%s)", (_TABLES_LOCK,))
        # Another process may have created them.
        if not await _has_tables(connection, older=older):
            await connection.execute(_COMMITS)
            for schema in SCHEMAS:
                for statement, values in schema.steps():
                    await connection.execute(_query(statement), dict(values))


async def _has_tables(connection: _Connection, *, older: bool) -> bool:
    """Whether the database has a store's tables, which are checked."""
    there = await (await connection.execute(_HAS_TABLES)).fetchone()
    if there != (True,):
        return False
    answer = await connection.execute(_query(GET_SCHEMA))
    check_schema("This database", await answer.fetchall(), older=older)
    return True


@cache
def _query(statement: str) -> LiteralString:
    """Convert a statement to psycopg's placeholders; its text is the package's own."""
    return cast("LiteralString", re.sub(r":([a-z_]+)", r"%(\1)s", statement))


def _may_retry(error: Exception) -> bool:
    """Return whether a retry may help: the server is unreachable, restarts, or asks for it."""
    if isinstance(error, OSError):
        return True
    if not isinstance(error, psycopg.Error):
        return False
    if error.sqlstate is None:
        return isinstance(
            error, psycopg.OperationalError | psycopg.InterfaceError
        ) and not _is_refusal(error)
    return error.sqlstate.startswith(_TRANSIENT)


def _always(_: Exception) -> bool:
    return True


async def _with_retries(
    attempt: Callable[[], Awaitable[_Result]],
    waits: Waits,
    *,
    may_retry: Callable[[Exception], bool] = _may_retry,
) -> _Result:
    """Retry until the server takes the attempt, or the patience is over."""
    delay = 0.05
    with waits.transaction() as may_wait:
        while True:
            try:
                return await attempt()
            except (psycopg.Error, OSError, StoreError) as error:
                if not (may_retry(error) and may_wait(error)):
                    raise
            await asyncio.sleep(delay)
            delay = min(delay * 2, 1.0)


def _is_refusal(error: psycopg.Error) -> bool:
    """Return whether the server refused the connection; psycopg sets no SQLSTATE for that."""
    return any(
        word in str(error)
        for word in (
            "does not exist",
            "authentication failed",
            "invalid connection option",
        )
    )


@contextmanager
def _as_store_errors(url: str) -> Generator[None]:
    """Convert a PostgreSQL error to a `StoreError` with the way out, and no password."""
    try:
        yield
    except (psycopg.errors.UniqueViolation, psycopg.errors.NotNullViolation) as error:
        raise DuplicateRowError(
            f"A row with this key is there already: {error}"
        ) from error
    except (psycopg.Error, OSError, UnicodeError) as error:
        line = " ".join(str(error).split())
        said = line.rstrip(".?") or type(error).__name__
        text = (
            f"PostgreSQL at {_server_of(url)} cannot be used: {said}. {_way_out(error)}"
        )
        is_clean = without_passwords(str(error), url) == str(error)
        raise StoreError(without_passwords(text, url)) from (
            error if is_clean else None
        )


def _way_out(error: psycopg.Error | OSError | UnicodeError) -> str:
    state = None
    if isinstance(error, psycopg.Error):
        state = error.sqlstate
    if isinstance(error, psycopg.DataError | UnicodeError):
        return (
            "Give a name that there may be: without NUL characters and lone surrogates."
        )
    if isinstance(error, psycopg.ProgrammingError) and state is None:
        return "Give a URL such as postgresql://user@host/database."
    if state is None and isinstance(error, psycopg.Error) and _is_refusal(error):
        return "Check the user, the password and the name of the database in the URL."
    fitting = [begin for begin in _WAYS_OUT if (state or "").startswith(begin)]
    if fitting:
        return _WAYS_OUT[max(fitting, key=len)]
    return (
        _REACHED
        if state is not None and not state.startswith(_TRANSIENT)
        else _NOT_REACHED
    )


def _server_of(url: str) -> str:
    try:
        parts = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        return "an invalid address"
    host = parts.get("host") or parts.get("hostaddr") or "the local socket"
    port = f":{parts['port']}" if parts.get("port") else ""
    return f"{host}{port}, database {parts.get('dbname') or parts.get('user') or 'of the user'!s}"
