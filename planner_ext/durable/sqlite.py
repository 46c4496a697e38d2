"""Runs in one SQLite file: on one host, in write-ahead mode, each transaction on disk before it is answered."""

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from planner_ext.core.errors import NewerSchemaError
from planner_ext.durable import statements as sql
from planner_ext.durable.database import Row, Step
from planner_ext.durable.errors import DuplicateRowError, StoreError

__all__ = ["SqliteDatabase"]

_BUSY_SECONDS = 30.0
"""How long a transaction waits for the ones of other processes."""

_Rows: TypeAlias = list[list[Row]]
_Work: TypeAlias = tuple[Sequence[Step], asyncio.Future[_Rows], asyncio.AbstractEventLoop]


class SqliteDatabase:
    """One SQLite file; implements `planner_ext.durable.database.Database`.

    The connection lives in a thread of its own, so that no wait for the disk holds up the event loop.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"planner_ext {path.name}", daemon=True)
        self._closed = False
        self._thread.start()

    @classmethod
    async def open(cls, path: Path, *, create: bool = True) -> "SqliteDatabase":
        """Open a file, and make its tables where they are not there.

        Args:
            path: The file.
            create: Whether to make the file; where not, a missing one is an error.

        Raises:
            StoreError: If it cannot be used; says why, and the way out.
            NewerSchemaError: If it was made by a newer version of this package.
        """
        return cls(path, await asyncio.to_thread(_connect, path, create))

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in one transaction; see `planner_ext.durable.database.Database`."""
        if self._closed:
            raise StoreError(f"The store {self._path} was closed. Use it inside its async with block.")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Rows] = loop.create_future()
        self._work.put((steps, done, loop))
        return await done

    async def close(self) -> None:
        """Finish what was given, and close the file."""
        if not self._closed:
            self._closed = True
            self._work.put(None)
            await asyncio.to_thread(self._thread.join)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            steps, done, loop = work
            try:
                deliver = _delivery(done, self._transact(steps), None)
            except Exception as error:
                deliver = _delivery(done, None, error)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(deliver)
        self._connection.close()

    def _transact(self, steps: Sequence[Step]) -> _Rows:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE" if any(map(_writes, steps)) else "BEGIN")
            answers = [connection.execute(statement, dict(values)).fetchall() for statement, values in steps]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                connection.rollback()
            raise _named(self._path, error) from error
        return answers


def _writes(step: Step) -> bool:
    return not step[0].lstrip().startswith("SELECT")


def _delivery(done: asyncio.Future[_Rows], rows: _Rows | None, error: Exception | None) -> Callable[[], None]:
    def deliver() -> None:
        if done.done():  # who waited was cancelled
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(rows or [])

    return deliver


def _connect(path: Path, create: bool) -> sqlite3.Connection:
    if not path.parent.is_dir():
        raise StoreError(f"The store {path} cannot be opened: its folder does not exist. Create {path.parent} first.")
    if not create and not path.exists():
        raise StoreError(f"There is no store {path}. Give the file that the workers use.")
    try:
        connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _named(path, error) from error
    try:
        _prepare(connection)
    except sqlite3.Error as error:
        connection.close()
        raise _named(path, error) from error
    except NewerSchemaError as error:
        connection.close()
        raise NewerSchemaError(f"The store {path} {error}") from None
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN IMMEDIATE")
    connection.execute(sql.TABLES[0])
    (number,) = connection.execute(sql.GET_SCHEMA).fetchone()
    if number is not None and number > sql.TABLE_SCHEMA:
        connection.rollback()
        raise NewerSchemaError(
            f"has tables of schema {number}; this version of planner_ext knows up to {sql.TABLE_SCHEMA}. "
            "Use the version that made it, or a newer one."
        )
    for statement in sql.TABLES:
        connection.execute(statement)
    connection.execute(sql.PUT_SCHEMA, {"number": sql.TABLE_SCHEMA})
    connection.execute("COMMIT")


_WAYS_OUT: dict[int, str] = {
    sqlite3.SQLITE_FULL: "the disk is full. Free space and start the run again: it goes on where it stands",
    sqlite3.SQLITE_BUSY: "another process holds its lock. End the tool that has it open, and start the run again",
    sqlite3.SQLITE_LOCKED: "another process holds its lock. End the tool that has it open, and start the run again",
    sqlite3.SQLITE_READONLY: "it is read-only. Give this process the right to write the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened. Check that it is a file that this process may read and write",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database. Give another path; the file was not changed",
    sqlite3.SQLITE_CORRUPT: "it is damaged. Restore it from a backup, or recover it with the sqlite3 tool's .recover",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write it. Check the disk, and start the run again",
}


def _named(path: Path, error: sqlite3.Error) -> StoreError:
    """Say what a database's error means for the one who has to mend it."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE):
        return DuplicateRowError(str(error))
    way_out = _WAYS_OUT.get(code & 0xFF, "")
    return StoreError(f"The store {path} cannot be used: {way_out or 'SQLite refused'} ({error}).")
