"""An application's clock, held to what a run needs of one."""

import inspect
import math
from typing import Any

from planner_ext.core.shown import shown
from planner_ext.kernel.errors import PlannerInvalidConfigurationError

__all__ = ["CheckedClock"]


class CheckedClock:
    """Passes on an application's clock, and names what is not a time. Implements `planner_ext.ports.Clock`.

    A ``monotonic`` that goes back stands still instead, so that no run gets back time that it has spent.
    """

    def __init__(self, clock: Any) -> None:
        """Wrap a clock."""
        self._clock = clock
        self._latest = -math.inf

    def now(self) -> float:
        """Seconds since the epoch.

        Raises:
            PlannerInvalidConfigurationError: If the clock gives something else than a finite number.
        """
        return _seconds("now", self._clock.now())

    def monotonic(self) -> float:
        """Seconds that never go back.

        Raises:
            PlannerInvalidConfigurationError: If the clock gives something else than a finite number.
        """
        self._latest = max(self._latest, _seconds("monotonic", self._clock.monotonic()))
        return self._latest

    async def sleep(self, seconds: float) -> None:
        """Wait; a clock that waits without ``await`` will do."""
        waiting = self._clock.sleep(seconds)
        if inspect.isawaitable(waiting):
            await waiting


def _seconds(name: str, given: object) -> float:
    if isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given):
        return given
    raise PlannerInvalidConfigurationError(
        f"clock.{name}() must give a finite number of seconds; got {shown(given)}. Give it as time.time() and "
        "time.monotonic() do."
    )
