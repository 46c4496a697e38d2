"""Whether a history may be sent: every call answered exactly once, directly after the message that made it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)

from planner_ext.kernel.errors import InvalidHistoryError
from planner_ext.kernel.messages import calls_of, with_items, with_own_ids

__all__ = ["check_history", "find_problems", "one_result_each", "repair_history"]

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


def find_problems(messages: Sequence[ChatMessageContent]) -> list[str]:
    """List what keeps a history from being sent, in order; each names the message's place and the ids."""
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
    return [*problems, *owed.unanswered()]


def _id_problems(calls: Sequence[str], place: int) -> list[str]:
    missing = [f"message {place}: a call without an id"] if "" in calls else []
    twice = sorted({call for call in calls if call and calls.count(call) > 1})
    return [*missing, *(f"message {place}: the call id {call!r} twice" for call in twice)]


def check_history(messages: Sequence[ChatMessageContent]) -> None:
    """Refuse a history that may not be sent.

    Raises:
        InvalidHistoryError: Naming every problem; nothing was sent and nothing changed.
    """
    if problems := find_problems(messages):
        raise InvalidHistoryError(
            "Expected a history in which every function call has exactly one result directly after it; found "
            f"{'; '.join(problems)}. Answer or remove these calls, or pass on_invalid_history='repair'."
        )


def repair_history(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Make a history fit to be sent: unanswered calls are answered, orphan and second results left out.

    Calls without an id of their own get one. Results stay in the order in which they stand. Idempotent; a history that
    is fit already comes back as it is, and so does every message that needs no mending.
    """
    if not find_problems(messages):
        return list(messages)
    repaired: list[ChatMessageContent] = []
    owed: list[_Call] = []
    for message in messages:
        if message.role == AuthorRole.TOOL:
            repaired += _answering(message, owed)
            continue
        repaired += _missing_results(owed)
        mended = _with_own_calls(message)
        repaired.append(mended)
        owed = [_Call(sent_as=old.id or "", call=new) for old, new in zip(_calls(message), _calls(mended), strict=True)]
    return [*repaired, *_missing_results(owed)]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that waits for its result; ``sent_as`` is the id under which the result comes."""

    sent_as: str
    call: FunctionCallContent


def _with_own_calls(message: ChatMessageContent) -> ChatMessageContent:
    ids = _call_ids(message)
    if "" not in ids and len(set(ids)) == len(ids):
        return message
    return with_items(message, with_own_ids(message.items), message.metadata)


def _answering(message: ChatMessageContent, owed: list[_Call]) -> list[ChatMessageContent]:
    """Keep of a tool message what answers a call that waits; nothing where nothing does."""
    items: list[FunctionResultContent] = []
    for result in _results(message):
        answered = next((waiting for waiting in owed if waiting.sent_as == (result.id or "")), None)
        if answered is not None:
            owed.remove(answered)
            same = answered.call.id == result.id
            items.append(result if same else result.model_copy(update={"id": answered.call.id}))
    if len(items) == len(message.items) and all(new is old for new, old in zip(items, message.items, strict=True)):
        return [message]
    return [message.model_copy(update={"items": items})] if items else []


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
