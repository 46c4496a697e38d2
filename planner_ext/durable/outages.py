"""Which endpoints are out, and when they are tried again: one circuit for each, shared by a worker's runs.

While an endpoint is out, no run of the worker sends a request to it. When the delay has
passed, one request tries it, and the others are still refused. Its reply lets all of
them continue, at their own due times, which are spread; its fault doubles the delay.
"""

import random
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from planner_ext.core.errors import PlannerExtError, described
from planner_ext.durable.options import RetryPolicy
from planner_ext.engine.ports import Clock

_LONGEST_SECONDS = 3600.0
"""The longest delay that an endpoint's ``Retry-After`` makes: a week of it, or a mistake,
does not hold back all runs of a worker."""


@dataclass(slots=True)
class _Circuit:
    """An endpoint that is out.

    Attributes:
        faults: The tries that failed.
        until: When the next try may begin, by the monotonic clock.
        problem: The last fault.
        is_tried: Whether a request tries it now.
    """

    faults: int = 0
    until: float = 0.0
    problem: str = ""
    is_tried: bool = False


class Outages:
    """The endpoints that are out, as one worker sees them."""

    def __init__(self, clock: Clock, retry: RetryPolicy) -> None:
        self._clock = clock
        self._retry = retry
        self._circuits: dict[str, _Circuit] = {}
        self._revivals: int | None = None

    @contextmanager
    def request(self, endpoint: str) -> Generator[str]:
        """Enter a request; see `planner_ext.engine.ports.Circuit`."""
        circuit = self._circuits.get(endpoint)
        if circuit is not None:
            if circuit.is_tried or self._clock.monotonic() < circuit.until:
                yield f"not sent, as the endpoint is out: {circuit.problem}"
                return
            circuit.is_tried = True
        try:
            yield ""
        except PlannerExtError as error:
            if error.outage is None:
                self._circuits.pop(endpoint, None)
            # Requests that were under way when another one failed say nothing new.
            elif self._circuits.get(endpoint) is circuit:
                self._failed(endpoint, error, error.outage[1])
            raise
        else:
            self._circuits.pop(endpoint, None)
        finally:
            if circuit is not None:
                circuit.is_tried = False

    def forget(self) -> None:
        """Let the next requests be sent to all endpoints."""
        self._circuits.clear()

    def heed(self, revivals: int) -> None:
        """Forget all outages, if a person has revived a run since the last call."""
        if self._revivals not in (None, revivals):
            self.forget()
        self._revivals = revivals

    def delay(self, endpoint: str, waited: float) -> float:
        """Return the seconds until a run tries its endpoint again.

        They grow with the seconds that it has waited, and are spread over as many: a
        run whose own request is what the endpoint fails at tries it ever more rarely.
        """
        circuit = self._circuits.get(endpoint)
        until = 0.0
        if circuit is not None:
            until = circuit.until - self._clock.monotonic()
        spread = min(self._retry.max_delay, max(self._retry.first_delay, waited))
        jitter = random.uniform(0, spread)  # noqa: S311  (nothing is kept secret by it)
        return max(0.0, until) + jitter

    def _failed(
        self, endpoint: str, error: PlannerExtError, retry_after: float
    ) -> None:
        circuit = self._circuits.setdefault(endpoint, _Circuit())
        circuit.faults += 1
        asked = min(retry_after, _LONGEST_SECONDS)
        delay = max(self._retry.delay(circuit.faults), asked)
        circuit.until = self._clock.monotonic() + delay
        circuit.problem = described(error.__cause__ or error)
