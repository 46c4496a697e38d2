"""Whether a history may be sent to a model, judged by rules of its own: neither the loop's nor the server's.

Pure; knows messages as `ShownMessage` only, so it can judge what any option left behind.
"""

from collections.abc import Iterator, Sequence

from planner_ext.compare.comparison import ShownMessage, Violation

__all__ = ["find_violations"]


def find_violations(messages: Sequence[ShownMessage]) -> tuple[Violation, ...]:
    """List what keeps a history from being sent, in the order of the messages.

    The rules, which are OpenAI's: each call has an id of its own within its message, and exactly one result, before any
    message that is no result; a result answers a call of the message right before the results; a reply has text or
    calls.

    Args:
        messages: The whole history.

    Returns:
        Nothing for a history that may be sent; a call without a result is found at the message that makes it.
    """
    found = [
        violation
        for place, message in enumerate(messages)
        for violation in (*_own(place, message), *_unanswered(place, messages), *_stray(place, messages))
    ]
    return tuple(found)


def _own(place: int, message: ShownMessage) -> Iterator[Violation]:
    """What is wrong with a message by itself."""
    if message.role == "assistant" and not message.text and not message.calls:
        yield Violation(place=place, text=f"message {place}: a reply with neither text nor calls")
    ids = [call.id for call in message.calls]
    if not all(ids):
        yield Violation(place=place, text=f"message {place}: a call without an id")
    for name in sorted({one for one in ids if one and ids.count(one) > 1}):
        yield Violation(place=place, text=f"message {place}: two calls have the id {name}")


def _unanswered(place: int, messages: Sequence[ShownMessage]) -> Iterator[Violation]:
    """The calls of a message that no result directly after it answers."""
    answers = {result.call_id for message in _results_after(place, messages) for result in message.results}
    for call in messages[place].calls:
        if call.id not in answers:
            yield Violation(place=place, text=f"message {place}: the call {call.id} of {call.name} has no result")


def _stray(place: int, messages: Sequence[ShownMessage]) -> Iterator[Violation]:
    """The results in a message that answer no call, or one that is answered already."""
    message = messages[place]
    if not message.results:
        return
    first = place
    while first and messages[first - 1].role == "tool":
        first -= 1
    waiting = {call.id for call in messages[first - 1].calls} if first else set[str]()
    before = {result.call_id for earlier in messages[first:place] for result in earlier.results}
    for result in message.results:
        if result.call_id not in waiting:
            yield Violation(place=place, text=f"message {place}: a result for {result.call_id}, which nothing called")
        elif result.call_id in before:
            yield Violation(place=place, text=f"message {place}: a second result for the call {result.call_id}")
        before.add(result.call_id)


def _results_after(place: int, messages: Sequence[ShownMessage]) -> Iterator[ShownMessage]:
    for message in messages[place + 1 :]:
        if message.role != "tool":
            return
        yield message
