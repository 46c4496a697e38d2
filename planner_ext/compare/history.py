"""A chat history as plain values, and the check whether servers accept it.

The rule of calls and results is the scripted server's (`planner_ext.testing.rules`), which is independent of the
compared loops.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from semantic_kernel.contents import (
    AuthorRole,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)

from planner_ext.testing.rules import CallPairing

__all__ = ["ShownCall", "ShownMessage", "ShownResult", "Violation", "find_violations", "shown_messages"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCall:
    """One function call in a message: its id, the function's name, and the arguments as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownResult:
    """The text that the model reads as the result of the call with this id."""

    call_id: str
    name: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownMessage:
    """One message of a history.

    Attributes:
        role: ``user``, ``assistant``, ``tool`` or ``system``.
        text: Its text; the results of calls are in ``results``.
        trip: The 1-based round trip of this reply; None for every other message.
    """

    role: str
    text: str = ""
    calls: tuple[ShownCall, ...] = ()
    results: tuple[ShownResult, ...] = ()
    trip: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """Why servers would refuse a history: the reason, and the 0-based index of the message at fault."""

    place: int
    text: str


def shown_messages(messages: Sequence[ChatMessageContent]) -> tuple[ShownMessage, ...]:
    """Convert Semantic Kernel's messages; the replies are numbered as round trips, in order."""
    trips = count(1)
    return tuple(_shown(each, next(trips) if each.role == AuthorRole.ASSISTANT else None) for each in messages)


def _shown(message: ChatMessageContent, trip: int | None) -> ShownMessage:
    texts: list[str] = []
    calls: list[ShownCall] = []
    results: list[ShownResult] = []
    for item in message.items:
        match item:
            case TextContent():
                texts.append(item.text)
            case FunctionCallContent():
                calls.append(ShownCall(id=item.id or "", name=item.name or "", arguments=_text(item.arguments)))
            case FunctionResultContent():
                results.append(ShownResult(call_id=item.id or "", name=item.name or "", text=_text(item.result)))
            case _:
                pass
    role, text = message.role.value, "".join(texts)
    return ShownMessage(role=role, text=text, calls=tuple(calls), results=tuple(results), trip=trip)


def _text(value: object) -> str:
    return "" if value is None else str(value)


def find_violations(messages: Sequence[ShownMessage]) -> tuple[Violation, ...]:
    """List why servers would refuse a history, in the order of the messages.

    The rules are OpenAI's. Each call has an id that is unique in its message and exactly one result, before any message
    without results. A result answers a call of the message right before the results. A reply has text or calls.

    Args:
        messages: The whole history.

    Returns:
        The violations; empty for a valid history. A call without a result is reported at the message that makes it.
    """
    found = [(place, text) for place, message in enumerate(messages) for text in _faults(message)]
    found += _pairing_faults(messages)
    found.sort(key=lambda fault: fault[0])
    return tuple(Violation(place=place, text=f"message {place}: {text}") for place, text in found)


def _faults(message: ShownMessage) -> Iterator[str]:
    """Yield the faults of a single message."""
    if message.role == "assistant" and not message.text and not message.calls:
        yield "a reply with neither text nor calls"
    ids = [call.id for call in message.calls]
    if not all(ids):
        yield "a call without an id"
    for name in sorted({one for one in ids if one and ids.count(one) > 1}):
        yield f"two calls have the id {name}"


def _pairing_faults(messages: Sequence[ShownMessage]) -> Iterator[tuple[int, str]]:
    """Yield the calls without a result, and the results without a call, each with its message's index."""
    caller, names, pairing = 0, dict[str, str](), CallPairing()
    for place, message in enumerate((*messages, ShownMessage(role="end"))):
        if message.role != "tool":
            calls = {call.id: call.name for call in message.calls}
            for call_id in pairing.begin(calls):
                yield caller, f"the call {call_id} of {names[call_id]} has no result"
            caller, names = place, calls
        for result in message.results:
            match pairing.answer(result.call_id):
                case "answered":
                    pass
                case "uncalled":
                    yield place, f"a result for {result.call_id}, which nothing called"
                case "repeated":
                    yield place, f"a second result for the call {result.call_id}"
