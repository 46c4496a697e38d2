"""A session's messages: what may be added to them, which calls in them wait for results, and what may be sent.

Promises that nothing of the caller's is shared or changed, and that what is refused leaves no trace. Must not know the
loop or the service.
"""

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
)

from planner_ext.core.fold import CUT_SHORT
from planner_ext.core.shown import shown
from planner_ext.kernel.accepted import given_arguments
from planner_ext.kernel.arguments import InvalidArguments, parse_object
from planner_ext.kernel.errors import InvalidHistoryError, InvalidReplyError, PlannerInvalidConfigurationError
from planner_ext.kernel.history import find_problems, one_result_each
from planner_ext.kernel.messages import calls_of, merge_reply, requested_calls, text_of, with_items
from planner_ext.kernel.rendering import render
from planner_ext.kernel.results import result_text

__all__ = ["Messages", "OpenCall", "as_reply", "checked_prompt", "copied", "open_calls", "with_added"]

Messages: TypeAlias = ChatMessageContent | FunctionResultContent | Iterable[ChatMessageContent | FunctionResultContent]
"""One message, or several in order, a ``ChatHistory`` included; a result by itself is its tool message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A function call of the model that its caller has to answer.

    Attributes:
        id: The call's id; its result goes by it.
        fully_qualified_name: The name that the model used, ``plugin-function``; nothing was checked yet.
        raw_arguments: JSON text as received, "{}" where the model sent none.
    """

    id: str
    fully_qualified_name: str
    raw_arguments: str = ""

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments, parsed; not validated against a function.

        Raises:
            InvalidReplyError: If the text is no JSON object. Answer the call with a result that says so.
        """
        parsed = parse_object(self.raw_arguments)
        if isinstance(parsed, InvalidArguments):
            raise InvalidReplyError(
                f"Expected one JSON object as arguments of {self.fully_qualified_name} ({self.id}); those received "
                f"{parsed.message} The text is in raw_arguments; tell the model with call.result(...)."
            )
        return parsed

    def result(self, value: Any) -> ChatMessageContent:
        """Make the tool message that answers the call, to be appended.

        Args:
            value: What the function returned, or what the model is to read instead; written as in closed loop: text as
                it is, None as "", everything else as JSON.
        """
        content = FunctionResultContent(id=self.id, name=self.fully_qualified_name, result=result_text(value))
        return ChatMessageContent(role=AuthorRole.TOOL, items=[content])


def copied(name: str, given: object, *, text_allowed: bool = True) -> list[ChatMessageContent]:
    """Copy what a caller passed as messages, deeply, each result in a message of its own.

    Args:
        name: The parameter, for errors.
        given: `Messages`, or a text, which is a user message.
        text_allowed: Whether a bare text may stand for a message.

    Raises:
        PlannerInvalidConfigurationError: If it is something else, or an empty text.
    """
    if isinstance(given, str) and text_allowed:
        if not given.strip():
            raise PlannerInvalidConfigurationError(f"{name} must not be an empty text; got {shown(given)}.")
        return [ChatMessageContent(role=AuthorRole.USER, content=given)]
    if isinstance(given, ChatMessageContent | FunctionResultContent | str) or not isinstance(given, Iterable):
        given = (given,)
    messages = [_copied(name, message) for message in cast("Iterable[object]", given)]
    return one_result_each(render(messages))


def _copied(name: str, message: object) -> ChatMessageContent:
    if isinstance(message, FunctionResultContent):
        return deepcopy(message).to_chat_message_content()
    if isinstance(message, ChatMessageContent):
        return deepcopy(message)
    raise PlannerInvalidConfigurationError(
        f"{name} must be messages of Semantic Kernel; got {shown(message)}. Make one with ChatMessageContent(role=..., "
        "content=...)."
    )


def open_calls(messages: Sequence[ChatMessageContent]) -> tuple[OpenCall, ...]:
    """List the calls at the end of a conversation that have no result yet, in their order."""
    answered: set[str | None] = set()
    for message in reversed(messages):
        if message.role != AuthorRole.TOOL:
            return tuple(call for call in _calls(message) if call.id not in answered)
        answered |= {item.id for item in message.items if isinstance(item, FunctionResultContent)}
    return ()


def _calls(message: ChatMessageContent) -> list[OpenCall]:
    requested = requested_calls(message) if message.role == AuthorRole.ASSISTANT else ()
    return [
        OpenCall(id=call.id, fully_qualified_name=call.name, raw_arguments=given_arguments(call.arguments))
        for call in requested
    ]


def with_added(messages: Sequence[ChatMessageContent], added: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Add messages to a conversation. Calls and results come in pairs; only calls that waited already may still wait.

    A pair whose call is the one that waits may be given whole: the call is not added a second time.

    Raises:
        InvalidHistoryError: If half of a pair is missing, naming the ids.
    """
    waiting = open_calls(messages)
    if waiting and added and [call.id for call in _calls(added[0])] == [call.id for call in waiting]:
        added = added[1:]
    combined = [*messages, *added]
    still = [call for call in open_calls(combined) if call in waiting]
    if problems := find_problems([*combined, *(call.result("") for call in still)]):
        raise InvalidHistoryError(
            "Expected function calls and their results in pairs, each result after its call; found "
            f"{'; '.join(problems)}. Append both together; nothing was added."
        )
    return combined


def checked_prompt(messages: list[ChatMessageContent], *, closed: bool) -> list[ChatMessageContent]:
    """Take a conversation that the model may be asked to go on with.

    Raises:
        PlannerInvalidConfigurationError: If there is nothing to answer, or a prefilled reply in closed loop.
        InvalidHistoryError: If calls and results do not match, naming the ids.
    """
    if problems := find_problems(messages):
        raise InvalidHistoryError(
            "Expected a conversation in which every function call has its result before the next prompt; found "
            f"{'; '.join(problems)}. Append the results first; nothing was sent."
        )
    if not messages:
        raise PlannerInvalidConfigurationError("prompt needs a text or messages; got none, and the session is empty.")
    if closed and messages[-1].role == AuthorRole.ASSISTANT:
        raise PlannerInvalidConfigurationError(
            "The last message of a prompt must not be the assistant's in closed loop: which of several replies should "
            "begin with it? Add a user message, or prefill in open loop: AutomaticToolUseConfig(enabled=False)."
        )
    return messages


def as_reply(messages: Sequence[ChatMessageContent]) -> list[ChatMessageContent]:
    """Make one message of the reply to an open-loop request, as the closed loop keeps it: at most one, ids reissued.

    Of a reply that was cut short the text is kept and its calls are not: they may not be whole.
    """
    if not messages:
        return []
    reply = merge_reply(messages)
    if calls_of(reply) and reply.finish_reason is not None and reply.finish_reason.value in CUT_SHORT:
        items: list[Any] = [item for item in reply.items if not isinstance(item, FunctionCallContent)]
        return [with_items(reply, items, reply.metadata)] if text_of(reply) else []
    return [reply]
