"""A run in a file: read and written whole, by one process at a time, with mode 0600, signed if there is a key.

The key comes from the environment (``PLANNER_EXT_CHECKPOINT_KEY``), since other processes can read a command line.
"""

import json
import os
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from planner_ext.core.facts import CallFinished, CallStarted, Fact
from planner_ext.durable.errors import StoreError
from planner_ext.durable.sqlite import drop_lock, take_lock
from planner_ext.errors import InvalidCheckpointError, PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Checkpoint

__all__ = ["CheckpointFile", "FileJournal", "environment_key"]

_KEY_VARIABLES = ("PLANNER_EXT_CHECKPOINT_KEY", "PLANNER_EXT_KEY")
"""The environment variables with the key that signs: the first one that is set and not empty."""


class CheckpointFile:
    """The file that a paused run waits in.

    Attributes:
        path: Where it is, as it was given.
    """

    def __init__(self, path: Path) -> None:
        """Set the path; nothing is read or written yet."""
        self.path = path
        self._target = Path(os.path.realpath(path))  # so that a symbolic link is kept
        self._lock = self._target.with_name(f".{self._target.name}.lock")

    @contextmanager
    def locked(self) -> Generator[Self]:
        """Check that the run can be kept here, and lock the file against other processes.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be written, or another process has locked it.
        """
        folder = self._target.parent
        if self._target.is_dir():
            raise PlannerInvalidConfigurationError(f"{self.path} is a directory; name a file for the checkpoint.")
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise PlannerInvalidConfigurationError(
                f"The checkpoint cannot be written to {self.path}: {folder} is no directory that can be written to."
            )
        try:
            descriptor = take_lock(self._lock)
        except StoreError as error:
            raise PlannerInvalidConfigurationError(f"{self.path} cannot be locked. {error}") from None
        if descriptor is None:
            raise PlannerInvalidConfigurationError(
                f"{self.path} is in use: another process works on this run. Nothing was run here. Try again when it "
                "has ended."
            )
        try:
            yield self
        finally:
            drop_lock(self._lock, descriptor)

    def read(self) -> Checkpoint:
        """Read the run.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be read.
            InvalidCheckpointError: If it holds no checkpoint, an altered one, or one signed with another key.
        """
        variable, key = _key()
        try:
            text = self._target.read_text(encoding="utf-8")
            checkpoint = Checkpoint.from_json(text, key)
        except OSError as error:
            raise PlannerInvalidConfigurationError(f"{self.path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise InvalidCheckpointError(f"{self.path} is no checkpoint: it is not text.") from None
        except InvalidCheckpointError as error:
            hint = f" The key is that of {variable}." if variable else ""
            raise InvalidCheckpointError(f"{self.path} cannot be used. {error}{hint}") from None
        if key is None and "signature" in json.loads(text):
            raise InvalidCheckpointError(
                f"{self.path} is signed, and PLANNER_EXT_KEY is not set. Set {' or '.join(_KEY_VARIABLES)} to the key "
                "that it was signed with."
            )
        return checkpoint

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the run atomically: a reader sees the old file or the new one; its mode is 0600.

        Raises:
            PlannerInvalidConfigurationError: If it cannot be written; then the old file is unchanged.
        """
        try:
            self._replace(checkpoint.to_json(environment_key()))
        except OSError as error:
            raise PlannerInvalidConfigurationError(
                f"The checkpoint cannot be written to {self.path}: {error.strerror}."
            ) from None

    def _replace(self, text: str) -> None:
        number, name = tempfile.mkstemp(dir=self._target.parent, prefix=f".{self._target.name}.")  # with mode 0600
        try:
            with open(number, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self._target)
        except BaseException:
            os.unlink(name)
            raise


class FileJournal:
    """Writes a run to its file while it works: a function starts only after the file records it.

    Implements `planner_ext.engine.ports.RunStore`.
    """

    def __init__(self, file: CheckpointFile | None, facts: Sequence[Fact]) -> None:
        """Continue the journal of a run; without a file it is not stored."""
        self._file = file
        self._facts = list(facts)

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:  # noqa: ARG002  (the port's signature)
        """Append facts, and write the file if a call has started or ended.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be written; then the function does not run.
        """
        self._facts[seq:] = facts
        if self._file is not None and any(isinstance(fact, CallStarted | CallFinished) for fact in facts):
            self._file.write(Checkpoint(tuple(self._facts)))


def environment_key() -> bytes | None:
    """Return the signing key of the environment, or None."""
    return _key()[1]


def _key() -> tuple[str, bytes | None]:
    name = next((name for name in _KEY_VARIABLES if os.environ.get(name)), "")
    return name, os.fsencode(os.environ[name]) if name else None
