"""One run of a service, and the caller's history that it keeps up to date."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory, ChatMessageContent, StreamingChatMessageContent
from semantic_kernel.functions import KernelArguments

from planner_ext.core.facts import (
    CallDecided,
    CallFinished,
    CallsWithheld,
    Clarified,
    Fact,
    IterationCompleted,
    ModelReplied,
)
from planner_ext.core.state import Phase, State
from planner_ext.engine import Engine, StopHandle
from planner_ext.kernel.errors import PlannerInvalidConfigurationError
from planner_ext.kernel.loop import Loop
from planner_ext.kernel.messages import calls_of, text_of
from planner_ext.kernel.outcome import final_message, raise_at_limit
from planner_ext.kernel.resumed_history import bring_up_to_date
from planner_ext.kernel.streamed import StreamedRun
from planner_ext.kernel.taken import NOTHING_TAKEN, Taking
from planner_ext.ports import Emit, Event, TextDelta
from planner_ext.streaming import watch

__all__ = ["ServiceRun", "World", "store"]

_SETTLING = (CallDecided, CallsWithheld, CallFinished, Clarified)
"""Facts with which the last call of a batch may have got its result."""

_SHOWN = (TextDelta, ModelReplied, IterationCompleted)
"""Events that make chunks, and the one after which a caller may leave before the calls of a reply begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a caller hands over with each request, beside history and settings.

    Raises:
        PlannerInvalidConfigurationError: If one of it is something else, naming it.
    """

    kernel: Kernel
    arguments: KernelArguments | None = None
    stop: StopHandle | None = None
    store_final: bool = False

    def __post_init__(self) -> None:
        given: dict[str, tuple[object, type]] = {
            "kernel": (self.kernel, Kernel),
            "arguments": (self.arguments, KernelArguments),
            "stop": (self.stop, StopHandle),
        }
        for name, (value, kind) in given.items():
            if not isinstance(value, kind) and (value is not None or name == "kernel"):
                raise PlannerInvalidConfigurationError(
                    f"{name}= must be a {kind.__name__}; got a {type(value).__name__}."
                )


class ServiceRun:
    """Drives one run and adds each settled batch to the caller's history, as soon as it has settled."""

    def __init__(
        self,
        history: ChatHistory,
        loop: Loop,
        *,
        known: int,
        world: World,
        facts: Sequence[Fact] = (),
        first: Sequence[Fact],
        taking: Taking = NOTHING_TAKEN,
        transcript: Sequence[ChatMessageContent] | None = None,
    ) -> None:
        """Bind a run to a history.

        Args:
            history: The caller's.
            loop: The world of the run.
            known: How many messages of the run's transcript are in the history already.
            world: What the caller handed over.
            facts: The journal that the run goes on from.
            first: What the run begins with, or is resumed with.
            taking: The decisions among that.
            transcript: Of a run that is resumed, its messages so far; the history is brought up to date with them.
        """
        self._loop = loop
        self._first = first
        self._taking = taking
        self._transcript = transcript
        self._store_final = world.store_final
        self._history = history
        self._known = known
        self._facts = tuple(facts)
        self._stop = world.stop
        self._settled: deque[list[ChatMessageContent]] = deque()

    async def message(self) -> ChatMessageContent:
        """Run, and make the message that the caller gets."""
        return self._returned(await self._drive(None))

    async def chunks(self, ai_model_id: str) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Run, and yield the chunks that the caller gets."""
        streamed = StreamedRun(ai_model_id)
        engines: list[Engine] = []

        async def run(emit: Emit) -> None:
            engines.append(await self._drive(_shown(emit)))

        async with aclosing(watch(run)) as events:
            async for event in events:
                if isinstance(event, TextDelta):
                    if (chunk := streamed.chunk(event)) is not None:
                        yield chunk
                elif isinstance(event, IterationCompleted) and self._settled:
                    for chunk in streamed.settled(self._settled.popleft(), event.iteration):
                        yield chunk
        yield streamed.last(self._returned(engines[0]))

    async def _drive(self, emit: Emit | None) -> Engine:
        engine = self._loop.engine(self._facts, emit=emit, stop=self._stop, follow=self._follow)
        with self._taking.held(engine):
            if self._transcript is not None:
                bring_up_to_date(self._history, self._transcript, engine.state, self._facts)
            for fact in self._first:
                await engine.record(fact)
            await self._loop.drive(engine)
        return engine

    def _returned(self, engine: Engine) -> ChatMessageContent:
        key = self._loop.checkpoint_key
        raise_at_limit(engine.state, engine.facts, key)
        message = final_message(engine.state, engine.facts, key)
        if self._store_final and engine.state.ended is not None:
            store(self._history, message)
        return message

    def _follow(self, state: State, fact: Fact) -> None:
        """Bring the history up to date with a fact."""
        if state.phase is Phase.COMPLETING and isinstance(fact, _SETTLING):
            settled = self._added(state)
            self._history.messages.extend(settled)
            self._settled.append(settled)
        elif state.phase is Phase.ASKING and isinstance(fact, Clarified):
            self._history.messages.extend(self._added(state))
        elif isinstance(fact, IterationCompleted) and fact.messages is not None:
            self._known = 0
            self._history.messages[:] = self._added(state)

    def _added(self, state: State) -> list[ChatMessageContent]:
        """Give the messages of the transcript that are not in the history yet."""
        transcript = self._loop.chat.messages(state.transcript)
        known, self._known = self._known, len(transcript)
        return transcript[known:]


def _shown(emit: Emit) -> Emit:
    """Hand over only what a stream of chunks has a use for."""

    async def show(event: Event) -> None:
        if isinstance(event, _SHOWN):
            await emit(event)

    return show


def store(history: ChatHistory, message: ChatMessageContent) -> None:
    """Add a final message to a history, unless there is nothing in it."""
    if calls_of(message) or text_of(message):
        history.add_message(message)
