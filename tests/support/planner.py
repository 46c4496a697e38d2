"""A planner over a scripted model, plain and streamed alike, and what the model was asked."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from openai import AsyncOpenAI
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.chat_completion_client_base import (
    ChatCompletionClientBase,
)
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import kernel_function

from planner_ext import (
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionCallingStepwisePlannerResult,
)
from planner_ext.events import PlannerEvent, ResultReady
from planner_ext.testing import (
    Script,
    ScriptedChatCompletion,
    ScriptedOpenAIServer,
    ScriptedReply,
    ScriptedRequest,
    call,
    say,
)
from planner_ext.testing.rules import find_violation

GOAL = "What is 1 + 2?"
PLAN = say("1. Add 1 and 2.")
ADD = call("math-add", {"a": 1, "b": 2})
FINAL_ANSWER = "UserInteraction-SendFinalAnswer"
ENOUGH = say("Enough.")

both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)


def final(answer: str = "It is 3.") -> ScriptedReply:
    """Hand over the final answer."""
    return call(FINAL_ANSWER, {"answer": answer})


def never_stops(request: ScriptedRequest) -> ScriptedReply:
    """Call a function whenever one is offered; write text only otherwise."""
    return ADD if request.tools else ENOUGH


@dataclass
class Math:
    """A plugin that remembers what it added."""

    sums: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    @kernel_function(description="Adds two numbers.")
    async def add(self, a: int, b: int) -> int:
        self.sums.append((a, b))
        return a + b

    @kernel_function(description="Fails.")
    async def fail(self) -> str:
        raise RuntimeError("the disk of db7 is full")


@dataclass
class Clock:
    """Time that passes only where a test says so."""

    seconds: float = 1_000_000.0
    slept: list[float] = field(default_factory=list[float])

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.seconds += seconds


def planner_with(
    service_id: str | None = None, **options: Any
) -> FunctionCallingStepwisePlanner:
    """Make a planner from options."""
    return FunctionCallingStepwisePlanner(
        service_id, FunctionCallingStepwisePlannerOptions(**options)
    )


def kernel_of(*services: ChatCompletionClientBase, **plugins: object) -> Kernel:
    """Make a kernel of services and plugins; `Math` is among the plugins unless one is given."""
    kernel = Kernel()
    for service in services:
        kernel.add_service(service)
    for name, plugin in (plugins or {"math": Math()}).items():
        kernel.add_plugin(plugin, name)
    return kernel


def scripted(script: Script, **more: Any) -> tuple[Kernel, ScriptedChatCompletion]:
    """Make a kernel whose model is a script, without a network."""
    service = ScriptedChatCompletion(script, **more)
    return kernel_of(service), service


@asynccontextmanager
async def openai_kernel(
    script: Script, **plugins: object
) -> AsyncGenerator[tuple[Kernel, ScriptedOpenAIServer]]:
    """Make a kernel with the real OpenAI connector against a scripted server; no request may break OpenAI's rules."""
    with ScriptedOpenAIServer(script) as server:
        async with AsyncOpenAI(
            base_url=server.url, api_key="any", max_retries=0
        ) as client:
            connector = OpenAIChatCompletion(
                ai_model_id="scripted", service_id="chat", async_client=client
            )
            yield kernel_of(connector, **plugins), server
        assert server.refused == []


async def drained(stream: AsyncGenerator[PlannerEvent, None]) -> list[PlannerEvent]:
    """Read a stream to its end."""
    async with aclosing(stream):
        return [event async for event in stream]


def result_in(events: Sequence[PlannerEvent]) -> FunctionCallingStepwisePlannerResult:
    """Take the result from the last event, which must be the one that has it."""
    last = events[-1]
    assert isinstance(last, ResultReady)
    return last.result


async def invoke(
    planner: FunctionCallingStepwisePlanner,
    kernel: Kernel,
    goal: str = GOAL,
    *,
    streamed: bool = False,
    **more: Any,
) -> FunctionCallingStepwisePlannerResult:
    """Reach a goal, plain or streamed."""
    if streamed:
        return result_in(await drained(planner.invoke_stream(kernel, goal, **more)))
    return await planner.invoke(kernel, goal, **more)


async def resume(
    planner: FunctionCallingStepwisePlanner,
    kernel: Kernel,
    checkpoint: Any,
    *,
    streamed: bool = False,
    **more: Any,
) -> FunctionCallingStepwisePlannerResult:
    """Go on with a run, plain or streamed."""
    if streamed:
        return result_in(
            await drained(planner.resume_stream(kernel, checkpoint, **more))
        )
    return await planner.resume(kernel, checkpoint, **more)


def texts(request: ScriptedRequest) -> list[tuple[object, object]]:
    """List role and content of each message of a request."""
    return [(message["role"], message.get("content")) for message in request.messages]


def whole_text(request: ScriptedRequest) -> str:
    """Join everything that a request says."""
    return "\n".join(str(message.get("content")) for message in request.messages)


def check_sendable(history: ChatHistory | None) -> None:
    """Fail where OpenAI would refuse a history."""
    assert history is not None
    violation = find_violation(
        {
            "model": "any",
            "messages": [message.to_dict() for message in history.messages],
        }
    )
    assert violation is None, violation
