"""Runs inside functions, crossed with levels, planners beside them, threads, doors, cancellation and stops."""

import asyncio
import threading
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.function_choice_behavior import (
    FunctionChoiceBehavior,
)
from semantic_kernel.connectors.ai.prompt_execution_settings import (
    PromptExecutionSettings,
)
from semantic_kernel.contents import ChatHistory
from semantic_kernel.functions import KernelArguments, kernel_function

from planner_ext import Budget, ToolCallHandler
from planner_ext.events import CallFinished
from planner_ext.hitl_manager import Checkpoint
from planner_ext.iteration import StopHandle, ToolExecution
from planner_ext.plugin import PlannerPlugin
from planner_ext.session import AutomaticToolUseConfig, ToolUseSession
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.examples import tried
from support.inside import INNER, Hidden, ScriptedText, auto, greedy, world
from support.planner import both_ways, invoke, kernel_of, planner_with
from support.stock import EVERY_HEALTH_CHECK


class Levels:
    """Functions that ask a model which may call them again, as deep as there are names."""

    def __init__(self) -> None:
        self.started = 0

    @kernel_function
    async def ask(self, kernel: Hidden) -> str:
        self.started += 1
        settings = PromptExecutionSettings(
            function_choice_behavior=FunctionChoiceBehavior.Auto()
        )
        return str(
            await kernel.invoke_prompt(
                INNER, arguments=KernelArguments(settings=settings)
            )
        )

    @kernel_function
    async def insist(self, kernel: Hidden) -> str:
        self.started += 1
        for _ in range(4):
            try:
                await asyncio.gather(*[kernel.invoke_prompt(INNER) for _ in range(2)])
                await kernel.invoke(plugin_name="levels", function_name="plain")
            except Exception:
                continue
        return "insisted"

    @kernel_function
    async def plain(self) -> str:
        self.started += 1
        return "plain"

    @kernel_function
    def threaded(self, kernel: Hidden) -> str:
        self.started += 1
        return str(asyncio.run(kernel.invoke_prompt(INNER)))


CALLS = [
    "levels-ask",
    "levels-insist",
    "levels-plain",
    "levels-threaded",
    "expert-reach_goal",
]


def played(turns: list[list[str]]) -> Any:
    """Play the turns over and over, for every caller."""

    def reply(request: ScriptedRequest) -> ScriptedReply:
        asked = [
            name for name in turns[request.index % len(turns)] if name in request.tools
        ]
        made = [
            call(name, {"goal": INNER} if name.startswith("expert") else {})
            for name in asked
        ]
        return calls(*made) if made else say("answer")

    return reply


@settings(tried(60), suppress_health_check=EVERY_HEALTH_CHECK)
@given(
    turns=st.lists(
        st.lists(st.sampled_from(CALLS), max_size=4), min_size=1, max_size=5
    ),
    trips=st.integers(1, 14),
    most=st.one_of(st.none(), st.integers(0, 9)),
    plain=st.one_of(st.none(), st.integers(0, 2)),
    on_limit=st.sampled_from(["answer", "stop", "return_calls"]),
    over=st.sampled_from(["reject_batch", "fill_remaining"]),
    concurrency=st.sampled_from([None, 1, 2]),
    streamed=st.booleans(),
)
def test_requests_and_calls_of_all_levels_never_pass_the_budget(
    turns: list[list[str]],
    trips: int,
    most: int | None,
    plain: int | None,
    on_limit: Any,
    over: Any,
    concurrency: int | None,
    streamed: bool,
) -> None:
    """Prompts in prompts, planners beside them, retries and threads: what was sent is what is charged, and no more."""
    service, levels = ScriptedChatCompletion(played(turns), service_id="chat"), Levels()
    kernel = kernel_of(service, levels=levels)
    kernel.add_plugin(PlannerPlugin(planner_with("chat", plan=False)), "expert")
    budget = Budget(
        max_iterations=trips,
        max_tool_calls=most,
        max_calls_per_function={} if plain is None else {"levels-plain": plain},
        on_limit=on_limit,
        batch_over_limit=over,
    )
    planner = planner_with(
        "chat",
        plan=False,
        budget=budget,
        execution=ToolExecution(max_concurrency=concurrency, timeout=20),
    )
    result = asyncio.run(invoke(planner, kernel, streamed=streamed))
    assert len(service.requests) == result.iterations <= trips
    assert levels.started <= result.tool_calls
    assert most is None or result.tool_calls <= most
    checkpoint = Checkpoint.from_json(result.checkpoint.to_json())
    assert checkpoint.state().usage.calls_by_function.get("levels-plain", 0) <= (
        100 if plain is None else plain
    )
    assert (
        checkpoint.state().usage.iterations,
        checkpoint.state().usage.tool_calls,
    ) == (
        result.iterations,
        result.tool_calls,
    )


@both_ways
async def test_a_text_completion_is_a_round_trip(streamed: bool) -> None:
    """A prompt that a text completion service answers is charged, and bounded, tokens included."""
    text = ScriptedText(ai_model_id="text", service_id="text")

    class Prompts:
        @kernel_function
        async def ask(self, kernel: Hidden) -> str:
            arguments = KernelArguments(
                settings=PromptExecutionSettings(service_id="text")
            )
            if streamed:
                return str(
                    [
                        piece
                        async for piece in kernel.invoke_prompt_stream(
                            INNER, arguments=arguments
                        )
                    ]
                )
            return str(await kernel.invoke_prompt(INNER, arguments=arguments))

    chat = ScriptedChatCompletion(
        lambda r: call("p-ask") if r.tools else say("done"), service_id="chat"
    )
    kernel = kernel_of(chat, p=Prompts())
    kernel.add_service(text)
    result = await invoke(
        planner_with("chat", plan=False, max_iterations=6), kernel, streamed=streamed
    )
    assert result.iterations == len(chat.requests) + len(text.asked) == 6
    spent = [
        fact.spent
        for fact in result.facts
        if isinstance(fact, CallFinished) and fact.spent is not None
    ]
    assert {(one.iterations, one.total_tokens) for one in spent} == {(1, 5)}


async def test_tokens_and_cost_inside_are_charged_and_bounded() -> None:
    """The requests inside are priced as the run prices its own; with the limit passed, no other is made."""
    async with world(greedy("inside-prompt_plain", 1)) as seen:
        options: dict[str, Any] = {
            "budget": Budget(max_cost=0.35),
            "price": lambda model, usage: 0.1,
        }
        result = await invoke(
            planner_with("chat", plan=False, **options), seen.kernel, streamed=False
        )
        assert result.limit == "max_cost"
        assert result.usage.cost == pytest.approx(0.1 * len(seen.server.requests))
        assert len(seen.server.requests) <= 5


async def test_an_agent_with_a_service_of_its_own_is_charged() -> None:
    """A service that an agent brings to the kernel it was given is charged; the kernel stays as it was."""
    async with world(greedy("agents-ask", 1)) as seen:

        class Agents:
            @kernel_function
            async def ask(self, kernel: Hidden) -> str:
                agent = ChatCompletionAgent(
                    kernel=kernel, name="a", instructions=INNER, service=seen.connector
                )
                return str(await agent.get_response(messages=INNER))

        seen.kernel.add_plugin(Agents(), "agents")
        result = await invoke(
            planner_with("chat", plan=False, max_iterations=6),
            seen.kernel,
            streamed=False,
        )
        assert len(seen.server.requests) == result.iterations <= 6
        assert seen.kernel.services["chat"] is seen.connector
        assert seen.bank.paid == 0


async def test_a_thread_without_the_context_is_charged_through_the_kernel() -> None:
    """A view of a kernel belongs to its call in every thread, also where context variables do not reach."""
    service = ScriptedChatCompletion(
        lambda r: call("t-go") if r.tools else say("done"), service_id="chat"
    )

    class Threads:
        @kernel_function
        def go(self, kernel: Hidden) -> str:
            said: list[str] = []
            work = threading.Thread(
                target=lambda: said.append(
                    str(asyncio.run(kernel.invoke_prompt(INNER)))
                )
            )
            work.start()
            work.join()
            return "".join(said)

    result = await invoke(
        planner_with("chat", plan=False, max_iterations=5),
        kernel_of(service, t=Threads()),
        streamed=False,
    )
    assert len(service.requests) == result.iterations == 5


async def test_what_was_spent_inside_is_in_the_checkpoint_of_a_cancelled_run() -> None:
    """A run that is cancelled while a function asks knows what that has spent: a resume has no more than the rest."""
    asked = asyncio.Event()

    async def hold(request: ScriptedRequest) -> None:
        if request.index == 2:
            asked.set()
            await asyncio.Future()

    class Twice:
        @kernel_function
        async def ask(self, kernel: Hidden) -> str:
            return str([str(await kernel.invoke_prompt(INNER)) for _ in range(2)])

    service = ScriptedChatCompletion(
        lambda r: call("t-ask") if r.tools else say("done"),
        service_id="chat",
        before_reply=hold,
    )
    facts: list[Any] = []
    planner = planner_with(
        "chat", plan=False, max_iterations=9, observers=[facts.append]
    )
    run = asyncio.ensure_future(
        invoke(planner, kernel_of(service, t=Twice()), streamed=False)
    )
    await asked.wait()
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    (finished,) = [fact for fact in facts if isinstance(fact, CallFinished)]
    assert finished.spent is not None
    assert finished.spent.iterations == 2


async def test_a_stop_ends_what_happens_inside() -> None:
    """Once a run is asked to stop its functions get no further request either."""
    stop = StopHandle()

    def reply(request: ScriptedRequest) -> ScriptedReply:
        if request.index == 1:
            stop.stop("Enough.")
        return call("levels-insist") if request.tools else say("more")

    service = ScriptedChatCompletion(reply, service_id="chat")
    result = await invoke(
        planner_with("chat", plan=False),
        kernel_of(service, levels=Levels()),
        streamed=False,
        stop=stop,
    )
    assert result.status == "stopped"
    assert len(service.requests) == result.iterations <= 3


@both_ways
async def test_handler_and_session_are_charged_for_what_functions_ask(
    streamed: bool,
) -> None:
    """Every door charges what its functions do."""
    async with world(greedy("inside-prompt_plain", 2)) as seen:
        history = ChatHistory()
        history.add_user_message("Go.")
        handler = ToolCallHandler(
            seen.kernel, settings=auto(), budget=Budget(max_iterations=5)
        )
        stream = handler.invoke_stream(history) if streamed else handler.invoke(history)
        async with aclosing(stream) as messages:
            last = [message async for message in messages][-1]
        assert last.metadata["iterations"] == len(seen.server.requests) <= 5
    async with world(greedy("inside-looks", 1)) as seen:
        session = ToolUseSession(
            seen.kernel,
            tool_use_config=AutomaticToolUseConfig(enabled=True, max_tool_calls=3),
        )
        with pytest.raises(Exception, match="Max number of tool call reached"):
            await session.prompt("Go.")
        assert seen.functions <= 3
