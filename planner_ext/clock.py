"""The clock that runs use unless they are given another one."""

import asyncio
import time

__all__ = ["SystemClock"]


class SystemClock:
    """The machine's time. Implements `planner_ext.ports.Clock`."""

    def now(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds of a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        await asyncio.sleep(seconds)
