"""What runs and workers may be called."""

import re
import uuid

from planner_ext.core.errors import shown
from planner_ext.durable.errors import StoreError

__all__ = ["check_worker_id", "checked_run_id", "new_worker_id"]

_WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")
_RUN_ID = re.compile(r"[^/\x00-\x1f\x7f\ud800-\udfff]{1,200}")


def check_worker_id(worker_id: str) -> None:
    """Refuse a name that cannot be part of a file's.

    Raises:
        StoreError: Saying what it may consist of.
    """
    if not isinstance(worker_id, str) or _WORKER_ID.fullmatch(worker_id) is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(
            f"worker_id must be 1 to 100 letters, digits, dots, dashes or underscores; got {shown(worker_id)}."
        )


def new_worker_id() -> str:
    """Make a worker's name."""
    return f"worker-{uuid.uuid4().hex[:12]}"


def checked_run_id(run_id: str | None) -> str:
    """Give a run's name back where it can be one; make one of None.

    Raises:
        StoreError: Saying what it may consist of.
    """
    if run_id is None:
        return uuid.uuid4().hex
    if not isinstance(run_id, str) or _RUN_ID.fullmatch(run_id) is None:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError(f"run_id must be 1 to 200 characters, without / and control characters; got {shown(run_id)}.")
    return run_id
