"""Which workers of one host live, by locks that the operating system drops when a process ends, however it ends."""

import os
import sys
from contextlib import suppress
from glob import escape
from pathlib import Path

from planner_ext.durable.errors import StoreError, WorkerInUseError
from planner_ext.durable.names import check_worker_id
from planner_ext.durable.private import create_private

__all__ = ["LockedWorkers", "drop_lock", "take_lock"]


class LockedWorkers:
    """The workers of one SQLite file: each holds a lock on ``{file}.{worker_id}.lock`` as long as it lives.

    Implements `planner_ext.durable.liveness.Workers`.
    """

    def __init__(self, path: Path, worker_id: str) -> None:
        """Take the worker's lock.

        Raises:
            WorkerInUseError: If a living process has it.
            StoreError: If the name or the folder cannot be used.
        """
        check_worker_id(worker_id)
        self._path = path = path.resolve()
        self.worker_id = worker_id
        descriptor = take_lock(self._lock(worker_id))
        if descriptor is None:
            raise WorkerInUseError(
                f"The worker {worker_id!r} of {path} is in use by a process that lives. Give each worker a name of its "
                "own, or none."
            )
        self._descriptor = descriptor

    async def alive(self, worker_id: str) -> bool:
        """Whether a worker's lock is held; what a dead one left is cleared away."""
        if worker_id == self.worker_id:
            return True
        lock = self._lock(worker_id)
        if not lock.exists():
            return False
        if (descriptor := take_lock(lock)) is None:
            return True
        drop_lock(lock, descriptor)
        return False

    async def sweep(self) -> None:
        """Clear away the locks of workers that died."""
        for lock in self._path.parent.glob(f"{escape(self._path.name)}.*.lock"):
            await self.alive(lock.name.removeprefix(f"{self._path.name}.").removesuffix(".lock"))

    def release(self) -> None:
        """Give the worker's name free."""
        drop_lock(self._lock(self.worker_id), self._descriptor)

    def _lock(self, worker_id: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{worker_id}.lock")


def take_lock(lock: Path) -> int | None:
    """Open and lock a file; None where another process has it locked.

    Raises:
        StoreError: If the file cannot be made.
    """
    while True:
        try:
            descriptor = _open(lock)
        except OSError as error:
            raise StoreError(f"The lock {lock} cannot be made: {error.strerror}. Check the folder's rights.") from error
        if not _locked(descriptor):
            os.close(descriptor)
            return None
        if _is(lock, descriptor):
            return descriptor
        os.close(descriptor)  # it was cleared away between opening and locking


def _open(lock: Path) -> int:
    try:
        return create_private(lock)
    except FileExistsError:
        return os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)


def _is(lock: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(lock.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def drop_lock(lock: Path, descriptor: int) -> None:
    """Give a lock back, and clear its file away."""
    with suppress(OSError):
        lock.unlink()
    os.close(descriptor)


if sys.platform == "win32":
    import msvcrt

    def _locked(descriptor: int) -> bool:
        try:
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _locked(descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True
