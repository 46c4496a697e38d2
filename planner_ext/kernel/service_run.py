"""One run of a service, and the caller's history that it keeps up to date."""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from semantic_kernel.contents import AuthorRole, ChatHistory, ChatMessageContent, StreamingChatMessageContent

from planner_ext.core.facts import Fact, IterationCompleted
from planner_ext.core.state import Phase, State
from planner_ext.engine import Engine, StopHandle
from planner_ext.kernel.loop import Loop
from planner_ext.kernel.messages import calls_of, text_of
from planner_ext.kernel.outcome import PAUSED_TEXT, final_message, raise_at_limit
from planner_ext.kernel.streamed import StreamedRun
from planner_ext.ports import Emit, TextDelta
from planner_ext.streaming import watch

__all__ = ["ServiceRun", "bring_up_to_date", "store"]

_SETTLING = frozenset({"CallDecided", "CallsWithheld", "CallFinished", "IterationCompleted"})
"""Facts with which a batch may have moved into the transcript, or the transcript may have been replaced."""


class ServiceRun:
    """Drives one run and adds each settled batch to the caller's history, as soon as it has settled.

    Attributes:
        loop: The world of the run; set before it is driven, since that world tells this run its facts.
        first: The facts that the run begins with, or goes on with.
    """

    loop: Loop
    first: Sequence[Fact] = ()

    def __init__(
        self,
        history: ChatHistory,
        *,
        known: int,
        facts: Sequence[Fact] = (),
        stop: StopHandle | None,
        store_final: bool,
    ) -> None:
        """Bind a run to a history.

        Args:
            history: The caller's.
            known: How many messages of the run's transcript are in it already.
            facts: The journal that the run goes on from.
            stop: Ends the run from outside.
            store_final: Whether the final message is added to the history, too.
        """
        self._store_final = store_final
        self._history = history
        self._known = known
        self._facts = tuple(facts)
        self._stop = stop
        self._settled: deque[list[ChatMessageContent]] = deque()

    async def message(self) -> ChatMessageContent:
        """Run, and make the message that the caller gets."""
        return self._returned(await self._drive(None))

    async def chunks(self, ai_model_id: str) -> AsyncGenerator[StreamingChatMessageContent, Any]:
        """Run, and yield the chunks that the caller gets."""
        streamed = StreamedRun(ai_model_id)
        engines: list[Engine] = []

        async def run(emit: Emit) -> None:
            engines.append(await self._drive(emit))

        async for event in watch(run):
            if isinstance(event, TextDelta):
                yield streamed.chunk(event)
            elif isinstance(event, IterationCompleted) and (chunk := streamed.results(self._settled.popleft())):
                yield chunk
        engine = engines[0]
        yield streamed.last(self._returned(engine), text_sent=engine.state.reply is not None)

    async def _drive(self, emit: Emit | None) -> Engine:
        engine = self.loop.engine(self._facts, emit=emit, stop=self._stop)
        for fact in self.first:
            await engine.record(fact)
        await self.loop.drive(engine)
        return engine

    def _returned(self, engine: Engine) -> ChatMessageContent:
        raise_at_limit(engine.state, engine.facts)
        message = final_message(engine.state, engine.facts)
        if self._store_final and engine.state.ended is not None:
            store(self._history, message)
        return message

    def follow(self, state: State, fact: Fact) -> None:
        """Bring the history up to date with a fact."""
        if fact.type not in _SETTLING:
            return
        rendered = self.loop.chat.messages(state.transcript)
        if isinstance(fact, IterationCompleted) and fact.messages is not None:
            self._history.messages[:] = rendered
        elif state.phase is Phase.COMPLETING:
            added = rendered[self._known :]
            self._history.messages.extend(added)
            self._settled.append(added)
        self._known = len(rendered)


def store(history: ChatHistory, message: ChatMessageContent) -> None:
    """Add a final message to a history, unless there is nothing in it."""
    if calls_of(message) or text_of(message):
        history.add_message(message)


def bring_up_to_date(history: ChatHistory, transcript: Sequence[ChatMessageContent]) -> None:
    """Drop what a pause left in a caller's history, and fill in what it lacks of the run's transcript."""
    messages = history.messages
    if messages and messages[-1].role == AuthorRole.ASSISTANT and str(messages[-1]) == PAUSED_TEXT:
        messages.pop()
    messages.extend(transcript[len(messages) :])
