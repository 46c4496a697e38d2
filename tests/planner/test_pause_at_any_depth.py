"""What waits inside: the outermost run shows it, is resumed by its path, and each run goes on where it stood."""

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel
from semantic_kernel import Kernel
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.contents import FunctionResultContent
from semantic_kernel.functions import KernelArguments, kernel_function
from semantic_kernel.functions.kernel_function_from_prompt import (
    KernelFunctionFromPrompt,
)

from planner_ext import (
    ApprovalSettings,
    Approve,
    Budget,
    Checkpoint,
    Defer,
    Deny,
    FunctionCallingStepwisePlanner,
    Supply,
)
from planner_ext.core.facts import CallStarted, HappenedInside, unwrapped
from planner_ext.durable import effect
from planner_ext.errors import (
    DecisionRefusedError,
    PlannerInvalidConfigurationError,
)
from planner_ext.iteration import AnswerContext
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.desks import TWO, Bank, Hidden, World, goal_in, once, pays, tool_results
from support.inside import auto
from support.planner import both_ways, invoke, planner_with

pytestmark = pytest.mark.filterwarnings(
    "ignore::pydantic.warnings.PydanticDeprecationWarning"
)


CLERK = call("clerk-reach_goal", {"goal": "Pay 3."})


@both_ways
async def test_what_waits_inside_is_pending_with_path_and_goal(streamed: bool) -> None:
    """At any depth, also two in one batch; nothing of it has run, everything before it once."""
    world = World(once(TWO))
    result = await invoke(world.planner, world.kernel, streamed=streamed)
    assert result.status == "paused"
    waiting = [(one.path, one.goal, one.arguments) for one in result.pending]
    assert waiting == [
        ("call_1/call_2/call_2", "Pay 1.", {"account": 1}),
        ("call_2/call_1", "Pay 2.", {"account": 2}),
    ]
    assert (world.bank.paid, world.bank.looked) == ([], 1)
    assert result.iterations == world.sent


async def test_each_run_goes_on_where_it_stood() -> None:
    """Decided one after the other, by path: nothing runs twice, each request is charged once."""
    world = World(once(TWO))
    first = await world.planner.invoke(world.kernel, "Go.")
    second = await world.resume(first, {"call_2/call_1": Approve(by="ann")})
    assert (second.status, world.bank.paid) == ("paused", [2])
    assert [one.path for one in second.pending] == ["call_1/call_2/call_2"]
    last = await world.resume(second, {"call_1/call_2/call_2": Approve(by="ben")})
    assert (last.status, last.final_answer) == ("answered", "seen paid 1 paid 2")
    assert (world.bank.paid, world.bank.looked) == ([2, 1], 1)
    assert (last.iterations, last.tool_calls) == (world.sent, 6)
    decided = [(one.call, one.by) for one in last.decisions]
    assert decided == [("call_2/call_1", "ann"), ("call_1/call_2/call_2", "ben")]


async def test_the_model_inside_reads_the_decision() -> None:
    """A denial, a supplied result and an edit are for the run that made the call."""
    world = World(once(TWO))
    paused = await world.planner.invoke(world.kernel, "Go.")
    result = await world.resume(
        paused,
        {
            "call_1/call_2/call_2": Deny("too much", by="ann"),
            "call_2/call_1": Approve(by="ann", arguments={"account": 7}),
        },
    )
    clerk = world.services["clerk"].requests
    read = [text for request in clerk for text in tool_results(request)]
    assert sorted(read) == [
        "The call was refused and did not run: too much",
        "paid 7",
    ]
    assert world.bank.paid == [7]
    assert result.status == "answered"


async def test_a_run_inside_keeps_its_own_budget_at_a_pause() -> None:
    """What it may spend was spent before: it ends by itself, and its function has a result."""
    world = World(
        once(call("clerk-reach_goal", {"goal": "Pay 3."})),
        inner={"max_iterations": 1, "budget": Budget(on_limit="stop")},
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    assert paused.status == "answered"  # its last round trip offers no functions
    world = World(
        once(call("clerk-reach_goal", {"goal": "Pay 3."})),
        inner={"max_iterations": 2, "budget": Budget(max_tool_calls=1)},
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    result = await world.resume(paused, {"call_1/call_1": Approve(by="ann")})
    assert (result.status, world.bank.paid) == ("answered", [3])


async def test_a_larger_budget_around_is_there_for_the_run_that_goes_on() -> None:
    """What is left around is drawn live, and is not frozen into the run inside."""
    world = World(
        once(call("clerk-reach_goal", {"goal": "Pay 3."})),
        options={"max_iterations": 3, "budget": Budget(on_limit="stop")},
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    checkpoint = Checkpoint.from_json(paused.checkpoint.to_json())
    result = await world.new_planner().resume(
        world.kernel,
        checkpoint,
        {"call_1/call_1": Approve(by="ann")},
        budget=Budget(max_iterations=5),
    )
    assert (result.status, result.iterations) == ("answered", 4)


async def test_cancel_ends_the_runs_at_every_depth() -> None:
    """Nothing runs, and each run inside has its own end in the journal."""
    world = World(once(TWO))
    paused = await world.planner.invoke(world.kernel, "Go.")
    result = world.planner.cancel(paused.checkpoint, by="bob", reason="enough")
    ends = [unwrapped(fact) for fact in result.facts if fact.type == "HappenedInside"]
    assert sum(fact.type == "Ended" for fact in ends) == 3
    assert (result.status, world.bank.paid) == ("stopped", [])
    assert result.chat_history is not None
    results = [
        item.result
        for message in result.chat_history.messages
        for item in message.items
        if isinstance(item, FunctionResultContent)
    ]
    assert results == ["Ended while it waited for a person's decision."] * 2


@both_ways
async def test_a_question_of_a_run_inside_travels_the_same_way(streamed: bool) -> None:
    """It is pending with its path, and its answer is for the model that asked."""

    def asks(request: ScriptedRequest) -> ScriptedReply:
        read = tool_results(request)
        asked = call("UserInteraction-AskUser", {"question": "Which account?"})
        return say(f"It is {read[0]}.") if read else asked

    world = World(once(call("expert-reach_goal", {"goal": "Ask."})), expert=asks)
    world.kernel.plugins.pop("expert")
    expert = planner_with("expert", plan=False, max_clarifications=2)
    world.kernel.add_plugin(PlannerPlugin(expert), "expert")
    result = await invoke(world.planner, world.kernel, streamed=streamed)
    assert (result.status, [one.path for one in result.pending]) == (
        "asked",
        ["call_1/call_1"],
    )
    answered = await world.resume(result, {"call_1/call_1": Supply("seven", by="ann")})
    assert answered.final_answer == "It is seven."


async def test_roles_of_every_run_around_and_the_own_hook_are_asked() -> None:
    """A decision inside needs each hook's leave; a refused one leaves the call waiting."""
    asked: list[tuple[str, str]] = []

    async def outer(request: Any) -> bool:
        asked.append(("outer", request.call.path))
        return True

    async def inner(request: Any) -> bool | str:
        asked.append(("inner", request.call.path))
        return request.by == "boss" or "only the boss"

    world = World(
        once(call("clerk-reach_goal", {"goal": "Pay 3."})),
        options={"approval": ApprovalSettings(authorize=outer)},
        inner={
            "approval": ApprovalSettings(authorize=inner),
            "interceptors": [
                lambda one: (
                    Defer(roles=["boss"]) if one.function_name == "pay" else None
                )
            ],
        },
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    boss = {"call_1/call_1": Approve(by="boss")}
    with pytest.raises(DecisionRefusedError, match="only the boss") as refused:
        await world.resume(paused, {"call_1/call_1": Approve(by="ann")})
    assert refused.value.call_id == "call_1/call_1"
    again = await world.resume(
        paused, boss
    )  # the mark is answered, the rule inside is not
    assert (again.pending[0].roles, world.bank.paid) == (("boss",), [])
    result = await world.resume(again, boss)
    assert (result.status, world.bank.paid) == ("answered", [3])
    assert {who for who, _ in asked} == {"outer", "inner"}
    assert {path for _, path in asked} == {"call_1/call_1"}


async def test_a_decision_is_taken_once_at_any_depth() -> None:
    """Another resume of the same checkpoint with the same planner is refused, and names the path."""
    world = World(once(TWO))
    paused = await world.planner.invoke(world.kernel, "Go.")
    decisions = {"call_2/call_1": Approve(by="ann")}
    again = await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    with pytest.raises(DecisionRefusedError, match="call_2/call_1"):
        await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    assert world.bank.paid == [2]
    other = {"call_1/call_2/call_2": Approve(by="ann")}
    result = await world.planner.resume(world.kernel, again.checkpoint, other)
    assert (result.status, world.bank.paid) == ("answered", [2, 1])


@pytest.mark.parametrize("change", ["missing", "replaced"])
async def test_a_decision_is_used_up_only_by_a_start(change: str) -> None:
    """If the function around is missing, or another one has its name, it is refused by name; the call still waits."""
    world = World(once(call("clerk-reach_goal", {"goal": "Pay 3."})))
    paused = await world.planner.invoke(world.kernel, "Go.")
    planner = world.kernel.plugins.pop("clerk")
    if change == "replaced":

        class Other:
            @kernel_function(name="reach_goal", description="Another one.")
            async def reach_goal(self, goal: str) -> str:
                raise AssertionError("another function has run")

        world.kernel.add_plugin(Other(), "clerk")
    decisions = {"call_1/call_1": Approve(by="ann")}
    with pytest.raises(DecisionRefusedError, match="clerk-reach_goal is not here"):
        await world.resume(paused, decisions)
    world.kernel.plugins["clerk"] = planner
    result = await world.resume(paused, decisions)
    assert (result.status, world.bank.paid) == ("answered", [3])


async def test_an_approval_for_the_rest_of_the_run_is_that_runs_own() -> None:
    """An outer "always" frees no call inside, and an inner one no call around."""

    def pays_twice(request: ScriptedRequest) -> ScriptedReply:
        done = len(tool_results(request))
        return say("done") if done == 2 else call("bank-pay", {"account": done})

    top = calls(
        call("bank-pay", {"account": 9}),
        call("expert-reach_goal", {"goal": "Twice."}),
    )
    world = World(
        once(top),
        expert=pays_twice,
        options={"approval": ApprovalSettings(on_deferred="run_safe_first")},
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    paths = [one.path for one in paused.pending]
    assert paths == ["call_1", "call_2/call_1"]
    always = Approve(by="ann", always="function")
    paused = await world.resume(paused, {"call_1": always})
    assert [one.path for one in paused.pending] == ["call_2/call_1"]
    result = await world.resume(paused, {"call_2/call_1": always})
    assert (result.status, world.bank.paid) == ("answered", [9, 0, 1])


async def test_a_question_inside_is_open_as_long_as_each_run_around_allows() -> None:
    """The shortest expiry counts."""
    world = World(
        once(call("clerk-reach_goal", {"goal": "Pay 3."})),
        options={"approval": ApprovalSettings(expires_in=60.0)},
        inner={"approval": ApprovalSettings(expires_in=600.0)},
    )
    paused = await world.planner.invoke(world.kernel, "Go.")
    (waiting,) = paused.pending
    asked_at = paused.facts[-1].at
    assert waiting.expires_at is not None
    assert waiting.expires_at.timestamp() == pytest.approx(asked_at + 60.0, abs=5.0)


@dataclass
class Own:
    """Code of the application around runs."""

    planner: FunctionCallingStepwisePlanner
    started: int = 0
    goal: str = "Pay 4."

    @effect("idempotent")
    @kernel_function(description="Works.")
    async def work(self, kernel: Hidden) -> str:
        self.started += 1
        first = await self.planner.invoke(kernel, self.goal)
        second = await kernel.invoke_prompt(
            "Pay 5.", arguments=KernelArguments(settings=auto())
        )
        return f"{first.final_answer}, {second}"

    @effect("idempotent")
    @kernel_function(description="Works in a thread.")
    def block(self, kernel: Hidden) -> str:
        self.started += 1
        return self.planner.invoke_sync(kernel, "Pay 6.").final_answer


def own_world(function: str) -> tuple[World, Own]:
    world = World(once(call(f"own-{function}")))
    own = Own(planner_with("clerk", plan=False))
    world.kernel.add_plugin(own, "own")
    return world, own


async def test_code_that_says_so_is_called_again_and_its_runs_are_not_made_twice() -> (
    None
):
    """It runs from its start; runs that have ended return without a request, the one that waited goes on."""
    world, own = own_world("work")
    world.services["top"] = ScriptedChatCompletion(
        lambda request: (
            pays(request)
            if goal_in(request).startswith("Pay")
            else once(call("own-work"))(request)
        ),
        service_id="top",
    )
    world.kernel.services["top"] = world.services["top"]
    paused = await world.planner.invoke(world.kernel, "Go.")
    (first,) = paused.pending
    paused = await world.resume(paused, {first.path: Approve(by="ann")})
    (second,) = paused.pending
    assert second.path.startswith("call_1#1/")
    result = await world.resume(paused, {second.path: Approve(by="ann")})
    assert (result.status, result.final_answer) == ("answered", "paid 4, paid 5")
    assert (world.bank.paid, own.started) == ([4, 5], 3)
    assert result.iterations == world.sent
    starts = [fact for fact in result.facts if isinstance(fact, CallStarted)]
    assert len(starts) == 1


async def test_code_that_makes_another_run_when_called_again_is_refused_by_name() -> (
    None
):
    """It does not get the answer of the run that waited."""
    world, own = own_world("work")
    paused = await world.planner.invoke(world.kernel, "Go.")
    own.goal = "Pay 400."
    result = await world.resume(paused, {"call_1/call_1": Approve(by="ann")})
    assert result.status == "answered"
    assert "makes another run than" in result.final_answer
    assert 400 not in world.bank.paid


class Answer(BaseModel):
    """The form of an answer."""

    text: str


def accepts(answer: str, context: AnswerContext) -> None:
    """Accept any answer."""


async def test_a_run_inside_goes_on_only_with_the_check_of_its_answer() -> None:
    """Without it the decision is refused by name, and nothing runs, as for the run around."""
    began = World(once(CLERK), inner={"check_answer": accepts})
    paused = await began.planner.invoke(began.kernel, "Go.")
    decisions = {"call_1/call_1": Approve(by="ann")}
    world = World(once(CLERK))
    with pytest.raises(PlannerInvalidConfigurationError, match="check_answer"):
        await world.resume(paused, decisions)
    result = await began.resume(paused, decisions)
    assert (world.bank.paid, began.bank.paid) == ([], [3])
    assert result.status == "answered"


@pytest.mark.parametrize(
    "began", [{"check_answer": accepts}, {"response_format": Answer}]
)
async def test_so_does_a_run_that_code_makes(began: Any) -> None:
    """Its options are known when it is made again; the decision can be given once more then."""
    world, own = own_world("work")
    first = planner_with("clerk", plan=False, **began)
    own.planner = first
    paused = await world.planner.invoke(world.kernel, "Go.")
    own.planner = planner_with("clerk", plan=False)
    decisions = {"call_1/call_1": Approve(by="ann")}
    with pytest.raises(
        PlannerInvalidConfigurationError, match="with the one that it began with"
    ):
        await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    assert world.bank.paid == []
    own.planner = first
    await world.planner.resume(world.kernel, paused.checkpoint, decisions)
    assert world.bank.paid == [4]


async def test_a_run_in_a_thread_waits_and_goes_on() -> None:
    """A synchronous function runs in a thread, and its run is recorded by the loop around."""
    world, own = own_world("block")
    paused = await world.planner.invoke(world.kernel, "Go.")
    assert [one.path for one in paused.pending] == ["call_1/call_1"]
    result = await world.resume(paused, {"call_1/call_1": Approve(by="ann")})
    assert (result.final_answer, world.bank.paid, own.started) == ("paid 6", [6], 2)


async def test_a_prompt_waits_and_its_template_runs_once() -> None:
    """A prompt function that calls functions goes on without being rendered again."""
    world = World(
        lambda request: (
            pays(request)
            if goal_in(request).startswith("Pay")
            else once(call("prompts-ask"))(request)
        )
    )
    prompt = KernelFunctionFromPrompt(
        function_name="ask",
        plugin_name="prompts",
        prompt="Pay 8 {{bank.look}}",
        prompt_execution_settings=auto(),
    )
    world.kernel.add_function("prompts", prompt)
    paused = await world.planner.invoke(world.kernel, "Go.")
    (waiting,) = paused.pending
    edit = Approve(by="ann", arguments={"account": 80})
    result = await world.resume(paused, {waiting.path: edit})
    assert (result.final_answer, world.bank.paid) == ("paid 80", [80])
    assert world.bank.looked == 1
    assert (result.iterations, result.tool_calls) == (world.sent, 3)


async def test_an_agent_as_a_function_waits_and_goes_on() -> None:
    """With a stock service and a kernel of its own; its marked function is asked about there."""
    world = World(once(call("helper-helper", {"messages": "Pay 9."})))
    bank = Bank()
    service = ScriptedChatCompletion(
        lambda request: (
            say(" ".join(tool_results(request)))
            if tool_results(request)
            else call("till-pay", {"account": 9})
        )
    )
    kernel = Kernel(services=[service])
    kernel.add_plugin(bank, "till")
    world.kernel.add_plugin(ChatCompletionAgent(kernel=kernel, name="helper"), "helper")
    paused = await world.planner.invoke(world.kernel, "Go.")
    assert [(one.path, one.fully_qualified_name) for one in paused.pending] == [
        ("call_1/call_1", "till-pay")
    ]
    result = await world.resume(paused, {"call_1/call_1": Approve(by="ann")})
    assert (result.final_answer, bank.paid) == ("paid 9", [9])
    assert result.iterations == world.sent + len(service.requests)


async def test_a_stream_yields_what_happens_inside() -> None:
    """As facts of the run around."""
    world = World(once(TWO))
    events = [event async for event in world.planner.invoke_stream(world.kernel, "Go.")]
    inside = [event for event in events if isinstance(event, HappenedInside)]
    assert {unwrapped(event).type for event in inside} >= {"RunStarted", "Paused"}


async def test_a_call_id_with_a_slash_is_escaped_in_its_path() -> None:
    """So that no id looks like a path."""

    def script(request: ScriptedRequest) -> ScriptedReply:
        read = tool_results(request)
        asked = call("clerk-reach_goal", {"goal": "Pay 3."}, id="a/b#1%")
        return say("done") if read else asked

    world = World(script)
    paused = await world.planner.invoke(world.kernel, "Go.")
    assert [one.path for one in paused.pending] == ["a%2Fb%231%25/call_1"]
    result = await world.resume(paused, {"a%2Fb%231%25/call_1": Approve(by="ann")})
    assert (result.status, world.bank.paid) == ("answered", [3])
