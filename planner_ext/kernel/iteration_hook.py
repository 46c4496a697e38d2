"""The iteration-completed callback: what it is told, what it may ask for, and ready-made ones."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from semantic_kernel.contents import AuthorRole, ChatMessageContent

from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.kernel.history import check_history

__all__ = ["FunctionInvocationIterationContext", "IterationCallback", "IterationCompletedHook"]

_logger = logging.getLogger(__name__)


class FunctionInvocationIterationContext:
    """What an iteration-completed callback sees, after the results are stored and before the next request.

    Attributes:
        iteration: The 0-based trip whose calls have their results now.
        total_usage: Tokens, cost and active time of the run so far; a copy.
        messages: Every message of the run so far. Change it, or put another list in its place, to compact the history:
            a message with calls and its results have to stay, or go, together.
        response: The reply whose calls were handled.
        is_streaming: Whether replies are streamed.
        terminate: Set it to True to end the run here: the results are kept, no further request is made.
        reason: Why, for the record.
    """

    def __init__(
        self,
        *,
        iteration: int,
        total_usage: Usage,
        messages: list[ChatMessageContent],
        response: ChatMessageContent | None,
        is_streaming: bool,
    ) -> None:
        self.iteration = iteration
        self.total_usage = total_usage
        self.messages = messages
        self.response = response
        self.is_streaming = is_streaming
        self.terminate = False
        self.reason = ""


IterationCallback = Callable[[FunctionInvocationIterationContext], Awaitable[None] | None]
"""Called after each iteration in which a function was called, plain and streamed; async or not."""


class IterationCompletedHook:
    """Implements `planner_ext.ports.IterationHook` for a callback."""

    def __init__(
        self,
        callback: IterationCallback,
        messages: Callable[[Sequence[Any]], list[ChatMessageContent]],
        *,
        streaming: bool,
    ) -> None:
        """Bind a callback to a run.

        Args:
            callback: Whom to tell.
            messages: Writes a transcript as messages.
            streaming: Whether replies are streamed.
        """
        self._callback = callback
        self._messages = messages
        self._streaming = streaming

    async def completed(self, state: State) -> Mapping[str, Any]:
        """Tell the callback; return what it asked for.

        Raises:
            InvalidHistoryError: If it left a history that may not be sent.
        """
        before = tuple(self._messages(state.transcript))
        context = FunctionInvocationIterationContext(
            iteration=state.iteration - 1,
            total_usage=state.ledger.usage,
            messages=list(before),
            response=next((m for m in reversed(before) if m.role == AuthorRole.ASSISTANT), None),
            is_streaming=self._streaming,
        )
        if (waiting := self._callback(context)) is not None and inspect.isawaitable(waiting):
            await waiting
        asked: dict[str, Any] = {}
        if context.terminate:
            _logger.info("The iteration-completed callback ended the run after iteration %d.", context.iteration)
            asked |= {"terminate": True, "reason": context.reason}
        after = tuple(context.messages)
        if len(after) != len(before) or any(new is not old for new, old in zip(after, before, strict=True)):
            check_history(after)
            asked["messages"] = after
        return asked
