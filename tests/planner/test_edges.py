"""What holds of every run where the loop meets something else: functions that talk to a model, filters, interruptions.

Drawn runs over a real kernel: a planner or a handler, plain or streamed; functions that ask the kernel's model, start
an agent or call a function that needs approval; filters that retry, change or skip; arguments in many spellings; a
budget, a stop or a cancellation at any fact; decisions through JSON. The model is a script that counts its requests.

``PLANNER_EXT_EXAMPLES=2000`` looks longer, at other runs each time, and makes what it finds small.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event, given, settings
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import (
    ApprovalPolicy,
    Approve,
    Budget,
    Deny,
    ToolCallHandler,
    requires_approval,
)
from planner_ext.durable import effect
from planner_ext.engine.concurrency import StopHandle
from planner_ext.errors import PlannerExtError
from planner_ext.hitl_manager import Checkpoint, PendingCall
from planner_ext.testing import (
    ScriptedCall,
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    say,
)
from planner_ext.testing.rules import find_violation
from support.examples import tried
from support.planner import check_sendable, invoke, kernel_of, planner_with, resume
from support.stock import EVERY_HEALTH_CHECK

_ENDLESS = 40
"""Requests after which the model gives up: far over each budget, so that a run without bound fails, and ends."""

POLICY = {
    "default": "allow",
    "rules": [
        {
            "plugin": "bank",
            "function": "send",
            "arguments": {"account": {"equals": 7}},
            "action": "deny",
        },
        {
            "plugin": "bank",
            "function": "send",
            "arguments": {"amount": {"gt": 10}},
            "action": "ask",
        },
    ],
}
"""Nothing may be sent to account 7, and more than 10 only where a person approved it."""


@dataclass
class Bank:
    """Functions with effects; remembers what they did.

    Attributes:
        effects: Function, account and amount of each effect, as the function saw them.
        started: How many functions were started, those that ask a model included.
    """

    effects: list[tuple[str, int, float]] = field(default_factory=list)
    started: int = 0
    failing: bool = False

    def _do(self, name: str, account: int, amount: float) -> str:
        assert type(account) is int
        assert type(amount) is float
        self.started += 1
        self.effects.append((name, account, amount))
        if self.failing:
            raise RuntimeError("the line to the bank was cut")
        return f"{name} {account} {amount}"

    @requires_approval
    @kernel_function
    async def pay(self, account: int, amount: float = 5.0) -> str:
        return self._do("pay", account, amount)

    @kernel_function
    def send(self, account: int, amount: float = 5.0) -> str:
        return self._do("send", account, amount)

    @effect("idempotent")
    @kernel_function
    async def look(self, account: int) -> str:
        self.started += 1
        return f"{account} is open"


@dataclass
class Experts:
    """Functions that use the kernel that they are given: they ask its model, start an agent, call its functions."""

    bank: Bank

    @kernel_function
    async def consult(self, question: str, kernel: Kernel) -> str:
        self.bank.started += 1
        return str(
            await kernel.invoke_prompt(
                question, arguments=KernelArguments(settings=automatic())
            )
        )

    @kernel_function
    async def ask(self, question: str, kernel: Kernel) -> str:
        self.bank.started += 1
        parts = kernel.invoke_prompt_stream(
            question, arguments=KernelArguments(settings=automatic())
        )
        return "".join([str(piece) async for piece in parts])

    @kernel_function
    async def delegate(self, question: str, kernel: Kernel) -> str:
        self.bank.started += 1
        return str(
            await ChatCompletionAgent(kernel=kernel, name="delegate").get_response(
                question
            )
        )

    @kernel_function
    async def relay(self, account: int, kernel: Kernel) -> str:
        self.bank.started += 1
        given = KernelArguments(account=account, amount=20.0)
        return str(
            await kernel.invoke(
                plugin_name="bank", function_name="pay", arguments=given
            )
        )


def automatic() -> PromptExecutionSettings:
    """Ask for the kernel's functions to be called, as an application would of a stock connector."""
    return PromptExecutionSettings(
        function_choice_behavior=FunctionChoiceBehavior.Auto()
    )


# What a filter does around a function. All but the retrying ones know nothing of what was approved.


async def _retry(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    for _ in range(3):
        with suppress(Exception):
            await next(context)


async def _twice_at_once(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    await asyncio.gather(next(context), next(context))


async def _change(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    if "account" in context.arguments:
        context.arguments = KernelArguments(**{**context.arguments, "account": 7})
    await next(context)


async def _change_in_place(
    context: Any, next: Callable[[Any], Awaitable[None]]
) -> None:
    if "amount" in context.arguments:
        context.arguments["amount"] = 9000.0
    await next(context)


async def _skip(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    return None


async def _swap(context: Any, next: Callable[[Any], Awaitable[None]]) -> None:
    if context.function.name == "send":
        context.function = context.kernel.get_function("bank", "pay")
    await next(context)


FILTERS = {
    "retry": _retry,
    "twice at once": _twice_at_once,
    "change": _change,
    "change in place": _change_in_place,
    "skip": _skip,
    "swap": _swap,
}


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """One drawn run.

    Attributes:
        replies: What the model says, over and over.
        stubborn: Whether the model calls functions although none are offered.
        decisions: Taken one by one: approve, approve by name, edit, deny; then all are denied.
        interrupt: Cancel or stop the run once this many facts are recorded, or not at all.
    """

    door: str
    streamed: bool
    replies: tuple[ScriptedReply, ...]
    stubborn: bool
    filters: tuple[tuple[str, str], ...]
    budget: Budget
    decisions: tuple[str, ...]
    interrupt: tuple[str, int] | None
    failing: bool


accounts = st.sampled_from([7, "7", 7.0, " 7", "7.0", 8, "8", True, None, "x"])
amounts = st.sampled_from([20, "20", 20.0, "2e1", 5, " 5.0", None, "NaN", "much"])
payments = st.builds(
    lambda name, account, amount: ScriptedCall(
        name=name,
        arguments={"account": account} | ({} if amount is None else {"amount": amount}),
    ),
    st.sampled_from(["bank-pay", "bank-send"]),
    accounts,
    amounts,
)
looks = st.builds(
    lambda account: ScriptedCall(name="bank-look", arguments={"account": account}),
    accounts,
)
questions = st.builds(
    lambda name: ScriptedCall(name=name, arguments={"question": "What now?"}),
    st.sampled_from(
        ["experts-consult", "experts-ask", "experts-delegate", "prompts-expert"]
    ),
)
relays = st.builds(
    lambda account: ScriptedCall(name="experts-relay", arguments={"account": account}),
    accounts,
)
unknown = st.sampled_from(
    ["functions.bank-pay", "bank-pay<|channel|>commentary", "", "n" * 65]
).map(lambda name: ScriptedCall(name=name, arguments={"account": 7}))
batches = st.lists(
    st.one_of(payments, payments, looks, questions, relays, unknown),
    min_size=1,
    max_size=4,
).map(lambda batch: ScriptedReply(calls=tuple(batch)))
budgets = st.builds(
    Budget,
    max_iterations=st.integers(1, 6),
    max_tool_calls=st.none() | st.integers(0, 6),
    max_repeated_calls=st.none() | st.integers(1, 2),
    max_consecutive_errors=st.none() | st.integers(1, 3),
    on_limit=st.sampled_from(["answer", "stop", "return_calls"]),
    batch_over_limit=st.sampled_from(["reject_batch", "fill_remaining"]),
)
scenarios = st.builds(
    Scenario,
    door=st.sampled_from(["planner", "handler"]),
    streamed=st.booleans(),
    replies=st.lists(
        batches | batches | st.just(say("Done.")), min_size=1, max_size=5
    ).map(tuple),
    stubborn=st.booleans(),
    filters=st.lists(
        st.tuples(
            st.sampled_from(["function_invocation", "auto_function_invocation"]),
            st.sampled_from(list(FILTERS)),
        ),
        max_size=2,
    ).map(tuple),
    budget=budgets,
    decisions=st.lists(
        st.sampled_from(["approve", "by", "edit", "deny"]), max_size=6
    ).map(tuple),
    interrupt=st.none()
    | st.tuples(st.sampled_from(["cancel", "stop"]), st.integers(1, 12)),
    failing=st.booleans(),
)


class World:
    """The kernel, the model and the people of one scenario, and what is known of its run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.bank = Bank(failing=scenario.failing)
        self.model = ScriptedChatCompletion(self._reply, service_id="chat")
        self.kernel = kernel_of(self.model, bank=self.bank, experts=Experts(self.bank))
        self.kernel.add_function(
            "prompts",
            function_name="expert",
            prompt="{{$question}}",
            prompt_execution_settings=automatic(),
        )
        for kind, name in scenario.filters:
            self.kernel.add_filter(kind, FILTERS[name])  # pyright: ignore[reportArgumentType]  # the name of a kind
        self.approved: Counter[tuple[str, int, float]] = Counter()
        self.stop = StopHandle()
        self.facts = 0
        self.cancelled = False
        self._left = list(scenario.decisions)
        self._task: asyncio.Task[Any] | None = None
        options: dict[str, Any] = {
            "interceptors": [ApprovalPolicy.from_dict(POLICY)],
            "budget": scenario.budget,
        }
        options["observers"] = [self._observe]
        self.planner = planner_with("chat", plan=False, max_iterations=None, **options)
        self.handler = ToolCallHandler(self.kernel, service_id="chat", **options)
        self.history = ChatHistory()
        self.history.add_user_message("Pay the bill.")

    def _reply(self, request: ScriptedRequest) -> ScriptedReply:
        if request.index < _ENDLESS and (request.tools or self.scenario.stubborn):
            return self.scenario.replies[request.index % len(self.scenario.replies)]
        return say("Done.")

    def _observe(self, fact: object) -> None:
        self.facts += 1
        if self.scenario.interrupt is None or self.facts != self.scenario.interrupt[1]:
            return
        if self.scenario.interrupt[0] == "stop":
            self.stop.stop("enough")
        elif self._task is not None:
            self._task.cancel()
            self.cancelled = True

    async def play(self) -> None:
        """Run; decide what waits, through JSON, up to four times."""
        end = await self._driven(self._begin())
        for _ in range(4):
            self._check()
            if end is None or end[0] not in ("paused", "asked"):
                break
            _, text, pending = end
            end = await self._driven(
                self._resumed(text, {call.id: self._decide(call) for call in pending})
            )
        self._check()

    async def _driven(
        self, run: Awaitable[Any]
    ) -> tuple[str, str, list[PendingCall]] | None:
        self._task = asyncio.ensure_future(run)
        try:
            return await self._task
        except asyncio.CancelledError as error:
            assert self.cancelled
            checkpoint = getattr(error, "checkpoint", None)
            if checkpoint is not None and self.scenario.door == "planner":
                check_sendable(getattr(error, "chat_history", None))
            return None
        except PlannerExtError as error:
            event(f"raised {type(error).__name__}")
            raise

    async def _begin(self) -> Any:
        if self.scenario.door == "planner":
            result = await invoke(
                self.planner,
                self.kernel,
                streamed=self.scenario.streamed,
                stop=self.stop,
            )
            return self._ended(result)
        ways = (
            self.handler.invoke_stream
            if self.scenario.streamed
            else self.handler.invoke
        )
        return self._returned(
            [message async for message in ways(self.history, stop=self.stop)][-1]
        )

    async def _resumed(self, text: str, decisions: dict[str, Any]) -> Any:
        if self.scenario.door == "planner":
            checkpoint = Checkpoint.from_json(text)
            result = await resume(
                self.planner,
                self.kernel,
                checkpoint,
                streamed=self.scenario.streamed,
                decisions=decisions,
                stop=self.stop,
            )
            return self._ended(result)
        ways = (
            self.handler.resume_stream
            if self.scenario.streamed
            else self.handler.resume
        )
        messages = [
            message
            async for message in ways(self.history, text, decisions, stop=self.stop)
        ]
        return self._returned(messages[-1])

    def _ended(self, result: Any) -> tuple[str, str, list[PendingCall]]:
        event(f"planner {result.status}, {result.limit}")
        self._check_counts(result.iterations, result.tool_calls)
        state = result.checkpoint.state()
        if state.ended is None or not state.ended.returned:
            check_sendable(result.chat_history)
        return result.status, result.checkpoint.to_json(), list(result.pending)

    def _returned(self, message: Any) -> tuple[str, str, list[PendingCall]]:
        metadata = message.metadata
        event(f"handler {metadata['status']}, {metadata['limit']}")
        self._check_counts(metadata["iterations"], metadata["tool_calls"])
        waiting = metadata.get("pending") or []
        pending = [
            PendingCall(
                **{
                    name: call[name]
                    for name in (
                        "id",
                        "fully_qualified_name",
                        "arguments",
                        "fingerprint",
                    )
                }
            )
            for call in waiting
        ]
        return metadata["status"], metadata.get("checkpoint") or "", pending

    def _decide(self, call: PendingCall) -> Any:
        choice = self._left.pop(0) if self._left else "deny"
        name, arguments = (
            call.fully_qualified_name.removeprefix("bank-"),
            dict(call.arguments),
        )
        if choice == "deny" or name not in ("pay", "send"):
            return Deny("no")
        if choice == "edit":
            arguments = {"account": 8, "amount": 3.0}
        self.approved[(name, arguments["account"], arguments.get("amount", 5.0))] += 1
        return Approve(
            arguments=arguments if choice == "edit" else None,
            by="ann" if choice == "by" else None,
        )

    def _check_counts(self, iterations: int, tool_calls: int) -> None:
        assert self.cancelled or iterations == len(self.model.requests)
        assert tool_calls >= self.bank.started

    def _check(self) -> None:
        """Hold what the model and the bank saw against what was allowed."""
        budget = self.scenario.budget
        assert budget.max_iterations is not None
        assert len(self.model.requests) <= budget.max_iterations, "over the round trips"
        assert (
            budget.max_tool_calls is None or self.bank.started <= budget.max_tool_calls
        ), "over the calls"
        done = Counter(self.bank.effects)
        for (name, account, amount), count in done.items():
            needs = name == "pay" or account == 7 or amount > 10
            assert not (
                name == "send"
                and account == 7
                and not self.approved[(name, account, amount)]
            ), "denied"
            assert not needs or count <= self.approved[(name, account, amount)], (
                "nobody approved it"
            )
        for request in self.model.requests:
            assert (
                find_violation({"model": "any", "messages": request.messages}) is None
            )


@settings(tried(150), suppress_health_check=EVERY_HEALTH_CHECK)
@given(scenario=scenarios)
def test_at_every_edge_the_budget_holds_and_nothing_unapproved_happens(
    scenario: Scenario,
) -> None:
    """No request and no call too many, no effect that was denied or not approved, every history fit to be sent."""
    asyncio.run(World(scenario).play())
