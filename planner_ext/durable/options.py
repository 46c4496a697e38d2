"""The options of a worker, declared once for every store."""

import inspect
import random
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from planner_ext.approval.decisions import (
    AuthorizeHooks,
    check_authorize,
    is_duration,
)
from planner_ext.approval.waiting import InDoubt
from planner_ext.core.causes import causes_of, status_of
from planner_ext.core.errors import PlannerExtError, require, shown
from planner_ext.core.limits import is_count, is_positive_number
from planner_ext.core.values import frozen
from planner_ext.durable.chain import signer_of
from planner_ext.durable.errors import StoreError
from planner_ext.durable.notices import Listener, Notifier, Webhook
from planner_ext.engine.ports import Clock

_F = TypeVar("_F", bound=Callable[..., Any])

TAG = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,200}")
"""What a run can be found by, see `planner_ext.durable.RunFilters`."""

_WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


_PASSING = (408, 409, 429)
"""HTTP statuses of a client error that a retry may cure: timeout, conflict, too many
requests."""


def is_final(error: BaseException) -> bool:
    """Return whether a retry cannot cure a fault.

    Final are an HTTP status 4xx other than 408, 409 and 429, a failed authentication,
    in the error or its causes, and an error of this package that names an option, a
    journal or a run that cannot be used. Any other fault is retried, also where this
    worker's kernel lacks the service.
    """
    status = status_of(error)
    if status is not None:
        return 400 <= status < 500 and status not in _PASSING
    if any(
        type(cause).__name__.endswith("AuthenticationError")
        for cause in causes_of(error)
    ):
        return True
    return isinstance(error, PlannerExtError) and not error.may_pass


@frozen
class RetryPolicy:
    """How often, and when, a run is driven again after a fault.

    A fault of an endpoint (408, 429, 5xx, no connection, a broken one) uses up no
    attempt: the run waits for the endpoint, with the same growing delays, which all
    runs of this worker share, or with those of ``Retry-After``, an hour at most.

    Nor does a store that takes no transactions for a while: its server restarts, fails
    over or is read-only, its disk is full, its file is locked. The worker waits with
    what it has in hand: results are recorded when that is over, and no call is in doubt.

    Attributes:
        attempts: How often a run is driven without a new reply or result before it is
            ``failed``; 1 never retries, and waits for no endpoint.
        first_delay: Seconds before the first retry. Each next delay is twice as long;
            a random time of up to ``first_delay`` is added.
        max_delay: The longest delay, in seconds.
        outage_seconds: How long a run waits for an endpoint before it is ``failed``,
            and a worker for its store before it ends; 12 hours by default.
        is_final: Returns whether a fault is never retried.

    Raises:
        PlannerInvalidConfigurationError: If a value is invalid, naming it.
    """

    attempts: int = 5
    first_delay: float = 1.0
    max_delay: float = 300.0
    outage_seconds: float = 43_200.0
    is_final: Callable[[BaseException], bool] = is_final

    def __post_init__(self) -> None:
        attempts = self.attempts
        counts = is_count(attempts, least=1)
        require("attempts", counts, "a whole number, 1 or more", attempts)
        for name in ("first_delay", "max_delay", "outage_seconds"):
            value = getattr(self, name)
            fits = is_positive_number(value)
            require(name, fits, "a number of seconds above 0", value)

    def delay(self, retries: int) -> float:
        """Return the seconds before a retry, from 1, as tenacity's `wait_exponential_jitter`."""
        jitter = random.uniform(0, self.first_delay)  # noqa: S311  (nothing is kept secret by it)
        return min(
            self.max_delay, self.first_delay * 2.0 ** min(retries - 1, 64) + jitter
        )


class WorkerOptions(TypedDict, total=False):
    """The options that `Runs.sqlite` and `Runs.postgres` take by keyword.

    Attributes:
        worker_id: This worker's name, unique among living workers. None generates one.
        in_doubt: Who handles a call that had started when its process died, that may
            not simply run again, and whose probe cannot tell: a ``person``, as a
            pending approval, or the ``model``, as the call's result. Default
            ``person``.
        poll_seconds: How often to poll the store for changes by others; default 0.25.
        retry: How often, and when, workers drive a run again after a fault here. None
            is the default `RetryPolicy`.
        lease_seconds: How long this worker may be frozen or cut off; after that others
            take its runs, and it stops. Default 30.
        max_deaths: How often a run may end its worker's process in a call, without a
            new result, before it is quarantined; default 3. For one that was in a request, or in
            a call beside those of others, it is the square of this number: most of
            these deaths are not its fault.
        grace_seconds: How many seconds calls and requests in flight may take when the
            block is left; 0 interrupts them. Replies and results that have arrived by
            then have 4 s more to be recorded. Default 25: Kubernetes kills after 30.
        clock: The time source; None uses the machine's clock.
        authorize: Asked before this worker takes a decision, and before this process
            acts on a run, besides the hook of the planner's `ApprovalSettings`; see
            `Approvals.connect`. A refused decision of an approver leaves its call
            waiting. A run that begins
            here is bound to the hook: a worker without it does not continue the run,
            and a process without any hook may not act on it.
        on_paused: Called with a `RunNotice` when a run of the store has paused; async
            or not. A notice is delivered at least once, in a separate task, and is
            retried for a day. Any worker may deliver it, so all workers should have the
            same listeners.
        on_ended: As ``on_paused``, when a run has ended or was cancelled.
        on_failed: As ``on_paused``, when a run has failed or was quarantined.
        notify: A URL to which all these notices are posted as JSON, by Standard
            Webhooks (standardwebhooks.com): ``https://...``, or ``http://...`` within a
            trusted network. ``text`` has the notice for a person. Headers:
            ``webhook-id``, the notice's id, and ``webhook-timestamp``, seconds since
            the epoch. A response of 2xx takes the notice; a redirection is not
            followed. Neither the URL's path nor the key is logged.
        notify_key: Signs the posted notices: ``whsec_`` and base64, or any other text
            as it is. The header ``webhook-signature`` is then ``v1,`` and the base64 of
            the HMAC-SHA256 of ``{id}.{timestamp}.{body}``. None does not sign.
        heads: A file outside the store to which the head of a journal is appended at
            each pause for a person and each end, for ``planner-ext runs verify``.
            Notices have it, too.
        heads_key: Signs heads: an Ed25519 private key in PEM. None does not sign. Needs
            the extra ``sign``.
    """

    worker_id: str | None
    in_doubt: InDoubt
    poll_seconds: float
    retry: RetryPolicy | None
    lease_seconds: float
    max_deaths: int
    grace_seconds: float
    clock: Clock | None
    authorize: AuthorizeHooks
    on_paused: Listener | None
    on_ended: Listener | None
    on_failed: Listener | None
    notify: str | None
    notify_key: str | None
    heads: str | Path | None
    heads_key: str | None


@frozen
class WorkerSettings:
    """`WorkerOptions`, validated and with defaults."""

    worker_id: str | None = None
    in_doubt: InDoubt = "person"
    poll_seconds: float = 0.25
    retry: RetryPolicy | None = None
    lease_seconds: float = 30.0
    max_deaths: int = 3
    grace_seconds: float = 25.0
    clock: Clock | None = None
    authorize: AuthorizeHooks = None
    on_paused: Listener | None = None
    on_ended: Listener | None = None
    on_failed: Listener | None = None
    notify: str | None = None
    notify_key: str | None = None
    heads: str | Path | None = None
    heads_key: str | None = None

    def __post_init__(self) -> None:
        in_doubt = self.in_doubt
        lease = self.lease_seconds
        deaths = self.max_deaths
        grace = self.grace_seconds
        who = in_doubt in ("person", "model")
        require("in_doubt", who, "'person' or 'model'", in_doubt)
        seconds = "a number of seconds above 0"
        require("lease_seconds", is_duration(lease), seconds, lease)
        check_poll_seconds(self.poll_seconds)
        checked_hook(self.authorize)
        counts = is_count(deaths, least=1)
        require("max_deaths", counts, "a whole number, 1 or more", deaths)
        fits = grace == 0 or is_duration(grace)
        require("grace_seconds", fits, "a number of seconds, 0 or more", grace)
        if self.worker_id is not None:
            expected = "worker_id must be 1 to 100 letters, digits, dots, dashes or underscores"
            checked_name(self.worker_id, _WORKER_ID, expected)

    def name(self) -> str:
        """Return the worker's name; the default is generated."""
        return self.worker_id or f"worker-{uuid.uuid4().hex[:12]}"

    def notifier(self) -> Notifier:
        """Make the notifier of the listeners; an invalid one is named."""
        webhook = None
        if self.notify is not None:
            webhook = Webhook(self.notify, self.notify_key)
        return Notifier(
            {
                "paused": self.on_paused,
                "ended": self.on_ended,
                "failed": self.on_failed,
            },
            webhook,
            None if self.heads is None else Path(self.heads),
            None if self.heads_key is None else signer_of(self.heads_key),
        )


def takes_worker_options(function: _F) -> _F:
    """Spell out `WorkerOptions` in a function's signature."""
    signature = inspect.signature(function)
    *own, _ = signature.parameters.values()
    options = inspect.signature(WorkerSettings).parameters.values()
    function.__signature__ = signature.replace(parameters=[*own, *options])  # pyright: ignore[reportFunctionMemberAccess]  (what inspect reads)
    return function


def check_poll_seconds(given: object) -> None:
    """Raise `InvalidLimitError` unless this is a number of seconds above 0."""
    expected = "a number of seconds above 0"
    require("poll_seconds", is_duration(given), expected, given)


def checked_hook(
    authorize: AuthorizeHooks,
) -> AuthorizeHooks:
    """Return an ``authorize`` hook, or raise `InvalidLimitError` if it is not a function."""
    check_authorize(authorize)
    return authorize


def checked_tag(tag: object) -> str:
    """Return a tag of a run, else raise `StoreError`."""
    expected = "a tag must be 1 to 200 characters, without control characters"
    return checked_name(tag, TAG, expected)


def checked_name(name: object, pattern: re.Pattern[str], expected: str) -> str:
    """Return a name that fits a pattern, else raise `StoreError`."""
    if not isinstance(name, str) or pattern.fullmatch(name) is None:
        raise StoreError(f"{expected}; got {shown(name)}.")
    return name
