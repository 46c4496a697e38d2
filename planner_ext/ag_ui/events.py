"""The events of a run: its facts in the protocol's words, while they happen and from a journal."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any
from uuid import uuid4

from ag_ui.core import (
    PROTOCOL_VERSION,
    AssistantMessage,
    BaseEvent,
    FunctionCall,
    Interrupt,
    Message,
    RunAgentInput,
    RunErrorEvent,
    RunFinishedCancelledOutcome,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    RunFinishedOutcome,
    RunFinishedSuccessOutcome,
    RunStartedEvent,
    StepFinishedEvent,
    StepStartedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TokenUsage,
    Tool,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
    ToolMessage,
    UserMessage,
)
from ag_ui.core import ToolCall as MadeCall

from planner_ext.ag_ui.inputs import is_tool
from planner_ext.approval.decisions import ToolCall
from planner_ext.approval.waiting import pending_calls, present_status
from planner_ext.core import facts
from planner_ext.core.results import cut_text
from planner_ext.core.state import State, path_of
from planner_ext.core.values import Usage
from planner_ext.engine.ports import ResultReady, TextDelta
from planner_ext.engine.timeline import TimelineCall, TimelineReader
from planner_ext.planner.run import PlannerEvent
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidHistoryError,
    LimitReachedError,
)
from planner_ext.sk.functions.questions import OWN_PLUGIN
from planner_ext.sk.messages import load_message
from planner_ext.sk.messages import text_of as message_text

logger = logging.getLogger(__name__)

_FINAL_ANSWER = f"{OWN_PLUGIN}-SendFinalAnswer"
_SHOWN_ERRORS = (DecisionRefusedError, InvalidHistoryError, LimitReachedError)
"""Errors whose text the front end reads; that of any other stays on the server."""


class RunEvents:
    """The events of one run, which is read fact by fact.

    The ids of messages come from places in the journal: every process gives the same
    ones.

    Attributes:
        place: The number of facts read.
        has_acted: Whether an answer or a started function changed the run since it was
            replayed.
    """

    def __init__(self, run_input: RunAgentInput, tools: Mapping[str, Tool]) -> None:
        self.place = 0
        self.has_acted = False
        self._input = run_input
        self._tools = tools
        self._reader = TimelineReader()
        self._used = Usage()
        self._step = ""
        self._open = ""
        self._last_text = ""
        self._said = 0
        self._shown = 0
        self._inside = dict[str, str]()

    @property
    def state(self) -> State:
        """The run's state."""
        return self._reader.state

    def replay(self, journal: Iterable[facts.Fact]) -> list[Message]:
        """Read what happened before; return the messages after the first that a front end had made of it."""
        messages = _folded(event for fact in journal for event in self.read(fact))
        self.has_acted = False
        self._used = self.state.usage
        self._step = ""
        return messages

    def read(self, event: PlannerEvent) -> Iterator[BaseEvent]:
        """Translate what happened next."""
        if isinstance(event, ResultReady):
            return
        if isinstance(event, TextDelta):
            yield from self._in_step(event.iteration)
            yield from self._text(event.text)
            return
        changed = self._reader.read(event)
        yield from self._fact(event)
        for call in changed:
            if call.ended is not None:
                self.has_acted = True
                if call.function != _FINAL_ANSWER:
                    id_ = self._id_at(path_of(call.id))
                    yield _result(id_, self._content(call))
        self.place += 1

    def _fact(self, fact: facts.Fact) -> Iterator[BaseEvent]:  # noqa: C901, PLR0912  (one case a fact)
        match fact:
            case facts.MessageAdded(purpose="said"):
                self._said += 1
                if self._said > self._shown:
                    text = message_text(load_message(fact.message))
                    yield from _message(self._said_id(self._said), text, "user")
            case facts.Planned():
                yield from self._replied(fact.plan, -1)
            case facts.ModelReplied():
                yield from self._replied(fact.text, fact.iteration)
                yield from self._calls()
            case facts.RequestFailed():
                yield from self._message_end()
            case facts.IterationCompleted():
                yield from self._in_step(None)
            case facts.CallStarted():
                self.has_acted = True
                yield from self._in_step(fact.iteration)
            case facts.Clarified(answer=str() as answer):
                self.has_acted = True
                if fact.index is None and fact.denied is None:
                    yield from _message(self._message_id, answer, "user")
            case facts.HappenedInside():
                yield from self._happened_inside(facts.unwrapped(fact))
            case facts.Paused():
                yield from self._calls_inside()
            case facts.Ended():
                # An answer that a call handed over was not sent yet.
                if fact.answer and fact.answer != self._last_text:
                    yield from self._text(fact.answer)
                yield from self._in_step(None)
                yield from self._message_end()
            case _:
                pass

    # Steps and messages.

    def _in_step(self, iteration: int | None) -> Iterator[BaseEvent]:
        """Open the step of an iteration, and close another one; None only closes."""
        name = (
            ""
            if iteration is None
            else "plan"
            if iteration < 0
            else f"iteration {iteration + 1}"
        )
        if name != self._step:
            yield from self._message_end()
            if self._step:
                yield StepFinishedEvent(step_name=self._step)
            if name:
                yield StepStartedEvent(step_name=name)
            self._step = name

    def _text(self, text: str) -> Iterator[BaseEvent]:
        if not self._open:
            self._open = self._message_id
            yield TextMessageStartEvent(message_id=self._open, role="assistant")
        yield TextMessageContentEvent(message_id=self._open, delta=text)

    def _message_end(self) -> Iterator[BaseEvent]:
        if self._open:
            yield TextMessageEndEvent(message_id=self._open)
            self._open = ""

    @property
    def _message_id(self) -> str:
        return f"{self.state.run_id}/{self.place}"

    def _replied(self, text: str, iteration: int) -> Iterator[BaseEvent]:
        """End the message of a reply, of which the text may have arrived in pieces."""
        yield from self._in_step(iteration)
        if text and not self._open:
            yield from self._text(text)
        self._last_text = text
        yield from self._message_end()

    def _said_id(self, number: int) -> str:
        return f"{self.state.run_id}/said-{number}"

    def unread(self, texts: Sequence[str]) -> list[Message]:
        """Return what was said and the run has not read as messages, which are not sent again."""
        first = self._said + 1
        self._shown = self._said + len(texts)
        return [
            UserMessage(id=self._said_id(number), content=text)
            for number, text in enumerate(texts, first)
        ]

    def notice(self, text: str) -> Iterator[BaseEvent]:
        """Tell the user something that is no part of the run; "" is nothing."""
        if text:
            yield from _message(uuid4().hex, text, "assistant")

    # Calls.

    def _calls(self) -> Iterator[BaseEvent]:
        """Send the calls of the batch that a reply has opened."""
        if self.state.batch is None:
            return
        for call in self._reader.calls:
            if call.function != _FINAL_ANSWER:
                id_ = self._id_at(path_of(call.id))
                yield from self._call(id_, call.function, call.requested)

    def _calls_inside(self) -> Iterator[BaseEvent]:
        """Send the calls of the front end's tools that wait in nested runs."""
        for call in pending_calls(self.state):
            is_inside = is_tool(call) and "/" in call.path
            if is_inside and call.fingerprint not in self._inside:
                id_ = self._inside[call.fingerprint] = self.id_of(call)
                name = call.fully_qualified_name
                yield from self._call(id_, name, call.raw_arguments)

    def _happened_inside(self, fact: facts.Fact) -> Iterator[BaseEvent]:
        if isinstance(fact, facts.CallStarted):
            self.has_acted = True
        elif isinstance(fact, facts.CallDecided) and fact.verdict == "answer":
            id_ = self._inside.pop(fact.fingerprint, None)
            if id_ is not None:
                yield _result(id_, fact.answer)

    def _content(self, call: TimelineCall) -> str:
        if call.cut is None:
            return call.result
        iteration = self._iteration
        return cut_text(call.result, call.cut, iteration, call.index)

    def _call(self, id_: str, name: str, arguments: str) -> Iterator[BaseEvent]:
        tool = self._tools.get(name)
        shown = name if tool is None else tool.name
        yield ToolCallStartEvent(
            tool_call_id=id_,
            tool_call_name=shown,
            parent_message_id=self._message_id,
        )
        yield ToolCallArgsEvent(tool_call_id=id_, delta=arguments or "{}")
        yield ToolCallEndEvent(tool_call_id=id_)

    @property
    def _iteration(self) -> int:
        return self.state.iteration - 1

    def _id_at(self, path: str) -> str:
        """Return the protocol's id of a call of the newest reply, or in a nested run of one."""
        # Models reuse ids in later batches.
        key = f"{self.state.run_id}/{self._iteration}/{path}"
        digest = sha256(key.encode()).hexdigest()
        return digest[:32]

    def id_of(self, call: ToolCall) -> str:
        """Return the protocol's id of a call that waits."""
        return self._id_at(call.path)

    # The end.

    def started(self) -> BaseEvent:
        """Open the protocol's run."""
        return RunStartedEvent(
            thread_id=self._input.thread_id,
            run_id=self._input.run_id,
            protocol_version=PROTOCOL_VERSION,
        )

    def finished(self, pending: Sequence[ToolCall] = ()) -> Iterator[BaseEvent]:
        """Close the protocol's run at a pause or end, with what waits for this front end."""
        ended = self.state.ended
        yield from self._in_step(None)
        if ended is not None and ended.status == "incomplete":
            yield RunErrorEvent(
                message=ended.reason or "The last reply was cut short.",
                code="incomplete",
            )
            return
        outcome = self._outcome(pending)
        is_cancelled = isinstance(outcome, RunFinishedCancelledOutcome)
        if self._input.protocol_version is None:
            if is_cancelled and ended is not None:
                yield from self.notice(f"The run was ended: {ended.reason}")
            if not isinstance(outcome, RunFinishedInterruptOutcome):
                outcome = None if is_cancelled else RunFinishedSuccessOutcome()
        yield RunFinishedEvent(
            thread_id=self._input.thread_id,
            run_id=self._input.run_id,
            outcome=outcome,
            result=(ended.answer or None) if ended is not None else None,
            usage=[_usage(self.state.usage - self._used)],
            metadata={
                "planner_ext": {
                    "status": present_status(self.state),
                    "limit": None if ended is None else ended.limit,
                    "reason": "" if ended is None else ended.reason,
                }
            },
        )

    def _outcome(self, pending: Sequence[ToolCall]) -> RunFinishedOutcome:
        asked = (call for call in pending if not is_tool(call))
        interrupts = [self._interrupt(call) for call in asked]
        ended = self.state.ended
        if interrupts:
            return RunFinishedInterruptOutcome(interrupts=interrupts)
        if ended is None or ended.answer or ended.status == "answered":
            tools = [self.id_of(call) for call in pending]
            return RunFinishedSuccessOutcome(pending_tool_call_ids=tools or None)
        return RunFinishedCancelledOutcome()

    def _interrupt(self, call: ToolCall) -> Interrupt:
        asks = call.kind == "question"
        has_call = self.state.batch is not None and "/" not in call.path
        return Interrupt(
            id=call.fingerprint,
            reason="input_required" if asks else "tool_call",
            message=call.prompt
            or (None if asks else f"May {call.fully_qualified_name} run?"),
            tool_call_id=self.id_of(call) if has_call else None,
            response_schema=_ANSWER_SCHEMA if asks else _approval_schema(call),
            expires_at=None if call.expires_at is None else call.expires_at.isoformat(),
            metadata={"planner_ext": _described(call)},
        )


def opening(run_id: str, goal: str) -> Message:
    """Return the message that begins a run."""
    return UserMessage(id=f"{run_id}/0", content=goal)


def _message(id_: str, text: str, role: Any) -> Iterator[BaseEvent]:
    yield TextMessageStartEvent(message_id=id_, role=role)
    yield TextMessageContentEvent(message_id=id_, delta=text)
    yield TextMessageEndEvent(message_id=id_)


def _result(call_id: str, content: str) -> BaseEvent:
    return ToolCallResultEvent(
        message_id=f"{call_id}-result",
        tool_call_id=call_id,
        content=content,
        role="tool",
    )


def _folded(events: Iterable[BaseEvent]) -> list[Message]:
    """Make messages of events, as a front end does."""
    made = dict[str, Any]()
    calls = dict[str, MadeCall]()
    for event in events:
        match event:
            case TextMessageStartEvent():
                kind = UserMessage if event.role == "user" else AssistantMessage
                made[event.message_id] = kind(id=event.message_id, content="")
            case TextMessageContentEvent():
                made[event.message_id].content += event.delta
            case ToolCallStartEvent(parent_message_id=str() as id_):
                function = FunctionCall(name=event.tool_call_name, arguments="")
                call = MadeCall(id=event.tool_call_id, function=function)
                owner = made.setdefault(id_, AssistantMessage(id=id_))
                owner.tool_calls = [*(owner.tool_calls or ()), call]
                calls[call.id] = call
            case ToolCallArgsEvent():
                calls[event.tool_call_id].function.arguments += event.delta
            case ToolCallResultEvent(message_id=id_, tool_call_id=of):
                made[id_] = ToolMessage(id=id_, tool_call_id=of, content=event.content)
            case _:
                pass
    return [*made.values()]


def _described(call: ToolCall) -> dict[str, Any]:
    described = {
        "function": call.fully_qualified_name,
        "arguments": dict(call.arguments),
    }
    if call.roles:
        return {**described, "roles": [*call.roles]}
    return described


_ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
}


def _approval_schema(call: ToolCall) -> dict[str, Any]:
    """Describe the answer as the protocol recommends for approval with edits."""
    edited = {
        **(call.parameters or {"type": "object"}),
        "description": "All arguments; they replace the model's.",
    }
    properties = {
        "approved": {"type": "boolean"},
        "editedArgs": edited,
        "reason": {"type": "string"},
    }
    return {"type": "object", "properties": properties, "required": ["approved"]}


def _usage(used: Usage) -> TokenUsage:
    return TokenUsage(
        input_tokens=used.prompt_tokens,
        output_tokens=used.completion_tokens,
        total_tokens=used.total_tokens,
    )


def error_event(error: Exception) -> RunErrorEvent:
    """Close the protocol's run after an error."""
    if isinstance(error, _SHOWN_ERRORS):
        return RunErrorEvent(message=str(error), code=type(error).__name__)
    logger.error("A run of an AG-UI front end failed.", exc_info=error)
    return RunErrorEvent(
        message="The run failed on the server.", code=type(error).__name__
    )
