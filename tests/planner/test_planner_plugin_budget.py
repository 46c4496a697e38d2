"""One budget for a run and all its nested runs: never exceeded, at two levels, side by side."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.functions import kernel_function

from planner_ext import Budget
from planner_ext.events import CallStarted
from planner_ext.iteration import ToolExecution
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.examples import tried
from support.planner import ADD, Clock, Math, invoke, kernel_of, planner_with
from support.stock import EVERY_HEALTH_CHECK

LEVELS = ("chat", "expert", "helper")
BELOW = {"chat": "expert", "expert": "helper"}


@dataclass(frozen=True)
class Mind:
    """What a model does, turn by turn: nested calls and plain ones in each; (0, 0) is an answer."""

    turns: tuple[tuple[int, int], ...]
    fails_at: int | None = None

    def script(self, level: str) -> Callable[[ScriptedRequest], ScriptedReply]:
        """Play the turns over and over."""

        def reply(request: ScriptedRequest) -> ScriptedReply:
            if request.index == self.fails_at:
                raise RuntimeError("no line")
            nested, plain = self.turns[request.index % len(self.turns)]
            below = (
                [call(f"{BELOW[level]}-reach_goal", {"goal": "go"})] * nested
                if level in BELOW
                else []
            )
            asked = [*below, *[ADD] * plain]
            return calls(*asked) if request.tools and asked else say("answer")

        return reply


minds = st.builds(
    Mind,
    turns=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=1, max_size=4
    ).map(tuple),
    fails_at=st.sampled_from([None, None, None, 0, 2]),
)
budgets = st.builds(
    dict,
    max_iterations=st.integers(1, 25),
    max_tool_calls=st.one_of(st.none(), st.integers(0, 20)),
    on_limit=st.sampled_from(["answer", "stop", "return_calls"]),
    batch_over_limit=st.sampled_from(["reject_batch", "fill_remaining"]),
)


@dataclass
class World:
    """A planner with a planner inside, which has another one inside, and what their models were asked."""

    kernel: Kernel
    services: dict[str, ScriptedChatCompletion]
    math: Math

    @property
    def requests(self) -> int:
        """Count the requests at every service."""
        return sum(len(service.requests) for service in self.services.values())


def world(chat: Mind, expert: Mind, helper: Mind, **options: Any) -> World:
    """Build the kernel."""
    minds = dict(zip(LEVELS, (chat, expert, helper), strict=True))
    services = {
        name: ScriptedChatCompletion(mind.script(name), service_id=name)
        for name, mind in minds.items()
    }
    math = Math()
    kernel = kernel_of(*services.values(), math=math)
    for name in LEVELS[1:]:
        kernel.add_plugin(
            PlannerPlugin(planner_with(name, plan=False, **options)), name
        )
    return World(kernel, services, math)


@settings(tried(40), suppress_health_check=EVERY_HEALTH_CHECK)
@given(
    chat=minds,
    expert=minds,
    helper=minds,
    budget=budgets,
    plan=st.booleans(),
    concurrency=st.sampled_from([None, 1]),
)
def test_trips_and_calls_of_all_runs_together_never_exceed_the_budget(
    chat: Mind,
    expert: Mind,
    helper: Mind,
    budget: dict[str, Any],
    plan: bool,
    concurrency: int | None,
) -> None:
    """Requests at all services, and functions started in all runs, are within the outermost budget, and charged."""
    chat = Mind(chat.turns)  # a fault of the outermost model is no end of a run
    seen = world(chat, expert, helper, max_iterations=None)
    planner = planner_with(
        "chat",
        plan=plan,
        budget=Budget(**budget),
        execution=ToolExecution(max_concurrency=concurrency),
    )
    result = asyncio.run(invoke(planner, seen.kernel, streamed=False))
    assert seen.requests <= result.iterations <= budget["max_iterations"]
    started = len(seen.math.sums) + sum(
        isinstance(fact, CallStarted) for fact in result.facts
    )
    if budget["max_tool_calls"] is not None:
        assert result.tool_calls <= budget["max_tool_calls"]
        assert len(seen.math.sums) <= result.tool_calls <= budget["max_tool_calls"]
    if expert.fails_at is None and helper.fails_at is None:
        assert seen.requests == result.iterations
        assert started >= result.tool_calls - _calls_to_helpers(seen, expert)


def _calls_to_helpers(seen: World, expert: Mind) -> int:
    """Count the nested calls that the second level asked for, of which the outermost journal does not tell.

    One that found nothing left was started, and made no request.
    """
    asked = [request for request in seen.services["expert"].requests if request.tools]
    return sum(expert.turns[request.index % len(expert.turns)][0] for request in asked)


@settings(tried(20), suppress_health_check=EVERY_HEALTH_CHECK)
@given(chat=minds, expert=minds, helper=minds, tokens=st.integers(50, 3000))
def test_the_usage_is_the_sum_of_all_requests(
    chat: Mind, expert: Mind, helper: Mind, tokens: int
) -> None:
    """Tokens and cost of every request are in the outermost usage; past the limit none begins but the forced answer."""
    chat, expert, helper = Mind(chat.turns), Mind(expert.turns), Mind(helper.turns)
    charged: list[int] = []
    begun_within_limit: list[int] = []

    def price(model: str, usage: Any) -> float:
        if sum(charged) < tokens:
            begun_within_limit.append(seen.requests)
        charged.append(usage.total_tokens)
        return usage.total_tokens / 1000

    seen = world(chat, expert, helper, max_iterations=None)
    budget = Budget(max_iterations=20, max_total_tokens=tokens, max_cost=100.0)
    planner = planner_with("chat", plan=False, budget=budget, price=price)
    result = asyncio.run(invoke(planner, seen.kernel, streamed=False))
    assert result.usage.total_tokens == sum(charged)
    assert result.usage.cost is not None
    assert round(result.usage.cost - sum(charged) / 1000, 9) == 0
    assert seen.requests <= max(begun_within_limit) + 1


async def test_a_nested_run_keeps_the_deadline_of_the_run_around() -> None:
    """Once the deadline has passed inside, neither run makes another request."""
    clock = Clock()

    class Slow:
        @kernel_function(description="Takes its time.")
        async def wait(self) -> str:
            clock.seconds += 100.0
            return "waited"

    chat = ScriptedChatCompletion(
        [call("expert-reach_goal", {"goal": "go"}), say("late")], service_id="chat"
    )
    expert = ScriptedChatCompletion(
        lambda request: call("slow-wait") if request.tools else say("late inside"),
        service_id="expert",
    )
    kernel = kernel_of(chat, expert, slow=Slow())
    kernel.add_plugin(
        PlannerPlugin(planner_with("expert", plan=False, clock=clock)), "expert"
    )
    budget = Budget(deadline=datetime.fromtimestamp(clock.seconds + 50, UTC))
    result = await invoke(
        planner_with("chat", plan=False, budget=budget, clock=clock),
        kernel,
        streamed=False,
    )
    assert result.status == "limit_reached"
    assert result.limit == "deadline"
    assert result.final_answer == ""
    assert (len(expert.requests), len(chat.requests)) == (1, 1)
