"""One way to ask and to resume, for every door and wire, and a shop that records every side effect."""

import json
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast

import pytest
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory, FunctionResultContent
from semantic_kernel.functions import kernel_function

from planner_ext import (
    BoundedFunctionChoiceBehavior,
    FunctionCallingStepwisePlanner,
    FunctionCallingStepwisePlannerOptions,
    FunctionInvokingChatCompletion,
    ToolCallHandler,
    requires_approval,
)
from planner_ext.events import CallDecided, Fact, ModelReplied, ResultReady
from planner_ext.hitl_manager import Checkpoint, Defer, ToolCall
from planner_ext.testing import Script, ScriptedChatCompletion, call, calls, say
from planner_ext.testing.rules import find_violation

LOOK = call("shop-look", {"order": "7"})
REFUND = call("shop-refund", {"order": "7", "amount": 50})
WIPE = call("shop-wipe", {})
DONE = say("Done.")
BOTH_CALLS = (calls(LOOK, REFUND), DONE)
REFUNDED = ("refund", "7", 50.0, "")
"""What `Shop.ran` holds after `REFUND`."""


@dataclass
class Shop:
    """A plugin whose functions record what they did."""

    ran: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])

    @kernel_function(description="Looks an order up.")
    async def look(self, order: str) -> str:
        self.ran.append(("look", order))
        return "sent"

    @kernel_function(description="Pays money back.")
    async def refund(self, order: str, amount: float, note: str = "") -> str:
        self.ran.append(("refund", order, amount, note))
        return f"refunded {amount:g}"

    @requires_approval(prompt="Really everything?")
    @kernel_function(description="Deletes everything.")
    async def wipe(self) -> str:
        self.ran.append(("wipe",))
        return "gone"

    @kernel_function(description="Charges the tenant.")
    async def charge(
        self,
        amount: float,
        tenant: Annotated[
            str, "Who pays", {"include_in_function_choices": False}
        ] = "nobody",
    ) -> str:
        self.ran.append(("charge", amount, tenant))
        return f"{tenant} pays {amount:g}"


@dataclass
class Clock:
    """Time that passes only where a test says so."""

    seconds: float = 1_000_000.0

    def now(self) -> float:
        return self.seconds

    def monotonic(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class World:
    """A kernel with a shop and a scripted model; `ran` is everything that was done."""

    kernel: Kernel
    service: ScriptedChatCompletion
    shop: Shop

    @property
    def ran(self) -> list[tuple[Any, ...]]:
        return self.shop.ran

    @property
    def requests(self) -> int:
        return len(self.service.requests)


def world(
    script: Script = BOTH_CALLS,
    shop: Any = None,
    *,
    chunk_size: int = 8,
    **plugins: object,
) -> World:
    """Make a kernel with a shop, and a model that says what a script says."""
    shop = shop or Shop()
    kernel, service = Kernel(), ScriptedChatCompletion(script, chunk_size=chunk_size)
    kernel.add_service(service)
    for name, plugin in {"shop": shop, **plugins}.items():
        kernel.add_plugin(plugin, name)
    return World(kernel, service, shop)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a run, as its door shows it.

    Attributes:
        text: The answer; of a service's stream, everything the assistant said after the last results.
        closing: The message of a service that is not streamed, or the last chunk: a paused run's fixed text.
        pending: The calls that wait, as JSON objects.
        checkpoint: JSON text; "" where the door gives none.
        history: The caller's history with a service or a handler, the result's with a planner.
    """

    status: str
    text: str
    closing: str
    pending: list[dict[str, Any]]
    checkpoint: str
    iterations: int
    tool_calls: int
    history: ChatHistory

    @property
    def waiting(self) -> list[str]:
        return [one["path"] for one in self.pending]


Kind = Literal["planner", "service", "handler"]


@dataclass(frozen=True)
class Door:
    """A way into the loop, plain or streamed. Each use makes a new planner, service or handler."""

    kind: Kind
    streamed: bool

    def __str__(self) -> str:
        return f"{self.kind}-{'streamed' if self.streamed else 'plain'}"

    async def ask(
        self,
        to: World,
        *,
        history: ChatHistory | None = None,
        arguments: Any = None,
        stop: Any = None,
        **options: Any,
    ) -> Outcome:
        """Begin a run."""
        if self.kind == "planner":
            planner = planner_with(**options)
            if not self.streamed:
                return _of_result(
                    await planner.invoke(
                        to.kernel, "Refund order 7.", arguments, stop=stop
                    )
                )
            return await _last_of(
                planner.invoke_stream(
                    to.kernel, "Refund order 7.", arguments, stop=stop
                )
            )
        history = asked() if history is None else history
        if self.kind == "handler":
            handler = _handler(to, arguments, options)
            return await _drained(
                (handler.invoke_stream if self.streamed else handler.invoke)(
                    history, stop=stop
                ),
                history,
            )
        settings = settings_with(options.pop("behavior", None))
        service = FunctionInvokingChatCompletion(to.service, **options)
        world: dict[str, Any] = {
            "kernel": to.kernel,
            "arguments": arguments,
            "stop": stop,
        }
        if self.streamed:
            return await _drained(
                service.get_streaming_chat_message_content(history, settings, **world),
                history,
            )
        return _of_message(
            await service.get_chat_message_content(history, settings, **world), history
        )

    async def resume(
        self,
        to: World,
        checkpoint: str,
        decisions: Mapping[str, Any],
        *,
        history: ChatHistory | None = None,
        arguments: Any = None,
        budget: Any = None,
        stop: Any = None,
        late: Any = None,
        **options: Any,
    ) -> Outcome:
        """Go on with a run from its checkpoint's text; an empty history unless one is given."""
        world: dict[str, Any] = {
            "budget": budget,
            "stop": stop,
            **({} if late is None else {"late": late}),
        }
        if self.kind == "planner":
            given = Checkpoint.from_json(checkpoint)
            planner = planner_with(**options)
            world["arguments"] = arguments
            if not self.streamed:
                return _of_result(
                    await planner.resume(to.kernel, given, decisions, **world)
                )
            return await _last_of(
                planner.resume_stream(to.kernel, given, decisions, **world)
            )
        history = ChatHistory() if history is None else history
        if self.kind == "handler":
            handler = _handler(to, arguments, options)
            resume = handler.resume_stream if self.streamed else handler.resume
            return await _drained(
                resume(history, checkpoint, decisions, **world), history
            )
        settings = settings_with(options.pop("behavior", None))
        service = FunctionInvokingChatCompletion(to.service, **options)
        world |= {"kernel": to.kernel, "arguments": arguments}
        if self.streamed:
            return await _drained(
                service.resume_streaming(
                    history, checkpoint, decisions, settings, **world
                ),
                history,
            )
        return _of_message(
            await service.resume(history, checkpoint, decisions, settings, **world),
            history,
        )


DOORS = [
    Door(kind, streamed)
    for kind in ("planner", "service", "handler")
    for streamed in (False, True)
]
every_door = pytest.mark.parametrize("door", DOORS, ids=str)
"""Each door, plain and streamed: where the way in and out is what is checked."""
one_door = pytest.mark.parametrize("door", [DOORS[0]], ids=str)
"""One door: what the loop does behind all of them, where a test beside it goes through each."""
three_doors = pytest.mark.parametrize("door", [DOORS[0], DOORS[3], DOORS[4]], ids=str)
"""Each door once, one of them streamed: where a door passes on what the loop does, or keeps it in a history."""
two_doors = pytest.mark.parametrize("door", [DOORS[0], DOORS[3]], ids=str)
"""One plain and one streamed: for a long table that a door's own code takes part in."""
planner_doors = pytest.mark.parametrize("door", DOORS[:2], ids=str)
service_doors = pytest.mark.parametrize("door", DOORS[2:4], ids=str)
handler_doors = pytest.mark.parametrize("door", DOORS[4:], ids=str)
service_and_handler = pytest.mark.parametrize("door", DOORS[2:], ids=str)
"""The doors that write into the caller's history, plain and streamed."""
service_or_handler = pytest.mark.parametrize("door", [DOORS[2], DOORS[5]], ids=str)
"""Each of them once, one of them streamed: where both take a history in the same way."""
both_ways = pytest.mark.parametrize(
    "streamed", [False, True], ids=["plain", "streamed"]
)


def asked() -> ChatHistory:
    """Make a history with a question."""
    history = ChatHistory()
    history.add_user_message("Refund order 7.")
    return history


def settings_with(behavior: Any = None) -> PromptExecutionSettings:
    """Make settings that invoke functions without a bound."""
    unbounded = BoundedFunctionChoiceBehavior.Auto(maximum_use_attempts=None)
    return PromptExecutionSettings(function_choice_behavior=behavior or unbounded)


def planner_with(**options: Any) -> FunctionCallingStepwisePlanner:
    """Make a planner that makes no plan."""
    if (behavior := options.pop("behavior", None)) is not None:
        options["execution_settings"] = settings_with(behavior)
    return FunctionCallingStepwisePlanner(
        "scripted", FunctionCallingStepwisePlannerOptions(plan=False, **options)
    )


def _handler(to: World, arguments: Any, options: dict[str, Any]) -> ToolCallHandler:
    settings = settings_with(options.pop("behavior", None))
    return ToolCallHandler(to.kernel, arguments=arguments, settings=settings, **options)


def _of_result(result: Any) -> Outcome:
    return Outcome(
        status=result.status,
        text=result.final_answer,
        closing="",
        pending=[one.as_dict() for one in result.pending],
        checkpoint=result.checkpoint.to_json(),
        iterations=result.iterations,
        tool_calls=result.tool_calls,
        history=result.chat_history,
    )


def _of_message(message: Any, history: ChatHistory) -> Outcome:
    metadata = message.metadata
    return Outcome(
        status=metadata["status"],
        text=str(message),
        closing=str(message),
        pending=json.loads(json.dumps(metadata.get("pending", []))),
        checkpoint=metadata.get("checkpoint", ""),
        iterations=metadata["iterations"],
        tool_calls=metadata["tool_calls"],
        history=history,
    )


async def _last_of(events: Any) -> Outcome:
    async with aclosing(events):
        seen = [event async for event in events]
    assert isinstance(seen[-1], ResultReady)
    return _of_result(cast("ResultReady[Any]", seen[-1]).result)


async def _drained(messages: Any, history: ChatHistory) -> Outcome:
    """Read messages or chunks; the text is that of the assistant after the last results."""
    async with aclosing(messages):
        seen = [message async for message in messages]
    after = max(
        (place + 1 for place, message in enumerate(seen) if message.role == "tool"),
        default=0,
    )
    return replace(
        _of_message(seen[-1], history),
        text="".join(str(message) for message in seen[after:]),
    )


def check_sendable(history: ChatHistory) -> None:
    """Fail where OpenAI would refuse a history."""
    violation = find_violation(
        {
            "model": "any",
            "messages": [message.to_dict() for message in history.messages],
        }
    )
    assert violation is None, violation


def results(history: ChatHistory) -> list[str]:
    """List what the model reads of its calls, in order."""
    first = [message.items[0] for message in history.messages if message.role == "tool"]
    return [
        str(item.result) for item in first if isinstance(item, FunctionResultContent)
    ]


def decided(facts: list[Fact]) -> list[CallDecided]:
    """List the decisions among facts."""
    return [fact for fact in facts if isinstance(fact, CallDecided)]


def arguments_in(history: ChatHistory) -> list[Any]:
    """List the arguments of each call as a history shows them."""
    sent = [message.to_dict() for message in history.messages]
    return [
        json.loads(one["function"]["arguments"])
        for message in sent
        for one in message.get("tool_calls", ())
    ]


def requested(facts: list[Fact]) -> list[Any]:
    """List the arguments of each call as the model sent them."""
    return [
        json.loads(one.arguments)
        for fact in facts
        if isinstance(fact, ModelReplied)
        for one in fact.calls
    ]


def only(name: str, decision: Any) -> Any:
    """Make an interceptor that decides the calls of one function, and no others."""

    async def interceptor(call: ToolCall) -> Any:
        return decision if call.function_name == name else None

    return interceptor


ASKING_REFUND = only("refund", Defer("Sure?"))
"""Asks a person about every refund."""
