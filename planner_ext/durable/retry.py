"""When a run that a fault interrupted is retried, and which faults are final."""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass

from planner_ext.core.errors import InvalidLimitError, PlannerExtError, shown
from planner_ext.core.limits import is_count, is_positive_number

_PASSING = (408, 409, 429)
"""HTTP statuses of a client error that a retry may cure: timeout, conflict, too many requests."""


def is_final(error: BaseException) -> bool:
    """Return whether a retry cannot cure a fault.

    Final are: an HTTP status 4xx other than 408, 409 and 429, and a failed authentication, in the error or its causes;
    and an error of this package that names an option, a journal or a run that cannot be used. Not final are: any other
    failure of the endpoint, of the store, and of the application's own code, such as ``arguments_for``; nor a service
    that this worker's kernel lacks, which another worker's may have.
    """
    for cause in _causes(error):
        status = getattr(cause, "status_code", None) or getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return 400 <= status < 500 and status not in _PASSING
        if type(cause).__name__.endswith("AuthenticationError"):
            return True
    return isinstance(error, PlannerExtError) and not error.may_pass


def _causes(error: BaseException | None) -> Generator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often, and when, a run that a fault interrupted is driven again.

    Attributes:
        attempts: How often a run is driven without a new reply or result before it is ``failed``; 1 never retries.
        first_delay: Seconds before the first retry; the next delays are twice as long each, and up to this much longer
            at random, so that many runs do not retry at once.
        max_delay: The longest delay, in seconds.
        is_final: Returns whether a fault is never retried.

    Raises:
        PlannerInvalidConfigurationError: If a value is invalid, naming it.
    """

    attempts: int = 5
    first_delay: float = 1.0
    max_delay: float = 300.0
    is_final: Callable[[BaseException], bool] = is_final

    def __post_init__(self) -> None:
        if not is_count(self.attempts, least=1):
            problem = f"attempts must be a whole number, 1 or more; got {shown(self.attempts)}."
            raise InvalidLimitError(problem)
        for name in ("first_delay", "max_delay"):
            if not is_positive_number(value := getattr(self, name)):
                problem = f"{name} must be a number of seconds above 0; got {shown(value)}."
                raise InvalidLimitError(problem)

    def delay(self, retries: int) -> float:
        """Return the seconds before a retry, counted from 1; the formula of tenacity's `wait_exponential_jitter`."""
        jitter = random.uniform(0, self.first_delay)  # noqa: S311  (nothing is kept secret by it)
        return min(self.max_delay, self.first_delay * 2.0 ** min(retries - 1, 64) + jitter)
