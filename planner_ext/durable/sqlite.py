"""Runs in one SQLite file: on one host, in write-ahead mode, each transaction on disk before it is answered."""

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from planner_ext.core.errors import NewerSchemaError
from planner_ext.durable import statements as sql
from planner_ext.durable.addresses import redacted
from planner_ext.durable.database import Row, Step
from planner_ext.durable.errors import DuplicateRowError, StoreError
from planner_ext.durable.private import create_private

__all__ = ["SqliteDatabase"]

_BUSY_SECONDS = 30.0
"""How long a transaction waits for the ones of other processes."""

_AGAIN_SECONDS = 0.001

_GROUP = 100
"""How many that wait are served by one transaction at most."""

_Rows: TypeAlias = list[list[Row]]
_Work: TypeAlias = tuple[Sequence[Step], asyncio.Future[_Rows], asyncio.AbstractEventLoop]


class SqliteDatabase:
    """One SQLite file; implements `planner_ext.durable.database.Database`.

    The connection lives in a thread of its own, so that no wait for the disk holds up the event loop.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._file = path.stat()
        self._connection = connection
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"planner_ext {path.name}", daemon=True)
        self._closed = False  # nothing more is taken
        self._closing = False  # nothing more is there
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

        def opened() -> SqliteDatabase:
            file = path.absolute()  # as SQLite has it, wherever the process goes
            try:
                return cls(file, _connect(file, create))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "a path has no NUL characters"
                raise StoreError(
                    f"The store {_shown(file)} cannot be used: {reason}. Give the path of a file that this process may "
                    "read and write."
                ) from error

        return await asyncio.to_thread(opened)

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """Perform steps in one transaction; see `planner_ext.durable.database.Database`."""
        if self._closed:
            raise StoreError(f"The store {_shown(self._path)} was closed. Use it inside its async with block.")
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
        while group := self._next_group():
            outcomes = self._transact([steps for steps, _, _ in group])
            for (_, done, loop), outcome in zip(group, outcomes, strict=True):
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(_deliver, done, outcome)
        self._connection.close()

    def _next_group(self) -> list[_Work]:
        """Wait for work, and take all there is: one wait for the disk serves everybody who waits for it."""
        group: list[_Work] = []
        work = None if self._closing else self._work.get()
        while work is not None:
            group.append(work)
            if len(group) == _GROUP or self._work.empty():
                return group
            work = self._work.get()
        self._closing = True
        return group

    def _transact(self, group: Sequence[Sequence[Step]]) -> Sequence[_Rows | StoreError]:
        begin = "BEGIN IMMEDIATE" if any(_writes(step) for steps in group for step in steps) else "BEGIN"
        connection = self._connection
        if not self._is_there():
            gone = StoreError(
                f"The store {_shown(self._path)} was moved, replaced or removed while it was open: what is "
                "written now would be lost. Put the file that was there back, with those beside it, and start the run "
                "again."
            )
            return [gone for _ in group]
        try:
            _patiently(lambda: connection.execute(begin))
            outcomes = [self._perform(steps) for steps in group]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                connection.rollback()
            return [_named(self._path, error) for _ in group]
        return outcomes

    def _is_there(self) -> bool:
        """Whether the path still leads to the open file: SQLite itself writes on into one that nobody can find."""
        try:
            return os.path.samestat(self._path.stat(), self._file)
        except OSError:
            return False

    def _perform(self, steps: Sequence[Step]) -> _Rows | StoreError:
        """Perform the steps of one among those of others, whose concern a key or value of this one is not."""
        connection = self._connection
        connection.execute("SAVEPOINT one")
        try:
            return [connection.execute(statement, dict(values)).fetchall() for statement, values in steps]
        except (sqlite3.IntegrityError, sqlite3.DataError, ValueError, OverflowError) as error:
            connection.execute("ROLLBACK TO one")
            return _named(self._path, error)
        finally:
            with suppress(sqlite3.Error):  # where the whole transaction is gone, so is this
                connection.execute("RELEASE one")


def _writes(step: Step) -> bool:
    return not step[0].lstrip().startswith("SELECT")


def _deliver(done: asyncio.Future[_Rows], outcome: _Rows | StoreError) -> None:
    if done.done():  # who waited was cancelled
        return
    if isinstance(outcome, StoreError):
        done.set_exception(outcome)
    else:
        done.set_result(outcome)


def _patiently(work: Callable[[], object]) -> None:
    """Repeat what another process is in the way of: soon, since SQLite's own waits grow to a tenth of a second."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            work()
        except sqlite3.OperationalError as error:
            busy = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > end:
                raise
            time.sleep(_AGAIN_SECONDS)
        else:
            return


def _connect(path: Path, create: bool) -> sqlite3.Connection:
    if not path.parent.is_dir():
        raise StoreError(
            f"The store {_shown(path)} cannot be opened: its folder does not exist. Create {_shown(path.parent)} first."
        )
    if not path.exists():
        if not create:
            raise StoreError(f"There is no store {_shown(path)}. Give the file that the workers use.")
        with suppress(FileExistsError):  # another process was faster
            os.close(create_private(path))
    try:
        connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _named(path, error) from error
    try:
        _patiently(lambda: _prepare(connection, create=create))
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.Error):
            raise _named(path, error) from error
        if isinstance(error, NewerSchemaError | StoreError):
            raise type(error)(f"The store {_shown(path)} {error}") from None
        raise
    return connection


def _prepare(connection: sqlite3.Connection, *, create: bool) -> None:
    _check(connection, create=create)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in sql.TABLES:
            connection.execute(statement)
        connection.execute(sql.PUT_SCHEMA, {"number": sql.TABLE_SCHEMA})
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.rollback()
        raise


def _check(connection: sqlite3.Connection, *, create: bool) -> None:
    """Refuse a file whose tables are not those of a store; where a store may be made, one without any is fine."""
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "planner_schema" not in there:
        if create and there.isdisjoint(_NEEDED):
            return
        raise StoreError(
            "is not one of planner_ext: it has no table planner_schema. Give the file that the workers use, or restore "
            "it from a backup; it was not changed."
        )
    (number,) = connection.execute(sql.GET_SCHEMA).fetchone()
    if not isinstance(number, int):
        raise StoreError(f"is damaged: the number of its tables is {number!r}. Restore it from a backup.")
    if number > sql.TABLE_SCHEMA:
        raise NewerSchemaError(
            f"has tables of schema {number}; this version of planner_ext knows up to {sql.TABLE_SCHEMA}. "
            "Use the version that made it, or a newer one."
        )
    if missing := sorted(_NEEDED - there):
        raise StoreError(f"is damaged: it lacks {', '.join(missing)}. Restore it from a backup; it was not changed.")


_NEEDED = frozenset({"planner_runs", "planner_journal", "planner_approvals"})
"""Tables without which nothing is known of the runs; they are made together with the number of their schema."""

_WAYS_OUT: dict[int, str] = {
    sqlite3.SQLITE_ERROR: "SQLite refused its tables: they are damaged, or not planner_ext's. Restore it from a backup",
    sqlite3.SQLITE_FULL: "the disk is full. Free space and start the run again: it goes on where it stands",
    sqlite3.SQLITE_BUSY: "another process holds its lock. End the tool that has it open, and start the run again",
    sqlite3.SQLITE_LOCKED: "another process holds its lock. End the tool that has it open, and start the run again",
    sqlite3.SQLITE_READONLY: "it is read-only. Give this process the right to write the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened. Check that it is a file that this process may read and write",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database. Give another path; the file was not changed",
    sqlite3.SQLITE_CORRUPT: "it is damaged. Restore it from a backup, or recover it with the sqlite3 tool's .recover",
    sqlite3.SQLITE_TOOBIG: "a text is longer than SQLite takes. Let the functions return less, or a reference",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write it. Check the disk, and start the run again",
}


def _named(path: Path, error: Exception) -> StoreError:
    """Say what a database's error means for the one who has to mend it."""
    code = getattr(error, "sqlite_errorcode", 0)
    if code in (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE):
        return DuplicateRowError(str(error))
    way_out = _WAYS_OUT.get(code & 0xFF, "")
    return StoreError(f"The store {_shown(path)} cannot be used: {way_out or 'SQLite refused'} ({error}).")


def _shown(path: Path) -> str:
    return redacted(str(path))
