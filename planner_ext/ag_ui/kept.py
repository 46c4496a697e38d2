"""`ag_ui_kept_events`: a window on the runs of a thread, which a store keeps."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

from ag_ui.core import (
    BaseEvent,
    Message,
    MessagesSnapshotEvent,
    RunAgentInput,
    Tool,
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
    is_tool,
    named_tools,
    text_of,
    with_tools,
)
from planner_ext.approval.decisions import Deny
from planner_ext.core.errors import EndedRunError
from planner_ext.durable.errors import (
    ApprovalRefusedError,
    RunConflictError,
    UnknownRunError,
)
from planner_ext.durable.listing import ENDS
from planner_ext.planner.planner import FunctionCallingStepwisePlanner
from planner_ext.sk.errors import DecisionRefusedError
from planner_ext.sk.run.outcome import chat_history

if TYPE_CHECKING:
    from planner_ext.durable import (
        PendingApproval,
        RunHandle,
        RunRecord,
        Runs,
        RunsClient,
        StoredRun,
    )


async def ag_ui_kept_events(
    runs: "Runs",
    planner: FunctionCallingStepwisePlanner,
    kernel: Kernel,
    run_input: RunAgentInput,
    *,
    run_id: str | None = None,
    by: str = "",
    arguments: KernelArguments | None = None,
    follow: float = 0.0,
) -> AsyncGenerator[BaseEvent]:
    """Show the runs of a thread that a store keeps to an AG-UI front end; see the module.

    The first run of a thread has the name ``run_id``, later ones ``{run_id}.2`` and so
    on; each continues the conversation of the one before. An input with a new message
    of the user begins a run, or says the message to the one that is unfinished; one
    without is a window on what is there, after a reload or beside the inbox.

    Where only others may decide what waits, a text says who, and the stream ends, so
    that the chat stays usable. A second request, with ``follow``, shows when the run
    continues. Keep it shorter than a proxy's patience, and than that of a server that
    leaves; the front end repeats it.

    Args:
        runs: The store.
        planner: Drives the runs.
        kernel: Not changed.
        run_input: The body of the request.
        run_id: The name of the thread's first run; None: the thread's id. Whoever names
            a run reads it: put the user's name into it, or make it unguessable.
        by: The user's name, for which the application vouches: recorded with their
            decisions and messages. A call is an interrupt only where the ``authorize``
            hooks of planner and store let this user decide it.
        arguments: The application's arguments; never stored.
        follow: Seconds for which the stream stays open while only others can decide; it
            goes on once they have.

    Yields:
        The events: ``RUN_STARTED``, ``MESSAGES_SNAPSHOT`` with the whole thread, what
            happens, and ``RUN_FINISHED``, or ``RUN_ERROR`` after a fault. Closing the
            stream leaves the run running. What cannot be taken is refused in a text.

    Raises:
        PlannerInvalidConfigurationError: If the kernel has a plugin ``ag_ui``.
    """
    check_plugins(kernel)
    tools = named_tools(run_input.tools or ())
    if tools and defer_front_end_tools in planner.options.interceptors:
        kernel = with_tools(kernel, tools)
    thread = _Thread(
        runs=runs,
        # The hooks of store and planner are asked about what this user does.
        client=runs.acting(authorize=planner.authorize, verified=bool(by)),
        run_id=run_id or run_input.thread_id,
        run_input=run_input,
        tools=tools,
        by=by,
        driving={
            "planner": planner,
            "kernel": kernel,
            "arguments": arguments,
            "streaming": True,
        },
        events=RunEvents(run_input, tools),
    )
    try:
        async with aclosing(thread.happening(follow=follow)) as events:
            async for event in events:
                yield event
    except Exception as error:
        yield error_event(error)


_Taken: TypeAlias = "tuple[RunHandle[Any] | None, list[Message]]"
_MOST_PENDING = 1000
_TOO_LATE = "The answer changed nothing: the call was decided before."
_FAILED = "The run failed on the server. A message tries it again."


@dataclass(kw_only=True, eq=False)
class _Thread:
    """The runs of one thread, and the input that comes to it.

    Attributes:
        events: Those of the thread's last run.
        driving: What it is driven with.
        problems: What of the input could not be taken.
    """

    runs: "Runs"
    client: "RunsClient"
    run_id: str
    run_input: RunAgentInput
    tools: Mapping[str, Tool]
    by: str
    driving: Mapping[str, Any]
    events: RunEvents
    problems: list[str] = field(default_factory=list[str])

    async def happening(self, *, follow: float) -> AsyncGenerator[BaseEvent]:
        """Take the input, and yield what happens."""
        yield self.events.started()
        handle, messages = await self._taken()
        yield MessagesSnapshotEvent(messages=messages)
        problems = "\n".join(self.problems)
        for event in self.events.notice(problems):
            yield event
        own: Sequence[PendingApproval] = ()
        waited_for = ""
        deadline = asyncio.get_running_loop().time() + follow
        while handle is not None:
            async with aclosing(self._until_pause(handle)) as events:
                async for event in events:
                    yield event
            pending = await self._pending(handle.run_id)
            own = [call for call in pending if await self._is_own(call)]
            foreign = [call for call in pending if call not in own]
            others = "\n".join(map(_waiting, foreign))
            if others != waited_for:
                waited_for = others
                for event in self.events.notice(others):
                    yield event
            has_ended = self.events.state.ended is not None
            is_over = has_ended or own or (pending and not follow)
            if is_over or not await _is_due(handle, deadline if pending else None):
                break
        for event in self.events.finished(own):
            yield event

    async def _until_pause(self, handle: "RunHandle[Any]") -> AsyncGenerator[BaseEvent]:
        async with aclosing(handle.events(after=self.events.place)) as happened:
            async for fact in happened:
                for event in self.events.read(fact):
                    yield event

    async def _taken(self) -> "_Taken":
        """Take the input; return the run that begins or continues, and the conversation."""
        messages: list[Message] = []
        last: StoredRun | None = None
        turns = 0
        tags = set[str]()
        async for stored in self._turns():
            turns += 1
            if stored is None:
                continue
            last = stored
            tags.update(last.record.tags)
            self.events = RunEvents(self.run_input, self.tools)
            first = opening(last.record.run_id, last.record.goal)
            messages += [first, *self.events.replay(last.facts)]
        unread = [] if last is None else [one.text for one in last.said]
        known = [*messages, *self.events.unread(unread)]
        new = self._new_message(known, tags)
        try:
            if last is None or last.record.status in ENDS:
                name = self._name(turns + 1)
                return await self._begun(name, new, messages)
            return await self._continued(last.record, new, messages, unread)
        except (EndedRunError, RunConflictError):  # another window was first
            return await self._taken()

    async def _begun(
        self, run_id: str, new: UserMessage | None, messages: list[Message]
    ) -> "_Taken":
        """Begin a run that knows the conversation before it, if the user asks for one."""
        await self._decide(())
        if new is None:
            return None, messages
        goal = text_of(new.content)
        before = [
            *chat_history(self.events.state).messages,
            *context_of(self.run_input),
        ]
        handle = await self.runs.start(
            goal=goal,
            run_id=run_id,
            chat_history=ChatHistory(messages=before) if before else None,
            tags=[_tag_of(new)],
            **self.driving,
        )
        self.events = RunEvents(self.run_input, self.tools)
        return handle, [*messages, opening(run_id, goal)]

    async def _continued(
        self,
        run: "RunRecord",
        new: UserMessage | None,
        messages: list[Message],
        unread: list[str],
    ) -> "_Taken":
        """Continue an unfinished run, with what the user answers and says."""
        pending = await self._pending(run.run_id)
        await self._decide(pending)
        if new is not None and await self._say(run.run_id, new, pending):
            unread.append(text_of(new.content))
        messages += self.events.unread(unread)
        if run.unfinished:
            start = partial(self.runs.start, goal=run.goal)
        elif new is not None:
            start = partial(self.runs.resume, by=self.by)
        else:
            self.problems.append(_FAILED)
            return None, messages
        return await start(run_id=run.run_id, **self.driving), messages

    async def _turns(self) -> "AsyncIterator[StoredRun | None]":
        """Load the runs of the thread, in order; None for one that was deleted."""
        for turn in count(1):
            name = self._name(turn)
            stored = None
            with suppress(UnknownRunError):
                stored = await self.client.load(name)
            if stored is None and not await self.client.was_deleted(name):
                return
            yield stored

    def _name(self, turn: int) -> str:
        return self.run_id if turn == 1 else f"{self.run_id}.{turn}"

    def _new_message(
        self, known: Sequence[Message], tags: Collection[str]
    ) -> UserMessage | None:
        """Return the user's message at the end of the input if the thread does not have it yet.

        A front end knows it by its own id until it has seen a snapshot. The runs of the
        thread are tagged with that id, so it may send the message again at any time.
        """
        given = self.run_input.messages
        last = given[-1] if given else None
        if not isinstance(last, UserMessage):
            return None
        ids = {one.id for one in known}
        is_known = last.id in ids or _tag_of(last) in tags
        return None if is_known else last

    async def _pending(self, run_id: str) -> "list[PendingApproval]":
        approvals = self.client.approvals()
        return await approvals.pending(run_id, limit=_MOST_PENDING)

    async def _decide(self, pending: "Sequence[PendingApproval]") -> None:
        """Take the answers in the input, each for itself."""
        approvals = self.client.approvals()
        answered, is_late = answers_of(self.run_input, pending, self.events.id_of)
        for call, answer in answered:
            try:
                decision = decision_of(answer, call, self.by or None)
                if decision is not None:
                    won = await approvals.decide(call.id, decision)
                    is_late = is_late or not won
            except (ApprovalRefusedError, DecisionRefusedError) as error:
                self.problems.append(str(error))
        if is_late:
            self.problems.append(_TOO_LATE)

    async def _say(
        self, run_id: str, new: UserMessage, pending: "Sequence[PendingApproval]"
    ) -> bool:
        """Say a message to the run, which then waits for no tool of the front end; False if the user may not."""
        text = text_of(new.content)
        tag = _tag_of(new)
        try:
            await self.client.say(run_id, text, by=self.by, once=tag)
        except ApprovalRefusedError as error:
            self.problems.append(str(error))
            return False
        left = Deny("the user continued without it", by=self.by or None)
        for call in filter(is_tool, pending):
            await self.client.approvals().decide(call.id, left)
        return True

    async def _is_own(self, call: "PendingApproval") -> bool:
        return is_tool(call) or await self.client.approvals().may_decide(
            call, by=self.by
        )


async def _is_due(handle: "RunHandle[Any]", deadline: float | None) -> bool:
    """Wait until a run can continue; False if it cannot by then."""
    try:
        async with asyncio.timeout_at(deadline):
            await handle.due()
    except TimeoutError:
        return False
    return True


def _tag_of(message: UserMessage) -> str:
    """Return the tag of the run that took a message. Some front ends count their ids anew in each window."""
    name = f"{message.id}\n{text_of(message.content)}"
    digest = sha256(name.encode(errors="replace")).hexdigest()
    return f"ag-ui {digest[:32]}"


def _waiting(call: "PendingApproval") -> str:
    what = call.prompt if call.kind == "question" else call.fully_qualified_name
    votes = f", approved by {call.tally}" if call.tally else ""
    return f"{what} waits for {', '.join(call.roles) or 'a decision'}{votes}."
