"""A run in a file: read and written whole, for nobody else's eyes, signed where there is a key.

The key is the environment's ``PLANNER_EXT_KEY``: on a command line everybody on the machine could read it.
"""

import json
import os
import tempfile
from pathlib import Path

from planner_ext.errors import InvalidCheckpointError, PlannerInvalidConfigurationError
from planner_ext.hitl_manager import Checkpoint

__all__ = ["KEY_VARIABLE", "CheckpointFile"]

KEY_VARIABLE = "PLANNER_EXT_KEY"
"""The environment variable with the key that signs; unset or empty: unsigned."""


class CheckpointFile:
    """The file that a paused run waits in.

    Attributes:
        path: Where it is, as it was given.
    """

    def __init__(self, path: Path) -> None:
        """Name the file; nothing is read or written yet."""
        self.path = path
        self._target = Path(os.path.realpath(path))  # so that a link stays one

    def check_place(self) -> None:
        """Find out before the run whether it could be kept here.

        Raises:
            PlannerInvalidConfigurationError: If not.
        """
        folder = self._target.parent
        if self._target.is_dir():
            raise PlannerInvalidConfigurationError(f"{self.path} is a directory; name a file for the checkpoint.")
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise PlannerInvalidConfigurationError(
                f"The checkpoint cannot be written to {self.path}: {folder} is no directory that can be written to."
            )

    def read(self) -> Checkpoint:
        """Read the run.

        Raises:
            PlannerInvalidConfigurationError: If the file cannot be read.
            InvalidCheckpointError: If it holds no checkpoint, an altered one, or one signed with another key.
        """
        key = _key()
        try:
            text = self._target.read_text(encoding="utf-8")
        except OSError as error:
            raise PlannerInvalidConfigurationError(f"{self.path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise InvalidCheckpointError(f"{self.path} is no checkpoint: it is not text.") from None
        try:
            checkpoint = Checkpoint.from_json(text, key)
        except InvalidCheckpointError as error:
            hint = "" if key is None else f" The key is that of {KEY_VARIABLE}."
            raise InvalidCheckpointError(f"{self.path} cannot be used. {error}{hint}") from None
        if key is None and "signature" in json.loads(text):
            raise InvalidCheckpointError(
                f"{self.path} is signed, and {KEY_VARIABLE} is not set. Set it to the key that it was signed with."
            )
        return checkpoint

    def write(self, checkpoint: Checkpoint) -> None:
        """Write the run in one step: whoever reads sees the old file or the new one; its mode is 0600.

        Raises:
            PlannerInvalidConfigurationError: If it cannot be written; then the old file is as it was.
        """
        try:
            self._replace(checkpoint.to_json(_key()))
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


def _key() -> bytes | None:
    return os.fsencode(os.environ.get(KEY_VARIABLE, "")) or None
