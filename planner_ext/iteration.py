"""How functions run, what happens between iterations, and how to stop a run."""

import inspect
from collections.abc import Awaitable, Callable

from semantic_kernel.contents import AuthorRole, FunctionResultContent

from planner_ext.core.errors import shown
from planner_ext.core.limits import Price
from planner_ext.core.values import Usage
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.ports import Clock
from planner_ext.sk.errors import InvalidOptionError
from planner_ext.sk.functions.execution import ToolExecution
from planner_ext.sk.messages import read_usage, text_of
from planner_ext.sk.run.answers import AnswerContext, CheckAnswer
from planner_ext.sk.run.iteration import (
    FunctionInvocationIterationContext,
    IterationCallback,
)
from planner_ext.sk.run.options import RunOptions

__all__ = [
    "AnswerContext",
    "CheckAnswer",
    "Clock",
    "FunctionInvocationIterationContext",
    "IterationCallback",
    "Price",
    "RunOptions",
    "StopHandle",
    "ToolExecution",
    "Usage",
    "after_seconds",
    "all_of",
    "at_cost",
    "at_token_fraction",
    "when_flagged",
]


def at_token_fraction(
    context_window: int, fraction: float = 0.5, then: IterationCallback | None = None
) -> IterationCallback:
    """Act when the newest request and its reply fill a fraction of the model's context window.

    Without reported tokens, or a limit that makes the run estimate them, it has no
    effect.

    Args:
        context_window: The size of the model's context window, in tokens.
        fraction: Above 0, up to 1.
        then: Called instead of ending the run, for instance to compact
            ``context.messages``. None ends the run.

    Raises:
        PlannerInvalidConfigurationError: If a number is out of range.
    """
    if context_window < 1 or not 0 < fraction <= 1:
        raise InvalidOptionError(
            "context_window must be 1 or more and fraction above 0 and up to 1; got "
            f"{shown(context_window)}, {shown(fraction)}."
        )

    async def callback(context: FunctionInvocationIterationContext) -> None:
        reported = (
            context.response.metadata.get("usage")
            if context.response is not None
            else None
        )
        tokens = read_usage(reported).total_tokens
        if tokens < fraction * context_window:
            return
        if then is None:
            context.terminate = True
            context.reason = (
                f"{tokens} of {context_window} tokens of the context window are used."
            )
        elif (waiting := then(context)) is not None:
            await waiting

    return callback


def at_cost(max_cost: float) -> IterationCallback:
    """End the run once it has cost this many US dollars; without a known price it has no effect."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        cost = context.total_usage.cost
        if cost is not None and cost >= max_cost:
            context.terminate = True
            context.reason = f"The run has cost {cost:g} of {max_cost:g} US dollars."

    return callback


def after_seconds(seconds: float) -> IterationCallback:
    """End the run once it has been active for so long; paused time does not count."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        active = context.total_usage.active_seconds
        if active >= seconds:
            context.terminate = True
            context.reason = (
                f"The run has been active for {active:.1f} of {seconds:g} seconds."
            )

    return callback


def when_flagged(flag: Callable[[str], bool | Awaitable[bool]]) -> IterationCallback:
    """End the run when a moderation flags a text of the newest iteration.

    Args:
        flag: Called, async or not, with the newest reply's text and with each result;
            True ends the run.
    """

    async def callback(context: FunctionInvocationIterationContext) -> None:
        for text in _newest_texts(context):
            answer = flag(text)
            if (await answer) if inspect.isawaitable(answer) else answer:
                context.terminate = True
                context.reason = "The moderation flagged what this iteration brought."
                return

    return callback


def all_of(*callbacks: IterationCallback) -> IterationCallback:
    """Call several callbacks in order, until one of them ends the run."""

    async def callback(context: FunctionInvocationIterationContext) -> None:
        for each in callbacks:
            waiting = each(context)
            if waiting is not None:
                await waiting
            if context.terminate:
                return

    return callback


def _newest_texts(context: FunctionInvocationIterationContext) -> list[str]:
    texts: list[str] = []
    for message in reversed(context.messages):
        if message.role == AuthorRole.TOOL:
            texts += [
                str(item.result)
                for item in message.items
                if isinstance(item, FunctionResultContent)
            ]
        else:
            texts.append(text_of(message))
            break
    return [text for text in texts if text]
