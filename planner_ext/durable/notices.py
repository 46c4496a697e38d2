"""Notices of runs that paused, ended or failed: rows in the store, delivered to callbacks and a webhook.

A row is written in the transaction that changes the run's status, if a worker
subscribed to the event within the last day. Any worker with a listener delivers it, at
least once. The store's clock tells when the next attempt is due.
"""

# ruff: noqa: S608  (only the package's own text is put into a statement)

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from planner_ext.core.errors import InvalidLimitError, PlannerExtError, described, shown
from planner_ext.core.values import frozen
from planner_ext.durable.chain import keep_head
from planner_ext.durable.database import Row, Value, read_values
from planner_ext.durable.errors import (
    ApprovalRefusedError,
    StoreError,
    UnknownRunError,
    reading_row,
)
from planner_ext.durable.listing import OPEN
from planner_ext.durable.records import (
    PendingApproval,
    RunRecord,
    approval_path,
    read_approval,
)
from planner_ext.durable.store import LATER, STORE_NOW, JournalStore, times
from planner_ext.engine.concurrency import called, end_tasks, in_thread
from planner_ext.engine.ports import Clock

if TYPE_CHECKING:
    from httpx import AsyncClient

logger = logging.getLogger(__name__)

_DAY = 86_400.0
_FIRST_DELAY = 1.0
_LONGEST_DELAY = 900.0
"""Seconds before the second attempt, and the most before a later one; each is twice the
one before."""
_ATTEMPT_SECONDS = 30.0
"""How long one attempt may take."""
_LEASE = 60.0
"""Seconds in which a worker that has claimed a notice delivers it, before another one
may."""
_LAST_SECONDS = 5.0
"""How long a worker that leaves delivers what is due."""
_AT_ONCE = 100
"""The most notices that a worker delivers at once: so many slow answers hold up the
next notice."""
_MOST_PENDING = 1000

_SUBSCRIBE = """
    INSERT INTO planner_subscriptions (event, until) VALUES (:event, :until)
    ON CONFLICT (event) DO UPDATE SET until = excluded.until
"""
_DUE = f"""
    SELECT id, run_id, event, body, created_at, attempts, next_at FROM planner_notices
    WHERE next_at IS NOT NULL AND (attempts = 0 OR next_at <= (SELECT {STORE_NOW}))
          AND event IN (:paused, :ended, :failed)
    ORDER BY next_at, id LIMIT :limit
"""
_CLAIM = f"""
    UPDATE planner_notices SET next_at = {LATER}, attempts = attempts + 1
    WHERE id = :id AND next_at = :seen RETURNING id
"""
_SETTLE = f"""
    UPDATE planner_notices SET next_at = {LATER}, delivered_at = :delivered_at, problem = :problem, body = :body
    WHERE id = :id
"""
_OF_RUN = """
    SELECT id, run_id, event, body, created_at, attempts, next_at, delivered_at, problem FROM planner_notices
    WHERE run_id = :run_id ORDER BY created_at, id
"""

NoticeEvent: TypeAlias = Literal["paused", "ended", "failed"]

_EVENTS: tuple[NoticeEvent, ...] = ("paused", "ended", "failed")


@frozen
class RunNotice:
    """An event of a run, for the application.

    Attributes:
        id: The notice's unique name; a repeated delivery has the same one.
        run_id: The run.
        event: ``paused``: it waits for decisions; ``ended``; ``failed``: it has failed,
            or is in quarantine.
        status: The run's status then, as in `RunRecord`.
        problem: Why it failed, or ended without an answer; "" without a problem.
        pending: What waits in a paused run when this is delivered.
        where: The store's path or address, without passwords; `Approvals.connect` and
            ``planner-ext approvals`` decide there.
        at: When it happened.
        inbox: The address of the inbox, as ``planner-ext serve --public-url`` or
            `Runs.set_inbox` last gave it; "" if that is not known.
        head: The head of its journal at a pause or end, for `planner_ext.durable.chain`:
            kept outside the store it proves what was in it. Else "".
    """

    id: str
    run_id: str
    event: NoticeEvent
    status: str
    goal: str
    problem: str
    pending: tuple[PendingApproval, ...]
    where: str
    at: datetime
    inbox: str = ""
    head: str = ""

    @property
    def text(self) -> str:
        """The notice for a person, as plain text: the goal, and what waits with its arguments and address."""
        from planner_ext.readable.plain import notice_text  # noqa: PLC0415  (only to notify)

        state = f"{self.status}: {self.problem}" if self.problem else self.status
        addresses = [self.address_of(call) for call in self.pending]
        return notice_text(f"{self.goal}\n{state}", self.pending, addresses)

    def address_of(self, call: PendingApproval) -> str:
        """Return the address of a call's page in the inbox; "" if that is not known."""
        return self.inbox and f"{self.inbox}/{approval_path(call.id)}"

    def as_dict(self) -> dict[str, Any]:
        """Convert the notice to JSON values, with its text; times are in ISO format.

        Each pending call has its ``address``, as of `address_of`.
        """
        pending = [
            {**call.as_dict(), "address": self.address_of(call)}
            for call in self.pending
        ]
        return {
            **asdict(self),
            "text": self.text,
            "at": self.at.isoformat(),
            "pending": pending,
        }


@frozen
class NoticeRecord:
    """A notice in the store.

    Attributes:
        event: ``paused``, ``ended`` or ``failed``.
        status: The run's status then.
        at: When it happened; like the other times, in UTC.
        attempts: How often a worker has begun to deliver it.
        next_at: When it is delivered next; None once it was delivered or given up.
        delivered_at: When it was delivered, or None.
        problem: Why the last attempt failed; "" if it did not.
    """

    id: str
    run_id: str
    event: str
    status: str
    at: datetime
    attempts: int
    next_at: datetime | None
    delivered_at: datetime | None
    problem: str


Listener: TypeAlias = Callable[[RunNotice], Awaitable[object] | object]
"""Receives a notice; an exception is logged, and the call is retried later."""


async def notices_of(store: JournalStore, run_id: str) -> tuple[NoticeRecord, ...]:
    """List the notices of a run, the oldest first."""
    (rows,) = await store.database.transact((_OF_RUN, {"run_id": run_id}))
    return tuple(map(_read_notice, rows))


_COLUMNS = tuple(one.name for one in fields(NoticeRecord))


def _read_notice(row: Row) -> NoticeRecord:
    """Read a row of a notice; raise `StoreError` if it is damaged."""
    values: dict[str, Any] = dict(zip(_COLUMNS, row, strict=True))
    with reading_row(f"The row of notice {row[0]!r} is"):
        values["status"] = _body(values["id"], values["status"]).status
        values["problem"] = json.loads(values["problem"] or '""')
        return read_values(NoticeRecord, values)


class Notifier:
    """Delivers the notices of one store, as one of its workers; an invalid listener is named.

    Args:
        listeners: The listener of each event.
        webhook: Receives all events, or None.
        heads: The file of the heads, or None.
        sign: Signs a head; None does not.
    """

    def __init__(
        self,
        listeners: Mapping[NoticeEvent, Listener | None],
        webhook: "Webhook | None" = None,
        heads: Path | None = None,
        sign: Callable[[str], str] | None = None,
    ) -> None:
        self._webhook = webhook
        self._sign = sign
        keep = None if heads is None else partial(_keep_head, heads)
        self._delivering: set[asyncio.Task[None]] = set()
        self._targets: dict[str, dict[str, Listener]] = {}
        for event in _EVENTS:
            listener = listeners.get(event)
            if listener is not None and not callable(listener):
                problem = f"on_{event} must be a function of one notice; got {shown(listener)}."
                raise InvalidLimitError(problem)
            given = {f"on_{event}": listener, "notify": webhook, "heads": keep}
            if targets := {
                name: target for name, target in given.items() if target is not None
            }:
                self._targets[event] = targets
        self._subscribed_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._store: JournalStore
        self._where: str
        self._clock: Clock
        self._poll_seconds: float

    async def open(
        self, store: JournalStore, *, where: str, clock: Clock, poll_seconds: float
    ) -> None:
        """Subscribe to the events that have listeners, and begin to deliver.

        Args:
            store: The store.
            where: Its path or address, without passwords.
            clock: Tells the time and sleeps.
            poll_seconds: How often to look for due notices.
        """
        self._store = store
        self._where = where
        self._clock = clock
        self._poll_seconds = poll_seconds
        if self._webhook is not None:
            self._webhook.open()
        if self._targets:
            await self._begin_work()

    async def listen(self, event: NoticeEvent, name: str, listener: Listener) -> None:
        """Deliver the notices of an event also to the listener of this name, under which their delivery is recorded."""
        self._targets.setdefault(event, {})[name] = listener
        await self._begin_work()

    async def _begin_work(self) -> None:
        await self._subscribe()
        if self._task is None:
            self._task = asyncio.create_task(self._work())

    async def close(self) -> None:
        """Deliver the due notices, for a few seconds at most, and end."""
        try:
            if self._task is not None:
                await end_tasks(self._task)
                with suppress(TimeoutError, StoreError):
                    async with asyncio.timeout(_LAST_SECONDS):
                        while await self._begin() or self._delivering:
                            await asyncio.wait(
                                self._delivering, return_when=asyncio.FIRST_COMPLETED
                            )
        finally:
            await end_tasks(*filter(None, [self._task, *self._delivering]))
            if self._webhook is not None:
                await self._webhook.close()

    async def _work(self) -> None:
        while True:
            with _logged():
                if self._clock.now() - self._subscribed_at > _DAY / 24:
                    await self._subscribe()
                while await self._begin():
                    await asyncio.wait(
                        self._delivering, return_when=asyncio.FIRST_COMPLETED
                    )
            await self._clock.sleep(self._poll_seconds)

    async def _begin(self) -> bool:
        """Begin to deliver the due notices; return whether more may be due."""
        events = {event: event if event in self._targets else "" for event in _EVENTS}
        free = _AT_ONCE - len(self._delivering)
        rows = await self._rows(_DUE, limit=free, **events)
        for row in rows:
            task = asyncio.create_task(self._deliver(row))
            self._delivering.add(task)
            task.add_done_callback(self._delivering.discard)
        return len(rows) == free

    async def _subscribe(self) -> None:
        now = self._clock.now()
        await self._store.database.transact(
            *(
                (_SUBSCRIBE, {"event": event, "until": now + _DAY})
                for event in self._targets
            )
        )
        self._subscribed_at = now

    async def _rows(self, statement: str, **values: Value) -> Sequence[Row]:
        """Run a statement that plans or compares by the store's time."""
        database = self._store.database
        at = times(self._clock.now())
        (rows,) = await database.transact(
            (statement.format(now=database.now), {**values, **at})
        )
        return rows

    async def _deliver(self, row: Row) -> None:
        """Deliver one notice, if no other worker has claimed it."""
        key, _, _, body, _, _, seen = row
        # The run was deleted meanwhile, and the row with it.
        with (
            _logged(),
            suppress(UnknownRunError),
        ):
            if await self._rows(_CLAIM, id=key, seen=seen, delay=_LEASE):
                await self._call(row, _body(key, body))

    async def _call(self, row: Row, state: "_Body") -> None:
        """Call the listeners that a notice has not reached yet."""
        key, _, event, *_ = row
        try:
            notice = await self._notice(row, state)
        except StoreError as error:  # its run's row is damaged
            await self._failed(row, state, str(error))
            return
        waiting = {
            name: target
            for name, target in self._targets[event].items()
            if name not in state.taken
        }
        faults = await asyncio.gather(
            *(_fault_of(target, notice) for target in waiting.values())
        )
        state.taken.extend(
            name for name, fault in zip(waiting, faults, strict=True) if not fault
        )
        problem = "; ".join(filter(None, faults))
        if problem:
            await self._failed(row, state, problem)
        else:
            await self._settle(key, state, delivered_at=self._clock.now())

    async def _notice(self, row: Row, state: "_Body") -> RunNotice:
        key, run_id, event, _, created_at, _, _ = row
        record = await self._store.record(run_id)
        return RunNotice(
            id=key,
            run_id=record.run_id,
            event=event,
            status=state.status,
            goal=record.goal,
            problem=state.problem,
            pending=await self._pending(record) if event == "paused" else (),
            where=self._where,
            inbox=await self._store.inbox(),
            at=datetime.fromtimestamp(created_at, UTC),
            head=self._sign(state.head) if self._sign and state.head else state.head,
        )

    async def _failed(self, row: Row, state: "_Body", problem: str) -> None:
        """Note when to try again; a day after the event, never."""
        key, run_id, event, _, created_at, attempts, _ = row
        now = self._clock.now()
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2.0 ** min(attempts, 64))
        over = now + delay > created_at + _DAY
        await self._settle(
            key, state, delay=None if over else delay, problem=json.dumps(problem)
        )
        outlook = (
            "it is given up" if over else f"it is tried again in {delay:.1f} seconds"
        )
        level = logging.ERROR if over else logging.WARNING
        logger.log(
            level,
            "The notice that run %s %s was not delivered, %s: %s",
            run_id,
            event,
            outlook,
            shown(problem),
        )

    async def _settle(
        self,
        key: str,
        state: "_Body",
        *,
        delay: float | None = None,
        delivered_at: float | None = None,
        problem: str | None = None,
    ) -> None:
        body = json.dumps(asdict(state), separators=(",", ":"))
        await self._rows(
            _SETTLE,
            id=key,
            body=body,
            delay=delay,
            delivered_at=delivered_at,
            problem=problem,
        )

    async def _pending(self, record: RunRecord) -> tuple[PendingApproval, ...]:
        now = self._clock.now()
        found = list[PendingApproval]()
        for row in await self._store.approvals(
            OPEN, now, run_id=record.run_id, limit=_MOST_PENDING
        ):
            with suppress(ApprovalRefusedError):  # a row that was altered
                found.append(read_approval(row, now=now))
        return tuple(found)


async def _keep_head(path: Path, notice: RunNotice) -> None:
    if notice.head:
        await in_thread(partial(keep_head, path, notice.head))


class _NotTakenError(PlannerExtError):
    """A webhook did not take a notice."""


class Webhook:
    """Posts notices to a URL; `planner_ext.durable.WorkerOptions` documents the format."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """Check the options ``notify`` and ``notify_key``; an invalid one is named."""
        import httpx  # noqa: PLC0415  (only for a webhook)

        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, TypeError):
            parsed = None
        if parsed is None or parsed.scheme not in ("http", "https") or not parsed.host:
            problem = "notify must be a URL that begins with https:// or http:// and names a host."
            raise InvalidLimitError(problem)
        self._key = None if key is None else _key_bytes(key)
        self._url = parsed
        self._host = parsed.host
        self._client: AsyncClient | None = None

    def open(self) -> None:
        """Open a client."""
        import httpx  # noqa: PLC0415  (see above)

        logging.getLogger("httpx").addFilter(self._is_other)
        self._client = httpx.AsyncClient(
            timeout=_ATTEMPT_SECONDS, follow_redirects=False
        )

    async def __call__(self, notice: RunNotice) -> None:
        """Post a notice once.

        Raises:
            _NotTakenError: If it was not taken; names the host, and nothing that may be
                secret.
        """
        assert self._client is not None, "it was opened"
        body = json.dumps(notice.as_dict(), separators=(",", ":"))
        at = str(int(time.time()))
        headers = {
            "content-type": "application/json",
            "webhook-id": notice.id,
            "webhook-timestamp": at,
        }
        if self._key is not None:
            signed = hmac.new(
                self._key, f"{notice.id}.{at}.{body}".encode(), hashlib.sha256
            ).digest()
            headers["webhook-signature"] = f"v1,{base64.b64encode(signed).decode()}"
        try:
            async with self._client.stream(
                "POST", self._url, content=body, headers=headers
            ) as response:
                status = response.status_code
        except Exception as error:
            raise _NotTakenError(
                f"{self._host} was not reached: {type(error).__name__}"
            ) from None
        if not 200 <= status < 300:
            raise _NotTakenError(f"{self._host} answered with status {status}")

    async def close(self) -> None:
        """Close the connections."""
        logging.getLogger("httpx").removeFilter(self._is_other)
        if self._client is not None:
            await self._client.aclose()

    def _is_other(self, record: logging.LogRecord) -> bool:
        """Whether a log record of httpx is not of this webhook: it has the whole URL."""
        return str(self._url) not in record.getMessage()


def _key_bytes(key: object) -> bytes:
    if not isinstance(key, str) or not key:
        raise InvalidLimitError("notify_key must be a text that is not empty, or None.")
    if not key.startswith("whsec_"):
        return key.encode()
    try:
        return base64.b64decode(key.removeprefix("whsec_"), validate=True)
    except ValueError:
        problem = "notify_key begins with whsec_, so the rest of it must be base64."
        raise InvalidLimitError(problem) from None


@dataclass(frozen=True, slots=True)
class _Body:
    """The JSON in a notice's row; ``taken``: the listeners that have received it."""

    status: str
    problem: str
    head: str = ""
    taken: list[str] = field(default_factory=list[str])


def _body(key: str, text: str) -> _Body:
    with reading_row(f"The body of notice {key!r} is"):
        return read_values(_Body, json.loads(text))


@contextmanager
def _logged() -> Generator[None]:
    """Log why notices wait: they are delivered later."""
    try:
        yield
    except PlannerExtError as error:
        logger.warning("Notices wait, the store cannot be used: %s", error)
    except Exception:
        logger.exception("Notices cannot be delivered; the worker tries again.")


async def _fault_of(listener: Listener, notice: RunNotice) -> str:
    """Call a listener, and return why it failed; "" if it did not."""
    limit = asyncio.timeout(_ATTEMPT_SECONDS)
    try:
        async with limit:
            await called(listener, notice)
    except Exception as error:
        late = f"{type(error).__name__}: no answer within {_ATTEMPT_SECONDS:g} seconds"
        return late if limit.expired() else described(error)
    return ""
