"""`ag_ui_events`: a run that lives in this process, behind a front end that holds the conversation."""

from collections.abc import AsyncGenerator, Collection, Iterator, MutableMapping
from contextlib import aclosing
from copy import copy
from typing import Any

from ag_ui.core import (
    BaseEvent,
    MessagesSnapshotEvent,
    RunAgentInput,
    ToolMessage,
    UserMessage,
)
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments

from planner_ext.ag_ui.events import RunEvents, error_event, opening
from planner_ext.ag_ui.inputs import (
    answers_of,
    check_plugins,
    context_of,
    decision_of,
    defer_front_end_tools,
    goal_of,
    history_of,
    is_tool,
    named_tools,
    with_tools,
)
from planner_ext.approval.decisions import (
    ApprovalSettings,
    Decision,
    DecisionRequest,
    ToolCall,
)
from planner_ext.approval.waiting import pending_calls
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.ports import ResultReady
from planner_ext.planner.planner import FunctionCallingStepwisePlanner
from planner_ext.planner.run import PlannerEvent
from planner_ext.sk.checkpoint import Checkpoint
from planner_ext.sk.errors import (
    DecisionRefusedError,
    PlannerInvalidConfigurationError,
)


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
) -> AsyncGenerator[BaseEvent]:
    """Run a planner for one input of an AG-UI front end, and yield the events; see the module.

    An input continues the run that waits on its thread, or begins a new one with its
    last user message as the goal.

    Args:
        planner: Drives the run.
        kernel: Its functions may be called; it is not changed.
        run_input: The body of the request.
        waiting: The runs that wait for the user, by thread id: a dictionary in the
            server's memory, or any mapping that keeps a `Checkpoint`. A resumed run is
            removed; one that is never answered stays.
        by: The user's name, recorded with their decisions.
        roles: The user's roles; a call that names roles is decided only by a user who
            has one of them, and if the planner's ``authorize`` hook allows it.
        arguments: The application's arguments; never stored.
        stop: Ends the run from outside.

    Yields:
        The events, from ``RUN_STARTED`` to ``RUN_FINISHED``, or to ``RUN_ERROR`` after
            a fault or a refused input. A run that was stopped, or that a limit ended
            without an answer, has the cancelled outcome. A resumed run begins with a
            ``MESSAGES_SNAPSHOT``. Closing the stream early cancels the run; a resumed
            run that has not yet done anything waits again.

    Raises:
        PlannerInvalidConfigurationError: If the kernel has a plugin ``ag_ui``, or
            ``roles`` is one text.
    """
    if isinstance(roles, str):
        raise PlannerInvalidConfigurationError(
            f"roles must be a list of names; got the text {roles!r}, whose letters would be roles. Write [{roles!r}]."
        )
    check_plugins(kernel)
    thread = _Thread(run_input, waiting)
    try:
        yield thread.events.started()
        if thread.kept is not None or thread.is_empty:
            yield thread.snapshot()
        if thread.is_empty:
            for one in thread.events.finished():
                yield one
            return
        given = {"arguments": arguments, "stop": stop}
        driven = thread.driven(planner, kernel, by, roles, **given)
        async with aclosing(driven) as events:
            async for event in events:
                for one in thread.shown(event):
                    yield one
    except Exception as error:
        yield error_event(error)
    finally:
        thread.close()


class _Thread:
    """The run that an input continues or begins.

    Attributes:
        kept: The checkpoint of the run that the input continues. A user message
            abandons a run in which only tools of the front end wait.
    """

    def __init__(
        self, run_input: RunAgentInput, waiting: MutableMapping[str, Checkpoint]
    ) -> None:
        self.tools = named_tools(run_input.tools or ())
        self._input = run_input
        self._waiting = waiting
        self.kept = waiting.pop(run_input.thread_id, None)
        self._is_over = False
        self.events = RunEvents(run_input, self.tools)
        if self.kept is not None and self._is_abandoned(self.kept):
            self.kept = None

    @property
    def is_empty(self) -> bool:
        """Whether a front end asks what is there, and nothing is."""
        asks = not self._input.messages and not self._input.resume
        return self.kept is None and asks

    def _is_abandoned(self, kept: Checkpoint) -> bool:
        messages = self._input.messages
        says_more = bool(messages) and isinstance(messages[-1], UserMessage)
        pending = pending_calls(kept.state())
        return says_more and all(map(is_tool, pending))

    def close(self) -> None:
        """Return the resumed run's checkpoint to ``waiting``, unless the run has made progress."""
        has_progressed = self._is_over or self.events.has_acted
        if self.kept is not None and not has_progressed:
            self._waiting.setdefault(self._input.thread_id, self.kept)

    def snapshot(self) -> BaseEvent:
        """Send the conversation of the front end, or the run alone if it has none.

        What the front end took for the result of a call that waits is left out.
        """
        facts = () if self.kept is None else self.kept.facts
        own = self.events.replay(facts)
        state = self.events.state
        waiting = {*map(self.events.id_of, pending_calls(state))}
        begun = [opening(state.run_id, state.goal)] if state.run_id else []
        given = {
            one.id: one
            for one in self._input.messages or begun
            if not isinstance(one, ToolMessage) or one.tool_call_id not in waiting
        }
        for one in own:
            given.setdefault(one.id, one)
        return MessagesSnapshotEvent(messages=[*given.values()])

    def driven(
        self,
        planner: FunctionCallingStepwisePlanner,
        kernel: Kernel,
        by: str,
        roles: Collection[str],
        **given: Any,
    ) -> AsyncGenerator[PlannerEvent]:
        """Continue the run with the input's decisions, or begin one."""
        if self.tools:
            planner = _with_interceptor(planner)
            kernel = with_tools(kernel, self.tools)
        approval = planner.options.approval
        checks_roles = bool(roles) or approval is None or approval.authorize is None
        if roles:
            planner = _letting_in(planner, roles)
        if self.kept is None:
            goal = goal_of(self._input)
            history = self._history()
            return planner.invoke_stream(kernel, goal, chat_history=history, **given)
        decisions = self._decisions(by, roles if checks_roles else None)
        return planner.resume_stream(kernel, self.kept, decisions, **given)

    def _history(self) -> ChatHistory | None:
        before = [
            *history_of(self._input.messages[:-1], self.tools),
            *context_of(self._input),
        ]
        return ChatHistory(messages=before) if before else None

    def _decisions(self, by: str, roles: Collection[str] | None) -> dict[str, Decision]:
        """Read the decisions on the calls that wait.

        Raises:
            DecisionRefusedError: If an answer does not fit its interrupt, or the user
                may not give it.
        """
        pending = pending_calls(self.events.state)
        answered, _ = answers_of(self._input, pending, self.events.id_of)
        decisions: dict[str, Decision] = {}
        for call, answer in answered:
            if not is_tool(call) and roles is not None and not _has_role(call, roles):
                raise DecisionRefusedError(
                    f"{call.fully_qualified_name} is for {', '.join(call.roles)} to decide."
                )
            decision = decision_of(answer, call, by or None)
            if decision is not None:
                decisions[call.path] = decision
        return decisions

    def shown(self, event: PlannerEvent) -> Iterator[BaseEvent]:
        """Translate an event; keep a run that waits before the front end can answer."""
        yield from self.events.read(event)
        if not isinstance(event, ResultReady):
            return
        self._is_over = True
        result = event.result
        if result.pending:
            self._waiting[self._input.thread_id] = result.checkpoint
        yield from self.events.finished(result.pending)


def _with_interceptor(
    planner: FunctionCallingStepwisePlanner,
) -> FunctionCallingStepwisePlanner:
    interceptors = (defer_front_end_tools, *planner.options.interceptors)
    return _with(planner, interceptors=interceptors)


def _letting_in(
    planner: FunctionCallingStepwisePlanner, roles: Collection[str]
) -> FunctionCallingStepwisePlanner:

    async def has_role(request: DecisionRequest) -> bool:
        return request.call is None or _has_role(request.call, roles)

    approval = planner.options.approval or ApprovalSettings()
    return _with(planner, approval=approval.asking(has_role))


def _with(
    planner: FunctionCallingStepwisePlanner, **options: Any
) -> FunctionCallingStepwisePlanner:
    """Copy a planner with other options; the copy shares the record of taken decisions."""
    copied = copy(planner)
    copied.options = planner.options.model_copy(update=options)
    return copied


def _has_role(call: ToolCall, roles: Collection[str]) -> bool:
    common = {*call.roles} & {*roles}
    return not call.roles or bool(common)
