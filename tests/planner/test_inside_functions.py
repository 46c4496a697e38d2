"""Every use that a function of a run makes of the run's kernel is charged to the run, and reviewed by its policy."""

from collections.abc import Callable
from typing import Any

import pytest
from semantic_kernel import Kernel
from semantic_kernel.contents import ChatHistory
from semantic_kernel.exceptions import KernelInvokeException
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import ApprovalPolicy, Budget, FunctionInvokingChatCompletion
from planner_ext.errors import LimitReachedError, NestedRunRefusedError
from planner_ext.events import CallFinished
from planner_ext.plugin import PlannerPlugin
from planner_ext.testing import ScriptedReply, ScriptedRequest, call, say
from support.inside import INNER, Hidden, World, auto, greedy, with_auto, world
from support.planner import GOAL, invoke, planner_with
from support.values import each_of

WAYS = [
    "ask-auto",
    "ask-none",
    "ask-required",
    "inside-prompt_auto",
    "inside-prompt_plain",
    "inside-prompt_stream",
    "inside-prompt_stream_plain",
    "inside-prompts_at_once",
    "inside-retries",
    "inside-pays",
    "inside-looks",
    "inside-template",
    "inside-template_looks",
    "inside-agent",
    "inside-agent_stream",
    "inside-service",
    "inside-planner",
    "inside-thread",
    "expert-reach_goal",
]
every_way = each_of("way", WAYS)


def with_expert(seen: World) -> None:
    """Add a planner as a plugin."""
    seen.kernel.add_plugin(PlannerPlugin(planner_with("chat", plan=False)), "expert")


@pytest.mark.parametrize(
    ("trips", "times", "streamed"),
    [(4, 1, False), (7, 3, True)],
    ids=["plain", "streamed"],
)
@every_way
async def test_no_way_passes_the_budget(
    way: str, trips: int, times: int, streamed: bool
) -> None:
    """The server counts what the run reports, and no more than it may; nothing marked runs, no function too many."""
    async with world(greedy(way, times), way) as seen:
        with_expert(seen)
        budget = Budget(max_iterations=trips, max_tool_calls=8)
        planner = planner_with("chat", plan=False, budget=budget)
        result = await invoke(planner, seen.kernel, streamed=streamed)
        assert len(seen.server.requests) == result.iterations <= trips
        assert seen.functions <= result.tool_calls <= 8
        assert seen.bank.paid == 0
        assert result.usage.total_tokens == seen.server.total_tokens
        assert seen.server.refused == []
        assert list(seen.kernel.services) == ["chat"]


@every_way
async def test_a_run_inside_is_in_the_usage_of_calls_by_function(way: str) -> None:
    """A limit by function counts all calls of the run, nested runs included."""
    async with world(greedy(way, 3), way) as seen:
        with_expert(seen)
        budget = Budget(max_iterations=12, max_calls_per_function={"bank-look": 2})
        await invoke(
            planner_with("chat", plan=False, budget=budget), seen.kernel, streamed=False
        )
        assert seen.bank.looked <= 2


@each_of(
    "way", ["ask-auto", "inside-prompt_plain", "inside-agent", "expert-reach_goal"]
)
async def test_a_service_is_charged_for_what_its_functions_do(way: str) -> None:
    """The metadata of a service report the requests of its functions, and its budget bounds them."""
    async with world(greedy(way, 2), way) as seen:
        with_expert(seen)
        history = ChatHistory()
        history.add_user_message("Go.")
        service = FunctionInvokingChatCompletion(
            seen.connector, budget=Budget(max_iterations=5)
        )
        message = await service.get_chat_message_content(
            history, auto(), kernel=seen.kernel
        )
        assert message is not None
        assert message.metadata["iterations"] == len(seen.server.requests) <= 5
        assert message.metadata["usage"].prompt_tokens == seen.server.prompt_tokens
        assert message.metadata["tool_calls"] >= seen.functions
        assert seen.bank.paid == 0


async def outcome(seen: World, way: str, **options: Any) -> tuple[Any, list[str]]:
    """Let the model call the way once; give the result, and what the model read of it."""
    planner = planner_with("chat", plan=False, **options)
    result = await invoke(planner, seen.kernel, streamed=False)
    return result, [
        fact.result for fact in result.facts if isinstance(fact, CallFinished)
    ]


def once(
    way: str, inner: Callable[[ScriptedRequest], ScriptedReply] | ScriptedReply
) -> Any:
    """Play a model that calls a way once, and inside says what it is given."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        if any(INNER in str(message.get("content")) for message in request.messages):
            return inner if isinstance(inner, ScriptedReply) else inner(request)
        return (
            say("done")
            if any(message["role"] == "tool" for message in request.messages)
            else call(way)
        )

    return reply


@each_of(
    "way", ["inside-prompt_plain", "inside-prompt_auto", "inside-agent", "ask-auto"]
)
async def test_with_nothing_left_the_request_is_refused_and_the_run_answers(
    way: str,
) -> None:
    """Of two trips one asks and one answers: nothing is sent between them, and the model reads why."""
    async with world(once(way, say("never")), way) as seen:
        result, told = await outcome(seen, way, max_iterations=2)
        assert result.iterations == 2
        assert len(seen.server.requests) == 2
        assert result.final_answer == "done"
        assert "max_iterations" in told[0]
        assert all(isinstance(error, LimitReachedError) for error in seen.inside.raised)


async def test_a_run_inside_keeps_a_request_for_its_answer() -> None:
    """The model inside gets to say what it found: its last request offers no functions."""
    looking = once(
        "inside-prompt_auto",
        lambda request: call("bank-look") if request.tools else say("What I saw."),
    )
    async with world(looking) as seen:
        result, told = await outcome(seen, "inside-prompt_auto", max_iterations=5)
        assert told == ["What I saw."]
        assert result.iterations == 5
        assert result.tool_calls == 3


async def test_a_policy_decides_calls_inside_a_function() -> None:
    """A rule of the run's policy denies the call of a model inside, and that of a function, with its reason."""
    policy = ApprovalPolicy.from_dict(
        {
            "default": "allow",
            "rules": [{"function": "look", "action": "deny", "reason": "not today"}],
        }
    )
    read: list[str] = []

    def inner(request: ScriptedRequest) -> ScriptedReply:
        read.append(str(request.messages[-1]["content"]))
        return call("bank-look") if len(read) == 1 else say("no luck")

    async with world(once("inside-prompt_auto", inner)) as seen:
        await outcome(seen, "inside-prompt_auto", interceptors=[policy])
        assert seen.bank.looked == 0
        assert "not today" in read[1]
    async with world(once("inside-looks", say("never"))) as seen:
        await outcome(seen, "inside-looks", interceptors=[policy])
        assert seen.bank.looked == 0
        assert isinstance(seen.inside.raised[0], NestedRunRefusedError)
        assert "not today" in str(seen.inside.raised[0])


async def test_what_needs_a_person_is_denied_by_name() -> None:
    """A marked function that a function calls does not run; the error names it and says why."""
    async with world(once("inside-pays", say("never"))) as seen:
        await outcome(seen, "inside-pays")
        assert seen.bank.paid == 0
        assert "bank-pay needs a person's decision" in str(seen.inside.raised[0])


async def test_an_allow_rule_frees_a_marked_function_inside_a_function() -> None:
    """The outermost run's rules decide about a mark: once, for all runs inside."""
    allowing = ApprovalPolicy.from_dict(
        {"default": "ask", "rules": [{"function": "*", "action": "allow"}]}
    )
    paying = once(
        "inside-prompt_auto",
        lambda request: call("bank-pay") if "tool" not in roles(request) else say("ok"),
    )
    async with world(paying) as seen:
        result, _ = await outcome(seen, "inside-prompt_auto", interceptors=[allowing])
        assert (seen.bank.paid, result.tool_calls) == (1, 2)


def roles(request: ScriptedRequest) -> list[Any]:
    return [message["role"] for message in request.messages]


async def test_after_its_call_a_function_can_do_nothing_in_its_name() -> None:
    """A task that outlives the call is refused by name: nothing is sent, nothing is charged."""
    async with world(once("inside-leaves", say("late"))) as seen:
        result, _ = await outcome(seen, "inside-leaves")
        assert isinstance(await seen.inside.refusal(), NestedRunRefusedError)
        assert len(seen.server.requests) == result.iterations == 2
        assert seen.inside.kept is not None
        with pytest.raises(KernelInvokeException):
            await seen.inside.kept.invoke(plugin_name="bank", function_name="look")
        assert seen.bank.looked == 0


async def test_a_kernel_that_a_function_holds_is_charged_through_a_registered_service() -> (
    None
):
    """`FunctionInvokingChatCompletion` as the service of the held kernel finds the call, its budget and its gate."""
    async with world(greedy("inside-holds", 2)) as seen:
        held = Kernel(
            services=FunctionInvokingChatCompletion(seen.connector),
            plugins=dict(seen.kernel.plugins),
        )
        seen.inside.captured = held
        planner = planner_with(
            "chat", plan=False, budget=Budget(max_iterations=6, max_tool_calls=7)
        )
        result = await invoke(planner, seen.kernel)
        assert len(seen.server.requests) == result.iterations <= 6
        assert seen.functions <= result.tool_calls <= 7
        assert seen.bank.paid == 0


async def test_a_function_may_add_a_plugin_and_have_it_called() -> None:
    """What a function adds to its kernel is offered inside at once, and in the run with its next request."""
    async with world(
        once(
            "loader-load",
            lambda request: call("late-look") if request.index == 1 else say("seen"),
        )
    ) as seen:

        class Loader:
            @kernel_function
            async def load(self, kernel: Hidden) -> str:
                kernel.add_plugin(seen.bank, "late")
                return str(await kernel.invoke_prompt(INNER, arguments=with_auto()))

        seen.kernel.add_plugin(Loader(), "loader")
        result, told = await outcome(seen, "loader-load")
        assert told == ["seen"]
        assert seen.bank.looked == 1
        assert result.tool_calls == 2
        assert "late-look" in seen.server.requests[-1].tools


async def test_the_model_is_not_offered_the_kernel_that_a_function_takes() -> None:
    """``kernel: Kernel`` is enough: Semantic Kernel fills it in, and no server could read its schema."""

    class Plain:
        @kernel_function
        async def ask(
            self, topic: str, kernel: Kernel, arguments: KernelArguments
        ) -> str:
            return str(await kernel.invoke_prompt(f"{INNER} {topic}"))

    async with world(greedy("plain-ask", 1)) as seen:
        seen.kernel.add_plugin(Plain(), "plain")
        result = await planner_with("chat", plan=False, max_iterations=2).invoke(
            seen.kernel, GOAL
        )
        assert result.iterations == len(seen.server.requests)
        tools: Any = seen.server.requests[0].body["tools"]
        (offered,) = (
            tool["function"]
            for tool in tools
            if tool["function"]["name"] == "plain-ask"
        )
        assert list(offered["parameters"]["properties"]) == ["topic"]
