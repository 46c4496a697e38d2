"""A front end of the AG-UI protocol: what it sends, what it keeps, and what it refuses of a stream."""

from collections.abc import Iterable, Sequence
from typing import Any

from ag_ui.core import (
    AssistantMessage,
    BaseEvent,
    EventType,
    FunctionCall,
    Interrupt,
    Message,
    ResumeEntry,
    RunAgentInput,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    ToolCall,
    ToolMessage,
    UserMessage,
)

__all__ = ["FrontEnd", "find_disorder"]

_TRIADS = {
    "TEXT_MESSAGE": "message_id",
    "TOOL_CALL": "tool_call_id",
    "STEP": "step_name",
}


def find_disorder(events: Iterable[BaseEvent]) -> str | None:
    """Say what of a stream breaks the protocol's rules of order, as its JavaScript client checks them; None if nothing.

    One run, from RUN_STARTED to RUN_FINISHED or RUN_ERROR; what is opened once is closed once before RUN_FINISHED, and
    extended only in between.
    """
    opened: set[tuple[str, str]] = set()
    types = [event.type.value for event in events]
    if (
        not types
        or types[0] != "RUN_STARTED"
        or types[-1] not in ("RUN_FINISHED", "RUN_ERROR")
    ):
        return f"it begins or ends wrongly: {types[:1]} {types[-1:]}"
    for event in list(events)[1:-1]:
        what, _, part = event.type.value.rpartition("_")
        if what == "RUN":
            return f"{event.type.value} in the middle"
        if part in ("RESULT", "SNAPSHOT"):
            continue
        key = (what, getattr(event, _TRIADS[what]))
        if (key in opened) != (part not in ("START", "STARTED")):
            return f"{event.type.value} of {key}, while open are {opened}"
        if part in ("START", "STARTED"):
            opened.add(key)
        elif part in ("END", "FINISHED"):
            opened.remove(key)
    return f"left open: {opened}" if opened and types[-1] == "RUN_FINISHED" else None


class FrontEnd:
    """One thread, as a front end keeps it: each stream adds to its messages, and is checked.

    Attributes:
        messages: The conversation.
        events: The last stream.
        interrupts: What its end waits for.
    """

    def __init__(
        self, thread_id: str = "thread", *, protocol_version: str | None = "1.0"
    ) -> None:
        self.messages: list[Message] = []
        self.events: Sequence[BaseEvent] = ()
        self.interrupts: list[Interrupt] = []
        self._thread_id = thread_id
        self._protocol_version = protocol_version
        self._runs = 0

    def ask(self, text: str, **options: Any) -> RunAgentInput:
        """Begin a run with a message of the user."""
        self._runs += 1
        self.messages.append(UserMessage(id=f"user-{self._runs}", content=text))
        return self._input(**options)

    def answer(self, *payloads: object, **options: Any) -> RunAgentInput:
        """Answer the interrupts in their order; None cancels one."""
        self._runs += 1
        entries = [
            ResumeEntry(
                interrupt_id=one.id,
                status="cancelled" if given is None else "resolved",
                payload=given,
            )
            for one, given in zip(self.interrupts, payloads, strict=False)
        ]
        return self._input(resume=entries, **options)

    def send_result(self, call_id: str, content: str, **options: Any) -> RunAgentInput:
        """Answer a call of a tool of the front end."""
        self._runs += 1
        self.messages.append(
            ToolMessage(
                id=f"result-{self._runs}", tool_call_id=call_id, content=content
            )
        )
        return self._input(**options)

    def unanswered(self, tool: str) -> list[str]:
        """List the calls of a tool that have no result."""
        answered = {
            one.tool_call_id for one in self.messages if isinstance(one, ToolMessage)
        }
        made = [
            call
            for one in self.messages
            if isinstance(one, AssistantMessage)
            for call in one.tool_calls or ()
        ]
        return [
            call.id
            for call in made
            if call.function.name == tool and call.id not in answered
        ]

    def look(self, **options: Any) -> RunAgentInput:
        """Ask for what is there, as a page does that is loaded."""
        self._runs += 1
        return self._input(**options)

    def _input(self, **options: Any) -> RunAgentInput:
        given = RunAgentInput(
            thread_id=self._thread_id,
            run_id=f"run-{self._runs}",
            protocol_version=self._protocol_version,
            messages=self.messages,
            **options,
        )
        return RunAgentInput.model_validate_json(given.model_dump_json(by_alias=True))

    def take(self, events: Sequence[BaseEvent]) -> list[str]:
        """Take a whole stream in, and list the types of its events."""
        assert (problem := find_disorder(events)) is None, problem
        self.take_part(events)
        end = events[-1]
        outcome = end.outcome if isinstance(end, RunFinishedEvent) else None
        if end.type is EventType.RUN_FINISHED:
            self.interrupts = (
                outcome.interrupts
                if isinstance(outcome, RunFinishedInterruptOutcome)
                else []
            )
        return [event.type.value for event in events]

    def take_part(self, events: Sequence[BaseEvent]) -> None:
        """Take in a stream that was left."""
        self.events = events
        for event in events:
            self._add(event)

    def _add(self, event: Any) -> None:
        match event.type:
            case EventType.MESSAGES_SNAPSHOT:
                sent = {message.id: message for message in event.messages}
                assert len(sent) == len(event.messages), "an id is one message's"
                kept = [sent.pop(one.id) for one in self.messages if one.id in sent]
                self.messages[:] = [*kept, *sent.values()]
            case EventType.TEXT_MESSAGE_START:
                of = UserMessage if event.role == "user" else AssistantMessage
                self.messages.append(of(id=event.message_id, content=""))
            case EventType.TEXT_MESSAGE_CONTENT:
                message = self._message(event.message_id)
                message.content = (message.content or "") + event.delta
            case EventType.TOOL_CALL_START:
                function = FunctionCall(name=event.tool_call_name, arguments="")
                message = self._assistant(event.parent_message_id)
                message.tool_calls = [
                    *(message.tool_calls or ()),
                    ToolCall(id=event.tool_call_id, function=function),
                ]
            case EventType.TOOL_CALL_ARGS:
                self._call(event.tool_call_id).function.arguments += event.delta
            case EventType.TOOL_CALL_RESULT:
                self._call(event.tool_call_id)
                answered = [
                    one.tool_call_id
                    for one in self.messages
                    if isinstance(one, ToolMessage)
                ]
                assert event.tool_call_id not in answered, (
                    "a call has one result, the front end's own included"
                )
                message = ToolMessage(
                    id=event.message_id,
                    tool_call_id=event.tool_call_id,
                    content=event.content,
                )
                self.messages.append(message)
            case _:
                pass

    def _message(self, message_id: str) -> Any:
        return next(one for one in self.messages if one.id == message_id)

    def _assistant(self, message_id: str) -> AssistantMessage:
        for message in self.messages:
            if isinstance(message, AssistantMessage) and message.id == message_id:
                return message
        message = AssistantMessage(id=message_id)
        self.messages.append(message)
        return message

    def _call(self, call_id: str) -> ToolCall:
        (call,) = (
            call
            for message in self.messages
            if isinstance(message, AssistantMessage)
            for call in message.tool_calls or ()
            if call.id == call_id
        )
        return call
