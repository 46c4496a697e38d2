"""The history that a request sends: a transcript as messages, and a caller's history, checked or repaired."""

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from operator import is_
from typing import Any, Final, TypeVar

from pydantic import BaseModel
from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.core.facts import Fact, ModelReplied
from planner_ext.core.values import (
    CallResult,
    EditedReply,
    Message,
    TextMessage,
    TranscriptItem,
)
from planner_ext.sk.chat.reply import accepted_items, accepted_name
from planner_ext.sk.errors import InvalidHistoryError
from planner_ext.sk.functions.conversion import quoted
from planner_ext.sk.messages import (
    INSIDE,
    AssistantMessage,
    calls_of,
    load_message,
    name_of,
    with_items,
)

_M = TypeVar("_M", bound=BaseModel)

NO_RESULT: Final = "No result was recorded for this call."
"""The result that `repair_history` gives a call without one."""

# Converting a transcript to messages.


def render(entries: Iterable[TranscriptItem]) -> list[ChatMessageContent]:
    """Convert transcript entries to Semantic Kernel's messages."""
    messages: list[ChatMessageContent] = []
    for entry in entries:
        match entry:
            case CallResult():
                message = _result_message(entry)
            case EditedReply():
                message = _edited(
                    _load(entry.message), set(entry.kept), dict(entry.edited)
                )
            case TextMessage():
                message = ChatMessageContent(
                    role=AuthorRole(entry.role), content=entry.text
                )
            case _:
                message = _load(entry)
        messages.append(message)
    return messages


def _result_message(entry: CallResult) -> ChatMessageContent:
    """Copy the first message of a function's result, which pydantic validated."""
    first = _first_result(entry.name)
    metadata = {INSIDE: list(entry.inside)} if entry.inside else {}
    content = _copied(
        first.items[0],
        {"id": entry.call_id, "result": entry.text, "metadata": metadata},
    )
    return _copied(first, {"items": [content], "metadata": {}})


def _copied(model: _M, values: dict[str, Any]) -> _M:
    """Copy a model without private attributes as pickle does: in half the time of ``model_copy``."""
    made = object.__new__(type(model))
    made.__setstate__(
        {
            "__dict__": vars(model) | values,
            "__pydantic_fields_set__": model.model_fields_set.copy(),
            "__pydantic_extra__": None,
            "__pydantic_private__": None,
        }
    )
    return made


@lru_cache(maxsize=256)
def _first_result(name: str) -> ChatMessageContent:
    content = FunctionResultContent(id="", name=name, result="")
    return ChatMessageContent(role=AuthorRole.TOOL, items=[content])


def _edited(
    message: ChatMessageContent, kept: set[str], edited: Mapping[str, str]
) -> ChatMessageContent:
    items: list[Any] = [
        item.model_copy(update={"arguments": edited[item.id or ""]})
        if isinstance(item, FunctionCallContent) and item.id in edited
        else item
        for item in message.items
        if not isinstance(item, FunctionCallContent) or item.id in kept
    ]
    return with_items(message, items, message.metadata)


def _load(message: Message) -> ChatMessageContent:
    """Load a message: text stays beside the calls, and an empty message gets a text."""
    loaded = load_message(message)
    if not loaded.items:
        return loaded.model_copy(update={"items": [TextContent(text="")]})
    if (
        loaded.role != AuthorRole.ASSISTANT
        or isinstance(loaded, AssistantMessage)
        or not calls_of(loaded)
    ):
        return loaded
    return with_items(loaded, list(loaded.items), loaded.metadata)


# Validating a history: servers accept its calls, and each is answered once, right after its message.


def find_problems(
    messages: Sequence[ChatMessageContent], offered: Container[str] | None = None
) -> list[str]:
    """List, in order, why servers would refuse a history; for ``offered`` see `accepted_name`."""
    problems: list[str] = []
    # Calls without a result, each with the index of its message.
    owed: dict[str, int] = {}
    answered: set[str] = set()
    for place, message in enumerate(messages):
        if message.role != AuthorRole.TOOL:
            calls = _calls(message)
            problems += [*_unanswered(owed), *_call_problems(calls, place, offered)]
            owed = dict.fromkeys((call.id or "" for call in calls), place)
            answered = set[str]()
            continue
        results = _results(message)
        if _is_of_service(message, answered):
            continue
        if not results:
            problems.append(f"message {place}: a tool message without a result")
        for call in (result.id or "" for result in results):
            if owed.pop(call, None) is None:
                kind = (
                    "a second result for the call"
                    if call in answered
                    else "a result for no call before it:"
                )
                problems.append(f"message {place}: {kind} {call!r}")
            else:
                answered.add(call)
    return [*problems, *_unanswered(owed)]


def _unanswered(owed: Mapping[str, int]) -> list[str]:
    return [
        f"message {place}: the call {call!r} has no result"
        for call, place in owed.items()
    ]


def _call_problems(
    calls: Sequence[FunctionCallContent], place: int, offered: Container[str] | None
) -> Iterable[str]:
    ids = [call.id or "" for call in calls]
    if "" in ids:
        yield f"message {place}: a call without an id"
    for twice in sorted({call for call in ids if call and ids.count(call) > 1}):
        yield f"message {place}: the call id {twice!r} twice"
    for name in map(name_of, calls):
        if accepted_name(name, offered) != name:
            yield f"message {place}: the function name {quoted(name)}, which servers refuse"


def check_history(
    messages: Sequence[ChatMessageContent], offered: Container[str] | None = None
) -> None:
    """Refuse an invalid history, naming every problem; for ``offered`` see `accepted_name`."""
    if problems := find_problems(messages, offered):
        raise InvalidHistoryError(
            "Expected a history in which every function call has a name that servers accept, and exactly one result "
            f"directly after it; found {'; '.join(problems)}. Answer or remove these calls, or pass "
            "on_invalid_history='repair'."
        )


def repair_history(
    messages: Sequence[ChatMessageContent], offered: Container[str] | None = None
) -> list[ChatMessageContent]:
    """Answer unanswered calls, and remove orphan and second results; idempotent.

    Calls are normalised by `accepted_items`. A message that needs no change is returned
    itself.
    """
    repaired: list[ChatMessageContent] = []
    owed: list[_OwedCall] = []
    for message in messages:
        if message.role == AuthorRole.TOOL:
            repaired += _answering(message, owed)
            continue
        own = _accepted(message, offered)
        repaired += [*map(_missing_result, owed), own]
        owed = [*zip(_calls(message), _calls(own), strict=True)]
    return [*repaired, *map(_missing_result, owed)]


_OwedCall = tuple[FunctionCallContent, FunctionCallContent]
"""A call without a result: as the history has it, and as it is repaired."""


def _accepted(
    message: ChatMessageContent, offered: Container[str] | None
) -> ChatMessageContent:
    if message.role != AuthorRole.ASSISTANT:
        return message
    items, _ = accepted_items(message.items, offered)
    return (
        message
        if all(map(is_, items, message.items))
        else with_items(message, items, message.metadata)
    )


def _answering(
    message: ChatMessageContent, owed: list[_OwedCall]
) -> list[ChatMessageContent]:
    results = _results(message)
    items = list[FunctionResultContent]()
    for result in results:
        answered = next(
            (pair for pair in owed if (pair[0].id or "") == (result.id or "")), None
        )
        if answered is not None:
            owed.remove(answered)
            items.append(_result_of(*answered, result))
    if items and len(items) == len(results) and all(map(is_, items, results)):
        return [message]
    if items:
        return [message.model_copy(update={"items": items})]
    return []


def _result_of(
    sent: FunctionCallContent, call: FunctionCallContent, result: FunctionResultContent
) -> FunctionResultContent:
    update: dict[str, Any] = {} if call.id == result.id else {"id": call.id}
    if name_of(call) != name_of(sent):
        update |= {
            "name": call.name,
            "plugin_name": call.plugin_name,
            "function_name": call.function_name,
        }
    return result.model_copy(update=update) if update else result


def _missing_result(owed: _OwedCall) -> ChatMessageContent:
    _, call = owed
    content = FunctionResultContent(id=call.id, name=call.name, result=NO_RESULT)
    return ChatMessageContent(role=AuthorRole.TOOL, items=[content])


def one_result_each(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Split tool messages with several results, as stock loops write them: connectors send only the first result.

    A service's message for a run that a filter ended is left out: it repeats results.
    """
    split: list[ChatMessageContent] = []
    answered: set[str] = set()
    for message in messages:
        if message.role != AuthorRole.TOOL:
            answered = set()
        elif _is_of_service(message, answered):
            continue
        else:
            answered.update(result.id or "" for result in _results(message))
        results = _results(message) if len(message.items) > 1 else []
        split += [
            message.model_copy(update={"items": [result]}) for result in results
        ] or [message]
    return split


def _is_of_service(message: ChatMessageContent, answered: Container[str]) -> bool:
    """Whether a service returned this tool message for a run that a filter ended."""
    return "checkpoint" in message.metadata and all(
        (result.id or "") in answered for result in _results(message)
    )


def _calls(message: ChatMessageContent) -> list[FunctionCallContent]:
    if message.role == AuthorRole.ASSISTANT:
        return calls_of(message)
    return []


def _results(message: ChatMessageContent) -> list[FunctionResultContent]:
    tool = message.role == AuthorRole.TOOL
    return (
        [item for item in message.items if isinstance(item, FunctionResultContent)]
        if tool
        else []
    )


def last_reply(facts: Sequence[Fact]) -> ModelReplied | None:
    """Return a journal's newest reply, or None."""
    return next(
        (fact for fact in reversed(facts) if isinstance(fact, ModelReplied)), None
    )
