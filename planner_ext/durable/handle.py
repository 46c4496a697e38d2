"""What the application holds of a run that is being driven."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["RunHandle"]

R = TypeVar("R")


class RunHandle(Generic[R]):
    """A run of a store, which goes on whether or not anybody waits for it.

    Attributes:
        run_id: Its name.
    """

    def __init__(
        self, run_id: str, task: Callable[[], "asyncio.Task[R]"], decided: Callable[[], Awaitable[bool]]
    ) -> None:
        """Hold a run.

        Args:
            run_id: Its name.
            task: Drives it, or gives the task that does.
            decided: Waits until there is something to do for the paused run; False where it has ended.
        """
        self.run_id = run_id
        self._task = task
        self._decided = decided
        self._segment = task()

    async def result(self) -> R:
        """Wait for the run's next pause or end; a paused run's result is a value with what is pending.

        Asked again after a pause, it goes on with what was decided meanwhile; without decisions it is the same pause.
        Where another worker drives the run, this waits for that one. Who is cancelled while waiting cancels nothing.

        Raises:
            Exception: On a fault, what a planner's ``invoke`` raises; the run is unfinished, and goes on when it is
                started again.
        """
        if self._segment.done() and not self._segment.cancelled() and self._segment.exception() is None:
            self._segment = self._task()
        return await asyncio.shield(self._segment)

    async def finished(self) -> R:
        """Wait for the run's end, over every pause: for whoever decides, and for questions to expire.

        Raises:
            Exception: As `result`.
        """
        result = await self.result()
        while await self._decided():
            result = await self.result()
        return result
