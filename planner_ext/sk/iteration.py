"""Ready-made iteration-completed callbacks: ends, or compacts, at a share of the context window, a cost, a time."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionResultContent

from planner_ext.core.errors import shown
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.sk.errors import InvalidHistoryError, PlannerInvalidConfigurationError
from planner_ext.sk.history import check_history
from planner_ext.sk.messages import text_of
from planner_ext.sk.usage import read_usage

__all__ = [
    "FunctionInvocationIterationContext",
    "IterationCallback",
    "IterationCompletedHook",
    "after_seconds",
    "all_of",
    "at_cost",
    "at_token_fraction",
    "when_flagged",
]

# The iteration-completed callback: what it is told, what it may ask for, and ready-made ones.

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
    """Implements `planner_ext.engine.ports.IterationHook` for a callback."""

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


def at_token_fraction(
    context_window: int, fraction: float = 0.5, then: IterationCallback | None = None
) -> IterationCallback:
    """Act when the newest reply and its prompt fill a share of the model's context window.

    Counts the tokens that the service reports, or that the run estimates where a limit needs them; where neither does,
    it has no effect.

    Args:
        context_window: Tokens that the model takes.
        fraction: The share, above 0 and up to 1.
        then: What to do, for instance compact ``context.messages``; None ends the run.

    Raises:
        PlannerInvalidConfigurationError: If the numbers mean nothing.
    """
    if context_window < 1 or not 0 < fraction <= 1:
        raise PlannerInvalidConfigurationError(
            "context_window must be 1 or more and fraction above 0 and up to 1; got "
            f"{shown(context_window)}, {shown(fraction)}."
        )

    async def callback(context: FunctionInvocationIterationContext) -> None:
        reported = context.response.metadata.get("usage") if context.response is not None else None
        tokens = read_usage(reported).total_tokens
        if tokens >= fraction * context_window:
            await _act(context, then, f"{tokens} of {context_window} tokens of the context window are used.")

    return callback


def at_cost(max_cost: float) -> IterationCallback:
    """End the run once it has cost this many US dollars; has no effect where no price is known."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        cost = context.total_usage.cost
        if cost is not None and cost >= max_cost:
            await _act(context, None, f"The run has cost {cost:g} of {max_cost:g} US dollars.")

    return callback


def after_seconds(seconds: float) -> IterationCallback:
    """End the run once it has been active for so long; time in which it was paused is not counted."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        active = context.total_usage.active_seconds
        if active >= seconds:
            await _act(context, None, f"The run has been active for {active:.1f} of {seconds:g} seconds.")

    return callback


def when_flagged(flag: Callable[[str], bool | Awaitable[bool]]) -> IterationCallback:
    """End the run when a moderation flags what the newest iteration brought.

    Args:
        flag: Asked, async or not, for the newest reply's text and for each of its results; True ends the run.
    """

    async def callback(context: FunctionInvocationIterationContext) -> None:
        for text in _newest_texts(context):
            answer = flag(text)
            if (await answer) if inspect.isawaitable(answer) else answer:
                await _act(context, None, "The moderation flagged what this iteration brought.")
                return

    return callback


def all_of(*callbacks: IterationCallback) -> IterationCallback:
    """Call several callbacks in order, until one of them ends the run."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        for each in callbacks:
            if (waiting := each(context)) is not None:
                await waiting
            if context.terminate:
                return

    return callback


async def _act(context: FunctionInvocationIterationContext, then: IterationCallback | None, reason: str) -> None:
    if then is None:
        context.terminate, context.reason = True, reason
    elif (waiting := then(context)) is not None:
        await waiting


def _newest_texts(context: FunctionInvocationIterationContext) -> list[str]:
    texts: list[str] = []
    for message in reversed(context.messages):
        if message.role == AuthorRole.TOOL:
            texts += [str(item.result) for item in message.items if isinstance(item, FunctionResultContent)]
        else:
            texts.append(text_of(message))
            break
    return [text for text in texts if text]
