"""The caller's history of a resumed run, compared with the run's own."""

import json
from collections.abc import Sequence
from itertools import takewhile
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
from planner_ext.core.values import (
    RequestedCall,
    frozen,
)
from planner_ext.sk.chat.history import last_reply, one_result_each
from planner_ext.sk.errors import InvalidHistoryError
from planner_ext.sk.messages import (
    load_message,
    requested_calls,
    text_of,
)

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
    last = last_reply(facts)
    if last is None:
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
