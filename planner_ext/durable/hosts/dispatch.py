"""Hands the names of due runs to an engine, as long as a host is open."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from planner_ext.durable.runs import Runs
from planner_ext.engine.log import escaped

logger = logging.getLogger(__name__)

_AT_ONCE = 20
_PAUSE_SECONDS = 1.0
"""How long to wait while the store or the engine cannot be used."""


async def dispatch(
    runs: Runs, wake: Callable[[str], Awaitable[None]], *, again_after: float
) -> NoReturn:
    """Hand over what is due until cancelled; a run that did not reach the engine is due again later."""
    failing = False
    while True:
        try:
            due = await runs.due(limit=_AT_ONCE, again_after=again_after)
            await asyncio.gather(*map(wake, due.runs))
            await runs.hint(due.seconds)
            failing = False
        except Exception as error:  # of the engine's client
            if not failing:
                logger.warning(
                    "Due runs wait, they cannot be handed to the engine: %s",
                    escaped(error),
                )
            failing = True
            await asyncio.sleep(_PAUSE_SECONDS)
