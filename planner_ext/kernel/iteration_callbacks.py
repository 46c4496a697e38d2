"""Ready-made iteration-completed callbacks: ends, or compacts, at a share of the context window, a cost, a time."""

import inspect
from collections.abc import Awaitable, Callable

from semantic_kernel.contents import AuthorRole, FunctionResultContent

from planner_ext.core.shown import shown
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.iteration_hook import FunctionInvocationIterationContext, IterationCallback
from planner_ext.kernel.messages import text_of
from planner_ext.kernel.usage import read_usage

__all__ = ["after_seconds", "all_of", "at_cost", "at_token_fraction", "when_flagged"]


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
