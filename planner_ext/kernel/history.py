"""Whether a history may be sent: every call answered exactly once, directly after the message that made it."""

from collections.abc import Sequence

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)

from planner_ext.kernel.errors import InvalidHistoryError

__all__ = ["check_history", "find_problems", "repair_history"]

NO_RESULT = "No result was recorded for this call."
"""What `repair_history` puts where a call was left unanswered."""


def find_problems(messages: Sequence[ChatMessageContent]) -> list[str]:
    """List what keeps a history from being sent, in order; each names the message's place and the ids."""
    problems: list[str] = []
    owed: dict[str, int] = {}
    answered: set[str] = set()
    for place, message in enumerate(messages):
        results = _result_ids(message)
        if message.role != AuthorRole.TOOL and owed:
            problems += [f"message {at}: the call {call!r} has no result" for call, at in owed.items()]
            owed = {}
        for call in results:
            if call in owed:
                answered.add(call)
                del owed[call]
            else:
                kind = "a second result for the call" if call in answered else "a result for no call before it:"
                problems.append(f"message {place}: {kind} {call!r}")
        if message.role == AuthorRole.ASSISTANT and (calls := _call_ids(message)):
            answered = set()
            owed = dict.fromkeys(calls, place)
            problems += [
                f"message {place}: the call id {c!r} twice" for c in sorted({c for c in calls if calls.count(c) > 1})
            ]
    return [*problems, *(f"message {at}: the call {call!r} has no result" for call, at in owed.items())]


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

    Results stay in the order in which they stand. Idempotent; a history that is fit already comes back as it is.
    """
    if not find_problems(messages):
        return list(messages)
    repaired: list[ChatMessageContent] = []
    owed: dict[str, FunctionCallContent] = {}
    for message in messages:
        if message.role == AuthorRole.TOOL:
            items = [item for item in message.items if _answers(item, owed)]
            if items:
                repaired.append(ChatMessageContent(role=AuthorRole.TOOL, items=items, name=message.name))
            continue
        repaired += _missing_results(owed)
        repaired.append(message)
        owed = {call.id or "": call for call in _calls(message)} if message.role == AuthorRole.ASSISTANT else {}
    return [*repaired, *_missing_results(owed)]


def _answers(item: object, owed: dict[str, FunctionCallContent]) -> bool:
    if not isinstance(item, FunctionResultContent):
        return True
    return owed.pop(item.id or "", None) is not None


def _missing_results(owed: dict[str, FunctionCallContent]) -> list[ChatMessageContent]:
    return [
        ChatMessageContent(
            role=AuthorRole.TOOL, items=[FunctionResultContent(id=call.id, name=call.name, result=NO_RESULT)]
        )
        for call in owed.values()
    ]


def _calls(message: ChatMessageContent) -> list[FunctionCallContent]:
    return [item for item in message.items if isinstance(item, FunctionCallContent)]


def _call_ids(message: ChatMessageContent) -> list[str]:
    return [call.id or "" for call in _calls(message)]


def _result_ids(message: ChatMessageContent) -> list[str]:
    if message.role != AuthorRole.TOOL:
        return []
    return [item.id or "" for item in message.items if isinstance(item, FunctionResultContent)]
