"""The iteration-completed callback of a run, and what it sees and may change."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from semantic_kernel.contents import AuthorRole, ChatMessageContent

from planner_ext.core.errors import shown
from planner_ext.core.state import State
from planner_ext.core.values import Usage
from planner_ext.engine.concurrency import of_application
from planner_ext.sk.chat.history import check_history
from planner_ext.sk.errors import InvalidHistoryError
from planner_ext.sk.messages import with_names_of

_logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class FunctionInvocationIterationContext:
    """The state of a run after an iteration's results are stored and before the next request.

    Attributes:
        iteration: The 0-based iteration whose calls now have their results.
        total_usage: Tokens, cost and active time of the run so far.
        messages: Copies of all messages. Change or replace the list to compact the
            history; a message with calls and its results must stay, or go, together.
        response: The reply whose calls ran.
        is_streaming: Whether replies are streamed.
        terminate: Set to True to end the run: the results are kept, no further request
            is made.
        reason: Why the run ends, for the record.
    """

    iteration: int
    total_usage: Usage
    messages: list[ChatMessageContent]
    response: ChatMessageContent | None
    is_streaming: bool
    terminate: bool = False
    reason: str = ""


IterationCallback = Callable[
    [FunctionInvocationIterationContext], Awaitable[None] | None
]
"""Called after each iteration with function calls, plain and streamed; async or not."""


@dataclass(slots=True, kw_only=True)
class IterationCompletedHook:
    """Calls an application's callback (`planner_ext.engine.ports.IterationHook`); ``messages`` renders a transcript."""

    callback: IterationCallback
    messages: Callable[[Sequence[Any]], list[ChatMessageContent]]
    streaming: bool
    _shown: Sequence[tuple[ChatMessageContent, ChatMessageContent]] = field(
        default=(), init=False
    )

    async def completed(self, state: State) -> Mapping[str, Any]:
        """Call the callback; return the termination or the messages that it asked for."""
        before = tuple(self.messages(state.transcript))
        shown = self._copies(before)
        context = FunctionInvocationIterationContext(
            iteration=state.iteration - 1,
            total_usage=state.usage,
            messages=list(shown),
            response=next(
                (m for m in reversed(shown) if m.role == AuthorRole.ASSISTANT), None
            ),
            is_streaming=self.streaming,
        )
        await of_application(self._called(context))
        asked: dict[str, Any] = {}
        if context.terminate:
            _logger.info(
                "The iteration-completed callback ended the run after iteration %d.",
                context.iteration,
            )
            asked |= {"terminate": True, "reason": str(context.reason)}
        after = _unchanged_as_they_were(_messages_in(context), shown, before)
        if len(after) != len(before) or any(
            new is not old for new, old in zip(after, before, strict=True)
        ):
            check_history(after)
            asked["messages"] = with_names_of(after, before)
        return asked

    async def _called(self, context: FunctionInvocationIterationContext) -> None:
        if (waiting := self.callback(context)) is not None and inspect.isawaitable(
            waiting
        ):
            await waiting

    def _copies(
        self, messages: Sequence[ChatMessageContent]
    ) -> list[ChatMessageContent]:
        """Copy messages, which the callback may change; unchanged copies are reused."""
        known = next(
            (
                at
                for at, (old, new) in enumerate(
                    zip(self._shown, messages, strict=False)
                )
                if old[0] is not new
            ),
            min(len(self._shown), len(messages)),
        )
        self._shown = [
            *self._shown[:known],
            *((message, _copy(message)) for message in messages[known:]),
        ]
        return [copy for _, copy in self._shown]


def _copy(message: ChatMessageContent) -> ChatMessageContent:
    items: list[Any] = [item.model_copy() for item in message.items]
    return message.model_copy(
        update={"items": items, "metadata": dict(message.metadata)}
    )


def _messages_in(
    context: FunctionInvocationIterationContext,
) -> Sequence[ChatMessageContent]:
    left: Any = context.messages
    if isinstance(left, list | tuple) and all(
        isinstance(each, ChatMessageContent) for each in cast("list[Any]", left)
    ):
        return context.messages
    raise InvalidHistoryError(
        f"The iteration-completed callback must leave a list of ChatMessageContent in context.messages; it left "
        f"{shown(context.messages)}. Nothing was sent."
    )


def _unchanged_as_they_were(
    after: Sequence[ChatMessageContent],
    shown: Sequence[ChatMessageContent],
    before: Sequence[ChatMessageContent],
) -> tuple[ChatMessageContent, ...]:
    originals = {id(copy): message for copy, message in zip(shown, before, strict=True)}
    return tuple(
        originals[id(m)] if id(m) in originals and m == originals[id(m)] else m
        for m in after
    )
