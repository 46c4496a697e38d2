"""The history that a request sends: a transcript as messages, and a caller's history, checked or repaired."""

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from operator import is_
from typing import Any, Final, TypeVar

from pydantic import BaseModel
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
from planner_ext.core.values import (
    CallResult,
    EditedReply,
    Message,
    RequestedCall,
    TextMessage,
    TranscriptItem,
    frozen,
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
    requested_calls,
    text_of,
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
    return [message.model_copy(update={"items": items})] if items else []


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
    return calls_of(message) if message.role == AuthorRole.ASSISTANT else []


def _results(message: ChatMessageContent) -> list[FunctionResultContent]:
    tool = message.role == AuthorRole.TOOL
    return (
        [item for item in message.items if isinstance(item, FunctionResultContent)]
        if tool
        else []
    )


# The caller's history of a resumed run.

_WAY_OUT = "The history was not changed. Resume with the history that the run left, or with an empty one."


@frozen
class ResumedHistory:
    """The caller's history of a resumed run, without the message that was returned.

    Attributes:
        kept: The messages of the run that the history has.
        missing: Those that it lacks.
        later: What the caller added after the run's.
    """

    kept: Sequence[ChatMessageContent]
    missing: Sequence[ChatMessageContent]
    later: Sequence[ChatMessageContent]

    @property
    def messages(self) -> list[ChatMessageContent]:
        """The history, brought up to date."""
        return [*self.kept, *self.missing, *self.later]

    @property
    def later_turn(self) -> str | None:
        """The first message that continues the conversation, or None."""
        for message in self.later:
            called = any(
                isinstance(item, FunctionCallContent | FunctionResultContent)
                for item in message.items
            )
            if called or message.role == AuthorRole.USER:
                return _summary(message)
        return None


def resumed_history(
    history: ChatHistory,
    transcript: Sequence[ChatMessageContent],
    state: State,
    facts: Sequence[Fact],
    returned: ChatMessageContent,
) -> ResumedHistory:
    """Compare a resumed run's history with its transcript, up to the point of resumption.

    Raises:
        InvalidHistoryError: If it is that of another run, or holds calls or results of
            the batch that waits.
    """
    messages = one_result_each(history.messages)
    known = sum(
        1 for _ in takewhile(_are_same, zip(messages, transcript, strict=False))
    )
    later = messages[known:]
    if later and _is_returned(later[0], facts, returned):
        later = later[1:]
    if known < len(transcript) and later:
        raise InvalidHistoryError(
            f"Expected the history of this checkpoint's run; its message {known} is {_summary(transcript[known])}, "
            f"the history's {_summary(messages[known])}. {_WAY_OUT}"
        )
    if present := _answered_elsewhere(later, state):
        raise InvalidHistoryError(
            f"The history holds {', '.join(present)} already: this checkpoint was resumed before, or its calls were "
            f"answered elsewhere. {_WAY_OUT}"
        )
    return ResumedHistory(
        kept=messages[:known], missing=transcript[known:], later=later
    )


def _are_same(pair: tuple[ChatMessageContent, ChatMessageContent]) -> bool:
    """Whether messages are equal but for metadata and classes, which JSON does not keep."""
    one, other = pair
    return one is other or _content(one) == _content(other)


def _content(message: ChatMessageContent) -> tuple[Any, ...]:
    results = [
        (item.id, str(item.result))
        for item in message.items
        if isinstance(item, FunctionResultContent)
    ]
    others = [
        item.to_dict()
        for item in message.items
        if not isinstance(
            item, TextContent | FunctionCallContent | FunctionResultContent
        )
    ]
    return message.role, *_text_and_calls(message), results, others


def _text_and_calls(
    message: ChatMessageContent,
) -> tuple[str, list[tuple[str, str, str]]]:
    """Return text and calls, their arguments canonical: a store may reformat JSON."""
    return text_of(message), _canonical_calls(requested_calls(message))


def _canonical_calls(calls: Sequence[RequestedCall]) -> list[tuple[str, str, str]]:
    return [(call.id, call.name, _canonical_json(call.arguments)) for call in calls]


def _canonical_json(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments


def _is_returned(
    message: ChatMessageContent, facts: Sequence[Fact], returned: ChatMessageContent
) -> bool:
    """Whether it is the message that the run had returned, or its chunks added up."""
    if message.role != AuthorRole.ASSISTANT:
        return False
    said = _text_and_calls(message)
    (text, calls) = _text_and_calls(returned)
    if said == (text, calls):
        return True
    if (last := last_reply(facts)) is None:
        return False
    own = text_of(load_message(last.message))
    if said[1] == _canonical_calls(last.calls) and said[0] in (own, own + text):
        return True
    # A reply without calls was returned as it is.
    end = "" if own == text and not last.calls else text
    whole = ""
    for reply in (fact for fact in reversed(facts) if isinstance(fact, ModelReplied)):
        whole = text_of(load_message(reply.message)) + whole
        if said == (whole + end, calls):
            return True
        if len(whole) > len(said[0]):
            break
    return False


def last_reply(facts: Sequence[Fact]) -> ModelReplied | None:
    """Return a journal's newest reply, or None."""
    return next(
        (fact for fact in reversed(facts) if isinstance(fact, ModelReplied)), None
    )


def _answered_elsewhere(
    messages: Sequence[ChatMessageContent], state: State
) -> list[str]:
    waiting = (
        {call.request.id for call in state.batch.calls}
        if state.batch is not None
        else set[str]()
    )
    found = [
        f"the {'result of the ' if isinstance(item, FunctionResultContent) else ''}call {item.id!r}"
        for message in messages
        for item in message.items
        if isinstance(item, FunctionCallContent | FunctionResultContent)
        and item.id in waiting
    ]
    return list(dict.fromkeys(found))


def _summary(message: ChatMessageContent) -> str:
    calls = "".join(
        f", calling {call.name} as {call.id!r}" for call in requested_calls(message)
    )
    return f"of the {message.role.value}: {text_of(message)[:60]!r}{calls}"
