"""The caller's history of a run that is resumed: it is this run's history, or it is refused and stays as it is."""

import json
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from operator import is_
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
from planner_ext.sk.arguments import quoted
from planner_ext.sk.errors import InvalidHistoryError
from planner_ext.sk.messages import (
    accepted_message,
    accepted_name,
    calls_of,
    has_accepted_id,
    load_message,
    name_of,
    requested_calls,
    text_of,
    with_items,
    with_own_ids,
)
from planner_ext.sk.outcome import returned_message

__all__ = ["bring_up_to_date", "check_history", "find_problems", "one_result_each", "repair_history"]

# Whether a history may be sent: calls that servers accept, each answered once, right after the message with it.

NO_RESULT = "No result was recorded for this call."
"""What `repair_history` puts where a call was left unanswered."""


@dataclass(slots=True)
class _Owed:
    """The calls of the newest message with calls that have no result yet, by id, and those that have one.

    Attributes:
        by_id: Id to the place of its message.
    """

    by_id: dict[str, int] = field(default_factory=dict[str, int])
    answered: set[str] = field(default_factory=set[str])

    def unanswered(self) -> list[str]:
        return [f"message {place}: the call {call!r} has no result" for call, place in self.by_id.items()]

    def answer(self, call: str, place: int) -> list[str]:
        if call in self.by_id:
            self.answered.add(call)
            del self.by_id[call]
            return []
        kind = "a second result for the call" if call in self.answered else "a result for no call before it:"
        return [f"message {place}: {kind} {call!r}"]


def find_problems(messages: Sequence[ChatMessageContent], offered: Container[str] | None = None) -> list[str]:
    """List what keeps a history from being sent, in order; each names the message's place and the ids.

    Args:
        messages: The history.
        offered: Function names that may be longer than most servers accept; None does not judge lengths.
    """
    problems: list[str] = []
    owed = _Owed()
    for place, message in enumerate(messages):
        if message.role == AuthorRole.TOOL:
            results = _results(message)
            if not results:
                problems.append(f"message {place}: a tool message without a result")
            for result in results:
                problems += owed.answer(result.id or "", place)
            continue
        problems += owed.unanswered()
        calls = _call_ids(message)
        owed = _Owed(dict.fromkeys(calls, place))
        problems += _id_problems(calls, place)
        problems += _name_problems(message, place, offered)
    return [*problems, *owed.unanswered()]


def _id_problems(calls: Sequence[str], place: int) -> list[str]:
    missing = [f"message {place}: a call without an id"] if "" in calls else []
    twice = sorted({call for call in calls if call and calls.count(call) > 1})
    return [*missing, *(f"message {place}: the call id {call!r} twice" for call in twice)]


def _name_problems(message: ChatMessageContent, place: int, offered: Container[str] | None) -> list[str]:
    names = [name_of(call) for call in _calls(message)]
    return [
        f"message {place}: the function name {quoted(name)}, which servers refuse"
        for name in names
        if accepted_name(name, offered) != name
    ]


def check_history(messages: Sequence[ChatMessageContent], offered: Container[str] | None = None) -> None:
    """Refuse a history that may not be sent; for ``offered`` see `find_problems`.

    Raises:
        InvalidHistoryError: Naming every problem; nothing was sent and nothing changed.
    """
    if problems := find_problems(messages, offered):
        raise InvalidHistoryError(
            "Expected a history in which every function call has a name that servers accept, and exactly one result "
            f"directly after it; found {'; '.join(problems)}. Answer or remove these calls, or pass "
            "on_invalid_history='repair'."
        )


def repair_history(
    messages: Sequence[ChatMessageContent], offered: Container[str] | None = None
) -> list[ChatMessageContent]:
    """Make a history fit to be sent: unanswered calls are answered, orphan and second results left out.

    Calls without an id of their own get one, and calls are written as servers accept them, see
    `planner_ext.sk.messages`. Results stay in the order in which they stand. Idempotent; a history that is fit
    already comes back as it is, and so does every message that needs no mending.
    """
    mended = [_with_own_calls(message, offered) for message in messages]
    if all(map(is_, mended, messages)) and not find_problems(messages, offered):
        return list(messages)
    repaired: list[ChatMessageContent] = []
    owed: list[_Call] = []
    for message, own in zip(messages, mended, strict=True):
        if message.role == AuthorRole.TOOL:
            repaired += _answering(message, owed)
            continue
        repaired += _missing_results(owed)
        repaired.append(own)
        owed = [_Call(sent=old, call=new) for old, new in zip(_calls(message), _calls(own), strict=True)]
    return [*repaired, *_missing_results(owed)]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that waits for its result, which comes under the id that ``sent`` has; and the call as it was mended."""

    sent: FunctionCallContent
    call: FunctionCallContent


def _with_own_calls(message: ChatMessageContent, offered: Container[str] | None) -> ChatMessageContent:
    calls = _calls(message)
    if not all(map(has_accepted_id, calls)) or len({call.id for call in calls}) < len(calls):
        message = with_items(message, with_own_ids(message.items), message.metadata)
    return accepted_message(message, offered)


def _answering(message: ChatMessageContent, owed: list[_Call]) -> list[ChatMessageContent]:
    """Keep of a tool message what answers a call that waits; nothing where nothing does."""
    items: list[FunctionResultContent] = []
    for result in _results(message):
        answered = next((waiting for waiting in owed if (waiting.sent.id or "") == (result.id or "")), None)
        if answered is not None:
            owed.remove(answered)
            items.append(_result_of(answered, result))
    if len(items) == len(message.items) and all(new is old for new, old in zip(items, message.items, strict=True)):
        return [message]
    return [message.model_copy(update={"items": items})] if items else []


def _result_of(answered: _Call, result: FunctionResultContent) -> FunctionResultContent:
    """Give a result the id and the name of its call, where these were mended."""
    sent, call = answered.sent, answered.call
    update: dict[str, Any] = {} if call.id == result.id else {"id": call.id}
    if name_of(call) != name_of(sent):
        update |= {"name": call.name, "plugin_name": call.plugin_name, "function_name": call.function_name}
    return result.model_copy(update=update) if update else result


def _missing_results(owed: Sequence[_Call]) -> list[ChatMessageContent]:
    return [
        ChatMessageContent(
            role=AuthorRole.TOOL,
            items=[FunctionResultContent(id=waiting.call.id, name=waiting.call.name, result=NO_RESULT)],
        )
        for waiting in owed
    ]


def one_result_each(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Split tool messages with several results, as stock loops leave them: of these only the first would be sent."""
    split: list[ChatMessageContent] = []
    for message in messages:
        results = _results(message) if len(message.items) > 1 else []
        split += [message.model_copy(update={"items": [result]}) for result in results] or [message]
    return split


def _calls(message: ChatMessageContent) -> list[FunctionCallContent]:
    return calls_of(message) if message.role == AuthorRole.ASSISTANT else []


def _call_ids(message: ChatMessageContent) -> list[str]:
    return [call.id or "" for call in _calls(message)]


def _results(message: ChatMessageContent) -> list[FunctionResultContent]:
    if message.role != AuthorRole.TOOL:
        return []
    return [item for item in message.items if isinstance(item, FunctionResultContent)]


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
    return message.role, text_of(message), _calls_sent(requested_calls(message)), results, others


def _calls_sent(calls: Sequence[RequestedCall]) -> list[tuple[str, str, str]]:
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
    own = [(text_of(returned), _calls_sent(requested_calls(returned)))]
    if (reply := next((fact for fact in reversed(facts) if isinstance(fact, ModelReplied)), None)) is not None:
        said = text_of(load_message(reply.message))
        calls = _calls_sent(reply.calls)
        own += [(said + own[0][0], []), (said, calls), (said + own[0][0], calls)]
    return (text_of(message), _calls_sent(requested_calls(message))) in own


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
