"""The outcome of a run: its status, its history, and the error where it has no answer."""

from collections.abc import Sequence

from semantic_kernel.contents import ChatHistory, ChatMessageContent

from planner_ext.approval.waiting import only_asks
from planner_ext.core.errors import UnansweredRunError, not_answered
from planner_ext.core.facts import (
    Fact,
)
from planner_ext.core.state import State
from planner_ext.core.values import Status
from planner_ext.sk.chat.history import render
from planner_ext.sk.checkpoint import Checkpoint, SigningKey


def status_of(state: State) -> Status:
    """Return how a run ended, or whether it waits for answers only (``asked``) or a decision."""
    if state.ended is not None:
        return state.ended.status
    return "asked" if only_asks(state) else "paused"


def chat_history(
    state: State, written: Sequence[ChatMessageContent] | None = None
) -> ChatHistory:
    """Convert a run's transcript; calls that the caller is to run come last."""
    messages = render(state.transcript) if written is None else list(written)
    if state.batch is not None and state.ended is not None and state.ended.returned:
        messages += render((state.batch.message,))
    return ChatHistory(messages=messages)


def carry_run(
    error: BaseException, state: State, facts: Sequence[Fact], key: SigningKey | None
) -> None:
    """Attach the run so far to the exception that ended it, a cancellation included."""
    vars(error).update(
        chat_history=chat_history(state), checkpoint=Checkpoint.of_run(facts, key)
    )


def raise_at_limit(state: State, facts: Sequence[Fact], key: SigningKey | None) -> None:
    """Raise `LimitReachedError` for a run that a limit ended, under ``on_limit="raise"``."""
    ended = state.ended
    if (
        state.rules.limits.on_limit == "raise"
        and ended is not None
        and ended.status == "limit_reached"
    ):
        raise run_not_answered(state, Checkpoint.of_run(facts, key), ended.reason)


def run_not_answered(
    state: State, checkpoint: Checkpoint, reason: str
) -> UnansweredRunError:
    """Make the error for a run that has no answer."""
    return not_answered(
        status=status_of(state),
        reason=reason,
        limit=state.ended.limit if state.ended is not None else None,
        iterations=state.usage.iterations,
        tool_calls=state.usage.tool_calls,
        usage=state.usage,
        chat_history=chat_history(state),
        checkpoint=checkpoint,
    )
