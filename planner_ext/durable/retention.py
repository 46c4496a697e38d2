"""How long a store keeps what has ended, which its workers apply, and how it forgets a person.

A deleted run leaves the digest of its name, and how it ended. A forgotten key of shared
budgets leaves a digest in the periods that have not ended, so that what was used of
them stays used.
"""

import asyncio
import hashlib
import hmac
import json
import logging
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta

from planner_ext.core.errors import PlannerExtError
from planner_ext.core.limits import is_positive_number
from planner_ext.core.values import frozen
from planner_ext.durable.database import Database, Row, Step
from planner_ext.durable.errors import StoreError, reading_row
from planner_ext.durable.listing import ENDS
from planner_ext.durable.store import JournalStore
from planner_ext.engine.ports import Clock

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 3600.0
"""How often a worker looks for what is too old."""
_SHARE = 10
"""A worker rests this many times as long as a transaction took, so that the runs of a
store hardly notice."""

GET_RETENTION: Step = (
    "SELECT value FROM planner_settings WHERE name = 'retention'",
    {},
)
_SET = """
    INSERT INTO planner_settings (name, value) VALUES ('retention', :value)
    ON CONFLICT (name) DO UPDATE SET value = EXCLUDED.value
"""
_DROP = "DELETE FROM planner_settings WHERE name = 'retention'"
_ADD_DIGEST_KEY = """
    INSERT INTO planner_settings (name, value) VALUES ('forgotten', :value) ON CONFLICT DO NOTHING
"""
GET_DIGEST_KEY: Step = (
    "SELECT value FROM planner_settings WHERE name = 'forgotten'",
    {},
)
_FORGET_KEY = (
    """
    DELETE FROM planner_budgets
    WHERE key = :key AND period <> 'all'
          AND SUBSTR(period, 1, LENGTH(:hour)) < SUBSTR(:hour, 1, LENGTH(period))
    """,
    """
    INSERT INTO planner_budgets
        (budget, key, period, limits, iterations, tool_calls, tokens, cost, reached, stamp, updated_at)
    SELECT budget, :digest, period, limits, iterations, tool_calls, tokens, cost, reached, stamp, updated_at
    FROM planner_budgets WHERE key = :key
    ON CONFLICT (budget, key, period) DO UPDATE SET
        iterations = planner_budgets.iterations + EXCLUDED.iterations,
        tool_calls = planner_budgets.tool_calls + EXCLUDED.tool_calls,
        tokens = planner_budgets.tokens + EXCLUDED.tokens, cost = planner_budgets.cost + EXCLUDED.cost
    """,
    "DELETE FROM planner_budgets WHERE key = :key",
    "UPDATE planner_budget_runs SET key = :digest WHERE key = :key",
)
_FORGET_GRANTS = """
    DELETE FROM planner_grants
    WHERE REPLACE(terms || decision, :text, '') <> terms || decision
"""


@frozen
class Retention:
    """How long a store keeps runs that have ended; failed and quarantined ones have not.

    Attributes:
        ended: Seconds after which a run is deleted; None keeps it.
        journals: Seconds after which only its row is kept: its name, goal, tags, status
            and consumption. None keeps all of it.
        by: Who set it; "" without a name.
        at: When, in seconds since the epoch.

    Raises:
        StoreError: If a time is no number of seconds above 0.
    """

    ended: float | None
    journals: float | None
    by: str
    at: float

    def __post_init__(self) -> None:
        for name in ("ended", "journals"):
            given = getattr(self, name)
            if given is not None and not is_positive_number(given):
                raise StoreError(
                    f"{name} must be a time above 0, or None; got {given!r}."
                )


def read_retention(rows: Sequence[Row]) -> Retention | None:
    """Read the answer to `GET_RETENTION`; raise `StoreError` if it is damaged."""
    if not rows:
        return None
    with reading_row("The retention of the store is"):
        return Retention(**json.loads(rows[0][0]))


async def set_retention(store: JournalStore, retention: Retention) -> None:
    """Store how long what ended is kept."""
    keeps_all = retention.ended is None and retention.journals is None
    step: Step = (_DROP, {})
    if not keeps_all:
        step = (_SET, {"value": json.dumps(asdict(retention))})
    await store.database.transact(step)


async def retain(store: JournalStore, clock: Clock) -> None:
    """Apply a store's retention, as one of its workers, until cancelled."""
    while True:
        try:
            await apply_retention(store, now=clock.now())
        except PlannerExtError as error:
            logger.warning("What is too old stays in the store for now: %s", error)
        await asyncio.sleep(_LOOK_SECONDS * random.uniform(0.5, 1.0))  # noqa: S311  (nothing is kept secret by it)


async def apply_retention(store: JournalStore, *, now: float) -> None:
    """Delete what is too old, in transactions of a few runs with rests between them."""
    (rows,) = await store.database.transact(GET_RETENTION)
    retention = read_retention(rows)
    if retention is None:
        return
    for seconds, only_texts in ((retention.ended, False), (retention.journals, True)):
        if seconds is None:
            continue
        for status in ENDS:
            after = 0.0
            began = time.monotonic()
            while batch := await store.prune_batch(
                status=status, before=now - seconds, after=after, only_texts=only_texts
            ):
                _, after = batch
                await asyncio.sleep(_SHARE * (time.monotonic() - began))
                began = time.monotonic()


async def forget_key(
    database: Database, key: str, *, runs: Sequence[str], now: float
) -> None:
    """Replace a key of shared budgets by its digest, and delete grants that name it or one of the runs."""
    await database.transact((_ADD_DIGEST_KEY, {"value": secrets.token_urlsafe(32)}))
    (rows,) = await database.transact(GET_DIGEST_KEY)
    # Earlier than in any time zone.
    day = datetime.fromtimestamp(now, UTC) - timedelta(days=1)
    values = {
        "key": key,
        "digest": forgotten_key(rows, key),
        "hour": day.strftime("%Y-%m-%dT%H"),
    }
    texts = [json.dumps(name) for name in (key, *runs)]
    await database.transact(
        *((statement, values) for statement in _FORGET_KEY),
        *((_FORGET_GRANTS, {"text": text}) for text in texts),
    )


def forgotten_key(secret: Sequence[Row], key: str) -> str:
    """Return what stands for a forgotten key of shared budgets, given the answer to `GET_DIGEST_KEY`."""
    ((written,),) = secret
    digest = hmac.digest(written.encode(), key.encode(), hashlib.sha256)
    return f"forgotten:{digest.hex()}"
