"""The iteration-completed callback, and ready-made ones that end a run or compact its history."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from semantic_kernel.contents import AuthorRole, ChatMessageContent, FunctionResultContent

from planner_ext.core.errors import shown
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.sk.errors import InvalidHistoryError, InvalidOptionError
from planner_ext.sk.history import check_history
from planner_ext.sk.messages import read_usage, text_of

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

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class FunctionInvocationIterationContext:
    """The state of a run after an iteration's results are stored and before the next request.

    Attributes:
        iteration: The 0-based iteration whose calls now have their results.
        total_usage: Tokens, cost and active time of the run so far.
        messages: Copies of all messages of the run. Change or replace the list to compact the history; a message with
            calls and its results must stay, or go, together.
        response: The reply whose calls ran.
        is_streaming: Whether replies are streamed.
        terminate: Set to True to end the run: the results are kept, no further request is made.
        reason: Why the run ends, for the record.
    """

    iteration: int
    total_usage: Usage
    messages: list[ChatMessageContent]
    response: ChatMessageContent | None
    is_streaming: bool
    terminate: bool = False
    reason: str = ""


IterationCallback = Callable[[FunctionInvocationIterationContext], Awaitable[None] | None]
"""A function, async or not, that is called after each iteration with function calls, plain and streamed."""


@dataclass(slots=True, kw_only=True)
class IterationCompletedHook:
    """Calls an application's callback (`planner_ext.engine.ports.IterationHook`).

    Attributes:
        callback: The application's callback.
        messages: Renders a transcript as messages.
        streaming: Whether replies are streamed.
    """

    callback: IterationCallback
    messages: Callable[[Sequence[Any]], list[ChatMessageContent]]
    streaming: bool
    _shown: Sequence[tuple[ChatMessageContent, ChatMessageContent]] = field(default=(), init=False)

    async def completed(self, state: State) -> Mapping[str, Any]:
        """Call the callback and return what it asked for: a termination, changed messages, or neither.

        Raises:
            InvalidHistoryError: If it left messages that servers refuse.
        """
        before = tuple(self.messages(state.transcript))
        shown = self._copies(before)
        context = FunctionInvocationIterationContext(
            iteration=state.iteration - 1,
            total_usage=state.ledger.usage,
            messages=list(shown),
            response=next((m for m in reversed(shown) if m.role == AuthorRole.ASSISTANT), None),
            is_streaming=self.streaming,
        )
        if (waiting := self.callback(context)) is not None and inspect.isawaitable(waiting):
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
        """Copy messages for the callback, which may change them; unchanged copies of the last iteration are reused."""
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
    """Return the messages that a callback left; raise InvalidHistoryError if they are not messages."""
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
    """Replace each unchanged copy by its original."""
    originals = {id(copy): message for copy, message in zip(shown, before, strict=True)}
    return tuple(originals[id(m)] if id(m) in originals and m == originals[id(m)] else m for m in after)


def at_token_fraction(
    context_window: int, fraction: float = 0.5, then: IterationCallback | None = None
) -> IterationCallback:
    """Act when the newest request and its reply fill a fraction of the model's context window.

    Counts reported tokens, or estimated ones if a limit makes the run estimate; without either it has no effect.

    Args:
        context_window: The size of the model's context window, in tokens.
        fraction: Above 0, up to 1.
        then: Called instead of ending the run, for instance to compact ``context.messages``. None ends the run.

    Raises:
        PlannerInvalidConfigurationError: If a number is out of range.
    """
    if context_window < 1 or not 0 < fraction <= 1:
        raise InvalidOptionError(
            "context_window must be 1 or more and fraction above 0 and up to 1; got "
            f"{shown(context_window)}, {shown(fraction)}."
        )

    async def callback(context: FunctionInvocationIterationContext) -> None:
        reported = context.response.metadata.get("usage") if context.response is not None else None
        tokens = read_usage(reported).total_tokens
        if tokens < fraction * context_window:
            return
        if then is None:
            context.terminate = True
            context.reason = f"{tokens} of {context_window} tokens of the context window are used."
        elif (waiting := then(context)) is not None:
            await waiting

    return callback


def at_cost(max_cost: float) -> IterationCallback:
    """End the run once it has cost this many US dollars; without a known price it has no effect."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        cost = context.total_usage.cost
        if cost is not None and cost >= max_cost:
            context.terminate, context.reason = True, f"The run has cost {cost:g} of {max_cost:g} US dollars."

    return callback


def after_seconds(seconds: float) -> IterationCallback:
    """End the run once it has been active for this many seconds; paused time does not count."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        active = context.total_usage.active_seconds
        if active >= seconds:
            context.terminate = True
            context.reason = f"The run has been active for {active:.1f} of {seconds:g} seconds."

    return callback


def when_flagged(flag: Callable[[str], bool | Awaitable[bool]]) -> IterationCallback:
    """End the run when a moderation flags a text of the newest iteration.

    Args:
        flag: Called, async or not, with the newest reply's text and with each result; True ends the run.
    """

    async def callback(context: FunctionInvocationIterationContext) -> None:
        for text in _newest_texts(context):
            answer = flag(text)
            if (await answer) if inspect.isawaitable(answer) else answer:
                context.terminate, context.reason = True, "The moderation flagged what this iteration brought."
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


def _newest_texts(context: FunctionInvocationIterationContext) -> list[str]:
    texts: list[str] = []
    for message in reversed(context.messages):
        if message.role == AuthorRole.TOOL:
            texts += [str(item.result) for item in message.items if isinstance(item, FunctionResultContent)]
        else:
            texts.append(text_of(message))
            break
    return [text for text in texts if text]
