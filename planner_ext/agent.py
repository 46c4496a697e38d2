"""A paused turn of a ``ChatCompletionAgent``: resumed with decisions, or cancelled, and the agent's thread with it.

An agent pauses as its `planner_ext.FunctionInvokingChatCompletion` does. The thread
then ends with the message that says so, and a further turn is refused until this one is
resumed or cancelled:

    response = await agent.get_response("Refund order 7.", thread=thread)
    if response.metadata["status"] == "paused":
        decisions = {call["id"]: Approve(by="ann") for call in response.metadata["pending"]}
        response = await resume_agent(agent, response.thread, response.metadata["checkpoint"], decisions)

Afterwards the thread has the calls, their results and the answer, or the message of the
next pause; then what the user wrote meanwhile.

Another process can resume a copy of a waiting thread once more. Where that must not
happen, use a planner with a store (`planner_ext.durable.Runs`).
"""

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final, cast
from weakref import WeakSet

from semantic_kernel import Kernel
from semantic_kernel.agents import (
    AgentResponseItem,
    AgentThread,
    ChatCompletionAgent,
    ChatHistoryAgentThread,
)
from semantic_kernel.connectors.ai import PromptExecutionSettings
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.contents import (
    AuthorRole,
    ChatHistory,
    ChatMessageContent,
    FunctionCallContent,
    FunctionResultContent,
    StreamingChatMessageContent,
)
from semantic_kernel.functions import KernelArguments

from planner_ext.approval.decisions import Decision, DecisionRequest
from planner_ext.core.errors import shown, way_out
from planner_ext.core.limits import Budget
from planner_ext.engine.authorization import refusal_of
from planner_ext.engine.concurrency import StopHandle, streams
from planner_ext.service import FunctionInvokingChatCompletion
from planner_ext.sk.chat.history import render
from planner_ext.sk.chat.resumed import ResumedHistory, resumed_history
from planner_ext.sk.checkpoint import Checkpoint, SigningKey
from planner_ext.sk.checks import instance_of
from planner_ext.sk.errors import (
    DecisionRefusedError,
    InvalidCheckpointError,
    InvalidOptionError,
)
from planner_ext.sk.run.outcome import chat_history
from planner_ext.sk.run.resume import (
    Late,
    cancelling_facts,
    end_cancelled,
    given_checkpoint,
)
from planner_ext.sk.run.returned import final_message, returned_message, waits
from planner_ext.sk.run.service import ServiceRequest, ServiceRun

__all__ = ["cancel_agent", "resume_agent", "resume_agent_stream"]


async def resume_agent(
    agent: ChatCompletionAgent,
    thread: AgentThread | None,
    checkpoint: Checkpoint | str,
    decisions: Mapping[str, Decision],
    *,
    kernel: Kernel | None = None,
    arguments: KernelArguments | None = None,
    budget: Budget | None = None,
    stop: StopHandle | None = None,
    late: Late = "refuse",
) -> AgentResponseItem[ChatMessageContent]:
    """Resume a turn of an agent that is paused, or that a limit or a stop ended.

    As `planner_ext.FunctionInvokingChatCompletion.resume`; and the thread is brought up
    to date.

    Args:
        agent: It need not be the object that began the turn.
        thread: The thread of the turn: the response's ``thread``.
        checkpoint: The turn's `Checkpoint`, or the JSON text in the metadata of its
            response.
        decisions: By call id; without one the call still waits.
        kernel: Its functions run and its service is asked; None uses the agent's.
        arguments: The application's arguments again, over the agent's own.
        budget: Replaces the turn's limits; what was spent still counts.
        stop: Ends the turn from outside.
        late: Whether to ``"refuse"`` or ``"allow"`` decisions after a later turn of the
            thread. A message that was refused because the turn waits is no later turn.

    Returns:
        The response, as of the agent's ``get_response``; it may wait again.

    Raises:
        PlannerInvalidConfigurationError: If agent, thread or service cannot be resumed;
            names what can.
        InvalidCheckpointError: If the checkpoint cannot be read, or is not signed with
            the service's key.
        InvalidHistoryError: If the thread is not that of the turn, or holds results of
            its open calls.
        DecisionRefusedError: If a decision is invalid, was taken before, comes late, or
            is on an earlier checkpoint than the thread's. In these cases nothing ran,
            and the thread is as it was.
    """
    turn = await _Turn.of(agent, thread, checkpoint, kernel, arguments)
    request = ServiceRequest(
        kernel=turn.kernel, arguments=turn.arguments, stop=stop, late=late
    )
    with _alone(turn.thread):
        run = await turn.run(decisions, request, budget=budget, streaming=False)
        try:
            await run.message()
        finally:
            await turn.went_on(run)
    assert run.final is not None, "a run that raises nothing has its message"
    message = turn.named(run.final)
    return AgentResponseItem(message=message, thread=turn.thread)


@streams
async def resume_agent_stream(
    agent: ChatCompletionAgent,
    thread: AgentThread | None,
    checkpoint: Checkpoint | str,
    decisions: Mapping[str, Decision],
    *,
    kernel: Kernel | None = None,
    arguments: KernelArguments | None = None,
    budget: Budget | None = None,
    stop: StopHandle | None = None,
    late: Late = "refuse",
) -> AsyncGenerator[AgentResponseItem[StreamingChatMessageContent]]:
    """Resume as `resume_agent` does, as a stream.

    Yields:
        Chunks, as of the agent's ``invoke_stream``; the last one has the metadata.
            Closing the stream early cancels the turn.
    """
    turn = await _Turn.of(agent, thread, checkpoint, kernel, arguments)
    request = ServiceRequest(
        kernel=turn.kernel, arguments=turn.arguments, stop=stop, late=late
    )
    with _alone(turn.thread):
        run = await turn.run(decisions, request, budget=budget, streaming=True)
        try:
            async with aclosing(run.chunks(turn.service.ai_model_id)) as chunks:
                async for chunk in chunks:
                    if run.final is not None or not any(
                        isinstance(item, _OF_CALLS) for item in chunk.items
                    ):
                        chunk.name = agent.name
                        yield AgentResponseItem(message=chunk, thread=turn.thread)
        finally:
            await turn.went_on(run)


async def cancel_agent(
    agent: ChatCompletionAgent,
    thread: AgentThread | None,
    checkpoint: Checkpoint | str,
    *,
    kernel: Kernel | None = None,
    by: str = "",
    reason: str = "",
) -> AgentResponseItem[ChatMessageContent]:
    """End a paused turn for good: the model reads in the next turn that no pending call was executed.

    Args:
        agent: The agent; its service's ``checkpoint_key`` applies.
        thread: The thread of the turn.
        checkpoint: The turn's `Checkpoint`, or its JSON text.
        kernel: Has the service; None uses the agent's.
        by: Who cancels, for the record and the model.
        reason: Why, for the record and the model.

    Returns:
        The response of the stopped turn, without a text.

    Raises:
        RunEndedError: If the turn has ended already.
        DecisionRefusedError: If the service's ``authorize`` hook does not allow it.
        PlannerException: As `resume_agent`; the thread is as it was.
    """
    turn = await _Turn.of(agent, thread, checkpoint, kernel, None)
    with _alone(turn.thread):
        options = turn.service.options
        before = turn.checkpoint.facts
        state = turn.checkpoint.state()
        asked = DecisionRequest(action="cancel", by=by, run_id=state.run_id)
        refusal = await refusal_of(options.approval.authorize, asked)
        if refusal is not None:
            raise DecisionRefusedError(f"{refusal} The turn still waits.")
        facts = cancelling_facts(
            turn.checkpoint, by=by, reason=reason, at=options.clock.now()
        )
        returned = returned_message(state, before)
        resumed = resumed_history(
            turn.history, render(state.transcript), state, before, returned
        )
        ended = end_cancelled(turn.checkpoint, facts, options.taken)
        new = ended.transcript[len(state.transcript) :]
        await turn.update(resumed, render(new), None)
        recorded = (*before, *facts)
        final = final_message(ended, recorded, options.checkpoint_key)
        message = turn.named(final)
        return AgentResponseItem(message=message, thread=turn.thread)


_OF_CALLS: Final = (FunctionCallContent, FunctionResultContent)

_GOING_ON: "WeakSet[AgentThread]" = WeakSet()
"""The threads whose turns are being resumed or cancelled."""


@contextmanager
def _alone(thread: AgentThread) -> Generator[None]:
    """Refuse a second resume of a thread while one is under way, by any agent."""
    if thread in _GOING_ON:
        raise DecisionRefusedError(
            "The turn of this thread is being resumed or cancelled already; nothing of this decision was taken. Wait "
            "for that one, and look at the thread again."
        )
    _GOING_ON.add(thread)
    try:
        yield
    finally:
        _GOING_ON.discard(thread)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Turn:
    """A turn that an agent had begun, and what its agent would ask the model with.

    ``history`` has no messages that were refused; ``sent`` is what it had before the
    turn was resumed.
    """

    agent: ChatCompletionAgent
    thread: ChatHistoryAgentThread
    checkpoint: Checkpoint
    kernel: Kernel
    arguments: KernelArguments
    service: FunctionInvokingChatCompletion
    settings: PromptExecutionSettings
    history: ChatHistory
    sent: Sequence[ChatMessageContent]

    @classmethod
    async def of(
        cls,
        agent: ChatCompletionAgent,
        thread: AgentThread | None,
        checkpoint: Checkpoint | str,
        kernel: Kernel | None,
        arguments: KernelArguments | None,
    ) -> "_Turn":
        """Find the service and the settings that the agent would use."""
        if not isinstance(agent, ChatCompletionAgent):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidOptionError(
                f"agent must be a ChatCompletionAgent, whose calls run in this process; got {shown(agent)}."
                f"{way_out('agent', agent)}"
            )
        if not isinstance(thread, ChatHistoryAgentThread):
            raise InvalidOptionError(
                "thread must be the ChatHistoryAgentThread of the turn that waits, which its response has as .thread; "
                f"got {shown(thread)}.{way_out('thread', thread)}"
            )
        if kernel is not None:
            instance_of("kernel", kernel, Kernel)
        kernel = kernel or agent.kernel
        merged = _merged(agent, arguments)
        service, settings = kernel.select_ai_service(
            arguments=merged, type=ChatCompletionClientBase
        )
        if not isinstance(service, FunctionInvokingChatCompletion):
            raise InvalidOptionError(
                "The agent's service must be the FunctionInvokingChatCompletion whose turn waits; got "
                f"{shown(service)}. Give the agent that service, or pass the kernel that has it."
            )
        settings = settings.model_copy()
        if settings.function_choice_behavior is None:
            settings.function_choice_behavior = agent.function_choice_behavior
        loaded = given_checkpoint(checkpoint, service.options.checkpoint_key)
        messages = [message async for message in thread.get_messages()]
        _refuse_older(loaded, messages, service.options.checkpoint_key)
        sent = chat_history(loaded.state()).messages
        history = ChatHistory()
        if _system_messages(sent) > _system_messages(messages):
            history.messages += sent[:1]
        taken = len(messages) - _refused(messages)
        history.messages += messages[:taken]
        return cls(
            agent=agent,
            thread=thread,
            checkpoint=loaded,
            kernel=kernel,
            arguments=merged,
            service=service,
            settings=settings,
            history=history,
            sent=tuple(history.messages),
        )

    async def run(
        self,
        decisions: Mapping[str, Decision],
        request: ServiceRequest,
        *,
        budget: Budget | None,
        streaming: bool,
    ) -> ServiceRun:
        """Prepare the run; nothing is driven or changed yet."""
        return await self.service._resume(  # pyright: ignore[reportPrivateUsage]  (the same door, with another history)
            self.history,
            self.checkpoint,
            decisions,
            self.settings,
            request,
            budget=budget,
            streaming=streaming,
        )

    async def went_on(self, run: ServiceRun) -> None:
        """Bring the thread up to date; one whose run settled nothing still waits."""
        if run.resumed is not None and (run.added or run.final is not None):
            await self.update(run.resumed, run.added, run.final)

    async def update(
        self,
        resumed: ResumedHistory,
        added: Sequence[ChatMessageContent],
        final: ChatMessageContent | None,
    ) -> None:
        """Replace the message that the turn had returned by the outcome."""
        messages = self.thread._chat_history.messages  # pyright: ignore[reportPrivateUsage]  (nothing else removes one)
        kept = {id(one) for one in (*resumed.kept, *resumed.later)}
        sent = {id(one) for one in self.sent}
        # Those that came meanwhile, too.
        refused = [one for one in messages if id(one) not in sent]
        messages[:] = [
            one
            for one in messages
            if id(one) in sent and (one.role != AuthorRole.ASSISTANT or id(one) in kept)
        ]
        for message in (*resumed.missing, *added):
            await self.thread.on_new_message(self.named(message))
        # Results are in the thread already.
        if final is not None and final.role != AuthorRole.TOOL:
            await self.thread.on_new_message(self.named(final))
        messages += refused

    def named(self, message: ChatMessageContent) -> ChatMessageContent:
        """Copy a message with the agent's name, as the agent adds messages to a thread."""
        return message.model_copy(update={"name": self.agent.name})


def _merged(
    agent: ChatCompletionAgent, arguments: KernelArguments | None
) -> KernelArguments:
    own = KernelArguments() if agent.arguments is None else agent.arguments
    merged = copy(own)
    if arguments is not None:
        cast("dict[str, Any]", merged).update(cast("dict[str, Any]", arguments))
        merged.execution_settings = {
            **(own.execution_settings or {}),
            **(arguments.execution_settings or {}),
        } or None
    return merged


def _refuse_older(
    given: Checkpoint, messages: Sequence[ChatMessageContent], key: SigningKey | None
) -> None:
    """Refuse a checkpoint that was resumed before: the thread's own has more facts."""
    own = next(
        (
            message.metadata.get("checkpoint")
            for message in reversed(messages)
            if waits(message)
        ),
        None,
    )
    # A thread may come from anywhere, and decides nothing.
    with suppress(InvalidCheckpointError):
        later = given
        if isinstance(own, str):
            later = Checkpoint.from_json(own, key)
        is_same_run = later.run_id == given.run_id
        if is_same_run and len(later.facts) > len(given.facts):
            raise DecisionRefusedError(
                "This checkpoint was resumed before, and the turn went on since: the thread waits with a later one. "
                "Nothing ran. Decide on the checkpoint in the metadata of the thread's last message."
            )


def _refused(messages: Sequence[ChatMessageContent]) -> int:
    """Count the user's messages after the one that says that a call waits."""
    users = _leading(AuthorRole.USER, reversed(messages))
    last = len(messages) - users - 1
    if last >= 0 and waits(messages[last]):
        return users
    return 0


def _system_messages(messages: Sequence[ChatMessageContent]) -> int:
    """Count the system messages at the beginning, where an agent puts its instructions."""
    return _leading(AuthorRole.SYSTEM, messages)


def _leading(role: AuthorRole, messages: Iterable[ChatMessageContent]) -> int:
    leading = takewhile(lambda message: message.role == role, messages)
    return len([*leading])
