"""A run so far, as a conversation: what a person reads who decides a call of it. All texts are fully visible."""

from collections.abc import Iterator

from planner_ext.core.state import ASK_USER
from planner_ext.core.values import frozen
from planner_ext.engine.timeline import Timeline, TimelineMessage
from planner_ext.readable.parts import Part, parts_written
from planner_ext.readable.plain import arguments_line
from planner_ext.readable.text import exact, visible

_SPEAKERS = {
    "system": "instructions",
    "user": "the user",
    "assistant": "the model",
    "tool": "a function",
}


_LONGEST_LINE = 300
"""Characters of a line that a page cuts where it ends."""


@frozen
class TurnCall:
    """A call of a reply.

    Attributes:
        id: The iteration and the model's id of the call, such as ``0/call_1``.
        line: The arguments on one line, or its beginning.
    """

    id: str
    function: str
    line: str
    arguments: tuple[Part, ...]


@frozen
class Turn:
    """One turn of a conversation.

    Attributes:
        role: ``system``, ``user``, ``assistant``, ``tool``, or ``person``.
        speaker: Its author, such as a function's name.
        at: In seconds since the epoch; None for messages from the start.
    """

    role: str
    speaker: str
    text: str
    calls: tuple[TurnCall, ...] = ()
    at: float | None = None


def runs_around(timeline: Timeline, id: str) -> list[Timeline]:
    """List a run, and those nested in it around the call of this id; the last one asks."""
    nested = (run for call in timeline.calls for run in call.runs)
    inner = next((run for run in nested if id.startswith(f"{run.run_id}/")), None)
    return [timeline, *([] if inner is None else runs_around(inner, id))]


def conversation_of(timeline: Timeline) -> Iterator[Turn]:
    """List a run's turns, without its plan and the planner's own messages."""
    for iteration in timeline.iterations[:1]:
        yield from map(_said, iteration.messages)
    for iteration in timeline.iterations:
        if iteration.reply is not None and iteration.number >= 0:
            asked = [
                call.prompt for call in iteration.calls if call.function == ASK_USER
            ]
            calls = tuple(
                TurnCall(
                    id=f"{iteration.number}/{call.id}",
                    function=exact(call.function),
                    line=arguments_line(call.requested)[:_LONGEST_LINE],
                    arguments=parts_written(call.requested),
                )
                for call in iteration.calls
                if call.function != ASK_USER
            )
            texts = filter(None, (iteration.reply.text, *asked))
            yield Turn(
                role="assistant",
                speaker="the model",
                text=visible("\n".join(texts)),
                calls=calls,
                at=iteration.request.ended or 0.0,
            )
        for call in iteration.calls:
            if call.ended is not None and call.function != ASK_USER:
                yield Turn(
                    role="tool",
                    speaker=exact(call.function),
                    text=visible(call.result),
                    at=call.ended,
                )
        for event in iteration.events:
            if event.kind == "question" and event.answer is not None:
                yield Turn(
                    role="person",
                    speaker=exact(event.by) or "a person",
                    text=visible(event.answer),
                    at=event.at,
                )


def _said(message: TimelineMessage) -> Turn:
    role = message.role if message.role in _SPEAKERS else "user"
    texts = filter(None, (message.text, *message.others))
    text = visible("\n".join(texts))
    return Turn(role=role, speaker=_SPEAKERS[role], text=text)
