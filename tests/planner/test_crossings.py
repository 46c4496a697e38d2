"""Everything at once: questions, approvals, nested runs, an answer in a form, every limit, and a resume after each end.

For all models and options, the budget holds, every history can be sent, and a run that came to any end
but an answer continues from JSON.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from semantic_kernel.functions import kernel_function

from planner_ext import (
    Approve,
    Budget,
    Deny,
    FunctionCallingStepwisePlannerResult,
    requires_approval,
)
from planner_ext.errors import LimitReachedError
from planner_ext.events import CallFinished
from planner_ext.hitl_manager import (
    ApprovalSettings,
    Checkpoint,
    Clarification,
    PendingCall,
    Question,
    Supply,
)
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from planner_ext.testing.rules import find_violation
from support.examples import tried
from support.planner import (
    ADD,
    check_sendable,
    final,
    invoke,
    kernel_of,
    planner_with,
    resume,
)
from support.stock import EVERY_HEALTH_CHECK

ASK = call("UserInteraction-AskUser", {"question": "Where?"})
RISKY = call("math-risky")
NEST = call("expert-reach_goal", {"goal": "go"})
IN_FORM = '{"total": 3}'

turns = st.sampled_from(
    [
        *(
            ADD,
            ASK,
            RISKY,
            NEST,
            call("math-fail"),
            call("no-such"),
            call("math-add", "{bad"),
        ),
        *(
            calls(ADD, ASK),
            calls(ASK, RISKY, ADD),
            calls(ASK, ASK),
            calls(NEST, NEST),
            calls(NEST, ASK, RISKY),
        ),
        *(
            final("x"),
            final(IN_FORM),
            final(""),
            say("prose"),
            say("Where?"),
            say(IN_FORM),
            say(""),
        ),
        *(
            ScriptedReply(text="cut", finish_reason="length"),
            ScriptedReply(text="beside", calls=ADD.calls),
        ),
    ]
)
scripts = st.lists(turns, min_size=1, max_size=6)


class Sum(BaseModel):
    """A form of the answer."""

    total: int


@dataclass
class Tools:
    """Functions that count how often they ran."""

    ran: int = 0

    @kernel_function(description="Adds.")
    async def add(self, a: int, b: int) -> int:
        self.ran += 1
        return a + b

    @kernel_function(description="Fails.")
    async def fail(self) -> str:
        self.ran += 1
        raise RuntimeError("broken")

    @requires_approval
    @kernel_function(description="Does harm.")
    async def risky(self) -> str:
        self.ran += 1
        return "done"


@dataclass
class Friend:
    """A clarifier that answers as told, and may charge a round trip for it."""

    answers: tuple[str | None, ...]
    costs: bool
    charged: int = 0
    seen: int = 0

    async def __call__(self, question: Question) -> Clarification | None:
        self.seen += 1
        if self.costs and question.trips_left is not None and question.trips_left < 1:
            return None
        self.charged += self.costs
        return Clarification(
            text=self.answers[self.seen % len(self.answers)], iterations=int(self.costs)
        )


friends = st.one_of(
    st.none(),
    st.builds(
        Friend,
        st.sampled_from([("Oslo",), (None,), ("Oslo", None)]),
        costs=st.booleans(),
    ),
)
options = st.fixed_dictionaries(
    {
        "plan": st.booleans(),
        "control": st.sampled_from(["iterations_metadata", "use_attempts"]),
        "require_final_answer_function": st.booleans(),
        "response_format": st.sampled_from([None, Sum]),
        "max_clarifications": st.sampled_from([None, 0, 1, 2]),
        "approval": st.builds(
            ApprovalSettings,
            on_denial=st.sampled_from(["refuse", "reask", "return_calls"]),
            on_deferred=st.sampled_from(["hold_all", "run_safe_first"]),
        ),
    }
)
budgets = st.builds(
    Budget,
    max_iterations=st.integers(1, 9),
    max_tool_calls=st.sampled_from([None, 0, 1, 3]),
    max_total_tokens=st.sampled_from([None, 200, 800]),
    max_consecutive_errors=st.sampled_from([None, 1, 2]),
    max_repeated_calls=st.sampled_from([None, 1, 2]),
    max_repeated_denials=st.sampled_from([None, 1]),
    on_limit=st.sampled_from(["answer", "stop", "raise", "return_calls"]),
    batch_over_limit=st.sampled_from(["reject_batch", "fill_remaining"]),
    last_trip=st.sampled_from(["withdraw", "none"]),
    tell_budget=st.sampled_from([False, True, 0.5]),
)


@dataclass
class World:
    """The models, the functions and the person, with what they saw; and what may be spent by now."""

    chat: ScriptedChatCompletion
    expert: ScriptedChatCompletion
    budget: Budget
    friend: Friend | None
    choices: list[int]
    tools: Tools = field(default_factory=Tools)

    def check_spent(self, end: Any) -> None:
        """Hold what was charged against what was seen to happen, and against the budget."""
        made = (
            len(self.chat.requests)
            + len(self.expert.requests)
            + (self.friend.charged if self.friend else 0)
        )
        lost = any(
            isinstance(fact, CallFinished) and fact.outcome != "ok"
            for fact in end.checkpoint.facts
        )
        assert made == end.iterations or (lost and made < end.iterations)
        assert end.iterations <= (self.budget.max_iterations or 0)
        assert self.tools.ran <= end.tool_calls
        assert (
            self.budget.max_tool_calls is None
            or end.tool_calls <= self.budget.max_tool_calls
        )
        for request in (*self.chat.requests, *self.expert.requests):
            assert (
                find_violation({"model": "any", "messages": request.messages}) is None
            )

    def larger(self) -> Budget:
        """Allow three round trips and two calls more, and lift the other limits."""
        allowed = self.budget
        trips, calls_ = (allowed.max_iterations or 0) + 3, allowed.max_tool_calls
        self.budget = replace(
            allowed,
            max_iterations=trips,
            max_tool_calls=None if calls_ is None else calls_ + 2,
            max_total_tokens=None,
            max_repeated_calls=None,
        )
        return self.budget

    def decision(self, pending: PendingCall) -> Any:
        """Decide as the choices say."""
        choice = self.choices.pop() if self.choices else 0
        if pending.fully_qualified_name == "UserInteraction-AskUser":
            return (Supply("Oslo"), Supply({"city": ["Oslo"]}), Deny("no"))[choice]
        return (Approve(), Deny("no"), Supply(3))[choice]


def endlessly(
    script: list[ScriptedReply],
) -> Callable[[ScriptedRequest], ScriptedReply]:
    """Play a script over and over."""
    return lambda request: script[request.index % len(script)]


def checked_status(
    end: FunctionCallingStepwisePlannerResult | LimitReachedError, *, in_form: bool
) -> str:
    """Look at how a run ended."""
    if isinstance(end, LimitReachedError):
        return "limit_reached"
    if end.status == "answered":
        assert end.final_answer
        assert (end.value is not None) == in_form
    assert bool(end.pending) == (end.status in ("paused", "asked"))
    return end.status


async def ended(run: Awaitable[FunctionCallingStepwisePlannerResult]) -> Any:
    """Wait for a run; a limit that is raised is an end, too."""
    try:
        return await run
    except LimitReachedError as error:
        return error


@settings(tried(60), suppress_health_check=EVERY_HEALTH_CHECK)
@given(
    chat=scripts,
    expert=scripts,
    given_options=options,
    budget=budgets,
    friend=friends,
    streamed=st.booleans(),
    choices=st.lists(st.integers(0, 2), max_size=12),
)
def test_the_budget_holds_and_the_run_continues_at_every_crossing(
    chat: list[ScriptedReply],
    expert: list[ScriptedReply],
    given_options: dict[str, Any],
    budget: Budget,
    friend: Friend | None,
    streamed: bool,
    choices: list[int],
) -> None:
    """Charged is what was seen; nothing exceeds the budget; each end is sendable, and resumes from its JSON."""
    outer = ScriptedChatCompletion(endlessly(chat), service_id="chat")
    inner = ScriptedChatCompletion(endlessly(expert), service_id="expert")
    world = World(outer, inner, budget, friend and replace(friend), choices)
    asyncio.run(play(world, given_options, streamed=streamed))


async def play(world: World, given_options: dict[str, Any], *, streamed: bool) -> None:
    """Run, and resume four times: with decisions where the run waits, with a larger budget where it ended."""
    kernel = kernel_of(world.chat, world.expert, math=world.tools)
    kernel.add_plugin(
        PlannerPlugin(planner_with("expert", plan=False, max_iterations=None)), "expert"
    )
    planner = planner_with(
        "chat",
        budget=world.budget,
        max_iterations=None,
        clarifier=world.friend,
        **given_options,
    )
    end = await ended(invoke(planner, kernel, streamed=streamed))
    for _ in range(4):
        world.check_spent(end)
        status = checked_status(
            end, in_form=given_options["response_format"] is not None
        )
        state = end.checkpoint.state()
        if state.ended is None or not state.ended.returned:
            check_sendable(end.chat_history)
        if status == "answered":
            return
        text = end.checkpoint.to_json()
        checkpoint = Checkpoint.from_json(text)
        assert checkpoint.to_json() == text
        if status in ("paused", "asked"):
            decisions = {
                pending.path: world.decision(pending) for pending in end.pending
            }
            end = await ended(
                resume(
                    planner, kernel, checkpoint, streamed=streamed, decisions=decisions
                )
            )
        else:
            end = await ended(
                resume(
                    planner,
                    kernel,
                    checkpoint,
                    streamed=streamed,
                    budget=world.larger(),
                )
            )
