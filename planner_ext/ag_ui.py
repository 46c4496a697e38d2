"""A planner's run as an AG-UI event stream, for CopilotKit, assistant-ui and other front ends; extra ``ag-ui``.

`ag_ui_events` is the body of an HTTP endpoint; ``samples/step19_ag_ui.py`` is a
complete one:

    waiting: dict[str, Checkpoint] = {}

    @service.post("/agent")
    async def agent(run_input: RunAgentInput) -> StreamingResponse:
        encoder = EventEncoder()
        events = ag_ui_events(planner, kernel, run_input, waiting=waiting)
        return StreamingResponse((encoder.encode(one) async for one in events), media_type=encoder.get_content_type())

A run that waits for a person ends with one interrupt for each call and question. The
next input on the thread answers them, and the run continues:

- a call (``reason`` ``tool_call``): ``{"approved": true}``, ``{"approved": true,
  "editedArgs": {...}}`` with all arguments, or ``{"approved": false, "reason":
  "..."}``;
- a question of the model (``input_required``): ``{"answer": "..."}``;
- the status ``cancelled`` refuses the call, or the answer.

An interrupt's ``responseSchema`` describes this, its ``metadata`` names function,
arguments and roles, and its ``id`` is the call's fingerprint, to which an answer binds.
Interrupts without an answer stay open.

**Trust.** The checkpoint stays on the server: a browser decides the calls that wait on
its thread, and cannot add a call, an approval or a result. Give each user a separate
``waiting``, or unguessable thread ids. The browser supplies the conversation before a
new run, as text; its system messages are dropped.

**Tools of the front end** (``RunAgentInput.tools``) are offered in the plugin
``ag_ui``. A call of one ends the run as a success that names it as pending; the tool
message in the next input is its result. A user message instead abandons the run, and
begins a new one.
"""

import logging
import re
from collections.abc import (
    AsyncGenerator,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import aclosing
from copy import copy
from datetime import UTC, datetime
from hashlib import sha256
from importlib.util import find_spec
from typing import Any, cast

if find_spec("ag_ui") is None:
    raise ImportError(
        "planner_ext.ag_ui needs the extra ag-ui: pip install 'planner-ext[ag-ui]'"
    )

from ag_ui.core import (
    PROTOCOL_VERSION,
    AssistantMessage,
    BaseEvent,
    ContentPart,
    Interrupt,
    Message,
    ResumeEntry,
    RunAgentInput,
    RunErrorEvent,
    RunFinishedCancelledOutcome,
    RunFinishedEvent,
    RunFinishedInterruptOutcome,
    RunFinishedSuccessOutcome,
    RunStartedEvent,
    StepFinishedEvent,
    StepStartedEvent,
    TextMessageContentEvent,
    TextMessageEndEvent,
    TextMessageStartEvent,
    TextPart,
    TokenUsage,
    Tool,
    ToolCallArgsEvent,
    ToolCallEndEvent,
    ToolCallResultEvent,
    ToolCallStartEvent,
    ToolMessage,
    UserMessage,
)
from semantic_kernel import Kernel
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    TextContent,
)
from semantic_kernel.functions import (
    KernelArguments,
    KernelFunctionFromMethod,
    KernelPlugin,
    kernel_function,
)
from semantic_kernel.functions.kernel_parameter_metadata import KernelParameterMetadata

from planner_ext.approval.decisions import (
    ApprovalSettings,
    Approve,
    Decision,
    DecisionRequest,
    Defer,
    Deny,
    Supply,
    ToolCall,
)
from planner_ext.approval.waiting import pending_calls
from planner_ext.core import facts
from planner_ext.core.results import cut_text
from planner_ext.core.values import Usage
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.ports import ResultReady, TextDelta
from planner_ext.engine.timeline import TimelineCall, TimelineReader
from planner_ext.planner.planner import FunctionCallingStepwisePlanner
from planner_ext.planner.run import FunctionCallingStepwisePlannerResult, PlannerEvent
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidHistoryError,
    LimitReachedError,
    PlannerInvalidConfigurationError,
)
from planner_ext.sk.functions.questions import OWN_PLUGIN

__all__ = ["ag_ui_events"]

logger = logging.getLogger(__name__)

_PLUGIN = "ag_ui"
_FINAL_ANSWER = f"{OWN_PLUGIN}-SendFinalAnswer"
_SHOWN_ERRORS = (DecisionRefusedError, InvalidHistoryError, LimitReachedError)
"""Errors whose text the front end reads; that of any other stays on the server."""


async def ag_ui_events(
    planner: FunctionCallingStepwisePlanner,
    kernel: Kernel,
    run_input: RunAgentInput,
    *,
    waiting: MutableMapping[str, Checkpoint],
    by: str = "",
    roles: Collection[str] = (),
    arguments: KernelArguments | None = None,
    stop: StopHandle | None = None,
) -> AsyncGenerator[BaseEvent, None]:
    """Run a planner for one input of an AG-UI front end, and yield the events; see the module.

    An input continues the run that waits on its thread, or begins a new one with its
    last user message as the goal.

    Args:
        planner: Drives the run.
        kernel: Not changed.
        run_input: The body of the request.
        waiting: The runs that wait for the user, by thread id; a resumed run is
            removed.
        by: The user's name, recorded with their decisions.
        roles: The user's roles; a call that names roles is decided only by a user who
            has one of them, and if the planner's ``authorize`` hook allows it.
        arguments: The application's arguments; never stored.
        stop: Ends the run from outside.

    Yields:
        The events, from ``RUN_STARTED`` to ``RUN_FINISHED``, or to ``RUN_ERROR`` after
            a fault or a refused input. Closing the stream early cancels the run; a
            resumed run that has not yet done anything waits again.

    Raises:
        PlannerInvalidConfigurationError: If the kernel has a plugin ``ag_ui``, or
            ``roles`` is one text.
    """
    _check(kernel, roles)
    run = _Run(run_input, waiting)
    try:
        yield RunStartedEvent(
            thread_id=run_input.thread_id,
            run_id=run_input.run_id,
            protocol_version=PROTOCOL_VERSION,
        )
        if run.tools:
            planner = _deferring(planner)
            kernel = _with_tools(kernel, run.tools)
        checks_roles = (
            bool(roles)
            or planner.options.approval is None
            or planner.options.approval.authorize is None
        )
        if roles:
            planner = _letting_in(planner, roles)
        if (kept := run.continued()) is not None:
            decisions = run.decisions(by, roles if checks_roles else None)
            events = planner.resume_stream(
                kernel, kept, decisions, arguments=arguments, stop=stop
            )
        else:
            goal, history = run.opening()
            events = planner.invoke_stream(
                kernel, goal, arguments, chat_history=history, stop=stop
            )
        async with aclosing(events):
            async for event in events:
                for shown in run.shown(event):
                    yield shown
    except Exception as error:
        yield _error_event(error)
    finally:
        run.close()


def _check(kernel: Kernel, roles: Collection[str]) -> None:
    if isinstance(roles, str):
        raise PlannerInvalidConfigurationError(
            f"roles must be a list of names; got the text {roles!r}, whose letters would be roles. Write [{roles!r}]."
        )
    if _PLUGIN in kernel.plugins:
        raise PlannerInvalidConfigurationError(
            f"The plugin name {_PLUGIN!r} is reserved for the tools of the front end; the kernel has a plugin of this "
            "name. Rename it."
        )


class _Run:
    """One run of the protocol: a run of the planner, or a part of one."""

    def __init__(
        self, run_input: RunAgentInput, waiting: MutableMapping[str, Checkpoint]
    ) -> None:
        self.tools = _named(run_input.tools or ())
        self._input = run_input
        self._waiting = waiting
        self._kept = waiting.pop(run_input.thread_id, None)
        self._begin(() if self._kept is None else self._kept.facts)
        self._step = ""
        self._messages = 0
        self._is_open = False
        self._last_text = ""
        self._answered: set[str] = set()

    def _begin(self, journal: Iterable[facts.Fact]) -> None:
        self._reader = TimelineReader()
        for fact in journal:
            self._reader.read(fact)
        self._used = self._reader.state.usage

    def close(self) -> None:
        """Return the resumed run's checkpoint to ``waiting``, unless the run has made progress."""
        if self._kept is not None:
            self._waiting.setdefault(self._input.thread_id, self._kept)

    # The input.

    def continued(self) -> Checkpoint | None:
        """Return the checkpoint of the run that the input continues.

        A user message abandons a run in which only tools of the front end wait.
        """
        messages = self._input.messages
        waits_for_tools = all(map(_is_tool, pending_calls(self._reader.state)))
        if waits_for_tools and messages and isinstance(messages[-1], UserMessage):
            self._kept = None
            self._begin(())
        return self._kept

    def opening(self) -> tuple[str, ChatHistory | None]:
        """Return the goal of a new run, and the conversation before it.

        Raises:
            DecisionRefusedError: If the input answers an interrupt, and no run waits.
            InvalidHistoryError: If the last message is not a user's.
        """
        messages = self._input.messages
        if self._input.resume:
            raise DecisionRefusedError(
                f"Nothing waits on the thread {self._input.thread_id!r}: it was answered before, or the server has no "
                "record of it. Nothing ran."
            )
        if not messages or not isinstance(messages[-1], UserMessage):
            raise InvalidHistoryError(
                "Expected a message of the user as the last one; send one to begin a run."
            )
        before = [*_history(messages[:-1], self.tools)]
        context = "\n".join(
            f"{each.description}: {each.value}" for each in self._input.context or ()
        )
        if context:
            before.append(
                ChatMessageContent(
                    role=AuthorRole.USER, content=f"The application shows:\n{context}"
                )
            )
        return _text(messages[-1].content), ChatHistory(
            messages=before
        ) if before else None

    def decisions(self, by: str, roles: Collection[str] | None) -> dict[str, Decision]:
        """Read the decisions on the calls that wait.

        Raises:
            DecisionRefusedError: If an answer does not fit its interrupt, or the user
                may not give it.
        """
        answers = {entry.interrupt_id: entry for entry in self._input.resume or ()}
        results = {
            one.tool_call_id: one
            for one in self._input.messages
            if isinstance(one, ToolMessage)
        }
        decisions: dict[str, Decision] = {}
        for call in pending_calls(self._reader.state):
            if _is_tool(call):
                result = results.get(self._call_id(call.id))
                if result is not None:
                    decisions[call.path] = Supply(
                        result.error or _text(result.content), by=by or None
                    )
                    self._answered.add(result.tool_call_id)
                continue
            entry = answers.pop(call.fingerprint, None)
            if entry is None:
                continue
            if roles is not None and not _has_role(call, roles):
                raise DecisionRefusedError(
                    f"{call.fully_qualified_name} is for {', '.join(call.roles)} to decide."
                )
            decision = _decision(entry, call, by or None)
            if decision is not None:
                decisions[call.path] = decision
        for unknown in answers:
            logger.warning(
                "Thread %r has no interrupt %r; the answer is ignored.",
                self._input.thread_id,
                unknown,
            )
        return decisions

    # The events.

    def shown(self, event: PlannerEvent) -> Iterator[BaseEvent]:
        """Translate an event of the planner."""
        match event:
            case ResultReady():
                yield from self._finished(event.result)
            case TextDelta():
                yield from self._in_step(event.iteration)
                yield from self._text(event.text)
            case _:
                changed = self._reader.read(event)
                yield from self._fact(event, changed)
                for call in changed:
                    if call.ended is not None:
                        yield from self._result(call)

    def _fact(
        self, fact: facts.Fact, changed: Iterable[TimelineCall]
    ) -> Iterator[BaseEvent]:
        match fact:
            case facts.Planned():
                yield from self._replied(fact.plan, -1)
            case facts.ModelReplied():
                yield from self._replied(fact.text, fact.iteration)
                yield from self._calls(changed)
            case facts.RequestFailed():
                yield from self._message_end()
            case facts.IterationCompleted():
                yield from self._in_step(None)
            case facts.CallStarted():
                self._kept = None
                yield from self._in_step(fact.iteration)
            case facts.Clarified(answer=str()):
                self._kept = None
            case _:
                pass

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
        if not self._is_open:
            self._messages += 1
            self._is_open = True
            yield TextMessageStartEvent(message_id=self._message_id, role="assistant")
        yield TextMessageContentEvent(message_id=self._message_id, delta=text)

    def _message_end(self) -> Iterator[BaseEvent]:
        if self._is_open:
            self._is_open = False
            yield TextMessageEndEvent(message_id=self._message_id)

    @property
    def _message_id(self) -> str:
        return f"{self._input.run_id}/{self._messages}"

    def _replied(self, text: str, iteration: int) -> Iterator[BaseEvent]:
        """End the message of a reply, whose text was streamed."""
        yield from self._in_step(iteration)
        self._last_text = text
        yield from self._message_end()

    def _calls(self, calls: Iterable[TimelineCall]) -> Iterator[BaseEvent]:
        """Send the calls of the batch that a reply has opened."""
        batch = self._reader.state.batch
        if not self._last_text:
            self._messages += 1  # the calls are in a message of their own
        for call in () if batch is None else calls:
            name = call.function
            if name == _FINAL_ANSWER:
                continue
            id_ = self._call_id(call.id)
            shown = self.tools[name].name if name in self.tools else name
            yield ToolCallStartEvent(
                tool_call_id=id_,
                tool_call_name=shown,
                parent_message_id=self._message_id,
            )
            yield ToolCallArgsEvent(tool_call_id=id_, delta=call.requested or "{}")
            yield ToolCallEndEvent(tool_call_id=id_)

    def _result(self, call: TimelineCall) -> Iterator[BaseEvent]:
        self._kept = None
        id_ = self._call_id(call.id)
        if call.function != _FINAL_ANSWER and id_ not in self._answered:
            self._answered.add(id_)
            text = (
                call.result
                if call.cut is None
                else cut_text(call.result, call.cut, self._iteration, call.index)
            )
            yield ToolCallResultEvent(
                message_id=f"{id_}-result", tool_call_id=id_, content=text, role="tool"
            )

    @property
    def _iteration(self) -> int:
        return self._reader.state.iteration - 1

    def _call_id(self, call_id: str) -> str:
        """Return the protocol's id of a call of the newest reply."""
        key = f"{self._reader.state.run_id}/{self._iteration}/{call_id}"
        return sha256(key.encode()).hexdigest()[
            :32
        ]  # models reuse ids in later batches

    def _finished(
        self, result: FunctionCallingStepwisePlannerResult
    ) -> Iterator[BaseEvent]:
        self._kept = None
        if result.pending:  # before the front end can answer
            self._waiting[self._input.thread_id] = result.checkpoint
        # An answer that a call handed over was not sent yet.
        if result.final_answer and result.final_answer != self._last_text:
            yield from self._text(result.final_answer)
        yield from self._in_step(None)
        yield from self._message_end()
        if result.status == "incomplete":
            yield RunErrorEvent(
                message=result.reason or "The last reply was cut short.",
                code="incomplete",
            )
            return
        yield RunFinishedEvent(
            thread_id=self._input.thread_id,
            run_id=self._input.run_id,
            outcome=self._outcome(result),
            result=result.final_answer or None,
            usage=[_usage(result.usage - self._used)],
            metadata={
                "planner_ext": {
                    "status": result.status,
                    "limit": result.limit,
                    "reason": result.reason,
                }
            },
        )

    def _outcome(
        self, result: FunctionCallingStepwisePlannerResult
    ) -> (
        RunFinishedSuccessOutcome
        | RunFinishedInterruptOutcome
        | RunFinishedCancelledOutcome
    ):
        interrupts = [
            self._interrupt(call) for call in result.pending if not _is_tool(call)
        ]
        if interrupts:
            return RunFinishedInterruptOutcome(interrupts=interrupts)
        if result.pending or result.final_answer or result.status == "answered":
            pending = [self._call_id(call.id) for call in result.pending]
            return RunFinishedSuccessOutcome(pending_tool_call_ids=pending or None)
        return RunFinishedCancelledOutcome()

    def _interrupt(self, call: ToolCall) -> Interrupt:
        asks = call.kind == "question"
        return Interrupt(
            id=call.fingerprint,
            reason="input_required" if asks else "tool_call",
            message=call.prompt
            or (None if asks else f"May {call.fully_qualified_name} run?"),
            tool_call_id=None
            if self._reader.state.batch is None
            else self._call_id(call.id),
            response_schema=_ANSWER_SCHEMA if asks else _approval_schema(call),
            expires_at=None if call.expires_at is None else call.expires_at.isoformat(),
            metadata={"planner_ext": _described(call)},
        )


def _described(call: ToolCall) -> dict[str, Any]:
    described = {
        "function": call.fully_qualified_name,
        "arguments": dict(call.arguments),
    }
    return {**described, "roles": [*call.roles]} if call.roles else described


# Decisions.

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


def _decision(entry: ResumeEntry, call: ToolCall, by: str | None) -> Decision | None:
    """Read one answer; None if it abandons an expired question.

    Raises:
        DecisionRefusedError: If it does not fit the interrupt.
    """
    if entry.status == "cancelled":
        expired = call.expires_at is not None and datetime.now(UTC) >= call.expires_at
        return None if expired else Deny("the user gave no decision", by=by)
    payload: object = entry.payload
    given = cast("dict[object, object]", payload) if isinstance(payload, dict) else {}
    match given:
        case {"answer": str() as answer} if call.kind == "question":
            return Supply(answer, by=by)
        case {"approved": False} if call.kind == "function":
            return Deny(str(given.get("reason") or ""), by=by)
        case {"approved": True} if call.kind == "function":
            edited = given.get("editedArgs")
            if edited is None or isinstance(edited, dict):
                arguments = None if edited is None else cast("dict[str, Any]", edited)
                return Approve(arguments=arguments, by=by)
        case _:
            pass
    raise DecisionRefusedError(
        f"The answer to {call.fully_qualified_name} does not have the form of its responseSchema. Nothing ran."
    )


def _is_tool(call: ToolCall) -> bool:
    return call.fully_qualified_name.startswith(f"{_PLUGIN}-")


# The tools of the front end.


def _named(tools: Iterable[Tool]) -> dict[str, Tool]:
    """Name each tool for the model; the last of two with one name counts."""
    named: dict[str, Tool] = {}
    for tool in {tool.name: tool for tool in tools}.values():
        name = plain = f"{_PLUGIN}-{re.sub(r'[^0-9A-Za-z_]', '_', tool.name)}"
        number = 1
        while name in named:
            number += 1
            name = f"{plain}_{number}"
        named[name] = tool
    return named


def _with_tools(kernel: Kernel, tools: Mapping[str, Tool]) -> Kernel:
    functions = [
        _function(name.removeprefix(f"{_PLUGIN}-"), tool)
        for name, tool in tools.items()
    ]
    return kernel.model_copy(
        update={
            "plugins": {
                **kernel.plugins,
                _PLUGIN: KernelPlugin(_PLUGIN, functions=functions),
            }
        }
    )


def _function(name: str, tool: Tool) -> KernelFunctionFromMethod:
    @kernel_function(name=name, description=tool.description)
    async def not_here() -> str:
        raise PlannerInvalidConfigurationError(
            f"{tool.name} runs at the front end, which answers its calls."
        )

    schema = _object(tool.parameters)
    listed: object = schema.get("required")
    required = cast("list[object]", listed) if isinstance(listed, list) else []
    parameters = [
        KernelParameterMetadata(
            name=parameter,
            is_required=parameter in required,
            type=None,
            schema_data=_object(data),
        )
        for parameter, data in _object(schema.get("properties")).items()
    ]
    return KernelFunctionFromMethod(not_here, _PLUGIN, parameters=parameters)


def _object(schema: object) -> dict[str, Any]:
    return cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}


def _deferring(
    planner: FunctionCallingStepwisePlanner,
) -> FunctionCallingStepwisePlanner:
    interceptors = (_defer_tools, *planner.options.interceptors)
    return _with(planner, interceptors=interceptors)


def _letting_in(
    planner: FunctionCallingStepwisePlanner, roles: Collection[str]
) -> FunctionCallingStepwisePlanner:

    async def has_role(request: DecisionRequest) -> bool:
        return request.call is None or _has_role(request.call, roles)

    approval = planner.options.approval or ApprovalSettings()
    return _with(planner, approval=approval.asking(has_role))


def _with(
    planner: FunctionCallingStepwisePlanner, **options: object
) -> FunctionCallingStepwisePlanner:
    """Copy a planner with other options; the copy shares the record of taken decisions."""
    copied = copy(planner)
    copied.options = planner.options.model_copy(update=options)
    return copied


def _has_role(call: ToolCall, roles: Collection[str]) -> bool:
    return not call.roles or bool({*call.roles} & {*roles})


async def _defer_tools(call: ToolCall) -> Defer | None:
    return Defer() if call.plugin_name == _PLUGIN else None


# Messages, ids, usage and errors.


def _history(
    messages: Sequence[Message], tools: Mapping[str, Tool]
) -> Iterator[ChatMessageContent]:
    """Convert the conversation for the model, each result directly after its call.

    Calls without a result, and other messages, are dropped. Of two results for one call
    the newer one counts.
    """
    sent = {tool.name: name for name, tool in tools.items()}
    results = {
        one.tool_call_id: one.error or _text(one.content)
        for one in messages
        if isinstance(one, ToolMessage)
    }
    for message in messages:
        match message:
            case UserMessage():
                yield ChatMessageContent(
                    role=AuthorRole.USER, content=_text(message.content)
                )
            case AssistantMessage():
                calls = [
                    FunctionCallContent(
                        id=made.id,
                        name=sent.get(made.function.name, made.function.name),
                        arguments=made.function.arguments,
                    )
                    for made in message.tool_calls or ()
                    if made.id in results
                ]
                items: list[Any] = (
                    [TextContent(text=message.content)] if message.content else []
                )
                if items or calls:
                    yield ChatMessageContent(
                        role=AuthorRole.ASSISTANT, items=[*items, *calls]
                    )
                for call in calls:
                    result = FunctionResultContent(
                        id=call.id, name=call.name, result=results[call.id or ""]
                    )
                    yield ChatMessageContent(role=AuthorRole.TOOL, items=[result])
            case _:
                pass


def _text(content: str | list[ContentPart]) -> str:
    return (
        content
        if isinstance(content, str)
        else "".join(one.text for one in content if isinstance(one, TextPart))
    )


def _usage(used: Usage) -> TokenUsage:
    return TokenUsage(
        input_tokens=used.prompt_tokens,
        output_tokens=used.completion_tokens,
        total_tokens=used.total_tokens,
    )


def _error_event(error: Exception) -> RunErrorEvent:
    if isinstance(error, _SHOWN_ERRORS):
        return RunErrorEvent(message=str(error), code=type(error).__name__)
    logger.error("A run of an AG-UI front end failed.", exc_info=error)
    return RunErrorEvent(
        message="The run failed on the server.", code=type(error).__name__
    )
