"""What the tests of the engine share: fakes of its ports, and journals read in short."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from planner_ext.approval.decisions import Approve, Decision, ToolCall
from planner_ext.core.facts import (
    CallDecided,
    Fact,
    Failure,
    Rules,
    RunStarted,
)
from planner_ext.core.machine import AskModel
from planner_ext.core.state import State
from planner_ext.core.values import (
    CallResult,
    Reply,
    RequestedCall,
    ResolvedCall,
    TranscriptItem,
    Usage,
)
from planner_ext.engine.concurrency import StopHandle
from planner_ext.engine.engine import Engine
from planner_ext.engine.ports import Emit, Finished, Ports, Reviewed, TextDelta
from support.journal import through_json

GOAL = {"role": "user", "text": "goal"}


PLAIN = [
    "ModelReplied",
    "CallDecided",
    "CallStarted",
    "CallFinished",
    "IterationCompleted",
    "ModelReplied",
    "Ended",
]


class FakeClock:
    """Time that moves when told to, and when slept."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.slept: list[float] = []

    def now(self) -> float:
        return self.time

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.time += seconds


@dataclass
class FakeChat:
    """Says its turns in order: a text, the names of functions to call, a reply, or an error to raise."""

    turns: list[Any]
    on_ask: Callable[[], object] = lambda: None
    requests: list[AskModel] = field(default_factory=list[AskModel])
    sent: list[Sequence[TranscriptItem]] = field(
        default_factory=list[Sequence[TranscriptItem]]
    )

    async def ask(
        self, transcript: Sequence[TranscriptItem], request: AskModel, emit: Emit | None
    ) -> Reply:
        self.requests.append(request)
        self.sent.append(tuple(transcript))
        if isinstance(waiting := self.on_ask(), Awaitable):
            await waiting
        turn = self.turns[len(self.requests) - 1]
        if isinstance(turn, BaseException):
            raise turn
        if emit is not None and isinstance(turn, str):
            await emit(TextDelta(text=turn, iteration=request.iteration))
        return turn if isinstance(turn, Reply) else _reply(turn)

    def failure(self, error: BaseException) -> Failure:
        return "unsent" if isinstance(error, ConnectionRefusedError) else "processed"

    def estimated(
        self, transcript: Sequence[TranscriptItem], request: AskModel
    ) -> Usage:
        return Usage(prompt_tokens=7, estimated_tokens=7)


def _reply(turn: str | Sequence[str]) -> Reply:
    if isinstance(turn, str):
        return Reply(
            message={"role": "assistant", "text": turn}, text=turn, finish_reason="stop"
        )
    calls = tuple(
        RequestedCall(id=f"c{index}", name=name, arguments="{}")
        for index, name in enumerate(turn)
    )
    message = {"role": "assistant", "text": "", "calls": [call.id for call in calls]}
    return Reply(
        message=message,
        calls=calls,
        finish_reason="tool_calls",
        usage=Usage(iterations=1, prompt_tokens=1),
    )


@dataclass
class FakeFunctions:
    """Functions that exist unless they are called unknown, bad, final or mine; each does what was scripted."""

    does: dict[str, Callable[[], Any]] = field(
        default_factory=dict[str, Callable[[], Any]]
    )
    trace: list[str] = field(default_factory=list[str])
    version: int = 0

    def check(self, call: RequestedCall, edited: str | None = None) -> ResolvedCall:
        kinds: dict[str, Any] = {
            "unknown": "unknown",
            "bad": "invalid",
            "final": "final_answer",
            "mine": "external",
        }
        kind = kinds.get(call.name, "function")
        if edited is not None and "bad" in edited:
            kind = "invalid"
        arguments = (
            {"version": self.version, "edited": edited} if kind == "function" else {}
        )
        answer = {
            "invalid": "Bad arguments.",
            "unknown": "No such function.",
            "final_answer": "42",
        }.get(kind, "")
        return ResolvedCall(
            kind=kind,
            function=call.name,
            function_name=call.name,
            arguments=arguments,
            answer=answer,
        )

    async def run(
        self, call: RequestedCall, checked: ResolvedCall, *, index: int, state: State
    ) -> Finished:
        self.trace.append(f"start {call.name}")
        result: Any = self.does.get(call.name, lambda: None)()
        if isinstance(result, Awaitable):
            result = await cast("Awaitable[Any]", result)
        self.trace.append(f"end {call.name}")
        edited = checked.arguments["edited"]
        return (
            result
            if isinstance(result, Finished)
            else Finished(outcome="ok", text=f"{call.name}({edited or ''})")
        )

    def encode(self, result: Any) -> str:
        return f"encoded {result}"


class FakePrompts:
    """Says what it is asked to say, in so many words."""

    async def plan_request(self) -> tuple[Any, ...]:
        return ({"role": "user", "text": "plan?"},)

    async def opening(self, plan: str) -> tuple[Any, ...]:
        return (GOAL, {"role": "assistant", "text": plan})


def fake_message(purpose: str, problem: str) -> Any:
    """Say what it is for, or what was wrong, in so many words."""
    return {"role": "user", "text": problem or purpose}


def reviewed(decision: Decision) -> Reviewed:
    """Make what a gate says that has one decision and no rules."""
    return Reviewed(
        decision=decision,
        arguments=decision.arguments if isinstance(decision, Approve) else None,
    )


@dataclass
class FakeGate:
    """Decides by the function's name; approves what it does not know."""

    decisions: Mapping[str, Decision] = field(default_factory=dict[str, Decision])
    on_review: Callable[[], None] = lambda: None
    seen: list[tuple[ToolCall, ...]] = field(default_factory=list[tuple[ToolCall, ...]])
    unwatched: Set[str] = frozenset()

    def watches(self, function: str) -> bool:
        return function not in self.unwatched

    async def review(
        self, calls: Sequence[ToolCall], state: State
    ) -> Sequence[Reviewed]:
        self.seen.append(tuple(calls))
        self.on_review()
        return [
            reviewed(self.decisions.get(call.function_name, Approve()))
            for call in calls
        ]


@dataclass
class FakeHook:
    """Asks for the same each time an iteration is completed."""

    asked: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: Exception | None = None
    seen: list[State] = field(default_factory=list[State])

    async def completed(self, state: State) -> Mapping[str, Any]:
        self.seen.append(state)
        if self.error is not None:
            raise self.error
        return self.asked


class FakeStore:
    """Keeps facts as a table with a unique position does; every append lets other tasks run first."""

    def __init__(self, fail_on: str = "") -> None:
        self.rows: dict[int, Fact] = {}
        self.fail_on = fail_on

    async def append(self, run_id: str, seq: int, facts: Sequence[Fact]) -> None:
        await _let_others_run()
        for offset, fact in enumerate(facts):
            if fact.type == self.fail_on:
                raise OSError("disk full")
            if seq + offset in self.rows:
                raise OSError(f"row {seq + offset} exists")
            self.rows[seq + offset] = fact


async def _let_others_run() -> None:
    turn = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(turn.set_result, None)
    await turn


def started(**rules: Any) -> RunStarted:
    """Begin a run."""
    return RunStarted(
        run_id="run", rules=Rules(**rules), messages=(GOAL,), goal="goal", at=1000.0
    )


def engine_of(
    *turns: Any,
    facts: Sequence[Fact] | None = None,
    emit: Emit | None = None,
    stop: StopHandle | None = None,
    rules: Mapping[str, Any] | None = None,
    **ports: Any,
) -> Engine:
    """Make an engine over fakes."""
    chat = (
        turns[0] if turns and isinstance(turns[0], FakeChat) else FakeChat(list(turns))
    )
    world: dict[str, Any] = {
        "functions": FakeFunctions(),
        "prompts": FakePrompts(),
        "message": fake_message,
        "clock": FakeClock(),
        **ports,
    }
    facts = (started(**(rules or {})),) if facts is None else facts
    return Engine(facts, Ports(chat=chat, **world), emit=emit, stop=stop)


def types_of(facts: Sequence[Fact]) -> list[str]:
    """Name the facts after the start."""
    return [fact.type for fact in facts[1:]]


def results_of(state: State) -> list[str]:
    """List what the model reads as results."""
    return [entry.text for entry in state.transcript if isinstance(entry, CallResult)]


def again(engine: Engine) -> tuple[Fact, ...]:
    """Send a journal through its JSON text."""
    return through_json(engine.facts)


async def refused_with(engine: Engine, error: type[BaseException]) -> BaseException:
    """Run an engine that raises; return what it raised."""
    with pytest.raises(error) as caught:
        await engine.run()
    return caught.value


class Meeting:
    """Functions that wait until all of them run at once: one that is alone waits for ever."""

    def __init__(self, size: int) -> None:
        self.barrier = asyncio.Barrier(size)

    async def join(self) -> None:
        await self.barrier.wait()


def decision_of(engine: Engine) -> CallDecided:
    """Return the last decision of a journal."""
    return [fact for fact in engine.facts if isinstance(fact, CallDecided)][-1]
