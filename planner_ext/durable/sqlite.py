"""Runs in one SQLite file: on one host, in write-ahead mode, each transaction on disk before it returns.

Each worker locks a file beside the database; the lock ends with the process.
"""

import asyncio
import os
import queue
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from glob import escape
from pathlib import Path
from typing import ClassVar, Self, TypeAlias

from planner_ext.durable.database import (
    GET_SCHEMA,
    SCHEMAS,
    Execute,
    Row,
    Step,
    Waits,
    check_schema,
)
from planner_ext.durable.errors import (
    DuplicateRowError,
    StoreError,
    WorkerInUseError,
    redacted,
)
from planner_ext.engine.concurrency import in_thread

_BUSY_SECONDS = 30.0
"""How long a transaction waits for the transactions of other processes."""

_RETRY_SECONDS = 0.001
_WAIT_SECONDS = 0.1
"""How long to wait before a transaction that the disk or a lock has failed is tried again."""

_MAX_GROUP = 100
"""The most callers that one transaction serves."""

_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs"),
    *("fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs", "fuse.rclone"),
)
"""File systems that several machines share: their locks, and the memory that SQLite's
processes share, do not hold."""
_TRUSTED = "PLANNER_EXT_TRUSTED_FILE_SYSTEMS"
_MOUNTS = Path("/proc/self/mountinfo")

_INVALID = (sqlite3.IntegrityError, sqlite3.DataError, ValueError, OverflowError)
"""What a key or a value of one caller raises."""

_Rows: TypeAlias = list[list[Row]]
_Work: TypeAlias = tuple[Sequence[Step], asyncio.Future[_Rows]]


class SqliteDatabase:
    """One SQLite file; implements `planner_ext.durable.database.Database`.

    Its connection lives in a dedicated thread. The steps of all callers of one turn of
    the event loop share one wait for the disk.
    """

    now: ClassVar[str] = "((julianday('now') - 2440587.5) * 86400.0)"
    age: ClassVar[str] = f"{now} - seen_at"
    is_locked: ClassVar[str] = "1"
    skip_locked: ClassVar[str] = ""
    hints: ClassVar[Sequence[Step]] = ()

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.waits = Waits(patience=0.0)
        self._path = path
        self._file = path.stat()
        self._connection = connection
        self._at_rest = _is_at_rest(path)
        self._gathered: list[_Work] = []
        self._work: queue.SimpleQueue[Sequence[_Work] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._serve, name=f"planner_ext {path.name}", daemon=True
        )
        self._closed = False
        self._thread.start()

    @classmethod
    async def open(
        cls, path: Path, *, create: bool = True, older: bool = False
    ) -> Self:
        """Open a file, and create its tables if they do not exist."""

        def opened() -> Self:
            # SQLite resolves the path once, whatever the process makes its directory.
            file = path.absolute()
            try:
                return cls(file, _connect(file, create, older=older))
            except sqlite3.Error as error:
                raise _as_store_error(file, error) from error
            except (OSError, ValueError) as error:
                reason = (
                    error.strerror
                    if isinstance(error, OSError)
                    else "a path has no NUL characters"
                )
                raise StoreError(
                    f"The store {_shown(file)} cannot be used: {reason}. Give the path of a file that this process may "
                    "read and write."
                ) from error

        return await in_thread(opened)

    async def transact(self, *steps: Step) -> Sequence[Sequence[Row]]:
        """See `planner_ext.durable.database.Database`."""
        if self._closed:
            raise StoreError(
                f"The store {_shown(self._path)} was closed. Use it inside its async with block."
            )
        loop = asyncio.get_running_loop()
        done: asyncio.Future[_Rows] = loop.create_future()
        if not self._gathered:
            loop.call_soon(self._hand_over)
        self._gathered.append((steps, done))
        return await done

    async def backup(self, path: Path) -> None:
        """See `planner_ext.durable.database.Database`."""

        def copy() -> None:
            with (
                new_file(path),
                closing(sqlite3.connect(self._path)) as source,
                closing(sqlite3.connect(path)) as target,
            ):
                # In one step: one state of the database, which no writer makes it start again.
                source.backup(target)

        try:
            await in_thread(copy)
        except sqlite3.Error as error:
            raise StoreError(
                f"The backup {_shown(path)} cannot be written: {error}. Check the disk."
            ) from error

    async def scrub(self) -> None:
        """See `planner_ext.durable.database.Database`: splits of pages leave copies that ``secure_delete`` misses."""

        def rewrite() -> None:
            with closing(_connect(self._path, create=False)) as connection:
                milliseconds = int(_BUSY_SECONDS * 1000)
                connection.execute(f"PRAGMA busy_timeout = {milliseconds}")
                connection.execute("VACUUM")
                log = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                is_busy, *_ = log.fetchone()
            if is_busy:
                raise StoreError(
                    f"The log of {_shown(self._path)} is being read, and keeps what was deleted. End the tool that has "
                    "it open, and repeat the command."
                )

        try:
            await in_thread(rewrite)
        except sqlite3.Error as error:
            raise _as_store_error(self._path, error) from error

    @contextmanager
    def connection(self, *, timeout: float) -> Generator[Execute]:
        """Open a second connection; without checkpoints, its commits never wait for the disk."""
        uri = f"{self._path.as_uri()}?mode=rw"
        try:
            with closing(
                sqlite3.connect(
                    uri,
                    uri=True,
                    timeout=min(timeout, _BUSY_SECONDS),
                    isolation_level=None,
                )
            ) as connection:
                connection.execute("PRAGMA synchronous = NORMAL")
                connection.execute("PRAGMA wal_autocheckpoint = 0")
                yield lambda statement, values: connection.execute(
                    statement, dict(values)
                ).fetchall()
        except sqlite3.Error as error:
            raise _as_store_error(self._path, error) from error

    async def holds_lock(self, worker_id: str) -> bool:
        """Whether a process holds a worker's lock; True if this one may not open it."""
        return await in_thread(
            partial(_is_locked, lock_file(self._path.resolve(), worker_id))
        )

    async def close(self) -> None:
        """Finish the transactions that were begun, and close the file."""
        if not self._closed:
            self._closed = True
            self.waits.leave()
            self._hand_over()
            self._work.put(None)
            await in_thread(self._thread.join)

    def _hand_over(self) -> None:
        if self._gathered:
            self._work.put(self._gathered)
            self._gathered = []

    def _serve(self) -> None:
        """Perform callers' steps until `close`; one wait for the disk serves all that wait."""
        closing = False
        while not closing:
            gathered = [self._work.get()]
            while not self._work.empty():
                gathered.append(self._work.get())
            closing = gathered[-1] is None
            work = [one for works in gathered for one in works or ()]
            for first in range(0, len(work), _MAX_GROUP):
                group = work[first : first + _MAX_GROUP]
                outcomes = self._transact([steps for steps, _ in group])
                # The loop is closed, and its callers have ended.
                with suppress(RuntimeError):
                    group[0][1].get_loop().call_soon_threadsafe(
                        _deliver, group, outcomes
                    )
        self._connection.close()

    def _transact(
        self, group: Sequence[Sequence[Step]]
    ) -> Sequence[_Rows | StoreError]:
        """Perform callers' steps in one transaction; wait while the disk or a lock lets none through."""
        with self.waits.transaction() as waits:
            while True:
                try:
                    return self._perform_all(group)
                except (sqlite3.Error, *_INVALID) as error:
                    problem = _as_store_error(self._path, error)
                    if not (_code(error) in _PASSING and waits(problem)):
                        return [problem for _ in group]
                except StoreError as error:
                    return [error for _ in group]
                time.sleep(_WAIT_SECONDS)

    def _perform_all(
        self, group: Sequence[Sequence[Step]]
    ) -> Sequence[_Rows | StoreError]:
        if not self._is_same_file():
            raise StoreError(
                f"The store {_shown(self._path)} was moved, replaced or removed while it was open: what is "
                "written now would be lost. Put the file that was there back, with those beside it, and start the run "
                "again."
            )
        reads = all(
            statement.lstrip().startswith("SELECT")
            for steps in group
            for statement, _ in steps
        )
        if self._at_rest:  # what workers write afterwards would not be seen
            self._connection.close()
            self._at_rest = _is_at_rest(self._path)
            self._connection = _connect(self._path, create=False)
        with self._connection as connection:
            _with_retries(
                lambda: connection.execute("BEGIN" if reads else "BEGIN IMMEDIATE")
            )
            if len(group) == 1:
                return [self._perform(group[0])]
            return [self._perform_apart(steps) for steps in group]

    def _is_same_file(self) -> bool:
        """Whether the path still leads to the open file: SQLite would keep writing into a deleted one."""
        try:
            return os.path.samestat(self._path.stat(), self._file)
        except OSError:
            return False

    def _perform(self, steps: Sequence[Step]) -> _Rows:
        return [
            self._connection.execute(statement, dict(values)).fetchall()
            for statement, values in steps
        ]

    def _perform_apart(self, steps: Sequence[Step]) -> _Rows | StoreError:
        """Perform one caller's steps; an invalid key or value fails only these."""
        connection = self._connection
        connection.execute("SAVEPOINT one")
        try:
            return self._perform(steps)
        except _INVALID as error:
            connection.execute("ROLLBACK TO one")
            return _as_store_error(self._path, error)
        finally:
            # The whole transaction was rolled back, this savepoint included.
            with suppress(sqlite3.Error):
                connection.execute("RELEASE one")


def _deliver(group: Sequence[_Work], outcomes: Sequence[_Rows | StoreError]) -> None:
    for (_, done), outcome in zip(group, outcomes, strict=True):
        if done.done():  # its caller was cancelled
            continue
        if isinstance(outcome, StoreError):
            done.set_exception(outcome)
        else:
            done.set_result(outcome)


def _with_retries(work: Callable[[], object]) -> None:
    """Retry what another process blocks, at short intervals: SQLite's own grow to a tenth of a second."""
    end = time.monotonic() + _BUSY_SECONDS
    while True:
        try:
            work()
        except sqlite3.OperationalError as error:
            busy = _code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            if not busy or time.monotonic() > end:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            return


def _connect(path: Path, create: bool, *, older: bool = False) -> sqlite3.Connection:
    if not path.parent.is_dir():
        raise StoreError(
            f"The store {_shown(path)} cannot be opened: its folder does not exist. Create {_shown(path.parent)} first."
        )
    _check_disk(path)
    if not path.exists():
        if not create:
            raise StoreError(
                f"There is no store {_shown(path)}. Give the file that the workers use. A worker, or runs submit "
                "--create, makes a new one."
            )
        with suppress(FileExistsError):  # another process was faster
            os.close(_create_private(path))
    mode = "?mode=ro&immutable=1" if _is_at_rest(path) else ""
    connection = sqlite3.connect(
        f"{path.as_uri()}{mode}",
        uri=True,
        timeout=0,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        _with_retries(
            lambda: _prepare(
                connection, f"The store {_shown(path)}", create=create, older=older
            )
        )
    except BaseException:
        connection.close()
        raise
    return connection


def _check_disk(path: Path) -> None:
    """Refuse a file of a network file system, by its name; Linux alone names it."""
    device = path.parent.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}" if hasattr(os, "major") else ""
    trusted = os.environ.get(_TRUSTED, "").split(",")
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ():
        mount, _, source = line.partition(" - ")
        kind = source.split(" ", 1)[0]
        if number in mount.split(" ")[2:3] and kind in _NETWORK and kind not in trusted:
            raise StoreError(
                f"The store {_shown(path)} is on a network file system ({kind}), whose locks do not keep two machines "
                "apart. Give a file on a disk of this machine, or use PostgreSQL. If no other machine opens the file "
                f"and its locks hold, say so: {_TRUSTED}={kind}."
            )


def _is_at_rest(path: Path) -> bool:
    """Whether this process may not write a file or its folder, and no other one has the file open.

    It is read as it is; else SQLite would leave files that the workers cannot write.
    """
    may_write = os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)
    return not may_write and not os.path.exists(f"{os.path.realpath(path)}-wal")


def _prepare(
    connection: sqlite3.Connection, store: str, *, create: bool, older: bool
) -> None:
    has_tables = _has_tables(connection, store, create=create, older=older)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA secure_delete = ON")
    if has_tables:
        return
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        # Another process may have created them.
        if not _has_tables(connection, store, create=create, older=older):
            for schema in SCHEMAS:
                for statement, values in schema.steps():
                    connection.execute(statement, dict(values))


def _has_tables(
    connection: sqlite3.Connection, store: str, *, create: bool, older: bool
) -> bool:
    """Whether a file has a store's tables; one with none of them may become a store."""
    there = {
        name
        for (name,) in connection.execute(
            "SELECT name FROM sqlite_master WHERE type = 'table'"
        )
    }
    missing = _NEEDED - there
    if create and missing == _NEEDED:
        return False
    if missing:
        raise StoreError(
            f"{store} is not one of planner_ext, or damaged: it lacks {', '.join(sorted(missing))}. Give the file that "
            "the workers use, or restore it from a backup; it was not changed."
        )
    check_schema(store, connection.execute(GET_SCHEMA).fetchall(), older=older)
    return True


_NEEDED = frozenset(
    {"planner_schema", "planner_runs", "planner_journal", "planner_approvals"}
)
"""Tables that every store has."""

_WAYS_OUT: dict[int, str] = {
    sqlite3.SQLITE_ERROR: "SQLite refused its tables: damaged, or of another version. Restore it from a backup",
    sqlite3.SQLITE_FULL: "the disk is full. Free space and start the run again: it continues where it stopped",
    sqlite3.SQLITE_BUSY: "another process holds its lock. End the tool that has it open, and start the run again",
    sqlite3.SQLITE_LOCKED: "another process holds its lock. End the tool that has it open, and start the run again",
    sqlite3.SQLITE_READONLY: "it is read-only. Give this process the right to write the file and its folder",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened. Check that it is a file that this process may read and write",
    sqlite3.SQLITE_NOTADB: "it is not an SQLite database. Give another path; the file was not changed",
    sqlite3.SQLITE_CORRUPT: "it is damaged. Restore it from a backup, or recover it with the sqlite3 tool's .recover",
    sqlite3.SQLITE_TOOBIG: "a text is longer than SQLite takes. Let the functions return less, or a reference",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write it. Check the disk, and start the run again",
}


_PASSING = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
)
"""What may pass without a change of the file: a lock, a full disk, one that failed or
takes no writes."""

_CONFLICTS = (
    sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY,
    sqlite3.SQLITE_CONSTRAINT_UNIQUE,
    sqlite3.SQLITE_CONSTRAINT_NOTNULL,
)


def _code(error: Exception) -> int:
    """Return the primary code of an SQLite error; 0 for another one."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _as_store_error(path: Path, error: Exception) -> StoreError:
    if getattr(error, "sqlite_errorcode", 0) in _CONFLICTS:
        return DuplicateRowError(str(error))
    way_out = _WAYS_OUT.get(_code(error), "")
    return StoreError(
        f"The store {_shown(path)} cannot be used: {way_out or 'SQLite refused'} ({error})."
    )


def _shown(path: Path) -> str:
    return redacted(str(path))


class LockedWorkers:
    """The workers of one SQLite file: each holds a lock on ``{file}.{worker_id}.lock`` as long as it lives."""

    def __init__(self, path: Path, worker_id: str) -> None:
        """Acquire the worker's lock.

        Raises:
            WorkerInUseError: If a living process has it.
            StoreError: If the folder cannot be used.
        """
        self._path = path.resolve()
        self.name = worker_id
        self.worker_id = worker_id
        self.hinted = asyncio.Event()
        descriptor = take_lock(self._lock(worker_id))
        if descriptor is None:
            raise WorkerInUseError(
                f"The worker {worker_id!r} of {self._path} is in use by a process that lives. Give each worker "
                "another name, or no name."
            )
        self._descriptor = descriptor

    async def __aenter__(self) -> Self:
        for lock in self._path.parent.glob(f"{escape(self._path.name)}.*.lock"):
            self._is_held(
                lock.name.removeprefix(f"{self._path.name}.").removesuffix(".lock")
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        drop_lock(self._lock(self.worker_id), self._descriptor)

    def missing(self, is_locked: Mapping[str, bool]) -> set[str]:
        """Return the workers that hold no lock; delete the lock of a dead one."""
        return {worker_id for worker_id in is_locked if not self._is_held(worker_id)}

    def _is_held(self, worker_id: str) -> bool:
        lock = self._lock(worker_id)
        if worker_id == self.worker_id or not lock.exists():
            return worker_id == self.worker_id
        descriptor = take_lock(lock)
        if descriptor is None:
            return True
        drop_lock(lock, descriptor)
        return False

    def _lock(self, worker_id: str) -> Path:
        return lock_file(self._path, worker_id)


def lock_file(path: Path, worker_id: str) -> Path:
    """Return the file that a worker of the store at a resolved path locks."""
    return path.with_name(f"{path.name}.{worker_id}.lock")


def _is_locked(lock: Path) -> bool:
    """Return whether a process has locked a file."""
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    try:
        _lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def take_lock(lock: Path) -> int | None:
    """Open and lock a file; None if another process has locked it."""
    while True:
        try:
            descriptor = _open(lock)
        except OSError as error:
            raise StoreError(
                f"The lock {lock} cannot be made: {error.strerror}. Check the folder's rights."
            ) from error
        try:
            _lock(descriptor)
        except OSError:  # another process has locked it
            os.close(descriptor)
            return None
        with suppress(FileNotFoundError):
            if os.path.samestat(lock.stat(), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # it was deleted between opening and locking


def drop_lock(lock: Path, descriptor: int) -> None:
    """Delete a lock's file, and release the lock."""
    with suppress(OSError):
        lock.unlink()
    os.close(descriptor)


def _open(lock: Path) -> int:
    try:
        return _create_private(lock)
    except FileExistsError:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def new_file(path: Path) -> Generator[None]:
    """Create a file that only its owner may use, for a block; deleted if the block fails.

    Raises:
        StoreError: If it exists, or cannot be written.
    """
    try:
        descriptor = _create_private(path)
        try:
            yield
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StoreError(
            f"{_shown(path)} cannot be written: {error.strerror}. Give the path of a new file."
        ) from error


def _create_private(path: Path) -> int:
    """Create a file that only its owner may use, under any umask."""
    descriptor = os.open(
        os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
    )
    if hasattr(os, "fchmod"):  # a umask may have removed the owner's rights, too
        os.fchmod(descriptor, 0o600)
    return descriptor


if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
