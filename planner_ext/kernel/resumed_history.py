"""The caller's history of a run that is resumed: it is this run's history, or it is refused and stays as it is."""

import json
from collections.abc import Sequence
from typing import Any

from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.core.facts import Fact, ModelReplied
from planner_ext.core.state import State
from planner_ext.core.values import RequestedCall
from planner_ext.kernel.errors import InvalidHistoryError
from planner_ext.kernel.history import one_result_each
from planner_ext.kernel.messages import load_message, requested_calls, text_of
from planner_ext.kernel.outcome import returned_message

__all__ = ["bring_up_to_date"]

_WAY_OUT = "The history was not changed. Resume with the history that the run left, or with an empty one."


def bring_up_to_date(
    history: ChatHistory, transcript: Sequence[ChatMessageContent], state: State, facts: Sequence[Fact]
) -> None:
    """Fill in what a history lacks of a run's transcript, and take out the message that the run had returned.

    Messages that the caller added after it are kept where they are.

    Args:
        history: The caller's: empty, or as far as it goes message by message that of the run.
        transcript: The run's messages up to where it is resumed.
        state: The run as its checkpoint has it.
        facts: The checkpoint's.

    Raises:
        InvalidHistoryError: If it is the history of another run, or holds calls or results of the batch that waits.
    """
    messages = one_result_each(history.messages)
    known = _common(messages, transcript)
    added = messages[known:]
    if added and _is_returned(added[0], state, facts):
        added = added[1:]
    if known < len(transcript) and added:
        raise InvalidHistoryError(
            f"Expected the history of this checkpoint's run; its message {known} is {_described(transcript[known])}, "
            f"the history's {_described(messages[known])}. {_WAY_OUT}"
        )
    if held := _held(added, state):
        raise InvalidHistoryError(
            f"The history holds {', '.join(held)} already: this checkpoint was resumed before, or its calls were "
            f"answered elsewhere. {_WAY_OUT}"
        )
    history.messages[:] = [*messages[:known], *transcript[known:], *added]


def _common(messages: Sequence[ChatMessageContent], transcript: Sequence[ChatMessageContent]) -> int:
    """Count the messages with which both begin."""
    pairs = enumerate(zip(messages, transcript, strict=False))
    return next((place for place, (one, other) in pairs if not _same(one, other)), min(len(messages), len(transcript)))


def _same(one: ChatMessageContent, other: ChatMessageContent) -> bool:
    """Whether two messages say the same: metadata and classes, which JSON does not keep, are not compared."""
    return one is other or _said(one) == _said(other)


def _said(message: ChatMessageContent) -> tuple[Any, ...]:
    results = [(item.id, str(item.result)) for item in message.items if isinstance(item, FunctionResultContent)]
    others = [
        item.to_dict()
        for item in message.items
        if not isinstance(item, TextContent | FunctionCallContent | FunctionResultContent)
    ]
    return message.role, text_of(message), _calls(requested_calls(message)), results, others


def _calls(calls: Sequence[RequestedCall]) -> list[tuple[str, str, str]]:
    """List calls with their arguments in one spelling: a store may write JSON text anew."""
    return [(call.id, call.name, _spelled(call.arguments)) for call in calls]


def _spelled(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _is_returned(message: ChatMessageContent, state: State, facts: Sequence[Fact]) -> bool:
    """Whether a message is the one that the run had returned, or the sum of the last trip's chunks."""
    if message.role != AuthorRole.ASSISTANT:
        return False
    returned = returned_message(state, facts)
    own = [(text_of(returned), _calls(requested_calls(returned)))]
    if (reply := next((fact for fact in reversed(facts) if isinstance(fact, ModelReplied)), None)) is not None:
        said = text_of(load_message(reply.message))
        calls = _calls(reply.calls)
        own += [(said + own[0][0], []), (said, calls), (said + own[0][0], calls)]
    return (text_of(message), _calls(requested_calls(message))) in own


def _held(messages: Sequence[ChatMessageContent], state: State) -> list[str]:
    """Name the calls of the open batch that stand in messages, and those whose results do."""
    waiting = {call.request.id for call in state.batch.calls} if state.batch is not None else set[str]()
    found = [
        (f"the result of the call {item.id!r}" if isinstance(item, FunctionResultContent) else f"the call {item.id!r}")
        for message in messages
        for item in message.items
        if isinstance(item, FunctionCallContent | FunctionResultContent) and item.id in waiting
    ]
    return list(dict.fromkeys(found))


def _described(message: ChatMessageContent) -> str:
    calls = "".join(f", calling {call.name} as {call.id!r}" for call in requested_calls(message))
    return f"of the {message.role.value}: {text_of(message)[:60]!r}{calls}"
