"""The iteration-completed callback: what it is told, what it may ask for, and ready-made ones."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from semantic_kernel.contents import AuthorRole, ChatMessageContent

from planner_ext.core.shown import shown
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.kernel.errors import InvalidHistoryError
from planner_ext.kernel.history import check_history

__all__ = ["FunctionInvocationIterationContext", "IterationCallback", "IterationCompletedHook"]

_logger = logging.getLogger(__name__)


class FunctionInvocationIterationContext:
    """What an iteration-completed callback sees, after the results are stored and before the next request.

    Attributes:
        iteration: The 0-based trip whose calls have their results now.
        total_usage: Tokens, cost and active time of the run so far; a copy.
        messages: Every message of the run so far, as copies. Change the list or what is in it, or put another list in
            its place, to compact the history: a message with calls and its results have to stay, or go, together.
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
        self._shown: list[tuple[ChatMessageContent, ChatMessageContent]] = []

    async def completed(self, state: State) -> Mapping[str, Any]:
        """Tell the callback; return what it asked for.

        Raises:
            InvalidHistoryError: If it left a history that may not be sent.
        """
        before = tuple(self._messages(state.transcript))
        shown = self._copies(before)
        context = FunctionInvocationIterationContext(
            iteration=state.iteration - 1,
            total_usage=state.ledger.usage,
            messages=list(shown),
            response=next((m for m in reversed(shown) if m.role == AuthorRole.ASSISTANT), None),
            is_streaming=self._streaming,
        )
        if (waiting := self._callback(context)) is not None and inspect.isawaitable(waiting):
            await waiting
        asked: dict[str, Any] = {}
        if context.terminate:
            _logger.info("The iteration-completed callback ended the run after iteration %d.", context.iteration)
            asked |= {"terminate": True, "reason": str(context.reason)}
        after = _unchanged_as_they_were(_messages_in(context), shown, before)
        if len(after) != len(before) or any(new is not old for new, old in zip(after, before, strict=True)):
            check_history(after)
            asked["messages"] = after
        return asked

    def _copies(self, messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
        """Copy messages for the callback, which may change them: only what is recorded may be sent.

        What was copied for the iteration before, and was left alone, is not copied again.
        """
        known = next(
            (at for at, (old, new) in enumerate(zip(self._shown, messages, strict=False)) if old[0] is not new),
            min(len(self._shown), len(messages)),
        )
        self._shown = [*self._shown[:known], *((message, _copy(message)) for message in messages[known:])]
        return [copy for _, copy in self._shown]


def _copy(message: ChatMessageContent) -> ChatMessageContent:
    items: list[Any] = [item.model_copy() for item in message.items]
    return message.model_copy(update={"items": items, "metadata": dict(message.metadata)})


def _messages_in(context: FunctionInvocationIterationContext) -> Sequence[ChatMessageContent]:
    """Read the messages that a callback left.

    Raises:
        InvalidHistoryError: If they are something else.
    """
    left: Any = context.messages
    if isinstance(left, list | tuple) and all(isinstance(each, ChatMessageContent) for each in cast("list[Any]", left)):
        return context.messages
    raise InvalidHistoryError(
        f"The iteration-completed callback must leave a list of ChatMessageContent in context.messages; it left "
        f"{shown(context.messages)}. Nothing was sent."
    )


def _unchanged_as_they_were(
    after: Sequence[ChatMessageContent], shown: Sequence[ChatMessageContent], before: Sequence[ChatMessageContent]
) -> tuple[ChatMessageContent, ...]:
    """Put the original in the place of each copy that the callback left as it was."""
    originals = {id(copy): message for copy, message in zip(shown, before, strict=True)}
    return tuple(originals[id(m)] if id(m) in originals and m == originals[id(m)] else m for m in after)
