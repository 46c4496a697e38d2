"""When and where segments are worked off, where a store does not leave that to its own workers."""

from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

__all__ = ["Segments"]

R = TypeVar("R")


class Segments(Protocol):
    """Queues, times and recovers the segments of runs: from a run's start or a decision to its next pause or end."""

    async def run(self, run_id: str, work: Callable[[], Awaitable[R]]) -> R:
        """Work off the segment that is due of a run, here and now; should this process die, another one does.

        Raises:
            Exception: What ``work`` raises.
        """
        ...

    async def serve(self, work: Callable[[str], Awaitable[object]], *, at_most: int) -> None:
        """From now on, work off whatever segment is due of whatever run, by ``work``; at most so many at once."""
        ...

    async def close(self) -> None:
        """Leave what is worked off here to others."""
        ...
