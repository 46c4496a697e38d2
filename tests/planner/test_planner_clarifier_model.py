"""A model that answers another one's questions: charged, capped by the run's round trips, silent where it has to be."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from semantic_kernel import Kernel
from semantic_kernel.connectors.ai.open_ai import OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory

from planner_ext.errors import PlannerInvalidConfigurationError, ServiceCallError
from planner_ext.events import Clarified
from planner_ext.hitl_manager import ModelClarifier, Question
from planner_ext.iteration import Usage
from planner_ext.testing import (
    ScriptedChatCompletion,
    ScriptedReply,
    ScriptedRequest,
    call,
    calls,
    say,
)
from support.examples import tried
from support.planner import (
    ADD,
    Clock,
    both_ways,
    final,
    invoke,
    kernel_of,
    openai_kernel,
    planner_with,
    scripted,
)
from support.stock import EVERY_HEALTH_CHECK

ASK = call("UserInteraction-AskUser", {"question": "Which numbers?"})


def answering(*replies: str) -> tuple[ModelClarifier, ScriptedChatCompletion]:
    """Make a clarifier of a scripted model."""
    service = ScriptedChatCompletion([say(text) for text in replies])
    return ModelClarifier(kernel_of(service)), service


@both_ways
async def test_another_model_answers_and_is_charged(streamed: bool) -> None:
    """One request without functions, with the goal and the question in it; its trip and tokens are the run's."""
    async with openai_kernel([say("1 and 2.")]) as (other, second):
        clarifier = ModelClarifier(other)
        async with openai_kernel([ASK, ADD, final()]) as (kernel, first):
            planner = planner_with(
                plan=False, require_final_answer_function=True, clarifier=clarifier
            )
            result = await invoke(
                planner, kernel, "Add the numbers.", streamed=streamed
            )

    assert (result.status, result.final_answer) == ("answered", "It is 3.")
    assert result.iterations == len(first.requests) + len(second.requests) == 4
    assert result.usage.total_tokens == first.total_tokens + second.total_tokens
    asked = second.requests[0]
    assert asked.tools == ()
    assert all(
        text in str(asked.messages) for text in ("Add the numbers.", "Which numbers?")
    )


async def test_a_model_that_reports_no_usage_is_charged_an_estimate() -> None:
    """Tokens that the clarifier's service does not report are estimated, and the run's usage says so."""
    silent = ScriptedChatCompletion([say("1 and 2.")], metadata={"usage": None})
    kernel, _ = scripted([ASK, ADD, final()])
    planner = planner_with(
        plan=False,
        require_final_answer_function=True,
        clarifier=ModelClarifier(kernel_of(silent)),
        max_iterations=9,
    )
    result = await invoke(planner, kernel, "Add the numbers.")
    assert (result.status, len(silent.requests)) == ("answered", 1)
    assert 0 < result.usage.estimated_tokens < result.usage.total_tokens


def test_a_price_of_the_model_that_gives_no_amount_is_refused() -> None:
    """A clarifier's price is tried when the clarifier is made."""
    with pytest.raises(
        PlannerInvalidConfigurationError, match="price must return US dollars"
    ):
        ModelClarifier(
            kernel_of(ScriptedChatCompletion([])),
            price=lambda model, usage: float("nan"),
        )


async def test_pass_leaves_the_question_open_and_still_counts() -> None:
    """A reply of PASS says nothing: the question waits for a person, the request is charged."""
    clarifier, other = answering("pass.")
    kernel, _ = scripted([ASK])
    result = await invoke(planner_with(plan=False, clarifier=clarifier), kernel)
    assert result.status == "asked"
    assert result.iterations == 2
    assert len(other.requests) == 1


async def test_no_request_is_made_that_would_leave_none_to_use_the_answer() -> None:
    """With one trip left the clarifier's model is not asked; the question waits for a person."""
    clarifier, other = answering("1 and 2.")
    kernel, _ = scripted([ASK])
    result = await invoke(
        planner_with(plan=False, max_iterations=2, clarifier=clarifier),
        kernel,
    )
    assert result.status == "asked"
    assert result.iterations == 1
    assert other.requests == []


async def test_its_time_and_its_price_are_the_runs() -> None:
    """The time of its request is active time; its cost is what its price says."""
    clock = Clock()

    def slow(request: ScriptedRequest) -> ScriptedReply:
        clock.seconds += 5
        return say("1 and 2.")

    def price(model: str, usage: Usage) -> float:
        return 0.5

    clarifier = ModelClarifier(kernel_of(ScriptedChatCompletion(slow)), price=price)
    kernel, _ = scripted([ASK, final()])
    planner = planner_with(
        plan=False, require_final_answer_function=True, clarifier=clarifier, clock=clock
    )
    result = await invoke(planner, kernel)
    assert result.status == "answered"
    assert result.usage.active_seconds == 5.0
    assert result.usage.cost == 0.5
    assert [fact.by for fact in result.facts if isinstance(fact, Clarified)] == [
        "scripted"
    ]


async def test_a_failing_model_is_a_fault_of_the_run() -> None:
    """What its connector raises is named, and carries the run."""

    def broken(request: ScriptedRequest) -> ScriptedReply:
        raise RuntimeError("no route")

    kernel, _ = scripted([ASK])
    planner = planner_with(
        plan=False, clarifier=ModelClarifier(kernel_of(ScriptedChatCompletion(broken)))
    )
    with pytest.raises(ServiceCallError, match="no route") as raised:
        await planner.invoke(kernel, "goal")
    assert raised.value.checkpoint is not None


async def test_one_clarifier_answers_the_questions_of_several_runs_at_once() -> None:
    """Each question is answered from its own conversation, also where the server is asked several at a time."""

    def echo(request: ScriptedRequest) -> ScriptedReply:
        return say(str(request.messages[-1]["content"]).splitlines()[0])

    def question(goal: str) -> Question:
        return Question(
            text="Which?",
            goal=goal,
            chat_history=ChatHistory(),
            by_function=True,
            iteration=0,
            clarifications=0,
            trips_left=None,
        )

    async with openai_kernel(echo) as (kernel, server):
        clarifier = ModelClarifier(kernel)
        goals = ["one", "two", "two", "three"]
        answers = await asyncio.gather(*(clarifier(question(goal)) for goal in goals))
    assert [answer.text for answer in answers if answer is not None] == [
        f"Goal: {goal}" for goal in goals
    ]
    assert [len(request.messages) for request in server.requests] == [2, 2, 2, 2]


async def test_functions_in_its_settings_are_not_offered() -> None:
    """Its requests offer no functions, even if its settings do."""
    tools = [
        {
            "type": "function",
            "function": {
                "name": "t-open",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    settings = OpenAIChatPromptExecutionSettings(tools=tools, tool_choice="auto")
    async with openai_kernel([say("1 and 2.")]) as (other, server):
        kernel, _ = scripted([ASK, final()])
        clarifier = ModelClarifier(other, settings=settings)
        planner = planner_with(
            plan=False, require_final_answer_function=True, clarifier=clarifier
        )
        await invoke(planner, kernel, streamed=False)
    assert [(request.tools, request.tool_choice) for request in server.requests] == [
        ((), None)
    ]


def test_a_clarifier_without_a_model_is_refused() -> None:
    """A kernel without a service, empty instructions and an invalid price are named at once."""
    with pytest.raises(PlannerInvalidConfigurationError, match="no service"):
        ModelClarifier(Kernel())
    with pytest.raises(PlannerInvalidConfigurationError, match="instructions"):
        ModelClarifier(kernel_of(ScriptedChatCompletion([])), instructions=" ")
    with pytest.raises(PlannerInvalidConfigurationError, match="price"):
        ModelClarifier(kernel_of(ScriptedChatCompletion([])), price=3)  # pyright: ignore[reportArgumentType]  # junk, on purpose


REPLIES = {
    "ask": ASK,
    "ask twice": calls(ASK, ASK),
    "plain": say("Which numbers?"),
    "add": ADD,
    "both": calls(ADD, ASK),
}


@settings(tried(80), suppress_health_check=EVERY_HEALTH_CHECK)
@given(
    names=st.lists(st.sampled_from(sorted(REPLIES)), max_size=6),
    answers=st.lists(st.sampled_from(["1 and 2.", "PASS"]), min_size=1, max_size=3),
    limit=st.integers(1, 6),
    options=st.fixed_dictionaries(
        {},
        optional={
            "plan": st.booleans(),
            "require_final_answer_function": st.booleans(),
            "max_clarifications": st.integers(0, 2),
            "control": st.sampled_from(["use_attempts", "iterations_metadata"]),
        },
    ),
)
async def test_both_models_together_never_exceed_the_round_trips(
    names: Sequence[str], answers: Sequence[str], limit: int, options: dict[str, Any]
) -> None:
    """For questions in calls or in plain text, both together are sent as many requests as are allowed at most."""
    turns = iter(names)

    def model(request: ScriptedRequest) -> ScriptedReply:
        name = next(turns, None)
        return say("It is 3.") if name is None or not request.tools else REPLIES[name]

    def other(request: ScriptedRequest) -> ScriptedReply:
        return say(answers[len(service.requests) % len(answers)])

    service = ScriptedChatCompletion(other)
    kernel, first = scripted(model)
    planner = planner_with(
        max_iterations=limit, clarifier=ModelClarifier(kernel_of(service)), **options
    )
    result = await planner.invoke(kernel, "Add the numbers.")
    assert result.iterations == len(first.requests) + len(service.requests) <= limit
    assert result.status in ("answered", "asked", "limit_reached")
