"""Server-sent events for changed lists. One poll of the store serves all viewers."""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Literal, TypeAlias

from planner_ext.durable.errors import StoreError
from planner_ext.durable.listing import StoreMarks

logger = logging.getLogger(__name__)

Topic: TypeAlias = Literal["waiting", "runs"]
"""The list that a viewer follows."""

_POLL_SECONDS = 1.0
_COMMENT_SECONDS = 15.0
"""Between comments on an idle stream, which reveal a lost connection."""


_REFRESHES_PER_SECOND = 50
"""Viewers that reload a changed page in a second: each waits for a random part of the spread."""


class Live:
    """The viewers of a store, which is polled while a stream is open.

    Attributes:
        poll_seconds: The time between polls.
        viewers: The number of open streams.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[StoreMarks]],
        *,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        self.poll_seconds = poll_seconds
        self._read = read
        self._marks: StoreMarks | None = None
        self._changed = asyncio.Event()
        self.viewers = 0
        self._polling: asyncio.Task[None] | None = None
        self._closed = False

    async def events(self, topic: Topic) -> AsyncGenerator[bytes]:
        """Yield an event at once, and one for each change.

        Its data: the ``mark`` of the list's state, the number ``waiting``, and the
        ``spread``, the seconds over which viewers reload their pages.
        """
        self.viewers += 1
        self._polling = self._polling or asyncio.create_task(self._poll())
        sent: str | None = None
        try:
            yield b"retry: 3000\n\n"
            while not self._closed:
                changed = self._changed
                marks = self._marks
                if marks is not None and (mark := getattr(marks, topic)) != sent:
                    sent = mark
                    spread = round(self.viewers / _REFRESHES_PER_SECOND, 2)
                    data = json.dumps(
                        {"mark": mark, "waiting": marks.number, "spread": spread}
                    )
                    yield f"event: {topic}\ndata: {data}\n\n".encode()
                try:
                    async with asyncio.timeout(_COMMENT_SECONDS):
                        await changed.wait()
                except TimeoutError:
                    yield b": nothing new\n\n"
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._polling.cancel()
                self._polling = None
                self._marks = None

    def close(self) -> None:
        """End all streams."""
        self._closed = True
        self._tell()

    def _tell(self) -> None:
        changed = self._changed
        self._changed = asyncio.Event()
        changed.set()

    async def _poll(self) -> None:
        while True:
            try:
                marks = await self._read()
            except StoreError as error:  # a database that restarts, for instance
                logger.warning("The inbox cannot follow its store: %s", error)
            except Exception:
                logger.exception("The inbox cannot follow its store.")
            else:
                if marks != self._marks:
                    self._marks = marks
                    self._tell()
            await asyncio.sleep(self.poll_seconds)
