"""The gauge of what waits in a store: ``planner_ext.approvals.waiting``.

It is read from the store when metrics are collected: a run pauses in one process and is
decided in another. Every worker reports the same number, so dashboards take the
greatest, not the sum.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Final

from opentelemetry.metrics import CallbackOptions, Observation, get_meter

_counts: Final[dict[object, tuple[str, Callable[[], int]]]] = {}


@contextmanager
def waiting_reported(store: str, count: Callable[[], int]) -> Generator[None]:
    """Report how many approvals wait in a store.

    Args:
        store: The store's address, without a password.
        count: Counts them, in the thread that collects metrics.
    """
    key = object()
    _counts[key] = store, count
    try:
        yield
    finally:
        del _counts[key]


def _observe(_: CallbackOptions) -> Iterable[Observation]:
    return [
        Observation(count(), {"planner_ext.store": store})
        for store, count in tuple(_counts.values())
    ]


get_meter("planner_ext").create_observable_gauge(
    "planner_ext.approvals.waiting",
    [_observe],
    "{approval}",
    "Approvals that wait for a decision in a store.",
)
