"""Files that their owner alone may read and write, whatever the umask: a store and what is beside it."""

import os
from pathlib import Path

__all__ = ["create_private"]


def create_private(path: Path) -> int:
    """Create a file with mode 0600 and return its descriptor; a link to a file that is not there is followed.

    Raises:
        FileExistsError: If there is one already; it is not opened.
        OSError: If it cannot be created.
    """
    descriptor = os.open(os.path.realpath(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    if hasattr(os, "fchmod"):  # a umask may have taken more than others' rights
        os.fchmod(descriptor, 0o600)
    return descriptor
